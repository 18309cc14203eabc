"""Folders of models that also read pictures: their text part is a model of one of the families.

Data flow: config.json and names of tensors -> those of the text model; with `read_vision` also the tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MODEL_TYPES = frozenset(
    {
        *("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe"),
        *("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl"),
    }
)
"""The `model_type` of their config.json, which has that of the text model in `text_config`."""
_TEXT_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models that are another family's but for the rotary positions of pictures."""
_DEFAULT_TEXT = {"idefics3": "llama", "smolvlm": "llama", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Of folders that do not say it."""
_TEXT_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen3_vl": {"rope_theta": 5e5, "max_position_embeddings": 128_000},
}
"""What transformers takes for keys that their text models lack, where it differs from the family's."""
_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")
"""Keys that count for the text model where its own configuration lacks them or the outer one has others."""
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
    "model.text_model.": "model.",
}
"""How the names of its tensors begin, in folders that transformers 4 and 5 wrote."""
_TOWERS = ("visual", "vision_model", "connector")
"""The parts that are towers which `Vision.tensors` names, without "model." in front."""
_OTHER_PARTS = (
    *("vision_tower", *_TOWERS, "multi_modal_projector", "embed_vision"),
    *("audio_tower", "embed_audio", "mtp"),
)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model; that of any other model as it is."""
    kind = config.get("model_type")
    if not (isinstance(kind, str) and kind in MODEL_TYPES):
        return config
    # Qwen2.5-VL's first folders have the keys of the text model beside the others.
    text = config if kind == "qwen2_5_vl" and "text_config" not in config else config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = {key: config[key] for key in _OUTER if config.get(key) not in (None, [])}
    own = text.get("model_type", _DEFAULT_TEXT.get(kind))
    return {**_TEXT_DEFAULTS.get(kind, {}), **text, **outer, "model_type": _TEXT_TYPES.get(str(own), own)}


def text_tensors(names: Iterable[str], *, tower: bool = False) -> tuple[dict[str, str], list[str]]:
    """(name in the model -> name in the folder, names in the folder of the parts that are not used).

    The model is that of texts; with its `tower`, if it has one.
    """
    ours, others = {}, []
    for name in names:
        plain = name.removeprefix("model.")
        if tower and plain.startswith(tuple(f"{part}." for part in _TOWERS)):
            ours[plain] = name
            continue
        if plain.startswith(tuple(f"{part}." for part in _OTHER_PARTS)):
            others.append(name)
            continue
        start = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        ours[_PREFIXES.get(start, "") + name.removeprefix(start)] = name
    return ours, others


def stored_name(name: str, embeddings: str) -> str:
    """The name in a folder of a tensor that `text_tensors` names so, from that of the embeddings there."""
    start = embeddings.removesuffix("embed_tokens.weight")
    if name.startswith("model."):
        return start + name.removeprefix("model.")
    if name.startswith(tuple(f"{part}." for part in _TOWERS)):
        return f"model.{name}"
    return "language_model." * (start == "language_model.model.") + name
