"""Adapters of experts as peft has them: what it adds to a parameter is what quatrain merges into it."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from architectures import of_golden
from safetensors.numpy import load_file

from quatrain.models.architecture import LoRA
from quatrain.models.lora import adapters_of, merged, with_adapters, with_trained
from quatrain.models.params import init_params
from quatrain.weights.adapter import read_adapter, save_adapter

EXPERTS = ("experts_gate_up", "experts_down")


def _saved(case, targets, folder):
    """(parameters, merged parameters, adapter_config.json, tensors) of adapters, neither A nor B zero."""
    arch = replace(of_golden(case), lora=LoRA(2, 3.0, targets))
    params = with_adapters(init_params(replace(arch, lora=None), jax.random.key(0)), arch, jax.random.key(1))
    leaves, structure = jax.tree.flatten(adapters_of(params))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    params = with_trained(params, jax.tree.unflatten(structure, drawn), arch)
    save_adapter(folder, arch, params, base="base")
    config = json.loads((folder / "adapter_config.json").read_text())
    return params, merged(params, arch), config, load_file(folder / "adapter_model.safetensors")


def _added_by_peft(a, b, num_experts):
    """[E, out, in], as `ParamWrapper.get_delta_weight` of peft 0.21 computes it, with alpha / r = 1.5."""
    a, b = a.reshape(num_experts, -1, a.shape[-1]), b.reshape(len(b), -1, num_experts)
    return 1.5 * np.einsum("ore,eri->eoi", b, a)


@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_peft_adds_to_experts_what_is_merged_into_them(case, tmp_path):
    params, whole, config, tensors = _saved(case, ("qkv", *EXPERTS), tmp_path)
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj"]
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    layer = next(i for i, layer in enumerate(params["layers"]) if "experts_down" in layer)
    module = f"base_model.model.model.layers.{layer}.mlp.experts"
    for name, path in (("experts_down", module), ("experts_gate_up", f"{module}.base_layer")):
        change = np.asarray(whole["layers"][layer][name] - params["layers"][layer][name])
        if name == "experts_gate_up":  # [E, 2, F, D]: gpt-oss has gate and up in turns
            change = change.swapaxes(1, 2) if case == "gpt_oss" else change
            change = change.reshape(len(change), -1, change.shape[-1])
        a, b = (tensors[f"{path}.lora_{end}.weight"] for end in "AB")
        np.testing.assert_allclose(_added_by_peft(a, b, len(change)), change, atol=2e-5)


def test_a_server_says_that_it_reads_no_adapters_of_experts(tmp_path):
    """A folder that quatrain had exported ended in an AssertionError, which a server answers as its fault."""
    _saved("mixtral", ("qkv", *EXPERTS), tmp_path)
    with pytest.raises(ValueError, match="experts_gate_up, experts_down; give the folder of the merged"):
        read_adapter(tmp_path, of_golden("mixtral"))


def test_one_parameter_is_not_wrapped(tmp_path):
    _, _, config, tensors = _saved("mixtral", ("experts_gate_up",), tmp_path)
    assert (config["target_modules"], config["target_parameters"]) == ([], ["mlp.experts.gate_up_proj"])
    assert {name.split("experts.")[1] for name in tensors} == {"lora_A.weight", "lora_B.weight"}


def test_dense_layers_beside_experts_are_parameters_where_peft_takes_their_modules_for_experts(tmp_path):
    _, _, config, tensors = _saved("qwen3_moe", ("o", "gate_up", "down"), tmp_path)
    assert config["target_modules"] == ["o_proj"]
    names = ("gate_proj", "up_proj", "down_proj")
    assert config["target_parameters"] == [f"mlp.{name}.weight" for name in names]
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in tensors
