"""GGUF files, named as llama.cpp names their tensors, against the Hugging Face folders of their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from goldens import Golden, read_golden

from quatrain.weights.gguf import _gemma_fields, _Keys, load_gguf
from quatrain.weights.hf import load_hf

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def convert(golden: Golden, path: Path) -> Path:
    """The model as llama.cpp's converter writes it; Gemma's norms have 1 added to their weights."""
    c, kind = golden.config, ARCHITECTURES[golden.config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]))
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    rope = c["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for number, add in (
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
    names = gguf.get_tensor_name_map(kind, c["num_hidden_layers"])
    for name, weight in golden.weights().items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        offset = c["model_type"].startswith("gemma") and ours.endswith("norm.weight")
        writer.add_tensor(ours, weight + 1 if offset else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_converted_model_is_that_of_its_folder(family: str, tmp_path: Path) -> None:
    golden = read_golden(family)
    arch, params = load_hf(golden.write_model(tmp_path / "hf"))
    found, loaded = load_gguf(convert(golden, tmp_path / "m.gguf"))
    if family.startswith("gemma"):  # what the file does not say is that of the published models
        arch = replace(arch, query_pre_attn_scalar=arch.head_dim)
        assert found.layer_types[0] == "sliding_attention"
        arch = replace(arch, layer_types=found.layer_types)
    assert found == replace(arch, eos_token_ids=found.eos_token_ids)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    tolerance = 2e-7 if family.startswith("gemma") else 0.0  # the 1 that was added costs a digit
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("layers", "period", "scalar"), [(26, 6, 128), (62, 6, 5376 // 32), (26, 2, 128), (46, 2, 5376 // 32)]
)
def test_windows_and_scales_that_llama_cpp_knows_by_the_size(layers: int, period: int, scalar: int) -> None:
    keys = _Keys.model_validate(
        {
            "block_count": layers,
            "context_length": 8192,
            "embedding_length": 5376,
            "feed_forward_length": 8,
            "attention.head_count": 32,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": 1024,
        }
    )
    fields = _gemma_fields({6: "gemma3_text", 2: "gemma2"}[period], keys, 128)
    assert fields["query_pre_attn_scalar"] == scalar
    assert fields["sliding_window"] == 1024
    assert [i for i, kind in enumerate(fields["layer_types"]) if kind == "full_attention"] == list(
        range(period - 1, layers, period)
    )
