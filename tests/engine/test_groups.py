"""Prompts packed into rows for the prefill."""

from dataclasses import replace

import numpy as np
import pytest

from quatrain.engine.groups import (
    Admitted,
    Continuation,
    Group,
    UsualSampling,
    calls,
    extension,
    pack_prompts,
)
from quatrain.models.prefix_tree import NO_FORMS, RowForms
from quatrain.ops import packing
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling


@pytest.fixture(autouse=True)
def _short_common_prefixes(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_COMMON_PREFIX", 2)


def _pack(*prompts):
    return [
        Admitted(Group.of(Prompt(i, np.array(ids, np.int32), "", {}), 7, (0,), 1), i, i)
        for i, ids in enumerate(prompts)
    ]


def test_prompts_stand_one_behind_the_other():
    """Nothing is in common, or too little: a token, or all of the shorter one but its last."""
    packed = pack_prompts([_pack([1, 2, 3], [1, 3]), _pack([5, 6]), []], 2, 4, NO_FORMS, UsualSampling())
    rows = packed.input_ids.reshape(3, -1)
    assert rows[:, :6].tolist() == [[1, 2, 3, 1, 3, 0], [5, 6, 0, 0, 0, 0], [0] * 6]
    assert packed.segment_ids.reshape(3, -1)[0, :6].tolist() == [1, 1, 1, 2, 2, 0]
    assert packed.positions.reshape(3, -1)[0, :6].tolist() == [0, 1, 2, 0, 1, 0]
    assert not packed.branch_ids.any()
    assert packed.num_common.tolist() == [0, 0, 0]
    assert packed.layout is None
    assert packed.starts.tolist() == [0, 3, 0, 0, 0, 0]
    assert packed.lengths.tolist() == [3, 2, 2, 1, 1, 1]
    assert packed.prefix_slots.tolist() == [0, 1, 0, 4, 4, 4]


def test_what_they_begin_with_stands_once_in_each_row():
    alike, others = _pack([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 6]), _pack([7, 8, 9], [7, 8, 9])
    packed = pack_prompts([alike, others], 1, 4, RowForms(0), UsualSampling())
    assert packed.num_common.tolist() == [2, 2]  # the last token of the shortest is its own
    assert packed.input_ids.reshape(2, -1)[:, :9].tolist() == [
        [1, 2, 3, 3, 4, 5, 3, 6, 0],
        [7, 8, 9, 9, 0, 0, 0, 0, 0],
    ]
    assert packed.positions.reshape(2, -1)[0, :9].tolist() == [0, 1, 2, 2, 3, 4, 2, 3, 0]
    assert packed.segment_ids.reshape(2, -1)[0, :9].tolist() == [1] * 8 + [0]
    assert packed.branch_ids.reshape(2, -1)[0, :9].tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 0]
    assert packed.starts.reshape(2, -1)[:, :3].tolist() == [[2, 3, 6], [2, 3, 0]]
    assert packed.lengths.reshape(2, -1)[:, :3].tolist() == [[3, 5, 4], [3, 3, 1]]
    assert packed.layout.blocks[0][0, :3, :5].tolist() == [[0, 1, 2, 0, 0], [0, 1, 3, 4, 5], [0, 1, 6, 7, 0]]


def test_rows_of_prompts_have_two_widths_for_each_power_of_two():
    widths = {
        pack_prompts([_pack([1] * n)], 1, 1, NO_FORMS, UsualSampling()).input_ids.size for n in range(1, 513)
    }
    assert sorted(widths) == [32, 48, 64, 96, 128, 192, 256, 384, 512]


def test_what_a_turn_draws_from_follows_from_its_place_in_the_sequence():
    """Sequence ids are those of a prompt's samples alone; offsets go on after what came before.

    What is kept of a context is not computed again.
    """
    groups = [Group.of(Prompt(i, np.array([1, 2, 3], np.int32), "", {}), 7, (0, 2), 9) for i in (4, 5)]
    assert [group.sequence_ids(3) for group in groups] == [[12, 14], [15, 17]]
    packed = pack_prompts(
        [[Admitted(group, i, i) for i, group in enumerate(groups)]], 3, 4, NO_FORMS, UsualSampling()
    )
    assert packed.sequence_ids.tolist() == [[12, 14, 0], [15, 17, 0]]
    assert (packed.steps.tolist(), packed.offsets.tolist()) == ([7, 7], [0, 0])
    own = PerRequestSampling(Sampling(1, 30), seed=2, step=8, sequence_id=14, offset=5)
    alone = Group.alone(replace(groups[0].prompt, group_id=0), own)
    assert (alone.position, alone.sequence_ids(1), alone.limit) == (5, [14], 30)
    extended = extension([[Continuation(alone, 0, 1, 1)]], 1, 16, 4, 4, UsualSampling())
    assert (extended.offsets[0], extended.steps[0], extended.sequence_ids[0].tolist()) == (5, 8, [14])
    first = extended.continued
    assert (first.input_ids[0, :3].tolist(), first.starts[0], first.counts[0]) == ([2, 3, 0], 1, 2)
    assert first.prefix_slots.tolist() == [1, 4, 4, 4]  # out of range: padding


def test_a_long_continuation_is_computed_in_parts_that_leave_nothing_out():
    group = Group.of(Prompt(0, np.arange(1, 1301, dtype=np.int32), "", {}), 7, (0,), 9)
    item, seen = Continuation(group, 0, 0, 0), []
    for batch, width, most in calls([[item]]):
        part = extension(batch, 1, width, most, 1, UsualSampling()).continued
        assert part.starts[0] == len(seen)
        seen += part.input_ids[0, : part.counts[0]].tolist()
    assert seen == list(range(1, 1301))


@pytest.mark.parametrize(
    ("left", "sizes"),
    [
        ([300], [(512, 1)]),
        ([1] * 7, [(16, 7)]),
        ([60, 1, 61], [(64, 3)]),
        ([20, 1500, 100], [(1024, 1), (512, 1), (128, 2)]),
        ([65] * 9, [(128, 8), (128, 1)]),
    ],
)
def test_a_single_request_after_a_kept_context_is_not_padded_to_several(left, sizes):
    """Its 300 tokens were computed in three calls of four rows of 128, and a sibling's single one as 128."""
    prompt = Prompt(0, np.arange(2000, dtype=np.int32), "")
    items = [Continuation(Group.of(prompt, 0, (0,), 1), 0, 0, 2000 - count) for count in left]
    found = [(width, len(batch)) for [batch], width, most in calls([items], varying=True, kept=True)]
    assert found == sizes
