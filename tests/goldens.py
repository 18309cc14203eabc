"""What the golden files rest on: weights drawn by name from fixed seeds, and how the files are read.

`tests/oracles/make_goldens.py` feeds these weights to transformers and keeps its logits; the tests feed the
same weights to quatrain. Neither the weights nor torch need to be at hand.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden"
CASES = (
    "llama",
    "llama_biases",
    "llama_rope_linear",
    "llama_rope_llama3",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "qwen3_sliding",
    "gemma2",
    "gemma3_text",
    "gemma3_text_rope_linear",
)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight called `name`: the same on any machine, as RandomState never changes its streams."""
    random = np.random.RandomState(zlib.crc32(f"{name}{shape}".encode()))
    values = random.standard_normal(shape)
    if len(shape) == 1:
        return (0.6 + 0.2 * values).astype(np.float32)
    return (values * shape[-1] ** -0.5).astype(np.float32)


@dataclass(frozen=True)
class Golden:
    """One model of the reference implementation: what went in, and the logits that came out."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    weights_crc: int
    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    logits: np.ndarray

    def weights(self) -> dict[str, np.ndarray]:
        """The state dict, in Hugging Face's names."""
        return {name: draw(name, shape) for name, shape in self.shapes.items()}

    def write_model(self, directory: Path) -> Path:
        """A Hugging Face directory of this model at `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def read_golden(case: str) -> Golden:
    """The golden file of `case`."""
    with np.load(GOLDEN / f"{case}.npz") as file:
        text = json.loads(str(file["about"]))
        arrays = {key: file[key] for key in ("input_ids", "attention_mask", "position_ids", "logits")}
    shapes = {name: tuple(shape) for name, shape in text["shapes"].items()}
    return Golden(text["config"], shapes, text["weights_crc"], **arrays)


def weights_crc(weights: dict[str, np.ndarray]) -> int:
    """A checksum of all weights, so that a changed draw is not taken for a wrong model."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(np.ascontiguousarray(weights[name]).tobytes(), crc)
    return crc
