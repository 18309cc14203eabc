import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed
from goldens import CASES, read_golden
from safetensors.numpy import load_file, save_file

from quatrain.models.decoder import scores
from quatrain.models.families import builtin_architecture
from quatrain.models.params import abstract_params, init_params
from quatrain.weights import hf
from quatrain.weights.hf import load_hf, save_hf


@pytest.fixture
def saved(tmp_path):
    """A small tied Llama on disk."""
    return read_golden("llama_rope_linear").write_model(tmp_path / "model")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_export_is_bit_for_bit_what_was_loaded(case, tmp_path):
    from transformers import AutoConfig

    golden = read_golden(case)
    before = golden.write_model(tmp_path / "before")
    save_hf(tmp_path / "after", *load_hf(before))
    weights, exported = golden.weights(), load_file(tmp_path / "after" / "model.safetensors")
    assert set(weights) == set(exported)
    for name, value in weights.items():
        np.testing.assert_array_equal(exported[name], value)
    configs = [AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("before", "after")]
    configs[1]["rope_parameters"].pop("type", None)  # the older name of rope_type
    for name in ("mrope_interleaved", "mrope_section"):  # of places in images: they change nothing for a text
        configs[0]["rope_parameters"].pop(name, None)
    differ = {key for key in configs[0] | configs[1] if configs[0].get(key) != configs[1].get(key)}
    # transformers 4 reads the share of a head that is rotated beside the rope parameters, 5 within them
    assert differ <= {"_name_or_path", "max_window_layers", "partial_rotary_factor"}


def test_what_an_export_holds(tmp_path):
    arch = builtin_architecture("tiny", 30, (2, 7))
    save_hf(tmp_path, arch, init_params(arch, jax.random.key(0), jnp.bfloat16))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert config["eos_token_id"] == [2, 7]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 7]}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (384, 128)
    assert tensors["model.norm.weight"].dtype == jnp.bfloat16
    assert "lm_head.weight" not in tensors


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 50.0, "top_p": 1, "temperature": None}, {"top_k": 50, "top_p": 1.0}),
        ({"top_k": -1.0, "no_repeat_ngram_size": 0.0}, {"top_k": 0, "no_repeat_ngram_size": 0}),
        ({"eos_token_id": [2.0, 7], "unk_token_id": 0.0}, {"unk_token_id": 0}),
    ],
)
def test_settings_of_sampling_as_other_tools_write_them(tmp_path, written, read):
    """Catches a model that does not load because of a number that training does not read."""
    (tmp_path / hf.GENERATION).write_text(json.dumps(written))
    assert hf.read_sampling(tmp_path) == read


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"top_k": -2}, "top_k must be greater than or equal to 0, not -2"),
        ({"top_k": 50.5}, "top_k must be a whole number, not 50.5"),
        ({"top_p": 1.5}, "top_p must be less than or equal to 1, not 1.5"),
        ({"eos_token_id": ["2"]}, "eos_token_id must be a token id, a list of token ids, or null"),
    ],
)
def test_settings_of_sampling_that_mean_nothing(tmp_path, written, message):
    (tmp_path / hf.GENERATION).write_text(json.dumps(written))
    with pytest.raises(ValueError, match=rf"generation_config.json: {message}"):
        hf.read_sampling(tmp_path)


def index_of(directory, file):
    """An index that names `file` for each tensor of model.safetensors, which is moved away."""
    tensors = load_file(directory / "model.safetensors")
    moved = directory.parent / "moved.safetensors"
    (directory / "model.safetensors").rename(moved)
    (directory / hf.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    return moved


@pytest.mark.parametrize(
    "form", ["../moved.safetensors", "sub/../../moved.safetensors", "absolute", "folder"]
)
def test_an_index_that_leaves_its_folder_is_refused(form, saved):
    (saved / "sub").mkdir()
    (saved / "link").symlink_to(saved.parent, target_is_directory=True)
    absolute = str(saved.parent / "moved.safetensors")
    name = {"absolute": absolute, "folder": "link/moved.safetensors"}.get(form, form)
    assert index_of(saved, name).is_file()
    with pytest.raises(
        ValueError, match=rf"must be in the folder of the index; .* names '{name}'; do not use"
    ):
        load_hf(saved)


@pytest.mark.parametrize("weight_map", [["model.safetensors"], {"a": 1}, {"a": None}, "model.safetensors"])
def test_an_index_of_another_form_is_refused(weight_map, saved):
    index_of(saved, "x")
    (saved / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"weight_map.* must be .*fetch it again"):
        load_hf(saved)


@pytest.mark.parametrize("name", ["part.safetensors", "sub/part.safetensors"])
def test_files_of_a_hub_cache_are_links_to_its_blobs(name, saved, tmp_path):
    """In a cache, snapshots/REVISION/FILE links to ../../blobs/HASH; a link may lead to the snapshot too."""
    arch, params = load_hf(saved)
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1", tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    saved.rename(snapshot)
    index_of(snapshot, name).rename(blobs / "abc")
    (snapshot / name).parent.mkdir(exist_ok=True)
    (snapshot / name).symlink_to(Path(*[".."] * name.count("/"), "..", "..", "blobs", "abc"))
    (tmp_path / "reached").symlink_to(snapshot, target_is_directory=True)
    for directory in (snapshot, tmp_path / "reached"):
        again = load_hf(directory)
        assert again[0] == arch
        jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_shards_and_blocks_change_nothing(saved, tmp_path, monkeypatch):
    arch, params = load_hf(saved)
    save_hf(tmp_path / "sharded", arch, params, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "sharded" / hf.INDEX).read_text())
    shards = sorted(p.name for p in (tmp_path / "sharded").glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    assert all((tmp_path / "sharded" / shard).stat().st_size < 22_000 for shard in shards)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    monkeypatch.setattr(hf, "BLOCK_BYTES", 1000)
    again = load_hf(tmp_path / "sharded")
    assert again[0] == arch
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_a_single_file_beside_shards_is_refused_unless_the_index_names_it(saved, tmp_path):
    arch, params = load_hf(saved)
    changed = {**params, "final_norm": params["final_norm"] + 1}
    sharded = tmp_path / "sharded"
    save_hf(sharded, arch, changed, max_shard_bytes=20_000)
    index = (sharded / hf.INDEX).read_text()
    (sharded / hf.SINGLE).write_bytes((saved / hf.SINGLE).read_bytes())
    with pytest.raises(ValueError, match=r"must contain model.safetensors or .*json with its files; .* both"):
        load_hf(sharded)
    (sharded / hf.SINGLE).unlink()
    np.testing.assert_array_equal(load_hf(sharded)[1]["final_norm"], changed["final_norm"])
    names = load_file(saved / hf.SINGLE)
    (saved / hf.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, hf.SINGLE)}))
    np.testing.assert_array_equal(load_hf(saved)[1]["final_norm"], params["final_norm"])

    # A shard with a tensor that the index has elsewhere.
    own = json.loads(index)["weight_map"]["model.norm.weight"]
    other = next(path for path in sorted(sharded.glob("*.safetensors"), reverse=True) if path.name != own)
    save_file(load_file(other) | {"model.norm.weight": names["model.norm.weight"]}, other)
    np.testing.assert_array_equal(load_hf(sharded)[1]["final_norm"], changed["final_norm"])


def test_saving_again_leaves_no_old_shards(saved, tmp_path):
    arch, params = load_hf(saved)
    save_hf(tmp_path / "out", arch, params, max_shard_bytes=20_000)
    save_hf(tmp_path / "out", arch, params)
    assert [p.name for p in (tmp_path / "out").glob("*model*")] == ["model.safetensors"]


def test_dtype_is_the_one_asked_for(saved):
    _, params = load_hf(saved, "bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    _, exact = load_hf(saved)
    np.testing.assert_array_equal(params["embed"], exact["embed"].astype(jnp.bfloat16))


def test_half_precision_files_are_read(saved):
    edit_tensors(saved, lambda tensors: {k: v.astype(jnp.bfloat16) for k, v in tensors.items()})
    _, params = load_hf(saved)
    assert params["embed"].dtype == jnp.float32
    expected = read_golden("llama_rope_linear").weights()["model.embed_tokens.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["embed"], expected.astype(np.float32))


def test_stop_tokens_of_both_configs_count(saved):
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert load_hf(saved)[0].eos_token_ids == (2, 9)
    (saved / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    assert load_hf(saved)[0].eos_token_ids == (2,)


def test_known_extras_are_ignored(saved):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    edit_tensors(saved, lambda t: {**t, **frequencies, "lm_head.weight": t["model.embed_tokens.weight"]})
    arch, params = load_hf(saved)
    assert arch.tie_embeddings
    assert "lm_head" not in params


def test_a_score_head_is_zero_unless_the_directory_has_one(saved):
    """A critic starts from a language model; a reward model brings its own head, and nothing else is read."""
    language_model, started = load_hf(saved)[1], load_hf(saved, head="value_head")
    assert started[0].head == "value_head"
    np.testing.assert_array_equal(started[1]["score"], np.zeros((1, started[0].hidden_size)))
    np.testing.assert_array_equal(started[1]["embed"], language_model["embed"])
    row = np.arange(started[0].hidden_size, dtype=np.float32)[None]
    edit_tensors(saved, lambda tensors: tensors | {"score.weight": row, "lm_head.weight": row + 1})
    arch, params = load_hf(saved, head="value_head")
    np.testing.assert_array_equal(params["score"], row)
    hidden = jnp.ones((2, 3, arch.hidden_size))
    np.testing.assert_allclose(scores(params, arch, hidden), np.full((2, 3), row.sum()), rtol=1e-6)
    edit_tensors(saved, lambda tensors: tensors | {"score.weight": np.concatenate([row, row])})
    with pytest.raises(ValueError, match=r"a classifier with 2 labels .*score.weight .* not \(1, .*language"):
        load_hf(saved, head="value_head")


def test_tied_head_that_differs_is_an_error(saved):
    edit_tensors(saved, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        load_hf(saved)


def test_missing_and_unknown_tensors_are_named(saved):
    def change(tensors):
        tensors["model.layers.0.mlp.gate"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
        return tensors

    edit_tensors(saved, change)
    message = r"missing model.layers.0.mlp.gate_proj.weight; unknown model.layers.0.mlp.gate$"
    with pytest.raises(ValueError, match=message):
        load_hf(saved)
    edit_config(saved, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"missing .* and 14 more; unknown"):
        load_hf(saved)


def test_wrong_shape_and_wrong_type_are_errors(saved):
    edit_config(saved, intermediate_size=40)
    with pytest.raises(ValueError, match=r"floats of shape \(.*40.*\) \(config.json\); it is F32 \(.*48.*\)"):
        load_hf(saved)
    edit_config(saved, intermediate_size=48)
    edit_tensors(saved, lambda t: {**t, "model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(ValueError, match=r"model.norm.weight .* it is I8 \(32,\)"):
        load_hf(saved)


def test_broken_directories_are_errors(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"must contain config.json; .*empty contains nothing"):
        load_hf(tmp_path / "empty")
    with pytest.raises(ValueError, match="does not exist or is not a directory"):
        load_hf(tmp_path / "absent")
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load_hf(saved)
    weights.rename(saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has neither \(it contains config.json, pytorch_model.bin\)"):
        load_hf(saved)
    (saved / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks: model-00001-of-00001.safetensors; fetch"):
        load_hf(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_hf(saved)


MEASURE = """
import sys
import jax
from quatrain.weights.hf import load_hf

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

load_hf(sys.argv[1])  # small: what the libraries themselves take is in the baseline
before = peak()
params = jax.block_until_ready(load_hf(sys.argv[2])[1])
print(before, peak(), sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_memory_peaks_near_the_size_of_the_parameters(stored, tmp_path):
    """The resident peak of a fresh process; half the parameters are embeddings, the hardest to stay below."""
    arch = builtin_architecture("tiny", 64, ())
    save_hf(tmp_path / "small", arch, init_params(arch, jax.random.key(0)))
    large = changed(arch, vocab_size=100_000, hidden_size=1024, width=4096, num_layers=8)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, stored), abstract_params(large))
    save_hf(tmp_path / "large", large, ones)
    del ones
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak, parameters = (int(x) for x in out.split())
    ratio = (peak - before) * 1024 / parameters
    print(f"{stored}: {parameters / 1e6:.0f} MB of parameters, peak {ratio:.2f} x")
    assert ratio <= 1.3


@pytest.mark.parametrize("outer", ["qwen3_5", "qwen3_5_moe"])
def test_of_a_qwen_3_5_folder_the_vision_part_and_the_predictor_of_more_tokens_are_not_read(
    outer, tmp_path, caplog
):
    golden = read_golden(f"{outer}_text")
    text, folder = golden.write_model(tmp_path / "text"), tmp_path / "both"
    folder.mkdir()
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in golden.weights().items()}
    renamed |= {name: np.ones(2, np.float32) for name in ("mtp.fc.weight", "model.visual.pos_embed.weight")}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": outer, "text_config": golden.config}))
    with caplog.at_level("INFO"):
        (arch, params), (expected_arch, expected) = load_hf(folder), load_hf(text)
    assert arch == expected_arch
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "2 tensors of mtp, visual are not read" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_predictor_of_more_tokens_beside_a_text_model_is_not_read(family, tmp_path, caplog):
    """Published folders of Qwen3-Next have it, and were refused as those of another model."""
    folder = read_golden(family).write_model(tmp_path)
    expected_arch, expected = load_hf(folder)
    edit_tensors(folder, lambda tensors: tensors | {"mtp.layers.0.mlp.gate.weight": np.ones(2, np.float32)})
    with caplog.at_level("INFO"):
        arch, params = load_hf(folder)
    assert arch == expected_arch
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "1 tensors of mtp are not read" in caplog.text
    save_hf(tmp_path / "after", arch, params)
    assert not [name for name in load_file(tmp_path / "after" / "model.safetensors") if "mtp" in name]


def test_end_tokens_of_a_multimodal_folder_are_those_of_its_text_part_too(tmp_path):
    """generation_config.json took their place: a completion then never ended at one of them."""
    golden = read_golden("gemma3_text")
    text = {key: value for key, value in golden.config.items() if key != "eos_token_id"}
    text["eos_token_id"], config = 9, {"model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert hf.read_architecture(tmp_path).eos_token_ids == (9, 3, 2)
    # Where the folder names some beside its parts, these count for the text too, as before.
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text, "eos_token_id": 5}))
    assert hf.read_architecture(tmp_path).eos_token_ids == (5, 3, 2)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_multimodal_folder_the_text_part_is_loaded(prefix, tmp_path, caplog):
    golden = read_golden("gemma3_text")
    text, folder = golden.write_model(tmp_path / "text"), tmp_path / "both"
    folder.mkdir()
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    renamed = {name.replace("model.", prefix, 1): value for name, value in golden.weights().items()}
    renamed[head] = renamed.pop("lm_head.weight")
    renamed |= {
        "vision_tower.embed.weight": np.ones((3, 2), np.float32),
        "multi_modal_projector.norm": np.ones(2),
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": golden.config}))
    with caplog.at_level("INFO"):
        (arch, params), (expected_arch, expected) = load_hf(folder), load_hf(text)
    assert arch == expected_arch
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert "2 tensors of multi_modal_projector, vision_tower are not read" in caplog.text
    del renamed["language_model.model.norm.weight" if "model.model" in prefix else f"{prefix}norm.weight"]
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing model.norm.weight"):
        load_hf(folder)
