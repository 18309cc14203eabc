"""What becomes of runs, checkpoints, rewards and inputs under faults: the figures of `docs/reliability.md`.

    python benchmarks/chaos.py                          # everything, about an hour on two cores
    python benchmarks/chaos.py checkpoints inputs       # two parts
    python benchmarks/chaos.py kills --cases 10

`kills`: a run is killed with SIGKILL at random moments and resumed, until it ends; its weights and metrics
are compared with those of a run that was left alone. `checkpoints`: one file of a run's newest checkpoint is
damaged (`damage.py`). `rewards`: reward functions that hang, crash, leave or return nonsense
(`tests/bad_rewards.py`). `processes`: a fault in one of two processes of a run, which is then resumed and
compared. `inputs`: damaged and hostile files (`tests/fuzz`).

It prints a Markdown table. `recovered`: the result is that without the fault, or what the fault costs by the
documentation. `lost`: something that was finished had to be given up. `wrong`: another result, without an
error. `hung`: no end within the time limit. The exit status is 1 if the last three are not 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.run.checkpoint import Checkpointer, DamagedCheckpoint
from quatrain.run.run_dir import checkpoint_steps

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "tests", "tests/fuzz")]

import bad_rewards  # noqa: E402
from damage import damage  # noqa: E402
from fuzz_inputs import NAMED, STRATEGIES, each_damaged  # noqa: E402
from fuzz_worker import Case, Worker  # noqa: E402
from rollouts import make_rollouts  # noqa: E402
from runs import steady_metrics  # noqa: E402

VERDICTS = ("recovered", "lost", "wrong", "hung")
HANG_S = 900.0
"""Seconds without an end after which a run counts as hung; a stopped process is found after 100."""
SETTINGS = (
    "data.batch_size=4",
    "rollout.n=4",
    "run.steps=24",
    "checkpoint.every_steps=3",
    "sft.steps=3",
    "eval.every_steps=8",
    "eval.num_prompts=4",
    "eval.final_num_prompts=4",
)
TWO = ("launch", "--processes", "2", "--devices-per-process", "1", "--")

Verdicts = Counter[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parts: dict[str, tuple[Callable[[int, Path], Verdicts], int]] = {
        "kills": (kills, 100),
        "checkpoints": (checkpoints, 400),
        "rewards": (rewards, len(bad_rewards.FAILING) + len(bad_rewards.HARMLESS)),
        "processes": (processes, 20),
        "inputs": (inputs, 5000),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--cases", type=int, help="faults of each part; default: those of the page")
    args = parser.parse_args(arguments)
    unknown = set(args.parts) - parts.keys()
    if unknown:
        parser.error(f"the parts are {', '.join(parts)}; got {', '.join(sorted(unknown))}")
    print(f"| faults | cases | {' | '.join(VERDICTS)} | seconds |")
    print("|---" * (len(VERDICTS) + 3) + "|")
    logging.disable(logging.WARNING)  # faults are reported to users, one by one
    bad = 0
    for name in args.parts or parts:
        run, cases = parts[name]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="quatrain-chaos-") as folder:
            found = run(args.cases or cases, Path(folder))
        cells = [name, found.total(), *(found[verdict] for verdict in VERDICTS)]
        seconds = time.perf_counter() - began
        print(f"| {' | '.join(map(str, cells))} | {seconds:.0f} |", flush=True)
        bad += found.total() - found["recovered"]
    return 1 if bad else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- runs ---


class Training:
    """The run `run` in `folder`, which `start` begins or resumes in a process of its own."""

    def __init__(self, folder: Path, *launcher: str):
        folder.mkdir(exist_ok=True)
        self.folder, self.run, self._launcher = folder, folder / "run", launcher
        self.steps_lost = 0
        """Training steps that were in a complete checkpoint and were trained again."""
        self._newest, self._said_before = 0, 0

    def start(self) -> subprocess.Popen[bytes]:
        options = [x for s in (*SETTINGS, f"run.dir={self.folder}", "run.name=run") for x in ("--set", s)]
        command = ["-m", "quatrain.cli", *self._launcher, "train", "--resume", "auto", *options]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
        self._note_resume()
        self._newest = max(checkpoint_steps(self.run), default=0)
        with (self.folder / "output").open("ab") as log:
            self._said_before = log.tell()
            return subprocess.Popen([sys.executable, *command], env=environ, stdout=log, stderr=log)

    def _note_resume(self) -> None:
        """Counts the steps by which the process before resumed earlier than the newest checkpoint allows."""
        output = self.folder / "output"
        said = output.read_bytes()[self._said_before :].decode(errors="replace") if output.exists() else ""
        resumed = re.search(r"resuming .* from step (\d+)", said)
        if resumed and int(resumed[1]) < self._newest:
            self.steps_lost += self._newest - int(resumed[1])

    def finish(self) -> None:
        """Runs to the end; raises RuntimeError if that is not reached."""
        status = self.start().wait(HANG_S)
        self._note_resume()
        if status:
            raise RuntimeError((self.folder / "output").read_text(errors="replace")[-2000:])

    def rows(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def verdict(self, whole: Training) -> str:
        """Of a finished run, beside one that was left alone."""
        if not self.same_as(whole):
            return "wrong"
        return "lost" if self.steps_lost else "recovered"

    def same_as(self, other: Training) -> bool:
        """Whether weights and metrics are equal to the bit, and nothing is doubled or missing."""
        same_weights = self.weights() == other.weights()
        return same_weights and steady_metrics(self.run) == steady_metrics(other.run)

    def weights(self) -> dict[str, bytes]:
        """The files of the exported weights, which several processes write in parts."""
        files = (self.run / "final").glob("*.safetensors")
        found = {path.name: path.read_bytes() for path in files}
        assert found, f"no weights in {self.run}"
        return found


def kills(cases: int, folder: Path) -> Verdicts:
    """Kills runs until there were this many; each run ends when a life is long enough."""
    whole = Training(folder / "whole")
    whole.finish()
    found, rng, runs = Counter[str](), random.Random(0), 0
    while found.total() < cases:
        training, killed, runs = Training(folder / f"run{runs}"), 0, runs + 1
        verdict = "hung"
        while killed < cases - found.total():
            if not killed_at_random(training, rng):
                break
            killed += 1
        try:
            training.finish()
            verdict = training.verdict(whole)
        except RuntimeError as error:
            say(str(error))
            verdict = "lost"
        except subprocess.TimeoutExpired:
            pass
        found[verdict] += killed
        say(f"kills: {killed} of one run: {verdict}")
        shutil.rmtree(training.folder)
    return found


def killed_at_random(training: Training, rng: random.Random) -> bool:
    """Starts or resumes the run, and kills it: half of the times while it loads, else within some steps.

    False if it ended before.
    """
    process, rows, began = training.start(), training.rows(), time.monotonic()
    if rng.random() < 0.5:
        waited = rng.uniform(0, 8)
        while time.monotonic() < began + waited and process.poll() is None:
            time.sleep(0.01)
    else:
        while training.rows() <= rows and process.poll() is None and time.monotonic() < began + HANG_S:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 1))
    process.kill()
    return process.wait() == -signal.SIGKILL


FAULTS = ("kill", "kill", "full disk", "terminate", "stop")
"""What happens to one of two processes: SIGKILL, SIGTERM, SIGSTOP, after which it no longer answers, or a
disk that takes no file of more than FULL_BYTES."""
FULL_BYTES = 200_000
"""More than the metrics, less than the arrays of a checkpoint."""


def processes(cases: int, folder: Path) -> Verdicts:
    """A fault in one of two processes; both must end, and the resumed run must be the run without it."""
    whole = Training(folder / "whole", *TWO)
    whole.finish()
    found, rng = Counter[str](), random.Random(0)
    for case in range(cases):
        training = Training(folder / f"run{case}", *TWO)
        fault, process = FAULTS[case % len(FAULTS)], case % 2
        verdict = fault_in_one(training, fault, process, rng, whole)
        say(f"processes: {fault} process {process}: {verdict}")
        found[verdict] += 1
        shutil.rmtree(training.folder)
    return found


def fault_in_one(training: Training, fault: str, process: int, rng: random.Random, whole: Training) -> str:
    numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
    launcher, after = training.start(), rng.randrange(1, 20)
    while training.rows() <= after and launcher.poll() is None:
        time.sleep(0.005)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    time.sleep(rng.uniform(0, 0.5))
    if fault in numbers:
        os.kill(int(children[process]), numbers[fault])
    else:
        resource.prlimit(int(children[process]), resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    try:
        ended = launcher.wait(HANG_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return "hung"
    if not ended:
        return "wrong"
    try:
        training.finish()
    except subprocess.TimeoutExpired:
        return "hung"
    except RuntimeError as error:
        say(str(error))
        return "lost"
    return training.verdict(whole)


# --- files ---


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError in the block after HANG_S seconds."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def checkpoints(cases: int, folder: Path) -> Verdicts:
    """Damages one file of a run's newest checkpoint; the right state of that or the one before counts."""
    import jax

    training = Training(folder / "whole")
    training.finish()
    good = training.run / "checkpoints"
    steps = Checkpointer(good).steps()
    like = {step: _state(good, step) for step in steps}
    found, rng = Counter[str](), random.Random(0)
    for _ in range(cases):
        bad = folder / "damaged"
        shutil.copytree(good, bad)
        what = damage(bad / str(steps[-1]), rng)
        try:
            with limited():
                step, arrays, host = Checkpointer(bad).restore(like[steps[-1]][0])
            pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(like[step][0]), strict=True)
            same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
            whole = same and host == like[step][1]
            verdict = "wrong" if not whole else "recovered" if step >= steps[-2] else "lost"
        except DamagedCheckpoint:
            verdict = "lost"
        except TimeoutError:
            verdict = "hung"
        if verdict != "recovered":
            say(f"checkpoints: {what}: {verdict}")
        found[verdict] += 1
        shutil.rmtree(bad)
    return found


def _state(folder: Path, step: int) -> tuple[Any, Any]:
    """Arrays and host data of a checkpoint, without the model that they belong to."""
    import jax
    import orbax.checkpoint as ocp

    saved = ocp.PyTreeCheckpointer().metadata(folder / str(step) / "arrays").item_metadata.tree
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in saved.items()}
    _, arrays, host = Checkpointer(folder).restore(wanted, step)
    return arrays, host


def inputs(cases: int, folder: Path) -> Verdicts:
    """Reads named and damaged files in a process with limits on time and memory."""
    found = Counter[str]()
    with closing(Worker()) as worker:

        def use(case: Case) -> None:
            outcome = worker.run(case)
            verdict = "recovered" if outcome.good else "hung" if outcome.kind == "hung" else "wrong"
            found[verdict] += 1
            if verdict != "recovered":
                say(f"inputs: {case.target}: {outcome.kind}: {outcome.detail}")

        for make in list(NAMED.values())[:cases]:
            use(make())
        left = cases - found.total()
        for index, target in enumerate(STRATEGIES):
            share = left * (index + 1) // len(STRATEGIES) - left * index // len(STRATEGIES)
            if share:
                each_damaged(target, share, use)
    return found


# --- rewards ---

COMPLETIONS = ("aa", bad_rewards.BAD, "c", "dddd")
EXPECTED = (2.0, -1.0, 1.0, 4.0)
TIMEOUT_S = 1.0


def rewards(cases: int, folder: Path) -> Verdicts:
    """Each function fails on one of four completions; only that one may lose its reward."""
    found = Counter[str]()
    for name, harmless in _functions(cases):
        verdict = reward_verdict(name, harmless)
        if verdict != "recovered":
            say(f"rewards: {name}: {verdict}")
        found[verdict] += 1
    return found


def _functions(cases: int) -> Iterator[tuple[str, bool]]:
    both = [(name, False) for name in bad_rewards.FAILING] + [(name, True) for name in bad_rewards.HARMLESS]
    yield from both[:cases]


def reward_verdict(name: str, harmless: bool) -> str:
    from quatrain.config.schema import RewardConfig
    from quatrain.reward.scorer import RewardScorer

    config = RewardConfig(
        functions={f"{bad_rewards.__file__}:{name}": 1.0}, timeout_s=TIMEOUT_S, memory_mb=256, workers=2
    )
    rollouts = replace(make_rollouts(list(COMPLETIONS)), group_ids=np.array([0, 0, 1, 1]))
    try:
        with limited(), closing(RewardScorer(config)) as scorer:
            batch = scorer.score(rollouts)
    except TimeoutError:
        return "hung"
    expected = [float(len(text)) for text in COMPLETIONS] if harmless else list(EXPECTED)
    errors = batch.metrics[f"reward/{name}/errors"].result()
    right = batch.rewards.tolist() == expected and errors == (0 if harmless else 1)
    return "recovered" if right else "wrong"


if __name__ == "__main__":
    sys.exit(main())
