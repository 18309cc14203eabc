"""Fused attention kernels that ship with JAX, and the choice among them for a model and a device.

Data flow: `choose_attention` is called when a run starts; the decoder then calls the chosen kernel in place
of block-sparse attention (`blocks.py`), for whole rows of tokens (no KV cache).

A token attends to tokens of its own segment (segment 0 is padding) at its index in the row or before, and
fewer than `window` indices before it. Tokens of a segment are neighbours, in order, so that the kernels use
indices in the row in place of positions. Queries must be scaled already. Results and gradients on padding are
finite and must not be used.

Shapes: B rows, T tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.models.architecture import LAYER_TYPES, Architecture

PLATFORMS = {"cudnn": "gpu", "pallas": "gpu", "splash": "tpu"}
"""The platform of each kernel; `auto` takes the first kernel that supports the model and the platform."""

BLOCK = 128
"""Rows are padded to a multiple of this: the TPU kernel requires it; the GPU kernels' blocks divide it."""

MAX_HEAD_DIM = 128
"""The limit of the GPU kernels: of cuDNN on GPUs before Hopper, and of Pallas blocks in shared memory."""

_TILE_BYTES = 16 * 1024
"""Size of a block of queries, keys or values; about five must fit in shared memory, at least 99 KiB."""


def choose_attention(
    name: str, arch: Architecture, *, platform: str, dtype: DTypeLike, packed: bool, shared: bool = False
) -> str:
    """The attention implementation for `model.attention` = `name`: `xla`, `cudnn`, `pallas` or `splash`.

    `platform` is `Backend.kind`, `dtype` the dtype of activations. `packed` says that a row may hold several
    segments, and `shared` that a segment may have branches (shared prompts). `auto` takes the first kernel of
    the platform that supports the attention of `arch`, else `xla`. Raises ValueError for an unknown name, and
    for a kernel of another platform or one that does not support `arch`, `dtype`, `packed` or `shared`.
    """
    if name == "auto":
        kernels = (kernel for kernel, where in PLATFORMS.items() if where == platform)
        return next((k for k in kernels if _obstacle(k, arch, dtype, packed, shared) is None), "xla")
    if name == "xla":
        return name
    if name not in PLATFORMS:
        raise ValueError(f"model.attention must be auto, xla, {', '.join(PLATFORMS)}; got {name!r}")
    if platform != PLATFORMS[name]:
        raise ValueError(
            f"model.attention={name} needs a {PLATFORMS[name].upper()}, but JAX uses the platform "
            f"{platform}; set model.attention to auto or xla"
        )
    obstacle = _obstacle(name, arch, dtype, packed, shared)
    if obstacle is not None:
        raise ValueError(f"model.attention={name} cannot {obstacle}; set model.attention to auto or xla")
    return name


def _obstacle(kernel: str, arch: Architecture, dtype: DTypeLike, packed: bool, shared: bool) -> str | None:
    """The first requirement that `kernel` does not meet, worded to follow "cannot"; None if it meets all."""
    if shared:
        return "compute a prompt once for its group (update.share_prompts)"
    if kernel == "splash":
        return None
    if arch.attention_softcap is not None:
        return f"apply a soft-cap to attention scores ({arch.family}, cap {arch.attention_softcap:g})"
    if arch.head_dim > MAX_HEAD_DIM:
        return f"take heads of more than {MAX_HEAD_DIM} elements ({arch.family}, head_dim {arch.head_dim})"
    if kernel == "pallas":
        if LAYER_TYPES[1] in arch.layer_types:
            return f"apply a sliding window ({arch.family}, window {arch.sliding_window})"
        return None
    if packed:
        return "keep the segments of a packed row apart"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"compute in {jnp.dtype(dtype)}, only in bfloat16 or float16"
    if arch.head_dim % 8:
        return f"take heads that are no multiple of 8 elements ({arch.family}, head_dim {arch.head_dim})"
    return None


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """Attention [B, T, N, H] by cuDNN, for rows of one segment followed by padding (not checked)."""
    return _one_segment_attention(
        q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, window=window, cap=cap, implementation="cudnn"
    )


def _one_segment_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int | None,
    cap: float | None,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    # The causal mask alone keeps a segment from attending to the padding after it, so cuDNN gets no sequence
    # lengths: no row of scores is fully masked, and its restrictions on windows with lengths do not apply.
    # Padding does attend to the segment; its results are set to 0, so that no gradient flows through them.
    assert cap is None
    T = q_BTNH.shape[1]
    y_BTNH = jax.nn.dot_product_attention(
        *(_pad(x, 1, T + -T % BLOCK) for x in (q_BTNH, k_BTKH, v_BTKH)),
        scale=1.0,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )[:, :T]
    return jnp.where((segment_ids_BT != 0)[:, :, None, None], y_BTNH, 0)


def pallas_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int | None,
    cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H] by the Triton kernel of `jax.experimental.pallas.ops.gpu`; no window, no cap.

    The kernel needs as many key/value heads as query heads, and a head size that is a power of two: keys and
    values are repeated, and heads are padded.
    """
    assert window is None
    assert cap is None
    mha = _gpu_attention()
    _, T, N, H = q_BTNH.shape
    padded_T, padded_H = T + -T % BLOCK, max(16, 1 << (H - 1).bit_length())
    forward = min(BLOCK, _TILE_BYTES // (padded_H * q_BTNH.dtype.itemsize))
    backward = min(32, forward)
    blocks = mha.BlockSizes(
        block_q=forward,
        block_k=forward,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )
    keys_values = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BTKH, v_BTKH))
    y_BTNH = mha.mha(
        *(_pad(_pad(x, 1, padded_T), 3, padded_H) for x in (q_BTNH, *keys_values)),
        _pad(segment_ids_BT, 1, padded_T),
        sm_scale=1.0,
        causal=True,
        block_sizes=blocks,
        interpret=interpret,
    )
    return y_BTNH[:, :T, :, :H]


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    window: int | None,
    cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H] by the TPU kernel of `jax.experimental.pallas.ops.tpu.splash_attention`.

    Heads are padded to a multiple of 128 elements (whole vector registers), sizes the kernel is known to
    support.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, T, N, H = q_BTNH.shape
    padded_T, padded_H = T + -T % BLOCK, H + -H % 128
    shape = padded_T, padded_T
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in (4 * BLOCK, 2 * BLOCK, BLOCK) if padded_T % size == 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
    segments = _pad(segment_ids_BT, 1, padded_T)
    heads_first = (_pad(_pad(x, 1, padded_T), 3, padded_H).swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    y_BNTH = jax.vmap(kernel)(*heads_first, splash.SegmentIds(segments, segments))
    return y_BNTH.swapaxes(1, 2)[:, :T, :, :H]


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """x padded at its end with zeros to `size` along `dim`."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = 0, size - x.shape[dim]
    return jnp.pad(x, widths)


def _gpu_attention() -> ModuleType:
    """The module of the Pallas kernel, which JAX 0.11 ships with a DeprecationWarning on import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention
