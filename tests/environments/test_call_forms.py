"""Calls in the form that a model's own template writes are read back from the tokens of an answer."""

import json
import logging
from dataclasses import replace

import pytest
from chat_templates import CALLING, FAMILIES, tokenizer_of
from effort import within

from quatrain.data.tokenizer import fill_template
from quatrain.data.tool_calls import CallStream, begun_call, split_calls, tool_calls, warn_of_unread
from quatrain.data.turns import TurnTemplate
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.call_forms import FORMS, ToolCall, schemas_of
from quatrain.types.call_values import Reading

TOKENIZERS = {name: tokenizer_of(family) for name, family in (FAMILIES | CALLING).items()}
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "flag": {"type": "boolean"},
                "list": {"type": "array"},
                "more": {"type": "object"},
                "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}
SCHEMAS = schemas_of([WRITE, {"type": "function", "function": {"name": "now"}}])
ASK = [{"role": "user", "content": "QUESTION"}]
WRITERS = [name for name in (*FAMILIES, *CALLING) if name not in ("smollm2", "gemma3", "mistral")]
ARGUMENTS = {
    "none": {},
    "every type": {
        "text": "17",
        "count": -3,
        "share": 1.5,
        "flag": True,
        "list": [1, "a", [None]],
        "more": {"k": {"l": []}},
        "none": None,
    },
    "a text like code": {"text": "f(x) = {\n  \"a\": 'b',\n}\n\\n </p> ü 🙂 ```"},
}
MARKUP = [
    *("wrap it in <tool_call>", "</tool_call> a", "[TOOL_CALLS]x[ARGS]{}", "<|call|>", "</function> a"),
    *("a </parameter> b", "<|tool_call>call:x{}<tool_call|>", "a </think> b", "<function_calls>", "<think>"),
    '<|channel|>final<|message|>{"name": "x", "arguments": {}}',
]


def said_by(name, *calls, content=""):
    """(what the template writes of an answer with these calls, what stands before it)."""
    made = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": made}
    tokenizer = TOKENIZERS[name]
    before = fill_template(tokenizer, ASK, add_generation_prompt=True)
    whole = fill_template(tokenizer, [*ASK, answer], add_generation_prompt=False)
    size = next((at for at, (a, b) in enumerate(zip(before, whole)) if a != b), len(before))
    return whole[size:], whole[:size]


def text_of(name, written, before="", *, plain=()):
    """The text of an answer with the tokens of `written`; in it, `plain` are no markers."""
    tokenizer = TOKENIZERS[name]
    ids = []
    for at, part in enumerate(written.split("PLAIN")):
        for word in [plain] if at and plain else []:
            ids += [index for letter in word for index in tokenizer.encode(letter, add_special_tokens=False)]
        ids += tokenizer.encode(part, add_special_tokens=False)
    return AnswerTokens(tokenizer).text(ids, tokenizer.encode(before, add_special_tokens=False))


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_template_writes_is_read_back(name, arguments):
    given = ARGUMENTS[arguments]
    written, before = said_by(name, ("write", given))
    assert tool_calls(text_of(name, written, before), SCHEMAS) == [
        ToolCall("write", given, "call00000" if name == "mistral's list" else None)
    ]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("llama3.1", "gpt-oss")])
def test_several_calls_and_an_unknown_name(name):
    calls = [("write", {"text": "a"}), ("now", {}), ("other", {"text": "b"})]
    written, before = said_by(name, *calls)
    found = tool_calls(text_of(name, written, before), SCHEMAS)
    assert [(call.name, call.arguments) for call in found] == calls


@pytest.mark.parametrize("text", MARKUP)
@pytest.mark.parametrize("name", WRITERS)
def test_markup_in_a_text_is_text(name, text):
    """Sampled as plain tokens, as a model that writes about markup does."""
    written, before = said_by(name, ("write", {"text": "PLAIN"}))
    escaped = text if name in ("qwen3-coder", "glm-4.5", "gemma4") else json.dumps(text)[1:-1]
    said = text_of(name, written, before, plain=escaped)
    assert [(call.name, call.arguments) for call in tool_calls(said, SCHEMAS)] == [("write", {"text": text})]


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_is_cut_is_no_call(name):
    written, before = said_by(name, ("write", {"text": "some words", "count": 3}))
    end = written.index("words") + 3
    said = text_of(name, written[:end], before)
    [call] = tool_calls(said, SCHEMAS)
    assert call.name in ("write", None)
    assert call.problem.startswith("a call must be ")
    assert split_calls(said, SCHEMAS) == (said, [])


@pytest.mark.parametrize("name", ["ministral", "gemma4", "gpt-oss", "phi4-mini"])
def test_a_complete_call_without_its_end_marker_is_made(name):
    """At the limit of tokens: the arguments are there."""
    written, before = said_by(name, ("write", {"count": 3}))
    for end in ("<tool_call|>", "<|call|>", "<|/tool_call|>", "</s>"):
        written = written.partition(end)[0]
    assert tool_calls(text_of(name, written, before), SCHEMAS) == [ToolCall("write", {"count": 3})]


@pytest.mark.parametrize("name", WRITERS)
def test_no_warning_for_a_form_that_is_read(name, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_unread(TOKENIZERS[name])
    assert caplog.text == ""


def test_a_form_that_is_not_read_is_warned_of_at_the_start(caplog):
    odd = FAMILIES["qwen2.5"].template.replace("<tool_call>", "<<CALL>>").replace("'<<CALL>>\\n{", "'@ {")
    tokenizer = tokenizer_of(replace(FAMILIES["qwen2.5"], template=odd))
    tokenizer.name_or_path = "models/odd-model"
    with caplog.at_level(logging.WARNING):
        warn_of_unread(tokenizer)
    assert "the chat template of odd-model writes a call as " in caplog.text
    assert "STANDIN" in caplog.text
    assert "what is read back is no call" in caplog.text
    with pytest.raises(ValueError, match="in a form that is read"):
        begun_call(tokenizer, [WRITE], "write")


@pytest.mark.parametrize("name", CALLING)
def test_a_begun_call_goes_on_as_a_call(name):
    """What `tool_choice` writes behind the prompt is the beginning of the call that the template writes."""
    tokenizer = TOKENIZERS[name]
    written, _ = said_by(name, ("write", {"text": "a"}))
    for begun in (begun_call(tokenizer, [WRITE], "write"), begun_call(tokenizer, [WRITE], None)):
        if name in (
            "mistral's list",
            "phi4-mini",
        ):  # whose objects have the arguments first, and a list around
            assert begun.startswith(("[TOOL_CALLS] [{", "<|tool_call|>[{"))
        else:
            assert begun in written


def test_the_results_of_a_call_follow_where_the_template_asks_for_a_call():
    """gpt-oss' template names the tool of a result by the call before it."""
    tokenizer = TOKENIZERS["gpt-oss"]
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    turns = TurnTemplate(tokenizer, ends, [WRITE])
    sampled = tokenizer.encode(
        ' to=functions.write<|channel|>commentary json<|message|>{"text": "a"}<|call|>',
        add_special_tokens=False,
    )
    result = {"role": "tool", "name": "write", "tool_call_id": "call00001", "content": "ok"}
    assert tokenizer.decode(turns.suffix(ASK, sampled, [result]).ids) == (
        '<|start|>functions.write to=assistant<|channel|>commentary<|message|>"ok"<|end|><|start|>assistant'
    )
    sampled = tokenizer.encode("<|channel|>final<|message|>a<|return|>", add_special_tokens=False)
    more = {"role": "user", "content": "more"}
    assert tokenizer.decode(turns.suffix(ASK, sampled, [more]).ids) == (
        "<|start|>user<|message|>more<|end|><|start|>assistant"
    )


TYPED = [
    ("integer", "17", 17),
    ("integer", "17.0", 17),
    ("number", "17", 17),
    ("string", "17", "17"),
    ("string", "null", "null"),
    ("boolean", "False", False),
    ("boolean", "false", False),
    ("object", '{"a": [1]}', {"a": [1]}),
    ("array", "1, 2", "1, 2"),
    ("integer", "many", "many"),
    (["string", "null"], "None", None),
    (["integer", "string"], "5", "5"),
    ("integer", "9" * 5000, "9" * 5000),
]


@pytest.mark.parametrize(("kind", "written", "value"), TYPED)
def test_values_get_the_type_of_the_schema(kind, written, value):
    schemas = {"f": {"type": "object", "properties": {"x": {"type": kind}}}}
    found = Reading("", schemas).typed("f", "x", written)
    assert (found, type(found)) == (value, type(value))
    xml = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert tool_calls(xml, schemas) == [ToolCall("f", {"x": value})]


def test_values_without_a_schema_are_json_where_they_can_be():
    xml = "<function=f><parameter=x>3</parameter><parameter=y>three</parameter></function>"
    assert tool_calls(xml) == [ToolCall("f", {"x": 3, "y": "three"})]


OTHERS = {
    "GLM-4": ('write\n{"text": "a"}', "write", {"text": "a"}),
    "a list of Python": ("[write(text='it\\'s', flag=False)]", "write", {"text": "it's", "flag": False}),
    "Gemma 3": ('```tool_code\nwrite(text="a")\n```', "write", {"text": "a"}),
    "FunctionGemma": (
        "<start_function_call>call:write{text:<escape>a, b<escape>}<end_function_call>",
        "write",
        {"text": "a, b"},
    ),
    "functools": ('functools[{"name": "write", "arguments": {"text": "a"}}]', "write", {"text": "a"}),
    "an id": ('[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{"text": "a"}', "write", {"text": "a"}),
    "DeepSeek V3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text": "a"}<｜tool▁call▁end｜>',
        "write",
        {"text": "a"},
    ),
    "a tag after text": ('I write. <|python_tag|>{"name": "write", "parameters": {}}', "write", {}),
}


@pytest.mark.parametrize("before", ["", "<think>write?</think>\n", "write it\n</think>\n\n"])
@pytest.mark.parametrize("form", OTHERS)
def test_forms_that_templates_ask_for_in_words(form, before):
    said, name, arguments = OTHERS[form]
    found = tool_calls(before + said, SCHEMAS)
    assert [(call.name, call.arguments, call.problem) for call in found] == [(name, arguments, None)]


@pytest.mark.parametrize(
    "said", ['Result\n{"text": "a"}', "[see(it)]?", "[write(3)]", "write\nit", "write(text=1)"]
)
def test_what_is_no_call_of_these_forms(said):
    assert tool_calls(said, SCHEMAS) == []


PIECES = [form.opening for form in FORMS if form.opening] + [
    *("<function=write>", "<parameter=text>", "</parameter>", "</function>", "</tool_call>", "write", "\n"),
    *(
        "<arg_key>text</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[ARGS]",
        '{"text": "a"}',
        "call:write{",
        "}",
    ),
    *(
        '<|"|>',
        "text:",
        "<tool_call|>",
        "(text='a')",
        "[",
        "]",
        ")",
        "<|/tool_call|>",
        "<|message|>",
        "<|call|>",
    ),
    *(" to=functions.write", "</function_calls>", "```", "<think>", "</think>", "a b", "<", "functools"),
]


@pytest.mark.parametrize("seed", range(150))
def test_a_stream_says_what_the_whole_says_in_every_form(seed):
    """Random pieces of markup: nothing raises, and what was said early stays outside of calls."""
    import random

    random = random.Random(seed)
    said = "".join(random.choices(PIECES, k=random.randint(1, 14)))
    whole = split_calls(said, SCHEMAS)
    for size in (1, 5):
        stream = CallStream("", SCHEMAS)
        parts = [stream.push(said[at : at + size]) for at in range(0, len(said), size)]
        rest, calls = stream.end()
        assert ("".join(parts) + rest, calls) == whole


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call><function=a><parameter=b>" * 5_000,
        "<function=a><parameter=b></parameter>x" * 5_000,
        "<tool_call>a<arg_key>b</arg_key><arg_value>" * 5_000,
        "<|tool_call>call:a{b:[" * 5_000,
        '<|tool_call>call:a{b:<|"|>' * 5_000,
        "<function_calls>a(b='" * 5_000,
        "[TOOL_CALLS]a[ARGS]{" * 5_000,
        "<|start|>assistant to=functions.a<|message|>{" * 3_000,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{" * 3_000,
        "[a(b=" + "[" * 50_000,
        "```tool_code" * 5_000,
    ],
)
def test_long_completions_of_markup_take_no_long_time(said):
    calls = within(5, lambda: tool_calls(said, SCHEMAS))
    assert all(call.problem is None or len(call.problem) < 500 for call in calls)
