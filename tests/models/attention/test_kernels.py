import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from reference import attention

from quatrain.models.attention import kernels
from quatrain.models.attention.kernels import choose_attention, pallas_attention, splash_attention
from quatrain.models.families import builtin_architecture
from quatrain.models.layers import attention_mask

TINY = builtin_architecture("tiny", 100, ())
CAPPED = dataclasses.replace(TINY, family="gemma2", attention_softcap=50.0)
WINDOWED = dataclasses.replace(
    TINY, family="gemma3_text", sliding_window=512, layer_types=("full_attention", "sliding_attention") * 2
)
DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu"),
}


def packed_rows(rows, T):
    """Segment ids and positions [B, T] of rows of segments of these lengths, padding behind them."""
    segments, positions = np.zeros((2, len(rows), T), np.int32)
    for row, lengths in enumerate(rows):
        used = sum(lengths)
        segments[row, :used] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        positions[row, :used] = np.concatenate([np.arange(n) for n in lengths]) if lengths else []
    return jnp.asarray(segments), jnp.asarray(positions)


def assert_equals_dense_attention(kernel, rows, T, H, window, cap):
    """Output and gradients of real tokens, whatever gradient reaches the padding; and all is finite."""
    segments, positions = packed_rows(rows, T)
    B, N, K = len(rows), 4, 2
    keys = jax.random.split(jax.random.key(T + H), 4)
    q, dy = (jax.random.normal(key, (B, T, N, H)) for key in keys[:2])
    k, v = (jax.random.normal(key, (B, T, K, H)) for key in keys[2:])
    real = (segments != 0)[:, :, None, None]

    def dense(q, k, v):
        mask = attention_mask(positions, positions, segments, segments, window)
        return attention(q, k, v, mask, cap)

    def fused(q, k, v):
        return kernel(q, k, v, segments, window=window, cap=cap)

    def output_and_gradients(f, dy):
        y, vjp = jax.vjp(f, q * H**-0.5, k, v)
        return y, *vjp(dy)

    expected = jax.jit(partial(output_and_gradients, dense))(dy * real)
    got = jax.jit(partial(output_and_gradients, fused))(dy)
    for name, x, wanted in zip(("y", "dq", "dk", "dv"), got, expected, strict=True):
        assert np.isfinite(x).all(), name
        np.testing.assert_allclose(x * real, wanted * real, rtol=2e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kernel", "T", "H", "window", "cap"),
    [
        (pallas_attention, 200, 64, None, None),
        (pallas_attention, 140, 48, None, None),
        (splash_attention, 300, 64, None, None),
        (splash_attention, 200, 48, None, 3.0),
        (splash_attention, 300, 96, 20, None),
        (splash_attention, 200, 64, 150, 3.0),
    ],
)
def test_kernels_equal_dense_attention_in_packed_rows(kernel, T, H, window, cap):
    rows = [(1, T - 120, 50), ()]
    assert_equals_dense_attention(partial(kernel, interpret=True), rows, T, H, window, cap)


@pytest.mark.parametrize("window", [None, 1, 7])
def test_the_call_of_cudnn_equals_dense_attention_in_rows_of_one_segment(window):
    kernel = partial(kernels._one_segment_attention, implementation="xla")
    assert_equals_dense_attention(kernel, [(13,), (20,), (1,), ()], 20, 16, window, None)


def test_cudnn_attention_asks_for_cudnn(monkeypatch):
    asked = []

    def dot_product_attention(q, k, v, **options):
        asked.append(options["implementation"])
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    x = jnp.ones((1, 3, 2, 8))
    kernels.cudnn_attention(x, x, x, jnp.ones((1, 3), jnp.int32), window=None, cap=None)
    assert asked == ["cudnn"]


@pytest.mark.parametrize(
    ("kernel", "platform", "H", "window", "cap", "call"),
    [
        (pallas_attention, "cuda", 8, None, None, "triton"),
        (pallas_attention, "cuda", 96, None, None, "triton"),
        (splash_attention, "tpu", 64, None, None, "tpu_custom_call"),
        (splash_attention, "tpu", 256, 100, 50.0, "tpu_custom_call"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_kernels_and_their_gradients_lower_for_their_platform(kernel, platform, H, window, cap, call, dtype):
    q, k = (jax.ShapeDtypeStruct((2, 300, heads, H), dtype) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct((2, 300), jnp.int32)

    def output_and_gradients(q, k, v, segments):
        y, vjp = jax.vjp(lambda q, k, v: kernel(q, k, v, segments, window=window, cap=cap), q, k, v)
        return y, *vjp(y)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform])):
        traced = jax.jit(output_and_gradients).trace(q, k, k, segments)
        lowered = traced.lower(lowering_platforms=(platform,))
    assert [(x.shape, x.dtype) for x in lowered.out_info] == [(x.shape, x.dtype) for x in (q, q, k, k)]
    assert call in lowered.as_text()


@pytest.mark.parametrize(
    ("arch", "platform", "dtype", "packed", "chosen"),
    [
        (TINY, "cpu", "float32", True, "xla"),
        (TINY, "METAL", "float32", False, "xla"),
        (TINY, "gpu", "bfloat16", False, "cudnn"),
        (TINY, "gpu", "bfloat16", True, "pallas"),
        (TINY, "gpu", "float32", False, "pallas"),
        (dataclasses.replace(TINY, head_dim=20), "gpu", "bfloat16", False, "pallas"),
        (dataclasses.replace(TINY, head_dim=256), "gpu", "bfloat16", False, "xla"),
        (CAPPED, "gpu", "bfloat16", False, "xla"),
        (WINDOWED, "gpu", "bfloat16", False, "cudnn"),
        (WINDOWED, "gpu", "bfloat16", True, "xla"),
        (dataclasses.replace(TINY, sliding_window=512), "gpu", "bfloat16", True, "pallas"),
        (CAPPED, "tpu", "float32", True, "splash"),
        (WINDOWED, "tpu", "bfloat16", True, "splash"),
    ],
)
def test_auto_takes_the_first_kernel_that_supports_the_mask(arch, platform, dtype, packed, chosen):
    assert choose_attention("auto", arch, platform=platform, dtype=dtype, packed=packed) == chosen
    if chosen != "xla":
        assert choose_attention(chosen, arch, platform=platform, dtype=dtype, packed=packed) == chosen
    assert choose_attention("xla", arch, platform=platform, dtype=dtype, packed=packed) == "xla"


@pytest.mark.parametrize(
    ("name", "arch", "platform", "dtype", "packed", "message"),
    [
        ("flash", TINY, "gpu", "bfloat16", False, "must be auto, xla, cudnn, pallas, splash; got 'flash'"),
        ("cudnn", TINY, "cpu", "bfloat16", False, "cudnn needs a GPU, but JAX uses the platform cpu; set"),
        ("pallas", TINY, "tpu", "bfloat16", False, "pallas needs a GPU, but JAX uses the platform tpu; set"),
        ("splash", TINY, "gpu", "bfloat16", False, "splash needs a TPU, but JAX uses the platform gpu; set"),
        (
            "cudnn",
            CAPPED,
            "gpu",
            "bfloat16",
            False,
            r"cudnn cannot apply a soft-cap .*\(gemma2, cap 50\); set",
        ),
        ("pallas", CAPPED, "gpu", "float32", True, "pallas cannot apply a soft-cap"),
        ("pallas", WINDOWED, "gpu", "float32", True, r"a sliding window \(gemma3_text, window 512\); set"),
        ("cudnn", TINY, "gpu", "bfloat16", True, "cannot keep the segments of a packed row apart; set"),
        ("cudnn", TINY, "gpu", "float32", False, "cannot compute in float32, only in bfloat16 or float16"),
        (
            "cudnn",
            dataclasses.replace(TINY, head_dim=20),
            "gpu",
            "bfloat16",
            False,
            r"multiple of 8 elements \(llama, head_dim 20\)",
        ),
        (
            "pallas",
            dataclasses.replace(TINY, head_dim=256),
            "gpu",
            "bfloat16",
            False,
            r"more than 128 elements \(llama, head_dim 256\); set model.attention to auto or xla",
        ),
    ],
)
def test_a_kernel_that_cannot_is_an_error(name, arch, platform, dtype, packed, message):
    with pytest.raises(ValueError, match=message):
        choose_attention(name, arch, platform=platform, dtype=dtype, packed=packed)
