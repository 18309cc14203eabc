"""One training step of ours on the workload that peers are compared on, stage by stage.

    python benchmarks/step.py --steps 3 --data train.jsonl
    python benchmarks/step.py --set update.max_tokens_per_device=4096
    python benchmarks/step.py --config configs/shapes.yaml --set model.path=FOLDER --data ROWS --vision all

4 GSM8K prompts, 8 samples of each, 64 new tokens each (no early stop), one AdamW step, no KL, on
SmolLM2-135M-Instruct in float32. First it samples once from the prompts of each step, which compiles every
width of prompts; then it runs one step more than `--steps` and drops it, which compiles the update. The steps
that are measured compile nothing, as their counts show. With pictures, the features of the warm-up are
dropped: a step runs the tower as in the first epoch of a run. Prints JSON: median seconds of the step and its
stages, every measured step's seconds and compilations, tokens per second, and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import jax
from peers.workload import LEARNING_RATE, MAX_GRAD_NORM, add_arguments, finish, text_reward

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.load import load_config
from quatrain.config.schema import Config, RewardConfig
from quatrain.data.prompts import load_prompts
from quatrain.loop.policy import load_policy
from quatrain.loop.stages import build_engine
from quatrain.parallel.compilations import num_compilations
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.rollouts import Rollouts
from quatrain.run.metrics import StageTimer, reduce_metrics
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.update.learner import Learner, TrainState

CONFIG = Path(__file__).parents[1] / "configs" / "gsm8k_smollm2_cpu.yaml"
MEASURES = {
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "rollout/sync_s": "time/rollout_sync_s",
    "rollout/prefill_s": "rollout/prefill_s",
    "rollout/decode_s": "rollout/decode_s",
    "rollout/flush_s": "time/rollout_flush_s",
    "reward_s": "time/reward_s",
    "advantage_s": "time/advantage_s",
    "update_s": "time/update_s",
    "update/logprobs_s": "time/update_logprobs_s",
    "update/shard_s": "time/shard_s",
    "micro_batches": "batch/micro_batches",
    "padding_fraction": "batch/padding_fraction",
    "shared_fraction": "batch/shared_fraction",
    "optimizer_steps": "update/optimizer_steps",
}
"""Name here -> name of the metric."""
OF_PICTURES = {
    "vision_s": "time/vision_s",
    "pictures": "vision/pictures",
    "tower_pictures": "vision/tower_pictures",
}
"""Of steps with pictures."""
MEDIANS = ("_s", "_fraction", "micro_batches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    steps = Steps(workload_config(args), args.steps + 1)
    warm_up_s = steps.warm_up()
    rows = [steps.run(number) for number in range(args.steps + 1)]
    measured = rows[1:]
    median = {
        name: statistics.median(row[name] for row in measured)
        for name in measured[0]
        if name.endswith(MEDIANS)
    }
    pictures = ("pictures", "tower_pictures")
    new_tokens = args.prompts * args.samples * args.tokens
    finish(
        {
            "median": {name: round(value, 4) for name, value in median.items()},
            "warm_up_s": round(warm_up_s, 2),
            "first_step_s": round(rows[0]["step_s"], 2),
            "rollout_tokens_per_s": round(new_tokens / median["rollout_s"], 1),
            "step_tokens_per_s": round(
                statistics.median(row["tokens"] / row["step_s"] for row in measured), 1
            ),
            "prompt_tokens": sum(len(prompt.input_ids) for prompt in steps.prompts),
            "compilations": [int(row["compilations"]) for row in measured],
            "optimizer_steps": [int(row["optimizer_steps"]) for row in rows],
            **{name: [int(row[name]) for row in measured] for name in pictures if name in measured[0]},
            "setting": {
                "dtype": steps.config.model.dtype,
                "max_tokens_per_device": steps.config.update.max_tokens_per_device,
                "micro_batch_size": steps.config.update.micro_batch_size,
                "set": args.set,
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
            "steps": [
                {name: round(value, 4) for name, value in row.items() if name.endswith("_s")}
                for row in measured
            ],
        }
    )


def workload_config(args: argparse.Namespace) -> Config:
    """The configuration with the workload's sizes; what `--set` names comes last."""
    sizes = (
        f"data.train={args.data}",
        f"data.batch_size={args.prompts}",
        f"rollout.n={args.samples}",
        f"rollout.max_new_tokens={args.tokens}",
        "rollout.temperature=1.0",
        "update.kl_coef=0.0",
        f"optimizer.learning_rate={LEARNING_RATE}",
        f"optimizer.max_grad_norm={MAX_GRAD_NORM}",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
    )
    if args.vision is not None:  # without a cache beyond two steps, so that no step knows its pictures
        sizes += (f"model.vision={args.vision}", "model.vision_cache_bytes=1")
    config = load_config(args.config, (*sizes, *args.set), os.environ).config
    rule = f"{Path(text_reward.__code__.co_filename).resolve()}:{text_reward.__name__}"
    return config.model_copy(update={"reward": RewardConfig(functions={rule: 1.0})})


class Steps:
    """The stages of a run without evaluation, checkpoints or report; prompts in the order of the file."""

    def __init__(self, config: Config, num_steps: int):
        self.config, self.num_steps = config, num_steps
        loaded = replace(load_policy(config), stop_ids=())
        self.store = loaded.store
        source = load_prompts(config.data.train, config.data, loaded.tokenizer, seed=config.seed)
        self.prompts: list[Prompt] = source.head(num_steps * config.data.batch_size)
        wanted = num_steps * config.data.batch_size
        if len(self.prompts) < wanted:
            raise ValueError(
                f"the data has a row for each prompt: {wanted} wanted, {config.data.train} has "
                f"{len(self.prompts)}; lower --steps"
            )
        self.engine: Rollouts = build_engine(config, loaded, prompts=source)
        self.scorer = RewardScorer(config.reward)
        self.advantage = AdvantageEstimator(config.advantage)
        self.learner = Learner.of(config, loaded, steps=num_steps)
        self.state: TrainState = self.learner.init(loaded.params)
        self.timer = StageTimer()

    def warm_up(self) -> float:
        """Sample once from the prompts of every step; seconds."""
        began = time.perf_counter()
        self.engine.sync_weights(self.state.params, self.state.step)
        for number in range(self.num_steps):
            self.engine.generate(self._prompts_of(number), step=number)
        for _ in range(2 if self.store is not None else 0):
            self.store.end_step()
        return time.perf_counter() - began

    def _prompts_of(self, number: int) -> list[Prompt]:
        size = self.config.data.batch_size
        return self.prompts[number * size : (number + 1) * size]

    def run(self, number: int) -> dict[str, float]:
        """One step: seconds of its stages and of their parts, and what was counted."""
        timer = self.timer
        compilations = num_compilations()
        with timer.stage("step"):
            with timer.stage("rollout"):
                self.engine.sync_weights(self.state.params, self.state.step)
                rollouts = self.engine.generate(self._prompts_of(number), step=number)
            with timer.stage("reward"):
                rewarded = self.scorer.score(rollouts)
            with timer.stage("advantage"):
                advantaged = self.advantage.estimate(rewarded)
            with timer.stage("update"):
                self.state = self.learner.step(self.state, advantaged)
                jax.block_until_ready((self.state.params, self.state.opt_state))
        metrics = reduce_metrics({**rollouts.metrics, **self.state.metrics, **timer.metrics()})
        check_workload(self.config, rollouts, metrics)
        measures = MEASURES | ({} if OF_PICTURES["pictures"] not in metrics else OF_PICTURES)
        row = {shown: metrics[name] for shown, name in measures.items()}
        prepared_s = row["update/logprobs_s"] + row["update/shard_s"]
        return row | {
            "update/gradient_and_optimizer_s": row["update_s"] - prepared_s,
            "compilations": num_compilations() - compilations,
            "tokens": float(rollouts.attention_mask.sum()),
        }


def check_workload(config: Config, rollouts: RolloutBatch, metrics: dict[str, float]) -> None:
    """The step was the workload's: every completion at full length, and one optimizer step."""
    lengths = sorted(set(rollouts.completion_mask.sum(axis=1).tolist()))
    if lengths != [config.rollout.max_new_tokens]:
        raise RuntimeError(f"no completion of the workload stops early: their lengths are {lengths}")
    taken = metrics["update/optimizer_steps"]
    if taken != 1:
        raise RuntimeError(f"a step of the workload takes one optimizer step: it took {taken:g}")


if __name__ == "__main__":
    main()
