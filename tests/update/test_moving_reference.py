import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.parallel.mesh import to_memory
from quatrain.update.moving_reference import followed

OLD, NEW = np.float32([1, 2, 3]), np.float32([3, 2, -1])


def placed(array, dtype=jnp.float32):
    mesh = jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1])
    return jax.device_put(jnp.asarray(array, dtype), jax.NamedSharding(mesh, jax.P()))


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize(("mixup", "expected"), [(1.0, [3, 2, -1]), (0.25, [1.5, 2, 2])])
def test_the_reference_moves_by_its_part(mixup, expected, memory):
    reference = to_memory(memory, {"w": placed(OLD)})
    params = {"w": placed(NEW)}
    moved = followed(reference, params, mixup)["w"]
    np.testing.assert_array_equal(moved, expected)
    assert moved.sharding.is_equivalent_to(reference["w"].sharding, 1)
    assert moved.sharding.memory_kind == reference["w"].sharding.memory_kind
    params["w"].delete()  # as a training step does that donates it
    np.testing.assert_array_equal(moved, expected)


def test_the_part_is_computed_in_float32():
    reference, params = {"w": placed([1.0], jnp.bfloat16)}, {"w": placed([1.5], jnp.bfloat16)}
    moved = followed(reference, params, 0.5)["w"]
    assert (moved.dtype, float(moved[0])) == (jnp.bfloat16, 1.25)


def test_a_small_part_arrives_in_the_mean_in_bfloat16():
    """Rounded to the nearest number it was lost, and the reference never moved, however often it should."""
    near = 1 + 2**-7  # the next number above 1
    reference, params = ({"v": placed(OLD), "w": placed(np.full(4096, x), jnp.bfloat16)} for x in (1, near))
    draw = np.array([5, 3, 2], np.uint32)
    assert (followed(reference, params, 0.25)["w"] == 1).all()
    moved, again = (followed(reference, params, 0.25, draw)["w"] for _ in range(2))
    assert abs(float((moved == near).mean()) - 0.25) < 0.03
    np.testing.assert_array_equal(moved, again)
    other = followed(reference, params, 0.25, draw + np.uint32(1))["w"]
    assert (np.asarray(moved) != np.asarray(other)).any()
