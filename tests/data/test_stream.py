import numpy as np
import pytest

from quatrain.data.stream import RowStream

MIXTURES = [(1, 1), (3, 1), (7, 5), (29, 13), (1, 1, 1), (5, 3, 1), (30, 1, 1, 1), (11, 7, 5, 3, 2)]


def sources(weights, count, seed=0, sizes=None, **options):
    stream = RowStream(sizes or [7] * len(weights), weights, seed=seed, **options)
    return np.array([stream.source(at) for at in range(count)])


@pytest.mark.parametrize("weights", MIXTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_source_has_its_share_to_less_than_one(weights, seed):
    total = sum(weights)
    drawn = sources(weights, 3 * total, seed)
    for source, weight in enumerate(weights):
        counts = np.concatenate([[0], np.cumsum(drawn == source)])
        parts = counts * total - np.arange(3 * total + 1) * weight  # of whole numbers: exact
        assert abs(parts).max() < total, "among the first n rows, for every n"
        assert not parts[::total].any(), "exact after each sum of the weights"
        widest = parts.max() - parts.min()  # over all windows
        assert widest < (total if len(weights) == 2 else 2 * total)


def test_the_seed_decides_which_source_is_first():
    firsts = {tuple(sources((1, 1, 1), 3, seed)) for seed in range(20)}
    assert len(firsts) > 1
    assert all(sorted(first) == [0, 1, 2] for first in firsts)
    assert {tuple(sources((1, 1, 1), 3, seed, shuffle=False)) for seed in range(20)} == {(0, 1, 2)}


def test_each_source_has_epochs_of_its_own():
    """Every row of a source once in each of its epochs, in another order, however large the others are."""
    stream = RowStream([64, 256], (2, 1), seed=3)
    rows = [stream[at] for at in range(6 * 128)]
    small, large = [row for row in rows if row < 64], [row for row in rows if row >= 64]
    epochs = [tuple(small[at : at + 64]) for at in range(0, 512, 64)]
    assert [tuple(sorted(epoch)) for epoch in epochs] == [tuple(range(64))] * 8
    assert len(set(epochs)) == 8
    assert sorted(large) == list(range(64, 320))
    assert [stream.source(at) for at in range(768)] == [int(row >= 64) for row in rows]


def test_sources_of_one_size_are_shuffled_apart():
    stream = RowStream([64, 64], (1, 1), seed=0)
    rows = [stream[at] for at in range(256)]
    first, second = ([row % 64 for row in rows if row // 64 == source] for source in (0, 1))
    assert sorted(first[:64]) == sorted(second[:64]) == list(range(64))
    assert first[:64] != second[:64]
    assert first[64:] != second[:64], "nor one epoch later"


def test_without_shuffle_each_source_is_in_its_order():
    stream = RowStream([3, 2], (2, 1), seed=5, shuffle=False)
    rows = [stream[at] for at in range(12)]
    assert [row for row in rows if row < 3] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [row for row in rows if row >= 3] == [3, 4, 3, 4]


def test_a_position_is_found_at_once_and_without_those_before():
    """What stands at position ten million is the same for a stream that has drawn nothing."""
    far = 10_000_000
    one = RowStream([64, 128, 256], (5, 3, 2), seed=1)
    tail = [one[at] for at in range(far, far + 20)]
    again = RowStream([64, 128, 256], (5, 3, 2), seed=1)
    for at in range(500):
        again[at]
    assert [again[at] for at in range(far, far + 20)] == tail
    # By hand: ten million places are a million patterns, of which each takes 5 rows of the first source.
    own = RowStream([64], seed=1)
    drawn = iter(range(5 * far // 10, 5 * far // 10 + 10))
    assert [row for row in tail if row < 64] == [own[next(drawn)] for row in tail if row < 64]


def test_without_weights_it_is_one_shuffled_stream():
    """The order of all runs before mixtures: that of grain's shuffle by the seed."""
    import grain

    rows = grain.MapDataset.range(64).shuffle(seed=4).repeat()
    stream = RowStream([50, 14], seed=2**32 + 4)
    assert [stream[at] for at in range(70)] == [int(rows[at]) for at in range(70)]
