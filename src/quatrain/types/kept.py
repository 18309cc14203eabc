"""The words that each token was drawn from, where filters or a grammar left some out.

Data flow: the engine, or an inference server, records sets with the tokens -> the column KEPT of `Piece` ->
`RolloutBatch.kept` -> every pass of the policy and its reference over the batch, whose log-probabilities are
those over the same words (`ops/kept_words.py`).

A set is an int32 array of different words, or a uint32 array with a bit for each word of the vocabulary, in
the form of `ops.kept_words`; None stands for all words. A row of the column is the set of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

KEPT = "kept"
"""The name of the column."""
NO_MASK = -1
"""In the place of a mask's number, of a token that has none."""


def all_words(tokens: int) -> np.ndarray:
    """[tokens] object: rows of a column, of tokens that were drawn from all words, or not drawn."""
    return np.full(tokens, None, object)


def listed_rows(words: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[T] object: rows of a column, from `words` [T, K] int32 of which the first `counts` [T] are kept."""
    rows = all_words(len(counts))
    for number, count in enumerate(counts.tolist()):
        # A copy: a view would keep the array of a whole decode call as long as the sample lives.
        rows[number] = words[number, :count].copy()
    return rows


class KeptRow(NamedTuple):
    """The sets of the T tokens of one sequence, of which the last may have none."""

    counts: np.ndarray  # [T] uint16, as in `KeptSets`
    words: np.ndarray  # [M] int32
    mask_ids: np.ndarray  # [T] int32, numbers among `masks`
    masks: Sequence[np.ndarray]  # [ceil(V / 32)] uint32 each

    @classmethod
    def of(cls, parts: Iterable[np.ndarray]) -> KeptRow:
        """Of the arrays of a column."""
        sets = [each for part in parts for each in part]
        numbers: dict[int, int] = {}  # by identity: tokens of a grammar share the arrays of equal masks
        masks: list[np.ndarray] = []
        counts, mask_ids = np.zeros(len(sets), np.uint16), np.full(len(sets), NO_MASK, np.int32)
        words = [np.zeros(0, np.int32)]
        for place, each in enumerate(sets):
            if each is None:
                continue
            if each.dtype == np.uint32:
                if id(each) not in numbers:
                    numbers[id(each)] = len(masks)
                    masks.append(each)
                mask_ids[place] = numbers[id(each)]
            else:
                counts[place] = len(each)
                words.append(each)
        return cls(counts, np.concatenate(words), mask_ids, masks)

    @property
    def column(self) -> np.ndarray:
        """[T] object: the inverse of `of`."""
        rows, ends = all_words(len(self.counts)), np.cumsum(self.counts, dtype=np.int64)
        for place in np.flatnonzero(self.counts):
            rows[place] = self.words[ends[place] - self.counts[place] : ends[place]]
        for place in np.flatnonzero(self.mask_ids != NO_MASK):
            rows[place] = self.masks[self.mask_ids[place]]
        return rows


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The sets of B sequences of T tokens each.

    `words` are those of all tokens with a list, one list behind another in the order of `counts`.
    """

    counts: np.ndarray
    """[B, T] uint16: how many words the token has in the list; 0: it has none."""
    words: np.ndarray
    """[M] int32, M the sum of `counts`."""
    mask_ids: np.ndarray
    """[B, T] int32: the number of its mask, or NO_MASK. A token without list and mask has all words."""
    masks: np.ndarray
    """[U, ceil(V / 32)] uint32, different ones."""

    @classmethod
    def stacked(cls, rows: Sequence[KeptRow | None], width: int) -> KeptSets | None:
        """[B, width]; None if no token has a set. Tokens behind `width` have none."""
        shape = len(rows), width
        counts, mask_ids = np.zeros(shape, np.uint16), np.full(shape, NO_MASK, np.int32)
        numbers: dict[bytes, int] = {}
        words, masks = [np.zeros(0, np.int32)], list[np.ndarray]()
        for number, row in enumerate(rows):
            if row is None:
                continue
            known = slice(0, min(len(row.counts), width))
            counts[number, known] = row.counts[known]
            words.append(row.words[: int(row.counts[known].sum(dtype=np.int64))])
            for mask, content in enumerate(row.masks):
                here = numbers.setdefault(content.tobytes(), len(masks))
                if here == len(masks):
                    masks.append(content)
                mask_ids[number, known][row.mask_ids[known] == mask] = here
        if not counts.any() and not masks:
            return None
        table = np.stack(masks) if masks else np.zeros((0, 0), np.uint32)
        return cls(counts, np.concatenate(words), mask_ids, table)

    @cached_property
    def _starts(self) -> np.ndarray:
        """[B, T] int64: where each token's list begins."""
        ends = np.cumsum(self.counts, dtype=np.int64).reshape(self.counts.shape)
        return ends - self.counts

    def row(self, number: int) -> KeptRow:
        """Those of one sequence."""
        counts = self.counts[number]
        first = int(self._starts[number, 0]) if len(counts) else 0
        words = self.words[first : first + int(counts.sum(dtype=np.int64))]
        used, mask_ids = np.unique(self.mask_ids[number], return_inverse=True)
        shift = int(bool(len(used)) and used[0] == NO_MASK)
        masks = [self.masks[mask] for mask in used[shift:]]
        return KeptRow(counts, words, (mask_ids - shift).astype(np.int32), masks)

    def take(self, rows: np.ndarray) -> KeptSets:
        """Those of some sequences; all masks stay."""
        parts = [self.words[:0], *(self.row(number).words for number in rows.tolist())]
        return KeptSets(self.counts[rows], np.concatenate(parts), self.mask_ids[rows], self.masks)

    def only(self, wanted: np.ndarray) -> KeptSets:
        """Those of the `wanted` [B, T] tokens; others have all words."""
        counts = self.counts.reshape(-1)
        words = self.words[np.repeat(wanted.reshape(-1), counts)]
        mask_ids = np.where(wanted, self.mask_ids, NO_MASK).astype(np.int32)
        return KeptSets(np.where(wanted, self.counts, 0).astype(np.uint16), words, mask_ids, self.masks)

    def listed(self, row: int, places: np.ndarray, width: int) -> np.ndarray:
        """[n, width] int32: the lists of the tokens at `places` of a sequence, filled up with -1."""
        offsets = np.arange(width)
        known = offsets < self.counts[row, places][:, None]
        found = np.full(known.shape, -1, np.int32)
        found[known] = self.words[(self._starts[row, places][:, None] + offsets)[known]]
        return found

    @property
    def has_set(self) -> np.ndarray:
        """[B, T] bool: which tokens have a list or a mask."""
        return (self.counts > 0) | (self.mask_ids != NO_MASK)

    def problem(self, input_ids: np.ndarray, sampled: np.ndarray) -> str | None:
        """What is wrong with the sets of the tokens `input_ids` [B, T], of which some were `sampled`."""
        counts, flat = self.counts.reshape(-1), input_ids.reshape(-1)
        if self.counts.shape != input_ids.shape or self.mask_ids.shape != input_ids.shape:
            return f"sets of tokens [{input_ids.shape[0]}, {input_ids.shape[1]}]; got {self.counts.shape}"
        if len(self.words) != counts.sum(dtype=np.int64):
            return f"as many words as the counts say; got {len(self.words)}"
        if (self.has_set & ~sampled).any():
            return "sets of sampled tokens alone; got one of another"
        if ((self.counts > 0) & (self.mask_ids != NO_MASK)).any() or (self.mask_ids >= len(self.masks)).any():
            return "a list or one of the masks for each token; got both, or another mask"
        lists = np.flatnonzero(counts)
        if len(lists):
            same = self.words == np.repeat(flat[lists], counts[lists])
            times = np.add.reduceat(same, self._starts.reshape(-1)[lists], dtype=np.int64)
            if (times != 1).any():
                return f"each sampled token once in its set; got {int((times != 1).sum())} that are not"
        if (masked := np.flatnonzero(self.mask_ids.reshape(-1) != NO_MASK)).size:
            tokens, numbers = flat[masked], self.mask_ids.reshape(-1)[masked]
            if tokens.max() // 32 >= self.masks.shape[1]:
                return "masks with a bit for each word; got fewer"
            outside = (self.masks[numbers, tokens // 32] >> (tokens % 32).astype(np.uint32)) & 1 == 0
            if outside.any():
                return f"each sampled token in its set; got {int(outside.sum())} that are not"
        return None

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError for sets of another vocabulary than one of so many words."""
        found = int(self.words.max(initial=-1)), int(self.words.min(initial=0))
        if found[0] >= size or found[1] < 0 or (len(self.masks) and self.masks.shape[1] != -(-size // 32)):
            raise ValueError(
                f"the words that tokens were drawn from must be ids from 0 to {size - 1}, as the model has; "
                f"got ids from {found[1]} to {found[0]} and masks of {32 * self.masks.shape[1]} words; let a "
                "sampler of this model record them"
            )


def plain_kept(row: KeptRow) -> dict[str, Any]:
    """As values of JSON and arrays, of which other processes are told."""
    return {**row._asdict(), "masks": [*row.masks]}


def kept_of_plain(values: Mapping[str, Any]) -> KeptRow:
    """The inverse of `plain_kept`."""
    return KeptRow(**values)
