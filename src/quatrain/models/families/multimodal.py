"""Folders of models that also read images: their text part is a model of one of the families.

Data flow: config.json and names of tensors -> those of the text model, which is what is trained and exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MODEL_TYPES = frozenset({"gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe"})
"""The `model_type` of their config.json, which has that of the text model in `text_config`."""
_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")
"""Keys that count for the text model where its own configuration lacks them or the outer one has others."""
_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
"""How the names of its tensors begin, in folders that transformers 4 and 5 wrote."""
_OTHER_PARTS = (
    *("vision_tower", "vision_model", "visual", "multi_modal_projector", "embed_vision"),
    *("audio_tower", "embed_audio", "mtp"),
)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model; that of any other model as it is."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not (isinstance(kind, str) and kind in MODEL_TYPES and isinstance(text, Mapping)):
        return config
    outer = {key: config[key] for key in _OUTER if config.get(key) not in (None, [])}
    return {**text, **outer}


def text_tensors(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(name in the text model -> name in the folder, names in the folder of the parts that are not text)."""
    ours, others = {}, []
    for name in names:
        if name.removeprefix("model.").startswith(tuple(f"{part}." for part in _OTHER_PARTS)):
            others.append(name)
            continue
        start = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        ours[_PREFIXES.get(start, "") + name.removeprefix(start)] = name
    return ours, others
