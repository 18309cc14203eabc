"""Floating-point operations of a model, computed from its architecture.

Data flow: architecture and token counts -> benchmarks, which divide them by time and by the device's peak;
architecture -> the packer of micro-batches, which balances the cost of sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax

from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.layer_run import Costs
from quatrain.models.params import is_spec, num_params, param_specs
from quatrain.models.vision import Vision
from quatrain.ops.packing import PackingCost

ONE = MeshShape()


def linear_parameters(arch: Architecture) -> int:
    """Elements of the weight matrices of all layers; the embedding and the output head do not count."""
    return sum(cost.weights for cost in _costs(arch))


def packing_cost(arch: Architecture) -> PackingCost:
    """Multiplications of one layer for a sequence, which the packer balances over data shards."""
    pairs = sum(cost.per_key for cost in _costs(arch))
    return PackingCost(linear_parameters(arch) / arch.num_layers, pairs / arch.num_layers)


def _costs(arch: Architecture) -> list[Costs]:
    """The costs of all blocks of all layers on one device."""
    blocks = (block for kind in arch.layers for block in kind.blocks)
    return [block.costs(arch.hidden_size, MeshShape()) for block in blocks]


def parameters_read(arch: Architecture, tokens: float, mesh: MeshShape = ONE) -> float:
    """Parameters that a device reads in a decode step of so many tokens of each data shard, on average.

    No decode step reads a tower. Of a layer's E experts, of which k compute a token, the devices of `ep` read
    E (1 - (1 - k / E)^n) in all, if the n tokens of their shards choose evenly and independently.
    """
    unread = 0.0
    for kind, specs in zip(arch.layers, param_specs(arch)["layers"], strict=True):
        if isinstance(kind.mlp, Experts):
            of_experts = sum(math.prod(spec.shape) for spec in specs.values() if "experts" in spec.axes)
            read = 1 - (1 - kind.mlp.top_k / kind.mlp.num) ** (tokens * mesh.ep)
            unread += of_experts * (1 - read / mesh.ep)
    return (num_params(replace(arch, vision=None)) - unread) / mesh.tp


def forward_flops(arch: Architecture, *, tokens: float, keys: float, scored: float) -> float:
    """Floating-point operations of a forward pass; a multiply-add counts as two.

    The layers compute `tokens`, which attend to `keys` keys on average, and the head logits of `scored`.
    """
    per_token = 2 * linear_parameters(arch) + 4 * sum(cost.per_key for cost in _costs(arch)) * keys
    return tokens * per_token + scored * 2 * arch.hidden_size * arch.vocab_size


def picture_flops(vision: Vision, size: tuple[int, int]) -> float:
    """Floating-point operations of the tower for a picture of this width and height in pixels.

    Blocks and the first product compute patches, projectors (`merger`, `deepstack`) features.
    """
    specs, patches = vision.params(), vision.num_patches(size)
    features = patches // vision.merge**2
    weights = {name: _matrices(specs.get(name, ())) for name in ("patch", "blocks", "merger", "deepstack")}
    products = patches * (weights["patch"] + weights["blocks"])
    products += features * (weights["merger"] + weights["deepstack"])
    whole = len(vision.whole) if vision.window else vision.depth
    pairs = whole * _pairs(vision, size, 0) + (vision.depth - whole) * _pairs(vision, size, vision.window)
    return 2 * products + 4 * vision.block.size * pairs


def _matrices(specs: Any) -> int:
    """Elements of the matrices among `specs`."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(math.prod(spec.shape) for spec in leaves if len(spec.shape) > 1)


def _pairs(vision: Vision, size: tuple[int, int], window: int) -> int:
    """Pairs of patches that attend to each other in a block with windows of so many features; 0: none."""
    side = window * vision.merge
    return sum(math.prod(_squares(count, side or count) for count in grid) for grid in vision.grids(size))


def _squares(count: int, step: int) -> int:
    """The sum of the squares of the parts of `count` of size `step`, the last of which may be smaller."""
    return count // step * step**2 + (count % step) ** 2
