"""The rollout alone: seconds of prefill and decode, what sharing a prompt's cache saves, and wasted decode.

    python benchmarks/decode.py models/SmolLM2-135M-Instruct.Q4_1.gguf --json decode.json

Prompts are `--prompts` texts of about `--prompt-tokens` tokens, each sampled `--n` times for exactly
`--new-tokens` tokens (no stop token). The same sequences are decoded with each prompt's cache shared by its
group, and with a copy for every sequence (as many groups of one), in turns; the first round compiles and is
dropped, the figures are medians. Beside them, the products of a decode step with the weights alone: what is
left where the cache costs nothing.

Wasted decode is slots times steps that gave no token, on log-normal completion lengths (median 64, sigma 1,
at most 512 tokens), for the scheduler and for batches that run until their last row is done; no model needed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from quatrain.backend import this_backend
from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.decode import TOKENS_PER_CALL
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.scheduler import Scheduler
from quatrain.models.decoder import logits
from quatrain.models.families import Architecture
from quatrain.models.layers import linear
from quatrain.types.batches import Prompt
from quatrain.weights.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="path of a model; without it, only wasted decode")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=130)
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args()
    report: dict[str, Any] = {"wasted decode": wasted_decode(sequences=256, n=8, slots=32)}
    if args.model:
        report |= measure(args)
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians for a shared and for a copied prompt cache, and which of the two is faster here."""
    model = load_model(args.model)
    arch, params = model.arch, model.params
    tokenizer = load_tokenizer(args.model)
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.prompt_tokens * 3 // 4, args.prompt_tokens * 5 // 4 + 1, args.prompts)
    ids = [rng.integers(0, arch.vocab_size, length).astype(np.int32) for length in lengths]
    modes = {
        "shared": (args.n, [Prompt(i, row, "") for i, row in enumerate(ids)]),
        "copied": (1, [Prompt(i, row, "") for i, row in enumerate(ids * args.n)]),
    }
    engines = {}
    for name, (n, _) in modes.items():
        config = RolloutConfig(n=n, max_new_tokens=args.new_tokens)
        engines[name] = RolloutEngine(arch, config, tokenizer, stop_ids=(), seed=0, dtype=args.dtype)
        engines[name].sync_weights(params, 0)
    products = weight_products(arch, params, args.prompts * args.n, args.dtype)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    bare = []
    for number in range(args.rounds + 1):
        for name, (_, prompts) in modes.items():
            row = one_round(engines[name], prompts, number, args.new_tokens)
            print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
            rounds[name].append(row)
        bare.append(products())
    figures: dict[str, Any] = {
        name: {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
        for name, rows in rounds.items()
    }
    step = {name: figures[name]["ms_per_step"] for name in modes}
    return {
        "device": jax.devices()[0].device_kind,
        **figures,
        "ms_per_step, weight products alone": statistics.median(bare[1:]),
        "faster here": min(step, key=step.__getitem__),
        "ms_per_step, shared / copied": step["shared"] / step["copied"],
    }


def one_round(engine: RolloutEngine, prompts: list[Prompt], number: int, new_tokens: int) -> dict[str, float]:
    """Figures of one `generate`; the first token of a sequence comes from the prefill."""
    began = time.perf_counter()
    batch = engine.generate(prompts, step=number)
    seconds = time.perf_counter() - began
    metrics = {name: metric.result() for name, metric in batch.metrics.items()}
    return {
        "seconds": seconds,
        "tokens_per_s": float(batch.completion_lengths.sum()) / seconds,
        "prefill_s": metrics["rollout/prefill_s"],
        "decode_s": metrics["rollout/decode_s"],
        "ms_per_step": 1e3 * metrics["rollout/decode_s"] / max(new_tokens - 1, 1),
        "compilations": metrics["rollout/compilations"],
    }


def weight_products(arch: Architecture, params: Any, rows: int, dtype: str) -> Callable[[], float]:
    """A function that times `rows` tokens times every weight matrix, in milliseconds."""
    backend = this_backend()
    widest = max(weight.shape[-1] for weight in jax.tree.leaves(params["layers"]))
    wide = jax.random.normal(jax.random.key(0), (rows, max(widest, arch.hidden_size)), dtype)

    @jax.jit
    def run(params: Any, wide: jax.Array) -> jax.Array:
        total = logits(params, arch, wide[:, : arch.hidden_size], backend=backend).max()
        for i, layer in enumerate(params["layers"]):
            for name, weight in layer.items():
                if weight.ndim > 1 and not name.endswith("_bias"):
                    # A shift of its own keeps products of equal inputs from becoming one.
                    inputs = wide[:, : weight.shape[-1]] + i
                    total += linear(inputs, layer, name, few_rows=backend.few_rows).max()
        return total

    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    jax.block_until_ready(run(cast, wide))

    def measured() -> float:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            jax.block_until_ready(run(cast, wide))
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    return measured


def wasted_decode(*, sequences: int, n: int, slots: int) -> dict[str, float]:
    """Share of decode work without a token, by the scheduler and by batches that wait for their last row."""
    draw = random.Random(0)
    lengths = [min(max(round(draw.lognormvariate(np.log(64), 1.0)), 1), 512) for _ in range(sequences)]
    scheduler, tokens, work = Scheduler(slots), 0, 0
    for _ in range(sequences // n):
        scheduler.submit(n)
    left = {(i // n, i % n): length - 1 for i, length in enumerate(lengths)}
    while scheduler.num_unfinished:
        wanted = scheduler.wanted_slots()
        sizes = wanted, scheduler.wanted_prefix_slots(wanted)
        if sizes != (len(scheduler.slots), len(scheduler.rows)):
            scheduler.resize(*sizes)
        while admitted := scheduler.admit():
            for ticket, _ in admitted:
                for sample in range(n):
                    if not left[ticket, sample]:
                        scheduler.finish_waiting(ticket, sample)
        scheduler.fill()
        running = {slot: (who.ticket, who.sample) for slot, who in enumerate(scheduler.slots) if who}
        steps = min(TOKENS_PER_CALL, max((left[key] for key in running.values()), default=0))
        work += steps * len(scheduler.slots)
        for slot, key in running.items():
            done = min(steps, left[key])
            tokens, left[key] = tokens + done, left[key] - done
            if not left[key]:
                scheduler.finish(slot)
    batches = [lengths[first : first + slots] for first in range(0, sequences, slots)]
    until_last = sum(slots * (max(batch) - 1) for batch in batches)
    return {"slots refilled": 1 - tokens / work, "until the last row": 1 - tokens / until_last}


if __name__ == "__main__":
    main()
