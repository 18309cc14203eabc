r"""Judges answers that are words (`\text{even}`), letters of a choice (`\text{(C)}`), dates or clock times.

Used by `answers.py`, which passes texts in the notation of `notation.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quatrain.reward.math.words import is_word

MAX_WORDS = 3
"""Words that are compared as text; a sentence says the same in too many ways."""
_GROUP = re.compile(r"\\(?:text|textbf|textrm|textit|textnormal|mbox|mathrm|mathbf|emph)\s?\{([^{}]*)\}")
_LABEL = re.compile(r"\s*(?:\((?P<a>[A-J])\)|(?P<b>[A-J])(?:[).:](?=\s|\Z)|(?=\s*\.?\s*\Z)))[.:]?\s*")
# A letter that is no article, no variable and not one of several letters.
_ONE = (
    r"(?!\)?\s*(?:(?:/|&|or\b|and\b)\s*\(?[A-J](?![A-Za-z'])"
    r"|[,;]\s*(?:or\s|and\s)?\(?[A-J]\)?(?=\s*(?:[,.;]|\Z|and\b|or\b))))"
    r"(?!\)?\s+(?:(?:is|was|seems|looks)(?:n't\b|\s+(?:clearly\s|also\s)?(?:not|wrong|incorrect|false|invalid"
    r"|impossible|eliminated|excluded|out)\b)|(?:does|can|could|would)\s?n[o']t\b|can\sbe\s(?:el|excl|ruled)|fails\b))"
)
_LETTER = (
    r"(?:\((?P<a>[A-J])\)|(?P<b>[B-HJ]|[AI](?!\s+(?!because|since|as\b|and\b|or\b|is\b)[a-z]))(?![A-Za-z0-9'(])(?!\s?[=+*/^_<>]|-[A-Za-z0-9]))"
    + _ONE
)
_RIGHT = r"\s+is\s+(?i:the\s+)?(?i:correct|right|best|answer|true)\b"
_CHOICE = r"(?i:options?|choices?|letter|alternative)"
_IS = r"(?i:is|are|would be|should be|must be|will be)\b"
_ANSWERED = re.compile(
    rf"\b(?:(?i:answer|ans)(?:\s{_CHOICE})?\s?(?:{_IS})?|{_CHOICE}\s?(?:{_IS}|(?=:)))[\s:=.>-]{{0,5}}"
    rf"(?:(?i:clearly|thus|therefore|simply|just|indeed)\s)?(?:{_CHOICE}[\s:]{{1,3}})?{_LETTER}"
)
_FIRST = re.compile(
    rf"[\s.:#>-]*(?:(?:{_CHOICE}|(?i:answer|final))[\s:]{{1,3}})?(?:\((?P<a>[A-J])\)|(?P<b>[A-J])(?:[).:](?=\s|\Z)"
    rf"|(?=\s*[.!]?\s*\Z|{_RIGHT}|\s+[-—]\s|,?\s+(?:because|since)\b))){_ONE}"
)
# Without a word or brackets, a small letter is a variable or an article.
_SMALL = re.compile(
    rf"(?i:(?:the\s)?(?:(?:correct|right|best|final)\s)?(?:answer|ans|{_CHOICE})\b\s?(?:{_IS})?[\s:=.-]{{0,3}})?"
    rf"(?:\((?P<a>[a-j])\)|(?<=[:\s])(?<!\bis )(?P<b>[b-hj]))[.!]?"
)
_SEVERAL = re.compile(
    r"(?:(?:(?i:so|thus|hence|therefore|the|my|final|correct|right|best)\b,?\s){0,4}"
    rf"(?:(?i:answers?)|{_CHOICE})\s?(?:{_IS})?[\s:]{{0,3}})?"
    r"(?P<letters>(?:\([A-J]\)|[A-J])(?:\s?(?:[,;&]|,?\s?and\b)?\s?(?:\([A-J]\)|[A-J])){1,9})\s?[.!]?"
)
_LIST_GOES_ON = re.compile(r"[,;&(]|and\b")
_CALLED_RIGHT = re.compile(rf"(?<![A-Za-z]){_LETTER}(?={_RIGHT})")
_BESIDE = re.compile(rf"(?<!out )(?<!reject )(?<!eliminate )\b{_CHOICE}[\s:]{{1,3}}{_LETTER}")
_LAST = re.compile(
    rf"(?:(?<!not )(?<!n't )\b(?i:is|be|choose|chose|select|selected|pick|picked|so|hence|thus|go\swith"
    rf"|therefore)[\s:,]{{1,3}}{_LETTER}"
    r"|(?<!or )(?<!and )(?<!, )(?<!not )(?<!not be )(?<!n't be )\((?P<c>[A-J])\))[\s.!]*\Z"
)
_TAIL_CHARS = 300
_EMPHASIS = re.compile(r"[$*`\"]|\\[()\[\]]")
_IN_BRACKETS = re.compile(r"(?<![A-Za-z0-9])['\[{]([A-J])['\]}](?![A-Za-z0-9^_])")
_VERB = r"(?:\A|\b(?:is|are|was|answer)[\s:]{1,3}(?:an?\s|the\s)?|[:=]\s?)"

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    "(?i:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_MONTH_AND_DAY = re.compile(
    r"(?<![0-9A-Za-z])(?:(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?\s(?:of\s)?(?P<month>"
    rf"{_MONTH})|(?P<first>{_MONTH})\s(?P<second>[0-9]{{1,2}})(?:st|nd|rd|th)?(?![0-9A-Za-z]))"
    r"(?:,?\s(?P<year>[0-9]{4})(?![0-9]))?"
)
_DATE = re.compile(
    r"(?<![0-9A-Za-z.,/+*^-])(?:(?:[0-9]{4}|0)(?P<sign>[-/.])(?:0?[1-9]|1[0-2])(?P=sign)(?:0?[1-9]|[12][0-9]|3[01])"
    r"|[0-9]{4}-(?:0[1-9]|1[0-2])|[0-9]{1,2}(?P<mark>[-/.])[0-9]{1,2}(?P=mark)[0-9]{4})(?![0-9]|[-/.+*^][0-9])"
)
# 3:4 is a ratio, 12:30 a time.
_CLOCK = re.compile(
    r"(?<![0-9:.,/+*^-])(?<!-\s)(?P<hour>[01]?[0-9]|2[0-3]):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9]))?"
    r"(?![0-9]|[:.][0-9])(?:\s?(?P<half>[aApP])\.?[mM](?![A-Za-z])\.?)?"
)


class Moment(NamedTuple):
    """A date as `_day` has it, and the match of a clock time."""

    date: tuple[int, list[int]] | None
    clock: re.Match[str] | None


def without_text(text: str) -> str:
    r"""`text` with the content of each `\text{…}` in its place, without $ and emphasis, one space at most."""
    return " ".join(_IN_BRACKETS.sub(r"(\1)", _EMPHASIS.sub("", ungrouped(text))).split())


def ungrouped(text: str) -> str:
    r"""`text` with the content of each `\text{…}` in its place."""
    return _GROUP.sub(r" \1 ", text)


def split_label(text: str) -> tuple[str, str]:
    """The letter of a choice at the start of `text`, and the text after it: `(B) 5` gives B and 5.

    The first of several, as in `(B) and (D)`, is none.
    """
    text = without_text(text)
    match = _LABEL.match(text)
    if match is None or (_LIST_GOES_ON.match(text, match.end()) and choices_of(text)):
        return "", text
    return match["a"] or match["b"], text[match.end() :]


def choice_of(said: str) -> str:
    """The letter of a choice that the answer `said` chooses; empty if it chooses none, or several.

    It is the last letter after "answer is", or else the one at the start of the last line or of the answer,
    or else the one that is called right, stands beside "option" or ends the answer.
    """
    text = without_text(said)
    if answered := _letters(_ANSWERED, text):
        return answered[-1]
    lines = [without_text(line) for line in said.strip().split("\n")]
    listed = len({label for line in lines if (label := split_label(line)[0])}) > 1
    for line in lines[-1:] if listed else (lines[-1], lines[0], text):  # not the first of the options
        if first := _FIRST.match(line):
            return first["a"] or first["b"]
        if small := _SMALL.fullmatch(line):
            return (small["a"] or small["b"]).upper()
    for pattern in (_CALLED_RIGHT, _BESIDE, _LAST):
        if letters := set(_letters(pattern, text[-_TAIL_CHARS:])):
            return letters.pop() if len(letters) == 1 else ""
    return ""


def choices_of(said: str) -> list[str]:
    """The letters, in order, if `said` chooses several: `BD`, `B, D` and `The answers are (B) and (D)`."""
    match = _SEVERAL.fullmatch(without_text(said))
    letters = re.findall("[A-J]", match["letters"]) if match else []
    return sorted(letters) if len(set(letters)) == len(letters) else []  # I and II are numerals


def _letters(pattern: re.Pattern[str], text: str) -> list[str]:
    return [next(filter(None, match.groups())) for match in pattern.finditer(text)]


def words_of(gold: str) -> list[str]:
    """The words of a gold answer that consists of words of prose; empty for another gold answer."""
    text = without_text(gold).strip(" .")
    words = text.split() if re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.'-])*", text) else []
    prose = [word for word in words if _is_prose(word.strip(",.'"))]
    return words if prose and all(len(word) > 2 or word in prose or word.islower() for word in words) else []


def same_words(said: str, words: list[str]) -> bool:
    """Whether `said` is these words, or a sentence that ends with "is" and these words."""
    said = without_text(said).strip(" .!\"'").casefold()[-300:]
    gold = re.escape(" ".join(words).strip(" .").casefold())
    return re.search(rf"{_VERB}{gold}\Z", said) is not None


def moment_of(text: str) -> Moment | None:
    """The date (2021-01-02, June 5, 2021), the clock time (12:30) or both that `text` consists of."""
    text = _with_month_numbers(text)
    dates, clocks = list(_DATE.finditer(text)), list(_CLOCK.finditer(text))
    rest = _CLOCK.sub("", _DATE.sub("", text))
    if max(len(dates), len(clocks)) != 1 or not re.fullmatch(
        r"T|(?:(?i:on|at|[a-z]{3,6}day)\b|[\s,.])*", rest
    ):
        return None
    return Moment(_day(dates[0]) if dates else None, clocks[0] if clocks else None)


def has_moment(text: str) -> bool:
    """Whether a date or several clock times are a part of `text`."""
    text = _with_month_numbers(text)
    return (
        bool(_DATE.search(text)) or len(re.findall(r"(?<![0-9:])[0-9]{1,2}:[0-5][0-9](?![0-9:])", text)) > 1
    )


def same_moment(said: str, gold: Moment) -> bool:
    """Whether the last date and time of `said` are those of `gold`, and no alternatives stand beside them.

    The year is compared if `gold` has one. 3:30 pm is also 15:30, and 3:30 if `said` has neither am nor pm.
    """
    said = _with_month_numbers(said)
    date = _last_alone(_DATE, said) if gold.date else None
    clock = _last_alone(_CLOCK, said) if gold.clock else None
    end = max(match.end() if match else 0 for match in (date, clock))
    if (gold.date and not date) or (gold.clock and not clock) or re.search("[0-9]", said[end:]):
        return False
    if date and gold.date:
        year, month_and_day = _day(date)
        if month_and_day != gold.date[1] or gold.date[0] not in (0, year):
            return False
    if not (clock and gold.clock):
        return True
    as_written = not clock["half"] and _time(clock, None) == _time(gold.clock, None)
    return as_written or _time(clock, clock["half"]) == _time(gold.clock, gold.clock["half"])


def _last_alone(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match, unless only "or", a comma or a dash separates it from another, or "not" precedes it."""
    found = list(pattern.finditer(text))
    if not found or re.search(r"(?:\bnot|n't)\s\Z", text[: found[-1].start()]):
        return None
    between = text[found[-2].end() : found[-1].start()] if len(found) > 1 else "is"
    return None if re.fullmatch(r"\W*(?:and|or|to|until)?\W*", between) else found[-1]


def _with_month_numbers(text: str) -> str:
    """`text` with 2021-6-5 for June 5, 2021, and 0-6-5 for June 5."""
    return _MONTH_AND_DAY.sub(_month_number, without_text(text))


def _month_number(match: re.Match[str]) -> str:
    month = _MONTHS.index((match["month"] or match["first"])[:3].casefold()) + 1
    return f"{match['year'] or 0}-{month}-{match['day'] or match['second']}"


def _day(match: re.Match[str]) -> tuple[int, list[int]]:
    """The year, 0 if there is none, and the month and the day, or both in the order written before a year."""
    first, *others = map(int, re.split("[-/.]", match[0]))
    return (first, others) if len(others) < 2 or others[1] < 100 else (others[1], [first, others[0], 0])


def _time(match: re.Match[str], half: str | None) -> tuple[int, int, int]:
    hour = int(match["hour"])
    if half and 1 <= hour <= 12:
        hour = hour % 12 + (12 if half in "pP" else 0)
    return hour, int(match["minute"]), int(match["second"] or 0)


def _is_prose(word: str) -> bool:
    return is_word(word) or word.casefold() in ("no", "yes") or (len(word) > 2 and not word.isascii())
