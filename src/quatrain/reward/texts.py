r"""Judges answers that are words (`\text{even}`, Evelyn) or letters of a multiple choice (`\text{(C)}`).

Used by `reward/answers.py`, which passes texts in the notation of `reward/notation.py`.
"""

from __future__ import annotations

import re

from quatrain.reward.words import is_word

_MAX_WORDS = 3
_GROUP = re.compile(r"\\(?:text|textbf|textrm|textit|textnormal|mbox|mathrm|mathbf|emph)\s?\{([^{}]*)\}")
_LABEL = re.compile(r"\s*(?:\((?P<a>[A-J])\)|(?P<b>[A-J])(?:[).:](?=\s|\Z)|(?=\s*\.?\s*\Z)))[.:]?\s*")
_LAST_LABEL = re.compile(r"(?:\(([A-J])\)|\b(?:is|option|choice|answer)[\s:*]{1,4}([A-J]))[\s.*]*\Z")
_EMPHASIS = re.compile(r"[$*]|\\[()\[\]]")
_VERB = r"(?:\A|\b(?:is|are|was|answer)[\s:]{1,3}(?:an?\s|the\s)?|[:=]\s?)"


def without_text(text: str) -> str:
    r"""`text` with the content of each `\text{…}` in its place, without $ and emphasis, one space at most."""
    return " ".join(_EMPHASIS.sub("", _GROUP.sub(r" \1 ", text)).split())


def split_label(text: str) -> tuple[str, str]:
    """The letter of a choice at the start of `text`, and the text after it: `(B) 5` gives B and 5."""
    text = without_text(text)
    match = _LABEL.match(text)
    return ((match["a"] or match["b"]), text[match.end() :]) if match else ("", text)


def choice_of(said: str) -> str:
    """The letter of a choice that the answer `said` chooses; empty if it chooses none."""
    letter, _ = split_label(said)
    last = _LAST_LABEL.search(without_text(said)[-100:])
    return letter or ((last[1] or last[2]) if last else "")


def same_label(said: str, label: str) -> bool:
    """Whether the answer `said` chooses the letter `label`, at its start or at the end of a sentence."""
    letter, _ = split_label(said)
    last = _LAST_LABEL.search(without_text(said)[-100:])
    return letter == label or (not letter and last is not None and (last[1] or last[2]) == label)


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
    said = without_text(said).strip(" .\"'").casefold()[-300:]
    gold = re.escape(" ".join(words).strip(" .").casefold())
    return re.search(rf"{_VERB}{gold}\Z", said) is not None


def _is_prose(word: str) -> bool:
    return is_word(word) or word.casefold() in ("no", "yes") or (len(word) > 2 and not word.isascii())
