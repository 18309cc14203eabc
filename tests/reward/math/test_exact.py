from fractions import Fraction

import pytest
from effort import within

from quatrain.reward.math.exact import exact_value, same_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25!", 15511210043330985984000000),
        ("2^{60}", 1152921504606846976),
        ("2^10", 1024),
        (r"6.02 \times 10^{23}", 602 * 10**21),
        ("6.02e23", 602 * 10**21),
        ("6.63E-34", Fraction(663, 10**36)),
        (r"\frac{1}{2^{97}}", Fraction(1, 2**97)),
        (r"\frac12", Fraction(1, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"2\cdot\frac{1}{2}", 1),
        (r"\frac{6!}{3!}", 120),
        (r"\binom{60}{30}", 118264581564861424),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        ("-2^2", -4),
        ("1,234.5", Fraction(2469, 2)),
        ("3(4-6)/2", -3),
        (r"2^{-3}\div 2", Fraction(1, 16)),
    ],
)
def test_values_of_arithmetic(text, value):
    assert exact_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5-",
        "x+1",
        "2 3",
        "1/2(3)",
        "1/0",
        r"\sqrt{2}",
        r"\sqrt{-4}",
        "2^{0.5}",
        "5!!",
        "(-1)!",
        r"\foo 5",
        "5{2}",
    ],
)
def test_what_is_not_read_has_no_value(text):
    assert exact_value(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "10^{1000000}",
        "10^10^10",
        "99999999!",
        "((((9^9)^9)^9)^9)^9",
        r"\binom{9999}{5000}",
        "(" * 200 + "1" + ")" * 200,
        "+".join(["10^{999}/7"] * 30),
        "1e999" * 80,
        "2^" * 100 + "2",
    ],
)
def test_huge_values_cost_nothing(text):
    within(0.2, lambda: exact_value.__wrapped__(text))


@pytest.mark.parametrize(
    ("x", "y", "same"),
    [
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),
        ("0.166667", "1/6", True),
        ("333333", "1000000/3", False),
        ("0", "1/3000000", False),
        ("0.000000333333", "1/3000000", True),
        ("1e-20", "2e-20", False),
        ("0.30000000000000004", "0.3", False),
        ("666667e-2", "20000/3", True),
        ("1/3", "333333/1000003", False),
    ],
)
def test_decimals_equal_what_they_round(x, y, same):
    assert same_value(Fraction(x), Fraction(y)) is same
    assert same_value(Fraction(y), Fraction(x)) is same
