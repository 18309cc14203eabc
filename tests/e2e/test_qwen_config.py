"""The configurations for Qwen2.5-0.5B on GSM8K, on a small random Qwen2: dry, and run to their ends."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from architectures import changed

from quatrain.config.load import load_config
from quatrain.data.builtin import builtin_tokenizer
from quatrain.loop.export import export_policy
from quatrain.loop.train import dry_run, train
from quatrain.models.params import init_params
from quatrain.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "gsm8k_qwen25_0p5b.yaml"
# A random model earns almost no reward from the recipes' own functions; here, short completions earn more.
BREVITY = f"reward.functions.{ROOT / 'examples' / 'custom_reward.py'}:brevity=1.0"
SMALL = (
    "run.steps=2",
    "data.batch_size=4",
    "rollout.n=4",
    "rollout.max_new_tokens=12",
    "update.mini_batch_size=2",
    "update.max_tokens_per_device=640",
    "optimizer.warmup_steps=0",
    "eval.num_prompts=4",
    "eval.final_num_prompts=4",
)


def _qwen2(folder: Path, arch) -> None:
    """A Hugging Face folder as transformers would write it: weights, config.json, tokenizer."""
    arch = changed(arch, family="qwen2", qkv_bias=True, tie_embeddings=True)
    export_policy(folder, arch, init_params(arch, jax.random.key(0)), builtin_tokenizer())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def _problems(path: Path, count: int) -> str:
    rows = (
        {"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def _settings(folder: Path, arch, name: str) -> tuple[str, ...]:
    """The keys that make a recipe small: model and data in `folder`, few prompts, short completions."""
    _qwen2(folder / "model", arch)
    return (
        *SMALL,
        f"model.path={folder / 'model'}",
        f"data.train={_problems(folder / 'train.jsonl', 16)}",
        f"data.eval={_problems(folder / 'test.jsonl', 6)}",
        f"run.dir={folder / 'runs'}",
        f"run.name={name}",
    )


ALGORITHMS = ("ppo", "dapo", "gspo", "cispo", "dr_grpo", "rloo", "remax", "dppo", "vapo")
"""Of the recipes beside GRPO's, `CONFIG`."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory, small_arch):
    return _settings(tmp_path_factory.mktemp("qwen"), small_arch, "dry")


@pytest.mark.parametrize(
    "path",
    [CONFIG, *(CONFIG.with_name(f"{name}_{CONFIG.name}") for name in ALGORITHMS)],
    ids=["grpo", *ALGORITHMS],
)
def test_a_dry_run_builds_every_part_of_a_recipe_and_warns_of_nothing(path, settings, monkeypatch):
    """The quick form: rewards, data, model and tokenizer fit each other; nothing is computed."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    free = ("reward.overlong_buffer=null", "update.mini_batch_size=null", "critic.warmup_steps=0")
    plan, warnings = dry_run(load_config(path, (*settings, *free), environ={}))
    assert plan.startswith("2 steps of 4 prompts x 4 samples, 16 training prompts\n")
    assert warnings == []


@pytest.mark.slow
def test_the_whole_chain_runs_on_a_small_qwen2(tmp_path, small_arch, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    settings = _settings(tmp_path, small_arch, "qwen")
    summary = train(load_config(CONFIG, settings, environ={}))
    rows = read_metrics(summary.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    steps = rows[1:]
    assert all(np.isfinite(row["reward/mean"]) for row in steps)
    assert sum(row["update/optimizer_steps"] + row["update/skipped_steps"] for row in steps) == 4
    assert all(row["rollout/logprob_diff_max"] < 0.2 for row in steps if "rollout/logprob_diff_max" in row)
    assert json.loads((summary.run / "final" / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_runs_on_a_small_qwen2(name, tmp_path, small_arch, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    path = ROOT / "configs" / f"{name}_gsm8k_qwen25_0p5b.yaml"
    recipe = load_config(path, [], environ={}).config
    optimizer_steps = recipe.data.batch_size // recipe.update.mini_batch_size
    settings = (
        *_settings(tmp_path, small_arch, name),
        BREVITY,
        "reward.overlong_buffer=null",  # the recipe's is longer than these completions
        "critic.warmup_steps=0",  # the recipe's is longer than this run
        f"rollout.n={min(recipe.rollout.n, 4)}",
        f"update.mini_batch_size={4 // optimizer_steps}",
    )
    summary = train(load_config(path, settings, environ={}))
    rows = read_metrics(summary.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert (row["update/optimizer_steps"], row.get("update/skipped_steps", 0)) == (optimizer_steps, 0)
        assert row["update/grad_norm"] > 0
        assert np.isfinite(row["update/policy_loss"])
    in_reward = [key for key in rows[-1] if key.startswith("reward/kl")]
    assert bool(in_reward) == (recipe.reward.kl_coef > 0)
    assert ("critic/loss" in rows[-1]) == recipe.critic.enabled
