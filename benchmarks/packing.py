"""The packer on log-normal lengths: cap, padding, balance and time, beside balancing by cost without a cap.

    python benchmarks/packing.py [--json]

Lengths are exp(Normal(ln 300, 0.8)) clipped to [8, C], C = 4096. The baseline is what a dynamic batch
without a cap does: A = ceil(total / (C * D)) micro-batches, A * D bins by Karmarkar-Karp on cost.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import platform
import statistics
import time

import numpy as np

from quatrain.ops.packing import DEFAULT_COST, least_imbalance, plan_packing

MAX_TOKENS = 4096
SHARDS = (1, 2, 8)
SEEDS = {120: 200, 512: 100, 2048: 50, 8192: 15}  # sequences -> draws
COLUMNS = {
    "sequences": "n",
    "num_shards": "D",
    "draws": "draws",
    "violations": "bins > C",
    "worst_padding": "worst padding",
    "worst_imbalance": "worst imbalance",
    "median_imbalance": "median",
    "over_target": "> 1.05",
    "over_target_forced": "forced",
    "median_ms": "median ms",
    "worst_ms": "worst ms",
    "baseline_bins_over": "bins > C",
    "baseline_batches_over": "batches > C",
    "baseline_median_ms": "median ms",
}


def log_normal(seed: int, n: int) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(300), 0.8, n))
    return np.clip(lengths, 8, MAX_TOKENS).astype(np.int64)


def karmarkar_karp(costs: list[float], num_bins: int) -> list[list[int]]:
    """Largest differencing: join the two partial partitions of the largest spread, dearest with cheapest bin.

    A partial partition is its bins that are not empty, by descending cost.
    """
    ties = itertools.count()
    heap = [(-cost, next(ties), [(cost, [row])]) for row, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        alone = num_bins - len(second)  # this many of the first's bins meet an empty one
        joined = first[:alone] + second[: num_bins - len(first)]
        for (a, rows), (b, others) in zip(first[alone:], reversed(second[max(num_bins - len(first), 0) :])):
            joined.append((a + b, rows + others))
        joined.sort(key=lambda entry: -entry[0])
        least = joined[-1][0] if len(joined) == num_bins else 0.0
        heapq.heappush(heap, (least - joined[0][0], next(ties), joined))
    return [rows for _, rows in heap[0][2]]


def timed(function, *arguments):
    begin = time.perf_counter()
    result = function(*arguments)
    return result, 1e3 * (time.perf_counter() - begin)


def measure(n: int, num_shards: int, draws: int) -> dict:
    """One row of the table; fractions, not per cent, and milliseconds."""
    violations, paddings, imbalances, forced, ms = 0, [], [], [], []
    full, bins_over, batches_over, num_bins, baseline_ms = [], 0, 0, 0, []
    for seed in range(draws):
        lengths = log_normal(seed, n)
        packing, spent = timed(plan_packing, lengths, MAX_TOKENS, num_shards)
        ms.append(spent)
        violations += sum(int(lengths[rows].sum()) > MAX_TOKENS for group in packing.bins for rows in group)
        paddings.append(packing.padding_fraction)
        imbalances.append(packing.imbalance)
        forced.append(least_imbalance(lengths, MAX_TOKENS, num_shards))
        full.append(lengths.sum() >= 8 * MAX_TOKENS * num_shards)

        count = -(-int(lengths.sum()) // (MAX_TOKENS * num_shards)) * num_shards
        costs = DEFAULT_COST.of(lengths, lengths**2).tolist()
        bins, spent = timed(karmarkar_karp, costs, count)
        baseline_ms.append(spent)
        over = sum(int(lengths[rows].sum()) > MAX_TOKENS for rows in bins)
        bins_over, num_bins, batches_over = bins_over + over, num_bins + count, batches_over + (over > 0)
    return {
        "sequences": n,
        "num_shards": num_shards,
        "draws": draws,
        "violations": violations,
        "worst_padding": max(p for p, f in zip(paddings, full) if f or not any(full)),
        "padding_target_applies": any(full),
        "worst_imbalance": max(imbalances),
        "median_imbalance": statistics.median(imbalances),
        "over_target": sum(value > 1.05 for value in imbalances) / draws,
        "over_target_forced": sum(value > 1.05 for value in forced) / draws,
        "median_ms": statistics.median(ms),
        "worst_ms": max(ms),
        "baseline_bins_over": bins_over / num_bins,
        "baseline_batches_over": batches_over / draws,
        "baseline_median_ms": statistics.median(baseline_ms),
    }


def cell(row: dict, name: str) -> str:
    value = row[name]
    if isinstance(value, int):
        return str(value)
    if "imbalance" in name:
        return f"{value:.3f}"
    if name.endswith("_ms"):
        return f"{value:.1f}"
    mark = "*" if name == "worst_padding" and not row["padding_target_applies"] else ""
    return f"{value:.1%}{mark}"


def table(rows: list[dict]) -> str:
    cells = [list(COLUMNS.values()), *([cell(row, name) for name in COLUMNS] for row in rows)]
    sizes = [max(map(len, column)) for column in zip(*cells)]
    first_of_baseline = list(COLUMNS).index("baseline_bins_over")
    lines = []
    for line in cells:
        padded = [text.rjust(size) for text, size in zip(line, sizes)]
        lines.append("  ".join(padded[:first_of_baseline]) + "  |  " + "  ".join(padded[first_of_baseline:]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object with all rows instead of the table")
    as_json = parser.parse_args().json
    rows = [measure(n, num_shards, draws) for n, draws in SEEDS.items() for num_shards in SHARDS]
    device = f"{platform.machine()} CPU, {os.cpu_count()} cores, one used"
    if as_json:
        print(json.dumps({"device": device, "max_tokens": MAX_TOKENS, "rows": rows}, indent=1))
        return
    print(f"{device}; C = {MAX_TOKENS}; left: plan_packing, right: Karmarkar-Karp on cost without a cap\n")
    print(table(rows))
    print("\nworst padding: over the draws of at least 8 * C * D tokens; * over all draws, none has as many")
    print("> 1.05: draws of a larger imbalance; forced: draws in which no plan is within 1.05, by a bound")
    print("batches > C: draws in which at least one bin is over the cap")


if __name__ == "__main__":
    main()
