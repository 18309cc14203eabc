"""The text of an answer that reward functions and environments get, from its tokens."""

import numpy as np
import pytest
from chat_templates import CALLING, FAMILIES, tokenizer_of

from quatrain.types.answer_text import AnswerTokens, Channels
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, rollout_batch

TOKENIZERS = {name: tokenizer_of(family) for name, family in (FAMILIES | CALLING).items()}
CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
NEXT = "<|end|><|start|>assistant"
SAID = {
    "final": ("gpt-oss", "<|channel|>final<|message|>4<|return|>", "4"),
    "after thoughts": ("gpt-oss", f"<|channel|>analysis<|message|>3?{NEXT}<|channel|>final<|message|>4", "4"),
    "thoughts that were cut": ("gpt-oss", "<|channel|>analysis<|message|>3?", ""),
    "a call": ("gpt-oss", CALL, f"<|start|>assistant{CALL}"),
    "words before a call": (
        "gpt-oss",
        f"<|channel|>commentary<|message|>I add.{NEXT}{CALL}",
        f"I add.<|start|>assistant{CALL}",
    ),
    "no header": ("gpt-oss", "4<|return|>", "4"),
    "Mistral's call": ("ministral", 'a[TOOL_CALLS]add[ARGS]{"a": 1}</s>', 'a[TOOL_CALLS]add[ARGS]{"a": 1}'),
    "Mistral's thoughts": ("ministral", "[THINK]3?[/THINK]4</s>", "4"),
    "Gemma's thoughts": ("gemma4", "<|channel>thought\n3?<channel|>4<turn|>", "4"),
    "Gemma's thoughts of no line": ("gemma4", "<|channel>thought<channel|>4<turn|>", "4"),
    "Llama's tag": ("llama3.1", "<|python_tag|>a<|eot_id|>", "<|python_tag|>a"),
    "other special tokens": ("phi4-mini", "4<|end|><|user|>a", "4a"),
    "thoughts in text": ("qwen3", "<think>3?</think>4<|im_end|>", "<think>3?</think>4"),
}


def ids_of(name, text):
    return TOKENIZERS[name].encode(text, add_special_tokens=False)


@pytest.mark.parametrize("case", SAID)
def test_the_text_of_an_answer(case):
    name, said, text = SAID[case]
    tokenizer = TOKENIZERS[name]
    prompt = np.array(ids_of(name, "<|start|>user<|message|>a<|end|><|start|>assistant"), np.int32)
    prompt = Prompt(0, prompt if name == "gpt-oss" else np.array(ids_of(name, "a"), np.int32), "a")
    ids = ids_of(name, said)
    completion = Completion()
    completion.extend(ids, [0.0] * len(ids), 0)
    assert rollout_batch([(prompt, completion)], tokenizer, {}).completions == (text,)


@pytest.mark.parametrize("case", SAID)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_parts_make_the_whole(case, size):
    name, said, text = SAID[case]
    tokens = AnswerTokens(TOKENIZERS[name])
    context = ids_of(name, "<|start|>assistant" if name == "gpt-oss" else "a")
    pieces = [part for piece in tokens.pieces(ids_of(name, said)) for part in _cut(piece, size)]
    channels = Channels(tokens, context)
    assert "".join(channels.push([piece]).text for piece in pieces) + channels.end().text == text


def _cut(piece, size):
    if type(piece) is not str:
        return [piece]
    return [piece[at : at + size] for at in range(0, len(piece), size)]


def test_letters_of_a_marker_are_no_marker():
    """Of text alone, a question or an answer about the format would end a message."""
    ids = ids_of("gpt-oss", "<|channel|>final<|message|>")
    for letter in "the token <|end|> ends":
        ids += ids_of("gpt-oss", letter)
    assert AnswerTokens(TOKENIZERS["gpt-oss"]).text(ids) == "the token <|end|> ends"


BEGUN = {
    "thoughts": (
        "gpt-oss",
        "<|start|>assistant<|channel|>analysis<|message|>",
        f"3?{NEXT}<|channel|>final<|message|>4",
    ),
    "the final channel": ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>", "4"),
    "Mistral's thoughts": ("ministral", "[/INST][THINK]", "3?[/THINK]4"),
    "Gemma's empty thoughts": ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "4"),
    "a question about a marker": ("ministral", "[INST]What is [THINK] in it?[/INST]", "4"),
}


@pytest.mark.parametrize("case", BEGUN)
def test_what_the_prompt_has_begun_goes_on(case):
    name, before, said = BEGUN[case]
    tokens = AnswerTokens(TOKENIZERS[name])
    assert tokens.text(ids_of(name, said), ids_of(name, before)) == "4"
