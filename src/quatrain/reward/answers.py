"""Decides whether a completion's answer equals the gold answer; text is parsed, never evaluated as code.

Used by the reward `correct` (`reward/functions.py`) and by the accuracy in evaluation. Numbers are compared
exactly, as fractions; answers that are not plain numbers are compared by `reward/expressions.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from quatrain.reward.expressions import same_expression
from quatrain.reward.words import is_word, may_follow_a_number, without_units

_OPEN, _CLOSE = "<answer>", "</answer>"
# Of a long text only the last characters are read, because the answer is expected at the end.
_TAIL_CHARS = 4000
_NUMBER_CHARS = 300

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
# Digits inside a word (H2O), an exponent (cm^2) or an index (x_1) are not matched as numbers.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<!\^)(?<!\^-)(?<!\^\{)(?<!\^\{-)(?<![A-Za-z]_)(?<![A-Za-z]_\{)"
    rf"(?P<value>{_DECIMAL})(?P<exponent>[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))?"
    rf"(?:[ ]{{1,2}}(?P<top>[0-9]+)[ ]?/[ ]?(?P<bottom>[0-9]+)|[ ]?/[ ]?(?P<divisor>{_DECIMAL}))?"
    r"(?P<percent>[ ]?(?:%|percent\b|per cent\b))?"
)
# A minus directly before a number is a sign unless an operand precedes it (10-3). A minus followed by a space
# is a sign only after = and similar characters (= - 3): "10 - 3" is a subtraction, and "- 3" a list item.
_MINUS = re.compile(r"(?:(?:\A|[^0-9A-Za-z)\]}%.-])-[$£€]?|(?:\A|[=≈(:$])[ ]{0,2}-[ ]?[$£€]?[ ]?|[$£€]-)\Z")
# Notation in which a number is only a part of the value: roots, fractions, powers, scientific notation.
_MORE_THAN_A_NUMBER = re.compile(
    r"\\(?:sqrt|pi|frac|binom)\b|[√π]|[0-9)]\s?\^|[0-9)]\*\*[0-9(]|[0-9)][⁰¹²³⁴-⁹]|(?:×|\\times)\s*10\s*\^"
)
# A brace after a backslash is a literal brace and does not delimit a group: \{1, 2\} is a set.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*(?P<a>-?[0-9.,]+)\s*\}\s*\{\s*(?P<b>[0-9.,]+)\s*\}|(?P<c>[0-9])(?P<d>[0-9]))"
)
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_PLAIN = str.maketrans(
    {"−": "-", "–": "-", "‒": "-", "﹣": "-", "－": "-", "\u00a0": " ", "\u202f": "", "\u2009": ""}
)


class Number(NamedTuple):
    """A number in a text: its value without the percent sign, and whether a percent sign follows."""

    value: Fraction
    percent: bool


def gold_text(answer: Any) -> str:
    """The text after the last `####` of a gold answer, or all its text; empty for None and blank answers."""
    return "" if answer is None else str(answer).rpartition("####")[2].strip()


def is_correct(completion: str, answer: Any) -> bool:
    """Whether the last number of the completion's answer equals the gold number of `answer`.

    The completion's answer is the content of its last `<answer>…</answer>`, or else the whole completion; if
    that contains a `\\boxed{…}`, the answer is the content of the last one. The gold answer is the text after
    the last `####` of `answer`, or all of it. Signs, thousands separators, fractions, mixed numbers, percents
    (50% equals both 50 and 0.5) and decimals are understood; a fraction without a finite decimal is compared
    to six places. Units are ignored. Other letters directly after a number are treated as variables. A gold
    answer that is an expression rather than a number is compared as text, then by math-verify.

    Raises ValueError for a gold answer without text. `####` follows GSM8K; the other rules are quatrain's.
    """
    gold = gold_text(answer)
    if not gold:
        raise ValueError(f"the gold answer must have text (after its last ####, if any); got {answer!r}")
    said = _answer_of(completion)[-_TAIL_CHARS:]
    gold_number = whole_number(gold)
    if gold_number is None:
        return _as_text(said) == _as_text(gold) or same_expression(_last_line(said), gold)
    said = without_units(_tidy(said))
    match = _last_match(said)
    if match is None:
        return False
    segment = _segment(said, match)
    if _MORE_THAN_A_NUMBER.search(segment) or not may_follow_a_number(_letters_after(said, match)):
        return same_expression(segment, str(gold_number.value))
    number = _to_number(said, match)
    return number is not None and _equal(number, gold_number)


def whole_number(text: str) -> Number | None:
    """The number in `text`, which may also contain a currency sign, units and words; None for other text."""
    tidy = without_units(_tidy(text))
    match = _last_match(tidy)
    if match is None or _MORE_THAN_A_NUMBER.search(tidy) or _letters_after(tidy, match):
        return None
    rest = tidy[: match.start()] + " " + tidy[match.end() :]
    rest = re.sub(r"\\(?:boxed|text|mathrm|mathbf|textbf|circ)\b|[{}$£€]", " ", rest)
    if not re.fullmatch(r"(?:[^\W\d_]{2,}+|a\b|[\s.,:;'\"°+-])*", rest):
        return None
    if not all(is_word(letters) for letters in re.findall(r"[A-Za-z]{2,}", rest)):
        return None
    return _to_number(tidy, match)


def _answer_of(completion: str) -> str:
    end = completion.rfind(_CLOSE)
    start = completion.rfind(_OPEN, 0, max(end, 0))
    answer = completion[start + len(_OPEN) : end] if start >= 0 else completion
    boxed = _last_boxed(answer)
    return answer if boxed is None else boxed


def _last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` in `text`; None if there is none or its brace is not closed."""
    opened = re.compile(r"\\boxed\s*\{").match(text, max(text.rfind("\\boxed"), 0))
    depth = 1
    for brace in _BRACE.finditer(text, opened.end()) if opened else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if opened and not depth:
            return text[opened.end() : brace.start()]
    return None


def _tidy(text: str) -> str:
    """`text` in a uniform notation: ASCII minus signs and spaces, LaTeX fractions of numbers as a/b."""
    text = text.translate(_PLAIN)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text.replace("{,}", ","))
    text = re.sub(r"\\(?:[,!;:]|left\b|right\b)", "", text)
    text = re.sub(r"\\([$%])", r"\1", text)
    text = re.sub(r"\^\s?\{?\\circ\b\s?\}?", "", text)
    text = re.sub(
        r"([0-9]?)([½⅓⅔¼¾⅕⅛])", lambda m: f"{m[1]} {_VULGAR[m[2]]}" if m[1] else _VULGAR[m[2]], text
    )
    text = _FRACTION.sub(_fraction_text, text)
    return re.sub(r"(\\[A-Za-z]+)(?=[0-9])", r"\1 ", text)


def _fraction_text(match: re.Match[str]) -> str:
    after_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if after_digit else ''}{match['a'] or match['c']}/{match['b'] or match['d']}"


def _last_match(text: str) -> re.Match[str] | None:
    match = None
    for found in _NUMBER.finditer(text):
        match = found
    return match


def _letters_after(text: str, match: re.Match[str]) -> str:
    """The letters directly after a number, without a space between."""
    letters = re.compile("[A-Za-z]*").match(text, match.end())
    return letters[0] if letters else ""


def _to_number(text: str, match: re.Match[str]) -> Number | None:
    if len(match[0]) > _NUMBER_CHARS:
        return None
    value = _fraction(match["value"]) * Fraction(10) ** int((match["exponent"] or "e0")[1:])
    try:
        if match["bottom"]:
            value += Fraction(int(match["top"]), int(match["bottom"]))
        elif match["divisor"]:
            value /= _fraction(match["divisor"])
    except ZeroDivisionError:
        return None
    negative = _MINUS.search(text[max(0, match.start() - 20) : match.start()])
    return Number(-value if negative else value, bool(match["percent"]))


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _equal(said: Number, gold: Number) -> bool:
    if _close(said.value, gold.value):
        return True
    if said.percent == gold.percent:
        return False
    one, other = (said, gold) if said.percent else (gold, said)
    return _close(one.value / 100, other.value)


def _close(x: Fraction, y: Fraction) -> bool:
    """Whether x equals y; if one has no finite decimal (1/3), to six places and five significant digits."""
    if x == y or (_is_decimal(x) and _is_decimal(y)):
        return x == y
    return abs(x - y) <= min(Fraction(5, 10**7), abs(y) / 10**5)


def _is_decimal(x: Fraction) -> bool:
    # A fraction has a finite decimal exactly if its denominator divides a sufficiently high power of ten.
    return pow(10, x.denominator.bit_length(), x.denominator) == 0


def _segment(text: str, match: re.Match[str]) -> str:
    """The expression around a number: from the last = or line start before it to the next = or line end."""
    start = max(text.rfind(sign, 0, match.start()) for sign in ("\n", "=", "≈"))
    end = min((at for sign in ("\n", "=") if (at := text.find(sign, match.end())) >= 0), default=len(text))
    return text[start + 1 : end]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _as_text(text: str) -> str:
    return re.sub(r"[\s$]|\.$|\\left|\\right", "", text.strip()).casefold()
