r"""Finds the answer in a completion: the content of its `<answer>` tags, and of the `\boxed` in it.

Used by `answers.py`.
"""

from __future__ import annotations

import re

_OPEN, _CLOSE, _THOUGHTS_END = "<answer>", "</answer>", "</think>"
_TEXT = re.compile(r"[^\s\ufffd]")  # U+FFFD is a part of a character
_BOX = re.compile(r"\\(?:f?boxed|f(?:rame)?box)\s*\{")
# A box without braces holds what follows up to white space, and not the end of the sentence.
_BARE_BOX = re.compile(
    r"\\f?boxed(?:\s+|(?=[0-9\\]))((?:\\[A-Za-z]+(?:\{[^{}$]{0,80}\}){1,2}|[^\s{}$]){1,80}?)(?=[.,;:!?)]*(?:[\s$]|\\[)\]]|\Z))"
)
# Markdown's > at the start of a quoted line, and its _ and __ for emphasis.
_QUOTE = re.compile(r"(\A|\n)[ \t]{0,3}(?:>[ \t]?){1,4}(?=[^\s=])")
_UNDERLINED = re.compile(r"(?<![\w}\\)])(_{1,2})(?=[^\s_{])([^_\n]{1,200})(?<=\S)\1(?!\w)")
# A brace after a backslash is a literal brace and does not delimit a group: \{1, 2\} is a set.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MAX_BOXES = 20
_MAX_GAP = 60
# The text between two boxes that form one list: nothing, or "and", "or" or a comma, with $ and names (y_2 =).
_GAP = re.compile(
    r"[ $]*|(?:[\s$]|\\[()\[\]]|\\q?quad)*(?:[,;]|,?\s?(?:\\text\s?\{\s?)?(?:and|or)\b\s?\}?)"
    r"(?:[\s$]|\\[()\[\]]|\\q?quad)*(?:[A-Za-z](?:_\{?[0-9]\}?)?\s?=\s?)?"
)


def answer_of(completion: str) -> tuple[str, bool]:
    r"""The answer in `completion`, and whether it was in a `\boxed`.

    It is looked for after the last `</think>`, if there is text beside the tags of an answer. The answer is
    the content of the last `<answer>…</answer>`, or else the whole text; if that contains a `\boxed{…}`, the
    answer is the content of the last one. Several boxes with nothing, "and", "or" or a comma between them are
    one list.
    """
    after_thoughts = completion.rpartition(_THOUGHTS_END)[2]
    if _TEXT.search(after_thoughts.replace(_OPEN, "").replace(_CLOSE, "")):
        completion = after_thoughts
    end = completion.rfind(_CLOSE)
    start = completion.rfind(_OPEN, 0, max(end, 0))
    answer = completion[start + len(_OPEN) : end] if start >= 0 else completion
    boxed = unboxed(answer)
    return (answer, False) if boxed is None else (boxed, True)


def without_markdown(text: str) -> str:
    """`text` without the > of quoted lines, and the _ of emphasis."""
    return _QUOTE.sub(r"\1", _UNDERLINED.sub(r"\2", text))


def unboxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` in `text`; None if there is none or its brace is not closed."""
    start = max(map(text.rfind, ("\\boxed", "\\fbox", "\\framebox")))
    last = _content(text, start)
    if last is None:
        return None
    contents = [last[0]]
    while len(contents) < _MAX_BOXES:
        earlier = text.rfind("\\boxed", 0, start)
        box = _content(text[:start], earlier)
        if box is None or start - box[1] > _MAX_GAP or not _GAP.fullmatch(text, box[1], start):
            break
        contents.append(box[0])
        start = earlier
    return ", ".join(dict.fromkeys(reversed(contents)))


def _content(text: str, start: int) -> tuple[str, int] | None:
    """The content of the box that begins at `start`, and the position after its closing brace."""
    bare = _BARE_BOX.match(text, start) if start >= 0 else None
    if bare:
        return bare[1], bare.end()
    opened = _BOX.match(text, start) if start >= 0 else None
    depth = 1
    for brace in _BRACE.finditer(text, opened.end()) if opened else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if opened and not depth:
            return text[opened.end() : brace.start()], brace.end()
    return None
