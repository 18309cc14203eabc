import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from packed_rows import inputs, with_branches, with_grouped_branches
from reference import attention

from quatrain.models.attention import kernels
from quatrain.models.attention.kernels import (
    candidates,
    choose_attention,
    splash_attention,
    splash_masked_attention,
)
from quatrain.models.families import builtin_architecture
from quatrain.models.layers import attention_mask

TINY = builtin_architecture("tiny", 100, ())
CAPPED = changed(TINY, family="gemma2", softcap=50.0)
WINDOWED = changed(TINY, family="gemma3_text", windows=(None, 512) * 2)
TPU = AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")


def whole_rows(lengths, T):
    """Segment ids and positions [B, T] of rows of one sequence of these lengths, padding behind it."""
    segments = (np.arange(T) < np.array(lengths)[:, None]).astype(np.int32)
    return jnp.asarray(segments), jnp.asarray(segments * np.arange(T, dtype=np.int32))


def assert_equals_dense_attention(kernel, segments, positions, branches, H, window, cap):
    """Output and gradients of real tokens; and all is finite."""
    (B, T), N, K = segments.shape, 4, 2
    keys = jax.random.split(jax.random.key(T + H), 4)
    q, dy = (jax.random.normal(key, (B, T, N, H)) for key in keys[:2])
    k, v = (jax.random.normal(key, (B, T, K, H)) for key in keys[2:])
    real = (segments != 0)[:, :, None, None]

    def dense(q, k, v):
        mask = attention_mask(positions, positions, segments, segments, window, (branches, branches))
        return attention(q, k, v, mask, cap)

    def output_and_gradients(f):
        y, vjp = jax.vjp(f, q * H**-0.5, k, v)
        return y, *vjp(dy * real)

    expected = jax.jit(partial(output_and_gradients, dense))()
    got = jax.jit(partial(output_and_gradients, kernel))()
    for name, x, wanted in zip(("y", "dq", "dk", "dv"), got, expected, strict=True):
        assert np.isfinite(x).all(), name
        np.testing.assert_allclose(x * real, wanted * real, rtol=2e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize(
    ("T", "H", "window", "cap"),
    [
        (200, 64, 150, 3.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((300, 64, None, None), (200, 48, None, 3.0), (300, 96, 20, None))
        ),
    ],
)
def test_splash_equals_dense_attention_in_rows_of_one_sequence(T, H, window, cap):
    segments, positions = whole_rows((T - 120, T), T)
    kernel = partial(splash_attention, window=window, cap=cap, interpret=True)
    assert_equals_dense_attention(kernel, segments, positions, jnp.zeros_like(segments), H, window, cap)


@pytest.mark.parametrize(
    ("split", "window", "cap"),
    [
        (with_branches, 20, 3.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, None, None), (with_grouped_branches, None, None))
        ),
    ],
)
def test_splash_takes_the_mask_of_packed_rows(split, window, cap):
    positions, segments, branches, *_ = inputs(2, 150, 4, split)
    mask = attention_mask(positions, positions, segments, segments, window, (branches, branches))
    kernel = partial(splash_masked_attention, mask_BTT=mask, cap=cap, interpret=True)
    assert_equals_dense_attention(kernel, segments, positions, branches, 64, window, cap)


@pytest.mark.parametrize("window", [None, 1, 7])
def test_the_call_of_cudnn_equals_dense_attention_in_rows_of_one_sequence(window):
    segments, positions = whole_rows((13, 20, 1), 20)
    kernel = partial(kernels.cudnn_attention, window=window, cap=None, implementation="xla")
    assert_equals_dense_attention(kernel, segments, positions, jnp.zeros_like(segments), 16, window, None)


def test_cudnn_attention_asks_for_cudnn(monkeypatch):
    asked = []

    def dot_product_attention(q, k, v, **options):
        asked.append(options["implementation"])
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    x = jnp.ones((1, 3, 2, 8))
    kernels.cudnn_attention(x, x, x, window=None, cap=None)
    assert asked == ["cudnn"]


def test_tokamax_gets_the_mask_and_pads_rows_to_blocks(monkeypatch):
    asked = []

    def dot_product_attention(q, k, v, **options):
        asked.append((q.shape, options))
        return q

    module = SimpleNamespace(dot_product_attention=dot_product_attention)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    x = jnp.ones((1, 130, 2, 8))
    assert kernels.tokamax_attention(x, x, x, window=5, cap=2.0).shape == x.shape
    ((shape, options),) = asked
    assert shape == (1, 256, 2, 8)
    assert options == {
        "scale": 1.0,
        "is_causal": True,
        "local_window_size": (4, 0),
        "logits_soft_cap": 2.0,
        "implementation": "mosaic",
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("H", "window", "cap", "dtype"),
    [
        (256, 100, 50.0, jnp.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (256, 100, 50.0, jnp.float32),
                *((64, None, None, dtype) for dtype in (jnp.bfloat16, jnp.float32)),
            )
        ),
    ],
)
def test_splash_and_its_gradients_lower_for_a_tpu(masked, H, window, cap, dtype):
    q, k = (jax.ShapeDtypeStruct((2, 300, heads, H), dtype) for heads in (4, 2))
    mask = jax.ShapeDtypeStruct((2, 300, 300), jnp.bool_)

    def output_and_gradients(q, k, v, mask):
        kernel = (
            partial(splash_masked_attention, mask_BTT=mask, cap=cap)
            if masked
            else partial(splash_attention, window=window, cap=cap)
        )
        y, vjp = jax.vjp(kernel, q, k, v)
        return y, *vjp(y)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=TPU)):
        traced = jax.jit(output_and_gradients).trace(q, k, k, mask)
        lowered = traced.lower(lowering_platforms=("tpu",))
    assert [(x.shape, x.dtype) for x in lowered.out_info] == [(x.shape, x.dtype) for x in (q, q, k, k)]
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize(
    ("arch", "platform", "dtype", "order"),
    [
        (TINY, "cpu", "float32", ["xla"]),
        (TINY, "METAL", "float32", ["xla"]),
        (TINY, "gpu", "bfloat16", ["cudnn", "tokamax", "xla"]),
        (TINY, "gpu", "float32", ["xla"]),
        (changed(TINY, head_dim=20), "gpu", "bfloat16", ["xla"]),
        (changed(TINY, head_dim=256), "gpu", "bfloat16", ["tokamax", "xla"]),
        (CAPPED, "gpu", "bfloat16", ["tokamax", "xla"]),
        (WINDOWED, "gpu", "bfloat16", ["cudnn", "tokamax", "xla"]),
        (CAPPED, "tpu", "float32", ["splash", "xla"]),
    ],
)
def test_auto_takes_the_first_kernel_that_supports_the_mask(arch, platform, dtype, order, monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    assert candidates(arch, platform=platform, dtype=dtype) == order
    for name in ("auto", *order):
        chosen = choose_attention(name, arch, platform=platform, dtype=dtype)
        assert chosen == (order[0] if name == "auto" else name)


def test_tokamax_is_no_candidate_without_its_package(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert candidates(TINY, platform="gpu", dtype="bfloat16") == ["cudnn", "xla"]
    install = r"`pip install -e '\.\[gpu\]'` in the repository of quatrain"
    with pytest.raises(ValueError, match=rf"cannot be imported: it needs {install}, Python 3.12"):
        choose_attention("tokamax", TINY, platform="gpu", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "arch", "platform", "dtype", "message"),
    [
        ("flash", TINY, "gpu", "bfloat16", "must be auto, xla, cudnn, tokamax, splash; got 'flash'"),
        ("cudnn", TINY, "cpu", "bfloat16", "cudnn needs a GPU, but JAX uses the platform cpu; set"),
        ("splash", TINY, "gpu", "bfloat16", "splash needs a TPU, but JAX uses the platform gpu; set"),
        ("cudnn", CAPPED, "gpu", "bfloat16", r"cudnn cannot apply a soft-cap .*\(gemma2, cap 50\); set"),
        ("cudnn", TINY, "gpu", "float32", "cannot compute in float32, only in bfloat16 or float16"),
        (
            "cudnn",
            changed(TINY, head_dim=20),
            "gpu",
            "bfloat16",
            r"multiple of 8 elements \(llama, head_dim 20\)",
        ),
        (
            "cudnn",
            changed(TINY, head_dim=256),
            "gpu",
            "bfloat16",
            r"more than 128 elements \(llama, head_dim 256\); set model.attention to auto or xla",
        ),
    ],
)
def test_a_kernel_that_cannot_is_an_error(name, arch, platform, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose_attention(name, arch, platform=platform, dtype=dtype)
