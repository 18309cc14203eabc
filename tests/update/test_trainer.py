import numpy as np

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
