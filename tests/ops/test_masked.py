"""Statistics by segment, against numbers worked out by hand."""

import numpy as np

from quatrain.ops.masked import mean_and_std, segment_means, segment_sizes, segment_stds

VALUES = np.array([1.0, 10.0, 3.0, 10.0, 5.0, -2.0])
SEGMENTS = np.array([0, 1, 0, 1, 0, 3])  # unsorted, unequal, and none in 2


def test_statistics_by_segment():
    np.testing.assert_array_equal(segment_means(VALUES, SEGMENTS), [3, 10, 3, 10, 3, -2])
    np.testing.assert_array_equal(segment_sizes(SEGMENTS), [3, 2, 3, 2, 3, 1])
    np.testing.assert_allclose(
        segment_stds(VALUES, SEGMENTS), [np.sqrt(8 / 3), 0, np.sqrt(8 / 3), 0, np.sqrt(8 / 3), 0]
    )


def test_weighted_means_by_segment():
    weights = np.array([1, 2, 3, 0, 0, 0])
    np.testing.assert_array_equal(segment_means(VALUES, SEGMENTS, weights), [2.5, 10, 2.5, 10, 2.5, -2])


def test_mean_and_std_of_everything_in_any_order():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 20)) * 10.0 ** rng.integers(-8, 8, (50, 20))
    expected = mean_and_std(values)
    np.testing.assert_allclose(expected, (values.mean(), values.std()), rtol=1e-9)
    assert mean_and_std(rng.permutation(values.reshape(-1))) == expected
    assert mean_and_std(np.full((3, 2), 0.1)) == (0.1, 0.0)
    assert mean_and_std(np.zeros((0, 3))) == (0.0, 0.0)


def test_equal_values_leave_no_rounding_error():
    values = np.full(7, 0.1)
    assert (segment_means(values, np.zeros(7, int)) == 0.1).all()
    assert not segment_stds(values, np.zeros(7, int)).any()


def test_no_rows():
    empty, none = np.zeros(0), np.zeros(0, np.int64)
    assert (
        segment_means(empty, none).shape
        == segment_stds(empty, none).shape
        == segment_sizes(none).shape
        == (0,)
    )
