import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quatrain.ops.fingerprint import describe_fingerprint, fingerprint


def digest(array):
    return describe_fingerprint(fingerprint(array)[0])


def reference(array):
    """The digest in Python's integers, element by element."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    words = [int(word) for word in np.ravel(array).view(unsigned)]
    parts = []
    for of_position, first, second in (
        (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35),
        (0x7FEB352D, 0x846CA68B, 0x58F38DED),
    ):
        total = 0
        for position, word in enumerate(words):
            mixed = (word ^ (position * of_position + first) % 2**32) * first % 2**32
            mixed = (mixed ^ mixed >> 13) * second % 2**32
            total += mixed ^ mixed >> 16
        parts.append(f"{total % 2**32:08x}")
    return "".join(parts)


ARRAYS = {
    "float32": np.random.default_rng(0).normal(size=(8, 3, 5)).astype(np.float32),
    "bfloat16": np.asarray(jnp.linspace(-2, 2, 24, dtype=jnp.bfloat16).reshape(8, 3)),
    "int32": np.arange(-8, 8, dtype=np.int32),
    "uint8": np.arange(16, dtype=np.uint8),
    "bool": np.array([True, False] * 4),
    "scalar": np.float32(3.5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_it_is_the_sum_of_hashes(name):
    assert digest(ARRAYS[name]) == reference(ARRAYS[name])


def test_every_flipped_bit_changes_it():
    array = ARRAYS["float32"][0]
    found = {digest(array)}
    for bit in range(array.nbytes * 8):
        flipped = bytearray(array.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        found.add(digest(np.frombuffer(bytes(flipped), np.float32).reshape(array.shape)))
    assert len(found) == 1 + array.nbytes * 8


def test_exchanged_elements_change_it():
    assert digest(np.array([1.0, 2.0], np.float32)) != digest(np.array([2.0, 1.0], np.float32))
    assert digest(ARRAYS["float32"]) != digest(ARRAYS["float32"].transpose(0, 2, 1))


def test_it_is_the_same_for_every_sharding():
    mesh = Mesh(np.array(jax.devices()), "d")
    for name in ("float32", "bfloat16"):
        array = ARRAYS[name]
        sharding = NamedSharding(
            mesh, PartitionSpec("d" if array.shape[0] % len(jax.devices()) == 0 else None)
        )
        assert digest(jax.device_put(array, sharding)) == digest(array)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found(bad):
    array = np.zeros((3, 4), np.float32)
    assert fingerprint(array)[1]
    assert fingerprint(np.arange(3))[1]
    array[2, 3] = bad
    assert not fingerprint(array)[1]
