"""Divergences of two models' distributions of the next word, in tiles of logits, as `logprobs.py` has them.

Data flow: hidden states of policy and teacher before each scored token, and both output heads -> here -> a
divergence per token, with its exact gradient to the policy -> the distillation loss.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from quatrain.ops.logprobs import (
    LOWEST,
    Arrays,
    Head,
    How,
    Rows,
    States,
    Sums,
    Tile,
    Tiled,
    chunked,
    first_of,
)

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def token_divergences(
    policy: Head,
    head: Rows,
    hidden: States,
    teacher: Head,
    teacher_head: Rows,
    teacher_hidden: States,
    *,
    kind: Divergence,
    beta: float = 0.5,
    tile: Tile,
    num_live: jax.Array | int | None = None,
    vocabulary_axis: str | None = None,
    head_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Divergences in nats of the policy p and the teacher q, over the V words of both heads, [N] float32.

    Beside them [N] float32: logsumexp of the teacher's logits, without a gradient.

    `reverse_kl`: sum p (log p - log q); `forward_kl`: sum q (log q - log p); `jsd`, with
    m = (1 - beta) p + beta q and 0 < beta < 1: beta KL(q || m) + (1 - beta) KL(p || m), as in GKD
    (arXiv 2306.13649) and TRL. The logits of one tile of each model exist at a time; `jsd` makes them twice
    in the forward pass, and all make them again in the backward pass. Gradients flow to `head` and `hidden`.

    Args:
        head, teacher_head: [V, ...] each, what logits are made of, word by word, or several such arrays.
        hidden, teacher_hidden: [N, D] and [N, D_t] states of the position before each token.
        tile, num_live, vocabulary_axis, head_gradient: as for `token_logprobs`.
    """
    assert len(first_of(head)) == len(first_of(teacher_head)), "both heads have the same words"
    num_tokens = len(first_of(hidden))
    if not num_tokens:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32)
    chunks, live = chunked(tile, num_live, hidden, teacher_hidden)
    how = How((policy, teacher), tile, vocabulary_axis, head_gradient)
    teacher_head, chunks[1] = lax.stop_gradient((teacher_head, chunks[1]))
    found = _by_tiles(how, (kind, beta), head, chunks[0], teacher_head, chunks[1], live)
    divergence, log_total = (x.reshape(-1)[:num_tokens] for x in found)
    return divergence, lax.stop_gradient(log_total)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_tiles(
    how: How,
    formula: tuple[Divergence, float],
    head: Rows,
    hidden: States,
    teacher_head: Rows,
    teacher_hidden: States,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """[chunks, n] divergences of hidden [chunks, n, D], and the teacher's logsumexp; 0 after chunk `live`.

    `formula` is (kind, beta).
    """
    return _forward(how, formula, head, hidden, teacher_head, teacher_hidden, live)[0]


def _forward(
    how: How,
    formula: tuple[Divergence, float],
    head: Rows,
    hidden: States,
    teacher_head: Rows,
    teacher_hidden: States,
    live: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    (kind, beta), shape = formula, first_of(hidden).shape[:2]
    tiled = Tiled(how, (head, teacher_head), (hidden, teacher_hidden), live)
    zeros = jnp.zeros(shape, jnp.float32)
    lowest = jnp.full_like(zeros, LOWEST)
    statistics, _ = tiled.over(partial(_with_tile, kind), (lowest, zeros, lowest, zeros, zeros))
    log_totals, weighted = _normalisers(how, kind, statistics)
    computed = jnp.arange(shape[0])[:, None] < live
    if kind == "jsd":
        (divergence, to_mean), _ = tiled.over(partial(_with_jsd, beta, log_totals), (zeros, zeros))
        if how.axis is not None:
            divergence, to_mean = lax.psum((divergence, to_mean), how.axis)
    else:
        own, other = log_totals if kind == "reverse_kl" else log_totals[::-1]
        divergence = to_mean = weighted - own + other
    divergence = jnp.where(computed, divergence, 0.0)
    residuals = (head, hidden, teacher_head, teacher_hidden, live, *log_totals, to_mean)
    return (divergence, log_totals[1]), residuals


def _with_tile(
    kind: Divergence, j: jax.Array, i: jax.Array, seen: Arrays, policy: jax.Array, teacher: jax.Array
) -> Arrays:
    """Of each row: greatest logit and sum of exp(z - greatest) of both models, and, of the model whose
    expectation the KL is, the sum of exp(z - greatest) times its logit minus the other's."""
    *of_both, weighted = seen
    of_p, shrink_p, weights_p = Sums(*of_both[:2]).with_tile(policy)
    of_t, shrink_t, weights_t = Sums(*of_both[2:]).with_tile(teacher)
    if kind != "jsd":
        reverse = kind == "reverse_kl"
        weights, gap = (weights_p, policy - teacher) if reverse else (weights_t, teacher - policy)
        added = (weights * jnp.where(weights > 0, gap, 0.0)).sum(axis=-1)
        weighted = weighted * (shrink_p if reverse else shrink_t) + added
    return *of_p, *of_t, weighted


def _normalisers(
    how: How, kind: Divergence, statistics: Arrays
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(log of the sums of exp of all logits of policy and teacher, expectation of the logits' difference)."""
    peak_p, total_p, peak_t, total_t, weighted = statistics
    reverse = kind == "reverse_kl"
    if how.axis is not None:
        own_p, own_t = peak_p, peak_t
        peak_p, peak_t = lax.pmax((peak_p, peak_t), how.axis)
        shrink_p, shrink_t = jnp.exp(own_p - peak_p), jnp.exp(own_t - peak_t)
        weighted = weighted * (shrink_p if reverse else shrink_t)
        total_p, total_t, weighted = lax.psum((total_p * shrink_p, total_t * shrink_t, weighted), how.axis)
    total_p, total_t = (jnp.where(total > 0, total, 1.0) for total in (total_p, total_t))
    log_totals = jnp.log(total_p) + peak_p, jnp.log(total_t) + peak_t
    return log_totals, weighted / (total_p if reverse else total_t)


def _with_jsd(
    beta: float,
    log_totals: tuple[jax.Array, jax.Array],
    j: jax.Array,
    i: jax.Array,
    seen: Arrays,
    policy: jax.Array,
    teacher: jax.Array,
) -> Arrays:
    """The Jensen-Shannon divergence and KL(p || m) of each row, with those of one more tile of words."""
    log_p, log_q = policy - log_totals[0][i][:, None], teacher - log_totals[1][i][:, None]
    log_m = log_mixture(beta, log_p, log_q)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    to_mean = jnp.where(p > 0, p * (log_p - log_m), 0.0).sum(axis=-1)
    from_teacher = jnp.where(q > 0, q * (log_q - log_m), 0.0).sum(axis=-1)
    return seen[0] + beta * from_teacher + (1 - beta) * to_mean, seen[1] + to_mean


def log_mixture(beta: float, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """log((1 - beta) p + beta q)."""
    return jnp.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def _backward(
    how: How, formula: tuple[Divergence, float], residuals: Any, cotangents: tuple[jax.Array, jax.Array]
) -> Any:
    (kind, beta), (cotangent, _) = formula, cotangents
    head, hidden, teacher_head, teacher_hidden, live, log_total_p, log_total_t, to_mean = residuals

    def to_logits(j: jax.Array, i: jax.Array, policy: jax.Array, teacher: jax.Array) -> jax.Array:
        """dD / dz of each of the policy's logits."""
        log_p, log_q = policy - log_total_p[i][:, None], teacher - log_total_t[i][:, None]
        p, mean = jnp.exp(log_p), to_mean[i][:, None]
        if kind == "forward_kl":
            slope = p - jnp.exp(log_q)
        elif kind == "reverse_kl":
            slope = p * jnp.where(p > 0, log_p - log_q - mean, 0.0)
        else:
            log_m = log_mixture(beta, log_p, log_q)
            slope = (1 - beta) * p * jnp.where(p > 0, log_p - log_m - mean, 0.0)
        return slope * cotangent[i][:, None]

    tiled = Tiled(how, (head, teacher_head), (hidden, teacher_hidden), live)
    return *tiled.gradients(to_logits), None, None, None


_by_tiles.defvjp(_forward, _backward)
