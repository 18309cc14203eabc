"""Stop strings: finds the token of a turn that completes one, without decoding the whole turn in each round.

Called by `session.py` for the completions that a round has extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quatrain.types.rollouts import Completion

SLACK = 16
"""Characters of a tail beyond those of the longest stop string: its first ones depend on tokens before it."""
INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


def cut_at_stop_strings(
    tokenizer: Any, completions: Sequence[tuple[Completion, tuple[str, ...]]]
) -> list[Completion]:
    """Truncates each completion after the token that completes one of its stop strings; those truncated.

    The text of the last turn counts, special tokens included. Only its tail (`Completion.tail`) is decoded,
    and all of it where the tail has a stop string.
    """
    texts = tokenizer.batch_decode([completion.tokens[completion.tail :] for completion, _ in completions])
    cut = []
    for (completion, strings), text in zip(completions, texts, strict=True):
        if _has(text, strings) and _has(tokenizer.decode(completion.last_turn), strings):
            turn = completion.last_turn
            length = len(turn)
            while length > 1 and _has(tokenizer.decode(turn[: length - 1]), strings):
                length -= 1
            completion.cut(completion.turns[-1] + length)
            cut.append(completion)
        else:
            _shorten_tail(tokenizer, completion, text, max(map(len, strings)))
    return cut


def _has(text: str, strings: tuple[str, ...]) -> bool:
    return any(string in text for string in strings)


def _shorten_tail(tokenizer: Any, completion: Completion, text: str, longest: int) -> None:
    """Drops the first half of the tail, whose text is `text`, if later stop strings cannot begin there.

    The other half must be longer than the `longest` stop string and have the same text without the first,
    which it has not if it begins within a character. Bytes at the end that are no character yet may belong
    to a run of bytes that is decoded as a whole, so the tail is then kept.
    """
    enough = longest + SLACK
    if len(text) < 3 * enough or text.endswith(INCOMPLETE):
        return
    middle = (completion.tail + len(completion.tokens)) // 2
    rest = tokenizer.decode(completion.tokens[middle:])
    if len(rest) >= enough and text.endswith(rest):
        completion.tail = middle
