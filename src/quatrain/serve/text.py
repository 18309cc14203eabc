"""The text of tokens: what is certain of a completion while its tokens come, and what each token adds to it.

Data flow: `Progress.tokens` -> `TextStream.push` -> the text of an answer; -> `TokenTexts.push` -> names,
bytes and offsets, for its log-probabilities.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from quatrain.types.answer_text import Marker, Said
from quatrain.types.call_forms import THOUGHT, THOUGHT_END

_NO_MARKERS: Mapping[int, Marker] = MappingProxyType({})
REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""
MOST_PENDING = 4
"""Tokens after which bytes that are no character will not become one: it has at most 4 bytes."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte for which each character stands in vocabularies of GPT-2's kind."""


class TextStream:
    """Tokens in, text out, without special tokens; the text ends before the first of the `stop` strings.

    Each push decodes the new tokens after those of the push before, so that a whole completion takes time in
    proportion to its length. `length` is the number of characters returned so far; `ended_by` the stop string
    that came, if one did. `markers` are special tokens that stay (`AnswerTokens.markers`).
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], markers: Mapping[int, Marker] = _NO_MARKERS):
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._stop, self._markers = tuple(stop), markers
        self._context: list[int] = []
        self._new: list[int] = []
        self._held = ""
        self.length = 0
        self.ended_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self.ended_by is not None

    def pieces(self, tokens: Sequence[int], *, finished: bool) -> list[str]:
        """The markers since the last call, and the texts between them that are certain."""
        pieces: list[str] = []
        begin = 0
        for at, marker in ((at, self._markers.get(token)) for at, token in enumerate(tokens)):
            if marker is not None and not self.stopped:
                pieces.append(self.push(tokens[begin:at], finished=True))
                self._context, self._new, begin = [], [], at + 1
                self.ended_by = self.ended_by or next((stop for stop in self._stop if stop in marker), None)
                if not self.stopped:
                    pieces.append(marker)
                    self.length += len(marker)
        return [*pieces, self.push(tokens[begin:], finished=finished)]

    def push(self, tokens: Sequence[int], *, finished: bool) -> str:
        """The text that is certain since the last call, of tokens without markers."""
        if self.stopped:
            return ""
        text = self._held + self._decoded(tokens, finished)
        # Of two that begin at one place, the first that was asked for.
        ends = [(place, number) for number, stop in enumerate(self._stop) if (place := text.find(stop)) >= 0]
        if ends:
            end, number = min(ends)
            certain, self.ended_by = text[:end], self._stop[number]
        else:
            certain = text if finished else self._certain(text)
        self._held = text[len(certain) :]
        self.length += len(certain)
        return certain

    def _decoded(self, tokens: Sequence[int], finished: bool) -> str:
        """The text that became certain; tokens whose bytes are no character yet wait for the next call."""
        self._new += tokens
        before, window = self._decode(self._context), self._context + self._new
        text = self._decode(window)
        for pending in range(min(len(self._new), MOST_PENDING + 1)):
            part: str = self._decode(window[:-pending]) if pending else text
            is_whole = finished or not part.endswith(REPLACEMENT)
            if is_whole or (pending == MOST_PENDING and text.startswith(part)):
                count = len(self._new) - pending
                if len(part) > len(before) or not self._context:
                    self._context = self._new[:count]
                del self._new[:count]
                return part[len(before) :]
        return ""

    def _certain(self, text: str) -> str:
        """`text` without what may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return text[:-size]
        return text


class ThoughtStream:
    """Text in, thoughts and text out: the thoughts with which an answer begins, up to the first `</think>`.

    They begin at `<think>`, or with the answer if the prompt has written it (`begun`). White space around
    both is left out, but for that at the end of the text.
    """

    def __init__(self, *, begun: bool = False):
        self._begun, self._held = begun, ""
        self._is_in: Literal["opening", "thoughts", "text"] = "opening"
        self._is_first = True
        """Whether no thought, or no text after thoughts, has come."""

    @property
    def never_closed(self) -> bool:
        """Whether the prompt has begun thoughts that have not ended, so that their calls are calls."""
        return self._begun and self._is_in != "text"

    @property
    def is_thinking(self) -> bool:
        """Whether further text is a thought."""
        return self._is_in == "thoughts" or (self._begun and self._is_in == "opening")

    @property
    def may_think(self) -> bool:
        """Whether further text may be a thought."""
        return self._is_in != "text"

    def push(self, text: str) -> Said:
        """What became certain."""
        text, self._held = self._held + text, ""
        thoughts = ""
        if self._is_in == "opening":
            start = text.lstrip()
            if THOUGHT.startswith(start):
                self._held = text
                return Said()
            opened = start.startswith(THOUGHT)
            self._is_in = "thoughts" if opened or self._begun else "text"
            self._is_first = self._is_in == "thoughts"
            text = start.removeprefix(THOUGHT) if self._is_in == "thoughts" else text
        if self._is_in == "thoughts":
            thought, closed, rest = text.partition(THOUGHT_END)
            kept = _without_part_of(THOUGHT_END, thought) if not closed else thought
            thoughts = self._begins(kept).rstrip()
            if not closed:
                self._held = self._begins(text)[len(thoughts) :]
            self._is_first = self._is_first and not thoughts
            if not closed:
                return Said(thoughts)
            self._is_in, self._is_first, text = "text", True, rest
        text = self._begins(text)
        self._is_first = self._is_first and not text
        return Said(thoughts, text)

    def end(self) -> Said:
        """What is left at the end of the answer."""
        held, self._held = self._held, ""
        if self._is_in == "opening" and not self._begun:
            return Said(text=held)
        return Said(thoughts=held.rstrip() if held.strip() else "")

    def _begins(self, text: str) -> str:
        return text.lstrip() if self._is_first else text


def _without_part_of(tag: str, text: str) -> str:
    """`text` without the beginning of `tag` with which it ends."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((text[:-size] for size in sizes if tag.startswith(text[-size:])), text)


class Vocabulary:
    """What a token of `tokenizer` is by itself; `first` if no text comes before it.

    Some tokenizers write no space before the first word of a text. `markers` as in `TextStream`.
    """

    def __init__(self, tokenizer: Any, markers: Mapping[int, Marker] = _NO_MARKERS):
        self._tokenizer, self.markers = tokenizer, markers
        self._before = tokenizer.encode("a", add_special_tokens=False)
        self.bytes_of, self.name = cache(self._bytes_of), cache(self._name)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _bytes_of(self, token: int, first: bool) -> bytes:
        """The bytes that a token adds to a text, perhaps part of a character; none if it is special."""
        if token in self.markers:
            return self.markers[token].encode()
        before = [] if first else self._before
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        text: str = decode([*before, token])[len(decode(before)) :]
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes.fromhex(byte[1])
        return bytes(map(BYTE_LEVEL.__getitem__, piece)) if BYTE_LEVEL.keys() >= set(piece) else text.encode()

    def _name(self, token: int, first: bool) -> str:
        r"""The text of a token, of a special one too; of a part of a character `bytes:\xf0\x9f`."""
        raw: bytes = self.bytes_of(token, first)
        try:
            return raw.decode() or self._tokenizer.decode([token])
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenText(NamedTuple):
    """A token's name, its bytes, and the characters of the whole text before it and up to its end."""

    name: str
    bytes: bytes
    start: int
    end: int


class TokenTexts:
    """The texts of the tokens of one completion, one after the other."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first, self._end = True, 0

    def push(self, token: int) -> TokenText:
        """The next token; one that continues a character starts where that character does."""
        name, raw = self._vocabulary.name(token, self._first), self._vocabulary.bytes_of(token, self._first)
        if raw and raw[0] & 0xC0 != 0x80:  # it begins a character, so one that is not whole stays broken
            self._end += len(self._utf8.decode(b"", final=True))
        start, self._end = self._end, self._end + len(self._utf8.decode(raw))
        self._first = token in self._vocabulary.markers or (self._first and not raw)
        return TokenText(name, raw, start, self._end)
