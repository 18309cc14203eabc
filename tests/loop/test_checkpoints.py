"""What a checkpoint holds of the state of a run, and when one is saved; runs are in `e2e/test_train.py`."""

from contextlib import closing, contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.schema import Config
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.stop_when import StopWhen
from quatrain.run.best import Best
from quatrain.run.checkpoint import Checkpointer
from quatrain.types.batches import PromptPosition
from quatrain.update.learner import TrainState
from quatrain.update.trainer import ModelState


class Evaluations:
    """Those of a run without evaluation sets, with what they were restored from."""

    def __init__(self, best=None):
        self.best, self.restored, self.changed = best, None, []

    def to_save(self, step):
        found = None if self.best is None else self.best.found
        return {"before": {}, "accuracy": 0.5, "evaluation_due": False, "best": found}

    def restore(self, host, step, checkpoints):
        self.restored = host["accuracy"], step, list(checkpoints)


class Recorder:
    def __init__(self):
        self.report = SimpleNamespace(event=lambda text: None, page=lambda: None)

    def log(self, step):
        pass

    @contextmanager
    def timed(self, stage):
        yield


class Reference:
    def __init__(self, value):
        self.value = value

    def arrays(self):
        return {"reference": {"w": self.value}}

    def restore(self, trained):
        self.value = trained["w"]


def numbers(first):
    return {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + first}


def trained_state():
    """A state of which no field has its default."""
    critic = ModelState(numbers(20), {"mu": numbers(30)}, step=5, bad_steps=1)
    return TrainState(
        numbers(0),
        {"mu": numbers(10)},
        step=7,
        bad_steps=2,
        train_step=4,
        critic=critic,
        reward_kl_coef=0.25,
        position=PromptPosition(48, 3, (None, 1 / 3, 0.0)),
        metrics={"loss": None},
    )


def fresh_state():
    zeros = {"w": jnp.zeros((2, 3))}
    critic = ModelState(dict(zeros), {"mu": {"w": jnp.zeros((2, 3))}})
    return TrainState({"w": jnp.zeros((2, 3))}, {"mu": {"w": jnp.zeros((2, 3))}}, critic=critic)


@contextmanager
def made(
    tmp_path,
    *,
    every=1,
    steps=100,
    keep=1,
    best=None,
    reference=None,
    stop_when=None,
    kl_coef=0.5,
    kl_target=0.1,
):
    """(checkpoints, their store, their evaluations) of a run in `tmp_path`."""
    config = Config(reward={"kl_coef": kl_coef, "kl_target": kl_target})
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": every})}
    )
    folder = SimpleNamespace(
        checkpoints=tmp_path / "checkpoints", rewind=lambda step: None, name="run", final=tmp_path / "final"
    )
    saved = {"config": {}, "num_prompts": 1}
    identity = SimpleNamespace(to_save=lambda: saved, check=lambda host: None)
    evaluations = Evaluations(best)
    with closing(Checkpointer(folder.checkpoints, keep=keep)) as store:
        yield (
            Checkpoints(
                config,
                folder,
                store,
                SimpleNamespace(lora=None, partly_frozen=False),
                reference or SimpleNamespace(arrays=dict),
                evaluations,
                Recorder(),
                steps=steps,
                identity=identity,
                stop_when=stop_when or StopWhen(config, (), ()),
            ),
            store,
            evaluations,
        )


def test_a_resumed_run_has_the_whole_state_again(tmp_path):
    """Every field but the metrics: a cursor, a counter or a moment that is not saved would be lost."""
    state = trained_state()
    with made(tmp_path, reference=Reference(numbers(40)["w"])) as (checkpoints, store, _):
        checkpoints.save(state)
        store.wait()
    reference = Reference(jnp.zeros((2, 3)))
    with made(tmp_path, reference=reference) as (checkpoints, _, evaluations):
        restored = checkpoints.restore(fresh_state())
    for each in fields(ModelState):
        for own, before in ((restored, state), (restored.critic, state.critic)):
            now, then = getattr(own, each.name), getattr(before, each.name)
            if isinstance(then, int):
                assert now == then, each.name
            else:
                now, then = (tree.get("mu", tree)["w"] for tree in (now, then))
                np.testing.assert_array_equal(now, then)
    assert (restored.train_step, restored.reward_kl_coef) == (4, 0.25)
    assert restored.position == PromptPosition(48, 3, (None, 1 / 3, 0.0))
    np.testing.assert_array_equal(reference.value, numbers(40)["w"])
    assert evaluations.restored == (0.5, 4, [4])


@pytest.mark.parametrize(
    ("before", "now", "coef"),
    [
        ((0.5, 0.1), (0.5, 0.2), 0.25),  # it goes on adapting
        ((0.5, 0.1), (0.01, 0.1), 0.01),
        ((0.5, 0.1), (0.5, None), 0.5),
        ((0.0, None), (0.5, None), 0.5),
        ((0.0, None), (0.5, 0.1), 0.5),
    ],
)
def test_another_coefficient_of_the_kl_in_the_reward_counts_after_a_resume(tmp_path, before, now, coef):
    """That of the checkpoint stayed: the key was listed as changed, and had no effect."""
    state = replace(trained_state(), reward_kl_coef=0.25 if before[0] else 0.0)
    with made(tmp_path, kl_coef=before[0], kl_target=before[1]) as (checkpoints, store, _):
        checkpoints.save(state)
        store.wait()
    with made(tmp_path, kl_coef=now[0], kl_target=now[1]) as (checkpoints, _, _):
        assert checkpoints.restore(fresh_state()).reward_kl_coef == coef


@pytest.mark.parametrize(("changed", "best"), [([], 0.75), (["data.eval"], None)])
def test_patience_begins_anew_where_evaluations_have_changed(tmp_path, changed, best):
    """An easier evaluation set before would end a run that becomes better."""
    condition = {"metric": "eval/reward", "patience": 2}
    patient = Config(run={"stop_when": condition}, eval={"every_steps": 1})
    stop_when = StopWhen(patient, ("eval/reward",), ())
    stop_when.reached({"eval/reward": 0.75})
    with made(tmp_path, stop_when=stop_when) as (checkpoints, store, _):
        checkpoints.save(trained_state())
        store.wait()
    stop_when = StopWhen(patient, ("eval/reward",), ())
    with made(tmp_path, stop_when=stop_when) as (checkpoints, _, evaluations):
        evaluations.changed = changed
        checkpoints.restore(fresh_state())
    assert stop_when.to_save()["best"] == best


@pytest.mark.parametrize(
    ("every", "bad_steps", "saved"),
    [
        (2, 0, [2, 4, 5]),
        (0, 0, [5]),
        (2, 1, [5]),
    ],  # the last step always; not after steps that were not applied
)
def test_when_a_checkpoint_is_saved(tmp_path, every, bad_steps, saved):
    with made(tmp_path, every=every, steps=5, keep=9) as (checkpoints, store, _):
        for step in range(1, 6):
            checkpoints.save_when_due(replace(fresh_state(), train_step=step, bad_steps=bad_steps))
        store.wait()
        assert store.steps() == saved


def test_the_best_step_is_saved_and_kept(tmp_path):
    best = Best(tmp_path, "eval/reward", "max")
    with made(tmp_path, every=2, steps=7, best=best) as (checkpoints, store, _):
        for step, value in enumerate([0.1, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1], start=1):
            best.note(step, {"eval/reward": value})
            checkpoints.save_when_due(replace(fresh_state(), train_step=step))
        store.wait()
        assert store.steps() == [2, 7]
    assert best.found["step"] == 2
