"""Small policies with random weights, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from quatrain.data.tokenizer import save_tokenizer
from quatrain.models.architecture import Architecture
from quatrain.models.params import init_params
from quatrain.weights.hf import save_hf


def save_policy(folder: Path, arch: Architecture, tokenizer: Any, seed: int = 9) -> Path:
    """A policy of `arch` in `folder`, with its tokenizer; its distributions are far from uniform."""
    params = init_params(arch, jax.random.key(seed))
    save_hf(folder, arch, {**params, "embed": params["embed"] * 1.5})
    save_tokenizer(tokenizer, folder)
    return folder
