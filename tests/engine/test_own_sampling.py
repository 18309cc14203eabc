"""Sequences that come one by one, each with a sampling of its own, share the slots of an engine."""

from dataclasses import replace

import numpy as np
import pytest

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.session import Session
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling, Request

LENGTHS = (5, 2, 17, 9, 3)
PROMPTS = [Prompt(0, np.arange(3, 3 + length, dtype=np.int32), "") for length in LENGTHS]
KINDS = (
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
)


@pytest.fixture
def engine_of(small_arch, small_params, tokenizer):
    def make(*, own=True, seed=11, **config):
        settings = RolloutConfig(**{"n": 1, "max_new_tokens": 12, **config})
        engine = RolloutEngine(
            small_arch,
            settings,
            tokenizer,
            stop_ids=(0, 7),
            seed=seed,
            cache_bytes=1 << 26,
            per_request_sampling=own,
        )
        engine.sync_weights(small_params, 4)
        return engine

    return make


def submit_own(engine, prompts, owners):
    return engine.submit(list(map(Request.alone, prompts, owners)))


def alone(engine_of, prompt, kind, *, seed, step, sequence_id, tokens):
    """The completion of the engine for training."""
    engine = engine_of(own=False, seed=seed, **{**kind, "max_new_tokens": tokens})
    as_group = Prompt(sequence_id, prompt.input_ids, "")
    [completion] = finish(engine, engine.submit([Request(as_group, step, engine.sampling)]))
    return completion


def finish(engine, tickets, advanced=lambda: None):
    while not all(map(engine.finished, tickets)):
        engine.advance()
        advanced()
    return [turn for ticket in tickets for turn in engine.take(ticket)]


@pytest.mark.slow
def test_each_sequence_is_what_it_would_be_alone(engine_of):
    engine = engine_of(max_concurrency=3)
    facts = [
        {"seed": 11 + i % 2, "step": i, "sequence_id": 40 + i, "tokens": 5 + 3 * i} for i in range(len(KINDS))
    ]
    tickets = []
    for prompt, kind, fact in zip(PROMPTS, KINDS, facts):  # one comes after every round
        sampling = Sampling(n=1, max_new_tokens=fact["tokens"], **kind)
        own = PerRequestSampling(sampling, fact["seed"], fact["step"], fact["sequence_id"])
        tickets += submit_own(engine, [prompt], [own])
        engine.advance()
    together = finish(engine, tickets)
    for prompt, kind, fact, completion in zip(PROMPTS, KINDS, facts, together):
        expected = alone(engine_of, prompt, kind, **fact)
        assert completion.tokens == expected.tokens, kind
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5, err_msg=str(kind))
        assert completion.finish_reason == expected.finish_reason
        assert set(completion.versions) == {4}


@pytest.mark.usefixtures("computed_by")
def test_a_stop_string_ends_its_sequence_alone(engine_of, tokenizer):
    engine = engine_of()
    free = PerRequestSampling(Sampling(n=1, max_new_tokens=12), 5, 0, 0)
    [whole] = finish(engine, submit_own(engine, PROMPTS[:1], [free]))
    stop = tokenizer.decode(whole.tokens[2:3])
    stopped = PerRequestSampling(Sampling(n=1, max_new_tokens=12, stop=(stop,)), 5, 0, 0)
    [cut, same] = finish(engine, submit_own(engine, [PROMPTS[0]] * 2, [stopped, free]))
    assert (cut.tokens, cut.finish_reason) == (whole.tokens[: len(cut.tokens)], "stop")
    assert len(cut.tokens) <= 3
    assert stop in tokenizer.decode(cut.tokens)
    assert same.tokens == whole.tokens


@pytest.mark.usefixtures("computed_by")
def test_stop_tokens_of_a_sequence_end_it_alone(engine_of):
    """Of an engine without stop tokens; what was decoded after one, and other sequences, change nothing."""
    engine = engine_of()
    engine.stop_ids = ()
    free = PerRequestSampling(Sampling(n=1, max_new_tokens=30), 5, 0, 0)
    [whole] = finish(engine, submit_own(engine, PROMPTS[:1], [free]))
    ends = (whole.tokens[11], whole.tokens[20])
    at = min(map(whole.tokens.index, ends))
    stopped = replace(free, stop_ids=ends)
    [cut, same] = finish(engine, submit_own(engine, [PROMPTS[0]] * 2, [stopped, free]))
    assert (cut.tokens, cut.finish_reason) == (whole.tokens[: at + 1], "stop")
    assert cut.logprobs == whole.logprobs[: at + 1]
    assert (same.tokens, same.finish_reason) == (whole.tokens, "length")
    stats = engine.stats
    assert stats.useful_slot_steps == 29 + at + 29  # the first token of each is that of the prefill
    assert stats.slot_steps > stats.useful_slot_steps


@pytest.mark.usefixtures("computed_by")
def test_a_cancelled_sequence_leaves_the_others_as_they_are(engine_of):
    def owners(count):
        return [
            PerRequestSampling(Sampling(n=1, max_new_tokens=30, temperature=1.5), 1, 0, i)
            for i in range(count)
        ]

    engine = engine_of(max_concurrency=2, max_new_tokens=30)
    expected = finish(engine, submit_own(engine, PROMPTS[:4], owners(4)))
    running, waiting, *others = submit_own(engine, PROMPTS[:4], owners(4))
    engine.cancel(waiting)  # before it has a slot
    engine.advance()
    assert (
        engine.completions(running)[0].tokens
        == expected[0].tokens[: len(engine.completions(running)[0].tokens)]
    )
    engine.cancel(running)  # in a slot, or finished
    left = finish(engine, others)
    assert [each.tokens for each in left] == [each.tokens for each in expected[2:]]
    assert not engine._session.num_groups
    assert engine._session._cache is None


@pytest.mark.usefixtures("computed_by")
def test_a_sequence_for_which_there_is_no_room_is_refused_and_the_next_is_not(engine_of):
    engine = engine_of()
    long = PerRequestSampling(Sampling(n=1, max_new_tokens=10**6), 0, 0, 0)
    with pytest.raises(ValueError, match="KV cache"):
        submit_own(engine, PROMPTS[:1], [long])
    short = PerRequestSampling(Sampling(n=1, max_new_tokens=4), 0, 0, 0)
    [completion] = finish(engine, submit_own(engine, PROMPTS[:1], [short]))
    assert 1 <= len(completion.tokens) <= 4


SHORT, LONG = (5, 12), (100, 30)  # tokens of a prompt and of its completion, which take 64 and 160 positions
MEMORY = 20 * 48  # positions of the cache


@pytest.fixture
def limited(engine_of, monkeypatch):
    """(an engine whose cache has MEMORY positions, the shape of the cache in each of its rounds)."""
    shapes, resize = [], Session._resize

    def recorded(session):
        resize(session)
        shapes.append(session._cache.shape)
        assert session._cache.shape.num_positions <= MEMORY

    monkeypatch.setattr(Session, "_resize", recorded)
    engine = engine_of(max_new_tokens=64)
    engine._cache_bytes = MEMORY * 256
    return engine, shapes


def asked(*sizes):
    prompts = [Prompt(0, np.arange(size, dtype=np.int32) % 250, "") for size, _ in sizes]
    owners = [
        PerRequestSampling(Sampling(n=1, max_new_tokens=new), 3, 0, i) for i, (_, new) in enumerate(sizes)
    ]
    return prompts, owners


@pytest.mark.usefixtures("computed_by")
def test_as_many_run_at_once_after_a_long_sequence_as_before(limited):
    engine, shapes = limited

    def most_at_once(count, *size):
        shapes.clear()
        finish(engine, submit_own(engine, *asked(*[size] * count)))
        return max(shape.slots for shape in shapes)

    # Of one token, which the prefill gives: no decode step is compiled.
    assert most_at_once(24, 5, 1) == 15
    assert most_at_once(8, 100, 1) == 6
    assert most_at_once(1, 700, 1) == 1
    assert most_at_once(24, 5, 1) == 15


@pytest.mark.usefixtures("computed_by")
def test_a_long_sequence_waits_for_room_and_then_gets_it(limited):
    engine, shapes = limited
    before = submit_own(engine, *asked(*[SHORT] * 10))
    engine.advance()
    [long] = submit_own(engine, *asked(LONG))
    after = submit_own(engine, *asked(*[SHORT] * 10))
    while not engine.completions(long)[0].tokens:
        assert shapes[-1] == (((15, 32),), 15, 32)
        assert not any(engine.completions(ticket)[0].tokens for ticket in after)
        engine.advance()
    assert len(shapes) > 2
    assert shapes[-1].slots <= 6
    assert shapes[-1].prompt_positions == 128
    assert all(completion.tokens for completion in finish(engine, [long, *before, *after]))


@pytest.mark.usefixtures("computed_by")
def test_any_mixture_of_lengths_fits_and_gives_what_each_gives_alone(limited):
    rng = np.random.default_rng(5)
    sizes = [(int(rng.choice([4, 100])), int(rng.choice([3, 12]))) for _ in range(20)]
    prompts, owners = asked(*sizes)
    engine, tickets = limited[0], []
    for first in range(0, len(prompts), 4):
        tickets += submit_own(engine, prompts[first : first + 4], owners[first : first + 4])
        for _ in range(int(rng.integers(0, 3))):
            engine.advance()
    together = [completion.tokens for completion in finish(engine, tickets)]
    for prompt, own, tokens in zip(prompts[:8], owners[:8], together):
        [alone] = finish(engine, submit_own(engine, [prompt], [own]))
        assert alone.tokens == tokens


def check_while_another_waits(engine, size, waits, rings=None):
    """That a sequence has the tokens that it has alone, and so has one that waits for memory meanwhile.

    `rings`: the positions of rings, of which there are several with limits above 2,048.
    """
    engine._cache_bytes = MEMORY * 256
    prompts, owners = asked(size, waits)
    tickets = submit_own(engine, prompts[:1], owners[:1])
    if rings is not None:
        engine._session._admission.ring_positions = rings
    engine.advance()
    together = finish(engine, tickets + submit_own(engine, prompts[1:], owners[1:]))
    for prompt, own, completion in zip(prompts, owners, together, strict=True):
        [alone] = finish(engine, submit_own(engine, [prompt], [own]))
        assert alone.tokens == completion.tokens


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize(("size", "waits"), [((5, 80), (300, 300)), ((100, 96), (300, 500))])
def test_with_drafts_a_sequence_runs_to_its_limit_while_a_longer_one_waits(limited, engine_of, size, waits):
    """The fault: a call with drafts may give one more tokens than its limit leaves, for which a ring was
    asked that only the longer one needs, which waits: an IndexError ended the engine and all in flight."""
    check_while_another_waits(engine_of(speculate=3), size, waits)


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize(("size", "waits"), [((600, 160), (5, 300)), ((500, 320), (300, 500))])
def test_a_sequence_that_fits_alone_runs_while_a_longer_one_waits(limited, engine_of, size, waits):
    """The fault: its ring was made as long as that of the one that waited, for which there was no memory
    beside its context: an AssertionError ended the engine and all in flight."""
    check_while_another_waits(engine_of(), size, waits, rings=(32, 64))


@pytest.mark.usefixtures("computed_by")
def test_a_long_group_of_a_shared_sampling_does_not_lower_the_number_of_slots_for_good(engine_of):
    engine = engine_of(own=False, max_new_tokens=12)
    engine._cache_bytes = MEMORY * 256

    def one(size):
        return Prompt(size, np.arange(size, dtype=np.int32) % 250, "")

    sizes = 100, *[5] * 19
    [long, *short] = engine.submit([Request(one(size), 0, engine.sampling) for size in sizes])
    scheduler = engine._session._scheduler
    engine.advance()
    assert scheduler.max_slots == MEMORY // 144
    while not engine.finished(long):
        engine.advance()
    engine.take(long)
    engine.advance()
    assert scheduler.max_slots == MEMORY // 48
    assert all(completion.tokens for completion in finish(engine, short))
