"""New weights of a server whose model has a tower: the pictures are seen with the tower of the weights."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from towers import CONFIGS, PROCESSORS, seeing

from quatrain.config.derive import longest_of_run
from quatrain.config.load import load_config
from quatrain.loop.serve import weights_of
from quatrain.models.params import VISION, tensor_shapes
from quatrain.parallel.mesh import one_device
from quatrain.weights.hf import load_hf, read_architecture, save_hf


def folder_of(path, seed, tower_seed):
    """A small random Qwen3-VL."""
    arch, text = seeing("qwen3_vl"), np.random.default_rng(seed)
    tower = {name.name for name in arch.vision.tensors()}
    of_tower, tensors = np.random.default_rng(tower_seed), {}
    for name, shape in tensor_shapes(arch).items():
        prefix, drawn = ("model.", of_tower) if name in tower else ("model.language_model.", text)
        whole = f"{prefix}{name.removeprefix('model.')}" if name != "lm_head.weight" else name
        tensors[whole] = drawn.normal(size=shape).astype(np.float32)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIGS["qwen3_vl"]))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["qwen3_vl"]))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Those of a server; with other weights; with another tower; of the text part alone."""
    root = tmp_path_factory.mktemp("towers")
    made = [folder_of(root / f"{i}{tower}", i, tower) for i, tower in ((0, 0), (1, 0), (1, 1))]
    save_hf(root / "text", *load_hf(made[1]))
    return [*made, root / "text"]


def reader(folder, vision):
    config = load_config(None, [f"model.path={folder}"], {}).config
    arch = read_architecture(folder, vision).for_length(longest_of_run(config))
    return weights_of(arch, config, SimpleNamespace(mesh=one_device()))


def test_a_frozen_tower_must_be_that_of_the_server(folders):
    """The fault: text weights that were trained with another tower, whose features are never computed."""
    served, same, other, text = folders
    read = reader(served, "frozen")
    of_same, of_text = read(str(same)), read(str(text))
    assert VISION not in of_same
    assert all(map(np.array_equal, jax.tree.leaves(of_same), jax.tree.leaves(of_text)))
    with pytest.raises(ValueError, match="must have the vision tower that is served, which is frozen"):
        read(str(other))


def test_a_tower_that_is_trained_comes_with_the_weights(folders):
    served, _, other, text = folders
    read = reader(served, "all")
    assert VISION in read(str(other))
    with pytest.raises(ValueError, match="tower"):
        read(str(text))
    assert VISION not in reader(served, "none")(str(other))
