"""Small reward models with random weights, as Hugging Face folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from architectures import of_golden
from goldens import draw

from quatrain.config.schema import LoraConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.gguf_tokenizer import CHATML
from quatrain.data.tokenizer import for_scoring, save_tokenizer, stop_token_ids
from quatrain.loop.export import export_policy
from quatrain.models.architecture import Architecture
from quatrain.models.lora import trained_part, with_adapters, with_lora, with_trained
from quatrain.models.params import assemble, init_params
from quatrain.models.spec import TensorName
from quatrain.weights.hf import save_hf
from quatrain.weights.load_model import load_model

TRAINED = ("llama", "qwen3")
"""The families of `trained_classifier`."""
QUESTION = ({"role": "user", "content": "Tom has 2 coins and finds 3 more. How many now?"},)
TO_SCORE = (
    *(
        (QUESTION, answer)
        for answer in ("<answer>5</answer>", "<think>2+3=6</think>\n<answer>6</answer>", "")
    ),
    *(("Tom has 2 coins", more) for more in (" and finds 3 more.", ".", " and finds 3 more. How many now?")),
)
"""Prompts with completions: of messages, and of text."""


def save_classifier(folder: Path, arch: Architecture, tokenizer: Any, seed: int = 5) -> Path:
    """A classifier of one label with the layers of `arch` in `folder`, with its tokenizer."""
    arch = dataclasses.replace(arch, head="value_head")
    layers, head = jax.random.split(jax.random.key(seed))
    score = jax.random.normal(head, (1, arch.hidden_size))
    save_hf(folder, arch, {**init_params(arch, layers), "score": score})
    save_tokenizer(tokenizer, folder)
    return folder


def trained_classifier(folder: Path, case: str, base: Path) -> Path:
    """What `quatrain rm` leaves of a run with adapters on a language model of a golden family: `final/`.

    `base` becomes the language model's folder. All numbers are drawn by name. The tokenizer pads with its end
    token; that of qwen3 has ChatML, whose turns end with a line break behind the end token.
    """
    tokenizer = builtin_tokenizer()
    if case == "qwen3":
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    tokenizer.pad_token = tokenizer.eos_token
    ends = {"eos_token_ids": (tokenizer.eos_token_id,), "pad_token_id": tokenizer.eos_token_id}
    plain = of_golden(case, vocab_size=len(tokenizer), **ends)

    def read(name: TensorName, parameter: np.ndarray) -> None:
        name.put(parameter, draw(name.name, name.shape_in(parameter.shape)))

    save_hf(base, plain, assemble(plain, np.float32, read))
    save_tokenizer(tokenizer, base)
    model = load_model(str(base), head="value_head")
    arch = with_lora(model.arch, LoraConfig(rank=2, alpha=3.0))
    stops = stop_token_ids(tokenizer, arch.eos_token_ids)
    arch = dataclasses.replace(arch, pad_token_id=for_scoring(tokenizer, stops).pad_token_id)
    params = with_adapters(model.params, arch, jax.random.key(0))
    drawn = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(draw(str(path), leaf.shape)), trained_part(params, arch)
    )
    export_policy(folder, arch, with_trained(params, drawn, arch), tokenizer, base=str(base))
    return folder
