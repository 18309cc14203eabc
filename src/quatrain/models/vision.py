"""What a model sees with: the geometry of pictures, and the tower that makes features of them.

Data flow: config.json -> `Vision`, a field of `Architecture` -> `num_placeholders`, for the tokens of a text;
`rope_positions` (`rope_positions.py`), for the text model; `Patches`, from pixels on the host -> `features`
-> `Inserts`, in the place of the embeddings of placeholders.

Shapes: P patches (with padding), F features, L further levels of features, D hidden size of the text model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

TrainedVision = Literal["frozen", "projector", "all"]


class Cells(NamedTuple):
    """The grid of features of a picture: of one placeholder each, rows by columns, by row."""

    rows: int
    columns: int


class Inserts(NamedTuple):
    """What stands in the place of token embeddings: features of pictures."""

    features: jax.Array
    """[R, 1 + L, F, D], or [1, 1 + L, F, D] where all R rows of tokens have the same; F has padding.

    Level 0 replaces embeddings; level 1 + i is added to the output of text layer i."""
    rows: jax.Array
    """[R, T] int32: which of the F features a token has; -1 for text."""


@dataclass(frozen=True)
class Vision:
    """The tower of one model; hashable, as it is a part of `Architecture`."""

    kind: Literal["idefics3", "qwen2_5_vl", "qwen3_vl"]
    placeholder_id: int
    """The token that templates and expansions have for each feature."""
    trained: TrainedVision = "frozen"

    @property
    def levels(self) -> int:
        """L: levels of features that are added after the first text layers (deepstack)."""
        raise NotImplementedError

    @property
    def has_grid(self) -> bool:
        """Whether rotary positions of placeholders have a row and a column (mrope)."""
        raise NotImplementedError

    def num_placeholders(self, size: tuple[int, int]) -> int:
        """Features of a picture of this width and height in pixels; raises ValueError for extreme ratios."""
        raise NotImplementedError

    def num_patches(self, size: tuple[int, int]) -> int:
        """Patches of a picture that the tower reads."""
        raise NotImplementedError

    def cells(self, size: tuple[int, int]) -> Cells:
        """The grid of the features of a picture, where `has_grid`."""
        raise NotImplementedError

    def seen_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height to which a picture is resized for the tower."""
        raise NotImplementedError


class Patches(NamedTuple):
    """Pictures as a row of patches for the tower, padded to a static shape; leading dims may be added."""

    pixels: Any
    """[P, values of a patch] float32."""
    layout: dict[str, Any]
    """Arrays [P, ...] that say of each patch which picture it is of (0: padding), where it is, and so on."""
    rows: Any
    """[F] int32: where the tower's output has each of the pictures' features, one picture after another."""


def patches_of(vision: Vision, pixels: list[np.ndarray], sizes: list[tuple[int, int]]) -> Patches:
    """One row of patches with these pictures, in order; P and F are rounded up to few sizes."""
    raise NotImplementedError


def features(params: Any, vision: Vision, patches: Patches, **settings: Any) -> jax.Array:
    """[1 + L, F, D]: what the tower, `params["vision"]`, makes of one row of patches."""
    raise NotImplementedError


def states(params: Any, vision: Vision, patches: Patches, **settings: Any) -> jax.Array:
    """[1 + L, F, S]: what the projector makes each feature of, S numbers of the tower's last states."""
    raise NotImplementedError


def projected(params: Any, vision: Vision, states: jax.Array, **settings: Any) -> jax.Array:
    """[1 + L, F, D]: what the projector makes of `states`: features."""
    raise NotImplementedError
