"""A reward for programs: 1 if the program of a completion passes all tests of its row, else 0.

    quatrain train --set 'reward.functions={examples/code_reward.py:passes: 1.0}' --set reward.per_call=sample

With these, set `data.train` to rows with a column `tests`, a list of mappings with the text that a program
reads (`input`) and the text that it must print (`output`). Of this row, `data.question_column` is `question`:

    {"question": "Print the sum of two numbers.", "tests": [{"input": "1 2", "output": "3"}]}

The program is the last block of Python in the completion. Each test runs it in a sandbox of its own
(docs/sandbox.md), and what it prints is compared here, where the program cannot reach. `python` is a tool
that runs what a model writes between its turns: --set 'rollout.tools=[examples/code_reward.py:python]'.
"""

import re

from quatrain import Sandbox

# Without isolation on this machine, this raises an error, and the run does not start.
SANDBOX = Sandbox(timeout_s=2.0, memory_mb=256)
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)


def passes(prompts, completions, tests):
    """1 for each completion whose program prints what its row's tests ask for, else 0; None without tests."""
    pairs = zip(completions, tests)
    return [float(passes_all(completion, row)) if row else None for completion, row in pairs]


def passes_all(completion, tests):
    """Whether the program passes all tests; the first one that fails decides."""
    program = program_of(completion)
    return program is not None and all(passes_one(program, test) for test in tests)


def program_of(completion):
    """The last block of Python, or the last one without a language, which beside Python is often output."""
    blocks = BLOCK.findall(completion)
    python = [code for language, code in blocks if language.lower() in ("py", "python", "python3")]
    plain = [code for language, code in blocks if not language]
    return next(reversed(python or plain), None)


def passes_one(program, test):
    result = SANDBOX.run_python(program, stdin=test["input"])
    return result.succeeded and result.stdout.split() == test["output"].split()


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It has no network, and its files are gone when it ends.
    """
    return str(SANDBOX.run_python(code))
