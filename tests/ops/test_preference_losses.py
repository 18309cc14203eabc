"""Losses on preferences: slopes are the changes of values, and values are those worked out by hand."""

import numpy as np
import pytest

from quatrain.config.sections import given
from quatrain.ops.preferences import PREFERENCE_LOSSES, SCORE_LOSSES, Pairs, kto

ARGUMENTS = {
    "sigmoid": [{"beta": 0.3, "label_smoothing": 0.0}, {"beta": 0.3, "label_smoothing": 0.2}],
    "robust": [{"beta": 0.3, "label_smoothing": 0.2}],
    "hinge": [{"beta": 0.3}],
    "ipo": [{"beta": 0.3}],
    "orpo": [{"beta": 0.3}],
    "simpo": [{"beta": 2.0, "gamma": 0.7}],
    "bradley_terry": [{"center": 0.0}, {"center": 0.1}],
}
CASES = [(name, each) for name, all_of in ARGUMENTS.items() for each in all_of]
LOSSES = PREFERENCE_LOSSES | SCORE_LOSSES


def drawn(count=200, seed=3):
    """Pairs of answers of 1 to 30 tokens of about a nat each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 31, (2, count)).astype(float)
    sums = -rng.exponential(1.0, (2, count)) * tokens
    return Pairs(*sums, *(sums + rng.normal(0, 5, (2, count))), *tokens, rng.exponential(1.0, count))


def test_the_names_are_those_of_the_configuration():
    assert {*PREFERENCE_LOSSES, "kto"} == set(given.PREFERENCE_LOSSES)
    assert set(SCORE_LOSSES) == set(given.SCORE_LOSSES)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_slopes_are_the_changes_of_the_losses(name, arguments):
    """Central differences of 200 pairs, which no pair but its own moves: a wrong sign or length shows."""
    pairs, step = drawn(), 1e-6
    found = LOSSES[name](pairs, **arguments)
    for side in ("chosen", "rejected"):
        up, down = (
            LOSSES[name](pairs._replace(**{side: getattr(pairs, side) + change}), **arguments).losses
            for change in (step, -step)
        )
        np.testing.assert_allclose(getattr(found, side), (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_extremes_are_finite(name, arguments):
    """Exponentials of 1e4 overflow, and a probability of 1 has infinite odds."""
    values = np.array([-1e4, -1e-9, 0.0, 1e4])
    sides = [grid.ravel() for grid in np.meshgrid(values, values)]
    zeros, ones = np.zeros(16), np.ones(16)
    found = LOSSES[name](Pairs(*sides, zeros, zeros, ones, ones, zeros), **arguments)
    assert all(np.isfinite(part).all() for part in found)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # Δ = (-4 + 5) - (-9 + 6) = 4
        ("sigmoid", {"beta": 0.5, "label_smoothing": 0.0}, np.log1p(np.exp(-2))),
        (
            "sigmoid",
            {"beta": 0.5, "label_smoothing": 0.25},
            0.75 * np.log1p(np.exp(-2)) + 0.25 * np.log1p(np.exp(2)),
        ),
        (
            "robust",
            {"beta": 0.5, "label_smoothing": 0.25},
            (0.75 * np.log1p(np.exp(-2)) - 0.25 * np.log1p(np.exp(2))) / 0.5,
        ),
        ("hinge", {"beta": 0.2}, 0.2),
        ("hinge", {"beta": 0.5}, 0.0),
        ("ipo", {"beta": 0.5}, (1 / 2 + 3 / 3 - 1) ** 2),
        ("simpo", {"beta": 2.0, "gamma": 0.5}, np.log1p(np.exp(-(2 * (-2 + 3) - 0.5)))),
        (
            "orpo",  # mean log-probabilities -2 and -3
            {"beta": 0.1},
            2 + 0.1 * np.log1p((1 / np.expm1(3)) / (1 / np.expm1(2))),
        ),
        ("bradley_terry", {"center": 0.1}, np.log1p(np.exp(-(-4 + 9 - 1.5))) + 0.1 * 13**2),
    ],
)
def test_losses_of_a_pair(name, arguments, expected):
    """A better answer of two tokens and another of three; the margin is 1.5."""
    one = [np.array([value]) for value in (-4.0, -9.0, -5.0, -6.0, 2.0, 3.0, 1.5)]
    np.testing.assert_allclose(LOSSES[name](Pairs(*one), **arguments).losses, [expected], rtol=1e-12)


WEIGHTS = {"beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.5}


def test_kto_slopes_are_the_changes_of_its_losses_at_a_fixed_kl():
    rng = np.random.default_rng(5)
    ratios, good, others = rng.normal(0, 3, 200), rng.random(200) < 0.5, rng.normal(1, 3, 200)
    found = kto(ratios, good, others, **WEIGHTS)
    up, down = (kto(ratios + change, good, others, **WEIGHTS).losses for change in (1e-6, -1e-6))
    np.testing.assert_allclose(found.slopes, (up - down) / 2e-6, rtol=1e-6, atol=1e-8)
    extremes = kto(np.array([-1e4, 1e4]), np.array([True, False]), np.array([1e4, 1e4]), **WEIGHTS)
    assert np.isfinite(extremes.losses).all()
    assert np.isfinite(extremes.slopes).all()


def test_kto_judges_from_a_kl_that_is_never_below_zero():
    """w (1 - σ(β(ρ - z))) of a good answer and w (1 - σ(β(z - ρ))) of another, both with ρ = 2."""
    ratios, good = np.array([2.0, 2.0]), np.array([True, False])
    above, below = (kto(ratios, good, np.array([kl, 1.0]), **WEIGHTS) for kl in (3.0, -3.0))
    np.testing.assert_allclose(above.losses, [0.5, 0.75])
    assert above.kl == 2
    np.testing.assert_allclose(below.losses, [1 / (1 + np.exp(1)), 1.5 / (1 + np.exp(-1))])
    assert below.kl == 0
