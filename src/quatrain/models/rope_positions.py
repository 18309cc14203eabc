"""Rotary positions of the tokens of a sequence with pictures, in time, rows and columns (mrope of the Qwens).

Data flow: `Pictures` of a sequence -> `rope_positions`, on the host -> `turns` of a row of tokens. Masks keep
the positions that count tokens.
"""

from __future__ import annotations

import numpy as np

from quatrain.models.vision import Vision
from quatrain.types.pictures import TEXT, Pictures


def rope_positions(vision: Vision, pictures: Pictures, num_tokens: int) -> tuple[np.ndarray, int]:
    """([3, T] int32 positions of a sequence of T = `num_tokens`, the shift of the tokens after it).

    Tokens behind those of `pictures` are text, which counts up in all three axes. The placeholders of a
    picture at position p have (p, p + row, p + column) in its grid of cells, and what follows goes on at
    p + the longer side. So a token of index i behind all pictures has i + shift in all axes.
    """
    numbers = vision.numbers_within(pictures)
    turns = np.empty((3, num_tokens), np.int32)
    position = done = 0
    for start in np.flatnonzero((pictures.ids != TEXT) & (numbers == 0)).tolist():
        turns[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        rows, columns = vision.cells(pictures.by_id[int(pictures.ids[start])].size)
        done = start + rows * columns
        assert (pictures.ids[start:done] == pictures.ids[start]).sum() == rows * columns, "a picture is cut"
        within = np.arange(rows * columns)
        turns[:, start:done] = position + np.stack([0 * within, within // columns, within % columns])
        position += max(rows, columns)
    turns[:, done:] = np.arange(position, position + num_tokens - done)
    return turns, position - done
