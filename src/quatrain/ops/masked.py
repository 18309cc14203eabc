"""Means and standard deviations over an array, or over parts of it: the rows of one group at a time.

Data flow: stands under `advantages/` and `covariance.py`. Host-side numpy, float64.
"""

import numpy as np


def segment_means(values: np.ndarray, segments: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """[B] float64: for each row, the (weighted) mean over the rows of its segment.

    Exact where all values of a segment are equal: their mean is that value to the last bit, so that
    `values - segment_means(...)` is 0 and not the rounding error of a sum. `values` [B] are finite;
    `segments` [B] are integers from 0 in any order; `weights` [B] are whole numbers >= 0, or None for 1. The
    mean of a segment whose weights are all 0 is its smallest value.
    """
    values = values.astype(np.float64)
    if not values.size:
        return values
    weights = np.ones(len(values)) if weights is None else weights
    counts = np.bincount(segments, weights)
    least = np.full(len(counts), np.inf)
    np.minimum.at(least, segments, values)
    excess = np.bincount(segments, weights * (values - least[segments]))
    return (least + excess / np.maximum(counts, 1))[segments]


def segment_stds(values: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """For each row, the population standard deviation over the rows of its segment; as `segment_means`.

    Exactly 0 where all values of a segment are equal.
    """
    return np.sqrt(segment_means((values - segment_means(values, segments)) ** 2, segments))


def segment_sizes(segments: np.ndarray) -> np.ndarray:
    """For each row, the number of rows of its segment: [B] int64."""
    return np.bincount(segments)[segments] if segments.size else np.zeros(0, np.int64)


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Mean and population standard deviation of all values, the same to the last bit in any order of them.

    The sums run in the order of the values. The standard deviation of equal values is exactly 0. Takes finite
    numbers of any shape; (0.0, 0.0) where there are none.
    """
    ranked = np.sort(values, axis=None)
    if not ranked.size:
        return 0.0, 0.0
    everyone = np.zeros(ranked.size, np.int64)
    return float(segment_means(ranked, everyone)[0]), float(segment_stds(ranked, everyone)[0])
