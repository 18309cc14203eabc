"""The text of an answer, given its tokens: without special tokens, but for the markers of calls, and without
thoughts that special tokens mark.

Data flow: tokens that were sampled -> `AnswerTokens.text` -> reward functions and environments; in parts,
from `serve/text.py` -> `Channels` -> thoughts and text, for `quatrain serve`. The text of a call stays as the
model writes it, for `data/tool_calls.py`.

| thoughts | models | |
|---|---|---|
| `<|channel|>analysis<|message|>…<|end|>` | gpt-oss (Harmony) | left out, as headers of messages are |
| `[THINK]…[/THINK]`, `<|channel>thought…<channel|>` | Magistral and Ministral 3, Gemma 4 | left out |
| `<think>…</think>` | most others | part of the text |

Markers are told from the same letters in a text by their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quatrain.types.call_forms import MARKERS

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HARMONY = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"})
_PAIRS = (("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""What begins and ends thoughts; after that of Gemma 4 stands a line with the name of the channel."""
_IN_TEXT = frozenset({"<think>", "</think>", *MARKERS})
CONTEXT = 64
"""Tokens before an answer that may begin it: the header of its message, or of its thoughts."""
_RECIPIENT, _CHANNEL = re.compile(r"\bto=([^\s<]+)"), re.compile(r"<\|channel\|>\s*(\w*)")
_PEOPLE = ("user", "assistant", "all")


class Marker(str):
    """The text of a token that is a marker."""

    __slots__ = ()


class Said(NamedTuple):
    """Parts of an answer: its thoughts, and its text, in which calls are."""

    thoughts: str = ""
    text: str = ""


class AnswerTokens:
    """Which tokens of a tokenizer are markers in an answer, and the text of an answer.

    `markers` are the texts of those that are no plain text, by their ids.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        names = {token.content for token in added.values()}
        self.is_harmony = {START, CHANNEL, MESSAGE} <= names
        self.pair = next((pair for pair in _PAIRS if names.issuperset(pair)), None)
        hidden = _HARMONY if self.is_harmony else frozenset(self.pair or ())
        self.markers: dict[int, Marker] = {
            index: Marker(token.content)
            for index, token in added.items()
            if token.content in hidden or (token.special and token.content in _IN_TEXT)
        }

    def text(self, tokens: Sequence[int], context: Sequence[int] = ()) -> str:
        """The text of a whole answer; `context` are the tokens before it, or the last CONTEXT of them."""
        if not self.markers:
            return self._decode(tokens)
        channels = Channels(self, context)
        return channels.push(self.pieces(tokens)).text + channels.end().text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The markers in order, and the texts between them without other special tokens."""
        pieces: list[str] = []
        begin = 0
        for at, token in enumerate(tokens):
            if (marker := self.markers.get(int(token))) is not None:
                pieces += [self._decode(tokens[begin:at]), marker]
                begin = at + 1
        return [*pieces, self._decode(tokens[begin:])]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True) if len(tokens) else ""
        return text


class Channels:
    """Tells the thoughts in an answer from its text, piece by piece; `context` as in `AnswerTokens.text`.

    In Harmony, the text has the messages of the channel `final` and of others that the user reads, without
    headers, and whole messages to a function, which are calls. What a message is, its header says; so the
    header is kept until `<|message|>`.
    """

    def __init__(self, tokens: AnswerTokens, context: Sequence[int] = ()):
        self._is_harmony, self._pair = tokens.is_harmony, tokens.pair
        self._kind = "text"
        self._header: str | None = None
        self._spoken = {"thoughts": False, "text": False}
        """Whether there was any, so that another message of the kind begins a paragraph."""
        self._is_anew = False
        self._begun = ""
        """What the prompt has begun of a call."""
        if tokens.markers and len(context):
            self._resume(tokens.pieces(context[-CONTEXT:]))
        self._given = len(self._header or "")

    @property
    def is_thinking(self) -> bool:
        """Whether further text is a thought."""
        return self._kind == "thoughts"

    @property
    def may_think(self) -> bool:
        """Whether further text may be a thought."""
        return self._is_harmony or self._pair is not None

    def _resume(self, pieces: Sequence[str]) -> None:
        """Takes up what the prompt has begun: in Harmony its last message, else thoughts at its very end."""
        openings = (START,) if self._is_harmony else (self._pair or ())
        places = [at for at, piece in enumerate(pieces) if isinstance(piece, Marker) and piece in openings]
        last = places[-1] if places else len(pieces)
        rest = "".join(pieces[last + 1 :]).strip()
        if self._is_harmony or rest in ("", "thought"):  # a question may hold the letters of a marker
            begun = self.push(pieces[last:])
            self._begun = begun.text if self._kind == "call" else ""
        self._spoken, self._is_anew = {"thoughts": False, "text": False}, False

    def push(self, pieces: Sequence[str]) -> Said:
        """What further pieces say."""
        said, self._begun = [Said(text=self._begun)], ""
        for piece in pieces:
            if not isinstance(piece, Marker):
                said.append(self._text(piece))
            elif self._is_harmony and piece in _HARMONY:
                said.append(self._of_harmony(piece))
            elif self._pair is not None and piece in self._pair:
                said.append(self.end())
                self._kind = "thoughts" if piece == self._pair[0] else "text"
                self._header, self._given = "" if piece == _PAIRS[1][0] else None, 0
                self._is_anew = piece == self._pair[0]
            else:
                said.append(self._text(piece))
        return Said("".join(each.thoughts for each in said), "".join(each.text for each in said))

    def end(self) -> Said:
        """What the answer says at its end: a text that began where a header should have."""
        header, self._header = self._header, None
        rest = "" if header is None else header[self._given :]
        if not self._is_harmony:
            return Said(thoughts="" if rest.strip() == "thought" else rest)
        return Said() if CHANNEL in rest or _RECIPIENT.search(rest) else Said(text=rest)

    def _text(self, text: str) -> Said:
        if self._header is not None:
            self._header += text
            if self._is_harmony or "\n" not in self._header:
                return Said()
            text, self._header = self._header.partition("\n")[2], None  # Gemma 4: the channel's name
        if not text:
            return Said()
        shown = "thoughts" if self._kind == "thoughts" else "text"
        if self._is_anew and self._spoken[shown] and self._kind != "call":
            text = f"\n\n{text}"
        self._is_anew, self._spoken[shown] = False, True
        return Said(thoughts=text) if shown == "thoughts" else Said(text=text)

    def _of_harmony(self, marker: str) -> Said:
        if marker == START:
            self._header, self._given = marker, 0
        elif marker == CHANNEL and self._header is None:
            self._header, self._given = f"{START}assistant{marker}", 0
        elif marker == MESSAGE:
            header, self._header = self._header or f"{START}assistant", None
            self._kind, self._is_anew = _kind_of(header), True
            return self._text(header + marker) if self._kind == "call" else Said()
        elif self._header is not None and marker in (CHANNEL, "<|constrain|>"):
            self._header += marker
        elif self._header is not None:  # the message ends in its header
            return self.end()
        else:
            is_closed = self._kind == "call" and marker != "<|return|>"
            closing = self._text(marker) if is_closed else Said()
            self._kind = "text"
            return closing
        return Said()


def _kind_of(header: str) -> str:
    """What a message of Harmony with this header is: a call, thoughts or text for the user."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient and recipient[1] not in _PEOPLE:
        return "call"
    return "thoughts" if channel and channel[1] == "analysis" else "text"
