import numpy as np
import pytest

from quatrain.update.batcher import TokenTable, micro_batches, mini_batches


def _table() -> TokenTable:
    input_ids = np.array([[5, 6, 7, 0], [8, 9, 10, 11], [12, 13, 0, 0]], np.int32)
    attention = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
    completion = np.array([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    advantages = np.where(completion, [[1], [2], [3]], 0).astype(np.float32)
    return TokenTable(input_ids, attention, completion, {"advantages": advantages})


def test_scored_tokens_are_listed_with_the_column_that_predicts_them():
    (rows, batch), (last_rows, last) = micro_batches(_table(), 2)
    assert rows.tolist() == [0, 1]
    assert last_rows.tolist() == [2]
    assert batch.input_ids.shape == last.input_ids.shape == (2, 16)
    assert batch.mask.sum(axis=1).tolist() == [1, 2]
    assert batch.targets[0, :1].tolist() == [7]
    assert batch.predictors[0, :1].tolist() == [1]
    assert batch.targets[1, :2].tolist() == [9, 11]  # the token between them is not the policy's
    assert batch.predictors[1, :2].tolist() == [0, 2]
    assert batch.advantages[1, :2].tolist() == [2.0, 2.0]
    assert batch.segment_ids[0].tolist() == [1, 1, 1] + [0] * 13
    assert not last.mask.any()
    assert not last.segment_ids[1].any()  # the last micro-batch is padded with an empty row


def test_absent_columns_are_zero():
    _, batch = next(micro_batches(_table(), 3))
    assert not np.asarray(batch.old_logprobs).any()


@pytest.mark.parametrize(("groups", "size", "sizes"), [(60, 40, [30, 30]), (7, 3, [3, 2, 2]), (4, 9, [4])])
def test_mini_batches_are_whole_groups_of_equal_size(groups, size, sizes):
    group_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(groups) * 3, 5))
    parts = mini_batches(group_ids, size, np.random.default_rng(1))
    assert [len(np.unique(group_ids[part])) for part in parts] == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(groups * 5))
    assert sum(len(np.unique(group_ids[part])) for part in parts) == groups  # no group is in two parts


def test_mini_batch_order_depends_on_the_generator():
    group_ids = np.repeat(np.arange(20), 2)
    first, second, again = (
        [p.tolist() for p in mini_batches(group_ids, 5, np.random.default_rng(s))] for s in (1, 2, 1)
    )
    assert first == again
    assert first != second
