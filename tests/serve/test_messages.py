"""Anthropic's Messages over HTTP: the anthropic package, and a model that answers what a test gives it."""

import copy
import io
import json
import threading
import time
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import anthropic
import pytest
from seeing import Says, encoded, seeing_tokenizer, shades, square
from servers import MODEL
from test_chat_tools import ADD, ASK, LOOK, TOKENIZERS, Scripted, answering
from test_pictures_in_requests import asks, url
from test_sessions import CALL, TOKENIZER, Held, more, say, session_of

from quatrain.types.piece import Piece
from quatrain.types.sampler import Progress

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
TOOLS = [
    {
        "name": tool["function"]["name"],
        **({"description": d} if (d := tool["function"].get("description")) else {}),
        "input_schema": tool["function"]["parameters"],
    }
    for tool in (ADD, LOOK)
]
BIG = 12345678901234567891
NUMBERS = (
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1.0, "b": {BIG}, "c": [-0.0, 2.5]}}}}\n</tool_call>'
)
TWO = f"{CALL}\n{NUMBERS}"
TURNS = ["I add. " + CALL, "<think>Hm.\n</think>\n\n" + NUMBERS, TWO, "Wait.\n\n" + CALL, CALL, "So 3."]
"""Five turns with tools, and the answer."""


def place(http, session):
    """The base URL of a session."""
    return f"{str(http.base_url).removesuffix('/')}/s/{session.id}"


@contextmanager
def messages_of(texts, **options):
    """(anthropic's client of a session, the session, the service, an HTTP client, OpenAI's client)."""
    with (
        session_of(texts, max_new_tokens=5000, **options) as (client, session, service, http),
        anthropic.Anthropic(
            base_url=place(http, session),
            api_key=session.key,
            max_retries=0,
            timeout=60,
        ) as own,
    ):
        yield own, session, service, http, client


@contextmanager
def served_to_anthropic(texts, name="qwen2.5", **options):
    """(anthropic's client, an HTTP client, the service) of a server without sessions."""
    with (
        answering(texts, name, **options) as (_, http, service),
        anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client, http, service


def ask(client, messages=ASK, *, stream=False, **fields):
    fields = {"model": MODEL, "max_tokens": 400, "messages": messages, **fields}
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        return events.get_final_message()


def rewritten(value):
    """JSON as a client in JavaScript writes it."""
    if isinstance(value, dict):
        return {name: rewritten(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(rewritten, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and abs(value) > 2**53:
        digits = f"{float(value):.17g}".partition("e")[0].replace(".", "")
        return int(digits.ljust(len(str(value)), "0"))
    return value


def results(answer):
    """What a client sends after an answer: it, and the results of its calls."""
    blocks = [
        {**block, "input": rewritten(block["input"])} if block["type"] == "tool_use" else block
        for block in answer.to_dict()["content"]
    ]
    came = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "3"}]}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": came}]


def chat_turns(client, turns):
    messages = list(ASK)
    for _ in range(turns):
        said = say(client, messages, tools=[ADD, LOOK]).choices[0].message
        calls = said.tool_calls or []
        messages += [
            said.model_dump(),
            *({"role": "tool", "tool_call_id": c.id, "content": "3"} for c in calls),
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_five_turns_with_tools_are_one_path_with_the_ids_of_a_chat(stream):
    """P13. The faults: each request is a root, as texts, thoughts, ids or numbers come back otherwise."""
    with session_of(TURNS, max_new_tokens=5000) as (client, _, service, _):
        chat_turns(client, 6)
        expected = service.prompts
    with messages_of(TURNS) as (client, session, service, _, _):
        messages = list(ASK)
        for turn in range(6):
            answer = ask(client, messages, tools=TOOLS, stream=stream)
            assert answer.stop_reason == ("end_turn" if turn == 5 else "tool_use")
            messages += results(answer)
        [row] = session.tree.rows()
    assert service.prompts == expected
    assert [turn.parent for turn in session.tree.turns] == [None, *session.tree.turns[:-1]]
    assert len(row.path) == len(row.owned) == 6
    assert session.counts["tool_calls"] == 6


THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ANSWERS = {
    "text": ("Hello.", [("text", "Hello.")], "end_turn"),
    "thoughts": (THOUGHT + "It is 3.", [("thinking", "Let me see."), ("text", "It is 3.")], "end_turn"),
    "a call": (CALL, [("tool_use", {"a": {"b": ["ü", None]}})], "tool_use"),
    "all": (
        f"{THOUGHT}I add.\n{CALL}",
        [("thinking", "Let me see."), ("text", "I add."), ("tool_use", {"a": {"b": ["ü", None]}})],
        "tool_use",
    ),
    "thoughts of a call": (f"<think>{CALL}</think>No.", [("thinking", CALL), ("text", "No.")], "end_turn"),
    "thoughts alone": ("<think>On and on", [("thinking", "On and on")], "end_turn"),
    "thoughts in the text": ("Well <think>a</think> b", [("text", "Well <think>a</think> b")], "end_turn"),
    "nothing": ("", [], "end_turn"),
    "a tag": ("<thin", [("text", "<thin")], "end_turn"),
}


def blocks_of(answer):
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in answer.content]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_blocks_whole_and_streamed(kind, size):
    text, blocks, reason = ANSWERS[kind]
    with served_to_anthropic(text, size=size) as (client, _, service):
        for stream in (False, True):
            answer = ask(client, tools=TOOLS, stream=stream)
            assert (blocks_of(answer), answer.stop_reason, answer.stop_sequence) == (blocks, reason, None)
            assert (answer.role, answer.type, answer.model) == ("assistant", "message", MODEL)
            for block in answer.content:
                if block.type == "thinking":
                    assert block.signature.startswith("q1.")
                if block.type == "tool_use":
                    assert (block.id[:6], len(block.id), block.name) == ("toolu_", 15, "add")
            sampled = len(TOKENIZER.encode(text, add_special_tokens=False)) + 1
            assert answer.usage.output_tokens == sampled
            assert answer.usage.input_tokens == len(service.prompts[-1])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_thoughts_of_harmony_stand_where_they_were_said(size):
    """The fault: thoughts after a text stood before it in the whole answer, or in a long event."""
    text = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
        "<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
    )
    blocks = [("text", "I look."), ("thinking", "Hm."), ("text", "\n\nIt is 3.")]
    with served_to_anthropic(text, "gpt-oss", size=size) as (client, _, _):
        for stream in (False, True):
            assert blocks_of(ask(client, tools=TOOLS, stream=stream)) == blocks


def test_instructions_behind_a_billing_header_are_kept():
    """The fault: a system prompt that is one text was left out whole."""
    header = "x-anthropic-billing-header: cch=a;"
    with messages_of("x") as (client, _, service, _, _):
        for system in ("Be brief.", f"{header}\nBe brief.", [{"type": "text", "text": header}], []):
            ask(client, system=system)
    one, same, none, without = service.prompts
    assert one == same
    assert none == without


def test_the_events_of_a_stream_in_their_order():
    """Each has a line with its type; blocks follow one another; the last numbers are those of all."""
    with served_to_anthropic(f"{THOUGHT}I add.\n{CALL}") as (_, http, service):
        body = {"model": "any", "max_tokens": 99, "messages": ASK, "tools": TOOLS, "stream": True}
        answer = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 3)
    at = -1
    for event in events[1:-2]:
        at += event["type"] == "content_block_start"
        assert event["index"] == at
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta"),
    ]
    assert (deltas.count("signature_delta"), deltas.count("input_json_delta")) == (1, 1)
    assert deltas.count("thinking_delta") > 1
    ending = events[-2]
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ending["usage"]["input_tokens"] == len(service.prompts[0])
    assert ending["usage"]["cache_creation_input_tokens"] == 0


def test_why_an_answer_ended():
    with served_to_anthropic("one two END three") as (client, _, _):
        for stream in (False, True):
            answer = ask(client, stop_sequences=["three", "END"], stream=stream)
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
            assert answer.content[0].text == "one two "
    with served_to_anthropic("one two", end=False) as (client, _, _):
        for stream in (False, True):
            answer = ask(client, stop_sequences=["END"], stream=stream)
            assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)


@pytest.mark.parametrize("closes", [True, False])
def test_thoughts_that_the_template_begins(closes):
    """The fault: thoughts before `</think>` were text, or calls in them were lost that a chat makes."""
    name = "qwen3"
    if name not in TOKENIZERS:
        pytest.skip("no template with variables")
    tokenizer = tokenizer_with_thoughts(TOKENIZERS[name])
    text = f"I think.\n</think>\n\n{CALL}" if closes else f"I think. {CALL}"
    for stream in (False, True):
        service = Scripted(tokenizer, text, "Done.")
        with messages_of("", service=service, tokenizer=tokenizer) as (client, session, _, _, _):
            answer = ask(client, tools=TOOLS, stream=stream)
            thoughts, call = answer.content
            assert (thoughts.thinking, call.input) == (
                "I think." if closes else text,
                {"a": {"b": ["ü", None]}},
            )
            ask(client, [*ASK, *results(answer)], tools=TOOLS)
        first, second = session.tree.turns
        assert second.parent is first


def tokenizer_with_thoughts(tokenizer):
    """Its template begins thoughts in each answer."""
    own = copy.deepcopy(tokenizer)
    own.chat_template += "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
    return own


def test_a_signature_chooses_among_equal_answers():
    """And makes no match: an answer that was edited begins a root, whatever its signature."""
    text = THOUGHT + "Same."
    with messages_of([text] * 5) as (client, session, _, _, _):
        first, second = ask(client), ask(client, stream=True)
        signatures = [answer.content[0].signature for answer in (first, second)]
        assert len(set(signatures)) == 2
        for answer in (first, second):
            ask(client, [*ASK, *results(answer)[:1], more()])
        edited = [
            {**results(first)[0], "content": [first.content[0].to_dict(), {"type": "text", "text": "Other"}]}
        ]
        ask(client, [*ASK, *edited, more()])
    one, two, of_one, of_two, root = session.tree.turns
    assert [one.signature, two.signature] == signatures
    assert (of_one.parent, of_two.parent, root.parent) == (one, two, None)


def counted(client, messages, **fields):
    return client.messages.count_tokens(model=MODEL, messages=messages, **fields).input_tokens


def read(usage):
    return usage.input_tokens + usage.cache_read_input_tokens


def test_the_count_is_that_of_the_next_request():
    """P15. The faults: counted as rendered anew, not as the tree goes on; or counting began a turn."""
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    with messages_of([THOUGHT + CALL, "two", "three"]) as (client, session, service, _, _):
        messages = list(ASK)
        for turn in range(2):
            fields = {"tools": TOOLS, "system": system}
            number = counted(client, messages, **fields)
            assert len(session.tree.turns) == turn
            answer = ask(client, messages, **fields)
            assert number == read(answer.usage) == len(service.prompts[-1])
            messages += results(answer) if turn == 0 else []
        forced = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}}
        assert counted(client, messages, **forced) == read(ask(client, messages, **forced).usage)
    with served_to_anthropic("x") as (client, _, _):
        assert counted(client, ASK) == read(ask(client).usage)
        assert client.beta.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == counted(
            client, ASK
        )


def test_what_is_kept_of_a_prompt_is_read_from_the_cache():
    class Keeping(Scripted):
        def start(self, requests, listener):
            def keeping(number, progress):
                listener(number, Progress(progress.piece, progress.finish_reason, cached=5))

            return super().start(requests, keeping)

    with messages_of("", service=Keeping(TOKENIZER, "x")) as (client, _, service, _, _):
        for stream in (False, True):
            usage = ask(client, stream=stream).usage
            assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
            assert usage.input_tokens == len(service.prompts[0]) - 5
        with client.messages.stream(model="m", max_tokens=9, messages=ASK) as events:
            [begun] = [event.message for event in events if event.type == "message_start"]
        assert read(begun.usage) == len(service.prompts[0])


def test_the_same_dialogue_as_a_chat_has_the_same_prompt():
    """Systems, results with errors, neighbours of one role, and what clients write anew in each request."""
    call = {"type": "tool_use", "id": "toolu_000000001", "name": "add", "input": {"a": 1}, "caller": None}
    done = {"type": "tool_result", "tool_use_id": "toolu_000000001", "content": "3", "is_error": True}
    kept = {"cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2;"}
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two", **kept}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I add.", "citations": None}, call]},
        {
            "role": "user",
            "content": [done, {"type": "text", "text": "And?"}, {"type": "text", "text": "Well?"}],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on"},
    ]
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "One\nTwo"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {"id": "000000001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "000000001", "content": "3"},
        {"role": "user", "content": "And?\nWell?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on"},
    ]
    system = [billing, {"type": "text", "text": "Be brief.", **kept}, {"type": "text", "text": "Be kind."}]
    with messages_of("x") as (client, _, service, _, chats):
        say(chats, chat, tools=[ADD, LOOK])
        ask(
            client,
            messages,
            tools=[{**tool, **kept, "type": "custom", "strict": True} for tool in TOOLS],
            system=system,
        )
        say(chats, [{"role": "system", "content": "Now."}, *ASK])
        ask(client, system="Now.", metadata={"user_id": "me"}, service_tier="auto")
        say(chats, ASK, tools=[ADD, LOOK], tool_choice="none")
        ask(client, tools=TOOLS, tool_choice={"type": "none"})
        say(chats, ASK, tools=[ADD, LOOK], tool_choice="required")
        ask(client, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert service.prompts[::2] == service.prompts[1::2]
    assert len(set(map(tuple, service.prompts))) == 4


def test_a_billing_header_that_changes_begins_no_root():
    """The fault: each request of Claude Code was a root, as the first block of its system prompt changes."""
    with messages_of(["one", "two"]) as (client, session, _, _, _):

        def system(hash_):
            return [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={hash_};"},
                {"type": "text", "text": "S"},
            ]

        first = ask(client, system=system("a"))
        ask(client, [*ASK, *results(first)[:1], more()], system=system("b"))
    assert session.tree.turns[1].parent is session.tree.turns[0]


def test_thinking_is_a_variable_of_templates_that_read_it():
    name = "qwen3"
    if name not in TOKENIZERS:
        pytest.skip("no template with variables")
    tokenizer = TOKENIZERS[name]
    with messages_of("", service=Scripted(tokenizer, "x"), tokenizer=tokenizer) as (
        client,
        _,
        service,
        _,
        chats,
    ):
        for thinking, variable in (("disabled", False), ("adaptive", True)):
            ask(client, thinking={"type": thinking})
            say(chats, ASK, extra_body={"chat_template_kwargs": {"enable_thinking": variable}})
        ask(client, thinking={"type": "enabled", "budget_tokens": 2000})
    off, chat_off, on, chat_on, budget = service.prompts
    assert (off, on, budget) == (chat_off, chat_on, chat_on)
    assert off != on
    with served_to_anthropic("x") as (client, _, service):  # a template without it
        ask(client, thinking={"type": "disabled"})
        ask(client)
    assert service.prompts[0] == service.prompts[1]


def test_the_policy_that_is_sampled_is_that_of_the_run():
    with messages_of("", service=Held(TOKENIZER, "x")) as (client, session, held, _, _):
        threading.Timer(0.5, held.answer).start()
        ask(
            client,
            extra_body={"temperature": 0.1, "top_p": 0.5, "top_k": 7},
            stop_sequences=["END"],
            max_tokens=30,
        )
    [owner] = held.owners
    assert (owner.sampling.temperature, owner.sampling.top_k, owner.sampling.top_p) == (0.7, 3, 1.0)
    assert (owner.sampling.max_new_tokens, owner.sampling.stop) == (30, ("END",))
    assert session.counts["overridden_fields"] == 3


def test_untrained_requests_and_roles():
    with messages_of("x") as (client, session, _, http, _):
        own = place(http, session)
        other = client.with_options(base_url=f"{own}/untrained")
        assert ask(other).content[0].text == "x"
        assert counted(other, ASK) > 0
        assert session.tree.turns == []
        role = client.with_options(base_url=f"{own}/role/judge")
        ask(role)
    assert len(session.roles["judge"].tree.turns) == 1


def test_a_request_that_is_repeated_is_answered_once():
    with messages_of(["one", "two"]) as (client, session, _, _, _):
        first = ask(client)
        again = ask(client, extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == first.id
    assert session.counts["replayed"] == 1


def test_errors_have_anthropics_form():
    """Status, type and message of each; the fault: OpenAI's form, in which such clients find no message."""
    with messages_of("x") as (client, session, _, http, _):
        own = place(http, session)
        wrong = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError, match="needs its key"):
            ask(wrong)
        with pytest.raises(anthropic.AuthenticationError) as raised:
            ask(wrong.with_options(base_url=str(http.base_url)))
        error = raised.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
        assert error["request_id"].startswith("req_")
        bearer = anthropic.Anthropic(base_url=own, auth_token=session.key, max_retries=0)
        assert ask(bearer).content[0].text == "x"
        with pytest.raises(anthropic.BadRequestError, match="temperature: Input should be"):
            ask(client.with_options(base_url=f"{own}/untrained"), extra_body={"temperature": -1})
        with pytest.raises(anthropic.NotFoundError, match=r"docs/serve\.md"):
            client.messages.batches.list()
        answer = http.get("/v1/messages")
        assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
        headers = {"x-api-key": session.key, "content-type": "application/json"}
        answer = http.post(f"{own}/v1/messages", content="x" * 33 * 2**20, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
        answer = http.post(f"{own}/v1/messages", content="{", headers=headers)
        assert (answer.status_code, "must be JSON" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("limit", ["positions", "tokens", "turns"])
def test_no_room_is_said_as_such_clients_look_for_it(limit):
    """The fault: a client that compacts its dialogue at these words gave up instead."""
    words = {"role": "user", "content": "many words " * 6000}
    options = {"turns": {"max_turns": 1}}.get(limit, {})
    with messages_of("x", **options) as (client, session, _, http, _):
        if limit == "positions":
            client = client.with_options(base_url=f"{place(http, session)}/untrained")
        if limit == "turns":
            ask(client)
        with pytest.raises(anthropic.BadRequestError) as raised:
            ask(client, [words if limit != "turns" else ASK[0]])
        message = raised.value.body["error"]["message"]
        assert "maximum context length" in message
        if limit == "turns":
            assert message.startswith("prompt is too long (maximum context length: an episode has")
            return
        number = counted(client, [words])
        most = {"positions": 9_999, "tokens": 1_999}[limit]
        assert message.startswith(f"prompt is too long: {number} tokens > {most} maximum (maximum context")


class Failing(Scripted):
    """Fails after some tokens."""

    def start(self, requests, listener):
        done = super().start(requests, lambda number, progress: None)
        listener(0, Progress(self.piece))
        listener(0, Progress(error="out of memory"))
        return done


def test_a_failure_is_an_event_of_the_stream_and_a_status_of_the_whole():
    service = Failing(TOKENIZER, "x")
    service.piece = Piece([5], [-1.0], [0])
    with messages_of("", service=service) as (client, _, _, _, _):
        with pytest.raises(anthropic.APIStatusError) as raised:
            ask(client, stream=True)
        assert raised.value.body["error"] == {"type": "api_error", "message": "out of memory"}
        service.piece = Piece([5], [-1.0], [0])
        with pytest.raises(anthropic.InternalServerError, match="out of memory") as raised:
            ask(client)
        assert raised.value.status_code == 503


def test_a_stream_that_waits_shows_that_it_goes_on(monkeypatch):
    monkeypatch.setattr("quatrain.serve.answering.PING_S", 0.1)
    held = Held(TOKENIZER, "late")
    with messages_of("", service=held) as (_, session, _, http, _):
        body = {"model": "any", "max_tokens": 99, "messages": ASK, "stream": True}
        threading.Timer(1.5, held.answer).start()
        answer = http.post(f"/s/{session.id}/v1/messages", json=body, headers={"x-api-key": session.key})
    first, *_ = answer.text.split("\n\n")
    assert first == 'event: ping\ndata: {"type": "ping"}'
    assert "message_stop" in answer.text


def test_a_client_that_leaves_frees_its_slots():
    held = Held(TOKENIZER, "late")
    with messages_of("", service=held) as (client, session, _, http, _):
        other = client.with_options(base_url=f"{place(http, session)}/untrained", timeout=1)
        with pytest.raises(anthropic.APITimeoutError):
            ask(other)
        deadline = time.monotonic() + 20
        while not held.cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_models_are_listed_for_anthropics_client():
    with served_to_anthropic("x") as (client, _, _):
        [model] = client.models.list()
        assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
        assert model.created_at.year > 2000
        assert client.models.retrieve(MODEL).id == MODEL


def test_pictures_are_those_of_a_chat():
    """In a message and in a result of a tool."""
    tokenizer = seeing_tokenizer()
    service = Says(tokenizer, "a", "b")
    source = {"type": "base64", "media_type": "image/png", "data": url(encoded(square(50))).partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Which?"}]
    with messages_of((), service=service, tokenizer=tokenizer) as (client, _, _, _, chats):
        ask(client, [{"role": "user", "content": content}])
        say(chats, [asks(50)])
        other = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages\.0\.content\.0\.source\.type: must be"
        ):
            ask(client, [{"role": "user", "content": [other]}])
    first, second = service.asked
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert shades(first.pictures, 0) == shades(second.pictures, 0)
    assert 50 in shades(first.pictures, 0)
    with (
        served_to_anthropic("x") as (client, _, _),
        pytest.raises(anthropic.BadRequestError, match="have pictures"),
    ):
        ask(client, [{"role": "user", "content": content}])


def test_the_example_of_the_page_runs():
    section = DOCS.read_text("utf-8").partition("\n## Anthropic's Messages\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    with served_to_anthropic("It is 42.") as (client, _, _):
        assert "http://127.0.0.1:8000" in code
        with redirect_stdout(io.StringIO()) as printed:
            exec(code.replace("http://127.0.0.1:8000", str(client.base_url)), {})
    assert printed.getvalue() == "It is 42.\n"
