"""What an episode of several turns costs: tokens prefilled with the cache kept between turns, and without.

    python benchmarks/episodes.py --json episodes.json
    python benchmarks/episodes.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --turns 1 2 4 8 --samples 2

`--samples` episodes for each of `--prompts` prompts of `--prompt-tokens` tokens have `--turns` turns of the
policy, each of `--turn-tokens` sampled tokens; between two turns come `--answer-tokens` tokens, as from an
environment that answers at once. There are no stop tokens, so that all episodes have the same length.

`kept` is the rollout's own session. `recomputed` is the same session with a scheduler that gives the samples
it holds between turns no row of the prompt cache, so that each turn begins with a prefill of all tokens
before it. Both sample with the same randomness; `same tokens` says whether they sampled the same ones, which
rounding can change, and `logprob_diff` is the largest difference of their log-probabilities if they did.

Each pair of runs is made twice, and the second time, when all programs are compiled, is what counts. The
table and the JSON have, for each number of turns: tokens of an episode, tokens prefilled for an episode
(a prompt that several samples share is divided among them), and seconds of prefill and of decoding of all
episodes together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.groups import Group
from quatrain.engine.scheduler import Scheduler
from quatrain.engine.session import Sampler, Session, Tally
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling
from quatrain.weights.load import Model, load_model

CACHE_BYTES = 2 << 30


class Forgetful(Scheduler):
    """Holds samples without their keys and values."""

    def hold(self, slot: int) -> tuple[int, int | None]:
        """Frees `slot` and holds its sample, as `hold_waiting` holds one that never had a slot."""
        self.finish(slot)
        return self._hold(None)


class Recomputing(Session):
    """A session in which each turn computes all tokens before it again."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._scheduler = Forgetful(0, self._sampler.num_replicas)


MODES = {"kept": Session, "recomputed": Recomputing}


@dataclass(frozen=True)
class Workload:
    """Episodes of the same length; sizes in tokens."""

    prompts: int
    samples: int
    prompt_tokens: int
    turn_tokens: int
    answer_tokens: int

    def length(self, turns: int) -> int:
        """Tokens of an episode."""
        return self.prompt_tokens + turns * self.turn_tokens + (turns - 1) * self.answer_tokens

    def tokens(self, vocab_size: int, *of: int, size: int) -> np.ndarray:
        """Random ids of an answer, or of a prompt, that depend on its numbers alone."""
        return np.random.default_rng(of).integers(0, vocab_size, size).astype(np.int32)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    work = Workload(args.prompts, args.samples, args.prompt_tokens, args.turn_tokens, args.answer_tokens)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, seed=0, vocab_size=len(tokenizer), eos_token_ids=())
    rows = [measure(model, tokenizer, work, turns) for turns in args.turns]
    report = {"model": args.model, "workload": vars(work), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--turn-tokens", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    return parser.parse_args(arguments)


def measure(model: Model, tokenizer: Any, work: Workload, turns: int) -> dict[str, Any]:
    """The figures of both modes for episodes of `turns` turns, after a round that compiles."""
    for _ in range(2):
        ran = {mode: run(session, model, tokenizer, work, turns) for mode, session in MODES.items()}
    episodes = work.prompts * work.samples
    row: dict[str, Any] = {"turns": turns, "length": work.length(turns)}
    for mode, (tally, _) in ran.items():
        row[mode] = {
            "prefilled_tokens": tally.prefilled_tokens / episodes,
            "prefill_s": tally.prefill_s,
            "decode_s": tally.decode_s,
        }
    return row | compared(*(completions for _, completions in ran.values()))


def run(
    make: type[Session], model: Model, tokenizer: Any, work: Workload, turns: int
) -> tuple[Tally, list[Completion]]:
    """All episodes, from the first token to the last: (the session's totals, completions in order)."""
    vocabulary = model.arch.vocab_size
    sampler = Sampler(
        model.arch,
        tokenizer,
        (),
        seed=0,
        dtype=jnp.dtype("float32"),
        attention="xla",
        mesh=one_device(),
        cache_bytes=CACHE_BYTES,
        usual_prompt=work.prompt_tokens,
        more_context=work.length(turns) - work.prompt_tokens,
    )
    sampling = Sampling(n=work.samples, max_new_tokens=work.turn_tokens * turns, temperature=1.0)
    session = make(sampler, sampling, None, lambda completion: len(completion.turns) < turns)
    prompts = [
        Prompt(i, work.tokens(vocabulary, 0, i, size=work.prompt_tokens), "") for i in range(work.prompts)
    ]
    numbers = range(work.samples)
    session.reserve(prompts, work.prompts * work.samples)
    tickets = session.submit_groups([Group.of(prompt, 0, numbers, work.turn_tokens) for prompt in prompts])
    playing = {(ticket, n): (i, n) for i, ticket in enumerate(tickets) for n in numbers}
    done: dict[tuple[int, int], Completion] = {}
    while playing:
        session.advance(model.params, 0)
        for end in session.take_ends():
            episode = playing.pop((end.ticket, end.sample))
            if end.held is None:
                done[episode] = end.completion
                continue
            turn = len(end.completion.turns)
            answer = work.tokens(vocabulary, 1, *episode, turn, size=work.answer_tokens)
            session.resume(end.held, answer.tolist(), (turn + 1) * work.turn_tokens)
            playing[end.held, 0] = episode
    return session.tally, [done[episode] for episode in sorted(done)]


def compared(kept: Sequence[Completion], recomputed: Sequence[Completion]) -> dict[str, Any]:
    """Whether both modes sampled the same tokens, and how far their log-probabilities are apart."""
    pairs = list(zip(kept, recomputed, strict=True))
    if any(a.tokens != b.tokens for a, b in pairs):
        return {"same_tokens": False, "logprob_diff": None}
    apart = max(np.abs(np.subtract(a.logprobs, b.logprobs)).max() for a, b in pairs)
    return {"same_tokens": True, "logprob_diff": float(apart)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| turns | tokens of an episode | tokens prefilled: kept | recomputed | seconds of prefill: kept | "
        "recomputed | seconds of decoding: kept | recomputed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = [row[mode] for mode in MODES]
        tokens = [f"{each['prefilled_tokens']:,.0f}" for each in of]
        seconds = [f"{each[key]:.2f}" for key in ("prefill_s", "decode_s") for each in of]
        cells = [str(row["turns"]), f"{row['length']:,}", *tokens, *seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
