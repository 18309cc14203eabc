"""Pictures without files, and tables of sequences that have some, for small models with towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from towers import PLACEHOLDER

from quatrain.forward.table import TokenTable, padded
from quatrain.models.architecture import Architecture
from quatrain.models.feature_store import FeatureStore
from quatrain.models.params import VISION, init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.pictures import Picture, Pictures, stacked

SMALL, WIDE, SQUARE = (16, 16), (24, 16), (24, 24)
"""Sizes of pictures, of 4, 6 and 9 features of the small Qwen3-VL."""
SIZES = (SMALL, WIDE, SQUARE, SMALL)


def picture(number: int, size: tuple[int, int] = SMALL) -> Picture:
    """The picture of this number; equal numbers and sizes are the same one."""
    return Picture.of(b"%d %d %d" % (number, *size), size)


def pixels_of(arch: Architecture) -> Any:
    """What gives the patches of a picture, drawn from its id."""
    vision = arch.vision
    assert vision is not None

    def pixels(of: Picture) -> np.ndarray:
        drawn = np.random.default_rng(of.id).normal(size=(vision.num_patches(of.size), vision.patch_values))
        return drawn.astype(np.float32)

    return pixels


def whole_params(arch: Architecture, mesh: Mesh | None = None) -> Any:
    """Parameters with those of the tower, also where it is frozen, that are not small at any place."""
    return init_params(arch.with_tower, jax.random.key(3), mesh=mesh)


def without_tower(params: Any, arch: Architecture) -> Any:
    """Those among the parameters of `arch`: a frozen tower is not."""
    frozen = arch.vision is None or arch.vision.trained == "frozen"
    return {name: leaf for name, leaf in params.items() if not (frozen and name == VISION)}


def store_of(
    arch: Architecture, whole: Any, *, mesh: Mesh | None = None, num_bytes: int = 2**30
) -> FeatureStore:
    """The store of a model with the parameters `whole`, loaded as version 0."""
    settings = mesh or one_device(), "float32", num_bytes, pixels_of(arch)
    store = FeatureStore(arch, *settings, frozen=lambda: whole[VISION])
    store.load(whole, 0)
    return store


def sequence(
    rng: np.random.Generator, arch: Architecture, prompt: Sequence[Picture | int], completion: int
) -> tuple[list[int], Pictures | None, int]:
    """(ids, pictures, tokens of the prompt): pictures, between so many random words; then a completion."""
    assert arch.vision is not None
    tokens: list[tuple[int, Picture | None]] = []
    for part in prompt:
        if isinstance(part, Picture):
            tokens += [(PLACEHOLDER, part)] * arch.vision.num_placeholders(part.size)
        else:
            tokens += [(int(word), None) for word in rng.integers(3, 80, part)]
    length = len(tokens)
    # A sampled placeholder id is text: the last word of a completion is one.
    tokens += [(int(word), None) for word in [*rng.integers(3, 80, completion - 1), PLACEHOLDER]]
    return [word for word, _ in tokens], Pictures.of(seen for _, seen in tokens), length


def picture_table(arch: Architecture, seed: int = 0, *, samples: int = 2) -> TokenTable:
    """Groups with no picture, one, two neighbours, the same twice, and prompts alike but for their pictures.

    With the columns of a policy loss.
    """
    a, b, c, d = (picture(number, size) for number, size in enumerate(SIZES))
    prompts = [[5], [3, a, 2], [2, a, b, 3], [1, c, 2, c, 1], [4, d, 3], [4, a, 3]]
    rng = np.random.default_rng(seed)
    rows, groups = [], []
    for group, prompt in enumerate(prompts):
        drawn = np.random.default_rng([seed, 7 if group >= len(prompts) - 2 else group])
        before, seen, length = sequence(drawn, arch, prompt, 1)
        for _ in range(samples):
            words = [int(word) for word in rng.integers(3, 80, rng.integers(1, 5))]
            ids = [*before[:length], *words, PLACEHOLDER]
            of = None if seen is None else Pictures(np.pad(seen.ids, (0, len(words))), seen.by_id)
            rows.append((ids, of, length))
            groups.append(group)
    input_ids, attention = padded([ids for ids, _, _ in rows])
    starts = np.array([length for _, _, length in rows])
    completion = attention & (np.arange(attention.shape[1]) >= starts[:, None])
    pictures = stacked((seen for _, seen, _ in rows), input_ids.shape[1])
    advantages = np.where(completion, rng.normal(size=(len(rows), 1)), 0).astype(np.float32)
    columns = {"advantages": advantages, "rollout_logprobs": np.zeros_like(advantages)}
    table = TokenTable(input_ids, attention, completion, columns, np.array(groups), pictures=pictures)
    return table.weighted("token_mean", 8)
