"""Pictures without a tower: their geometry counts cells, and their features are random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from quatrain.models.rope_positions import rope_positions
from quatrain.models.vision import Cells, Vision
from quatrain.types.pictures import Picture, Pictures


class InCells:
    """In the place of a `Vision`: a picture's width and height count cells."""

    has_grid, levels = True, 1

    def cells(self, size: tuple[int, int]) -> Cells:
        return Cells(size[1], size[0])

    def num_placeholders(self, size: tuple[int, int]) -> int:
        return size[0] * size[1]

    numbers_within: Any = Vision.numbers_within


PLACEHOLDER = 9
VISION: Any = InCells()


class MadeUpFeatures:
    """In the place of a `FeatureStore`: features of each picture that derive from its id."""

    def __init__(self, hidden_size: int, vision: Any = VISION):
        self.vision, self.dtype = vision, np.dtype(np.float32)
        self.arch = SimpleNamespace(hidden_size=hidden_size)

    def load(self, params: Any, version: int) -> None:
        """The same, whatever the weights."""

    def of(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        return [self.of_one(picture) for picture in pictures]

    def of_one(self, picture: Picture) -> np.ndarray:
        shape = 1 + self.vision.levels, self.vision.num_placeholders(picture.size), self.arch.hidden_size
        return np.random.default_rng(picture.id).normal(0, 0.5, shape).astype(np.float32)

    def of_tokens(self, pictures: Pictures, num_tokens: int) -> list[np.ndarray | None]:
        """[1 + L, D] of each token of a sequence, whose last ones may be text; None for text."""
        numbers = self.vision.numbers_within(pictures)
        found: list[np.ndarray | None] = [None] * num_tokens
        for i in np.flatnonzero(pictures.ids):
            found[i] = self.of_one(pictures.by_id[int(pictures.ids[i])])[:, numbers[i]]
        return found

    def turns(self, pictures: Pictures, num_tokens: int) -> np.ndarray:
        """[3, T]: the rotary positions of a sequence."""
        return rope_positions(self.vision, pictures, num_tokens)[0]


def picture(rows: int, columns: int, number: int = 0) -> Picture:
    """A picture of so many cells; those with another number are others."""
    return Picture.of(bytes((rows, columns, number)), (columns, rows))


def tokens_of(runs: Sequence[Any]) -> tuple[list[int], Pictures | None]:
    """The tokens of texts, which are lists of ids, and pictures in order."""
    ids: list[int] = []
    pictures: list[Picture | None] = []
    for run in runs:
        count = VISION.num_placeholders(run.size) if isinstance(run, Picture) else len(run)
        ids += [PLACEHOLDER] * count if isinstance(run, Picture) else run
        pictures += [run if isinstance(run, Picture) else None] * count
    return ids, Pictures.of(pictures)
