"""Grammars of calls in the forms of chat templates: what follows them is read back as a call."""

import jsonschema
import numpy as np
import pytest
from chat_templates import CALLING, FAMILIES, tokenizer_of

from quatrain.data.grammars import of_answer, of_call
from quatrain.data.tokenizer import encode
from quatrain.data.tool_calls import begun_call, tool_calls
from quatrain.engine.masks import Guide
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.call_forms import schemas_of

KNOWN = ("qwen2.5", "llama3.1", "hermes", "qwen3-coder", "ministral", "mistral's list", "glm-4.5")
KNOWN = (*KNOWN, "phi4-mini", "gpt-oss", "deepseek")
UNKNOWN = ("gemma4", "olmo3")
SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"type": "integer", "maximum": 99, "minimum": 0},
        "text": {"type": "string"},
        "kind": {"type": "string", "enum": ["a", "b b"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["key", "kind"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "stop"}},
]


def walk(guide, grammar, end, rng, most=150):
    """Words at random that follow a grammar; None if it does not end within `most`."""
    matcher, drawn = guide.matcher(grammar), []
    while len(drawn) < most:
        bits = np.unpackbits(guide.masks([matcher]).view(np.uint8), bitorder="little")
        drawn.append(int(rng.choice(np.flatnonzero(bits))))
        if drawn[-1] == end:
            return drawn
        matcher.consume(drawn[-1])
        assert matcher.error is None
    return None


@pytest.mark.parametrize("name", KNOWN)
def test_what_follows_the_grammar_of_a_call_is_read_back_as_one(name):
    """Markers that are tokens, arguments in tags, lists around calls, ids that templates ask for."""
    tokenizer, rng = tokenizer_of((FAMILIES | CALLING)[name]), np.random.default_rng(0)
    answers, end = AnswerTokens(tokenizer), tokenizer.eos_token_id
    if answers.is_harmony:
        end = tokenizer.convert_tokens_to_ids("<|call|>")
    guide, tools, made = Guide(tokenizer, len(tokenizer), (end,)), TOOLS[:2], set()
    for called in ("write", None):
        grammar, begun = of_call(tokenizer, tools, called), begun_call(tokenizer, tools, called)
        before = encode(
            tokenizer, "<|start|>assistant" * answers.is_harmony + begun, add_special_tokens=False
        )
        walks = [walk(guide, grammar, end, rng) for _ in range(8)]
        for drawn in (each for each in walks if each is not None):
            shown, context = (drawn, before) if answers.is_harmony else ([*before, *drawn], ())
            [call] = tool_calls(answers.text(shown, context), schemas_of(tools))
            assert call.problem is None
            jsonschema.validate(dict(call.arguments), TOOLS[call.name == "now"]["function"]["parameters"])
            made.add(call.name)
    assert made == {"write", "now"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_forms_stay_begun_alone(name):
    tokenizer = tokenizer_of((FAMILIES | CALLING)[name])
    assert of_call(tokenizer, TOOLS, "write") is None
    with pytest.raises(ValueError, match="set tool_choice to none"):
        of_answer(SCHEMA, tokenizer, TOOLS)


TAGGED = {
    "a pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$"}}},
    "alternatives": {"anyOf": [{"type": "object"}]},
    "further keys": {"type": "object", "required": ["a"]},
}


@pytest.mark.parametrize("schema", TAGGED.values(), ids=list(TAGGED))
def test_between_tags_a_schema_that_is_not_held_has_no_grammar(schema):
    """A grammar that took half of it would promise what it does not keep."""
    tokenizer = tokenizer_of(CALLING["qwen3-coder"])
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert of_call(tokenizer, [tool], "f") is None
    assert of_call(tokenizer_of(FAMILIES["qwen2.5"]), [tool], "f") is not None


def test_of_harmony_an_answer_is_a_message_to_the_user_or_to_a_function():
    tokenizer, rng = tokenizer_of(CALLING["gpt-oss"]), np.random.default_rng(1)
    end = tokenizer.convert_tokens_to_ids("<|return|>")
    guide = Guide(tokenizer, len(tokenizer), (end,))
    grammar = of_answer({"type": "boolean"}, tokenizer, TOOLS[1:2])
    said = {tokenizer.decode(walk(guide, grammar, end, rng)).partition("{")[0] for _ in range(20)}
    assert said == {
        "<|channel|>final<|message|>true<|return|>",
        "<|channel|>final<|message|>false<|return|>",
        " to=functions.now<|channel|>commentary json<|message|>",
    }
