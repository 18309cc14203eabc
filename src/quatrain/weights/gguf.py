"""Loads the weights of a GGUF file (llama.cpp's format), dequantised.

Data flow: a `.gguf` path -> `Architecture` and the parameter tree that the decoder reads.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.models.families import Architecture, RopeScaling, TensorName, tensor_names
from quatrain.models.layers import rope_frequencies
from quatrain.models.params import Params, assemble
from quatrain.weights.gguf_header import GGUFHeader, TensorInfo, read_header

ARCHITECTURES = ("llama", "qwen2")
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_ROPE_FACTORS = "rope_freqs.weight"
_READ_VALUES = 2**22  # dequantised at a time
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
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_gguf(
    path: str | Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> tuple[Architecture, Params]:
    """The model in the GGUF file at `path`, its weights dequantised to `dtype`, on `mesh` (see `assemble`).

    Architectures: llama and qwen2. Tensor types: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K. Tensors are
    read one at a time, the largest first, so that memory stays near the size of the parameters.

    Raises ValueError for a file that is not GGUF or ends early, another architecture or tensor type, a
    missing, unexpected or misshapen tensor, rotary scaling that `Architecture` cannot hold, and where the
    `gguf` package is not installed.
    """
    header = read_header(path)
    _check_architecture(header)
    gguf = _gguf_package()
    tensors = {tensor.name: tensor for tensor in header.tensors}
    _check_tensors(header, gguf)
    arch = _architecture(header, tensors, gguf)
    expected = {_gguf_name(name.name) for name in tensor_names(arch)}
    _check_names(header.path, expected, set(tensors) - {_ROPE_FACTORS})

    def read(name: TensorName, parameter: np.ndarray) -> None:
        _read_into(parameter, name, header, tensors[_gguf_name(name.name)], gguf, arch)

    return arch, assemble(arch, dtype, read, mesh)


def gguf_architecture(path: str | Path) -> Architecture:
    """The architecture in the header of the GGUF file at `path`, of which no weights are read.

    Raises ValueError as `load_gguf` does for what is in the header.
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


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`."""
    module, kind = name.rsplit(".", 1)
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _check_tensors(header: GGUFHeader, gguf: ModuleType) -> None:
    """Every tensor is of a type that is read here, and lies within the file."""
    for tensor in header.tensors:
        name = _type_name(tensor, gguf)
        if name not in TENSOR_TYPES:
            raise ValueError(
                f"tensors of the types {', '.join(TENSOR_TYPES)} are read; {tensor.name} in {header.path} "
                f"has the type {name}; take another quantisation of the model"
            )
        end = tensor.offset + _num_bytes(tensor, gguf)
        if end > header.file_size:
            raise ValueError(
                f"{header.path} is truncated: {tensor.name} ends at byte {end}, the file at "
                f"{header.file_size}; fetch it again"
            )


def _check_names(path: Path, expected: set[str], found: set[str]) -> None:
    for names, problem in ((expected - found, "lacks"), (found - expected, "has unexpected")):
        if names:
            first = sorted(names)
            listed = ", ".join(first[:5]) + (f" and {len(first) - 5} more" if len(first) > 5 else "")
            raise ValueError(
                f"{path} {problem} tensors: {listed}; it is no {' or '.join(ARCHITECTURES)} model"
            )


def _type_name(tensor: TensorInfo, gguf: ModuleType) -> str:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    return known.get(tensor.type_id, f"number {tensor.type_id}")


def _row_bytes(tensor: TensorInfo, gguf: ModuleType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ValueError(f"rows of {tensor.name} come in blocks of {block}; its shape is {tensor.shape}")
    return tensor.shape[-1] // block * size


def _num_bytes(tensor: TensorInfo, gguf: ModuleType) -> int:
    return math.prod(tensor.shape[:-1]) * _row_bytes(tensor, gguf)


def _blocks(header: GGUFHeader, tensor: TensorInfo, gguf: ModuleType) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of the tensor, float32, in numpy's order of dimensions; a vector is one row."""
    num_rows = math.prod(tensor.shape[:-1])
    row_bytes, kind = _row_bytes(tensor, gguf), gguf.GGMLQuantizationType(tensor.type_id)
    # A few rows at a time, and not memory-mapped: what is read and its float32 values never pile up.
    step = max(1, _READ_VALUES // tensor.shape[-1])
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, num_rows, step):
            rows = min(step, num_rows - start)
            raw = np.fromfile(file, np.uint8, rows * row_bytes)
            yield start, gguf.quants.dequantize(raw.reshape(rows, row_bytes), kind)


def _read_into(
    parameter: np.ndarray,
    name: TensorName,
    header: GGUFHeader,
    tensor: TensorInfo,
    gguf: ModuleType,
    arch: Architecture,
) -> None:
    """The tensor to its place in `parameter`, rotary halves one after the other."""
    rows, own = name.rows(parameter)
    shape = (len(own), *rows.shape[1:])
    if tensor.shape != shape:
        raise ValueError(f"{tensor.name} in {header.path} has shape {tensor.shape}; the model's is {shape}")
    if arch.family == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        # Rows of each head come as (0, H/2, 1, H/2 + 1, ...), as llama.cpp pairs them.
        own = own.reshape(-1, 2, arch.head_dim // 2).swapaxes(1, 2).reshape(-1)
    for start, values in _blocks(header, tensor, gguf):
        if name.vector:
            rows[own] = values[0]
        else:
            rows[own[start : start + len(values)]] = values


def _check_architecture(header: GGUFHeader) -> None:
    family = header.metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"GGUF files of the architectures {', '.join(ARCHITECTURES)} are read; {header.path} has "
            f"{family!r}; give the model's Hugging Face folder or hub id"
        )


def _architecture(header: GGUFHeader, tensors: Mapping[str, TensorInfo], gguf: ModuleType) -> Architecture:
    family = header.metadata["general.architecture"]
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{header.path} lacks the tensor token_embd.weight; it holds no language model")
    hidden, heads = _integer(header, "embedding_length"), _integer(header, "attention.head_count")
    head_dim = _integer(header, "attention.key_length", hidden // heads)
    _check_plain(header, head_dim)
    theta = float(header.metadata.get(f"{family}.rope.freq_base", 10_000.0))
    return Architecture(
        family=family,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_integer(header, "feed_forward_length"),
        num_layers=_integer(header, "block_count"),
        num_heads=heads,
        num_kv_heads=_integer(header, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=_integer(header, "context_length"),
        norm_eps=_float(header, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(header, tensors.get(_ROPE_FACTORS), gguf, head_dim, theta),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        eos_token_ids=_stop_ids(header),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def _check_plain(header: GGUFHeader, head_dim: int) -> None:
    """Refuses what files of these architectures may hold and the decoder does not do."""
    rotary = _integer(header, "rope.dimension_count", head_dim)
    experts = _integer(header, "expert_count", 0)
    window = _integer(header, "attention.sliding_window", 0)
    if rotary != head_dim or experts or window:
        raise ValueError(
            f"dense models with full attention and rotary embeddings over the whole head of {head_dim} are "
            f"read; {header.path} has {experts} experts, a window of {window} and {rotary} rotary dimensions"
        )


def _stop_ids(header: GGUFHeader) -> tuple[int, ...]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted({int(header.metadata[name]) for name in names if name in header.metadata}))


def _rope_scaling(
    header: GGUFHeader, tensor: TensorInfo | None, gguf: ModuleType, head_dim: int, theta: float
) -> RopeScaling | None:
    """Rotary scaling: `linear` from the metadata, `llama3` from the factors that divide each frequency."""
    prefix = f"{header.metadata['general.architecture']}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    factor = float(header.metadata.get(f"{prefix}.factor", 1.0))
    if kind not in ("none", "linear"):
        raise ValueError(f"rotary scaling none, linear and llama3 is supported; {header.path} has {kind!r}")
    linear = RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None
    if tensor is None:
        return linear
    factors = np.concatenate([values.reshape(-1) for _, values in _blocks(header, tensor, gguf)])
    if (factors == 1.0).all():
        return linear
    # The factors are all the file has: the published Llama 3 settings are tried, and must give them again.
    original = header.metadata.get(f"{prefix}.original_context_length", RopeScaling.original_max_position)
    scaling = RopeScaling("llama3", float(factors.max()), original_max_position=int(original))
    expected = rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, scaling)
    if linear or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{_ROPE_FACTORS} holds Llama 3's rotary factors (low 1, high 4, original length {original}); "
            f"those in {header.path} are others; give the model's Hugging Face folder or hub id"
        )
    return scaling


def _integer(header: GGUFHeader, name: str, default: int | None = None) -> int:
    value = _value(header, name, default)
    if not isinstance(value, int):
        raise ValueError(f"GGUF key {name} is one whole number; {header.path} has {str(value)[:40]}")
    return value


def _float(header: GGUFHeader, name: str) -> float:
    # Stored as float32: the shortest decimal that rounds to it is what the model's author wrote.
    return float(str(np.float32(_value(header, name, None))))


def _value(header: GGUFHeader, name: str, default: Any) -> Any:
    key = f"{header.metadata['general.architecture']}.{name}"
    value = header.metadata.get(key, default)
    if value is None:
        raise ValueError(f"{header.path} lacks the key {key}, which its model needs")
    return value
