"""The rollout alone: seconds of prefill and decode, what sharing a prompt's cache saves, and wasted decode.

    python benchmarks/decode.py models/SmolLM2-135M-Instruct.Q4_1.gguf --json decode.json

Prompts are `--prompts` texts of about `--prompt-tokens` tokens, each sampled `--n` times for exactly
`--new-tokens` tokens (no stop token). The same sequences are decoded with each prompt's cache shared by its
group, and with a copy for every sequence (as many groups of one), in turns; the first round compiles and is
dropped, the figures are medians. Beside them, the products of a decode step with the weights alone: what is
left where the cache costs nothing.

Wasted decode, long completions and the memory of a prefill need no model. A long prompt is computed in parts,
and what the compiler needs for one beside its arguments is compared with a row of 2,048 tokens. Log-normal
lengths (median 2,048, at most 32,768 tokens; `--quick`: a sixteenth of these) are sampled with unlimited
memory and in a quarter of what that takes at most, by the scheduler alone.

Wasted decode is slots times steps that gave no token, on log-normal completion lengths (median 64, sigma 1,
at most 512 tokens), for the scheduler and for batches that run until their last row is done.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.backend import this_backend
from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.admission import RING_POSITIONS, Admission
from quatrain.engine.cache import Room
from quatrain.engine.decode import TOKENS_PER_CALL, Program, extend_program, prefill_program
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.groups import (
    PREFILL_TOKENS,
    Admitted,
    Continuation,
    Group,
    UsualSampling,
    calls,
    extension,
    pack_prompts,
    prompt_positions,
)
from quatrain.engine.scheduler import Scheduler
from quatrain.engine.service import EngineService
from quatrain.models.decoder import logits
from quatrain.models.families import Architecture, builtin_architecture
from quatrain.models.kv_cache import empty_cache
from quatrain.models.layers import linear
from quatrain.models.params import abstract_params
from quatrain.models.prefix_tree import NO_FORMS
from quatrain.parallel.mesh import one_device
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.weights.load_model import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="path of a model; without it, only what needs none")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=130)
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="long completions of a sixteenth of the length")
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args()
    arch = builtin_architecture("tiny", 300, (0,))
    report: dict[str, Any] = {
        "wasted decode": wasted_decode(sequences=256, n=8, slots=32),
        "long completions": long_completions(sequences=512, n=8, parts=16 if args.quick else 1),
        "bytes of a prefill": prefill_memory(arch, 32768),
    }
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
        engine = RolloutEngine(arch, config, tokenizer, stop_ids=(), seed=0, dtype=args.dtype)
        engines[name] = Rollouts(EngineService(engine, thread=None), tokenizer, Sampling.of(config))
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


def one_round(engine: Rollouts, prompts: list[Prompt], number: int, new_tokens: int) -> dict[str, float]:
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


class Simulation:
    """The scheduler and the admission of an engine, with samples of known lengths and without a model.

    `lengths` has a row for each prompt of `prompt` tokens; `positions` is the memory of a replica's cache.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        *,
        limit: int,
        positions: int,
        prompt: int,
        slots: int | None = None,
        replicas: int = 1,
        ring_positions: tuple[int, ...] = RING_POSITIONS,
    ):
        self.lengths, self.scheduler = lengths, Scheduler(1, replicas)
        self.groups: dict[int, Group] = {}
        room, size = Room(positions, 1, prompt_positions(prompt)), len(lengths[0])
        self.admission = Admission(
            self.scheduler, room, self.groups, size, slots, limit, ring_positions=ring_positions
        )
        self.steps = self.ring_steps = self.slot_steps = self.tokens = self.recomputed = self.read = (
            self.peak
        ) = 0
        ids = np.ones(prompt, np.int32)
        for number in range(len(lengths)):
            group = Group.of(Prompt(number, ids, ""), 0, range(size), limit)
            self.groups[self.scheduler.submit(size)] = group

    def run(self) -> dict[str, float]:
        """Figures of all rounds until the last sample has ended."""
        while self.scheduler.num_unfinished:
            self.round()
        return {
            "decode steps": self.steps,
            "decode steps, each ring by itself": self.ring_steps,
            "slots times steps": self.slot_steps,
            "wasted decode": 1 - self.tokens / max(self.slot_steps, 1),
            "positions read per position used": self.read
            / sum(n * n / 2 for row in self.lengths for n in row),
            "most positions": self.peak,
            "preempted": self.admission.num_preempted,
            "tokens computed again per token": self.recomputed / sum(map(sum, self.lengths)),
        }

    def round(self) -> None:
        """A round of the session."""
        scheduler, shape = self.scheduler, self.admission.next_shape()
        self.peak = max(self.peak, shape.num_positions)
        rings = tuple(ring.slots for ring in shape.rings)
        if (scheduler.rings, scheduler.num_prefix_slots) != (
            rings,
            shape.prefix_slots,
        ) or scheduler.misplaced:
            scheduler.resize(rings, shape.prefix_slots)
        while admitted := scheduler.admit():
            for ticket, _ in admitted:
                group = self.groups[ticket]
                if group.turn_length(0):  # of another replica, or preempted
                    self.recomputed += len(group.context) * scheduler.has_begun(ticket)
                    continue
                for sample, completion in enumerate(group.completions):
                    completion.tokens = range(1)
                    if self.lengths[ticket][sample] == 1:
                        scheduler.finish_waiting(ticket, sample)
        for _, who in scheduler.fill():
            self.recomputed += self.groups[who.ticket].turn_length(who.sample) - 1
        running = [(slot, who) for slot, who in enumerate(scheduler.slots) if who]
        left = {}
        for slot, who in running:
            left[slot] = self.lengths[who.ticket][who.sample] - self.groups[who.ticket].turn_length(
                who.sample
            )
            positions = shape.rings[scheduler.place(slot)[0]].positions
            length = self.groups[who.ticket].turn_length(who.sample)
            assert length - 1 + min(TOKENS_PER_CALL, left[slot]) <= positions, "a slot is too short"
        steps = min(TOKENS_PER_CALL, max(left.values(), default=0))
        self.steps += steps
        self.ring_steps += steps * len({scheduler.place(slot)[0] for slot, _ in running})
        self.slot_steps += steps * len(scheduler.slots)
        slots = sum(ring.slots * ring.positions for ring in shape.rings)
        self.read += steps * scheduler.num_replicas * slots
        for slot, who in running:
            completion, done = self.groups[who.ticket].completions[who.sample], min(steps, left[slot])
            completion.tokens = range(len(completion.tokens) + done)
            self.tokens += done
            if done == left[slot]:
                scheduler.finish(slot)


def prefill_memory(arch: Architecture, long: int, *, dtype: str = "float32") -> dict[str, int]:
    """What the compiler needs beside arguments: for a row of PREFILL_TOKENS, and for a part of a long prompt.

    `long` tokens of one prompt; `cache` is what its prefix slot takes.
    """
    backend, mesh = this_backend(), one_device()
    program = Program(arch, (), jnp.dtype(dtype), "xla", mesh)
    params = abstract_params(arch, jnp.float32)

    def temporary(run: Any, packed: Any, positions: int) -> tuple[int, int]:
        prompts = jax.eval_shape(lambda: empty_cache(arch, 1, positions, dtype, mesh))
        compiled = run(backend).lower(params, prompts, packed, program=program).compile()
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(prompts))
        return compiled.memory_analysis().temp_size_in_bytes, size

    def group(tokens: int) -> Group:
        return Group.of(Prompt(0, np.ones(tokens, np.int32), ""), 0, (0,), 1)

    row = pack_prompts([[Admitted(group(PREFILL_TOKENS), 0, 0)]], 1, 1, NO_FORMS, UsualSampling())
    usual, _ = temporary(prefill_program, row, PREFILL_TOKENS)
    left = [[Continuation(group(long), 0, 0, 0)]]
    batch, width, most = next(calls(left))
    part = extension(batch, 1, width, most, 1, UsualSampling())
    in_parts, cache = temporary(extend_program, part, prompt_positions(long))
    return {f"{PREFILL_TOKENS} tokens": usual, f"part of {long} tokens": in_parts, "cache": cache}


def wasted_decode(*, sequences: int, n: int, slots: int) -> dict[str, float]:
    """Share of decode work without a token, by the scheduler and by batches that wait for their last row."""
    lengths = lognormal(sequences, median=64, sigma=1.0, longest=512)
    rows = [lengths[first : first + n] for first in range(0, sequences, n)]
    refilled = Simulation(rows, limit=512, positions=1 << 40, prompt=128, slots=slots).run()
    batches = [lengths[first : first + slots] for first in range(0, sequences, slots)]
    until_last = sum(slots * (max(batch) - 1) for batch in batches)
    tokens = sum(lengths) - sequences
    return {"slots refilled": refilled["wasted decode"], "until the last row": 1 - tokens / until_last}


def long_completions(*, sequences: int, n: int, parts: int = 1) -> dict[str, Any]:
    """Log-normal lengths with unlimited memory, and with a quarter of what that takes at most.

    Their median is 2,048 tokens and the longest has 32,768; these and the positions of the rings are divided
    by `parts`.
    """
    median, longest = 2048 // parts, 32768 // parts
    sizes = {
        "limit": longest,
        "prompt": 200 // parts,
        "ring_positions": tuple(p // parts for p in RING_POSITIONS),
    }
    lengths = lognormal(sequences, median=median, sigma=1.0, longest=longest)
    rows = [lengths[first : first + n] for first in range(0, sequences, n)]
    figures: dict[str, Any] = {}
    positions = 1 << 40
    for name in ("unlimited memory", "a quarter of it"):
        figures[name] = Simulation(rows, positions=positions, **sizes).run()
        positions = figures[name]["most positions"] // 4
    whole, quarter = figures.values()
    ratio = quarter["decode steps"] / whole["decode steps"]
    return {**figures, "decode steps, a quarter / unlimited": ratio}


def lognormal(count: int, *, median: int, sigma: float, longest: int) -> list[int]:
    """Lengths of completions, the same in every call."""
    draw = random.Random(0)
    return [min(max(round(draw.lognormvariate(np.log(median), sigma)), 1), longest) for _ in range(count)]


if __name__ == "__main__":
    main()
