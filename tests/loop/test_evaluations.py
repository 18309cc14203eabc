"""When a run evaluates, and what of its evaluations a resumed run goes on from; runs are in `e2e/`."""

from types import SimpleNamespace

import pytest

from quatrain.config.schema import Config
from quatrain.loop.evaluations import Evaluations
from quatrain.run.best import Best


class Source:
    def __init__(self, digest):
        self.digest = digest

    def digests(self, first):
        return {"the prompts": self.digest}


def made(every=2, steps=6, digest="0a", best=None, **sections):
    data = {"eval": "builtin:arithmetic"}
    config = Config(data=data, eval={"every_steps": every, "num_prompts": 4}, **sections)
    sets = [SimpleNamespace(name="", source=Source(digest))]
    generation = SimpleNamespace(evaluator=SimpleNamespace(sets=sets))
    return Evaluations(config, best, None, None, steps=steps, generation=generation)


def due(evaluations, steps=8):
    return [step for step in range(steps) if evaluations._is_due(step)]


def test_a_run_evaluates_every_so_many_steps_and_not_before_or_after_the_last():
    assert due(made()) == [2, 4]  # the step 6 is the last, which has an evaluation of its own
    assert due(made(steps=7)) == [2, 4, 6]
    assert due(made(every=0)) == []


@pytest.mark.parametrize(("evaluated", "due_again"), [(True, [2]), (False, [2, 4])])
def test_a_resumed_run_evaluates_its_step_unless_that_was_done(evaluated, due_again):
    first = made()
    first.before, first.accuracy = {"eval/reward": 0.25}, 0.5
    first._evaluated = 4 if evaluated else 2
    saved = first.to_save(4)
    assert saved["evaluation_due"] is not evaluated
    resumed = made()
    resumed.restore(saved, 4, [4])
    assert due(resumed) == due_again
    assert (resumed.before, resumed.accuracy) == ({"eval/reward": 0.25}, 0.5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"digest": "ff"}, "the prompts of builtin:arithmetic"),
        ({"eval_tokens": 7}, "max_new_tokens"),
    ],
)
def test_evaluations_of_another_kind_are_not_compared(tmp_path, caplog, changes, what):
    best = Best(tmp_path, "eval/reward", "max")
    best.note(2, {"eval/reward": 0.75})
    first = made(best=best)
    first.before, first.accuracy = {"eval/reward": 0.25}, 0.5
    saved = first.to_save(4)
    assert saved["best"]["step"] == 2
    again = made(best=Best(tmp_path, "eval/reward", "max"))
    again.restore(saved, 4, [2, 4])
    assert (again.best.found["step"], again.accuracy) == (2, 0.5)
    more = {"rollout": {"max_new_tokens": changes["eval_tokens"]}} if "eval_tokens" in changes else changes
    other = made(best=Best(tmp_path, "eval/reward", "max"), **more)
    other.restore(saved, 4, [2, 4])
    assert (other.before, other.accuracy, other.best.found) == ({}, None, None)
    assert f"the evaluations have changed in {what}" in caplog.text
