import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.models.families import architecture_to_hf, builtin_architecture
from quatrain.models.params import init_params
from quatrain.weights.hf import model_directory, save_hf
from quatrain.weights.load_model import load_architecture, load_classifier, load_model


def test_builtin_model():
    model = load_model("builtin:tiny", dtype="bfloat16", seed=3, vocab_size=20, eos_token_ids=(4,))
    assert model.arch.eos_token_ids == (4,)
    assert model.params["embed"].shape == (20, 128)
    assert model.params["embed"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="pass vocab_size"):
        load_model("builtin:tiny")
    with pytest.raises(ValueError, match="the builtin models are: builtin:tiny"):
        load_model("builtin:small", vocab_size=20)


def test_saved_model_loads_back(tmp_path):
    model = load_model("builtin:tiny", vocab_size=20, eos_token_ids=(4,))
    save_hf(tmp_path / "saved", model.arch, model.params)
    again = load_model(str(tmp_path / "saved"))
    assert again.arch == model.arch
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_begins_as_the_language_model_with_a_head_of_zeros(tmp_path, tied):
    """The same body whether it is built in or from a folder, and no head of the vocabulary beside it."""
    arch = dataclasses.replace(builtin_architecture("tiny", 20, (4,)), tie_embeddings=tied)
    params = init_params(arch, jax.random.key(3))
    save_hf(tmp_path, arch, params)
    for seed in (3, 3) if tied else ():
        built = load_model("builtin:tiny", seed=seed, vocab_size=20, eos_token_ids=(4,), head="value_head")
        _check_begun(built, params)
    found = load_model(str(tmp_path), head="value_head")
    _check_begun(found, params)
    save_hf(tmp_path, found.arch, {**found.params, "score": found.params["score"] + 2})
    np.testing.assert_array_equal(load_model(str(tmp_path), head="value_head").params["score"], 2)


def _check_begun(model, params):
    assert model.arch.head == "value_head"
    own = dict(model.params)
    np.testing.assert_array_equal(own.pop("score"), np.zeros((1, 128)))
    jax.tree.map(np.testing.assert_array_equal, own, {k: v for k, v in params.items() if k != "lm_head"})


def test_an_architecture_needs_no_weights(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    arch = builtin_architecture("tiny", 20, (4,))
    (tmp_path / "config.json").write_text(json.dumps(architecture_to_hf(arch)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 7]}')
    assert load_architecture(str(tmp_path)) == dataclasses.replace(arch, eos_token_ids=(4, 7))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    assert load_architecture("owner/name") == load_architecture(str(tmp_path))

    def without(model_id, name):
        if name == "generation_config.json":
            raise EntryNotFoundError("404")
        return str(tmp_path / "other" / name)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(architecture_to_hf(arch)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", without)
    assert load_architecture("owner/name") == arch
    assert load_architecture("builtin:tiny", vocab_size=20, eos_token_ids=(4,)) == arch
    with pytest.raises(ValueError, match="pass vocab_size"):
        load_architecture("builtin:tiny")
    with pytest.raises(ValueError, match="no-such-model does not exist"):
        load_architecture("no-such-model")


def test_weights_of_a_model_that_is_no_classifier_are_not_downloaded(monkeypatch, tmp_path):
    import huggingface_hub

    arch = builtin_architecture("tiny", 20, (4,))
    (tmp_path / "config.json").write_text(json.dumps(architecture_to_hf(arch)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(ValueError, match="…ForSequenceClassification; it names LlamaForCausalLM"):
        load_classifier("owner/name")


def test_missing_directory_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(ValueError, match="nothing-here does not exist"):
        load_model(str(tmp_path / "nothing-here"))
    with pytest.raises(ValueError, match="the model must be a directory; no-such-model does not exist"):
        load_model("no-such-model")


def test_hub_id_without_a_network(monkeypatch):
    import huggingface_hub

    def unreachable(model_id, *_, **__):
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    message = r"is not a local directory.*\(.*ConnectionError: Name or service not known\): check the name"
    with pytest.raises(ValueError, match=message):
        load_model("owner/name")


def test_hub_id_is_resolved_to_its_snapshot(monkeypatch, tmp_path):
    import huggingface_hub

    arch = builtin_architecture("tiny", 20, (4,))
    (tmp_path / "config.json").write_text(json.dumps(architecture_to_hf(arch)))
    asked = {}

    def download(model_id, allow_patterns):
        asked[model_id] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_directory("owner/name") == tmp_path
    assert "*.safetensors" in asked["owner/name"]


def test_no_weights_of_an_unsupported_model_are_fetched(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(ValueError, match="mamba"):
        model_directory("owner/name")


def test_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = load_model("builtin:tiny", vocab_size=20, eos_token_ids=(4,))
    save_hf(tmp_path / "saved", model.arch, model.params)
    assert load_model("~/saved").arch == model.arch
    with pytest.raises(ValueError, match=f"there is no GGUF file {tmp_path}/a.gguf"):
        load_model("~/a.gguf")
