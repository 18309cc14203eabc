"""Compares answers that are not plain numbers (roots, powers, symbols, tuples) with math-verify.

Used by `reward/answers.py`. math-verify runs in a child process with limits on time and memory, because it
may take unlimited time on short inputs, and its own time limit works only in the main thread of a process.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path

from quatrain.child import Child, ChildError
from quatrain.reward.words import split_at_words, without_units

logger = logging.getLogger(__name__)

_MAX_CHARS = 100
# Text passed to math-verify may contain numbers, single letters, arithmetic, roots, pi, tuples and intervals.
_ALLOWED = re.compile(
    r"(?:\\(?:frac|sqrt|pi|cdot|times|div|infty|cup|left|right)(?![A-Za-z])"
    r"|[0-9]{1,15}(?![0-9])|[A-Za-z]|[-+*/.,()\[\]{}^ ])*"
)
_EXPONENT = re.compile(
    r"\^\s*(?:\{\s*(-?(?:[0-9]{1,2}|[0-9]/[0-9]|[A-Za-z]))\s*\}|(-?[0-9A-Za-z]))(?![0-9^])"
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def same_expression(said: str, gold: str) -> bool:
    """Whether the line `said` contains an expression equal to `gold`, both in LaTeX or plain notation.

    False without asking math-verify for text over 100 characters, relations, functions, towers of powers, and
    symbols that the gold answer lacks. False, with a warning, if math-verify takes too long or fails.
    """
    said, gold = _math_of(said), _math_of(gold)
    if not (said and gold and _is_bounded(said)) or _letters(said) - _letters(gold):
        return False
    return _ask(gold, said)


def _math_of(text: str) -> str:
    r"""The mathematics of a line in LaTeX, without units, prose and end punctuation.

    If the line contains $…$ or \(…\), only the last of them is used. Empty if words separate two pieces of
    mathematics, as in `3 or 5`, because joining the pieces would form a different expression.
    """
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", " ".join(text.split()))
    text = re.sub(r"\\[,!;: ]|~", " ", text)
    text = without_units(text)
    inline = re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)", text)
    text = next(filter(None, inline[-1])) if inline else text
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π", r"\\pi ", re.sub("[$%]", " ", text))
    pieces = split_at_words(text)
    text = pieces[0] if len(pieces) == 1 else ""
    text = re.sub(
        r"(?:√|(?<![\\A-Za-z])sqrt)\s?([0-9]+|\([^()]*\))", r"\\sqrt{\1}", text.replace("×", r"\times ")
    )
    text = re.sub(rf"[{_SUPERSCRIPTS}]", lambda m: f"^{_SUPERSCRIPTS.index(m[0])}", text.replace("**", "^"))
    # Variables are separated by spaces, because math-verify reads some letter sequences as words (or, inf).
    return re.sub(r"\\[A-Za-z]+|(?<=[A-Za-z])(?=[A-Za-z])", lambda m: m[0] or " ", text)


def _is_bounded(text: str) -> bool:
    """Whether `text` is short, with few roots and powers, small exponents and no nested powers."""
    if len(text) > _MAX_CHARS or not _ALLOWED.fullmatch(text):
        return False
    exponents = [braced or bare for braced, bare in _EXPONENT.findall(text)]
    small = all(len(exponent.lstrip("-")) < 2 for exponent in exponents) or len(exponents) == 1
    return len(exponents) == text.count("^") <= 3 and small and text.count("sqrt") <= 3


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


@functools.lru_cache(maxsize=4096)
def _ask(gold: str, said: str) -> bool:
    return _same(_math_verify, gold, said)


def _same(child: Child, gold: str, said: str) -> bool:
    try:
        return bool(child.ask([gold, said]))
    except ChildError as error:
        if error.late:
            logger.warning("math-verify took too long over %r, which counts as wrong", said)
        else:
            logger.warning("math-verify failed (%s) over %r, which counts as wrong", error, said)
        return False


_math_verify = Child(Path(__file__).with_name("math_worker.py"))
