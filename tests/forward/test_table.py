"""Tables whose targets are not their tokens, and tables that ask for one number of each sequence."""

import numpy as np
import pytest

from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.table import TokenTable
from quatrain.parallel.mesh import one_device


def test_a_sequence_is_scored_behind_its_last_token_that_is_not_padding():
    table = TokenTable.scored_at_end([[5, 6, 0], [7], [0, 0], [8, 0, 9]], pad_token_id=0)
    assert table.input_ids.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0], [8, 0, 9, 0]]
    assert table.lengths.tolist() == [3, 1, 2, 3]
    assert [np.flatnonzero(row).tolist() for row in table.completion_mask] == [[2], [1], [1], [3]]
    last = TokenTable.scored_at_end([[5, 6, 0], [7]]).completion_mask
    assert [np.flatnonzero(row).tolist() for row in last] == [[3], [1]]  # without a padding token
    assert TokenTable.scored_at_end([]).input_ids.shape == (0, 1)


def _targets() -> TokenTable:
    """Targets that are not the tokens, one of each sequence behind its last."""
    ids = np.array([[1, 2, 3, 0, 0], [1, 2, 3, 4, 0]], np.int32)
    scored = np.array([[0, 1, 0, 1, 0], [0, 0, 1, 1, 1]], bool)
    targets = np.array([[0, 21, 0, 23, 0], [0, 0, 32, 33, 34]], np.int32)
    rows = {"margin": np.array([0.5, 1.5])}
    return TokenTable(ids, ids > 0, scored, {}, np.array([3, 3]), targets=targets, of_rows=rows)


@pytest.mark.parametrize("planner", [MicroBatchPlanner(rows=2), MicroBatchPlanner(max_tokens=7)])
def test_targets_are_predicted_from_the_tokens_before_their_places(planner):
    ((rows, batch),) = micro_batches(_targets(), planner, one_device())
    mask, ids = np.asarray(batch.mask), np.asarray(batch.input_ids)
    buffers, places = np.nonzero(mask)
    predictors = np.asarray(batch.predictors)[buffers, places]
    assert rows.tolist() == [0, 1]
    assert np.asarray(batch.targets)[mask].tolist() == [21, 23, 32, 33, 34]
    assert ids[buffers, predictors].tolist() == [1, 3, 2, 3, 4]
    assert np.asarray(batch.positions)[buffers, predictors].tolist() == [0, 2, 1, 2, 3]


def test_rows_that_are_taken_have_their_targets_and_numbers():
    taken = _targets().take(np.array([1]))
    assert taken.targets.tolist() == [[0, 0, 32, 33, 34]]
    assert taken.of_rows["margin"].tolist() == [1.5]
    assert taken.with_columns(weights=np.ones((1, 5), np.float32)).targets is taken.targets
    assert _targets().weighted("token_mean", 4).of_rows["margin"].tolist() == [0.5, 1.5]


def test_a_list_of_scored_tokens_holds_the_places_behind_equal_sequences():
    """Of six sequences of 3 tokens that are equal, all shared, a buffer of 3 would have to list six."""
    ids = np.full((6, 3), 7, np.int32)
    table = TokenTable.scored_at_end(ids.tolist())
    table = TokenTable(**vars(table) | {"group_ids": np.zeros(6, int)})
    planner = MicroBatchPlanner(max_tokens=8, share_prompts=True)
    ((rows, batch),) = micro_batches(table, planner, one_device())
    assert sorted(rows.tolist()) == list(range(6))
    assert batch.input_ids.tolist() == [[7] * 8]  # two that are shared, and the last token of each
    assert batch.positions.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2]]
    assert batch.predictors[0, :6].tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("place", [0, 3])
def test_no_target_stands_before_or_after_what_tokens_predict(place):
    ids = np.array([[1, 2, 0, 0]], np.int32)
    scored = np.arange(4)[None] == place
    with pytest.raises(AssertionError, match="from the tokens of their sequence"):
        next(micro_batches(TokenTable(ids, ids > 0, scored, {}), MicroBatchPlanner(rows=1), one_device()))
