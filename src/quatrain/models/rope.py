"""Rotary embeddings: frequencies, angles of positions, and the rotation of queries and keys.

Data flow: `Rope`, a field of an attention block -> angles, once per forward pass -> `rotate` in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Angles = tuple[jax.Array, jax.Array]
"""Cosine and sine, each [B, T, 1, H/2] float32."""


@dataclass(frozen=True)
class Rope:
    """Frequencies theta ** (-2i / H), scaled so that a model handles longer contexts than it was trained on.

    `linear` divides every frequency by `factor`. `llama3` divides frequencies whose wavelength is longer than
    `original_max_position / low_freq_factor` tokens by `factor`, keeps frequencies whose wavelength is
    shorter than `original_max_position / high_freq_factor` tokens, and interpolates between the two.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def frequencies(self, head_dim: int) -> jax.Array:
        """[H/2] float32 angles per position."""
        frequencies = 1.0 / self.theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        if self.kind == "default":
            return frequencies
        slow = frequencies / self.factor
        if self.kind == "linear":
            return slow
        turns = self.original_max_position * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = jnp.clip(keep, 0.0, 1.0)
        return keep * frequencies + (1 - keep) * slow


def rope_angles(positions_BT: jax.Array, frequencies: jax.Array) -> Angles:
    """Cosine and sine of position x frequency."""
    angles = positions_BT.astype(jnp.float32)[..., None, None] * frequencies
    # The barrier makes XLA compute the angles once; otherwise it recomputes them at every use, twice per
    # layer.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H]: each pair (i, i + H/2) turns by its angle (Su et al. 2021)."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
