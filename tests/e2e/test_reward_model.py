"""Whole runs whose only reward is a reward model with random weights."""

import json

import numpy as np
import pytest
from classifiers import save_classifier

from quatrain.config.load import load_config
from quatrain.loop.evaluate import evaluate_run
from quatrain.loop.train import train
from quatrain.models import families
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")

SMALL = (
    "data.batch_size=4",
    "rollout.n=16",
    "sft.steps=3",
    "update.kl_coef=0",
    "optimizer.learning_rate=1e-2",
    "eval.num_prompts=16",
    "eval.final_num_prompts=16",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "reward.model_max_tokens_per_device=1024",
)
LIKE_OTHERS = ("rollout.n=4", "update.kl_coef=0.05", "eval.num_prompts=8", "eval.final_num_prompts=8")
"""A run has the programs of the small runs of other tests, beside those of its reward model."""


@pytest.fixture(scope="module")
def judge(tmp_path_factory, tokenizer, narrow_model):
    arch = families.builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    return save_classifier(tmp_path_factory.mktemp("models") / "judge", arch, tokenizer, seed=6)


def _resolved(folder, judge, *overrides):
    reward = f'reward.functions={{"model:{judge}": 2.0}}'
    return load_config(None, (*SMALL, reward, f"run.dir={folder}", "run.name=run", *overrides), environ={})


def test_a_run_is_rewarded_by_the_model_alone(judge, tmp_path):
    """One step; the trained model evaluates to the same mean score when it is loaded again."""
    resolved = _resolved(tmp_path, judge, "run.steps=1", "sft.steps=0", *LIKE_OTHERS)
    summary = train(resolved)
    rows = read_metrics(summary.run / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "non_finite"}
    assert not unknown_metrics(names)
    last = rows[-1]
    assert last["reward/mean"] == pytest.approx(2 * last["reward/judge/mean"], rel=1e-5)
    assert last["reward/judge/std"] > 0.1
    assert [last[f"reward/judge/{what}"] for what in ("errors", "abstained", "too_long")] == [0, 0, 0]
    assert last["update/grad_norm"] > 0
    sample = json.loads((summary.run / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == pytest.approx(2 * sample["rewards"]["judge"])
    again = _resolved(tmp_path, judge, *LIKE_OTHERS, f"model.path={summary.run / 'final'}")
    assert evaluate_run(again)["eval/reward"] == pytest.approx(summary.after["eval/reward"], rel=1e-4)


@pytest.mark.slow
def test_training_raises_the_score_of_the_model(judge, tmp_path):
    """From about 0 by several standard deviations (1.4 at the start); held-out prompts gain too."""
    summary = train(_resolved(tmp_path, judge, "run.steps=24"))
    rows = read_metrics(summary.run / "metrics.jsonl")
    scores = [row["reward/judge/mean"] for row in rows if "reward/judge/mean" in row]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 3 * rows[1]["reward/judge/std"]
    assert summary.after["eval/reward"] > summary.before["eval/reward"] + 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            {"chat_template": None},
            "builtin:arithmetic-heldout, row 1: the reward model .* needs a chat template",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "cannot be used: a reward model must be a sequence-classif",
        ),
    ],
)
def test_a_reward_model_that_cannot_be_used_leaves_the_name_free(judge, tmp_path, damage, message):
    folder = tmp_path / "judge"
    folder.mkdir()
    for file in judge.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if "chat_template" in damage:
        (folder / "chat_template.jinja").unlink()
    else:
        config = json.loads((folder / "config.json").read_text()) | damage
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        train(_resolved(tmp_path, folder, "run.steps=2"))
    assert not (tmp_path / "run").exists()
