"""MXFP4: the packed experts of gpt-oss, blocks of 32 numbers of 4 bits with a common power of two.

Data flow: two tensors of a checkpoint, `NAME_blocks` and `NAME_scales` -> rows of a parameter (`hf.py`).
Format: OCP Microscaling Formats (MX) v1.0, E2M1 elements with an E8M0 scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from quatrain.models.spec import TensorName

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Numbers of a block, in bytes of two."""
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BIAS = 127
"""Of the exponents."""


class Stored(NamedTuple):
    """Where a tensor is: the file, and its name there; of a packed one, where its scales are."""

    path: Path
    name: str
    scales: tuple[Path, str] | None = None


def with_packed(files: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors, of which those that are packed are one each."""
    found = dict(files)
    for name in files:
        packed = name.removesuffix(BLOCKS)
        if name.endswith(BLOCKS) and packed + SCALES in files:
            scales = found.pop(packed + SCALES)
            found[packed] = found.pop(name)._replace(scales=(scales.path, scales.name))
    return found


def check_packed(tensor: Stored, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless the packed `tensor` is one of `expected` [experts, in, out]."""
    assert tensor.scales
    experts, width, rows = expected
    shape = (experts, rows, width // BLOCK)
    for (path, name), wanted in ((tensor[:2], (*shape, BLOCK // 2)), (tensor.scales, shape)):
        with safe_open(path, "np") as file:
            view = file.get_slice(name)
            got, kind = tuple(view.get_shape()), view.get_dtype()
        if got != wanted or kind != "U8" or width % BLOCK:
            raise ValueError(
                f"{name} in {path} must be MXFP4 of shape {wanted}, U8 (config.json); it is {kind} {got}"
            )


def read_packed(tensor: Stored, name: TensorName, parameter: np.ndarray) -> None:
    """Copies a packed tensor into its slice of `parameter`, one expert at a time."""
    assert tensor.scales
    # One expert at a time: dequantised whole, a layer's experts are over seven times their size in the file.
    for expert in range(len(parameter)):
        parts = []
        for path, stored in (tensor[:2], tensor.scales):
            with safe_open(path, "np") as file:
                parts.append(file.get_slice(stored)[expert : expert + 1])
        name._replace(transposed=False).put(parameter, dequantised(*parts), expert)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float32 [..., 32 G] of `blocks` [..., G, 16], the lower half of a byte first, and `scales` [..., G]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    values = np.concatenate([VALUES, -VALUES])[codes]
    exact = np.ldexp(values, scales.astype(np.int32)[..., None] - BIAS)
    return exact.reshape(*scales.shape[:-1], -1).astype(np.float32)
