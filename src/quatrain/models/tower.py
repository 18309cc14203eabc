"""The tower: features of pictures, from their pixels.

Data flow: pixels of each picture on the host -> `Patches`, a row of patches padded to a static shape ->
`states`, the tower's blocks -> `projected`, features for the text model. `features` is both.

Shapes: R rows, P patches, W width of the tower, F features, L further levels of features, D hidden size of
the text model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from quatrain.models.vision import Vision


class Patches(NamedTuple):
    """Pictures as a row of patches for the tower, padded to a static shape; rows are stacked: [R, ...]."""

    pixels: Any
    """[P, values of a patch] float32."""
    layout: dict[str, Any]
    """Arrays [P, ...] that say of each patch which grid it is of (0: padding), where it is, and so on."""
    rows: Any
    """[F] int32: where the tower's output has each of the pictures' features, one picture after another."""


def patches_of(vision: Vision, pixels: list[np.ndarray], sizes: list[tuple[int, int]]) -> Patches:
    """One row of patches with these pictures, in order; P and F are rounded up to few sizes."""
    raise NotImplementedError


def features(tower: Any, vision: Vision, patches: Patches, **settings: Any) -> jax.Array:
    """[R, 1 + L, F, D]: what the tower, `params["vision"]`, makes of rows of patches."""
    raise NotImplementedError
