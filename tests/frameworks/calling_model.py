"""A small model whose weights are set, not trained: it calls tools if its prompt has some.

Programs that others wrote decide what they ask next from what a model says. A model with random weights calls
nothing, and one that is trained to takes minutes. This one is a Markov chain over pieces of text: the piece
sampled last alone decides how likely each next one is, by rows of the output head. One layer of attention
sees whether the prompt has tools and results of tools, and shifts the first piece accordingly. It is a folder
with the architecture of Llama, and is sampled and trained like any other.

No encoding of a text gives the pieces: they have no merges, so that a text is encoded byte by byte. An answer
that was encoded again has other token ids than those that were sampled.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from chat_templates import QWEN25
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, OTHER_END, OPENING = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TOOLS, RESULT = "<tools>", "<tool_response>"
HEAD_SIZE, THETA = 8, 1e8
MOST_POSITIONS = 65_536
STRONG, FLAG, SEEN = 60.0, 30.0, 0.1
"""Logits of a next piece, and of a flag; how large a flag stands in the hidden state."""
CLOSERS = {'"': 11, "}": 9, "]": 9, ",": 3}
"""Logits of what ends texts, objects and lists, which a grammar would else let go on without an end."""
UNASKED = 15
"""By how much a piece is less likely than a letter after what it does not follow."""

Line = Sequence[str]
"""Pieces of a text, the first of them after the last token of the prompt."""


def call(name: str, *arguments: str) -> list[str]:
    """The pieces of a call of `name`, whose arguments in JSON are given in pieces."""
    return ['<tool_call>\n{"na', f'me": "{name}", "argum', 'ents": ', *arguments, "}\n</tool_call>"]


def save_calling_model(
    folder: Path,
    calls: Mapping[Line, float],
    texts: Mapping[Line, float],
    *,
    asked: Mapping[str, Line] | None = None,
    begun: Mapping[str, Sequence[Line]] | None = None,
    calls_at_first: float = 0.9,
    calls_again: float = 0.4,
) -> Path:
    """Writes the model that says one of `calls` or `texts`, each so often as its number says.

    With tools in the prompt, it calls with the probability `calls_at_first`, and `calls_again` once the
    prompt has a result; without tools it says a text. `asked`: what it says instead if a word stands in the
    prompt; a line whose first piece comes again at its end has no end. `begun`: what follows a character in a
    call whose beginning is given. Bytes that its grammar forces come one by one, as the tokenizer encodes.
    """
    asked = asked or {}
    weights, firsts = _chain(calls, texts, asked, begun or {})
    looked_for = (TOOLS, RESULT, *asked)
    tokenizer = _tokenizer(
        [*weights, *(each for following in weights.values() for each in following)], looked_for
    )

    def number(text: str) -> int:
        return tokenizer.convert_tokens_to_ids(text if text in (END, *looked_for) else _written(text))

    # Of the hidden state: a constant, what is known of the last token, and what attention has seen.
    dims = itertools.count()
    constant, other, start = (next(dims) for _ in range(3))
    states = {piece: next(dims) for piece in weights}
    marks, flags = ([next(dims) for _ in looked_for] for _ in range(2))
    block = 16 * len(looked_for)  # transformers takes only multiples of the number of heads
    hidden, vocabulary = -(-next(dims) // block) * block, len(tokenizer)

    known = {number("\n"): start} | {number(piece): dim for piece, dim in states.items()}
    known |= {number(text): dim for text, dim in zip(looked_for, marks)}
    embedding = np.zeros((vocabulary, hidden), np.float32)
    embedding[:, constant] = 1
    embedding[np.arange(vocabulary), [known.get(token, other) for token in range(vocabulary)]] = 1
    scale = math.sqrt(hidden / 2)  # of what follows a norm: two entries are 1

    logits = np.zeros((vocabulary, hidden), np.float32)
    for letter, logit in CLOSERS.items():
        logits[number(letter), constant] = logit
    for piece, following in weights.items():
        for each, weight in following.items():
            logits[number(each), states[piece]] = STRONG + math.log(weight / following.total())
    for first, weight in firsts["call"].items():
        likely = math.log(weight / firsts["call"].total() * calls_at_first)
        shift = math.log(calls_again / (1 - calls_again)) - math.log(calls_at_first / (1 - calls_at_first))
        logits[number(first), start] = STRONG - FLAG + likely
        logits[number(first), flags[:2]] = FLAG / SEEN, shift / SEEN
    for first, weight in firsts["text"].items():
        logits[number(first), start] = STRONG + math.log(
            weight / firsts["text"].total() * (1 - calls_at_first)
        )
    for line, flag in zip(asked.values(), flags[2:]):
        # Two flags apart: unasked, it is e^-20 as likely as a text. With one, 1 of 300 answers was this line.
        logits[number(line[0]), [start, flag]] = STRONG - FLAG, 2 * FLAG / SEEN
    for token in {number(piece) for piece in states if len(_written(piece)) > 1}:
        followed = logits[token] != 0
        followed[flags] = False
        logits[token, followed] += UNASKED
        logits[token, constant] = -UNASKED
    logits /= scale

    ones, layer = np.ones(hidden, np.float32), "model.layers.0"
    gates = np.random.default_rng(0).normal(0, 0.02, (2, hidden, hidden)).astype(np.float32)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": logits,
        f"{layer}.input_layernorm.weight": ones.copy(),
        f"{layer}.post_attention_layernorm.weight": ones.copy(),
        **{
            f"{layer}.self_attn.{name}_proj.weight": tensor
            for name, tensor in _attention(hidden, scale, constant, marks, flags).items()
        },
        f"{layer}.mlp.gate_proj.weight": gates[0],
        f"{layer}.mlp.up_proj.weight": gates[1],
        f"{layer}.mlp.down_proj.weight": np.zeros((hidden, hidden), np.float32),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": len(looked_for),
        "num_key_value_heads": len(looked_for),
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": MOST_POSITIONS,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "eos_token_id": [number(END), tokenizer.convert_tokens_to_ids(OTHER_END)],
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _chain(
    calls: Mapping[Line, float],
    texts: Mapping[Line, float],
    asked: Mapping[str, Line],
    begun: Mapping[str, Sequence[Line]],
) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """(how often a piece follows another, how often a call or a text begins with a piece)"""
    weights: dict[str, Counter[str]] = defaultdict(Counter)
    firsts: dict[str, Counter[str]] = {"call": Counter(), "text": Counter()}
    for kind, lines in (("call", calls), ("text", texts)):
        for line, weight in lines.items():
            firsts[kind][line[0]] += weight
            for piece, following in zip(line, [*line[1:], END]):
                weights[piece][following] += weight
    for line in asked.values():
        for piece, following in zip(line, line[1:] if line[0] == line[-1] else [*line[1:], END]):
            weights[piece][following] += 1
    for letter, lines in begun.items():
        for line in lines:
            for piece, following in zip((letter, *line), [*line, END]):
                weights[piece][following] += 1
    return weights, firsts


def _attention(
    hidden: int, scale: float, constant: int, marks: Sequence[int], flags: Sequence[int]
) -> dict[str, np.ndarray]:
    """Projections by which each head sets its flag to SEEN if a token with its mark stands in the prompt."""
    size = len(marks) * HEAD_SIZE
    query, key, value = (np.zeros((size, hidden), np.float32) for _ in range(3))
    output = np.zeros((hidden, size), np.float32)
    slow = HEAD_SIZE // 2 - 1  # of the pair of entries that turns by THETA ** -0.75 radians a token
    for head, (mark, flag) in enumerate(zip(marks, flags)):
        first = head * HEAD_SIZE
        query[first + slow, constant] = 1 / scale
        key[first + slow, mark] = STRONG * math.sqrt(HEAD_SIZE) / scale
        value[first, mark] = SEEN / scale
        output[flag, first] = 1
    return {"q": query, "k": key, "v": value, "o": output}


def _written(text: str) -> str:
    """A text as the vocabulary has it, a letter a byte."""
    [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return written


def _tokenizer(pieces: Sequence[str], looked_for: Sequence[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys([*alphabet, *(_written(piece) for piece in pieces if piece != END)])
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, OTHER_END, OPENING)])
    tokenizer.add_tokens([AddedToken(text) for text in looked_for])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=OTHER_END,
        chat_template=QWEN25,
        clean_up_tokenization_spaces=False,
    )
