"""What the golden files rest on: weights drawn by name from fixed seeds, and how the files are read.

`tests/oracles/make_goldens.py` feeds these weights to transformers and keeps its logits, and
`make_score_goldens.py` keeps the scores of its sequence-classification models; the tests feed the same
weights to quatrain. Neither the weights nor torch need to be at hand.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from quatrain.models.architecture import Architecture
from quatrain.models.decoder import forward, logits
from quatrain.models.families import architecture_from_hf
from quatrain.models.params import Params, assemble, leaf_at, tensor_names
from quatrain.models.spec import TensorName

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
    "gemma4_text",
    "gemma4_text_dense",
    "llama_yarn",
    "qwen3_yarn",
    "mistral",
    "ministral3",
    "olmo2",
    "olmo3",
    "smollm3",
    "smollm3_sliding",
    "granite",
    "phi3",
    "phi3_longrope",
    "phi3_longrope_long",
    "glm",
    "glm4",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_text_biases",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "gpt_oss",
    "qwen3_next_experts",
    "qwen3_5_moe_text",
)

SCORE_CASES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight called `name`: the same on any machine, as RandomState never changes its streams."""
    random = np.random.RandomState(zlib.crc32(f"{name}{shape}".encode()))
    values = random.standard_normal(shape)
    if name.endswith(".A_log"):
        return (values - 3).astype(np.float32)  # a memory of tens of tokens
    if len(shape) == 1:
        return (0.6 + 0.2 * values).astype(np.float32)
    return (values * shape[-1] ** -0.5).astype(np.float32)


@dataclass(frozen=True)
class GoldenModel:
    """One model of the reference implementation, without its weights, which are drawn again."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    weights_crc: int

    def weights(self) -> dict[str, np.ndarray]:
        """The state dict, in Hugging Face's names."""
        return {name: draw(name, shape) for name, shape in self.shapes.items()}

    def write_model(self, directory: Path) -> Path:
        """A Hugging Face directory of this model at `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        return directory


@dataclass(frozen=True)
class Golden(GoldenModel):
    """What went into a language model, and the logits that came out."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    logits: np.ndarray

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The arguments of a model of transformers."""
        return {name: getattr(self, name) for name in ("input_ids", "attention_mask", "position_ids")}

    def model(self) -> tuple[Architecture, Params]:
        """The model here, for sequences as long as these."""
        weights = self.weights()

        def read(name: TensorName, parameter: np.ndarray) -> None:
            name.put(parameter, weights[name.name])

        arch = architecture_from_hf(self.config).for_length(self.input_ids.shape[1])
        return arch, assemble(arch, np.float32, read)


@dataclass(frozen=True)
class ScoreGolden(GoldenModel):
    """What went into a sequence-classification model, right-padded, and the scores that came out."""

    input_ids: np.ndarray  # [B, T]
    lengths: np.ndarray  # [B]
    scores: np.ndarray  # [B]

    @property
    def sequences(self) -> list[list[int]]:
        """The token ids of each sequence, without padding."""
        return [ids[:length].tolist() for ids, length in zip(self.input_ids, self.lengths, strict=True)]


def read_golden(case: str) -> Golden:
    """The golden file of `case`, one of `CASES`."""
    return Golden(*read_arrays(case, "input_ids", "attention_mask", "position_ids", "logits"))


def read_score_golden(case: str) -> ScoreGolden:
    """The golden file of the classifier of `case`, one of `SCORE_CASES`."""
    return ScoreGolden(*read_arrays(f"score_{case}", "input_ids", "lengths", "scores"))


def read_arrays(name: str, *arrays: str) -> tuple[Any, ...]:
    """Config, shapes and checksum of the model in a golden file, and then its `arrays`."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        text = json.loads(str(file["about"]))
        values = [file[key] for key in arrays]
    shapes = {name: tuple(shape) for name, shape in text["shapes"].items()}
    return text["config"], shapes, text["weights_crc"], *values


def golden_gradients(golden: Golden) -> dict[str, np.ndarray]:
    """The gradient of each tensor of the mean cross-entropy of all tokens with a predecessor."""
    arch, params = golden.model()
    ids, positions, mask = golden.input_ids, golden.position_ids, golden.attention_mask
    real = mask[:, 1:] * mask[:, :-1] > 0

    @jax.jit
    @jax.grad
    def gradient(params: Params) -> jax.Array:
        scores = logits(params, arch, forward(params, arch, ids, positions, mask).hidden)[:, :-1]
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(scores), ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(logprobs * real) / real.sum()

    found = jax.tree.map(np.asarray, gradient(params))
    names = [name for name in tensor_names(arch) if not name.name.endswith("layer_scalar")]  # not trained
    return {name.name: name.of(leaf_at(found, name.path)) for name in names}


def probes(gradients: dict[str, np.ndarray]) -> np.ndarray:
    """[tensors, 2]: of each gradient, by name, its norm and its product with a random direction of norm 1."""
    found = []
    for name, gradient in sorted(gradients.items()):
        direction = draw(f"direction of {name}", (gradient.size, 1))
        along = gradient.reshape(-1) @ direction[:, 0] / np.linalg.norm(direction)
        found.append((np.linalg.norm(gradient), along))
    return np.array(found)


def weights_crc(weights: dict[str, np.ndarray]) -> int:
    """A checksum of all weights, so that a changed draw is not taken for a wrong model."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(np.ascontiguousarray(weights[name]).tobytes(), crc)
    return crc
