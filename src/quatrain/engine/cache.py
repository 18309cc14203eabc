"""The KV cache of a session, whose size changes with the sequences that are in flight.

Called by `session.py`, which decides the sizes and what is moved; `decode.py` has the compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.engine.decode import Turns, keep_turns, rearrange
from quatrain.engine.groups import FEWEST_COLUMNS, prompt_columns
from quatrain.models.architecture import Architecture
from quatrain.models.kv_cache import CachePart, empty_cache
from quatrain.ops.shape_buckets import power_of_four, round_up
from quatrain.parallel.mesh import mesh_shape

FEWEST_OF_TURNS = 128
"""Least columns of the prompt cache of turns, where a context can need as many; fewer save little."""


class CacheShape(NamedTuple):
    """Sizes of the cache of one replica."""

    slots: int
    rows: int
    prompt_columns: int
    generated_columns: int


@dataclass(frozen=True)
class Room:
    """The memory for the cache of one replica, of which a sequence takes as much as it has columns.

    The prompt cache has at least `fewest_columns`. A sequence may have `more_context` tokens more than its
    prompt before its last turn, and a turn `more_turn` tokens more than are asked for.
    """

    num_bytes: int
    column_bytes: int
    fewest_columns: int
    more_context: int = 0
    more_turn: int = 0

    def columns(self, prompt: int, new: int) -> int:
        """Columns of a sequence with a prompt of up to `prompt` tokens and a completion of up to `new`."""
        return self._most_context(prompt) + self.ring(new, new)

    def context(self, tokens: int) -> int:
        """Columns of the prompt cache for contexts of up to `tokens` tokens.

        Contexts of turns have all lengths. Their columns double until they suffice, so that few programs are
        compiled; at most those that `columns` counts.
        """
        needed = max(prompt_columns(tokens), self.fewest_columns)
        if not self.more_context:
            return needed
        doubled = max(self.fewest_columns, FEWEST_OF_TURNS)
        while doubled < tokens:
            doubled *= 2
        return max(needed, min(doubled, self._most_context(1)))

    def _most_context(self, prompt: int) -> int:
        return prompt_columns(max(prompt_columns(prompt), self.fewest_columns) + self.more_context)

    def ring(self, needed: int, most: int) -> int:
        """Columns of the ring buffer for `needed` tokens: FEWEST_COLUMNS, doubled until they suffice.

        At most as many as the longest completion has, of `most` tokens. Turns have room for a call more:
        their keys and values are kept after a call in which other slots went on writing.
        """
        columns = FEWEST_COLUMNS
        while columns < needed:
            columns *= 2
        return min(columns, round_up(most + self.more_turn))

    def fitting(self, columns: int) -> int:
        """How many sequences of so many columns there is room for."""
        return self.num_bytes // (columns * self.column_bytes)

    def share(self, columns: int) -> str:
        """The memory that so many columns take, and how much there is, for an error."""
        return f"{columns * self.column_bytes / 2**20:.1f} MiB of {self.num_bytes / 2**20:.1f} MiB"


class Move(NamedTuple):
    """A turn whose keys and values are moved to a row of the prompt cache; indices over all replicas."""

    slot: int
    column: int
    """Column of the turn's first token; a multiple of the columns may be missing or too much."""
    num_tokens: int
    """Tokens of the turn that are moved."""
    source: int
    """Row with the tokens before the turn."""
    num_before: int
    """How many these are."""
    row: int


@dataclass(frozen=True)
class Cache:
    """Keys and values of prompts, and of the turns that follow them, in slots.

    `generated`, the part of the slots, is a ring buffer whose next decode step writes `column`.
    """

    prompts: CachePart
    generated: CachePart
    column: int
    shape: CacheShape
    mesh: Mesh

    @classmethod
    def empty(cls, arch: Architecture, dtype: DTypeLike, mesh: Mesh, shape: CacheShape) -> Cache:
        """A cache of zeros."""
        empty = partial(empty_cache, arch, dtype=dtype, mesh=mesh)
        prompts = empty(shape.rows, shape.prompt_columns)
        return cls(prompts, empty(shape.slots, shape.generated_columns), 0, shape, mesh)

    @property
    def num_replicas(self) -> int:
        """Replicas of the sampler."""
        return mesh_shape(self.mesh).num_data_shards

    def decoded(self, generated: CachePart, steps: int) -> Cache:
        """After `steps` decode steps, which wrote `generated`."""
        return replace(self, generated=generated, column=(self.column + steps) % self.shape.generated_columns)

    def rearranged(self, shape: CacheShape, slots: list[int], rows: list[int], used: int) -> Cache:
        """The cache in another shape: its given `slots` and `rows`, and the ring's last `used` columns."""
        old, prompts, generated, column = self.shape, self.prompts, self.generated, self.column
        if old[1:3] != shape[1:3] or rows != self._all(old.rows):
            prompts = rearrange(prompts, np.array(rows), np.arange(shape.prompt_columns), self.mesh)
        size = shape.generated_columns
        if (old.slots, old.generated_columns) != (shape.slots, size) or slots != self._all(old.slots):
            columns = (column - used + np.arange(size)) % old.generated_columns
            generated = rearrange(generated, np.array(slots), columns, self.mesh)
            column = used % size
        return Cache(prompts, generated, column, shape, self.mesh)

    def resized(self, shape: CacheShape, used: int) -> Cache:
        """The cache with other numbers of columns; slots and rows stay where they are."""
        return self.rearranged(shape, self._all(shape.slots), self._all(shape.rows), used)

    def kept(self, moves: list[Move]) -> Cache:
        """The cache with these turns in rows of the prompt cache, which has enough columns for them."""
        slots, rows, *_ = self.shape
        given: list[list[tuple[int, ...]]] = [[] for _ in range(self.num_replicas)]
        for slot, column, tokens, source, before, row in moves:
            own = (slot % slots, column, tokens, source % rows, before, row % rows)
            given[slot // slots].append(own)
        size = power_of_four(max(map(len, given)))
        padding = (0, 0, 0, 0, 0, rows)
        table = np.array([own + [padding] * (size - len(own)) for own in given], np.int32)
        turns = Turns(*table.reshape(-1, len(padding)).T.copy())
        return replace(self, prompts=keep_turns(self.prompts, self.generated, turns, self.mesh))

    def _all(self, size: int) -> list[int]:
        """Every slot or row, by its index on its replica."""
        return [*range(size)] * self.num_replicas
