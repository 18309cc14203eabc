"""The packer on log-normal lengths: cap, padding, balance, time and widths of buffers.

    python benchmarks/packing.py [--json]

Lengths are exp(Normal(ln 300, 0.8)) clipped to [8, C], C = 4096. The baseline is what a dynamic batch
without a cap does: A = ceil(total / (C * D)) micro-batches, A * D bins by Karmarkar-Karp on cost.

A second table is the mean padding of totals around one budget.
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

from quatrain.ops.packing import DEFAULT_COST, Packing, plan_packing

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


TOTALS = {"0.1 to 0.5": (0.1, 0.5), "0.5 to 4": (0.5, 4.0)}  # budgets of all shards


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


def least_imbalance(lengths: np.ndarray, max_tokens: int, num_shards: int) -> float:
    """A bound that no plan's imbalance is below: the longest sequence alone in its bin, and in the D - 1
    others as many of the next longest, in part if need be, as the cap lets in.
    """
    longest, *others = np.sort(lengths)[::-1]
    others = np.array(others)
    room = (num_shards - 1) * max_tokens - (np.cumsum(others) - others)
    tokens = np.clip(room, 0, others)
    own = DEFAULT_COST.of(longest, longest**2)
    rest = DEFAULT_COST.of(tokens.sum(), (tokens * others).sum())
    return max(1.0, float(own * num_shards / (own + rest)))


def imbalance(packing: Packing, lengths: np.ndarray) -> float:
    """The largest cost of a bin over the mean of its micro-batch."""
    bins = [[lengths[rows] for rows in group] for group in packing.bins]
    costs = [[DEFAULT_COST.of(held.sum(), (held**2).sum()) for held in group] for group in bins]
    return float(max(max(group) / np.mean(group) for group in costs))


def padding(packing: Packing, lengths: np.ndarray, num_shards: int) -> float:
    return float(1 - lengths.sum() / (sum(packing.widths) * num_shards))


def mean_padding(least: float, most: float) -> float:
    """Of totals from `least` to `most` budgets of 4,096 and 16,384 tokens on each of one to four shards."""
    known, rng, found = np.minimum(log_normal(1, 5000), 1000), np.random.default_rng(0), []
    for num_shards, budgets, max_tokens in itertools.product(
        (1, 2, 3, 4), np.linspace(least, most, 40), (4096, 16384)
    ):
        drawn = rng.choice(known, 2000)
        count = np.searchsorted(np.cumsum(drawn), budgets * max_tokens * num_shards)
        lengths = drawn[: max(count, 1)]
        found.append(padding(plan_packing(lengths, max_tokens, num_shards), lengths, num_shards))
    return statistics.mean(found)


def measure(n: int, num_shards: int, draws: int) -> dict:
    """One row of the table; fractions, not per cent, and milliseconds."""
    violations, paddings, imbalances, forced, ms = 0, [], [], [], []
    full, bins_over, batches_over, num_bins, baseline_ms = [], 0, 0, 0, []
    for seed in range(draws):
        lengths = log_normal(seed, n)
        packing, spent = timed(plan_packing, lengths, MAX_TOKENS, num_shards)
        ms.append(spent)
        violations += sum(int(lengths[rows].sum()) > MAX_TOKENS for group in packing.bins for rows in group)
        paddings.append(padding(packing, lengths, num_shards))
        imbalances.append(imbalance(packing, lengths))
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
    small = [{"budgets": name, "mean_padding": mean_padding(*ends)} for name, ends in TOTALS.items()]
    device = f"{platform.machine()} CPU, {os.cpu_count()} cores, one used"
    if as_json:
        print(
            json.dumps({"device": device, "max_tokens": MAX_TOKENS, "rows": rows, "totals": small}, indent=1)
        )
        return
    print(f"{device}; C = {MAX_TOKENS}; left: plan_packing, right: Karmarkar-Karp on cost without a cap\n")
    print(table(rows))
    print("\nworst padding: over the draws of at least 8 * C * D tokens; * over all draws, none has as many")
    print("> 1.05: draws of a larger imbalance; forced: draws in which no plan is within 1.05, by a bound")
    print("batches > C: draws in which at least one bin is over the cap")
    print("\nmean padding where the total is so many budgets, over one to four shards:")
    for each in small:
        print(f"{each['budgets']:>12}  {each['mean_padding']:.1%}")


if __name__ == "__main__":
    main()
