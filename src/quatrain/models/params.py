"""The tree of parameter specs, from which parameter shapes, initial values and shardings are derived.

Data flow: `Architecture` -> tree of `ParamSpec` -> parameter tree, filled by loading and read by the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.config.mesh import MeshShape
from quatrain.models.families import Architecture, TensorName, tensor_names
from quatrain.parallel.axes import FSDP, partition_spec
from quatrain.parallel.collectives import all_gather, psum_backward
from quatrain.parallel.mesh import mesh_shape, one_device, place, shardings

Params = dict[str, Any]
"""{"embed": [V, D], "layers": [one dict per layer], "final_norm": [D], and the output head}.

The head is `lm_head` [V, D] unless it is tied to `embed`, or `score` [1, D] (`Architecture.head`).
"""

XLA_ALIGNMENT = 64
"""The alignment, in bytes, of host arrays that XLA uses on a CPU without copying them."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axis of each dimension, and its random initialisation.

    Logical axes: `vocab`, `embed` (hidden), `heads` (query heads x head size), `kv_heads` (key/value heads,
    each with its query heads), `mlp`, and `group`, `head`, `rank` and `norm`, which are never sharded.
    `scale` is the standard deviation if `init` is `normal`, the largest absolute value if it is `uniform`,
    and the value of every element if it is `constant`. `dtype` is the parameter's own; None: the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "uniform", "constant"]
    scale: float
    dtype: str | None = None


def param_specs(arch: Architecture) -> Params:
    """The tree of `ParamSpec`s of `arch`.

    Matrices are stored as [*out, in]. Matrices that multiply the same input are stored as one: `qkv`
    [K, G + 2, H, D] holds for each key/value head its G query heads, its key head and its value head, and
    `gate_up` [2, F, D] holds the gate and the up projection. The time of a decode step is the time to read
    the weights, and one product in place of three takes two thirds of it on a CPU.

    Weights are initialised with standard deviation in**-0.5. The standard deviation of matrices that write
    to the residual stream is divided by sqrt(2 * layers), so that the variance of the residual stream does
    not grow with depth (Radford et al. 2019). A `score` head is zero. The adapters of `Architecture.lora` are
    parameters of their layers (`models.lora`).
    """
    d = arch.hidden_size
    specs: Params = {
        "embed": ParamSpec((arch.vocab_size, d), ("vocab", "embed"), "normal", d**-0.5),
        "layers": [_layer_specs(arch) for _ in range(arch.num_layers)],
        "final_norm": _norm(arch, d),
    }
    score = ParamSpec((1, d), ("norm", "norm"), "constant", 0.0)
    specs[output_head_name(arch)] = score if arch.head == "score" else specs["embed"]
    return specs


def output_head_name(arch: Architecture) -> str:
    """The name of the output head's parameter: `score`, `embed` if the embeddings are tied, or `lm_head`."""
    if arch.head == "score":
        return "score"
    return "embed" if arch.tie_embeddings else "lm_head"


def _layer_specs(arch: Architecture) -> dict[str, ParamSpec]:
    d, f = arch.hidden_size, arch.intermediate_size
    heads, per_kv_head = arch.num_heads * arch.head_dim, arch.num_heads // arch.num_kv_heads + 2
    residual = (2 * arch.num_layers) ** -0.5
    specs = {
        "attention_norm": _norm(arch, d),
        "qkv": _matrix(
            (arch.num_kv_heads, per_kv_head, arch.head_dim, d), ("kv_heads", "group", "head", "embed")
        ),
        "o": _matrix((d, heads), ("embed", "heads"), residual),
        "mlp_norm": _norm(arch, d),
        "gate_up": _matrix((2, f, d), ("group", "mlp", "embed")),
        "down": _matrix((d, f), ("embed", "mlp"), residual),
    }
    biased = ["qkv"] * arch.qkv_bias + ["o"] * arch.output_bias + ["gate_up", "down"] * arch.mlp_bias
    for name in biased:
        matrix = specs[name]
        specs[f"{name}_bias"] = ParamSpec(matrix.shape[:-1], matrix.axes[:-1], "constant", 0.0)
    if arch.qk_norm:
        specs |= {"q_norm": _norm(arch, arch.head_dim), "k_norm": _norm(arch, arch.head_dim)}
    if arch.post_norms:
        specs |= {"post_attention_norm": _norm(arch, d), "post_mlp_norm": _norm(arch, d)}
    for name in arch.lora.targets if arch.lora else ():
        specs |= _adapter(name, specs[name], arch.lora.rank if arch.lora else 0)
    return specs


ADAPTED = ("qkv", "o", "gate_up", "down")
"""The matrices of a layer that may have adapters."""
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""How the names of adapters end, after the name of their matrix."""


def _adapter(name: str, matrix: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    """A and B of the matrix `name`, in float32.

    A has a block for each of the matrices that are stored as one, as if they were apart: `qkv_lora_a`
    [3, r, D], `gate_up_lora_a` [2, r, D], and of others [r, in]. B is [*out, r]. A is uniform up to in**-0.5
    and B is zero, as in peft.
    """
    *out, width = matrix.shape
    blocks = {"qkv": (3,), "gate_up": (2,)}.get(name, ())
    a_axes = ("group",) * len(blocks) + ("rank", matrix.axes[-1])
    return {
        name + LORA_A: ParamSpec((*blocks, rank, width), a_axes, "uniform", width**-0.5, "float32"),
        name + LORA_B: ParamSpec((*out, rank), (*matrix.axes[:-1], "rank"), "constant", 0.0, "float32"),
    }


def _matrix(shape: tuple[int, ...], axes: tuple[str, ...], factor: float = 1.0) -> ParamSpec:
    return ParamSpec(shape, axes, "normal", factor * shape[-1] ** -0.5)


def _norm(arch: Architecture, size: int) -> ParamSpec:
    return ParamSpec((size,), ("norm",), "constant", 1.0 - arch.norm_offset)


def is_spec(leaf: object) -> bool:
    """Whether `leaf` is a ParamSpec; for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(leaf, ParamSpec)


def partition(arch: Architecture, mesh: MeshShape) -> Params:
    """The tree of `PartitionSpec`s with which the parameters of `arch` are sharded over `mesh`.

    Raises ValueError if a layer cannot be split over the `tp` devices of `mesh`.
    """
    valid = [tp for tp in range(1, arch.num_heads + 1) if _divides_layers(arch, tp)]
    if mesh.tp not in valid:
        raise ValueError(
            f"tp must be a number that divides the {arch.num_heads} query heads and the "
            f"{arch.intermediate_size} columns of the MLP, and that divides or is a multiple of the "
            f"{arch.num_kv_heads} key/value heads; got tp {mesh.tp}; "
            f"choose one of {', '.join(map(str, valid))}"
        )
    return jax.tree.map(lambda s: partition_spec(s.shape, s.axes, mesh), param_specs(arch), is_leaf=is_spec)


def _divides_layers(arch: Architecture, tp: int) -> bool:
    kv_heads = arch.num_kv_heads
    return not (arch.num_heads % tp or arch.intermediate_size % tp or (kv_heads % tp and tp % kv_heads))


def gather_params(params: Any, specs: Any, dtype: DTypeLike | None = None) -> Any:
    """`params` all-gathered over the `fsdp` axis; for use inside `shard_map`, where the parameters are read.

    `specs` are the partition specs of `params`. Matrices are cast to `dtype` before the all-gather. The
    backward pass sums the gradients over the `fsdp` axis (reduce-scatter).
    """

    def one(parameter: jax.Array, spec: PartitionSpec) -> jax.Array:
        if FSDP not in spec:
            return psum_backward(parameter, FSDP)
        return all_gather(parameter, FSDP, spec.index(FSDP), dtype if parameter.ndim > 1 else None)

    return jax.tree.map(one, params, specs)


class GatheredLayer(Mapping[str, jax.Array]):
    """The parameters of one layer as a mapping; reading one all-gathers it, as `gather_params` does."""

    def __init__(self, layer: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec], dtype: DTypeLike):
        self._layer, self._specs, self._dtype = layer, specs, dtype

    def __getitem__(self, name: str) -> jax.Array:
        whole: jax.Array = gather_params(self._layer[name], self._specs[name], self._dtype)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._layer

    def __iter__(self) -> Iterator[str]:
        return iter(self._layer)

    def __len__(self) -> int:
        return len(self._layer)


def init_params(
    arch: Architecture, key: jax.Array, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Params:
    """Random parameters for `arch`, each shard created on its own device of `mesh`, by default one device.

    The random key of a parameter is `key` folded with its index in the tree, so values do not depend on
    the mesh.
    """
    mesh = mesh or one_device()
    return draw_params(param_specs(arch), partition(arch, mesh_shape(mesh)), key, dtype, mesh)


def draw_params(specs: Any, places: Any, key: jax.Array, dtype: DTypeLike, mesh: Mesh) -> Any:
    """Random parameters for the tree `specs`, sharded over `mesh` by the partition specs `places`."""
    specs, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    places = jax.tree.leaves(shardings(mesh, places))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(specs)))
    seeds = np.asarray(jax.random.key_data(keys))
    drawn = [_draw(seeds[i], spec, jnp.dtype(spec.dtype or dtype), places[i]) for i, spec in enumerate(specs)]
    return jax.tree.unflatten(structure, drawn)


@partial(jax.jit, static_argnames=("spec", "dtype", "sharding"))
def _draw(seed: Any, spec: ParamSpec, dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    if spec.init == "constant":
        drawn = jnp.full(spec.shape, spec.scale, dtype)
    elif spec.init == "uniform":
        key = jax.random.wrap_key_data(seed)
        drawn = jax.random.uniform(key, spec.shape, jnp.float32, -spec.scale, spec.scale).astype(dtype)
    else:
        key = jax.random.wrap_key_data(seed)
        drawn = (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
    return jax.lax.with_sharding_constraint(drawn, sharding)


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a Hugging Face checkpoint of `arch`."""
    specs = param_specs(arch)
    return {name.name: name.shape_in(leaf_at(specs, name.path).shape) for name in tensor_names(arch)}


def assemble(
    arch: Architecture,
    dtype: DTypeLike,
    read: Callable[[TensorName, np.ndarray], None],
    mesh: Mesh | None = None,
) -> Params:
    """Parameters of `arch` on `mesh`, by default one device, read from the tensors of a checkpoint.

    `read(name, parameter)` copies the tensor `name` into its slice of `parameter`. The host holds one
    parameter at a time, the largest first, so that the peak memory of the process stays close to the size of
    the parameters on its devices.
    """
    assert arch.lora is None, "adapters come after the model they adapt"
    mesh = mesh or one_device()
    params, places = param_specs(arch), shardings(mesh, partition(arch, mesh_shape(mesh)))
    parts: dict[tuple[str | int, ...], list[TensorName]] = {}
    for name in tensor_names(arch):
        parts.setdefault(name.path, []).append(name)
    for path in sorted(parts, key=lambda path: -math.prod(leaf_at(params, path).shape)):
        parameter = _aligned(leaf_at(params, path).shape, jnp.dtype(dtype))
        for name in parts[path]:
            read(name, parameter)
        placed = jax.block_until_ready(place(parameter, leaf_at(places, path)))
        leaf_at(params, path[:-1])[path[-1]] = placed
    return params


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array aligned as XLA requires: on a CPU, XLA copies an array that is not aligned."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + XLA_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % XLA_ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def leaf_at(params: Any, path: tuple[str | int, ...]) -> Any:
    """The entry of the tree `params` at `path`."""
    for key in path:
        params = params[key]
    return params


def abstract_params(arch: Architecture, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Params:
    """The parameters as `ShapeDtypeStruct`s (no memory) with shardings on `mesh`, by default one device."""
    mesh = mesh or one_device()
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype or dtype, sharding=place),
        param_specs(arch),
        shardings(mesh, partition(arch, mesh_shape(mesh))),
        is_leaf=is_spec,
    )


def num_params(arch: Architecture) -> int:
    """Number of parameters of `arch`; tied embeddings count once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(arch), is_leaf=is_spec))
