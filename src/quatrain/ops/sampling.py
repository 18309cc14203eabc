"""Sampling one token per row from logits, with one uniform number per row.

Data flow: the decoder's logits and `token_uniforms` -> here -> token ids and the sampler's log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 256
"""Words of the blocks that the cumulative sum over the vocabulary is split into; about sqrt(V)."""


def token_uniforms(
    seed: int | jax.Array, step: int | jax.Array, sequence_ids: jax.Array, positions: jax.Array
) -> jax.Array:
    """[B] float32 in [0, 1), a function of (seed, step, sequence id, position) alone.

    The slot a sequence runs in, the batch it shares and the number of devices change nothing. `seed` and
    `step`, the training step, are scalars; `sequence_ids` [B] are unique within the step; `positions` [B]
    are those of the tokens to be sampled in their sequences.
    """
    step_key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)

    def uniform(sequence_id: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(step_key, sequence_id), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(uniform)(sequence_ids, positions)


class Filters(NamedTuple):
    """Which words of each of B sequences may be drawn, as numbers; where one is off, it changes nothing.

    They apply in the order of transformers: logits / temperature; the `top_k` likeliest tokens; of
    these, renormalised, the smallest set with mass >= `top_p`; of these, those at least `min_p` times as
    likely as the likeliest. (vLLM applies min-p before top-p; the two differ only where both are on.)
    Exactly k tokens pass top-k; in top-k and top-p, ties go to the lower token id. At least one
    token always passes.
    """

    top_k: jax.Array  # [B] int32, >= 0; 0: off
    top_p: jax.Array  # [B] float32, in (0, 1]; 1: off
    log_min_p: jax.Array  # [B] float32, the logarithm of min_p in [0, 1]; 0, with logarithm -inf: off

    @classmethod
    def alike(cls, count: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Self:
        """Host arrays [count] of the same filters for each sequence; all off by default."""
        log_min_p = math.log(min_p) if min_p else -math.inf
        numbers = (top_k, np.int32), (top_p, np.float32), (log_min_p, np.float32)
        return cls._make(cast(list[jax.Array], [np.full(count, *number) for number in numbers]))

    def kept(self, candidates: jax.Array, axis: int, size: int) -> jax.Array:
        """`candidates` with -inf for those that do not pass; a filter that no row has on is not computed."""
        top_k, top_p, log_min_p = (jnp.expand_dims(x, axis) for x in self)

        def least_likely(x: jax.Array) -> jax.Array:
            return jnp.where(x >= x.max(axis=axis, keepdims=True) + log_min_p, x, -jnp.inf)

        keeps: tuple[tuple[jax.Array, Callable[[jax.Array], jax.Array]], ...] = (
            (self.top_k > 0, lambda x: _keep_likeliest(x, top_k, axis, size)),
            (self.top_p < 1, lambda x: _keep_nucleus(x, top_p, axis, size)),
            (self.log_min_p > -jnp.inf, least_likely),
        )
        for rows, keep in keeps:
            candidates = _when_any(rows, keep, candidates, axis)
        return candidates


class SamplingNumbers(NamedTuple):
    """How the next token of each of B sequences is sampled: data of the compiled programs.

    Temperature 0 takes the likeliest token; the filters of such a sequence are off.
    """

    seeds: jax.Array  # [B] uint32
    temperature: jax.Array  # [B] float32, >= 0
    filters: Filters | None
    """None where no sequence has one, which is a program of its own: they are half of what a decode step's
    program takes to compile, and most runs have none."""

    @classmethod
    def alike(
        cls,
        count: int,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Self:
        """Host arrays [count] of the same numbers for each sequence; at temperature 0 without filters."""
        filtered = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
        seeds, temperatures = np.full(count, seed, np.uint32), np.full(count, temperature, np.float32)
        filters = Filters.alike(count, top_k, top_p, min_p) if filtered else None
        return cls(cast(jax.Array, seeds), cast(jax.Array, temperatures), filters)

    def put(self, place: int, own: SamplingNumbers) -> SamplingNumbers:
        """These host arrays with those of one sequence, [1] each, in `place`; arrays are changed."""
        filters = self.filters
        if filters is None and own.filters is not None:
            filters = Filters.alike(len(self.seeds))
        pairs = [*zip(self[:2], own[:2], strict=True)]
        if filters is not None:
            pairs += zip(filters, own.filters or Filters.alike(1), strict=True)
        for array, [number] in pairs:
            cast(np.ndarray, array)[place] = number
        return self._replace(filters=filters)


class KeptWords(NamedTuple):
    """The words that tokens were drawn from."""

    words: jax.Array  # [..., K] int32, the likeliest first; behind `counts` of them others
    counts: jax.Array  # [...] int32


def sample(
    logits: jax.Array, uniforms: jax.Array, numbers: SamplingNumbers, *, vocabulary_first: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `sample_kept`, without the words that the tokens were drawn from."""
    tokens, logprobs, _ = sample_kept(logits, uniforms, numbers, vocabulary_first=vocabulary_first)
    return tokens, logprobs


def sample_kept(
    logits: jax.Array,
    uniforms: jax.Array,
    numbers: SamplingNumbers,
    *,
    most: int = 0,
    vocabulary_first: bool = False,
) -> tuple[jax.Array, jax.Array, KeptWords | None]:
    """One token per row by inversion of the cumulative distribution, and its log-probability.

    `logits` [B, V] are float32, -inf forbids a token; `uniforms` [B] are those of `token_uniforms`. A token
    that does not pass the filters, or whose probability is 0, is never drawn. `vocabulary_first` works on the
    transpose of `logits`, in blocks that divide its columns where they can: sums are then rounded otherwise,
    in which a uniform that lies between two tokens may choose the other.

    Returns (tokens [B] int32, logprobs [B] float32, the words [B, most] that pass the filters; None for
    `most` 0). Of a row of which more than `most` pass, the counts say so. The log-probability is that of the
    distribution drawn from, after temperature and filters; at temperature 0, that of the unfiltered softmax
    at 1. A row with a NaN or +inf logit has log-probability NaN.

    Raises ValueError for shapes that do not fit.
    """
    if logits.ndim != 2 or uniforms.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [B, V] and uniforms [B], got {logits.shape} and {uniforms.shape}")
    axis, logits = (0, logits.T) if vocabulary_first else (1, logits)
    size = 128 if vocabulary_first and logits.shape[axis] % BLOCK else BLOCK
    greedy = numbers.temperature == 0
    logits = logits / jnp.expand_dims(jnp.where(greedy, 1.0, numbers.temperature), axis)
    if numbers.filters is not None:
        logits = numbers.filters.kept(logits, axis, size)
    kept = None
    if most:
        counts = (logits > -jnp.inf).sum(axis=axis, dtype=jnp.int32)
        by_row = logits if axis else logits.T
        kept = KeptWords(jax.lax.top_k(by_row, min(most, by_row.shape[1]))[1], counts)
    return *_invert_cdf(logits, uniforms, greedy, axis, size), kept


def allowed(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """`logits` [B, V] with -inf for the words that `masks` [B, ceil(V / 32)] uint32 forbid.

    Bit i of number w, counted from the lowest, is word 32 w + i; where it is 0, the word is forbidden. Before
    `sample`, so that temperature and filters apply to the words that are left. Raises ValueError for shapes
    that do not fit.
    """
    batch, width = logits.shape
    if masks.shape != (batch, -(-width // 32)):
        raise ValueError(f"expected masks [{batch}, {-(-width // 32)}], got {masks.shape}")
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=masks.dtype)) & 1
    return jnp.where(bits.reshape(batch, -1)[:, :width] != 0, logits, -jnp.inf)


def _when_any(
    rows: jax.Array, keep: Callable[[jax.Array], jax.Array], candidates: jax.Array, axis: int
) -> jax.Array:
    """`keep(candidates)` in these rows; it is not computed if there are none."""

    def in_rows(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(rows, axis), keep(x), x)

    return jax.lax.cond(rows.any(), in_rows, lambda x: x, candidates)


# In what follows the vocabulary is along `axis`, 0 or 1, of arrays [W, B] or [B, W], and is split into blocks
# of `size` words: [W / size, size, B] or [B, W / size, size].


def _keep_likeliest(logits: jax.Array, top_k: jax.Array, axis: int, size: int) -> jax.Array:
    """`logits` with -inf outside the `top_k` (0: all) likeliest of each row, ties by position.

    The least logit inside is found by bisection over the bit patterns of float32, in the order of the
    numbers, as in `_keep_nucleus`.
    """
    width = logits.shape[axis]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, width), width)

    def number(place: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.where(place < 0, place ^ 0x7FFFFFFF, place), jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at least as many as wanted are at or above low, fewer at or above high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum of both may be too large for 32 bits
        enough = (logits >= number(middle)).sum(axis=axis, keepdims=True) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    infinite = np.float32(np.inf).view(np.int32)
    bounds = (jnp.full_like(wanted, ~infinite), jnp.full_like(wanted, infinite + 1))
    least = number(jax.lax.fori_loop(0, 32, halve, bounds)[0])
    above, tied = ~(logits <= least), logits == least  # what is no number stays, to show in the result
    most = wanted - above.sum(axis=axis, keepdims=True)
    return _first_of_ties(logits, above, tied, most, axis, size)


def _keep_nucleus(logits: jax.Array, top_p: jax.Array, axis: int, size: int) -> jax.Array:
    """`logits` with -inf outside the smallest set of mass >= top_p, likeliest first, ties by position.

    Instead of sorting (on a CPU, hundreds of times the cost of the sampling itself), the least weight
    inside is found by bisection: float32 weights in [0, 1] order as their bit patterns, of which there are
    fewer than 2^30, and the mass of the weights at or above a pattern never grows with it.
    """
    weights = jnp.exp(logits - logits.max(axis=axis, keepdims=True))
    goal = top_p * weights.sum(axis=axis, keepdims=True)

    def weight(pattern: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(pattern, jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the mass at or above low reaches the goal, that at or above high does not
        middle = low + (high - low) // 2
        enough = jnp.where(weights >= weight(middle), weights, 0.0).sum(axis=axis, keepdims=True) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    above_one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
    bounds = (jnp.zeros_like(goal, jnp.int32), jnp.full_like(goal, above_one, jnp.int32))
    least = weight(jax.lax.fori_loop(0, 30, halve, bounds)[0])
    above, tied = weights > least, weights == least
    missing = goal - jnp.where(above, weights, 0.0).sum(axis=axis, keepdims=True)
    most = jnp.ceil(missing / least).astype(jnp.int32)
    return _first_of_ties(logits, above, tied, most, axis, size)


def _blocks(x: jax.Array, axis: int, size: int, fill: float | bool) -> jax.Array:
    """`x` with `axis` split into blocks of `size`, the last of them filled up with `fill`."""
    width = x.shape[axis]
    padding = [(0, 0), (0, 0)]
    padding[axis] = (0, -width % size)
    padded = jnp.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:axis], -(-width // size), size, *x.shape[axis + 1 :])


def _first_of_ties(
    logits: jax.Array, above: jax.Array, tied: jax.Array, most: jax.Array, axis: int, size: int
) -> jax.Array:
    """`logits` with -inf but where `above` and at the first `most` of those `tied`.

    The cumulative sum is by blocks: half the time of one long sum on a CPU.
    """
    inside = jnp.cumsum(_blocks(tied, axis, size, False), axis=axis + 1, dtype=jnp.int32)
    totals = jax.lax.index_in_dim(inside, size - 1, axis + 1, keepdims=False)
    before = jnp.cumsum(totals, axis=axis) - totals
    counts = inside + jnp.expand_dims(before, axis + 1)
    counts = counts.reshape(*tied.shape[:axis], -1, *tied.shape[axis + 1 :])
    counts = jax.lax.slice_in_dim(counts, 0, tied.shape[axis], axis=axis)
    return jnp.where(above | (tied & (counts <= most)), logits, -jnp.inf)


def _invert_cdf(
    logits: jax.Array, uniforms: jax.Array, greedy: jax.Array, axis: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """[B] word where the cumulative softmax first exceeds the uniform, and its log-probability.

    In `greedy` rows, the first of the likeliest words. Two levels: sums, or maxima, of blocks of the
    vocabulary choose a block, a cumulative sum in it chooses the word.
    """
    blocks, greedy = _blocks(logits, axis, size, -jnp.inf), jnp.expand_dims(greedy, axis)
    peaks = blocks.max(axis=axis + 1)
    peak = peaks.max(axis=axis, keepdims=True)
    sums = jnp.exp(blocks - jnp.expand_dims(peak, axis + 1)).sum(axis=axis + 1)
    ends = jnp.cumsum(sums, axis=axis)
    total = jax.lax.index_in_dim(ends, -1, axis)
    goals = jnp.expand_dims(uniforms, axis) * total
    block = jnp.where(greedy, _first(peaks == peak, axis), _first_above(ends, sums, goals, axis))
    goals_inside = goals - jnp.take_along_axis(ends - sums, block, axis=axis)
    inside = _block_of_each(blocks, block, axis)
    weights = jnp.exp(inside - peak)
    drawn = _first_above(jnp.cumsum(weights, axis=axis), weights, goals_inside, axis)
    place = jnp.where(greedy, _first(inside == peak, axis), drawn)
    picked = jnp.take_along_axis(inside, place, axis=axis)
    logprobs = picked - peak - jnp.log(total)
    # The clip matters for a row of NaN alone, where no word is right and the log-probability is NaN.
    words = jnp.minimum(block * size + place, logits.shape[axis] - 1)
    return words.squeeze(axis), logprobs.squeeze(axis)


def _first(wanted: jax.Array, axis: int) -> jax.Array:
    """The first place that is `wanted`, or 0; length 1."""
    return jnp.argmax(wanted, axis=axis, keepdims=True).astype(jnp.int32)


def _block_of_each(blocks: jax.Array, chosen: jax.Array, axis: int) -> jax.Array:
    """[B, size] or [size, B]: the `chosen` block of each row."""
    chosen = jnp.expand_dims(chosen, axis + 1)
    if axis == 1:
        return jnp.take_along_axis(blocks, chosen, axis=axis).squeeze(axis)
    # For a gather along the first dimension, XLA for TPUs copies all of the blocks to another layout.
    numbers = jax.lax.broadcasted_iota(jnp.int32, blocks.shape, axis)
    return jnp.where(numbers == chosen, blocks, -jnp.inf).max(axis=axis)


def _first_above(ends: jax.Array, weights: jax.Array, goals: jax.Array, axis: int) -> jax.Array:
    """First place with weight > 0 whose cumulative sum exceeds the goal, else the last with weight; length 1.

    Asking for a weight keeps rounding (sums that are not monotone, or a goal rounded up to the total) from
    ever choosing a word of probability 0.
    """
    positive = weights > 0
    first = _first(positive & (ends > goals), axis)
    last = weights.shape[axis] - 1 - jnp.argmax(jnp.flip(positive, axis=axis), axis=axis, keepdims=True)
    found = jnp.take_along_axis(positive & (ends > goals), first, axis=axis)
    return jnp.where(found, first, last).astype(jnp.int32)
