"""Rollout workers on Ray: what they cost beside the engine in process, and what a killed worker costs.

    python benchmarks/fleet.py beside configs/gsm8k_smollm2_cpu.yaml
    python benchmarks/fleet.py kills configs/gsm8k_smollm2_cpu.yaml --figure fleet.svg

`beside` samples the same batches with the engine in this process and with one worker by Ray, in turns, and
prints the median ratio of their times, and the fraction of completions with the same tokens.

`kills` samples one batch with two workers: unharmed, with one worker killed (SIGKILL) at a quarter of it, and
with a worker killed at each quarter. It prints the seconds of each and the fraction of completions with the
tokens of the unharmed batch, and draws the completions over time with the kills marked.

Both need a quiet machine and the extra `ray`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quatrain.config.load import load_config
from quatrain.config.schema import Config
from quatrain.data.prompts import load_prompts
from quatrain.loop.policy import LoadedPolicy, load_policy
from quatrain.loop.stages import build_engine
from quatrain.report.plot import can_plot, style_axes
from quatrain.rollout.fleet import Fleet
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import RolloutProgress

LARGEST_GAP = 1e-3
"""Log-probabilities of the same tokens differ by less, in nats."""
QUARTERS = (0.25, 0.5, 0.75)
CASES: dict[str, tuple[float, ...]] = {"unharmed": (), "one kill": (0.25,), "three kills": QUARTERS}
"""At which fractions of the batch a worker is killed."""


class Run(NamedTuple):
    """A batch, its seconds, (seconds, completions) over time, and the seconds of the kills."""

    batch: RolloutBatch
    seconds: float
    progress: list[tuple[float, int]]
    kills: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("beside", "kills"))
    parser.add_argument("config", type=Path, nargs="?", help="default: the quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a batch")
    parser.add_argument("--rounds", type=int, default=5, help="batches of each in `beside`")
    parser.add_argument("--figure", type=Path, help="file of the figure of `kills`")
    args = parser.parse_args(arguments)
    config = load_config(args.config, args.set).config
    loaded = load_policy(config, critic=False)
    source = load_prompts(config.data.train, config.data, loaded.tokenizer, seed=config.seed)
    if args.what == "beside":
        batches = [source.take(i * args.prompts, args.prompts) for i in range(args.rounds + 1)]
        print("\n".join(beside(config, loaded, batches)))
        return 0
    runs = kills(config, loaded, source.take(0, args.prompts))
    print("\n".join(kills_table(runs)))
    if args.figure is not None:
        if not can_plot():
            print("a figure needs the extra `plot`", file=sys.stderr)
            return 1
        draw(runs, args.figure)
    return 0


def with_workers(config: Config, count: int) -> Config:
    """The configuration with `count` workers on Ray."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": count})})


def beside(config: Config, loaded: LoadedPolicy, batches: Sequence[Sequence[Prompt]]) -> list[str]:
    """The table of `beside`; the first batch compiles and is not counted."""
    engines = {
        "in process": build_engine(config, loaded),
        "Ray": build_engine(with_workers(config, 1), loaded),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    same: list[float] = []
    for step, prompts in enumerate(batches):
        found = {}
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.sync_weights(loaded.params, step)
            found[name] = engine.generate(prompts, step=step)
            seconds[name].append(time.perf_counter() - began)
        same.append(share_of_same(found["in process"], found["Ray"]))
    for engine in engines.values():
        engine.close()
    ratios = [ray / own for own, ray in zip(*(times[1:] for times in seconds.values()), strict=True)]
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return [
        *(f"{name}: {median:.2f} s a batch" for name, median in medians.items()),
        f"Ray / in process: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"completions with the same tokens: {statistics.mean(same):.4f}",
    ]


def kills(config: Config, loaded: LoadedPolicy, prompts: Sequence[Prompt]) -> dict[str, Run]:
    """A run of each case; the workers are new in each, and have compiled before it is timed."""
    runs: dict[str, Run] = {}
    for name, fractions in CASES.items():
        runs[name] = run_with_kills(config, loaded, prompts, fractions)
    return runs


def run_with_kills(
    config: Config, loaded: LoadedPolicy, prompts: Sequence[Prompt], fractions: Sequence[float]
) -> Run:
    """A batch during which a worker is killed at each of these fractions of its completions."""
    left, progress, killed = list(fractions), list[tuple[float, int]](), list[float]()
    began = time.perf_counter()

    def look(now: RolloutProgress) -> None:
        at = time.perf_counter() - began
        progress.append((at, now.completions))
        if left and now.completions >= left[0] * now.total and kill_one(fleet, len(killed)):
            killed.append(at)
            left.pop(0)

    fleet: Any = build_engine(with_workers(config, 2), loaded, on_progress=look)
    asked, left[:] = left[:], []
    fleet.sync_weights(loaded.params, 0)
    fleet.generate(prompts, step=0)  # compiles
    fleet.sync_weights(loaded.params, 1)
    left[:] = asked
    progress.clear()
    began = time.perf_counter()
    batch = fleet.generate(prompts, step=1)
    seconds = time.perf_counter() - began
    fleet.close()
    progress.append((seconds, batch.input_ids.shape[0]))
    return Run(batch, seconds, progress, killed)


def kill_one(fleet: Fleet, number: int) -> bool:
    """Kills one of the workers that are alive; whether there was one."""
    processes = [worker.process for worker in fleet.workers]  # type: ignore[attr-defined]
    if not processes:
        return False
    os.kill(processes[number % len(processes)], signal.SIGKILL)
    return True


def share_of_same(one: RolloutBatch, other: RolloutBatch) -> float:
    """The fraction of completions with the same tokens in both batches, which have the same groups.

    Workers decode other numbers of sequences at a time, and rounding that depends on it can change a token
    whose draw falls between two. Raises AssertionError if log-probabilities of common tokens differ.
    """
    np.testing.assert_array_equal(one.group_ids, other.group_ids)
    width = min(one.input_ids.shape[1], other.input_ids.shape[1])
    equal = one.input_ids[:, :width] == other.input_ids[:, :width]
    common = np.logical_and.accumulate(equal, axis=1)
    gaps = np.abs(one.rollout_logprobs[:, :width] - other.rollout_logprobs[:, :width])
    assert gaps[common].max() < LARGEST_GAP, gaps[common].max()
    ends = [
        np.array_equal(a[x], b[y])
        for a, x, b, y in zip(
            one.input_ids, one.attention_mask, other.input_ids, other.attention_mask, strict=True
        )
    ]
    return float(np.mean(ends))


def kills_table(runs: dict[str, Run]) -> list[str]:
    """The table of `kills`."""
    table = [
        "| | seconds | retried groups | workers started again | same completions |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        retried, restarts = (
            run.batch.metrics[f"fleet/{each}"].result() for each in ("retried_groups", "restarts")
        )
        same = share_of_same(runs["unharmed"].batch, run.batch)
        table.append(f"| {name} | {run.seconds:.1f} | {retried:.0f} | {restarts:.0f} | {same:.4f} |")
    return table


def draw(runs: dict[str, Run], path: Path) -> None:
    """Completions over time, with a mark at each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        times, counts = zip((0.0, 0), *run.progress, strict=True)
        (line,) = axes.plot(times, counts, drawstyle="steps-post", label=name)
        marks = [max(count for at, count in [(0.0, 0), *run.progress] if at <= kill) for kill in run.kills]
        axes.plot(run.kills, marks, "x", color=line.get_color(), markersize=9, markeredgewidth=2)
    style_axes(axes, "Completions of a batch by two workers")
    axes.set_xlabel("seconds (a cross: a worker is killed)")
    axes.set_ylabel("completions")
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
