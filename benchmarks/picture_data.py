"""Models that see, with random weights, and rows with pictures, for `compare.py`.

    shapes    the quickstart: `builtin:tiny_vl` and the rows of `builtin:shapes`
    qwen3-vl  the sizes of Qwen3-VL-2B with 3 of its 28 text layers, 4 of the 24 blocks of its tower and a
              vocabulary of 32,768; pictures of 256 to 448 pixels a side, 24 words beside each

A folder is as transformers loads it: weights, processor, tokenizer, and `rows.jsonl` with the chat of each
row and the files of its pictures (`images`), which both sides read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
ROWS = {"shapes": 512, "qwen3-vl": 32}
SIZES = ((448, 320), (256, 352))
"""Width and height of the pictures for `qwen3-vl`, in turns: each step of two prompts has both."""
WORDS = 24
TEXT_LAYERS, BLOCKS = 3, 4
VOCABULARY = 32_768
SPECIAL = (
    "<unk>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>",
)  # fmt: skip
"""The first tokens of the vocabulary."""
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
    "image_token_id": SPECIAL.index("<|image_pad|>"),
    "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|end|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": BLOCKS,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [0, 1, 2],
    },
}
"""config.json, as published but for the sizes that the module's text names."""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write(name: str, folder: Path) -> None:
    """The folder of the model `name`, with its rows; float32."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _shapes(folder) if name == "shapes" else _qwen3_vl(folder)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as lines:
        for number, (text, encoded) in enumerate(rows):
            (folder / f"{number}.png").write_bytes(encoded)
            row = {"prompt": [{"role": "user", "content": text}], "images": [f"{number}.png"]}
            lines.write(json.dumps(row) + "\n")


def _shapes(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Writes the model; the text and the encoded picture of each row."""
    from quatrain.config.load import load_config
    from quatrain.data.builtin import builtin_rows
    from quatrain.loop.export import export_policy
    from quatrain.loop.policy import load_policy

    loaded = load_policy(load_config(ROOT / "configs" / "shapes.yaml", environ={}).config)
    export_policy(folder, loaded.arch, loaded.params, loaded.tokenizer, whole=loaded.whole)
    for row in builtin_rows("shapes")[: ROWS["shapes"]]:
        picture, question = row["prompt"][0]["content"]
        yield question["text"], picture["image"]


def _qwen3_vl(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Writes the model; the text and the encoded picture of each row."""
    from PIL import Image

    from quatrain.loop.export import export_policy
    from quatrain.models.families import architecture_from_hf
    from quatrain.models.params import init_params
    from quatrain.weights.whole import Whole

    arch = architecture_from_hf(QWEN3_VL, vision=PROCESSOR).with_tower
    params = init_params(arch, jax.random.key(0), np.float32)
    tokenizer, words = _tokenizer()
    export_policy(folder, arch, params, tokenizer, whole=Whole(QWEN3_VL, processor=PROCESSOR))
    rng = np.random.default_rng(0)
    for number in range(ROWS["qwen3-vl"]):
        width, height = SIZES[number % len(SIZES)]
        coarse = rng.integers(0, 256, (height // 32, width // 32, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
        yield " ".join(words[i] for i in rng.integers(len(words), size=WORDS)), buffer.getvalue()


def _tokenizer() -> tuple[Any, list[str]]:
    """A tokenizer with a token for each of its words, which are made of letters, and these words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from quatrain.data.builtin import PICTURE_TEMPLATE

    letters = "abcdefghijklmnopqrst"
    words = [
        "".join(letters[number // len(letters) ** place % len(letters)] for place in range(4))
        for number in range(VOCABULARY - len(SPECIAL))
    ]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=[*SPECIAL[3:]],
        chat_template=PICTURE_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer, words
