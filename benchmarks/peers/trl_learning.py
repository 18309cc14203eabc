"""A run of TRL's GRPOTrainer on the task of `record_task.py`, on the CPU: the reward of each step.

Run by `learning.py --peer trl`, which gives the settings that both sides have.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from record_task import record
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import finish, num_prompt_tokens

ROWS = 16
"""Samples of a micro-batch: 64 need more than 20 GB for the logits of a vocabulary of 49,152 words."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model, for transformers")
    parser.add_argument("--data", type=Path, required=True, help="rows of record_task.py")
    parser.add_argument("--settings", type=json.loads, required=True, help="what both sides have, as JSON")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    given = args.settings
    setting = {
        # A step samples all at once and is one optimizer step; its parts are for memory.
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": given["prompts"] * given["samples"] // ROWS,
        "num_generations": given["samples"],
        "max_completion_length": given["tokens"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_vllm": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "learning_rate": given["learning_rate"],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    questions = [json.loads(line) for line in args.data.read_text().splitlines()]
    rows = [{**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in questions]
    clock = Clock()
    with TemporaryDirectory(prefix="trl-") as folder:
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=record,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                seed=args.seed,
                max_steps=given["steps"],
                lr_scheduler_type="constant",
                shuffle_dataset=False,
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **setting,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[clock],
        )
        trainer.train()
    finish(
        {
            "peer": f"trl {version('trl')}, transformers {version('transformers')}, torch {version('torch')}",
            "setting": {**setting, "optim": str(trainer.args.optim), "threads": torch.get_num_threads()},
            "prompt_tokens": prompt_tokens(trainer.processing_class, rows, given["prompts"])[
                : given["steps"]
            ],
            "steps": clock.steps,
        }
    )


def prompt_tokens(tokenizer: Any, rows: list[dict[str, Any]], prompts: int) -> list[float]:
    """The mean length of the prompts of each step."""
    chats = [row["prompt"] for row in rows]
    starts = range(0, len(chats), prompts)
    return [num_prompt_tokens(tokenizer, chats[start : start + prompts]) / prompts for start in starts]


class Clock(TrainerCallback):
    """Of each step the mean reward of its samples, and the seconds since training began."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = 0.0

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        """Before the first rollout."""
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
        """After the optimizer; the summary at the end of the run has no reward."""
        if "reward" in logs:
            self.steps.append({"seconds": time.perf_counter() - self._began, "reward": logs["reward"]})


if __name__ == "__main__":
    main()
