"""Log-probabilities and entropies of given tokens, computed in chunks so that [N, V] never exists.

Data flow: the decoder's hidden states -> here -> the policy loss, and the old and reference passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LogitsFn = Callable[..., jax.Array]
Arrays = tuple[jax.Array, ...]

CHUNK_BYTES = {"cpu": 2**26}
ACCELERATOR_CHUNK_BYTES = 2**29
"""Logits of one chunk at most. Accelerators need larger products to be busy, and have the memory."""


def default_chunk(vocab_size: int, platform: str = "cpu") -> int:
    """Tokens per chunk so that one chunk's float32 logits take at most 64 MiB on a CPU, 512 MiB elsewhere.

    A power of two, at least 1.
    """
    most = CHUNK_BYTES.get(platform, ACCELERATOR_CHUNK_BYTES)
    return 2 ** int(math.log2(max(1, most // (4 * vocab_size))))


def token_logprobs(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float,
    *,
    chunk: int,
    num_live: jax.Array | int | None = None,
    vocabulary_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target token and entropy of its distribution, at the sampling temperature.

    With z = logits_fn(hidden) / temperature: logprob_n = z[n, targets_n] - logsumexp_v z[n, v] and
    entropy_n = logsumexp_v z[n, v] - sum_v softmax(z)[n, v] z[n, v], both in nats and float32.

    Forward and backward hold the logits of one chunk, at the price of computing the logits (and nothing
    else) twice. Gradients flow to `hidden` and to whatever `logits_fn` closes over.

    Args:
        logits_fn: hidden [n, D] -> logits [n, V], row by row; may close over parameters.
        hidden: [N, D] hidden states, each of the position before its target.
        targets: [N] integer token ids in [0, V).
        temperature: static float > 0 that the tokens were sampled at.
        chunk: tokens per chunk, >= 1; need not divide N (`default_chunk` bounds the memory).
        num_live: the first so many tokens are asked for, by default all N. It may be traced: chunks past it
            are not computed, and their tokens have 0 for both results.
        vocabulary_axis: in a function mapped over a mesh, the axis whose devices each have an equal part of
            the vocabulary, in order, and get the logits of that part from `logits_fn`. The gradients of
            `hidden` are then each device's part of the sum, those of parameters its own.

    Returns:
        (logprobs [N] float32, entropy [N] float32).

    Raises:
        ValueError: for a temperature <= 0, a chunk < 1, or shapes that do not fit.
    """
    num_tokens = _check(hidden, targets, temperature, chunk)
    if not num_tokens:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32)
    # As many chunks as the cap asks for, of equal size: less padding than full chunks and a small last one.
    num_chunks = -(-num_tokens // chunk)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(num_chunks, size)
    live = jnp.int32(num_chunks) if num_live is None else jnp.minimum(-(-num_live // size), num_chunks)

    def scaled(chunk_hidden: jax.Array) -> jax.Array:
        return logits_fn(chunk_hidden).astype(jnp.float32) / jnp.float32(temperature)

    pure, constants = jax.closure_convert(scaled, hidden[0])
    outputs = _by_chunks(pure, vocabulary_axis, hidden, targets, live, tuple(constants))
    logprobs, entropy = (output.reshape(-1)[:num_tokens] for output in outputs)
    return logprobs, entropy


def _check(hidden: jax.Array, targets: jax.Array, temperature: float, chunk: int) -> int:
    if not temperature > 0:
        raise ValueError(
            f"token log-probabilities need a temperature > 0, got {temperature}; greedy completions "
            "(temperature 0) have no distribution to train on: sample them at a positive temperature"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least one token, got {chunk}; see default_chunk(vocab_size)")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [N, D] and targets [N], got {hidden.shape} and {targets.shape}; "
            "flatten batch and time together"
        )
    return hidden.shape[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_chunks(
    logits_fn: LogitsFn,
    axis: str | None,
    hidden: jax.Array,
    targets: jax.Array,
    live: jax.Array,
    constants: Arrays,
) -> tuple[jax.Array, jax.Array]:
    """(logprobs, entropy), each [chunks, n], of hidden [chunks, n, D]; zeros from chunk `live` on."""
    return _forward(logits_fn, axis, hidden, targets, live, constants)[0]


def _forward(
    logits_fn: LogitsFn,
    axis: str | None,
    hidden: jax.Array,
    targets: jax.Array,
    live: jax.Array,
    constants: Arrays,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    def one_chunk(i: jax.Array, results: Arrays) -> Arrays:
        values = _statistics(logits_fn(hidden[i], *constants), targets[i], axis)
        return tuple(result.at[i].set(value) for result, value in zip(results, values, strict=True))

    empty = jnp.zeros(targets.shape, jnp.float32)
    logprobs, entropy, log_total = lax.fori_loop(0, live, one_chunk, (empty,) * 3)
    return (logprobs, entropy), (hidden, targets, live, constants, entropy, log_total)


def _statistics(logits: jax.Array, targets: jax.Array, axis: str | None) -> Arrays:
    """Log-probability of the target, entropy, and log of the sum of exponentials of each row."""
    peak = logits.max(axis=-1, keepdims=True)
    peak = peak if axis is None else lax.pmax(peak, axis)
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    # A logit of -inf (a forbidden token) has weight 0 and must add nothing, where 0 * -inf is NaN.
    weighted = (weights * jnp.where(weights > 0, shifted, 0.0)).sum(axis=-1)
    # A masked sum, not a gather: the target may be in another device's part of the vocabulary.
    target = jnp.where(_is_target(logits, targets, axis), shifted, 0.0).sum(axis=-1)
    if axis is not None:
        total, weighted, target = lax.psum((total, weighted, target), axis)
    log_total = jnp.log(total)
    return target - log_total, log_total - weighted / total, log_total + peak[:, 0]


def _backward(
    logits_fn: LogitsFn, axis: str | None, residuals: Any, cotangents: tuple[jax.Array, jax.Array]
) -> Any:
    hidden, targets, live, constants, entropy, log_total = residuals
    by_logprob, by_entropy = cotangents

    def one_chunk(i: jax.Array, grads: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        to_hidden, to_constants = grads
        logits, pull = jax.vjp(logits_fn, hidden[i], *constants)
        logprobs = logits - log_total[i][:, None]
        probs = jnp.exp(logprobs)
        surprise = jnp.where(probs > 0, logprobs, 0.0) + entropy[i][:, None]
        weight = by_logprob[i][:, None]
        to_logits = jnp.where(_is_target(logits, targets[i], axis), weight, 0.0) - probs * (
            weight + by_entropy[i][:, None] * surprise
        )
        hidden_grad, *constant_grads = pull(to_logits)
        return to_hidden.at[i].set(hidden_grad), tuple(
            total + grad for total, grad in zip(to_constants, constant_grads, strict=True)
        )

    # Sums over chunks are in float32 even where the parameters are not.
    zeros = jnp.zeros_like(hidden), tuple(jnp.zeros(c.shape, jnp.float32) for c in constants)
    to_hidden, sums = lax.fori_loop(0, live, one_chunk, zeros)
    to_constants = tuple(total.astype(c.dtype) for total, c in zip(sums, constants, strict=True))
    return to_hidden, None, None, to_constants


def _is_target(logits: jax.Array, targets: jax.Array, axis: str | None) -> jax.Array:
    first = 0 if axis is None else lax.axis_index(axis) * logits.shape[1]
    return lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None] - first


_by_chunks.defvjp(_forward, _backward)
