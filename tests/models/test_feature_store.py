"""What is computed of pictures, how often, and what is kept of it."""

import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from picture_tables import SIZES, SMALL, SQUARE, WIDE, picture, pixels_of, store_of, whole_params
from towers import seeing

from quatrain.models.feature_store import feature_rows, inserts_of
from quatrain.models.params import VISION
from quatrain.models.tower import features, patches_of
from quatrain.types.pictures import Pictures

PICTURES = [picture(number, size) for number, size in enumerate(SIZES)]
COUNTS = [4, 6, 9, 4]


@pytest.fixture(scope="module")
def frozen():
    return seeing("qwen3_vl", "frozen")


@pytest.fixture(scope="module")
def whole(frozen):
    return whole_params(frozen)


def _trained(frozen, trained):
    return replace(frozen, vision=replace(frozen.vision, trained=trained))


def _moved(whole, *path):
    """Parameters whose part of the tower at `path` is another."""
    (first, *_) = path
    part = jax.tree.map(lambda x: x + 0.5, whole[VISION][first])
    return {**whole, VISION: {**whole[VISION], first: part}}


def _same(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def test_features_are_those_of_the_tower(frozen, whole):
    """A padded patch, or a feature of another picture, would be among them."""
    store, pixels = store_of(frozen, whole), pixels_of(frozen)
    found = store.of(PICTURES)
    row = patches_of(frozen.vision, [*map(pixels, PICTURES)], SIZES)
    tower = jax.jit(lambda rows: features(whole[VISION], frozen.vision, rows)[0])
    together = tower(jax.tree.map(lambda x: x[None], row))
    for array, count, end in zip(found, COUNTS, np.cumsum(COUNTS), strict=True):
        assert array.shape == (3, count, 32)
        np.testing.assert_allclose(array, together[:, end - count : end], atol=1e-5)
    assert np.abs(found[0] - found[3]).max() > 0.1  # of one size, and not the same


def test_a_frozen_tower_runs_once_for_each_picture(frozen, whole):
    store = store_of(frozen, whole)
    first = store.of(PICTURES[:2] * 3)
    store.load(whole, 1)  # the weights of the policy after a step
    again = store.of_update(PICTURES[:3])
    assert _same(first[:2], again[:2])
    assert (store.stats.pictures, store.stats.tower_pictures) == (3, 3)
    # 16, 24 and 36 patches in rows of 16, 24 and 48.
    assert (store.stats.patches, store.stats.padding) == (88, 12)
    metrics = store.end_step()
    assert metrics["vision/pictures"].result() == metrics["vision/tower_pictures"].result() == 3
    assert metrics["vision/padding_fraction"].result() == 12 / 88
    assert metrics["vision/store_bytes"].result() == 3 * 32 * 4 * (4 + 6 + 9)
    assert metrics["time/vision_s"].result() > 0
    store.of(PICTURES[:1])
    metrics = store.end_step()
    assert metrics["vision/pictures"].result() == 1
    assert metrics["vision/tower_pictures"].result() == 0
    assert "vision/padding_fraction" not in metrics


def test_features_do_not_depend_on_what_is_computed_beside_them(frozen, whole):
    """To the bit: a resumed run begins with an empty store."""
    assert _same(store_of(frozen, whole).of(PICTURES)[3:], store_of(frozen, whole).of(PICTURES[3:]))


def test_a_projector_makes_features_anew_of_what_the_tower_left(frozen, whole):
    arch = _trained(frozen, "projector")
    store = store_of(arch, whole)
    expected = store_of(frozen, whole).of(PICTURES)
    for a, b in zip(store.of(PICTURES), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    states = store.of_update(PICTURES)
    assert states[0].shape == (3, 4, 4 * 32)
    moved = _moved(whole, "merger")
    store.load(moved, 1)
    changed = store.of(PICTURES)
    for a, b in zip(changed, store_of(frozen, moved).of(PICTURES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert np.abs(changed[0] - expected[0]).max() > 0.1
    assert _same(store.of_update(PICTURES), states)
    assert store.stats.tower_pictures == len(PICTURES)


def test_a_trained_tower_runs_once_for_each_version(frozen, whole):
    store = store_of(_trained(frozen, "all"), whole)
    before = store.of(PICTURES[:1])[0]
    store.load(whole, 0)
    assert store.of(PICTURES[:1])[0] is before
    store.load(_moved(whole, "blocks"), 1)
    assert np.abs(store.of(PICTURES[:1])[0] - before).max() > 1e-3
    store.load(_moved(whole, "blocks"), 1)  # other arrays, such as those of a restored checkpoint
    store.of(PICTURES[:1])
    assert store.stats.tower_pictures == 3
    assert store.version == 1
    np.testing.assert_array_equal(store.of_update(PICTURES[:1])[0], pixels_of(frozen)(PICTURES[0]))


def test_a_training_step_may_take_over_the_arrays_that_were_loaded(frozen, whole):
    given = jax.tree.map(jnp.copy, whole)
    store = store_of(_trained(frozen, "all"), whole)
    store.load(given, 1)
    held = weakref.ref(given[VISION]["patch"])
    jax.tree.map(lambda x: x.delete(), given)
    del given
    assert held() is None, "a copy that was made for the sampler would stay"
    assert _same(store.of(PICTURES[:1]), store_of(frozen, whole).of(PICTURES[:1]))


def test_what_two_steps_used_is_kept_and_older_features_are_dropped(frozen, whole):
    store = store_of(frozen, whole, num_bytes=1)
    store.follow_steps()
    store.of(PICTURES[:2])
    store.end_step()
    store.of(PICTURES[1:2])
    store.of(PICTURES[:1])
    assert store.stats.tower_pictures == 0, "the pictures of a batch are there for its update"
    store.end_step()
    store.of(PICTURES[:1])
    store.end_step()
    store.of(PICTURES[:1])
    assert store.stats.tower_pictures == 0
    store.of(PICTURES[1:2])
    assert store.stats.tower_pictures == 1
    roomy = store_of(frozen, whole, num_bytes=2**20)
    roomy.of(PICTURES[:1])
    for _ in range(4):
        roomy.end_step()
    roomy.of(PICTURES[:1])
    assert roomy.stats.tower_pictures == 0


def test_an_evaluation_keeps_no_pictures_for_two_steps(frozen, whole):
    """All pictures of an evaluation would stay in memory, above the limit; or those of the step would go."""
    store = store_of(frozen, whole, num_bytes=1)
    store.follow_steps()
    store.of(PICTURES[:1])
    with store.passing():
        for one in PICTURES:
            store.of([one])
    of_step = store.num_bytes
    store.of(PICTURES[:1])
    assert store.stats.tower_pictures == len(PICTURES), "the step's own is still there"
    store.of(PICTURES[1:2])
    assert (store.stats.tower_pictures, store.num_bytes > of_step) == (len(PICTURES) + 1, True)


def test_a_store_without_steps_keeps_what_has_room(frozen, whole):
    """That of a server, where nobody ends a step: it would keep the pictures of all requests."""
    store = store_of(frozen, whole, num_bytes=3 * 32 * 4 * (4 + 6))
    for one in PICTURES:
        store.of([one])
    assert store.num_bytes <= 3 * 32 * 4 * (4 + 6)
    store.of(PICTURES[-1:])
    assert store.stats.tower_pictures == len(PICTURES), "the last one is still there"


def test_the_steps_of_a_store_are_those_of_the_stores_beside_it(frozen, whole):
    """Those of a critic and of a teacher, whose steps nobody else ends: they would keep every picture."""
    store = store_of(frozen, whole, num_bytes=1)
    before = store.beside(frozen, store.mesh, lambda: whole[VISION], pixels_of(frozen))
    store.follow_steps()
    later = store.beside(frozen, store.mesh, lambda: whole[VISION], pixels_of(frozen))
    for beside in (before, later):
        beside.of(PICTURES[:1])
        beside.of(PICTURES[1:2])
        assert beside.num_bytes == 3 * 32 * 4 * (4 + 6), "both are of this step"
    for _ in range(2):
        store.end_step()
    assert before.num_bytes == later.num_bytes == 0


def test_inserts_have_each_picture_of_a_row_once(frozen, whole):
    """In the order in which they first stand; a picture may stand twice, and after another."""
    a, b = picture(0, SMALL), picture(1, WIDE)
    seen = [None, *[b] * 6, *[a] * 4, None, *[b] * 6]
    store = store_of(frozen, whole)
    found = inserts_of([None, Pictures.of(seen)], 20, store)
    assert (found.rows[0] == -1).all()
    assert found.rows[1].tolist() == [-1, *range(6), *range(6, 10), -1, *range(6), -1, -1]
    assert found.features.shape == (2, 3, 12, 32)
    of_b, of_a = store.of([b, a])
    np.testing.assert_array_equal(found.features[1, :, :10], np.concatenate([of_b, of_a], axis=1))
    assert not found.features[0].any()
    assert not found.features[1, :, 10:].any()
    # A part of a sequence that begins within the picture.
    part = Pictures.of(seen[4:8])
    numbers = np.array([3, 4, 5, 0], np.int32)
    assert inserts_of([part], 4, store, [numbers]).rows.tolist() == [[3, 4, 5, 6]]
    assert feature_rows(part, frozen.vision)[1].tolist() == [0, 1, 2, 6]


def test_a_model_that_reads_other_patches_is_refused(frozen, whole):
    store = store_of(frozen, whole)
    other = seeing("smolvlm", "frozen")
    with pytest.raises(
        ValueError, match="must read pictures alike; the policy has a tower of the kind qwen3_vl"
    ):
        store.beside(other, store.mesh, dict, pixels_of(other))
    beside = store.beside(frozen, store.mesh, lambda: whole[VISION], pixels_of(frozen))
    assert _same(beside.of([picture(2, SQUARE)]), store.of([picture(2, SQUARE)]))
