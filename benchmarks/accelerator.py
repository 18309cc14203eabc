"""What `first_gpu_run.py` measures with: shapes of Qwen2.5 with random weights, and the sections of `Bench`.

`machine`: the machine's own rates. `checks`: the tests marked `gpu`. `decode`: in bfloat16, against what
memory bandwidth allows: each weight, the cache of each group's prompt and of each sampled token read once a
step. `update`: optimizer steps in bfloat16, against the rate of matrix products; recomputation and padding
are not counted as work. `float32_gap`, `bfloat16_gap`: how far the sampler's log-probabilities are from the
trainer's.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.backend import this_backend
from quatrain.config.schema import LogprobConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from quatrain.engine.decode import TOKENS_PER_CALL
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.forward.micro_batch import MicroBatch, fill
from quatrain.forward.planner import MicroBatchPlan, describe_plans
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import Architecture
from quatrain.models.families import architecture_from_hf
from quatrain.models.flops import forward_flops, packing_cost, parameters_read
from quatrain.models.kv_cache import bytes_per_position
from quatrain.models.params import init_params
from quatrain.models.probe import trusted_attention
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import Sampling
from quatrain.update.gradient import Accumulated, init_optimizer, optimizer_step, sum_gradients
from quatrain.update.objective import PolicyObjective
from quatrain.update.optimizer import Optimizer

ROOT = Path(__file__).resolve().parents[1]
LARGEST_GAP = 1e-4
"""Of log-probabilities in float32 at the highest precision of products, between sampler and trainer."""
Figures = dict[str, Any]


def qwen25(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Architecture:
    """The shape of a small Qwen2.5."""
    return architecture_from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 2,
            "head_dim": hidden_size // num_heads,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        }
    )


@dataclass(frozen=True)
class Scale:
    """How large everything is; sizes in sequences, tokens and bytes."""

    shapes: dict[str, Architecture] = field(
        default_factory=lambda: {"1.5B": qwen25(1536, 8960, 28, 12), "0.5B": qwen25(896, 4864, 24, 14)}
    )
    matrix: int = 8192
    copied_bytes: int = 2**32
    repeats: int = 20
    group: int = 8
    slots: int = 256
    prompt_tokens: int = 256
    new_tokens: int = 512
    sequences: int = 64
    """Of an optimizer step; completions are log-normal around `median` tokens, `longest` at most."""
    median: int = 400
    """Tokens."""
    longest: int = 1024
    max_tokens: int = 16384
    steps: int = 3
    gap_groups: int = 6
    gap_tokens: int = 64
    gap_layers: int = 4
    """Of the shapes that are sampled from in float32."""


SMALL = Scale(
    shapes={"tiny": replace(qwen25(64, 96, 1, 4), vocab_size=500)},
    matrix=256,
    copied_bytes=2**22,
    repeats=2,
    slots=16,
    prompt_tokens=20,
    new_tokens=40,
    sequences=16,
    median=22,
    longest=40,
    max_tokens=256,
    steps=2,
    gap_groups=2,
    gap_tokens=12,
    gap_layers=1,
)


class NotPossible(Exception):
    """What a section measures does not exist on this machine."""


class WithoutText:
    """Stands where a tokenizer stands: what random weights say is not worth reading."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """No text."""
        return ""


@dataclass
class Bench:
    """What the sections measure with; `limits` are the machine's own rates, once they are known."""

    scale: Scale
    peak_tflops: float | None
    bandwidth_tb_s: float | None
    remat: str = "layer"
    checks_limit_s: float = 240
    limits: dict[str, float] = field(default_factory=dict)
    sampled: dict[Architecture, RolloutBatch] = field(default_factory=dict)
    """What `decode` sampled."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(OptimizerConfig(learning_rate=1e-6), 1000))

    def machine(self, figures: Figures) -> None:
        """Rate of large bfloat16 products of random matrices, and of copying (bytes read and written)."""
        scale = self.scale
        size = scale.matrix
        x, w = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(_key()))
        # Products of products keep their scale.
        seconds = chained(jax.jit(jnp.matmul), x, scale.repeats, w * size**-0.5)
        self.limits["matmul_tflops"] = figures["matmul_tflops"] = 2 * size**3 / seconds / 1e12
        array = jax.random.normal(_key(), (scale.copied_bytes // 4,), jnp.float32)
        seconds = chained(jax.jit(lambda x: x + 1, donate_argnums=0), array, scale.repeats)
        self.limits["copy_tb_s"] = figures["copy_tb_s"] = 2 * scale.copied_bytes / seconds / 1e12

    def checks(self, figures: Figures) -> None:
        """The tests marked `gpu`, in a process of their own; raises where one fails."""
        output, status = run_tests(ROOT / "tests" / "gpu", self.checks_limit_s)
        figures |= count_outcomes(output)
        if status:
            figures["output"] = output.splitlines()[-150:]
            why = ", ".join(figures["failing"]) or f"pytest ended with status {status}"
            raise RuntimeError(f"not all checks pass: {why}")

    def decode(self, arch: Architecture, figures: Figures) -> None:
        """Seconds of a decode step of full slots, and the share of what memory bandwidth allows."""
        scale = self.scale
        rounds: list[float] = []
        told = lambda _: rounds.append(time.perf_counter())  # noqa: E731
        engine = _engine(arch, scale.group, scale.new_tokens, "bfloat16", told)
        engine.sync_weights(init_params(arch, _key(), jnp.bfloat16), 0)
        prompts = random_prompts(arch, scale.slots // scale.group, scale.prompt_tokens)
        engine.generate(prompts)
        rounds.clear()
        began = time.perf_counter()
        batch = self.sampled[arch] = engine.generate(prompts, step=1)
        seconds = time.perf_counter() - began
        metrics = {name: metric.result() for name, metric in batch.metrics.items()}
        step_s = metrics["rollout/decode_s"] / (scale.new_tokens - 1)
        tokens = sum(len(prompt.input_ids) for prompt in prompts) + scale.slots * scale.new_tokens / 2
        weights, cache = (
            2 * parameters_read(arch, scale.slots),
            tokens * bytes_per_position(arch, jnp.bfloat16),
        )
        rate = (weights + cache) / step_s / 1e12
        # The first round computes the prompts.
        quarters = np.array_split(np.diff(rounds) / TOKENS_PER_CALL, 4)
        figures |= {
            "seconds_per_step": step_s,
            "seconds_per_step_by_quarter": [statistics.median(part) for part in quarters],
            "decode_tokens_per_s": scale.slots / step_s,
            "tokens_per_s": batch.completion_lengths.sum() / seconds,
            "prefill_s": metrics["rollout/prefill_s"],
            "compilations_while_measured": metrics["rollout/compilations"],
            "weight_bytes": weights,
            "cache_bytes_mean": cache,
            "tb_per_s": rate,
            **_shares(rate, bandwidth=self.bandwidth_tb_s, copy=self.limits.get("copy_tb_s")),
        }

    def update(self, arch: Architecture, attention: str, layout: str, figures: Figures) -> None:
        """Seconds of an optimizer step, and the share of the rate of matrix products."""
        scale = self.scale
        dtype = "bfloat16"
        choose = partial(trusted_attention, arch=arch, platform=this_backend().kind, dtype=dtype)
        try:
            choose(attention)
        except ValueError as error:
            raise NotPossible(str(error)) from None
        figures["auto_picks"] = choose("auto")
        policy = PolicySpec(arch, dtype=dtype, remat=self.remat, attention=attention)
        table = random_table(arch, scale)
        sizes = LogprobConfig(max_tokens_per_device=scale.max_tokens)
        cuts = policy.planner(sizes, share_prompts=layout == "shared").plans(table)
        flops, filled = 3 * needed_flops(arch, table, cuts), describe_plans(table, cuts, packing_cost(arch))
        for name in ("tokens", "micro_batches", "padding_fraction", "shared_fraction"):
            figures[name] = filled[f"batch/{name}"].result()
        seconds, figures["grad_norm"] = self._optimizer_steps(
            policy, [fill(cut, table, policy.mesh, policy.forms) for cut in cuts]
        )
        step_s = statistics.median(seconds[1:])
        rate = flops / step_s / 1e12
        figures |= {
            "seconds_per_step": step_s,
            "first_step_s": seconds[0],
            "tokens_per_s": table.lengths.sum() / step_s,
            "tflop": flops / 1e12,
            "tflops": rate,
            **_shares(rate, peak=self.peak_tflops, matmul=self.limits.get("matmul_tflops")),
            "most_gib_so_far": _most_memory(),
        }

    def _optimizer_steps(self, policy: PolicySpec, batches: list[MicroBatch]) -> tuple[list[float], float]:
        """Seconds of each optimizer step, the first of which compiles, and the norm of the last gradient."""
        params = init_params(policy.arch, _key())
        state, seconds = init_optimizer(self.optimizer.form, params), []
        objective = PolicyObjective.of(UpdateConfig(), on_policy=True)
        for step in range(self.scale.steps + 1):
            began = time.perf_counter()
            grads, stats, _ = sum_gradients(params, batches, model=policy, objective=objective)
            params, state, applied, metrics, _ = optimizer_step(
                params,
                state,
                Accumulated(grads, (stats,)),
                model=policy,
                form=self.optimizer.form,
                numbers=self.optimizer.numbers(step),
            )
            jax.block_until_ready((params, state))
            seconds.append(time.perf_counter() - began)
            if not applied:
                raise RuntimeError("an optimizer step has a finite loss and gradient; this one had not")
        return seconds, metrics["update/grad_norm"].result()

    def float32_gap(self, arch: Architecture, precision: str, figures: Figures) -> None:
        """The gap in float32, products at this precision; raises where the highest is not enough."""
        scale = self.scale
        params = init_params(arch, _key())
        with jax.default_matmul_precision(precision):
            engine = _engine(arch, scale.group, scale.gap_tokens, "float32")
            engine.sync_weights(params, 0)
            batch = engine.generate(random_prompts(arch, scale.gap_groups, scale.prompt_tokens))
            figures |= describe_gap(PolicySpec(arch, attention="xla"), params, batch, scale.max_tokens)
        largest = figures["logprob_diff_max"]
        if precision == "highest" and not largest < LARGEST_GAP:
            raise RuntimeError(
                f"sampler and trainer agree to {LARGEST_GAP:g} in float32; they differ by {largest:g}"
            )

    def bfloat16_gap(self, arch: Architecture, figures: Figures) -> None:
        """The gap of what `decode` sampled, of as many sequences as fill two micro-batches."""
        if arch not in self.sampled:
            raise NotPossible("sequences come from the section decode of this shape, which has none")
        batch, max_tokens = self.sampled[arch], self.scale.max_tokens
        rows = 2 * (max_tokens // int(batch.lengths.max()))
        params = init_params(arch, _key(), jnp.bfloat16)
        policy = PolicySpec(arch, dtype="bfloat16", attention=_attention(arch, "bfloat16"))
        figures |= describe_gap(policy, params, batch, max_tokens, rows)


def _shares(rate: float, **limits: float | None) -> dict[str, float]:
    """`rate` over each limit that is known."""
    return {f"share_of_{name}": rate / limit for name, limit in limits.items() if limit}


def _attention(arch: Architecture, dtype: str) -> str:
    """The attention implementation that a run would use."""
    return trusted_attention("auto", arch, platform=this_backend().kind, dtype=dtype)


def _key() -> jax.Array:
    return jax.random.key(0)


def _engine(
    arch: Architecture, n: int, new_tokens: int, dtype: str, on_progress: Callable[[Any], None] | None = None
) -> Rollouts:
    """Line 1 on an engine that meets no stop token; prompts with the attention that `auto` stands for."""
    config, attention = RolloutConfig(n=n, max_new_tokens=new_tokens), _attention(arch, dtype)
    settings = {"seed": 0, "dtype": dtype, "attention": attention}
    engine = RolloutEngine(arch, config, WithoutText(), stop_ids=(), **settings)
    sampler = EngineService(engine, thread=None)
    return Rollouts(sampler, WithoutText(), Sampling.of(config), on_progress=on_progress)


def random_prompts(arch: Architecture, count: int, tokens: int) -> list[Prompt]:
    """Prompts of `tokens` random tokens: of equal length, as every other shape would be compiled too."""
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, (count, tokens)).astype(np.int32)
    return [Prompt(group, row, "") for group, row in enumerate(ids)]


def random_table(arch: Architecture, scale: Scale) -> TokenTable:
    """Groups with a prompt each and random completions of log-normal lengths, with random advantages."""
    rng = np.random.default_rng(0)
    count = scale.sequences // scale.group
    group_ids = np.repeat(np.arange(count), scale.group)
    drawn = rng.lognormal(np.log(scale.median), 0.6, len(group_ids))
    lengths = scale.prompt_tokens + np.clip(drawn, 1, scale.longest).astype(int)
    columns = np.arange(lengths.max())
    attention = columns < lengths[:, None]
    completion = attention & (columns >= scale.prompt_tokens)
    input_ids = np.where(completion, rng.integers(0, arch.vocab_size, attention.shape), 0).astype(np.int32)
    prompts = np.stack([prompt.input_ids for prompt in random_prompts(arch, count, scale.prompt_tokens)])
    input_ids[:, : scale.prompt_tokens] = prompts[group_ids]
    advantages = np.where(completion, rng.normal(size=(len(group_ids), 1)), 0).astype(np.float32)
    sampled = {"advantages": advantages, "rollout_logprobs": -completion.astype(np.float32)}
    table = TokenTable(input_ids, attention, completion, sampled, group_ids)
    return table.weighted("token_mean", scale.longest)


def describe_gap(
    policy: PolicySpec, params: Any, batch: RolloutBatch, max_tokens: int, rows: int | None = None
) -> Figures:
    """Log-probabilities of `policy` minus the sampler's, over the tokens of the first `rows` sequences."""
    table = TokenTable(batch.input_ids, batch.attention_mask, batch.completion_mask, {})
    table = table.take(np.arange(len(table))[:rows])
    planner = policy.planner(LogprobConfig(max_tokens_per_device=max_tokens))
    trained = predict_tokens(params, table, model=policy, planner=planner)
    mask = table.completion_mask
    gap = (trained - batch.rollout_logprobs[:rows])[mask].astype(np.float64)
    return {
        "logprob_diff_max": np.abs(gap).max(),
        "logprob_diff_mean": np.abs(gap).mean(),
        "ratio_max": np.exp(gap).max(),
        "logprob_mean": trained[mask].mean(),
        "tokens": mask.sum(),
    }


def needed_flops(arch: Architecture, table: TokenTable, cuts: Sequence[MicroBatchPlan]) -> float:
    """Operations of a forward pass over `cuts` of `table`: what is shared counts once."""
    tokens = keys = 0.0
    for cut in cuts:
        again = cut.num_common * (cut.num_common + 1) / 2
        tokens += float(sum(cut.work(buffer)[0] for buffer in cut.buffers))
        keys += again * sum(map(bool, cut.buffers))
        for segment in (segment for buffer in cut.buffers for segment in buffer):
            shared, own = segment.num_shared, table.lengths[segment.rows] - segment.num_shared
            keys += shared * (shared + 1) / 2 - again
            keys += float((own * shared + own * (own + 1) / 2).sum())
    scored = float(table.completion_mask.sum())
    return forward_flops(arch, tokens=tokens, keys=keys / tokens, scored=scored)


def chained(function: Callable[..., jax.Array], x: jax.Array, repeats: int, *others: Any) -> float:
    """Seconds of one call of x = function(x, ...), among `repeats` that the device is handed at once."""
    x = jax.block_until_ready(function(x, *others))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            x = function(x, *others)
        jax.block_until_ready(x)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def run_tests(folder: Path, limit_s: float) -> tuple[str, int]:
    """What pytest printed on the tests in `folder` marked `gpu`, and its status; -1 where time ran out."""
    options = ["-o", "addopts=", "-v", "-rs", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    # By default warnings are errors; here is not the place to learn of a new one.
    command = [sys.executable, "-m", "pytest", *options, "-W", "default", "-m", "gpu", str(folder)]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has most of the device's memory
    }
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), -1
    return ended.stdout.decode(errors="replace"), ended.returncode


def count_outcomes(output: str) -> Figures:
    """Tests passed, failed and skipped in what `pytest -v` printed, as far as it came, and which failed."""
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    outcomes = {outcome: [name for name, got in found if got == outcome] for _, outcome in found}
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", output, re.MULTILINE)
    return {
        "passed": len(outcomes.get("PASSED", ())),
        "failed": len(outcomes.get("FAILED", ())) + len(outcomes.get("ERROR", ())),
        "skipped": len(outcomes.get("SKIPPED", ())),
        "failing": [*outcomes.get("FAILED", ()), *outcomes.get("ERROR", ())],
        "why_skipped": sorted(set(reasons)),
    }


def _most_memory() -> float | None:
    most = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if most is None else most / 2**30


def describe_device() -> Figures:
    """Device, driver and versions."""
    device = jax.local_devices()[0]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "optax")
    return {
        "kind": device.device_kind,
        "platform": jax.default_backend(),
        "count": jax.device_count(),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": _output(query),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in packages if _version(name)},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
    }


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def attempt(function: Callable[[Figures], None], figures: Figures) -> Figures:
    """Run `function`; its status, with the error's first line and place where there was one."""
    try:
        function(figures)
    except NotPossible as reason:
        return {"status": "not possible", "why": str(reason)}
    except Exception as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "site-packages" not in frame.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        text = next(iter(str(error).strip().splitlines()), "")
        return {"status": "failed", "error": f"{type(error).__name__}: {text[:500]} ({place})"}
    return {"status": "done"}


def plain(value: Any) -> Any:
    """NumPy's numbers as Python's, for JSON; what else there may be as text, so that no figure is lost."""
    return value.item() if isinstance(value, np.generic) else str(value)
