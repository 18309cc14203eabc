"""Sampling one token per row from logits, with one uniform number per row.

Data flow: the decoder's logits and `token_uniforms` -> here -> token ids and the sampler's log-probabilities.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

BLOCK = 256
"""Width of the blocks the cumulative sum over the vocabulary is split into; about sqrt(V)."""


def token_uniforms(
    seed: int | jax.Array, step: int | jax.Array, sequence_ids: jax.Array, positions: jax.Array
) -> jax.Array:
    """One uniform number in [0, 1) per row, a function of (seed, step, sequence id, position) alone.

    The slot a sequence runs in, the batch it shares and the number of devices change nothing.

    Args:
        seed: the run's seed, a scalar.
        step: training step, a scalar.
        sequence_ids: [B] integers, unique to a sequence within the step.
        positions: [B] integers, position of the token to be sampled in its sequence.

    Returns:
        [B] float32.
    """
    step_key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)

    def uniform(sequence_id: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(step_key, sequence_id), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(uniform)(sequence_ids, positions)


def sample(
    logits: jax.Array, uniforms: jax.Array, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[jax.Array, jax.Array]:
    """One token per row by inversion of the cumulative distribution, and its log-probability.

    The filters apply in the order of transformers: logits / temperature; the `top_k` likeliest tokens; of
    these, renormalised, the smallest set with mass >= `top_p`; of these, those at least `min_p` times as
    likely as the likeliest. (vLLM applies min-p before top-p; the two differ only where both are on.)
    Exactly k tokens pass top-k; in top-k and top-p, ties go to the lower token id. At least one
    token always passes, and a token that did not, or whose probability is 0, is never drawn.

    Args:
        logits: [B, V] float32; -inf forbids a token.
        uniforms: [B] float32 in [0, 1), see `token_uniforms`; not read at temperature 0.
        temperature: static, >= 0; 0 takes the likeliest token and ignores the filters.
        top_k: static, >= 0; 0 or >= V: off.
        top_p: static, in (0, 1]; 1: off.
        min_p: static, in [0, 1]; 0: off.

    Returns:
        (tokens [B] int32, logprobs [B] float32). The log-probability is that of the distribution drawn
        from, after temperature and filters; at temperature 0, that of the unfiltered softmax at 1.
        A row with a NaN or +inf logit has log-probability NaN.

    Raises:
        ValueError: for an option out of range or shapes that do not fit.
    """
    _check(logits, uniforms, temperature, top_k, top_p, min_p)
    if temperature == 0:
        tokens = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        picked = jnp.take_along_axis(logits, tokens, axis=-1)
        return tokens[:, 0], (picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True))[:, 0]
    candidates, ids = logits / jnp.float32(temperature), None
    if 0 < top_k < logits.shape[1]:
        candidates, ids = jax.lax.top_k(candidates, top_k)
    if top_p < 1:
        candidates = _keep_nucleus(candidates, top_p)
    if min_p > 0:
        floor = candidates.max(axis=-1, keepdims=True) + jnp.float32(math.log(min_p))
        candidates = jnp.where(candidates >= floor, candidates, -jnp.inf)
    picks, logprobs = _invert_cdf(candidates, uniforms)
    tokens = picks if ids is None else jnp.take_along_axis(ids, picks[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), logprobs


def _check(
    logits: jax.Array, uniforms: jax.Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    if logits.ndim != 2 or uniforms.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [B, V] and uniforms [B], got {logits.shape} and {uniforms.shape}")
    rules = {
        f"temperature >= 0, got {temperature}": temperature >= 0,
        f"top_k >= 0 (0: off), got {top_k}": top_k >= 0,
        f"0 < top_p <= 1 (1: off), got {top_p}": 0 < top_p <= 1,
        f"0 <= min_p <= 1 (0: off), got {min_p}": 0 <= min_p <= 1,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"sampling needs {rule}")


def _keep_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """`logits` with -inf outside the smallest set of mass >= top_p, likeliest first, ties by position.

    Instead of sorting (on a CPU, hundreds of times the cost of the sampling itself), the least weight
    inside is found by bisection: float32 weights in [0, 1] order as their bit patterns, of which there are
    fewer than 2^30, and the mass of the weights at or above a pattern never grows with it.
    """
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    goal = jnp.float32(top_p) * weights.sum(axis=-1, keepdims=True)

    def weight(pattern: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(pattern, jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the mass at or above low reaches the goal, that at or above high does not
        middle = low + (high - low) // 2
        enough = jnp.where(weights >= weight(middle), weights, 0.0).sum(axis=-1, keepdims=True) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    above_one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
    bounds = (jnp.zeros_like(goal, jnp.int32), jnp.full_like(goal, above_one, jnp.int32))
    least = weight(jax.lax.fori_loop(0, 30, halve, bounds)[0])
    above, tied = weights > least, weights == least
    missing = goal - jnp.where(above, weights, 0.0).sum(axis=-1, keepdims=True)
    inside = above | (tied & (_running_count(tied) <= jnp.ceil(missing / least).astype(jnp.int32)))
    return jnp.where(inside, logits, -jnp.inf)


def _running_count(flags: jax.Array) -> jax.Array:
    """[B, W] cumulative sum of `flags` along each row, by blocks: half the time of one long sum on a CPU."""
    rows, width = flags.shape
    blocks = jnp.pad(flags, ((0, 0), (0, -width % BLOCK))).reshape(rows, -1, BLOCK)
    inside = jnp.cumsum(blocks, axis=-1, dtype=jnp.int32)
    before = jnp.cumsum(inside[:, :, -1], axis=-1) - inside[:, :, -1]
    return (inside + before[:, :, None]).reshape(rows, -1)[:, :width]


def _invert_cdf(logits: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Column of each row where the cumulative softmax first exceeds the uniform, and its log-probability.

    Two levels: sums of blocks of the vocabulary choose a block, a cumulative sum in it chooses the column.
    """
    rows, width = logits.shape
    num_blocks = -(-width // BLOCK)
    peak = logits.max(axis=-1, keepdims=True)
    padded = jnp.pad(logits, ((0, 0), (0, num_blocks * BLOCK - width)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, num_blocks, BLOCK)
    sums = jnp.exp(blocks - peak[:, :, None]).sum(axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    goals = uniforms[:, None] * ends[:, -1:]
    block = _first_above(ends, sums, goals)
    goals_inside = goals - jnp.take_along_axis(ends - sums, block, axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    weights = jnp.exp(inside - peak)
    column = _first_above(jnp.cumsum(weights, axis=-1), weights, goals_inside)
    picked = jnp.take_along_axis(inside, column, axis=-1)
    logprobs = picked - peak - jnp.log(ends[:, -1:])
    # The clip matters for a row of NaN alone, where no column is right and the log-probability is NaN.
    return jnp.minimum(block * BLOCK + column, width - 1)[:, 0], logprobs[:, 0]


def _first_above(ends: jax.Array, weights: jax.Array, goals: jax.Array) -> jax.Array:
    """[B, 1] first column with weight > 0 whose cumulative sum exceeds the goal, else the last with weight.

    Asking for a weight keeps rounding (sums that are not monotone, or a goal rounded up to the total) from
    ever choosing a column of probability 0.
    """
    positive = weights > 0
    first = jnp.argmax(positive & (ends > goals), axis=-1, keepdims=True)
    last = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(positive, axis=-1), axis=-1, keepdims=True)
    found = jnp.take_along_axis(positive & (ends > goals), first, axis=-1)
    return jnp.where(found, first, last).astype(jnp.int32)
