r"""The exact value of arithmetic on numbers as written: `25!`, `6.02 \times 10^{23}`, `\frac{1}{2^{97}}`.

Used by `answers.py` and `expressions.py`, so that such values need no sympy and no rounding.
The text is untrusted: its length, its nesting and the size of every intermediate value are bounded.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction

_MAX_CHARS = 400
_MAX_BITS = 20_000
_MAX_DEPTH = 20
_MAX_COUNT = 1000
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
EXPONENT = r"(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{DECIMAL}{EXPONENT}?)"
    r"|(?P<sign>\\(?:frac|binom|sqrt|times|cdot|div)(?![A-Za-z])|[-+*/^!(){}]))"
)
_PRODUCTS = ("*", r"\times", r"\cdot", "/", r"\div")
_OPENING = {"(": ")", "{": "}"}


@functools.lru_cache(maxsize=4096)
def exact_value(text: str) -> Fraction | None:
    """The value of arithmetic on integers, fractions and decimals; None for other text and huge values."""
    tokens, at, text = [], 0, text.strip()
    while at < len(text) <= _MAX_CHARS and (token := _TOKEN.match(text, at)):
        tokens.append(token["number"] or token["sign"])
        at = token.end()
    if at < len(text) or not tokens:
        return None
    reader = _TokenReader(tokens)
    try:
        value = reader.sum()
        return None if reader.token else value
    except (ValueError, ZeroDivisionError):
        return None


def same_value(x: Fraction, y: Fraction) -> bool:
    """Whether x equals y; if one is a decimal and the other has none (0.333333 and 1/3), to six digits.

    These are significant digits of the value without a finite decimal.
    """
    if x == y or is_decimal(x) == is_decimal(y):
        return x == y
    decimal, other = (x, y) if is_decimal(x) else (y, x)
    if decimal.denominator == 1:
        return False
    first_digit = math.floor(math.log10(abs(other.numerator)) - math.log10(other.denominator))
    return abs(x - y) <= 5 * Fraction(10) ** (first_digit - 6)


def is_decimal(x: Fraction) -> bool:
    """Whether x has a finite decimal: its denominator divides a sufficiently high power of ten."""
    return pow(10, x.denominator.bit_length(), x.denominator) == 0


class _TokenReader:
    """Reads tokens from left to right; raises ValueError at the first that is not understood."""

    def __init__(self, tokens: list[str]):
        self._left, self._depth = ["", *reversed(tokens)], 0  # "" is the end

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self._left[-1]

    def _accept(self, *tokens: str) -> str:
        """Takes the next token if it is one of `tokens`; empty if not."""
        return self._left.pop() if self.token in tokens else ""

    def sum(self) -> Fraction:
        """The value of terms with signs."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError
        total, sign = Fraction(0), self._accept("+", "-") or "+"
        while sign:
            total = _bounded(total - self._term() if sign == "-" else total + self._term())
            sign = self._accept("+", "-")
        self._depth -= 1
        return total

    def _term(self) -> Fraction:
        first, value, divided = self.token, self._power(), False
        while self.token in _PRODUCTS or self.token.startswith(("(", "\\")):
            if sign := self._accept(*_PRODUCTS):
                factor = -self._power() if self._accept("-") else self._power()
                divides = sign in ("/", r"\div")
                value = _bounded(value / factor if divides else value * factor)
                divided = divided or divides
            elif divided:  # 1/2(3) may be read in two ways
                raise ValueError
            elif self.token == r"\frac" and first.isdigit():
                value += self._mixed()
            else:
                value = _bounded(value * self._power())
            first = ""
        return value

    def _mixed(self) -> Fraction:
        """The fraction of a mixed number."""
        before = self._left[:-1]
        part = self._power()
        digits = "".join(before[len(self._left) :]).translate({ord("{"): "", ord("}"): ""})
        if (digits and not digits.isdigit()) or self.token in ("(", "{", "^", r"\frac"):
            raise ValueError
        return part

    def _power(self) -> Fraction:
        value = self._primary()
        if self._accept("!"):
            if self.token == "!" or value.denominator != 1 or not 0 <= value <= _MAX_COUNT:
                raise ValueError
            value = Fraction(math.factorial(value.numerator))
        if self._accept("^"):
            if self.token == "{":
                exponent = self._group()
            else:
                exponent = Fraction((-1 if self._accept("-") else 1) * int(self._digits()))
            if self.token in ("^", "!") or exponent.denominator != 1:
                raise ValueError
            if _num_bits(value) * abs(exponent.numerator) > _MAX_BITS:
                raise ValueError
            value = value**exponent.numerator
        return value

    def _primary(self) -> Fraction:
        if self.token in _OPENING:
            return self._group()
        token = self._left.pop()
        if token == r"\frac":
            return self._argument() / self._argument()
        if token == r"\sqrt":
            square = self._argument()
            root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
            if root * root != square:
                raise ValueError
            return root
        if token == r"\binom":
            n, k = self._argument(), self._argument()
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= _MAX_COUNT:
                raise ValueError
            return Fraction(math.comb(n.numerator, k.numerator))
        return Fraction(token.replace(",", ""))  # ValueError for other signs, and at the end

    def _group(self) -> Fraction:
        closing = _OPENING[self._left.pop()]
        value = self.sum()
        if not self._accept(closing):
            raise ValueError
        return value

    def _digits(self) -> str:
        if not self.token.isdigit():
            raise ValueError
        return self._left.pop()

    def _argument(self) -> Fraction:
        r"""A group in braces, or one digit: `\frac12` is 1/2."""
        if self.token == "{":
            return self._group()
        digits = self._digits()
        if len(digits) > 1:  # the rest of the digits is what comes next
            self._left.append(digits[1:])
        return Fraction(int(digits[0]))


def _num_bits(x: Fraction) -> int:
    return max(x.numerator.bit_length(), x.denominator.bit_length())


def _bounded(x: Fraction) -> Fraction:
    if _num_bits(x) > _MAX_BITS:
        raise ValueError
    return x
