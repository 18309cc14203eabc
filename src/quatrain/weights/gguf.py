"""Loads the weights of a GGUF file (llama.cpp's format) and dequantises them.

Data flow: a `.gguf` path -> `Architecture` and the decoder's parameter tree.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from pydantic import Field

from quatrain.config.errors import shown
from quatrain.config.files import Description, checked
from quatrain.models.architecture import LAYER_TYPES, Head
from quatrain.models.families import FAMILIES, Architecture, RopeScaling, TensorName
from quatrain.models.hf_config import Heads, Layers, Positions, Positive, Width
from quatrain.models.layers import rope_frequencies
from quatrain.models.params import Params, assemble, tensor_shapes
from quatrain.weights.gguf_header import GGUFHeader, SpecialIds, TensorInfo, read_header

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""llama.cpp's names of the supported architectures, and the family of each."""

_ROPE_FACTORS = "rope_freqs.weight"
_READ_VALUES = 2**22  # number of values dequantised at a time
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_POST_NORM_NAMES = {**_LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}
"""Where norms stand before and after attention and MLP (Gemma)."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models whose queries are scaled by hidden size / heads, not by the head's size."""


def load_gguf(
    path: str | Path,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    head: Head = "vocabulary",
) -> tuple[Architecture, Params]:
    """The model in the GGUF file at `path`, its weights dequantised to `dtype`, on `mesh` (see `assemble`).

    With the head `score`, the head is zero and the output head of the vocabulary is not read.

    Architectures: llama, qwen2, qwen3, gemma2 and gemma3. Tensor types: all that the `gguf` package
    dequantises, which are F32, F16, BF16 and the Q, IQ, TQ and FP4 types. Tensors are read one at a time, the
    largest first, so that peak memory is close to the size of the parameters.

    Raises ValueError for a file that is not GGUF or is truncated, another architecture or tensor type, a
    missing tensor, an unexpected tensor, a tensor of the wrong shape, rotary scaling that `Architecture`
    cannot represent, and if the `gguf` package is not installed.
    """
    header = read_header(path)
    _check_architecture(header)
    gguf = _gguf_package()
    tensors = {tensor.name: tensor for tensor in header.tensors}
    arch = _architecture(header, tensors, gguf)
    expected = {_gguf_name(name, arch): shape for name, shape in tensor_shapes(arch).items()}
    _check_names(header.path, set(expected), set(tensors) - {_ROPE_FACTORS})
    _check_shapes(header, tensors, expected)

    arch = replace(arch, head=head)

    def read(name: TensorName, parameter: np.ndarray) -> None:
        if name.path == ("score",):
            parameter[...] = 0.0
            return
        _read_into(parameter, name, tensors[_gguf_name(name.name, arch)], gguf, arch)

    return arch, assemble(arch, dtype, read, mesh)


def gguf_architecture(path: str | Path) -> Architecture:
    """The architecture in the header of the GGUF file at `path`; no weights are read.

    Raises the errors of `load_gguf` that concern the header.
    """
    header = read_header(path)
    _check_architecture(header)
    return _architecture(header, {tensor.name: tensor for tensor in header.tensors}, _gguf_package())


def _gguf_package() -> ModuleType:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ValueError(
            "loading a .gguf model needs the `gguf` package; it is not installed; "
            "run `pip install quatrain[gguf]`"
        ) from error


def _gguf_name(name: str, arch: Architecture) -> str:
    """The GGUF name of the tensor with the Hugging Face name `name`."""
    module, kind = name.rsplit(".", 1)
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    names = _POST_NORM_NAMES if arch.post_norms else _LAYER_NAMES
    return f"blk.{layer}.{names[module]}.{kind}"


def _check_tensors(header: GGUFHeader, gguf: ModuleType) -> None:
    """Raises ValueError for a tensor of an unsupported type and one that extends past the end of the file."""
    supported = {int(kind): kind.name for kind in gguf.GGMLQuantizationType if _is_dequantised(kind, gguf)}
    for tensor in header.tensors:
        if tensor.type_id not in supported:
            raise ValueError(
                f"tensors of the types {', '.join(supported.values())} are supported; {tensor.name:.80} in "
                f"{header.path} has the type {_type_name(tensor, gguf)}; use another quantisation"
            )
        end = tensor.offset + _num_bytes(tensor, gguf)
        size = tensor.path.stat().st_size
        if end > size:
            raise ValueError(
                f"{tensor.path} is truncated: {tensor.name:.80} ends at byte {end}, the file at {size}; "
                "fetch it again"
            )


def _check_names(path: Path, expected: set[str], found: set[str]) -> None:
    for names, problem in ((expected - found, "lacks"), (found - expected, "has unexpected")):
        if names:
            first = sorted(names)
            listed = ", ".join(name[:80] for name in first[:5]) + (
                f" and {len(first) - 5} more" if len(first) > 5 else ""
            )
            raise ValueError(
                f"{path} {problem} tensors: {listed}; it is not a {' or '.join(ARCHITECTURES)} model"
            )


def _check_shapes(
    header: GGUFHeader, tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError for a tensor of the wrong shape, before there is memory for any parameter."""
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} in {header.path} must have shape {shape}; it has {tensors[name].shape}; "
                "fetch the file again"
            )


def _is_dequantised(kind: Any, gguf: ModuleType) -> bool:
    """Whether the `gguf` package turns values of this type into float32."""
    block = np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8)
    try:
        return bool(gguf.quants.dequantize(block, kind).dtype == np.float32)
    except NotImplementedError:
        return False


def _type_name(tensor: TensorInfo, gguf: ModuleType) -> str:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    return known.get(tensor.type_id, f"number {tensor.type_id}")


def _row_bytes(tensor: TensorInfo, gguf: ModuleType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(
            f"the last dimension of {tensor.name:.80} must be a multiple of its quantisation block, {block}; "
            f"its shape is {tensor.shape}"
        )
    return tensor.shape[-1] // block * size


def _num_bytes(tensor: TensorInfo, gguf: ModuleType) -> int:
    return math.prod(tensor.shape[:-1]) * _row_bytes(tensor, gguf)


def _blocks(tensor: TensorInfo, gguf: ModuleType) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows as float32) of the tensor in numpy's dimension order; a vector is one row."""
    num_rows = math.prod(tensor.shape[:-1])
    row_bytes, kind = _row_bytes(tensor, gguf), gguf.GGMLQuantizationType(tensor.type_id)
    # A few rows at a time, without memory mapping, so that little memory is used beside the parameters.
    step = max(1, _READ_VALUES // tensor.shape[-1])
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, num_rows, step):
            rows = min(step, num_rows - start)
            raw = np.fromfile(file, np.uint8, rows * row_bytes)
            yield start, gguf.quants.dequantize(raw.reshape(rows, row_bytes), kind)


def _read_into(
    parameter: np.ndarray,
    name: TensorName,
    tensor: TensorInfo,
    gguf: ModuleType,
    arch: Architecture,
) -> None:
    """Reads the tensor into `parameter`.

    Query and key rows are reordered from llama.cpp's rotary layout; what it adds to the weights of norms
    (Gemma) is taken off again.
    """
    rows, own = name.rows(parameter)
    if arch.family == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        # llama.cpp stores the rows of each head in the order (0, H/2, 1, H/2 + 1, ...).
        own = own.reshape(-1, 2, arch.head_dim // 2).swapaxes(1, 2).reshape(-1)
    offset = arch.norm_offset if tensor.name.endswith("norm.weight") else 0.0
    for start, values in _blocks(tensor, gguf):
        if name.vector:
            rows[own] = values[0] - np.float32(offset)
        else:
            rows[own[start : start + len(values)]] = values


def _check_architecture(header: GGUFHeader) -> None:
    family = header.metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"GGUF files of the architectures {', '.join(ARCHITECTURES)} are supported; {header.path} has "
            f"{shown(family)}; give the model's Hugging Face folder or hub id"
        )


Factor = Annotated[float, Field(ge=0, le=1e12)]
"""0 stands for none."""
Window = Annotated[int, Field(ge=0, le=2**31 - 1)]
Pattern = Annotated[int, Field(ge=0, le=2**10)]
"""Every so many layers, one has full attention; 0: none has."""


class _Keys(Description):
    """The metadata of a model, without the name of its architecture in front."""

    block_count: Layers
    context_length: Positions
    embedding_length: Width
    feed_forward_length: Width
    heads: Annotated[Heads, Field(alias="attention.head_count")]
    kv_heads: Annotated[Heads | None, Field(alias="attention.head_count_kv")] = None
    head_dim: Annotated[Heads | None, Field(alias="attention.key_length")] = None
    norm_eps: Annotated[float, Field(alias="attention.layer_norm_rms_epsilon", ge=0, le=1)]
    rope_theta: Annotated[Positive, Field(alias="rope.freq_base")] = 10_000.0
    rotary_dims: Annotated[int | None, Field(alias="rope.dimension_count")] = None
    # llama.cpp takes a factor without a type for linear scaling, and knows an older name of it.
    scaling: Annotated[str, Field(alias="rope.scaling.type")] = "linear"
    scaling_factor: Annotated[Factor | None, Field(alias="rope.scaling.factor")] = None
    linear_factor: Annotated[Factor, Field(alias="rope.scale_linear")] = 0.0
    original_length: Annotated[Positions, Field(alias="rope.scaling.original_context_length")] = (
        RopeScaling.original_max_position
    )

    # Of Gemma models alone; 0 stands for none.
    sliding_window: Annotated[Window, Field(alias="attention.sliding_window")] = 0
    pattern: Annotated[Pattern | list[bool | int], Field(alias="attention.sliding_window_pattern")] = 0
    scale: Annotated[Factor, Field(alias="attention.scale")] = 0.0
    attention_softcap: Annotated[Factor, Field(alias="attn_logit_softcapping")] = 0.0
    final_softcap: Annotated[Factor, Field(alias="final_logit_softcapping")] = 0.0
    local_rope_theta: Annotated[Positive | None, Field(alias="rope.freq_base_swa")] = None


_OF_GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": 2,
        "attention.scale": 0.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "attention.sliding_window": 0,
        "attention.sliding_window_pattern": 6,
        "attention.scale": 0.0,
        "final_logit_softcapping": 0.0,
        "rope.freq_base_swa": 10_000.0,
    },
}
"""The keys that only these families have, with what llama.cpp takes for a missing one."""
_WITHOUT_EFFECT = {
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "attention.value_length",  # the shapes of tensors say it too
    "attention.layer_norm_epsilon",
    "expert_used_count",
    "rope.scaling.finetuned",
}
"""Keys that are not read, because they do not change what a supported model computes."""


def _architecture(header: GGUFHeader, tensors: Mapping[str, TensorInfo], gguf: ModuleType) -> Architecture:
    _check_tensors(header, gguf)
    name = header.metadata["general.architecture"]
    family = ARCHITECTURES[name]
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ValueError(f"{header.path} lacks the tensor token_embd.weight; it is not a language model")
    prefix = f"{name}."
    # The file stores float32; the shortest decimal form is the number in the model's configuration.
    own = _OF_GEMMA.get(family, {}) | {
        key.removeprefix(prefix): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    keys = checked(_Keys, own, f"{header.path}, keys {prefix}…")
    special = checked(SpecialIds, header.metadata, str(header.path))
    head_dim = keys.head_dim or keys.embedding_length // keys.heads
    _check_plain(header, family, own, keys, head_dim)
    return Architecture(
        family=family,
        vocab_size=embeddings.shape[0],
        hidden_size=keys.embedding_length,
        intermediate_size=keys.feed_forward_length,
        num_layers=keys.block_count,
        num_heads=keys.heads,
        num_kv_heads=keys.kv_heads or keys.heads,
        head_dim=head_dim,
        max_position=keys.context_length,
        norm_eps=keys.norm_eps,
        rope_theta=keys.rope_theta,
        rope_scaling=_rope_scaling(header, keys, tensors.get(_ROPE_FACTORS), gguf, head_dim),
        tie_embeddings="output.weight" not in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        eos_token_ids=tuple(
            sorted({each for each in (special.eos, special.eot, special.eom) if each is not None})
        ),
        bos_token_id=special.bos,
        pad_token_id=special.padding,
        **FAMILIES[family].fixed
        | {"qkv_bias": "blk.0.attn_q.bias" in tensors, "output_bias": "blk.0.attn_output.bias" in tensors},
        **(_gemma_fields(family, keys, head_dim) if family in _OF_GEMMA else {}),
    )


def _gemma_fields(family: str, keys: _Keys, head_dim: int) -> dict[str, Any]:
    """Activation, attention windows and scales of a Gemma model; llama.cpp knows some by its size only."""
    scalar: float = head_dim
    if keys.scale:
        scalar = keys.scale**-2
    elif keys.block_count == _GEMMA_27B_LAYERS[family]:
        scalar = keys.embedding_length // keys.heads
    layers, pattern = range(keys.block_count), keys.pattern
    # Of a number of layers, the last has full attention; with 0 none has.
    slides = pattern if isinstance(pattern, list) else [not pattern or (i + 1) % pattern > 0 for i in layers]
    windows = keys.sliding_window > 0 and any(slides)
    return {
        "activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.sliding_window if windows else None,
        "layer_types": tuple(LAYER_TYPES[bool(slide)] for slide in slides) if windows else (),
        "attention_softcap": keys.attention_softcap or None,
        "final_softcap": keys.final_softcap or None,
        "local_rope_theta": keys.local_rope_theta,
    }


def _check_plain(header: GGUFHeader, family: str, own: Mapping[str, Any], keys: _Keys, head_dim: int) -> None:
    """Raises ValueError for partial rotary embeddings, and for keys that have an effect but are not read.

    Zero, false and a scale of one have no effect.
    """
    rotary = head_dim if keys.rotary_dims is None else keys.rotary_dims
    if rotary != head_dim:
        raise ValueError(
            f"GGUF models must have rotary embeddings over all {head_dim} dimensions of a head; "
            f"{header.path} has {rotary} rotary dimensions"
        )
    of_gemma = {key for keys_of in _OF_GEMMA.values() for key in keys_of}
    read = {field.alias or name for name, field in _Keys.model_fields.items()} | _WITHOUT_EFFECT
    read -= of_gemma - set(_OF_GEMMA.get(family, {}))
    none = {"attention.causal": True, "rope.freq_base_swa": keys.rope_theta}
    prefix = header.metadata["general.architecture"]
    unread = [
        f"{prefix}.{key:.80} = {shown(value)}"
        for key, value in own.items()
        if key not in read
        and value != none.get(key, 0)
        and not (key.endswith(("scale", "factor")) and value == 1)
    ]
    if unread:
        raise ValueError(
            f"GGUF models may only have settings that the decoder has; {header.path} has "
            f"{', '.join(unread[:5])}; give the model's Hugging Face folder or hub id, or another model"
        )


def _rope_scaling(
    header: GGUFHeader, keys: _Keys, tensor: TensorInfo | None, gguf: ModuleType, head_dim: int
) -> RopeScaling | None:
    """Rotary scaling: `linear` from the metadata, `llama3` from the tensor of divisors of the frequencies."""
    if keys.scaling not in ("none", "linear"):
        raise ValueError(
            f"rotary scaling must be none, linear or llama3; {header.path} has {shown(keys.scaling)}"
        )
    factor = (keys.linear_factor if keys.scaling_factor is None else keys.scaling_factor) or 1.0
    linear = RopeScaling("linear", factor) if keys.scaling == "linear" and factor != 1.0 else None
    if tensor is None:
        return linear
    if tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{_ROPE_FACTORS} must have shape {(head_dim // 2,)}; in {header.path} it has {tensor.shape}"
        )
    factors = np.concatenate([values.reshape(-1) for _, values in _blocks(tensor, gguf)])
    if (factors == 1.0).all():
        return linear
    # The file contains only the resulting factors. They must equal those of the published Llama 3 settings.
    original, theta = keys.original_length, keys.rope_theta
    scaling = RopeScaling("llama3", float(factors.max()), original_max_position=original)
    expected = rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, scaling)
    if linear or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{_ROPE_FACTORS} must contain Llama 3's rotary factors (low 1, high 4, original length "
            f"{original}); {header.path} has others; give the model's Hugging Face folder or hub id"
        )
    return scaling
