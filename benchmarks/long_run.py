"""Whether a long run needs more and more of the machine: memory, files, threads and programs by step.

    python benchmarks/long_run.py --steps 300
    python benchmarks/long_run.py --steps 300 --set rollout.max_staleness=1 --out rows.jsonl

Trains the quickstart in a process of its own and looks at it after every training step (Linux, `/proc`). It
prints a Markdown table with the figures after some of the steps; `--out` keeps those of all. `compiled` is
the number of programs that the run has compiled so far.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from quatrain.run.metrics import read_metrics

FIRST = (1, 2, 5, 10, 20)
"""Steps in the table besides every fiftieth."""
POLL_S = 0.02

Row = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="figures of all steps, one JSON object each")
    args = parser.parse_args(arguments)
    rows = watched(args.steps, args.set)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(table(rows)))
    return 0


def watched(steps: int, settings: Sequence[str]) -> list[Row]:
    """The figures after each training step."""
    with tempfile.TemporaryDirectory(prefix="quatrain-long-") as folder:
        every = (f"run.steps={steps}", f"run.dir={folder}", "run.name=run", *settings)
        options = [part for setting in every for part in ("--set", setting)]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
        command = [sys.executable, "-m", "quatrain.cli", "train", *options]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        metrics, rows = Path(folder) / "run" / "metrics.jsonl", []
        with open(os.devnull, "wb") as nowhere:
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            while process.poll() is None:
                nowhere.write(process.stderr.read() or b"")
                done = metrics.read_bytes().count(b"\n") - 1 if metrics.is_file() else 0
                if done > len(rows):
                    rows.append({"step": done, **figures(process.pid)})
                time.sleep(POLL_S)
        if process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
        compiled = 0.0
        by_step = {row["step"]: row for row in read_metrics(metrics)}
        for row in rows:
            own = by_step[int(row["step"])]
            compiled += sum(own.get(name, 0.0) for name in own if name.endswith("/compilations"))
            row["compiled"] = compiled
    return rows


def figures(pid: int) -> Row:
    """Resident memory in MiB, open files, threads and children of a process."""
    try:
        process = Path(f"/proc/{pid}")
        status = dict(
            line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
        )
        children = [path.read_text().split() for path in (process / "task").glob("*/children")]
        return {
            "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
            "files": len(list((process / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "children": sum(map(len, children)),
        }
    except (OSError, KeyError):  # it has just ended
        return {}


def table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table of some of the steps."""
    names = ("step", "memory_mib", "files", "threads", "children", "compiled")
    titles = ("step", "resident MiB", "files", "threads", "children", "compiled")
    shown = [row for row in rows if row["step"] in FIRST or row["step"] % 50 == 0]
    return [
        f"| {' | '.join(titles)} |",
        "|---" * len(names) + "|",
        *(f"| {' | '.join(f'{row.get(name, 0):.0f}' for name in names)} |" for row in shown),
    ]


if __name__ == "__main__":
    sys.exit(main())
