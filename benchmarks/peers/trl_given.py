"""Optimizer steps of TRL's SFTTrainer, DPOTrainer or RewardTrainer on the CPU.

Run by `compare.py --peer trl-sft | trl-dpo | trl-rm`. The reference log-probabilities of DPO are computed
before the first step, as ours are.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from given_workload import add_given_arguments, rows
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from workload import LEARNING_RATE, MAX_GRAD_NORM, finish

TRAINERS = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "rm": (RewardTrainer, RewardConfig),
}
MORE: dict[str, dict[str, Any]] = {
    # Packing needs FlashAttention to keep examples apart, which a CPU has not; padding is ordinary there.
    "sft": {"packing": False, "assistant_only_loss": False, "completion_only_loss": True},
    "dpo": {"beta": 0.1, "precompute_ref_log_probs": True},
    "rm": {"center_rewards_coefficient": None},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_given_arguments(parser)
    parser.add_argument("--model", required=True, help="folder with the model, for transformers")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, help="examples of a micro-batch")
    args, _ = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    size = args.rows or args.examples
    if args.examples % size:
        raise ValueError(f"micro-batches divide the step: {args.examples} examples, got --rows {size}")
    trainer_class, config_class = TRAINERS[args.task]
    setting = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": args.examples // size,
        "gradient_checkpointing": False,
        "bf16": False,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "max_length": 1024,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        **MORE[args.task],
    }
    data, tokenizer = rows(args), AutoTokenizer.from_pretrained(args.model)
    if args.task == "sft":
        data = [completion(each["messages"], tokenizer) for each in data]
    clock = Clock()
    with TemporaryDirectory(prefix="trl-") as folder:
        trainer = trainer_class(
            model=args.model,
            args=config_class(
                output_dir=folder,
                use_cpu=True,
                max_steps=args.steps + 1,
                lr_scheduler_type="constant",
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **setting,
            ),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    trained = sum(row["grad_norm"] > 0 for row in logged)
    assert trained == args.steps + 1, f"{trained} of {args.steps + 1} steps had a gradient"
    finish(
        {
            "peer": f"trl {version('trl')}, transformers {version('transformers')}, torch {version('torch')}",
            "setting": {**setting, "optim": str(trainer.args.optim), "threads": torch.get_num_threads()},
            "losses": [row["loss"] for row in logged],
            "steps": clock.steps[1:],
        }
    )


def completion(messages: Any, tokenizer: Any) -> dict[str, list[int]]:
    """A conversation's tokens up to the end of the answer, which alone is trained.

    By itself TRL trains the line break too that the template writes behind the end, which a model never
    samples; its mean loss would be that of other tokens.
    """
    ids, prompt = (
        tokenizer.apply_chat_template(part, add_generation_prompt=begins, return_dict=False)
        for part, begins in ((messages, False), (messages[:-1], True))
    )
    assert ids[: len(prompt)] == prompt
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    mask = [0] * len(prompt) + [1] * (end - len(prompt))
    return {"input_ids": ids[:end], "completion_mask": mask}


class Clock(TrainerCallback):
    """Seconds of every optimizer step, from its first micro-batch to its optimizer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = 0.0

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        """Before the first micro-batch."""
        self._began = time.perf_counter()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """After the optimizer."""
        self.steps.append({"step_s": time.perf_counter() - self._began})


if __name__ == "__main__":
    main()
