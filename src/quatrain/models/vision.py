"""What a model sees with: the geometry of pictures, and the tower that makes features of them.

Data flow: config.json -> `Vision`, a field of `Architecture` -> `num_placeholders`, for the tokens of a text;
`rope_positions` (`rope_positions.py`), for the text model; `Patches` and `features` (`tower.py`), from pixels
on the host -> `Inserts`, in the place of the embeddings of placeholders.

A picture is resized, and cut into grids of patches: one grid (Qwen), or square tiles and the whole picture
once more as a tile (Idefics3). Patches attend to those of their own grid. `merge` x `merge` neighbours of a
grid become one feature. Sizes are (width, height) in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from quatrain.models.blocks.vit import VisionBlock
from quatrain.models.spec import LoRA, ParamSpec, TensorName, linear_tensors, require
from quatrain.types.pictures import Pictures

TrainedVision = Literal["frozen", "projector", "all"]
VisionKind = Literal["idefics3", "qwen2_5_vl", "qwen3_vl"]
PROJECTOR = ("merger", "deepstack")
"""The parts of a tower's parameters that `projector` trains."""
MOST_RATIO = 200
"""Of the longer and the shorter side of a picture; Qwen's rule."""
LARGEST_SIDE = 4096
"""In pixels, of a picture that Idefics3 cuts into tiles."""


class Cells(NamedTuple):
    """A grid: of features, of one placeholder each, by row; or of tiles."""

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

    kind: VisionKind
    placeholder_id: int
    """The token that templates and expansions have for each feature."""
    block: VisionBlock
    depth: int
    """Blocks."""
    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """m: m x m patches become one feature."""
    out_size: int
    """D."""
    temporal: int = 1
    """How many times a patch has a picture, as if it were so many frames of a film."""
    channels: int = 3
    table_side: int = 0
    """Side of the square of learned positions; 0: there are none."""
    deepstack: tuple[int, ...] = ()
    """The blocks after which a further level of features is made, in ascending order."""
    window: int = 0
    """Features of a side of a window, whose patches attend to each other alone; 0: all of a grid do."""
    whole: tuple[int, ...] = ()
    """The blocks whose patches attend to their whole grid all the same."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Of a resized picture (Qwen)."""
    longest_edge: int = 0
    """Pixels of the longer side of a resized picture that is cut into tiles (Idefics3)."""
    tile: int = 0
    """Pixels of a side of a tile (Idefics3); 0: a picture is one grid."""
    splits: bool = False
    """Whether larger pictures are cut into tiles; if not, each is one tile."""
    trained: TrainedVision = "frozen"
    lora: LoRA | None = None
    """Adapters of the matrices of its blocks, which alone are trained of it."""

    def __post_init__(self) -> None:
        rising = list(self.deepstack) == sorted({*self.deepstack} & {*range(self.depth)})
        require(rising, "deepstack_visual_indexes", f"ascending numbers below {self.depth}", self.deepstack)
        unit = self.unit
        require(self.tile % unit == 0, "max_image_size", f"a multiple of {unit} pixels", self.tile)

    @property
    def unit(self) -> int:
        """Pixels of a side of a feature."""
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: channels, times, rows and columns, in this order."""
        return self.channels * self.temporal * self.patch**2

    @property
    def levels(self) -> int:
        """L: levels of features that are added after the first text layers (deepstack)."""
        return len(self.deepstack)

    @property
    def text_module(self) -> str:
        """The name of the text model within the model of transformers."""
        return "text_model" if self.kind == "idefics3" else "language_model"

    @property
    def has_grid(self) -> bool:
        """Whether rotary positions of placeholders have a row and a column (mrope)."""
        return self.tile == 0

    def num_placeholders(self, size: tuple[int, int]) -> int:
        """Features of a picture of this width and height in pixels; raises ValueError for extreme ratios."""
        return self.num_patches(size) // self.merge**2

    def numbers_within(self, pictures: Pictures) -> np.ndarray:
        """[T] int32: of each placeholder of a sequence, its number among those of its picture; 0 for text."""
        numbers = np.zeros(len(pictures), np.int32)
        for picture in pictures.used:
            places = np.flatnonzero(pictures.ids == picture.id)
            numbers[places] = np.arange(len(places)) % self.num_placeholders(picture.size)
        return numbers

    def num_patches(self, size: tuple[int, int]) -> int:
        """Patches of a picture that the tower reads."""
        return sum(grid.rows * grid.columns for grid in self.grids(size))

    def cells(self, size: tuple[int, int]) -> Cells:
        """The grid of the features of a picture, where `has_grid`."""
        assert self.has_grid, "tiles have a grid each"
        width, height = self.seen_size(size)
        return Cells(height // self.unit, width // self.unit)

    def tiles(self, size: tuple[int, int]) -> Cells:
        """The grid of tiles that a picture is cut into, where not `has_grid`; (0, 0): it is one tile.

        If it is cut, the whole picture is one more tile, the last.
        """
        assert not self.has_grid, "the picture is one grid"
        width, height = self.seen_size(size)
        found = Cells(height // self.tile, width // self.tile)
        return Cells(0, 0) if found == (1, 1) else found

    def grids(self, size: tuple[int, int]) -> list[Cells]:
        """The grids of patches of a picture, in the order in which the tower reads them."""
        if self.has_grid:
            rows, columns = self.cells(size)
            return [Cells(rows * self.merge, columns * self.merge)]
        rows, columns = self.tiles(size)
        return [Cells(self.tile // self.patch, self.tile // self.patch)] * (rows * columns + 1)

    def seen_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height to which a picture is resized for the tower.

        The arithmetic is that of the image processors of transformers, rounding included. Raises ValueError
        for a picture whose sides are too different.
        """
        if max(size) > MOST_RATIO * min(size):
            raise ValueError(
                f"a picture may be at most {MOST_RATIO} times as long as it is wide; got "
                f"{size[0]} x {size[1]} pixels; cut it"
            )
        if self.has_grid:
            return self._within_pixels(*size)
        if not self.splits:
            return self.tile, self.tile
        width, height = _bounded(*_with_longest_edge(*size, self.longest_edge))
        return _rounded_up(width, height, self.tile)

    def _within_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Multiples of `unit`, with `min_pixels` to `max_pixels` together (Qwen's `smart_resize`)."""
        unit = self.unit
        wide, high = (round(side / unit) * unit for side in (width, height))
        if wide * high > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            wide, high = (max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height))
        elif wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            wide, high = (math.ceil(side * grow / unit) * unit for side in (width, height))
        return wide, high

    def params(self) -> dict[str, Any]:
        """The specs of the tower: `patch` [W, values], `blocks`, `merger`, and what else it has."""
        w, norm, residual = self.block.size, self.block.norm, (2 * self.depth) ** -0.5
        specs: dict[str, Any] = {
            "patch": ParamSpec.matrix((w, self.patch_values), ("embed", "group")),
            "blocks": [self.block.params(residual, self.lora) for _ in range(self.depth)],
            "merger": self._projector(norm_first=True),
        }
        if self.kind != "qwen2_5_vl":
            specs["patch_bias"] = specs["patch"].bias()
            specs["positions"] = ParamSpec((self.table_side**2, w), ("group", "embed"), "normal", w**-0.5)
        if self.kind == "idefics3":
            specs |= norm.params("post_norm", w)
        if self.deepstack:
            specs["deepstack"] = [self._projector(norm_first=False) for _ in self.deepstack]
        return specs

    def _projector(self, norm_first: bool) -> dict[str, ParamSpec]:
        """What makes a feature of m x m patches; their norm is of each, or of all in a row."""
        w = self.block.size * self.merge**2
        down = ParamSpec.matrix((self.out_size, w), ("group", "embed"))
        if self.kind == "idefics3":
            return {"down": down}
        up = ParamSpec.matrix((w, w), ("group", "embed"))
        specs = {"up": up, "up_bias": up.bias(), "down": down, "down_bias": down.bias()}
        return specs | self.block.norm.params("norm", self.block.size if norm_first else w)

    @property
    def block_modules(self) -> list[str]:
        """The names of the blocks in a checkpoint."""
        return [f"{_MODULES[self.kind]['blocks']}.{i}" for i in range(self.depth)]

    def tensors(self) -> list[TensorName]:
        """The tensors of the tower in a checkpoint, with paths that begin with `vision`."""
        names = _MODULES[self.kind]
        frames = (self.temporal,) if self.kind != "idefics3" else ()
        kernel = (self.channels, *frames, self.patch, self.patch)
        found = linear_tensors(names["patch"], "patch", bias=self.kind != "qwen2_5_vl")
        found[0] = found[0]._replace(folded=kernel)
        if "positions" in names:
            found += linear_tensors(names["positions"], "positions", bias=False)
        if "post_norm" in names:
            found += self.block.norm.tensors(names["post_norm"], "post_norm")
        found += self._of(names["blocks"], "blocks", [self.block.tensors()] * self.depth)
        found += _below(f"{names['merger']}.", ("merger",), self._projector_tensors(names))
        found += self._of(
            names.get("deepstack", ""), "deepstack", [self._projector_tensors(names)] * self.levels
        )
        return _below("", ("vision",), found)

    def _projector_tensors(self, names: dict[str, str]) -> list[TensorName]:
        if self.kind == "idefics3":
            return linear_tensors(names["down"], "down", bias=False)
        linears = [t for name in ("up", "down") for t in linear_tensors(names[name], name, bias=True)]
        return [*linears, *self.block.norm.tensors(names["norm"], "norm")]

    def _of(self, module: str, name: str, parts: list[list[TensorName]]) -> list[TensorName]:
        """The tensors of a list of modules."""
        each = (_below(f"{module}.{i}.", (name, i), part) for i, part in enumerate(parts))
        return [tensor for part in each for tensor in part]


_MODULES: dict[VisionKind, dict[str, str]] = {
    "idefics3": {
        "patch": "vision_model.embeddings.patch_embedding",
        "positions": "vision_model.embeddings.position_embedding",
        "blocks": "vision_model.encoder.layers",
        "post_norm": "vision_model.post_layernorm",
        "merger": "connector.modality_projection",
        "down": "proj",
    },
    "qwen2_5_vl": {
        "patch": "visual.patch_embed.proj",
        "blocks": "visual.blocks",
        "merger": "visual.merger",
        "norm": "ln_q",
        "up": "mlp.0",
        "down": "mlp.2",
    },
    "qwen3_vl": {
        "patch": "visual.patch_embed.proj",
        "positions": "visual.pos_embed",
        "blocks": "visual.blocks",
        "merger": "visual.merger",
        "deepstack": "visual.deepstack_merger_list",
        "norm": "norm",
        "up": "linear_fc1",
        "down": "linear_fc2",
    },
}
"""The names of a tower's modules in a checkpoint; those of a projector are within it."""


def _below(module: str, path: tuple[str | int, ...], tensors: list[TensorName]) -> list[TensorName]:
    return [each._replace(name=module + each.name, path=(*path, *each.path)) for each in tensors]


def _with_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Of the longer side `edge`, the other even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    return max(width, 1), max(height, 1)


def _bounded(width: int, height: int) -> tuple[int, int]:
    """At most LARGEST_SIDE a side."""
    ratio = width / height
    if width >= height and width > LARGEST_SIDE:
        width, height = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
    elif height > width and height > LARGEST_SIDE:
        width, height = int(LARGEST_SIDE * ratio), LARGEST_SIDE
    return max(width, 1), max(height, 1)


def _rounded_up(width: int, height: int, tile: int) -> tuple[int, int]:
    """Both sides up to multiples of a tile; the shorter one of what the longer one made of it."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height
