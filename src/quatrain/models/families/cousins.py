"""What differs in models that are not supported from the nearest that is, for the error that names both."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_COUSINS = {
    "cohere": ("llama", "layer norms and blocks side by side"),
    "cohere2": ("llama", "layer norms and blocks side by side"),
    "deepseek_v2": ("llama", "latent attention and experts"),
    "deepseek_v3": ("llama", "latent attention and experts"),
    "gemma": ("gemma2", "no norms after its blocks"),
    "gemma3n": ("gemma3_text", "several streams of hidden states"),
    "glm4_moe": ("qwen3_moe", "a router with groups of experts"),
    "gpt_neox": ("llama", "layer norms and no gate in its MLP"),
    "granitemoe": ("granite", "experts whose tensors are fused"),
    "granitemoehybrid": ("granite", "state-space layers or experts"),
    "llama4": ("llama", "experts"),
    "llama4_text": ("llama", "experts"),
    "ministral": ("mistral", "windows on some layers alone"),
    "olmo": ("olmo2", "layer norms without weights"),
    "phi": ("phi3", "layer norms and blocks side by side"),
    "phimoe": ("mixtral", "layer norms and another router"),
    "qwen2_5_vl": ("qwen2", "rotary embeddings of image positions"),
    "qwen2_vl": ("qwen2", "rotary embeddings of image positions"),
    "qwen3_vl": ("qwen3", "rotary embeddings of image positions"),
    "starcoder2": ("llama", "layer norms and no gate in its MLP"),
}
"""Of other model types: the nearest supported one, and what they have that it lacks."""


def cousin(model_type: str, known: Iterable[str]) -> str:
    """A clause that names the nearest of the `known` model types and what differs; empty if none is near."""
    if model_type in _COUSINS:
        nearest, differs = _COUSINS[model_type]
        return f"; it is nearest to {nearest}, but has {differs}"
    near = get_close_matches(model_type, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
