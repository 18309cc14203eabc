"""Trains small models with TRL (torch, CPU) and keeps losses and gradient norms in tests/golden/trl_*.json.

Run by `make oracles`, which needs torch; the tests that read the files do not. Each model is exported by
quatrain, and each objective trained for ten steps of AdamW on one batch, from the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import logging
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import GOLDEN, read_golden, read_score_golden
from trainer_goldens import (
    BETA,
    CENTER,
    EPSILON,
    GAMMA,
    LEARNING_RATE,
    STEPS,
    TRAINED,
    UNDESIRABLE,
    reference_of,
)

from quatrain.weights.hf import load_hf, save_hf

END, PAD = 2, 7
WORDS = [{END: "</s>", PAD: "<pad>"}.get(word, f"w{word}") for word in range(72)]
PAIRS = 8


class Written(TrainerCallback):
    """Keeps the norm of each step's gradient."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        grads = [p.grad.double() for p in given["model"].parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()))


def main() -> None:
    """Writes the golden file of each family."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for case in sys.argv[1:] or TRAINED:
        data = make_data(case)
        with tempfile.TemporaryDirectory() as folder:
            models = export(case, Path(folder))
            found = {name: train(name, models, data) for name in objectives()}
        for name, (losses, norms) in found.items():
            print(f"{case} {name}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, norm {norms[0]:.6g}")
        libraries = "torch", "transformers", "trl", "numpy"
        about = {"versions": {name: version(name) for name in libraries}, "data": data}
        runs = {name: {"losses": losses, "norms": norms} for name, (losses, norms) in found.items()}
        text = json.dumps(about | {"runs": runs}, indent=1)
        (GOLDEN / f"trl_{case}.json").write_text(text + "\n")


def export(case: str, folder: Path) -> Path:
    """A folder with the folders `policy`, `reference` and `rm` (a classifier), as quatrain writes them."""
    arch, params = load_hf(read_golden(case).write_model(folder / "golden"))
    save_hf(folder / "policy", arch, params)
    save_hf(folder / "reference", arch, reference_of(params))
    scores = read_score_golden(case).write_model(folder / "scores")
    save_hf(folder / "rm", *load_hf(scores, head="value_head"))
    return folder


def make_data(case: str) -> dict[str, Any]:
    """Token ids of pairs with margins, and of pairs whose prompts have one token and better answers five.

    TRL's ORPO takes its supervised term over prompt and answer, as a mean over tokens: on the latter pairs
    that is the mean over the answers.
    """
    random = np.random.RandomState(sum(map(ord, case)))
    words = [word for word in range(72) if word not in (END, PAD)]

    def draw(tokens: int) -> list[int]:
        return random.choice(words, tokens).tolist()

    def pair(prompt: int, chosen: int, rejected: int) -> dict[str, Any]:
        return {
            "prompt_ids": draw(prompt),
            "chosen_ids": [*draw(chosen), END],
            "rejected_ids": [*draw(rejected), END],
            "margin": round(float(random.exponential()), 3),
        }

    sizes = random.randint(1, 9, (PAIRS, 3)).tolist()
    return {
        "pairs": [pair(*size) for size in sizes],
        "one_token_prompts": [pair(1, 4, size[2]) for size in sizes],
        "labels": [True, False, True, True, False, True, False, True],
    }


def objectives() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Trainer, its configuration and arguments, by the name of each objective here."""
    dpo: dict[str, Any] = {"beta": BETA}
    smooth = {**dpo, "label_smoothing": EPSILON}
    return {
        "sft": (SFTTrainer, SFTConfig, {"completion_only_loss": True}),
        **{
            loss: (DPOTrainer, DPOConfig, {**dpo, "loss_type": [loss]})
            for loss in ("sigmoid", "ipo", "hinge")
        },
        "robust": (DPOTrainer, DPOConfig, {**smooth, "loss_type": ["robust"]}),
        # Of one pair at a time `aot` is the smoothed sigmoid, which TRL's `sigmoid` is not.
        "smoothed": (DPOTrainer, DPOConfig, {**smooth, "loss_type": ["aot"], "one_by_one": True}),
        "orpo": (ORPOTrainer, ORPOConfig, {**dpo}),
        "simpo": (
            CPOTrainer,
            CPOConfig,
            {**dpo, "loss_type": "simpo", "simpo_gamma": GAMMA, "cpo_alpha": 0.0},
        ),
        "kto": (KTOTrainer, KTOConfig, {**dpo, "undesirable_weight": UNDESIRABLE}),
        "rm": (RewardTrainer, RewardConfig, {"center_rewards_coefficient": CENTER}),
    }


def train(name: str, models: Path, data: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradient of each step."""
    trainer_class, config_class, arguments = objectives()[name]
    one_by_one = arguments.pop("one_by_one", False)
    losses: list[float] = []

    class Recorded(trainer_class):
        """The trainer, which keeps its losses: what it logs is rounded."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    load = {"attn_implementation": "eager", "dtype": torch.float32}
    if name == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(models / "rm", **load)
    else:
        model = AutoModelForCausalLM.from_pretrained(models / "policy", **load)
    model.config.pad_token_id = PAD
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else a token that happens to be it has no gradient
    written = Written()
    with tempfile.TemporaryDirectory() as out:
        config = config_class(
            output_dir=out,
            per_device_train_batch_size=1 if one_by_one else PAIRS,
            gradient_accumulation_steps=PAIRS if one_by_one else 1,
            max_steps=STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            max_length=None,
            report_to="none",
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **arguments,
        )
        given: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [written]}
        if trainer_class in (DPOTrainer, KTOTrainer):
            given["ref_model"] = AutoModelForCausalLM.from_pretrained(models / "reference", **load)
        Recorded(model, args=config, train_dataset=rows(name, data), **given).train()
    if one_by_one:
        losses = np.array(losses).reshape(STEPS, PAIRS).mean(axis=1).tolist()
    assert len(losses) == len(written.norms) == STEPS, (name, len(losses), len(written.norms))
    return losses, written.norms


def rows(name: str, data: dict[str, Any]) -> Dataset:
    """The data set of an objective in the form that its trainer reads."""
    pairs = data["one_token_prompts" if name == "orpo" else "pairs"]
    if name == "sft":
        return Dataset.from_list(
            [
                {
                    "input_ids": pair["prompt_ids"] + pair["chosen_ids"],
                    "completion_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair["chosen_ids"]),
                }
                for pair in pairs
            ]
        )
    if name == "rm":
        return Dataset.from_list(
            [
                {side: pair["prompt_ids"] + pair[side] for side in ("chosen_ids", "rejected_ids")}
                | {"margin": pair["margin"]}
                for pair in pairs
            ]
        )
    texts = [
        {key: as_text(pair[f"{key}_ids"]) for key in ("prompt", "chosen", "rejected")} | {"label": label}
        for pair, label in zip(pairs, data["labels"], strict=True)
    ]
    if name == "kto":  # which pairs each prompt with the answer to the one before, too
        return Dataset.from_list([{**row, "completion": row["chosen"]} for row in texts]).remove_columns(
            ["chosen", "rejected"]
        )
    return Dataset.from_list(texts).remove_columns("label")


def as_text(ids: list[int]) -> str:
    """The text of token ids."""
    return "".join(f" {WORDS[word]}" for word in ids)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `WORDS`."""
    words = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[END], pad_token=WORDS[PAD])


if __name__ == "__main__":
    main()
