"""The first run on a GPU: what works there and how fast each part is, in one table.

    python benchmarks/first_gpu_run.py --out first_gpu_run
    python benchmarks/first_gpu_run.py --out first_gpu_run --seconds 500
    python benchmarks/first_gpu_run.py --out first_gpu_run --only 'attention*' --only 'decode*'
    python benchmarks/first_gpu_run.py --out first_gpu_run --only train --model MODEL --data train.jsonl
    python benchmarks/first_gpu_run.py --out small --small       # tiny shapes, on any machine

Each item runs in a process of its own with a limit on its seconds, and writes OUT/<item>.json again with
each of its figures, and OUT/<item>.log: what is stopped leaves what it has. OUT/table.txt is written again
after each item. `--seconds` bounds the whole run. Compiled programs are kept in OUT/compilation_cache: a
second call measures what the first only compiled. Items:

    limits               rates of large bfloat16 products and of copying
    kernels              which attention kernels pass the comparison with XLA, and why others do not
    update-KERNEL        optimizer steps of the 0.5B shape with this attention
    update-packed        the same by XLA, prompts not shared
    rollout-0.5B, -1.5B  decode with all layers, and the gap between its log-probabilities and the trainer's
    checks               the tests marked `gpu`
    train                training of `--model` by `quatrain train`: seconds of the stages, rates; without it
                         random weights of the 0.5B shape and rewards that differ whatever samples say
    attention-KERNEL     milliseconds of one layer's attention on a packed line, forward and with backward
    head                 milliseconds of the output head, forward and backward, by tile
    sampling             milliseconds of drawing a token for each slot
    decode-…             decode steps of four layers, under XLA's settings of command buffers (CUDA graphs)
    gap-default, -highest   the gap in float32, at two precisions of products

Weights are random, of the shapes of Qwen2.5, except in `train` with `--model`. Shares are of the card's
peak rates by its data sheet, where it is known or given by `--bandwidth-tb-s` and `--peak-tflops`, and of the
rates measured in the same process. The exit status is 1 if an item failed or found no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from quatrain.cluster.launcher import end_with_parent
from quatrain.data.tokenizer import load_tokenizer, save_tokenizer
from quatrain.forward.micro_batch import fill
from quatrain.forward.specs import head_logprobs
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention, unpacks_above
from quatrain.models.attention.kernels import PLATFORMS, obstacle
from quatrain.models.decoder import REMAT
from quatrain.models.families import architecture_from_hf
from quatrain.models.flops import forward_flops
from quatrain.models.params import init_params, num_params
from quatrain.models.prefix_tree import RowForms
from quatrain.models.probe import probe_attention
from quatrain.ops.logprobs import Tile
from quatrain.ops.sampling import SamplingNumbers, sample
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

COMMAND_BUFFERS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "while": "--xla_gpu_enable_command_buffer=+WHILE",
}
"""XLA's settings of command buffers: its own, none, and with loops."""
CARDS = {"H200": (989, 4.8), "H100 80GB HBM3": (989, 3.35), "H100 PCIe": (756, 2.0), "A100": (312, 2.0)}
"""Dense bfloat16 TFLOP/s and TB/s of memory by the data sheet, for names of devices that contain this."""
SMALL_LIMITS = 3
"""Limits of `--small` are so many times those of a card: a CPU compiles, perhaps one that has other work."""
NOT_ENDED = "it did not end"
"""The error of an item that has not written another: it runs, or was killed, or crashed."""
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
    peak_tflops: float | None
    bandwidth_tb_s: float | None
    remat: str

    @property
    def scale(self) -> Scale:
        """Sizes of shapes."""
        return SMALL if self.small else Scale()

    def bench(self, checks_limit_s: float = 0) -> Bench:
        """What is measured with, with no rates of the machine yet."""
        name = jax.devices()[0].device_kind
        peak, bandwidth = next((rates for card, rates in CARDS.items() if card in name), (None, None))
        return Bench(
            self.scale,
            self.peak_tflops or peak,
            self.bandwidth_tb_s or bandwidth,
            self.remat,
            checks_limit_s,
        )

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


def attention(kernel: str, run: Run, figures: Figures) -> None:
    """Milliseconds of one layer's attention on a micro-batch with shared prompts."""
    for shape, arch in run.scale.shapes.items():
        if reason := _cannot(kernel, arch):
            raise NotPossible(f"{kernel} {shape}: {reason}")
        figures |= _attention_ms(run.scale, arch, kernel, shape)


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
    blocks = spec.backend.attention_blocks
    # Arguments of the programs: constants would be folded while compiling, for seconds.
    others = (k, v, dy, (batch.positions, batch.segment_ids, batch.branch_ids), batch.layout)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, ids: Any, layout: Any) -> jax.Array:
        pattern = attention_pattern(kernel, *ids, None, blocks, layout=layout)
        return self_attention(kernel, q, k, v, pattern, window=None, cap=None)

    def with_backward(
        q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, ids: Any, layout: Any
    ) -> jax.Array:
        y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, dy, ids, layout), q, k, v)
        by_q, by_k, by_v = pull(dy)
        # So that no gradient is left out of the program.
        return y + by_q + (by_k + by_v).mean(axis=2, keepdims=True)

    return {
        f"{name} forward ms": 1e3 * chained(jax.jit(attend), q, scale.repeats, *others),
        f"{name} with backward ms": 1e3 * chained(jax.jit(with_backward), q, scale.repeats, *others),
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


def update(kernel: str, layout: str, run: Run, figures: Figures) -> None:
    """Optimizer steps of the smallest shape."""
    bench = run.bench()
    bench.machine(figures)
    bench.update(run.smallest, kernel, layout, figures)


def rollout(which: int, run: Run, figures: Figures) -> None:
    """Decode of a shape with all layers, and how far its log-probabilities are from the trainer's."""
    bench, arch = run.bench(), list(run.scale.shapes.values())[which]
    bench.machine(figures)
    bench.decode(arch, figures)
    bench.bfloat16_gap(arch, figures)


def gap(precision: str, run: Run, figures: Figures) -> None:
    """How far log-probabilities in float32 are from the trainer's, of a few layers of the first shape."""
    bench, arch = run.bench(), next(iter(run.scale.shapes.values()))
    bench.float32_gap(replace(arch, layers=arch.layers[: run.scale.gap_layers]), precision, figures)


def noise(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that differs between samples, whatever they say: steps of a random model have a signal."""
    texts = [str(completion) for completion in completions]
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 for text in texts]


def random_model(run: Run) -> Path:
    """A folder with random weights of the smallest shape and the built-in tokenizer."""
    folder, tokenizer = run.out / "random_model", load_tokenizer("builtin:tiny")
    arch = replace(run.smallest, eos_token_ids=(int(tokenizer.eos_token_id),))
    save_hf(folder, arch, init_params(arch, jax.random.key(0), jnp.bfloat16))
    save_tokenizer(tokenizer, folder)
    return folder


def train(run: Run, figures: Figures) -> None:
    """Steps of `quatrain train`: medians after the two first steps, which compile."""
    out, name = run.out / "runs", f"train-{time.strftime('%Y%m%d-%H%M%S')}"
    data = str(Path(run.data).resolve()) if run.data else "builtin:arithmetic"
    chosen = run.model or str(random_model(run))
    model = str(Path(chosen).resolve()) if Path(chosen).exists() else chosen
    options = {
        "run.name": name, "run.dir": str(out), "run.steps": run.steps, "model.path": model,
        "model.dtype": "bfloat16", "data.train": data, "sft.steps": 0, "eval.before": "false",
        "eval.every_steps": 0, "checkpoint.every_steps": 0, "rollout.max_new_tokens": 256,
        "data.max_prompt_length": 512, "data.batch_size": 64, "rollout.n": 8,
    }  # fmt: skip
    if run.model is None:
        options |= {"reward.functions": f"{{'{Path(__file__).resolve()}:noise': 1.0}}", "data.batch_size": 32}
    if run.small:
        options |= {"data.batch_size": 2, "rollout.n": 2, "rollout.max_new_tokens": 16}
    if run.data is not None:
        options |= {"data.question_column": "question"}
    command = [sys.executable, "-m", "quatrain", "train"]
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


KERNELS = ("xla", *(name for name, platform in PLATFORMS.items() if platform == "gpu"))
ITEMS: dict[str, Item] = {
    "limits": Item(limits, 60),
    "kernels": Item(kernels, 150),
    **{f"update-{name}": Item(partial(update, name, "shared"), 150) for name in KERNELS},
    "update-packed": Item(partial(update, "xla", "packed"), 150),
    "rollout-0.5B": Item(partial(rollout, -1), 150),
    "checks": Item(checks, 400),
    "train": Item(train, 550),
    **{f"attention-{name}": Item(partial(attention, name), 150) for name in KERNELS},
    "head": Item(head, 150),
    "sampling": Item(sampling, 60),
    **{f"decode-{name}": Item(decode, 120, flags) for name, flags in COMMAND_BUFFERS.items()},
    **{f"gap-{name}": Item(partial(gap, name), 120) for name in ("default", "highest")},
    "rollout-1.5B": Item(partial(rollout, 0), 250),
}
"""In order of what they are worth to a run that ends early."""


class Report(dict[str, Any]):
    """An item's figures; its file is written again with each of them, so that a killed item leaves them."""

    def __init__(self, out: Path, name: str) -> None:
        super().__init__()
        self.out, self.name, self.began = out, name, time.monotonic()
        self.write(status="failed", error=NOT_ENDED)

    def write(self, **status: Any) -> None:
        """Writes the file, with what is said of the item's end so far."""
        seconds = time.monotonic() - self.began
        write(self.out, self.name, {"item": self.name, **status, "seconds": seconds, "figures": dict(self)})

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.write(status="failed", error=NOT_ENDED)

    def __ior__(self, other: Any) -> Report:  # type: ignore[override,misc]
        super().__ior__(other)
        self.write(status="failed", error=NOT_ENDED)
        return self


def run_item(name: str, run: Run) -> int:
    """Runs an item in this process and writes its file; 1 if it failed."""
    figures = Report(run.out, name)
    status = attempt(partial(ITEMS[name].function, run), figures)
    figures.write(**status, device=describe_device())
    return int(status["status"] == "failed")


def write(out: Path, name: str, report: Figures) -> None:
    """Writes the file of an item, whole or not at all."""
    text, path = json.dumps(report, indent=2, default=accelerator.plain), out / f"{name}.json"
    path.with_suffix(".tmp").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def in_a_process(name: str, run: Run, arguments: Sequence[str], left_s: float) -> bool:
    """Runs an item in a process of its own for at most `left_s` seconds; whether it did not fail."""
    item, log = ITEMS[name], run.out / f"{name}.log"
    limit = min(item.limit_s * (SMALL_LIMITS if run.small else 1), left_s)
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(run.out / "compilation_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = f"{os.environ.get('XLA_FLAGS', '')} {item.xla_flags}".strip()
    command = [sys.executable, __file__, *arguments, "--parent", str(os.getpid()), "--item", name]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**cache, **os.environ, "XLA_FLAGS": flags},
            start_new_session=True,
        )
    status: int | None = None
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # with what it has started, also where this process is stopped
        process.wait()
    path = run.out / f"{name}.json"
    report = json.loads(path.read_text("utf-8")) if path.exists() else {"item": name, "error": NOT_ENDED}
    if report.get("error") != NOT_ENDED:
        return status == 0
    last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
    why = (
        f"not done in {limit:.3g} s"
        if status is None
        else f"ended with status {status}: {' '.join(last)[:300]}"
    )
    write(run.out, name, {**report, "status": "failed", "error": why})
    return False


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
    parser.add_argument(
        "--model", help="folder or GGUF file of a model, for `train`; default: random weights"
    )
    parser.add_argument("--data", help="a .jsonl file with the columns question and answer, for `train`")
    parser.add_argument("--steps", type=int, default=6, help="training steps of `train`")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16 products; default: the card's data sheet")
    parser.add_argument("--bandwidth-tb-s", type=float, help="of its memory; default: the card's data sheet")
    parser.add_argument("--remat", choices=REMAT, default="layer", help="of `update`")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    run = Run(
        args.out.resolve(),
        *(args.small, args.model, args.data, args.steps, args.peak_tflops, args.bandwidth_tb_s, args.remat),
    )
    run.out.mkdir(parents=True, exist_ok=True)
    if args.item:
        end_with_parent(args.parent)
        return run_item(args.item, run)
    wanted = [name for name in ITEMS if any(fnmatch(name, pattern) for pattern in args.only or ["*"])]
    if not wanted:
        parser.error(f"--only must match an item; items are {', '.join(ITEMS)}; got {args.only}")
    for name in wanted:
        (run.out / f"{name}.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the item at hand is ended
    began, good = time.monotonic(), []
    for name in wanted:
        left_s = args.seconds - (time.monotonic() - began)
        if left_s > 0:
            good.append(in_a_process(name, run, arguments, left_s))
        else:
            good.append(False)
            write(run.out, name, {"item": name, "status": "failed", "error": "no time was left to begin it"})
        (run.out / "table.txt").write_text(table(run.out), encoding="utf-8")
    print(table(run.out), end="")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
