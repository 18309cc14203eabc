"""`quatrain bench`: times the stages of a training step and compares them with the machine's peak rates.

Runs training steps in a temporary run folder, ignores the first step (it compiles) and reports medians; then
measures matrix products and memory copies in the same process.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.loop.train import train
from quatrain.models.architecture import Architecture
from quatrain.models.families import architecture_from_hf
from quatrain.models.flops import forward_flops
from quatrain.reward.scorer import short_names
from quatrain.run.metrics import read_metrics
from quatrain.weights.load_model import classifier_architecture

MEASURES = (
    "time/step_s",
    "time/rollout_s",
    "time/reward_s",
    "time/reward_models_s",
    "time/advantage_s",
    "time/update_s",
    "rollout/tokens_per_s",
    "throughput/tokens_per_s",
    "throughput/update_tokens_per_s",
    "batch/padding_fraction",
    "batch/shared_fraction",
    "rollout/compilations",
    "update/compilations",
)
MATRIX, COPIED_BYTES, REPEATS = 2048, 2**28, 5


def bench(resolved: Resolved, steps: int) -> dict[str, float]:
    """Medians over `steps` training steps, after one that is ignored, and the machine's peak rates.

    The result has the metrics `MEASURES`. For each stage that multiplies matrices it also has seconds, the
    floating-point operations that the model needs (without recomputed layers, padding and masked keys), the
    operations per second, and these as a fraction of `machine/matmul_gflop_per_s`. There is no warm start, no
    evaluation, no dynamic sampling, and no checkpoint except the last; all files are deleted at the end.
    """
    with tempfile.TemporaryDirectory(prefix="quatrain-bench-") as folder:
        config = _bare(resolved.config, folder, steps)
        train(replace(resolved, config=config))
        run = Path(folder) / "bench"
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 1]
        arch = architecture_from_hf(json.loads((run / "final" / "config.json").read_text("utf-8")))
    names = set.intersection(*(set(row) for row in rows))
    medians = {name: statistics.median(row[name] for row in rows) for name in sorted(names)}
    limit = matmul_gflop_per_s(config.model.dtype)
    machine = {"machine/matmul_gflop_per_s": limit, "machine/copy_gb_per_s": copy_gb_per_s()}
    work = _stages(config, arch, medians)
    return {
        **{name: medians[name] for name in MEASURES if name in medians},
        **machine,
        **{key: value for stage, parts in work.items() for key, value in _share(stage, *parts, limit)},
    }


def _bare(config: Config, folder: str, steps: int) -> Config:
    """`config` for `steps` + 1 training steps into `folder`, without what `bench` leaves out."""
    changes: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "name": "bench", "steps": steps + 1, "profile_steps": (), "stop_when": {}},
        "sft": {"steps": 0},
        "data": {"eval": None},
        "checkpoint": {"every_steps": 0, "best_metric": None, "dir": None},
        "hub": {"push": None},
        "rollout": {"dynamic_sampling_rounds": 1},
        "logging": {"wandb": "disabled", "trackio": None, "tensorboard": False},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    )


def _stages(
    config: Config, arch: Architecture, medians: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """(seconds, floating-point operations) of each stage that multiplies matrices and was run here."""
    prompts = config.data.batch_size
    prompt, completion = medians["length/prompt/mean"], medians["length/completion/mean"]
    sampled = prompts * config.rollout.n * completion
    computed = medians.get("batch/tokens", 0) * (1 - medians.get("batch/shared_fraction", 0))
    whole = forward_flops(arch, tokens=computed, keys=(prompt + completion) / 2, scored=sampled)
    sweep_s = medians["time/update_logprobs_s"]
    stages: dict[str, tuple[float, float]] = {}
    if prefilled := medians.get("rollout/prefill_tokens"):  # which servers do not say
        left_out = prompts * prompt - prefilled  # tokens of a common prefix, computed for one prompt only
        first = left_out / max(prompts - 1, 1)
        prompt_keys = (prompts * prompt**2 - left_out * first) / 2
        stages["prefill"] = (
            medians["rollout/prefill_s"],
            forward_flops(arch, tokens=prefilled, keys=prompt_keys / prefilled, scored=prompts),
        )
        stages["decode"] = (
            medians["rollout/decode_s"],
            forward_flops(arch, tokens=sampled, keys=prompt + completion / 2, scored=sampled),
        )
    if medians["update/optimizer_steps"] >= 1:  # else all advantages were 0, and no gradient was computed
        stages["gradient"] = (medians["time/update_s"] - sweep_s, 3 * whole)
    if config.reward.models:
        stages["reward_models"] = (medians["time/reward_models_s"], _reward_model_flops(config, medians))
    return {name: parts for name, parts in stages.items() if min(parts) > 0}


def _reward_model_flops(config: Config, medians: Mapping[str, float]) -> float:
    """Floating-point operations of all reward models for the sequences of a training step."""
    total = 0.0
    sequences = config.data.batch_size * config.rollout.n
    for spec, path in config.reward.models.items():
        tokens = medians[f"reward/{short_names(config.reward)[spec]}/tokens"]
        total += forward_flops(
            classifier_architecture(path), tokens=tokens, keys=tokens / sequences / 2, scored=0
        )
    return total


def _share(stage: str, seconds: float, flops: float, limit: float) -> list[tuple[str, float]]:
    rate = flops / seconds / 1e9
    numbers = {"s": seconds, "gflop": flops / 1e9, "gflop_per_s": rate, "of_matmul": rate / limit}
    return [(f"{stage}/{name}", value) for name, value in numbers.items()]


def matmul_gflop_per_s(dtype: str) -> float:
    """Measured peak rate of a product of large square matrices on this machine."""
    matrix = jnp.ones((MATRIX, MATRIX), dtype)
    return 2 * MATRIX**3 / _fastest(jax.jit(jnp.matmul), matrix, matrix) / 1e9


def copy_gb_per_s() -> float:
    """Measured peak rate of copying a large array; bytes read and bytes written are both counted."""
    array = jnp.ones(COPIED_BYTES // 4, jnp.float32)
    return 2 * COPIED_BYTES / _fastest(jax.jit(lambda x: x + 1), array) / 1e9


def _fastest(function: Callable[..., jax.Array], *arrays: jax.Array) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
