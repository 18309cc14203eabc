"""Log-probabilities and entropies of given tokens, computed in chunks so that [N, V] never exists.

Data flow: the decoder's hidden states -> here -> the policy loss, and the old and reference passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk at most: 64 MiB as float32."""


def default_chunk(vocab_size: int) -> int:
    """Tokens per chunk so that one chunk's float32 logits take at most 64 MiB; a power of two, at least 1."""
    return 2 ** int(math.log2(max(1, CHUNK_ELEMENTS // vocab_size)))


def token_logprobs(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target token and entropy of its distribution, at the sampling temperature.

    With z = logits_fn(hidden) / temperature: logprob_n = z[n, targets_n] - logsumexp_v z[n, v] and
    entropy_n = logsumexp_v z[n, v] - sum_v softmax(z)[n, v] z[n, v], both in nats and float32.

    Each chunk is computed under `jax.checkpoint`: forward and backward hold the logits of one chunk, at the
    price of computing them twice. Gradients flow to `hidden` and to whatever `logits_fn` closes over.

    Args:
        logits_fn: hidden [n, D] -> logits [n, V], row by row; may close over parameters.
        hidden: [N, D] hidden states, each of the position before its target.
        targets: [N] integer token ids in [0, V).
        temperature: static float > 0 that the tokens were sampled at.
        chunk: tokens per chunk, >= 1; need not divide N (`default_chunk` bounds the memory).

    Returns:
        (logprobs [N] float32, entropy [N] float32).

    Raises:
        ValueError: for a temperature <= 0, a chunk < 1, or shapes that do not fit.
    """
    num_tokens = _check(hidden, targets, temperature, chunk)

    def one_chunk(hidden_chunk: jax.Array, targets_chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_fn(hidden_chunk).astype(jnp.float32) / jnp.float32(temperature)
        return _logprobs_and_entropy(logits, targets_chunk)

    if num_tokens <= chunk:
        return jax.checkpoint(one_chunk)(hidden, targets)
    # As many chunks as the cap asks for, of equal size: less padding than full chunks and a small last one.
    num_chunks = -(-num_tokens // chunk)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    chunks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, size, -1),
        jnp.pad(targets, (0, padding)).reshape(num_chunks, size),
    )
    step = jax.checkpoint(one_chunk, prevent_cse=False)
    _, outputs = jax.lax.scan(lambda carry, xs: (carry, step(*xs)), None, chunks)
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


def _logprobs_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The target's logit is a masked sum, not a gather: it fuses with the other reductions, its gradient
    # is no scatter, and it works on a vocabulary split over devices.
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]
    target_logits = jnp.where(is_target, shifted, 0.0).sum(axis=-1)
    # A logit of -inf (a masked token) has weight 0 and must add nothing, where 0 * -inf is NaN.
    entropy = log_total - (weights * jnp.where(weights > 0, shifted, 0.0)).sum(axis=-1) / total
    return target_logits - log_total, entropy
