"""What a parameter is, and which slice of it a tensor of a checkpoint fills.

Data flow: blocks and `Architecture` -> `ParamSpec`s and `TensorName`s -> `params.py`, `weights/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from quatrain.config.errors import shown

LORA_A, LORA_B = "_lora_a", "_lora_b"
"""How the names of adapters end, after the name of their matrix."""
EXPERTS = "experts"
"""The logical axis of experts, the first of their parameters."""


@dataclass(frozen=True)
class LoRA:
    """Adapters of low rank on matrices of every layer: W x becomes W x + (alpha / rank) B (A x).

    A is [rank, in], B [out, rank] (Hu et al. 2021, arXiv 2106.09685). `targets` are names of a layer's
    matrices (`models.params`), and `lm_head`, the output head of the vocabulary. Where this is tied to the
    embeddings they stay as they are. Those of a tower are in `Vision.lora`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axis of each dimension, and its random initialisation.

    Logical axes: `vocab`, `embed` (hidden), `heads` (query heads x head size), `kv_heads` (key/value heads,
    each with its query heads), `mlp`, `experts`, and `group`, `head`, `rank` and `norm`, which are never
    sharded.
    `scale` is the standard deviation if `init` is `normal`, the largest absolute value if it is `uniform`,
    and the value of every element if it is `constant`. `dtype` is the parameter's own; None: the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "uniform", "constant"]
    scale: float
    dtype: str | None = None

    @classmethod
    def matrix(cls, shape: tuple[int, ...], axes: tuple[str, ...], factor: float = 1.0) -> ParamSpec:
        """A matrix [*out, in] of standard deviation `factor` * in**-0.5."""
        return cls(shape, axes, "normal", factor * shape[-1] ** -0.5)

    def bias(self) -> ParamSpec:
        """The bias of this matrix."""
        return ParamSpec(self.shape[:-1], self.axes[:-1], "constant", 0.0)

    def adapters(self, name: str, rank: int, num_parts: int) -> dict[str, ParamSpec]:
        """A and B of this matrix `name`, in float32, which holds `num_parts` matrices of a checkpoint.

        A has a block for each of these, as if they were apart: `qkv_lora_a` [3, r, D], `gate_up_lora_a`
        [2, r, D], and of a single matrix [r, in]. B is [*out, r]. Of experts' matrices [E, *out, in], which
        are as one in peft, A is [E, r, in]. A is uniform up to in**-0.5 and B is zero, as in peft.
        """
        *out, width = self.shape
        parts: tuple[int, ...] = (num_parts,) if num_parts > 1 else ()
        a_axes: tuple[str, ...] = ("group",) * len(parts)
        if self.axes[0] == EXPERTS:
            parts, a_axes = self.shape[:1], (EXPERTS,)
        a_axes += ("rank", self.axes[-1])
        a = ParamSpec((*parts, rank, width), a_axes, "uniform", width**-0.5, "float32")
        b = ParamSpec((*out, rank), (*self.axes[:-1], "rank"), "constant", 0.0, "float32")
        return {name + LORA_A: a, name + LORA_B: b}


class TensorName(NamedTuple):
    """A tensor of a Hugging Face checkpoint: its name, the path of the parameter, and the slice it fills.

    `part` is an index of the parameter that leaves its last dimension whole, except of a vector. Where rows
    are in another order than in the checkpoint, it is a tuple of row numbers.
    """

    name: str
    path: tuple[str | int, ...]
    part: Any = ...
    vector: bool = True
    kernel: bool = False
    """Whether it is that of a convolution of each channel by itself, [channels, 1, width] in a checkpoint."""
    stacked: bool = False
    """Whether a checkpoint has the matrices or vectors of all experts as one tensor [experts, ...]."""
    transposed: bool = False
    """Whether these are [experts, in, out] there."""
    folded: tuple[int, ...] = ()
    """The dimensions that a checkpoint has in the place of `in`: those of a convolution of patches."""

    def shape_in(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this tensor, given the shape of its parameter."""
        rows = np.empty((), bool)
        rows = np.broadcast_to(rows, parameter if self.vector else parameter[:-1])[self.part]
        experts = (len(rows),) if self.stacked else ()
        out = rows.size // math.prod(experts)
        if self.vector:
            return (*experts, out)
        if self.transposed:
            return (*experts, parameter[-1], out)
        return (*experts, out, *(1,) * self.kernel, *(self.folded or parameter[-1:]))

    def rows(self, parameter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(`parameter` as a list of rows, row numbers that this tensor fills, in the order of the tensor).

        A parameter [*out, in] has prod(out) rows; if the tensor is a vector, each element is a row. Of
        stacked tensors the numbers are [experts, rows], else [rows].
        """
        shape = parameter.shape if self.vector else parameter.shape[:-1]
        numbers = np.arange(math.prod(shape)).reshape(shape)[self.part]
        numbers = numbers.reshape((len(numbers), -1) if self.stacked else -1)
        return parameter.reshape(-1, *parameter.shape[len(shape) :]), numbers

    def put(self, parameter: np.ndarray, block: np.ndarray, first: int = 0) -> None:
        """Copies a block of this tensor, from `first` on along its first dimension, into `parameter`."""
        rows, numbers = self.rows(parameter)
        at = numbers[first : first + len(block)]
        rows[at] = (block.swapaxes(1, 2) if self.transposed else block).reshape(*at.shape, *rows.shape[1:])

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """This tensor's slice of `parameter`: [out, in], or [out] for a vector."""
        part, shape = parameter[self.part], self.shape_in(parameter.shape)
        if self.transposed:
            part = part.reshape(shape[0], shape[2], shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(part.reshape(shape))


def linear_tensors(module: str, param: str, part: Any = ..., *, bias: bool) -> list[TensorName]:
    """The weight of the linear module `module`, a slice of matrix `param`, and its bias if it has one."""
    weight = TensorName(f"{module}.weight", (param,), part, vector=False)
    return [weight, TensorName(f"{module}.bias", (f"{param}_bias",), part)][: 1 + bias]


def part_tensors(block: str, param: str, parts: Mapping[str, Any], *, bias: bool) -> list[TensorName]:
    """The tensors of the linear modules of `block` that are parts of one matrix `param`."""
    names = (linear_tensors(f"{block}.{name}", param, part, bias=bias) for name, part in parts.items())
    return [*chain(*names)]


def require(holds: bool, name: str, expected: str, got: object) -> None:
    """Raises ValueError unless a field of an architecture is as expected."""
    if not holds:
        raise ValueError(f"model architecture: {name} must be {expected}; got {shown(got)}")
