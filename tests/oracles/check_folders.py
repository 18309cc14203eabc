"""Checks, with transformers, the folders that models with towers are exported as.

For each family: a small random model is saved by transformers, read here, changed where it is trained, and
written again. transformers must load the folder as the class that saw the pictures before, with the changed
tensors, and what is frozen must have the same bytes. Needs torch: see `make oracles`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import torch
from peft import PeftModel
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from towers import CONFIGS, PROCESSORS

from quatrain.config.schema import LoraConfig
from quatrain.data.tokenizer import load_tokenizer, save_tokenizer
from quatrain.models.architecture import Architecture
from quatrain.models.decoder import forward, logits
from quatrain.models.lora import (
    merged,
    merged_architecture,
    trained_part,
    with_adapters,
    with_lora,
    with_trained,
)
from quatrain.models.params import Params
from quatrain.weights.adapter import save_adapter
from quatrain.weights.hf import save_hf
from quatrain.weights.load_model import load_model


def saved(model_type: str, folder: Path, dtype: torch.dtype) -> None:
    """A random model of this type, as transformers writes it, beside the settings of its image processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS[model_type])
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[model_type]))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in list(file.keys())}
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def check(
    model_type: str, trained: str, lora: tuple[str, ...] = (), dtype: torch.dtype = torch.float32
) -> None:
    from transformers import AutoModelForImageTextToText

    with tempfile.TemporaryDirectory() as place:
        before, after = Path(place) / "before", Path(place) / "after"
        saved(model_type, before, dtype)
        name = str(dtype).removeprefix("torch.")
        model = load_model(str(before), dtype=name, vision=trained)
        arch, params = model.arch, model.params
        if lora:
            arch = with_lora(arch, LoraConfig(rank=4, targets=lora))
            params = with_adapters(params, arch, jax.random.key(0))
        moved = jax.tree.map(lambda x: x + 0.25, trained_part(params, arch))
        params = with_trained(params, moved, arch)
        plain = merged_architecture(arch)
        save_hf(after, plain, merged(params, arch), whole=model.whole)
        old, new = tensors(before), tensors(after)
        assert old.keys() == new.keys(), old.keys() ^ new.keys()
        frozen = {name for name in old if same(old[name], new[name])}
        of_tower = {name for name in old if any(part in name for part in ("visual", "vision", "connector"))}
        behind = {name for name in of_tower if any(part in name for part in ("merger", "connector"))}
        expected = {"frozen": of_tower, "projector": of_tower - behind, "all": set()}[trained]
        if not lora:
            assert frozen == expected, frozen ^ expected
        if lora:
            save_adapter(Path(place) / "adapter", arch, params, base=str(before))
            base = AutoModelForImageTextToText.from_pretrained(before, dtype=torch.float32)
            found = PeftModel.from_pretrained(base, Path(place) / "adapter").merge_and_unload().state_dict()
            wanted = AutoModelForImageTextToText.from_pretrained(after, dtype=torch.float32).state_dict()
            for key, tensor in wanted.items():
                tolerance = 1e-5 if dtype == torch.float32 else 3e-2
                torch.testing.assert_close(found[key], tensor, atol=tolerance, rtol=tolerance)
        loaded, info = AutoModelForImageTextToText.from_pretrained(
            after, output_loading_info=True, dtype="auto"
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert type(loaded).__name__.endswith("ForConditionalGeneration"), type(loaded)
        again = load_model(str(after), dtype=name, vision=trained)
        assert again.arch == replace(plain, eos_token_ids=again.arch.eos_token_ids)
        jax.tree.map(np.testing.assert_array_equal, again.params, merged(params, arch))
        if dtype == torch.float32:
            check_logits(again.arch, again.params, loaded)
        print(f"{model_type} {trained} {lora or ''}: {len(frozen)} of {len(old)} tensors to the bit")


def check_logits(arch: Architecture, params: Params, model: torch.nn.Module) -> None:
    """Those of a text are transformers'."""
    ids = np.random.default_rng(0).integers(3, 60, size=(1, 12))
    places, mask = np.arange(12)[None], np.ones((1, 12), bool)
    ours = logits(params, arch, forward(params, arch, ids, places, mask).hidden)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def check_builtin() -> None:
    """The built-in model with a tower, which has no folder, and its processor."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tokenizer = load_tokenizer("builtin:tiny_vl")
    ends = (int(tokenizer.eos_token_id),)
    model = load_model("builtin:tiny_vl", vocab_size=len(tokenizer), eos_token_ids=ends, vision="all")
    with tempfile.TemporaryDirectory() as folder:
        save_hf(folder, model.arch, model.params, whole=model.whole)
        save_tokenizer(tokenizer, folder)
        loaded, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        check_logits(model.arch, model.params, loaded)
        again = load_model(folder, vision="all")
        jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
        assert again.arch.vision == model.arch.vision
        try:
            print("builtin:tiny_vl:", type(AutoProcessor.from_pretrained(folder)).__name__)
        except ImportError as error:  # of videos, which need torchvision
            print(f"builtin:tiny_vl: no AutoProcessor here: {str(error).strip().splitlines()[0]}")


check_builtin()
for model_type in CONFIGS:
    for trained in ("frozen", "projector", "all"):
        check(model_type, trained)
    check(model_type, "frozen", lora=("all-linear",), dtype=torch.bfloat16)
    check(model_type, "all", lora=("all-linear", "vision.qkv", "vision.down"))
