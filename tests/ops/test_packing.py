"""Packing: literal plans, the invariants of every plan, its targets on log-normal lengths, its errors."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.ops.packing import PackingCost, least_imbalance, plan_packing, width_ladder

LOG_NORMAL = [(n, d) for n in (120, 512, 2048, 8192) for d in (1, 2, 8)]


def log_normal(seed, n, longest=4096):
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(300), 0.8, n))
    return np.clip(lengths, 8, longest).astype(np.int64)


def listed(packing):
    return [[rows.tolist() for rows in micro_batch] for micro_batch in packing.bins]


@st.composite
def problems(draw):
    max_tokens = draw(st.sampled_from([1, 7, 100, 300, 512, 1000, 4096]))
    shapes = st.sampled_from([(1, max_tokens), (1, 1 + max_tokens // 8), (1 + max_tokens // 2, max_tokens)])
    low, high = draw(shapes)
    lengths = draw(st.lists(st.integers(low, min(high, max_tokens)), max_size=80))
    options = {
        "min_micro_batches": draw(st.integers(1, 5)),
        "micro_batches_multiple_of": draw(st.integers(1, 4)),
        "cost": PackingCost(draw(st.sampled_from([0.0, 1.0, 24576.0])), draw(st.sampled_from([0.5, 1.0]))),
    }
    return lengths, max_tokens, draw(st.integers(1, 9)), options


@given(problems())
@settings(deadline=None, max_examples=200)
def test_every_plan_holds_every_sequence_once_under_the_cap(problem):
    lengths, max_tokens, num_shards, options = problem
    packing = plan_packing(lengths, max_tokens, num_shards, **options)
    tokens = np.array([[sum(lengths[row] for row in rows) for rows in group] for group in packing.bins])
    ladder = width_ladder(max_tokens)

    assert sorted(packing.order) == list(range(len(lengths)))
    np.testing.assert_array_equal(
        packing.order, np.concatenate([rows for group in packing.bins for rows in group])
    )
    assert tokens.shape == (packing.num_micro_batches, num_shards)
    assert tokens.max() <= max_tokens
    assert all(
        width == min(w for w in ladder if w >= most) for width, most in zip(packing.widths, tokens.max(1))
    )
    assert packing.num_micro_batches >= options["min_micro_batches"]
    assert packing.num_micro_batches % options["micro_batches_multiple_of"] == 0
    np.testing.assert_array_equal(packing.tokens_per_shard, tokens.sum(0))


@given(problems())
@settings(deadline=None, max_examples=100)
def test_statistics_are_those_of_the_bins(problem):
    lengths, max_tokens, num_shards, options = problem
    packing = plan_packing(lengths, max_tokens, num_shards, **options)
    cost = options["cost"]
    costs = np.array(
        [[sum(cost.linear * lengths[r] + cost.quadratic * lengths[r] ** 2 for r in rows) for rows in group]
         for group in packing.bins]
    )  # fmt: skip
    ratios = [row.max() / row.mean() if row.any() else 1.0 for row in costs]
    np.testing.assert_allclose(packing.imbalance, max(ratios), rtol=1e-12)
    np.testing.assert_allclose(
        packing.padding_fraction, 1 - sum(lengths) / (sum(packing.widths) * num_shards), rtol=1e-12
    )
    assert packing.imbalance >= least_imbalance(np.array(lengths), max_tokens, num_shards, cost) - 1e-12
    totals = costs.sum(1)
    top = int(totals.argmax())
    assert (np.diff(totals[: top + 1]) >= 0).all()  # the least at both ends, the largest between
    assert (np.diff(totals[top:]) <= 0).all()


@given(problems())
@settings(deadline=None, max_examples=50)
def test_the_same_arguments_give_the_same_plan(problem):
    lengths, max_tokens, num_shards, options = problem
    first = plan_packing(lengths, max_tokens, num_shards, **options)
    plan_packing(lengths[::-1], max_tokens, num_shards, **options)
    again = plan_packing(np.array(lengths, np.int32), max_tokens, num_shards, **options)
    assert listed(first) == listed(again)
    assert (first.widths, first.imbalance) == (again.widths, again.imbalance)


@given(problems(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_the_sequences_does_not_change_the_lengths_of_the_bins(problem, random):
    lengths, max_tokens, num_shards, options = problem
    shuffled = random.sample(lengths, len(lengths))

    def contents(lengths):
        packing = plan_packing(lengths, max_tokens, num_shards, **options)
        return [[sorted(lengths[row] for row in rows) for rows in group] for group in packing.bins]

    assert contents(lengths) == contents(shuffled)


@given(problems())
@settings(deadline=None, max_examples=50)
def test_restore_order_is_the_inverse_of_order(problem):
    lengths, max_tokens, num_shards, options = problem
    packing = plan_packing(lengths, max_tokens, num_shards, **options)
    values = np.random.default_rng(0).normal(size=(len(lengths), 3))
    np.testing.assert_array_equal(packing.restore_order(values[packing.order]), values)
    names = [f"sequence {row}" for row in range(len(lengths))]
    assert packing.restore_order([names[row] for row in packing.order]) == names
    assert packing.restore_order(tuple(packing.order.tolist())) == list(range(len(lengths)))


@pytest.mark.parametrize(("n", "num_shards"), LOG_NORMAL)
def test_targets_on_log_normal_lengths(n, num_shards):
    for seed in range(1 if n == 8192 else 4):
        lengths = log_normal(seed, n)
        packing = plan_packing(lengths, 4096, num_shards)
        assert max(lengths[rows].sum() for group in packing.bins for rows in group) <= 4096
        if lengths.sum() >= 8 * 4096 * num_shards:
            assert packing.padding_fraction <= 0.05
        # Where one sequence of 4096 tokens stands beside shorter ones, no plan is within 1.05. At 99.85% of
        # the capacity (n = 512 on 8 shards, seed 1) it is 1.0506: computed tokens come before balance.
        forced = least_imbalance(lengths, 4096, num_shards)
        assert packing.imbalance <= max(1.051, 1.015 * forced)
        units = -(-4 * int(lengths.sum()) // (4096 * num_shards))  # quarters of a micro-batch, at the least
        assert sum(packing.widths) <= (units + 1) * 1024


def test_all_micro_batches_are_full_but_one():
    lengths = log_normal(1, 2048)
    packing = plan_packing(lengths, 4096, 8)
    assert packing.num_micro_batches == -(-lengths.sum() // (4096 * 8))
    assert sorted(packing.widths)[1:] == [4096] * (packing.num_micro_batches - 1)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_shards", "bins", "widths"),
    [
        # First fit by decreasing length needs three bins here.
        ([5, 4, 4, 3, 2, 2], 10, 1, [[[1, 2, 5]], [[0, 3, 4]]], (10, 10)),
        ([5, 4, 4, 3, 2, 2], 10, 2, [[[0, 3, 4], [1, 2, 5]]], (10,)),
        ([6, 6, 6, 6, 6], 10, 1, [[[0]], [[2]], [[4]], [[3]], [[1]]], (10,) * 5),
        ([300, 200, 200, 100, 500, 512], 512, 2, [[[0, 3], [1, 2]], [[4], [5]]], (512, 512)),
        ([512, 512, 100, 30], 512, 2, [[[2], [3]], [[1], [0]]], (128, 512)),
        ([7], 10, 4, [[[0], [], [], []]], (10,)),
        ([], 512, 2, [[[], []]], (128,)),
    ],
)
def test_literal_plans(lengths, max_tokens, num_shards, bins, widths):
    packing = plan_packing(lengths, max_tokens, num_shards)
    assert listed(packing) == bins
    assert packing.widths == widths


def test_literal_statistics():
    packing = plan_packing([512, 512, 100, 30], 512, 2, cost=PackingCost(linear=1.0, quadratic=0.0))
    assert packing.tokens_per_shard.tolist() == [612, 542]
    assert packing.order.tolist() == [2, 3, 1, 0]
    assert packing.padding_fraction == 1 - 1154 / 1280
    assert packing.imbalance == 100 / 65
    assert (packing.max_tokens, packing.num_shards, packing.num_sequences) == (512, 2, 4)


def test_the_cap_is_obeyed_where_it_asks_for_more_micro_batches():
    packing = plan_packing([60] * 10, 100, 2, micro_batches_multiple_of=2)
    assert packing.num_micro_batches == 6  # 600 tokens are 3 micro-batches of 2 * 100, but 60 + 60 > 100
    assert [len(rows) for group in packing.bins for rows in group].count(1) == 10


def test_the_cost_decides_what_balanced_is():
    lengths = [300, 100, 100, 100, 90, 80, 70, 60]

    def spread(weights, cost):
        (group,) = plan_packing(lengths, 4096, 2, cost=cost).bins
        first, second = (sum(weights[row] for row in rows) for rows in group)
        return abs(first - second) / (first + second)

    squares = [length**2 for length in lengths]
    assert spread(lengths, PackingCost(1.0, 0.0)) <= 0.01
    assert spread(lengths, PackingCost(0.0, 1.0)) > 0.1
    assert spread(squares, PackingCost(0.0, 1.0)) < spread(squares, PackingCost(1.0, 0.0))


@pytest.mark.parametrize(
    ("max_tokens", "widths"),
    [
        (1, (1,)),
        (100, (100,)),
        (300, (128, 256, 300)),
        (512, (128, 256, 384, 512)),
        (1000, (256, 512, 768, 1000)),
        (4096, (1024, 2048, 3072, 4096)),
        (5000, (1280, 2560, 3840, 5000)),
    ],
)
def test_width_ladder(max_tokens, widths):
    assert width_ladder(max_tokens) == widths


def test_least_imbalance():
    cost = PackingCost(linear=1.0, quadratic=0.0)
    assert least_imbalance(np.array([10]), 10, 4, cost) == 4
    assert least_imbalance(np.array([10, 3, 2]), 10, 2, cost) == 20 / 15
    assert least_imbalance(np.array([10, 8, 4]), 10, 2, PackingCost(0.0, 1.0)) == 200 / (100 + 64 + 8)
    assert least_imbalance(np.array([], np.int64), 10, 2) == 1


def test_a_packing_is_frozen():
    packing = plan_packing([3], 10, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        packing.widths = (5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5, 11, 12], 10, 1), "max_tokens=10 cannot hold the sequence of 12 tokens at index 2; set it to"),
        (([5, 0], 10, 1), "at least 1 token, got 0 at index 1"),
        (([5, -3], 10, 1), "at least 1 token, got -3 at index 1"),
        (([5.0], 10, 1), r"whole numbers of tokens, one per sequence; got float64 of shape \(1,\)"),
        (([[5]], 10, 1), r"got int64 of shape \(1, 1\)"),
        (([5], 0, 1), "max_tokens is at least 1, got 0"),
        (([5], 10, 0), "num_shards is at least 1, got 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_packing(*arguments)


@pytest.mark.parametrize("name", ["min_micro_batches", "micro_batches_multiple_of"])
def test_errors_of_counts(name):
    with pytest.raises(ValueError, match=f"{name} is at least 1, got 0"):
        plan_packing([5], 10, 1, **{name: 0})


@pytest.mark.parametrize("cost", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_errors_of_cost(cost):
    with pytest.raises(ValueError, match="finite and not negative"):
        PackingCost(*cost)


def test_restore_order_wants_every_sequence():
    packing = plan_packing([3, 4], 10, 1)
    with pytest.raises(ValueError, match="expected 2, got 3"):
        packing.restore_order(np.zeros(3))
    with pytest.raises(ValueError, match="expected 2, got 1"):
        packing.restore_order(["a"])
