"""Calls of tools in the forms in which models write them, and what is no call."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.rollout.tool_calls import ToolCall, tool_calls

ADD = ToolCall("add", {"a": 1, "b": [2, "é"]})
BODY = '"name": "add", "arguments": {"a": 1, "b": [2, "é"]}'
PARAMETERS = '{"name": "add", "parameters": {"a": 1, "b": [2, "é"]}}'


@pytest.mark.parametrize(
    ("completion", "calls"),
    [
        # Qwen2.5, Qwen3, Hermes
        (f"<tool_call>\n{{{BODY}}}\n</tool_call>", [ADD]),
        (f"I add.\n<tool_call>{{{BODY}}}</tool_call>\n<tool_call>\n{{{BODY}}}\n</tool_call> ok", [ADD, ADD]),
        (f"<think>\n<tool_call>x</tool_call>\n</think>\n\n<tool_call>{{{BODY}}}</tool_call>", [ADD]),
        (f"<tool_call>\n{{{BODY}}}", [ADD]),
        (f"<tool_call>{{{BODY}}}<tool_call>{{{BODY}}}</tool_call>", [ADD, ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
        (f"<tool_call>{{{BODY}}}\n{{{BODY}}}</tool_call>", [ADD, ADD]),
        # Llama 3, whose <|python_tag|> decoding may leave out
        (PARAMETERS, [ADD]),
        (f"<|python_tag|>{PARAMETERS}", [ADD]),
        (f"{PARAMETERS}; {PARAMETERS}", [ADD, ADD]),
        ('{"type": "function", "name": "add", "parameters": {}}', [ToolCall("add")]),
        (
            '<|python_tag|>search.call(query="a, \\"b\\"", n=2)',
            [ToolCall("search", {"query": 'a, "b"', "n": 2})],
        ),
        ('search.call(query="x")', [ToolCall("search", {"query": "x"})]),
        ("now.call()", [ToolCall("now")]),
        # Mistral and others
        (f'[TOOL_CALLS] [{{{BODY}, "id": "abcdefghi"}}]', [ToolCall("add", ADD.arguments, "abcdefghi")]),
        (f"[{{{BODY}}}, {{{BODY}}}]", [ADD, ADD]),
        (f"```json\n{{{BODY}}}\n```", [ADD]),
        (f'{{"type": "function", "function": {{{BODY}}}}}', [ADD]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ToolCall("add", {"a": 1})]),
    ],
)
def test_forms_of_calls(completion, calls):
    assert tool_calls(completion) == calls


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "The answer is 4.",
        f"I would say {{{BODY}}}",
        "<think>\n<tool_call>" + PARAMETERS,
        f"<think>{PARAMETERS}</think>\n\n4",
        '{"answer": 4}',
        '{"name": "Ann", "age": 4}',
        "[1, 2]",
        "[]",
        "{broken",
        "```python\nprint(4)\n```",
        "a.call(b) and more",
        "</tool_call>",
    ],
)
def test_what_is_no_call(completion):
    assert tool_calls(completion) == []


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("<tool_call>add(1)</tool_call>", "it is no valid JSON: Expecting value at character 0"),
        ("<tool_call></tool_call>", "there is nothing in it"),
        ("<tool_call>3</tool_call>", "got 3"),
        ('<tool_call>{"arguments": {}}</tool_call>', "its name is None"),
        ('<tool_call>{"name": 3}</tool_call>', "its name is 3"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are [1]"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "the arguments are the text 'a=1'"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number"),
        ('{"name": "add", "parameters": {"a": 1}', "it is no valid JSON: Expecting"),
        (PARAMETERS + " ok", "it is no valid JSON: Expecting value"),
        ("<|python_tag|>print(4)", "got 'print(4)'"),
        ("<|python_tag|>", "got ''"),
        ("add.call(1)", "got '1' in place of key=value"),
        ('add.call(a="x)', "a is no valid JSON: Unterminated string"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(completion, problem):
    (call,) = tool_calls(completion)
    assert call.problem.startswith(
        'a call must be {"name": the tool\'s name, "arguments": {name: value}} in JSON'
    )
    assert problem in call.problem


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3))
def test_any_call_in_json_comes_back(name, arguments):
    # In JSON, < needs no escape; a model's call ends at the first </tool_call>, so it cannot be in a text.
    inner = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    assert tool_calls(f"<tool_call>{inner}</tool_call>") == [ToolCall(name, arguments)]


PIECES = (
    *(
        '{"name":',
        '"a"',
        ',"arguments":{',
        "}",
        "]",
        "[",
        ";",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
    ),
    *("[TOOL_CALLS]", "```", "a.call(", "b=", ")", "<think>", "</think>", " ", "1", "\ud800", "é"),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_no_completion_raises(completion):
    assert all(call.name is not None or call.problem for call in tool_calls(completion))


@pytest.mark.parametrize(
    "completion",
    [
        "<tool_call>" * 20_000,
        "<tool_call>" + "[" * 100_000,
        '{"name": "a", "arguments": ' + "[" * 100_000,
        '{"name": "a", "arguments": {"n": ' + "9" * 100_000 + "}}",
        '"name" ' * 20_000,
        "```" + "\n" * 100_000,
        "a.call(" + "b=1," * 20_000,
        '{"name": "arguments"' * 5_000,
    ],
)
def test_long_completions_take_no_long_time(completion):
    began = time.perf_counter()
    assert all(call.problem is None or len(call.problem) < 500 for call in tool_calls(completion))
    assert time.perf_counter() - began < 2
