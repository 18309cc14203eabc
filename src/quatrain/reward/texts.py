r"""Judges answers that are words (`\text{even}`, Evelyn) or letters of a multiple choice (`\text{(C)}`).

Used by `reward/answers.py`, which passes texts in the notation of `reward/notation.py`.
"""

from __future__ import annotations

import re

from quatrain.reward.words import is_word

_MAX_WORDS = 3
_GROUP = re.compile(r"\\(?:text|textbf|textrm|textit|textnormal|mbox|mathrm|mathbf|emph)\s?\{([^{}]*)\}")
_LABEL = re.compile(r"\s*(?:\((?P<a>[A-J])\)|(?P<b>[A-J])(?:[).:](?=\s|\Z)|(?=\s*\.?\s*\Z)))[.:]?\s*")
# A letter that is no article, no variable and not one of several letters.
_ONE = (
    r"(?!\)?\s*(?:(?:/|&|or\b|and\b)\s*\(?[A-J](?![A-Za-z'])"
    r"|[,;]\s*(?:or\s|and\s)?\(?[A-J]\)?(?=\s*(?:[,.;]|\Z|and\b|or\b))))"
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
    rf"[\s.:#>-]*(?:(?:{_CHOICE}|(?i:answer))[\s:]{{1,3}})?(?:\((?P<a>[A-J])\)|(?P<b>[A-J])(?:[).:](?=\s|\Z)"
    rf"|(?=\s*[.!]?\s*\Z|{_RIGHT}|\s+-\s|,?\s+(?:because|since)\b))){_ONE}"
)
_CALLED_RIGHT = re.compile(rf"(?<![A-Za-z]){_LETTER}(?={_RIGHT})")
_BESIDE = re.compile(rf"\b{_CHOICE}[\s:]{{1,3}}{_LETTER}")
_LAST = re.compile(
    rf"(?:\b(?i:is|be|choose|chose|select|selected|pick|picked|so|hence|thus|therefore)[\s:,]{{1,3}}{_LETTER}"
    r"|(?<!or )(?<!and )(?<!, )\((?P<c>[A-J])\))[\s.!]*\Z"
)
_TAIL_CHARS = 300
_EMPHASIS = re.compile(r"[$*`\"]|\\[()\[\]]")
_IN_BRACKETS = re.compile(r"(?<![A-Za-z0-9])['\[{]([A-J])['\]}](?![A-Za-z0-9^_])")
_VERB = r"(?:\A|\b(?:is|are|was|answer)[\s:]{1,3}(?:an?\s|the\s)?|[:=]\s?)"


def without_text(text: str) -> str:
    r"""`text` with the content of each `\text{…}` in its place, without $ and emphasis, one space at most."""
    return " ".join(_IN_BRACKETS.sub(r"(\1)", _EMPHASIS.sub("", _GROUP.sub(r" \1 ", text))).split())


def split_label(text: str) -> tuple[str, str]:
    """The letter of a choice at the start of `text`, and the text after it: `(B) 5` gives B and 5."""
    text = without_text(text)
    match = _LABEL.match(text)
    return ((match["a"] or match["b"]), text[match.end() :]) if match else ("", text)


def choice_of(said: str) -> str:
    """The letter of a choice that the answer `said` chooses; empty if it chooses none, or several.

    It is the last letter after "answer is", or else the one at the start of the last line or of the answer,
    or else the one that is called right, stands beside "option" or ends the answer.
    """
    text = without_text(said)
    answered = _letters(_ANSWERED, text)
    if answered:
        return answered[-1]
    for line in (without_text(said.strip().rpartition("\n")[2]), text):
        if first := _FIRST.match(line):
            return first["a"] or first["b"]
    for pattern in (_CALLED_RIGHT, _BESIDE, _LAST):
        if letters := set(_letters(pattern, text[-_TAIL_CHARS:])):
            return letters.pop() if len(letters) == 1 else ""
    return ""


def _letters(pattern: re.Pattern[str], text: str) -> list[str]:
    return [next(filter(None, match.groups())) for match in pattern.finditer(text)]


def words_of(gold: str) -> list[str]:
    """The words of a gold answer that consists of words of prose; empty for another gold answer."""
    text = without_text(gold).strip(" .")
    words = text.split() if re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.'-])*", text) else []
    prose = [word for word in words if _is_prose(word.strip(",.'"))]
    return words if prose and all(len(word) > 2 or word in prose or word.islower() for word in words) else []


def is_short(words: list[str]) -> bool:
    """Whether words can be compared as text: a sentence says the same in too many ways."""
    return len(words) <= _MAX_WORDS


def same_words(said: str, words: list[str]) -> bool:
    """Whether `said` is these words, or a sentence that ends with "is" and these words."""
    said = without_text(said).strip(" .!\"'").casefold()[-300:]
    gold = re.escape(" ".join(words).strip(" .").casefold())
    return re.search(rf"{_VERB}{gold}\Z", said) is not None


def _is_prose(word: str) -> bool:
    return is_word(word) or word.casefold() in ("no", "yes") or (len(word) > 2 and not word.isascii())
