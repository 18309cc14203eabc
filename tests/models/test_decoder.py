import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed, of_golden
from goldens import CASES, read_golden, weights_crc

from quatrain.models.architecture import BOTH
from quatrain.models.decoder import forward, logits
from quatrain.models.families import Architecture, builtin_architecture
from quatrain.models.params import init_params
from quatrain.models.rope import Rope
from quatrain.weights.hf import load_hf

TOLERANCE = 1e-4


def whole(params, arch, ids, positions, segments, dtype=jnp.float32, remat="none"):
    hidden = forward(params, arch, ids, positions, segments, dtype=dtype, remat=remat).hidden
    return logits(params, arch, hidden)


run = jax.jit(whole, static_argnames=("arch", "dtype", "remat"))


@functools.cache
def small_model() -> tuple[Architecture, dict]:
    """A model with every kind of layer: sliding and full, q/k norms, post norms, softcaps, biases."""
    arch = changed(
        builtin_architecture("tiny", 50, (1,)),
        hidden_size=32,
        width=48,
        windows=(4, None),
        head_dim=8,
        sliding_rope=Rope(100.0),
        qk_norm=True,
        norms=BOTH,
        qkv_bias=True,
        embedding_scale=6.0,
        softcap=5.0,
        final_softcap=10.0,
    )
    return arch, init_params(arch, jax.random.key(0))


def rows(*lengths: int, vocab: int = 50, seed: int = 0):
    """Right-padded rows of these lengths: ids, positions, segments."""
    shape = (len(lengths), max(lengths))
    ids = np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return ids, positions, (positions < np.asarray(lengths)[:, None]).astype(np.int32)


LIKE_OTHERS = (
    "gemma3_text_rope_linear",
    "qwen3_sliding",
    "qwen3_yarn",
    "smollm3_sliding",
    "qwen3_next",
    "qwen3_5_text_biases",
)
"""Each has features that other cases have, together; `test_families.py` reads and writes their config too."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in LIKE_OTHERS)) for case in CASES]
)
def test_logits_are_those_of_transformers(case, tmp_path):
    golden = read_golden(case)
    assert weights_crc(golden.weights()) == golden.weights_crc
    arch, params = load_hf(golden.write_model(tmp_path / "model"))
    ids, positions, segments = golden.input_ids, golden.position_ids, golden.attention_mask
    real = segments > 0

    ours = run(params, arch.for_length(ids.shape[1]), ids, positions, segments)
    assert np.abs(np.asarray(ours) - golden.logits)[real].max() < TOLERANCE


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama_rope_llama3", {"rope": Rope(5e3)}),
        ("llama_rope_linear", {"rope": Rope(1e4)}),
        ("qwen2_sliding", {"windows": (None, 8)}),
        ("qwen3_sliding", {"windows": (None, None)}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scale": None}),
        ("gemma3_text", {"rope": Rope(1e6)}),
    ],
)
@pytest.mark.slow
def test_goldens_notice_a_missing_feature(case, change, tmp_path):
    golden = read_golden(case)
    arch, params = load_hf(golden.write_model(tmp_path / "model"))
    other = changed(arch, **change)
    ours = run(params, other, golden.input_ids, golden.position_ids, golden.attention_mask)
    assert np.abs(np.asarray(ours) - golden.logits)[golden.attention_mask > 0].max() > 100 * TOLERANCE


def test_packed_segments_equal_separate_rows():
    arch, params = small_model()
    ids, positions, segments = rows(5, 8)
    separate = run(params, arch, ids, positions, segments)
    lengths = segments.sum(1)
    padding = np.zeros(3, np.int32)
    packed_ids = np.concatenate([*(row[:n] for row, n in zip(ids, lengths)), padding])[None]
    packed_positions = np.concatenate([*map(np.arange, lengths), padding])[None].astype(np.int32)
    packed_segments = np.repeat([1, 2, 0], [*lengths, 3])[None].astype(np.int32)
    packed = run(params, arch, packed_ids, packed_positions, packed_segments)[0]
    start = 0
    for row, n in zip(separate, lengths):
        np.testing.assert_allclose(packed[start : start + n], row[:n], atol=1e-5)
        start += n


def test_packed_segments_may_be_laid_out_in_any_order():
    arch, params = small_model()
    ids, positions, segments = rows(8, 8)
    separate = np.asarray(run(params, arch, ids, positions, segments))
    woven = np.stack([ids[0], ids[1]], axis=1).reshape(1, -1)
    packed = run(
        params,
        arch,
        woven,
        np.repeat(np.arange(8, dtype=np.int32), 2)[None],
        np.tile(np.int32([1, 2]), 8)[None],
    )
    np.testing.assert_allclose(packed[0].reshape(8, 2, -1).transpose(1, 0, 2), separate, atol=1e-5)


def test_padding_changes_nothing_and_gives_no_nan():
    arch, params = small_model()
    ids, positions, segments = rows(5, 8)
    padded = run(params, arch, ids, positions, segments)
    other = np.where(segments > 0, ids, 7)
    np.testing.assert_array_equal(run(params, arch, other, positions, segments)[0, :5], padded[0, :5])
    assert bool(jnp.isfinite(run(params, arch, ids, positions, np.zeros_like(ids))).all())


@pytest.mark.slow
def test_remat_gives_the_same_gradient():
    """The quick tests have `layer` in `equivalence/test_routing_replay.py`, and `dots` in
    `equivalence/test_lora_gradient.py`."""
    arch, params = small_model()
    inputs = rows(5, 8)

    @partial(jax.jit, static_argnames="remat")
    @jax.grad
    def gradient(params, remat):
        return jnp.sum(jax.nn.log_softmax(whole(params, arch, *inputs, remat=remat))[..., 3])

    plain = gradient(params, remat="none")
    for remat in ("dots", "layer"):
        again = gradient(params, remat=remat)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)
    assert float(jnp.abs(plain["layers"][0]["qkv"]).max()) > 0


@pytest.mark.slow
def test_remat_of_parts_computes_no_product_again():
    """Those with weights, four a layer, are what whole layers compute again; no copies of what is kept."""
    arch, params = small_model()
    inputs = rows(5, 8)

    def operations(remat):
        gradient = jax.grad(lambda params: whole(params, arch, *inputs, remat=remat).sum())
        text = str(jax.make_jaxpr(gradient)(params))
        assert "reduce_precision" not in text
        return text.count(" dot_general[")

    assert operations("none") == operations("dots")
    assert operations("layer") >= operations("dots") + 4 * arch.num_layers


def test_remat_computes_attention_of_a_kernel_again():
    """What kernels would keep is larger than queries, keys and values: heads padded or repeated."""
    arch, params = small_model()
    arch = changed(arch, num_layers=1, windows=(None,), softcap=None)
    params = {**params, "layers": params["layers"][:1]}
    ids, positions, segments = rows(128)

    def kernels(remat):
        def loss(params):
            kernel = {"attention": "splash", "packed": False}
            return forward(params, arch, ids, positions, segments, remat=remat, **kernel).hidden.sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("pallas_call[")

    assert kernels("dots") == kernels("layer") == kernels("none") + 1


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    arch, params = small_model()
    inputs = rows(5, 8)
    hidden = jax.eval_shape(lambda p: forward(p, arch, *inputs, dtype=jnp.bfloat16).hidden, params)
    assert hidden.dtype == jnp.bfloat16
    rough, exact = run(params, arch, *inputs, dtype=jnp.bfloat16), run(params, arch, *inputs)
    assert rough.dtype == jnp.float32
    error = np.abs(np.asarray(rough) - np.asarray(exact)).max()
    assert 0 < error < 0.1 * np.asarray(exact).std() + 0.05


@pytest.mark.slow
def test_sinks_in_bfloat16_are_read_as_float32():
    arch = of_golden("gpt_oss", num_layers=1)
    half = init_params(arch, jax.random.key(0), jnp.bfloat16)
    inputs = rows(5, 8, vocab=arch.vocab_size)
    expected = run(jax.tree.map(lambda x: x.astype(jnp.float32), half), arch, *inputs, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(run(half, arch, *inputs, dtype=jnp.bfloat16), expected)
    loss = jax.grad(lambda p: jnp.square(whole(p, arch, *inputs, dtype=jnp.bfloat16)).sum())
    found = jax.jit(loss)(half)["layers"][0]["sinks"]
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32)).min() > 0


def test_tied_logits_use_the_embeddings():
    arch = changed(builtin_architecture("tiny", 5, ()), hidden_size=4, final_softcap=2.0)
    params = {"embed": jnp.arange(20.0).reshape(5, 4) / 10}
    hidden = jnp.array([1.0, 0.0, -1.0, 2.0])
    # embed @ hidden = [0.4, 1.2, 2.0, 2.8, 3.6]
    expected = 2 * np.tanh(np.array([0.4, 1.2, 2.0, 2.8, 3.6]) / 2)
    np.testing.assert_allclose(logits(params, arch, hidden), expected, rtol=1e-6)
