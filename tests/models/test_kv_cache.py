import jax.numpy as jnp
import numpy as np

from quatrain.models.families import builtin_architecture
from quatrain.models.kv_cache import CachePart, bytes_per_position, write


def test_columns_are_the_tokens_a_part_has_room_for():
    part = CachePart(((jnp.zeros((3, 2, 32, 5)), jnp.zeros((3, 2, 5, 32))),))
    assert part.positions == 5


def test_a_token_takes_keys_and_values_of_every_layer():
    arch = builtin_architecture("tiny", 8, ())
    mixer = arch.layers[0].mixer
    assert (arch.num_layers, mixer.num_kv_heads, mixer.head_dim) == (4, 2, 32)
    assert bytes_per_position(arch, jnp.float32) == 2 * 4 * 2 * 32 * 4
    assert bytes_per_position(arch, jnp.bfloat16) == 2 * 4 * 2 * 32 * 2


def test_write_casts_and_keeps_the_rest():
    buffer = jnp.zeros((1, 4), jnp.bfloat16)
    written = write(buffer, jnp.array([[1.0, 2.0]]), 1, axis=1)
    assert written.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written.astype(jnp.float32), [[0, 1, 2, 0]])
