"""The update alone: fixed rows, a token budget, and a token budget with shared prompts, in turns.

    python benchmarks/update.py configs/gsm8k_smollm2_cpu.yaml --set data.train=train.jsonl --steps 3

Prompts are those of the configuration. Completions are random tokens of log-normal lengths (median
`--median`, sigma 0.6, at most rollout.max_new_tokens): what they say does not change what they cost. The
first step of each mode compiles and is dropped; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.load import load_config
from quatrain.config.schema import Config
from quatrain.data.prompts import load_prompts
from quatrain.forward.specs import PolicySpec
from quatrain.loop.policy import load_policy
from quatrain.types.batches import AdvantagedBatch, Prompt, RewardedBatch, RolloutBatch
from quatrain.update.learner import Learner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a fixed micro-batch")
    parser.add_argument("--median", type=float, default=60.0, help="completion tokens")
    args = parser.parse_args()
    config = load_config(args.config, args.set, os.environ).config
    loaded = load_policy(config)
    prompts = load_prompts(
        config.data.train, config.data, loaded.tokenizer, seed=config.seed, required_columns=()
    )
    policy = PolicySpec.of(config.model, loaded, temperature=1.0)
    budget = config.update.max_tokens_per_device
    tokens = {"micro_batch_size": None, "max_tokens_per_device": budget}
    modes = {
        f"fixed, {args.rows} rows": {"micro_batch_size": args.rows, "max_tokens_per_device": None},
        f"budget, {budget} tokens": {**tokens, "share_prompts": False},
        f"budget, {budget} tokens, prompts shared": {**tokens, "share_prompts": True},
    }
    reference = jax.tree.map(jnp.copy, loaded.params) if config.update.kl_coef else None
    learners = {
        name: Learner(
            policy,
            config.update.model_copy(update=sizes),
            config.logprob,
            config.optimizer,
            max_new_tokens=config.rollout.max_new_tokens,
            total_steps=1000,
            seed=config.seed,
            reference=reference,
        )
        for name, sizes in modes.items()
    }
    state = learners[next(iter(learners))].init(loaded.params)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in learners}
    for step in range(args.steps + 1):
        drawn = prompts.batch(step, config.data.batch_size)
        for name, learner in learners.items():
            batch = random_batch(config, drawn, loaded.arch.vocab_size, args.median, step, state.step)
            began = time.perf_counter()
            state = jax.block_until_ready(learner.step(state, batch))
            seconds = time.perf_counter() - began
            metrics = {key: metric.result() for key, metric in state.metrics.items()}
            row = {
                "seconds": seconds,
                "tokens_per_s": metrics["batch/tokens"] / seconds,
                "padding_fraction": metrics["batch/padding_fraction"],
                "micro_batches": metrics["batch/micro_batches"],
                "shared_fraction": metrics["batch/shared_fraction"],
                "compilations": metrics["update/compilations"],
            }
            print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
            if step:
                rows[name].append(row)
    medians = {
        name: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for name, measured in rows.items()
    }
    fixed, packed, shared = (measured["tokens_per_s"] for measured in medians.values())
    ratios = {"budget / fixed": packed / fixed, "budget with shared prompts / fixed": shared / fixed}
    print(json.dumps({**medians, "tokens_per_s": ratios}, indent=2))


def random_batch(
    config: Config, prompts: list[Prompt], vocab_size: int, median: float, step: int, version: int
) -> AdvantagedBatch:
    """`rollout.n` random completions of each prompt, with random advantages; `step` seeds both."""
    rng = np.random.default_rng([config.seed, step])
    sources = [prompt for prompt in prompts for _ in range(config.rollout.n)]
    lengths = rng.lognormal(np.log(median), 0.6, len(sources)).astype(int)
    lengths = np.clip(lengths, 1, config.rollout.max_new_tokens)
    before = np.array([len(prompt.input_ids) for prompt in sources])
    columns = np.arange((before + lengths).max())
    attention = columns < (before + lengths)[:, None]
    completion = attention & (columns >= before[:, None])
    input_ids = np.where(completion, rng.integers(0, vocab_size, completion.shape), 0).astype(np.int32)
    for row, prompt in enumerate(sources):
        input_ids[row, : before[row]] = prompt.input_ids
    rollouts = RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention,
        completion_mask=completion,
        rollout_logprobs=np.where(completion, -1.0, 0.0).astype(np.float32),
        policy_version=np.where(completion, version, -1).astype(np.int32),
        finish_reason=np.full(len(sources), "length"),
        group_ids=np.array([prompt.group_id for prompt in sources], np.int64),
        prompts=tuple(prompt.text for prompt in sources),
        completions=("",) * len(sources),
    )
    rewards = rng.normal(size=len(sources)).astype(np.float32)
    advantages = np.where(completion, rewards[:, None], 0).astype(np.float32)
    return AdvantagedBatch(RewardedBatch(rollouts, rewards, rewards[None], ("random",)), advantages)


if __name__ == "__main__":
    main()
