"""Sequences with pictures: packed, shared and padded, and whatever of the tower is trained, one gradient."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from picture_tables import picture_table, store_of, whole_params, without_tower
from towers import seeing

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.models.decoder import forward, logits
from quatrain.models.params import VISION
from quatrain.models.rope_positions import rope_positions
from quatrain.models.vision import PROJECTOR, Inserts
from quatrain.parallel.mesh import one_device
from quatrain.types.pictures import Pictures
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVE = PolicyObjective.of(UpdateConfig(entropy_coef=0.2), on_policy=True)
ALONE = MicroBatchPlanner(rows=12)  # each sequence in a buffer of its own
PACKED = MicroBatchPlanner(max_tokens=64, num_shards=2, share_prompts=True)
CUTS = (
    MicroBatchPlanner(rows=1),
    MicroBatchPlanner(rows=5),
    MicroBatchPlanner(max_tokens=48),
    MicroBatchPlanner(max_tokens=200, share_prompts=True),
    MicroBatchPlanner(max_tokens=96, num_shards=2, share_prompts=True, line_tokens=48),
)


@cache
def _arch(model_type, trained):
    """Of this type; `small`: a Qwen3-VL of two layers and one block, with a level of features after it."""
    if model_type != "small":
        return seeing(model_type, trained)
    arch = seeing("qwen3_vl", trained)
    return replace(arch, layers=arch.layers[:2], vision=replace(arch.vision, depth=1, deepstack=(0,)))


@cache
def _whole(model_type):
    return whole_params(_arch(model_type, "all"))


@cache
def _table(model_type):
    return picture_table(_arch(model_type, "all"))


def _with_room(planner, longest):
    """The planner with packed rows that hold the longest sequence: SmolVLM cuts pictures into tiles."""
    sizes = {name: getattr(planner, name) for name in ("max_tokens", "line_tokens")}
    return replace(planner, **{name: size and max(size, longest) for name, size in sizes.items()})


@cache
def _gradient(model_type, trained, planner, remat="none"):
    """The gradient of what is trained, and its metrics."""
    arch, whole = _arch(model_type, trained), _whole(model_type)
    planner = _with_room(planner, int(_table(model_type).attention_mask.sum(axis=1).max()))
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
    # The sums of DeltaNet layers over a chunk round otherwise where a prefix is shared.
    _assert_same(got[0], expected[0], 3e-5 if model_type == "qwen3_5" else 1e-5)
    for name, value in expected[1]["sum"].items():
        np.testing.assert_allclose(got[1]["sum"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_no_cut_changes_the_gradient_of_a_trained_tower():
    _assert_cut("small", "all", PACKED)
    tower = _gradient("small", "all", PACKED)[0][VISION]
    for name in ("patch", "merger", "deepstack", "blocks"):
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(tower[name])) > 1e-4, name


def test_what_is_trained_of_the_tower_changes_no_gradient():
    """Those of the text model and of the projector are the same."""
    everything = _gradient("small", "all", PACKED)[0]
    text = {name: leaf for name, leaf in everything.items() if name != VISION}
    _assert_same(_gradient("small", "frozen", PACKED)[0], text)
    projector = {name: leaf for name, leaf in everything[VISION].items() if name in PROJECTOR}
    _assert_same(_gradient("small", "projector", PACKED)[0], {**text, VISION: projector})


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
    arch, whole, table = _arch("small", "frozen"), _whole("small"), _table("small")
    store = store_of(arch, whole)
    params, vision = without_tower(whole, arch), arch.vision
    planner = replace(PACKED, store=store)
    found = predict_tokens(params, table, model=PolicySpec(arch), planner=planner)
    shape = table.input_ids.shape
    turns, at = np.zeros((3, *shape), np.int32), np.full(shape, -1, np.int32)
    features = np.zeros((shape[0], 1 + vision.levels, 24, arch.hidden_size), np.float32)
    for row in range(len(table)):
        seen = Pictures(table.pictures.ids[row], table.pictures.by_id)
        turns[:, row], _ = rope_positions(vision, seen, shape[1])
        end, counts = 0, dict[int, int]()
        starts = dict[int, int]()
        for each, array in zip(seen.used, store.of(seen.used), strict=True):
            features[row, :, end : end + array.shape[1]] = array
            starts[each.id], end = end, end + array.shape[1]
        for place in np.flatnonzero(seen.ids):
            number = int(seen.ids[place])
            size = vision.num_placeholders(seen.by_id[number].size)
            at[row, place] = starts[number] + counts.get(number, 0) % size
            counts[number] = counts.get(number, 0) + 1

    @jax.jit
    def logprobs(ids, places, segments, turns, inserts):
        hidden = forward(params, arch, ids, places, segments, turns=turns, inserts=inserts).hidden
        scores = jax.nn.log_softmax(logits(params, arch, hidden), axis=-1)
        return jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]

    places = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    segments = table.attention_mask.astype(np.int32)
    expected = logprobs(table.input_ids, places, segments, turns, Inserts(features, at))
    scored = table.completion_mask[:, 1:]
    np.testing.assert_allclose(found[:, 1:][scored], np.asarray(expected)[scored], atol=2e-5)
