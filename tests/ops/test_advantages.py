"""Advantage estimators: literal values, abstentions, groups of one, holes in the mask, the order of rows."""

import inspect
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.config.algorithms import ESTIMATORS
from quatrain.ops.advantages import ADVANTAGE_ESTIMATORS, TokenAdvantages
from quatrain.ops.advantages._shared import rewards_of_tokens
from quatrain.ops.advantages.dr_grpo import dr_grpo
from quatrain.ops.advantages.gae import gae
from quatrain.ops.advantages.gdpo import gdpo
from quatrain.ops.advantages.gpg import gpg
from quatrain.ops.advantages.grpo import grpo
from quatrain.ops.advantages.length_adaptive_gae import length_adaptive_gae
from quatrain.ops.advantages.maxrl import maxrl
from quatrain.ops.advantages.opo import opo
from quatrain.ops.advantages.passk import passk
from quatrain.ops.advantages.reinforce import reinforce
from quatrain.ops.advantages.reinforce_pp import reinforce_pp
from quatrain.ops.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from quatrain.ops.advantages.remax import remax
from quatrain.ops.advantages.rloo import rloo

NAN = np.nan
# Groups 7: 1, 2, 6 (mean 3, std sqrt(14/3)); -4: 0, 2 (mean 1, std 1); 900: 5 alone.
REWARDS = np.array([1, 0, 2, 5, 6, 2], np.float32)
GROUPS = np.array([7, -4, 7, 900, 7, -4])
# Completion tokens: 1, 3, 2, 4, 1, 1; some rows with holes.
MASK = np.array(
    [[0, 1, 0, 0, 0], [0, 1, 1, 0, 1], [0, 0, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]],
    bool,
)
TOKEN_REWARDS = np.where(MASK, np.arange(30).reshape(6, 5) % 7 - 3, 0).astype(np.float32)
VALUES = np.where(MASK, np.arange(30).reshape(6, 5) % 5 - 1, 0).astype(np.float32)
PAIRS = [(name, scale) for name, estimator in ESTIMATORS.items() for scale in estimator.scales]


def estimated(
    name,
    scale,
    rewards=REWARDS,
    group_ids=GROUPS,
    completion_mask=MASK,
    token_rewards=TOKEN_REWARDS,
    values=VALUES,
    baseline_rewards=None,
):
    """What the estimator `name` returns for those of the inputs that it names, as a tuple of arrays."""
    if baseline_rewards is None:  # one for each group, in the order of their numbers
        _, groups = np.unique(group_ids, return_inverse=True)
        baseline_rewards = np.zeros(len(rewards), np.float32)
        for group in groups:
            own = rewards[(groups == group) & ~np.isnan(rewards)]
            baseline_rewards[groups == group] = own.max(initial=-np.inf) if len(own) else 0
    function_rewards = np.stack([rewards, rewards**2], axis=1)
    function_weights = np.array([1.0, 0.5], np.float32)
    inputs = locals()
    function = ADVANTAGE_ESTIMATORS[name]
    returned = function(
        **{key: inputs[key] for key in inspect.signature(function).parameters if key in inputs}
    )
    arrays = tuple(returned) if isinstance(returned, TokenAdvantages) else (returned,)
    assert all(array.dtype == np.float32 for array in arrays)
    return arrays


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


def test_opo():
    # Group 7: the baseline is (1 x 1 + 2 x 2 + 1 x 6) / 4; group -4: (3 x 0 + 1 x 2) / 4.
    np.testing.assert_array_equal(opo(REWARDS, GROUPS, MASK), [-1.75, -0.5, -0.75, 0, 3.25, 1.5])


def test_gpg_makes_up_for_groups_without_signal():
    # Three groups, of which 7 and -4 have signal.
    np.testing.assert_array_equal(gpg(REWARDS, GROUPS), [-3, -1.5, -1.5, 0, 4.5, 1.5])
    assert gpg(np.ones(3, np.float32), np.arange(3)).tolist() == [0, 0, 0]


def test_passk_is_for_the_best_of_a_group():
    np.testing.assert_array_equal(passk(REWARDS, GROUPS, "none"), [0, 0, 0, 0, 4, 2])
    expected = [0, 0, 0, 0, 4 / (np.sqrt(14 / 3) + 1e-4), 2 / 1.0001]
    np.testing.assert_allclose(passk(REWARDS, GROUPS), expected, rtol=1e-6)
    assert passk(np.array([1, 1, 0], np.float32), np.zeros(3, int)).tolist() == [0, 0, 0]
    assert passk(np.array([1], np.float32), np.zeros(1, int)).tolist() == [0]


def test_maxrl_divides_by_the_mean_of_the_group():
    # Group 7: mean 3, group -4: mean 1.
    np.testing.assert_allclose(maxrl(REWARDS, GROUPS), [-2 / 3, -1, -1 / 3, 0, 1, 1], rtol=1e-6)
    assert maxrl(np.array([1, 0, 0, 0], np.float32), np.zeros(4, int)).tolist() == [3, -1, -1, -1]
    assert maxrl(np.zeros(4, np.float32), np.zeros(4, int)).tolist() == [0, 0, 0, 0]
    # A reward below 0 counts as 0, also where a group has nothing above it.
    rewards, groups = np.array([1, 0, 0, -1, -1, 0], np.float32), np.array([0, 0, 0, 0, 1, 1])
    assert maxrl(rewards, groups).tolist() == [3, -1, -1, -1, 0, 0]


def test_gdpo_normalises_each_function_in_its_group():
    """Two functions; the second abstains on the last row, and both on row 4, which has no reward."""
    groups = np.array([0, 0, 1, 1, 1, 1])
    values = np.array([[1, 4], [0, 2], [1, 0], [0, 0], [NAN, NAN], [0, NAN]], np.float32)
    weights = np.array([1.0, 0.5], np.float32)
    rewards = np.array([3, 1, 1, 0, NAN, 0], np.float32)
    std = (
        np.sqrt(2) / 3 + 1e-4
    )  # of 1, 0, 0, whose mean is 1/3; the second function's rewards there are equal
    first = 0.5 / 0.5001
    second = 0.5 * 1 / 1.0001
    sums = np.array([first + second, -first - second, 2 / 3 / std, -1 / 3 / std, 0, -1 / 3 / std])
    np.testing.assert_allclose(gdpo(rewards, groups, values, weights, "none"), sums, rtol=1e-6)
    whole = np.std(sums[[0, 1, 2, 3, 5]]) + 1e-4
    np.testing.assert_allclose(gdpo(rewards, groups, values, weights), sums / whole, rtol=1e-6)


def test_gdpo_tells_apart_what_has_one_sum():
    """Rewards (1, 0) and (0, 1) of one sum, whose functions differ in spread: GRPO gives both the same."""
    values = np.array([[1, 0], [0, 1], [0, 0], [0, 0]], np.float32)
    values[:, 1] += [0, 0, 0, 1]
    rewards, groups = values.sum(axis=1), np.zeros(4, int)
    advantages = gdpo(rewards, groups, values, np.ones(2, np.float32))
    assert grpo(rewards, groups)[0] == grpo(rewards, groups)[1]
    assert advantages[0] > advantages[1] > 0


HOLED = np.array([[0, 1, 0, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]], bool)
SPARSE = np.array([[7, 0.5, 9, 0, 0], [0, -0.5, 1, 8, 8], [0, 5, 5, 0, 0]], np.float32)
OUTCOMES = np.array([2, -1, NAN], np.float32)


def test_the_rewards_of_tokens():
    expected = [[0, 0.5, 0, 0, 2], [0, -0.5, 0, 0, 0], [0, 5, 5, 0, 0]]
    assert rewards_of_tokens(OUTCOMES, HOLED, SPARSE).tolist() == expected
    assert rewards_of_tokens(OUTCOMES, np.zeros_like(HOLED), SPARSE).tolist() == np.zeros((3, 5)).tolist()
    with pytest.raises(ValueError, match=r"got shapes \(3,\), \(3, 5\) and \(3, 4\)"):
        rewards_of_tokens(OUTCOMES, HOLED, SPARSE[:, :4])


def test_reinforce_pp():
    # Discounted by 0.5 over completion tokens: 2, 0 + 1, 0.5 + 0.5; and 0, -0.5.
    returns = reinforce_pp(OUTCOMES, HOLED, SPARSE, 0.5, "none")
    np.testing.assert_array_equal(returns, [[0, 1, 0, 1, 2], [0, -0.5, 0, 0, 0], [0] * 5])
    std = np.sqrt(0.76) + 1e-4  # of 1, 1, 2, -0.5, 0, whose mean is 0.7
    expected = np.array([[0, 0.3, 0, 0.3, 1.3], [0, -1.2, -0.7, 0, 0], [0] * 5]) / std
    np.testing.assert_allclose(reinforce_pp(OUTCOMES, HOLED, SPARSE, 0.5), expected, rtol=1e-6)


def test_reinforce_pp_baseline():
    rewards, groups = np.array([1, 3, 5, NAN], np.float32), np.array([4, 4, 9, 9])
    mask = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1]], bool)
    zeros = np.zeros(mask.shape, np.float32)
    raw = reinforce_pp_baseline(rewards, groups, mask, zeros, scale="none")
    np.testing.assert_array_equal(raw, [[0, -1, -1], [0, 1, 0], [0] * 3, [0] * 3])
    std = np.sqrt(8 / 9) + 1e-4  # of -1, -1, 1; the third row has nobody to be compared with
    expected = np.array([[0, -2 / 3, -2 / 3], [0, 4 / 3, 0], [0] * 3, [0] * 3]) / std
    np.testing.assert_allclose(reinforce_pp_baseline(rewards, groups, mask, zeros), expected, rtol=1e-6)


def test_gae():
    values = np.array([[0, 1, 7, 2, 0], [0, 0, 4, 7, 7], [0, 3, 6, 0, 0]], np.float32)
    # Deltas with gamma 0.5: 0.5 + 1 - 1, 0 + 0 - 2, 2 - 0; and -0.5 + 2 - 0, 0 - 4. Summed with 0.25.
    raw = gae(OUTCOMES, HOLED, SPARSE, values, 0.5, 0.5, "none")
    np.testing.assert_array_equal(raw.advantages, [[0, 0.125, 0, -1.5, 2], [0, 0.5, -4, 0, 0], [0] * 5])
    returns = [[0, 1.125, 0, 0.5, 2], [0, 0.5, 0, 0, 0], [0, 3, 6, 0, 0]]
    np.testing.assert_array_equal(raw.returns, returns)
    whitened = gae(OUTCOMES, HOLED, SPARSE, values, 0.5, 0.5)
    std = np.std([0.125, -1.5, 2, 0.5, -4]) + 1e-4  # their mean is -0.575
    expected = np.array([[0, 0.7, 0, -0.925, 2.575], [0, 1.075, -3.425, 0, 0], [0] * 5]) / std
    np.testing.assert_allclose(whitened.advantages, expected, rtol=1e-6)
    np.testing.assert_array_equal(whitened.returns, returns)


def test_gae_without_discount_is_the_return_minus_the_value():
    values = np.where(HOLED, 3, 0).astype(np.float32)
    advantages, returns = gae(OUTCOMES, HOLED, SPARSE, values, scale="none")
    np.testing.assert_array_equal(returns[:2], [[0, 2.5, 0, 2, 2], [0, -0.5, 0, 0, 0]])
    np.testing.assert_array_equal(advantages[:2], np.where(HOLED[:2], returns[:2] - 3, 0))


@pytest.mark.parametrize(("name", "bad"), [("gamma", 1.5), ("gamma", -0.1), ("lam", 2.0), ("lam", NAN)])
def test_discounts_are_fractions(name, bad):
    with pytest.raises(
        ValueError, match=rf"{name} must be in \[0, 1\], got {bad}; set advantage.args.{name}"
    ):
        gae(OUTCOMES, HOLED, SPARSE, SPARSE, **{name: bad})
    if name == "gamma":
        for estimator in (reinforce_pp, partial(length_adaptive_gae, values=SPARSE)):
            with pytest.raises(ValueError, match="gamma must be in"):
                estimator(OUTCOMES, HOLED, SPARSE, gamma=bad)


def test_length_adaptive_gae():
    """Lambda is 1 - 1 / (0.5 x 3) = 1/3 for the first row, and 0 for the second, of two tokens."""
    values = np.array([[0, 1, 7, 2, 0], [0, 0, 4, 7, 7], [0, 3, 6, 0, 0]], np.float32)
    # Deltas: 0.5 + 2 - 1, 0 + 0 - 2, 2 - 0; and -0.5 + 4 - 0, 0 - 4.
    raw = length_adaptive_gae(OUTCOMES, HOLED, SPARSE, values, alpha=0.5, scale="none")
    first = [0, 1.5 + (-2 + 2 / 3) / 3, 0, -2 + 2 / 3, 2]
    np.testing.assert_allclose(raw.advantages, [first, [0, 3.5, -4, 0, 0], [0] * 5], rtol=1e-6)
    # The returns are sums of rewards, whatever the critic said; without a reward what it said.
    returns = [[0, 2.5, 0, 2, 2], [0, -0.5, 0, 0, 0], [0, 3, 6, 0, 0]]
    np.testing.assert_array_equal(raw.returns, returns)
    whitened = length_adaptive_gae(OUTCOMES, HOLED, SPARSE, values, alpha=0.5)
    assert abs(whitened.advantages[HOLED][:5].mean()) < 1e-6
    for name, bad, rule in (("alpha", 0.0, "alpha must be above 0"), ("critic_lam", 2, "must be in")):
        with pytest.raises(ValueError, match=rf"{rule}.*got {bad}; set advantage.args.{name}"):
            length_adaptive_gae(OUTCOMES, HOLED, SPARSE, values, **{name: bad})


def test_remax_subtracts_the_reward_of_the_greedy_completion():
    rewards = np.array([1, 0, NAN, 5, 6], np.float32)
    baseline = np.array([0.5, 0.5, 1, NAN, 7], np.float32)
    got = remax(rewards, baseline)
    assert got.tolist() == [0.5, -0.5, 0, 0, -1]
    assert got.dtype == np.float32


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_an_abstained_row_is_as_if_it_were_not_there(name, scale):
    inserted = (0, 3, 6)
    with_nan = estimated(
        name,
        scale,
        np.insert(REWARDS, inserted, NAN),
        np.insert(GROUPS, inserted, [7, 900, 1234]),
        *(np.insert(columns, inserted, columns[3], axis=0) for columns in (MASK, TOKEN_REWARDS, VALUES)),
    )
    assert not with_nan[0][[0, 4, 8]].any()
    for got, expected in zip(with_nan, estimated(name, scale)):
        np.testing.assert_array_equal(np.delete(got, [0, 4, 8], axis=0), expected)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "passk", "maxrl", "gdpo", "reinforce_pp_baseline"]
)
def test_groups_of_one_learn_nothing(name):
    rewards, groups = np.array([3.0, -1.0, 2.0, NAN], np.float32), np.array([1, 2, 3, 3])
    rows = (MASK[:4], TOKEN_REWARDS[:4], VALUES[:4])
    (advantages,) = estimated(name, ESTIMATORS[name].scales[0], rewards, groups, *rows)
    assert not advantages.any()


UNCENTRED = [(name, "none") for name in ("reinforce", "reinforce_pp", "gae")]
# With a lambda below 1 the reward reaches the tokens at the end alone, unless the critic's values carry it.
UNCENTRED += [("length_adaptive_gae", scale) for scale in ("batch", "none")]


@pytest.mark.parametrize(("name", "scale"), [p for p in PAIRS if p not in UNCENTRED])
def test_equal_rewards_give_exactly_zero(name, scale):
    mask = np.tril(np.ones((7, 8), bool), 0)
    none = np.zeros(mask.shape, np.float32)
    advantages, *_ = estimated(name, scale, np.full(7, 0.1, np.float32), np.full(7, 3), mask, none, none)
    assert not advantages.any()


@pytest.mark.parametrize(("name", "scale"), PAIRS)
@settings(deadline=None, max_examples=20)  # for each of 23 estimators with a scale
@given(data=st.data())
def test_order_of_rows_and_names_of_groups_change_nothing(name, scale, data):
    size = data.draw(st.integers(1, 12))
    # Below 1e-20 advantages could be subnormal float32s, whose rounding is not relative to their size.
    number = st.floats(-1e3, 1e3, width=32).map(lambda x: x if abs(x) >= 1e-20 else 0.0)
    reward = st.one_of(number, st.just(NAN), st.sampled_from([0.0, 0.1, 1.0]))
    rewards = np.array(data.draw(st.lists(reward, min_size=size, max_size=size)), np.float32)
    groups = np.array(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    names = np.array(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=4, max_size=4, unique=True)))
    order = np.array(data.draw(st.permutations(range(size))))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    mask = rng.random((size, 4)) < 0.6
    columns = [mask, *(np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(2))]
    arrays = estimated(name, scale, rewards, groups, *columns)
    permuted = estimated(name, scale, rewards[order], names[groups][order], *(c[order] for c in columns))
    for got, expected in zip(permuted, arrays):
        np.testing.assert_array_equal(got, expected[order])
        assert np.isfinite(expected).all()
    if name in ("grpo", "dr_grpo", "rloo", "gpg"):
        for group in range(4):
            assert abs(arrays[0][groups == group].sum()) <= 1e-5 * np.abs(arrays[0]).sum()


@pytest.mark.parametrize(("name", "scale"), PAIRS)
@settings(deadline=None, max_examples=20)  # for each of 23 estimators with a scale
@given(data=st.data())
def test_positions_outside_the_mask_do_not_exist(name, scale, data):
    """Wherever columns that no completion has are put between the others, whatever stands in them."""
    places = data.draw(st.lists(st.integers(0, MASK.shape[1]), max_size=4))
    wide = [
        np.insert(columns, places, filling, axis=1)
        for columns, filling in ((MASK, False), (TOKEN_REWARDS, 100), (VALUES, -50))
    ]
    kept = np.insert(np.ones(MASK.shape[1], bool), places, False)
    for got, expected in zip(estimated(name, scale, REWARDS, GROUPS, *wide), estimated(name, scale)):
        if got.ndim == 2:
            assert not got[:, ~kept].any()
            got = got[:, kept]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_no_rows(name, scale):
    rows = (array[:0] for array in (REWARDS, GROUPS, MASK, TOKEN_REWARDS, VALUES))
    assert all(len(array) == 0 for array in estimated(name, scale, *rows))


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("rloo", "group"),
        ("dr_grpo", "batch"),
        ("reinforce", "group"),
        ("grpo", "std"),
        ("reinforce_pp", "group"),
        ("reinforce_pp_baseline", "group"),
        ("opo", "group"),
        ("gpg", "batch"),
        ("passk", "batch"),
        ("maxrl", "group"),
        ("gdpo", "group"),
        ("gae", "group"),
        ("length_adaptive_gae", "group"),
    ],
)
def test_a_scale_that_does_not_go_with_the_estimator(name, scale):
    message = (
        rf"advantage.scale='{scale}' does not go with advantage.estimator='{name}': use .* or leave it null"
    )
    with pytest.raises(ValueError, match=message):
        estimated(name, scale)


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"got shapes \(6,\) and \(5,\)"):
        grpo(REWARDS, GROUPS[:5])
