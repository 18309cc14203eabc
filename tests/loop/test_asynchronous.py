"""The order of batches sampled ahead, and which weights sample them, with stages that record their calls."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.schema import Config, DataConfig
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import load_tokenizer
from quatrain.loop.asynchronous import AsyncRollouts, staleness
from quatrain.types.batches import PromptPosition, RewardedBatch
from quatrain.types.rollouts import Completion, rollout_batch

TOKENS_A_STEP = 2
"""Optimizer steps of a training step here, so that versions and steps differ."""


class Rollout:
    """Completions whose only token is the number that the weights hold."""

    def __init__(self, tokenizer):
        self.tokenizer, self.closed = tokenizer, threading.Event()
        self.hang_at, self.calls = None, []
        self.num_tokens = 0
        self.on_sync = lambda version: None
        self.hangs = threading.Event()
        self.decoded = threading.Semaphore(0)
        """Released once for each token that may be decoded, in flight."""

    def copy_weights(self, params):
        return jax.tree.map(jnp.copy, params)

    def sync_weights(self, params, version):
        self.weights, self.version = params, version
        self.on_sync(version)

    def release(self):
        self.weights = None

    def generate(self, prompts, *, step):
        self.calls.append(step)
        if step == self.hang_at:
            self.hangs.set()
            self.closed.wait(20)
            raise RuntimeError("closed")
        time.sleep(0.002)
        token = int(self.weights["w"][0])

        def completion():
            made = Completion(finish_reason="stop")
            made.extend([token], [-1.0], self.version)
            return made

        return rollout_batch([(prompt, completion()) for prompt in prompts], self.tokenizer, {})

    def submit(self, prompts, *, step):
        self.calls.append(step)
        return {"prompts": prompts, "completions": [Completion(finish_reason="stop") for _ in prompts]}

    def wait(self, ticket):
        """Two tokens, each of the weights at its time."""
        for _ in range(2):
            for made in ticket["completions"]:
                made.extend([int(self.weights["w"][0])], [-1.0], self.version)
            self.num_tokens += 1
            self.decoded.acquire()
        return rollout_batch(
            list(zip(ticket["prompts"], ticket["completions"], strict=True)), self.tokenizer, {}
        )

    def close(self):
        self.closed.set()


class Reward:
    fail_at = None

    def score(self, rollouts):
        if self.fail_at in rollouts.group_ids:
            raise ValueError("this prompt cannot be scored")
        rewards = np.zeros(len(rollouts), np.float32)
        return RewardedBatch(rollouts, rewards, rewards[None], ("r",))


@pytest.fixture(scope="module")
def source():
    return load_prompts("builtin:arithmetic", DataConfig(), load_tokenizer("builtin:tiny"), seed=3)


@pytest.fixture
def make(source):
    opened = []

    def make(max_staleness, *, steps=12, barrier_every=0, in_flight=False):
        stages = SimpleNamespace(rollout=Rollout(load_tokenizer("builtin:tiny")), reward=Reward())
        config = Config(
            data={"batch_size": 3},
            rollout={"max_staleness": max_staleness, "in_flight": in_flight},
            checkpoint={"every_steps": barrier_every},
        )
        ahead = AsyncRollouts(config, stages, source, steps)
        opened.append(ahead)
        return ahead, stages

    yield make
    for ahead in opened:
        ahead.close()


def state(step):
    """The state at the start of training step `step`; its weights hold the step's number."""
    params = {"w": jnp.full(1, step)}
    place = PromptPosition(3 * step)
    return SimpleNamespace(params=params, step=TOKENS_A_STEP * step, train_step=step, position=place)


def trained(ahead, steps, first=0):
    """[(step whose weights sampled the batch, first prompt)] of each step, taken in order."""
    found = []
    for step in range(first, steps):
        now = state(step)
        taken = ahead.take(now)
        now.params["w"].delete()  # training takes over the parameters
        rollouts = taken.rewarded.rollouts
        (token,) = np.unique(rollouts.input_ids[rollouts.completion_mask])
        (version,) = np.unique(rollouts.policy_version[rollouts.completion_mask])
        assert version == TOKENS_A_STEP * token
        assert taken.position == PromptPosition(3 * (step + 1))
        found.append((int(token), int(rollouts.group_ids[0])))
    return found


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("barrier_every", [0, 1, 4, 5])
def test_batches_are_sampled_by_weights_of_exactly_the_lag(make, max_staleness, barrier_every):
    ahead, stages = make(max_staleness, barrier_every=barrier_every)
    barrier = [step // barrier_every * barrier_every if barrier_every else 0 for step in range(12)]
    assert trained(ahead, 12) == [(max(step - max_staleness, barrier[step]), 3 * step) for step in range(12)]
    assert stages.rollout.calls == list(range(12))


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_resumed_run_samples_what_the_uninterrupted_one_does(make, max_staleness):
    whole = trained(make(max_staleness, barrier_every=4)[0], 12)
    for barrier in (4, 8):
        assert trained(make(max_staleness, barrier_every=4)[0], 12, first=barrier) == whole[barrier:]


def test_an_error_is_raised_when_its_batch_is_taken(make):
    ahead, stages = make(2)
    stages.reward.fail_at = 3 * 4 + 1
    assert [step for step, _ in trained(ahead, 4)] == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="this prompt cannot be scored"):
        ahead.take(state(4))


def test_a_job_runs_in_its_turn_on_the_thread_of_the_rollout(make):
    for max_staleness in (0, 2):
        ahead, stages = make(max_staleness)
        trained(ahead, 3)
        thread, calls = ahead.run(lambda: (threading.current_thread(), list(stages.rollout.calls)))  # noqa: B023
        assert (thread is threading.main_thread()) == (max_staleness == 0)
        assert calls == list(range(3 + max_staleness))  # all batches that may be sampled already
        with pytest.raises(ZeroDivisionError):
            ahead.run(lambda: 1 / 0)
        assert len(trained(ahead, 6, first=3)) == 3


def test_closing_ends_a_rollout_that_runs_and_discards_the_rest(make):
    ahead, stages = make(3)
    stages.rollout.hang_at = 1
    trained(ahead, 1)
    stages.rollout.hangs.wait(20)
    ahead.close()
    assert stages.rollout.closed.is_set()
    assert stages.rollout.calls == [0, 1]
    assert not any(
        thread.name == "quatrain-rollout" and thread.is_alive() for thread in threading.enumerate()
    )


def test_nothing_begins_after_the_end(make):
    ahead, _ = make(1, steps=3)
    trained(ahead, 3)
    ahead.close()
    with pytest.raises(RuntimeError, match="the rollout was closed"):
        ahead.run(lambda: None)
    ahead.close()


def test_steps_are_taken_in_order(make):
    ahead, _ = make(2)
    trained(ahead, 2)
    with pytest.raises(ValueError, match="in the order of steps: the next is 2, got 3"):
        ahead.take(state(3))


def test_a_thread_that_does_not_end_is_told(make, monkeypatch, caplog):
    monkeypatch.setattr("quatrain.loop.asynchronous.END_TIMEOUT_S", 0.05)
    ahead, _ = make(1)
    began, release = threading.Event(), threading.Event()
    ahead._run(lambda: (began.set(), release.wait()))
    assert began.wait(20)
    ahead.close()
    assert "did not end within 0.05 seconds and is left behind" in caplog.text
    release.set()


def test_who_waits_for_whom_is_measured_only_with_a_lag(make):
    waits = {"wait_rollout", "wait_weights", "copy_weights", "lead"}
    for max_staleness in (0, 1):
        taken = make(max_staleness)[0].take(state(0))
        assert taken.seconds.keys() == {"rollout", "reward", *(waits if max_staleness else ())}
        assert taken.seconds["rollout"] >= 0.002
        assert ("async/staleness_max" in taken.rewarded.metrics) == (max_staleness > 0)


def test_the_age_of_tokens_is_counted_in_optimizer_steps(make):
    batch = make(0)[0].take(state(2)).rewarded.rollouts  # three sequences of one token, version 4
    versions = batch.policy_version.copy()
    versions[0][batch.completion_mask[0]] = 1
    found = staleness(replace(batch, policy_version=versions), 7)
    assert {name: metric.result() for name, metric in found.items()} == {
        "async/staleness_mean": (6 + 3 + 3) / 3,
        "async/staleness_max": 6,
        "async/versions_per_sequence_max": 1,
    }


def test_weights_are_exchanged_in_flight(make):
    ahead, stages = make(1, in_flight=True)
    decoded = stages.rollout.decoded

    def versions(taken):
        rollouts = taken.rewarded.rollouts
        return rollouts.policy_version[0][rollouts.completion_mask[0]].tolist()

    decoded.release(2)
    assert versions(ahead.take(state(0))) == [0, 0]
    assert stages.rollout.calls == [0, 1]
    while stages.rollout.num_tokens < 3:  # until the first token of the second batch
        time.sleep(0.001)
    stages.rollout.on_sync = lambda version: decoded.release(2) if version == TOKENS_A_STEP else None
    taken = ahead.take(state(1))
    assert versions(taken) == [0, TOKENS_A_STEP]
    assert taken.rewarded.rollouts.group_ids.tolist() == [3, 4, 5]
    assert stages.rollout.calls == [0, 1, 2]
    metrics = {name: metric.result() for name, metric in taken.rewarded.metrics.items()}
    assert (metrics["async/staleness_max"], metrics["async/versions_per_sequence_max"]) == (TOKENS_A_STEP, 2)
    decoded.release(100)
    ahead.run(lambda: stages.rollout.sync_weights({"w": jnp.zeros(1)}, 99))  # as an evaluation does
    assert (int(stages.rollout.weights["w"][0]), stages.rollout.version) == (1, TOKENS_A_STEP)


def test_the_samplers_weights_are_freed_before_the_update_unless_it_runs_ahead(make):
    for max_staleness in (0, 1):
        ahead, stages = make(max_staleness)
        ahead.take(state(0))
        assert (stages.rollout.weights is None) == (max_staleness == 0)
        ahead.run(lambda rollout=stages.rollout: rollout.sync_weights({"w": jnp.zeros(1)}, 9))
        assert (stages.rollout.weights is None) == (max_staleness == 0)
