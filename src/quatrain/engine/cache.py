"""The KV cache of a session, whose size changes with the sequences that are in flight.

Called by `session.py`, which decides the sizes and what is moved; `decode.py` has the compiled programs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.engine.decode import (
    Filled,
    Picked,
    copy_states,
    rearrange,
    rearrange_rings,
)
from quatrain.engine.groups import FEWEST_POSITIONS, prompt_positions
from quatrain.models.architecture import Architecture
from quatrain.models.kv_cache import CachePart, LayerCache, empty_cache, empty_layer
from quatrain.ops.shape_buckets import power_of_four, round_up
from quatrain.parallel.mesh import mesh_shape

FEWEST_OF_REQUESTS = 128
"""Least positions of the prompt cache of requests, whose contexts grow; fewer save little."""

FEW = 8
"""So many requests of a length have to fit into the memory for their positions to be doubled."""


class Ring(NamedTuple):
    """Sizes of a ring buffer of one replica: so many slots of so many positions each."""

    slots: int
    positions: int


class CacheShape(NamedTuple):
    """Sizes of the cache of one replica: its slots are in rings of different lengths."""

    rings: tuple[Ring, ...]
    prefix_slots: int
    prompt_positions: int

    @property
    def slots(self) -> int:
        """Slots of all rings."""
        return sum(ring.slots for ring in self.rings)

    @property
    def num_positions(self) -> int:
        """Positions of all slots and prefix slots."""
        generated = sum(ring.slots * ring.positions for ring in self.rings)
        return generated + self.prefix_slots * self.prompt_positions


@dataclass(frozen=True)
class Room:
    """The memory for the cache of one replica, of which a sequence takes as much as it has positions.

    The prompt cache has at least `fewest_positions`.
    """

    num_bytes: int
    position_bytes: int
    fewest_positions: int
    state_bytes: int = 0
    """Of a slot or a prefix slot, whatever its positions."""
    varying: bool = False
    """Whether contexts of all lengths come, as requests do."""

    def positions(self, prompt: int, new: int) -> int:
        """Positions of a sequence with a prompt of up to `prompt` tokens and a completion of up to `new`."""
        return self.context(prompt) + self.ring(new, new)

    def context(self, tokens: int) -> int:
        """Positions of the prompt cache for contexts of up to `tokens` tokens.

        Contexts of requests have all lengths. Their positions double until they suffice, so that few programs
        are compiled; where only a few fit into the memory, they are no more than are needed."""
        needed = max(prompt_positions(tokens), self.fewest_positions)
        if not self.varying:
            return needed
        doubled = max(self.fewest_positions, FEWEST_OF_REQUESTS)
        while doubled < tokens:
            doubled *= 2
        return doubled if FEW * self._of_sequence(doubled) <= self.num_bytes else needed

    def ring(self, needed: int, most: int) -> int:
        """Positions of the ring buffer for `needed` tokens: FEWEST_POSITIONS, doubled until they suffice.

        At most as many as the longest completion has, of `most` tokens; of requests, which ask for any
        number, only where a few of the doubled ones do not fit into the memory.
        """
        positions = FEWEST_POSITIONS
        while positions < needed:
            positions *= 2
        longest = round_up(most)
        fits = FEW * self._of_sequence(positions) <= self.num_bytes
        return positions if self.varying and fits else min(positions, longest)

    def slots(self, positions: int) -> int:
        """How many slots of so many positions there is memory for, without prefix slots."""
        return self.num_bytes // (positions * self.position_bytes + self.state_bytes)

    def prefix_slots(self, shape: CacheShape) -> int:
        """How many prefix slots there is memory for beside the slots of `shape`."""
        left = self.num_bytes - self._bytes(shape._replace(prefix_slots=0))
        return left // (shape.prompt_positions * self.position_bytes + self.state_bytes)

    def fits(self, shape: CacheShape) -> bool:
        """Whether there is memory for a cache of this shape."""
        return self._bytes(shape) <= self.num_bytes

    def _bytes(self, shape: CacheShape) -> int:
        states = shape.slots + shape.prefix_slots
        return shape.num_positions * self.position_bytes + states * self.state_bytes

    def fitting(self, positions: int) -> int:
        """How many sequences of so many positions there is room for."""
        return self.num_bytes // self._of_sequence(positions)

    def _of_sequence(self, positions: int) -> int:
        return positions * self.position_bytes + 2 * self.state_bytes

    def share(self, positions: int) -> str:
        """The memory that a sequence of so many positions takes, and how much there is, for an error."""
        return f"{self._of_sequence(positions) / 2**20:.1f} MiB of {self.num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Cache:
    """Keys and values of prompts, and of what was sampled after them, in slots.

    `generated`, the part of the slots, has a ring buffer for each ring of `shape`, whose next decode step
    writes the one of `ring_positions`. With `from_first`, rings are none: a turn's token number i is at
    position i of its slot, as decode steps with drafts need it.
    """

    prompts: CachePart
    generated: tuple[CachePart, ...]
    ring_positions: tuple[int, ...]
    shape: CacheShape
    arch: Architecture
    dtype: DTypeLike
    mesh: Mesh
    from_first: bool = False

    @classmethod
    def empty(
        cls,
        arch: Architecture,
        dtype: DTypeLike,
        mesh: Mesh,
        shape: CacheShape,
        *,
        from_first: bool = False,
    ) -> Cache:
        """A cache of zeros."""
        empty = partial(empty_cache, arch, dtype=dtype, mesh=mesh)
        prompts = empty(shape.prefix_slots, shape.prompt_positions)
        generated = tuple(empty(*ring) for ring in shape.rings)
        return cls(prompts, generated, (0,) * len(generated), shape, arch, dtype, mesh, from_first)

    @property
    def num_replicas(self) -> int:
        """Replicas of the sampler."""
        return mesh_shape(self.mesh).num_data_shards

    def with_ring(self, ring: int, generated: CachePart, steps: int = 0) -> Cache:
        """The cache with this ring, after `steps` decode steps, which wrote it."""
        parts, positions = list(self.generated), list(self.ring_positions)
        steps = 0 if self.from_first else steps
        parts[ring], positions[ring] = generated, (positions[ring] + steps) % generated.positions
        return replace(self, generated=tuple(parts), ring_positions=tuple(positions))

    def begin(self, ring: int, written: int) -> int:
        """The position in its slot of the first token of a turn, the last `written` of a ring."""
        return 0 if self.from_first else self.ring_positions[ring] - written

    def rearranged(
        self, shape: CacheShape, slots: Sequence[int], prefix_slots: Sequence[int], used: Sequence[int]
    ) -> Cache:
        """The cache in another shape: its given `slots` (-1: none) and `prefix_slots` of each replica.

        Of each new ring, the last `used` positions are kept. This cache is freed as far as it is copied.
        """
        old, prompts, generated = self.shape, self.prompts, self.generated
        sources = [self._sources(shape, ring, slots, used[ring]) for ring in range(len(shape.rings))]
        shrinks = shape.prefix_slots * shape.prompt_positions < old.prefix_slots * old.prompt_positions

        def empty(ring: Ring) -> Callable[[int], LayerCache]:
            return lambda layer: empty_layer(self.arch, layer, *ring, self.dtype, self.mesh)

        for of_prompts in (shrinks, not shrinks):  # what shrinks makes room for what grows
            if not of_prompts:
                taken = [(own, more) for _, own, more in sources]
                generated = rearrange_rings(generated, list(map(empty, shape.rings)), taken, self.mesh)
            elif old[1:] != shape[1:] or prefix_slots != self._all(old.prefix_slots):
                columns = np.arange(shape.prompt_positions)
                prompts = rearrange(prompts, np.array(prefix_slots), columns, self.mesh)
        positions = tuple(position for position, *_ in sources)
        return replace(self, prompts=prompts, generated=generated, ring_positions=positions, shape=shape)

    def _sources(
        self, shape: CacheShape, ring: int, slots: Sequence[int], used: int
    ) -> tuple[int, Picked | None, dict[int, Picked]]:
        """(position of the new ring, what it takes of the old ring in its place, what of other rings)."""
        old, (size, positions) = self.shape.rings, shape.rings[ring]
        before = [0, *accumulate(r.slots for r in shape.rings)][ring]
        ends = [*accumulate(r.slots for r in old)]
        taken: dict[int, list[list[tuple[int, int]]]] = {}
        for replica in range(self.num_replicas):
            first = replica * shape.slots + before
            for to, source in enumerate(slots[first : first + size]):
                if source >= 0:
                    of = bisect_right(ends, source)
                    here = taken.setdefault(of, [[] for _ in range(self.num_replicas)])
                    here[replica].append((to, source - (ends[of] - old[of].slots)))
        stays = ring < len(old) and old[ring].slots > 0 and size > 0
        own, in_place = taken.pop(ring, None), False
        position = 0 if self.from_first else used % max(positions, 1)
        if stays and old[ring] == shape.rings[ring]:
            in_place = all(to == source for pairs in own or [] for to, source in pairs)
            position = self.ring_positions[ring] if in_place else position

        def columns(of: int) -> np.ndarray:
            """The position in an old ring of each position of the new one."""
            if self.from_first:
                return np.arange(positions)
            # The newest position is the one before the next to be written, in both rings: back from there.
            back = (position - 1 - np.arange(positions)) % positions
            return (self.ring_positions[of] - 1 - back) % old[of].positions

        more = {of: Picked.moved(pairs, size, columns(of)) for of, pairs in taken.items()}
        if not stays:
            return position, None, more
        if in_place:
            return position, Picked(None, None, np.arange(0)), more
        whole = [dict(pairs) for pairs in own or [[]] * self.num_replicas]
        picked = np.array([each.get(to, 0) for each in whole for to in range(size)])
        return position, Picked(picked, None, columns(ring)), more

    def begun(self, filled: Sequence[tuple[int, int, int, int]]) -> Cache:
        """The cache with the states of prefix slots in slots: (replica, ring, slot of it, prefix slot)."""
        cache = self
        for ring, (slots, _) in enumerate(self.shape.rings):
            given: list[list[tuple[int, int]]] = [[] for _ in range(self.num_replicas)]
            for replica, of, slot, prefix_slot in filled:
                if of == ring:
                    given[replica].append((slot, prefix_slot))
            if any(given):
                table = padded(given, (slots, 0))
                generated = copy_states(cache.generated[ring], self.prompts, Filled(*table), self.mesh)
                cache = cache.with_ring(ring, generated)
        return cache

    def _all(self, size: int) -> list[int]:
        """Every prefix slot, by its index on its replica."""
        return [*range(size)] * self.num_replicas


def padded(given: Sequence[Sequence[tuple[int, ...]]], padding: tuple[int, ...]) -> np.ndarray:
    """[fields, replicas x N] int32 of N entries of each replica, a power of four so that few programs are
    compiled."""
    size = power_of_four(max(map(len, given)))
    table = np.array([[*own, *[padding] * (size - len(own))] for own in given], np.int32)
    return table.reshape(-1, len(padding)).T.copy()
