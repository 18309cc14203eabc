import json
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import read_golden
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from quatrain.config.load import load_config
from quatrain.data.gguf_tokenizer import CHATML
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.loop.export import export, export_policy
from quatrain.loop.policy import load_policy
from quatrain.models.architecture import LoRA
from quatrain.models.decoder import forward, logits
from quatrain.models.families import builtin_architecture
from quatrain.models.lora import adapters_of, frozen_part, with_adapters, with_trained, without_adapters
from quatrain.models.params import init_params
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.serve.tinker.calls import LoraRequest, Trained
from quatrain.serve.tinker.checkpoint import what_loads
from quatrain.serve.tinker.store import Store
from quatrain.serve.tinker.training import adapted
from quatrain.weights.adapter import save_adapter
from quatrain.weights.hf import save_hf
from quatrain.weights.load_model import load_model


def test_what_is_exported_is_readable_by_others_and_by_transformers(tmp_path):
    tokenizer = load_tokenizer("builtin:tiny")
    arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    params = init_params(arch, jax.random.key(0), jnp.bfloat16)
    export_policy(tmp_path / "final", arch, params, tokenizer)
    (tmp_path / "plain").write_text("")
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "final").iterdir()}
    assert modes == dict.fromkeys(modes, usual)
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= set(modes)
    assert AutoConfig.from_pretrained(tmp_path / "final").vocab_size == len(tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").encode("3+4") == tokenizer.encode("3+4")
    written = json.loads((tmp_path / "final" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_settings_of_sampling_of_the_source_are_kept(tmp_path):
    source = read_golden("qwen2").write_model(tmp_path / "source")
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "unk_token_id": 7}
    others = {"eos_token_id": [3, 6], "bos_token_id": 9, "transformers_version": "4.1"}
    (source / "generation_config.json").write_text(json.dumps(settings | others))
    model, tokenizer = load_model(str(source)), load_tokenizer("builtin:tiny")
    export_policy(tmp_path / "final", model.arch, model.params, tokenizer, model.sampling)
    written = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    assert written == settings | {"eos_token_id": [3, 5, 6, tokenizer.eos_token_id]}
    assert GenerationConfig.from_pretrained(tmp_path / "final").temperature == 0.7


def test_each_of_several_files_of_weights_is_readable_by_others(tmp_path):
    arch = builtin_architecture("tiny", 30, (2,))
    save_hf(tmp_path / "model", arch, init_params(arch, jax.random.key(0)), max_shard_bytes=100_000)
    (tmp_path / "plain").write_text("")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    assert {file.stat().st_mode for file in files} == {(tmp_path / "plain").stat().st_mode}


def test_the_end_tokens_are_those_that_training_stops_at(tmp_path):
    """As of a base model trained with a chat template: its files name <|endoftext|>, turns end otherwise."""
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    export_policy(tmp_path, arch, init_params(arch, jax.random.key(0)), tokenizer)
    ends = sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    assert stop_token_ids(tokenizer, arch.eos_token_ids) == tuple(ends)
    for name in ("generation_config.json", "config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == ends, name
    assert stop_token_ids(load_tokenizer(str(tmp_path)), load_model(str(tmp_path)).arch.eos_token_ids) == (
        *ends,
    )


@pytest.mark.parametrize(
    ("base", "copied"), [("m.gguf", True), ("", True), ("folder", False), ("a/b", False)]
)
def test_adapters_name_a_base_that_peft_can_load(base, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("builtin:tiny")
    plain = builtin_architecture("tiny", len(tokenizer), (2,))
    params = init_params(plain, jax.random.key(0))
    save_hf(tmp_path / "folder", plain, params)
    arch = replace(plain, lora=LoRA(2, 2.0, ("o", "lm_head")))
    export_policy(Path("out"), arch, with_adapters(params, arch, jax.random.key(1)), tokenizer, base=base)
    adapter = json.loads(Path("out/adapter/adapter_config.json").read_text())
    assert adapter["target_modules"] == ["o_proj", "lm_head"]
    named = adapter["base_model_name_or_path"]
    # The base's head is its embeddings, that of the merged model is not, even where B is still 0.
    found = load_model("out")
    assert (plain.tie_embeddings, found.arch.tie_embeddings) == (True, False)
    np.testing.assert_array_equal(found.params["lm_head"], params["embed"])
    assert Path("out/base").exists() == copied
    if base == "a/b":
        assert named == base
    else:
        assert named == str(tmp_path / ("out/base" if copied else "folder"))
        jax.tree.map(np.testing.assert_array_equal, load_model(named).params, params)


@pytest.fixture
def of_server(narrow_model, tmp_path):
    """(folder of a checkpoint of the training server, its parameters and architecture with adapters)."""
    config = load_config(None, ["model.path=builtin:tiny", "seed=3"], {}).config
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    arch = adapted(loaded.arch, 4)
    params = with_adapters(loaded.params, arch, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    drawn = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 8, adapters_of(params))
    params = with_trained(params, drawn, arch)
    save_adapter(tmp_path / "plain", arch, params, base="builtin:tiny")
    fingerprint = tree_fingerprint(frozen_part(loaded.params, arch))
    base = SimpleNamespace(name="/served", arch=loaded.arch, fingerprint=fingerprint)
    store = Store(tmp_path / "state", base, what_loads(config))
    store.note_run("o", "s:train:0", LoraRequest(4))
    tensors = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    trained = Trained(LoraRequest(4), 0, 5, tensors, {"count": np.array(5, np.int32)})
    list(store.save("o", "s:train:0", "weights", "final", trained))
    store.close()
    return store.run_folder("s:train:0") / "weights" / "final", params, arch


def scored(params, arch):
    tokens, mask = jnp.arange(12)[None], jnp.ones((1, 12), bool)
    return logits(params, arch, forward(params, arch, tokens, tokens, mask).hidden)


def test_a_checkpoint_of_the_server_becomes_the_model_that_was_trained(of_server, tmp_path):
    """Its merged weights compute what base and adapters compute; its adapters are those of the checkpoint."""
    folder, params, arch = of_server
    assert export(folder, tmp_path / "out") == 5
    model = load_model(str(tmp_path / "out"))
    scores = scored(params, arch)
    np.testing.assert_allclose(scored(model.params, model.arch), scores, atol=2e-5)
    base = scored(without_adapters(params), replace(arch, lora=None))
    assert np.abs(base - scores).max() > 0.1
    written = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
    assert written.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="not an empty folder"):
        export(folder, tmp_path / "out")


def test_a_checkpoint_of_the_server_is_not_merged_into_another_base(of_server, tmp_path):
    folder, _, _ = of_server
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("seed: 3", "seed: 4"))
    with pytest.raises(ValueError, match="base with fingerprint"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
