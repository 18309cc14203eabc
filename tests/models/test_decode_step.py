"""Parts of the sampler's forward passes by themselves; whole ones are compared in `engine/`."""

import jax
import jax.numpy as jnp
import numpy as np
from architectures import of_golden

from quatrain.models.decode_step import Continued, extend
from quatrain.models.delta_rule import DeltaState
from quatrain.models.kv_cache import CachePart, empty_cache
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device


def test_a_sequence_begins_without_the_state_that_its_prefix_slot_had():
    """A long prompt that is computed in parts begins in a slot of another; the part after it goes on."""
    arch = of_golden("qwen3_5_text", vocab_size=50)
    params = init_params(arch, jax.random.key(3))
    clean = empty_cache(arch, 2, 32, jnp.float32, one_device())
    used = CachePart(
        tuple(
            jax.tree.map(lambda x: x + 0.5, layer) if isinstance(layer, DeltaState) else layer
            for layer in clean.layers
        )
    )
    run = jax.jit(lambda continued, cache: extend(params, arch, continued, cache, dtype=jnp.float32)[:2])

    def hidden(start, cache):
        arrays = (np.array([[5, 6, 7, 8]]), np.array([start]), np.array([3]), np.array([1]))
        return run(Continued(*(jnp.asarray(array, jnp.int32) for array in arrays)), cache)

    expected, states = hidden(0, clean)
    found, again = hidden(0, used)
    np.testing.assert_array_equal(found, expected)
    for one, two in zip(states.layers, again.layers, strict=True):
        if isinstance(one, DeltaState):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[1]), one, two)
    assert np.abs(hidden(2, used)[0] - hidden(2, clean)[0]).max() > 1e-3  # it goes on with the state
