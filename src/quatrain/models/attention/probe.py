"""Whether a fused attention kernel computes on these devices what it should: asked once, when a run starts.

Data flow: `model.attention` and an `Architecture` -> `trusted_attention` -> the name of an implementation for
`PolicySpec`, `CriticSpec`, reward models and the rollout engine. A kernel may refuse a GPU, a driver or a
version of cuDNN only when it is compiled, so each is compiled and compared with `xla` before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR
from quatrain.cluster.processes import decided_by_main
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention, unpacks_above
from quatrain.models.attention.kernels import PLATFORMS, candidates, choose_attention, obstacle
from quatrain.models.attention.unpacking import Unpacking, unpacking
from quatrain.models.layers import BRANCHES_PER_GROUP

logger = logging.getLogger(__name__)

TOLERANCE = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-2}
"""Largest |got - wanted| / |wanted|, Euclidean norms over all real tokens, by the dtype of activations.

Rounding to bfloat16, which a TPU does in its products of float32 numbers too, causes about 4e-3; one token of
300 with a wrong mask causes 3e-2 and more."""
PROMPTS, COMPLETIONS, COMMON = (40, 70), (90, 30), 33
"""Tokens of the line that is computed: two prompts after a common prefix, each with two completions."""
WINDOW = 50
"""Its sliding window, in tokens, for models that have one."""
REASON_CHARS = 200


@dataclass(frozen=True)
class _Case:
    """What a kernel's support may depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    packed: bool
    cap: float | None
    dtype: str


Probe = Callable[[str, Architecture, DTypeLike], str | None]
"""(name of a kernel, architecture, dtype of activations) -> why the kernel cannot be used, or None."""


def probe(name: str, arch: Architecture, dtype: DTypeLike) -> str | None:
    """Compiles and runs attention by `name`, forward and backward, and compares it with `xla` in float32.

    Returns why it cannot be used: its error, or how far its results are from those of `xla`; None if it can.
    """
    # What unpacks all rows computes packed rows as rows of one sequence; the others have two ways.
    for mixer, packed in product(arch.attentions, (True,) if unpacks_above(name) == 0 else (True, False)):
        window = WINDOW if mixer.window else None
        sizes = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        case = _Case(*sizes, window, packed, mixer.softcap, str(jnp.dtype(dtype)))
        reason = _probed(name, case)
        if reason is not None:
            return reason
    return None


def trusted_attention(
    name: str, arch: Architecture, *, platform: str, dtype: DTypeLike, probe: Probe = probe
) -> str:
    """The attention implementation for `model.attention` = `name`, whose kernel passed its `probe`.

    In a run of several processes all must call this; the main process probes its devices for all of them.
    `auto` takes the first of `kernels.candidates` that passes, and logs it with the reasons against those
    before it. Raises ValueError for a kernel that does not pass, or that `choose_attention` refuses.
    """

    def failure(kernel: str) -> str | None:
        return None if kernel == "xla" else decided_by_main(partial(probe, kernel, arch, dtype))

    if name != "auto":
        chosen = choose_attention(name, arch, platform=platform, dtype=dtype)
        reason = failure(chosen)
        if reason is not None:
            raise ValueError(
                f"model.attention={name} must compute what xla computes on these devices, and it does not: "
                f"{reason}; set model.attention to auto or xla"
            )
        return chosen
    kernels = [kernel for kernel, where in PLATFORMS.items() if where == platform]
    refused = ((kernel, obstacle(kernel, arch, dtype)) for kernel in kernels)
    against = [f"not {kernel}: it cannot {reason}" for kernel, reason in refused if reason]
    for kernel in candidates(arch, platform=platform, dtype=dtype):
        reason = failure(kernel)
        if reason is None:
            break
        against.append(f"not {kernel}: {reason}")
    if kernels:
        logger.info("attention: %s", "; ".join((kernel, *against)))
    return kernel


@cache
def _probed(name: str, case: _Case) -> str | None:
    return _compared(name, case)


def _compared(name: str, case: _Case) -> str | None:
    try:
        with jax.default_matmul_precision("highest"):
            expected = _results("xla", case, "float32")
        got = _results(name, case, case.dtype)
    except Exception as error:  # a kernel's package raises exceptions of any class
        text = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {text:.{REASON_CHARS}}"
    limit = TOLERANCE[case.dtype]
    for part, wanted in expected.items():
        distance = float(np.linalg.norm(got[part] - wanted) / np.linalg.norm(wanted))
        if not distance <= limit:
            norms = f"{distance:.2g} of its norm, and rounding explains at most {limit:g}"
            return f"its {part} differs from that of xla by {norms}"
    return None


def _results(name: str, case: _Case, dtype: str) -> dict[str, np.ndarray]:
    """Output and gradients of one line with shared prompts, as float32 on the host; zeros on padding."""
    positions, segments, branches = _line() if case.packed else _row()
    layout = unpacking(segments, branches) if unpacks_above(name) == 0 else None
    real = (segments != 0)[:, :, None, None]
    rng = np.random.default_rng(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, dy = (
        jnp.asarray(rng.normal(size=(*segments.shape, count, case.head_dim)), dtype) for count in heads
    )

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, layout: Unpacking | None) -> Any:
        pattern = attention_pattern(
            name,
            jnp.asarray(positions),
            jnp.asarray(segments),
            jnp.asarray(branches),
            case.window,
            ACCELERATOR.attention_blocks,
            packed=case.packed,
            layout=layout,
        )
        attend = partial(self_attention, name, pattern=pattern, window=case.window, cap=case.cap)
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    scaled, upstream = q * jnp.asarray(case.head_dim**-0.5, dtype), dy * jnp.asarray(real, dtype)
    results = jax.device_get(run(scaled, k, v, upstream, layout))
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {part: np.where(real, x, 0).astype(np.float32) for part, x in zip(names, results, strict=True)}


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
