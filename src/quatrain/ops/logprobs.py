"""Log-probabilities and entropies of given tokens, computed in chunks so that [N, V] never exists.

Data flow: the decoder's hidden states -> here -> the policy loss, and the old and reference passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_Outputs = tuple[jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
_STATISTICS = "token_statistics"

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

    With more tokens than `chunk`, each chunk is computed under `jax.checkpoint`: forward and backward hold
    the logits of one chunk, at the price of computing the logits (and nothing else) twice. Gradients flow
    to `hidden` and to whatever `logits_fn` closes over.

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
        return one_chunk(hidden, targets)
    # As many chunks as the cap asks for, of equal size: less padding than full chunks and a small last one.
    num_chunks = -(-num_tokens // chunk)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    chunks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, size, -1),
        jnp.pad(targets, (0, padding)).reshape(num_chunks, size),
    )
    # Three numbers kept per token leave only the logits to compute again.
    keep = jax.checkpoint_policies.save_only_these_names(_STATISTICS)
    step = jax.checkpoint(one_chunk, prevent_cse=False, policy=keep)
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


@jax.custom_vjp
def _logprobs_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-probability of the target, entropy) of each row; the gradient by hand, in one pass over [n, V]."""
    outputs, _ = _logprobs_and_entropy_forward(logits, targets)
    return outputs


def _logprobs_and_entropy_forward(logits: jax.Array, targets: jax.Array) -> tuple[_Outputs, _Residuals]:
    peak = checkpoint_name(logits.max(axis=-1, keepdims=True), _STATISTICS)
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    # A logit of -inf (a forbidden token) has weight 0 and must add nothing, where 0 * -inf is NaN.
    mean_shifted = (weights * jnp.where(weights > 0, shifted, 0.0)).sum(axis=-1, keepdims=True) / total
    # A masked sum, not a gather: it stays local on a vocabulary split over devices.
    target = jnp.where(_is_target(logits, targets), shifted, 0.0).sum(axis=-1)
    log_total = checkpoint_name(jnp.log(total), _STATISTICS)
    entropy = checkpoint_name(log_total - mean_shifted, _STATISTICS)
    return (target - log_total[:, 0], entropy[:, 0]), (logits, targets, peak, log_total, entropy)


def _logprobs_and_entropy_backward(residuals: _Residuals, cotangents: _Outputs) -> tuple[jax.Array, None]:
    logits, targets, peak, log_total, entropy = residuals
    by_logprob, by_entropy = (cotangent[:, None] for cotangent in cotangents)
    logprobs = logits - peak - log_total
    probs = jnp.exp(logprobs)
    surprise = jnp.where(probs > 0, logprobs, 0.0) + entropy
    gradient = jnp.where(_is_target(logits, targets), by_logprob, 0.0) - probs * (
        by_logprob + by_entropy * surprise
    )
    return gradient, None


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]


_logprobs_and_entropy.defvjp(_logprobs_and_entropy_forward, _logprobs_and_entropy_backward)
