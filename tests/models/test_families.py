import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from goldens import CASES, SCORE_CASES, read_golden, read_score_golden

from quatrain.models.architecture import BOTH, Routes
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.blocks.experts import Experts
from quatrain.models.families import (
    _COUSINS,
    FAMILIES,
    architecture_from_hf,
    architecture_to_hf,
    builtin_architecture,
)
from quatrain.models.families.multimodal import MODEL_TYPES
from quatrain.models.params import is_spec, param_specs, tensor_names
from quatrain.models.rope import Rope

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
GEMMA2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
    "vocab_size": 262144,
}
REAL = {
    "llama": LLAMA_32_1B,
    "qwen2": QWEN25_05B,
    "qwen3": QWEN3_06B,
    "gemma2": GEMMA2_2B,
    "gemma3_text": GEMMA3_1B,
}


def test_llama_config():
    arch = architecture_from_hf(LLAMA_32_1B)
    mixer = arch.layers[0].mixer
    assert mixer.rope == Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert (arch.tie_embeddings, mixer.qkv_bias, arch.norm.offset) == (True, False, 0.0)
    assert arch.eos_token_ids == (128001, 128008, 128009)
    assert mixer.query_scale == 64**-0.5
    assert arch.kinds == arch.layers[:1]


def windows(arch):
    return [kind.mixer.window for kind in arch.layers]


def test_qwen_config_slides_only_when_told():
    arch = architecture_from_hf(QWEN25_05B)
    mixer = arch.layers[0].mixer
    assert (mixer.qkv_bias, mixer.output_bias, mixer.head_dim) == (True, False, 64)
    assert windows(arch) == [None] * 24
    sliding = architecture_from_hf({**QWEN25_05B, "use_sliding_window": True})
    assert windows(sliding) == [None] * 21 + [32768] * 3
    assert architecture_from_hf(QWEN3_06B).layers[0].mixer.qk_norm


def test_gemma_config():
    two, three = architecture_from_hf(GEMMA2_2B), architecture_from_hf(GEMMA3_1B)
    sliding, full = two.kinds
    assert windows(two)[:3] == [4096, None, 4096]
    assert (full.mixer.softcap, two.final_softcap, full.mixer.head_dim) == (50.0, 30.0, 256)
    assert [i for i, window in enumerate(windows(three)) if window is None] == [5, 11, 17, 23]
    sliding, full = three.kinds
    assert (full.mixer.rope, sliding.mixer.rope) == (Rope(1e6), Rope(1e4))
    assert (full.mixer.softcap, three.final_softcap, full.mixer.qk_norm) == (None, None, True)
    assert (three.tie_embeddings, three.norm.offset) == (True, 1.0)
    assert (full.mlp.activation, full.norms) == ("gelu_pytorch_tanh", BOTH)


@pytest.mark.parametrize("family", REAL)
def test_old_layout_and_that_of_transformers_5_agree(family):
    from transformers import AutoConfig

    new = AutoConfig.for_model(**REAL[family]).to_dict()
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    old = {key: value for key, value in REAL[family].items() if value is not None or key == "rope_scaling"}
    arch = architecture_from_hf(old)
    assert architecture_from_hf(new) == arch
    again = AutoConfig.for_model(**architecture_to_hf(arch)).to_dict()
    unread = {"dtype", "max_window_layers", "sliding_window_pattern"}
    assert {k: v for k, v in again.items() if k not in unread} == {
        **{k: v for k, v in new.items() if k not in unread},
        "architectures": [FAMILIES[family].hf_class],
    }


LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {"type": "llama3", "factor": 8.0, **LLAMA3_SCALING},
            {"kind": "llama3", "factor": 8.0, "original_max_position": 64},
        ),
        ({"type": "default"}, {}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_rope_scaling_counts_beside_the_rope_parameters_that_an_export_has(family, scaling, expected):
    exported = architecture_to_hf(architecture_from_hf(REAL[family] | {"rope_scaling": None}))
    arch = architecture_from_hf({**exported, "rope_scaling": scaling})
    full = arch.layers[-1] if family == "gemma2" else arch.layers[5]
    assert full.mixer.rope == Rope(exported["rope_theta"], **expected)
    # Of two scalings, transformers takes that of rope_scaling, and nothing of the other.
    other = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    both = {"full_attention": other} if family == "gemma3_text" else other
    arch = architecture_from_hf({**exported, "rope_parameters": both, "rope_scaling": scaling})
    full = arch.layers[-1] if family == "gemma2" else arch.layers[5]
    theta = exported["rope_theta"] if scaling else 7.0
    assert full.mixer.rope == Rope(theta, **(expected if scaling else {"kind": "linear", "factor": 2.0}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_takes_the_default_of_transformers(family):
    """And what transformers writes of its defaults is read: Gemma 4's numbers of layers were not, as 05."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(family).to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    least = {key: whole[key] for key in ("model_type", *sizes) if key in whole}
    assert architecture_from_hf(least) == architecture_from_hf(whole)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_a_missing_key_of_a_text_part_takes_the_default_of_its_own_class(kind):
    """It was that of the text model's family: positions turned fifty times as fast, without an error."""
    from transformers import AutoConfig

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = AutoConfig.for_model(kind).to_dict()["text_config"]
    least = {"model_type": kind, "text_config": {key: text[key] for key in ("model_type", *sizes)}}
    whole = AutoConfig.for_model(**least).to_dict()
    ends = {key: whole["text_config"].get(key) for key in ("bos_token_id", "eos_token_id")}
    assert architecture_from_hf({**least, **ends}) == architecture_from_hf(whole)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_gemma_model_without_sliding_windows_is_written_with_the_size_that_transformers_needs(family):
    config = REAL[family] | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    arch = architecture_from_hf(config)
    assert windows(arch) == [None] * 3
    written = architecture_to_hf(arch)
    assert written["layer_types"] == ["full_attention"] * 3
    assert written["sliding_window"] == arch.max_position
    assert written.get("sliding_window_pattern") == (1 if family == "gemma3_text" else None)
    assert architecture_from_hf(written) == arch
    by_pattern = REAL["gemma3_text"] | {"num_hidden_layers": 3, "sliding_window_pattern": 1}
    assert windows(architecture_from_hf(by_pattern)) == [None] * 3


@pytest.mark.parametrize("case", ["gemma4_text_dense", "olmo3"])
def test_a_model_with_full_attention_alone_is_written_with_a_window_that_transformers_needs(case):
    config = read_golden(case).config
    full = {"layer_types": ["full_attention"] * config["num_hidden_layers"], "per_layer_config": None}
    arch = architecture_from_hf({**config, **full})
    written = architecture_to_hf(arch)
    assert written["sliding_window"] == arch.max_position
    assert architecture_from_hf(written) == arch


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.0}}, {"partial": 1.0}),
        (
            "gemma4_text",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2.0}}},
            {"factor": 2.0},
        ),
    ],
)
def test_what_differs_from_a_familys_usual_rotary_embeddings_is_written(case, changes, field):
    arch = architecture_from_hf(read_golden(case).config | changes)
    rope = arch.layers[-1].mixer.rope
    assert {name: getattr(rope, name) for name in field} == field
    assert architecture_from_hf(architecture_to_hf(arch)) == arch


def test_a_share_of_a_head_that_is_odd_is_rotated_as_in_transformers():
    """5 of 10 elements are three frequencies, and so six elements, in the order of the checkpoint."""
    share = {"rope_parameters": {"partial_rotary_factor": 0.5}, "head_dim": 10}
    arch = architecture_from_hf(read_golden("glm4").config | share)
    mixer = arch.layers[0].mixer
    assert mixer.rope.rotated(10) == 6
    np.testing.assert_allclose(
        mixer.rope.frequencies(10), 10_000.0 ** -np.array([0, 2 / 5, 4 / 5]), rtol=1e-6
    )
    query = next(name for name in tensor_names(arch) if name.name.endswith("0.self_attn.q_proj.bias"))
    rows = query.rows(np.zeros(param_specs(arch)["layers"][0]["qkv_bias"].shape))[1]
    assert rows[:10].tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("case", SCORE_CASES)
def test_a_model_with_a_score_head_is_written_as_a_classifier_of_one_label(case):
    read = read_score_golden(case).config
    written = architecture_to_hf(replace(architecture_from_hf(read), head="value_head"))
    for key in ("architectures", "id2label", "label2id"):
        assert written[key] == read[key], key


@pytest.mark.parametrize("case", CASES)
def test_config_written_is_config_read(case):
    arch = architecture_from_hf(read_golden(case).config)
    assert architecture_from_hf(architecture_to_hf(arch)) == arch


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_the_name_and_shape_of_transformers(case):
    golden = read_golden(case)
    arch = architecture_from_hf(golden.config)
    names = tensor_names(arch)
    assert {name.name for name in names} == set(golden.shapes)
    leaves = jax.tree_util.tree_leaves_with_path(param_specs(arch), is_leaf=is_spec)
    shapes = {tuple(getattr(k, "key", getattr(k, "idx", None)) for k in path): s.shape for path, s in leaves}
    assert set(shapes) == {name.path for name in names}
    seen = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for name in names:
        assert name.of(seen[name.path]).shape == golden.shapes[name.name]
        rows, own = name.rows(seen[name.path])
        rows[own] += 1
    for path, count in seen.items():
        np.testing.assert_array_equal(count, 1, err_msg=str(path))


def test_a_tensor_read_into_its_rows_is_the_one_taken_out():
    golden = read_golden("qwen2")
    rng = np.random.default_rng(0)
    specs = param_specs(architecture_from_hf(golden.config))
    q, k = (
        name
        for name in tensor_names(architecture_from_hf(golden.config))
        if name.name.endswith(("0.self_attn.q_proj.weight", "0.self_attn.k_proj.weight"))
    )
    parameter = np.zeros(specs["layers"][0]["qkv"].shape, np.float32)
    tensors = [rng.normal(size=golden.shapes[name.name]).astype(np.float32) for name in (q, k)]
    for name, tensor in zip((q, k), tensors, strict=True):
        rows, own = name.rows(parameter)
        rows[own] = tensor
    np.testing.assert_array_equal(q.of(parameter), tensors[0])
    np.testing.assert_array_equal(k.of(parameter), tensors[1])
    # The second query head of the first key/value head, and that head's keys.
    size = parameter.shape[2]
    np.testing.assert_array_equal(parameter[0, 1], tensors[0][size : 2 * size])
    np.testing.assert_array_equal(parameter[0, -2], tensors[1][:size])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mamba"},
            "'mamba'.*supported: llama, qwen2, qwen3, gemma2, gemma3_text",
        ),
        ({}, "unsupported model_type None"),
        (
            {"model_type": "llama", "vocab_size": 3},
            "hidden_size must be given; intermediate_size must be given",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": {"rope_type": "yarn", "beta_fast": 4.0}},
            "the rope type yarn needs factor; add the missing values",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "'dynamic'.*default, linear.*set rope_type to yarn",
        ),
        (
            {
                **QWEN25_05B,
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "ntk", "factor": 4.0},
            },
            "'ntk'.*default, linear, llama3, yarn, longrope",
        ),
        ({**QWEN25_05B, "rope_scaling": {"factor": 4.0}}, r"a rope factor \(4.0\) needs a rope_type"),
        (
            {**QWEN25_05B, "rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}},
            "rope_type 'default' and type 'linear'; remove one",
        ),
        (
            {**QWEN25_05B, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "which this family does not have",
        ),
        ({**LLAMA_32_1B, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {**LLAMA_32_1B, "hidden_act": "relu"},
            "must be one of silu, gelu_pytorch_tanh; got 'relu'",
        ),
        (
            {**LLAMA_32_1B, "quantization_config": {"quant_method": "fp8"}},
            "quantised weights are not supported",
        ),
        (
            {**LLAMA_32_1B, "num_key_value_heads": 5},
            "a multiple of num_kv_heads = 5; got 32",
        ),
        ({**QWEN3_06B, "layer_types": ["chunked_attention"] * 28}, "layer_types must be 28 entries"),
        (
            {**QWEN3_06B, "layer_types": ["sliding_attention"] * 28},
            "sliding_window must be a positive",
        ),
        ({**GEMMA2_2B, "use_bidirectional_attention": True}, "only causal attention"),
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, "set it to null"),
        (
            {
                "model_type": "gemma3",
                "text_config": GEMMA3_1B,
                "quantization_config": {"quant_method": "fp8"},
            },
            "quantised weights are not supported",
        ),
        (
            {**LLAMA_32_1B, "model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be a positive number; got 0",
        ),
        (
            {**GEMMA3_1B, "model_type": "gemma4_text", "num_kv_shared_layers": 27},
            "num_kv_shared_layers must be less than num_hidden_layers, 26; got 27",
        ),
        (
            {
                **GEMMA3_1B,
                "model_type": "gemma4_text",
                "hidden_size_per_layer_input": 0,
                "per_layer_config": {str(i): {"head_dim": 512 + i} for i in (5, 11, 17, 23, 25)},
            },
            "per_layer_config must be the same for all layers of full_attention",
        ),
        (
            {
                **GEMMA3_1B,
                "model_type": "gemma4_text",
                "per_layer_config": {"5": {"intermediate_size": 4}},
            },
            "per_layer_config.5.intermediate_size is not supported",
        ),
        (
            {
                **LLAMA_32_1B,
                "model_type": "phi3",
                "original_max_position_embeddings": 1,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 32, "long_factor": [1.0] * 32},
            },
            "original_max_position_embeddings of 2 or more; got 1",
        ),
        (
            {**LLAMA_32_1B, "rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "yarn needs a rope_theta above 1; got 1.0",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": {**YARN, "orignal_max_position_embeddings": 1024}},
            r"not known here: orignal_max_position_embeddings \(did you mean original_max_position",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": None, "rope_parameters": {**YARN, "extrapolation_factor": 0.5}},
            "not known here: extrapolation_factor",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "attn_factor": 0.9}},
            "attn_factor in rope settings of type linear, which does not read it",
        ),
        (
            {**LLAMA_32_1B, "rope_scaling": {**YARN, "attention_factor": 1.0, "attn_factor": 0.5}},
            r"attention_factor \(1\) and attn_factor \(0.5, times yarn's own factor 0.569315\)",
        ),
    ],
)
def test_what_the_decoder_lacks_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf(config)


def test_attn_factor_multiplies_yarns_own_factor_and_is_exported_for_transformers_too():
    """DeepSeek-R1-0528-Qwen3-8B, as vLLM reads it: 0.8782 x (0.1 ln 4 + 1) = 1."""
    scaling = {**YARN, "attn_factor": 0.8782488562869419, "original_max_position_embeddings": 32768}
    arch = architecture_from_hf({**LLAMA_32_1B, "rope_scaling": scaling, "finetuned": True})
    assert arch.attentions[0].rope.scale == pytest.approx(1.0, abs=1e-12)
    exported = architecture_to_hf(arch)
    assert exported["rope_scaling"]["attention_factor"] == pytest.approx(1.0)
    assert exported["rope_scaling"]["attn_factor"] == scaling["attn_factor"]
    assert architecture_from_hf(exported) == arch


@pytest.mark.parametrize("sections", [{}, {"mrope_section": [16, 8, 8], "mrope_interleaved": True}])
def test_keys_of_rope_settings_without_effect_on_text_are_read_over(sections):
    """Of a text model; one that is exported with sections is taken for one that sees by other engines."""
    scaling = {**YARN, "finetuned": True, **sections}
    arch = architecture_from_hf({**LLAMA_32_1B, "rope_scaling": scaling})
    assert arch == architecture_from_hf({**LLAMA_32_1B, "rope_scaling": YARN})
    assert "mrope_section" not in json.dumps(architecture_to_hf(arch))
    old = {**LLAMA_32_1B, "rope_scaling": {"type": "mrope", **sections}}
    assert architecture_from_hf(old) == architecture_from_hf({**LLAMA_32_1B, "rope_scaling": None})


def test_two_different_kinds_of_rope_are_an_error():
    scaling = {"type": "mrope", "rope_type": "yarn", "factor": 4.0, "mrope_section": [16, 8, 8]}
    with pytest.raises(ValueError, match="rope_type 'yarn' and type 'mrope'; remove one"):
        architecture_from_hf({**LLAMA_32_1B, "rope_scaling": scaling})


def test_minus_one_is_no_padding_id():
    arch = architecture_from_hf({**LLAMA_32_1B, "pad_token_id": -1})
    assert arch.pad_token_id is None
    assert architecture_to_hf(arch)["pad_token_id"] is None


def test_builtin_architecture():
    arch = builtin_architecture("tiny", 64, (2,))
    assert (arch.family, arch.vocab_size, arch.eos_token_ids) == ("llama", 64, (2,))
    assert hash(arch) == hash(replace(arch))
    with pytest.raises(
        ValueError, match="unknown builtin model builtin:huge; the builtin models are: builtin:tiny"
    ):
        builtin_architecture("huge", 64, ())


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama4", "it is nearest to llama, but has experts"),
        ("deepseek_v3", "it is nearest to llama, but has latent attention and experts"),
        ("olmo", "it is nearest to olmo2, but has layer norms without weights"),
        ("lama", r"did you mean llama\?"),
        ("gemma3n_text", "did you mean gemma3_text"),
    ],
)
def test_an_unknown_family_is_told_the_nearest(model_type, message):
    with pytest.raises(ValueError, match=f"unsupported model_type '{model_type}' in config.json.*{message}"):
        architecture_from_hf({**LLAMA_32_1B, "model_type": model_type})


def test_every_cousin_names_a_family_and_is_none():
    for model_type, (nearest, differs) in _COUSINS.items():
        assert nearest in {*FAMILIES, *MODEL_TYPES}
        assert model_type not in {*FAMILIES, *MODEL_TYPES}
        assert differs


def test_the_text_part_of_a_multimodal_config_with_its_end_tokens():
    text = {key: value for key, value in GEMMA3_1B.items() if key != "eos_token_id"}
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}}
    assert architecture_from_hf(outer) == architecture_from_hf(GEMMA3_1B)


def test_a_text_config_without_sizes_has_those_of_transformers():
    """As the 4B model on the Hub has it."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    arch = architecture_from_hf({"model_type": "gemma3", "text_config": text})
    mixer = arch.layers[0].mixer
    assert (arch.vocab_size, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (262_208, 8, 4, 256)


def test_longrope_is_decided_by_the_longest_sequence():
    arch = architecture_from_hf(read_golden("phi3_longrope").config)
    short, long = arch.for_length(64), arch.for_length(65)
    assert (short.longest, long.longest) == (64, 128)
    assert [a.layers[0].mixer.rope.long for a in (short, long)] == [False, True]
    assert short == arch
    assert architecture_to_hf(short) == architecture_to_hf(long)
    llama = architecture_from_hf(LLAMA_32_1B)
    assert llama.for_length(10**6) is llama


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "have 1 and 4",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
            "longrope needs short_factor, long_f",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be less than or equal to 1"),
        ({"rope_scaling": {"type": "su", "short_factor": ["a"], "long_factor": [1.0]}}, "short_factor"),
    ],
)
def test_what_is_wrong_in_a_phi_config(changes, message):
    config = {k: v for k, v in read_golden("phi3_longrope").config.items() if k != "rope_parameters"}
    with pytest.raises(ValueError, match=message):
        architecture_from_hf({**config, "partial_rotary_factor": 0.5, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block must be false"),
        ({"num_kv_shared_layers": 4}, "layer_types must be a type of layer that has keys and values"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input must be vocab_size, 72"),
        ({"use_bidirectional_attention": "all"}, "only causal attention is supported"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be less than num_hidden_layers"),
    ],
)
def test_what_is_wrong_in_a_gemma_4_config(changes, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf({**read_golden("gemma4_text").config, **changes})


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({"num_experts": 12}, range(8)),
        ({"num_local_experts": 12, "decoder_sparse_step": 2}, (1, 3, 5, 7)),
        ({"num_experts": 12, "mlp_only_layers": [*range(7)]}, (7,)),
        ({"num_experts": 12, "mlp_only_layers": [*range(8)]}, ()),
        ({"num_experts": 0}, ()),
    ],
)
def test_which_layers_have_experts(fields, sparse):
    config = {**read_golden("qwen3_next").config, "num_hidden_layers": 8, "layer_types": None}
    config = {key: value for key, value in config.items() if key != "num_experts"} | fields
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
    arch = architecture_from_hf(config)
    assert [isinstance(kind.mixer, GatedDeltaNet) for kind in arch.layers] == [True, True, True, False] * 2
    assert [i for i, kind in enumerate(arch.layers) if isinstance(kind.mlp, Experts)] == [*sparse]
    assert arch.routes == (Routes(len(sparse), 2, 12) if sparse else None)
    assert architecture_from_hf(architecture_to_hf(arch)) == arch


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_every_layer_of_qwen3_5_with_experts_has_them(fields):
    """As in transformers, which does not read these keys there."""
    config = read_golden("qwen3_5_moe_text").config
    assert architecture_from_hf({**config, **fields}) == architecture_from_hf(config)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "qwen3_5_moe_text",
            {"num_experts": 0},
            "num_experts_per_tok must be from 1 to num_experts = 0; got 3",
        ),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_experts must be equal to num_local"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok must be from 1 to num_experts = 6",
        ),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights are not supported"),
        ("olmoe", {"hidden_act": "relu"}, "activation must be one of silu"),
    ],
)
def test_what_is_wrong_in_a_config_of_experts(case, changes, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf({**read_golden(case).config, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "of at least one layer of full attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "3 entries out of full_attention, linear_attention"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads must be a multiple of linear_num_key_heads = 2",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be 2 or more"),
    ],
)
def test_delta_layers_that_the_decoder_lacks_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf({**read_golden("qwen3_5_text").config, **fields})
