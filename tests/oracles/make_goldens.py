"""Runs transformers (torch, CPU) on small random models and keeps its logits in tests/golden/.

Run by `make oracles`, which needs torch; the tests that read the files do not. It also checks what only
torch can tell: that transformers loads what quatrain exports, to the same config and the same logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import CASES, GOLDEN, draw, weights_crc

from quatrain.models import decoder
from quatrain.weights.hf import load_hf, save_hf

ROWS, TOKENS, PREFILL = 3, 40, 25
SMALL: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MINISTRAL = {
    **YARN,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
    "tie_word_embeddings": True,
}
LONGROPE = {
    **IDS,
    "num_attention_heads": 2,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "partial_rotary_factor": 0.5,
    },
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "final_logit_softcapping": 3.0}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
STACKED = ("gpt_oss", "qwen3_5_moe_text")
"""Families whose checkpoints have the matrices of all experts as one tensor."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "vocab_size_per_layer_input": 72}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_rope_linear": ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "llama_rope_llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "eos_token_id": [3, 5]}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_sliding": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5}),
    "gemma3_text": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3_text_rope_linear": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                *["sliding_attention"] * 2,
                "full_attention",
            ],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_text_dense": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3_yarn": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "truncate": False, "beta_fast": 3.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 9}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL, "num_key_value_heads": 1}),
    "olmo2": ("olmo2", {"tie_word_embeddings": True}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {**IDS, "no_rope_layers": [1, 0]}),
    "smollm3_sliding": (
        "smollm3",
        {**IDS, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "granite": ("granite", GRANITE),
    "phi3": ("phi3", {**IDS, "sliding_window": 9}),
    "phi3_longrope": ("phi3", {**LONGROPE, "original_max_position_embeddings": 64}),
    "phi3_longrope_long": ("phi3", {**LONGROPE, "original_max_position_embeddings": 16}),
    "qwen3_next": ("qwen3_next", {**DELTA, "num_experts": 0, "linear_num_value_heads": 2}),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            **DELTA,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_5_text_biases": (
        "qwen3_5_text",
        {
            **DELTA,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 1.0,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}),
    "olmoe": ("olmoe", {**IDS, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.9}),
    "qwen2_moe": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [0]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3_next_experts": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24, "intermediate_size": None},
    ),
    "glm": ("glm", {**IDS, "head_dim": 16}),
    "glm4": ("glm4", {**IDS, "head_dim": 8, "num_key_value_heads": 1, "attention_bias": True}),
}


def main() -> None:
    """Writes the golden files of the cases in the arguments, or all; stops at the first check that fails."""
    logging.disable_progress_bar()
    assert set(CONFIGS) == set(CASES), "goldens.CASES lists the files that the tests read"
    chosen = sys.argv[1:] or [*CONFIGS]
    if chosen == [*CONFIGS]:
        check_multimodal()
    GOLDEN.mkdir(exist_ok=True)
    for case, (model_type, fields) in ((case, CONFIGS[case]) for case in chosen):
        config = AutoConfig.for_model(model_type, **given({**SMALL, **fields}))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        tensors = tensors_of(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        weights = {name: draw(name, shape) for name, shape in shapes.items()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(weights[name]))
        inputs = make_inputs(case)
        logits = run(model, inputs)
        off_cached = np.abs(run_cached(model, inputs) - logits)[inputs["attention_mask"] > 0].max()
        assert off_cached < 1e-4, f"{case}: transformers differs from itself with a cache by {off_cached}"
        written, off = check_export(model, inputs, logits)
        about = {
            "config": written,
            "shapes": shapes,
            "weights_crc": weights_crc(weights),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        }
        np.savez_compressed(GOLDEN / f"{case}.npz", about=json.dumps(about), logits=logits, **inputs)
        print(f"{case}: logits std {logits.std():.2f}, cached {off_cached:.1e}, re-loaded export {off:.1e}")


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint of `model` has: its parameters, and the scalars of layers, which are buffers."""
    buffers = {name: x for name, x in model.named_buffers() if name.endswith("layer_scalar")}
    return as_stored(model, dict(model.named_parameters())) | buffers


def as_stored(model: Any, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: views of arrays like the parameters, which have all experts as one."""
    family = model.config.model_type
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        module, _, part = name.rpartition(".")
        if not module.endswith("mlp.experts") or family in STACKED:
            stored[renamed(family, name)] = tensor
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for e, matrix in enumerate(tensor):
            for own, half in zip(names, matrix.chunk(len(names)), strict=True):
                stored[renamed(family, f"{module}.{e}.{own}.weight")] = half
    return stored


def renamed(family: str, name: str) -> str:
    """The name of a tensor in a checkpoint."""
    if family == "mixtral":
        for ours, theirs in {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3"}.items():
            name = name.replace(ours, theirs)
        name = name.replace("down_proj", "w2")
    return name


def check_multimodal() -> None:
    """quatrain's logits of the text part of models that also read images, as transformers saves them."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    inputs = make_inputs("multimodal")
    text_parts = (("gemma3", "gemma3_text"), ("gemma4", "gemma4_text"), ("mistral3", "ministral3"))
    for outer, case in (*text_parts, ("mistral3", "mistral"), ("qwen3_5", "qwen3_5_text")):
        text_type, fields = CONFIGS[case]
        text = {**SMALL, **IDS, **fields, "model_type": text_type}
        own = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8} if outer == "gemma4" else {}
        parts = {"audio_config": None} if own else {}
        if outer == "qwen3_5":
            own = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        config = AutoConfig.for_model(outer, text_config=text, vision_config=vision | own, **parts)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            arch, params = load_hf(folder)
            arrays = (jnp.asarray(inputs[name]) for name in ("input_ids", "position_ids", "attention_mask"))
            ours = np.asarray(decoder.logits(params, arch, decoder.forward(params, arch, *arrays).hidden))
            off = np.abs(ours - run(model, inputs))[inputs["attention_mask"] > 0].max()
            assert off < 1e-4, f"{outer} with {case}: logits differ by {off}"
            save_hf(f"{folder}/text", arch, params)
            loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/text", attn_implementation="eager")
            off_exported = np.abs(run(loaded.eval(), inputs) - run(model, inputs)).max()
            assert off_exported < 1e-4, f"{outer} with {case}: the export's logits differ by {off_exported}"
        print(f"{outer} with {case}: logits differ by {off:.1e}, those of the export by {off_exported:.1e}")


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those that are None here, which the family does not have."""
    return {key: value for key, value in fields.items() if value is not None}


def make_inputs(case: str) -> dict[str, np.ndarray]:
    """One full row, one padded on the right, one padded on the left."""
    ids = (draw(f"input_ids of {case}", (ROWS, TOKENS)) * 1e4).astype(np.int64) % SMALL["vocab_size"]
    mask = np.ones((ROWS, TOKENS), np.int64)
    mask[1, 31:] = 0
    mask[2, :9] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}


@torch.no_grad()
def run(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] logits of one pass over whole rows."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    return model(**tensors, use_cache=False).logits.float().numpy()


@torch.no_grad()
def run_cached(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] logits with a cache: PREFILL columns at once, then one by one."""
    cache, parts = None, []
    for start, end in [(0, PREFILL), *((t, t + 1) for t in range(PREFILL, TOKENS))]:
        step = model(
            input_ids=torch.from_numpy(inputs["input_ids"][:, start:end]),
            attention_mask=torch.from_numpy(inputs["attention_mask"][:, :end]),
            position_ids=torch.from_numpy(inputs["position_ids"][:, start:end]),
            past_key_values=cache,
            use_cache=True,
        )
        cache = step.past_key_values
        parts.append(step.logits.numpy())
    return np.concatenate(parts, axis=1)


def check_export(
    model: Any, inputs: dict[str, np.ndarray], logits: np.ndarray
) -> tuple[dict[str, Any], np.ndarray]:
    """The config.json transformers writes, and how far its logits of our export are from its own."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours, half = (Path(folder) / name for name in ("theirs", "ours", "half"))
        model.save_pretrained(theirs)
        arch, params = load_hf(theirs)
        save_hf(ours, arch, params)
        loaded = AutoModelForCausalLM.from_pretrained(ours, attn_implementation="eager").eval()
        assert loaded.dtype == torch.float32
        before, after = model.config.to_dict(), loaded.config.to_dict()
        after["rope_parameters"].pop("type", None)  # the older name of rope_type
        for of_images in ("mrope_section", "mrope_interleaved"):
            before["rope_parameters"].pop(of_images, None)
        differ = {k: (before.get(k), after.get(k)) for k in before | after if before.get(k) != after.get(k)}
        unread = {"max_window_layers", "_name_or_path", "partial_rotary_factor"}
        assert not set(differ) - unread, f"the exported config differs: {differ}"
        save_hf(half, *load_hf(theirs, jnp.bfloat16))
        assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16
        off = np.abs(run(loaded, inputs) - logits).max()
        assert off == 0, f"the exported model's logits differ by {off}"
        return json.loads((theirs / "config.json").read_text()), off


if __name__ == "__main__":
    main()
