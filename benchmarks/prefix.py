"""Dialogues of several turns: what kept contexts save of their prefill, and what idle ones cost others.

    python benchmarks/prefix.py [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--turns 8] [--json prefix.json]

`--episodes` dialogues begin with the same 100 tokens; each turn has an answer of 40 tokens and 60 tokens of
the user. They are sampled as requests with kept contexts (`rollout.prefix_share`), and as requests without.
Each way runs `--rounds` + 2 times on new tokens, in turns; the first two compile and are dropped. Figures are
the tokens and the seconds of prefill, by turn and as the ratio of medians `kept / without` (asked: at most
0.25).

Then the seconds of a decode step of four sequences, with 64 idle contexts kept over those with none (1.02).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.session import Session, SessionSettings
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling
from quatrain.weights.load_model import load_model

FIRST, SAID, ANSWER = 100, 60, 40
CACHE_BYTES = 4 << 30
WARM = 2
"""Rounds that compile: sizes of the cache stay as they grew, so that the second begins with others."""
Turns = list[tuple[int, float]]
"""The tokens and the seconds of prefill of each turn."""


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:tiny", help="path of a model")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--idle", type=int, default=64, help="idle contexts beside a decode step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, vocab_size=len(tokenizer) if ":" in args.model else None)
    ways = {
        "kept": requests(args, model, tokenizer, 0.5),
        "without": requests(args, model, tokenizer, 0.0),
    }
    rounds: dict[str, list[Turns]] = {name: [] for name in ways}
    for number in range(args.rounds + WARM):
        for name, way in ways.items():
            rounds[name].append(way(number))
    tokens = {name: sum(count for count, _ in found[-1]) for name, found in rounds.items()}
    by_turn = {
        name: [statistics.median(s[1] for s in each) for each in zip(*found[WARM:], strict=True)]
        for name, found in rounds.items()
    }
    whole = {
        name: statistics.median(sum(seconds for _, seconds in turns) for turns in found[WARM:])
        for name, found in rounds.items()
    }
    steps = decode_steps(args, model, tokenizer)
    report = {
        "prefilled tokens": tokens,
        "seconds of prefill": whole,
        "seconds of prefill by turn": by_turn,
        "kept / without": whole["kept"] / whole["without"],
        "kept, last / second turn": by_turn["kept"][-1] / by_turn["kept"][1],
        "without, last / second turn": by_turn["without"][-1] / by_turn["without"][1],
        "decode step beside idle contexts / alone": steps,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


def words(arch: Any, *seed: int, count: int) -> list[int]:
    """Tokens that no other seed has."""
    return np.random.default_rng(seed).integers(0, arch.vocab_size, count).tolist()


def new_session(args: Any, model: Any, tokenizer: Any, share: float) -> Session:
    """A session of requests that keeps contexts in a share of its memory."""
    where = "xla", one_device(), CACHE_BYTES
    settings = SessionSettings(
        model.arch, tokenizer, (), 0, jnp.dtype(args.dtype), *where, prefix_share=share
    )
    return Session(settings, Sampling(n=1, max_new_tokens=ANSWER), None, per_request_sampling=True)


def asked(
    session: Session, params: Any, contexts: list[list[int]], name: str, tokens: int = ANSWER
) -> list[Any]:
    """The completions of requests that are asked together, one for each dialogue."""
    prompts = [Prompt(0, np.array(ids, np.int32), "") for ids in contexts]
    sampling = Sampling(n=1, max_new_tokens=tokens)
    owners = [
        PerRequestSampling(sampling, 0, 0, number, session=f"{name}/{number}")
        for number in range(len(prompts))
    ]
    tickets = session.submit_own(prompts, owners)
    while not session.finished(tickets):
        session.advance(params, 0)
    return session.take(tickets)


def requests(args: Any, model: Any, tokenizer: Any, share: float) -> Callable[[int], Turns]:
    """Plays dialogues whose turns are requests with the whole context."""
    session = new_session(args, model, tokenizer, share)

    def play(number: int) -> Turns:
        contexts = [words(model.arch, number, count=FIRST) for _ in range(args.episodes)]
        found = []
        for turn in range(args.turns):
            before = session.stats
            done = asked(session, model.params, contexts, f"{number}")
            work = session.stats - before
            found.append((work.prefilled_tokens, work.prefill_s))
            contexts = [
                [*context, *each.tokens, *words(model.arch, number, turn, episode, count=SAID)]
                for episode, (context, each) in enumerate(zip(contexts, done, strict=True))
            ]
        for episode in range(args.episodes):
            session.forget(f"{number}/{episode}")
        return found

    return play


def decode_steps(args: Any, model: Any, tokenizer: Any) -> float:
    """The seconds of a decode step beside so many idle contexts that are kept, over those of one alone."""
    sessions = [new_session(args, model, tokenizer, 0.5) for _ in range(2)]
    for number in range(args.idle):
        asked(sessions[0], model.params, [words(model.arch, number, 1, count=FIRST)], f"idle {number}", 2)
    seconds: list[list[float]] = [[], []]
    for number in range(args.rounds + WARM):
        contexts = [words(model.arch, number, 2, i, count=FIRST) for i in range(4)]
        for session, of in zip(sessions, seconds, strict=True):
            before = session.stats
            asked(session, model.params, contexts, f"{number}")
            work = session.stats - before
            of.append(work.decode_s / work.slot_steps)
    beside, alone = (statistics.median(of[WARM:]) for of in seconds)
    return beside / alone


if __name__ == "__main__":
    main()
