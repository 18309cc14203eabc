"""Tools: descriptions from functions, calls, and results as messages."""

import json
import logging
from collections import Counter
from enum import Enum
from typing import Literal

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of

from quatrain.data.tokenizer import fill_template
from quatrain.data.turns import TurnTemplate
from quatrain.episodes.environment import CheckedEnvironment, StepResult
from quatrain.episodes.tools import Tool, Tools


def add(a: int, b: float = 0.5) -> float:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


def look(what: Literal["pens", "books"]) -> str:
    """Looks something up.

    Args:
        what: Its name.
    """
    raise LookupError(f"no {what}")


def give(kind: str):
    """Returns a value of a kind.

    Args:
        kind: The kind.
    """
    values = {
        "none": None,
        "list": [1, "é"],
        "array": np.arange(3),
        "number": np.int64(3),
        "object": {"a": Color.RED},
        "half": "\ud800",
        "empty": "",
    }
    if kind == "exit":
        raise SystemExit(3)
    if kind == "circle":
        values["circle"] = values
    return values[kind]


async def later(text: str) -> str:
    """Waits.

    Args:
        text: What comes back.
    """
    return text


class Color(Enum):
    RED = "red"

    def __str__(self):
        return "red"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(tools, completion):
    turn = CheckedEnvironment("tools", tools).step(completion)
    return [message["content"] for message in turn.messages]


def test_the_schema_comes_from_hints_and_docstring():
    assert Tool.of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "number", "description": "The second."},
                },
                "required": ["a"],
            },
            "return": {"type": "number", "description": "The sum."},
        },
    }


def test_calls_become_messages_and_no_call_ends_the_episode():
    tools = Tools(add, look)
    assert tools.step(call("add", a=1) + "\n" + call("add", a=2, b=3)) == StepResult(
        [
            {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "1.5"},
            {"role": "tool", "name": "add", "tool_call_id": "call00002", "content": "5.0"},
        ]
    )
    assert tools.step("It is 5.") is None
    own = tools.step('[{"name": "add", "arguments": {"a": 1}, "id": "abc123XYZ"}]')
    assert own.messages[0]["tool_call_id"] == "abc123XYZ"
    other = tools.step('[{"name": "add", "arguments": {"a": 1}, "id": "call_1"}]')
    assert other.messages[0]["tool_call_id"] == "call00004"
    assert tools.counts == Counter({"tool_calls": 4})


@pytest.mark.parametrize(
    ("completion", "content"),
    [
        (call("add", a="x"), "the argument a of add must be a whole number; got 'x'"),
        (call("add", a="1"), "the argument a of add must be a whole number; got '1'"),
        (call("add", a=1.5), "the argument a of add must be a whole number"),
        (call("add"), "add takes the arguments a, b; a is missing"),
        (call("add", a=1, c=2), "add takes the arguments a, b; got c"),
        (call("look", what="cups"), "the argument what of look must be 'pens' or 'books'; got 'cups'"),
        (call("sub", a=1), "there is no tool 'sub'; the tools are add, look"),
        ("<tool_call>add 1</tool_call>", "a call must be"),
    ],
)
def test_a_malformed_call_says_what_was_wrong(completion, content):
    tools = Tools(add, look)
    (text,) = results(tools, completion)
    assert text.startswith(f"Error: {content}")
    assert tools.counts == Counter({"tool_calls": 1, "malformed_calls": 1})


def test_an_exception_is_a_message_and_is_counted():
    tools = Tools(look, give)
    texts = results(
        tools, call("look", what="pens") + call("give", kind="exit") + call("give", kind="circle")
    )
    assert texts[0].startswith("Error: LookupError: no pens (test_tools.py, line ")
    assert texts[1].startswith("Error: SystemExit: 3")
    assert texts[2].startswith("Error: ValueError: Circular reference detected")
    assert tools.counts == Counter({"tool_calls": 3, "tool_errors": 3})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("none", "null"),
        ("list", '[1, "é"]'),
        ("array", "[0, 1, 2]"),
        ("number", "3"),
        ("object", '{"a": "red"}'),
        ("half", "\\ud800"),
        ("empty", ""),
    ],
)
def test_results_are_text_or_json(kind, text):
    assert results(Tools(give), call("give", kind=kind)) == [text]


def test_an_async_function():
    assert results(Tools(later), call("later", text="now")) == ["now"]


def test_a_secret_in_an_exception_is_redacted(monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "s3cr3t-of-the-service")

    def fetch() -> str:
        """Fetches."""
        raise OSError("401 for s3cr3t-of-the-service")

    (text,) = results(Tools(fetch), call("fetch"))
    assert text.startswith("Error: OSError: 401 for [redacted]")


def bare(a, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def undocumented(a: int) -> int:
    return a


def half_documented(a: int) -> int:
    """Returns it."""
    return a


def variadic(*numbers: int) -> int:
    """Adds."""
    return sum(numbers)


def of_own_type(a: CheckedEnvironment) -> int:
    """Takes what JSON has not.

    Args:
        a: An object.
    """
    return 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            bare,
            "a tool must have a type hint for each argument.*bare has not: Argument a is missing a type hint",
        ),
        (undocumented, "a tool must have .* a docstring.*undocumented has not: .*no docstring"),
        (half_documented, "half_documented has not: .*no description for the argument 'a'"),
        (of_own_type, "of_own_type has not: "),
        (variadic, "a tool's arguments must be given by name; variadic takes numbers in another way"),
        (lambda: 1, "a tool must be a function with a name"),
    ],
)
def test_a_function_that_cannot_be_a_tool(function, message):
    with pytest.raises(ValueError, match=message):
        Tools(function)


def test_names_are_unique():
    with pytest.raises(ValueError, match="each with a name of its own; got add twice"):
        Tools(add, add)
    with pytest.raises(ValueError, match=r"at least one.*got none"):
        Tools()


def test_an_episode_of_tools_in_tokens():
    """Prompt, call, result, answer: what the chat template would write, with the sampled ids as they are."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tools, end = Tools(add), tokenizer.eos_token_id
    turns = TurnTemplate(tokenizer, [end], [tool.schema for tool in tools.tools])
    prompt = ({"role": "user", "content": "1 + 2?"},)
    said = [call("add", a=1, b=2), "It is 3."]
    ids, dialogue = turns.prompt(prompt).ids, list(prompt)
    for text in said:
        sampled = [*tokenizer.encode(text), end]
        ids += sampled
        dialogue.append({"role": "assistant", "content": text})
        turn = tools.step(tokenizer.decode(sampled, skip_special_tokens=True))
        if turn is None:
            break
        ids += turns.suffix(prompt, sampled, turn.messages).ids
        dialogue += turn.messages
    schemas = [tool.schema for tool in tools.tools]
    whole = fill_template(tokenizer, dialogue, add_generation_prompt=False, tools=schemas)
    assert tokenizer.decode(ids) + "\n" == whole
    assert "<tool_response>\n3.0\n</tool_response>" in whole


def test_text_of_a_flood_is_not_shown(caplog):
    def fail() -> str:
        """Fails."""
        raise ValueError("x" * 10_000_000)

    with caplog.at_level(logging.DEBUG):
        (text,) = results(Tools(fail), call("fail"))
    assert text.startswith("Error: ValueError: a text of 10000000 characters (test_tools.py")
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "turn",
    [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
        'add\n{"a": 1, "b": 2}',
        "<function_calls>add(a=1, b=2)</function_calls>",
    ],
)
def test_calls_in_other_forms_have_arguments_of_the_hints(turn):
    """Types are checked strictly, so a form that writes values as text needs the tool's schema."""
    tools = Tools(add, look)
    [message] = tools.step(turn).messages
    assert (message["name"], message["content"]) == ("add", "3.0")
    assert tools.counts["malformed_calls"] == 0
