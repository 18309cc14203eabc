import logging
import sys

import pytest

from quatrain import child
from quatrain.reward import expressions
from quatrain.reward.expressions import same_expression


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
        "9" * 16,
    ],
)
def test_math_verify_is_not_asked(said, monkeypatch):
    monkeypatch.setattr(expressions, "_ask", lambda gold, said: pytest.fail(f"asked about {said}"))
    assert same_expression(said, "x+1") is False


def test_a_comparison_without_end_is_cut_off_and_the_next_one_works(caplog):
    with caplog.at_level(logging.WARNING):
        assert same_expression(r"\sqrt[9]{\sqrt[9]{9}}-9-\pi", "(1,x)") is False
    assert "took too long" in caplog.text
    assert same_expression("1+1+x", "x+2") is True


def test_math_verify_stays_out_of_this_process():
    assert same_expression(r"\sqrt{4}", "2") is True
    assert "math_verify" not in sys.modules


def test_a_child_that_fails_is_no_equality(monkeypatch, tmp_path, caplog):
    python, script = tmp_path / "python", tmp_path / "script.py"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(python))
    assert expressions._same(child.Child(script), "1", "1") is False
    assert "exit status 3" in caplog.text
    monkeypatch.setattr(child.sys, "executable", str(tmp_path / "missing"))
    assert expressions._same(child.Child(script), "1", "1") is False
    assert "math-verify failed" in caplog.text
