"""A model without a device: NumPy in place of the compiled programs of the rollout.

Its cache has the shapes of a real one, and tokens in place of keys and values: a program reads from the cache
what a real one would attend to, and what it draws is a hash of all of it. So a token of a sequence that is
missing, at another place or of another sequence changes all tokens after it, and whatever is read before it
was written ends the test. No shape costs a compilation, so that tests of what moves in the cache and when may
have as many as they like. What moves the arrays is the code of `engine/decode.py`, run by NumPy.

What a device computes, `decode_step.py` and the programs of `engine/decode.py`, is not in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from quatrain.engine import cache, contexts, decode, session
from quatrain.engine.decode import TOKENS_PER_CALL, Decoded
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.delta_rule import DeltaState
from quatrain.models.kv_cache import CachePart
from quatrain.ops.sampling import KeptWords
from quatrain.types.routes import live_of

MASK, BASE, OTHER_BASE = 2**64 - 1, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
NOTHING = -1
"""What a cache has where nothing was written, or where slots without a sequence wrote."""


class HostArray(np.ndarray):
    """A NumPy array with what the code that moves the cache uses of JAX's."""

    _deleted = False

    @property
    def at(self) -> Any:
        return _At(self)

    def delete(self) -> None:
        """Like JAX's; who holds it still reads nothing from it."""
        self._deleted = True
        self[...] = NOTHING

    def is_deleted(self) -> bool:
        return self._deleted


@dataclass(frozen=True)
class _At:
    array: HostArray
    rows: Any = None

    def __getitem__(self, rows: Any) -> _At:
        return _At(self.array, np.asarray(rows))

    def set(self, values: Any, *, mode: str) -> HostArray:
        assert mode == "drop"
        new, real = self.array.copy(), self.rows < len(self.array)
        new[self.rows[real]] = values[real]
        return new


def _empty_layer(arch: Any, layer: int, slots: int, positions: int, dtype: Any, mesh: Any) -> Any:
    def full(*shape: int) -> HostArray:
        return np.full(shape, NOTHING, np.int64).view(HostArray)

    if isinstance(arch.layers[arch.cached.index(layer)].mixer, GatedDeltaNet):
        return DeltaState(full(slots, 1), full(slots, 1))
    return full(slots, 1, 1, positions), full(slots, 1, positions, 1)


def _empty_cache(arch: Any, slots: int, positions: int, dtype: Any, mesh: Any) -> CachePart:
    return CachePart(
        tuple(_empty_layer(arch, i, slots, positions, dtype, mesh) for i in range(arch.num_caches))
    )


def _hash(*numbers: int, base: int = BASE) -> int:
    found = 0
    for number in numbers:
        found = ((found ^ number) * base + 1) & MASK
        found ^= found >> 29
    return found


_POWERS = np.array([pow(BASE, i, 2**64) for i in range(8192)], np.uint64)


def _of_sequence(entries: np.ndarray) -> int:
    """The hash of what a cache has of a sequence, all of which was written."""
    assert (entries >= 0).all(), "a program read what was not written"
    return int((entries[::-1].astype(np.uint64) * _POWERS[: len(entries)]).sum())


class _Rows:
    """Reads and writes rows of a part of the cache, in all layers alike; its arrays are copies."""

    def __init__(self, part: CachePart):
        self.layers = [
            DeltaState(*(x.copy() for x in layer))
            if isinstance(layer, DeltaState)
            else tuple(x.copy() for x in layer)
            for layer in part.layers
        ]
        self.attentions = [layer for layer in self.layers if not isinstance(layer, DeltaState)]
        self.deltas = [layer for layer in self.layers if isinstance(layer, DeltaState)]

    @property
    def part(self) -> CachePart:
        return CachePart(tuple(self.layers))

    @property
    def positions(self) -> int:
        return self.part.positions

    def entries(self, row: int, places: Any) -> np.ndarray:
        both = [(keys[row, 0, 0, places], values[row, 0, places, 0]) for keys, values in self.attentions]
        first = both[0][0]
        for one in (each for pair in both for each in pair):
            assert np.array_equal(one, first), "layers have different tokens"
        return np.asarray(first)

    def write(self, row: Any, places: Any, entries: Any) -> None:
        for keys, values in self.attentions:
            keys[row, 0, 0, places] = entries
            values[row, 0, places, 0] = entries

    def state(self, row: int) -> int:
        """The hash of all tokens of the sequence that a state has; 0 without such layers."""
        if not self.deltas:
            return 0
        found = {int(x[row, 0]) for layer in self.deltas for x in layer}
        assert len(found) == 1, "layers have different states"
        return found.pop()

    def put_state(self, row: int, state: int) -> None:
        for layer in self.deltas:
            for x in layer:
                x[row, 0] = state


class Seen(NamedTuple):
    """What pictures change of a token; of text before them nothing."""

    turned: tuple[int, ...] = (0, 0, 0)
    """Its rotary positions less its position."""
    feature: int | None = None
    """The hash of the features in the place of its embedding."""


TEXT = Seen()


def _seen(place: int, turns: Any, features: Any, row: int) -> Seen:
    """Of a token at this position, with rotary positions [3] and the row -1 or that of its `features`."""
    turned = (0, 0, 0) if turns is None else tuple(int(turn) - place for turn in turns)
    return Seen(turned, None if row < 0 else zlib.crc32(np.ascontiguousarray(features[:, row]).tobytes()))


def _given_of(given: Any, number: int, at: int, place: int) -> Seen:
    """Of token `at` of row `number` of what `turns` and `inserts` have it; it is at this position."""
    turns = None if given.turns is None else given.turns[number, :, at]
    if given.inserts is None:
        return _seen(place, turns, None, -1)
    return _seen(place, turns, given.inserts.features[0], int(given.inserts.rows[number, at]))


def _behind(shifts: Any, i: int) -> Seen:
    """Of text behind the pictures of sequence `i`."""
    return TEXT if shifts is None else Seen((int(shifts[i]),) * 3)


class _Sequence:
    """A sequence whose tokens are computed one after another, by weights whose hash is `weights`."""

    def __init__(self, program: Any, weights: int, before: np.ndarray, state: int = 0):
        self._form, self._weights = program.arch.routes, weights
        self._size = program.arch.vocab_size
        self.hash, self.state = _of_sequence(before), state
        self.entries: list[int] = []
        self.routes: list[np.ndarray] = []

    def add(self, token: int, routes: np.ndarray | None = None, seen: Seen = TEXT) -> None:
        """Computes a token; with `routes`, its experts are those."""
        entry = _hash(token if seen.feature is None else seen.feature, self._weights, base=OTHER_BASE) >> 2
        if any(seen.turned):
            entry = _hash(entry, *(turn % 2**32 for turn in seen.turned)) >> 2
        if self._form is not None:
            if routes is None or (routes == live_of(self._form.dtype)).all():
                chosen = _hash(self.hash, token, self._weights, 1)
                layers, k = np.ogrid[: self._form.layers, : self._form.experts_per_token]
                first = (chosen >> 7) % 10**6
                routes = ((first * (layers + 1) + k) % self._form.num_experts).astype(self._form.dtype)
            self.routes.append(routes)
            entry = _hash(entry, *routes.reshape(-1).tolist()) >> 2
        self.hash = (self.hash * BASE + entry) & MASK
        self.state = _hash(self.state, token, self._weights) >> 2
        self.entries.append(entry)

    def draw(
        self, sampling: Any, i: int, *ids: int, deltas: bool, masks: np.ndarray | None = None
    ) -> tuple[int, float]:
        """The next token and its log-probability, of the sampling and the mask with number `i`."""
        scores = _hash(self.hash, self.state if deltas else 0)
        top_k, top_p, min_p = 0.0, 1.0, -np.inf
        if sampling.filters is not None:
            top_k, top_p, min_p = (float(x[i]) for x in sampling.filters)
        temperature, top_k = float(sampling.temperature[i]), top_k * (top_k < self._size)
        if temperature and top_k != 1 and top_p > 1e-6:
            numbers = zlib.crc32(repr((temperature, top_k, top_p, min_p)).encode())
            ids = (numbers, int(sampling.seeds[i]), *map(int, ids))
        else:
            ids = ()
        drawn = _hash(scores, *ids)
        logprob = -1 - (drawn >> 11) % 1000 / 500
        words = np.arange(self._size)
        if masks is not None:
            words = words[np.unpackbits(masks[i].view(np.uint8), bitorder="little")[: self._size] > 0]
        return int(words[(drawn >> 17) % len(words)]), logprob * (min(temperature, 1) ** 2 or 1)


def _weights(params: Any) -> int:
    return 0 if params is None else zlib.crc32(np.asarray(params["embed"][0]).tobytes())


def _given(routes: Any, *place: int) -> np.ndarray | None:
    return None if routes is None else routes[place]


def _drawn(sequence: _Sequence, drawn: Any, i: int, deltas: bool) -> list[tuple[int, float]]:
    facts = drawn.steps[i], drawn.offsets[i]
    return [
        sequence.draw(drawn.sampling, i, facts[0], number, facts[1], deltas=deltas, masks=drawn.masks)
        for number in drawn.sequence_ids[i]
    ]


def _as_arrays(samples: dict[int, list[tuple[int, float]]], shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    tokens, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for i, each in samples.items():
        tokens[i], logprobs[i] = zip(*each, strict=True)
    return tokens, logprobs


def _kept(program: Any, tokens: np.ndarray) -> KeptWords | None:
    """Of each token itself alone, if they are recorded."""
    if not program.most_kept:
        return None
    return KeptWords(np.repeat(tokens[..., None], program.most_kept, axis=-1), np.ones_like(tokens))


def _table(program: Any, *shape: int) -> Any:
    form = program.arch.routes if program.records_routes else None
    return form and np.zeros((*shape, form.layers, form.experts_per_token), form.dtype)


def _prefill(params: Any, prompts: CachePart, packed: Any, program: Any) -> Any:
    rows, weights = _Rows(prompts), _weights(params)
    routes, samples = _table(program, len(packed.input_ids)), {}
    number = np.arange(len(packed.input_ids))
    common = int(packed.num_common[0])
    for i, row in enumerate(packed.prefix_slots):
        if row >= len(rows.layers[0][0]):
            continue
        last = packed.starts[i] + packed.lengths[i] - common - 1
        segment, branch = packed.segment_ids, packed.branch_ids
        seen = (segment == segment[last]) & ((branch == 0) | (branch == branch[last]))
        places = number[seen & (packed.positions <= packed.positions[last])]
        assert packed.positions[places].tolist() == list(range(packed.lengths[i]))
        sequence = _Sequence(program, weights, np.zeros(0, np.int64))
        for place in places:
            seen = _given_of(packed, 0, place, int(packed.positions[place]))
            sequence.add(int(packed.input_ids[place]), _given(packed.routes, place), seen)
        if routes is not None:
            routes[places] = sequence.routes
        rows.write(row, slice(None), NOTHING)
        rows.write(row, slice(0, len(places)), sequence.entries)
        rows.put_state(row, sequence.state)
        samples[i] = _drawn(sequence, packed, i, bool(rows.deltas))
    tokens, logprobs = _as_arrays(samples, packed.sequence_ids.shape)
    return rows.part, tokens, logprobs, _kept(program, tokens), routes


def _extend(params: Any, prompts: CachePart, extended: Any, program: Any) -> Any:
    rows, weights, continued = _Rows(prompts), _weights(params), extended.continued
    routes, samples = _table(program, *continued.input_ids.shape), {}
    for i, row in enumerate(continued.prefix_slots):
        if row >= len(rows.layers[0][0]):
            continue
        start, count = int(continued.starts[i]), int(continued.counts[i])
        state = rows.state(row) if start else 0
        sequence = _Sequence(program, weights, rows.entries(row, slice(0, start)), state)
        for t in range(count):
            seen = _given_of(continued, i, t, start + t)
            sequence.add(int(continued.input_ids[i, t]), _given(continued.routes, i, t), seen)
        assert start + count <= rows.positions
        rows.write(row, slice(start, start + count), sequence.entries)
        rows.put_state(row, sequence.state)
        if routes is not None:
            routes[i, :count] = sequence.routes
        samples[i] = _drawn(sequence, extended, i, bool(rows.deltas))
    tokens, logprobs = _as_arrays(samples, extended.sequence_ids.shape)
    return rows.part, tokens, logprobs, _kept(program, tokens), routes


def _restore(params: Any, generated: CachePart, prompts: CachePart, restored: Any, program: Any) -> Any:
    rows, before, weights, continued = _Rows(generated), _Rows(prompts), _weights(params), restored.continued
    for i, row in enumerate(restored.slots):
        if row >= len(rows.layers[0][0]):
            continue
        start, count = int(continued.starts[i]), int(continued.counts[i])
        places = (restored.begins[i] + np.arange(start + count)) % rows.positions
        assert len(set(places.tolist())) == len(places), "a turn is longer than its slot"
        prompt = before.entries(continued.prefix_slots[i], slice(0, restored.prompt_lengths[i]))
        known = np.concatenate([prompt, rows.entries(row, places[:start])])
        sequence = _Sequence(program, weights, known, rows.state(row))
        for t in range(count):
            routes, seen = _given(continued.routes, i, t), _behind(restored.shifts, i)
            sequence.add(int(continued.input_ids[i, t]), routes, seen)
        rows.write(row, places[start:], sequence.entries)
        rows.put_state(row, sequence.state)
    return rows.part


def _decode(
    params: Any,
    generated: CachePart,
    prompts: CachePart,
    slots: Any,
    sharing: Any,
    ring_position: Any,
    program: Any,
) -> tuple[CachePart, Decoded]:
    rows, before, weights = _Rows(generated), _Rows(prompts), _weights(params)
    shape = len(slots.tokens), TOKENS_PER_CALL if slots.masks is None else 1
    found = Decoded(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape[0], np.int32),
        0,
        _table(program, *shape),
    )
    tokens, live, size = np.array(slots.tokens), np.array(slots.live), sharing.members.shape[1]
    while found.num_steps < shape[1] and live.any():
        now = found.num_steps
        place = (int(ring_position) + now) % rows.positions
        rows.write(np.arange(shape[0])[~live], place, NOTHING)
        for slot in np.flatnonzero(live):
            length, prefix = int(slots.lengths[slot]) + now, sharing.place[slot] // size
            assert sharing.members.reshape(-1)[sharing.place[slot]] == slot
            assert sharing.prompt_lengths[prefix] == slots.prompt_lengths[slot]
            assert length <= rows.positions, "a turn is longer than its slot"
            prompt = before.entries(prefix, slice(0, slots.prompt_lengths[slot]))
            turn = rows.entries(slot, (place - np.arange(length - 1, 0, -1)) % rows.positions)
            sequence = _Sequence(program, weights, np.concatenate([prompt, turn]), rows.state(slot))
            sequence.add(int(tokens[slot]), None, _behind(slots.shifts, slot))
            rows.write(slot, place, sequence.entries[0])
            rows.put_state(slot, sequence.state)
            facts = slots.steps[slot], slots.sequence_ids[slot], int(slots.offsets[slot]) + length
            how = {"deltas": bool(rows.deltas), "masks": slots.masks}
            token, logprob = sequence.draw(slots.sampling, slot, *facts, **how)
            if found.routes is not None:
                found.routes[slot, now] = sequence.routes[0]
            found.tokens[slot, now], found.logprobs[slot, now] = token, logprob
            found.counts[slot] += 1
            tokens[slot] = token
            live[slot] = token not in program.stop_ids and length + 1 < slots.limits[slot]
        found = found._replace(num_steps=now + 1)
    return rows.part, found._replace(kept=_kept(program, found.tokens))


def _speculate(
    params: Any,
    generated: CachePart,
    prompts: CachePart,
    slots: Any,
    sharing: Any,
    drafts: Any,
    program: Any,
    num_drafts: int,
) -> tuple[CachePart, Decoded]:
    """Drafts are right with the chance of two in three: words of a hash are never written twice."""
    rows, before, weights = _Rows(generated), _Rows(prompts), _weights(params)
    B, steps = len(slots.tokens), TOKENS_PER_CALL if slots.masks is None else 1
    shape = B, steps * (1 + num_drafts)
    counts, checked, ends = (np.zeros(each, np.int32) for each in (B, B, (B, steps)))
    found = Decoded(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), counts, 0, _table(program, *shape)
    )
    tokens, live, size = np.array(slots.tokens), np.array(slots.live), sharing.members.shape[1]
    while found.num_steps < steps and live.any():
        for slot in np.flatnonzero(live):
            length, prefix = int(slots.lengths[slot] + counts[slot]), sharing.place[slot] // size
            if num_drafts:
                context = drafts.own[slot, : slots.prompt_lengths[slot] + slots.lengths[slot]]
                assert (context >= 0).all(), "drafts are looked up in an incomplete sequence"
                assert context[-1] == slots.tokens[slot]
            prompt = before.entries(prefix, slice(0, slots.prompt_lengths[slot]))
            turn = rows.entries(slot, np.arange(length - 1))
            sequence = _Sequence(program, weights, np.concatenate([prompt, turn]))
            for ahead in range(1 + num_drafts):
                sequence.add(int(tokens[slot]), None, _behind(slots.shifts, slot))
                assert length <= rows.positions, "a turn is longer than its slot"
                rows.write(slot, length - 1, sequence.entries[-1])
                facts = slots.steps[slot], slots.sequence_ids[slot], int(slots.offsets[slot]) + length
                token, logprob = sequence.draw(slots.sampling, slot, *facts, deltas=False, masks=slots.masks)
                if found.routes is not None:
                    found.routes[slot, counts[slot]] = sequence.routes[-1]
                found.tokens[slot, counts[slot]], found.logprobs[slot, counts[slot]] = token, logprob
                counts[slot], length, tokens[slot] = counts[slot] + 1, length + 1, token
                live[slot] = token not in program.stop_ids and length < slots.limits[slot]
                if not live[slot] or ahead == num_drafts:
                    break
                checked[slot] += 1
                if token % 3 == 0:
                    # What a wrong draft and those behind it leave, for the next step to overwrite.
                    wrong = np.arange(length - 1, min(length + num_drafts - ahead - 1, rows.positions))
                    rows.write(slot, wrong, OTHER_BASE >> 2)
                    break
        ends[:, found.num_steps] = counts
        found = found._replace(num_steps=found.num_steps + 1)
    return rows.part, found._replace(drafted=checked, ends=ends)


def forward(arch: Any, params: Any, ids: list[int], turns: Any = None, features: Any = None) -> Any:
    """(the likeliest token after each of these of one sequence, its log-probability, the routes of each).

    `turns` [3, T] are their rotary positions, `features` the [1 + L, D] of each, or None for text.
    """
    program = SimpleNamespace(arch=arch)
    sequence = _Sequence(program, _weights(params), np.zeros(0, np.int64))
    greedy = SimpleNamespace(filters=None, temperature=[0.0], seeds=[0])
    deltas, drawn = bool(arch.deltas), []
    for i, token in enumerate(ids):
        feature = None if features is None else features[i]
        at = None if turns is None else turns[:, i]
        seen = _seen(i, at, *((None, -1) if feature is None else (feature[:, None], 0)))
        sequence.add(token, None, seen)
        drawn.append(sequence.draw(greedy, 0, deltas=deltas))
    tokens, logprobs = zip(*drawn, strict=True)
    return list(tokens), list(logprobs), sequence.routes


def routes_of_rows(params: Any, arch: Any, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T, L, k], as `routed_models.routes_of_rows` has them of a device."""
    form = arch.routes
    routes = np.full((*ids.shape, form.layers, form.experts_per_token), live_of(form.dtype), form.dtype)
    for row, length in enumerate(lengths):
        routes[row, : length - 1] = forward(arch, params, ids[row, : length - 1].tolist())[2]
    return routes


def check_routes(params: Any, arch: Any, batch: Any) -> None:
    """As `routed_models.check_routes`."""
    expected = routes_of_rows(params, arch, batch.input_ids, batch.lengths)
    np.testing.assert_array_equal(batch.routes, expected)


def _noted(name: str, program: Any, seen: set[Any]) -> Any:
    """`program`, which notes the shapes that it is called with: each would be compiled by itself."""

    def run(*args: Any, **static: Any) -> Any:
        arrays = jax.tree.leaves(args[1:] if name in _PROGRAMS else args)
        shapes = [x.shape for x in arrays if isinstance(x, np.ndarray)]
        seen.add((name, *shapes))
        return program(*args, **static)

    return run


def _load(prompts: HostArray, kept: HostArray, blocks: Any, axis: int, mesh: Any) -> HostArray:
    loaded = prompts.copy()
    for i in range(blocks.counts[0]):
        row, span = blocks.prefix_slots[i], slice(blocks.firsts[i], blocks.firsts[i] + kept.shape[axis])
        loaded[(row, *[slice(None)] * (axis - 1), span)] = kept[blocks.blocks[i]]
    return loaded


def _keep_block(kept: HostArray, prompts: HostArray, blocks: Any, axis: int, mesh: Any) -> HostArray:
    new = kept.copy()
    for i in range(blocks.counts[0]):
        places = blocks.firsts[i] + np.arange(kept.shape[axis])
        new[blocks.blocks[i]] = prompts[blocks.prefix_slots[i]].take(places, axis - 1)
    return new


def _keep_turn_block(kept: HostArray, generated: HostArray, blocks: Any, axis: int, mesh: Any) -> HostArray:
    new = kept.copy()
    for i in range(blocks.counts[0]):
        after = blocks.firsts[i] + np.arange(kept.shape[axis])
        ring = (blocks.ring_positions[i] + after) % generated.shape[axis]
        before = np.expand_dims(after < 0, [0, 1] if axis == 3 else [0, 2])
        block = blocks.blocks[i]
        new[block] = np.where(before, new[block], generated[blocks.slots[i]].take(ring, axis - 1))
    return new


_PROGRAMS = {
    "prefill": _prefill,
    "extend": _extend,
    "restore": _restore,
    "decode": _decode,
    "speculate": _speculate,
}


def use_host_model(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Sessions compute with NumPy until `monkeypatch` is undone, on one replica.

    Returns a set of what would have been compiled so far for a device.
    """
    seen: set[Any] = set()
    for name in ("_pick", "_put", "_copied"):
        monkeypatch.setattr(decode, name, _noted(name, getattr(decode, name).__wrapped__, seen))
    of_blocks = {"_load": _load, "_keep_block": _keep_block, "_keep_turn_block": _keep_turn_block}
    for name, move in of_blocks.items():  # loops over slices of XLA's
        monkeypatch.setattr(decode, name, _noted(name, move, seen))
    monkeypatch.setattr(decode, "jnp", np)
    monkeypatch.setattr(decode, "shard_mapped", lambda function, mesh, in_specs, out_specs: function)
    monkeypatch.setattr(cache, "empty_layer", _empty_layer)
    monkeypatch.setattr(contexts, "empty_layer", _empty_layer)
    monkeypatch.setattr(cache, "empty_cache", _empty_cache)
    for name, program in _PROGRAMS.items():
        noted = _noted(name, program, seen)
        monkeypatch.setattr(session, f"{name}_program", lambda backend, noted=noted: noted)
    return seen


@pytest.fixture(params=["host", pytest.param("jax", marks=pytest.mark.slow)])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What engines compute with: NumPy, which compiles nothing, or, in the slow tests, JAX as in a run."""
    if request.param == "host":
        use_host_model(monkeypatch)
    return str(request.param)


@pytest.fixture(scope="module", params=["host", pytest.param("jax", marks=pytest.mark.slow)])
def all_computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `computed_by`, for all tests of a module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "host":
            use_host_model(monkeypatch)
        yield str(request.param)
