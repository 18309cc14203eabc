"""Advantage estimators: literal values by group, abstentions, groups of one, and the order of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    ADVANTAGE_SCALES,
    check_scale,
    dr_grpo,
    grpo,
    reinforce,
    rloo,
)

NAN = np.nan
# Groups 7: 1, 2, 6 (mean 3, std sqrt(14/3)); -4: 0, 2 (mean 1, std 1); 900: 5 alone.
REWARDS = np.array([1, 0, 2, 5, 6, 2], np.float32)
GROUPS = np.array([7, -4, 7, 900, 7, -4])
PAIRS = [(name, scale) for name, scales in ADVANTAGE_SCALES.items() for scale in scales]


def test_grpo_by_group():
    std = np.sqrt(14 / 3) + 1e-4
    expected = [-2 / std, -1 / 1.0001, -1 / std, 0, 3 / std, 1 / 1.0001]
    advantages = grpo(REWARDS, GROUPS)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert advantages.dtype == np.float32


def test_grpo_by_batch():
    std = np.std([1, 0, 2, 5, 6, 2]) + 1e-4
    np.testing.assert_allclose(
        grpo(REWARDS, GROUPS, "batch"), np.array([-2, -1, -1, 0, 3, 1]) / std, rtol=1e-6
    )


@pytest.mark.parametrize("advantages", [grpo(REWARDS, GROUPS, "none"), dr_grpo(REWARDS, GROUPS)])
def test_dr_grpo(advantages):
    np.testing.assert_array_equal(advantages, [-2, -1, -1, 0, 3, 1])


def test_rloo():
    # Group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; group -4: 0 - 2, 2 - 0.
    np.testing.assert_allclose(rloo(REWARDS, GROUPS), [-3, -2, -1.5, 0, 4.5, 2], rtol=1e-6)


def test_reinforce():
    np.testing.assert_array_equal(reinforce(REWARDS, GROUPS, "none"), REWARDS)
    std = np.std([1, 0, 2, 5, 6, 2]) + 1e-4
    expected = (np.array([1, 0, 2, 5, 6, 2]) - 16 / 6) / std
    np.testing.assert_allclose(reinforce(REWARDS, GROUPS), expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_an_abstained_row_is_as_if_it_were_not_there(name, scale):
    estimator = ADVANTAGE_ESTIMATORS[name]
    with_nan = estimator(
        np.insert(REWARDS, [0, 3, 6], NAN), np.insert(GROUPS, [0, 3, 6], [7, 900, 1234]), scale
    )
    assert with_nan[[0, 4, 8]].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(np.delete(with_nan, [0, 4, 8]), estimator(REWARDS, GROUPS, scale))


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_groups_of_one_learn_nothing(estimator):
    rewards, groups = np.array([3.0, -1.0, 2.0, NAN], np.float32), np.array([1, 2, 3, 3])
    assert estimator(rewards, groups).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("name", "scale"), [p for p in PAIRS if p != ("reinforce", "none")])
def test_equal_rewards_give_exactly_zero(name, scale):
    advantages = ADVANTAGE_ESTIMATORS[name](np.full(7, 0.1, np.float32), np.full(7, 3), scale)
    assert advantages.tolist() == [0] * 7


@pytest.mark.parametrize(("name", "scale"), PAIRS)
@given(data=st.data())
def test_order_of_rows_and_names_of_groups_change_nothing(name, scale, data):
    estimator = ADVANTAGE_ESTIMATORS[name]
    size = data.draw(st.integers(1, 12))
    reward = st.one_of(st.floats(-1e3, 1e3, width=32), st.just(NAN), st.sampled_from([0.0, 0.1, 1.0]))
    rewards = np.array(data.draw(st.lists(reward, min_size=size, max_size=size)), np.float32)
    groups = np.array(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    names = np.array(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=4, max_size=4, unique=True)))
    order = np.array(data.draw(st.permutations(range(size))))
    advantages = estimator(rewards, groups, scale)
    np.testing.assert_array_equal(estimator(rewards[order], names[groups][order], scale), advantages[order])
    assert np.isfinite(advantages).all()
    if name in ("grpo", "dr_grpo", "rloo"):
        for group in range(4):
            assert abs(advantages[groups == group].sum()) <= 1e-5 * np.abs(advantages).sum()


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_no_rows(name, scale):
    assert ADVANTAGE_ESTIMATORS[name](np.zeros(0, np.float32), np.zeros(0, np.int64), scale).shape == (0,)


@pytest.mark.parametrize(
    ("name", "scale"), [("rloo", "group"), ("dr_grpo", "batch"), ("reinforce", "group"), ("grpo", "std")]
)
def test_a_scale_that_does_not_go_with_the_estimator(name, scale):
    message = (
        rf"advantage.scale='{scale}' does not go with advantage.estimator='{name}': use .* or leave it null"
    )
    with pytest.raises(ValueError, match=message):
        check_scale(name, scale)
    with pytest.raises(ValueError, match=message):
        ADVANTAGE_ESTIMATORS[name](REWARDS, GROUPS, scale)


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"got shapes \(6,\) and \(5,\)"):
        grpo(REWARDS, GROUPS[:5])
