"""Whether kernels compute on these devices what they should: asked once, when a run starts.

Data flow: `model.attention` and `model.experts` with an `Architecture` -> `trusted_attention` and
`trusted_experts` -> the name of an implementation, for the specs of models and for `Backend.experts`. A
kernel may refuse a GPU, a driver or a version of cuDNN only when it is compiled, so each is compiled and
compared with what XLA computes by itself before it is used.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend, this_backend
from quatrain.cluster.processes import decided_by_main
from quatrain.config.errors import installation
from quatrain.config.sections.model_on_devices import ModelConfig
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention, unpacks_above
from quatrain.models.attention.kernels import PLATFORMS, choose_attention, obstacle
from quatrain.models.attention.unpacking import Unpacking, unpacking
from quatrain.models.blocks.experts import Experts
from quatrain.models.expert_products import PRODUCTS, expert_product, group_pairs
from quatrain.models.layers import BRANCHES_PER_GROUP

logger = logging.getLogger(__name__)

TOLERANCE = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-2}
"""Largest |got - wanted| / |wanted|, Euclidean norms over all real tokens, by the dtype of activations.

Rounding to bfloat16, which a TPU does in its products of float32 numbers too, causes about 4e-3; one token of
300 with a wrong mask causes 3e-2 and more."""
PROMPTS, COMPLETIONS, COMMON = (40, 70), (90, 30), 33
"""Tokens of the line that is attended to: two prompts after a common prefix, each with two completions."""
WINDOW = 50
"""Its sliding window, in tokens, for models that have one."""
CANDIDATES = {"cpu": ("blocks",), "gpu": ("tokamax", "blocks"), "tpu": ("ragged", "blocks")}
"""What `model.experts` auto tries on each platform, the best first; on GPUs `ragged` needs memory for zeros
in place of all other experts' rows."""
TOKAMAX_PLATFORMS = ("gpu", "tpu")
EXPERTS, PAIRS, FOREIGN = 8, 500, 60
"""Of the example: experts, at most; pairs; and those of them that are another device's."""
REASON_CHARS = 200


def trusted_attention(name: str, arch: Architecture, *, platform: str, dtype: DTypeLike) -> str:
    """The attention implementation for `model.attention` = `name`, whose kernel passed its probe.

    In a run of several processes all must call this; the main process probes its devices for all of them.
    `auto` takes the first kernel of the platform that passes, and logs it with the reasons against those
    before it. Raises ValueError for a kernel that does not pass, or that `choose_attention` refuses.
    """

    def failure(kernel: str) -> str | None:
        if kernel == "xla":
            return None
        if reason := obstacle(kernel, arch, dtype):
            return f"it cannot {reason}"
        return decided_by_main(partial(probe_attention, kernel, arch, dtype))

    if name == "auto":
        kernels = [kernel for kernel, where in PLATFORMS.items() if where == platform]
        return _first_trusted("attention", [*kernels, "xla"], failure)
    if reason := failure(choose_attention(name, arch, platform=platform, dtype=dtype)):
        raise ValueError(
            f"model.attention={name} must compute what xla computes on these devices, and it does not: "
            f"{reason}; set model.attention to auto or xla"
        )
    return name


def trusted_backend(config: ModelConfig, arch: Architecture) -> Backend:
    """The settings for these devices, with the product of `model.experts`; raises as `trusted_experts`."""
    backend = this_backend()
    experts = trusted_experts(config.experts, arch, platform=backend.kind, dtype=config.dtype)
    return replace(backend, experts=experts) if arch.routes else backend


def trusted_experts(name: str, arch: Architecture, *, platform: str, dtype: DTypeLike) -> str:
    """How a model's products of experts are computed, for `model.experts` = `name`.

    As `trusted_attention`, with `CANDIDATES`. Raises ValueError for a named one that the platform or a
    package does not have or that does not pass, and for any in a model without experts.
    """
    if arch.routes is None:
        if name == "auto":
            return "blocks"
        raise ValueError(
            f"model.experts={name} needs a model with experts; a {arch.family} model has none; set "
            "model.experts to auto"
        )

    def failure(kernel: str) -> str | None:
        if kernel == "blocks":
            return None
        if kernel == "tokamax" and platform not in TOKAMAX_PLATFORMS:
            return f"it needs a GPU or a TPU, but JAX uses the platform {platform}"
        if kernel == "tokamax" and importlib.util.find_spec("tokamax") is None:
            return f"it needs {installation('gpu')}, Python 3.12 or later and JAX 0.11.1 or later"
        shapes = product_shapes(arch)
        cases = [ExpertCase(*shape, str(jnp.dtype(dtype))) for shape in shapes]
        return decided_by_main(partial(_first_reason, kernel, cases))

    if name == "auto":
        return _first_trusted("experts", CANDIDATES.get(platform, ("blocks",)), failure)
    if reason := failure(name):
        raise ValueError(f"model.experts={name} cannot be used: {reason}; set model.experts to auto")
    return name


def _first_trusted(what: str, kernels: Sequence[str], failure: Callable[[str], str | None]) -> str:
    """The first of `kernels` without a `failure`, which the last never has; logged if there are others."""
    against: list[str] = []
    for kernel in kernels:
        if (reason := failure(kernel)) is None:
            break
        against.append(f"not {kernel}: {reason}")
    if len(kernels) > 1:
        logger.info("%s: %s", what, "; ".join((kernel, *against)))
    return kernel


def probe_attention(name: str, arch: Architecture, dtype: DTypeLike) -> str | None:
    """Compiles and runs attention by `name`, forward and backward, and compares it with `xla` in float32.

    Returns why it cannot be used: its error, or how far its results are from those of `xla`; None if it can.
    """
    cases = []
    # What unpacks all rows computes packed rows as rows of one sequence; the others have two ways.
    for mixer, packed in product(arch.attentions, (True,) if unpacks_above(name) == 0 else (True, False)):
        sizes = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        window = WINDOW if mixer.window else None
        cases.append(AttentionCase(*sizes, window, packed, mixer.softcap, str(jnp.dtype(dtype))))
    return _first_reason(name, cases)


def product_shapes(arch: Architecture) -> list[tuple[int, int, int]]:
    """(experts, inputs, outputs) of all products of experts, those of adapters among them."""
    shapes = dict[tuple[int, int, int], None]()
    for kind in arch.kinds:
        if isinstance(kind.mlp, Experts):
            d, f, e = arch.hidden_size, kind.mlp.width, min(kind.mlp.num, EXPERTS)
            for name, inputs, outputs in (("experts_gate_up", d, 2 * f), ("experts_down", f, d)):
                shapes[e, inputs, outputs] = None
                if arch.lora and name in arch.lora.targets:
                    shapes |= dict.fromkeys([(e, inputs, arch.lora.rank), (e, arch.lora.rank, outputs)])
    return [*shapes]


@dataclass(frozen=True)
class AttentionCase:
    """What an attention kernel's support may depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    packed: bool
    cap: float | None
    dtype: str

    reference: ClassVar[str] = "xla"

    def results(self, name: str, dtype: str) -> dict[str, np.ndarray]:
        """Output and gradients of one line with shared prompts, as float32 on the host; zeros on padding."""
        positions, segments, branches = _line() if self.packed else _row()
        layout = unpacking(segments, branches) if unpacks_above(name) == 0 else None
        real = (segments != 0)[:, :, None, None]
        rng = np.random.default_rng(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dy = (
            jnp.asarray(rng.normal(size=(*segments.shape, count, self.head_dim)), dtype) for count in heads
        )

        @jax.jit
        def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, layout: Unpacking | None) -> Any:
            pattern = attention_pattern(
                name,
                jnp.asarray(positions),
                jnp.asarray(segments),
                jnp.asarray(branches),
                self.window,
                ACCELERATOR.attention_blocks,
                packed=self.packed,
                layout=layout,
            )
            attend = partial(self_attention, name, pattern=pattern, window=self.window, cap=self.cap)
            y, pull = jax.vjp(attend, q, k, v)
            return y, *pull(dy)

        scaled, upstream = q * jnp.asarray(self.head_dim**-0.5, dtype), dy * jnp.asarray(real, dtype)
        results = jax.device_get(run(scaled, k, v, upstream, layout))
        names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
        return {part: np.where(real, x, 0).astype(np.float32) for part, x in zip(names, results, strict=True)}


@dataclass(frozen=True)
class ExpertCase:
    """What a product of experts may depend on."""

    experts: int
    inputs: int
    outputs: int
    dtype: str

    reference: ClassVar[str] = "blocks"

    def results(self, name: str, dtype: str) -> dict[str, np.ndarray]:
        """Output and gradients of an example, as float32 on the host; the last expert has no row."""
        assert name in PRODUCTS
        rng = np.random.default_rng(0)
        chosen = rng.integers(0, max(self.experts - 1, 1), PAIRS)
        chosen[:FOREIGN] = -1
        shapes = (PAIRS, self.inputs), (self.experts, self.outputs, self.inputs), (PAIRS, self.outputs)
        x, w, dy = (jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype) for shape in shapes)

        @jax.jit
        def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
            groups = group_pairs(jnp.asarray(chosen, jnp.int32), self.experts)
            y, pull = jax.vjp(lambda x, w: expert_product(x, w, groups, name), x, w)
            return y, *pull(dy)

        names = ("output", "gradient of rows", "gradient of matrices")
        results = jax.device_get(run(x, w, dy))
        return {part: np.asarray(x, np.float32) for part, x in zip(names, results, strict=True)}


def _first_reason(name: str, cases: Iterable[AttentionCase | ExpertCase]) -> str | None:
    """Why the kernel `name` cannot be used for the first of `cases` that it fails; None if it fails none."""
    return next(filter(None, (compared(name, case) for case in cases)), None)


@cache  # models of one shape, as policy, critic and teacher often are, ask once
def compared(name: str, case: AttentionCase | ExpertCase) -> str | None:
    """The error of the kernel `name`, or which of its results is too far from the reference's; else None."""
    try:
        with jax.default_matmul_precision("highest"):
            expected = case.results(case.reference, "float32")
        got = case.results(name, case.dtype)
    except Exception as error:  # a kernel's package raises exceptions of any class
        text = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {text:.{REASON_CHARS}}"
    limit = TOLERANCE[case.dtype]
    for part, wanted in expected.items():
        distance = float(np.linalg.norm(got[part] - wanted) / np.linalg.norm(wanted))
        if not distance <= limit:  # so written that NaN is too far
            norms = f"{distance:.2g} of its norm, and rounding explains at most {limit:g}"
            return f"its {part} differs from that of {case.reference} by {norms}"
    return None


def _row() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, segment ids and branch ids [1, T] of one sequence with padding behind it."""
    width = sum(PROMPTS) + sum(COMPLETIONS)
    segments = (np.arange(width) < width - COMMON)[None].astype(np.int32)
    return segments * np.arange(width, dtype=np.int32), segments, np.zeros_like(segments)


def _line() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, segment ids and branch ids [1, T] of the line, with some padding at its end."""
    parts = [(0, 0, COMMON)]
    for group, prompt in enumerate(PROMPTS, start=1):
        parts.append((group * BRANCHES_PER_GROUP, COMMON, prompt))
        for number, completion in enumerate(COMPLETIONS, start=1):
            parts.append((group * BRANCHES_PER_GROUP + number, COMMON + prompt, completion))
    positions = np.concatenate([first + np.arange(size) for _, first, size in parts])
    branches = np.repeat([branch for branch, *_ in parts], [size for *_, size in parts])
    width = -(-len(positions) // 64) * 64 + 64
    padded = (np.pad(x, (0, width - len(x))) for x in (positions, np.ones_like(positions), branches))
    line = [x[None].astype(np.int32) for x in padded]
    return line[0], line[1], line[2]
