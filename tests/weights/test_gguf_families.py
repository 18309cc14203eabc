"""GGUF files, named as llama.cpp names their tensors, against the Hugging Face folders of their models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from architectures import changed
from goldens import Golden, read_golden

from quatrain.models.families import FAMILIES, architecture_from_hf
from quatrain.models.hf_config import GGUFKeys
from quatrain.models.params import tensor_shapes
from quatrain.weights.gguf import gguf_architecture, load_gguf
from quatrain.weights.hf import load_hf

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
CASES = {family: family for family in ARCHITECTURES} | {"phi3_longrope": "phi3"}


def convert(golden: Golden, path: Path, more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None) -> Path:
    """The model as llama.cpp's converter writes it.

    Gemma's and Qwen3.5's norms have 1 added to their weights; the rows of queries and keys of Granite,
    SmolLM3 and Mixtral are in another rotary order.
    """
    c, kind = golden.config, ARCHITECTURES[golden.config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    rope = c["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    more(writer)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind_of_factor in ("long", "short"):
            factors = np.array(rope[f"{kind_of_factor}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind_of_factor}.weight", factors)
    for number, add in (
        (c.get("attention_multiplier"), writer.add_attention_scale),
        (c.get("embedding_multiplier"), writer.add_embedding_scale),
        (c.get("residual_multiplier"), writer.add_residual_scale),
        (c.get("logits_scaling"), writer.add_logit_scale),
        (c.get("sliding_window"), writer.add_sliding_window),
        (c.get("attn_logit_softcapping"), writer.add_attn_logit_softcapping),
        (c.get("final_logit_softcapping"), writer.add_final_logit_softcapping),
        (c.get("bos_token_id"), writer.add_bos_token_id),
        (c.get("pad_token_id"), writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    if not isinstance(c["eos_token_id"], list | None):
        writer.add_eos_token_id(c["eos_token_id"])
    if kind == gguf.MODEL_ARCH.QWEN35:
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        writer.add_full_attention_interval(2)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if c["model_type"] in ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss"):
        writer.add_expert_count(c.get("num_local_experts", c.get("num_experts")))
        writer.add_expert_used_count(c["num_experts_per_tok"])
        if c["model_type"] not in ("olmoe", "mixtral"):
            writer.add_expert_feed_forward_length(c.get("moe_intermediate_size", c["intermediate_size"]))
    if "shared_expert_intermediate_size" in c:
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(kind, c["num_hidden_layers"])
    for name, weight in with_stacked_experts(golden.weights()).items():
        if "shared_expert_gate" in name:
            weight = weight[0]
        if "linear_attn" in name:
            name, weight = converted_delta(name, weight, c)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if c["model_type"] in ("granite", "smollm3", "mixtral") and ours.split(".")[-2] in (
            "attn_q",
            "attn_k",
        ):
            halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        offset = c["model_type"].startswith(("gemma", "qwen3_5")) and ours.endswith("norm.weight")
        offset &= "ssm" not in ours
        writer.add_tensor(ours, weight + 1 if offset else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_stacked_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with one tensor for the gates of all experts of a layer, one for `up`, one for `down`."""
    found: dict[str, np.ndarray] = {}
    apart: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+_proj|w\d)\.weight", name):
            apart.setdefault(f"{match[1]}.{match[2]}.weight", []).append(weight)
        elif match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name):
            kind = "bias" if match[3] else "weight"
            stored = weight if match[3] else weight.swapaxes(1, 2)
            if match[2] == "down":
                found[f"{match[1]}.down_proj.{kind}"] = np.ascontiguousarray(stored)
                continue
            for first, part in enumerate(("gate", "up")):
                found[f"{match[1]}.{part}_proj.{kind}"] = np.ascontiguousarray(stored[:, first::2])
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = weight
    return found | {name: np.stack(matrices) for name, matrices in apart.items()}


def converted_delta(name: str, weight: np.ndarray, c: dict[str, Any]) -> tuple[str, np.ndarray]:
    """A tensor of a DeltaNet layer as llama.cpp's converter names and stores it."""
    key_heads, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]

    def tiled(x: np.ndarray, size: int) -> np.ndarray:
        """The value heads of all key heads, which are the last rows, one of each key head after another."""
        keys, values = np.split(x, [len(x) - heads * size])
        grouped = values.reshape(key_heads, heads // key_heads, size, *x.shape[1:])
        return np.concatenate([keys, grouped.swapaxes(0, 1).reshape(values.shape)])

    size = c["linear_value_head_dim"]
    if name.endswith(".A_log"):
        return name, -np.exp(tiled(weight, 1))
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), tiled(weight, 1)
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
        return name, tiled(weight, 1)
    if name.endswith(".out_proj.weight"):
        return name, np.ascontiguousarray(tiled(weight.T, size).T)
    if name.endswith(".conv1d.weight"):
        return name, tiled(weight[:, 0], size)
    return name, weight if name.endswith(".norm.weight") else tiled(weight, size)


@pytest.mark.parametrize(("case", "family"), CASES.items())
def test_a_converted_model_is_that_of_its_folder(case: str, family: str, tmp_path: Path) -> None:
    golden = read_golden(case)
    if family == "smollm3":  # llama.cpp has no key for layers without rope: every fourth
        golden = replace(golden, config=golden.config | {"no_rope_layers": None})
    if family == "qwen3_5_text":  # three value heads of each of two key heads
        config = golden.config | {"linear_num_value_heads": 6}
        golden = replace(golden, config=config, shapes=tensor_shapes(architecture_from_hf(config)))
    if family == "gpt_oss":  # llama.cpp knows no other limit
        golden = replace(golden, config=golden.config | {"swiglu_limit": 7.0})
    if family in ("qwen3_moe", "qwen2_moe", "olmoe"):  # llama.cpp has experts in every layer
        every = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": family == "qwen3_moe"}
        config = golden.config | every | {"clip_qkv": None}
        golden = replace(golden, config=config, shapes=tensor_shapes(architecture_from_hf(config)))
    if family == "mixtral":  # nor windows in what it takes for Llama
        golden = replace(golden, config=golden.config | {"sliding_window": None})
    arch, params = load_hf(golden.write_model(tmp_path / "hf"))
    found, loaded = load_gguf(convert(golden, tmp_path / "m.gguf"))
    if family.startswith("gemma"):  # what the file does not say is that of the published models
        assert found.layers[0].mixer.window
        windows = [kind.mixer.window for kind in found.layers]
        mixer = next(kind.mixer for kind in arch.layers if kind.mixer.window)
        arch = changed(arch, windows=windows, sliding_rope=mixer.rope, scale=mixer.head_dim**-0.5)
    if case == "phi3_longrope":  # of float32 numbers, the file has the exact values
        mixer, rope = found.layers[0].mixer, found.layers[0].mixer.rope
        np.testing.assert_allclose(
            rope.frequencies(mixer.head_dim), arch.layers[0].mixer.rope.frequencies(16)
        )
        arch = changed(arch, rope=rope)
    assert found == replace(arch, eos_token_ids=found.eos_token_ids)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    exact = not family.startswith(("gemma", "qwen3_5"))
    tolerance = 0.0 if exact else 4e-7  # the 1 that was added costs a digit
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3: list[tuple[dict[str, Any], Callable[[gguf.GGUFWriter], Any]]] = [
    ({"final_logit_softcapping": 3.5}, lambda writer: None),
    # Where all layers have full attention, llama.cpp's converter leaves out the size of the window.
    ({"sliding_window": None, "layer_types": [FULL] * 7}, lambda writer: None),
    ({"layer_types": ([SLIDING] * 5 + [FULL, SLIDING])}, lambda writer: None),
    (
        {"layer_types": ([SLIDING, SLIDING, FULL] * 3)[:7]},
        lambda writer: writer.add_sliding_window_pattern(3),
    ),
    ({"layer_types": [SLIDING] * 7}, lambda writer: writer.add_sliding_window_pattern(0)),
    (
        {"layer_types": [FULL, SLIDING, FULL, FULL, SLIDING, SLIDING, FULL]},
        lambda writer: writer.add_sliding_window_pattern([False, True, False, False, True, True, False]),
    ),
    (
        {"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 7e3}}},
        lambda writer: writer.add_rope_freq_base_swa(7e3),
    ),
]


@pytest.mark.parametrize(("changes", "more"), GEMMA3)
def test_what_llama_cpp_reads_of_a_gemma_3_file_counts(
    changes: dict[str, Any], more: Callable[[gguf.GGUFWriter], Any], tmp_path: Path
) -> None:
    golden = with_layers(read_golden("gemma3_text"), 7)
    config = (
        golden.config | {"query_pre_attn_scalar": golden.config["head_dim"], "layer_types": None} | changes
    )
    arch = architecture_from_hf(config)
    found = gguf_architecture(convert(replace(golden, config=config), tmp_path / "m.gguf", more))
    assert replace(found, eos_token_ids=arch.eos_token_ids) == arch


def test_a_gemma_2_file_without_windows(tmp_path: Path) -> None:
    golden = read_golden("gemma2")
    config = golden.config | {"layer_types": [FULL] * golden.config["num_hidden_layers"]}

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window_pattern(1)

    found = gguf_architecture(convert(replace(golden, config=config), tmp_path / "m.gguf", more))
    assert [kind.mixer.window for kind in found.layers] == [None] * found.num_layers
    assert (found.layers[0].mixer.softcap, found.final_softcap) == (
        config["attn_logit_softcapping"],
        config["final_logit_softcapping"],
    )


def with_layers(golden: Golden, layers: int) -> Golden:
    """A model like `golden` with another number of layers."""
    shapes = {name: shape for name, shape in golden.shapes.items() if ".layers." not in name}
    for i in range(layers):
        own = {name: shape for name, shape in golden.shapes.items() if ".layers.0." in name}
        shapes |= {name.replace(".layers.0.", f".layers.{i}."): shape for name, shape in own.items()}
    return replace(golden, config=golden.config | {"num_hidden_layers": layers}, shapes=shapes)


@pytest.mark.parametrize(
    ("layers", "period", "scalar"), [(26, 6, 128), (62, 6, 5376 // 32), (26, 2, 128), (46, 2, 5376 // 32)]
)
def test_windows_and_scales_that_llama_cpp_knows_by_the_size(layers: int, period: int, scalar: int) -> None:
    family = FAMILIES[{6: "gemma3_text", 2: "gemma2"}[period]]
    keys = GGUFKeys.model_validate(
        family.gguf.keys
        | {
            "block_count": layers,
            "context_length": 8192,
            "embedding_length": 5376,
            "attention.key_length": 128,
            "feed_forward_length": 8,
            "attention.head_count": 32,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": 1024,
        }
    )
    fields = family.gguf.config(keys)
    assert fields["query_pre_attn_scalar"] == scalar
    assert fields["sliding_window"] == 1024
    assert [i for i, kind in enumerate(fields["layer_types"]) if kind == "full_attention"] == list(
        range(period - 1, layers, period)
    )
