"""The losses of the interface, value and gradient, against their formulas in float64; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.tokens import LISTED_WORDS, ListedTokens, ScoredTokens
from quatrain.serve.tinker.calls import Datum, Pass, Refused
from quatrain.serve.tinker.losses import ForLoss
from quatrain.types.metrics import Metric

LENGTHS = (7, 1, 12)
MOST = 64
"""Tokens of a datum."""


def request(loss: str, numbers=None, *, seed: int = 0, without=(), **columns) -> tuple[Pass, list]:
    """(a request, the log-probabilities of its targets); of four rows in ten the advantage is 0."""
    random, data, logprobs = np.random.RandomState(seed), [], []
    for length in LENGTHS:
        own = -random.exponential(2.0, length)
        given = {
            "logprobs": own + 1.5 * random.standard_normal(length),
            "advantages": random.standard_normal(length) * (random.uniform(size=length) > 0.4),
        }
        given |= {name: draw(random, length) for name, draw in columns.items()}
        given = {name: x.astype(np.float32) for name, x in given.items() if name not in without}
        tokens, targets = random.randint(0, 50, (2, length)).astype(np.int32)
        data.append(Datum(tokens, targets, given))
        logprobs.append(own.astype(np.float32))
    return Pass(tuple(data), loss, numbers or {}), logprobs


def computed(asked: Pass, logprobs: list) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(the loss, -dloss/dlogprobs of each datum, metrics) by the objective, summed as the trainer does."""
    given = ForLoss.of(asked, MOST)
    table, mask = given.table, given.table.completion_mask
    columns = dict(table.columns)
    weights = columns.pop("weights")
    predicted = np.zeros((*mask.shape, *columns.get(LISTED_WORDS, mask).shape[2:]), np.float32)
    for row, (values, cells) in enumerate(zip(logprobs, given.cells, strict=True)):
        places = (row, cells.rows + 1, cells.ranks)[: predicted.ndim]
        predicted[places] = values.reshape(cells.real.shape)[cells.real]
    ids = jnp.zeros(mask.shape, jnp.int32)

    def loss(predicted):
        if given.lists:
            tokens = ListedTokens(predicted, mask, ids, columns)
        else:
            tokens = ScoredTokens(predicted, jnp.zeros(mask.shape), mask, ids, columns)
        of_tokens = given.objective(tokens)
        return jnp.where(mask, weights * of_tokens.loss, 0.0).sum(), of_tokens

    (value, of_tokens), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(predicted))
    metrics = {"loss": Metric(float(value))}
    metrics |= {name: Metric(float(jnp.where(mask, x, 0).sum())) for name, x in of_tokens.means.items()}
    metrics |= {
        name: Metric(float(jnp.where(mask, x, -jnp.inf).max())) for name, x in of_tokens.peaks.items()
    }
    assert not np.asarray(gradient)[~mask].any()
    return float(value), given.logprobs(-np.asarray(gradient), asked), given.metrics(metrics)


def low_rows(random, length):
    return random.uniform(0.3, 0.9, length)


def high_rows(random, length):
    return random.uniform(1.0, 1.6, length)


def mask_rows(random, length):
    return random.uniform(size=length) > 0.4


def formula(loss: str, l, old, A, low, high, beta, mask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(losses, -dloss/dl, whether the ratio was clipped) of the rows of a datum, in float64."""
    d = np.clip(l - old, -20, 20)
    moves = np.abs(l - old) < 20
    r = np.exp(d)
    if loss == "gspo":
        inside = mask > 0
        r = np.full(len(l), np.exp(np.clip((l - old)[inside].mean(), -20, 20)) if inside.any() else 1.0)
        A, moves = np.where(inside, A, 0), True
    if loss == "dro":
        losses, pull = -(A * l - 0.5 * beta * (l - old) ** 2), A - beta * (l - old)
        clipped = np.zeros(len(l), bool)
    elif loss == "cispo":
        used = np.clip(r, low, high)
        losses, pull, clipped = -used * A * l, used * A, used != r
    else:
        ends = np.minimum(r * A, np.clip(r, low, high) * A)
        clipped = ends != r * A
        losses, pull = -ends, np.where(clipped, 0, r * A * moves)
    counted = A != 0
    return losses * counted, pull * counted, clipped & counted


CASES = {
    "importance_sampling": ("importance_sampling", {}, {}, (0.0, np.inf)),
    "ppo": ("ppo", {}, {}, (0.8, 1.2)),
    "ppo of a configuration": (
        "ppo",
        {"clip_low_threshold": 0.4, "clip_high_threshold": 3.0},
        {},
        (0.4, 3.0),
    ),
    "ppo of each row": ("ppo", {}, {"clip_low_threshold": low_rows, "clip_high_threshold": high_rows}, None),
    "cispo": ("cispo", {}, {}, (0.0, 4.0)),
    "cispo of a configuration": ("cispo", {"clip_low_threshold": 0.7}, {}, (0.7, 4.0)),
    "dro": ("dro", {"beta": 0.3}, {}, (0.0, np.inf)),
    "gspo": ("gspo", {}, {}, (1 - 3e-4, 1 + 4e-4)),
    "gspo of wide bounds": (
        "gspo",
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        {},
        (0.5, 2.0),
    ),
    "gspo of a mask": ("gspo", {}, {"sequence_ratio_mask": mask_rows}, (1 - 3e-4, 1 + 4e-4)),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_their_formulas(case):
    """Sums over rows, nothing divided; the gradient, bounds, masks and metrics of each."""
    loss, numbers, columns, bounds = CASES[case]
    all_clips = all_counted = 0
    for seed in range(3):
        asked, logprobs = request(loss, numbers, seed=seed, **columns)
        value, pulls, metrics = computed(asked, logprobs)
        total, counted, ratios, clips = 0.0, 0, [], 0
        for datum, l, pull in zip(asked.data, logprobs, pulls, strict=True):
            of = {name: x.astype(np.float64) for name, x in datum.columns.items()}
            low, high = bounds or (of["clip_low_threshold"], of["clip_high_threshold"])
            A, old, l = of["advantages"], of["logprobs"], l.astype(np.float64)
            mask = of.get("sequence_ratio_mask", A != 0)
            losses, expected, clipped = formula(loss, l, old, A, low, high, numbers.get("beta"), mask)
            np.testing.assert_allclose(pull, expected, rtol=1e-5, atol=1e-6)
            counts = (A != 0) & ((loss != "gspo") | (mask > 0))
            total, counted, clips = total + losses.sum(), counted + counts.sum(), clips + clipped.sum()
            ratios += np.exp(l - old)[counts].tolist()
        assert value == pytest.approx(total, rel=1e-5)
        assert metrics == pytest.approx(
            {
                "loss:sum": value,
                "tokens:sum": counted,
                "ratio:mean": np.mean(ratios),
                "ratio:max": np.max(ratios),
                "clip_fraction:mean": clips / counted,
            },
            rel=1e-5,
        )
        all_clips, all_counted = all_clips + clips, all_counted + counted
    assert all_clips < all_counted
    assert (all_clips > 0) == (loss not in ("importance_sampling", "dro"))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_rows_without_advantage_count_nothing_whatever_their_ratio(loss):
    """Prompts have logprobs 0 or anything: exactly 0, and no share in the mean of a sequence."""
    numbers = {"beta": 0.5} if loss == "dro" else {}
    asked, logprobs = request(loss, numbers)
    value, pulls, metrics = computed(asked, logprobs)
    for datum in asked.data:
        datum.columns["logprobs"][datum.columns["advantages"] == 0] = -3e38
    again, others, of_others = computed(asked, logprobs)
    assert (again, of_others) == (value, metrics)
    for pull, other, datum in zip(pulls, others, asked.data, strict=True):
        np.testing.assert_array_equal(pull, other)
        assert not pull[datum.columns["advantages"] == 0].any()


def test_log_ratios_end_at_20():
    """Far from its sampler a row has the ratio exp(20), and no gradient but that of DRO's penalty."""
    for sign in (1, -1):
        data = Datum(
            np.zeros(2, np.int32),
            np.zeros(2, np.int32),
            {"logprobs": np.float32([-40 * sign, -1]), "advantages": np.float32([1, 1])},
        )
        value, [pull], metrics = computed(Pass((data,), "importance_sampling"), [np.float32([-1, -1])])
        assert value == pytest.approx(-np.exp(20 * sign) - 1, rel=1e-5)
        np.testing.assert_allclose(pull, [0, 1], rtol=1e-5)
        assert metrics["ratio:max"] == pytest.approx(np.exp(20) if sign > 0 else 1, rel=1e-5)
        asked = Pass((data,), "dro", {"beta": 0.1})
        value, [pull], _ = computed(asked, [np.float32([-1, -1])])
        # A penalty is no ratio: it pulls back, however far a row is.
        assert value == pytest.approx(2 + 0.05 * (40 * sign - 1) ** 2, rel=1e-5)
        np.testing.assert_allclose(pull, [1 - 0.1 * (40 * sign - 1), 1], rtol=1e-5)


def test_cross_entropy_has_weights_of_any_sign_and_one_by_default():
    random = np.random.RandomState(0)
    tokens, targets = random.randint(0, 50, (2, 5)).astype(np.int32)
    targets[3] = -1
    weights, logprobs = np.float32([0.5, -2, 0, 7, 1]), np.float32([-1, -2, -3, -9, -0.5])
    data = Datum(tokens, targets, {"weights": weights}), Datum(tokens, targets, {})
    value, pulls, metrics = computed(Pass(data, "cross_entropy"), [logprobs, logprobs])
    assert value == pytest.approx((0.5 - 4 + 0.5) + (1 + 2 + 3 + 0.5))
    np.testing.assert_array_equal(pulls, [[0.5, -2, 0, 0, 1], [1, 1, 1, 0, 1]])
    assert metrics == {"loss:sum": value, "tokens:sum": 7}


def test_cross_entropy_over_lists_of_targets():
    """Datums with K of 4, 1 and none: each has its own cells and weights; no target takes no place."""
    lists = np.array([[4, -1, 4, 9], [-1, -1, 7, -1]], np.int32)
    weights = np.float32([[1, 0, -2, 3], [0, 0, 0.5, 0]])
    data = (
        Datum(np.zeros(2, np.int32), lists, {"weights": weights}),
        Datum(np.zeros(3, np.int32), np.array([[1], [2], [-1]], np.int32), {}),
        Datum(np.zeros(1, np.int32), np.array([6], np.int32), {"weights": np.float32([-4])}),
    )
    asked = Pass(data, "cross_entropy")
    given = ForLoss.of(asked, MOST)
    # Three at most in a row, in lists as long as a power of two.
    packed = [[-1] * 4, [4, 4, 9, -1], [7, -1, -1, -1]]
    np.testing.assert_array_equal(given.table.columns[LISTED_WORDS][0, :3], packed)
    np.testing.assert_array_equal(given.table.columns[LISTED_WORDS][2, 1], [6, -1, -1, -1])
    logprobs = [np.float32([[-1, 0, -1, -2], [0, 0, -3, 0]]), np.float32([[-5], [-6], [0]]), np.float32([-7])]
    value, pulls, metrics = computed(asked, logprobs)
    assert value == pytest.approx((1 - 2 + 6 + 1.5) + 11 - 28)
    for pull, expected in zip(pulls, (weights, [[1], [1], [0]], [-4]), strict=True):
        np.testing.assert_array_equal(pull, expected)
    assert metrics == {"loss:sum": value, "tokens:sum": 5}


def test_rows_are_scored_at_the_place_of_the_token_after():
    """All rows of a datum, also the last, in the order of the tokens."""
    asked, _ = request("ppo")
    table = ForLoss.of(asked, MOST).table
    for row, datum in enumerate(asked.data):
        length = len(datum.tokens)
        np.testing.assert_array_equal(table.input_ids[row, :length], datum.tokens)
        np.testing.assert_array_equal(np.flatnonzero(table.completion_mask[row]), np.arange(1, length + 1))
        np.testing.assert_array_equal(table.targets[row, 1 : length + 1], datum.targets)
        np.testing.assert_array_equal(
            table.columns["old_logprobs"][row, 1 : length + 1], datum.columns["logprobs"]
        )


def test_requests_without_advantage_have_metrics_of_nothing():
    asked, logprobs = request("ppo", advantages=lambda random, length: np.zeros(length))
    value, _, metrics = computed(asked, logprobs)
    assert value == 0
    assert metrics == {
        "loss:sum": 0,
        "tokens:sum": 0,
        "ratio:mean": 0,
        "clip_fraction:mean": 0,
        "ratio:max": 0,
    }


def test_numbers_that_a_loss_cannot_use_are_refused():
    """What is wrong with a request by itself is found where it is read; a bound may also be the default."""
    for loss, numbers, message in (
        ("ppo", {"clip_high_threshold": 0.5}, r"must be at most .*; got 0.8 and 0.5; .* ppo are 0.8 and 1.2"),
        ("cispo", {"clip_low_threshold": 4.5}, "got 4.5 and 4; the defaults of cispo"),
        ("dro", {"beta": 1e39}, "beta must be a number of float32; got 1e"),
    ):
        asked, _ = request(loss, numbers)
        with pytest.raises(Refused, match=message):
            ForLoss.of(asked, MOST)
    asked, _ = request("ppo", clip_low_threshold=lambda random, length: np.full(length, 1.3))
    with pytest.raises(Refused, match=r"got 1.3 and 1.2"):
        ForLoss.of(asked, MOST)


def test_requests_that_need_too_much_memory_are_refused():
    """Whole datums are computed at once, and lists of targets are as long for every row."""
    asked, _ = request("ppo")
    with pytest.raises(Refused, match=r"datum 2: model_input must have at most 11 tokens.*got 12"):
        ForLoss.of(asked, 11)
    wide = Datum(np.zeros(1, np.int32), np.zeros((1, 2**20), np.int32), {})
    for data, most in (((wide,), 2**7), ((wide, *[asked.data[2]] * 100), 16)):
        with pytest.raises(Refused, match=r"lists of targets must fit 67108864 cells: 1048576, for .* fewer"):
            ForLoss.of(Pass(data, "cross_entropy"), most)
