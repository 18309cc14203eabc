"""The likeliest words of a teacher and all others as one: divergences of k + 1 outcomes, in tiles of logits.

Data flow: hidden states of the teacher -> `top_words`, its k likeliest words in the place of each scored
token, with the logits of them and the rest -> `outcome_logits`, the policy's of the same outcomes ->
`outcome_divergence` -> the distillation loss, or `listed_logprobs` of words that were given. The logits of
one tile exist at a time (`logprobs.py`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quatrain.ops.divergences import Divergence, log_mixture
from quatrain.ops.kept_words import NO_WORD
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
    Words,
    chunked,
    first_of,
)

LEAST_REST = 1e-9
"""Least probability of a teacher's rest: servers give probabilities that are rounded."""


def _divided(
    how: How, num_words: int | None, rows: Rows, logits: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`logits` of the rows from `first` on: those of the words that count, and those of the others.

    Each has -inf in place of the other. The first `num_words` count; None: all.
    """
    if num_words is None:
        return logits, jnp.full((len(logits), 1), -jnp.inf)
    numbers = how.first_word(rows) + first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    counts = numbers < num_words
    return jnp.where(counts, logits, -jnp.inf), jnp.where(counts, -jnp.inf, logits)


def outcome_divergence(
    kind: Divergence, logits: jax.Array, teacher_logprobs: jax.Array, *, beta: float = 0.5
) -> jax.Array:
    """[...] divergence in nats of the policy softmax(`logits`) [..., k + 1] from a teacher of k + 1 outcomes.

    The formulas are those of `token_divergences`, over the k words and the rest, which is the last outcome.
    It is at least 0, at most the divergence over all words, and equal to it where the words are all there
    are. The teacher's rest has a probability of at least LEAST_REST. Outcomes that do not exist have logits
    of `LOWEST` and add nothing. Gradients flow to `logits`.
    """
    log_p = jax.nn.log_softmax(logits)
    # A rest that a server rounded to 0 would make the reverse KL infinite.
    log_q = teacher_logprobs.at[..., -1].max(math.log(LEAST_REST))
    log_q = lax.stop_gradient(jnp.where(logits < LOWEST / 2, LOWEST, log_q))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(axis=-1)
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(axis=-1)
    log_m = log_mixture(beta, log_p, log_q)
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(axis=-1)


def outcome_logits(
    head: Head,
    rows: Rows,
    hidden: States,
    words: jax.Array,
    *,
    tile: Tile,
    num_words: int | None = None,
    num_live: jax.Array | int | None = None,
    vocabulary_axis: str | None = None,
    head_gradient: bool = True,
) -> jax.Array:
    """[N, k + 1] float32: the logits of `words` [N, k], and logsumexp of those of all other words.

    Their softmax is the distribution of the k words and the rest. An outcome that does not exist, `NO_WORD`
    or a rest of no words, has `LOWEST`. Gradients flow to `rows` and `hidden`.

    Args:
        rows: [V, ...], what logits are made of, word by word, or several such arrays.
        hidden: [N, D] states of the position before each token; as many arrays as `rows`.
        num_words: the first so many words count, by default all V.
        tile, num_live, vocabulary_axis, head_gradient: as for `token_logprobs`.
    """
    num_tokens, num_outcomes = len(words), words.shape[1] + 1
    if not num_tokens:
        return jnp.zeros((0, num_outcomes), jnp.float32)
    (states, chosen), live = chunked(tile, num_live, hidden, words.astype(jnp.int32))
    how = How((head,), tile, vocabulary_axis, head_gradient)
    return _outcomes(how, num_words, rows, states, chosen, live).reshape(-1, num_outcomes)[:num_tokens]


def listed_logprobs(outcomes: jax.Array, words: jax.Array) -> jax.Array:
    """[N, k] float32: the log-probabilities of `words` [N, k], of what `outcome_logits` has for them.

    0 for `NO_WORD`. A word may be listed several times. Gradients flow to `outcomes`.
    """
    logits, rest = outcomes[:, :-1], outcomes[:, -1:]
    # A word that is listed again has the same logit, and must count once in the total.
    order = jnp.argsort(words, axis=-1)
    ordered = jnp.take_along_axis(words, order, axis=-1)
    again = jnp.pad(ordered[:, 1:] == ordered[:, :-1], [(0, 0), (1, 0)])
    counted = jnp.where(again, LOWEST, jnp.take_along_axis(logits, order, axis=-1))
    total = jax.nn.logsumexp(jnp.concatenate([counted, rest], axis=-1), axis=-1, keepdims=True)
    return jnp.where(words == NO_WORD, 0.0, logits - total)


def top_words(
    head: Head,
    rows: Rows,
    hidden: States,
    count: int,
    *,
    tile: Tile,
    num_words: int | None = None,
    num_live: jax.Array | int | None = None,
    vocabulary_axis: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(words [N, count] int32, the logits of these outcomes [N, count + 1], mass [N]), both float32.

    The likeliest words, their logits and that of the rest as `outcome_logits` has them, and the probability
    of the words that do not count. The arguments are those of `outcome_logits`; `count` is at most the number
    of words that count. There is no gradient.
    """
    (states,), live = chunked(tile, num_live, hidden)
    how = How((head,), tile, vocabulary_axis, head_gradient=False)
    words, logits, outside = _likeliest(how, num_words, rows, states, live, count)
    mass = jnp.exp(outside - jnp.logaddexp(outside, jax.nn.logsumexp(logits, axis=-1)))
    num_tokens, found = len(first_of(hidden)), (words, logits, mass)
    words, logits, mass = (x.reshape(-1, *x.shape[2:])[:num_tokens] for x in found)
    return words, logits, mass


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _outcomes(
    how: How, num_words: int | None, rows: Rows, hidden: States, words: jax.Array, live: jax.Array
) -> jax.Array:
    """[chunks, n, k + 1] logits of `words` [chunks, n, k] and the rest; LOWEST from chunk `live` on."""
    return _forward(how, num_words, rows, hidden, words, live)[0]


def _forward(
    how: How, num_words: int | None, rows: Rows, hidden: States, words: jax.Array, live: jax.Array
) -> tuple[jax.Array, Any]:
    tiled = Tiled(how, [rows], [hidden], live)
    tiles = tiled.words
    # Of this device's part of the vocabulary, words count from its first.
    own_words = words - how.first_word(rows)

    def one(j: jax.Array, i: jax.Array, seen: Arrays, logits: jax.Array) -> Arrays:
        found, *rest = seen
        places = _inside(tiles, own_words[i], j)
        logits, _ = _divided(how, num_words, rows, logits, tiles.first(j))
        # A gather is enough going forward; its gradient is the scatter in `_backward`, of places within the
        # tile alone.
        here = jnp.take_along_axis(logits, jnp.minimum(places, tiles.size - 1), axis=1)
        found = jnp.where(places < tiles.size, here, found)
        return found, *Sums(*rest).with_tile(_without(logits, places))[0]

    lowest = jnp.full(words.shape[:2], LOWEST, jnp.float32)
    begin = jnp.full(words.shape, LOWEST, jnp.float32), lowest, jnp.zeros_like(lowest)
    (found, peak, total), _ = tiled.over(one, begin)
    if how.axis is not None:
        found = lax.pmax(found, how.axis)
    rest = _logsumexp(peak, total, how.axis)
    outcomes = jnp.concatenate([jnp.maximum(found, LOWEST), rest[..., None]], axis=-1)
    return outcomes, (rows, hidden, own_words, live, rest)


def _backward(how: How, num_words: int | None, residuals: Any, cotangent: jax.Array) -> Any:
    rows, hidden, own_words, live, rest = residuals
    tiled = Tiled(how, [rows], [hidden], live)

    def to_logits(j: jax.Array, i: jax.Array, logits: jax.Array) -> jax.Array:
        places = _inside(tiled.words, own_words[i], j)
        logits, _ = _divided(how, num_words, rows, logits, tiled.words.first(j))
        of_others = jnp.exp(_without(logits, places) - rest[i][:, None]) * cotangent[i][:, -1:]
        return of_others.at[_lines(places), places].add(cotangent[i][:, :-1], mode="drop")

    return *tiled.gradients(to_logits), None, None


_outcomes.defvjp(_forward, _backward)


def _likeliest(
    how: How, num_words: int | None, rows: Rows, hidden: States, live: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """([chunks, n, count] words, [chunks, n, count + 1] their logits and logsumexp of the others, [chunks, n]
    logsumexp of those that do not count)."""
    tiled, shape = Tiled(how, [rows], [hidden], live), first_of(hidden).shape[:2]
    kept = min(count, len(first_of(rows)))
    tiles = tiled.words

    def one(j: jax.Array, i: jax.Array, seen: Arrays, logits: jax.Array) -> Arrays:
        words, best, *sums = seen
        logits, outside = _divided(how, num_words, rows, logits, tiles.first(j))
        new = jnp.broadcast_to(tiles.first(j) + jnp.arange(tiles.size, dtype=jnp.int32), logits.shape)
        both = jnp.concatenate([words, new], axis=1), jnp.concatenate([best, logits], axis=1)
        words, best, others = _split(*both, kept)
        of_rest, of_outside = Sums(*sums[:2]).with_tile(others)[0], Sums(*sums[2:]).with_tile(outside)[0]
        return words, best, *of_rest, *of_outside

    lowest = jnp.full(shape, LOWEST, jnp.float32)
    none = jnp.full((*shape, kept), NO_WORD, jnp.int32), jnp.full((*shape, kept), -jnp.inf, jnp.float32)
    begin = *none, *(lowest, jnp.zeros_like(lowest)) * 2
    (words, best, *sums), _ = tiled.over(one, begin)
    rest, outside = (_logsumexp(peak, total, how.axis) for peak, total in (sums[:2], sums[2:]))
    if how.axis is not None:
        words = words + how.first_word(rows)
        # The likeliest of all are among the likeliest of each device: k numbers travel, not the vocabulary.
        words, best = (lax.all_gather(x, how.axis, axis=2, tiled=True) for x in (words, best))
        flat_words, flat_best = (x.reshape(-1, x.shape[-1]) for x in (words, best))
        split = _split(flat_words, flat_best, count)
        words, best, others = (x.reshape(*shape, x.shape[-1]) for x in split)
        rest = jnp.logaddexp(rest, jnp.maximum(jax.nn.logsumexp(others, axis=-1), LOWEST))
    return words, jnp.concatenate([jnp.maximum(best, LOWEST), rest[..., None]], axis=-1), outside


def _split(words: jax.Array, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` likeliest of `words` [n, m], their logits, and `logits` with -inf in their places."""
    best, places = lax.top_k(logits, count)
    return jnp.take_along_axis(words, places, axis=1), best, _without(logits, places)


def _inside(tiles: Words, words: jax.Array, j: jax.Array) -> jax.Array:
    """[n, k]: the place in tile `j` of each of `words`; `tiles.size`, no place, where it is not in it."""
    places = tiles.places(words, j)
    return jnp.where((places >= 0) & (places < tiles.size), places, tiles.size)


def _lines(places: jax.Array) -> jax.Array:
    return jnp.arange(len(places))[:, None]


def _without(logits: jax.Array, places: jax.Array) -> jax.Array:
    """`logits` [n, v] with -inf at `places` [n, k]."""
    return logits.at[_lines(places), places].set(-jnp.inf, mode="drop")


def _logsumexp(peak: jax.Array, total: jax.Array, axis: str | None) -> jax.Array:
    """The logarithm of total x exp(peak), summed over `axis`; LOWEST where nothing was summed."""
    if axis is not None:
        own, peak = peak, lax.pmax(peak, axis)
        total = lax.psum(total * jnp.exp(own - peak), axis)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + peak, LOWEST)
