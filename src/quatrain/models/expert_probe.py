"""Whether a product of experts computes on these devices what it should: asked once, when a run starts.

Data flow: `model.experts` and an `Architecture` -> `trusted_experts` -> `Backend.experts` of the update, of
critics and of the rollout engine. As for attention (`attention/probe.py`), a kernel may refuse a device only
when it is compiled, so each is compiled and compared with `blocks` before it is used.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from quatrain.backend import Backend, this_backend
from quatrain.cluster.processes import decided_by_main
from quatrain.config.errors import installation
from quatrain.config.sections.model import ModelConfig
from quatrain.models.architecture import Architecture
from quatrain.models.attention.probe import REASON_CHARS, TOLERANCE
from quatrain.models.blocks.experts import Experts
from quatrain.models.expert_products import PRODUCTS, expert_product, group_pairs

logger = logging.getLogger(__name__)

CANDIDATES = {"cpu": ("blocks",), "gpu": ("tokamax", "blocks"), "tpu": ("ragged", "blocks")}
"""What `auto` tries on each platform, the best first; on GPUs `ragged` needs memory for zeros in place of all
other experts' rows."""
TOKAMAX_PLATFORMS = ("gpu", "tpu")
EXPERTS, PAIRS, FOREIGN = 8, 500, 60
"""Of the example: experts, at most; pairs; and those of them that are another device's."""

Probe = Callable[[str, Architecture, DTypeLike], str | None]
"""(name of a product, architecture, dtype of activations) -> why it cannot be used, or None."""


def trusted_backend(config: ModelConfig, arch: Architecture) -> Backend:
    """The settings for these devices, with the product of `model.experts`; raises as `trusted_experts`."""
    backend = this_backend()
    experts = trusted_experts(config.experts, arch, platform=backend.kind, dtype=config.dtype)
    return replace(backend, experts=experts) if arch.routes else backend


def trusted_experts(
    name: str, arch: Architecture, *, platform: str, dtype: DTypeLike, probe: Probe | None = None
) -> str:
    """How a model's products of experts are computed, for `model.experts` = `name`.

    In a run of several processes all must call this; the main process probes its devices for all of them.
    `auto` takes the first of `CANDIDATES` that passes its `probe`, and logs it with the reasons against those
    before it. Raises ValueError for a named one that the platform or a package does not have or that does not
    pass, and for any in a model without experts.
    """
    probe = probe or probed
    if arch.routes is None:
        if name == "auto":
            return "blocks"
        raise ValueError(
            f"model.experts={name} needs a model with experts; a {arch.family} model has none; set "
            "model.experts to auto"
        )

    def failure(product: str) -> str | None:
        reason = _missing(product, platform)
        if reason or product == "blocks":
            return reason
        return decided_by_main(partial(probe, product, arch, dtype))

    if name != "auto":
        if reason := failure(name):
            raise ValueError(f"model.experts={name} cannot be used: {reason}; set model.experts to auto")
        return name
    products, against = CANDIDATES.get(platform, ("blocks",)), []
    for product in products:
        reason = failure(product)
        if reason is None:
            break
        against.append(f"not {product}: {reason}")
    if len(products) > 1:
        logger.info("experts: %s", "; ".join((product, *against)))
    return product


def _missing(product: str, platform: str) -> str | None:
    """What is not there without which the product cannot be computed."""
    if product != "tokamax":
        return None
    if platform not in TOKAMAX_PLATFORMS:
        return f"it needs a GPU or a TPU, but JAX uses the platform {platform}"
    if importlib.util.find_spec("tokamax") is None:
        return f"it needs {installation('gpu')}, Python 3.12 or later and JAX 0.11.1 or later"
    return None


def probed(product: str, arch: Architecture, dtype: DTypeLike) -> str | None:
    """Compiles and runs the products of a model, forward and backward, and compares them with `blocks`.

    Returns why it cannot be used: its error, or how far its results are from those of `blocks` in float32;
    None if it can.
    """
    for experts, inputs, outputs in _shapes(arch):
        if reason := _compared(product, experts, inputs, outputs, str(jnp.dtype(dtype))):
            return reason
    return None


def _shapes(arch: Architecture) -> list[tuple[int, int, int]]:
    """(experts, inputs, outputs) of all products, those of adapters among them."""
    shapes = dict[tuple[int, int, int], None]()
    for kind in arch.kinds:
        if isinstance(kind.mlp, Experts):
            d, f, e = arch.hidden_size, kind.mlp.width, min(kind.mlp.num, EXPERTS)
            for name, inputs, outputs in (("experts_gate_up", d, 2 * f), ("experts_down", f, d)):
                shapes[e, inputs, outputs] = None
                if arch.lora and name in arch.lora.targets:
                    shapes |= dict.fromkeys([(e, inputs, arch.lora.rank), (e, arch.lora.rank, outputs)])
    return [*shapes]


@cache
def _compared(product: str, experts: int, inputs: int, outputs: int, dtype: str) -> str | None:
    shape = experts, inputs, outputs
    try:
        with jax.default_matmul_precision("highest"):
            expected = _results("blocks", *shape, "float32")
        got = _results(product, *shape, dtype)
    except Exception as error:  # a kernel's package raises exceptions of any class
        text = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {text:.{REASON_CHARS}}"
    for part, wanted in expected.items():
        distance = float(np.linalg.norm(got[part] - wanted) / np.linalg.norm(wanted))
        if not distance <= TOLERANCE[dtype]:
            norms = f"{distance:.2g} of its norm, and rounding explains at most {TOLERANCE[dtype]:g}"
            return f"its {part} differs from that of blocks by {norms}"
    return None


def _results(product: str, experts: int, inputs: int, outputs: int, dtype: str) -> dict[str, np.ndarray]:
    """Output and gradients of an example, as float32 on the host; the last expert has no row."""
    assert product in PRODUCTS
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, max(experts - 1, 1), PAIRS)
    chosen[:FOREIGN] = -1
    shapes = (PAIRS, inputs), (experts, outputs, inputs), (PAIRS, outputs)
    x, w, dy = (jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype) for shape in shapes)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        groups = group_pairs(jnp.asarray(chosen, jnp.int32), experts)
        y, pull = jax.vjp(lambda x, w: expert_product(x, w, groups, product), x, w)
        return y, *pull(dy)

    names = ("output", "gradient of rows", "gradient of matrices")
    results = jax.device_get(run(x, w, dy))
    return {part: np.asarray(x, np.float32) for part, x in zip(names, results, strict=True)}
