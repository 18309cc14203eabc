"""Tokens with all that is known of each: what carries them from decoding to the batch that is trained on.

Data flow: the engine, or an inference server, makes `Piece`s -> `append` joins those of a sequence ->
`Completion` -> `rollout_batch`. Whatever else is known of tokens is a column: the file that makes it and the
file that reads it know its name, and nothing between them does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quatrain.types.batches import brief
from quatrain.types.pictures import PICTURES

GIVEN = -1
"""The version of a token that the policy did not sample: an environment, a template or a client wrote it."""
Column = list[np.ndarray]
Columns = dict[str, Column]


class Mark(NamedTuple):
    """How much of a piece there was: tokens, and arrays of each column."""

    tokens: int = 0
    parts: Mapping[str, int] = {}


NOTHING = Mark()
"""The mark of a piece that is empty."""


@dataclass
class Piece:
    """Tokens that follow one another, each with its log-probability and the version of the sampling weights.

    A token that the policy did not sample has version GIVEN and log-probability 0. It is not in the
    completion mask and is not trained on.

    A column has arrays [tokens, ..] that follow one another, one row for each token of the sequence from the
    first of the prompt on, whoever wrote it. It may end before the tokens do: what is known of a token once
    it was an input (`routes`) is not known of the last. So rows are not those of `tokens`; pieces that
    follow one another have columns that do, and a piece that loses tokens at its end loses as many rows.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    columns: Columns = field(default_factory=dict, compare=False)
    num_given: int = 0
    """How many of the tokens the policy did not sample: counted, as each decode call asks for it."""

    __repr__ = brief

    @classmethod
    def given(cls, tokens: Sequence[int], columns: Mapping[str, Column] | None = None) -> Piece:
        """Tokens that the policy did not sample."""
        count = len(tokens)
        return Piece([*tokens], [0.0] * count, [GIVEN] * count, dict(columns or {}), count)

    @property
    def num_sampled(self) -> int:
        """How many of the tokens the policy sampled."""
        return len(self.tokens) - self.num_given

    def append(self, other: Piece, first: int | None = None) -> None:
        """Add `other` at the end.

        Its columns follow those of this piece, or begin with token `first` of the sequence; then tokens whose
        rows are known keep them, and a column that would leave a gap is left out.
        """
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.num_given += other.num_given
        for name, parts in other.columns.items():
            if first is None:
                self.columns.setdefault(name, []).extend(parts)
            elif first <= self.known(name):
                self.record(name, first, *parts)

    @property
    def mark(self) -> Mark:
        """How much there is now, for `since`."""
        return Mark(len(self.tokens), {name: len(parts) for name, parts in self.columns.items()})

    def since(self, mark: Mark) -> Piece:
        """What was added since `mark`; it shares the arrays of columns."""
        new = slice(mark.tokens, None)
        columns = {name: parts[mark.parts.get(name, 0) :] for name, parts in self.columns.items()}
        versions = self.versions[new]
        return Piece(self.tokens[new], self.logprobs[new], versions, columns, versions.count(GIVEN))

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`, and as many rows of each column."""
        # That column may end earlier than the tokens; a sampler, which alone cuts, never has it.
        assert PICTURES not in self.columns, "turns are cut before they are added to what has pictures"
        for parts in self.columns.values():
            left = len(self.tokens) - length
            while left > 0 and parts:
                kept = len(parts[-1]) - left
                left -= len(parts[-1])
                parts[-1:] = [parts[-1][:kept]] if kept > 0 else []
        self.num_given -= self.versions[length:].count(GIVEN)
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]

    def known(self, name: str) -> int:
        """How many tokens of the sequence have a row in the column."""
        return sum(map(len, self.columns.get(name, ())))

    def record(self, name: str, first: int, *parts: np.ndarray) -> None:
        """Append `parts` to a column, whose rows are of the sequence's tokens from number `first` on.

        Tokens with a row keep it: it is that of the pass from which what follows them was drawn.
        """
        known = self.known(name)
        assert first <= known or not parts, f"{name} from token {first} leave a gap after {known}"
        new = rows_between(parts, known - first, sum(map(len, parts)))
        if new:
            self.columns.setdefault(name, []).extend(new)

    def rows(self, name: str, first: int, end: int) -> Column:
        """Of a column, the rows of the sequence's tokens from `first` to `end`; fewer if it ends before."""
        return rows_between(self.columns.get(name, ()), first, end)


def rows_between(parts: Sequence[np.ndarray], first: int, end: int) -> Column:
    """Of `parts`, the first of which begins with token 0, those of the tokens from `first` to `end`."""
    found, begin = [], 0
    for part in parts:
        if len(kept := part[max(first - begin, 0) : max(end - begin, 0)]):
            found.append(kept)
        begin += len(part)
    return found
