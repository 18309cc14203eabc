"""Compares expressions with math-verify, in a worker process alone (`grader.py`).

Importing this module changes math-verify and the logging of the whole process. It imports nothing from
quatrain, and no other module imports math-verify.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, verify

DIGITS, MAX_DIGITS = 60, 200
"""Significant digits to which values that are no fractions are compared, and most digits of a computation."""
# Only LaTeX extraction is used, because math-verify's extraction of plain expressions passes text to Python's
# eval. Units were removed before; math-verify would also remove variables, such as h and r of 2\pi hr.
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
_LATEX = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
# math-verify takes i for the imaginary unit only where it is a word by itself: in 2 i, not in 2i.
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
# latex2sympy reads \gamma as Euler's constant, \Pi as pi, and capital Greek letters and indexed capitals as
# small ones.
_MISREAD = re.compile(
    r"(\\(?:gamma|[A-Z][a-z]+)|[A-Z](?=_))(?![A-Za-z])(?:\s?_\s?(?:\{([0-9A-Za-z]+)\}|([0-9A-Za-z])))?"
)


def same(gold: str, said: str) -> bool:
    """Whether math-verify finds the two LaTeX expressions equal; False if it raises an error."""
    try:
        return verify(_parsed_gold(gold), _parsed(said), timeout_seconds=None, allow_set_relation_comp=True)
    except Exception:  # any error of the parser, sympy or the memory limit counts as not equal
        return False


def is_parsed(gold: str) -> bool:
    """Whether math-verify parses this LaTeX expression."""
    try:
        return bool(_parsed_gold(gold))
    except Exception:  # any error of the parser, sympy or the memory limit
        return False


def _parsed(text: str) -> list:
    """The expression that math-verify reads, decimals as fractions; empty if it reads none."""
    text = _DECIMAL.sub(lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", text)
    text = _IMAGINARY.sub(" i ", _MISREAD.sub(_symbol, text))
    return parse(f"${text}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)


_parsed_gold = functools.lru_cache(maxsize=256)(_parsed)


def _symbol(match: re.Match[str]) -> str:
    """A name with an index of its own instead of one that latex2sympy takes for another."""
    name = f"{match[1]}_{match[2] or match[3] or ''}"
    return f"g_{{{''.join(str(ord(letter)) for letter in name)}}}"


def _same_numbers(a: Any, b: Any, *_: Any) -> bool:
    """In place of math-verify's comparison of numbers, which rounds to six places or to 1e-15: relative.

    Fractions are compared exactly, other values to DIGITS digits, and a decimal and a value without a finite
    decimal to six significant digits, as `exact.py` does.
    """
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        pairs = zip(a.flat(), b.flat(), strict=True) if a.shape == b.shape else ()
        return a.shape == b.shape and all(grader.sympy_expr_eq(x, y, 0, 0) for x, y in pairs)
    a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
    if a == b:
        return True
    if not (_is_number(a) and _is_number(b)):
        return False
    x, y = (value.evalf(DIGITS + 10, maxn=MAX_DIGITS) for value in (a, b))
    for decimal, other, value in ((a, b, y), (b, a, x)):
        if _is_finite_decimal(decimal) and not _is_finite_decimal(other):
            unit = sympy.Integer(10) ** (sympy.floor(sympy.log(abs(value), 10)) - 5) if value else 0
            return bool(decimal.q > 1 and abs(x - y) <= unit / 2)
    return not (a.is_Rational and b.is_Rational) and bool(abs(x - y) <= abs(y) / sympy.Integer(10) ** DIGITS)


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and value.is_number is True and value.is_finite is not False


def _is_finite_decimal(value: Any) -> bool:
    return value.is_Rational is True and pow(10, int(value.q).bit_length(), int(value.q)) == 0


def compare(question: Sequence[str]) -> tuple[bool, float]:
    """The verdict on `gold, said` (are they equal), or on `gold` (is it parsed), and its CPU seconds."""
    began = time.process_time()
    gold, *said = question
    verdict = same(gold, *said) if said else is_parsed(gold)
    return verdict, time.process_time() - began


assert hasattr(grader, "sympy_numeric_eq"), "math-verify compares numbers in another function"
grader.sympy_numeric_eq = _same_numbers
# Suppresses math-verify's warning that its own time limit is off; it cannot stop a loop in C code.
logging.disable(logging.WARNING)
same("(x, 1)", r"\sqrt{2}+0.5")  # fills the caches of the parser, which each fork then has
