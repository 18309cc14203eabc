"""What rollouts ahead of training cost in learning: the quickstart with older and older data.

    python benchmarks/staleness.py --only 'parity/*' --seeds 5 --out results.jsonl --figure staleness.svg
    python benchmarks/staleness.py --only 'stress/*' --seeds 2 --out results.jsonl

`parity/ETA` trains with `rollout.max_staleness` ETA, exact or in flight; without checkpoints in between, so
that no fence makes the data fresher. `stress/ETA CORRECTION` has a learning rate four times as high;
CORRECTION is a value of `update.correction`, or `rollout` for `update.old_logprobs: rollout`, or
`uncorrected`, which trains stale data as if it were fresh (a run refuses that; the loss in `uncorrected.py`
divides the weights out again).

Results, tables and figure are those of `algorithms.py`, whose `--help` explains them and the options.
"""

from __future__ import annotations

import sys
from pathlib import Path

from algorithms import Settings, Suite, main

from quatrain.config.load import load_config

UNCORRECTED = Path(__file__).with_name("uncorrected.py")
STRESS_RATE = 4.0
"""Times the quickstart's learning rate."""
CORRECTIONS: dict[str, Settings] = {
    "truncate": {"update.correction": "truncate"},
    "mask": {"update.correction": "mask"},
    "rollout": {"update.old_logprobs": "rollout"},
    "uncorrected": {"update.correction": "truncate", "update.loss": f"{UNCORRECTED}:uncorrected"},
}


def staleness(learning_rate: float) -> Suite:
    """All variants; `learning_rate` is that of the quickstart."""
    settings: dict[str, Settings] = {}
    for eta in (0, 1, 2):
        settings[f"parity/{eta}"] = {"rollout.max_staleness": eta}
    for eta in (1, 2):
        settings[f"parity/{eta}, in flight"] = {"rollout.max_staleness": eta, "rollout.in_flight": True}
    stress = {"optimizer.learning_rate": STRESS_RATE * learning_rate}
    settings["stress/0"] = stress
    for eta in (4, 8):
        for name, own in CORRECTIONS.items():
            settings[f"stress/{eta} {name}"] = {**stress, "rollout.max_staleness": eta, **own}
    titles = {
        "parity": "`rollout.max_staleness`",
        "stress": f"`rollout.max_staleness` and correction, learning rate × {STRESS_RATE:g}",
    }
    return Suite(titles, settings)


def quickstart_rate() -> float:
    """The learning rate of the quickstart."""
    return load_config(None, environ={}).config.optimizer.learning_rate


if __name__ == "__main__":
    sys.exit(main(suite=staleness(quickstart_rate())))
