"""A child process that compares expressions with math-verify; a timer signal kills it on a slow comparison.

`reward/expressions.py` runs it as a script. It reads lines with a JSON list from standard input and
writes a JSON boolean for each to standard output: whether the two expressions of [gold, said] are equal, or
whether the expression of [gold] is parsed. It imports nothing from quatrain, and no other module
imports math-verify.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

CPU_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 2 << 30
# Only LaTeX extraction is used, because math-verify's extraction of plain expressions passes text to Python's
# eval. Units were removed before; math-verify would also remove variables, such as h and r of 2\pi hr.
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
_LATEX = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]


def same(gold: str, said: str) -> bool:
    """Whether math-verify finds the two LaTeX expressions equal; False if it raises an error."""
    try:
        expected, got = _parsed(gold), _parsed(said)
        return verify(expected, got, timeout_seconds=None, allow_set_relation_comp=True)
    except Exception:  # any error of the parser, sympy or the memory limit counts as not equal
        return False


def is_parsed(gold: str) -> bool:
    """Whether math-verify parses this LaTeX expression."""
    try:
        return bool(_parsed(gold))
    except Exception:  # any error of the parser, sympy or the memory limit
        return False


def _parsed(text: str) -> list:
    """The expression that math-verify reads; empty if it reads none."""
    return parse(f"${text}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)


def main() -> None:
    """Answers requests until standard input ends."""
    # Suppresses math-verify's warning that its own time limit is off; it cannot stop a loop in C code.
    logging.disable(logging.WARNING)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent process handles them
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        gold, *said = json.loads(line)
        # The default action of SIGPROF ends the process, even in the middle of C code.
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        verdict = same(gold, *said) if said else is_parsed(gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
