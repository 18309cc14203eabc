"""The keys that must agree when a run is resumed."""

import pytest

from quatrain.config.schema import Config
from quatrain.run.resume import must_agree_on_resume

ALWAYS = {
    "seed": 0,
    "run.task": "rl",
    "data.train": "builtin:arithmetic",
    "data.shuffle": True,
    "data.batch_size": 16,
    "data.pass_rate_column": "pass_rate",
    "data.min_pass_rate": None,
    "data.max_pass_rate": None,
    "data.curriculum": {},
    "rollout.n": 8,
    "rollout.max_staleness": 0,
    "rollout.in_flight": False,
    "update.reference_sync_steps": None,
    "optimizer.state_dtype": "float32",
    "lora.rank": 0,
    "data.image_max_pixels": None,
    "data.image_min_pixels": None,
    "model.vision": None,
}


@pytest.mark.parametrize(
    ("sections", "values"),
    [
        ({}, {}),
        ({"data": {"train": ["a.jsonl", "b.jsonl"]}}, {"data.train": ["a.jsonl", "b.jsonl"]}),
        (
            {"data": {"train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 0.5}]}},
            {"data.train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 0.5}]},
        ),
        ({"critic": {"enabled": True}}, {"critic_optimizer.state_dtype": "float32"}),
        (
            {"lora": {"rank": 2, "targets": ["o"]}},
            {"lora.rank": 2, "lora.alpha": None, "lora.targets": ["o"], "sft.steps": 0},
        ),
        (
            {"rollout": {"max_staleness": 1}, "checkpoint": {"every_steps": 7}},
            {"rollout.max_staleness": 1, "checkpoint.every_steps": 7},
        ),
    ],
)
def test_what_must_agree_depends_on_what_a_run_has(sections, values):
    assert must_agree_on_resume(Config(**sections)) == ALWAYS | values


def test_a_run_on_preferences_keeps_their_loss_and_no_keys_of_rollouts():
    """Keys of another command would refuse to resume for what has no effect."""
    kept = must_agree_on_resume(Config(run={"task": "dpo"}, dpo={"data": "pairs.jsonl", "beta": 0.2}))
    assert (kept["run.task"], kept["dpo.data"], kept["dpo.beta"]) == ("dpo", "pairs.jsonl", 0.2)
    assert not any(key.startswith(("rollout.", "sft.", "rm.", "data.train")) for key in kept)
