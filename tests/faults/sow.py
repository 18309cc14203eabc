"""Sows each fault of the tables beside this file into a copy of `src`, and runs the tests named with it.

`make test-faults` measures the strength of the quick tests so: every fault must be caught by the tests that
it names, which pass without it. A fault is a plausible error: a text of one file of `src/quatrain`, and the
one in its place. It is no patch, because a text survives edits of other lines. The text must occur exactly
once (`test_sow.py` checks that in the test suite); where code has changed, sow the fault there anew.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent
ROOT = TESTS.parent
TIME_LIMIT_S = 1800
"""Of the tests of one fault; a fault after which they hang is not caught by them."""
CACHE = "QUATRAIN_FAULTS_CACHE"
"""The variable with the folder of compiled programs: most are the same with and without a fault."""


class Fault(NamedTuple):
    """In `file` of `src/quatrain`, `new` in place of `old`; `why` says what is wrong then.

    `tests` are files, folders or `file::test` of `tests/` that fail.
    """

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self) -> str | None:
        """Why it cannot be sown; None if it can."""
        path = ROOT / "src/quatrain" / self.file
        if not path.is_file():
            return f"src/quatrain/{self.file} is gone"
        if (times := path.read_text(encoding="utf-8").count(self.old)) != 1:
            return f"its text occurs {times} times in src/quatrain/{self.file}, not once"
        if missing := [test for test in self.tests if not _exists(test)]:
            return f"tests/{missing[0]} is gone"
        return None


def read_faults() -> list[Fault]:
    """The faults of all tables, `*.toml`, beside this file."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
    return [
        Fault(**{**fault, "tests": tuple(fault["tests"])}) for table in tables for fault in table["fault"]
    ]


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = TESTS / file
    if not name:
        return path.exists()
    return path.is_file() and bool(re.search(rf"^def {re.escape(name)}\(", path.read_text("utf-8"), re.M))


@contextmanager
def _copy(fault: Fault | None) -> Iterator[Path]:
    """A copy of `src` with the fault."""
    with tempfile.TemporaryDirectory(prefix="quatrain-fault-") as folder:
        copy = Path(folder, "src")
        shutil.copytree(ROOT / "src", copy)
        if fault is not None:
            path = copy / "quatrain" / fault.file
            path.write_text(path.read_text("utf-8").replace(fault.old, fault.new), "utf-8")
        yield copy


def run_tests(tests: Sequence[str], fault: Fault | None, cache: Path) -> tuple[str, str]:
    """(passed, failed or why neither, the end of what pytest printed) of the tests, with the fault."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "sow", *(f"tests/{test}" for test in tests)]
    with _copy(fault) as copy:
        path = os.pathsep.join([str(copy), str(FOLDER), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, CACHE: str(cache)}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            settings: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": output}
            try:
                code = subprocess.run(
                    command, **settings, stderr=subprocess.STDOUT, timeout=TIME_LIMIT_S
                ).returncode
            except subprocess.TimeoutExpired:
                return f"did not end within {TIME_LIMIT_S} s", ""
            output.seek(0)
            text = output.read()[-2000:]
    return {0: "passed", 1: "failed"}.get(code, f"ended with pytest's exit status {code}"), text


def pytest_sessionstart() -> None:
    """As a plugin of pytest: programs are kept in the folder that all runs of a call share."""
    import jax

    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main() -> int:
    """The exit status: 0 if all faults are caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], help="faults, or patterns of names; default: all")
    parser.add_argument("--at-once", type=int, default=2, help="runs of pytest at one time")
    given = parser.parse_args()
    faults = [fault for fault in read_faults() if any(fnmatch(fault.name, name) for name in given.names)]
    if not faults:
        print(f"no fault is called {' or '.join(given.names)}")
        return 1
    problems = {fault: problem for fault in faults if (problem := fault.problem())}
    sown = [fault for fault in faults if fault not in problems]
    with tempfile.TemporaryDirectory(prefix="quatrain-programs-") as folder:
        cache = Path(folder)
        with ThreadPoolExecutor(given.at_once) as pool:
            selections = list(dict.fromkeys(fault.tests for fault in sown))
            clean = pool.map(lambda tests: run_tests(tests, None, cache), selections)
            for tests, (verdict, text) in zip(selections, clean, strict=True):
                if verdict != "passed":
                    print(f"without a fault, {' '.join(tests)} {verdict}:\n{text}", flush=True)
                    problems |= {f: "its tests do not pass without it" for f in sown if f.tests == tests}
            sown = [fault for fault in sown if fault not in problems]
            for fault, (verdict, _) in zip(
                sown, pool.map(lambda fault: run_tests(fault.tests, fault, cache), sown), strict=True
            ):
                print(f"{'caught' if verdict == 'failed' else 'NOT CAUGHT':10}  {fault.name}", flush=True)
                if verdict != "failed":
                    problems[fault] = f"NOT CAUGHT: {' '.join(fault.tests)} {verdict}"
    for fault, problem in problems.items():
        print(f"{fault.name}: {problem}\n  {fault.why}")
    print(f"{len(faults) - len(problems)} of {len(faults)} faults are caught")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
