"""Tokens chosen by covariance: literal values, ties, draws, and the order of rows."""

import numpy as np
import pytest

from quatrain.ops.covariance import tokens_between_covariances, tokens_of_highest_covariance

MASK = np.array([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
ADVANTAGES = np.where(MASK, [[1.0] * 4, [-1.0] * 4, [0.0] * 4], 0).astype(np.float32)
LOGPROBS = np.array([[9, -1, -5, 9], [9, -2, 9, -4], [9, 9, 9, 9]], np.float32)
# The mean advantage is 0, the mean log-probability -3: the covariances are 2, -2, -1 and 1.


def highest(
    logprobs=LOGPROBS, advantages=ADVANTAGES, mask=MASK, *, ratio, old=None, column="high_covariance"
):
    columns = tokens_of_highest_covariance(
        *(logprobs, advantages, mask, np.random.default_rng(0)),
        old_logprobs=logprobs if old is None else old,
        kl_cov_ratio=ratio,
    )
    assert list(columns) == ["high_covariance", "moved"]
    assert {values.dtype for values in columns.values()} == {np.dtype(np.float32)}
    return columns[column]


def between(lower, upper, ratio, seed=0, logprobs=LOGPROBS, advantages=ADVANTAGES, mask=MASK):
    bounds = {"clip_cov_ratio": ratio, "clip_cov_lb": lower, "clip_cov_ub": upper}
    rng = np.random.default_rng(seed)
    columns = tokens_between_covariances(logprobs, advantages, mask, rng, **bounds)
    return columns["high_covariance"]


@pytest.mark.parametrize(
    ("ratio", "first", "second"),
    [
        (0.0, [0, 1, 0, 0], [0, 0, 0, 0]),  # at least one
        (0.49, [0, 1, 0, 0], [0, 0, 0, 0]),
        (0.5, [0, 1, 0, 0], [0, 0, 0, 1]),
        (1.0, [0, 1, 0, 0], [0, 0, 0, 1]),  # the others have a negative covariance
    ],
)
def test_the_highest_covariances(ratio, first, second):
    assert highest(ratio=ratio).tolist() == [first, second, [0] * 4]


def test_tokens_of_equal_covariance_are_taken_together():
    logprobs = np.where(LOGPROBS == -5, -3, LOGPROBS)  # mean -2.5: covariances 1.5, -0.5, -0.5, 1.5
    assert highest(logprobs, ratio=0.25).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1], [0] * 4]
    assert not highest(advantages=np.ones_like(ADVANTAGES), ratio=1.0).any()


def test_a_chosen_token_has_moved_by_more_than_rounding():
    old = LOGPROBS - np.array([[0, 0.5, 3, 0], [0, 1, 0, 1e-4], [0] * 4], np.float32)
    assert highest(ratio=1.0, old=old, column="moved").tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4]
    assert highest(ratio=0.25, old=-old, column="moved").tolist() == [[0, -1, 0, 0], [0] * 4, [0] * 4]
    assert not highest(ratio=1.0, column="moved").any()  # the first optimizer step of a training step


def test_tokens_between_covariances():
    assert between(1, 2, 1.0).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1], [0] * 4]
    assert between(1, 1.9, 1.0).tolist() == [[0] * 4, [0, 0, 0, 1], [0] * 4]
    assert not between(2.1, 5, 1.0).any()
    draws = [between(1, 2, 0.25, seed) for seed in range(20)]
    assert {draw.sum() for draw in draws} == {1}
    assert len({tuple(np.flatnonzero(draw)) for draw in draws}) == 2
    np.testing.assert_array_equal(between(1, 2, 0.25, 3), draws[3])


def test_the_order_of_rows_chooses_the_same_tokens():
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random((12, 5)) < 0.7
        advantages = np.repeat(rng.normal(size=(12, 1)), 5, axis=1).astype(np.float32)
        logprobs = -rng.exponential(size=mask.shape).astype(np.float32)
        logprobs[6:], advantages[6:], mask[6:] = logprobs[:6], advantages[:6], mask[:6]
        order = rng.permutation(12)
        batch = (logprobs, advantages, mask)
        permuted = tuple(values[order] for values in batch)
        ratio = rng.random()
        np.testing.assert_array_equal(highest(*permuted, ratio=ratio), highest(*batch, ratio=ratio)[order])
        bounds = (0.0, 0.5, 1.0, 0)
        np.testing.assert_array_equal(between(*bounds, *permuted), between(*bounds, *batch)[order])


def test_without_tokens_nothing_is_chosen():
    nothing = np.zeros_like(MASK)
    assert not highest(mask=nothing, ratio=0.5).any()
    assert not between(-9, 9, 0.5, mask=nothing).any()


@pytest.mark.parametrize("ratio", [-0.1, 1.1, np.nan])
def test_ratios_are_fractions(ratio):
    with pytest.raises(ValueError, match=r"kl_cov_ratio must be in \[0, 1\], got .* update.loss_args"):
        highest(ratio=ratio)
    with pytest.raises(ValueError, match=r"clip_cov_ratio must be in \[0, 1\]"):
        between(0, 1, ratio)
