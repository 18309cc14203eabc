"""Packed buffers as forests: nodes of tokens, each after the prefixes that it continues.

Data flow: segment and branch ids, on the host -> nodes -> sequences in rows of their own
(`attention/unpacking.py`), and the chunks of the delta rule, an input of the compiled programs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quatrain.models.delta_rule import (
    CHUNK,
    FROM_CHUNK_BEFORE,
    FROM_SAVED,
    FROM_ZERO,
    NOWHERE,
    PREFIXES,
    Chunks,
)
from quatrain.models.layers import BRANCHES_PER_GROUP
from quatrain.ops.shape_buckets import round_up_coarsely

Node = tuple[int, int]
"""A segment and a branch of it; its tokens are neighbours in a buffer."""


class RowForms(NamedTuple):
    """Which arrays packed rows need beside their tokens.

    Rows of more than `unpack_above` tokens need the layout of their sequences, for attention; None: none do.
    `chunked`: they need chunks, for DeltaNet layers. `counted`: they need the number of sequences that each
    token stands for, for experts.
    """

    unpack_above: int | None = None
    chunked: bool = False
    counted: bool = False

    def unpacks(self, tokens: int) -> bool:
        """Whether rows of so many tokens need the layout."""
        return self.unpack_above is not None and tokens > self.unpack_above

    def joined(self, other: RowForms) -> RowForms:
        """Those of rows that two models read."""
        limits = [each.unpack_above for each in (self, other) if each.unpack_above is not None]
        flags = (a or b for a, b in zip(self[1:], other[1:], strict=True))
        return RowForms(min(limits, default=None), *flags)


NO_FORMS = RowForms()


def spans_of_nodes(segments: np.ndarray, branches: np.ndarray) -> dict[Node, np.ndarray]:
    """The indices of the tokens of each node of a buffer [T], in the order of the buffer."""
    # Nodes are neighbours by construction (`micro_batch.fill`), so a change of either number begins one.
    starts = np.flatnonzero(np.diff(segments, prepend=0) | np.diff(branches, prepend=0))
    return {
        (int(segments[span[0]]), int(branches[span[0]])): span
        for span in np.split(np.arange(len(segments)), starts)
        if len(span) and segments[span[0]]
    }


def prefixes_of(segment: int, branch: int) -> set[Node]:
    """The nodes that a branch of a segment continues: the common prefix and that of its group."""
    group = branch - branch % BRANCHES_PER_GROUP
    return {(segment, 0), (segment, group)} - {(segment, branch)}


def chunk_layout(segment_ids: np.ndarray, branch_ids: np.ndarray, *, ends: bool = False) -> Chunks:
    """The chunks, as host arrays, of buffers with `segment_ids` and `branch_ids` [B, T].

    The state at the end of a prefix is saved under the number of prefixes before it. With `ends`, for buffers
    of one level of prefixes, those at the ends of sequences are saved too, from 1 on in the order of the
    buffer. The number of chunks is rounded up (`round_up_coarsely`).
    """
    rows = [_chunks(*buffer, ends) for buffer in zip(segment_ids, branch_ids, strict=True)]
    padding = (0, 0, FROM_CHUNK_BEFORE, NOWHERE)
    most = round_up_coarsely(max([1, *map(len, rows)]))
    table = np.array([row + [padding] * (most - len(row)) for row in rows], np.int32)
    return Chunks(*(np.ascontiguousarray(table[..., i]) for i in range(4)))  # type: ignore[arg-type]


def _chunks(segments: np.ndarray, branches: np.ndarray, ends: bool) -> list[tuple[int, int, int, int]]:
    spans, chunks, sequences = spans_of_nodes(segments, branches), [], 0
    prefixes = {node: prefixes_of(*node) & spans.keys() for node in spans}
    continued = set().union(*prefixes.values())
    for node, span in spans.items():
        depth, save = len(prefixes[node]), NOWHERE
        if node in continued:
            # The scan has memory for so many saved states: a deeper prefix would overwrite one that is still
            # read.
            assert depth < (1 if ends else PREFIXES), node
            save = depth
        elif ends:
            sequences += 1
            save = sequences
        source = FROM_SAVED + depth - 1 if depth else FROM_ZERO
        for first in range(0, len(span), CHUNK):
            last = first + CHUNK >= len(span)
            count = min(CHUNK, len(span) - first)
            chunks.append((int(span[first]), count, source, save if last else NOWHERE))
            # Only the first chunk of a node begins with a saved state; a node may begin in any place of the
            # row.
            source = FROM_CHUNK_BEFORE
    return chunks
