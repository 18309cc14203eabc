"""Sequences are admitted by their actual lengths, and give way to others without a trace in their tokens."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.config.schema import RolloutConfig
from quatrain.engine import decode as decode_programs
from quatrain.engine import session
from quatrain.engine.admission import Admission
from quatrain.engine.cache import Cache, CacheShape, Ring, Room
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.groups import Group, prompt_positions
from quatrain.engine.scheduler import Scheduler
from quatrain.models import decode_step
from quatrain.models.kv_cache import bytes_of_largest, bytes_per_position
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.sampler import Request

STOP_IDS = tuple(range(0, 290, 30))
LONGEST = 128
SEQUENCE = 32 + LONGEST
"""Positions of the longest sequence: those of its prompt and of its completion."""
PROMPTS = [[5, 9, 200], [17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6], [8, 8], [31, 2, 77], [4]]


def prompts():
    return [Prompt(i, np.array(ids, np.int32), "", {}) for i, ids in enumerate(PROMPTS)]


@dataclass
class Watched:
    """What an engine of one layer does in each round."""

    engine: RolloutEngine
    positions: int
    """Of the cache."""
    rings: tuple[int, ...] = ()
    """Positions of the rings before the last."""

    @property
    def session(self):
        return self.engine._session

    def run(self, *, each_round=lambda number: None, step=3, given=None):
        """The completions of the batch; the cache never has more positions than there is memory for."""
        sampling = self.engine.sampling
        tickets = self.engine.submit([Request(prompt, step, sampling) for prompt in given or prompts()])
        self.session._admission.ring_positions = self.rings
        self.unfinished, self.live, self.num_rings, number = [], [], [], 0
        while not all(map(self.engine.finished, tickets)):
            each_round(number)
            self.unfinished.append(self.session._scheduler.demand)
            self.engine.advance()
            cache = self.session._cache
            assert cache is None or cache.shape.num_positions <= self.positions
            self.live.append(self.session._admission.shape.slots)
            self.num_rings.append(len(self.session._admission.shape.rings))
            number += 1
        self.stats = self.session.stats
        return [completion for ticket in tickets for completion in self.engine.take(ticket)]


@pytest.fixture
def make(computed_by, small_arch, tokenizer):
    usual = changed(small_arch, family="qwen2", windows=(24,))
    params = init_params(usual, jax.random.key(3))

    def make(positions, *, new=params, stop_ids=STOP_IDS, window=24, rings=(), arch=usual, **config):
        arch = changed(arch, windows=(window,))
        settings = RolloutConfig(**{"n": 3, "max_new_tokens": LONGEST, "temperature": 0.9, **config})
        engine = RolloutEngine(
            arch, settings, tokenizer, stop_ids=stop_ids, seed=11, cache_bytes=positions * 128
        )
        engine.sync_weights(new, 5)
        return Watched(engine, positions, rings)

    make.params, make.arch = params, usual
    return make


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def expected(make, computed_by, known):
    """The completions with memory for all."""
    if computed_by not in known:
        known[computed_by] = make(1 << 20).run()
    return known[computed_by]


@pytest.fixture(scope="module")
def decode(load_script):
    """The benchmark whose simulation has the scheduler and the admission without a model."""
    return load_script("decode")


def same(one, other):
    assert [c.tokens for c in one] == [c.tokens for c in other]
    assert [c.finish_reason for c in one] == [c.finish_reason for c in other]
    for a, b in zip(one, other):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_sequences_are_admitted_by_their_lengths_and_give_way_to_longer_ones(make):
    """More run at first than fit with the longest completions; few stop tokens make these come."""
    short, expected = (make(positions, stop_ids=STOP_IDS[:4]) for positions in (4 * SEQUENCE, 1 << 20))
    same(short.run(), expected.run())
    assert max(short.live) >= 12
    assert short.stats.preempted > 0
    assert short.stats.recomputed_tokens > 0


@pytest.mark.parametrize("memory", [2, 4, 6])
def test_a_sequence_moves_to_longer_rings_as_it_grows(make, expected, memory):
    rings = make(memory * SEQUENCE, rings=(32, 64))
    same(rings.run(), expected)
    assert max(rings.num_rings) >= 2
    fit = [number for number, left in zip(rings.num_rings, rings.unfinished) if 0 < left <= memory]
    assert set(fit) <= {1}


def counted_copies(monkeypatch):
    """The most bytes in memory after a copy of an array of the cache, before the old one is freed."""
    most = [0]

    def counted(copy):
        def run(*args):
            copied = copy(*args)
            most[0] = max(most[0], sum(x.nbytes for x in jax.live_arrays()))
            return copied

        return run

    for name in ("_pick", "_put"):
        monkeypatch.setattr(decode_programs, name, counted(getattr(decode_programs, name)))
    return most


def bytes_in_memory():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_the_cache_takes_a_layer_more_than_its_memory_while_it_changes(small_arch, monkeypatch):
    """As `quatrain plan` says; the fault: old arrays are all freed at the end."""
    arch, most = changed(small_arch, num_layers=3), counted_copies(monkeypatch)
    before = bytes_in_memory()
    small = CacheShape((Ring(2, 32),), 1, 32)
    cache = Cache.empty(arch, "float32", one_device(), small)
    large = CacheShape((Ring(4, 32), Ring(2, 64)), 2, 32)
    cache = cache.rearranged(large, [0, -1, -1, -1, 1, -1], [0, 0], [8, 30])
    assert cache.shape == large
    cache = cache.rearranged(small, [4, 0], [1], [30])
    assert bytes_in_memory() - before == small.num_positions * bytes_per_position(arch, "float32")
    usual = large.num_positions * bytes_per_position(arch, "float32")
    layer = large.num_positions * bytes_of_largest(arch, "float32")
    assert usual / 2 < most[0] - before <= usual + layer


@pytest.mark.slow
def test_the_cache_takes_no_more_than_its_memory_and_a_layer_in_a_run(small_arch, tokenizer, monkeypatch):
    arch, positions = changed(small_arch, num_layers=3), 3 * SEQUENCE
    params, most = init_params(arch, jax.random.key(3)), counted_copies(monkeypatch)
    position = bytes_per_position(arch, "float32")
    config = RolloutConfig(n=3, max_new_tokens=LONGEST, temperature=0.9)
    engine = RolloutEngine(
        arch, config, tokenizer, stop_ids=STOP_IDS, seed=11, cache_bytes=positions * position
    )
    engine.sync_weights(params, 0)
    before = bytes_in_memory()
    Watched(engine, positions, (32, 64)).run()
    layer = bytes_of_largest(arch, "float32")
    assert positions * position / 2 < most[0] - before <= positions * (position + layer) + 4096


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_down_to_one_sequence(make, expected, memory):
    least = make(memory * SEQUENCE)
    same(least.run(), expected)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([5, 70, 400]),
    st.one_of(st.none(), st.integers(1, 8)),
    st.sampled_from([(), (64,), (32, 128), (16, 64, 256)]),
)
def test_every_sample_ends_whatever_the_memory(decode, lengths, memory, replicas, prompt, slots, rings):
    """`memory` in tenths of what the longest needs, from one on; no round has more positions."""
    longest = prompt_positions(prompt) + 320  # 300 rounded up
    positions = longest * (9 + memory) // 10
    sizes = {"limit": 300, "prompt": prompt, "slots": slots, "replicas": replicas, "ring_positions": rings}
    figures = decode.Simulation(lengths, positions=positions, **sizes).run()
    assert figures["most positions"] <= positions
    whole = decode.Simulation(lengths, positions=1 << 40, **sizes).run()
    assert whole["preempted"] == whole["tokens computed again per token"] == 0
    again = decode.Simulation(lengths, positions=positions, **sizes).run()
    assert again == figures


@dataclass
class Placed:
    """Groups of one sample in slots of `scheduler`, and its admission to the positions of a replica."""

    scheduler: Scheduler
    positions: int

    def __post_init__(self):
        self.groups = {}
        room = Room(self.positions, 1, 32)
        self.admission = Admission(self.scheduler, room, self.groups, 1, None, None)

    def submit(self, prompt):
        group = Group.of(Prompt(0, np.ones(prompt, np.int32), ""), 0, range(1), 300)
        self.groups[self.scheduler.submit(1)] = group
        return group.completions[0]


def test_an_idle_replica_makes_no_room_on_another_for_a_long_prompt():
    """Of 4 + 1 samples 3 on each replica would fit, but 4 run on the first and stay there."""
    placed = Placed(Scheduler(4, 2), 2000)
    completions = [placed.submit(5) for _ in range(8)]
    placed.scheduler.resize((4,), 4)
    placed.scheduler.admit()
    placed.scheduler.fill()
    for completion in completions:
        completion.tokens = [0] * 200
    for slot in range(4, 8):
        placed.scheduler.finish(slot)
    placed.submit(200)
    assert placed.admission.next_shape() == CacheShape((Ring(4, 256),), 4, 32)
    assert placed.scheduler.barred == 8
    for slot in range(4):
        placed.scheduler.finish(slot)
    assert placed.admission.next_shape().prompt_positions == 256


def test_a_prompt_cache_that_was_wider_is_not_kept_where_prompts_in_use_do_not_fit():
    """One sample runs, another waits with its prompt in the cache, which a longer prompt has left."""
    placed = Placed(Scheduler(2), 700)
    running, _ = placed.submit(20), placed.submit(20)
    placed.scheduler.resize((2,), 2)
    placed.scheduler.admit()
    placed.scheduler.resize((1,), 2)
    placed.scheduler.fill()
    running.tokens = [0] * 130
    placed.admission.shape = CacheShape((Ring(1, 128),), 2, 256)
    assert placed.admission.next_shape() == CacheShape((Ring(1, 256),), 2, 32)


def test_long_completions_need_few_more_steps_in_a_quarter_of_the_memory(decode):
    figures = decode.long_completions(sequences=512, n=8, parts=16)
    assert figures["a quarter of it"]["preempted"] > 0
    assert figures["decode steps, a quarter / unlimited"] <= 1.3


@pytest.mark.parametrize(
    ("positions", "rings", "seed"),
    [
        (positions, rings, seed)
        for positions, rings in ((4 * SEQUENCE, (32, 64)), (1 << 20, ()), (4 * SEQUENCE, ()))
        for seed in (0, 1)
    ],
)
def test_samples_that_are_preempted_in_any_round_have_the_same_tokens(make, expected, positions, rings, seed):
    forced = make(positions, rings=rings)
    draw, taken = np.random.default_rng(seed), []

    def each_round(number):
        scheduler = forced.session._scheduler
        for who in scheduler.placed if number % 2 else []:
            if draw.random() < 0.3:
                scheduler.preempt(*who)
                taken.append(who)

    same(forced.run(each_round=each_round), expected)
    assert len(taken) > 5
    assert forced.stats.recomputed_tokens > 100


def test_what_was_sampled_before_new_weights_stays_as_it_was(make):
    """The tokens after them are those of a prompt with the tokens before, all by the new weights."""
    options = {"temperature": 0.0, "n": 2, "max_new_tokens": 40, "stop_ids": ()}
    expected, changed = make(1 << 20, **options).run(), make(1 << 20, **options)
    other = jax.tree.map(lambda x: x * 1.3 if x.ndim > 1 else x, make.params)

    def each_round(number):
        if number == 2:
            for who in changed.session._scheduler.placed:
                changed.session._scheduler.preempt(*who)
            changed.engine.sync_weights(other, 6)

    completions = changed.run(each_round=each_round)
    fresh = make(1 << 20, new=other, **{**options, "n": 1})
    for i, (completion, before) in enumerate(zip(completions, expected)):
        kept = completion.versions.count(5)
        assert completion.versions == [5] * kept + [6] * (40 - kept)
        assert kept == 17
        assert completion.tokens[:kept] == before.tokens[:kept]
        assert completion.logprobs[:kept] == before.logprobs[:kept]
        if i % 2 == 0:
            start = np.array([*PROMPTS[i // 2], *completion.tokens[:kept]], np.int32)
            [rest] = fresh.run(given=[Prompt(i // 2, start, "")])
            assert completion.tokens[kept:] == rest.tokens[: 40 - kept]
            np.testing.assert_allclose(completion.logprobs[kept:], rest.logprobs[: 40 - kept], atol=2e-5)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 24])
def test_a_long_prompt_is_computed_in_parts(make, monkeypatch, window):
    """Of three: one in parts, one that goes on after a part is full, one that is packed as usual."""
    draw, options = np.random.default_rng(0), {"window": window, "max_new_tokens": 12}
    given = [Prompt(i, draw.integers(1, 290, size, np.int32), "") for i, size in enumerate((2100, 2049, 30))]
    parts = make(1 << 20, **options)
    found = parts.run(given=given)
    monkeypatch.setattr(session, "PREFILL_TOKENS", 1 << 20)
    whole = make(1 << 20, **options)
    same(found, whole.run(given=given))
    assert parts.stats.prefilled_tokens == whole.stats.prefilled_tokens == 2100 + 2049 + 30
    assert parts.stats.recomputed_tokens == 0


def test_a_part_of_a_long_prompt_needs_no_more_memory_than_a_row_of_short_ones(decode, small_arch):
    arch = changed(small_arch, hidden_size=128, width=384, num_layers=1, head_dim=32)
    usual, part, cache = decode.prefill_memory(arch, 1 << 15).values()
    assert part <= 1.2 * usual < cache


@pytest.mark.parametrize("window", [None, 24])
def test_keys_that_are_read_in_blocks_give_what_all_of_them_give(monkeypatch, small_arch, window):
    """Of sequences at any places of their rows; the fault: a block left out or read twice."""
    mixer, draw = replace(small_arch.layers[0].mixer, window=window), np.random.default_rng(0)
    queries = draw.normal(size=(3, 2, 2, 2, 8)).astype(np.float32)
    cache = draw.normal(size=(4, 2, 8, 96)), draw.normal(size=(4, 2, 96, 8))
    cache = tuple(x.astype(np.float32) for x in cache)
    ring = (np.arange(96, dtype=np.int32) - 40) % 96  # the first token at place 40
    prompt = np.where(np.arange(96) < 30, np.arange(96), decode_step.NOWHERE).astype(np.int32)
    rows, places = np.array([2, 0, 3], np.int32), np.stack([ring, np.arange(96, dtype=np.int32), prompt])
    positions = np.array([[50, 51], [95, 3], [40, 41]], np.int32)

    def attended():
        sequences = decode_step._Sequences(tuple(map(jnp.asarray, cache)), rows, places)
        found = jax.jit(lambda: decode_step._attend_to(queries, positions, sequences, mixer))()
        return np.asarray(found.sums / found.total)

    whole = attended()
    monkeypatch.setattr(decode_step, "MOST_AT_ONCE", 16)
    monkeypatch.setattr(decode_step, "KEYS_AT_ONCE", 16)
    np.testing.assert_allclose(attended(), whole, atol=1e-5)
    assert np.abs(whole).min(axis=-1).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [2048, 24])
@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
def test_keys_that_are_read_in_blocks_give_the_same_tokens(make, monkeypatch, window):
    """Of sequences that are preempted; the sizes are those of short sequences."""
    expected = make(1 << 20, window=window).run()
    monkeypatch.setattr(decode_step, "MOST_AT_ONCE", 16)
    monkeypatch.setattr(decode_step, "KEYS_AT_ONCE", 16)
    # With an architecture of no other test, which would have compiled the programs.
    arch = changed(make.arch, max_position=make.arch.max_position - 1)
    blocks = make(2 * SEQUENCE, window=window, arch=arch)
    same(blocks.run(), expected)
    assert blocks.stats.recomputed_tokens > 0  # a cache has at least 32 positions: two blocks or more


@pytest.mark.parametrize("rings", [(), (16,)])
def test_a_limit_between_two_calls(make, rings):
    """The last call of a sequence ends at its limit, and its slot has no room for a whole one."""
    options = {"max_new_tokens": 20, "stop_ids": ()}
    expected = make(1 << 20, **options).run()
    assert {len(completion.tokens) for completion in expected} == {20}
    same(make(5 * (32 + 20), rings=rings, **options).run(), expected)
