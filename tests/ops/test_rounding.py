import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from quatrain.ops.rounding import random_bits, round_tree, stochastic_bfloat16

EVERY = np.arange(2**16, dtype=np.uint16)
"""Every value of the random bits, and every pattern of a bfloat16."""
ULP = 2.0**-7
"""Distance of the bfloat16 numbers above 1."""


def draw(seed=0, stream=0, step=0):
    return np.array([seed, stream, step], np.uint32)


@pytest.mark.parametrize("value", [1.0 + 1e-6, -3.14159, 2e-41, -6.1e-39, 1e38, -0.1, 1 + ULP * 0.75])
def test_the_mean_over_all_bits_is_the_number(value):
    x = np.float32(value)
    rounded = np.asarray(stochastic_bfloat16(jnp.full(2**16, x), EVERY), np.float64)
    assert len(np.unique(rounded)) == 2
    assert rounded.min() < x < rounded.max()
    assert rounded.mean() == np.float64(x)


def test_numbers_that_bfloat16_has_infinities_and_nan_are_left():
    numbers = jax.lax.bitcast_convert_type(jnp.asarray(EVERY), jnp.bfloat16)
    bits = np.random.default_rng(0).permutation(EVERY)
    same = np.asarray(stochastic_bfloat16(_exactly(numbers), bits)).view(np.uint16)
    nan = np.asarray(jnp.isnan(numbers))
    np.testing.assert_array_equal(same[~nan], EVERY[~nan])
    assert np.isnan(same[nan].view(jnp.bfloat16).astype(np.float32)).all()


def _exactly(numbers):
    """float32 with the bits of bfloat16 `numbers`, subnormal ones too."""
    wide = jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(wide, jnp.float32)


def test_nan_in_the_lower_bits_alone_stays_nan():
    x = jax.lax.bitcast_convert_type(jnp.array([0x7F800001, 0xFF800001], jnp.uint32), jnp.float32)
    assert jnp.isnan(stochastic_bfloat16(x, jnp.array([0, 65535], jnp.uint16))).all()


def test_the_mean_over_many_draws_is_within_its_error():
    """The share p of numbers rounded up has the standard deviation (p (1 - p) / n)^½."""
    n, p = 2**18, 0.3
    exact = {"a": jnp.full(n, 1 + p * ULP), "b": jnp.full(n, -1 - p * ULP)}
    rounded = round_tree(exact, jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact), draw(7))
    error = 5 * (p * (1 - p) / n) ** 0.5 * ULP
    for name, sign in (("a", 1), ("b", -1)):
        mean = np.asarray(rounded[name], np.float64).mean()
        assert abs(sign * mean - (1 + p * ULP)) < error


@pytest.mark.parametrize(("stochastic", "expected"), [(True, 3e-4), (False, 0.0)])
def test_many_small_steps_add_up_only_with_stochastic_rounding(stochastic, expected):
    steps, n, size = 300, 2**15, 1e-6

    @jax.jit
    def walk(weights):
        def step(number, weights):
            place = jnp.stack([jnp.uint32(3), jnp.uint32(0), number.astype(jnp.uint32)])
            return round_tree(weights.astype(jnp.float32) + size, weights, place if stochastic else None)

        return jax.lax.fori_loop(0, steps, step, weights)

    moved = np.asarray(walk(jnp.ones(n, jnp.bfloat16)), np.float64).mean() - 1
    deviation = (steps * size * ULP / n) ** 0.5  # of the mean: each step moves by ULP, with p = size / ULP
    assert abs(moved - expected) <= 5 * deviation * stochastic


def test_the_bits_depend_on_seed_stream_step_and_place():
    exact = [jnp.full(64, 1 + ULP / 2)] * 2
    like = [jnp.ones(64, jnp.bfloat16)] * 2
    draws = [draw(), draw(seed=1), draw(stream=1), draw(step=1), draw(seed=2**32 - 1)]
    found = {np.asarray(leaf).tobytes() for each in draws for leaf in round_tree(exact, like, each)}
    assert len(found) == 2 * len(draws)
    again = round_tree(exact, like, draw())
    for one, other in zip(again, round_tree(exact, like, draw())):
        np.testing.assert_array_equal(one, other)


def test_the_bits_are_uniform_and_those_of_neighbours_and_steps_uncorrelated():
    """Over 2^18 elements: every byte as often as it should be, and correlations within their error."""
    shape = (512, 512)
    keys = [jax.random.fold_in(jax.random.key(seed), step) for seed in (0, 1) for step in range(3)]
    drawn = [np.asarray(random_bits(key, shape)).ravel() for key in keys]
    for bits in drawn:
        for byte in (bits >> 8, bits & 255):
            assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-6
        assert abs(np.corrcoef(bits[1:], bits[:-1])[0, 1]) < 5 / 2**9
        assert abs(np.corrcoef(bits[512:], bits[:-512])[0, 1]) < 5 / 2**9
    between = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(between).max() < 5 / 2**9
    each = np.unpackbits(np.stack(drawn).view(np.uint8), axis=1).mean()
    assert abs(each - 0.5) < 1e-3


def test_float32_is_not_rounded():
    exact = [jnp.float32([1e-45, 1 + 1e-7])]
    np.testing.assert_array_equal(round_tree(exact, exact, draw())[0], exact[0])
    nearest = round_tree(exact, [jnp.zeros(2, jnp.bfloat16)], None)[0]
    np.testing.assert_array_equal(nearest, exact[0].astype(jnp.bfloat16))
