"""Sequences with pictures: packed, shared and padded, and whatever of the tower is trained, one gradient."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from picture_tables import picture_table, pixels_of, store_of, whole_params, without_tower
from towers import seeing

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.models.decoder import forward, logits
from quatrain.models.params import VISION
from quatrain.models.rope_positions import rope_positions
from quatrain.models.tower import features, patches_of
from quatrain.models.vision import PROJECTOR, Inserts
from quatrain.parallel.mesh import one_device
from quatrain.types.pictures import Pictures
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVE = PolicyObjective.of(UpdateConfig(entropy_coef=0.2), on_policy=True)
ALONE = MicroBatchPlanner(rows=1)
PACKED = MicroBatchPlanner(max_tokens=64, num_shards=2, share_prompts=True)
CUTS = (
    MicroBatchPlanner(rows=5),
    MicroBatchPlanner(max_tokens=48),
    MicroBatchPlanner(max_tokens=200, share_prompts=True),
    MicroBatchPlanner(max_tokens=96, num_shards=2, share_prompts=True, line_tokens=48),
)


@cache
def _arch(model_type, trained):
    return seeing(model_type, trained)


@cache
def _whole(model_type):
    return whole_params(_arch(model_type, "all"))


@cache
def _table(model_type):
    return picture_table(_arch(model_type, "all"))


@cache
def _gradient(model_type, trained, planner, remat="none"):
    """The gradient of what is trained, and its metrics."""
    arch, whole = _arch(model_type, trained), _whole(model_type)
    policy, planner = PolicySpec(arch, remat=remat), replace(planner, store=store_of(arch, whole))
    batches = (b for _, b in micro_batches(_table(model_type), planner, one_device(), policy.forms))
    grads, stats, _ = sum_gradients(without_tower(whole, arch), batches, model=policy, objective=OBJECTIVE)
    return jax.tree.map(lambda x: np.asarray(x)[0], grads), jax.tree.map(np.asarray, stats)


def _assert_same(got, expected, bound=1e-5):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=bound, atol=bound * largest)


def _assert_cut(model_type, trained, planner, remat="none"):
    got, expected = _gradient(model_type, trained, planner, remat), _gradient(model_type, trained, ALONE)
    _assert_same(got[0], expected[0])
    for name, value in expected[1]["sum"].items():
        np.testing.assert_allclose(got[1]["sum"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_no_cut_changes_the_gradient_of_a_trained_tower():
    _assert_cut("qwen3_vl", "all", PACKED)
    tower = _gradient("qwen3_vl", "all", PACKED)[0][VISION]
    for name in ("patch", "merger", "deepstack", "blocks"):
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(tower[name])) > 1e-4, name


def test_what_is_trained_of_the_tower_changes_no_gradient():
    """Those of the text model and of the projector are the same."""
    everything = _gradient("qwen3_vl", "all", PACKED)[0]
    text = {name: leaf for name, leaf in everything.items() if name != VISION}
    _assert_same(_gradient("qwen3_vl", "frozen", PACKED)[0], text)
    projector = {name: leaf for name, leaf in everything[VISION].items() if name in PROJECTOR}
    _assert_same(_gradient("qwen3_vl", "projector", PACKED)[0], {**text, VISION: projector})


@pytest.mark.slow
@pytest.mark.parametrize("planner", [PACKED, *CUTS])
@pytest.mark.parametrize("trained", ["frozen", "projector", "all"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "smolvlm"])
def test_no_cut_changes_the_gradient_of_any_family(model_type, trained, planner):
    _assert_cut(model_type, trained, planner)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_what_is_recomputed_changes_no_gradient(remat):
    _assert_cut("qwen3_vl", "all", PACKED, remat)


def test_log_probabilities_are_those_of_each_sequence_by_hand():
    """Rotary positions, features and the places of both, of what `fill` makes."""
    arch, whole, table = _arch("qwen3_vl", "frozen"), _whole("qwen3_vl"), _table("qwen3_vl")
    policy, planner = PolicySpec(arch), replace(PACKED, store=store_of(arch, whole))
    found = predict_tokens(without_tower(whole, arch), table, model=policy, planner=planner)
    pixels = pixels_of(arch)
    for row in (0, 2, 4, 6, 8, 10):
        length = int(table.lengths[row])
        seen = Pictures(table.pictures.ids[row, :length], table.pictures.by_id)
        turns, _ = rope_positions(arch.vision, seen, length)
        inserts = None
        if seen.used:
            patches = patches_of(arch.vision, [pixels(x) for x in seen.used], [x.size for x in seen.used])
            made = features(whole[VISION], arch.vision, jax.tree.map(lambda x: x[None], patches))
            starts, at = {}, np.full((1, length), -1, np.int32)
            for each in seen.used:
                starts[each.id] = sum(arch.vision.num_placeholders(x.size) for x in seen.used[: len(starts)])
            counts = dict.fromkeys(starts, 0)
            for place in np.flatnonzero(seen.ids):
                number = int(seen.ids[place])
                size = arch.vision.num_placeholders(table.pictures.by_id[number].size)
                at[0, place] = starts[number] + counts[number] % size
                counts[number] += 1
            inserts = Inserts(made, jnp.asarray(at))
        ids = jnp.asarray(table.input_ids[row : row + 1, :length])
        places = jnp.arange(length)[None]
        hidden = forward(
            without_tower(whole, arch),
            arch,
            ids,
            places,
            jnp.ones_like(ids),
            turns=jnp.asarray(turns)[:, None],
            inserts=inserts,
        ).hidden
        log_p = jax.nn.log_softmax(logits(whole, arch, hidden[0]), axis=-1)
        for place in np.flatnonzero(table.completion_mask[row]):
            expected = log_p[place - 1, table.input_ids[row, place]]
            np.testing.assert_allclose(found[row, place], expected, atol=2e-5)
