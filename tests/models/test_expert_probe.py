"""Products of experts are compiled and compared with `blocks` before a run uses them."""

import logging

import jax
import pytest
from architectures import of_golden

from quatrain.models import expert_products
from quatrain.models import probe as module
from quatrain.models.architecture import LoRA
from quatrain.models.probe import trusted_experts

ARCH = of_golden("qwen3_moe")


def right(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes)


def of_the_next_expert(x, w, sizes):
    return right(x, w[::-1], sizes)


def with_half_gradients(x, w, sizes):
    y = right(x, w, sizes)
    return (y + jax.lax.stop_gradient(y)) / 2


def without_kernel(x, w, sizes):
    raise RuntimeError("no kernel\nand more")


@pytest.fixture
def product(monkeypatch):
    """Sets the functions that the names tokamax and ragged stand for, and forgets what was probed."""
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)

    def use(**functions):
        module.compared.cache_clear()
        for name, function in functions.items():
            monkeypatch.setitem(expert_products._RAGGED, name, function)

    yield use
    module.compared.cache_clear()


def choose(name, platform="gpu", arch=ARCH, dtype="float32"):
    return trusted_experts(name, arch, platform=platform, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_takes_the_first_that_computes_what_blocks_do(product, caplog, dtype):
    product(tokamax=right)
    assert choose("auto", dtype=dtype) == "tokamax"
    product(tokamax=without_kernel)
    with caplog.at_level(logging.INFO, module.logger.name):
        assert choose("auto", dtype=dtype) == "blocks"
    assert caplog.messages == ["experts: blocks; not tokamax: RuntimeError: no kernel"]


@pytest.mark.parametrize(
    ("wrong", "part"), [(of_the_next_expert, "output"), (with_half_gradients, "gradient of rows")]
)
def test_what_computes_something_else_is_not_taken(product, wrong, part):
    product(tokamax=wrong, ragged=wrong)
    assert choose("auto") == choose("auto", "tpu") == "blocks"
    with pytest.raises(ValueError, match=f"model.experts=tokamax cannot be used: its {part} differs from"):
        choose("tokamax")


def test_a_cpu_takes_blocks_and_has_no_kernel(product):
    assert choose("auto", "cpu") == "blocks"
    assert choose("ragged", "cpu") == "ragged"
    with pytest.raises(ValueError, match="it needs a GPU or a TPU, but JAX uses the platform cpu"):
        choose("tokamax", "cpu")


def test_a_package_that_is_not_installed_is_named(monkeypatch, caplog):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, module.logger.name):
        assert choose("auto") == "blocks"
    assert "not tokamax: it needs `pip install -e '.[gpu]'`" in caplog.text
    with pytest.raises(
        ValueError, match=r"needs `pip install -e '\.\[gpu\]'` in .*; set model\.experts to auto"
    ):
        choose("tokamax")


def test_a_model_without_experts_takes_no_product():
    dense = of_golden("qwen3")
    assert choose("auto", arch=dense) == "blocks"
    with pytest.raises(ValueError, match=r"model\.experts=ragged needs a model with experts; a qwen3 model"):
        choose("ragged", arch=dense)


def test_products_of_adapters_are_probed_too():
    from dataclasses import replace

    arch = replace(ARCH, lora=LoRA(3, 3.0, ("experts_down",)))
    d, f = arch.hidden_size, arch.layers[0].mlp.width
    assert module.product_shapes(arch) == [(8, d, 2 * f), (8, f, d), (8, f, 3), (8, 3, d)]
