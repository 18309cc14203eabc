"""The engine records the experts of every token, from the pass in which the token was the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import host_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import local_rollouts
from routed_models import check_routes, routed_model, routes_of_rows
from test_session_turns import PROMPTS, STOP_IDS, TURNS, Episodes, preempted

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.session import Session, SessionSettings
from quatrain.models.families import builtin_architecture
from quatrain.models.kv_cache import bytes_per_position
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling, rollout_batch
from quatrain.types.sampler import PerRequestSampling, Request


@pytest.fixture(scope="module")
def model():
    return routed_model()


@pytest.fixture
def check(computed_by, model) -> Callable[..., None]:
    """check(batch): each token has the experts of a pass over its sequence, by what computed it."""
    of = host_model.check_routes if computed_by == "host" else check_routes
    return partial(of, model[1], model[0])


def _prompts(sizes=(5, 1, 17, 9, 3), common=0) -> list[Prompt]:
    rng = np.random.default_rng(0)
    first = rng.integers(1, 290, common)
    ids = [np.concatenate([first, rng.integers(1, 290, size)]).astype(np.int32) for size in sizes]
    return [Prompt(20 + i, each, f"{i}") for i, each in enumerate(ids)]


def _engine(model, tokenizer, **options):
    config = RolloutConfig(**{"n": 3, "max_new_tokens": 12, "temperature": 0.9, **options})
    engine = local_rollouts(model[0], config, tokenizer, stop_ids=tuple(range(0, 290, 13)), seed=1)
    engine.sync_weights(model[1], 0)
    return engine


@pytest.mark.parametrize("slots", [None, 4], ids=["all at once", "slots refilled"])
@pytest.mark.parametrize("common", [0, 40], ids=["", "a common prefix"])
def test_each_token_has_the_experts_of_a_pass_over_its_sequence(model, tokenizer, check, slots, common):
    engine = _engine(model, tokenizer, max_concurrency=slots)
    batch = engine.generate(_prompts(common=common))
    assert len(np.unique(batch.completion_lengths)) > 2
    check(batch)
    assert len(np.unique(batch.routes[batch.routes != 255])) == 8


def test_long_prompts_have_routes_part_by_part(model, tokenizer, check, monkeypatch):
    monkeypatch.setattr("quatrain.engine.session.PREFILL_TOKENS", 16)
    check(_engine(model, tokenizer).generate(_prompts((40, 3, 17))))


def test_stop_strings_cut_routes_too(model, tokenizer, check):
    usual = _engine(model, tokenizer).generate(_prompts())
    texts = [tokenizer.decode(ids[mask][2:3]) for ids, mask in zip(usual.input_ids, usual.completion_mask)]
    stop = tuple({text for text in texts if text.strip()})[:6]
    batch = _engine(model, tokenizer, stop=stop).generate(_prompts())
    assert batch.completion_lengths.sum() < usual.completion_lengths.sum()
    check(batch)


def _session(model, tokenizer, *, most=None, memory=1 << 28, usual_prompt=1):
    where = "xla", one_device(), memory, usual_prompt
    of = model[0], tokenizer, STOP_IDS, 11, jnp.dtype("float32")
    settings = SessionSettings(*of, *where, records_routes=True, prefix_share=0.5)
    return Session(settings, Sampling(1, 40), most, per_request_sampling=True)


def _batch(tokenizer, completions: list[Completion], ids=PROMPTS):
    prompts = [Prompt(i // 3, np.array(ids[i // 3], np.int32), "") for i in range(len(completions))]
    return rollout_batch(list(zip(prompts, completions)), tokenizer, {})


@pytest.fixture(scope="module")
def played(model, tokenizer):
    """The batch of episodes whose prompts begin alike, on a device: slots are refilled, contexts kept."""
    prompts = [[*range(60, 100), *ids] for ids in PROMPTS[:2]]
    session = _session(model, tokenizer, most=2, usual_prompt=200)
    completions = Episodes(session).run(model[1], prompts, max_new_tokens=24)
    assert max(len(completion.turns) for completion in completions) == TURNS
    return _batch(tokenizer, completions, prompts)


@pytest.mark.slow
def test_turns_on_a_device_have_the_experts_of_a_pass_over_their_sequences(model, played):
    """Of a common prefix, prompts, answers and sampled tokens; the fault: those of another token or layer."""
    check_routes(model[1], model[0], played)
    assert len(np.unique(played.routes[played.routes != 255])) == 8


def test_a_recording_that_is_one_token_late_or_early_is_noticed(model, played):
    """By the check that these tests use."""
    for shift in (1, -1):
        routes = np.roll(played.routes, shift, axis=1)
        routes[np.arange(len(played)), played.lengths - 1] = 255
        with pytest.raises(AssertionError, match="have the routes of others"):
            check_routes(model[1], model[0], replace(played, routes=routes))


@pytest.mark.parametrize(
    ("most", "sequences", "chance"),
    [(4, 99, 0.0), (None, 99, 0.2), (None, 3, 0.0), (4, 1.1, 0.5)],
    ids=["refilled", "preempted", "little memory", "all"],
)
def test_turns_that_are_kept_refilled_or_computed_again_keep_their_routes(
    model, tokenizer, check, most, sequences, chance
):
    memory = int(sequences * 300 * bytes_per_position(model[0], "float32"))
    session = _session(model, tokenizer, most=most, memory=memory)
    waits = lambda number, rounds: (number * 7 + rounds * 5) % 6  # noqa: E731
    completions = Episodes(session, waits, preempted(chance)).run(model[1])
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert bool(chance) <= (session.stats.recomputed_tokens > 0)
    check(_batch(tokenizer, completions))


@pytest.mark.slow
def test_what_is_computed_again_takes_the_recorded_experts(tokenizer):
    """After a preemption with other recorded experts, tokens are those of a model with these experts."""
    model = routed_model(num_hidden_layers=2, mlp_only_layers=[1])
    [prompt] = _prompts((9,))
    sampling = Sampling(n=1, max_new_tokens=20, temperature=0.0)
    found = []
    for changes in (False, True):
        where = "xla", one_device(), 1 << 28
        settings = SessionSettings(
            model[0], tokenizer, (289,), 11, jnp.dtype("float32"), *where, records_routes=True
        )
        session = Session(settings, sampling, None)
        (ticket,) = session.submit([prompt], 0)
        session.advance(model[1], 0)
        completion = session.completions(ticket)[0]
        if changes:
            parts = completion.columns["routes"]
            parts[:] = [(np.array(part) + 3) % 8 for part in parts]
        (who,) = session._scheduler.placed
        session._scheduler.preempt(*who)
        while not session.finished([ticket]):
            session.advance(model[1], 0)
        assert session.stats.recomputed_tokens > 0
        found.append((completion.tokens, completion.logprobs, completion.known("routes")))
    assert found[0][2] == found[1][2] == 9 + 20 - 1
    assert found[0][1][:9] == found[1][1][:9]
    assert np.abs(np.subtract(found[0][1][9:], found[1][1][9:])).max() > 1e-3


def test_requests_of_their_own_have_routes(model, tokenizer, check):
    config = RolloutConfig(n=1, max_new_tokens=30)
    engine = RolloutEngine(model[0], config, tokenizer, stop_ids=(0,), seed=1, per_request_sampling=True)
    engine.sync_weights(model[1], 0)
    prompts = [replace(prompt, group_id=0) for prompt in _prompts()]
    owners = [PerRequestSampling(Sampling(1, 3 + 4 * i), 5, 0, i) for i in range(len(prompts))]
    tickets = engine.submit(list(map(Request.alone, prompts, owners)))
    while not all(map(engine.finished, tickets)):
        engine.advance()
    taken = [turn for ticket in tickets for turn in engine.take(ticket)]
    samples = [(replace(prompt, group_id=i), turn) for i, (prompt, turn) in enumerate(zip(prompts, taken))]
    check(rollout_batch(samples, tokenizer, {}))


@pytest.mark.usefixtures("computed_by")
def test_the_off_switch_records_nothing(model, tokenizer):
    batches = [_engine(model, tokenizer, record_routes=value).generate(_prompts()) for value in (False, True)]
    assert batches[0].routes is None
    assert batches[1].routes is not None
    np.testing.assert_array_equal(batches[0].input_ids, batches[1].input_ids)
    np.testing.assert_array_equal(batches[0].rollout_logprobs, batches[1].rollout_logprobs)


@pytest.mark.usefixtures("computed_by")
def test_routes_are_refused_for_a_model_without_experts(tokenizer):
    arch = builtin_architecture("tiny", len(tokenizer), (0,))
    with pytest.raises(ValueError, match=r"rollout\.record_routes must be auto or false for a model"):
        local_rollouts(arch, RolloutConfig(record_routes=True), tokenizer, stop_ids=(0,), seed=1)
    engine = local_rollouts(arch, RolloutConfig(n=1, max_new_tokens=4), tokenizer, stop_ids=(0,), seed=1)
    engine.sync_weights(init_params(arch, jax.random.key(0)), 0)
    assert engine.generate(_prompts((3,))).routes is None


@pytest.mark.slow
def test_many_experts_are_recorded_as_sixteen_bits(tokenizer):
    """The fault: numbers of experts above 255 that wrap around."""
    sizes = {"num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": 4}
    arch, params = routed_model(num_experts=300, **sizes)
    batch = _engine((arch, params), tokenizer, n=1, max_new_tokens=8).generate(_prompts((17, 9)))
    assert batch.routes.dtype == np.uint16
    assert batch.routes[batch.routes != 65535].max() > 255
    check_routes(params, arch, batch)
    assert routes_of_rows(params, arch, batch.input_ids, batch.lengths).dtype == np.uint16
