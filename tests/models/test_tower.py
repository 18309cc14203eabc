"""The tower against transformers (V1, V9), and what does not change its features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import probes
from towers import (
    CASES,
    SIZES,
    feature_gradients,
    logit_gradients,
    picture,
    read_seeing,
    rows_of,
    seeing,
    seen_logits,
)

from quatrain.models.families.multimodal import text_tensors
from quatrain.models.params import leaf_at, tensor_names
from quatrain.models.tower import features, patches_of

QUICK = ("smolvlm", "qwen3_vl", "qwen2_5_vl")
"""Of the others, Qwen3.5 has the tower of Qwen3-VL, and Idefics3 that of SmolVLM."""
each_case = pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)


@pytest.fixture(scope="module", params=QUICK)
def quick(request):
    """A golden file, its model, and the features of its pictures, which are several in one row."""
    golden = read_seeing(request.param)
    arch, params = golden.model()
    patches, count = rows_of(arch.vision)
    run = jax.jit(lambda patches: features(params["vision"], arch.vision, patches))
    return golden, arch, run, np.asarray(run(patches)[0, :, :count])


def test_features_of_several_pictures_are_those_of_torch(quick):
    golden, arch, _, found = quick
    assert golden.features.shape[0] == 1 + arch.vision.levels
    for ours, theirs in zip(found, golden.features, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


def test_a_picture_has_the_same_features_beside_others_and_in_a_row_of_its_own(quick):
    # Catches attention across pictures, and layouts that depend on what stands before a picture.
    _, arch, run, found = quick
    vision, patches, start = arch.vision, rows_of(arch.vision)[0], 0
    for number, size in list(enumerate(SIZES))[:3]:
        count = vision.num_placeholders(size)
        if number:
            alone = patches_of(vision, [picture(vision, number, size)[1]], [size])
            # As long as the row of all: the same program, and more padding.
            same = jax.tree.map(
                lambda x, y: np.pad(x, [(0, y.shape[1] - len(x)), *[(0, 0)] * (x.ndim - 1)]), alone, patches
            )
            ours = run(jax.tree.map(lambda x: jnp.asarray(x)[None], same))[0, :, :count]
            beside = found[:, start : start + count]
            np.testing.assert_allclose(ours, beside, atol=2e-6 * np.abs(beside).max())
        start += count


def assert_gradients(ours, expected):
    """`ours` have the norms of `expected` and their products with random directions."""
    found, whole = probes(ours), np.linalg.norm(expected[:, 0])
    # Biases of keys without rotary embeddings have no gradient: there the whole counts.
    scale = np.where(expected[:, :1] > 1e-9 * whole, expected[:, :1], whole)
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-4)


@pytest.mark.parametrize(
    "case", [case if case == "qwen2_5_vl" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_gradients_of_the_tower_are_those_of_torch(case):
    golden = read_seeing(case)
    assert_gradients(feature_gradients(golden), golden.of_features)


@pytest.mark.slow
@each_case
def test_gradients_of_all_tensors_of_a_text_with_pictures_are_those_of_torch(case):
    golden = read_seeing(case)
    assert_gradients(logit_gradients(golden), golden.of_logits)


@pytest.mark.parametrize(
    "case", [case if case == "qwen3_vl" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_of_a_text_with_pictures_are_those_of_torch(case):
    golden = read_seeing(case)
    arch, params = golden.model()
    ours = jax.jit(lambda params: seen_logits(arch, params, golden))(params)
    np.testing.assert_allclose(ours, golden.logits, atol=1e-4 * np.abs(golden.logits).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_recomputing_blocks_changes_no_gradient(case):
    golden = read_seeing(case)
    arch, params = golden.model()
    patches, _ = rows_of(arch.vision)

    def gradient(remat):
        return jax.jit(jax.grad(lambda tower: features(tower, arch.vision, patches, remat=remat).sum()))

    for plain, again in zip(
        *(jax.tree.leaves(gradient(x)(params["vision"])) for x in (False, True)), strict=True
    ):
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-5 * np.abs(plain).max())


def test_the_tensors_of_a_tower_are_cut_and_joined_without_loss():
    # Export writes what loading has read: of fused and separate tensors, convolutions and vectors.
    golden = read_seeing("smolvlm")
    arch, params = golden.model()
    weights, (ours, _) = golden.weights(), text_tensors(golden.shapes, tower=True)
    for name in tensor_names(arch):
        again = name.of(np.asarray(leaf_at(params, name.path)))
        np.testing.assert_array_equal(again, weights[ours[name.name]], err_msg=name.name)


def test_pixels_of_another_size_are_refused():
    vision = seeing("qwen3_vl").vision
    _, patches = picture(vision, 0, (40, 40))
    with pytest.raises(
        ValueError, match=r"pixels of a picture of \(40, 41\) must be \(100, 96\); got \(99, 96\)"
    ):
        patches_of(vision, [patches[1:]], [(40, 41)])
