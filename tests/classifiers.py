"""Small reward models with random weights, as Hugging Face folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from quatrain.data.tokenizer import save_tokenizer
from quatrain.models.architecture import Architecture
from quatrain.models.params import init_params
from quatrain.weights.hf import save_hf


def save_classifier(folder: Path, arch: Architecture, tokenizer: Any, seed: int = 5) -> Path:
    """A classifier of one label with the layers of `arch` in `folder`, with its tokenizer."""
    arch = dataclasses.replace(arch, head="value_head")
    layers, head = jax.random.split(jax.random.key(seed))
    score = jax.random.normal(head, (1, arch.hidden_size))
    save_hf(folder, arch, {**init_params(arch, layers), "score": score})
    save_tokenizer(tokenizer, folder)
    return folder
