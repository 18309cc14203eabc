"""Agents whose turns workers of a fleet sample: the episodes of one engine, whichever worker is lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from test_play import AGENTS, prompts

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.episodes.agent_episodes import AgentPlayer, AgentRules
from quatrain.parallel.mesh import one_device
from quatrain.rollout.engine_worker import EngineWorker, weights_reader
from quatrain.rollout.fleet import Fleet
from quatrain.rollout.publish import InMemory
from quatrain.rollout.rollouts import Rollouts
from quatrain.rollout.worker import FinishedGroup, WorkerLost
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import ServiceFailed


@pytest.fixture
def playing(small_arch, small_params, tokenizer):
    """The agent `name` on `num_workers` workers, each made by `worker`; on one engine without workers."""
    sampling = Sampling(3, 40, 0.9)

    def engine():
        settings = RolloutConfig(n=1, max_new_tokens=small_arch.max_position, temperature=0.9)
        options = {"stop_ids": (tokenizer.eos_token_id,), "seed": 11, "cache_bytes": 1 << 26}
        return RolloutEngine(small_arch, settings, tokenizer, per_request_sampling=True, **options)

    def on_fleet(num_workers, worker):
        read = weights_reader(small_arch, one_device())

        def factory():
            return worker(engine(), read, name="engine", num_slots=None, timeout_s=60.0)

        return Fleet([factory] * num_workers, InMemory(), dtype="float32", timeout_s=60.0)

    @contextmanager
    def played(name, num_workers=0, worker=EngineWorker, **args):
        fields = {"concurrency": None, "timeout_s": 60.0, "max_turns": 8, "more_tokens": 200, "seed": 11}
        sampler = on_fleet(num_workers, worker) if num_workers else EngineService(engine(), thread=None)
        player = AgentPlayer(
            sampler,
            AgentRules(f"{AGENTS}:{name}", args, num_workers=2, longest=small_arch.max_position, **fields),
            tokenizer=tokenizer,
            stop_ids=(tokenizer.eos_token_id,),
            model="small",
            vocab_size=small_arch.vocab_size,
        )
        rollouts = Rollouts(sampler, tokenizer, sampling, player)
        try:
            rollouts.sync_weights(small_params, 3)
            yield rollouts
        finally:
            rollouts.close()

    return played


class Fragile(EngineWorker):
    """The first of its kind dies with its third group."""

    made = taken = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        Fragile.made += 1
        self.is_first = Fragile.made == 1

    def take(self, timeout_s):
        finished = super().take(timeout_s)
        Fragile.taken += len(finished) * self.is_first
        if self.is_first and Fragile.taken > 2:
            raise WorkerLost("it died")
        return finished


class Refusing(EngineWorker):
    def submit(self, groups, version):
        self._unfinished += len(groups)
        for group in groups:
            self._finish(FinishedGroup(group.number, error="ValueError: no"))


class Hanging(EngineWorker):
    """Ends no group, and loads no weights before it has."""

    labels_versions = False

    def submit(self, groups, version):
        self._unfinished += len(groups)


pytestmark = pytest.mark.usefixtures("computed_by")


@pytest.mark.parametrize("worker", [pytest.param(EngineWorker, marks=pytest.mark.slow), Fragile])
def test_turns_on_workers_are_those_of_one_engine(playing, tokenizer, tmp_path, worker):
    Fragile.made = Fragile.taken = 0
    batches = []
    for number, count in enumerate((0, 2)):
        with playing("edits", count, worker, log=str(tmp_path / f"log{number}.jsonl")) as rollouts:
            batches.append(rollouts.generate(prompts(tokenizer), step=5))
    one, other = batches
    assert one.completions == other.completions
    np.testing.assert_array_equal(one.input_ids, other.input_ids)
    np.testing.assert_array_equal(one.completion_mask, other.completion_mask)
    np.testing.assert_array_equal(one.episode_ids, other.episode_ids)
    np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5)
    assert (other.policy_version[other.completion_mask] == 3).all()
    assert other.metrics["fleet/restarts"].result() == (worker is Fragile)
    assert (other.metrics["fleet/retried_groups"].result() > 0) == (worker is Fragile)
    work = {"rollout/prefill_tokens", "rollout/prefill_s", "rollout/decode_s", "rollout/slot_utilisation"}
    assert work <= other.metrics.keys() & one.metrics.keys()
    prefilled = [batch.metrics["rollout/prefill_tokens"].result() for batch in batches]
    assert prefilled[1] >= prefilled[0] > 0  # a turn of a worker that was lost is computed twice


def test_new_weights_wait_for_what_agents_have_left(playing, small_params, tokenizer):
    """An agent that leaves takes its request along; a worker may have it still."""
    with playing("leaves_requests_behind", 1) as rollouts:
        rollouts.generate(prompts(tokenizer), step=1)
        rollouts.sync_weights(small_params, 4)
        batch = rollouts.generate(prompts(tokenizer), step=2)
    assert (batch.policy_version[batch.completion_mask] == 4).all()


def test_a_turn_that_no_worker_samples_costs_its_episode(playing, tokenizer, tmp_path):
    """The agent gets an error; here it is that of every episode, so that the run ends."""
    with (
        playing("edits", 1, Refusing, log=str(tmp_path / "log.jsonl")) as rollouts,
        pytest.raises(ValueError, match=r"every episode of .* has a fault(.|\n)*it failed 4 times, last on"),
    ):
        rollouts.generate(prompts(tokenizer), step=5)


def test_nothing_waits_for_a_fleet_that_was_closed(playing, small_params, tokenizer):
    with playing("once", 1, Hanging) as rollouts:
        rollouts.submit(prompts(tokenizer), step=1)
        fleet = rollouts.sampler
        # All six episodes have asked, so that none asks after the drop.
        while len(asked := list(fleet._awaited)) < 6 or not all(map(fleet._table.is_given, asked)):
            time.sleep(0.01)
        fleet.drop(list(fleet._awaited))  # the worker has them still
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(fleet.load, small_params, 4)
            time.sleep(0.3)
            fleet.close()
            with pytest.raises(RuntimeError, match="the fleet was closed"):
                waiting.result(5)
        with pytest.raises(ServiceFailed):
            rollouts.generate(prompts(tokenizer), step=2)
