"""A worker around an engine: groups that come at any time are those of a batch."""

import time
from contextlib import closing

import jax
import numpy as np
import pytest
from rollouts import fleet_rollouts, local_rollouts

from quatrain.config.schema import LoraConfig, RolloutConfig
from quatrain.engine.service import EngineService
from quatrain.models.lora import adapters_of, with_adapters, with_lora, with_trained
from quatrain.parallel.mesh import one_device
from quatrain.rollout.engine_worker import EngineWorker, weights_reader
from quatrain.rollout.publish import Folder, InMemory, gathered
from quatrain.rollout.worker import GroupSpec, WorkerLost
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

LENGTHS = (5, 2, 17, 9, 3)
PROMPTS = [
    Prompt(20 + i, np.arange(3, 3 + length, dtype=np.int32), f"prompt {i}", {"answer": i})
    for i, length in enumerate(LENGTHS)
]


@pytest.fixture
def make_engine(computed_by, small_arch, tokenizer):
    def make(arch=small_arch, **config):
        settings = RolloutConfig(**{"n": 3, "max_new_tokens": 12, "temperature": 0.9, **config})
        return local_rollouts(arch, settings, tokenizer, stop_ids=(0, 7), seed=11, cache_bytes=1 << 26)

    return make


def worker_of(engine, base=None, timeout_s=60.0, slots=None):
    engine = engine.engine
    read = weights_reader(engine._with_adapters, one_device(), base)
    return EngineWorker(engine, read, name="engine", num_slots=slots, timeout_s=timeout_s)


def fleet_of(engines, tokenizer, publisher=None, **options):
    factories = [lambda engine=engine: worker_of(engine, **options) for engine in engines]
    return fleet_rollouts(
        factories,
        publisher or InMemory(),
        sampling=engines[0].sampling,
        tokenizer=tokenizer,
        dtype="float32",
        timeout_s=60.0,
    )


def assert_same(batch, other):
    np.testing.assert_array_equal(batch.input_ids, other.input_ids)
    np.testing.assert_array_equal(batch.policy_version, other.policy_version)
    np.testing.assert_allclose(batch.rollout_logprobs, other.rollout_logprobs, atol=1e-5)
    assert batch.completions == other.completions
    assert batch.columns == other.columns


@pytest.mark.parametrize("count", [1, 2])
def test_a_fleet_of_engines_samples_what_one_engine_does(make_engine, small_params, tokenizer, count):
    whole = make_engine()
    whole.sync_weights(small_params, 5)
    expected = whole.generate(PROMPTS, step=3)
    fleet = fleet_of([make_engine() for _ in range(count)], tokenizer)
    fleet.sync_weights(small_params, 5)
    batch = fleet.generate(PROMPTS, step=3)
    assert_same(batch, expected)
    greedy = Sampling(n=1, max_new_tokens=5, temperature=0.0)
    assert_same(fleet.generate(PROMPTS, sampling=greedy), whole.generate(PROMPTS, sampling=greedy))
    each = fleet.generate_each([PROMPTS[:2], PROMPTS[2:]], sampling=greedy, at_once=2)
    for part, prompts in zip(each, (PROMPTS[:2], PROMPTS[2:]), strict=True):
        assert_same(part, whole.generate(prompts, sampling=greedy))
    assert 0 < batch.metrics["rollout/slot_utilisation"].result() <= 1
    assert batch.metrics["rollout/decode_s"].result() > 0
    fleet.close()


def test_groups_given_together_begin_in_one_round(make_engine, small_params, monkeypatch):
    """Catches an engine that begins with the first groups while others are being given to it: the shapes of
    its programs, and so the last bits of a run over a fleet, would depend on the timing."""
    began, start, taken = [], EngineService.start, EngineService._taken

    def slow_start(self, *arguments):
        time.sleep(0.05)
        return start(self, *arguments)

    def counted(self, *arguments):
        come = taken(self, *arguments)
        began.extend([len(come.asked)] if come.asked else [])
        return come

    monkeypatch.setattr(EngineService, "start", slow_start)
    monkeypatch.setattr(EngineService, "_taken", counted)
    worker = worker_of(make_engine())
    worker.load(gathered(small_params, "float32"), 4, 60)
    sampling = Sampling(n=2, max_new_tokens=4, temperature=1.0)
    worker.submit([GroupSpec(i, prompt, 0, sampling) for i, prompt in enumerate(PROMPTS)], 4)
    finished_of(worker, len(PROMPTS))
    worker.close()
    assert began == [len(PROMPTS)]


def test_weights_come_through_a_folder(make_engine, small_arch, small_params, tokenizer, tmp_path):
    whole = make_engine()
    whole.sync_weights(small_params, 5)
    fleet = fleet_of([make_engine()], tokenizer, Folder(tmp_path / "weights", small_arch))
    fleet.sync_weights(small_params, 5)
    assert_same(fleet.generate(PROMPTS, step=1), whole.generate(PROMPTS, step=1))
    doubled = jax.tree.map(lambda x: x * 1.5, small_params)
    fleet.sync_weights(doubled, 6)
    whole.sync_weights(doubled, 6)
    assert_same(fleet.generate(PROMPTS, step=1), whole.generate(PROMPTS, step=1))
    fleet.close()
    assert not list(tmp_path.iterdir())


def test_old_weights_are_freed_before_new_ones_are_read(make_engine, small_params):
    engine, held = make_engine().engine, []

    def read(weights):
        held.append(engine._params)
        return weights

    worker = EngineWorker(engine, read, name="w", num_slots=None, timeout_s=60.0)
    with closing(worker):
        for version in (1, 2):
            assert worker.load(small_params, version, 60.0) == version
            assert engine._params is not None
    assert held == [None, None]


def test_of_adapters_a_worker_needs_only_these(make_engine, small_arch, small_params, tokenizer):
    arch = with_lora(small_arch, LoraConfig(rank=2, targets=("all-linear", "lm_head")))
    params = with_adapters(small_params, arch, jax.random.key(3))
    params = with_trained(params, jax.tree.map(lambda x: x + 0.05, adapters_of(params)), arch)
    whole = make_engine(arch)
    whole.sync_weights(params, 2)
    fleet = fleet_of([make_engine(arch)], tokenizer, base=small_params)
    fleet.sync_weights(params, 2)
    assert_same(fleet.generate(PROMPTS, step=1), whole.generate(PROMPTS, step=1))
    fleet.close()


def finished_of(worker, count, limit_s=60):
    found, end = [], time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < end
        found += worker.take(0.5)
    return found


def test_groups_come_at_any_time_and_each_when_it_is_finished(make_engine, small_params):
    worker = worker_of(make_engine(max_concurrency=6))
    assert worker.load(gathered(small_params, "float32"), 4, 60) == 4
    assert worker.state() == "idle"
    sampling = Sampling(n=2, max_new_tokens=4, temperature=1.0)
    specs = [GroupSpec(i, prompt, 0, sampling) for i, prompt in enumerate(PROMPTS)]
    worker.submit(specs[:2], 4)
    assert worker.state() != "idle"
    first = finished_of(worker, 1)
    worker.submit(specs[2:], 4)
    found = first + finished_of(worker, 5 - len(first))
    assert sorted(group.number for group in found) == list(range(5))
    assert all(len(group.samples) == 2 and group.error is None for group in found)
    assert worker.state() == "idle"
    worker.close()


def test_a_group_for_which_there_is_no_room_fails_alone(make_engine, small_params):
    worker = worker_of(make_engine(max_concurrency=6))
    worker.load(gathered(small_params, "float32"), 4, 60)
    sampling = Sampling(n=2, max_new_tokens=4, temperature=1.0)
    huge = Prompt(9, np.ones(1 << 20, np.int32), "huge")
    worker.submit([GroupSpec(0, huge, 0, sampling), GroupSpec(1, PROMPTS[0], 0, sampling)], 4)
    found = {group.number: group.error for group in finished_of(worker, 2)}
    assert found[1] is None
    assert "KV cache" in found[0]
    worker.close()


def test_an_engine_that_fails_or_hangs_makes_the_worker_lost(make_engine, small_params, monkeypatch):
    sampling = Sampling(n=1, max_new_tokens=4, temperature=1.0)
    for advance, message in (
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: time.sleep(3), "a decode call takes longer than 0.2 s"),
    ):
        engine = make_engine()
        worker = worker_of(engine, timeout_s=0.2)
        worker.load(gathered(small_params, "float32"), 4, 60)
        monkeypatch.setattr(engine.engine, "advance", advance)
        worker.submit([GroupSpec(0, PROMPTS[0], 0, sampling)], 4)
        with pytest.raises(WorkerLost, match=message):
            finished_of(worker, 1, 10)
        worker.close()


def test_a_round_that_compiles_has_three_times_as_long_while_it_compiles(
    make_engine, small_params, monkeypatch
):
    engine = make_engine()
    worker = worker_of(engine, timeout_s=0.4)
    worker.load(gathered(small_params, "float32"), 4, 60)

    def advance():
        jax.jit(lambda x: (time.sleep(0.7), x)[1])(1.0)  # JAX counts tracing as a part of compiling
        raise RuntimeError("the end of the round")

    monkeypatch.setattr(engine.engine, "advance", advance)
    with closing(worker):
        worker.submit([GroupSpec(0, PROMPTS[0], 0, Sampling(n=1, max_new_tokens=4, temperature=1.0))], 4)
        time.sleep(0.2)
        assert worker.state() == "compiling"
        with pytest.raises(WorkerLost, match="the end of the round"):
            finished_of(worker, 1, 10)


def test_weights_are_exchanged_while_workers_sample(make_engine, small_params, tokenizer):
    """Tokens of a group say which weights sampled each, as those of one engine do; the fault: a group whose
    tokens all claim one version, and a worker that is lost for tokens of the older."""

    engine = make_engine(max_new_tokens=200, max_concurrency=3)
    fleet = fleet_of([engine], tokenizer, slots=3)
    fleet.sampler.wait_for_start()
    assert fleet.sampler.exchanges_in_flight
    fleet.sync_weights(small_params, 5)
    ticket = fleet.submit(PROMPTS, step=3)
    while not fleet.sampler.work().completions:
        time.sleep(0.01)
    fleet.sync_weights(small_params, 6)
    batch = fleet.wait(ticket)
    versions = batch.policy_version[batch.completion_mask]
    assert set(versions) == {5, 6}
    assert batch.metrics["fleet/restarts"].result() == 0
    whole = make_engine(max_new_tokens=200)
    whole.sync_weights(small_params, 5)
    np.testing.assert_array_equal(batch.input_ids, whole.generate(PROMPTS, step=3).input_ids)
    assert whole.sampler.exchanges_in_flight
    fleet.close()
