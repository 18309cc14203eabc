"""The first run on a GPU: what works there and how fast each part is, in one table.

    python benchmarks/first_gpu_run.py --out first_gpu_run
    python benchmarks/first_gpu_run.py --out first_gpu_run --only attention --only 'decode*'
    python benchmarks/first_gpu_run.py --out first_gpu_run --only train --model MODEL --data train.jsonl
    python benchmarks/first_gpu_run.py --out small --small       # tiny shapes, on any machine

Each item runs in a process of its own with a limit on its seconds, and leaves OUT/<item>.json and
OUT/<item>.log, also if it fails or takes too long; OUT/table.txt is written again after each. Items:

    limits      rates of large bfloat16 products and of copying
    kernels     which attention kernels pass the comparison with XLA, and why others do not
    attention   milliseconds of one layer's attention on a packed line, by kernel, forward and with backward
    head        milliseconds of the output head, forward and backward, by tile
    sampling    milliseconds of drawing a token for each slot
    decode …    decode steps of four layers, under XLA's settings of command buffers (CUDA graphs)
    checks      the tests marked `gpu`
    update      optimizer steps of the 0.5B shape, with each kernel
    rollout     decode of the 1.5B shape with all layers, and the gap between its log-probabilities and the
                trainer's
    gap         that gap in float32, at two precisions of products
    train       training of `--model` by `quatrain train`: seconds of the stages, rates

Weights are random, of the shapes of Qwen2.5, except in `train`. Shares are of `--bandwidth-tb-s` and
`--peak-tflops`, and of the rates measured in the same process. The exit status is 1 if an item failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
import accelerator
from accelerator import (
    MODES,
    ROOT,
    SMALL,
    Bench,
    Figures,
    NotPossible,
    Scale,
    attempt,
    chained,
    describe_device,
)

from quatrain.backend import this_backend
from quatrain.forward.micro_batch import fill
from quatrain.forward.specs import head_logprobs
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention, unpacks_above
from quatrain.models.attention.kernels import PLATFORMS, obstacle
from quatrain.models.decoder import REMAT
from quatrain.models.families import architecture_from_hf
from quatrain.models.flops import forward_flops
from quatrain.models.params import num_params
from quatrain.models.prefix_tree import RowForms
from quatrain.models.probe import probe_attention
from quatrain.ops.logprobs import Tile
from quatrain.ops.sampling import SamplingNumbers, sample
from quatrain.run.metrics import read_metrics

COMMAND_BUFFERS = {"default": "", "off": "--xla_gpu_enable_command_buffer=", "while": "+WHILE"}
"""XLA's settings of command buffers: its own, none, and with loops."""
TILES = (Tile(4096, 32768), Tile(2048, 65536))
"""Tiles of logits beside that of the backend."""


@dataclass(frozen=True)
class Run:
    """The options of the command line."""

    out: Path
    small: bool
    model: str | None
    data: str | None
    steps: int
    peak_tflops: float
    bandwidth_tb_s: float
    remat: str

    @property
    def scale(self) -> Scale:
        """Sizes of shapes."""
        return SMALL if self.small else Scale()

    def bench(self, checks_limit_s: float = 0) -> Bench:
        """What is measured with, with no rates of the machine yet."""
        return Bench(self.scale, self.peak_tflops, self.bandwidth_tb_s, self.remat, checks_limit_s)

    @property
    def smallest(self) -> Architecture:
        """The 0.5B shape, or the tiny one."""
        return list(self.scale.shapes.values())[-1]


@dataclass(frozen=True)
class Item:
    """A part of the run: a function of its process, the limit on its seconds, and its environment."""

    function: Callable[[Run, Figures], None]
    limit_s: float
    xla_flags: str = ""


def limits(run: Run, figures: Figures) -> None:
    """The machine's own rates."""
    run.bench().machine(figures)


def kernels(run: Run, figures: Figures) -> None:
    """For each shape and kernel: `works`, or why it does not."""
    [kind, *others] = run.smallest.layers

    def with_mixer(**values: Any) -> Architecture:
        return replace(run.smallest, layers=(replace(kind, mixer=replace(kind.mixer, **values)), *others))

    capped, windowed = with_mixer(softcap=50.0), with_mixer(window=512)
    shapes = {**run.scale.shapes, "soft-cap": capped, "window": windowed}
    for shape, arch in shapes.items():
        for kernel in PLATFORMS:
            figures[f"{kernel} {shape}"] = _cannot(kernel, arch) or "works"


def _cannot(kernel: str, arch: Architecture) -> str | None:
    """Why `kernel` cannot be used for `arch` here, or None."""
    platform = this_backend().kind
    if kernel == "xla":
        return None
    if PLATFORMS[kernel] != platform:
        return f"needs a {PLATFORMS[kernel].upper()}, and JAX uses the platform {platform}"
    reason = obstacle(kernel, arch, "bfloat16")
    return probe_attention(kernel, arch, "bfloat16") if reason is None else f"cannot {reason}"


def attention(run: Run, figures: Figures) -> None:
    """Milliseconds of one layer's attention on a micro-batch with shared prompts."""
    for shape, arch in run.scale.shapes.items():
        for kernel in ("xla", *PLATFORMS):
            reason = _cannot(kernel, arch)
            if reason is None:
                figures |= _attention_ms(run.scale, arch, kernel, f"{kernel} {shape}")
            else:
                figures[f"{kernel} {shape}"] = reason


def _attention_ms(scale: Scale, arch: Architecture, kernel: str, name: str) -> Figures:
    spec = accelerator.PolicySpec(arch, dtype="bfloat16", attention=kernel)
    table = accelerator.random_table(arch, scale)
    sizes = accelerator.LogprobConfig(max_tokens_per_device=scale.max_tokens)
    cut = spec.planner(sizes, share_prompts=True).plans(table)[0]
    batch = fill(cut, table, spec.mesh, RowForms(unpacks_above(kernel)))
    line = batch.input_ids.shape
    mixer = arch.layers[0].mixer
    heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads, mixer.num_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dy = (
        jax.random.normal(key, (*line, count, mixer.head_dim), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    )
    ids = (batch.positions, batch.segment_ids, batch.branch_ids)
    blocks = spec.backend.attention_blocks

    def attend(q: jax.Array, k: jax.Array = k, v: jax.Array = v) -> jax.Array:
        pattern = attention_pattern(kernel, *ids, None, blocks, layout=batch.layout)
        return self_attention(kernel, q, k, v, pattern, window=None, cap=None)

    def with_backward(q: jax.Array) -> jax.Array:
        y, pull = jax.vjp(attend, q, k, v)
        by_q, by_k, by_v = pull(dy)
        # So that no gradient is left out of the program.
        return y + by_q + (by_k + by_v).mean(axis=2, keepdims=True)

    return {
        f"{name} forward ms": 1e3 * chained(jax.jit(attend), q, scale.repeats),
        f"{name} with backward ms": 1e3 * chained(jax.jit(with_backward), q, scale.repeats),
        f"{name} line": list(line),
        f"{name} rows": None if batch.layout is None else [x.shape for x in batch.layout.blocks],
    }


def head(run: Run, figures: Figures) -> None:
    """Milliseconds of the output head on three quarters of a micro-batch, forward and backward."""
    for shape, arch in run.scale.shapes.items():
        for tile in (this_backend().tile(arch.vocab_size), *TILES):
            name = f"{shape} tile {tile.tokens} x {tile.words}"
            try:
                figures[f"{name} ms"] = 1e3 * _head_s(run.scale, arch, tile)
            except jax.errors.JaxRuntimeError as error:  # out of memory
                figures[name] = str(error).splitlines()[0][:200]


def _head_s(scale: Scale, arch: Architecture, tile: Tile) -> float:
    tokens = scale.max_tokens * 3 // 4
    keys = jax.random.split(jax.random.key(0), 3)
    matrix = jax.random.normal(keys[0], (arch.vocab_size, arch.hidden_size), jnp.float32) * 0.02
    hidden = jax.random.normal(keys[1], (tokens, arch.hidden_size), jnp.bfloat16)
    targets = jax.random.randint(keys[2], (tokens,), 0, arch.vocab_size)

    backend = replace(this_backend(), fixed_tile=tile)
    policy = accelerator.PolicySpec(
        replace(arch, tie_embeddings=True), dtype="bfloat16", attention="xla", backend=backend
    )

    def loss(matrix: jax.Array, hidden: jax.Array) -> jax.Array:
        logprobs, entropy = head_logprobs({"embed": matrix}, policy, hidden, targets, jnp.int32(tokens))
        return logprobs.sum() + 0.01 * entropy.sum()

    gradient = jax.jit(lambda matrix: matrix + 1e-6 * jax.grad(loss, (0, 1))(matrix, hidden)[0])
    return chained(gradient, matrix, scale.repeats)


def sampling(run: Run, figures: Figures) -> None:
    """Milliseconds of drawing a token for each slot from float32 logits."""
    slots, vocabulary = run.scale.slots, run.smallest.vocab_size
    logits = jax.random.normal(jax.random.key(0), (slots, vocabulary), jnp.float32)
    uniforms = jax.random.uniform(jax.random.key(1), (slots,))
    draw = jax.jit(_logits_after_a_draw)
    kinds = {
        "plain": SamplingNumbers.alike(slots),
        "top-p 0.95": SamplingNumbers.alike(slots, top_p=0.95),
        "top-k 50": SamplingNumbers.alike(slots, top_k=50),
    }
    for name, numbers in kinds.items():
        figures[f"{name} ms"] = 1e3 * chained(
            draw, logits, run.scale.repeats, uniforms, jax.device_put(numbers)
        )
    figures["bytes of logits"] = 4 * slots * vocabulary


def _logits_after_a_draw(logits: jax.Array, uniforms: jax.Array, numbers: SamplingNumbers) -> jax.Array:
    """The logits, a little changed by what was drawn from them, so that draws follow one another."""
    _, logprobs = sample(logits, uniforms, numbers)
    return logits.at[:, 0].add(1e-6 * logprobs)


def decode(run: Run, figures: Figures) -> None:
    """Decode steps of four layers of each shape."""
    bench = run.bench()
    for shape, arch in run.scale.shapes.items():
        found: Figures = {}
        bench.decode(replace(arch, layers=arch.layers[:4]), found)
        figures[f"{shape} ms a step"] = 1e3 * found["seconds_per_step"]
        figures[f"{shape} TB/s"] = found["tb_per_s"]


def checks(run: Run, figures: Figures) -> None:
    """The tests marked `gpu`."""
    run.bench(checks_limit_s=200).checks(figures)


def update(run: Run, figures: Figures) -> None:
    """Optimizer steps of the smallest shape with each attention and layout."""
    bench, failed = run.bench(), []
    bench.machine(figures)
    for attention, layout in MODES:
        name, found = f"{attention} {layout}", dict[str, Any]()
        status = attempt(partial(bench.update, run.smallest, attention, layout), found)
        figures |= {f"{name}: {key}": value for key, value in (status | found).items()}
        if status["status"] == "failed":
            failed.append(name)
    if failed:
        raise RuntimeError(f"no optimizer step with {', '.join(failed)}")


def rollout(run: Run, figures: Figures) -> None:
    """Decode of the first shape, and how far its log-probabilities are from the trainer's."""
    bench, arch = run.bench(), next(iter(run.scale.shapes.values()))
    bench.machine(figures)
    bench.decode(arch, figures)
    bench.bfloat16_gap(arch, figures)


def gap(run: Run, figures: Figures) -> None:
    """How far log-probabilities in float32 are from the trainer's, of a few layers of the first shape."""
    bench, arch = run.bench(), next(iter(run.scale.shapes.values()))
    for precision in ("default", "highest"):
        found: Figures = {}
        bench.float32_gap(replace(arch, layers=arch.layers[: run.scale.gap_layers]), precision, found)
        figures |= {f"{precision}: {key}": value for key, value in found.items()}


def train(run: Run, figures: Figures) -> None:
    """Steps of `quatrain train`: medians after the two first steps, which compile."""
    if run.model is None:
        raise NotPossible("training needs a model: give --model, and --data for prompts")
    out, name = run.out / "runs", f"train-{time.strftime('%Y%m%d-%H%M%S')}"
    data = str(Path(run.data).resolve()) if run.data else "builtin:arithmetic"
    model = str(Path(run.model).resolve()) if Path(run.model).exists() else run.model
    options = {
        "run.name": name, "run.dir": str(out), "run.steps": run.steps, "model.path": model,
        "model.dtype": "bfloat16", "data.train": data, "sft.steps": 0, "eval.before": "false",
        "eval.every_steps": 0, "checkpoint.every_steps": 0, "rollout.max_new_tokens": 256,
        "data.max_prompt_length": 512, "data.batch_size": 64, "rollout.n": 8,
    }  # fmt: skip
    if run.small:
        options |= {"data.batch_size": 2, "rollout.n": 2, "rollout.max_new_tokens": 16}
    if run.data is not None:
        options |= {"data.question_column": "question"}
    command = [sys.executable, "-m", "quatrain.cli", "train"]
    for key, value in options.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, cwd=ROOT)
    figures |= describe_training(out / name)


def describe_training(folder: Path) -> Figures:
    """Medians of the stages of the run in `folder`, after its first two steps, and what they amount to.

    Work of the update: the tokens that sharing leaves, each attending to half a sequence on average; what is
    recomputed and padding do not count. Bytes of a decode step: the weights alone.
    """
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 2]
    if not rows:
        raise NotPossible("medians leave the two first steps out: give --steps of at least 3")
    names = ("time/step_s", "time/rollout_s", "time/update_s", "rollout/decode_s", "rollout/prefill_s")

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    found: Figures = {name: median(name) for name in names}
    arch = architecture_from_hf(json.loads((folder / "final" / "config.json").read_text("utf-8")))
    tokens, length = median("batch/tokens"), median("length/total/mean")
    flops = 3 * forward_flops(
        arch,
        tokens=tokens * (1 - median("batch/shared_fraction")),
        keys=length / 2,
        scored=tokens * median("length/completion/mean") / length,
    )
    weights = 2 * num_params(arch) * median("length/completion/max")
    found["update TFLOP/s"] = flops / found["time/update_s"] / 1e12
    found["decode TB/s, weights alone"] = weights / found["rollout/decode_s"] / 1e12
    found["steps"] = len(rows)
    found["reward of the first and the last step"] = [rows[0]["reward/mean"], rows[-1]["reward/mean"]]
    found["tokens/s"] = statistics.median(row["batch/tokens"] for row in rows) / found["time/step_s"]
    return found


ITEMS: dict[str, Item] = {
    "limits": Item(limits, 60),
    "kernels": Item(kernels, 100),
    "attention": Item(attention, 150),
    "head": Item(head, 100),
    "sampling": Item(sampling, 60),
    **{f"decode {name}": Item(decode, 120, flags) for name, flags in COMMAND_BUFFERS.items()},
    "checks": Item(checks, 240),
    "update": Item(update, 400),
    "rollout": Item(rollout, 300),
    "gap": Item(gap, 200),
    "train": Item(train, 550),
}


def run_item(name: str, run: Run) -> int:
    """Runs an item in this process and writes its file; 1 if it failed."""
    figures: Figures = {}
    began = time.monotonic()
    status = attempt(partial(ITEMS[name].function, run), figures)
    whole = {"item": name, **status, "seconds": time.monotonic() - began, "device": describe_device()}
    write(run.out, name, {**whole, "figures": figures})
    return int(status["status"] == "failed")


def write(out: Path, name: str, report: Figures) -> None:
    """Writes the file of an item."""
    text = json.dumps(report, indent=2, default=accelerator.plain)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def in_a_process(name: str, run: Run, arguments: Sequence[str]) -> bool:
    """Runs an item in a process of its own; whether it did not fail."""
    item, log = ITEMS[name], run.out / f"{name}.log"
    flags = item.xla_flags
    if flags.startswith("+"):
        flags = f"--xla_gpu_enable_command_buffer={flags}"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    command = [sys.executable, __file__, *arguments, "--item", name]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        status = process.wait(item.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.wait()
        write(run.out, name, {"item": name, "status": "failed", "error": f"not done in {item.limit_s:g} s"})
        return False
    if not (run.out / f"{name}.json").exists():  # it crashed
        last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
        error = f"ended with status {status}: {' '.join(last)[:300]}"
        write(run.out, name, {"item": name, "status": "failed", "error": error})
    return status == 0


def table(out: Path) -> str:
    """The figures of all items in `out`, a line each."""
    lines = []
    for name in ITEMS:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        report = json.loads(path.read_text("utf-8"))
        why = report.get("why") or report.get("error") or ""
        lines.append(f"{name}: {report['status']}{': ' * bool(why)}{why}")
        lines += [f"    {key}  {_shown(value)}" for key, value in report.get("figures", {}).items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="items to run")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--model", help="folder or GGUF file of a model, for `train`")
    parser.add_argument("--data", help="a .jsonl file with the columns question and answer, for `train`")
    parser.add_argument("--steps", type=int, default=6, help="training steps of `train`")
    parser.add_argument("--peak-tflops", type=float, default=790, help="bfloat16 products of the device")
    parser.add_argument("--bandwidth-tb-s", type=float, default=4.3, help="of the device's memory")
    parser.add_argument("--remat", choices=REMAT, default="layer", help="of `update`")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    run = Run(
        args.out.resolve(),
        *(args.small, args.model, args.data, args.steps, args.peak_tflops, args.bandwidth_tb_s, args.remat),
    )
    run.out.mkdir(parents=True, exist_ok=True)
    if args.item:
        return run_item(args.item, run)
    wanted = [name for name in ITEMS if any(fnmatch(name, pattern) for pattern in args.only or ["*"])]
    if not wanted:
        parser.error(f"--only must match an item; items are {', '.join(ITEMS)}; got {args.only}")
    good = []
    for name in wanted:
        (run.out / f"{name}.json").unlink(missing_ok=True)
        good.append(in_a_process(name, run, arguments))
        (run.out / "table.txt").write_text(table(run.out), encoding="utf-8")
    print(table(run.out), end="")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
