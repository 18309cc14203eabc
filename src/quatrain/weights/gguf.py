"""Loads the weights of a GGUF file (llama.cpp's format) and dequantises them.

Data flow: a `.gguf` path -> `Architecture` and the decoder's parameter tree.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.config.errors import installation, shown
from quatrain.config.files import checked
from quatrain.models.architecture import Architecture, Head
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.blocks.experts import APART
from quatrain.models.families import FAMILIES, architecture_from_hf, family_of
from quatrain.models.families.common import GGUF
from quatrain.models.families.ropes import write_rope
from quatrain.models.hf_config import GGUFKeys
from quatrain.models.params import Params, assemble, tensor_names, tensor_shapes
from quatrain.models.rope import Rope
from quatrain.models.spec import TensorName
from quatrain.weights.gguf_header import GGUFHeader, SpecialIds, TensorInfo, read_header

_GGUF_FAMILIES = [(family, family.gguf) for family in FAMILIES.values() if family.gguf]
FAMILY_OF = {
    name: {gguf.experts: (family, gguf) for family, gguf in _GGUF_FAMILIES if gguf.name == name}
    for name in dict.fromkeys(gguf.name for _, gguf in _GGUF_FAMILIES)
}
"""The families and what they say of GGUF files, keyed by llama.cpp's names of their architectures and whether
they have experts: llama.cpp has one name for Llama and Mixtral."""

_ROPE_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = {_ROPE_FACTORS, _LONG, _SHORT}
_OTHER_SOURCE = "give the model's Hugging Face folder or hub id"
_READ_VALUES = 2**22  # number of values dequantised at a time
_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "qkv_proj": "attn_qkv",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "router": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "router_bias": "ffn_gate_inp",
    "sinks": "attn_sinks",
    "delta_norm": "ssm_norm",
}
"""The GGUF names of parameters and, where several tensors are stored as one, of their modules."""


_OF_DELTA = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
"""The GGUF names of vectors of a DeltaNet layer that have no module."""
_BY_VALUE_HEAD = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
"""Tensors of a DeltaNet layer whose last rows are of value heads."""


def load_gguf(
    path: str | Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, head: Head = "lm_head"
) -> tuple[Architecture, Params]:
    """The model in the GGUF file at `path`, its weights dequantised to `dtype`, on `mesh` (see `assemble`).

    With the head `value_head`, the head is zero and the output head of the vocabulary is not read. Tensors
    may have all types that the `gguf` package dequantises: F32, F16, BF16 and the Q, IQ, TQ and FP4 types.

    Raises ValueError for a file that is not GGUF or is damaged, a model that the decoder does not support,
    and if the `gguf` package is not installed.
    """
    header = read_header(path)
    arch, tensors = _architecture(header), {tensor.name: tensor for tensor in header.tensors}
    # Before memory is taken: a wrong header must cost an error, not the memory of the model that it claims.
    _check_tensors(header.path, tensors, _as_stored(arch))
    arch = replace(arch, head=head)

    def read(name: TensorName, parameter: np.ndarray) -> None:
        if name.path == ("score",):
            parameter[...] = 0.0
        else:
            _read_into(parameter, name, tensors[_gguf_name(name, arch)], arch)

    return arch, assemble(_as_stored(arch), dtype, read, mesh)


def _as_stored(arch: Architecture) -> Architecture:
    """`arch` with the experts of a layer in three tensors, as a file has them."""
    layout: dict[str, Any] = {"names": APART, "stacked": True, "transposed": False}
    return arch.with_experts(lambda mlp: replace(mlp, **layout))


def gguf_architecture(path: str | Path) -> Architecture:
    """The architecture in the header of the GGUF file at `path`; no weights are read.

    Raises the errors of `load_gguf` that concern the header.
    """
    return _architecture(read_header(path))


def _gguf() -> Any:
    """The package `gguf`."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a .gguf model needs the `gguf` package, which is not installed: run {installation('gguf')}"
        ) from error


def _gguf_name(name: TensorName, arch: Architecture) -> str:
    """The GGUF name of a tensor."""
    module, kind = name.name.split(".")[-2:]
    if kind in _OF_DELTA:
        return f"blk.{name.path[1]}.{_OF_DELTA[kind]}"
    if name.stacked:
        part, biased = kind.removesuffix("_bias"), kind.endswith("_bias")
        return f"blk.{name.path[1]}.{_NAMES[part]}_exps.{'bias' if biased else 'weight'}"
    gguf, parameter = family_of(arch).gguf, str(name.path[-1])
    if parameter == "sinks":
        kind = "weight"
    stored = (gguf and gguf.names.get(parameter)) or _NAMES.get(module) or _NAMES[parameter]
    if ".shared_expert." in name.name:
        stored += "_shexp"
    return f"blk.{name.path[1]}.{stored}.{kind}" if name.path[0] == "layers" else f"{stored}.{kind}"


def _check_types(header: GGUFHeader) -> None:
    """Raises ValueError for a tensor of an unsupported type and one that extends past the end of the file."""
    known = {int(kind): kind.name for kind in _gguf().GGMLQuantizationType}
    supported = [kind.name for kind in _gguf().GGMLQuantizationType if _is_dequantised(kind)]
    for tensor in header.tensors:
        kind = known.get(tensor.type_id, f"number {tensor.type_id}")
        name = f"{tensor.name:.80}"
        if kind not in supported:
            raise ValueError(
                f"tensors of the types {', '.join(supported)} are supported; {name} in {header.path} has the "
                f"type {kind}; use another quantisation"
            )
        end, size = (
            tensor.offset + math.prod(tensor.shape[:-1]) * _row_bytes(tensor),
            tensor.path.stat().st_size,
        )
        if end > size:
            raise ValueError(
                f"{tensor.path} is truncated: {name} ends at byte {end}, the file at {size}; fetch it again"
            )


def _check_tensors(path: Path, tensors: Mapping[str, TensorInfo], arch: Architecture) -> None:
    """Raises ValueError for missing, unexpected and misshapen tensors, before any parameter has memory."""
    shapes = tensor_shapes(arch)
    names = tensor_names(arch)
    expected = {_gguf_name(name, arch): shapes[name.name] for name in names}
    kernels = {_gguf_name(name, arch) for name in names if name.kernel}
    expected |= {name: (expected[name][0], expected[name][2]) for name in kernels}
    gates = {name for name in expected if name.endswith("ffn_gate_inp_shexp.weight")}
    expected |= {
        name: expected[name][1:] for name in gates if name in tensors and len(tensors[name].shape) == 1
    }
    given = tensors.keys() - _ROPE_TENSORS
    for wrong, problem in ((expected.keys() - given, "lacks"), (given - expected.keys(), "has unexpected")):
        if wrong:
            first = ", ".join(sorted(name[:80] for name in wrong)[:5])
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(
                f"{path} {problem} tensors: {first}{more}; it is no {' or '.join(FAMILY_OF)} model"
            )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            has = tensors[name].shape
            raise ValueError(f"{name} in {path} must have shape {shape}; it has {has}; fetch the file again")


def _is_dequantised(kind: Any) -> bool:
    """Whether the `gguf` package turns values of this type into float32."""
    block = np.zeros(_gguf().GGML_QUANT_SIZES[kind][1], np.uint8)
    try:
        return bool(_gguf().quants.dequantize(block, kind).dtype == np.float32)
    except NotImplementedError:
        return False


def _row_bytes(tensor: TensorInfo) -> int:
    block, size = _gguf().GGML_QUANT_SIZES[tensor.type_id]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(
            f"the last dimension of {tensor.name:.80} must be a multiple of its block, {block}; its shape is "
            f"{tensor.shape}"
        )
    return int(tensor.shape[-1] // block * size)


def _blocks(tensor: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows as float32) of the tensor in numpy's dimension order; a vector is one row."""
    num_rows, row_bytes = math.prod(tensor.shape[:-1]), _row_bytes(tensor)
    # A few rows at a time, without memory mapping, so that little memory is used beside the parameters.
    step = max(1, _READ_VALUES // tensor.shape[-1])
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, num_rows, step):
            rows = min(step, num_rows - start)
            raw = np.fromfile(file, np.uint8, rows * row_bytes).reshape(rows, row_bytes)
            yield start, _gguf().quants.dequantize(raw, _gguf().GGMLQuantizationType(tensor.type_id))


def _read_into(parameter: np.ndarray, name: TensorName, tensor: TensorInfo, arch: Architecture) -> None:
    """Reads the tensor into `parameter`.

    Query and key rows are reordered from llama.cpp's rotary layout; what it adds to the weights of norms
    (Gemma, Qwen3.5) is taken off again. In DeltaNet layers value heads are in another order, and the decay is
    -exp(A_log).
    """
    rows, numbers = name.rows(parameter)
    gguf = family_of(arch).gguf
    if gguf and gguf.permuted and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        half = arch.attentions[0].head_dim // 2
        numbers = numbers.reshape(-1, 2, half).swapaxes(1, 2).reshape(-1)
    module = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    columns = None
    if name.path[-1] in ("qkv", "ba", "conv", "a_log", "dt_bias", "o") and "linear_attn" in name.name:
        delta = arch.deltas[0]
        size = 1 if name.path[-1] in ("ba", "a_log", "dt_bias") else delta.value_size
        if module in _BY_VALUE_HEAD:
            numbers = numbers[_order_of_value_heads(delta, len(numbers), size)]
        else:
            # The output's inputs are by value head too: its columns are in the file's order, not its rows.
            columns = np.argsort(_order_of_value_heads(delta, parameter.shape[-1], size))
    plain = module == "ssm_norm" or not tensor.name.endswith("norm.weight")
    offset = 0.0 if plain else arch.norm.offset
    for start, values in _blocks(tensor):
        if columns is not None:
            values = values[:, columns]
        if module == "ssm_a":
            # llama.cpp stores what it multiplies by; the parameter is its logarithm, so that training cannot
            # change the sign.
            values = np.log(-values)
        if name.stacked:
            each = numbers.reshape((-1, *values.shape[1:]) if name.vector else -1)
            rows[each[start : start + len(values)]] = values
        elif name.vector:
            rows[numbers] = values[0] - np.float32(offset)
        else:
            rows[numbers[start : start + len(values)]] = values


def _order_of_value_heads(delta: GatedDeltaNet, rows: int, size: int) -> np.ndarray:
    """The rows of a Hugging Face tensor in the order of a file, of which the last have `size` a value head.

    A file has the first value head of each key head, then the second of each, and so on."""
    heads = np.arange(rows)[rows - delta.num_heads * size :].reshape(delta.num_key_heads, -1, size)
    return np.concatenate([np.arange(rows - heads.size), heads.swapaxes(0, 1).reshape(-1)])


_WITHOUT_EFFECT = {
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    "rope.scaling.finetuned",
}
"""Keys that are not read: they change nothing, or the shapes of tensors say the same."""


def _architecture(header: GGUFHeader) -> Architecture:
    """The architecture, by way of the config.json that the file would have as a Hugging Face folder."""
    name, tensors = header.metadata.get("general.architecture"), {t.name: t for t in header.tensors}
    if name not in FAMILY_OF:
        raise ValueError(
            f"GGUF files of the architectures {', '.join(FAMILY_OF)} are supported; {header.path} has "
            f"{shown(name)}; {_OTHER_SOURCE}"
        )
    _check_types(header)
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ValueError(f"{header.path} lacks the tensor token_embd.weight; it is not a language model")
    prefix, families = f"{name}.", FAMILY_OF[name]
    experts = bool(header.metadata.get(f"{prefix}expert_count"))
    family, gguf = families.get(experts) or families[not experts]
    # The file stores float32; the shortest decimal form is the number in the model's configuration.
    metadata = {**gguf.keys} | {
        key.removeprefix(prefix): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    keys = checked(GGUFKeys, metadata, f"{header.path}, keys {prefix}…")
    special = checked(SpecialIds, header.metadata, str(header.path))
    _check_plain(header, gguf, metadata, keys)
    rope = _rope(header, gguf, keys, tensors)
    config = {
        "model_type": family.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": keys.embedding_length,
        "intermediate_size": keys.feed_forward_length,
        "num_hidden_layers": keys.block_count,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.context_length,
        "rms_norm_eps": keys.norm_eps,
        **write_rope(rope),
        "partial_rotary_factor": rope.partial,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "eos_token_id": sorted(i for i in {special.eos, special.eot, special.eom} if i is not None),
        "bos_token_id": special.bos,
        "pad_token_id": special.padding,
        **gguf.config(keys),
    }
    return architecture_from_hf(config, str(header.path))


def _check_plain(header: GGUFHeader, gguf: GGUF, metadata: Mapping[str, Any], keys: GGUFKeys) -> None:
    """Raises ValueError for keys that have an effect but are not read.

    Zero, false and a scale of one have no effect.
    """
    of_families = {key for _, other in _GGUF_FAMILIES for key in other.keys}
    read = {field.alias or name for name, field in GGUFKeys.model_fields.items()} | _WITHOUT_EFFECT
    read -= of_families - gguf.keys.keys()
    none = {"attention.causal": True, "rope.freq_base_swa": keys.rope_theta}
    prefix = header.metadata["general.architecture"]
    unread = [
        f"{prefix}.{key:.80} = {shown(value)}"
        for key, value in metadata.items()
        if key not in read
        and value != none.get(key, 0)
        and not (key.endswith(("scale", "factor")) and value == 1)
    ]
    if unread:
        raise ValueError(
            f"GGUF models may only have settings that the decoder has; {header.path} has "
            f"{', '.join(unread[:5])}; {_OTHER_SOURCE}"
        )


def _rope(header: GGUFHeader, gguf: GGUF, keys: GGUFKeys, tensors: Mapping[str, TensorInfo]) -> Rope:
    """Rotary scaling: `linear` from the metadata, `llama3` and `longrope` from divisors of the
    frequencies."""
    if keys.scaling == "yarn" and gguf.yarn:
        values = {
            "factor": keys.scaling_factor,
            "original_max_position_embeddings": keys.original_length,
            "truncate": False,
        }
        return Rope(keys.rope_theta, kind="yarn", written=tuple(values.items()))
    if keys.scaling not in ("none", "linear"):
        raise ValueError(
            f"rotary scaling must be none, linear or llama3; {header.path} has {shown(keys.scaling)}"
        )
    factor = (keys.linear_factor if keys.scaling_factor is None else keys.scaling_factor) or 1.0
    partial = (keys.rotary_dims or keys.head_dim) / max(keys.head_dim, 1)  # 0 is refused with the rest
    linear, plain = keys.scaling == "linear" and factor != 1.0, Rope(keys.rope_theta, partial=partial)
    rope = replace(plain, kind="linear", factor=factor) if linear else plain
    divisors: dict[str, np.ndarray] = {}
    for name in _ROPE_TENSORS & tensors.keys():
        expected = (plain.rotated(keys.head_dim) // 2,)
        if tensors[name].shape != expected:
            raise ValueError(
                f"{name} must have shape {expected}; in {header.path} it has {tensors[name].shape}"
            )
        divisors[name] = np.concatenate([values.reshape(-1) for _, values in _blocks(tensors[name])])
    if _LONG in divisors and _SHORT in divisors:
        values = {"short_factor": divisors[_SHORT].tolist(), "long_factor": divisors[_LONG].tolist()}
        values["original_max_position_embeddings"] = keys.original_length
        if keys.attn_factor:
            values["attention_factor"] = keys.attn_factor
        return replace(plain, kind="longrope", written=tuple(values.items()))
    factors = divisors.get(_ROPE_FACTORS)
    if factors is None or (factors == 1.0).all():
        return rope
    # The file contains only the resulting factors. They must equal those of the published Llama 3 settings.
    original, most = keys.original_length, float(factors.max())
    llama3 = replace(plain, kind="llama3", factor=most, original_max_position=original)
    divided = plain.frequencies(keys.head_dim) / llama3.frequencies(keys.head_dim)
    if linear or not np.allclose(factors, divided, rtol=1e-3):
        raise ValueError(
            f"{_ROPE_FACTORS} must contain Llama 3's rotary factors (low 1, high 4, original length "
            f"{original}); {header.path} has others; {_OTHER_SOURCE}"
        )
    return llama3
