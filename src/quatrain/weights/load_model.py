"""Loads the model given by `model.path`, of any supported kind.

Data flow: configuration -> `Model(arch, params)` -> rollout, update, evaluation, export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.models.architecture import Architecture, Head
from quatrain.models.families import BUILTIN_PROCESSOR, builtin_architecture, builtin_config
from quatrain.models.params import Params, init_params, partition
from quatrain.parallel.mesh import mesh_shape
from quatrain.weights import hf
from quatrain.weights.hf import (
    VisionChoice,
    check_classifier,
    check_score_head,
    image_processor,
    load_hf,
    model_directory,
    read_architecture,
    read_sampling,
    read_whole,
)
from quatrain.weights.whole import Whole

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Model:
    """A model: its architecture, its parameters, and what its folder has beside them."""

    arch: Architecture
    params: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The settings of sampling that its folder recommends."""
    whole: Whole | None = None
    """What the parameters are a part of, if the model has a tower."""


def load_model(
    path: str,
    *,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    vocab_size: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    mesh: Mesh | None = None,
    head: Head = "lm_head",
    weights: bool = True,
    vision: VisionChoice = "none",
) -> Model:
    """The model at `path`, its parameters in `dtype` on `mesh` (default: on one device).

    `path` is `builtin:NAME`, a `.gguf` file, a Hugging Face directory (either of them also in a bucket) or a
    hub id. A built-in model is randomly initialised from `seed`, for a tokenizer with `vocab_size` and
    `eos_token_ids`; the other kinds ignore these arguments. With the head `value_head` (a critic, a reward
    model), the head is zero unless the model has one, and the output head of the vocabulary is not read.
    Without `weights`, the parameters are None, and files of weights are neither read nor downloaded.
    `vision`: what of a tower is trained (`model.vision`); without it the model is its text part. Raises
    ValueError if the model is missing, damaged or of an unsupported kind.
    """
    if not weights or path.startswith(BUILTIN):
        arch = load_architecture(path, vocab_size=vocab_size, eos_token_ids=eos_token_ids, vision=vision)
        arch = replace(arch, head=head)
        if weights:
            params = init_params(arch, jax.random.key(seed), dtype, mesh)
            return Model(arch, params, whole=_whole_of(path, arch))
        if mesh is not None:
            partition(arch, mesh_shape(mesh))
        return Model(arch, None)
    if path.endswith(".gguf"):
        from quatrain.weights.gguf import load_gguf

        return Model(*load_gguf(path, dtype, mesh, head))
    directory = model_directory(path)
    arch, params = load_hf(directory, dtype, mesh, head, vision=vision)
    whole = read_whole(directory) if arch.vision else None
    return Model(arch, params, read_sampling(directory), whole)


def load_tower(path: str, arch: Architecture, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> Params:
    """The frozen tower of the model at `path`, which `load_model` has loaded as `arch`, on `mesh`."""
    return hf.load_tower(model_directory(path), arch, dtype, mesh)


def load_processor(path: str) -> dict[str, Any]:
    """The settings of the image processor of the model at `path`; {}: transformers' defaults."""
    if path.startswith(BUILTIN):
        return BUILTIN_PROCESSOR
    return image_processor(model_directory(path, weights=False))


def load_classifier(path: str, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Model:
    """The sequence-classification model with one label at `path`, its parameters in `dtype` on `mesh`.

    `path` is a local Hugging Face directory or a hub id; `Architecture.head` is `value_head`. Raises
    ValueError if the model is missing, damaged, of an unsupported family, no sequence-classification model,
    or has several labels or no head. config.json is checked before any weights are downloaded.
    """
    check_classifier(path)
    directory = model_directory(path)
    check_score_head(directory)
    return Model(*load_hf(directory, dtype, mesh, "value_head"))


def classifier_architecture(path: str) -> Architecture:
    """The architecture of the model that `load_classifier` loads, from config.json alone.

    Raises ValueError in the same cases as `load_classifier`, but for what is wrong with the weights.
    """
    check_classifier(path)
    return load_architecture(path)


def load_architecture(
    path: str,
    *,
    vocab_size: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    vision: VisionChoice = "none",
) -> Architecture:
    """The architecture of the model at `path` (see `load_model`), without loading its weights.

    It is read from config.json and generation_config.json, the only files downloaded of a model on the Hub,
    or from the header of a `.gguf` file. Raises ValueError in the same cases as `load_model`.
    """
    if path.startswith(BUILTIN):
        if vocab_size is None:
            raise ValueError(f"{path} needs the size of the tokenizer's vocabulary: pass vocab_size")
        arch = builtin_architecture(path.removeprefix(BUILTIN), vocab_size, eos_token_ids)
        return _of_random(arch, vision, path)
    if path.endswith(".gguf"):
        from quatrain.weights.gguf import gguf_architecture

        return gguf_architecture(path)
    return read_architecture(model_directory(path, weights=False), vision)


def _whole_of(path: str, arch: Architecture) -> Whole | None:
    """What a built-in model with a tower is exported as."""
    if arch.vision is None:
        return None
    config = builtin_config(path.removeprefix(BUILTIN), arch.vocab_size, arch.eos_token_ids)
    return Whole(config, processor=BUILTIN_PROCESSOR)


def _of_random(arch: Architecture, vision: VisionChoice, path: str) -> Architecture:
    """A built-in model, of whose tower `vision` is trained: all of it by default, because it is random."""
    if vision in ("frozen", "projector") or (vision == "all" and arch.vision is None):
        has = f"{path} has none" if arch.vision is None else f"that of {path} is random"
        raise ValueError(
            f"model.vision of a built-in model must be all, if it has a tower, or none; {has}; set "
            f"model.vision to {'none' if arch.vision is None else 'all'}"
        )
    return replace(arch, vision=None) if vision == "none" else arch.with_tower
