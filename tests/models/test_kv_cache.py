import jax
import jax.numpy as jnp
import numpy as np

from quatrain.models.families import builtin_architecture
from quatrain.models.kv_cache import KVCache, init_cache, write


def test_empty_cache():
    cache = init_cache(builtin_architecture("tiny", 8, ()), batch=3, length=5, dtype=jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == 4
    assert cache.keys[0].shape == (3, 2, 5, 32)
    assert cache.values[3].dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.positions, np.full((3, 5), -1))


def test_cache_is_a_pytree():
    cache = init_cache(builtin_architecture("tiny", 8, ()), batch=1, length=2)
    doubled = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), cache)
    assert isinstance(doubled, KVCache)
    assert doubled.positions.shape == (2, 2)


def test_write_casts_and_keeps_the_rest():
    buffer = jnp.zeros((1, 4), jnp.bfloat16)
    written = write(buffer, jnp.array([[1.0, 2.0]]), 1, axis=1)
    assert written.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written.astype(jnp.float32), [[0, 1, 2, 0]])
