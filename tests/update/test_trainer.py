import numpy as np
import pytest

from quatrain.update.trainer import mini_batches_of_step


def test_places_in_the_schedule_follow_from_the_number_of_the_training_step():
    groups = np.repeat(np.arange(5), 2)
    settings = {"epochs": 2, "seed": 0, "resting_steps": 1}
    found = mini_batches_of_step(groups, 2, train_step=3, **settings)
    assert [place for place, _ in found] == [12, 13, 14, 15, 16, 17]  # 2 epochs of 3, after 2 such steps
    assert mini_batches_of_step(groups, 2, train_step=1, **settings)[0][0] == 0
    for first in (0, 3):
        rows = np.concatenate([rows for _, rows in found[first : first + 3]])
        np.testing.assert_array_equal(np.sort(rows), np.arange(10))


@pytest.mark.parametrize(("groups", "size", "sizes"), [(60, 40, [30, 30]), (7, 3, [3, 2, 2]), (4, 9, [4])])
def test_mini_batches_are_whole_groups_of_equal_size(groups, size, sizes):
    group_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(groups) * 3, 5))
    parts = [rows for _, rows in mini_batches_of_step(group_ids, size, epochs=1, seed=1, train_step=0)]
    assert [len(np.unique(group_ids[part])) for part in parts] == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(groups * 5))
    assert sum(len(np.unique(group_ids[part])) for part in parts) == groups  # no group is in two parts


def test_mini_batches_depend_on_seed_training_step_and_epoch():
    group_ids = np.repeat(np.arange(20), 2)
    first, other_seed, other_step, again = (
        [rows.tolist() for _, rows in mini_batches_of_step(group_ids, 5, epochs=2, seed=s, train_step=t)]
        for s, t in ((1, 0), (2, 0), (1, 1), (1, 0))
    )
    assert first == again
    assert first[:4] != first[4:]  # the two epochs
    assert first not in (other_seed, other_step)
