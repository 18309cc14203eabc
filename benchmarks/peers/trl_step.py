"""One GRPO step of TRL's GRPOTrainer with transformers `generate`, on the CPU.

Run by `compare.py --peer trl`, `trl-pictures` and `trl-qwen3-vl`. The whole step is one micro-batch unless
`--rows` says otherwise.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from workload import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    finish,
    num_prompt_tokens,
    peer_parser,
    read_rows,
    text_reward,
)


def main() -> None:
    args = peer_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    sequences = args.prompts * args.samples
    rows = args.rows or sequences
    if sequences % rows:
        raise ValueError(f"micro-batches divide the step: {sequences} sequences, got --rows {rows}")
    setting = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": sequences // rows,
        "num_generations": args.samples,
        "max_completion_length": args.tokens,
        "generation_kwargs": {"min_new_tokens": args.tokens},
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_vllm": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    clock = StepClock()
    with TemporaryDirectory(prefix="trl-") as folder:
        trainer = build(folder, args, setting, clock)
        clock.watch(trainer)
        if args.vision == "frozen":
            trainer.model.model.visual.requires_grad_(False)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    trained = sum(row["grad_norm"] > 0 for row in logged)
    assert trained == args.steps + 1, f"{trained} of {args.steps + 1} steps had a gradient"
    lengths = {row["completions/mean_length"] for row in logged}
    assert lengths == {args.tokens}, f"no completion stops early: mean lengths are {lengths}"
    finish(
        {
            "peer": f"trl {version('trl')}, transformers {version('transformers')}, torch {version('torch')}",
            "setting": {**setting, "optim": str(trainer.args.optim), "threads": torch.get_num_threads()}
            | ({} if args.vision is None else {"vision": args.vision}),
            "prompt_tokens": prompt_tokens(trainer.processing_class, read_rows(args)),
            "steps": clock.steps[1:],
        }
    )


def build(folder: str, args: Any, setting: dict[str, Any], clock: StepClock) -> GRPOTrainer:
    """The trainer, its prompts in file order."""
    return GRPOTrainer(
        model=str(args.model),
        reward_funcs=text_reward,
        args=GRPOConfig(
            output_dir=str(Path(folder)),
            use_cpu=True,
            max_steps=args.steps + 1,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **setting,
        ),
        train_dataset=Dataset.from_list([opened(row) for row in read_rows(args)]),
        processing_class=(AutoTokenizer if args.vision is None else AutoProcessor).from_pretrained(
            args.model
        ),
        callbacks=[clock],
    )


def opened(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its pictures, if it has any."""
    return row | {"images": [Image.open(file) for file in row["images"]]} if "images" in row else row


def prompt_tokens(reader: Any, rows: list[dict[str, Any]]) -> int:
    """Of all prompts together, their pictures' placeholders included; ours must have as many."""
    chats = [row["prompt"] for row in rows]
    if "images" not in rows[0]:
        return num_prompt_tokens(reader, chats)
    seen = [
        prepare_multimodal_messages(chat, images=opened(row)["images"])
        for chat, row in zip(chats, rows, strict=True)
    ]
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return sum(len(reader.apply_chat_template(chat, **how)["input_ids"][0]) for chat in seen)


class StepClock(TrainerCallback):
    """Seconds of every optimizer step, and of its parts: generation, rewards, then loss to optimizer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = self._generate_s = self._prepare_s = 0.0

    def watch(self, trainer: GRPOTrainer) -> None:
        """Time the trainer's own methods."""
        generate, prepare = trainer._generate, trainer._generate_and_score_completions

        def timed_generate(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = generate(*given, **named)
            self._generate_s += time.perf_counter() - began
            return result

        def timed_prepare(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = prepare(*given, **named)
            self._prepare_s += time.perf_counter() - began
            return result

        trainer._generate, trainer._generate_and_score_completions = timed_generate, timed_prepare

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        """Before the prompts are sampled from."""
        self._began, self._generate_s, self._prepare_s = time.perf_counter(), 0.0, 0.0

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """After the optimizer."""
        step_s = time.perf_counter() - self._began
        self.steps.append(
            {
                "step_s": step_s,
                "rollout_s": self._generate_s,
                "reward_and_advantage_s": self._prepare_s - self._generate_s,
                "update_s": step_s - self._prepare_s,
            }
        )


if __name__ == "__main__":
    main()
