"""Runs transformers' sequence-classification models (torch, CPU) and keeps their scores in tests/golden/.

Run by `make oracles`, which needs torch; the tests that read the files do not. It also checks that
transformers loads what quatrain saves of a model with a score head, to the same scores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_goldens import CONFIGS, SMALL
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import GOLDEN, SCORE_CASES, draw, weights_crc

from quatrain.weights.hf import load_hf, save_hf

LENGTHS = (40, 31, 17, 9, 1, 24)
PAD = 7
ENDS_IN_PADS = 5
"""The sequence whose own last two tokens are the padding token, before which transformers pools."""


def main() -> None:
    """Writes the golden file of every family, or stops at the first check that fails."""
    logging.disable_progress_bar()
    for case in SCORE_CASES:
        model_type, fields = CONFIGS[case]
        config = AutoConfig.for_model(
            model_type, **{**SMALL, **fields, "num_labels": 1, "pad_token_id": PAD, "eos_token_id": 3}
        )
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        weights = {name: draw(name, shape) for name, shape in shapes.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))
        ids = make_ids(case)
        scores = run(model, ids)
        written = check_saved(model, ids, scores)
        about = {
            "config": written,
            "shapes": shapes,
            "weights_crc": weights_crc(weights),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        }
        arrays = {"input_ids": ids, "lengths": np.array(LENGTHS), "scores": scores}
        np.savez_compressed(GOLDEN / f"score_{case}.npz", about=json.dumps(about), **arrays)
        print(f"{case}: {written['architectures']}, scores {np.round(scores, 3)}")


def make_ids(case: str) -> np.ndarray:
    """[B, T] token ids, right-padded; PAD stands in no sequence except at the end of one."""
    drawn = draw(f"sequences of {case}", (len(LENGTHS), max(LENGTHS)))
    ids = (drawn * 1e4).astype(np.int64) % (SMALL["vocab_size"] - 1)
    ids += ids >= PAD
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = PAD
    ids[ENDS_IN_PADS, LENGTHS[ENDS_IN_PADS] - 2 :] = PAD
    return ids


@torch.no_grad()
def run(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """[B] scores of a right-padded batch; they equal those of each sequence alone."""
    mask = np.arange(ids.shape[1]) < np.array(LENGTHS)[:, None]
    batch = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask.astype(np.int64)))
    scores = batch.logits.float().numpy()[:, 0]
    alone = [model(input_ids=torch.from_numpy(row[None, :n])).logits for row, n in zip(ids, LENGTHS)]
    off = np.abs(np.array([float(score) for score in alone]) - scores).max()
    assert off < 1e-5, f"transformers differs from itself without padding by {off}"
    return scores


def check_saved(model: Any, ids: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """The config.json that transformers writes, whose model keeps its scores when quatrain saves it."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        model.save_pretrained(theirs)
        save_hf(ours, *load_hf(theirs, head="value_head"))
        loaded = AutoModelForSequenceClassification.from_pretrained(ours, attn_implementation="eager").eval()
        assert type(loaded) is type(model), type(loaded)
        off = np.abs(run(loaded, ids) - scores).max()
        assert off == 0, f"the saved model's scores differ by {off}"
        return json.loads((theirs / "config.json").read_text())


if __name__ == "__main__":
    main()
