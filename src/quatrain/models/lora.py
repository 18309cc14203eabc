"""Low-rank adapters: which parameters are trained, how they begin, and what they make of the base's matrices.

Data flow: a loaded base -> `with_adapters` -> parameters of an `Architecture` with `lora`. The update trains
`trained_part`; the sampler and the export take `merged`, the log-probabilities of the reference
`without_adapters`. The forward pass is in `layers.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from quatrain.config.schema import LoraConfig
from quatrain.config.sections.model_on_devices import ALL_LINEAR, MODULES, VISION_TARGETS
from quatrain.models.architecture import Architecture, LayerKind, LoRA
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.layer_run import OF_EXPERTS
from quatrain.models.params import (
    LM_HEAD,
    SCORE,
    VISION,
    Params,
    draw_params,
    output_head_name,
    param_specs,
    partition,
)
from quatrain.models.spec import LORA_A, LORA_B, TensorName
from quatrain.models.vision import PROJECTOR
from quatrain.ops.rounding import random_bits, stochastic_bfloat16
from quatrain.parallel.mesh import (
    copy_if_aliased,
    device_put,
    mesh_shape,
    one_device,
    shardings,
    to_memory,
)

EXPERT_PARAMETERS = {"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}
"""The names of experts' matrices in transformers 5, which peft's `target_parameters` takes."""
EXPERTS_MODULE = "mlp.experts"
LAYERS = "layers"
"""The name of the layers in the tree of parameters."""

OF_TOWER = "vision."
"""How the names of a tower's matrices begin among targets."""

STREAM = 0x10FA
"""Separates the random numbers of adapters from those of the base's parameters."""


def with_lora(arch: Architecture, config: LoraConfig) -> Architecture:
    """`arch` with the adapters of `config`; raises ValueError if it cannot have them.

    `all-linear` stands for those of attention's and the MLP's matrices that it has, experts left out.
    """
    if not config.rank:
        return arch
    known = _known(arch)
    words = ([each for each in MODULES if each in known] if w == ALL_LINEAR else [w] for w in config.targets)
    lora = LoRA(config.rank, config.alpha or float(config.rank), tuple(chain(*words)))
    check_lora(arch, lora)
    texts, tower = ([name for name in lora.targets if name.startswith(OF_TOWER) == of] for of in (0, 1))
    if arch.vision and (arch.vision.trained != "frozen" or tower):
        if arch.vision.trained != "all" or not tower:
            raise ValueError(
                "beside adapters a tower must be frozen, or have adapters of its own; got model.vision "
                f"{arch.vision.trained} with {len(tower)} of its matrices in lora.targets; set model.vision "
                f"to frozen, or to all with one of {', '.join(VISION_TARGETS)} in lora.targets"
            )
        own = replace(lora, targets=tuple(name.removeprefix(OF_TOWER) for name in tower))
        arch = replace(arch, vision=replace(arch.vision, lora=own))
    return replace(arch, lora=replace(lora, targets=tuple(texts)))


def check_lora(arch: Architecture, lora: LoRA) -> None:
    """Raises ValueError if a model of `arch` cannot have these adapters."""
    known = _known(arch)
    for name in lora.targets:
        if name not in known:
            raise ValueError(
                f"lora.targets must be matrices of the model's layers, or its output head; a {arch.family} "
                f"model has no {name}; choose from {', '.join(known)}"
            )
    sides = [(LM_HEAD, LM_HEAD, arch.vocab_size, arch.hidden_size)]
    for kind in arch.kinds:
        matrices, layer = kind.matrices(), kind.params(arch.hidden_size, arch.norm, 1.0, None)
        for name in lora.targets:
            for tensor in matrices.get(name, ()):
                rows, columns = tensor.shape_in(layer[name].shape)[-2:]
                sides.append((name, tensor.name.split(".")[-2], rows, columns))
    if arch.vision:
        block = arch.vision.block
        specs = block.params(1.0)
        for name, tensors in block.matrices().items():
            for tensor in tensors:
                rows, columns = tensor.shape_in(specs[name].shape)[-2:]
                sides.append((f"{OF_TOWER}{name}", tensor.name, rows, columns))
    for name, module, rows, columns in sides:
        if name in lora.targets and lora.rank > min(rows, columns):
            raise ValueError(
                "lora.rank must be at most the shorter side of each matrix that has adapters; "
                f"{module} of this {arch.family} model is {rows} x {columns}, got rank {lora.rank}; lower "
                f"lora.rank, or leave {name} out of lora.targets"
            )


def _known(arch: Architecture) -> list[str]:
    """The matrices of `arch` that may have adapters."""
    names = dict.fromkeys(name for kind in arch.kinds for name in kind.matrices())
    trained = arch.vision is not None and arch.vision.trained == "all"
    return [*names, *[LM_HEAD] * (arch.head == "lm_head"), *VISION_TARGETS * trained]


def adapter_names(arch: Architecture) -> list[TensorName]:
    """All tensors of an adapter of `arch.lora` in peft's names: A [r, in] and B [out, r] of each matrix.

    Those of experts' matrices are stacked: A [E, r, in] and B [E, out, r]. Of a model with a tower the text
    model has the name that it has within transformers' model. The score head [1, D] of a reward
    model, which is trained beside them, is one of its tensors.
    """
    names = []
    if arch.head == "value_head":
        names.append(TensorName(f"base_model.model.{SCORE}.weight", (SCORE,), vector=False))
    targets = arch.lora.targets if arch.lora else ()
    for end, adapter in (("A", LORA_A), ("B", LORA_B)) if LM_HEAD in targets else ():
        name = f"base_model.model.{LM_HEAD}.lora_{end}.weight"
        names.append(TensorName(name, (LM_HEAD + adapter,), vector=False))
    model = "base_model.model.model." + (f"{arch.vision.text_module}." if arch.vision else "")
    for i, kind in enumerate(arch.layers):
        layer = f"{model}layers.{i}"
        names += _of_experts(f"{layer}.{EXPERTS_MODULE}", i, kind, targets)
        alone = [name for name in targets if not name.startswith(OF_EXPERTS)]
        names += _of_matrices(layer, ("layers", i), kind.matrices(), alone)
    if arch.vision and arch.vision.lora:
        for i, module in enumerate(arch.vision.block_modules):
            path = (VISION, "blocks", i)
            matrices = arch.vision.block.matrices()
            names += _of_matrices(
                f"base_model.model.model.{module}", path, matrices, arch.vision.lora.targets
            )
    return names


def _of_matrices(
    module: str,
    path: tuple[str | int, ...],
    matrices: Mapping[str, Sequence[TensorName]],
    targets: Sequence[str],
) -> list[TensorName]:
    """The tensors of adapters of the matrices of one layer or block."""
    names = []
    for matrix in [name for name in matrices if name in targets]:
        for number, tensor in enumerate(matrices[matrix]):
            start = f"{module}.{tensor.name.removesuffix('weight')}"
            block = number if len(matrices[matrix]) > 1 else ...
            for end, adapter, part in (("A", LORA_A, block), ("B", LORA_B, tensor.part)):
                name = f"{start}lora_{end}.weight"
                names.append(TensorName(name, (*path, matrix + adapter), part, vector=False))
    return names


def _of_experts(module: str, layer: int, kind: LayerKind, targets: Sequence[str]) -> list[TensorName]:
    """The tensors of adapters of parameters of one module, each of which peft wraps in the next one's."""
    if not isinstance(kind.mlp, Experts):
        return []
    names: list[TensorName] = []
    for matrix in [name for name in reversed(EXPERT_PARAMETERS) if name in targets]:
        rows = kind.mlp.rows if matrix == "experts_gate_up" else ...
        for end, adapter, part in (("A", LORA_A, ...), ("B", LORA_B, rows)):
            path = ("layers", layer, matrix + adapter)
            names.append(TensorName(f"{module}.lora_{end}.weight", path, part, vector=False, stacked=True))
        module += ".base_layer"
    return names


def with_adapters(params: Params, arch: Architecture, key: jax.Array, mesh: Mesh | None = None) -> Params:
    """`params` of a base with new adapters of `arch.lora`, which change nothing yet: A is random, B zero.

    A score head keeps its numbers, in float32 as what is trained beside it.
    """
    mesh = mesh or one_device()
    specs, places = adapters_of(param_specs(arch)), adapters_of(partition(arch, mesh_shape(mesh)))
    drawn = draw_params(specs, places, jax.random.fold_in(key, STREAM), jnp.float32, mesh)
    head = {name: leaf.astype(jnp.float32) for name, leaf in params.items() if name == SCORE}
    return with_trained(params, drawn | head, arch)


def trained_part(tree: Any, arch: Architecture) -> Any:
    """Of a tree like the parameters of `arch`, what is trained: all but a frozen tower, or the adapters.

    With adapters a score head is trained too, `{"layers": [...], "score": …}`: at the start it is zero.
    """
    return _part(tree, lambda path: is_trained(path, arch))


def frozen_part(tree: Any, arch: Architecture) -> Any:
    """Of a tree like the parameters of `arch`, what is not trained; no leaf unless `arch.partly_frozen`."""
    return _part(tree, lambda path: not is_trained(path, arch))


def with_trained(tree: Any, trained: Any, arch: Architecture) -> Any:
    """`tree` with its trained part replaced by `trained`; the other arrays are those of `tree`."""
    return _joined(tree, trained) if arch.partly_frozen else trained


def with_host_adapters(base: Params, adapters: Any, arch: Architecture, mesh: Mesh) -> Params:
    """`base` with the `adapters` of `arch`, host arrays in a tree as of `adapters_of`, placed on `mesh`."""
    places = adapters_of(shardings(mesh, partition(arch, mesh_shape(mesh))))
    return with_trained(base, jax.tree.map(device_put, adapters, places), arch)


def adapters_of(tree: Any) -> Any:
    """The adapters in a tree like parameters: `{"layers": [one dict per layer]}`, and those of the head."""
    return _part(tree, lambda path: is_adapter(path[-1]))


def without_adapters(tree: Any) -> Any:
    """A tree like parameters without its adapters: the base, whose arrays are not copied."""
    return _part(tree, lambda path: not is_adapter(path[-1]))


def is_trained(path: Sequence[str | int], arch: Architecture) -> bool:
    """Whether the parameter at `path`, of names from the top of the tree and numbers in lists, is trained."""
    if arch.lora is not None:
        return is_adapter(str(path[-1])) or path[0] == SCORE
    if path[0] != VISION or arch.vision is None or arch.vision.trained == "all":
        return True
    return arch.vision.trained == "projector" and path[1] in PROJECTOR


def _part(tree: Any, takes: Callable[[tuple[str, ...]], bool], path: tuple[str, ...] = ()) -> Any:
    """A tree like parameters without the leaves whose names `takes` refuses.

    Lists keep their length. Of a dictionary without leaves nothing stays, except of the list of layers.
    """
    if isinstance(tree, list):
        return [_part(each, takes, path) for each in tree]
    kept: dict[str, Any] = {}
    for name, each in tree.items():
        if isinstance(each, dict | list):
            part = _part(each, takes, (*path, name))
            if name == LAYERS or jax.tree.leaves(part):
                kept[name] = part
        elif takes((*path, name)):
            kept[name] = each
    return kept


def _joined(tree: Any, part: Any) -> Any:
    """`tree` with the leaves of `part`, which may be new, in their places."""
    if isinstance(part, list):
        return [_joined(*each) for each in zip(tree, part, strict=True)]
    if isinstance(part, dict):
        return {**tree, **{name: _joined(tree.get(name), each) for name, each in part.items()}}
    return part


def has_adapters(tree: Any) -> bool:
    """Whether a tree like parameters has adapters."""
    return bool(jax.tree.leaves(adapters_of(tree)))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of a matrix's adapters."""
    return name.endswith((LORA_A, LORA_B))


def copies_if_aliased(placed: Params, params: Params, arch: Architecture) -> Params:
    """`placed`, which was made of `params` of `arch`, without buffers of those of them that are trained.

    A training step may then donate them. What is frozen is never donated, so it is not copied.
    """
    if has_adapters(params) and not has_adapters(placed):
        return placed  # merged with its adapters, which are none of its arrays
    copied = jax.tree.map(copy_if_aliased, *(trained_part(tree, arch) for tree in (placed, params)))
    return with_trained(placed, copied, arch)


def merged_architecture(arch: Architecture) -> Architecture:
    """That of the parameters that `merged` returns: without adapters.

    A head that has some is no longer tied to the embeddings, which stay as they are.
    """
    apart = arch.lora is not None and LM_HEAD in arch.lora.targets
    return replace(arch.without_lora, tie_embeddings=arch.tie_embeddings and not apart)


def merged(params: Params, arch: Architecture, dtype: DTypeLike | None = None) -> Params:
    """The parameters of `merged_architecture`, a model that computes what `params` of `arch` compute.

    A matrix W with adapters becomes W + (alpha / rank) B A in `dtype` (default: that of W), on the devices:
    W as a model of that dtype has it, and the sum in float32, rounded once. A score head gets the dtype of
    its base. The other arrays are not copied.

    The sum is rounded to bfloat16 stochastically (`ops.rounding`): the nearest number is W itself for changes
    of less than half the spacing there, which would be lost. The random bits of an element depend on its
    place alone: the same parameters are always merged to the same bits.
    """
    if arch.lora is None or not has_adapters(params):
        return params
    base = without_adapters(params)
    layers = [dict(layer) for layer in base["layers"]]
    head = {name: leaf.astype(base["embed"].dtype) for name, leaf in base.items() if name == SCORE}
    sees = VISION in base
    blocks = [dict(block) for block in base[VISION]["blocks"]] if sees else []
    # Where each matrix with its adapters is, and where it comes to; behind all layers the head, then a tower.
    parts: list[tuple[Any, dict[str, Any], LayerKind | None]]
    parts = [(whole, layer, kind) for whole, layer, kind in zip(params["layers"], layers, arch.layers)]
    parts += [(params, head, None)]
    parts += [(whole, block, None) for whole, block in zip(params[VISION]["blocks"] if sees else [], blocks)]
    place = -1
    for number, (whole, into, kind) in enumerate(parts):
        lora = arch.vision.lora if arch.vision and number > len(layers) else arch.lora
        for name in lora.targets if lora else ():
            place += 1
            if name + LORA_A not in whole:
                continue
            own = whole[output_head_name(arch) if name == LM_HEAD else name]
            matrix, a, b = to_memory("device", [own, whole[name + LORA_A], whole[name + LORA_B]])
            how = {"dtype": jnp.dtype(dtype or matrix.dtype), "sharding": matrix.sharding}
            how["stacked"] = kind.stacked(name) if kind else ()
            how["experts"] = name.startswith(OF_EXPERTS)
            key = jax.random.fold_in(jax.random.key(STREAM, impl="threefry2x32"), place)
            into[name] = _merged(matrix, a, b, key, scale=arch.lora.scale, **how)
            if matrix is not own:
                jax.block_until_ready(into[name])  # the device has room for one such copy at a time
    tower = {VISION: {**base[VISION], "blocks": blocks}} if sees else {}
    return {**base, **head, "layers": layers, **tower}


@partial(jax.jit, static_argnames=("scale", "dtype", "sharding", "stacked", "experts"))
def _merged(
    matrix: jax.Array,
    a: jax.Array,
    b: jax.Array,
    key: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    sharding: NamedSharding,
    stacked: tuple[int, ...],
    experts: bool,
) -> jax.Array:
    """One matrix [*out, in], of one array at a time: it needs memory for this one in float32."""
    exact = changed(matrix.astype(dtype), a, b, scale, stacked, experts=experts)
    stochastic = dtype == jnp.bfloat16
    rounded = stochastic_bfloat16(exact, random_bits(key, exact.shape)) if stochastic else exact.astype(dtype)
    return jax.lax.with_sharding_constraint(rounded, sharding)


def changed(
    matrix: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    stacked: tuple[int, ...] = (),
    *,
    experts: bool = False,
) -> jax.Array:
    """W + scale B A in float32, for W [*out, in] as it is stored, with a block of A for each of its parts.

    Those of `experts` are the matrices along the first of `out`. `stacked`: how many rows each part has, if
    they stand one after another in the last of `out`.
    """
    product = partial(jnp.einsum, precision="highest")
    if a.ndim == 2:  # one A, of a matrix that a checkpoint has as one
        change = product("...r,ri->...i", b, a)
    elif stacked:
        parts = zip(jnp.split(b, np.cumsum(stacked)[:-1], axis=-2), a, strict=True)
        change = jnp.concatenate([product("...r,ri->...i", *part) for part in parts], axis=-2)
    elif matrix.ndim == 4 and not experts:  # qkv [K, G + 2, H, D], or G + 1 if values are keys
        queries = product("kghr,rd->kghd", b[:, : 1 - len(a)], a[0])
        others = product("kphr,prd->kphd", b[:, 1 - len(a) :], a[1:])
        change = jnp.concatenate([queries, others], axis=1)
    else:  # gate_up [2, F, D], and experts
        change = product("p...r,prd->p...d", b, a)
    return matrix.astype(jnp.float32) + scale * change
