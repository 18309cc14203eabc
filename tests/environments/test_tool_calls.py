"""Calls of tools in the forms in which models write them, and what is no call."""

import json
import time

import pytest
from effort import within
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.data.tool_calls import CallStream, split_calls, tool_calls
from quatrain.types.call_forms import ToolCall

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
        (f"{PARAMETERS}<tool_call>{{{BODY}}}</tool_call>", [ADD]),
        # Calls in thoughts are not made, whether the completion or the template begins the thoughts.
        (f"<think>{PARAMETERS}</think>\n{PARAMETERS}", [ADD]),
        (f"I try <tool_call>{{{BODY}}}</tool_call>?\n</think>\n<tool_call>{{{BODY}}}</tool_call>", [ADD]),
        (f"the <tool_call> tag\n</think>\n<tool_call>{{{BODY}}}</tool_call>", [ADD]),
        (f"<tool_call>{{{BODY}}}</think><tool_call>{{{BODY}}}", [ADD]),
        (f"{PARAMETERS} is it\n</think>\n\n{PARAMETERS}", [ADD]),
        # Thoughts between two calls do not take back the first.
        (f"<tool_call>{{{BODY}}}</tool_call><think>b</think><tool_call>{{{BODY}}}</tool_call>", [ADD, ADD]),
    ],
)
def test_forms_of_calls(completion, calls):
    assert tool_calls(completion) == calls


MARKUP = (
    *("wrap it in <tool_call>", "end with </tool_call> please", "<tool_call>{}</tool_call>"),
    *(
        "a </think> b",
        "<think> a",
        "<think>a</think>",
        "</think><tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
    ),
    *("```json\n{}\n```", '}}"]} {"name": "x"} ) ;', 'f.call(a="b")'),
)
WRAPPED = {
    "tagged": '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>',
    "tagged, not closed": '<tool_call>{"name": "write", "arguments": %s}',
    "parameters": '{"name": "write", "parameters": %s}',
    "python tag": '<|python_tag|>{"name": "write", "parameters": %s}',
    "Mistral": '[TOOL_CALLS] [{"name": "write", "arguments": %s}]',
    "fenced": '```json\n{"name": "write", "arguments": %s}\n```',
    "OpenAI": '{"type": "function", "function": {"name": "write", "arguments": %s}}',
}


@pytest.mark.parametrize("before", ["", "<think>write?</think>\n", "write it\n</think>\n\n"])
@pytest.mark.parametrize("form", [*WRAPPED, "method"])
def test_an_argument_may_hold_the_text_of_any_markup(form, before):
    for text in MARKUP:
        arguments = {"path": "a.md", "text": text, "more": {"deep": [text, {text: 1}]}}
        as_json = json.dumps(arguments)
        if form == "method":
            said = f"write.call({', '.join(f'{key}={json.dumps(arguments[key])}' for key in arguments)})"
            assert tool_calls(before + said) == [ToolCall("write", arguments)], text
            continue
        for written in (as_json, json.dumps(as_json)):  # an object, and its JSON in a string
            assert tool_calls(before + WRAPPED[form] % written) == [ToolCall("write", arguments)], text
        if form.startswith("tagged"):
            twice = (WRAPPED[form] % as_json) * 2
            assert tool_calls(f"{before}I write.{twice}") == [ToolCall("write", arguments)] * 2, text


@pytest.mark.parametrize("given", ["", "null", '""', '"  "', '"null"', '"{}"', "{}"])
@pytest.mark.parametrize("form", WRAPPED)
def test_a_tool_without_arguments(form, given):
    if given:
        assert tool_calls(WRAPPED[form] % given) == [ToolCall("write")]
    elif form.startswith("tagged"):  # without the tag, an object with a name alone is no call
        assert tool_calls('<tool_call>{"name": "write"}</tool_call>') == [ToolCall("write")]


@pytest.mark.parametrize("text", ["ab", "<tool_call>", "a </tool_call> b", "a </think> b", "<think> a"])
@pytest.mark.parametrize("form", WRAPPED)
def test_a_call_that_is_cut_is_reported_once(form, text):
    whole = WRAPPED[form] % json.dumps({"path": "a.md", "text": text})
    last = whole.rindex(text) + len(text)
    for said in (whole[:last], whole[: last + 1], whole[:last] + "\n" + whole[last:]):
        [call] = tool_calls(said)
        assert "it is no valid JSON" in call.problem


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "The answer is 4.",
        f"I would say {{{BODY}}}",
        "<think>\n<tool_call>" + PARAMETERS,
        f"<think>{PARAMETERS}</think>\n\n4",
        f"I could call {PARAMETERS} or <tool_call>{PARAMETERS}</tool_call>\n</think>\n\n4",
        f"<think>{PARAMETERS}</think> no, <tool_call>{PARAMETERS}</tool_call></think>\n\n4",
        '{"answer": 4}',
        '{"name": "Ann", "age": 4}',
        "[1, 2]",
        "[]",
        "{broken",
        "```python\nprint(4)\n```",
        f"```json\n{{{BODY}}}\n```\nis how to call it",
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
        (PARAMETERS + "</tool_call>", "it is no valid JSON: Expecting value"),
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
    inner = json.dumps({"name": name, "arguments": arguments})
    assert tool_calls(f"<tool_call>{inner}</tool_call>") == [ToolCall(name, arguments)]
    assert tool_calls(inner) == [ToolCall(name, arguments)]


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
    ("completion", "text"),
    [
        (f"I add.\n<tool_call>{{{BODY}}}</tool_call>\n<tool_call>{{{BODY}}}</tool_call>\n", "I add."),
        (f"\nA <tool_call>{{{BODY}}}</tool_call> b", "\nA  b"),
        (f"<tool_call>3</tool_call> <tool_call>{{{BODY}}}", "<tool_call>3</tool_call>"),
        (f"<think>{PARAMETERS}</think>\n{PARAMETERS}\n", f"<think>{PARAMETERS}</think>"),
        (f"I try <tool_call>{{{BODY}}}</tool_call>?\n</think>```json\n{{{BODY}}}\n```", None),
    ],
)
def test_the_text_outside_of_calls(completion, text):
    before = completion[: completion.index("```")] if text is None else text
    found = split_calls(completion)
    assert found == (before, [ADD] * len(found[1]))
    assert found[1]


@pytest.mark.parametrize(
    "inner",
    ['{"name": "add", "arguments": {"a": 1e999}}', '{"name": "\\ud800", "arguments": {}}', "3", "add(1)", ""],
)
def test_a_call_that_cannot_be_made_stays_text(inner):
    text = f"A <tool_call>{inner}</tool_call> \n"
    assert split_calls(text) == (text, [])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from((*PIECES, f"{{{BODY}}}", PARAMETERS, "ab", "\n", "Hi, ", "<", "json", "add.call()")),
        max_size=12,
    ).map("".join),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_a_stream_says_what_the_whole_says(completion, sizes):
    stream, said, at = CallStream(completion[: sizes[0] // 5]), [], sizes[0] // 5
    while at < len(completion):
        size = sizes[len(said) % len(sizes)]
        said.append(stream.push(completion[at : at + size]))
        at += size
    rest, calls = stream.end()
    assert ("".join(said) + rest, calls) == split_calls(completion)
    assert [*filter(None, (call.problem for call in calls))] == []


@pytest.mark.parametrize("part", ["a b ", "<think>a ", "<think>a</think> b ", "é", " ", "< ", "{"])
def test_a_long_stream_takes_no_long_time(part):
    def calls():
        stream = CallStream()
        for _ in range(10_000):
            stream.push(part)
        return stream.end()[1]

    assert within(2.5, calls, time.thread_time) == []


@pytest.mark.parametrize(
    "completion",
    [
        "<tool_call>" * 10_000,
        "<tool_call>" + "[" * 50_000,
        '{"name": "a", "arguments": ' + "[" * 50_000,
        '{"name": "a", "arguments": {"n": ' + "9" * 50_000 + "}}",
        '"name" ' * 10_000,
        "```" + "\n" * 50_000,
        "a.call(" + "b=1," * 10_000,
        '{"name": "arguments"' * 2_500,
        '</think>{"name": "arguments"' * 2_500,
        "</think>{" * 2_500,
        "</think><|python_tag|>a" * 2_500,
        "</think>a.call(" * 2_500 + ")",
        "</think>```[1" * 2_500 + "```",
        "<think></think>[" * 2_500,
        '<tool_call>{"a' * 2_500,
    ],
)
def test_long_completions_take_no_long_time(completion):
    calls = within(1, lambda: tool_calls(completion), time.thread_time)
    assert all(call.problem is None or len(call.problem) < 500 for call in calls)
