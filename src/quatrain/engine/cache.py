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
from quatrain.engine.groups import FEWEST_POSITIONS, prompt_positions
from quatrain.models.architecture import Architecture
from quatrain.models.kv_cache import CachePart, empty_cache
from quatrain.ops.shape_buckets import power_of_four, round_up
from quatrain.parallel.mesh import mesh_shape

FEWEST_OF_TURNS = 128
"""Least positions of the prompt cache of turns, where a context can need as many; fewer save little."""


class CacheShape(NamedTuple):
    """Sizes of the cache of one replica."""

    slots: int
    prefix_slots: int
    prompt_positions: int
    generated_positions: int

    @property
    def num_positions(self) -> int:
        """Positions of all slots and prefix slots."""
        return self.slots * self.generated_positions + self.prefix_slots * self.prompt_positions


@dataclass(frozen=True)
class Room:
    """The memory for the cache of one replica, of which a sequence takes as much as it has positions.

    The prompt cache has at least `fewest_positions`. A sequence may have `more_context` tokens more than its
    prompt before its last turn, and a turn `more_turn` tokens more than are asked for.
    """

    num_bytes: int
    position_bytes: int
    fewest_positions: int
    more_context: int = 0
    more_turn: int = 0

    def positions(self, prompt: int, new: int) -> int:
        """Positions of a sequence with a prompt of up to `prompt` tokens and a completion of up to `new`."""
        return self._most_context(prompt) + self.ring(new, new)

    def context(self, tokens: int) -> int:
        """Positions of the prompt cache for contexts of up to `tokens` tokens.

        Contexts of turns have all lengths. Their positions double until they suffice, so that few programs
        are compiled; at most those that `positions` counts."""
        needed = max(prompt_positions(tokens), self.fewest_positions)
        if not self.more_context:
            return needed
        doubled = max(self.fewest_positions, FEWEST_OF_TURNS)
        while doubled < tokens:
            doubled *= 2
        return max(needed, min(doubled, self._most_context(1)))

    def _most_context(self, prompt: int) -> int:
        return prompt_positions(max(prompt_positions(prompt), self.fewest_positions) + self.more_context)

    def ring(self, needed: int, most: int) -> int:
        """Positions of the ring buffer for `needed` tokens: FEWEST_POSITIONS, doubled until they suffice.

        At most as many as the longest completion has, of `most` tokens. Turns have room for a call more:
        their keys and values are kept after a call in which other slots went on writing.
        """
        positions = FEWEST_POSITIONS
        while positions < needed:
            positions *= 2
        return min(positions, round_up(most + self.more_turn))

    @property
    def num_positions(self) -> int:
        """Positions that there is memory for."""
        return self.num_bytes // self.position_bytes

    def fits(self, shape: CacheShape) -> bool:
        """Whether there is memory for a cache of this shape."""
        return shape.num_positions <= self.num_positions

    def fitting(self, positions: int) -> int:
        """How many sequences of so many positions there is room for."""
        return self.num_bytes // (positions * self.position_bytes)

    def share(self, positions: int) -> str:
        """The memory that so many positions take, and how much there is, for an error."""
        return f"{positions * self.position_bytes / 2**20:.1f} MiB of {self.num_bytes / 2**20:.1f} MiB"


class Move(NamedTuple):
    """A turn whose keys and values are moved to a prefix slot; indices over all replicas."""

    slot: int
    position: int
    """Position of the turn's first token; a multiple of the positions may be missing or too much."""
    num_tokens: int
    """Tokens of the turn that are moved."""
    source: int
    """Prefix slot with the tokens before the turn."""
    num_before: int
    """How many these are."""
    prefix_slot: int


@dataclass(frozen=True)
class Cache:
    """Keys and values of prompts, and of the turns that follow them, in slots.

    `generated`, the part of the slots, is a ring buffer whose next decode step writes `ring_position`.
    """

    prompts: CachePart
    generated: CachePart
    ring_position: int
    shape: CacheShape
    mesh: Mesh

    @classmethod
    def empty(cls, arch: Architecture, dtype: DTypeLike, mesh: Mesh, shape: CacheShape) -> Cache:
        """A cache of zeros."""
        empty = partial(empty_cache, arch, dtype=dtype, mesh=mesh)
        prompts = empty(shape.prefix_slots, shape.prompt_positions)
        return cls(prompts, empty(shape.slots, shape.generated_positions), 0, shape, mesh)

    @property
    def num_replicas(self) -> int:
        """Replicas of the sampler."""
        return mesh_shape(self.mesh).num_data_shards

    def decoded(self, generated: CachePart, steps: int) -> Cache:
        """After `steps` decode steps, which wrote `generated`."""
        return replace(
            self,
            generated=generated,
            ring_position=(self.ring_position + steps) % self.shape.generated_positions,
        )

    def rearranged(self, shape: CacheShape, slots: list[int], prefix_slots: list[int], used: int) -> Cache:
        """The cache in another shape: its given `slots` and `prefix_slots`, and the ring's last `used`
        positions. This one is freed as far as it is copied."""
        old, prompts, generated, position = self.shape, self.prompts, self.generated, self.ring_position
        if old[1:3] != shape[1:3] or prefix_slots != self._all(old.prefix_slots):
            prompts = rearrange(prompts, np.array(prefix_slots), np.arange(shape.prompt_positions), self.mesh)
        size = shape.generated_positions
        if (old.slots, old.generated_positions) != (shape.slots, size) or slots != self._all(old.slots):
            positions = (position - used + np.arange(size)) % old.generated_positions
            generated = rearrange(generated, np.array(slots), positions, self.mesh)
            position = used % size
        return Cache(prompts, generated, position, shape, self.mesh)

    def resized(self, shape: CacheShape, used: int) -> Cache:
        """The cache with other numbers of positions; slots and prefix slots stay where they are."""
        return self.rearranged(shape, self._all(shape.slots), self._all(shape.prefix_slots), used)

    def kept(self, moves: list[Move]) -> Cache:
        """The cache with these turns in prefix slots, which has enough positions for them."""
        slots, prefix_slots, *_ = self.shape
        given: list[list[tuple[int, ...]]] = [[] for _ in range(self.num_replicas)]
        for slot, position, tokens, source, before, prefix_slot in moves:
            own = (slot % slots, position, tokens, source % prefix_slots, before, prefix_slot % prefix_slots)
            given[slot // slots].append(own)
        size = power_of_four(max(map(len, given)))
        padding = (0, 0, 0, 0, 0, prefix_slots)
        table = np.array([own + [padding] * (size - len(own)) for own in given], np.int32)
        turns = Turns(*table.reshape(-1, len(padding)).T.copy())
        return replace(self, prompts=keep_turns(self.prompts, self.generated, turns, self.mesh))

    def _all(self, size: int) -> list[int]:
        """Every slot or prefix slot, by its index on its replica."""
        return [*range(size)] * self.num_replicas
