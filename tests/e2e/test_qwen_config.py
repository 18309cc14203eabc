"""The configuration for Qwen2.5-0.5B on GSM8K, run to its end on a small random Qwen2."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from quatrain.config.load import load_config
from quatrain.data.builtin import builtin_tokenizer
from quatrain.export import export_policy
from quatrain.models.params import init_params
from quatrain.report.metrics import read_metrics
from quatrain.train import train

CONFIG = Path(__file__).parents[2] / "configs" / "gsm8k_qwen25_0p5b.yaml"
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
    arch = dataclasses.replace(arch, family="qwen2", qkv_bias=True, tie_embeddings=True)
    export_policy(folder, arch, init_params(arch, jax.random.key(0)), builtin_tokenizer())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def _problems(path: Path, count: int) -> str:
    rows = (
        {"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_the_whole_chain_runs_on_a_small_qwen2(tmp_path, small_arch, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    _qwen2(tmp_path / "model", small_arch)
    settings = (
        *SMALL,
        f"model.path={tmp_path / 'model'}",
        f"data.train={_problems(tmp_path / 'train.jsonl', 16)}",
        f"data.eval={_problems(tmp_path / 'test.jsonl', 6)}",
        f"run.dir={tmp_path / 'runs'}",
        "run.name=qwen",
    )
    summary = train(load_config(CONFIG, settings, environ={}))
    rows = read_metrics(summary.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    steps = rows[1:]
    assert all(np.isfinite(row["reward/mean"]) for row in steps)
    assert sum(row["update/optimizer_steps"] + row["update/skipped_steps"] for row in steps) == 4
    assert all(row["rollout/logprob_diff_max"] < 0.2 for row in steps if "rollout/logprob_diff_max" in row)
    assert json.loads((summary.run / "final" / "config.json").read_text())["model_type"] == "qwen2"
