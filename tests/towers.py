"""Small models with towers: their config.json, and what their preprocessor_config.json says of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from goldens import GoldenModel, draw, read_arrays

from quatrain.models.architecture import Architecture
from quatrain.models.decoder import forward, logits
from quatrain.models.families import architecture_from_hf
from quatrain.models.families.multimodal import text_tensors
from quatrain.models.params import Params, assemble, leaf_at, tensor_names
from quatrain.models.spec import TensorName
from quatrain.models.tower import Patches, features, patches_of
from quatrain.models.vision import Inserts, TrainedVision, Vision

PLACEHOLDER = 90
VIDEO = 91
VISION_START = 92
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_QWEN_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}
_TILES = {"size": {"longest_edge": 24}, "max_image_size": {"longest_edge": 12}}
_QWEN_SIZES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}


def _idefics3(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "image_token_id": PLACEHOLDER,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT, "model_type": "llama", "rms_norm_eps": 1e-5},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 2,
            "layer_norm_eps": 1e-5,
        },
    }


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e5, "mrope_section": sections, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": _idefics3("idefics3"),
    "smolvlm": _idefics3("smolvlm"),
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_parameters": _mrope([2, 1, 1], mrope_interleaved=True),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_vl_vision",
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": _mrope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_vision", "num_position_embeddings": 36},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": _mrope([2, 1, 1]),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
    },
}
"""By model type."""
PROCESSORS: dict[str, dict[str, Any]] = {
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "qwen3_vl": _QWEN_SIZES,
    "qwen3_5": _QWEN_SIZES,
    "qwen2_5_vl": _QWEN_SIZES,
}
"""The values of their preprocessor_config.json."""


CASES = ("smolvlm", "idefics3", "qwen3_vl", "qwen3_5", "qwen2_5_vl")
SIZES = ((40, 40), (100, 37), (9, 50), (40, 40))
"""Of the pictures of the golden files, the first two of which are neighbours."""
TEXTS = (5, 1, 7, 4, 6)
"""Tokens before each of them, and behind the last."""


def seeing(
    model_type: str, trained: TrainedVision = "all", *, config: Mapping[str, Any] | None = None
) -> Architecture:
    """The small model of this type with its tower; or one of this `config`."""
    arch = architecture_from_hf(config or CONFIGS[model_type], vision=PROCESSORS[model_type])
    assert arch.vision is not None
    return replace(arch, vision=replace(arch.vision, trained=trained))


def picture(vision: Vision, number: int, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A picture of random numbers: ([grids, C, height, width], the same as patches in merge order)."""
    grids, p, m = vision.grids(size), vision.patch, vision.merge
    rows, columns = grids[0]
    shape = len(grids), vision.channels, rows * p, columns * p
    images = 3 * draw(f"picture {number}", shape)
    blocks = images.reshape(*shape[:2], rows // m, m, p, columns // m, m, p)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    return images, np.repeat(ordered, vision.temporal, axis=6).reshape(-1, vision.patch_values)


def token_ids(vision: Vision) -> np.ndarray:
    """[1, T] tokens of a text with the pictures."""
    text = (draw("text of towers", (sum(TEXTS), 1))[:, 0] * 1e4).astype(np.int64) % PLACEHOLDER
    parts = np.split(text, np.cumsum(TEXTS)[:-1])
    runs = [np.full(vision.num_placeholders(size), PLACEHOLDER) for size in SIZES]
    joined = [each for pair in zip(parts, runs, strict=False) for each in pair]
    return np.concatenate([*joined, parts[-1]])[None]


@dataclass(frozen=True)
class SeeingGolden(GoldenModel):
    """What went into a model with a tower, and what came out."""

    position_ids: np.ndarray
    """[3, 1, T]; or [1, T]."""
    features: np.ndarray
    """[1 + L, F, D] of all pictures."""
    logits: np.ndarray
    """[1, T, V]."""
    of_features: np.ndarray
    """[tensors of the tower, 2]: `probes` of the gradients of `loss_of_features`."""
    of_logits: np.ndarray
    """[tensors, 2]: those of the mean cross-entropy of the tokens that have a predecessor."""

    def model(self) -> tuple[Architecture, Params]:
        """The model here."""
        weights = self.weights()
        ours, _ = text_tensors(weights, tower=True)

        def read(name: TensorName, parameter: np.ndarray) -> None:
            name.put(parameter, weights[ours[name.name]])

        arch = seeing(self.config["model_type"], config=self.config)
        assert {name.name for name in tensor_names(arch)} == {*ours}
        return arch, assemble(arch, np.float32, read)


def read_seeing(model_type: str) -> SeeingGolden:
    """The golden file of a model with a tower, one of CASES."""
    names = "position_ids", "features", "logits", "of_features", "of_logits"
    return SeeingGolden(*read_arrays(f"tower_{model_type}", *names))


def loss_weights(shape: tuple[int, ...]) -> np.ndarray:
    """`loss_of_features` is the sum of features times these."""
    return draw("loss of features", shape)


def rows_of(vision: Vision) -> tuple[Patches, int]:
    """The pictures of the golden files as one row of patches, [1, ...], and how many features they have."""
    pixels = [picture(vision, number, size)[1] for number, size in enumerate(SIZES)]
    patches = patches_of(vision, pixels, SIZES)
    return jax.tree.map(lambda x: jnp.asarray(x)[None], patches), sum(map(vision.num_placeholders, SIZES))


def feature_gradients(golden: SeeingGolden) -> dict[str, np.ndarray]:
    """The gradient of each tensor of the tower of the sum of features times `loss_weights`."""
    arch, params = golden.model()
    assert arch.vision is not None
    patches, count = rows_of(arch.vision)
    factors = jnp.asarray(loss_weights(golden.features.shape))

    @jax.jit
    @jax.grad
    def gradient(tower: Any) -> jax.Array:
        return (features(tower, arch.vision, patches)[0, :, :count] * factors).sum()

    found = {"vision": gradient(params["vision"])}
    return _by_name(golden, arch, found, [name for name in tensor_names(arch) if name.path[0] == "vision"])


def seen_logits(arch: Architecture, params: Params, golden: SeeingGolden) -> jax.Array:
    """[1, T, V] of the text with the pictures."""
    assert arch.vision is not None
    ids = jnp.asarray(token_ids(arch.vision).astype(np.int32))
    patches, _ = rows_of(arch.vision)
    rows = jnp.where(ids == PLACEHOLDER, jnp.cumsum(ids == PLACEHOLDER, axis=1) - 1, -1)
    inserts = Inserts(features(params["vision"], arch.vision, patches), rows)
    places = jnp.arange(ids.shape[1])[None]
    turns = jnp.asarray(golden.position_ids) if arch.vision.has_grid else None
    ones = jnp.ones_like(ids)
    return logits(params, arch, forward(params, arch, ids, places, ones, turns=turns, inserts=inserts).hidden)


def logit_gradients(golden: SeeingGolden) -> dict[str, np.ndarray]:
    """The gradient of each tensor of the mean cross-entropy of all tokens with a predecessor."""
    arch, params = golden.model()
    assert arch.vision is not None
    targets = jnp.asarray(token_ids(arch.vision)[:, 1:, None])

    @jax.jit
    @jax.grad
    def gradient(params: Params) -> jax.Array:
        scores = jax.nn.log_softmax(seen_logits(arch, params, golden)[:, :-1])
        return -jnp.take_along_axis(scores, targets, axis=-1).mean()

    return _by_name(golden, arch, gradient(params), tensor_names(arch))


def _by_name(
    golden: SeeingGolden, arch: Architecture, found: Any, names: list[TensorName]
) -> dict[str, np.ndarray]:
    """Gradients under the names of the golden file's tensors."""
    theirs, _ = text_tensors(golden.shapes, tower=True)
    found = jax.tree.map(np.asarray, found)
    return {theirs[name.name]: name.of(leaf_at(found, name.path)) for name in names}
