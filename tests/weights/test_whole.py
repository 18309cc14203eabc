"""Whole folders of models with towers: what is loaded of them, and what an export has."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from towers import CONFIGS, PROCESSORS, seeing

from quatrain.data.policy import Policy
from quatrain.models.architecture import LoRA
from quatrain.models.params import tensor_names, tensor_shapes
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.run.resume import check_frozen
from quatrain.weights import whole as carrying
from quatrain.weights.hf import load_hf, load_tower, read_whole, save_hf

PREFIXES = {"qwen3_vl": "model.language_model.", "idefics3": "model.text_model."}
OTHERS = {"mtp.fc.weight": np.arange(6, dtype=np.int32).reshape(2, 3)}


def written(model_type, folder, *, older=False):
    """A small random model: texts in float32, tower in bfloat16, in two files; `older`: as transformers 4."""
    arch = seeing(model_type)
    rng, tower = np.random.default_rng(0), {name.name for name in arch.vision.tensors()}
    text, rest = {}, dict(OTHERS)
    for name, shape in tensor_shapes(arch).items():
        drawn = rng.normal(size=shape).astype(np.float32)
        if name in tower:
            rest[name if older else f"model.{name}"] = drawn.astype(ml_dtypes.bfloat16)
        elif older:
            text[f"language_model.{name}"] = drawn
        else:
            text[name.replace("model.", PREFIXES[model_type], 1)] = drawn
    folder.mkdir()
    files = {"model-1.safetensors": text, "model-2.safetensors": rest}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {**CONFIGS[model_type], "eos_token_id": 7, "architectures": ["Of"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[model_type]))
    return folder


def stored(folder):
    """The bytes, dtype and shape of each tensor."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in load_file(path).items()}
    return tensors


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def exported(folder, output, vision, **fields):
    """The folder's model with every parameter moved, as it is exported; and as it was loaded."""
    arch, params = load_hf(folder, vision=vision)
    moved = jax.tree.map(lambda x: x + 1, params)
    save_hf(output, replace(arch, **fields), moved, whole=read_whole(folder))
    return arch, moved


@pytest.mark.parametrize("model_type", PREFIXES)
def test_a_frozen_tower_and_other_parts_are_exported_to_the_bit(model_type, tmp_path, monkeypatch):
    """Under the names of the source, in its dtypes, copied in small blocks; texts are as trained."""
    monkeypatch.setattr(carrying, "BLOCK_BYTES", 50)
    folder = written(model_type, tmp_path / "before")
    arch, moved = exported(folder, tmp_path / "after", None, eos_token_ids=(5, 6))
    assert arch.vision.trained == "frozen"
    assert "vision" not in moved
    before, after = stored(folder), stored(tmp_path / "after")
    texts = {name for name in before if name.startswith((PREFIXES[model_type], "lm_head"))}
    assert changed(before, after) == texts
    again = load_hf(tmp_path / "after")[1]
    jax.tree.map(np.testing.assert_array_equal, again, moved)
    index = json.loads((tmp_path / "after" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(len(each[2]) for each in after.values())


def test_the_configuration_is_that_of_the_source_but_for_end_tokens_and_dtype(tmp_path):
    folder = written("qwen3_vl", tmp_path / "before")
    exported(folder, tmp_path / "after", "frozen", eos_token_ids=(5, 6))
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    for part in (config, config["text_config"]):
        assert (part.pop("dtype"), part.pop("torch_dtype")) == ("float32", "float32")
        assert part.pop("eos_token_id") == [5, 6]
        assert part.pop("tie_word_embeddings") is False
    source = json.loads((folder / "config.json").read_text())
    for key in ("torch_dtype", "eos_token_id", "tie_word_embeddings"):
        source.pop(key)
    source["text_config"].pop("eos_token_id")
    assert config == source
    assert json.loads((tmp_path / "after" / "generation_config.json").read_text())["eos_token_id"] == [5, 6]
    assert json.loads((tmp_path / "after" / "preprocessor_config.json").read_text()) == PROCESSORS["qwen3_vl"]


def test_of_a_trained_projector_and_a_trained_tower_the_rest_stays(tmp_path):
    """Also where parameters have another dtype than the files, from which frozen blocks are copied."""
    folder = written("qwen3_vl", tmp_path / "before")
    before = stored(folder)
    for vision, moving in (("projector", ("merger", "deepstack")), ("all", ("visual",))):
        exported(folder, tmp_path / vision, vision)
        after = stored(tmp_path / vision)
        tower = {name for name in changed(before, after) if "visual" in name}
        assert tower == {name for name in before if any(part in name for part in moving)}
        assert {after[name][0] for name in tower} == {"float32"}
        assert after["mtp.fc.weight"] == before["mtp.fc.weight"]


def test_without_its_tower_the_text_model_is_exported_as_before(tmp_path):
    folder = written("qwen3_vl", tmp_path / "before")
    arch, params = load_hf(folder)
    assert arch.vision is None
    save_hf(tmp_path / "after", arch, params)
    assert stored(tmp_path / "after").keys() == {name.name for name in tensor_names(arch)}
    assert json.loads((tmp_path / "after" / "config.json").read_text())["model_type"] == "qwen3"


def test_an_untied_head_and_the_names_of_older_folders(tmp_path):
    """A head that was tied has no name in the source; a stale copy of tied embeddings is not carried over."""
    folder = written("qwen3_vl", tmp_path / "before", older=True)
    arch, params = load_hf(folder, vision="frozen")
    before = stored(folder)
    tied, single = replace(arch, tie_embeddings=True), {k: v for k, v in params.items() if k != "lm_head"}
    save_hf(tmp_path / "tied", tied, single, whole=read_whole(folder))
    after = stored(tmp_path / "tied")
    assert after.keys() == before.keys() - {"language_model.lm_head.weight"}
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    save_hf(tmp_path / "apart", arch, params, whole=read_whole(tmp_path / "tied"))
    assert stored(tmp_path / "apart") == before


def test_a_frozen_tower_is_loaded_apart_and_checked_with_the_model(tmp_path):
    """What `load_tower` gives is what a trained tower begins with; a folder without it fails at the start."""
    folder = written("qwen3_vl", tmp_path / "model")
    arch, params = load_hf(folder, jnp.bfloat16, vision="frozen")
    tower = load_tower(folder, arch, jnp.bfloat16)
    whole = load_hf(folder, jnp.bfloat16, vision="all")[1]
    jax.tree.map(np.testing.assert_array_equal, {**params, "vision": tower}, whole)
    rest = load_file(folder / "model-2.safetensors")
    del rest["model.visual.blocks.0.attn.qkv.weight"]
    save_file(rest, folder / "model-2.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing visual.blocks.0.attn.qkv.weight"):
        load_hf(folder, vision="frozen")
    load_hf(folder)  # the text model does not need it


def test_the_fingerprint_of_a_tower_is_that_of_its_bytes(tmp_path):
    """Another byte of it is another tower; texts, other parts and the names of older folders are not."""
    found = {}
    for name in ("same", "texts", "tower"):
        folder = written("qwen3_vl", tmp_path / name)
        for file, key in (("model-1", "lm_head.weight"), ("model-2", "model.visual.pos_embed.weight")):
            tensors = load_file(folder / f"{file}.safetensors")
            tensors[key] = tensors[key].copy()
            tensors[key][-1, -1] += (file, name) in (("model-1", "texts"), ("model-2", "tower"))
            save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
        found[name] = read_whole(folder).fingerprint
    assert found["same"] == found["texts"] != found["tower"]
    older = read_whole(written("qwen3_vl", tmp_path / "older", older=True)).fingerprint
    assert older == found["same"]


def test_the_settings_of_pictures_are_read_where_transformers_reads_them(tmp_path):
    folder = written("qwen3_vl", tmp_path / "model")
    plain = load_hf(folder, vision="frozen")[0].vision
    other = {**PROCESSORS["qwen3_vl"], "size": {"shortest_edge": 64, "longest_edge": 1024}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": other}))
    assert load_hf(folder, vision="frozen")[0].vision == replace(plain, min_pixels=64, max_pixels=1024)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 64}))
    assert load_hf(folder, vision="frozen")[0].vision == plain


def test_a_tower_that_is_not_supported_is_no_tower_unless_it_is_asked_for(tmp_path):
    folder = written("qwen3_vl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral3"}
    config["text_config"]["model_type"] = "qwen3"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_hf(folder, vision=None)[0].vision is None
    with pytest.raises(ValueError, match=r"model_type mistral3: its tower is not supported; .*vision: none"):
        load_hf(folder, vision="frozen")


def test_what_is_frozen_has_a_fingerprint_in_checkpoints(tmp_path):
    """Of a frozen tower that of its files, which are not in memory; of a frozen part, that of its arrays."""
    folder = written("qwen3_vl", tmp_path / "model")
    whole = read_whole(folder)

    def found(arch, params):
        return Policy(None, arch, params, (), None, {}, whole=whole).frozen_fingerprints

    arch, params = load_hf(folder, vision="frozen")
    tower = {"tower": whole.fingerprint}
    assert found(arch, params) == tower
    adapted = replace(arch, lora=LoRA(2, 2.0, ("o",)))
    assert found(adapted, params) == {"base": tree_fingerprint(params)} | tower
    check_frozen(tower, tower, "model", folder)
    check_frozen(tower, {}, "model", folder)  # a checkpoint of an earlier version
    with pytest.raises(ValueError, match=r"a base with fingerprint 0f, .*model has"):
        check_frozen(tower, {"tower": "0f"}, "model", folder)
    with pytest.raises(ValueError, match=r"a base with fingerprint unknown"):
        check_frozen({"base": "0f"}, {}, "model", folder)
    arch, params = load_hf(folder, vision="all")
    assert found(arch, params) == {}
    arch, params = load_hf(folder, vision="projector")
    tower = params["vision"]
    moved = {**tower, "merger": jax.tree.map(lambda x: x + 1, tower["merger"])}
    assert found(arch, params) == found(arch, {**params, "embed": params["embed"] + 1, "vision": moved})
    assert found(arch, params) != found(arch, {**params, "vision": {**tower, "patch": tower["patch"] + 1}})
    assert found(arch, params).keys() == {"base"}
