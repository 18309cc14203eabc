"""What the checks of the batch types cost in a training step, over the step's seconds.

python benchmarks/validation.py [CONFIG] [--steps 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from quatrain.cli.bench import bench
from quatrain.config.load import load_config
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch

CHECKED = (RolloutBatch, RewardedBatch, AdvantagedBatch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", nargs="?", help="by default the quickstart")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {kind.__name__: [] for kind in CHECKED}
    for kind in CHECKED:
        kind.__post_init__ = _timed(kind.__post_init__, seconds[kind.__name__])  # type: ignore[method-assign]
    step_s = bench(load_config(args.config, (), os.environ), args.steps)["time/step_s"]
    checks = {name: statistics.median(values) for name, values in seconds.items()}
    total = sum(checks.values())
    print(json.dumps({"checks_s": checks, "step_s": step_s, "fraction": total / step_s}, indent=2))


def _timed(check: Callable[[Any], None], seconds: list[float]) -> Callable[[Any], None]:
    def timed(self: Any) -> None:
        began = time.perf_counter()
        check(self)
        seconds.append(time.perf_counter() - began)

    return timed


if __name__ == "__main__":
    main()
