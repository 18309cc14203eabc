"""Kernels are compiled and compared with `xla` before a run uses them."""

import logging

import jax
import jax.numpy as jnp
import pytest
from architectures import changed

from quatrain.models import attention
from quatrain.models import probe as module
from quatrain.models.attention import kernels
from quatrain.models.families import builtin_architecture
from quatrain.models.probe import probe_attention, trusted_attention

ARCH = changed(builtin_architecture("tiny", 100, ()), family="gemma3_text", windows=(None, 512) * 2)


def right(q, k, v, *, window, cap):
    return kernels.cudnn_attention(q, k, v, window=window, cap=cap, implementation="xla")


def without_window(q, k, v, *, window, cap):
    return right(q, k, v, window=None, cap=cap)


def with_half_gradients(q, k, v, *, window, cap):
    y = right(q, k, v, window=window, cap=cap)
    return (y + jax.lax.stop_gradient(y)) / 2


def not_finite(q, k, v, *, window, cap):
    return right(q, k, v, window=window, cap=cap) * jnp.nan


def without_plans(q, k, v, *, window, cap):
    raise RuntimeError("no execution plan\nand more")


@pytest.fixture
def gpu(monkeypatch):
    """Sets the kernels that the names cudnn and tokamax stand for."""
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "compared", module.compared.__wrapped__)

    def use(**functions):
        for name, function in functions.items():
            monkeypatch.setitem(attention._CAUSAL, name, function)

    return use


def choose(name):
    return trusted_attention(name, ARCH, platform="gpu", dtype="bfloat16")


def test_auto_takes_the_first_kernel_that_computes_what_xla_does(gpu, caplog):
    gpu(cudnn=without_plans, tokamax=right)
    with caplog.at_level(logging.INFO, module.logger.name):
        assert choose("auto") == "tokamax"
    assert caplog.messages == ["attention: tokamax; not cudnn: RuntimeError: no execution plan"]


def test_xla_is_left_where_no_kernel_can_be_trusted(gpu, caplog):
    gpu(cudnn=without_window, tokamax=with_half_gradients)
    with caplog.at_level(logging.INFO, module.logger.name):
        assert choose("auto") == "xla"
    (message,) = caplog.messages
    assert "; not cudnn: its output differs from that of xla by 0." in message
    assert "; not tokamax: its gradient of queries differs from that of xla by 0.5" in message


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (without_plans, r"RuntimeError: no execution plan; set"),
        (not_finite, r"its output differs from that of xla by nan of its norm"),
        (
            with_half_gradients,
            r"by 0\.5 of its norm, and rounding explains at most 0\.02; set model\.attention",
        ),
    ],
)
def test_a_named_kernel_that_cannot_be_trusted_is_an_error(gpu, kernel, reason):
    gpu(cudnn=kernel)
    with pytest.raises(ValueError, match=f"model.attention=cudnn must compute what xla computes.*{reason}"):
        choose("cudnn")


def test_a_named_kernel_that_is_right_is_used(gpu):
    gpu(cudnn=right)
    assert choose("cudnn") == "cudnn"


def test_xla_is_not_compared_with_itself(monkeypatch):
    monkeypatch.delattr(module.AttentionCase, "results")
    assert trusted_attention("auto", ARCH, platform="cpu", dtype="float32") == "xla"
    assert trusted_attention("xla", ARCH, platform="gpu", dtype="float32") == "xla"


def test_a_kernel_is_probed_once_for_models_of_one_shape(monkeypatch):
    probed = []
    monkeypatch.setattr(module.AttentionCase, "results", lambda case, *_: probed.append(case.window) or {})
    for pairs in (1, 2):
        probe_attention("cudnn", changed(ARCH, windows=(None, 512) * pairs, head_dim=24), "bfloat16")
    assert probed == [None, None, 50, 50]  # each with the reference
