"""Contexts that a session of requests keeps beside its live cache, and finds again by their tokens.

Data flow: `session.py` -> `wave` (who is computed now, and what is kept of it) -> `load` (blocks into prefix
slots) -> prefill -> `keep_contexts`; at the end of turns `keep_turns`. `prefix_store.py` decides what is kept
where, `decode.py` has the programs that copy.

Live sequences never wait for what is kept: it has a part of the memory of its own, and gives up its oldest
promises rather than to ask for more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.engine.cache import Cache, padded
from quatrain.engine.decode import (
    Blocks,
    Filled,
    TurnBlocks,
    keep_blocks,
    keep_states,
    keep_turn_blocks,
    load_blocks,
    load_states,
    rearrange,
)
from quatrain.engine.groups import Group
from quatrain.engine.prefix_store import BLOCK, Hit, Kept, PrefixStore
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.kv_cache import CachePart, bytes_per_position, bytes_per_state, empty_layer
from quatrain.parallel.mesh import mesh_shape
from quatrain.types.routes import ROUTES

LEAST_HIT = 16
"""A shorter beginning is computed again, in a row with others: templates begin all chats alike."""

NO_VERSION = -1
"""The version of a root under which nothing is looked for."""
FEWEST_COPIES = 256
"""Entries of a table of copies, most of them padding, which costs nothing: each size is a program."""
_Table = dict[Any, tuple[int, ...]]
"""Copies on a replica, by what they fill: of two that fill the same, the last counts."""


class Root(NamedTuple):
    """Contexts with different roots share nothing."""

    salt: str
    version: int
    """That of the weights that computed the keys."""


class Found(NamedTuple):
    """A group whose context is to be computed, on its replica, and what is kept of it."""

    ticket: int
    group: Group
    replica: int
    prefix_slot: int
    hit: Hit = Hit()
    pause: int | None = None
    """The token before which a state is kept, for those that begin alike."""


class EndedTurn(NamedTuple):
    """A turn that has ended, in a slot of a ring; indices on its replica."""

    ticket: int
    group: Group
    replica: int
    prefix_slot: int
    ring: int
    slot: int
    begin: int
    """Ring position of its first token."""
    whole: bool
    """Whether the slot's state is that of all its tokens but the last: none was cut."""


class KeptContexts:
    """Contexts in at most `num_bytes` of each device, of all replicas of the sampler.

    `in_flight`: a session of requests goes on with the keys that it has after the weights have changed.
    """

    def __init__(
        self, arch: Architecture, dtype: DTypeLike, mesh: Mesh, num_bytes: int, *, in_flight: bool = False
    ):
        self._arch, self._dtype, self._mesh, self._in_flight = arch, dtype, mesh, in_flight
        shape = mesh_shape(mesh)
        self._block_bytes = BLOCK * bytes_per_position(arch, dtype, shape.tp)
        self._state_bytes = bytes_per_state(arch, dtype, shape.tp)
        self.num_bytes = num_bytes
        self._stores = [PrefixStore(*self._most) for _ in range(shape.num_data_shards)]
        self._blocks: CachePart | None = None
        self._states: CachePart | None = None
        self._version: int | None = None
        self._began: dict[str, int] = {}
        """The version of the weights with which each session began, with `in_flight`."""
        self._places: dict[int, tuple[int, Root]] = {}
        """The replica and the root of each ticket with a row of the live cache."""
        self._homes: dict[int, int | None] = {}

    @property
    def _most(self) -> tuple[int, int | None]:
        """(blocks, states) of a replica; states take half of the memory, if there are any."""
        if not self._state_bytes:
            return self.num_bytes // self._block_bytes, None
        half = self.num_bytes // 2
        return half // self._block_bytes, half // self._state_bytes

    @property
    def evicted_tokens(self) -> int:
        """Tokens that were given up for others so far."""
        return sum(store.evicted_tokens for store in self._stores)

    @property
    def num_used(self) -> int:
        """Blocks in use on all replicas."""
        return sum(store.num_used for store in self._stores)

    def halve(self) -> None:
        """Gives up all that is kept, and half of the memory for good."""
        self.num_bytes //= 2
        self.release()
        for store in self._stores:
            store.most_blocks, store.most_states = self._most

    def release(self) -> None:
        """Frees all memory; sequences in flight go on, and are kept when they end."""
        self._blocks = self._states = None
        for store in self._stores:
            store.clear()

    def forget_all(self) -> None:
        """Nothing is found again, and nothing of those in flight is kept: other weights have this version."""
        self.release()
        self._places = {
            ticket: (replica, root._replace(version=NO_VERSION))
            for ticket, (replica, root) in self._places.items()
        }

    def begin(self, version: int) -> None:
        """A round begins, with weights of this version; what no request can find any more is forgotten."""
        self._homes.clear()
        if version != self._version:
            self._version = version
            wanted = {version, *self._began.values()}
            for store in self._stores:
                store.keep_roots(lambda root: root.version in wanted)

    def forget(self, session: str) -> None:
        """The session has ended: what it alone used is the first to be given up."""
        self._began.pop(session, None)
        for store in self._stores:
            store.forget(session)

    def end(self, ticket: int) -> None:
        """The group has its row no longer."""
        if (place := self._places.pop(ticket, None)) is not None:
            self._stores[place[0]].end(ticket)

    def home(self, ticket: int, group: Group) -> int | None:
        """The replica that keeps the most of the group's context; None if none has enough of it."""
        if ticket not in self._homes:
            root, marks = self._root(group), group.marks[:-1]
            lengths = [store.match(root, marks) for store in self._stores]
            longest = max(lengths)
            self._homes[ticket] = lengths.index(longest) if longest >= LEAST_HIT else None
        return self._homes[ticket]

    def wave(
        self,
        admitted: Sequence[tuple[int, int]],
        groups: Mapping[int, Group],
        num_prefix_slots: int,
        waited: dict[int, int],
    ) -> tuple[list[Found], list[tuple[int, int]]]:
        """(those of the admitted that are computed now, those that wait for what these compute).

        Of groups that lack the same next tokens, one is computed; the others find them then. `waited` has
        what was kept for those that have waited before: they wait again only if it has become more.
        """
        first: list[tuple[Any, tuple[int, Group, int, int]]] = []
        waiting, keys, followed = [], set(), set()
        for ticket, place in admitted:
            group, (replica, prefix_slot) = groups[ticket], divmod(place, num_prefix_slots)
            root, marks = self._root(group), group.marks
            length = self._stores[replica].match(root, marks[:-1])
            # After a state, only those can go on that have all of the same context.
            new = marks[: length + LEAST_HIT] if not self._state_bytes else marks
            key = replica, root, new.tobytes()
            # Without room for it nothing was kept, and all would be computed one after another.
            if key in keys and waited.get(ticket, -1) < length:
                waiting.append((ticket, place))
                waited[ticket] = length
                followed.add(key)
            else:
                keys.add(key)
                first.append((key, (ticket, group, replica, prefix_slot)))
        return [self._found(*each, key in followed) for key, each in first], waiting

    def _found(self, ticket: int, group: Group, replica: int, prefix_slot: int, followed: bool) -> Found:
        root, marks = self._root(group), group.marks
        self.end(ticket)
        self._places[ticket] = replica, root
        known, session = group.known_routes(0, len(marks) - 1), "" if group.own is None else group.own.session
        # The last token is computed in any case: the next one is drawn from its logits.
        hit = self._stores[replica].find(root, marks[:-1], session, known)
        hit = hit if hit.length >= LEAST_HIT else Hit()
        group.record(0, *hit.routes)
        pauses = bool(self._state_bytes) and (followed or not hit.length) and hit.length < len(marks) - 1
        return Found(ticket, group, replica, prefix_slot, hit, len(marks) - 1 if pauses else None)

    def load(self, prompts: CachePart, found: Sequence[Found]) -> CachePart:
        """The prompt cache with what was found of each context in its prefix slot."""
        blocks, states = self._tables(), self._tables()
        for each in found:
            for i, block in enumerate(each.hit.blocks):
                blocks[each.replica][each.prefix_slot, i] = block, each.prefix_slot, i * BLOCK
            if each.hit.state is not None:
                states[each.replica][each.prefix_slot] = each.prefix_slot, each.hit.state
        if any(blocks):
            assert self._blocks is not None
            prompts = load_blocks(prompts, self._blocks, Blocks(*_table(blocks, 3)), self._mesh)
        if any(states):
            assert self._states is not None
            size = len(prompts.layers[0][0]) // len(self._stores)
            prompts = load_states(prompts, self._states, _filled(states, size), self._mesh)
        return prompts

    def keep_contexts(self, prompts: CachePart, found: Iterable[Found]) -> None:
        """Keeps what was computed: with states what is before their pauses, else the whole contexts."""
        blocks, states = self._tables(), self._tables()
        for each in found:
            if self._state_bytes and each.pause is None:
                continue
            marks = each.group.marks[: each.pause]
            kept = self._keep(each.ticket, each.group, marks, live=each.ticket)
            for block, first in kept.copies:
                blocks[each.replica][block] = block, each.prefix_slot, first
            if kept.state is not None:
                states[each.replica][kept.state] = kept.state, each.prefix_slot
        self._grow()
        self._copy_rows(prompts, blocks)
        self._copy_states(prompts, states)

    def keep_turns(self, cache: Cache, turns: Iterable[EndedTurn]) -> None:
        """Keeps the contexts of turns that have ended, and their tokens but the last, which has no keys."""
        of_rows, row_states = self._tables(), self._tables()
        rings = range(len(cache.shape.rings))
        of_rings, ring_states = [self._tables() for _ in rings], [self._tables() for _ in rings]
        for each in turns:
            marks, from_row = each.group.marks, bool(self._state_bytes) and not each.whole
            length, replica = len(marks), each.replica
            if not from_row:
                marks = np.concatenate([marks, each.group.completions[0].tokens[:-1]])
            kept = self._keep(each.ticket, each.group, marks, ends_turn=True)
            for block, first in kept.copies:
                # Of two that fill the same block in a round, the second has evicted the first.
                for table in (of_rows, *of_rings):
                    table[replica].pop(block, None)
                if first < length:
                    of_rows[replica][block] = block, each.prefix_slot, first
                if first + BLOCK > length and not from_row:
                    of_rings[each.ring][replica][block] = block, each.slot, first - length, each.begin
            if kept.state is not None:
                for table in (row_states, *ring_states):
                    table[replica].pop(kept.state, None)
                states, row = (
                    (row_states, each.prefix_slot) if from_row else (ring_states[each.ring], each.slot)
                )
                states[replica][kept.state] = kept.state, row
            self.end(each.ticket)
        self._grow()
        self._copy_rows(cache.prompts, of_rows)
        self._copy_states(cache.prompts, row_states)
        for generated, blocks, states in zip(cache.generated, of_rings, ring_states, strict=True):
            if any(blocks):
                assert self._blocks is not None
                table_of_turns = TurnBlocks(*_table(blocks, 4))
                self._blocks = keep_turn_blocks(self._blocks, generated, table_of_turns, self._mesh)
            self._copy_states(generated, states)

    def _root(self, group: Group) -> Root:
        assert self._version is not None
        own, version = group.own, self._version
        if self._in_flight and own is not None and own.session:
            version = self._began.setdefault(own.session, version)
        return Root("" if own is None else own.salt, version)

    def _keep(self, ticket: int, group: Group, marks: np.ndarray, **how: Any) -> Kept:
        replica, root = self._places[ticket]
        # Others would read keys of older weights; in flight, a session goes on with those that it has.
        if root.version not in (self._version, *self._began.values()):
            return Kept()
        session = "" if group.own is None else group.own.session

        def routes(first: int, end: int) -> np.ndarray | None:
            parts = group.completions[0].rows(ROUTES, first, end)
            return np.concatenate(parts) if parts else None

        return self._stores[replica].keep(root, marks, session, routes, **how)

    def _tables(self) -> list[_Table]:
        return [{} for _ in self._stores]

    def _copy_rows(self, prompts: CachePart, given: list[_Table]) -> None:
        if any(given):
            assert self._blocks is not None
            self._blocks = keep_blocks(self._blocks, prompts, Blocks(*_table(given, 3)), self._mesh)

    def _copy_states(self, cache: CachePart, given: list[_Table]) -> None:
        if any(given):
            assert self._states is not None
            size = len(self._states.layers[0][0]) // len(self._stores)
            self._states = keep_states(self._states, cache, _filled(given, size), self._mesh)

    def _grow(self) -> None:
        """Allocates as much as the stores count on."""
        sizes = [(store.num_blocks, store.num_states) for store in self._stores]
        blocks, states = map(max, zip(*sizes, strict=True))
        self._blocks = self._grown(self._blocks, blocks, BLOCK)
        self._states = self._grown(self._states, states, 0)

    def _grown(self, pool: CachePart | None, size: int, positions: int) -> CachePart | None:
        """The pool of blocks, or with 0 positions of states, with so many on each replica."""
        before = 0 if pool is None else len(pool.layers[0][0]) // len(self._stores)
        if size == before:
            return pool
        if pool is None:
            arch = self._arch  # of which several layers may have one cache
            mixers = (arch.layers[arch.cached.index(number)].mixer for number in range(arch.num_caches))
            kinds = (
                number
                for number, mixer in enumerate(mixers)
                if isinstance(mixer, GatedDeltaNet) != bool(positions)
            )
            empty = (
                empty_layer(arch, number, size, positions or 1, self._dtype, self._mesh) for number in kinds
            )
            return CachePart(tuple(empty))
        picked = np.array([*range(before), *[0] * (size - before)] * len(self._stores))
        return rearrange(pool, picked, np.arange(positions), self._mesh)


def _table(given: list[_Table], fields: int) -> list[np.ndarray]:
    """The numbers of entries of each replica, and their fields [replicas x N]."""
    counts = np.array(list(map(len, given)), np.int32)
    least = [(0,) * fields] * FEWEST_COPIES
    return [counts, *padded([[*own.values(), *least[len(own) :]] for own in given], (0,) * fields)]


def _filled(given: list[_Table], size: int) -> Filled:
    """(to, from) of each replica; `size` is out of the range of the first."""
    return Filled(*padded([list(own.values()) for own in given], (size, 0)))
