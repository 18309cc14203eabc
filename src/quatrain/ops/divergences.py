"""Divergences of two models' distributions of the next word, in tiles of logits, as `logprobs.py` has them.

Data flow: hidden states of policy and teacher before each scored token, and both output heads -> here -> a
divergence per token, with its exact gradient to the policy -> the distillation loss.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from quatrain.ops.logprobs import (
    LOWEST,
    Arrays,
    Project,
    Tile,
    ToLogits,
    Words,
    even_parts,
    gradients_by_tiles,
    narrowed,
)

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


class Head(NamedTuple):
    """What makes logits: a function (rows of the head, hidden states) -> logits, and the temperature."""

    project: Project
    temperature: float


class _How(NamedTuple):
    """The static arguments of the functions below."""

    policy: Head
    teacher: Head
    kind: Divergence
    beta: float
    tile: Tile
    axis: str | None
    head_gradient: bool

    def logits(self, head: Head, rows: jax.Array, chunk: jax.Array) -> jax.Array:
        return head.project(rows, chunk).astype(jnp.float32) / jnp.float32(head.temperature)


def token_divergences(
    policy: Head,
    head: jax.Array,
    hidden: jax.Array,
    teacher: Head,
    teacher_head: jax.Array,
    teacher_hidden: jax.Array,
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
        head, teacher_head: [V, ...] each, what logits are made of, word by word.
        hidden, teacher_hidden: [N, D] and [N, D_t] states of the position before each token.
        tile, num_live, vocabulary_axis, head_gradient: as for `token_logprobs`.
    """
    assert len(head) == len(teacher_head), "both heads have the same words"
    num_tokens = len(hidden)
    if not num_tokens:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32)
    num_chunks, size = even_parts(num_tokens, tile.tokens)
    padding = ((0, num_chunks * size - num_tokens), (0, 0))
    chunks = [jnp.pad(x, padding).reshape(num_chunks, size, -1) for x in (hidden, teacher_hidden)]
    live = jnp.int32(num_chunks) if num_live is None else jnp.minimum(-(-num_live // size), num_chunks)
    how = _How(policy, teacher, kind, beta, tile, vocabulary_axis, head_gradient)
    teacher_head, chunks[1] = lax.stop_gradient((teacher_head, chunks[1]))
    found = _by_tiles(how, head, chunks[0], teacher_head, chunks[1], live)
    divergence, log_total = (x.reshape(-1)[:num_tokens] for x in found)
    return divergence, lax.stop_gradient(log_total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_tiles(
    how: _How,
    head: jax.Array,
    hidden: jax.Array,
    teacher_head: jax.Array,
    teacher_hidden: jax.Array,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """[chunks, n] divergences of hidden [chunks, n, D], and the teacher's logsumexp; 0 after chunk `live`."""
    return _forward(how, head, hidden, teacher_head, teacher_hidden, live)[0]


def _forward(
    how: _How,
    head: jax.Array,
    hidden: jax.Array,
    teacher_head: jax.Array,
    teacher_hidden: jax.Array,
    live: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    words = Words.of(len(head), how.tile)
    heads = narrowed(head, hidden.dtype), narrowed(teacher_head, teacher_hidden.dtype)
    shape = hidden.shape[:2]

    def over_tiles(one: Any, carry: Arrays) -> Arrays:
        """`one(carry of a chunk, its two tiles of logits)` over all tiles and live chunks."""

        def one_tile(j: jax.Array, carry: Arrays) -> Arrays:
            rows = [lax.dynamic_slice_in_dim(x, words.first(j), words.size) for x in heads]

            def one_chunk(i: jax.Array, carry: Arrays) -> Arrays:
                logits = (
                    words.without_earlier(how.logits(which, own, states[i]), j)
                    for which, own, states in zip(
                        (how.policy, how.teacher), rows, (hidden, teacher_hidden), strict=True
                    )
                )
                new = one(tuple(x[i] for x in carry), i, *logits)
                return tuple(x.at[i].set(value) for x, value in zip(carry, new, strict=True))

            return lax.fori_loop(0, live, one_chunk, carry)

        return lax.fori_loop(0, words.num_tiles, one_tile, carry)

    zeros = jnp.zeros(shape, jnp.float32)
    lowest = jnp.full_like(zeros, LOWEST)
    statistics = over_tiles(partial(_with_tile, how.kind), (lowest, zeros, lowest, zeros, zeros))
    log_totals, weighted = _normalisers(how, statistics)
    computed = jnp.arange(shape[0])[:, None] < live
    if how.kind == "jsd":
        both = partial(_with_jsd, how, log_totals)
        divergence, to_mean = over_tiles(both, (zeros, zeros))
        if how.axis is not None:
            divergence, to_mean = lax.psum((divergence, to_mean), how.axis)
    else:
        own, other = log_totals if how.kind == "reverse_kl" else log_totals[::-1]
        divergence = to_mean = weighted - own + other
    divergence = jnp.where(computed, divergence, 0.0)
    residuals = (head, hidden, teacher_head, teacher_hidden, live, *log_totals, to_mean)
    return (divergence, log_totals[1]), residuals


def _with_tile(kind: Divergence, seen: Arrays, _: jax.Array, policy: jax.Array, teacher: jax.Array) -> Arrays:
    """Of each row: greatest logit and sum of exp(z - greatest) of both models, and, of the model whose
    expectation the KL is, the sum of exp(z - greatest) times its logit minus the other's."""
    peak_p, total_p, peak_t, total_t, weighted = seen
    new_p, new_t = (
        jnp.maximum(peak, logits.max(axis=-1)) for peak, logits in ((peak_p, policy), (peak_t, teacher))
    )
    weights_p, weights_t = jnp.exp(policy - new_p[:, None]), jnp.exp(teacher - new_t[:, None])
    shrink_p, shrink_t = jnp.exp(peak_p - new_p), jnp.exp(peak_t - new_t)
    total_p, total_t = (
        total_p * shrink_p + weights_p.sum(axis=-1),
        total_t * shrink_t + weights_t.sum(axis=-1),
    )
    if kind != "jsd":
        reverse = kind == "reverse_kl"
        weights, gap = (weights_p, policy - teacher) if reverse else (weights_t, teacher - policy)
        added = (weights * jnp.where(weights > 0, gap, 0.0)).sum(axis=-1)
        weighted = weighted * (shrink_p if reverse else shrink_t) + added
    return new_p, total_p, new_t, total_t, weighted


def _normalisers(how: _How, statistics: Arrays) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(log of the sums of exp of all logits of policy and teacher, expectation of the logits' difference)."""
    peak_p, total_p, peak_t, total_t, weighted = statistics
    reverse = how.kind == "reverse_kl"
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
    how: _How,
    log_totals: tuple[jax.Array, jax.Array],
    seen: Arrays,
    chunk: jax.Array,
    policy: jax.Array,
    teacher: jax.Array,
) -> Arrays:
    """The Jensen-Shannon divergence and KL(p || m) of each row, with those of one more tile of words."""
    log_p, log_q = policy - log_totals[0][chunk][:, None], teacher - log_totals[1][chunk][:, None]
    log_m = log_mixture(how.beta, log_p, log_q)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    to_mean = jnp.where(p > 0, p * (log_p - log_m), 0.0).sum(axis=-1)
    from_teacher = jnp.where(q > 0, q * (log_q - log_m), 0.0).sum(axis=-1)
    return seen[0] + how.beta * from_teacher + (1 - how.beta) * to_mean, seen[1] + to_mean


def log_mixture(beta: float, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """log((1 - beta) p + beta q)."""
    return jnp.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def _backward(how: _How, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    cotangent, _ = cotangents
    head, hidden, teacher_head, teacher_hidden, live, log_total_p, log_total_t, to_mean = residuals
    narrow = narrowed(teacher_head, teacher_hidden.dtype)
    words = Words.of(len(head), how.tile)

    def of_tile(j: jax.Array) -> ToLogits:
        rows = lax.dynamic_slice_in_dim(narrow, words.first(j), words.size)

        def to_logits(i: jax.Array, logits: jax.Array) -> jax.Array:
            teacher = how.logits(how.teacher, rows, teacher_hidden[i])
            log_p = words.without_earlier(logits, j) - log_total_p[i][:, None]
            log_q = words.without_earlier(teacher, j) - log_total_t[i][:, None]
            return _to_logits(how, log_p, log_q, to_mean[i][:, None]) * cotangent[i][:, None]

        return to_logits

    gradients = gradients_by_tiles(
        partial(how.logits, how.policy), head, hidden, words, live, of_tile, head_gradient=how.head_gradient
    )
    return *gradients, None, None, None


def _to_logits(how: _How, log_p: jax.Array, log_q: jax.Array, to_mean: jax.Array) -> jax.Array:
    """dD / dz of each of the policy's logits."""
    p = jnp.exp(log_p)
    if how.kind == "forward_kl":
        return p - jnp.exp(log_q)
    if how.kind == "reverse_kl":
        return p * jnp.where(p > 0, log_p - log_q - to_mean, 0.0)
    log_m = log_mixture(how.beta, log_p, log_q)
    return (1 - how.beta) * p * jnp.where(p > 0, log_p - log_m - to_mean, 0.0)


_by_tiles.defvjp(_forward, _backward)
