"""Published weights: complete folders under the name of their version, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from routed_models import routed_model
from towers import CONFIGS, PROCESSORS, seeing

from quatrain.config.schema import LoraConfig, RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.models.lora import with_adapters, with_lora
from quatrain.models.params import init_params
from quatrain.rollout.publish import Folder, Stream, gathered
from quatrain.weights import hf
from quatrain.weights.hf import load_hf
from quatrain.weights.whole import Whole


def test_a_version_is_a_folder_that_loads_as_the_model(tmp_path, small_arch, small_params):
    folder = Folder(tmp_path, small_arch)
    handle = folder.publish(gathered(small_params, "float32"), 3)
    assert handle == str(tmp_path / "v000003")
    found = load_hf(handle)[1]
    jax.tree.map(np.testing.assert_array_equal, found, small_params)
    assert [path.name for path in tmp_path.iterdir()] == ["v000003"]


def test_a_folder_that_does_not_fit_leaves_nothing_and_names_the_key(
    tmp_path, small_arch, small_params, monkeypatch
):
    folder = Folder(tmp_path, small_arch)
    weights = gathered(small_params, "float32")
    first = folder.publish(weights, 1)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(OSError, match=r"rollout.weights_dir.*No space left on device.*free space"):
        folder.publish(weights, 2)
    assert [str(path) for path in tmp_path.iterdir()] == [first]


def test_a_folder_that_is_made_is_removed_and_one_that_cannot_be_is_refused(
    tmp_path, small_arch, small_params
):
    closed = []
    folder = Folder(tmp_path / "a" / "b", small_arch, on_close=lambda: closed.append(True))
    folder.publish(gathered(small_params, "float32"), 1)
    folder.close()
    assert closed == [True]
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"rollout.weights_dir must be a folder .*got .*/file: .*; name"):
        Folder(tmp_path / "file", small_arch)


def test_versions_are_replaced_discarded_and_removed(tmp_path, small_arch, small_params):
    weights = gathered(small_params, "float32")
    (tmp_path / "v000001").mkdir()
    (tmp_path / ".v000002.partial").mkdir()
    (tmp_path / "other").mkdir()
    folder = Folder(tmp_path, small_arch)
    handles = [folder.publish(weights, version) for version in (1, 2, 3)]
    folder.discard(handles[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v000002", "v000003"]
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_changes_are_held_of_the_newest_version_alone(small_arch, small_params):
    """Catches changes of all versions that are kept, each up to 0.9 of the weights, on the heap."""
    stream = Stream(small_arch, {}, kept=3)
    weights = gathered(small_params, "float32")
    published = []
    for version in range(3):
        weights = {**weights, "final_norm": weights["final_norm"] * 0.5}
        published.append(stream.publish(weights, version))
    held = [sum(len(each.changes or b"") for each in pieces.each) for pieces in published]
    assert held[:2] == [0, 0]
    assert 0 < held[2] < published[2].num_bytes
    for number, piece in enumerate(published[1].each):  # older ones are sent whole, to any receiver
        message = published[1].message("stream", number, piece.before)
        assert message is None or len(message) > piece.size
    assert published[1].num_new_bytes > published[2].num_new_bytes
    stream.close()


def test_matrices_get_the_dtype_and_vectors_keep_theirs(small_params):
    found = gathered(small_params, jnp.bfloat16)
    dtypes = {leaf.ndim == 1: leaf.dtype for leaf in jax.tree.leaves(found)}
    assert dtypes == {True: np.float32, False: jnp.bfloat16}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))


def test_routers_keep_their_dtype_as_in_the_sampler_of_the_same_process():
    arch, params = routed_model()
    found = gathered(params, jnp.bfloat16)
    router = found["layers"][0]["router"]
    assert router.dtype == np.float32
    np.testing.assert_array_equal(router, params["layers"][0]["router"])
    engine = RolloutEngine(arch, RolloutConfig(), None, stop_ids=(0,), seed=0, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, found, engine.copy_weights(params))


def test_of_a_model_with_adapters_these_alone_are_sent(small_arch, small_params):
    arch = with_lora(small_arch, LoraConfig(rank=2))
    params = with_adapters(small_params, arch, jax.random.key(0))
    found = gathered(params, jnp.bfloat16)
    assert set(found) == {"layers"}
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (found, params)]
    assert sizes[0] < sizes[1] / 4


def test_servers_get_the_text_part_of_a_model_with_a_tower(tmp_path):
    """Catches folders with tensors of a tower that their config.json does not describe."""
    arch = seeing("qwen3_vl")
    params = init_params(arch, jax.random.key(0))
    handle = Folder(tmp_path / "weights", arch).publish(gathered(params, np.float32), 1)
    found, texts = load_hf(handle)
    assert found.vision is None
    np.testing.assert_array_equal(texts["embed"], params["embed"])


def test_servers_that_see_get_the_whole_model(tmp_path):
    """Catches a tower that servers never learn of, and names that only the text model has."""
    arch = seeing("qwen3_vl")
    params = init_params(arch, jax.random.key(0))
    whole = Whole(CONFIGS["qwen3_vl"], processor=PROCESSORS["qwen3_vl"])
    handle = Folder(tmp_path / "weights", arch, whole=whole).publish(gathered(params, np.float32), 1)
    found, seen = load_hf(handle, vision="all")
    assert found.vision == arch.vision
    jax.tree.map(np.testing.assert_array_equal, seen, params)
