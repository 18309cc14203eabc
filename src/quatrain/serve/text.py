"""The text of a completion while its tokens come: only what later tokens cannot change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


class TextStream:
    """Tokens in, text out, without special tokens; the text ends before the first of the `stop` strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._sent = 0

    def push(self, tokens: Sequence[int], *, finished: bool) -> str:
        """The text that is certain since the last call."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            text = text[: min(ends)]
        elif not finished:
            text = self._certain(text.rstrip(REPLACEMENT))
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _certain(self, text: str) -> str:
        """`text` without what may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return text[:-size]
        return text
