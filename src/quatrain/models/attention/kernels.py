"""Fused attention kernels, and the choice among them for a model and a device.

Data flow: `choose_attention` when a run starts (`probe.py` runs what it chooses once); the decoder then calls
the chosen kernel in place of block-sparse attention (`blockwise.py`), for whole rows of tokens (no KV cache).

The kernels compute causal attention of rows [B, T] of one sequence each, with padding behind it: a token
attends to tokens at its index in the row or before, and fewer than `window` indices before it. Packed rows
come to them as rows of whole sequences (`unpacking.py`), or, for `splash`, with their mask. Queries must be
scaled already. Results and gradients on padding are finite and must not be used.

Shapes: B rows, T tokens, N query heads, K key/value heads, G = N / K, H head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.config.errors import installation
from quatrain.models.architecture import Architecture

PLATFORMS = {"cudnn": "gpu", "tokamax": "gpu", "splash": "tpu"}
"""The platform of each kernel; `auto` takes the first kernel that supports the model and the platform."""

BLOCK = 128
"""Rows are padded to a multiple of this: the TPU kernel requires it; the GPU kernels' blocks divide it."""

MAX_HEAD_DIM = 128
"""The largest head size of cuDNN's kernel on every GPU."""


def choose_attention(name: str, arch: Architecture, *, platform: str, dtype: DTypeLike) -> str:
    """The attention implementation for `model.attention` = `name`: `xla`, `cudnn`, `tokamax` or `splash`.

    `platform` is `Backend.kind`, `dtype` the dtype of activations. `auto` takes the first of `candidates`.
    Raises ValueError for an unknown name, and for a kernel that does not support the platform or the model.
    """
    if name == "auto":
        return candidates(arch, platform=platform, dtype=dtype)[0]
    if name == "xla":
        return name
    if name not in PLATFORMS:
        raise ValueError(f"model.attention must be auto, xla, {', '.join(PLATFORMS)}; got {name!r}")
    if platform != PLATFORMS[name]:
        raise ValueError(
            f"model.attention={name} needs a {PLATFORMS[name].upper()}, but JAX uses the platform "
            f"{platform}; set model.attention to auto or xla"
        )
    reason = obstacle(name, arch, dtype)
    if reason is not None:
        raise ValueError(f"model.attention={name} cannot {reason}; set model.attention to auto or xla")
    return name


def candidates(arch: Architecture, *, platform: str, dtype: DTypeLike) -> list[str]:
    """What `auto` may take, the best first: the kernels of `platform` that support `arch`, then `xla`."""
    kernels = [kernel for kernel, where in PLATFORMS.items() if where == platform]
    return [kernel for kernel in kernels if obstacle(kernel, arch, dtype) is None] + ["xla"]


def obstacle(kernel: str, arch: Architecture, dtype: DTypeLike) -> str | None:
    """The first requirement that `kernel` does not meet, worded to follow "cannot"; None if it meets all."""
    if any(mixer.sinks for mixer in arch.attentions):
        return f"add sinks to attention scores ({arch.family})"
    if kernel == "splash":
        return None
    if kernel == "tokamax" and importlib.util.find_spec("tokamax") is None:
        return f"be imported: it needs {installation('gpu')}, Python 3.12 or later and JAX 0.11.1 or later"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"compute in {jnp.dtype(dtype)}, only in bfloat16 or float16"
    for mixer in arch.attentions:
        size, cap = f"({arch.family}, head_dim {mixer.head_dim})", mixer.softcap
        if mixer.head_dim % 8:
            return f"take heads that are no multiple of 8 elements {size}"
        if kernel == "cudnn" and cap is not None:
            return f"apply a soft-cap to attention scores ({arch.family}, cap {cap:g})"
        if kernel == "cudnn" and mixer.head_dim > MAX_HEAD_DIM:
            return f"take heads of more than {MAX_HEAD_DIM} elements {size}"
    return None


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int | None,
    cap: float | None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """Attention [B, T, N, H] by cuDNN, or as XLA computes the same."""
    # The causal mask alone keeps a sequence from attending to the padding after it, so cuDNN gets no sequence
    # lengths: no row of scores is fully masked, and its restrictions on windows with lengths do not apply.
    assert cap is None
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)
    return _causal(attend, q_BTNH, k_BTKH, v_BTKH, window)


def tokamax_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: int | None, cap: float | None
) -> jax.Array:
    """Attention [B, T, N, H] by the Mosaic kernel of the package tokamax."""
    import tokamax

    attend = partial(tokamax.dot_product_attention, logits_soft_cap=cap, implementation="mosaic")
    return _causal(attend, q_BTNH, k_BTKH, v_BTKH, window)


def _causal(
    attend: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of rows that are padded to whole blocks."""
    T, near = q_BTNH.shape[1], None if window is None else (window - 1, 0)
    padded = (_pad(x, 1, T + -T % BLOCK) for x in (q_BTNH, k_BTKH, v_BTKH))
    return attend(*padded, scale=1.0, is_causal=True, local_window_size=near)[:, :T]


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int | None,
    cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H] by the TPU kernel of `jax.experimental.pallas.ops.tpu.splash_attention`."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, T, N, _ = q_BTNH.shape
    shape = (T + -T % BLOCK,) * 2
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * N),
        block_sizes=_splash_blocks(shape[0]),
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
    q_BNTH, k_BKTH, v_BKTH = (_splash_heads(x) for x in (q_BTNH, k_BTKH, v_BTKH))
    return _from_splash(jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH), q_BTNH.shape)


def splash_masked_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    mask_BTT: jax.Array,
    *,
    cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H] of packed rows with the bool `mask_BTT`, by the TPU kernel.

    Blocks of the mask without a true entry are skipped, forward and backward. Padding attends to itself, so
    that no row of scores is fully masked.

    The kernel has a mask per head and none per row, so rows are its heads, and it is mapped over the heads.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, N, _ = q_BTNH.shape
    K, width = k_BTKH.shape[2], T + -T % BLOCK
    mask_BTT = _pad(_pad(mask_BTT, 1, width), 2, width)
    # A row of scores that is masked whole has a softmax of 0 / 0, and NaN on padding spreads in the gradient.
    mask_BTT = mask_BTT | (jnp.eye(width, dtype=bool) & ~mask_BTT.any(axis=2, keepdims=True))
    kernel = splash.make_splash_mha_single_device(
        mask_BTT, block_sizes=_splash_blocks(width), attn_logits_soft_cap=cap, interpret=interpret
    )

    def one_head(*rows: jax.Array) -> Any:
        return _with_dynamic_mask(kernel)(*rows)

    q_BNTH, k_BKTH, v_BKTH = (_splash_heads(x) for x in (q_BTNH, k_BTKH, v_BTKH))
    q_BKGTH = q_BNTH.reshape(B, K, N // K, *q_BNTH.shape[2:])
    heads_of_key = jax.vmap(one_head, (1, None, None), 1)
    y_BKGTH = jax.vmap(heads_of_key, 1, 1)(q_BKGTH, k_BKTH, v_BKTH)
    return _from_splash(y_BKGTH.reshape(q_BNTH.shape), q_BTNH.shape)


def _with_dynamic_mask(kernel: Any) -> Any:
    """`kernel` with the flag that its mask is an array, which `jit` would otherwise make a traced value."""
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        info = getattr(kernel, name)
        if info is not None:
            setattr(kernel, name, info._replace(is_dynamic_mask=True))
    return kernel


def _splash_blocks(width: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # The largest that divides the row: the kernel itself pads nothing.
    block = next(size for size in (4 * BLOCK, 2 * BLOCK, BLOCK) if width % size == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: Any = dict.fromkeys(names, block)
    return splash.BlockSizes(**sizes)


def _splash_heads(x_BTNH: jax.Array) -> jax.Array:
    """[B, N, T, H] with T padded to whole blocks, and heads to a multiple of 128 (whole vector registers)."""
    _, T, _, H = x_BTNH.shape
    return _pad(_pad(x_BTNH, 1, T + -T % BLOCK), 3, H + -H % 128).swapaxes(1, 2)


def _from_splash(y_BNTH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, T, N, H] = `shape`, without the padding of `_splash_heads`."""
    _, T, _, H = shape
    return y_BNTH.swapaxes(1, 2)[:, :T, :, :H]


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """x padded at its end with zeros to `size` along `dim`."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = 0, size - x.shape[dim]
    return jnp.pad(x, widths)
