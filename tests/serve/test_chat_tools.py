"""Tools in a chat as clients see them: the openai package, and a model that answers what a test gives it."""

import json
import logging
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
from chat_templates import CALLING, FAMILIES, tokenizer_of
from servers import MODEL, served

from quatrain.engine.service import Progress
from quatrain.types.piece import Piece

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds – for ever.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A"}}},
    },
}
LOOK = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
TOOLS = [ADD, LOOK]
ASK = [{"role": "user", "content": "How many?"}]
NAMED = {"type": "function", "function": {"name": "add"}}
NESTED = {"a": 1, "b": [{"c": None}, 'ü 🙂 "x" </tool_call>'], "d": {"e": {"f": [1.5, True]}}}
TOKENIZERS = {name: tokenizer_of(family) for name, family in (FAMILIES | CALLING).items()}
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"


class Scripted:
    """In place of an `EngineService`: answers each sequence with the tokens of a text, a few at a time.

    Of several texts, each answers one request, and the last those that follow.
    """

    cannot_see = cannot_constrain = "it answers texts"

    def __init__(self, tokenizer, *texts, end=True, size=3):
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self._answers = [[*ids, *[tokenizer.eos_token_id] * end] for ids in encoded]
        self._reason, self._size = "stop" if end else "length", size
        self.prompts, self.cancelled, self.version, self.error = [], [], 0, None

    def start(self, requests, listener):
        self.prompts += [request.prompt.input_ids.tolist() for request in requests]
        keys = list(range(len(requests)))
        ids = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        for number in keys:
            for at in range(0, len(ids), self._size):
                part = ids[at : at + self._size]
                ended = self._reason if at + self._size >= len(ids) else None
                listener(number, Progress(Piece([*part], [-0.5] * len(part), [0] * len(part)), ended))
        done = Future()
        done.set_result(keys)
        return done

    def drop(self, keys):
        self.cancelled += keys

    def close(self):
        """Nothing runs."""


@contextmanager
def answering(texts, name="qwen2.5", **options):
    """(the openai package's client, an HTTP client, the service) of a server whose model says these texts."""
    tokenizer = TOKENIZERS[name]
    service = Scripted(tokenizer, *([texts] if isinstance(texts, str) else texts), **options)
    arch = SimpleNamespace(vocab_size=len(tokenizer), max_position=10_000)
    with (
        served(service, arch, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield client, http, service


def ask(client, messages=ASK, **options):
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "tools": TOOLS, **options})


def asked_twice(client, **options):
    """(content, [(name, arguments)], finish reason) of the answer, which a stream has too."""
    [choice] = ask(client, **options).choices
    calls = choice.message.tool_calls or []
    whole = choice.message.content, [(c.function.name, c.function.arguments) for c in calls]
    assert all(call.type == "function" for call in calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert len({call.id for call in calls}) == len(calls)

    said, streamed, reasons = None, {}, []
    for event in ask(client, stream=True, **options):
        [part] = event.choices
        assert part.finish_reason is None or not reasons
        reasons += [part.finish_reason] if part.finish_reason else []
        if part.delta.content is not None:
            assert not streamed
            said = (said or "") + part.delta.content
        for call in part.delta.tool_calls or []:
            assert (call.index, call.type) == (len(streamed), "function")  # whole, in one event
            assert call.id
            streamed[call.index] = call.function.name, call.function.arguments
    assert (said, list(streamed.values()), reasons) == (*whole, [choice.finish_reason])

    if choice.finish_reason == "length":  # which the package refuses to put together
        return (*whole, choice.finish_reason)
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == choice.finish_reason
    assert final.message.content == choice.message.content
    made = [(c.function.name, c.function.arguments) for c in final.message.tool_calls or []]
    assert made == whole[1]
    return (*whole, choice.finish_reason)


def hermes(name, arguments):
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


def as_text(arguments):
    return json.dumps(arguments, ensure_ascii=False)


LLAMA = '{"name": "add", "parameters": {"a": 1}}'
ANSWERS = {
    "a call": ("qwen2.5", hermes("add", {"a": 1}), None, [("add", '{"a": 1}')]),
    "nested and unicode": ("qwen2.5", hermes("add", NESTED), None, [("add", as_text(NESTED))]),
    "two calls": (
        "qwen3",
        f"I look – ü.\n{hermes('look_up', {})}\n{hermes('add', {'a': 2})}\n",
        "I look – ü.",
        [("look_up", "{}"), ("add", '{"a": 2}')],
    ),
    "between thoughts": (
        "qwen3",
        f"<think>\n<tool_call>x</tool_call>\n</think>\n\n{hermes('add', {})}",
        "<think>\n<tool_call>x</tool_call>\n</think>",
        [("add", "{}")],
    ),
    "text after it": ("hermes", f"{hermes('add', {})}\nDone.", "\nDone.", [("add", "{}")]),
    "Llama": ("llama3.1", LLAMA, None, [("add", '{"a": 1}')]),
    "two of Llama": ("llama3.1", f"{LLAMA}; {LLAMA}", None, [("add", '{"a": 1}')] * 2),
    "python tag": ("llama3.1", f"<|python_tag|>{LLAMA}", None, [("add", '{"a": 1}')]),
    "a method": ("llama3.1", 'look_up.call(q="x")', None, [("look_up", '{"q": "x"}')]),
    "an unknown name": ("qwen2.5", hermes("other", {}), None, [("other", "{}")]),
}


HARMONY = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ANSWERS |= {
    "Ministral": ("ministral", '[TOOL_CALLS]add[ARGS]{"a": 1}', None, [("add", '{"a": 1}')]),
    "Ministral after text": (
        "ministral",
        '[THINK]I "add"[/THINK]Both.[TOOL_CALLS]add[ARGS]{"a": {"b": "[TOOL_CALLS]"}}'
        "[TOOL_CALLS]look_up[ARGS]{}",
        "Both.",
        [("add", '{"a": {"b": "[TOOL_CALLS]"}}'), ("look_up", "{}")],
    ),
    "Mistral's list": (
        "ministral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": {}}]',
        None,
        [("add", '{"a": 1}'), ("look_up", "{}")],
    ),
    "Qwen3-Coder": (
        "qwen3-coder",
        "I add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "I add.",
        [("add", '{"a": 1}')],
    ),
    "GLM-4.5": (
        "glm-4.5",
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "\n<think></think>",
        [("add", '{"a": 1}')],
    ),
    "Gemma 4": (
        "gemma4",
        '<|channel>thought\nadd?<channel|><|tool_call>call:add{a:1,s:<|"|>{"<|"|>}<tool_call|>',
        None,
        [("add", '{"a": 1, "s": "{\\""}')],
    ),
    "OLMo 3": (
        "olmo3",
        "<function_calls>add(a=1)\nlook_up()</function_calls>",
        None,
        [("add", '{"a": 1}'), ("look_up", "{}")],
    ),
    "Phi-4-mini": (
        "phi4-mini",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
        None,
        [("add", '{"a": 1}')],
    ),
    "Harmony": (
        "gpt-oss",
        HARMONY % "hm" + ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        None,
        [("add", '{"a": 1}')],
    ),
    "Harmony, the header's other order": (
        "gpt-oss",
        HARMONY % "hm" + TO_ADD + '{"a": 1}<|call|>',
        None,
        [("add", '{"a": 1}')],
    ),
    "Harmony, a word before": (
        "gpt-oss",
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + TO_ADD + '{"a": 1}',
        "I add.",
        [("add", '{"a": 1}')],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_parsed_and_streamed_whole(name):
    family, text, content, calls = ANSWERS[name]
    with answering(text, family) as (client, _, _):
        assert asked_twice(client) == (content, calls, "tool_calls")


FINALS = {
    "the final channel": ("<|channel|>final<|message|>4 < 5", "4 < 5", None),
    "after thoughts": (HARMONY % "2 + 2\n" + "<|channel|>final<|message|>4", "4", "2 + 2\n"),
    "thoughts alone": ("<|channel|>analysis<|message|>2 +", "", "2 +"),
    "cut in a header": (HARMONY % "so" + "<|channel|>fin", "", "so"),
    "without a channel": ("4", "4", None),
    "twice": (HARMONY % "a" + HARMONY % "b" + "<|channel|>final<|message|>4", "4", "a\n\nb"),
    "without an end": (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>4",
        "4",
        "a",
    ),
}


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FINALS)
def test_the_content_of_harmony_is_its_final_channel(name, size, tools):
    """No header, name of a channel or thought reaches the content; thoughts have a field of their own."""
    text, content, thoughts = FINALS[name]
    with answering(text, "gpt-oss", size=size) as (client, http, _):
        body = {"model": MODEL, "messages": ASK, "tools": tools, "logprobs": True}
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        message = choice["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, thoughts)
        names = "".join(each["token"] for each in choice["logprobs"]["content"])
        assert names == f"{text}<|return|>"  # of every token, thoughts and markers too
        deltas = [event.choices[0].delta for event in ask(client, tools=tools, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == content
    said = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(said) == (thoughts or "")


def test_without_tools_a_call_of_harmony_stays_text_and_raw_completions_are_as_they_were():
    text = HARMONY % "hm" + TO_ADD + '{"a": 1}'
    with answering(text, "gpt-oss") as (client, http, _):
        [choice] = ask(client, tools=[]).choices
        assert choice.message.content == "<|start|>assistant" + TO_ADD + '{"a": 1}'
        raw = http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).json()["choices"][0]["text"]
        assert raw == 'analysishmassistantcommentary to=functions.add json{"a": 1}'


@pytest.mark.parametrize("family", ["ministral", "gemma4"])
def test_thoughts_between_special_tokens_have_a_field_of_their_own(family):
    begin, end = {"ministral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>thought\n", "<channel|>")}[
        family
    ]
    with answering(f"{begin}2 + 2{end}4", family, size=1) as (client, _, _):
        message = ask(client).choices[0].message
        assert (message.content, message.reasoning_content) == ("4", "2 + 2")
        deltas = [event.choices[0].delta for event in ask(client, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "4"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "2 + 2"


@pytest.mark.parametrize("name", ["ministral", "qwen3-coder", "gpt-oss", "glm-4.5", "gemma4", "olmo3"])
def test_calls_are_begun_in_the_form_of_the_template(name):
    rest = {
        "ministral": '{"a": 7}',
        "qwen3-coder": "\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        "gpt-oss": '{"a": 7}<|call|>',
        "glm-4.5": "\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "gemma4": "{a:7}<tool_call|>",
        "olmo3": "a=7)</function_calls>",
    }[name]
    with answering(rest, name) as (client, _, _):
        assert asked_twice(client, tool_choice=NAMED) == (None, [("add", '{"a": 7}')], "tool_calls")


def test_a_dialogue_of_harmony_goes_on_after_a_call():
    text = TO_ADD + '{"a": 1}<|call|>'
    with answering([text, "<|channel|>final<|message|>2"], "gpt-oss") as (client, _, service):
        said = ask(client).choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "2"}
        assert ask(client, messages=[*ASK, said, result]).choices[0].message.content == "2"
    assert (
        TOKENIZERS["gpt-oss"]
        .decode(service.prompts[-1])
        .endswith(
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|><|start|>functions.add '
            'to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
        )
    )


def test_a_server_warns_at_its_start_of_calls_that_are_not_read(caplog):
    odd = (
        FAMILIES["qwen2.5"]
        .template.replace("'<tool_call>\\n{", "'<<call>>\\n{")
        .replace("}\\n</tool_call>'", "}'")
    )
    TOKENIZERS["odd"] = tokenizer_of(replace(FAMILIES["qwen2.5"], template=odd))
    with caplog.at_level(logging.WARNING), answering("4", "odd"):
        assert "calls of tools may not be found in this model's answers" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), answering("4", "smollm2"), answering("4", "gpt-oss"):
        assert caplog.text == ""


NO_CALLS = {
    "text": "It is 4, <b>not</b> 5 <tool",
    "white space": " \n 4 \n",
    "nothing": "",
    "no JSON": "I say <tool_call>\nadd(1)\n</tool_call> so",
    "a number": "<tool_call>\n3\n</tool_call>",
    "cut": '<tool_call>\n{"name": "add", "argu',
    "infinity": '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    "half a character": '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "an object": '{"answer": 4}',
    "a block": "```python\nadd(4)\n```",
    "in thoughts": f"<think>{hermes('add', {})}</think>\n\n4",
}


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_stays_text(name):
    with answering(NO_CALLS[name]) as (client, _, _):
        content, calls, reason = asked_twice(client)
        assert (content or "", calls, reason) == (NO_CALLS[name], [], "stop")


def test_a_call_beside_a_malformed_one_and_a_cut_answer():
    text = f'{hermes("add", {"a": 1})}\n<tool_call>\n{{"name": "ad'
    with answering(text, end=False) as (client, _, _):
        cut = '\n<tool_call>\n{"name": "ad'
        assert asked_twice(client) == (cut, [("add", '{"a": 1}')], "length")


def test_text_is_held_back_only_where_a_call_may_begin():
    text = f"The answer is <b>4</b>.\n{hermes('add', {})}"
    with answering(text, size=1) as (client, _, _):
        parts = [event.choices[0].delta.content for event in ask(client, stream=True)]
    assert parts[0] is None
    # Each letter is a token; a first word may begin a call of a method, and `<` a tag.
    said = ["The", " a", *"nswer", " i", "s", " <b", ">", "4", "</b", ">", "."]
    assert [part for part in parts if part] == said


def test_without_tools_calls_are_text():
    text = hermes("add", {"a": 1})
    with answering(text) as (client, _, service):
        for options in ({"tools": openai.NOT_GIVEN}, {"tools": []}, {"tool_choice": "none"}):
            [choice] = ask(client, **options).choices
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"
        [of_none] = {tuple(prompt) for prompt in service.prompts}
        ask(client)
    tokenizer = TOKENIZERS["qwen2.5"]
    assert list(of_none) == reference(tokenizer, ASK, None)
    assert service.prompts[-1] == reference(tokenizer, ASK, TOOLS)


def reference(tokenizer, messages, tools, **variables):
    """The ids that transformers gives messages: with past arguments as objects, and without null fields."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    return tokenizer.encode(text, add_special_tokens=False)


def called(*calls, content=""):
    made = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(content, n=0, name="add"):
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{n}", "content": content}


TRANSCRIPTS = {
    "one": [*ASK, called(("add", {"a": 1})), result("2")],
    "nested and unicode": [
        {"role": "system", "content": "Be brief – ü."},
        *ASK,
        called(("look_up", NESTED)),
        result('{"found": "中 🙂"}', name="look_up"),
        {"role": "assistant", "content": "It is 中."},
        {"role": "user", "content": "And?"},
        called(("add", {})),
        result(""),
    ],
    "two calls": [
        *ASK,
        called(("add", {"a": 1}), ("look_up", {"q": "é"}), content="Both."),
        result("2"),
        result("x", 1, "look_up"),
    ],
}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "hermes"])
@pytest.mark.parametrize("transcript", TRANSCRIPTS)
def test_prompt_ids_of_transcripts_are_those_of_transformers(name, transcript):
    """As clients send them: content null, arguments as text, parts, null fields, results without names."""
    tokenizer, dialogue = TOKENIZERS[name], TRANSCRIPTS[transcript]
    sent = []
    for message in dialogue:
        message = json.loads(json.dumps(message))
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = as_text(call["function"]["arguments"])
        if message["role"] == "assistant":
            message = {"refusal": None, "tool_calls": None, "audio": None, **message}
        if message["role"] == "tool":
            message["content"] = [{"type": "text", "text": message["content"]}]
            del message["name"]
        sent.append(message | ({} if message["content"] else {"content": None}))
    with answering("ok", name) as (_, http, service):
        body = {"model": MODEL, "messages": sent, "tools": TOOLS, "return_token_ids": True}
        answer = http.post("/v1/chat/completions", json=body)
        if name == "llama3.1" and transcript == "two calls":  # whose template takes one call
            assert answer.status_code == 400
            assert "only supports single tool-calls" in answer.json()["error"]["message"]
            return
        assert answer.status_code == 200, answer.text
        expected = reference(tokenizer, dialogue, TOOLS)
        assert service.prompts == [expected]
        assert answer.json()["prompt_token_ids"] == expected


def test_a_message_of_the_package_is_sent_back_as_it_came():
    with answering(f"Look:\n{hermes('add', {'a': 1})}") as (client, _, service):
        said = ask(client).choices[0].message
        [call] = said.tool_calls
        new = [said, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        ask(client, messages=[*ASK, *new])
    dialogue = [*ASK, called(("add", {"a": 1}), content="Look:"), result("2")]
    assert service.prompts[-1] == reference(TOKENIZERS["qwen2.5"], dialogue, TOOLS)


def test_the_example_of_the_page_runs(capsys):
    section = DOCS.read_text("utf-8").partition("\n## Tools\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    call = hermes("add", {"a": 17, "b": 25})
    with answering([call, "It is 42."]) as (client, _, service):
        assert "http://127.0.0.1:8000/v1" in code
        exec(code.replace("http://127.0.0.1:8000/v1", str(client.base_url)), {})
    assert capsys.readouterr().out == "It is 42.\n"
    said = TOKENIZERS["qwen2.5"].decode(service.prompts[1])
    assert f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>" in said


FORCED = {
    "qwen2.5": ('<tool_call>\n{"name": "add", "arguments":', ' {"a": 7}}\n</tool_call>'),
    "qwen3": ('<tool_call>\n{"name": "add", "arguments":', ' {"a": 7}}\n</tool_call>'),
    "hermes": ('<tool_call>\n{ "name": "add", "arguments":', ' {"a": 7}}\n</tool_call>'),
    "llama3.1": ('{"name": "add", "parameters":', ' {"a": 7}}'),
}


@pytest.mark.parametrize("name", FORCED)
def test_a_call_is_begun_with_given_tokens(name):
    begun, rest = FORCED[name]
    tokenizer = TOKENIZERS[name]
    given = tokenizer.encode(begun, add_special_tokens=False)
    with answering(rest, name) as (client, _, service):
        assert asked_twice(client, tool_choice=NAMED) == (None, [("add", '{"a": 7}')], "tool_calls")
        answer = ask(client, tool_choice=NAMED, extra_body={"return_token_ids": True})
    assert service.prompts[-1] == [*reference(tokenizer, ASK, TOOLS), *given]
    assert answer.prompt_token_ids == service.prompts[-1]
    assert answer.choices[0].token_ids == [
        *tokenizer.encode(rest, add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    before = begun[: begun.index("add")]
    with answering(f"look_up{begun[begun.index('add') + 3 :]}{rest}", name) as (client, _, service):
        answer = asked_twice(client, tool_choice="required")
        assert answer == (None, [("look_up", '{"a": 7}')], "tool_calls")
    text = tokenizer.decode(service.prompts[-1])
    assert text.endswith(before)


def test_a_begun_call_that_is_malformed_stays_text_with_its_beginning():
    begun, _ = FORCED["qwen2.5"]
    with answering(" {a: 1", end=False) as (client, _, _):
        assert asked_twice(client, tool_choice=NAMED) == (f"{begun} {{a: 1", [], "length")


def test_a_call_cannot_be_begun_in_other_forms():
    with answering("4", "gemma3") as (client, _, service):
        for choice in ("required", NAMED):
            with pytest.raises(openai.BadRequestError, match="in a form that is read") as error:
                ask(client, tool_choice=choice)
            assert error.value.param == "tool_choice"
    assert service.prompts == []


def test_tools_that_the_template_does_not_write_are_warned_of_once(caplog):
    with answering("4", "smollm2") as (client, _, _), caplog.at_level(logging.WARNING):
        ask(client)
        ask(client)
    assert caplog.text.count("does not write the descriptions of tools") == 1


BAD = {
    "no function": ({"tools": [{}]}, "tools", "a tool must be"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools", "a tool must be"),
    "another type": ({"tools": [{"type": "web_search"}]}, "tools", "a tool must be"),
    "no list": ({"tools": ADD}, "tools", "list"),
    "no schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools",
        "a tool must be",
    ),
    "half a character": (
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        "tools",
        "Unicode",
    ),
    "twice": ({"tools": [ADD, ADD]}, "tools", "a name of their own"),
    "required without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice", "with tools"),
    "an unknown tool": (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "the tools are add, look_up",
    ),
    "an unknown choice": ({"tool_choice": "any"}, "tool_choice", "must be"),
    "allowed tools": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be"),
    "arguments that are no JSON": (
        {"messages": [*ASK, called(("add", "{a")), result("2")]},
        "messages",
        "must be an object, or its JSON text",
    ),
    "arguments that are no object": (
        {"messages": [*ASK, called(("add", "[1]")), result("2")]},
        "messages",
        "must be an object, or its JSON text",
    ),
    "a call without a name": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages",
        "past tool calls",
    ),
    "no content and no calls": (
        {"messages": [*ASK, {"role": "assistant", "content": None}]},
        "messages",
        "`content`",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "messages have pictures: it answers texts",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages",
        "parts that are texts",
    ),
    "a format": ({"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
    "audio": ({"audio": {"voice": "x"}}, "audio", "leave it out"),
    "alternatives": ({"logprobs": True, "top_logprobs": 1}, "top_logprobs", "0"),
    "a bias": ({"logit_bias": {"3": 1}}, "logit_bias", "leave it out"),
    "a variable that the template does not read": (
        {"chat_template_kwargs": {"thinking": True}},
        "chat_template_kwargs",
        "must name variables",
    ),
    "a variable of the rendering": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
        "must not have add_generation_prompt",
    ),
}


def test_bad_requests_get_one_error_that_names_the_field():
    with answering("4", "qwen3") as (_, http, service):
        for name, (fields, field, named) in BAD.items():
            body = json.dumps({"model": MODEL, "messages": ASK, "tools": TOOLS, **fields})
            headers = {"Content-Type": "application/json"}
            answer = http.post("/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"] == field, (name, error)
            assert named in error["message"], (name, error)
            assert "\n" not in error["message"], (name, error)
        assert service.prompts == []


def test_null_fields_of_a_tool_are_left_out_of_the_prompt():
    """Templates write descriptions as JSON: `"strict": null` was a part of the prompt."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    plain = {"type": "function", "function": {"name": "add", "parameters": schema}}
    nulls = {**plain, "id": None, "function": {**plain["function"], "description": None, "strict": None}}
    with answering("5") as (client, _, service):
        for tool in (plain, nulls):
            ask(client, tools=[tool])
    without, with_nulls = service.prompts
    assert without == with_nulls
    assert '"default": null' in TOKENIZERS["qwen2.5"].decode(without)


def test_fields_that_clients_send_are_taken():
    with answering("4", "qwen3") as (client, _, service):
        answer = ask(
            client,
            model="any-name",
            parallel_tool_calls=False,
            store=True,
            metadata={"a": "b"},
            user="me",
            service_tier="flex",
            reasoning_effort="low",
            verbosity="low",
            prompt_cache_key="x",
            safety_identifier="y",
            response_format={"type": "text"},
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    assert (answer.model, answer.choices[0].message.content) == (MODEL, "4")
    tokenizer = TOKENIZERS["qwen3"]
    assert service.prompts == [reference(tokenizer, ASK, TOOLS, enable_thinking=False)]


def test_tokens_are_named_by_their_ids():
    text = f"ü{hermes('add', {})}"
    tokenizer = TOKENIZERS["qwen2.5"]
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    names = [f"token_id:{token}" for token in ids]
    own = {"extra_body": {"return_tokens_as_token_ids": True}}
    with answering(text) as (client, _, service):
        answer = ask(client, logprobs=True, **own)
        assert [each.token for each in answer.choices[0].logprobs.content] == names
        assert answer.prompt_token_ids == service.prompts[0]
        events = list(ask(client, logprobs=True, stream=True, **own))
        listed = [e.choices[0].logprobs.content for e in events if e.choices[0].logprobs]
        assert [each.token for part in listed for each in part] == names
        assert [hasattr(event, "prompt_token_ids") for event in events] == [True] + [False] * (
            len(events) - 1
        )
        assert events[0].prompt_token_ids == service.prompts[1]
        text = client.completions.create(model="x", prompt=[3, 4], logprobs=0, **own)
        assert text.choices[0].logprobs.tokens == names


GENERATE = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 30, "logprobs": 1}}


def test_tokens_of_a_stop_string_are_not_listed_before_it_is_whole():
    """A stop string that is one character of several tokens: a stream listed all of them but the last."""
    asked = {"messages": ASK, "model": MODEL, "logprobs": True, "stop": "🙂"}
    with answering("aü🙂b", size=1) as (client, _, _):
        events = [*client.chat.completions.create(**asked, stream=True)]
        [whole] = client.chat.completions.create(**asked).choices
    listed = [e.choices[0].logprobs.content for e in events if e.choices[0].logprobs]
    tokens = [token for part in listed for token in part]
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == whole.message.content == "aü"
    assert [token.token for token in tokens] == [token.token for token in whole.logprobs.content]


def test_generate_takes_ids_and_answers_ids():
    tokenizer = TOKENIZERS["qwen2.5"]
    ids = [*tokenizer.encode("four", add_special_tokens=False), tokenizer.eos_token_id]
    with answering("four", size=2) as (_, http, service):
        answer = http.post(
            "/inference/v1/generate", json=GENERATE | {"request_id": "r1", "model": "x"}
        ).json()
        [choice] = answer["choices"]
        assert (answer["request_id"], answer["model"]) == ("r1", MODEL)
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        assert choice == {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in ids]},
            "weight_versions": [0] * 5,
        }
        sampling = {
            "stop_token_ids": [ids[2]],
            "n": 2,
            "skip_special_tokens": False,
            "detokenize": False,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "logprobs": None,
        }
        body = {"token_ids": [3], "sampling_params": sampling, "cache_salt": "x", "features": None}
        answer = http.post("/inference/v1/generate", json=body).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [ids[:3]] * 2
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
        assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 2
        assert service.prompts == [[3, 4, 5], [3], [3]]
        assert set(service.cancelled) == {0, 1}
        assert answer["request_id"]


BAD_GENERATE = {
    "no ids": ({"sampling_params": {}}, "token_ids"),
    "empty": ({"token_ids": []}, "token_ids"),
    "outside": ({"token_ids": [10**6]}, "token_ids"),
    "a text": ({"token_ids": "a"}, "token_ids"),
    "long": ({"token_ids": [3] * 10_000}, "token_ids"),
    "parameters": ({"token_ids": [3], "sampling_params": [1]}, "sampling_params"),
    "twice": ({"token_ids": [3], "n": 1, "sampling_params": {"n": 2}}, "sampling_params"),
    "temperature": ({"token_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
    "penalty": ({"token_ids": [3], "sampling_params": {"presence_penalty": 1}}, "presence_penalty"),
    "alternatives": ({"token_ids": [3], "sampling_params": {"logprobs": 5}}, "logprobs"),
    "prompt": ({"token_ids": [3], "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    "a stream": ({"token_ids": [3], "stream": True}, "stream"),
    "unknown": ({"token_ids": [3], "features": {}}, "features"),
}


def test_bad_bodies_of_generate():
    with answering("4") as (_, http, service):
        for name, (body, field) in BAD_GENERATE.items():
            answer = http.post("/inference/v1/generate", json=body)
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["param"] == field, (name, answer.text)
        assert service.prompts == []
