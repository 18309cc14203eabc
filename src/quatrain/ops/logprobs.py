"""Log-probabilities and entropies of given tokens, in tiles of [N, V], which exists only where it is small.

Data flow: the decoder's hidden states -> here -> the policy loss, and the old and reference passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from quatrain.ops.kept_words import only_kept

Arrays = tuple[jax.Array, ...]
Rows = jax.Array | Arrays
"""What logits are made of, word by word: [V, ...]; or several such arrays, as a matrix and its adapters."""
States = jax.Array | Arrays
"""Hidden states [N, D]; with several arrays of `Rows` as many, [N, ...] each."""
Project = Callable[[Any, Any], jax.Array]
"""(rows [v, ...] of a head, hidden states [n, D]) -> logits [n, v].

Differentiated at arguments in float32, so that gradients are not rounded before they are summed.
"""

LOWEST = -1e30
"""Below every logit but that of a forbidden token; finite, so that differences are."""


@dataclass(frozen=True)
class Tile:
    """How many tokens, and how many words of the vocabulary, have their logits at one time.

    Logits of all tokens that take `kept_bytes` or less wait for the backward pass; others are made twice.
    The words of a vocabulary that has several tiles come in multiples of `unit`.
    """

    tokens: int
    words: int
    kept_bytes: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        problem = None
        if self.tokens < 1 or self.words < 1:
            problem = f"is of at least one token and one word, got {self.tokens} and {self.words}"
        elif self.words % self.unit:
            problem = f"has words in multiples of its unit, got {self.words} words and {self.unit}"
        if problem:
            raise ValueError(f"a tile of logits {problem}; see Backend.tile in backend.py")


def kept_logits(num_tokens: int, num_words: int, tile: Tile) -> int:
    """Bytes of logits that wait for the backward pass."""
    size = 4 * num_tokens * num_words
    return size if size <= tile.kept_bytes else 0


def even_parts(total: int, most: int, unit: int = 1) -> tuple[int, int]:
    """How many parts of at most `most` make `total`, and their size: less padding than full ones have.

    The size of several parts is a multiple of `unit`, which divides `most`.
    """
    count = -(-total // most)
    size = -(-total // count)
    return count, size if count == 1 else -(-size // unit) * unit


def token_logprobs(
    project: Project,
    head: Rows,
    hidden: States,
    targets: jax.Array,
    temperature: float,
    *,
    tile: Tile,
    num_live: jax.Array | int | None = None,
    vocabulary_axis: str | None = None,
    head_gradient: bool = True,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target token and entropy of its distribution, at the sampling temperature.

    With z = project(head, hidden) / temperature: logprob_n = z[n, targets_n] - logsumexp_v z[n, v] and
    entropy_n = logsumexp_v z[n, v] - sum_v softmax(z)[n, v] z[n, v], both in nats and float32.

    Forward and backward hold the logits of one tile, at the price of computing the logits (and nothing else)
    twice, where the `tile` does not let all of them be kept. Gradients flow to `hidden` and `head`; their
    sums over tiles are in float32. A head that is wider than the hidden states (float32 parameters under
    bfloat16 activations) is cast to their dtype, once for all tiles of a pass.

    Args:
        project: computes the logits of each token and word by itself.
        head: [V, ...], what logits are made of, word by word, or several such arrays.
        hidden: [N, D] hidden states, each of the position before its target; as many arrays as `head`.
        targets: [N] integer token ids in [0, V).
        temperature: static float > 0 that the tokens were sampled at.
        tile: tokens and words whose logits exist at one time (`Backend.tile`); need not divide N and V.
        num_live: the first so many tokens are asked for, by default all N. It may be traced: tiles past it
            are not computed, and their tokens have 0 for both results.
        vocabulary_axis: in a function mapped over a mesh, the axis whose devices each have an equal part of
            the vocabulary, in order, as their `head`. The gradients of `hidden` are then each device's part
            of the sum, those of `head` its own.
        head_gradient: whether `head` is trained; its gradient is not computed otherwise, and is zero. Of
            several arrays this says it of the first, and the others, adapters, always are.
        kept: [N, ceil(V / 32)] uint32, a bit for each word of this device's part of the vocabulary
            (`kept_bits`): z is -inf where it is 0, so that both results, and their gradients, are over the
            kept words alone. The target is one of them. None: all words are kept.

    Raises ValueError for a temperature <= 0 and for shapes that do not fit.
    """
    if not temperature > 0:
        raise ValueError(
            f"token log-probabilities need a temperature > 0, got {temperature}; greedy completions "
            "(temperature 0) have no distribution to train on: sample them at a positive temperature"
        )
    shape = first_of(hidden).shape
    if len(shape) != 2 or targets.shape != shape[:1]:
        raise ValueError(
            f"expected hidden [N, D] and targets [N], got {shape} and {targets.shape}; "
            "flatten batch and time together"
        )
    num_tokens = len(targets)
    bits = num_tokens, -(-len(first_of(head)) // 32)
    if kept is not None and kept.shape != bits:
        raise ValueError(f"expected kept {[*bits]}, a bit for each word, got {kept.shape}; see `kept_bits`")
    if not num_tokens:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.float32)
    # The bits of words that are left out: chunks are padded with zeros, and a token must keep some word.
    left_out = [] if kept is None else [~kept]
    (hidden, targets, *sets), live = chunked(tile, num_live, hidden, targets, *left_out)
    how = How((Head(project, temperature),), tile, vocabulary_axis, head_gradient)
    keep = kept_logits(num_tokens, len(first_of(head)), tile) > 0
    outputs = _by_tiles(how, keep, head, hidden, targets, live, tuple(sets))
    logprobs, entropy = (output.reshape(-1)[:num_tokens] for output in outputs)
    return logprobs, entropy


def first_of(arrays: Rows | States) -> jax.Array:
    """The array, or the first of several."""
    return arrays[0] if isinstance(arrays, tuple) else arrays


def chunked(tile: Tile, num_live: jax.Array | int | None, *arrays: States) -> tuple[list[Any], jax.Array]:
    """(the arrays [N, ...] as [chunks, n, ...], padded with zeros; the number of chunks with live tokens)."""
    num_tokens = len(first_of(arrays[0]))
    count, size = even_parts(num_tokens, tile.tokens)
    live = jnp.int32(count) if num_live is None else jnp.minimum(-(-num_live // size), count)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, count * size - num_tokens), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(count, size, *x.shape[1:])

    return jax.tree.map(cut, [*arrays]), live


@dataclass(frozen=True)
class Words:
    """A vocabulary in `num_tiles` of `size` words; the last begins early where they do not come out even."""

    total: int
    num_tiles: int
    size: int

    @classmethod
    def of(cls, total: int, tile: Tile) -> Words:
        return cls(total, *even_parts(total, tile.words, tile.unit))

    def first(self, j: jax.Array) -> jax.Array:
        """The first word of tile `j`."""
        return jnp.minimum(j * self.size, self.total - self.size)

    def places(self, words: jax.Array, j: jax.Array) -> jax.Array:
        """Where in tile `j` each of `words` is; not in it where it is in another, or in the one before."""
        return jnp.where(words >= j * self.size, words - self.first(j), -1)

    def without_earlier(self, logits: jax.Array, j: jax.Array) -> jax.Array:
        """The logits of tile `j`, -inf for the words of the tile before."""
        if self.num_tiles * self.size == self.total:
            return logits
        earlier = j * self.size - self.first(j)
        return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < earlier, -jnp.inf, logits)


class Head(NamedTuple):
    """What makes logits: a function (rows of the head, hidden states) -> logits, and the temperature."""

    project: Project
    temperature: float

    def logits(self, rows: Rows, chunk: States) -> jax.Array:
        """[n, v] float32, divided by the temperature."""
        return self.project(rows, chunk).astype(jnp.float32) / jnp.float32(self.temperature)


class How(NamedTuple):
    """How logits are computed: static arguments of the functions over tiles here and beside."""

    heads: tuple[Head, ...]
    """Of models with the same words; the first is that which is trained."""
    tile: Tile
    axis: str | None
    """Of the mesh, over which the vocabulary is sharded."""
    head_gradient: bool

    def first_word(self, rows: Rows) -> jax.Array | int:
        """The number of the first of this device's `rows` of the vocabulary."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * len(first_of(rows))


class Tiled:
    """The logits of chunks of tokens in all tiles of words, of which one tile exists at a time.

    `rows` [V, ...] and `hidden` [chunks, n, ...] are of the models of `how.heads`. Chunks from `live` on are
    not computed.
    """

    def __init__(self, how: How, rows: Sequence[Rows], hidden: Sequence[States], live: jax.Array):
        self.words = Words.of(len(first_of(rows[0])), how.tile)
        self._how, self._rows, self._hidden, self._live = how, rows, hidden, live
        # Cast once here: within the loops XLA would cast the same rows again for every chunk of tokens.
        self._narrow = jax.tree.map(lambda x, states: narrowed(x, states.dtype), [*rows], [*hidden])

    def _rows_of(self, j: jax.Array) -> list[Rows]:
        """The rows of tile `j` of each model."""
        first, size = self.words.first(j), self.words.size
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), self._narrow)

    def _logits(self, rows: Sequence[Rows], i: jax.Array, first: int = 0) -> list[jax.Array]:
        """The logits of chunk `i` from the `rows` of a tile, of the models from `first` on."""
        given = zip(self._how.heads[first:], rows, self._hidden[first:], strict=True)
        return [head.logits(own, jax.tree.map(lambda x: x[i], states)) for head, own, states in given]

    def over(self, one: Callable[..., Arrays], carry: Arrays, kept: Arrays = ()) -> tuple[Arrays, Arrays]:
        """`one(tile, chunk, carry of the chunk, its logits by each model)` over all tiles and live chunks.

        Returns the last carry, and `kept` [tiles, chunks, n, v], if given, with logits of the first model.
        """

        def one_tile(j: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            rows = self._rows_of(j)

            def one_chunk(i: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
                seen, kept = carry
                logits = self._logits(rows, i)
                kept = tuple(x.at[j, i].set(logits[0]) for x in kept)
                shown = (self.words.without_earlier(each, j) for each in logits)
                new = one(j, i, tuple(x[i] for x in seen), *shown)
                return tuple(x.at[i].set(value) for x, value in zip(seen, new, strict=True)), kept

            return lax.fori_loop(0, self._live, one_chunk, carry)

        return lax.fori_loop(0, self.words.num_tiles, one_tile, (carry, kept))

    def gradients(self, to_logits: Callable[..., jax.Array], kept: Arrays = ()) -> tuple[Any, States]:
        """The gradients of the first model's rows (None of those that are frozen) and hidden states.

        The logits of a tile of words and a chunk are made again, unless they were `kept`, and
        `to_logits(tile, chunk, logits by each model)` gives the gradients of those of the first.
        """
        head, structure = jax.tree.flatten(self._rows[0])
        hidden, num_frozen = self._hidden[0], 0 if self._how.head_gradient else 1

        def one_tile(j: jax.Array, grads: tuple[Arrays, States]) -> tuple[Arrays, States]:
            to_head, to_hidden = grads  # `to_head` has one array for each of the rows that are trained
            first = self.words.first(j)
            own, *others = self._rows_of(j)
            rows = jax.tree.leaves(own)
            frozen, trained = rows[:num_frozen], rows[num_frozen:]

            def one_chunk(i: jax.Array, grads: tuple[Arrays, States]) -> tuple[Arrays, States]:
                to_rows, to_hidden = grads

                def logits_of(trained: list[jax.Array], states: States) -> jax.Array:
                    return self._how.heads[0].logits(
                        jax.tree.unflatten(structure, [*frozen, *trained]), states
                    )

                # In float32, in which the products of the gradients are then summed.
                at = jax.tree.map(_float32, (trained, jax.tree.map(lambda x: x[i], hidden)))
                logits, pull = jax.vjp(logits_of, *at)
                all_logits = [kept[0][j, i] if kept else logits, *self._logits(others, i, 1)]
                shown = (self.words.without_earlier(each, j) for each in all_logits)
                by_rows, by_chunk = pull(to_logits(j, i, *shown))
                to_hidden = jax.tree.map(
                    lambda old, new: old.at[i].add(new.astype(old.dtype)), to_hidden, by_chunk
                )
                added = zip(to_rows, by_rows, strict=True)
                return tuple(old + new.astype(jnp.float32) for old, new in added), to_hidden

            to_rows = tuple(lax.dynamic_slice_in_dim(x, first, self.words.size) for x in to_head)
            to_rows, to_hidden = lax.fori_loop(0, self._live, one_chunk, (to_rows, to_hidden))
            updated = zip(to_head, to_rows, strict=True)
            # Tiles are the outer loop, so that a tile's part of the head's gradient is read and written once.
            return tuple(lax.dynamic_update_slice_in_dim(x, new, first, 0) for x, new in updated), to_hidden

        # Sums over chunks and tiles are in float32 even where parameters and activations are not.
        several = self.words.num_tiles > 1
        zeros = (
            tuple(jnp.zeros(x.shape, jnp.float32) for x in head[num_frozen:]),
            jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32 if several else x.dtype), hidden),
        )
        to_head, to_hidden = lax.fori_loop(0, self.words.num_tiles, one_tile, zeros)
        summed = [x.astype(own.dtype) for x, own in zip(to_head, head[num_frozen:], strict=True)]
        to_hidden = jax.tree.map(lambda x, own: x.astype(own.dtype), to_hidden, hidden)
        return jax.tree.unflatten(structure, [*[None] * num_frozen, *summed]), to_hidden


class Sums(NamedTuple):
    """Of each row of logits z of the tiles so far: the greatest, and the sum of exp(z - greatest)."""

    peak: jax.Array
    total: jax.Array

    def with_tile(self, logits: jax.Array) -> tuple[Sums, jax.Array, jax.Array]:
        """(these with one more tile, the factor by which they shrank, exp(z - greatest) of the tile)."""
        peak = jnp.maximum(self.peak, logits.max(axis=-1))
        shrink, weights = jnp.exp(self.peak - peak), jnp.exp(logits - peak[:, None])
        return Sums(peak, self.total * shrink + weights.sum(axis=-1)), shrink, weights


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_tiles(
    how: How, keep: bool, head: Rows, hidden: States, targets: jax.Array, live: jax.Array, sets: Arrays
) -> tuple[jax.Array, jax.Array]:
    """(logprobs, entropy), each [chunks, n], of hidden [chunks, n, D]; zeros from chunk `live` on.

    `keep`: whether the logits of the forward pass wait for the backward pass. `sets`: the bits of words
    that are left out [chunks, n, W], if some are.
    """
    return _forward(how, False, head, hidden, targets, live, sets)[0]


def _forward(
    how: How, keep: bool, head: Rows, hidden: States, targets: jax.Array, live: jax.Array, sets: Arrays
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    axis, tiled = how.axis, Tiled(how, [head], [hidden], live)
    words = tiled.words
    # Of this device's part of the vocabulary, targets count from its first word.
    own_targets = targets - how.first_word(head)

    def one(j: jax.Array, i: jax.Array, seen: Arrays, logits: jax.Array) -> Arrays:
        """Greatest logit z, sum of exp(z - greatest), the same times z - greatest, and the target's logit."""
        peak, total, weighted, target = seen
        logits = _of_kept(logits, sets, words, j, i)
        sums, shrink, weights = Sums(peak, total).with_tile(logits)
        # A logit of -inf (a forbidden token) has weight 0 and must add nothing, where 0 * -inf is NaN.
        shifted = jnp.where(weights > 0, logits - sums.peak[:, None], 0.0)
        weighted = (weighted + total * (peak - sums.peak)) * shrink + (weights * shifted).sum(axis=-1)
        # A masked sum, not a gather: the target may be in another tile, or in another device's.
        is_target = _is_target(logits, words.places(own_targets[i], j))
        return *sums, weighted, target + jnp.where(is_target, logits, 0.0).sum(axis=-1)

    nothing = jnp.zeros(targets.shape, jnp.float32)
    begin = (jnp.full_like(nothing, LOWEST), nothing, nothing, nothing)
    shape = words.num_tiles, *targets.shape, words.size
    kept: Arrays = (jnp.zeros(shape, jnp.float32),) if keep else ()
    (peak, total, weighted, target), kept = tiled.over(one, begin, kept)
    if axis is not None:
        own_peak, peak = peak, lax.pmax(peak, axis)
        lower, shrink = own_peak - peak, jnp.exp(own_peak - peak)
        total, weighted = lax.psum((total * shrink, (weighted + total * lower) * shrink), axis)
        target = lax.psum(target, axis)
    # Chunks that no token asked for were not computed: their sums are 0, and the logarithm would be -inf.
    computed = jnp.arange(len(targets))[:, None] < live
    total = jnp.where(computed, total, 1.0)
    log_total = jnp.log(total)
    logprobs = jnp.where(computed, target - peak - log_total, 0.0)
    entropy = jnp.where(computed, log_total - weighted / total, 0.0)
    return (logprobs, entropy), (head, hidden, own_targets, live, entropy, log_total + peak, kept, sets)


def _backward(how: How, keep: bool, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    head, hidden, own_targets, live, entropy, log_total, kept, sets = residuals
    by_logprob, by_entropy = cotangents
    tiled = Tiled(how, [head], [hidden], live)

    def to_logits(j: jax.Array, i: jax.Array, logits: jax.Array) -> jax.Array:
        logits = _of_kept(logits, sets, tiled.words, j, i)
        logprobs = logits - log_total[i][:, None]
        probs = jnp.exp(logprobs)
        surprise = jnp.where(probs > 0, logprobs, 0.0) + entropy[i][:, None]
        weight = by_logprob[i][:, None]
        is_target = _is_target(logits, tiled.words.places(own_targets[i], j))
        return jnp.where(is_target, weight, 0.0) - probs * (weight + by_entropy[i][:, None] * surprise)

    return *tiled.gradients(to_logits, kept), None, None, tuple(None for _ in sets)


def _of_kept(logits: jax.Array, sets: Arrays, words: Words, j: jax.Array, i: jax.Array) -> jax.Array:
    """The logits of tile `j` and chunk `i`, -inf for words that are not kept."""
    return only_kept(logits, ~sets[0][i], words.first(j)) if sets else logits


def narrowed(head: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`head` in `dtype` if that is narrower; the barrier keeps XLA from casting each tile in the loops."""
    if head.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return head
    return lax.optimization_barrier(head.astype(dtype))


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]


_by_tiles.defvjp(_forward, _backward)
