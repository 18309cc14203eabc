"""What a GPU has to show of pictures: a model sees there what it sees on a CPU; how fast the tower is.

    python benchmarks/first_gpu_pictures.py --out first_gpu_pictures
    python benchmarks/first_gpu_pictures.py --out first_gpu_pictures --only 'tower*'
    python benchmarks/first_gpu_pictures.py --out pictures --only train --model MODEL --data rows.jsonl
    python benchmarks/first_gpu_pictures.py --out small --small          # tiny shapes, on any machine

Beside `first_gpu_run.py`, which has the text model. OUT/NAME.json has the figures of each item, and
OUT/table.txt those of all, written again after each. Items, with what each has to show:

    tower-KIND   milliseconds of the tower of a published shape with random weights, forward and with
                 backward, on one picture and on as many as a micro-batch has, and their share of the card's
                 peak; features are the same to the bit when they are computed again, and in bfloat16 those
                 of float32 up to 0.05 of the largest
    quickstart   `quatrain train configs/shapes.yaml`: accuracies as on a CPU, at chance with other pictures;
                 sampler and trainer as near as in text
    train        `quatrain train` on MODEL and DATA: seconds of the stages; each distinct picture goes
                 through a frozen tower once; peak memory, beside that of `quatrain plan`

The exit status is 1 if an item failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from accelerator import ROOT, Figures, NotPossible, attempt, chained, describe_device, plain
from first_gpu_run import CARDS

from quatrain.models.architecture import Architecture
from quatrain.models.families import architecture_from_hf
from quatrain.models.flops import picture_flops
from quatrain.models.params import init_params
from quatrain.models.tower import Patches, features, patches_of
from quatrain.parallel.collectives import shard_mapped
from quatrain.parallel.mesh import one_device
from quatrain.run.metrics import read_metrics

QWEN = {"temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
TOWERS: dict[str, dict[str, Any]] = {
    "smolvlm2-256m": {
        "model_type": "smolvlm", "scale_factor": 4, "image_token_id": 90,
        "processor": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        "vision_config": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
        },
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl", "image_token_id": 90, "hidden": 3584,
        "vision_config": {
            **QWEN, "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 3584, "hidden_act": "silu",
        },
    },
    "qwen3-vl-4b": {
        "model_type": "qwen3_vl", "image_token_id": 90, "hidden": 2560,
        "vision_config": {
            **QWEN, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "patch_size": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}  # fmt: skip
"""config.json of towers, as published, without their text models, of which small layers are made; and
`processor`, what preprocessor_config.json says of sizes."""
SIZE, SMALL_SIZE = (1024, 768), (96, 64)
PICTURES, SMALL_PICTURES = 8, 2
"""Of a micro-batch."""
LARGEST_ERROR = 0.05
"""Of the largest feature: how far those in bfloat16 are from those in float32."""


@dataclass(frozen=True)
class Run:
    """The options of the command line."""

    out: Path
    small: bool
    model: str | None
    data: str | None
    steps: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a picture."""
        return SMALL_SIZE if self.small else SIZE

    @property
    def pictures(self) -> int:
        """Pictures of a micro-batch."""
        return SMALL_PICTURES if self.small else PICTURES


def architecture(name: str, small: bool) -> Architecture:
    """A model with the tower `name`, or a tiny one of its kind; its text part has small layers."""
    config = dict(TOWERS[name])
    hidden, processor = config.pop("hidden", 576), config.pop("processor", {})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if config["model_type"] != "smolvlm":
        rope["mrope_section"] = [8, 12, 12]
    text = {
        "hidden_size": hidden, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 64, "vocab_size": 96, "rope_parameters": rope,
    }  # fmt: skip
    arch = architecture_from_hf({**config, "text_config": text}, vision=processor)
    assert arch.vision is not None
    vision = replace(arch.vision, trained="all")
    if small:
        block = replace(vision.block, size=64, num_heads=2, width=64)
        vision = replace(
            vision, block=block, depth=1, deepstack=vision.deepstack and (0,), whole=(), splits=False
        )
    return replace(arch, vision=vision)


def tower(name: str, run: Run, figures: Figures) -> None:
    """Milliseconds of a tower, and whether features are what they have to be."""
    arch = architecture(name, run.small)
    vision, mesh = arch.vision, one_device()
    assert vision is not None
    params = init_params(arch, jax.random.key(0), jnp.float32)["vision"]
    rng = np.random.default_rng(0)
    shape = vision.num_patches(run.size), vision.patch_values
    pixels = [rng.normal(size=shape).astype(np.float32) for _ in range(run.pictures)]

    def row(number: int) -> Patches:
        made = patches_of(vision, pixels[:number], [run.size] * number)
        return jax.tree.map(lambda x: jax.device_put(x[None]), made)

    def of(dtype: Any) -> Callable[[Any, Patches], jax.Array]:
        made = partial(features, vision=vision, dtype=dtype, remat=True)
        run_it = shard_mapped(
            lambda tower, rows: made(tower, patches=rows),
            mesh,
            (PartitionSpec(), PartitionSpec()),
            PartitionSpec(),
        )
        return jax.jit(run_it)

    flops = picture_flops(vision, run.size)
    figures["placeholders of a picture"] = vision.num_placeholders(run.size)
    figures["GFLOP of a picture"] = flops / 1e9
    peak = next((rate for card, (rate, _) in CARDS.items() if card in jax.devices()[0].device_kind), None)
    in_bfloat16 = of(jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda tower, rows: in_bfloat16(tower, rows).astype(jnp.float32).sum()))

    def backward(tower: Any, rows: Patches) -> jax.Array:
        found: jax.Array = gradient(tower, rows)["patch"]
        return found

    for number in (1, run.pictures):
        rows = row(number)
        seconds = _seconds(in_bfloat16, params, rows)
        figures[f"{number} pictures, forward ms"] = 1e3 * seconds
        figures[f"{number} pictures, forward TFLOP/s"] = number * flops / seconds / 1e12
        seconds = _seconds(backward, params, rows)
        figures[f"{number} pictures, with backward ms"] = 1e3 * seconds
        if peak is not None:
            figures[f"{number} pictures, share of the peak"] = 3 * number * flops / seconds / 1e12 / peak
    _check_features(of, params, row(1), figures)


def _seconds(function: Callable[[Any, Patches], jax.Array], params: Any, rows: Patches) -> float:
    """Of one call; each call waits for the one before by the pixels, which stay what they are."""

    def step(pixels: jax.Array) -> jax.Array:
        made = function(params, rows._replace(pixels=pixels))
        return pixels + 0 * made.astype(jnp.float32).mean()

    return chained(step, rows.pixels, 5)


def _check_features(of: Callable[[Any], Any], params: Any, one: Patches, figures: Figures) -> None:
    """Raises RuntimeError where features are not the same twice, or far from those in float32."""
    exact = np.asarray(of(jnp.float32)(params, one))
    first, second = (np.asarray(of(jnp.bfloat16)(params, one)) for _ in range(2))
    figures["features are the same twice"] = same = bool((first == second).all())
    error = float(np.abs(first.astype(np.float32) - exact).max() / np.abs(exact).max())
    figures["bfloat16 features, largest error"] = error
    if not same or not error < LARGEST_ERROR:
        raise RuntimeError(f"features must be the same twice, and within {LARGEST_ERROR} of float32")


def quickstart(run: Run, figures: Figures) -> None:
    """The quickstart that sees, and its accuracies."""
    options = {"run.steps": run.steps or (3 if run.small else 300)}
    if run.small:
        options |= {"sft.steps": 2, "data.batch_size": 4, "rollout.n": 2, "eval.num_prompts": 4}
    figures |= _trained(run, "quickstart", [str(ROOT / "configs" / "shapes.yaml")], options)


def train(run: Run, figures: Figures) -> None:
    """Steps on a real model and pictures."""
    if run.model is None or run.data is None:
        raise NotPossible("--model and --data name a model that sees and rows with pictures")
    options = {
        "model.path": str(Path(run.model).resolve()), "data.train": str(Path(run.data).resolve()),
        "model.dtype": "bfloat16", "data.image_max_pixels": 802816, "data.max_prompt_length": 2048,
        "rollout.max_new_tokens": 512, "data.batch_size": 32, "rollout.n": 8, "sft.steps": 0,
        "eval.before": "false", "run.steps": run.steps or 6, "model.remat": "layer",
    }  # fmt: skip
    figures |= _trained(run, "train", [], options)
    if figures["vision/tower_pictures, all steps"] != figures["vision/pictures, all steps"]:
        raise RuntimeError("a frozen tower must compute each distinct picture once, without a second epoch")


def _trained(run: Run, name: str, arguments: list[str], options: dict[str, Any]) -> Figures:
    """Figures of a run of `quatrain train`: medians after its first two steps, which compile."""
    run_name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = {**options, "run.name": run_name, "run.dir": str(run.out / "runs")}
    command = [sys.executable, "-m", "quatrain", "train", *arguments]
    for key, value in options.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, cwd=ROOT)
    rows = read_metrics(run.out / "runs" / run_name / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    later = [row for row in steps if row["step"] > 2] or steps
    found: Figures = {}
    for key in (
        "time/step_s",
        "time/rollout_s",
        "time/update_s",
        "time/vision_s",
        "rollout/logprob_diff_mean",
    ):
        values = [row[key] for row in later if row.get(key) is not None]
        if values:
            found[key] = statistics.median(values)
    for key in ("vision/pictures", "vision/tower_pictures"):
        found[f"{key}, all steps"] = sum(row.get(key, 0) for row in steps)
    gaps = [row["vision/blind_gap"] for row in steps if "vision/blind_gap" in row]
    found["vision/blind_gap"] = gaps[0] if gaps else None
    found["memory/peak_gib"] = max((row.get("memory/peak_gib") or 0 for row in steps), default=0)
    for key in sorted({key for row in rows for key in row if key.endswith("accuracy_lenient")}):
        values = [row[key] for row in rows if row.get(key) is not None]
        found[f"{key}, first and last"] = [values[0], values[-1]]
    return found


ITEMS: dict[str, Callable[[Run, Figures], None]] = {
    **{f"tower-{name}": partial(tower, name) for name in TOWERS},
    "quickstart": quickstart,
    "train": train,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="items to run")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--model", help="folder of a model that sees, for `train`")
    parser.add_argument("--data", help="rows with pictures and the column answer, for `train`")
    parser.add_argument("--steps", type=int, default=0, help="training steps; default: those of each item")
    args = parser.parse_args(arguments)
    run = Run(args.out.resolve(), args.small, args.model, args.data, args.steps)
    wanted = [name for name in ITEMS if any(fnmatch(name, pattern) for pattern in args.only or ["*"])]
    if not wanted:
        parser.error(f"--only must match an item; items are {', '.join(ITEMS)}; got {args.only}")
    run.out.mkdir(parents=True, exist_ok=True)
    lines, failed = [], False
    for name in wanted:
        figures: Figures = {}
        status = attempt(partial(ITEMS[name], run), figures)
        failed |= status["status"] == "failed"
        report = {"item": name, **status, "device": describe_device(), "figures": figures}
        text = json.dumps(report, indent=2, default=plain)
        (run.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        why = status.get("why") or status.get("error") or ""
        lines.append(f"{name}: {status['status']}{': ' * bool(why)}{why}")
        lines += [f"    {key}  {value}" for key, value in figures.items()]
        (run.out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
