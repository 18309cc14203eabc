from dataclasses import replace

import jax
import numpy as np
import pytest
from architectures import of_golden
from towers import seeing

from quatrain.config.mesh import MeshShape
from quatrain.models.flops import forward_flops, linear_parameters, parameters_read, picture_flops
from quatrain.models.params import init_params, is_spec, num_params


def test_every_matrix_of_the_layers_is_counted(small_arch):
    layers = init_params(small_arch, jax.random.key(0))["layers"]
    assert linear_parameters(small_arch) == sum(w.size for w in jax.tree.leaves(layers) if w.ndim > 1)


def test_flops_are_those_the_compiler_counts(small_arch):
    """A product of matrices per token, two per key, one with the vocabulary per scored token."""
    matrices = forward_flops(small_arch, tokens=10, keys=0, scored=0)
    assert matrices == 20 * linear_parameters(small_arch)
    attention = forward_flops(small_arch, tokens=10, keys=6, scored=0) - matrices
    q, k = np.zeros((4, 10, 8)), np.zeros((4, 6, 8))
    products = jax.jit(lambda q, k: (q @ k.swapaxes(1, 2)) @ k).lower(q, k).compile().cost_analysis()
    assert attention == small_arch.num_layers * products["flops"]
    head = forward_flops(small_arch, tokens=0, keys=0, scored=3)
    assert head == 2 * 3 * small_arch.hidden_size * small_arch.vocab_size


def test_a_decode_step_reads_the_experts_that_its_tokens_choose(small_arch):
    assert parameters_read(small_arch, 1) == num_params(small_arch)
    arch = of_golden("qwen3_moe")
    layers = init_params(arch, jax.random.key(0))["layers"]
    experts = sum(w.size for layer in layers for name, w in layer.items() if name.startswith("experts_"))
    others = num_params(arch) - experts
    mlp = next(kind.mlp for kind in arch.layers if hasattr(kind.mlp, "top_k"))
    assert (mlp.num, mlp.top_k) == (8, 3)
    assert parameters_read(arch, 1) == pytest.approx(others + experts * 3 / 8)
    rng, draws = np.random.default_rng(0), 4000
    chosen = [len({*np.concatenate([rng.permutation(8)[:3] for _ in range(4)])}) for _ in range(draws)]
    assert parameters_read(arch, 4) == pytest.approx(others + experts * np.mean(chosen) / 8, rel=0.01)
    assert parameters_read(arch, 1000) == pytest.approx(num_params(arch))
    own = parameters_read(arch, 2, MeshShape(1, 1, 2, 1, 2))  # 2 tokens of each of two shards
    assert own * 2 == pytest.approx(others + (parameters_read(arch, 4) - others) / 2)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_a_tower_multiplies_patches_by_blocks_and_features_by_projectors(kind):
    vision, size = seeing(kind).vision, (64, 48)
    specs, m, w = vision.params(), vision.merge, vision.block.size
    (grid,) = {*vision.grids(size)}
    grids, patches = len(vision.grids(size)), vision.num_patches(size)

    def matrices(*parts):
        leaves = jax.tree.leaves([specs[part] for part in parts if part in specs], is_leaf=is_spec)
        return sum(np.prod(spec.shape) for spec in leaves if len(spec.shape) > 1)

    products = patches * matrices("patch", "blocks") + patches // m**2 * matrices("merger", "deepstack")
    rows, columns = np.mgrid[: grid.rows, : grid.columns].reshape(2, -1) // m
    seen = grid.rows**2 * grid.columns**2 * vision.depth
    if vision.window:  # ragged: 6 x 8 features in windows of 4 x 4
        numbers = rows // vision.window * 1000 + columns // vision.window
        seen = len(vision.whole) * seen // vision.depth
        seen += (vision.depth - len(vision.whole)) * int((numbers[:, None] == numbers).sum())
    assert picture_flops(vision, size) == 2 * products + 4 * w * grids * seen


def test_a_decode_step_reads_no_tower():
    arch = seeing("qwen3_vl").with_tower
    assert parameters_read(arch, 1) == num_params(replace(arch, vision=None)) < num_params(arch)
