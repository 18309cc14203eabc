"""Which pictures a buffer has, and what models without them say."""

from dataclasses import replace

import numpy as np
import pytest
from picture_tables import SMALL, WIDE, picture, picture_table, store_of, whole_params
from towers import PLACEHOLDER, seeing

from quatrain.forward.micro_batch import fill
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.table import TokenTable
from quatrain.parallel.mesh import one_device
from quatrain.types.pictures import Pictures, stacked


@pytest.fixture(scope="module")
def arch():
    return seeing("qwen3_vl", "all")


@pytest.fixture(scope="module")
def whole(arch):
    return whole_params(arch)


@pytest.fixture
def store(arch, whole):
    return store_of(arch, whole)


def _filled(table, planner, store):
    return [fill(cut, table, one_device(), store=store) for cut in planner.plans(table)]


def test_a_picture_stands_once_in_a_buffer_whoever_shares_it(arch, store):
    table = picture_table(arch)
    [batch] = _filled(table, MicroBatchPlanner(max_tokens=500, share_prompts=True), store)
    # Of four different pictures, of which one is in two groups, and all in two sequences.
    assert store.stats.tower_pictures == 4
    assert batch.patches.pixels.shape == (1, 4 * 24, arch.vision.patch_values)
    assert (store.stats.patches, store.stats.padding) == (96, 96 - 16 - 24 - 36 - 16)
    assert batch.rows.max() == 4 + 6 + 9 + 4 - 1
    apart = _filled(table, MicroBatchPlanner(rows=1), store)
    alone = [len(Pictures(ids, table.pictures.by_id).used) for ids in table.pictures.ids]
    assert store.stats.tower_pictures == 4 + sum(alone)
    # A micro-batch without a picture is as of a text model.
    assert [x.rows is None and x.patches is None and x.turns is None for x in apart] == [not n for n in alone]


def test_rows_of_patches_of_one_micro_batch_are_of_one_width(arch, store):
    table = picture_table(arch)
    [batch] = _filled(table, MicroBatchPlanner(rows=12), store)
    assert batch.patches.pixels.shape[:2] == (12, 48)  # 24 + 16 patches
    assert not batch.patches.pixels[:2].any(), "the first group has no picture"
    assert not batch.patches.layout["grids"][:2].any()
    assert (np.asarray(batch.rows[:2]) == -1).all()
    assert batch.patches.rows.shape == (12, 12)


def test_prefixes_end_where_pictures_differ(arch, store):
    """The two last groups have the same ids, and pictures of one size."""
    table = picture_table(arch)
    rows = np.flatnonzero(table.group_ids >= 4)
    same = replace(table.take(rows), group_ids=np.zeros(4, np.int64))
    assert (same.input_ids[:, :8] == same.input_ids[0, :8]).all()
    [cut] = MicroBatchPlanner(max_tokens=500, share_prompts=True).plans(same)
    assert {segment.num_shared for buffer in cut.buffers for segment in buffer} == {4}
    # Of an episode that begins anew with another picture, the prompt of the others does not shrink.
    anew = replace(same, episode_ids=np.arange(4))
    [cut] = MicroBatchPlanner(max_tokens=500, share_prompts=True).plans(anew)
    assert [(segment.rows.tolist(), segment.num_shared) for (*each,) in cut.buffers for segment in each] == [
        ([0, 1], 11),
        ([2, 3], 11),
    ]


def test_turns_of_a_text_beside_pictures_count_up(arch, store):
    table = picture_table(arch)
    [batch] = _filled(table, MicroBatchPlanner(rows=12), store)
    length = int(table.lengths[0])
    np.testing.assert_array_equal(batch.turns[0, :, :length], np.tile(np.arange(length), (3, 1)))
    # 3 words, a picture of 2 x 2 cells, and what follows at 3 + 2.
    assert batch.turns[2, 0, :9].tolist() == [0, 1, 2, 3, 3, 3, 3, 5, 6]
    assert batch.turns[2, 1, :9].tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 6]
    assert batch.turns[2, 2, :9].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]


def test_models_that_see_nothing_refuse_pictures(arch):
    with pytest.raises(ValueError, match="sequences with pictures must be read by models with a tower"):
        _filled(picture_table(arch), MicroBatchPlanner(rows=1), None)


def test_a_picture_has_as_many_placeholders_as_features(store):
    """A teacher with other sizes of pictures would read other features than the policy."""
    ids = np.full((1, 7), PLACEHOLDER, np.int32)
    seen = stacked([Pictures.of([None, *[picture(0, WIDE)] * 4, None, None])], 7)
    table = TokenTable(ids, ids > 0, np.arange(7)[None] == 6, {}, pictures=seen)
    with pytest.raises(ValueError, match="24 x 16 pixels with 4 placeholders it makes 6"):
        _filled(table, MicroBatchPlanner(rows=1), store)
    right = stacked([Pictures.of([None, *[picture(0, SMALL)] * 4, None, None])], 7)
    assert len(_filled(replace(table, pictures=right), MicroBatchPlanner(rows=1), store)) == 1
