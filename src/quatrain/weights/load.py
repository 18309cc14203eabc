"""A model from wherever `model.path` points.

Data flow: config -> `Model(arch, params)` -> rollout, update, evaluation, export.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.config.places import HUB_ID, local_path
from quatrain.models.families import Architecture, builtin_architecture
from quatrain.models.params import Params, init_params
from quatrain.weights.hf import hub_architecture, load_hf, read_architecture, resolve_hub

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Model:
    """What a model is: its architecture and its parameters."""

    arch: Architecture
    params: Params


def load_model(
    path: str,
    *,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    vocab_size: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> Model:
    """The model at `path`, its parameters in `dtype` on `mesh`, by default one device.

    `builtin:NAME` is drawn from `seed` for a tokenizer with `vocab_size` and `eos_token_ids`, which the
    other kinds read from their own files: a `.gguf` file, a local Hugging Face directory, or a hub id.
    Raises ValueError where the model is missing, broken or of an unsupported kind.
    """
    if path.startswith(BUILTIN):
        arch = load_architecture(path, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        return Model(arch, init_params(arch, jax.random.key(seed), dtype, mesh))
    if path.endswith(".gguf"):
        from quatrain.weights.gguf import load_gguf

        return Model(*load_gguf(local_path(path), dtype, mesh))
    return Model(*load_hf(model_directory(path), dtype, mesh))


def load_architecture(
    path: str, *, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()
) -> Architecture:
    """The architecture of the model at `path`, as `load_model` has it, without its weights.

    It comes from config.json, which is all that is fetched of a hub model, or from the header of a `.gguf`
    file. Raises ValueError as `load_model` does.
    """
    if path.startswith(BUILTIN):
        if vocab_size is None:
            raise ValueError(f"{path} has no vocabulary of its own: pass vocab_size, the tokenizer's")
        return builtin_architecture(path.removeprefix(BUILTIN), vocab_size, eos_token_ids)
    if path.endswith(".gguf"):
        from quatrain.weights.gguf import gguf_architecture

        return gguf_architecture(local_path(path))
    if not local_path(path).exists() and HUB_ID.fullmatch(path):
        return hub_architecture(path)
    return read_architecture(path)


def model_directory(path: str) -> Path:
    """The local Hugging Face directory of `path`, a directory or a hub id, which is downloaded.

    Raises ValueError where there is neither.
    """
    local = local_path(path)
    if local.exists() or not HUB_ID.fullmatch(path):
        return local
    return resolve_hub(path)
