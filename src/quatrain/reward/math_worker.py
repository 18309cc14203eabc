"""A child process that compares expressions with math-verify, killed by the kernel when one takes too long.

Run as a script by `reward/expressions.py`: a JSON line [gold, said] in, a JSON boolean out, until the end.
It imports nothing of quatrain, and it alone imports math-verify.
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
# LaTeX alone: the extraction of plain expressions hands text to Python's eval. Units are removed before text
# comes here; math-verify would also remove variables that spell one, such as the last two of 2\pi hr.
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
_LATEX = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]


def same(gold: str, said: str) -> bool:
    """Whether math-verify finds the two LaTeX expressions equal; False where it fails on one of them."""
    try:
        expected, got = (parse(f"${text}$", _LATEX, parsing_timeout=None) for text in (gold, said))
        return bool(expected and got and verify(expected, got, timeout_seconds=None))
    except Exception:  # whatever the parser, sympy or the memory limit raises, it is no equality
        return False


def main() -> None:
    """Answers requests until standard input ends."""
    # math-verify warns that it runs without its own time limit, which a busy C loop would outlast.
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the keyboard is the parent's to handle
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        gold, said = json.loads(line)
        # The default action of this signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        verdict = same(gold, said)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
