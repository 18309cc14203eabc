"""The table of examples, and what is logged of it."""

import numpy as np
import pytest

from quatrain.types.batches import Example
from quatrain.update.supervised import example_table, log_likelihoods


@pytest.fixture
def table():
    """One example with one trained token, and one with three of four."""
    rows = [([5, 6], [False, True], "a"), ([7, 8, 9, 10], [False, True, True, True], "b")]
    return example_table([Example(np.array(ids, np.int32), np.array(on), source) for ids, on, source in rows])


def test_every_trained_token_of_a_batch_has_the_same_weight(table):
    """Else a short answer counts as much as a long one."""
    assert table.columns["weights"][table.completion_mask].tolist() == [0.25] * 4
    assert table.completion_mask.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert table.columns["weights"].sum() == 1


def test_losses_are_means_over_the_tokens_of_each_source(table):
    predicted = np.where(table.completion_mask, [[-2.0], [-1.0]], 0).astype(np.float32)
    found = {name: metric.result() for name, metric in log_likelihoods(predicted, table).items()}
    assert found == {"sft/loss": 1.25, "sft/loss/a": 2.0, "sft/loss/b": 1.0}
