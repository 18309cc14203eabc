"""The page that adds a family: its code is run, and the family is loaded, sampled and exported."""

import json
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from quatrain.models import families
from quatrain.models.decoder import forward, logits
from quatrain.models.params import init_params
from quatrain.weights.hf import load_hf, save_hf

PAGE = Path(__file__).parents[2] / "docs" / "family.md"
CONFIG = {
    "model_type": "acorn",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 3,
}


@pytest.fixture
def acorn(monkeypatch):
    """The family of the page, registered."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("quatrain.models.families.acorn")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, PAGE, "exec"), vars(module))
    monkeypatch.setitem(families.FAMILIES, "acorn", module.ACORN)
    return module.ACORN


def test_the_page_adds_a_family(acorn, tmp_path):
    arch = families.architecture_from_hf(CONFIG)
    assert [kind.mixer.window for kind in arch.layers] == [3, None, 3]
    assert arch.layers[0].residual_scale == 0.5
    params = init_params(arch, jax.random.key(0))
    assert "attention_norm" not in params["layers"][0]
    save_hf(tmp_path, arch, params)
    again, loaded = load_hf(tmp_path)
    assert again == arch
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["AcornForCausalLM"]
    ids = np.arange(8, dtype=np.int32)[None]
    segments = np.ones_like(ids)
    run = jax.jit(lambda params: logits(params, arch, forward(params, arch, ids, ids, segments).hidden))
    before, after = run(params), run(loaded)
    np.testing.assert_array_equal(before, after)
    assert np.std(before) > 0.1
