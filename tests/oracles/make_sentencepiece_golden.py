"""Writes a small SentencePiece vocabulary and what the sentencepiece library makes of some texts with it.

Needs sentencepiece, which the tests do not. Run from the repository's root:

    python tests/oracles/make_sentencepiece_golden.py
"""

from __future__ import annotations

import argparse
import io
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece

NUM_TEXTS = 40
STRANGE_TEXTS = (
    " ",
    "a",
    "  two  spaces ",
    "\n\n\tx",
    "1234567890",
    "naïve café — “quoted” … ½ ²",
    "日本語のテキスト",
    "🙂👩‍👩‍👧 emoji",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, default=Path("../shared/data/gsm8k/test.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("tests/golden"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.gsm8k.read_text("utf-8").splitlines()]
    texts = [row["question"] for row in rows]
    processor = train(texts[NUM_TEXTS:])
    golden = {
        "made_by": {"sentencepiece": version("sentencepiece")},
        "metadata": gguf_metadata(processor),
        "cases": [{"text": t, "ids": processor.encode(t)} for t in (*STRANGE_TEXTS, *texts[:NUM_TEXTS])],
    }
    (args.output / "tokenizer_sentencepiece.json").write_text(json.dumps(golden) + "\n")


def train(texts: list[str]) -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary as Llama's: bytes for what is not in it, single digits, text left as it is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def gguf_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The vocabulary as a GGUF file spells it."""
    ids = range(processor.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [token_type(processor, i) for i in ids],
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


def token_type(processor: sentencepiece.SentencePieceProcessor, index: int) -> int:
    if processor.is_unknown(index):
        return 2
    if processor.is_control(index):
        return 3
    return 6 if processor.is_byte(index) else 1


if __name__ == "__main__":
    main()
