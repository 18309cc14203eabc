"""Prompts packed into rows for the prefill."""

import numpy as np
import pytest

from quatrain.engine.groups import Admitted, Group, UsualSampling, pack_prompts
from quatrain.models.prefix_tree import NO_FORMS, RowForms
from quatrain.ops import packing
from quatrain.types.batches import Prompt


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
