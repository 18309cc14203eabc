r"""Rewrites an answer in a uniform notation: one spelling for each symbol, no spacing and no size commands.

Used by `reward/answers.py` and `reward/expressions.py` before they read numbers and expressions.
"""

from __future__ import annotations

import re

_SYMBOLS = {
    **dict.fromkeys("−–‒﹣－", "-"),
    **dict.fromkeys("\u202f\u2009", ""),
    "\u00a0": " ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "±": r"\pm ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "θ": r"\theta ",
}
_TRANSLATION = str.maketrans(_SYMBOLS)
_SPELLINGS = {"leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne"}
_SPELLINGS |= {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"}
_SPELLINGS |= {"varnothing": "emptyset", "simeq": "approx", "lbrace": "{", "rbrace": "}", "ast": "cdot"}
_SPELLED = re.compile(rf"\\({'|'.join(_SPELLINGS)})(?![A-Za-z])")
# GSM8K's solutions contain calculations such as <<48/2=24>>.
_CALCULATION = re.compile(r"<<[^<>\n]{0,100}>>")
_SIZES = re.compile(
    r"\\(?:(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|(?:displaystyle|limits|qquad|quad)(?=[^a-z]|[a-z]_|\Z))"
)
_REPEATING = re.compile(r"(?<![0-9.])([0-9]{1,9})\.([0-9]{0,9})\\overline\s?\{([0-9]{1,9})\}")
_STYLED_LABEL = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s?\{\s?(\(?[A-J][).:]{0,2})\s?\}"
)
# Markdown's ** at the edge of a word; between two operands it is a power.
_BOLD = re.compile(r"(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?!\S)|(?<=[^\w\s)}])\*\*|\*\*(?=[^\w\s(\\])")
_STYLED_AND = re.compile(r"\\(?:text|textrm|mbox|mathrm)\s?\{[\s,]{0,3}(and|or)\s{0,3}\}")


def uniform(text: str) -> str:
    r"""`text` with one spelling for each symbol: `\le` for ≤, `<=` and `\leq`, `\frac` for `\dfrac`."""
    text = _BOLD.sub("", _CALCULATION.sub("", text.translate(_TRANSLATION)))
    text = re.sub(r",\\!\s?| ?\{ ?, ?\} ?", ",", text)
    text = _SIZES.sub(" ", re.sub(r"(?<!\\)\\[,!;:]", "", text))
    text = re.sub(r"(?<!\\)\\ |~", " ", text)
    text = _SPELLED.sub(lambda match: "\\" + _SPELLINGS[match[1]], text)
    text = re.sub(r"\\lt(?![A-Za-z])", "<", re.sub(r"\\gt(?![A-Za-z])", ">", text))
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = _STYLED_AND.sub(r" \1 ", _STYLED_LABEL.sub(r"\1", text))
    text = re.sub(r"\^\s?\{?\\circ\b\s?\}?|°", "", text)
    return _REPEATING.sub(_repeating, re.sub(r"\\([$%])", r"\1", text))


def _repeating(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: 0.1\overline{6} is 15/90."""
    whole, once, again = match.groups()
    bottom = (10 ** len(again) - 1) * 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{bottom}}}"
