"""What sequences with a grammar cost those without: tokens/s of free sequences beside them, over alone.

    python benchmarks/grammars.py [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--free 16] [--constrained 4] \\
        [--json grammars.json]

`--free` sequences of `--tokens` tokens are decoded alone, and beside `--constrained` others that follow a
JSON schema and end after them. Each way runs `--rounds` + 1 times, in turns; the first one compiles and is
dropped. A figure is the free sequences' tokens by the seconds of the rounds that decode alone; then the ratio
of medians `beside / alone` (asked: at least 0.6), and the seconds of the masks of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from quatrain.data.grammars import of_schema
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.engine.masks import guide_of
from quatrain.engine.session import Session, SessionSettings
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling
from quatrain.weights.load_model import load_model

PROMPT = 32
CACHE_BYTES = 4 << 30
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}},
    "minItems": 99,
}
"""An answer that does not end before the others."""


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:tiny", help="path of a model")
    parser.add_argument("--free", type=int, default=16)
    parser.add_argument("--constrained", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, vocab_size=len(tokenizer) if ":" in args.model else None)
    stop_ids = stop_token_ids(tokenizer, [tokenizer.eos_token_id])
    guide = guide_of(tokenizer, model.arch.vocab_size, stop_ids)
    where = "xla", one_device(), CACHE_BYTES
    settings = SessionSettings(
        model.arch, tokenizer, stop_ids, 0, jnp.dtype(args.dtype), *where, guide=lambda: guide
    )
    session = Session(settings, Sampling(n=1, max_new_tokens=1), None, per_request_sampling=True)
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    for number in range(args.rounds + 1):
        for name, count in (("alone", 0), ("beside", args.constrained)):
            found[name].append(tokens_per_s(args, model, session, count, number))
    medians = {name: statistics.median(each[1:]) for name, each in found.items()}
    report = {
        "free tokens/s": medians,
        "of each round": found,
        "beside / alone": medians["beside"] / medians["alone"],
        "seconds of a mask": mask_s(guide, args.constrained),
        "load of the machine": os.getloadavg(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


def tokens_per_s(args: Any, model: Any, session: Session, constrained: int, number: int) -> float:
    """Tokens of the free sequences by the seconds in which they are decoded, with so many others."""
    rng, grammar = np.random.default_rng(number), of_schema(SCHEMA)
    kinds = [None] * args.free + [grammar] * constrained
    # Likely words alone would end some sequences before others.
    sampling = [Sampling(1, args.tokens if kind is None else 2 * args.tokens) for kind in kinds]
    prompts = [Prompt(0, rng.integers(0, model.arch.vocab_size, PROMPT).astype(np.int32), "") for _ in kinds]
    owners = [
        PerRequestSampling(how, 0, number, i, grammar=kind)
        for i, (how, kind) in enumerate(zip(sampling, kinds, strict=True))
    ]
    tickets = session.submit_own(prompts, owners)
    free = tickets[: args.free]
    tokens, seconds = 0, 0.0
    while not session.finished(free):
        before, counted = session.stats, sum(len(session.completions(ticket)[0].tokens) for ticket in free)
        session.advance(model.params, 0)
        work = session.stats - before
        if not work.prefilled_tokens:
            tokens += sum(len(session.completions(ticket)[0].tokens) for ticket in free) - counted
            seconds += work.decode_s
    for ticket in tickets:
        session.cancel(ticket)
    return tokens / seconds


def mask_s(guide: Any, count: int) -> float:
    """Seconds of the masks of one step, at the beginning of an answer."""
    matchers = [guide.matcher(of_schema(SCHEMA)) for _ in range(count)]
    began = time.perf_counter()
    for _ in range(20):
        guide.masks(matchers)
    return (time.perf_counter() - began) / 20


if __name__ == "__main__":
    main()
