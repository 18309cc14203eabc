"""Rotary embeddings: frequencies, angles of positions, and the rotation of queries and keys.

Data flow: `Rope`, a field of an attention block -> angles, once per forward pass -> `rotate` in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


class Angles(NamedTuple):
    """What `rotate` needs of the positions of tokens."""

    cos: jax.Array
    """[B, T, 1, R/2] float32, for heads of which R elements are rotated."""
    sin: jax.Array
    query_scale: jax.Array | None = None
    """[B, T, 1, 1] float32: factors of queries by position (`Rope.query_beta`)."""


@dataclass(frozen=True)
class Rope:
    """Frequencies theta ** (-2i / R) of R rotated elements, scaled for contexts longer than those of
    training.

    - `linear` divides every frequency by `factor`.
    - `llama3` divides frequencies whose wavelength is longer than `original_max_position / low_freq_factor`
      tokens by `factor`, keeps those of wavelengths shorter than `original_max_position / high_freq_factor`,
      and interpolates between the two.
    - `yarn` keeps frequencies that turn more than `beta_fast` times in `original_max_position` tokens,
      divides those that turn less than `beta_slow` times by `factor`, and interpolates between (Peng et al.
      2023).
    - `longrope` divides each frequency by a number of its own (Ding et al. 2024): one of `short_factors`, or
      of `long_factors` if sequences may be longer than `original_max_position` (`for_length`).
    - `proportional` has the frequencies theta ** (-2i / H) of a whole head of H elements and turns a share
      `partial` of its pairs.

    `scale` multiplies cosines and sines, so scores by its square.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the bounds of yarn's interpolation are whole elements."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long: bool = False
    """Which of these two a model uses in the whole run: transformers and vLLM choose anew in each call, by
    its longest sequence, so that a token's log-probability would depend on tokens after it."""
    scale: float = 1.0
    partial: float = 1.0
    """The share of a head's elements that is rotated, from the first."""
    interleaved: bool = False
    """Whether a checkpoint has the elements of a pair beside each other, not half a head apart."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / original_max_position))."""
    sections: tuple[int, ...] = ()
    """Of the R/2 frequencies, how many turn with each axis of a position of three numbers: time, row, column.
    (): positions are one number. In text all three are the same, so that nothing depends on it."""
    alternating: bool = False
    """Whether the axes take turns from frequency to frequency (Qwen3), not block after block (Qwen2.5)."""
    written: tuple[tuple[str, Any], ...] = ()
    """What config.json says of `yarn` or `longrope`, for the export."""

    def for_length(self, tokens: int) -> Rope:
        """These embeddings for a run whose sequences have at most so many tokens."""
        return replace(self, long=tokens > self.original_max_position) if self.kind == "longrope" else self

    def rotated(self, head_dim: int) -> int:
        """How many of a head's elements are rotated: pairs, of which the last may be half of one in R."""
        return head_dim if self.kind == "proportional" else 2 * -(-self._dims(head_dim) // 2)

    def _dims(self, head_dim: int) -> int:
        """R of the frequencies, which may be odd."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)

    def axes(self, head_dim: int) -> np.ndarray:
        """[R/2] int: the axis of a position with which each frequency turns.

        Raises ValueError if the sections are not those of a head of this size.
        """
        count = self.rotated(head_dim) // 2
        if len(self.sections) != 3 or sum(self.sections) != count:
            raise ValueError(
                "mrope_section has three numbers of frequencies, in time, rows and columns, which sum to the "
                f"{count} of a head of {head_dim}; got {list(self.sections)}; correct it in config.json"
            )
        if not self.alternating:
            return np.repeat(np.arange(3), self.sections)
        axes = np.zeros(count, int)  # what is left over at the end is of the first axis
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes

    def frequencies(self, head_dim: int) -> jax.Array:
        """[R/2] float32 angles per position."""
        dims = self._dims(head_dim)
        frequencies = 1.0 / self.theta ** (jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
        if self.kind == "default":
            return frequencies
        if self.kind == "proportional":
            turned = int(self.partial * head_dim // 2)
            return jnp.where(jnp.arange(dims // 2) < turned, frequencies / self.factor, 0.0)
        if self.kind == "longrope":
            return frequencies / jnp.asarray(self.long_factors if self.long else self.short_factors)
        slow = frequencies / self.factor
        if self.kind == "linear":
            return slow
        keep = self._kept_by_yarn(dims) if self.kind == "yarn" else self._kept_by_llama3(frequencies)
        return keep * frequencies + (1 - keep) * slow

    def _kept_by_llama3(self, frequencies: jax.Array) -> jax.Array:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return jnp.clip(keep, 0.0, 1.0)

    def _kept_by_yarn(self, dims: int) -> jax.Array:
        def element(turns: float) -> float:
            """The element that turns so many times."""
            return (
                dims
                * math.log(self.original_max_position / (turns * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        first, last = element(self.beta_fast), element(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        ramp = (jnp.arange(dims // 2, dtype=jnp.float32) - first) / (last - first or 0.001)
        return 1 - jnp.clip(ramp, 0.0, 1.0)


def yarn_scale(factor: float, values: Mapping[str, Any]) -> float:
    """The factor of cosines and sines of `yarn`, with the settings of config.json."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, other = values.get("mscale"), values.get("mscale_all_dim")
    return magnitude(one) / magnitude(other) if one and other else magnitude(1.0)


def longrope_scale(factor: float, original: int) -> float:
    """The factor of cosines and sines of `longrope`."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rope_angles(positions: jax.Array, rope: Rope, head_dim: int) -> Angles:
    """Cosine and sine of position x frequency.

    Positions are [B, T], or [3, B, T] of tokens among pictures, of which each frequency takes one axis.
    """
    if positions.ndim == 3:
        assert not rope.query_beta
        by_frequency = jnp.moveaxis(positions.astype(jnp.float32)[rope.axes(head_dim)], 0, -1)
        angles = by_frequency[:, :, None] * rope.frequencies(head_dim)
    else:
        angles = positions.astype(jnp.float32)[..., None, None] * rope.frequencies(head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scale != 1.0:
        cos, sin = cos * rope.scale, sin * rope.scale
    queries = None
    if rope.query_beta:
        periods = (positions // rope.original_max_position)[..., None, None]
        queries = 1 + rope.query_beta * jnp.log1p(periods.astype(jnp.float32))
    # The barrier makes XLA compute the angles once; otherwise it recomputes them at every use, twice per
    # layer.
    return jax.lax.optimization_barrier(Angles(cos, sin, queries))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H]: each pair (i, i + R/2) turns by its angle (Su et al. 2021).

    Elements from R on stay as they are.
    """
    cos, sin, _ = angles
    dims = 2 * cos.shape[-1]
    if dims < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :dims], angles), x[..., dims:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
