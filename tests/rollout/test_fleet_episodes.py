"""Episodes whose turns workers sample one by one: those of an engine that keeps them in its cache."""

import host_model
import numpy as np
import pytest
from rollouts import fleet_rollouts, local_rollouts
from routed_models import routed_model, routes_of_rows

from quatrain import StepResult
from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import render
from quatrain.engine.engine import RolloutEngine
from quatrain.episodes.environment_episodes import EnvironmentPlayer, EpisodeRules
from quatrain.episodes.environment_threads import InThreads
from quatrain.episodes.load_environment import load_environment
from quatrain.parallel.mesh import one_device
from quatrain.rollout.engine_worker import EngineWorker, weights_reader
from quatrain.rollout.publish import InMemory
from quatrain.rollout.worker import WorkerLost
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

STOP_IDS = tuple(range(0, 290, 5))


class Counts:
    """Answers with a number; one prompt's fails in its second turn."""

    def reset(self, number):
        self.number, self.turn = number, 0

    def step(self, completion):
        self.turn += 1
        if self.number == 2 and self.turn == 2:
            raise RuntimeError("no luck")
        message = {"role": "user", "content": f"{self.number} and {self.turn}"}
        return StepResult([message], reward=0.5, done=self.turn > self.number)


class Dying(EngineWorker):
    """Is lost with its fifth group; the next ones live."""

    taken = 0

    def take(self, timeout_s):
        finished = super().take(timeout_s)
        before, Dying.taken = Dying.taken, Dying.taken + len(finished)
        if before < 5 <= Dying.taken:
            raise WorkerLost("it died")
        return finished


@pytest.fixture
def make(computed_by, small_arch, small_params, tokenizer):
    made = []

    def make(num_workers=0, worker=EngineWorker, arch=small_arch, params=small_params):
        settings = RolloutConfig(n=3, max_new_tokens=24, temperature=0.9)
        of_engine = {"stop_ids": STOP_IDS, "seed": 11, "cache_bytes": 1 << 28}

        environments = load_environment(Counts)
        rules = EpisodeRules(
            tokenizer,
            environments.turns(tokenizer, STOP_IDS),
            InThreads(environments, 20.0),
            max_turns=3,
            max_environment_tokens=100,
            max_tokens=300,
            seed=11,
        )
        player = EnvironmentPlayer(rules)
        if not num_workers:
            rollouts = local_rollouts(arch, settings, tokenizer, player=player, **of_engine)
        else:
            read = weights_reader(arch, one_device())

            def factory():
                own = RolloutEngine(arch, settings, tokenizer, per_request_sampling=True, **of_engine)
                return worker(own, read, name="engine", num_slots=None, timeout_s=60.0)

            sampling = Sampling(3, 24, 0.9)
            options = {"sampling": sampling, "tokenizer": tokenizer, "dtype": "float32", "timeout_s": 60.0}
            rollouts = fleet_rollouts([factory] * num_workers, InMemory(), player=player, **options)
        rollouts.sync_weights(params, 5)
        made.append(rollouts)
        return rollouts

    yield make
    for rollouts in made:
        rollouts.close()


def _prompts(tokenizer) -> list[Prompt]:
    texts = [({"role": "user", "content": f"How many {i}?"},) for i in range(5)]
    return [
        Prompt(i, np.array(render(tokenizer, text).ids, np.int32), text, {"number": i})
        for i, text in enumerate(texts)
    ]


def test_episodes_have_the_routes_of_their_tokens_whoever_samples_the_turns(computed_by, make, tokenizer):
    """Of every token but those after the last turn."""
    arch, params = routed_model(vocab_size=294)
    one, fleet = (make(workers, arch=arch, params=params) for workers in (0, 2))
    expected, batch = (rollouts.generate(_prompts(tokenizer), step=3) for rollouts in (one, fleet))
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.routes, expected.routes)
    truth_of = host_model.routes_of_rows if computed_by == "host" else routes_of_rows
    truth = truth_of(params, arch, batch.input_ids, batch.lengths)
    recorded = (batch.routes != 255).any(axis=(2, 3))
    np.testing.assert_array_equal(np.sort(batch.routes[recorded]), np.sort(truth[recorded]))
    assert recorded[np.roll(batch.completion_mask, -1, axis=1)].all()
    assert max(map(len, batch.columns["messages"])) > 4


@pytest.mark.parametrize("worker", [EngineWorker, Dying])
def test_episodes_are_those_of_an_engine_whoever_is_lost(make, tokenizer, small_params, worker):
    prompts = _prompts(tokenizer)
    Dying.taken = 0
    one, fleet = make(), make(2, worker)
    for step in (3, 4):
        expected, batch = (rollouts.generate(prompts, step=step) for rollouts in (one, fleet))
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        np.testing.assert_array_equal(batch.completion_mask, expected.completion_mask)
        np.testing.assert_array_equal(batch.policy_version, expected.policy_version)
        np.testing.assert_allclose(batch.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
        assert batch.finish_reason.tolist() == expected.finish_reason.tolist()
        assert {"environment", "turns"} <= set(batch.finish_reason.tolist())
        assert "error" in batch.finish_reason[6:9]
        assert batch.columns == expected.columns
        for name in ("episode/turns/max", "episode/errors", "length/environment/max"):
            assert batch.metrics[name].result() == expected.metrics[name].result()
        if step == 3:
            assert batch.metrics["fleet/restarts"].result() == (worker is Dying)
        for rollouts in (one, fleet):
            rollouts.sync_weights(small_params, 6)
