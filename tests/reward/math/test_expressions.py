import sys

import pytest

from quatrain.reward.math import grader
from quatrain.reward.math.expressions import is_judgeable, same_expression


@pytest.mark.parametrize(
    ("said", "gold", "verdict"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("The answer is $x + 1$.", "1+x", True),
        ("x + 1", "x + 2", False),
        ("(1, 2)", "(1,2)", True),
        (r"[0,\infty)", r"[0, \infty)", True),
        ("10^{-2}", "1/100", True),
        ("no mathematics here", "1/100", False),
        ("2^3", r"\text{eight}", False),
        ("5", "5xy", False),
        ("5yx", "5xy", True),
        ("2xy+3", "2ab+3", False),
        ("324", r"18\text{ cm}^2", False),
        ("18", r"18\text{ cm}^2", True),
        ("18", r"\text{Area: } 18\text{ cm}^2", True),
        ("x", r"x\text{ m}^2", True),
        ("3+5", r"3+\text{5}", True),
        ("3", r"3+\text{5}", False),
        (r"e\cdot 2", r"2\mathrm{e}", True),
        (r"\frac{3}{2}", r"\frac{3\text{ cm}}{2}", True),
    ],
)
def test_expressions(said, gold, verdict):
    assert same_expression(said, gold) is verdict


@pytest.mark.parametrize(
    "said",
    [
        "2^2^2",
        "2^{2^2}",
        "((2^2)^2)^{22}",
        "2^{999}",
        "2^2+2^2+2^2+2^2",
        "1+" * 80 + "1",
        "100!",
        "(9!)!",
        "9!!",
        r"\binom{100}{50}",
        r"\sum x",
        r"\exp(1)",
        "y",
        "9" * 101,
        "x+(1",
        "x+",
    ],
)
def test_math_verify_is_not_asked(said, monkeypatch):
    monkeypatch.setattr(grader, "ask", lambda gold, said: pytest.fail(f"asked about {said}"))
    assert same_expression(said, "x+1") is False


def test_math_verify_stays_out_of_this_process():
    assert same_expression(r"\sqrt{4}", "2") is True
    assert "math_verify" not in sys.modules


@pytest.mark.parametrize(
    ("said", "gold", "verdict"),
    [
        ("10^{-20}x", "2*10^{-20}x", False),
        (r"(10^{-20},1)", r"(2\times 10^{-20},1)", False),
        (r"(10^{-20},1)", r"(\frac{1}{10^{20}},1)", True),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}0\\1\end{pmatrix}", False),
        ("[0,10^{-20}]", r"[0,2\times10^{-20}]", False),
        ("1,10^{-20}", r"1,2\times10^{-20}", False),
        (r"\frac{2\pi}{10^{20}}", r"\frac{\pi}{10^{20}}", False),
        (r"10^{-9}\sqrt{4\cdot 2}", r"2\sqrt{2}\cdot 10^{-9}", True),
        (r"\sqrt{2}+10^{-9}", r"\sqrt{2}", False),
        (r"(6\cdot 10^{-34},2\cdot 10^{-19})", r"(\frac{6}{10^{34}},2\times 10^{-19})", True),
        (r"(10^{-34},2\cdot 10^{-19})", r"(\frac{1}{10^{34}},3\times 10^{-19})", False),
        ("(25!,1)", "(15511210043330985984000000,1)", True),
        ("1000000000000000000x", "10^{18}x", True),
        ("0.5x", r"\frac{x}{2}", True),
        ("0.1x+0.2x", "0.3x", True),
        (r"\{0.5,1.5\}", r"\{\frac{3}{2},\frac12\}", True),
        ("1.41421", r"\sqrt{2}", True),
        ("1.4142", r"\sqrt{2}", False),
        ("1.5<x<2.5", r"\frac{3}{2}<x<\frac{5}{2}", True),
        ("1+2i", "1+2.0i", True),
        (r"\gamma", "0.577216", False),
        (r"\delta", r"\Delta", False),
        (r"\Pi", r"\pi", False),
        ("x_1", "X_1", False),
        ("sin x", r"\sin x", True),
    ],
)
def test_values_are_compared_relatively_and_names_exactly(said, gold, verdict):
    assert same_expression(said, gold) is verdict


@pytest.mark.parametrize("gold", ["9^{9^{9}}", "9^{99999}", "10^{10^6}", "99999!", "9!!", "2 dozen"])
def test_values_that_are_too_large_or_not_read_are_not_judgeable(gold, monkeypatch):
    monkeypatch.setattr(grader, "ask", lambda *question: pytest.fail(f"asked about {question}"))
    assert is_judgeable(gold) is False
