r"""Removes units of measurement and words of prose from an answer and keeps its mathematics.

Used by `answers.py` and `expressions.py`. Letters that are neither a known unit nor a word of
prose are variables and are kept: `2ab` contains two variables.
"""

from __future__ import annotations

import re
import unicodedata

# The exponent of a unit: ^2, ^{-1}, $^2$ or ².
_EXPONENT = r"(?:\$?\s?\^\s?(?:\{\s?-?[0-9]\s?\}|-?[0-9])\$?|(?<=\s)(?:squared|cubed))"
# One more level of braces: \text{cm^{2}}.
_GROUP = re.compile(
    r"(?P<slash>/\s*)?"
    r"\\(?P<command>text|textrm|textit|textbf|textnormal|mbox|mathrm|operatorname)\s*"
    rf"\{{(?P<content>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}\s*(?P<exponent>{_EXPONENT}?)"
)
# `++`: a word is read in one way; of 2^30 otherwise, where a digit follows one of 31 letters.
_WORDS_IN_GROUP = re.compile(rf"(?:[A-Za-z]++{_EXPONENT}?|\\cdot(?![A-Za-z])|[\s~.,:;'/()*-])*")
# \text{kg}\cdot\text{m} is one group.
_JOINED = re.compile(
    r"(\\(?:text|mathrm)\s?\{[A-Za-z ~]*)\}\s?(\\cdot(?![A-Za-z])|/)\s?"
    r"\\(?:text|mathrm)\s?\{(?=[A-Za-z ~/^0-9-]*\})"
)
_LETTER_UNITS = frozenset("mgshLJNWVACKFT")
_AFTER_VALUE = re.compile(r"[0-9A-Za-z)}]\s*\Z")

# Abbreviations and words that are not plausible as products of variables.
_UNITS = (
    r"(?:[cdk]m|mm|ft|yds?|oz|lbs?|kgs?|mcg|mL|kWh?|kJ|kPa|k?Hz|MHz|GHz|[KMGT][Bb]|mph|kph|rpm|mpg|"
    r"hrs|mins?|secs?|yrs?|pts|pcs|USD|EUR|GBP|"
    r"(?:milli|centi|kilo)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|inch(?:es)?|feet|foot|yards?|miles?|"
    r"ounces?|pounds?|gallons?|degrees?|radians?|units?|dollars?|cents?|euros?|"
    r"seconds?|minutes?|hours?|days?|weeks?|months?|years?)"
)
# These can also be products of variables (2mg, 2hr); they count as units only after a number and a space.
_SHORT_UNITS = (
    r"(?:[pnumkMG](?:m|g|s|L|l|J|N|W|V|A|F|C|Pa|eV|Hz|mol|cal|bar|ohm|rad)|Pa|Hz|eV|mol|rad|cal|k?ohm|atm|bar"
    r"|Wb|Nm|Wh|Ah|lm|lx|cd|dB|min|sec|mi|in|hr|am|pm)"
)
_LETTER_UNIT = f"[{''.join(sorted(_LETTER_UNITS))}]"
_A_UNIT = re.compile(f"{_UNITS}|{_SHORT_UNITS}|sq|square|cu|cubic|per")
_POWERED = rf"(?:(?:sq|square|cu|cubic)\.?\s)?{_UNITS}\s?{_EXPONENT}?"
_TERM = rf"(?:{_UNITS}|{_SHORT_UNITS}|{_LETTER_UNIT})(?![A-Za-z])(?:\s?{_EXPONENT})?"
_DIVIDED = rf"(?:{_TERM}|\(\s?{_TERM}(?:\s?(?:\\cdot|\*)?\s?{_TERM}){{0,3}}\s?\))"
# m/s, kg m/s^2, J/(kg K), kg m^2 s^{-2}: divided, or with a negative exponent or a unit of several letters.
_COMPOUND = (
    rf"(?:{_TERM}|[a-z]{{3,15}}s)(?:(?:\s?(?:\\cdot|\*)\s?|\s){_TERM}){{0,3}}(?:\s?(?:/|per(?![A-Za-z]))\s?{_DIVIDED}){{1,2}}"
    rf"|(?=[^+=,;]{{0,30}}(?:\^\s?\{{?\s?-|[A-Za-z]{{2}})){_TERM}(?:(?:\s?(?:\\cdot|\*)\s?|\s){_TERM}){{1,3}}"
)
# A unit must be followed by punctuation, the end or a word; before an operator, a digit or one letter the
# letters are a product of variables.
_END = r"(?=\s*(?:[.,;:!?)\]$\"']|\\[)\]]|\Z))"
_END_OR_WORD = rf"(?:{_END}|(?=\s+[A-Za-z]{{2,}}))"
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9)}}])(?:\s?{_POWERED}(?:\s?(?:/|per)\s?(?:{_POWERED}|[hs]))?"
    r"(?=\s*(?:[.,;:!?)\]}$]|\\[)\]]|\Z)|\s+[A-Za-z]{2,})"
    rf"|(?P<short>\s{{1,2}}(?:(?:{_SHORT_UNITS}{_EXPONENT}?|{_COMPOUND}){_END_OR_WORD}"
    rf"|{_LETTER_UNIT}\s?{_EXPONENT}{_END})))"
)
# A sum or a variable before a number with letters after it: these are variables too.
_ALGEBRA = re.compile(r"\+|[0-9)}]\s*-|(?<![A-Za-z\\'])(?![eE][0-9+-])[b-zB-HJ-Z](?![A-Za-z'])(?!\s*=)")
ATTACHED_UNIT = re.compile(rf"(?:{_COMPOUND}|{_LETTER_UNIT}\s?{_EXPONENT})(?=\W*\Z)")
"""A compound unit that directly follows a number: `m/s` of `12m/s`."""
LETTER_UNIT = re.compile(rf"\s{_LETTER_UNIT}[\s.]*")
"""A unit of one letter after a space, if it is all that follows a number: ` m` of `12 m`."""
_UNIT_FRACTION = re.compile(
    rf"(?<=[0-9}}\s])\\frac\s?\{{\s?(?:\\(?:text|mathrm)\s?\{{)?{_TERM}\s?\}}?\s?\}}"
    rf"\s?\{{\s?(?:\\(?:text|mathrm)\s?\{{)?{_TERM}\s?\}}?\s?\}}"
)
# Words that change the value of the number beside them.
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Power of ten by the word that multiplies the number before it."""
_CHANGED_AFTER = re.compile(
    r"\s*-?(?:(?:and|&)\san?\s(?:half|third|quarter|fourth)|(?:an?\s)?half|squared|cubed|plus|minus|factorial"
    r"|dozen|lakh|crore|thirds|fifths|sixths|sevenths|eighths|ninths|tenths|hundredths|thousandths"
    rf"|(?:{'|'.join(SCALES)})s?)(?![A-Za-z])"
    r"|\s?[十百千万萬亿億兆半]",
    re.IGNORECASE,
)
CHANGED = re.compile(rf"(?<=[0-9}}])(?:{_CHANGED_AFTER.pattern})", re.IGNORECASE)
"""Words after a number that change its value."""
_LAST_LETTER = re.compile(rf"(?P<short>(?<=[0-9}}])\s{{1,2}}{_LETTER_UNIT}[\s.]*\Z)")
_CHANGED_BEFORE = re.compile(
    r"(?:(?<!\\)\b(?:minus|plus|(?:square|cube)\s(?:root\s)?of|root\s?(?:of)?|log|(?:half|third|quarter|fourth|fifth|tenth)\sof"
    r"|times|twice|not|[0-9]\s(?:by|out\sof))\s?"
    r"|[〇零一二三四五六七八九十百千万萬亿億兆])\Z",
    re.IGNORECASE,
)

# A word of prose is surrounded by white space or punctuation, with no operator next to it.
_WORD = re.compile(
    r"(?<![^\s(,.;:!?\"'])(?<![-+*/^=<>]\s)(?P<word>[A-Za-z]{2,})(?:'[a-z]{1,2})?(?![^\s),.;:!?\"'])"
    r"(?!\s*(?:[+*/^=<>]|-\s))"
)
_SHORT_WORD = re.compile("is|of|to|in|so|it|we|at|on|by|an|or|as|be|if|my|he|me|us")
# Names with a mathematical meaning: removing them would change the answer.
NO_WORDS = re.compile(
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
    if "\\" in text:
        text = _GROUP.sub(_without_group, _UNIT_FRACTION.sub(" ", _JOINED.sub(r"\1\2 ", text)))
    return _PLAIN_UNIT.sub(_without_unit, text)


def is_changed(text: str, start: int, end: int) -> bool:
    """Whether a word next to `text[start:end]`, a number, changes its value: 3 and a half, the root of 3."""
    before = text[max(0, start - 20) : start].rstrip(" ")
    return bool(_CHANGED_AFTER.match(text, end) or _CHANGED_BEFORE.search(before))


def without_letter_unit(text: str) -> str:
    """`text` without a unit of one letter after a space at its end: `10^{-19} C`."""
    return _LAST_LETTER.sub(_without_unit, text)


def _without_unit(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 80) : match.start()].rpartition("\n")[2]
    return match[0] if match["short"] and _ALGEBRA.search(before) else " "


def split_at_words(text: str) -> list[str]:
    """The non-empty pieces of `text` between its words of prose, stripped of punctuation at both ends."""
    pieces, start = [], 0
    for found in _WORD.finditer(text):
        if is_word(found["word"]):
            pieces.append(text[start : found.start()])
            start = found.end()
    pieces = _SEPARATOR.join([*pieces, text[start:]]).split(_SEPARATOR)
    return [piece for piece in (piece.strip(" .,;:'\"") for piece in pieces) if piece]


def between_words(text: str, limits: tuple[int, int], span: tuple[int, int]) -> str:
    """The part of `text` within `limits` around `span` up to the next words of prose."""
    start, end = limits
    for found in _WORD.finditer(text, *limits):
        if is_word(found["word"]) and found.end() <= span[0]:
            start = found.end()
        elif is_word(found["word"]) and found.start() >= span[1]:
            return text[start : found.start()]
    return text[start:end]


def is_word(letters: str) -> bool:
    """Whether a sequence of letters is a word of prose or a unit rather than a product of variables.

    Words of other scripts than Latin are not read, so they are none.
    """
    lower = letters.casefold()
    if not letters.isascii():
        plain = unicodedata.normalize("NFD", lower)
        return len(letters) > 2 and all(c.isascii() or unicodedata.combining(c) for c in plain)
    if _SHORT_WORD.fullmatch(lower) or re.fullmatch(_UNITS, letters):
        return True
    if len(letters) < 3 or NO_WORDS.fullmatch(lower) or lower in _ALPHABET or letters[1:] != lower[1:]:
        return False
    return not set("aeiou").isdisjoint(lower)


def may_follow_a_number(letters: str) -> bool:
    """Whether letters directly after a number do not change its value: true for `5cm`, false for `5xy`."""
    unit = letters in _LETTER_UNITS or re.fullmatch(_SHORT_UNITS, letters)
    return bool(unit) or letters in ("", "st", "nd", "rd", "th") or is_word(letters)


def _without_group(match: re.Match[str]) -> str:
    content = match["content"]
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", content)
    before = match.string[max(0, match.start() - 20) : match.start()]
    if _WORDS_IN_GROUP.fullmatch(content):
        units = all(run in _LETTER_UNITS or _A_UNIT.fullmatch(run) for run in runs)
        if units and _AFTER_VALUE.search(before):
            return " "
        if not SCALES.keys().isdisjoint(runs):
            return f" {content} "
        words = all(map(is_word, runs)) if match["command"] in ("mathrm", "operatorname") else True
        if words and any(len(run) > 1 for run in runs):
            return _SEPARATOR
    return f"{match['slash'] or ''} {content} {match['exponent']}"
