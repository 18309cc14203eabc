"""Models in buckets, in memory: folders and GGUF files, with their tokenizers."""

import jax
import numpy as np
import pytest
from object_store import buckets_in_memory

from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.tokenizer import load_tokenizer, save_tokenizer
from quatrain.weights.hf import save_hf
from quatrain.weights.load_model import load_architecture, load_model

URL = "gs://models/tiny"


@pytest.fixture
def objects(tmp_path):
    with buckets_in_memory(tmp_path / "cache") as made:
        yield made


def put_model(objects, folder, seed, vocab_size):
    model = load_model("builtin:tiny", seed=seed, vocab_size=vocab_size, eos_token_ids=(4,))
    save_hf(folder, model.arch, model.params)
    for file in folder.iterdir():
        objects.put(f"{URL}/{file.name}", file.read_bytes())
    return model


def test_a_model_and_its_tokenizer_are_loaded_and_again_when_they_change(objects, tmp_path):
    """Catches weights that are read for the architecture alone, and a copy of an earlier model."""
    tokenizer = builtin_tokenizer("tiny")
    save_tokenizer(tokenizer, tmp_path / "saved")
    first = put_model(objects, tmp_path / "saved", 1, len(tokenizer))
    objects.put(f"{URL}/training.log", b"not a part of it")
    assert load_architecture(URL) == first.arch
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert load_tokenizer(URL).encode("1 + 2") == tokenizer.encode("1 + 2")
    jax.tree.map(np.testing.assert_array_equal, load_model(URL).params, first.params)
    second = put_model(objects, tmp_path / "other", 2, len(tokenizer))
    jax.tree.map(np.testing.assert_array_equal, load_model(URL).params, second.params)
    assert not list((tmp_path / "cache").rglob("training.log"))


def test_a_folder_without_a_model_is_told(objects):
    objects.put(f"{URL}/notes.md", b"")
    with pytest.raises(ValueError, match=rf"a model in a bucket is a folder .*; {URL} has none"):
        load_model(URL)
