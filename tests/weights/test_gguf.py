"""GGUF weights: every tensor type, both architectures, rotary scaling, and files that are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from quatrain.models.rope import Rope
from quatrain.weights.gguf import gguf_architecture, load_gguf

HIDDEN, MLP, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 12, 2, 4, 2, 64
Tensors = dict[str, tuple[np.ndarray, T]]


def small_tensors(arch: str, *, tied: bool = True) -> Tensors:
    """Random float32 tensors of a small model, named and laid out as in Hugging Face (not yet permuted)."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, MLP),
        }
        if arch == "qwen2":
            shapes |= {
                f"blk.{i}.attn_{n}.bias": (heads * HEAD_DIM,)
                for n, heads in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
            }
    return {name: (rng.normal(size=shape).astype(np.float32), T.F32) for name, shape in shapes.items()}


def as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter leaves them for the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def permuted(tensors: Tensors) -> Tensors:
    changed = dict(tensors)
    for name, (weight, kind) in tensors.items():
        if "attn_q" in name or "attn_k" in name:
            changed[name] = (as_llama_cpp(weight, HEADS if "attn_q" in name else KV_HEADS), kind)
    return changed


def write(
    path: Path, arch: str, tensors: Tensors, more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None
) -> Path:
    write_to(gguf.GGUFWriter(path, arch), tensors, more)
    return path


def write_to(
    writer: gguf.GGUFWriter, tensors: Tensors, more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None
) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_eos_token_id(5)
    writer.add_bos_token_id(4)
    more(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(*parts: np.ndarray | bytes) -> np.ndarray:
    """One block of bytes out of its fields."""
    return np.frombuffer(b"".join(bytes(part) for part in parts), np.uint8)


HALF = np.float16(0.5).tobytes()
NIBBLES = np.arange(16, dtype=np.uint8)  # low nibble i, high nibble 15 - i
BLOCKS: dict[T, tuple[np.ndarray, list[float]]] = {
    # Bytes of one block or a few values, and what ggml's format says they mean.
    T.F32: (np.array([1.5, -2.25], np.float32), [1.5, -2.25]),
    T.F16: (np.array([1.5, -2.25], np.float16), [1.5, -2.25]),
    T.BF16: (np.array([0x3FC0, 0xC010], "<u2").view(np.uint8), [1.5, -2.25]),
    # d * q
    T.Q8_0: (blocks(HALF, np.arange(-16, 16, dtype=np.int8)), [0.5 * q for q in range(-16, 16)]),
    # d * (q - 8), low nibbles first
    T.Q4_0: (
        blocks(HALF, NIBBLES | (15 - NIBBLES) << 4),
        [0.5 * (q - 8) for q in [*range(16), *range(15, -1, -1)]],
    ),
    # d * q + m
    T.Q4_1: (
        blocks(HALF, np.float16(-3.0).tobytes(), NIBBLES | (15 - NIBBLES) << 4),
        [0.5 * q - 3.0 for q in [*range(16), *range(15, -1, -1)]],
    ),
    # d * scale * q - dmin * min, eight sub-blocks of 32 with 6-bit scales and mins; here scale 1 and min 2 in
    # the first four, scale 17 and min 34 in the last four, q 3 and 7 by turns.
    T.Q4_K: (
        blocks(
            HALF,
            np.float16(0.25).tobytes(),
            [1 | 1 << 6] * 4,
            [2 | 2 << 6] * 4,
            [1 | 2 << 4] * 4,
            [0x73] * 128,
        ),
        ([1.0] * 32 + [3.0] * 32) * 2 + ([17.0] * 32 + [51.0] * 32) * 2,
    ),
    # d * scale * (q - 32), six-bit q out of nibbles 1 and 5 and bit pairs 0, 1, 2, 3; here scale 2
    T.Q6_K: (
        blocks([0x51] * 128, [0b11_10_01_00] * 64, [2] * 16, HALF),
        ([-31.0] * 32 + [-15.0] * 32 + [5.0] * 32 + [21.0] * 32) * 2,
    ),
}


DEQUANTISED = [
    *(T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.F32, T.F16, T.BF16),
    *(
        T.IQ2_XXS,
        T.IQ2_XS,
        T.IQ2_S,
        T.IQ3_XXS,
        T.IQ3_S,
        T.IQ1_S,
        T.IQ1_M,
        T.IQ4_NL,
        T.IQ4_XS,
        T.TQ1_0,
        T.TQ2_0,
    ),
    *(T.MXFP4, T.NVFP4),
]


@pytest.mark.parametrize("kind", list(BLOCKS), ids=lambda kind: kind.name)
def test_every_tensor_type_is_dequantised(kind: T, tmp_path: Path) -> None:
    block, values = BLOCKS[kind]
    row = np.tile(block, HIDDEN // len(values))
    expected = np.tile(np.array(values, np.float32), HIDDEN // len(values))
    tensors = small_tensors("llama") | {"blk.1.ffn_up.weight": (np.tile(row, (MLP, 1)), kind)}
    _, params = load_gguf(write(tmp_path / "m.gguf", "llama", tensors))
    loaded = params["layers"][1]["gate_up"][1]
    assert loaded.shape == (MLP, HIDDEN)
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, np.tile(expected, (MLP, 1)))


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_values_of_every_type_are_those_of_the_gguf_package(kind: T, tmp_path: Path, monkeypatch) -> None:
    """Also when a tensor is read in pieces; the package reads it whole."""
    monkeypatch.setattr("quatrain.weights.gguf._READ_VALUES", 3 * HIDDEN)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 60: none makes a scale that overflows.
    raw = np.random.default_rng(0).integers(0, 60, (MLP, HIDDEN // block * size), np.uint8)
    tensors = small_tensors("llama") | {"blk.1.ffn_up.weight": (raw, kind)}
    _, params = load_gguf(write(tmp_path / "m.gguf", "llama", tensors))
    np.testing.assert_array_equal(params["layers"][1]["gate_up"][1], gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1], ids=lambda kind: kind.name)
def test_a_whole_model_quantised_is_near_the_original(kind: T, tmp_path: Path) -> None:
    plain = permuted(small_tensors("llama"))
    coded = {
        name: (gguf.quants.quantize(w, kind), kind) if w.ndim == 2 else (w, T.F32)
        for name, (w, _) in plain.items()
    }
    arch, exact = load_gguf(write(tmp_path / "plain.gguf", "llama", plain))
    same, near = load_gguf(write(tmp_path / "coded.gguf", "llama", coded))
    assert arch == same
    # Half of the widest step among values below 8.
    step = {T.F16: 2**-9, T.BF16: 2**-6, T.Q8_0: 0.02, T.Q4_0: 0.6, T.Q4_1: 0.3}[kind]
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(near), strict=True):
        assert float(jnp.abs(a - b).max()) < step


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_names_layout_and_architecture(family: str, tied: bool, tmp_path: Path) -> None:
    tensors = small_tensors(family, tied=tied)
    path = write(tmp_path / "m.gguf", family, permuted(tensors) if family == "llama" else tensors)
    arch, params = load_gguf(path)
    assert gguf_architecture(path) == arch
    scored, begun = load_gguf(path, head="value_head")  # what a reward model begins with
    assert (scored.head, begun.keys() - {"score"}) == ("value_head", params.keys() - {"lm_head"})
    np.testing.assert_array_equal(begun["score"], np.zeros((1, HIDDEN)))
    weights = {name: weight for name, (weight, _) in tensors.items()}

    assert arch.family == family
    mixer, mlp = arch.layers[0].mixer, arch.layers[0].mlp
    assert (arch.hidden_size, mlp.width, arch.vocab_size) == (HIDDEN, MLP, VOCAB)
    assert (arch.num_layers, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (2, 4, 2, 64)
    assert (arch.max_position, arch.norm.eps, mixer.rope) == (4096, 1e-5, Rope(50000.0))
    assert (arch.tie_embeddings, mixer.qkv_bias) == (tied, family == "qwen2")
    assert (arch.eos_token_ids, arch.bos_token_id) == ((5,), 4)
    assert not mixer.qk_norm

    np.testing.assert_array_equal(params["embed"], weights["token_embd.weight"])
    np.testing.assert_array_equal(params["final_norm"], weights["output_norm.weight"])
    assert ("lm_head" in params) == (not tied)
    if not tied:
        np.testing.assert_array_equal(params["lm_head"], weights["output.weight"])
    parts = {"attn_q": np.s_[:, :-2], "attn_k": np.s_[:, -2], "attn_v": np.s_[:, -1]}
    for i, layer in enumerate(params["layers"]):
        matrices = {name: layer["qkv"][part] for name, part in parts.items()}
        matrices |= {"attn_output": layer["o"], "ffn_down": layer["down"]}
        matrices |= {"ffn_gate": layer["gate_up"][0], "ffn_up": layer["gate_up"][1]}
        for name, matrix in matrices.items():
            expected = weights[f"blk.{i}.{name}.weight"]
            np.testing.assert_array_equal(matrix.reshape(expected.shape), expected)
        np.testing.assert_array_equal(layer["attention_norm"], weights[f"blk.{i}.attn_norm.weight"])
        np.testing.assert_array_equal(layer["mlp_norm"], weights[f"blk.{i}.ffn_norm.weight"])
        biases = {key for key in layer if key.endswith("_bias")}
        assert biases == ({"qkv_bias"} if family == "qwen2" else set())
        for name, part in parts.items() if biases else ():
            bias = layer["qkv_bias"][part].reshape(-1)
            np.testing.assert_array_equal(bias, weights[f"blk.{i}.{name}.bias"])


def test_parameters_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    _, params = load_gguf(path, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    exact = small_tensors("llama")["token_embd.weight"][0]
    np.testing.assert_array_equal(params["embed"], exact.astype(jnp.bfloat16))


def rope_factors(rope: Rope) -> np.ndarray:
    return np.asarray(Rope(50000.0).frequencies(HEAD_DIM) / rope.frequencies(HEAD_DIM))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotary_scaling_is_recognised_by_its_factors(factor: float, tmp_path: Path) -> None:
    scaling = Rope(50000.0, "llama3", factor, 1.0, 4.0, 8192)
    factors = rope_factors(scaling)
    assert factors[0] == 1.0
    assert factors[-1] == factor
    tensors = small_tensors("llama") | {"rope_freqs.weight": (factors, T.F32)}
    arch, _ = load_gguf(write(tmp_path / "m.gguf", "llama", tensors))
    assert arch.layers[0].mixer.rope == scaling


def test_other_rotary_scaling(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    ones = tensors | {"rope_freqs.weight": (np.ones(HEAD_DIM // 2, np.float32), T.F32)}
    assert load_gguf(write(tmp_path / "ones.gguf", "llama", ones))[0].layers[0].mixer.rope == Rope(50000.0)

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    # llama.cpp takes a factor without a type for linear scaling, and knows an older name of it.
    for more in (
        linear,
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0),
    ):
        arch = gguf_architecture(write(tmp_path / "linear.gguf", "llama", tensors, more))
        assert arch.layers[0].mixer.rope == Rope(50000.0, "linear", 4.0)

    strange = tensors | {"rope_freqs.weight": (np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32), T.F32)}
    with pytest.raises(ValueError, match=r"rope_freqs.weight must contain Llama 3's rotary factors"):
        load_gguf(write(tmp_path / "strange.gguf", "llama", strange))

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    with pytest.raises(ValueError, match=r"must be none, linear or llama3; .* has 'yarn'"):
        load_gguf(write(tmp_path / "yarn.gguf", "llama", tensors, yarn))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "mamba", small_tensors("llama"))
    with pytest.raises(ValueError, match=r"architectures llama, qwen2, .* are supported; .* has 'mamba'"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda writer: writer.add_sliding_window(128), r"attention.sliding_window = 128"),
        (lambda writer: writer.add_attn_logit_softcapping(50.0), r"attn_logit_softcapping = 50.0"),
        (lambda writer: writer.add_final_logit_softcapping(30.0), r"final_logit_softcapping = 30.0"),
        (lambda writer: writer.add_rope_freq_base_swa(7.0), r"rope.freq_base_swa = 7.0"),
        (lambda writer: writer.add_attention_scale(0.3), r"attention.scale = 0.3"),
        (lambda writer: writer.add_logit_scale(0.5), r"logit_scale = 0.5"),
        (lambda writer: writer.add_causal_attention(False), r"attention.causal = False"),
        (lambda writer: writer.add_rope_scaling_attn_factors(1.2), r"rope.scaling.attn_factor = 1.2"),
        (lambda writer: writer.add_uint32("llama.new", 3), r"llama.new = 3"),
        (
            lambda writer: writer.add_rope_dimension_count(32),
            r"partial_rotary_factor = 0.5; this family has only 1.0",
        ),
        (
            lambda writer: writer.add_array("llama.attention.key_length", [1, 2]),
            r"attention.key_length must be a whole number, not \[1, 2\]",
        ),
    ],
)
def test_models_the_decoder_does_not_do_are_refused(
    more: Callable[[gguf.GGUFWriter], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_gguf(write(tmp_path / "m.gguf", "llama", small_tensors("llama"), more))


def test_a_llama_file_with_experts_is_taken_for_mixtral(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf", "llama", small_tensors("llama"), lambda writer: writer.add_expert_count(8)
    )
    with pytest.raises(ValueError, match=r"lacks tensors: blk.0.ffn_down_exps.weight"):
        load_gguf(path)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_sliding_window(0)
        writer.add_logit_scale(1.0)
        writer.add_causal_attention(True)
        writer.add_rope_freq_base_swa(50000.0)
        writer.add_vocab_size(VOCAB)

    plain = gguf_architecture(write(tmp_path / "plain.gguf", "llama", small_tensors("llama")))
    assert gguf_architecture(write(tmp_path / "m.gguf", "llama", small_tensors("llama"), more)) == plain


@pytest.mark.parametrize("none", [2**32 - 1, -1])
def test_special_tokens_that_the_file_says_there_are_none_of(none: int, tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        add = writer.add_int32 if none < 0 else writer.add_uint32
        add("tokenizer.ggml.padding_token_id", none)
        add("tokenizer.ggml.eot_token_id", none)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 7)

    arch = gguf_architecture(write(tmp_path / "m.gguf", "llama", small_tensors("llama"), more))
    assert (arch.pad_token_id, arch.bos_token_id, arch.eos_token_ids) == (None, 4, (5, 7))


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    arch, params = load_gguf(write(tmp_path / "whole.gguf", "llama", tensors))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=8)
    write_to(writer, tensors)
    first = tmp_path / "m-00001-of-00003.gguf"
    again = load_gguf(first)
    assert again[0] == arch
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    last = tmp_path / "m-00003-of-00003.gguf"
    last.write_bytes(last.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"m-00003-of-00003.gguf is truncated"):
        load_gguf(first)


def test_other_tensor_types_are_refused_by_name(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    tensors["blk.0.ffn_up.weight"] = (np.zeros((MLP, HIDDEN), np.int8), T.I8)
    with pytest.raises(
        ValueError, match=r"F32, F16, Q4_0, .* are supported; blk.0.ffn_up.weight .* has the type I8"
    ):
        load_gguf(write(tmp_path / "m.gguf", "llama", tensors))


def test_missing_unexpected_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    lacking = {name: tensor for name, tensor in tensors.items() if name != "blk.1.attn_v.weight"}
    with pytest.raises(ValueError, match=r"lacks tensors: blk.1.attn_v.weight"):
        load_gguf(write(tmp_path / "lacking.gguf", "llama", lacking))
    extra = tensors | {"blk.0.attn_q_norm.weight": (np.ones(64, np.float32), T.F32)}
    with pytest.raises(ValueError, match=r"unexpected tensors: blk.0.attn_q_norm.weight"):
        load_gguf(write(tmp_path / "extra.gguf", "llama", extra))
    odd = tensors | {"blk.0.ffn_up.weight": (np.ones((8, HIDDEN), np.float32), T.F32)}
    with pytest.raises(ValueError, match=r"ffn_up.weight .* must have shape \(512, 256\); it has \(8, 256\)"):
        load_gguf(write(tmp_path / "odd.gguf", "llama", odd))
    headless = {name: tensor for name, tensor in tensors.items() if name != "token_embd.weight"}
    with pytest.raises(ValueError, match=r"lacks the tensor token_embd.weight"):
        load_gguf(write(tmp_path / "headless.gguf", "llama", headless))


def test_a_file_cut_in_its_weights_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"truncated: .* ends at byte \d+, the file at \d+; fetch it again"):
        load_gguf(path)


def test_without_the_gguf_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[gguf\]'"):
        load_gguf(path)
