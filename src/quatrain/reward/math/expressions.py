"""Compares answers that are not plain numbers (roots, powers, symbols, tuples, relations) with math-verify.

Used by `answers.py`. `grader.py` asks math-verify, about short expressions of bounded size.
"""

from __future__ import annotations

import re
from fractions import Fraction

from quatrain.reward.math import grader
from quatrain.reward.math.exact import exact_value, same_value
from quatrain.reward.math.notation import uniform
from quatrain.reward.math.words import CHANGED, split_at_words, without_units

_MAX_CHARS = 160
_MAX_GOLD_CHARS = 400
_MAX_MATRICES = 2
# Text passed to math-verify may contain numbers, single letters, and the notation of school mathematics.
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|chi|psi"
    "|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
_ALLOWED = re.compile(
    r"(?:\\(?:frac|binom|sqrt|pi|cdot|times|div|infty|cup|cap|setminus|in|le|ge|ne|pm|emptyset|circ"
    rf"|{_GREEK}|mathbb\{{[RNZQC]\}}|overline"
    r"|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|lfloor|rfloor|lceil|rceil)(?![A-Za-z])"
    r"|\\(?:begin|end)\{[pb]matrix\}|\\[{}|\\]"
    r"|[0-9]{1,100}(?![0-9])|[A-Za-z]|[-+*/.,()\[\]{}^ <>=|_:!&])*"
)
_FRACTION = r"\\frac\{[-+0-9 ]{1,6}(?:\\sqrt\{[0-9]{1,2}\})?[-+0-9 ]{0,6}\}\{[0-9]\}"
_IN_BRACES = rf"-?(?:[0-9]{{1,2}}|[0-9]/[0-9]|[0-9]?[A-Za-z](?:[+-][0-9])?|{_FRACTION})"
_EXPONENT = re.compile(rf"\^\s*(?:\{{\s*({_IN_BRACES})\s*\}}|(-?[0-9A-Za-z]))(?![0-9^])")
_POWER_OF_TEN = re.compile(r"(?<![0-9A-Za-z.){}^])10\s?\^\s?\{\s?-?[0-9]{1,2}\s?\}(?!\s?[\^!])")
_SMALL_FACTORIAL = re.compile(r"(?:(?<![0-9.^])[0-9]{1,2}|(?<![0-9A-Za-z^])[A-Za-z])\s?!(?!\s?!)")
_SMALL_BINOMIAL = re.compile(
    r"\\binom\s?(?:\{\s?(?:[0-9]{1,2}|[A-Za-z])\s?\}\s?\{\s?(?:[0-9]{1,2}|[A-Za-z])\s?\}|[0-9]{2}(?![0-9]))"
)
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log)(?=\s?[\s(_^\\{0-9])"
)
# Values that math-verify would compute for seconds, and numbers that are not read.
_HUGE = re.compile(r"\^\s?\{?\s?-?(?:[0-9]{5,}|[0-9]+\s?\}?\s?\^\s?\{?\s?[0-9])|[0-9]{4,}\s?!|!\s?!")
_NUMBER_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|half|dozen|twice"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|billion)(?![A-Za-z])",
    re.IGNORECASE,
)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![A-Za-z])")
# The left side of a definition: y, f(x), x_1, AB, |AB|, (x, y), V_1:V_2. A sum or a product is an equation.
_SYMBOL = (
    rf"(?:\|?[A-Z]{{2,4}}\|?|(?:\\(?:{_GREEK})\s?|\\?[A-Za-z])(?:_(?:\{{[0-9A-Za-z]{{1,6}}\}}|[0-9A-Za-z]))?)"
)
_NAME = rf"{_SYMBOL}(?:\^\{{-1\}})?(?:\([A-Za-z0-9, ]{{1,8}}\))?"
_LEFT_SIDE = rf"(?:{_NAME}(?:\s?:\s?{_NAME})?|\([A-Za-z](?:\s?,\s?[A-Za-z]){{1,3}}\))\s?=(?!=)"
_DEFINITION = re.compile(rf"(?:\A|(?<=,))\s*{_LEFT_SIDE}\s*")
_MEMBER = re.compile(r"\A\s*[A-Za-z]\s?\\in(?![A-Za-z])\s*")
_FALLING = re.compile(r"([^<>=]+)(\\ge|>)([^<>=]+)(\\ge|>)([^<>=]+)")
_RISING = {">": "<", "\\ge": "\\le "}
_INLINE = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_BETWEEN_INLINE = re.compile(r"\s*(?:,|;|,?\s?(?:and|or)\b)[\s,]*")
_BASE = re.compile(r"\s*([0-9A-F.]+)\s?_\s?\{?\s?([0-9]{1,2})\s?\}?\s*")
_BRACKETED = re.compile(r"\s*(?:\\(?=\{))?([(\[{])([^()\[\]]*?)\\?([)\]}])\s*")


def same_expression(said: str, gold: str) -> bool:
    """Whether the line `said` contains an expression equal to `gold`, both in LaTeX or plain notation.

    False without asking math-verify for text over 160 characters, unknown commands, towers of powers, large
    factorials, and symbols that the gold answer lacks. Raises `grader.Unjudged` if math-verify takes too
    long or fails.
    """
    expected, got = _math_of(gold), _math_of(said)
    if not (expected and got):
        return False
    if expected == got:
        return True
    if _BASE.fullmatch(expected) or _BASE.fullmatch(got):
        return _same_in_base(got, expected)
    expected, got = _alike(expected, got)
    if "=" in expected and "=" not in got and not _RELATION.search(expected):  # an equation and a value
        return False
    values = exact_value(expected), exact_value(got)
    if values[0] is not None and values[1] is not None:
        return same_value(values[0], values[1])
    if not (_is_bounded(got) and _is_allowed(expected) and _same_brackets(expected, got)):
        return False
    letters, new_letters = _letters(expected), _letters(got) - _letters(expected)
    if new_letters and (letters or len(new_letters) > 1 or not _RELATION.search(got)):
        return False  # beside one variable of a relation
    return grader.ask(expected, got)


def exact_expression(text: str) -> Fraction | None:
    """The exact value of the mathematics of a line (`exact_value`); None if it has none."""
    return exact_value(_math_of(text))


def is_judgeable(gold: str) -> bool:
    """Whether a gold answer is an expression that math-verify parses; may raise `grader.Unjudged`."""
    expected = _math_of(gold)
    if exact_value(expected) is not None:
        return True
    if _HUGE.search(expected) or _NUMBER_WORD.search(gold):
        return False
    return bool(expected) and _is_allowed(expected) and grader.ask(_alike(expected, "")[0])


def _math_of(text: str) -> str:
    r"""The mathematics of a line in LaTeX, without units, prose and end punctuation.

    If the line contains $…$, \(…\) or \[…\], only the last of them is used, or the last list of them. Empty
    if words separate two pieces of mathematics, because joining the pieces would form a different expression.
    """
    text = uniform(" ".join(text.split()))
    text = re.sub(r"\[\s?\\begin\{(?:array\}\{[lcr|]+|matrix)\}", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:array|matrix)\}\s?\]", r"\\end{pmatrix}", text)
    text = _last_inline(without_units(text.replace("{bmatrix}", "{pmatrix}")))
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π", r"\\pi ", re.sub("[$%]", " ", text))
    text = re.sub(r"[\s,;]*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])[\s,]*|;", ", ", text)
    pieces = [] if CHANGED.search(text) else split_at_words(text)
    text = pieces[0] if len(pieces) == 1 else ""
    text = re.sub(r"(?:√|(?<![\\A-Za-z])sqrt)\s?([0-9]+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = _FUNCTION.sub(r"\\\1", text.replace("**", "^"))
    text = _both_signs(re.sub(r"\\approx(?![A-Za-z]).*", "", text))
    if chain := _FALLING.fullmatch(text):
        text = f"{chain[5]}{_RISING[chain[4]]}{chain[3]}{_RISING[chain[2]]}{chain[1]}"
    # Variables are separated by spaces, because math-verify reads some letter sequences as words (or, inf).
    return re.sub(
        r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+|(?<=[A-Za-z])(?=[A-Za-z])", lambda m: m[0] or " ", text
    ).strip()


def _both_signs(text: str) -> str:
    r"""`text` with each item of a list that has one `\pm` as two items."""
    if "\\pm" not in text or re.search(r"[()\[\]]", text):
        return text
    text = re.sub(r"\A\\\{(.*)\\\}\Z", r"\1", text)
    items = (item.split("\\pm") for item in text.split(","))
    return ",".join(f"{a}+{b[0]},{a}-{b[0]}" if len(b) == 1 else "\\pm".join([a, *b]) for a, *b in items)


def _last_inline(text: str) -> str:
    """The content of the last $…$ in `text`, with those before it in the same list; without $, the text."""
    found = list(_INLINE.finditer(text))
    contents: list[str] = []
    for this, following in zip(reversed(found), [None, *reversed(found)], strict=False):
        if following and not _BETWEEN_INLINE.fullmatch(text, this.end(), following.start()):
            break
        contents.append(next(filter(None, this.groups())))
    return ", ".join(reversed(contents)) if contents else text


def _alike(gold: str, said: str) -> tuple[str, str]:
    """Both expressions without their names, as in `y =`, if only one of them has names."""
    if not _RELATION.search(gold):
        said = _MEMBER.sub("", said)
    if not _RELATION.search(_MEMBER.sub("", gold)):
        gold = _MEMBER.sub("", gold)
        said = _MEMBER.sub("", said)
    if said and not ("=" in gold and "=" in said):
        gold, said = _DEFINITION.sub("", gold), _DEFINITION.sub("", said)
    return gold, said


def _same_in_base(said: str, gold: str) -> bool:
    """Whether two numbers in a base (120_9) have the same digits, and the same base if both name one."""
    one, other = (_BASE.fullmatch(text) for text in (gold, said))
    if one and other:
        return one.groups() == other.groups()
    named, plain = (one, said) if one else (other, gold)
    return named is not None and named[1] == plain.strip()


def _same_brackets(gold: str, said: str) -> bool:
    """Whether the brackets of an interval, tuple or set agree: (1, 2) is neither [1, 2] nor {1, 2}."""
    one, other = _BRACKETED.fullmatch(gold), _BRACKETED.fullmatch(said)
    if one and "," in one[2] and not other and "," in said and not _RELATION.search(said):
        return one[1] == "{"
    return not (one and other and "," in one[2]) or one[1] + one[3] == other[1] + other[3]


def _is_allowed(text: str) -> bool:
    """Whether `text` has only the notation that is passed to math-verify, in matched groups."""
    return len(text) <= _MAX_GOLD_CHARS and _ALLOWED.fullmatch(text) is not None


def _is_bounded(text: str) -> bool:
    """Whether `text` is short and whole, with few roots and powers, small exponents and no nested powers."""
    if len(re.findall(r"[(\[]", text)) != len(re.findall(r"[)\]]", text)):
        return False
    if text.endswith(("+", "-", "*", "/", "^")) or len(text) > _MAX_CHARS or not _is_allowed(text):
        return False
    if text.count("begin") > _MAX_MATRICES or text.count("sqrt") > 4:
        return False
    for sign, small in (("!", _SMALL_FACTORIAL), ("binom", _SMALL_BINOMIAL)):
        if not text.count(sign) == len(small.findall(text)) <= 3:
            return False
    text = _POWER_OF_TEN.sub("10", text)
    exponents = [braced or bare for braced, bare in _EXPONENT.findall(text)]
    if len(exponents) > 1 and any(len(e.lstrip("-")) > 1 and "frac" not in e for e in exponents):
        return False
    return len(exponents) == text.count("^") <= 3


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\(?:begin|end|mathbb)\{[A-Za-z]+\}|\\[A-Za-z]+", " ", text)))
