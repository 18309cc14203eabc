"""The words that a token was drawn from, as bits: what log-probabilities over these words alone are made of.

Data flow: the words that the sampler kept of each token, or masks of grammars -> here -> `token_logprobs`.
Bit i of number w, counted from the lowest, is word 32 w + i.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NO_WORD = -1
"""Stands where a token has fewer words than others."""
BITS = 32
LIST_WIDTHS = 16, 64, 512
"""Words of the lists of a micro-batch, or of a decode call: few, as each is a program."""


def list_width(most: int) -> int:
    """The number of places for lists of at most so many words."""
    return next((width for width in LIST_WIDTHS if width >= most), most)


def kept_bits(words: jax.Array, num_words: int, first: jax.Array | int = 0) -> jax.Array:
    """[N, ceil(num_words / 32)] uint32: of each row, the `words` that are among those from `first` on.

    `words` [N, K] int32 are different ones in a row, or NO_WORD. A row without any word keeps all.
    """
    shape = len(words), -(-num_words // BITS)
    own = words - first
    # Out of range, and so dropped, where the word is another device's, or none: -1 would be the last.
    column = jnp.where((own >= 0) & (own < num_words), own // BITS, shape[1])
    bit = jnp.uint32(1) << (own % BITS).astype(jnp.uint32)
    # Bits of different words are different, so that their sum is their union.
    bits = jnp.zeros(shape, jnp.uint32).at[jnp.arange(len(words))[:, None], column].add(bit, mode="drop")
    return jnp.where((words == NO_WORD).all(axis=1, keepdims=True), ~jnp.uint32(0), bits)


def bits_from(masks: jax.Array, num_words: int, first: jax.Array | int = 0) -> jax.Array:
    """[U, ceil(num_words / 32)] uint32: of `masks` [U, ceil(V / 32)] uint32, the words from `first` on."""
    size = -(-num_words // BITS)
    # One more than are needed where `first` lies within a number; the slice must not begin earlier.
    padded = jnp.pad(masks, [(0, 0), (0, size + 1)])
    pair = lax.dynamic_slice_in_dim(padded, jnp.asarray(first) // BITS, size + 1, axis=1)
    right = jnp.asarray(first % BITS, jnp.uint32)
    left = jnp.where(right > 0, pair[:, 1:] << (BITS - right), jnp.uint32(0))
    return (pair[:, :-1] >> right) | left


def only_kept(logits: jax.Array, bits: jax.Array, first: jax.Array | int) -> jax.Array:
    """`logits` [n, v] of the words from `first` on, with -inf for those whose bit in `bits` [n, W] is 0."""
    count = logits.shape[1]
    numbers = bits_from(bits, count, first)
    each = (numbers[:, :, None] >> jnp.arange(BITS, dtype=jnp.uint32)[None, None]) & 1
    return jnp.where(each.reshape(len(bits), -1)[:, :count] != 0, logits, -jnp.inf)
