"""Digests of arrays that do not depend on how an array is distributed over devices.

The checkpointer saves them with the arrays and compares them after reading.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIERS = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x7FEB352D, 0x846CA68B, 0x58F38DED))
"""Odd constants of the two 32-bit hashes: of the position, and of the two rounds of mixing."""


@jax.jit
def fingerprint(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(uint32 [2], bool): a digest of the bits of `array`, and whether all its numbers are finite.

    The digest is the sum modulo 2^32 of a hash of each element's bits and position, which is one to one in
    the bits: a change of one element always changes it. Sums of integers do not depend on the order, hence
    not on the sharding. Elements have 32 bits at most.
    """
    bits = _bits(array)
    position = positions(array.shape)
    digest = jnp.stack(
        [_mixed(bits, position, *constants).sum(dtype=jnp.uint32) for constants in MULTIPLIERS]
    )
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    return digest, jnp.isfinite(array).all() if inexact else jnp.asarray(True)


def describe_fingerprint(digest: Any) -> str:
    """A digest as 16 hexadecimal digits."""
    return "".join(f"{int(part):08x}" for part in np.asarray(digest))


def tree_fingerprint(tree: Any) -> str:
    """16 hexadecimal digits for all arrays of `tree`: their names, dtypes, shapes and bits.

    The same however they are distributed over devices.
    """
    lines = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {list(leaf.shape)} "
        f"{describe_fingerprint(jax.device_get(fingerprint(leaf)[0]))}"
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def positions(shape: tuple[int, ...]) -> jax.Array:
    """uint32 of `shape`: the index of each element in C order, modulo 2^32."""
    position = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        position += iota * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return position


def _mixed(bits: jax.Array, position: jax.Array, of_position: int, first: int, second: int) -> jax.Array:
    mixed = bits ^ (position * jnp.uint32(of_position) + jnp.uint32(first))
    mixed *= jnp.uint32(first)
    mixed ^= mixed >> 13
    mixed *= jnp.uint32(second)
    return mixed ^ (mixed >> 16)
