"""Decides whether a completion's answer equals the gold answer; text is parsed, never evaluated as code.

Used by the reward `correct` (`reward/functions.py`) and by the accuracy in evaluation. `reward/extract.py`
finds the answer. Numbers are compared exactly, as fractions; words and letters of a choice by
`reward/texts.py`, all other answers by `reward/expressions.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from quatrain.reward import texts
from quatrain.reward.expressions import is_judgeable, same_expression
from quatrain.reward.extract import answer_of, unboxed
from quatrain.reward.notation import uniform
from quatrain.reward.words import (
    between_words,
    is_function,
    is_word,
    may_follow_a_number,
    without_units,
)

# Of a long text only the last characters are read, because the answer is expected at the end.
_TAIL_CHARS = 4000
_NUMBER_CHARS = 300

_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
# Digits inside a word (H2O), an exponent (cm^2) or an index (x_1) are not matched as numbers.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<!\^)(?<!\^-)(?<!\^\{)(?<!\^\{-)(?<![A-Za-z]_)(?<![A-Za-z]_\{)"
    rf"(?P<value>{_DECIMAL})(?P<exponent>[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))?"
    rf"(?:[ ]{{1,2}}(?P<top>[0-9]+)[ ]?/[ ]?(?P<bottom>[0-9]+)|[ ]?/[ ]?(?P<divisor>{_DECIMAL}))?"
    r"(?P<percent>[$]?[ ]?(?:%|(?:percent|percentage|per cent|pct)\b))?"
)
# A minus directly before a number is a sign unless an operand precedes it (10-3). A minus followed by a space
# is a sign only after = and similar characters (= - 3): "10 - 3" is a subtraction, and "- 3" a list item.
_MINUS = re.compile(
    r"(?:(?:\A|[^0-9A-Za-z)\]}%.-])-[$£€]?|(?:\A|[=(:$]|\\approx)[ ]{0,2}-[ ]?[$£€]?[ ]?|[$£€]-)\Z"
)
# Notation in which a number is only a part of the value: roots, fractions, powers, scientific notation.
_MORE_THAN_A_NUMBER = re.compile(
    r"\\(?:sqrt|pi|frac|binom|pm|ln|log|infty)\b|[√π!±]|[0-9)]\s?\^|[0-9)]\*\*[0-9(]|[0-9)][⁰¹²³⁴-⁹]"
    r"|\\times\s*10\s*\^"
)
_FRACTION = re.compile(
    r"\\frac\s*(?:\{\s*(?P<a>-?[0-9.,]+)\s*\}\s*\{\s*(?P<b>[0-9.,]+)\s*\}|(?P<c>[0-9])(?P<d>[0-9]))"
)
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
# Sums and products of plain numbers: the question, not its answer.
_NOT_COMPUTED = re.compile(
    r"(?:[0-9.,$(){}+/ -]|\\[()\[\]]|(?<!\*)\*(?!\*)|\\(?:times|cdot|div)(?![A-Za-z]))*"
)
# What may stand before the last number of a list: another number, and a comma, "and" or "or" after it.
_LIST_BEFORE = re.compile(
    r"[0-9)\]}%$](?:\s?[A-Za-z]{1,15}\b){0,2}[\s$)}\]]{0,4}(?:[,;&]|,?\s{0,2}\b(?:and|or)\b)[\s$({\[\\+-]{0,6}"
    r"(?:[A-Za-z](?:_\{?[0-9]\}?)?\s?=\s?)?[\s$£€({\[\\+-]{0,6}\Z"
)
# A variable as the next item of a list: 3 and x.
_LIST_AFTER = re.compile(r"[\s$)}]{0,3}(?:[,;]|\b(?:and|or)\b)[\s$(]{0,3}-?[b-zB-HJ-Z](?![A-Za-z'])")
# Where an expression ends: at a line, an equals sign, the end of a sentence.
_BREAK = re.compile(r"\n|=|\\approx|[.:;!?](?=\s)|####|</?[a-z]{1,10}>")
_PLAIN_BEFORE = re.compile(
    r"(?:[\s$£€#*.,:;'\"({\[+-]|[^\x00-\x7f]|[\x00-\x1f]|\\[(\[{]|\\f?boxed\s?\{|\([a-z]{1,3}\)\s"
    r"|(?<![^\W\d_])(?:[aAI]|[^\W\d_]{2,})[,:.]?\s+)*"
)
_PLAIN_AFTER = re.compile(
    r"(?:[^\W\d_]|[^\x00-\x7f]|[\x00-\x1f]|[\s$£€#*.,:;'\")}\](!?-]|\\[)\]}]|/\s?(?=[A-Za-z]{2}))*"
)
_ACRONYM = re.compile("[A-Z]{3,}s?")
_THOUSANDS_SPACE = re.compile(r"\s*-?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?\s*")
_DECIMAL_COMMA = re.compile(r"(?<![0-9,.])([0-9]+),([0-9]+)(?![0-9,])")


class Number(NamedTuple):
    """A number in a text: its value without the percent sign, and whether a percent sign follows."""

    value: Fraction
    percent: bool


def gold_text(answer: Any) -> str:
    """The text after the last `####` of a gold answer, or all its text; empty for None and blank answers."""
    return "" if answer is None else str(answer).rpartition("####")[2].strip()


def is_correct(completion: str, answer: Any) -> bool | None:
    r"""Whether the completion's answer equals the gold answer; None if the gold answer cannot be judged.

    The completion's answer is the content of its last `<answer>…</answer>`, or else the whole completion; if
    that contains a `\boxed{…}`, the answer is the content of the last one. The gold answer is the text after
    the last `####` of `answer`, or all of it, and the content of its `\boxed{…}` if it has one.

    If the gold answer is a number, the answer is the last number, unless that is a part of an expression, a
    list or an inequality. Signs, thousands separators, fractions, mixed numbers, percents (50% equals both 50
    and 0.5) and decimals are understood; a fraction without a finite decimal is compared to six places.
    Units are ignored. Up to three words are compared as text, letters of a choice as letters, and all other
    answers by math-verify. A gold answer cannot be judged if it is a longer text or not parsed.

    Raises ValueError for a gold answer without text. `####` follows GSM8K; the other rules are quatrain's.
    """
    gold = gold_text(answer)
    if not gold:
        raise ValueError(f"the gold answer must have text (after its last ####, if any); got {answer!r}")
    box = unboxed(gold)
    said, boxed = answer_of(completion)
    return _verdict(uniform(said[-_TAIL_CHARS:]), uniform(gold if box is None else box), boxed)


def _verdict(said: str, gold: str, boxed: bool) -> bool | None:
    label, rest = texts.split_label(gold)
    if label and texts.same_label(said, label):
        return True
    if label and texts.split_label(said)[0]:
        return False
    if label:
        return bool(rest and _verdict(said, rest, boxed))
    number = whole_number(gold)
    if number is not None:
        return _same_number(said, number)
    line = said if boxed else _last_line(said)
    words = texts.words_of(gold)
    if words:
        return texts.same_words(line, words) if texts.is_short(words) else None
    if _DECIMAL_COMMA.fullmatch(gold) and whole_number(said) == whole_number(gold.replace(",", ".")):
        return True
    if not is_judgeable(gold):
        return None
    return _as_text(said) == _as_text(gold) or same_expression(line, gold)


def _same_number(said: str, gold: Number) -> bool:
    r"""Whether the answer `said` is the number `gold`; of 1/3 \approx 0.33, either side may be."""
    label, rest = texts.split_label(said)
    said = _one_notation(rest if label else said, gold)
    exact, approx, rest = said.partition("\\approx")
    return _ends_with(said, gold) or bool(approx and "\n" not in rest and _ends_with(exact, gold))


def _ends_with(said: str, gold: Number) -> bool:
    """Whether the last number of `said` is `gold`, and not a part of an expression, a list or a relation."""
    said = without_units(_tidy(said))
    match = _last_match(said)
    if match is None:
        return False
    before = said[max(0, match.start() - 80) : match.start()]
    if _LIST_BEFORE.search(before) or _LIST_AFTER.match(said, match.end()):
        return False
    piece = _piece(said, match)
    if _is_plain(piece, match[0]) and may_follow_a_number(_letters_after(said, match)):
        number = _to_number(said, match)
        return number is not None and _equal(number, gold)
    computed = not _NOT_COMPUTED.fullmatch(piece)
    return computed and same_expression(piece, _decimal(gold.value))


def _one_notation(said: str, gold: Number) -> str:
    """`said` with the thousands spaces of 1 000 removed, and the decimal comma of 2,74 as a point."""
    if _THOUSANDS_SPACE.fullmatch(said):
        return said.replace(" ", "")
    if gold.value.denominator > 1:
        return _DECIMAL_COMMA.sub(lambda m: m[0] if _grouped(m) else f"{m[1]}.{m[2]}", said)
    return said


def _grouped(match: re.Match[str]) -> bool:
    """Whether the comma between two runs of digits separates thousands."""
    return len(match[2]) == 3 and len(match[1]) <= 3 and not match[1].startswith("0")


def whole_number(text: str) -> Number | None:
    """The number in `text`, which may also contain a currency sign, units and words; None for other text."""
    tidy = without_units(_tidy(uniform(text)))
    match = _last_match(tidy)
    if match is None or _MORE_THAN_A_NUMBER.search(tidy) or _letters_after(tidy, match):
        return None
    rest = tidy[: match.start()] + " " + tidy[match.end() :]
    rest = re.sub(r"\\(?:boxed|text|mathrm|mathbf|textbf|circ)\b|\\[()\[\]]|[{}$£€]", " ", rest)
    if not re.fullmatch(r"(?:[^\W\d_]{2,}+|a\b|[\s.,:;'\"°+-])*", rest):
        return None
    if not all(is_word(letters) for letters in re.findall(r"[A-Za-z]{2,}", rest)):
        return None
    return _to_number(tidy, match)


def _tidy(text: str) -> str:
    """`text` with fractions of numbers as a/b."""
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


def _decimal(x: Fraction) -> str:
    """A number as math-verify reads it: 0.25 as a decimal, which it compares to six places, or 1/3."""
    digits = x.denominator.bit_length()
    if x.denominator == 1 or not _is_decimal(x) or digits > 60:
        return str(x)
    scaled = f"{abs(x.numerator) * 10**digits // x.denominator:0{digits + 1}d}"
    return f"{'-' if x < 0 else ''}{scaled[:-digits]}.{scaled[-digits:].rstrip('0')}"


def _piece(text: str, match: re.Match[str]) -> str:
    """The expression around a number: without the words, the lines and the sides of = next to it."""
    starts = [found.end() for found in _BREAK.finditer(text, 0, match.start())]
    after = _BREAK.search(text, match.end())
    start, end = max(starts, default=0), after.start() if after else len(text)
    start, end = between_words(text, (start, end), match.span())
    return text[start:end]


def _is_plain(piece: str, number: str) -> bool:
    """Whether `piece` is only a number with its sign, currency, unit and brackets."""
    before, _, after = piece.rpartition(number)
    if _MORE_THAN_A_NUMBER.search(piece) or not _PLAIN_BEFORE.fullmatch(before):
        return False
    if not _PLAIN_AFTER.fullmatch(after) or any(map(is_function, re.findall("[A-Za-z]+", before))):
        return False
    names = re.findall("[A-Za-z]+", after)
    return all(may_follow_a_number(name) or name == "a" or _ACRONYM.fullmatch(name) for name in names)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _as_text(text: str) -> str:
    return re.sub(r"[\s$]|\.$", "", text.strip())
