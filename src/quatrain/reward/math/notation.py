r"""Rewrites an answer in a uniform notation: one spelling for each symbol, no spacing and no size commands.

Used by `answers.py` and `expressions.py` before they read numbers and expressions.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

# Characters, and how all of them are written.
_SYMBOLS = {
    "−–‒﹣－": "-",
    "\u202f\u2009\u200b\u2060\ufeff": "",
    "\u00a0": " ",
    "“”": '"',
    "‘’": "'",
    "₹¥₩₽₪₫₱₺₦": "€",
    "→⟶": r"\to ",
    "⇒⟹∴": r"\Rightarrow ",
    "‰‱": r"\unknown ",
    "∕⁄": "/",
    "∗": "*",
    "\u00b5": "μ",
    "º": "°",
    "℃": "°C",
    "℉": "°F",
}
_COMMANDS = {"≤": "le", "≥": "ge", "≠": "ne", "≈": "approx", "∞": "infty", "∪": "cup", "∩": "cap", "∈": "in"}
_COMMANDS |= {"∅": "emptyset", "±": "pm", "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div"}
_TRANSLATION = str.maketrans(
    {character: written for characters, written in _SYMBOLS.items() for character in characters}
    | {character: rf"\{name} " for character, name in _COMMANDS.items()}
    | {letter: rf"\mathbb{{{name}}}" for letter, name in zip("ℝℕℤℚℂ", "RNZQC", strict=True)}
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_GREEK = re.compile(r"[\u0370-\u03ff\u1f00-\u1fff]+")
_MAX_GREEK_SYMBOLS = 3
# A micrometre and an ohm are units, not products of Greek letters.
_MICRO = re.compile(r"(?<=[0-9\s{/])[µμ](?=[mgsLlFHVWAJN](?![A-Za-z]))")
_OHM = re.compile(r"(?<=[0-9\s{kM])[ΩΩ](?![A-Za-z])")
# Full width, and the alphabets of mathematics: bold, italic, script.
_STYLED_CHARACTERS = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ffℊ-ℎℓℯℴ\u03d0-\u03d6\u03f0-\u03f5]+")
_LATEX_MICRO = re.compile(r"(?<=[0-9\s}])\\mu\s?\\(?:text|mathrm)\s?\{\s?([mgsLlFHVWAJN])\s?\}")
_LATEX_OHM = re.compile(r"(?<=[0-9])\s?\\Omega(?=\W*\Z)")
# The letter x of 6.02 x 10^23.
_TIMES = re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?(?:\^|\*\*))")
_SPELLINGS = {"leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne"}
_SPELLINGS |= {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"}
_SPELLINGS |= {"varnothing": "emptyset", "simeq": "approx", "lbrace": "{", "rbrace": "}", "ast": "cdot"}
_SPELLINGS |= {"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "longrightarrow": "to"}
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
_FONT = r"\\(?:text(?:bf|rm|it|normal|sf|tt|sc)?|mathrm|mathbf|mathit|mathsf|mathtt|mbox|emph|underline)"
_BOLD_MATH = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathtt|boldsymbol|bm|pmb|underline)\s?\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_NESTED_FONT = re.compile(rf"{_FONT}\s?\{{\s?({_FONT}\s?\{{[^{{}}]*\}})\s?\}}")
_MAX_FONTS = 4
_FONT_SWITCH = re.compile(
    r"\\(?:text)?color\s?\{[A-Za-z]+\}|\\(?:bf|rm|it|bfseries|large|Large|huge|Huge|small|boldmath)(?![A-Za-z])\s?"
    r"|\\(?:mathbf|mathrm|mathit|mathsf|boldsymbol|bm)\s?(?=[0-9])"
)
# An angle of a function: its degree sign is no unit that may be left out.
_ANGLE = re.compile(
    r"(?<![A-Za-z])(?P<function>(?:sin|cos|tan|cot|sec|csc)(?:\s?\^\s?\{?[0-9]\}?)?)\s?[({]?\s?(?P<angle>-?[0-9.]+)\s?"
    r"(?:\^\s?\{?\\circ\b\s?\}?|°|degrees?\b)\s?[)}]?"
)
_DEGREES = re.compile(
    r"(?:\^\s?\{?\\circ\b\s?\}?|°)(?:\s?(?:\\(?:text|mathrm)\s?\{\s?)?([CF])(?![A-Za-z])\}?)?"
)
_ORDINAL = re.compile(
    r"(?<=[0-9])\s?\^\s?\{?\s?\\(?:text|textrm|mathrm)\s?\{\s?(?:st|nd|rd|th)\s?\}(?:\s?\})?"
)
_EQUATIONS = re.compile(r"\\(?:begin|end)\{(?:align|aligned|gather|gathered|equation|eqnarray|split)\*?\}")
_RAISED = re.compile(r"<su([bp])>([^<>\n]{1,40})</su\1>", re.IGNORECASE)
_STYLED_AND = re.compile(r"\\(?:text|textrm|mbox|mathrm)\s?\{[\s,]{0,3}(and|or)\s{0,3}\}")


def uniform(text: str) -> str:
    r"""`text` with one spelling for each symbol: `\le` for ≤, `<=` and `\leq`, `\frac` for `\dfrac`.

    Superscripts are powers, and Greek letters commands. `\unknown` stands for a mathematical symbol that has
    no such spelling, and which must not be taken for prose.
    """
    text = text if text.isascii() else _ascii_symbols(text)
    text = re.sub(r"(?<=[*`$\"])!", ".", text).replace("`", "")
    text = _RAISED.sub(lambda m: f"{'^' if m[1] in 'pP' else '_'}{{{m[2]}}}", text)
    text = _TIMES.sub(r"\\times ", text)
    text = re.sub(r"(?<=[0-9)])\*\*(?=-[0-9])", "^", text)
    text = _BOLD.sub("", _CALCULATION.sub("", text))
    text = re.sub(r",\\!\s?| ?\{ ?, ?\} ?", ",", text)
    text = _SIZES.sub(" ", re.sub(r"(?<!\\)\\[,!;:]", "", text))
    text = re.sub(r"(?<!\\)\\ |~", " ", text)
    if "\\" in text:
        text = _one_spelling(text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = re.sub(r"(?:-{1,2}|=)>", r"\\Rightarrow ", text)
    text = _ANGLE.sub(r"\g<function>(\\frac{\g<angle> \\pi}{180})", text)
    text = _DEGREES.sub(lambda match: " degrees" if match[1] else "", text)
    return re.sub(r"\\([$%])", r"\1", text)


def _one_spelling(text: str) -> str:
    """`text` with one spelling for each command, and without those that only set a font."""
    text = _SPELLED.sub(lambda match: "\\" + _SPELLINGS[match[1]], text)
    text = re.sub(r"\\lt(?![A-Za-z])", "<", re.sub(r"\\gt(?![A-Za-z])", ">", text))
    if _EQUATIONS.search(text):
        text = re.sub(r"&\s?(?==|\\)", "", _EQUATIONS.sub("\n", text).replace("\\\\", "\n"))
    text = _ORDINAL.sub("", re.sub(r"\\not\s?=", r"\\ne ", text))
    text = _FONT_SWITCH.sub("", _LATEX_MICRO.sub(r" u\1", _LATEX_OHM.sub(" ohm", text)))
    for _ in range(_MAX_FONTS):
        text = _NESTED_FONT.sub(r"\1", text)
    text = _BOLD_MATH.sub(_without_bold, _STYLED_LABEL.sub(r"\1", text))
    return _REPEATING.sub(_repeating, _STYLED_AND.sub(r" \1 ", text))


def _without_bold(match: re.Match[str]) -> str:
    alone = re.fullmatch(r"[0-9.,]+|[A-Za-z]", match[1]) and not match.string[: match.start()][-1:].isalnum()
    return match[1] if alone else f"{{{match[1]}}}"


def _ascii_symbols(text: str) -> str:
    """`text` with symbols of mathematics in LaTeX; letters of other scripts and punctuation stay."""
    text = _STYLED_CHARACTERS.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)
    text = _OHM.sub("ohm", _MICRO.sub("u", text)).translate(_TRANSLATION)
    return _NOT_ASCII.sub(_in_latex, _GREEK.sub(_greek, text))


def _greek(run: re.Match[str]) -> str:
    """Up to three Greek letters as commands, more as the word that they are."""
    names = [unicodedata.name(letter, "").replace("LAMDA", "LAMBDA") for letter in run[0]]
    letters = [re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", name) for name in names]
    if len(letters) > _MAX_GREEK_SYMBOLS or not all(letters):
        return run[0]
    return "".join(
        f"\\{m[2].lower() if m[1] == 'SMALL' else m[2].capitalize()} " for m in letters if m is not None
    )


def _in_latex(run: re.Match[str]) -> str:
    r"""Superscripts as `^{…}`, subscripts as `_{…}`, digits of all scripts as 0 to 9, others as they are."""
    parts = []
    for kind, characters in itertools.groupby(run[0], _kind):
        part = "".join(characters)
        if kind in ("^", "_"):
            part = f"{kind}{{{unicodedata.normalize('NFKC', part)}}}".replace("\N{MINUS SIGN}", "-")
        elif kind == "fraction":
            halves = (unicodedata.normalize("NFKC", c).split("\N{FRACTION SLASH}") for c in part)
            part = "".join(rf"\frac{{{top}}}{{{bottom}}}" for top, bottom in halves)
        elif kind == "decimal":
            part = "".join(str(unicodedata.decimal(digit)) for digit in part)
        elif kind == "unknown":
            part = r"\unknown " * len(part)
        parts.append(part)
    return "".join(parts)


def _kind(character: str) -> str:
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind in ("<super>", "<sub>"):
        return "^" if kind == "<super>" else "_"
    if unicodedata.decimal(character, None) is not None:
        return "decimal"
    if kind == "<fraction>":
        return "fraction"
    return "unknown" if character != "√" and unicodedata.category(character) in ("Sm", "No", "Nl") else ""


def _repeating(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: 0.1\overline{6} is 15/90."""
    whole, once, again = match.groups()
    bottom = (10 ** len(again) - 1) * 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{bottom}}}"
