"""OpenAI's Responses as its own package sees them, and a model that answers what a test gives it."""

import json
import re
from pathlib import Path
from typing import get_args, get_type_hints

import openai
import pytest
from openai.types import responses as sdk
from openai.types.responses import input_token_count_params as count_params
from openai.types.responses import response_create_params as create_params
from openai.types.responses import response_input_item_param as items
from test_chat_tools import ANSWERS, ASK, TOKENIZERS, TOOLS, Scripted, answering, hermes
from test_sessions import CALL, TOKENIZER, more, say, session_of

from quatrain.serve.protocols import responses
from quatrain.serve.protocols.responses import Responses
from quatrain.serve.requests import BadRequest
from quatrain.types.sampler import Progress

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
FUNCTIONS = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
SYSTEM = "You add."


def user(text):
    return {"role": "user", "content": text}


def given(**fields):
    """The request that a body becomes."""
    body = {"model": "any", "input": "How many?", **fields}
    return Responses(reads_thinking=False).request(json.dumps(body).encode(), None, None)


def result(call, text):
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


class Asker:
    """Asks as a program with its history in items; with `stream`, puts the answer together from events."""

    def __init__(self, client, stream, **fields):
        self.client, self.stream, self.fields = client, stream, {"model": "any", "tools": FUNCTIONS, **fields}

    def __call__(self, history, **more_fields):
        fields = self.fields | more_fields
        if not self.stream:
            return self.client.responses.create(input=history, **fields)
        with self.client.responses.stream(input=history, **fields) as stream:
            return stream.get_final_response()


def plain(output):
    """Items without their ids, which are new each time."""
    found = [json.loads(item.to_json()) for item in output]
    for item in found:
        for name in ("id", "call_id", "encrypted_content", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return found


# ------------------------------------------------------------------------------------------------- fields


def known_fields():
    return responses.AS_IN_CHAT | responses.CONVERTED | responses.IGNORED_HERE | responses.REFUSED.keys()


def test_every_field_of_the_openai_package_is_known():
    """P14: a field that a new version of the package sends would be refused as unknown."""
    parts = (
        create_params.ResponseCreateParamsNonStreaming,
        create_params.ResponseCreateParamsStreaming,
        count_params.InputTokenCountParams,
    )
    fields = set().union(*(get_type_hints(part) for part in parts))
    assert len(fields) > 25
    assert fields - known_fields() == set()
    page = DOCS.read_text("utf-8")
    assert [name for name in sorted(known_fields()) if f"`{name}`" not in page] == []


def test_ignored_fields_may_have_any_value_and_null_is_as_good_as_left_out():
    """A wish of a client that no token depends on must not be an error."""
    for name in responses.IGNORED_HERE:
        for value in ("high", True, {"a": "b"}, ["x"], 1):
            asked = given(**{name: value})
            assert asked.model_dump() == given().model_dump(), name
    everything = dict.fromkeys(known_fields() - {"input", "model"})
    assert given(**everything).model_dump() == given().model_dump()


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("message", (items.EasyInputMessageParam, items.Message, sdk.ResponseOutputMessageParam)),
        ("function_call", (sdk.ResponseFunctionToolCallParam,)),
        ("function_call_output", (items.FunctionCallOutput,)),
        ("reasoning", (sdk.ResponseReasoningItemParam,)),
    ],
)
def test_every_field_of_an_item_is_read_ignored_or_refused_by_its_path(kind, types):
    """An item that a client gives back whole, with all its fields, must not be an error."""
    good = {
        "message": {"role": "user", "content": "a"},
        "function_call": {"call_id": "c", "name": "add", "arguments": "{}"},
        "function_call_output": {"call_id": "c", "output": "1"},
        "reasoning": {"summary": []},
    }[kind]
    fields = set().union(*(get_type_hints(each) for each in types)) - {"type"}
    for name in fields - responses._ITEMS[kind]:
        with pytest.raises(BadRequest) as error:
            given(input=[{"type": kind, **good, name: "x"}, user("b")])
        assert error.value.field == f"input[0].{name}"
    whole = {**dict.fromkeys(fields | responses._ITEMS[kind]), "type": kind, **good}
    assert (
        given(input=[whole, user("b")]).messages == given(input=[{"type": kind, **good}, user("b")]).messages
    )


def test_every_field_of_a_tool_is_read_ignored_or_refused_by_its_path():
    """Catches a field that is accepted in silence because it is false, and one that a client always sends."""
    fields = set(get_type_hints(sdk.FunctionToolParam))
    assert fields - responses._TOOL == set()
    own = {"async": False, "defer_loading": False, "allowed_callers": ["direct", "programmatic"]}
    own |= {"output_schema": {"type": "integer"}}
    told = {**dict.fromkeys(fields), **FUNCTIONS[0], **own}
    assert given(tools=[told]).tools == given(tools=FUNCTIONS[:1]).tools
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    by_model = {**call, "caller": {"type": "direct", "caller_id": None}}
    assert given(input=[by_model, user("a")]).messages == given(input=[call, user("a")]).messages


def test_what_a_request_becomes():
    """Each field of the table has the meaning that a chat's has."""
    asked = given(
        instructions=SYSTEM,
        input=[
            user("a"),
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "q1.x"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"type": "function_call", "call_id": "call_abc", "name": "add", "arguments": "{}"},
            {"type": "function_call", "call_id": "own", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_abc", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "own",
                "output": [{"type": "input_text", "text": "2"}],
            },
        ],
        tools=FUNCTIONS,
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=7,
        temperature=0.5,
        include=["message.output_text.logprobs"],
        prompt_cache_key="me",
        stream=True,
    )

    def call(identity, name):
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert asked.messages == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "assistant", "content": "c", "tool_calls": [call("abc", "add"), call("own", "look_up")]},
        {"role": "tool", "tool_call_id": "abc", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "2"},
    ]
    assert asked.tools == TOOLS
    assert (asked.called, asked.must_call, asked.wanted_tokens, asked.temperature) == ("add", True, 7, 0.5)
    assert (asked.wants_logprobs, asked.prompt_cache_key, asked.stream, asked.n) == (True, "me", True, 1)
    assert asked.hints == {"q1.x"}


def test_a_picture_is_that_of_a_chat():
    """A part with a data URL must reach what reads pictures."""
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    [message] = given(input=[{"role": "user", "content": content}]).messages
    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


BAD = {
    "no input": ({"input": None}, "input", "missing"),
    "a number": ({"input": 3}, "input", "a text or a list"),
    "no items": ({"input": []}, "input", "at least 1"),
    "no item": ({"input": ["a"]}, "input[0]", "an object"),
    "a type": (
        {"input": [user("a"), {"type": "item_reference", "id": "x"}]},
        "input[1].type",
        "leave the item out",
    ),
    "a custom call": ({"input": [{"type": "custom_tool_call"}]}, "input[0].type", "leave the item out"),
    "a role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "one of user"),
    "a part": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].type",
        "input_text",
    ),
    "a picture by its id": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "leave it out",
    ),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
        "input",
        "have pictures",
    ),
    "no text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "a text",
    ),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content", "a text or a list"),
    "no output": (
        {"input": [{"type": "function_call_output", "call_id": "a"}]},
        "input[0].output",
        "a text or",
    ),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "add", "arguments": "{"}, user("a")]},
        "input",
        "an object, or its JSON text",
    ),
    "an answer last": ({"input": [{"role": "assistant", "content": "a"}]}, "input", "nothing follows"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    "a custom tool": (
        {"tools": [FUNCTIONS[0], {"type": "custom", "name": "x"}]},
        "tools[1].type",
        "function",
    ),
    "loading": (
        {"tools": [{**FUNCTIONS[0], "defer_loading": True}]},
        "tools[0].defer_loading",
        "must be false",
    ),
    "a field that is false": (
        {"tools": [{**FUNCTIONS[0], "cached": False}]},
        "tools[0].cached",
        "leave it out",
    ),
    "a tool of programs": (
        {"tools": [{**FUNCTIONS[0], "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
        "must have `direct`",
    ),
    "no callers": (
        {"tools": [{**FUNCTIONS[0], "allowed_callers": "direct"}]},
        "tools[0].allowed_callers",
        "a list",
    ),
    "a call by a program": (
        {
            "input": [
                {
                    "type": "function_call",
                    "call_id": "a",
                    "name": "add",
                    "arguments": "{}",
                    "caller": {"type": "program", "caller_id": "p"},
                },
                user("a"),
            ]
        },
        "input[0].caller",
        "no programs call tools",
    ),
    "a result for a program": (
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": "1",
                    "caller": {"type": "program", "caller_id": "p"},
                },
                user("a"),
            ]
        },
        "input[0].caller",
        "no programs call tools",
    ),
    "a tool's schema": ({"tools": [{**FUNCTIONS[0], "parameters": 3}]}, "tools", "a tool must be"),
    "a choice": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "function"),
    "an unknown choice": (
        {"tool_choice": {"type": "function", "name": "x"}},
        "tool_choice",
        "the tools are add",
    ),
    "required": ({"tools": [], "tool_choice": "required"}, "tool_choice", "with tools"),
    "a format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_schema"),
    "a field of text": ({"text": {"style": "x"}}, "text.style", "leave it out"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
    "background": ({"background": True}, "background", "leave it out"),
    "a conversation": ({"conversation": "c"}, "conversation", "leave it out"),
    "a prompt": ({"prompt": {"id": "p"}}, "prompt", "leave it out"),
    "a context": ({"context_management": [{"type": "compaction"}]}, "context_management", "leave it out"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
    "an unknown field": ({"messages": ASK}, "messages", "leave it out"),
    "half a character": ({"metadata": {"a": "\ud800"}}, "metadata", "half a surrogate pair"),
    "n": ({"n": 2}, "n", "leave it out"),
    "most tokens": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    "alternatives": ({"top_logprobs": 3}, "top_logprobs", "0"),
    "temperature": ({"temperature": -1}, "temperature", "greater"),
    "instructions": ({"instructions": [user("a")]}, "instructions", "a text"),
    "an answer that is not stored": (
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        "nothing is stored",
    ),
}


def test_bad_requests_get_one_error_that_names_the_field_by_its_path():
    """What is not supported must be an error with a remedy, never an answer to less than was asked."""
    with answering("4") as (_, http, service):
        for name, (fields, field, named) in BAD.items():
            body = {"model": "m", "input": "How many?", "tools": FUNCTIONS, **fields}
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                headers = {"Content-Type": "application/json"}
                answer = http.post(path, content=json.dumps(body), headers=headers)
                if (path.endswith("tokens"), field) == (True, "max_output_tokens"):
                    continue
                assert answer.status_code == 400, (name, path, answer.text)
                error = answer.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", field), (name, error)
                assert named in error["message"], (name, error)
        assert service.prompts == []
        previous = http.post("/v1/responses", json={"input": "a", "previous_response_id": "x"}).json()
        assert previous["error"]["code"] == "previous_response_not_found"


def test_nothing_is_stored():
    """A client that looks an answer up later must be told at once, in a form that it knows."""
    with answering("4") as (client, _, _):
        answer = client.responses.create(model="m", input="a", store=True)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="does not have the path"):
                ask(answer.id)


# ------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", ANSWERS)
def test_the_items_of_a_stream_are_those_of_the_whole_answer(name):
    """Calls and texts in all forms of models: what a stream says piece by piece must be the answer."""
    tokenizer, text, content, calls = ANSWERS[name]
    with answering(text, tokenizer, size=2) as (client, _, _):
        whole, streamed = (Asker(client, stream)("How many?") for stream in (False, True))
    assert plain(whole.output) == plain(streamed.output)
    made = [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert made == calls
    said = [part.text for item in whole.output if item.type == "message" for part in item.content]
    text = re.sub("<think>.*?</think>", "", content or "", flags=re.DOTALL).strip("\n")
    assert "".join(said).strip("\n") == text
    assert whole.status == "completed"
    assert len({item.id for item in whole.output}) == len(whole.output)


THOUGHT = "<think>\nI add – ü.\n</think>\n\nSix."


def test_thoughts_are_an_item_and_their_tokens_are_counted():
    """Thoughts in the text would be shown to users, and counted as no thoughts."""
    tokenizer = TOKENIZERS["qwen3"]
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False)
    num_thoughts = 1 + ids.index(tokenizer.convert_tokens_to_ids("</think>"))
    for size in (1, 3, 100):
        with answering(THOUGHT, "qwen3", size=size) as (client, _, _):
            for stream in (False, True):
                ask = Asker(client, stream, include=["reasoning.encrypted_content"])
                answer = ask("How many?")
                thought, message = answer.output
                assert [part.text for part in thought.content] == ["I add – ü."]
                assert (thought.type, thought.summary, thought.status) == ("reasoning", [], "completed")
                assert thought.encrypted_content.startswith("q1.")
                assert answer.output_text == "Six."
                assert message.content[0].text == "Six."
                usage = answer.usage
                assert usage.output_tokens_details.reasoning_tokens == num_thoughts
                assert usage.output_tokens == len(ids) + 1
                assert usage.total_tokens == usage.input_tokens + usage.output_tokens
                assert usage.input_tokens_details.cached_tokens == 0
                assert ask("How many?", include=[]).output[0].encrypted_content is None


def events_of(http, **body):
    """(names, values) of the events of a stream, as they stand in it."""
    fields = {"model": "m", "input": "How many?", "tools": FUNCTIONS, "stream": True, **body}
    answer = http.post("/v1/responses", json=fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip("\n").split("\n\n")]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in blocks)
    values = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [value["type"] for value in values]
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    return [value["type"].removeprefix("response.") for value in values], values


def test_the_events_of_a_stream():
    """Programs that read events themselves need each of them, in order, with its place."""
    text = f"<think>\na\n</think>\n\nb{hermes('add', {'a': 1})}"
    with answering(text, "qwen3", size=100) as (_, http, _):
        names, values = events_of(http)
    parts = ["output_item.added", "content_part.added"]
    assert names == [
        *("created", "in_progress"),
        *(*parts, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*parts, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert [value["output_index"] for value in values[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4
    done = [value["item"] for value in values if value["type"] == "response.output_item.done"]
    assert done == values[-1]["response"]["output"]
    assert {value["item_id"] for value in values if "item_id" in value} == {item["id"] for item in done}
    assert values[2]["item"] == {**done[0], "status": "in_progress", "content": []}
    assert values[0]["response"]["output"] == []
    assert (values[0]["response"]["status"], values[0]["response"]["usage"]) == ("in_progress", None)
    for value in values:  # as the package's types have them
        sdk_type = next(
            kind
            for kind in get_args(get_args(sdk.ResponseStreamEvent)[0])
            if value["type"] in get_args(kind.model_fields["type"].annotation)
        )
        sdk_type.model_validate(value)


def test_an_answer_that_was_cut_is_incomplete():
    """A program must see that the answer is not whole."""
    with answering("I add", end=False) as (client, http, _):
        whole = client.responses.create(model="m", input="a", max_output_tokens=50)
        names, values = events_of(http)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert whole.max_output_tokens == 50
    assert names[-1] == "incomplete"
    assert values[-1]["response"]["output"][0]["content"][0]["text"] == "I add"


def test_an_answer_without_words_has_a_message():
    """Without an item to give back, the next request would not continue the answer."""
    with answering("") as (client, _, _):
        for stream in (False, True):
            assert plain(Asker(client, stream)("a").output) == [
                {
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}],
                }
            ]


class Failing(Scripted):
    """Says a part of its answer, and fails."""

    def start(self, requests, listener):
        def heard(number, progress):
            listener(number, progress if progress.finish_reason is None else Progress(error="out of memory"))

        return super().start(requests, heard)


def test_a_stream_that_fails_says_so_in_its_last_event(monkeypatch):
    """Without it, a client takes the part for the answer."""
    monkeypatch.setattr("test_chat_tools.Scripted", Failing)
    with answering("one two three four five") as (client, http, _):
        names, values = events_of(http)
        failed = values[-1]["response"]
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            client.responses.create(model="m", input="a")
    assert names[-1] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "out of memory"}
    assert (failed["status"], failed["id"]) == ("failed", values[0]["response"]["id"])


def test_log_probabilities_are_those_of_the_text():
    """Those of thoughts would not fit the text that they stand beside."""
    with answering(THOUGHT, "qwen3", size=2) as (client, _, _):
        for stream in (False, True):
            answer = Asker(client, stream, include=["message.output_text.logprobs"])("a")
            [part] = answer.output[1].content
            assert bytes(b for each in part.logprobs for b in each.bytes).decode().strip() == "Six."
            assert {each.logprob for each in part.logprobs} == {-0.5}


def test_each_message_has_the_log_probabilities_of_its_own_text():
    """Where gpt-oss thinks between two messages, the first of a whole answer had those of both."""
    final = "<|end|><|start|>assistant<|channel|>final<|message|>Six."
    begun = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
    )
    for size in (2, 100):
        with answering(begun + final, "gpt-oss", size=size) as (client, _, _):
            for stream in (False, True):
                answer = Asker(client, stream, include=["message.output_text.logprobs"])("a")
                first, _, last = [item.content[0] for item in answer.output]
                said_by = ["".join(each.token for each in part.logprobs) for part in (first, last)]
                assert ("I look." in said_by[0], "Six." in said_by[0]) == (True, False)
                assert ("I look." in said_by[1], "Six." in said_by[1]) == (False, True)


def test_log_probabilities_of_a_call_are_in_a_stream_too():
    """A stream left out those of all tokens after its last text, which the whole answer has."""
    ids = TOKENIZER.encode(text := f"I add.\n{CALL}", add_special_tokens=False)
    with answering(text, size=2) as (client, _, _):
        for stream in (False, True):
            answer = Asker(client, stream, include=["message.output_text.logprobs"])("a")
            assert len(answer.output[0].content[0].logprobs) == len(ids)


def test_the_answer_repeats_its_request():
    """Agents keep the answer as the record of what was asked."""
    fields = {"instructions": "Add.", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5}
    with answering("4") as (client, _, _):
        answer = client.responses.create(
            model="any", input="a", tools=FUNCTIONS, tool_choice="none", reasoning={"effort": "low"}, **fields
        )
    assert {name: getattr(answer, name) for name in fields} == fields
    assert (answer.model, answer.object, answer.tool_choice, answer.output_text) == (
        *("small", "response", "none"),
        "4",
    )
    assert [tool.name for tool in answer.tools] == ["add", "look_up"]
    assert answer.reasoning.effort == "low"
    assert answer.weight_version == 0


def test_no_effort_is_no_thinking():
    """The variable must reach templates that read it, and not be an error of others."""
    tokenizer = TOKENIZERS["qwen3"]
    with answering("4", "qwen3") as (client, _, service):
        client.responses.create(model="m", input="a", reasoning={"effort": "none"})
        client.responses.create(model="m", input="a", reasoning={"effort": "high", "summary": "auto"})
    assert tokenizer.decode(service.prompts[0]).endswith("</think>\n\n")
    assert not tokenizer.decode(service.prompts[1]).endswith("</think>\n\n")
    with answering("4") as (client, _, service):
        client.responses.create(model="m", input="a", reasoning={"effort": "none"})
        assert len(service.prompts) == 1


# ------------------------------------------------------------------------------------------------ sessions

ROUNDS = [hermes("add", {"a": n}) for n in range(4)] + [f"<think>\n?\n</think>\n\nI add.\n{CALL}", "Done."]


def chat_agent(client):
    messages = [{"role": "system", "content": SYSTEM}, *ASK]
    for at in range(len(ROUNDS)):
        message = say(client, messages, tools=TOOLS).choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(at)})


@pytest.mark.parametrize("stream", [False, True])
def test_tool_turns_are_one_sequence_with_the_ids_of_a_chat(stream):
    """P13: a program that gives back what it got must not begin roots, nor have text encoded again."""
    found = []
    for kind in ("chat", "responses"):
        with session_of(ROUNDS, size=1) as (client, session, service, _):
            if kind == "chat":
                chat_agent(client)
            else:
                ask, history = Asker(client, stream, instructions=SYSTEM), [user(ASK[0]["content"])]
                for at in range(len(ROUNDS)):
                    output = ask(history).output
                    calls = [item for item in output if item.type == "function_call"]
                    assert len(calls) == (at < 5)
                    history += [*output, *(result(call, str(at)) for call in calls)]
            [row] = session.tree.rows()
        assert [turn.parent for turn in row.path] == [None, *row.path[:-1]]
        assert len(session.tree.turns) == len(ROUNDS)
        assert service.prompts == [turn.prompt_ids for turn in row.path]
        assert (session.counts["tool_calls"], session.counts["malformed_calls"]) == (5, 0)
        found.append([turn.ids for turn in row.path])
    assert found[0] == found[1]


@pytest.mark.parametrize("together", [True, False])
def test_a_result_behind_each_call_goes_on_with_the_answer(together):
    """Programs that write call, result, call, result began a root; and two answers must not become one."""
    one, two = hermes("add", {"a": 1}), hermes("look_up", {})
    texts = [f"I add.\n{one}\n{two}", "Done."] if together else [one, two, "Done."]
    with session_of(texts) as (client, session, _, _):
        ask, history = Asker(client, False), [user(ASK[0]["content"])]
        for _ in range(len(texts)):
            for item in ask(history).output:
                history += [item, *([result(item, "3")] if item.type == "function_call" else [])]
        turns = session.tree.turns
    assert [turn.parent for turn in turns] == [None, *turns[:-1]]
    calls = [len(each["tool_calls"]) for each in turns[-1].messages if each.get("tool_calls")]
    assert calls == ([2] if together else [1, 1])


def test_an_answer_is_gone_on_with_by_its_id():
    """Without its items; its instructions are not inherited, and it may be gone on with twice."""
    with session_of(["<think>x</think>one", CALL, "two", "three"], tokenizer=TOKENIZERS["qwen3"]) as (
        *(client, session, service),
        _,
    ):
        ask = Asker(client, False)
        first = ask("How many?", instructions=SYSTEM)
        second = ask("And now?", previous_response_id=first.id, instructions=SYSTEM)
        [call] = [item for item in second.output if item.type == "function_call"]
        third = ask([result(call, "3")], previous_response_id=second.id, instructions=SYSTEM)
        assert third.previous_response_id == second.id
        ask("Else?", previous_response_id=first.id)  # without the instructions: another dialogue
        with pytest.raises(openai.BadRequestError, match="is none in this session") as error:
            ask("a", previous_response_id="resp_0")
        assert error.value.code == "previous_response_not_found"
        other = client.with_options(base_url=f"{str(client.base_url).removesuffix('v1/')}untrained/v1")
        with pytest.raises(openai.BadRequestError, match="is none here"):
            other.responses.create(model="m", input="a", previous_response_id=first.id)
    one, two, three, four = session.tree.turns
    assert (one.parent, two.parent, three.parent, four.parent) == (None, one, two, None)
    assert SYSTEM not in TOKENIZERS["qwen3"].decode(four.prompt_ids)
    assert [message["role"] for message in four.messages] == ["user", "assistant", "user", "assistant"]
    assert service.prompts == [turn.prompt_ids for turn in session.tree.turns]


@pytest.mark.parametrize("tools", [[], FUNCTIONS])
def test_a_count_is_the_usage_of_the_next_request_and_no_turn(tools):
    """P15: a program that shortens its history by a wrong count fails at the limit of its context."""
    with session_of([CALL, "two", "three"], size=1) as (client, session, service, _):
        history, before = [user("How many?")], None
        for at in range(3):
            fields = {"model": "m", "input": history, "tools": tools, "instructions": SYSTEM}
            if before is not None and at == 2:
                fields |= {"previous_response_id": before.id, "input": [user("more")]}
            count = client.responses.input_tokens.count(**fields)
            assert len(session.tree.turns) == at
            before = client.responses.create(**fields)
            assert count.input_tokens == before.usage.input_tokens == len(service.prompts[-1])
            calls = [item for item in before.output if item.type == "function_call"]
            history += [*before.output, *(result(call, "3") for call in calls)]
            history += [] if calls else [user("more")]
        assert [turn.parent is None for turn in session.tree.turns] == [True, False, False]
        assert client.responses.input_tokens.count(model="m", input="a", tool_choice="none").input_tokens


def test_a_signature_chooses_among_equal_answers():
    """Of two answers with the same words, the one that the program goes on with must get the turn."""
    texts = ["<think>a</think>same", "<think>b</think>same", "next"]
    with session_of(texts, tokenizer=TOKENIZERS["qwen3"]) as (client, session, _, _):
        ask = Asker(client, False, include=["reasoning.encrypted_content"])
        first, _ = (ask("How many?") for _ in range(2))
        ask([user("How many?"), *first.output, user("more")])
    one, _, three = session.tree.turns
    assert three.parent is one


def test_a_model_that_is_untrained_is_answered_and_no_turn():
    """A title that a helper model writes would be trained with the reward of the work."""
    with session_of(["work", "title", "title", "more"]) as (client, session, service, http):
        ask = Asker(client, False)
        first = ask("How many?")
        assert client.responses.create(model="small:untrained", input="A title?").output_text == "title"
        chat = client.chat.completions.create(model="small:untrained", messages=ASK)
        assert chat.choices[0].message.content == "title"
        ask([user("How many?"), *first.output, user(":untrained")])
        headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}
        bad = http.post(f"/s/{session.id}/v1/responses", content='{"model": ":untrained"', headers=headers)
        assert bad.status_code == 400
        assert client.models.retrieve("small:untrained").id == "small"
    assert len(session.tree.turns) == 2
    assert session.tree.turns[1].parent is session.tree.turns[0]
    assert session.counts["untrained_requests"] == 2
    assert len(service.prompts) == 4


def test_a_repeated_request_gets_the_same_answer_and_limits_are_refused():
    """As a chat: a client repeats what was lost, and shortens its history at a limit."""
    with session_of(["one", "two"], max_turns=1) as (client, session, _, _):
        first = client.responses.create(model="m", input="a", temperature=2)
        again = client.responses.create(
            model="m", input="a", temperature=2, extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again.id == first.id
        with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
            client.responses.create(model="m", input="b")
        assert error.value.code == "context_length_exceeded"
    assert session.counts["overridden_fields"] == 1
    assert TOKENIZER.decode(session.tree.turns[0].tokens).startswith("one")
    assert more()["role"] == "user"
