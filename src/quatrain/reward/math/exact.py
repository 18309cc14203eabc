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
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))?)"
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
    reader = _Reader(tokens)
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


class _Reader:
    """Reads tokens from left to right; raises ValueError at the first that is not understood."""

    def __init__(self, tokens: list[str]):
        self._tokens, self._at, self._depth = tokens, 0, 0

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *allowed: str) -> str:
        token = self.token
        if allowed and token not in allowed:
            raise ValueError
        self._at += 1
        return token

    def sum(self) -> Fraction:
        """The value of terms with signs."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError
        total, sign = Fraction(0), self._take() if self.token in ("+", "-") else "+"
        while True:
            total = _bounded(total - self._term() if sign == "-" else total + self._term())
            if self.token not in ("+", "-"):
                break
            sign = self._take()
        self._depth -= 1
        return total

    def _term(self) -> Fraction:
        first, value, divided = self.token, self._power(), False
        while self.token in _PRODUCTS or self.token == "(" or self.token.startswith("\\"):
            if self.token in ("/", r"\div"):
                self._take()
                value, divided = _bounded(value / self._factor()), True
            elif self.token in _PRODUCTS:
                self._take()
                value = _bounded(value * self._factor())
            elif divided:  # 1/2(3) may be read in two ways
                raise ValueError
            elif self.token == r"\frac" and first.isdigit():  # a mixed number
                value += self._mixed()
            else:
                value = _bounded(value * self._power())
            first = ""
        return value

    def _mixed(self) -> Fraction:
        start = self._at
        part = self._power()
        digits = [token for token in self._tokens[start + 1 : self._at] if token not in "{}"]
        if not all(token.isdigit() for token in digits) or self.token in ("(", "{", "^", r"\frac"):
            raise ValueError
        return part

    def _factor(self) -> Fraction:
        if self.token == "-":
            self._take()
            return -self._power()
        return self._power()

    def _power(self) -> Fraction:
        value = self._factorial()
        if self.token == "^":
            self._take()
            exponent = self._group() if self.token == "{" else self._signed()
            if self.token in ("^", "!") or exponent.denominator != 1:
                raise ValueError
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
            if bits * abs(exponent.numerator) > _MAX_BITS:
                raise ValueError
            value = value**exponent.numerator
        return value

    def _signed(self) -> Fraction:
        sign = -1 if self.token == "-" and self._take() else 1
        if not self.token.isdigit():
            raise ValueError
        return sign * _number(self._take())

    def _factorial(self) -> Fraction:
        value = self._primary()
        if self.token == "!":
            self._take()
            if self.token == "!" or value.denominator != 1 or not 0 <= value <= _MAX_COUNT:
                raise ValueError
            value = Fraction(math.factorial(value.numerator))
        return value

    def _primary(self) -> Fraction:
        if self.token in _OPENING:
            return self._group()
        token = self._take()
        if token == r"\frac":
            return self._argument() / self._argument()
        if token == r"\sqrt":
            return _root(self._argument())
        if token == r"\binom":
            n, k = self._argument(), self._argument()
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= _MAX_COUNT:
                raise ValueError
            return Fraction(math.comb(n.numerator, k.numerator))
        return _number(token)

    def _group(self) -> Fraction:
        closing = _OPENING[self._take("(", "{")]
        value = self.sum()
        self._take(closing)
        return value

    def _argument(self) -> Fraction:
        r"""A group in braces, or one digit: `\frac12` is 1/2."""
        if self.token == "{":
            return self._group()
        token = self._take()
        if not token.isdigit():
            raise ValueError
        if len(token) > 1:  # the rest of the digits is what comes next
            self._at -= 1
            self._tokens[self._at] = token[1:]
        return Fraction(int(token[0]))


def _number(token: str) -> Fraction:
    if not re.match(r"\.?[0-9]", token):
        raise ValueError
    return Fraction(token.replace(",", ""))


def _root(x: Fraction) -> Fraction:
    if x < 0:
        raise ValueError
    root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    if root * root != x:
        raise ValueError
    return root


def _bounded(x: Fraction) -> Fraction:
    if max(x.numerator.bit_length(), x.denominator.bit_length()) > _MAX_BITS:
        raise ValueError
    return x
