import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION
from jax.sharding import PartitionSpec

from quatrain.backend import CPU
from quatrain.models.blocks.layer_run import LayerRun
from quatrain.models.blocks.mlp import Dense
from quatrain.models.layers import (
    BRANCHES_PER_GROUP,
    Norm,
    attention_mask,
    linear,
    matmul_transposed,
    product_in,
    rms_norm,
    softcap,
)
from quatrain.models.rope import Rope, rope_angles, rotate
from quatrain.parallel.compilations import jit_for_backend


def test_rms_norm():
    x = jnp.array([3.0, 4.0])  # rms = sqrt(12.5)
    np.testing.assert_allclose(
        rms_norm(x, jnp.array([1.0, 2.0]), 0.0), [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=1e-6
    )
    np.testing.assert_allclose(
        rms_norm(x, jnp.zeros(2), 0.0, offset=1.0), np.array([3, 4]) / 12.5**0.5, rtol=1e-6
    )
    assert rms_norm(x.astype(jnp.bfloat16), jnp.ones(2), 1e-6).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, CPU.few_rows, CPU.few_rows + 1])
def test_products_of_few_rows_have_the_weights_first_on_a_cpu(rows):
    """The compiled program's, too: XLA would turn a product round whose result is transposed."""
    x, weight = (jax.random.normal(jax.random.key(0), shape) for shape in ((rows, 32), (48, 32)))
    program = jit_for_backend(partial(matmul_transposed, few_rows=CPU.few_rows))(CPU)
    np.testing.assert_allclose(program(x, weight), np.asarray(x) @ np.asarray(weight).T, rtol=1e-4, atol=1e-5)
    in_bfloat16 = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), jnp.float32
    assert matmul_transposed(*in_bfloat16, few_rows=CPU.few_rows).dtype == jnp.float32
    hlo = program.lower(x, weight).compile(DEFAULT_FUSION).as_text()
    products = re.findall(r" = f32\[([\d,]+)\]\S* dot\(", hlo)
    assert products == [f"48,{rows}" if rows <= CPU.few_rows else f"{rows},48"]


def test_products_in_bfloat16_have_float32_sums_and_gradients():
    """The result and both gradients are those of rounded factors, multiplied exactly."""
    rng = np.random.default_rng(4)
    x, weight, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 5), (7, 5), (6, 7)))
    y, pull = jax.vjp(lambda x, weight: product_in(x, weight, jnp.bfloat16), x, weight)
    products = [each for each in jax.make_jaxpr(pull)(dy).eqns if each.primitive.name == "dot_general"]
    assert [each.params["preferred_element_type"] for each in products] == [jnp.float32] * 2
    x, weight, dy_rounded = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, weight, dy))
    expected = (x @ weight.T, dy_rounded @ weight, dy_rounded.T @ x)
    for ours, theirs in zip((y, *pull(dy)), expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_linear_casts_weights_and_adds_a_bias_where_there_is_one():
    layer = {"o": jnp.array([[1.0, 3.0], [2.0, 4.0]]), "o_bias": jnp.array([10.0, 20.0])}
    np.testing.assert_array_equal(linear(jnp.array([1.0, 1.0]), layer, "o"), [14.0, 26.0])
    np.testing.assert_array_equal(linear(jnp.array([1.0, 1.0]), {"o": layer["o"]}, "o"), [4.0, 6.0])
    assert linear(jnp.ones(2, jnp.bfloat16), layer, "o").dtype == jnp.bfloat16


def test_linear_of_several_outputs():
    weight = jnp.arange(12.0).reshape(2, 3, 2)
    x = jnp.array([[[1.0, 10.0]], [[0.0, 1.0]]])
    expected = [[[[10, 32, 54], [76, 98, 120]]], [[[1, 3, 5], [7, 9, 11]]]]
    np.testing.assert_array_equal(linear(x, {"qkv": weight}, "qkv"), expected)


def test_rope_turns_pairs_by_position_times_frequency():
    rope = Rope(100.0)
    np.testing.assert_allclose(rope.frequencies(4), [1.0, 0.1], rtol=1e-6)
    x = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    turned = rotate(x, rope_angles(jnp.array([[2]]), rope, 4))[0, 0, 0]
    np.testing.assert_allclose(turned, [math.cos(2), -math.sin(0.2), math.sin(2), math.cos(0.2)], rtol=1e-6)


def test_rope_scores_depend_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    rope = Rope(10_000.0)

    def score(i, j):
        return float(
            jnp.sum(
                rotate(q, rope_angles(jnp.array([[i]]), rope, 8))
                * rotate(k, rope_angles(jnp.array([[j]]), rope, 8))
            )
        )

    assert abs(score(3, 1) - score(40, 38)) < 1e-4
    assert abs(score(3, 1) - score(4, 1)) > 1e-3


def test_rope_scaling():
    plain = Rope(10_000.0).frequencies(8)
    np.testing.assert_allclose(Rope(10_000.0, "linear", 4.0).frequencies(8), plain / 4, rtol=1e-6)
    # Wavelengths 6.28, 62.8, 628, 6283 tokens; long ones (> 400) slow down, short ones (< 50) do not, and
    # that of 62.8 keeps (400 / 62.8 - 1) / (8 - 1) = 0.7666 of its own speed.
    scaled = Rope(10_000.0, "llama3", 10.0, 1.0, 8.0, 400).frequencies(8)
    keep = (400 * 0.1 / (2 * math.pi) - 1) / 7
    np.testing.assert_allclose(scaled, [1.0, 0.1 * (keep + (1 - keep) / 10), 0.001, 0.0001], rtol=1e-5)


def test_attention_mask():
    positions = jnp.array([[0, 1, 2, 0, 1, 0]])
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    full = attention_mask(positions, positions, segments, segments, None)[0]
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(full, expected)
    windowed = attention_mask(positions, positions, segments, segments, 2)[0]
    expected[2][0] = 0
    np.testing.assert_array_equal(windowed, expected)


def test_a_branch_sees_its_group_prefix_and_the_common_prefix():
    first, second = BRANCHES_PER_GROUP, 2 * BRANCHES_PER_GROUP
    branches = jnp.array([[0, first, first + 1, first + 2, second, second + 1]])
    positions, segments = jnp.array([[0, 1, 2, 2, 1, 2]]), jnp.ones((1, 6), jnp.int32)
    seen = attention_mask(positions, positions, segments, segments, None, (branches, branches))
    assert seen[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_softcap():
    np.testing.assert_allclose(
        softcap(jnp.array([0.0, 2.0, 1e6]), 2.0), [0.0, 2 * math.tanh(1), 2.0], rtol=1e-6
    )
    np.testing.assert_array_equal(softcap(jnp.array([7.0]), None), [7.0])


def test_mlp():
    layer = {"gate_up": jnp.array([[[2.0]], [[3.0]]]), "down": jnp.array([[5.0]])}
    silu = 2 / (1 + math.exp(-2))
    run = LayerRun(layer, dict.fromkeys(layer, PartitionSpec()), jnp.float32, Norm(), False, 0, 1.0)
    y = Dense(1).run(jnp.ones((1, 1, 1)), lambda x, layer: x, run)
    np.testing.assert_allclose(y, [[[silu * 3 * 5]]], rtol=1e-6)
