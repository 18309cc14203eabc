"""Stochastic rounding of new parameters to bfloat16.

Data flow: float32 parameters after an optimizer step -> `round_tree` -> parameters as they are stored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from quatrain.ops.fingerprint import positions


def stochastic_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """`x` rounded to one of the two nearest bfloat16 numbers, so that its mean over random `bits` is `x`.

    bfloat16 has the upper 16 of the 32 bits of a float32. Added to the lower 16, uniformly random bits carry
    into the upper with the probability (x - below) / (above - below), as the sign is a bit of its own. A
    number that bfloat16 has is not changed, nor are infinities and NaN. `x` is float32, `bits` are uint16 of
    its shape. Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551.
    """
    assert x.dtype == jnp.float32, x.dtype
    assert bits.dtype == jnp.uint16, bits.dtype
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    upper = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint16 of `shape`: random bits of each element, a function of `key` and its position in C order.

    The position is mixed twice, each time after a word of the key was combined with it (xor): two functions
    that are one to one in the position. Generators of `jax.random` need about ten times as many operations,
    and on a CPU temporary arrays of several times the size.
    Source of the mixing: C. Wellons, Prospecting for Hash Functions (2018), lowbias32.
    """
    bits = positions(shape)
    for word in jax.random.key_data(key):
        bits ^= word
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
        bits ^= bits >> 16
    return (bits >> 16).astype(jnp.uint16)


def round_tree(exact: Any, like: Any, draw: Any = None) -> Any:
    """The tree `exact` of float32 arrays in the dtypes of the tree `like`.

    With a `draw` ([3] uint32: the run's seed, the stream of random numbers, the optimizer step), bfloat16
    arrays are rounded stochastically, else to the nearest number. The random bits of an element depend only
    on `draw`, the array's place in the tree and the element's place in the array, however arrays are
    distributed over devices.
    """
    if draw is None:
        return jax.tree.map(lambda x, other: x.astype(other.dtype), exact, like)
    key = _key(draw)
    leaves, structure = jax.tree.flatten(exact)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
    rounded = [_rounded(x, dtype, key, place) for place, (x, dtype) in enumerate(zip(leaves, dtypes))]
    return jax.tree.unflatten(structure, rounded)


def round_array(exact: jax.Array, dtype: Any, place: Any, draw: Any = None) -> jax.Array:
    """`exact` in `dtype`, as `round_tree` rounds the array at `place` in its tree, counted from 0."""
    return exact.astype(dtype) if draw is None else _rounded(exact, dtype, _key(draw), place)


def _key(draw: Any) -> jax.Array:
    key = jax.random.key(draw[0], impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, draw[1]), draw[2])


def _rounded(exact: jax.Array, dtype: Any, key: jax.Array, place: Any) -> jax.Array:
    if dtype != jnp.bfloat16:
        return exact.astype(dtype)
    return stochastic_bfloat16(exact, random_bits(jax.random.fold_in(key, place), exact.shape))
