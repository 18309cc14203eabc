"""Attention as the textbook has it, all scores at once: what every implementation is held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from quatrain.models.layers import MASKED, softcap


def attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask_BTS: jax.Array, cap: float | None
) -> jax.Array:
    """Grouped-query attention [B, T, N, H] of queries that are scaled already; softmax in float32."""
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    keys, values = (jnp.repeat(x, groups, axis=2) for x in (k_BTKH, v_BTKH))
    scores = softcap(jnp.einsum("btnh,bsnh->bnts", q_BTNH, keys, preferred_element_type=jnp.float32), cap)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None], scores, MASKED), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(values.dtype), values).astype(q_BTNH.dtype)
