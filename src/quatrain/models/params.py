"""The tree of parameter specs, from which parameter shapes, initial values and shardings are derived.

Data flow: `Architecture` -> tree of `ParamSpec` -> parameter tree, filled by loading and read by the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from quatrain.config.errors import listed
from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import Experts
from quatrain.models.spec import ParamSpec, TensorName
from quatrain.parallel.axes import partition_spec
from quatrain.parallel.mesh import device_put, mesh_shape, one_device, shardings

Params = dict[str, Any]
"""{"embed": [V, D], "layers": [one dict per layer], "final_norm": [D], and the output head}.

The head is `lm_head` [V, D] unless it is tied to `embed`, or `score` [1, D] (`Architecture.head`). Models
whose layers have inputs of their own also have `layer_embed` [V, L P], `layer_projection` [L P, D] and
`layer_norm` [P]. Adapters of the head are `lm_head_lora_a` [r, D] and `lm_head_lora_b` [V, r], tied or not.
`vision` is the tree of a tower (`Vision.params`) that is trained, wholly or in part. A frozen one is not
among the parameters: what makes features alone reads it, when the first picture comes (`with_tower`).
"""

LM_HEAD = "lm_head"
"""The name of the head that makes logits of the vocabulary, and of its adapters."""

VISION = "vision"
"""The name of the tower."""

SCORE = "score"
"""The name of the head that makes one number of a hidden state (`Architecture.head` is `value_head`)."""
MAX_TP = 2**12
"""The largest `tp` that an error names: as many heads as config.json may have."""
XLA_ALIGNMENT = 64
"""The alignment, in bytes, of host arrays that XLA uses on a CPU without copying them."""


def param_specs(arch: Architecture) -> Params:
    """The tree of `ParamSpec`s of `arch`.

    Matrices are stored as [*out, in]. Matrices that multiply the same input are stored as one: `qkv`
    [K, G + 2, H, D] holds for each key/value head its G query heads, its key head and its value head, and
    `gate_up` [2, F, D] holds the gate and the up projection. The time of a decode step is the time to read
    the weights, and one product in place of three takes two thirds of it on a CPU.

    Weights are initialised with standard deviation in**-0.5. The standard deviation of matrices that write
    to the residual stream is divided by sqrt(2 * layers), so that the variance of the residual stream does
    not grow with depth (Radford et al. 2019). A `score` head is zero, and in float32 beside adapters, with
    which it is trained. The adapters of `Architecture.lora` are parameters of their layers (`models.lora`).
    """
    d, residual = arch.hidden_size, (2 * arch.num_layers) ** -0.5
    specs: Params = {
        "embed": ParamSpec((arch.vocab_size, d), ("vocab", "embed"), "normal", d**-0.5),
        "layers": [kind.params(d, arch.norm, residual, arch.lora) for kind in arch.layers],
        "final_norm": arch.norm.spec(d),
    }
    if block := arch.layers[0].layer_input:
        inputs = arch.num_layers * block.width
        specs |= {
            "layer_embed": ParamSpec(
                (arch.vocab_size, inputs), ("group", "embed"), "normal", block.width**-0.5
            ),
            "layer_projection": ParamSpec.matrix((inputs, d), ("group", "embed")),
            "layer_norm": arch.norm.spec(block.width),
        }
    score = ParamSpec((1, d), ("norm", "norm"), "constant", 0.0, "float32" if arch.lora else None)
    specs[output_head_name(arch)] = score if arch.head == "value_head" else specs["embed"]
    if arch.lora and LM_HEAD in arch.lora.targets:
        specs |= specs["embed"].adapters(LM_HEAD, arch.lora.rank, 1)
    if arch.vision and arch.vision.trained != "frozen":
        specs[VISION] = arch.vision.params()
    return specs


def output_head_name(arch: Architecture) -> str:
    """The name of the output head's parameter: `score`, `embed` if the embeddings are tied, or `lm_head`."""
    if arch.head == "value_head":
        return SCORE
    return "embed" if arch.tie_embeddings else LM_HEAD


def is_spec(leaf: object) -> bool:
    """Whether `leaf` is a ParamSpec; for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(leaf, ParamSpec)


def partition(arch: Architecture, mesh: MeshShape) -> Params:
    """The tree of `PartitionSpec`s with which the parameters of `arch` are sharded over `mesh`.

    Without experts, the devices of `ep` share parameters as those of `fsdp` do. Raises ValueError if a layer
    cannot be split over the devices of `tp`, `cp` or `ep`.
    """
    blocks = [block for kind in arch.kinds for block in kind.blocks]
    if not all(block.splits(mesh.tp) for block in blocks):
        rules = dict.fromkeys(block.split_rule for block in blocks)
        valid = _numbers(MAX_TP, lambda tp: all(block.splits(tp) for block in blocks))
        raise ValueError(
            f"tp must be a number that {', and '.join(rules)}; got tp {mesh.tp}; choose one of {valid}"
        )
    if not all(mixer.exchanges(mesh.tp, mesh.cp) for mixer in arch.mixers):
        most = max(mixer.num_heads for mixer in arch.mixers)
        valid = _numbers(most, lambda cp: all(mixer.exchanges(mesh.tp, cp) for mixer in arch.mixers))
        heads = [mixer.heads_of_device(mesh.tp) for mixer in arch.attentions]
        queries, keys = (listed(map(str, numbers)) for numbers in zip(*heads, strict=True))
        also = [
            f", and divides the key heads of a device in DeltaNet layers ({mixer.num_key_heads // mesh.tp})"
            for mixer in arch.deltas
        ]
        raise ValueError(
            f"cp must be a number that divides the query heads of a device ({queries}), and divides or is a "
            f"multiple of its key/value heads ({keys}){''.join(also)}; got cp {mesh.cp}; choose one of "
            f"{valid}"
        )
    if mesh.ep > 1:
        _check_experts(arch, mesh)
    return jax.tree.map(lambda s: partition_spec(s.shape, s.axes, mesh), param_specs(arch), is_leaf=is_spec)


def _numbers(most: int, holds: Callable[[int], bool]) -> str:
    """The numbers up to `most` for which a rule holds, for an error."""
    return ", ".join(str(number) for number in range(1, most + 1) if holds(number))


def check_policy(arch: Architecture, *meshes: MeshShape) -> None:
    """Raises ValueError if the policy has no experts, and one of its meshes has `ep` for them.

    Other models of a run may be dense on the mesh of a policy with experts.
    """
    for mesh in meshes:
        if mesh.ep > 1 and arch.routes is None:
            raise ValueError(
                f"ep must be 1 in a model without experts (family {arch.family}); got ep {mesh.ep}; give "
                "these devices to fsdp"
            )


def _check_experts(arch: Architecture, mesh: MeshShape) -> None:
    """Raises ValueError if the devices of `ep` cannot share the experts."""
    blocks = {kind.mlp for kind in arch.kinds if isinstance(kind.mlp, Experts)}
    if not all(block.spreads(mesh.tp, mesh.ep) for block in blocks):
        most = min(block.num for block in blocks)
        valid = _numbers(most, lambda ep: all(block.spreads(mesh.tp, ep) for block in blocks))
        numbers = listed(sorted({str(block.num // mesh.tp) for block in blocks}))
        raise ValueError(
            f"ep must be a number that divides the experts of a device of tp ({numbers}); got ep {mesh.ep}; "
            f"choose one of {valid}"
        )


def init_params(
    arch: Architecture, key: jax.Array, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Params:
    """Random parameters for `arch`, each shard created on its own device of `mesh`, by default one device.

    The random key of a parameter is `key` folded with its index in the tree: values do not depend on `mesh`.
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
        drawn = jax.random.uniform(key, spec.shape, jnp.float32, -spec.scale, spec.scale)
    else:
        drawn = spec.scale * jax.random.normal(jax.random.wrap_key_data(seed), spec.shape, jnp.float32)
    return jax.lax.with_sharding_constraint(drawn.astype(dtype), sharding)


def tensor_names(arch: Architecture) -> list[TensorName]:
    """All tensors of a Hugging Face checkpoint of `arch`."""
    names = [
        TensorName("model.embed_tokens.weight", ("embed",), vector=False),
        TensorName("model.norm.weight", ("final_norm",)),
    ]
    if (head := output_head_name(arch)) != "embed":
        names.append(TensorName(f"{head}.weight", (head,), vector=False))
    if arch.layers[0].layer_input:
        names += [
            TensorName("model.embed_tokens_per_layer.weight", ("layer_embed",), vector=False),
            TensorName("model.per_layer_model_projection.weight", ("layer_projection",), vector=False),
            TensorName("model.per_layer_projection_norm.weight", ("layer_norm",)),
        ]
    for i, kind in enumerate(arch.layers):
        names += [
            tensor._replace(name=f"model.layers.{i}.{tensor.name}", path=("layers", i, *tensor.path))
            for tensor in kind.tensors()
        ]
    return names + (arch.vision.tensors() if arch.vision and arch.vision.trained != "frozen" else [])


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a Hugging Face checkpoint of `arch`."""
    specs = param_specs(arch)
    return {name.name: name.shape_in(leaf_at(specs, name.path).shape) for name in tensor_names(arch)}


def assemble(
    arch: Architecture,
    dtype: DTypeLike,
    read: Callable[[TensorName, np.ndarray], None],
    mesh: Mesh | None = None,
    *,
    only: str | None = None,
) -> Params:
    """Parameters of `arch` on `mesh`, by default one device, read from the tensors of a checkpoint.

    With `only`, those of one entry of the tree alone. `read(name, parameter)` copies the tensor `name` into
    its slice of `parameter`. The host holds one parameter at a time, the largest first, so that peak memory
    is close to the size of the parameters.
    """
    assert arch.lora is None, "adapters come after the model they adapt"
    mesh = mesh or one_device()
    params, places = param_specs(arch), shardings(mesh, partition(arch, mesh_shape(mesh)))
    params = params if only is None else {only: params[only]}
    parts: dict[tuple[str | int, ...], list[TensorName]] = {}
    for name in tensor_names(arch):
        if name.path[0] in params:
            parts.setdefault(name.path, []).append(name)
    # The largest first: its host copy exists while the devices are still empty.
    for path in sorted(parts, key=lambda path: -math.prod(leaf_at(params, path).shape)):
        spec = leaf_at(params, path)
        parameter = _aligned(spec.shape, jnp.dtype(spec.dtype or dtype))
        for name in parts[path]:
            read(name, parameter)
        # Waited for: otherwise the host would hold the copies of all parameters that are on their way.
        placed = jax.block_until_ready(device_put(parameter, leaf_at(places, path)))
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
