"""Every field that Anthropic's own client may send is followed, ignored, or refused by its path."""

import copy
import json
from pathlib import Path

import anthropic.types as stable
import anthropic.types.beta as beta
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.serve.protocols.messages import IGNORED, READ, REFUSED, Messages
from quatrain.serve.requests import BadRequest

DOCS = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
PROTOCOL = Messages(reads_thinking=True)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
USE = {"type": "tool_use", "id": "toolu_000000001", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_000000001", "content": "3"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
GOOD = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, IMAGE]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm", "signature": "q1.a"}, USE],
        },
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "output_config": {},
}
KEPT = {"type": "ephemeral"}
TYPES = {
    ("system", 0): "TextBlockParam",
    ("messages", 0, "content", 0): "TextBlockParam",
    ("messages", 0, "content", 1): "ImageBlockParam",
    ("messages", 0, "content", 1, "source"): "Base64ImageSourceParam",
    ("messages", 0): "UserMessageParam",
    ("messages", 1): "AssistantMessageParam",
    ("messages", 1, "content", 0): "ThinkingBlockParam",
    ("messages", 1, "content", 1): "ToolUseBlockParam",
    ("messages", 2, "content", 0): "ToolResultBlockParam",
    ("tools", 0): "ToolParam",
    ("tool_choice",): "ToolChoiceAutoParam",
    ("thinking",): "ThinkingConfigEnabledParam",
    ("output_config",): "OutputConfigParam",
}
"""Where the types of the package stand in GOOD."""
SAME = {
    "cache_control": KEPT,
    "is_error": True,
    "caller": {"type": "direct"},
    "strict": True,
    "input_examples": [{}],
    "eager_input_streaming": True,
    "allowed_callers": ["direct"],
    "defer_loading": False,
    "citations": [],
    "disable_parallel_tool_use": True,
    "budget_tokens": 2000,
    "display": "omitted",
    "block_binding": "x",
    "effort": "high",
    "task_budget": {"type": "tokens", "total": 9},
}
"""Fields of parts -> values with which they change nothing."""
WRONG = {
    "citations": [{"type": "char_location"}],
    "caller": {"type": "code_execution_20250825", "tool_id": "x"},
    "toolset_name": "browser",
    "transformations": {"resize": True},
    "defer_loading": True,
    "allowed_callers": ["code_execution_20250825"],
}
"""Fields of parts -> values with which they are refused."""


def asked(body):
    return PROTOCOL.request(json.dumps(body).encode(), None, None)


def at(body, place):
    for step in place:
        body = body[step]
    return body


def changed(place, **fields):
    body = copy.deepcopy(GOOD)
    at(body, place).update(fields)
    return body


def keys(kind):
    return kind.__required_keys__ | kind.__optional_keys__


def sdk_fields():
    found = set()
    for module in (stable, beta):
        params = module.message_create_params
        found |= keys(params.MessageCreateParamsNonStreaming) | keys(params.MessageCreateParamsStreaming)
        found |= keys(module.message_count_tokens_params.MessageCountTokensParams)
    return found


def test_every_field_of_the_anthropic_package_is_known_and_documented():
    """P14. A new field belongs into READ, IGNORED or REFUSED, and into docs/serve.md."""
    known = READ | IGNORED | REFUSED.keys() | {"context_management"}
    assert sdk_fields() - known == set()
    section = DOCS[DOCS.index("## Anthropic's Messages") :]
    assert [name for name in sorted(known) if f"`{name}`" not in section] == []


@pytest.mark.parametrize(("place", "name"), TYPES.items(), ids=lambda value: None)
def test_every_field_of_a_part_is_known(place, name):
    """P14, of blocks, tools and the like: each changes nothing, or is refused by its path."""
    for kind in (getattr(stable, name), getattr(beta, f"Beta{name}")):
        for field in sorted(keys(kind) - at(GOOD, place).keys()):
            if field in SAME:
                assert asked(changed(place, **{field: SAME[field]})) == asked(GOOD), (place, field)
            if field in WRONG:
                path = ".".join(map(str, (*place, field)))
                with pytest.raises(BadRequest) as raised:
                    asked(changed(place, **{field: WRONG[field]}))
                assert raised.value.field == path
                assert str(raised.value).startswith(path)
            optional = {"type", "format", "description"}
            assert field in SAME.keys() | WRONG.keys() | optional, (place, field)


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_fields_may_have_any_value(name):
    for value in ("high", True, {"a": "b"}, ["x"], 1):
        assert asked({**GOOD, name: value}) == asked(GOOD)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_supported_is_refused_by_name(name):
    for value in (None, [], {}):
        assert asked({**GOOD, name: value}) == asked(GOOD)
    with pytest.raises(BadRequest, match=f"^{name} is not supported: .*; leave it out$") as raised:
        asked({**GOOD, name: {"a": "b"}})
    assert raised.value.field == name


def test_null_is_as_good_as_left_out():
    fields = sdk_fields() - GOOD.keys()
    assert asked({**GOOD, **dict.fromkeys(fields)}) == asked(GOOD)
    for place, name in TYPES.items():
        kind = getattr(beta, f"Beta{name}")
        assert asked(changed(place, **dict.fromkeys(keys(kind) - at(GOOD, place).keys()))) == asked(GOOD)


def test_what_the_fields_become():
    chat = asked(
        {
            **GOOD,
            "stop_sequences": ["A", "B"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stream": True,
            "thinking": {"type": "disabled"},
        }
    )
    assert (chat.stop_strings, chat.stream, chat.wanted_tokens) == (("A", "B"), True, 9)
    assert (chat.temperature, chat.top_p, chat.top_k) == (0.5, 0.9, 5)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.hints == {"q1.a"}
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]
    said, picture = chat.messages[1]["content"]
    assert (said["text"], picture["image_url"]["url"]) == ("Hello", "data:image/png;base64,AA==")
    assert chat.messages[2]["tool_calls"][0]["id"] == chat.messages[3]["tool_call_id"] == "000000001"
    named = asked({**GOOD, "tool_choice": {"type": "tool", "name": "add"}})
    assert (named.must_call, named.called) == (True, "add")


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_empty_instructions_are_none(system):
    """They were an empty system message, in place of the template's own, and refused by some templates."""
    with_them, without = ({**GOOD, "system": value} for value in (system, None))
    assert asked(with_them).messages == asked(without).messages


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        ({"messages": []}, "messages", "must end with one of the user"),
        ({"messages": None}, "messages", "is missing"),
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"model": None}, "model", "is missing"),
        ({"system": 5}, "system", "must be a text or a list of blocks"),
        ({"stop_sequences": "END"}, "stop_sequences", "must be a list"),
        ({"stop_sequences": [1]}, "stop_sequences", "must be a text, or a list of texts"),
        ({"stop_sequences": [""]}, "stop_sequences", "none of them empty"),
        ({"top_k": -7}, "top_k", "greater than or equal to -1"),
        ({"guided_json": {}}, "guided_json", "is not supported; leave it out"),
        ({"thinking": {"type": "loud"}}, "thinking.type", "must be one of"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "calls no tools itself"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "must be an object"),
        ({"tools": [TOOL, TOOL]}, "tools", "a name of their own"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice", "with tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "the tools are"),
        ({"tool_choice": "auto"}, "tool_choice", "must be an object"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "a text or a list of blocks"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "must be one of"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages.0", "whose text would go on"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type", "must be one of"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type", "must be one of"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits.0",
            "edits no dialogue",
        ),
    ],
)
def test_bad_requests_are_refused_with_the_path(body, path, message):
    with pytest.raises(BadRequest) as raised:
        asked({**GOOD, **body})
    assert (raised.value.field, raised.value.status) == (path, 400)
    assert message in str(raised.value)
    assert str(raised.value).startswith(path)


@pytest.mark.parametrize(
    "kind",
    [
        "document",
        "search_result",
        "redacted_thinking",
        "server_tool_use",
        "container_upload",
        "web_search_tool_result",
    ],
)
def test_other_blocks_are_refused(kind):
    for role in ("user", "assistant"):
        body = {**GOOD, "messages": [{"role": role, "content": [{"type": kind}]}, *GOOD["messages"]]}
        with pytest.raises(BadRequest, match=r"^messages\.0\.content\.0\.type: must be one of") as raised:
            asked(body)
        assert "leave the block out" in str(raised.value)


def test_to_keep_all_thoughts_is_no_edit():
    """Claude Code asks for it in each request."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert asked({**GOOD, "context_management": edits}) == asked(GOOD)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CONTENTS = [("messages", 0, "content"), ("messages", 1, "content", 1, "input")]
PLACES = [(), *((name,) for name in GOOD), *TYPES, *CONTENTS]
NAMES = st.text(max_size=5) | st.sampled_from(["type", "text", "id", "name", "\ud800"])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), NAMES, JSON)
def test_no_body_is_a_fault_of_the_server(place, name, value):
    """Whatever stands anywhere, the request is read or refused, in words that can be written."""
    body = copy.deepcopy(GOOD)
    part = at(body, place)
    if isinstance(part, dict):
        part[name] = value
    elif isinstance(part, list):
        part.append(value)
    try:
        asked(body)
    except BadRequest as error:
        json.dumps(PROTOCOL.error(error), ensure_ascii=False).encode()
