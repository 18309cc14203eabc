"""Means and standard deviations over parts of an array: the rows of one group at a time.

Data flow: stands under `ops/advantages.py`. Host-side numpy, float64.
"""

from __future__ import annotations

import numpy as np


def segment_means(values: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """For each row, the mean over the rows of its segment.

    Exact where all values of a segment are equal: their mean is that value to the last bit, so that
    `values - segment_means(...)` is 0 and not the rounding error of a sum.

    Args:
        values: [B] finite numbers.
        segments: [B] integers in [0, number of segments), in any order and number of rows.

    Returns:
        [B] float64.
    """
    values = values.astype(np.float64)
    if not values.size:
        return values
    counts = np.bincount(segments)
    least = np.full(len(counts), np.inf)
    np.minimum.at(least, segments, values)
    excess = np.bincount(segments, values - least[segments])
    return (least + excess / np.maximum(counts, 1))[segments]


def segment_stds(values: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """For each row, the population standard deviation over the rows of its segment; as `segment_means`.

    Exactly 0 where all values of a segment are equal.
    """
    return np.sqrt(segment_means((values - segment_means(values, segments)) ** 2, segments))


def segment_sizes(segments: np.ndarray) -> np.ndarray:
    """For each row, the number of rows of its segment: [B] int64."""
    return np.bincount(segments)[segments] if segments.size else np.zeros(0, np.int64)
