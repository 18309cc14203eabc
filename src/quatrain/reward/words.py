r"""Removes units of measurement and words of prose from an answer and keeps its mathematics.

Used by `reward/answers.py` and `reward/expressions.py`. Letters that are neither a known unit nor a word of
prose are variables and are kept: `2ab` contains two variables.
"""

from __future__ import annotations

import re

# The exponent of a unit: ^2, ^{-1}, $^2$ or ².
_EXPONENT = r"(?:\$?\s?\^\s?(?:\{\s?-?[0-9]\s?\}|-?[0-9])\$?|[⁰¹²³⁴-⁹])"
# One more level of braces: \text{cm^{2}}.
_GROUP = re.compile(
    r"(?P<slash>/\s*)?"
    r"\\(?P<command>text|textrm|textit|textbf|textnormal|mbox|mathrm|operatorname)\s*"
    rf"\{{(?P<content>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}\s*(?P<exponent>{_EXPONENT}?)"
)
_WORDS_IN_GROUP = re.compile(rf"(?:[A-Za-zµμΩ°]+{_EXPONENT}?|[\s~.,:;'/()·-])*")
_LETTER_UNITS = frozenset("mgshLJNWVACKF")
_AFTER_VALUE = re.compile(r"[0-9A-Za-z)}½⅓⅔¼¾⅕⅛]\s*\Z")

# Abbreviations and words that are not plausible as products of variables.
_UNITS = (
    r"(?:[cdk]m|mm|ft|yds?|oz|lbs?|kgs?|mcg|mL|kWh?|kJ|kPa|k?Hz|MHz|GHz|[KMGT][Bb]|mph|kph|rpm|mpg|"
    r"hrs|mins?|secs?|yrs?|pts|pcs|USD|EUR|GBP|"
    r"(?:milli|centi|kilo)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|inch(?:es)?|feet|foot|yards?|miles?|"
    r"ounces?|pounds?|gallons?|degrees?|radians?|units?|dollars?|cents?|euros?|"
    r"seconds?|minutes?|hours?|days?|weeks?|months?|years?)"
)
# These can also be products of variables (2mg, 2hr); they count as units only after a number and a space.
_SHORT_UNITS = r"(?:mg|ml|in|hr|am|pm)"
_A_UNIT = re.compile(f"{_UNITS}|{_SHORT_UNITS}|sq|square|cu|cubic|per")
_POWERED = rf"(?:(?:sq|square|cu|cubic)\.?\s)?{_UNITS}\s?{_EXPONENT}?"
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9)}}])(?:\s?{_POWERED}(?:\s?(?:/|per)\s?(?:{_POWERED}|[hs]))?|\s{_SHORT_UNITS}{_EXPONENT}?)"
    # A unit must be followed by punctuation, the end or a word; before an operator, a digit or one letter
    # the letters are a product of variables.
    r"(?=\s*(?:[.,;:!?)\]}$]|\\[)\]]|\Z)|\s+[A-Za-z]{2,})"
)

# A word of prose is surrounded by white space or punctuation, with no operator next to it.
_WORD = re.compile(
    r"(?<![^\s(,.;:!?\"'])(?<![-+*/^=<>]\s)(?P<word>[A-Za-z]{2,})(?:'[a-z]{1,2})?(?![^\s),.;:!?\"'])"
    r"(?!\s*(?:[+*/^=<>]|-\s))"
)
_SHORT_WORD = re.compile("is|of|to|in|so|it|we|at|on|by|an|or|as|be|if|my|he|me|us")
# Names with a mathematical meaning: removing them would change the answer.
_NO_WORDS = re.compile(
    "sin|cos|tan|sec|csc|cot|sinh|cosh|tanh|arcsin|arccos|arctan|asin|acos|atan|log|exp|max|min|mod|gcd|lcm|det"
    "|deg|lim|arg|sqrt|frac|inf|infinity|alpha|beta|gamma|delta|theta|lambda|sigma|omega"
)
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_SEPARATOR = "\n"


def without_units(text: str) -> str:
    r"""`text` without its units, plain or in `\text{…}`, and their exponents: `18\text{ cm}^2` becomes `18`.

    Words in `\text{…}` become a line break, at which `split_at_words` splits. A group of anything else
    (`\text{5}`, `\mathrm{e}`, `\mathrm{AB}`) is replaced by its content.
    """
    return _PLAIN_UNIT.sub(" ", _GROUP.sub(_without_group, text))


def split_at_words(text: str) -> list[str]:
    """The non-empty pieces of `text` between its words of prose, stripped of punctuation at both ends."""
    pieces, start = [], 0
    for found in _WORD.finditer(text):
        if is_word(found["word"]):
            pieces.append(text[start : found.start()])
            start = found.end()
    pieces = _SEPARATOR.join([*pieces, text[start:]]).split(_SEPARATOR)
    return [piece for piece in (piece.strip(" .,;:'\"") for piece in pieces) if piece]


def between_words(text: str, limits: tuple[int, int], span: tuple[int, int]) -> tuple[int, int]:
    """The part of `text` within `limits` around `span` up to the next words of prose: its start and end."""
    start, end = limits
    for found in _WORD.finditer(text, *limits):
        if is_word(found["word"]) and found.end() <= span[0]:
            start = found.end()
        elif is_word(found["word"]) and found.start() >= span[1]:
            return start, found.start()
    return start, end


def is_function(letters: str) -> bool:
    """Whether these letters are a name with a mathematical meaning, such as `log`."""
    return _NO_WORDS.fullmatch(letters.casefold()) is not None


def is_word(letters: str) -> bool:
    """Whether a sequence of ASCII letters is a word of prose or a unit rather than a product of variables."""
    lower = letters.casefold()
    if _SHORT_WORD.fullmatch(lower) or re.fullmatch(_UNITS, letters):
        return True
    if len(letters) < 3 or _NO_WORDS.fullmatch(lower) or lower in _ALPHABET or letters[1:] != lower[1:]:
        return False
    return not set("aeiou").isdisjoint(lower)


def may_follow_a_number(letters: str) -> bool:
    """Whether letters directly after a number do not change its value: true for `5cm`, false for `5xy`."""
    unit = letters in _LETTER_UNITS or re.fullmatch(_SHORT_UNITS, letters)
    return bool(unit) or letters in ("", "st", "nd", "rd", "th") or is_word(letters)


def _without_group(match: re.Match[str]) -> str:
    content = match["content"]
    runs = re.findall(r"[A-Za-zµμΩ°]+", content)
    before = match.string[max(0, match.start() - 20) : match.start()]
    if _WORDS_IN_GROUP.fullmatch(content):
        units = all(run in _LETTER_UNITS or _A_UNIT.fullmatch(run) for run in runs)
        if units and _AFTER_VALUE.search(before):
            return " "
        words = all(map(is_word, runs)) if match["command"] in ("mathrm", "operatorname") else True
        if words and any(len(run) > 1 for run in runs):
            return _SEPARATOR
    return f"{match['slash'] or ''} {content} {match['exponent']}"
