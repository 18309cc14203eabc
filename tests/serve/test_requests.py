"""Every field that OpenAI's own client may send is followed, changes nothing, or is refused by name."""

import json
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from quatrain.serve.requests import (
    IGNORED,
    UNCHANGING,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    parsed,
)
from quatrain.types.rollouts import Sampling

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
GOOD = {
    CompletionRequest: {"model": "m", "prompt": [3, 4]},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
}
TYPES = {CompletionRequest: completions, ChatRequest: chats}


def sdk_fields(kind):
    types = TYPES[kind]
    parts = (types.CompletionCreateParamsNonStreaming, types.CompletionCreateParamsStreaming)
    return set().union(*(get_type_hints(part) for part in parts))


def asked(kind, **fields):
    return parsed(kind, json.dumps({**GOOD[kind], **fields}).encode())


@pytest.mark.parametrize("kind", GOOD)
def test_every_field_of_the_openai_package_is_known(kind):
    """A new field belongs into the model, IGNORED or UNCHANGING, and into docs/serve.md."""
    assert sdk_fields(kind) - kind.model_fields.keys() - IGNORED - UNCHANGING.keys() == set()


@pytest.mark.parametrize("kind", GOOD)
def test_null_is_as_good_as_left_out(kind):
    fields = (sdk_fields(kind) | kind.model_fields.keys() | IGNORED | UNCHANGING.keys()) - GOOD[kind].keys()
    assert len(fields) > 40
    whole = asked(kind, **dict.fromkeys(fields))
    assert whole == asked(kind)
    assert whole.sequences([2], 50)[0].sampling == asked(kind).sequences([2], 50)[0].sampling
    for name in GOOD[kind]:
        with pytest.raises(BadRequest, match=f"{name} is missing"):
            asked(kind, **{name: None})


@pytest.mark.parametrize("kind", GOOD)
def test_values_that_change_nothing(kind):
    same = UNCHANGING | {
        "logit_bias": ({}, {"3": 0}, {"3": 0.0, "4": 0}),
        "n": (1,),
        "stop": ([],),
        "stream": (False,),
        "stream_options": (
            {},
            {"include_usage": False},
            {"include_usage": None, "include_obfuscation": True},
        ),
        "echo": (False,),
        "add_special_tokens": (kind is CompletionRequest,),
        **({"logprobs": (False,)} if kind is ChatRequest else {"best_of": (1,)}),
        **({"tools": ([],), "tool_choice": ("none", "auto")} if kind is ChatRequest else {}),
        **({"chat_template_kwargs": ({},)} if kind is ChatRequest else {}),
    }
    for name, values in same.items():
        for value in values:
            sampling = asked(kind, **{name: value}).sequences([2], 50)[0].sampling
            assert sampling == asked(kind).sequences([2], 50)[0].sampling, (name, value)


@pytest.mark.parametrize("kind", GOOD)
def test_ignored_fields_may_have_any_value(kind):
    for name in IGNORED:
        for value in ("high", True, {"a": "b"}, ["x"], 1):
            assert asked(kind, **{name: value}) == asked(kind)


REFUSED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "repetition_penalty": 1.1,
    "length_penalty": 2,
    "min_tokens": 1,
    "priority": 1,
    "bad_words": ["x"],
    "logits_processors": ["f"],
    "documents": [{"text": "x"}],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "use_beam_search": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "suffix": "x",
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "response_format": {"type": "json_object"},
    "web_search_options": {},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k in GOOD for name in UNCHANGING if name not in k.model_fields]
)
def test_what_is_not_supported_is_refused_by_name_with_the_remedy(kind, name):
    with pytest.raises(BadRequest, match=f"^{name} .*; got .*; leave it out$") as error:
        asked(kind, **{name: REFUSED[name]})
    assert (error.value.field, error.value.status) == (name, 400)
    for value in UNCHANGING[name]:
        assert json.dumps(value) in str(error.value)


def test_a_text_gets_the_special_tokens_and_a_chat_those_of_its_template():
    for kind in GOOD:
        with pytest.raises(BadRequest, match="add_special_tokens: Input should be"):
            asked(kind, add_special_tokens=kind is ChatRequest)
    with pytest.raises(BadRequest, match="echo: Input should be False"):
        asked(ChatRequest, echo=True)


def test_unknown_fields_are_refused_unless_they_are_null():
    assert asked(ChatRequest, guided_json=None) == asked(ChatRequest)
    with pytest.raises(BadRequest, match="guided_json is not supported; leave it out"):
        asked(ChatRequest, guided_json={})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("prompt", [-1], "token ids (whole numbers from 0)"),
        ("prompt", [[1], ["a"]], "or a list of either"),
        ("stop", [13], "a text, or a list of texts"),
    ],
)
def test_a_field_of_several_types_is_refused_by_its_own_rule(field, value, rule):
    """A prompt with a negative id was `prompt.str: Input should be a valid string`."""
    with pytest.raises(BadRequest) as refused:
        parsed(CompletionRequest, json.dumps({"model": "m", "prompt": "x", field: value}).encode())
    assert str(refused.value).startswith(f"{field}: must be a text")
    assert rule in str(refused.value)
    assert (refused.value.field, str(value) in str(refused.value)) == (field, True)


def test_best_of_is_n():
    assert asked(CompletionRequest, n=3, best_of=3).n == 3
    with pytest.raises(BadRequest, match="best_of: must be n"):
        asked(CompletionRequest, n=1, best_of=2)
    with pytest.raises(BadRequest, match="logit_bias: must be 0"):
        asked(CompletionRequest, logit_bias={"3": 0, "4": 1})


@pytest.mark.parametrize("kind", GOOD)
def test_max_tokens_is_clipped_to_what_the_prompt_leaves(kind):
    def most(length, **fields):
        [own] = asked(kind, **fields).sequences([length], 100)
        assert isinstance(own.sampling, Sampling)
        return own.sampling.max_new_tokens

    assert [most(90, max_tokens=wanted) for wanted in (1, 9, 10, 11, 10**30)] == [1, 9, 10, 10, 10]
    assert most(99, max_tokens=5) == 1
    assert most(95) == 5  # of the 16 of a completion, and of all positions in a chat
    with pytest.raises(BadRequest, match="must leave room for a token in the model's 100 positions") as error:
        most(100, max_tokens=1)
    assert error.value.field in GOOD[kind]
    assert error.value.code == "context_length_exceeded"


def test_the_page_names_every_field():
    page = DOCS.read_text("utf-8")
    names = set().union(*(sdk_fields(kind) | kind.model_fields.keys() for kind in GOOD))
    names |= GenerateRequest.model_fields.keys()
    assert [name for name in sorted(names | IGNORED | UNCHANGING.keys()) if f"`{name}`" not in page] == []
