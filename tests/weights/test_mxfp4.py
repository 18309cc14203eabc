"""Packed experts of gpt-oss, and files with the matrices of all experts of a layer as one tensor."""

import jax
import numpy as np
import pytest
from goldens import read_golden
from safetensors.numpy import load_file, save_file

from quatrain.weights.hf import load_hf, save_hf
from quatrain.weights.mxfp4 import VALUES, dequantised

PACKED = ("gate_up_proj", "down_proj")


def test_a_byte_has_two_numbers_and_the_lower_half_is_the_first():
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, 0], blocks[0, 15] = 0x92, 0x7F  # 1 and -0.5; -6 and 6
    numbers = dequantised(blocks, np.array([129], np.uint8))
    assert numbers.shape == (32,)
    assert numbers[[0, 1, 2, 30, 31]].tolist() == [4, -2, 0, -24, 24]
    np.testing.assert_array_equal(dequantised(blocks, np.array([126], np.uint8)), numbers / 8)


def _pack(weights):
    """(the tensors with random packed experts, what these are as matrices [experts, in, out])."""
    rng, stored, plain = np.random.default_rng(0), dict(weights), dict(weights)
    for name in weights:
        if name.endswith(PACKED):
            experts, width, rows = weights[name].shape
            blocks = rng.integers(0, 256, (experts, rows, width // 32, 16), np.uint8)
            scales = rng.integers(124, 128, blocks.shape[:-1], np.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, rows, -1, 32).astype(int)
            numbers = np.where(codes > 7, -1, 1) * VALUES[codes % 8] * 2.0 ** (scales[..., None] - 127.0)
            plain[name] = np.ascontiguousarray(
                numbers.reshape(experts, rows, width).swapaxes(1, 2), np.float32
            )
    return stored, plain


@pytest.fixture
def folder(tmp_path):
    """A gpt-oss whose experts have 32 inputs and 64 columns, so that whole blocks fit."""
    golden = read_golden("gpt_oss")
    config = golden.config | {"intermediate_size": 64}
    shapes = {}
    for name, shape in golden.shapes.items():
        wide = {"gate_up_proj": (6, 32, 128), "gate_up_proj_bias": (6, 128), "down_proj": (6, 64, 32)}
        shapes[name] = wide.get(name.split(".")[-1], shape)
    return type(golden)(config, shapes, 0, *[np.zeros(0)] * 4).write_model(tmp_path / "plain")


def _rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def test_packed_experts_are_read_as_the_matrices_that_they_stand_for(folder, tmp_path):
    stored, plain = _pack(load_file(folder / "model.safetensors"))
    _rewrite(folder, lambda _: plain)
    arch, expected = load_hf(folder)
    _rewrite(folder, lambda _: stored)
    found_arch, found = load_hf(folder)
    assert found_arch == arch
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    save_hf(tmp_path / "export", found_arch, found)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == plain.keys()
    np.testing.assert_array_equal(
        exported["model.layers.1.mlp.experts.down_proj"], plain["model.layers.1.mlp.experts.down_proj"]
    )


def test_packed_experts_of_another_shape_are_an_error(folder):
    stored, _ = _pack(load_file(folder / "model.safetensors"))
    name = "model.layers.0.mlp.experts.down_proj_scales"
    _rewrite(folder, lambda _: stored | {name: stored[name][:5]})
    with pytest.raises(ValueError, match=r"down_proj_scales .* must be MXFP4 of shape \(6, 32, 2\), U8"):
        load_hf(folder)


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe", "qwen2_moe", "qwen3_next_experts"])
def test_matrices_of_all_experts_may_be_one_tensor(case, tmp_path):
    folder = read_golden(case).write_model(tmp_path)
    arch, expected = load_hf(folder)

    def stacked(tensors):
        apart = {name for name in tensors if ".experts." in name}
        found = {name: tensor for name, tensor in tensors.items() if name not in apart}
        for layer in sorted({name.split(".experts.")[0] for name in apart}):
            of = [
                [tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(8)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = map(np.stack, of)
            found |= {f"{layer}.experts.gate_up_proj": np.concatenate([gate, up], axis=1)}
            found |= {f"{layer}.experts.down_proj": down}
        return found

    _rewrite(folder, stacked)
    found_arch, found = load_hf(folder)
    assert found_arch == arch
    jax.tree.map(np.testing.assert_array_equal, found, expected)
