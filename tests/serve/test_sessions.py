"""The sessions of agents over HTTP, with the openai package and a model that answers what a test gives it."""

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import openai
import pytest
from servers import MODEL, served
from test_chat_tools import ASK, TOKENIZERS, TOOLS, Scripted

from quatrain.data.turns import TurnTemplate
from quatrain.serve.sessions import Session, SessionRules, Sessions
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

TOKENIZER = TOKENIZERS["qwen2.5"]
PLACE = {"step": 1, "group_id": 1, "sample": 0, "n": 1}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": {"b": ["ü", null]}}}\n</tool_call>'


@contextmanager
def session_of(
    texts,
    *,
    max_turns=8,
    max_new_tokens=500,
    retries=0,
    transport=None,
    service=None,
    tokenizer=TOKENIZER,
    **options,
):
    """(an OpenAI client of a session, the session, the service, an HTTP client of the server)."""
    service = service or Scripted(tokenizer, *([texts] if isinstance(texts, str) else texts), **options)
    sampling = Sampling(4, max_new_tokens, 0.7, top_k=3)
    ids = TurnTemplate(tokenizer, (tokenizer.eos_token_id,)).prompt(tuple(ASK)).ids
    sessions = Sessions()
    prompt = Prompt(6, np.array(ids, np.int32), tuple(ASK))
    session = sessions.open(SessionRules(sampling, 11, 5, max_turns, 2000), prompt, 2)
    arch = SimpleNamespace(vocab_size=len(tokenizer), max_position=10_000)
    with (
        served(service, arch, tokenizer, token="the server's", sessions=sessions) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        openai.OpenAI(
            base_url=f"{url}/s/{session.id}/v1",
            api_key=session.key,
            max_retries=retries,
            timeout=60,
            http_client=None if transport is None else httpx.Client(transport=transport, timeout=60),
        ) as client,
    ):
        yield client, session, service, http


def say(client, messages, **fields):
    return client.chat.completions.create(model="any", messages=messages, **fields)


def more(text="more"):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_request_has_the_ids_that_were_sampled(stream):
    """Also where the tokens of the answer are not those of its text, and with calls."""
    with session_of(["hello", CALL, "done"], size=1) as (client, session, service, _):
        messages = list(ASK)
        for new in (more(), {"role": "tool", "content": "3"}, None):
            if stream:
                parts = list(say(client, messages, tools=TOOLS, stream=True))
                calls = [c for p in parts if p.choices for c in p.choices[0].delta.tool_calls or []]
                text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
                message = {"role": "assistant", "content": text or None}
                if calls:
                    message["tool_calls"] = [json.loads(c.model_dump_json(exclude={"index"})) for c in calls]
            else:
                message = say(client, messages, tools=TOOLS).choices[0].message.model_dump()
            if new is not None and new["role"] == "tool":
                new["tool_call_id"] = message["tool_calls"][0]["id"]
            messages += [message, new]
        [row] = session.tree.rows()
    assert len(row.path) == 3
    first, second, third = row.path
    assert service.prompts == [first.prompt_ids, second.prompt_ids, third.prompt_ids]
    assert second.prompt_ids[: len(first.ids)] == first.ids
    assert third.prompt_ids[: len(second.ids)] == second.ids
    written = TOKENIZER.decode(third.given)
    assert "3" in written
    assert session.counts["tool_calls"] == 1
    assert [turn.sampled.versions for turn in row.path] == [[0] * len(turn.tokens) for turn in row.path]


def test_the_policy_that_is_sampled_is_that_of_the_run():
    owners = []

    class Recording(Scripted):
        def start(self, requests, listener):
            owners.extend(request.own for request in requests)
            return super().start(requests, listener)

    with session_of("x", service=Recording(TOKENIZER, "x")) as (client, session, _, _):
        say(
            client, ASK, temperature=2, top_p=0.1, seed=4, frequency_penalty=1, stop="END", max_tokens=30, n=2
        )
    assert session.counts["overridden_fields"] == 4
    first, second = owners
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.7, 3, 1.0)
    assert (first.sampling.max_new_tokens, first.sampling.stop) == (30, ("END",))
    assert (first.seed, first.step, first.sequence_id, first.offset) == (11, 5, 6 * 4 + 2, 0)
    assert second.sequence_id != first.sequence_id
    assert len(session.tree.rows()) == 2


def test_a_session_needs_its_key_and_ends():
    with session_of("x") as (client, session, _, http):
        body = {"model": MODEL, "messages": ASK}
        path, plain = f"/s/{session.id}/v1/chat/completions", "/v1/chat/completions"

        def status(path, key):
            return http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        assert status(path, "wrong") == status("/s/other/v1/chat/completions", session.key) == 401
        assert http.post(path, json=body).status_code == 401
        assert status(plain, session.key) == 200  # by its key alone
        assert status(plain, "wrong") == 401
        assert (
            http.post("/weights", json={}, headers={"Authorization": f"Bearer {session.key}"}).status_code
            == 401
        )
        assert len(session.tree.turns) == 1
        assert client.models.list().data[0].max_model_len == 2000
        assert client.models.retrieve("whatever").id == MODEL


def test_a_closed_session_refuses_its_key():
    sessions = Sessions()
    rules = SessionRules(Sampling(1, 9), 1, 1, 1, 9)
    session = sessions.open(rules, Prompt(0, np.array([1], np.int32), "a"), 0)
    assert sessions.named(session.id) is sessions.of_key(session.key) is session
    asyncio.run(sessions.close(session))
    assert sessions.named(session.id) is sessions.of_key(session.key) is None
    other = Session(rules, session.prompt, 0)
    assert len({session.key, other.key, session.id, other.id}) == 4


def test_a_request_that_is_repeated_is_answered_once():
    with session_of(["one", "two", "three"]) as (client, session, _, _):
        first = say(client, ASK)
        again = say(client, ASK, extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == first.id
        assert len(session.tree.turns) == 1
        another = say(client, ASK)
        assert (another.id != first.id, another.choices[0].message.content) == (True, "two")
        keyed = say(client, [more("k")], extra_headers={"Idempotency-Key": "k"})
        assert say(client, [more("k")], extra_headers={"Idempotency-Key": "k"}).id == keyed.id
    assert session.counts["replayed"] == 2
    assert len(session.tree.turns) == 3


class Cutting(httpx.HTTPTransport):
    """Loses every third answer on its way."""

    count = 0

    def handle_request(self, request):
        response = super().handle_request(request)
        self.count += 1
        if self.count % 3 == 0:
            response.read()
            raise httpx.RemoteProtocolError("cut")
        return response


def test_an_openai_client_repeats_what_was_lost_on_its_way():
    answers = [f"answer {n}" for n in range(8)]
    found = []
    for transport in (None, Cutting()):
        with session_of(answers, retries=3, transport=transport) as (client, session, _, _):
            messages = list(ASK)
            for _ in range(6):
                messages += [say(client, messages).choices[0].message.model_dump(), more()]
            [row] = session.tree.rows()
            found.append([turn.ids for turn in row.path])
    assert found[0] == found[1]
    assert session.counts["replayed"] >= 2


class Slow(Scripted):
    """Answers two seconds after it was asked."""

    def start(self, requests, listener):
        done = Future()
        done.set_result([0])
        threading.Timer(2.0, lambda: Scripted.start(self, requests, listener)).start()
        return done


def test_an_answer_whose_client_has_left_is_kept_for_a_repetition_alone():
    with session_of("late", service=Slow(TOKENIZER, "late")) as (client, session, _, _):
        with pytest.raises(openai.APITimeoutError):
            say(client, ASK, timeout=0.8)
        deadline = time.monotonic() + 20
        while not (
            session.tree.turns and session.tree.turns[0].tokens and not session.tree.turns[0].is_known
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert session.tree.rows() == []
        assert (
            say(client, ASK, extra_headers={"x-stainless-retry-count": "1"}).choices[0].message.content
            == "late"
        )
        assert len(session.tree.rows()) == 1


class Later(Scripted):
    """Takes the first request when it is told to."""

    def start(self, requests, listener):
        if self.prompts:
            return super().start(requests, listener)
        self.taken, self.first = Future(), (requests, listener)
        self.prompts.append(requests[0].prompt.input_ids.tolist())
        return self.taken

    def take(self):
        self.taken.set_result([0])
        super().start(*self.first)


def test_a_stream_that_nobody_waits_for_when_it_begins_holds_no_room():
    """Catches an episode that ends early: its room was held for ever for a stream whose client had left while
    the request waited for the engine, or it counted as the last answer; and slots that sample for nobody."""
    limits = {"max_new_tokens": 9, "max_turns": 1}
    with session_of("", service=Later(TOKENIZER, "late"), **limits) as (client, session, later, _):
        with pytest.raises(openai.APITimeoutError):
            say(client, ASK, stream=True, timeout=0.4)
        time.sleep(0.7)  # its end is seen by now
        later.take()
        deadline = time.monotonic() + 20
        while not later.cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        again = say(client, ASK, extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == "late"
        [row] = session.tree.rows()
        assert (row.path, session.tree.turns[0].tokens) == ([session.tree.turns[1]], [])
        with pytest.raises(openai.BadRequestError, match="which are used up"):
            say(client, [*ASK, more()])


def test_a_stream_goes_to_the_repetition_that_waits_for_it():
    """Catches a stream that is read by a connection that is broken, and by its repetition with an error."""
    with session_of("", service=Later(TOKENIZER, "late")) as (_, session, later, http):
        path, headers = f"/s/{session.id}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        body = {"model": MODEL, "messages": ASK, "stream": True}
        with pytest.raises(httpx.TimeoutException):
            http.post(path, json=body, headers=headers, timeout=0.1)
        threading.Timer(0.15, later.take).start()
        answer = http.post(path, json=body, headers={**headers, "x-stainless-retry-count": "1"})
        parts = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == "late"
        assert len(session.tree.rows()) == 1


@pytest.mark.parametrize(
    ("limits", "fields", "refused", "message"),
    [
        ({"max_turns": 1}, {}, "turns", r"at most 1 answers \(rollout.max_turns\), which are used up"),
        ({"max_new_tokens": 4}, {}, "length", r"at most 4 that are sampled \(rollout.max_new_tokens\)"),
    ],
)
def test_limits_are_refused_in_the_form_that_agents_know(limits, fields, refused, message):
    with session_of("abc", size=10, **limits) as (client, session, _, _):
        answer = say(client, ASK).choices[0].message.model_dump()
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            say(client, [*ASK, answer, more()], **fields)
        assert raised.value.code == "context_length_exceeded"
        assert "maximum context length" in raised.value.message
    assert session.refused == refused
    assert len(session.tree.rows()) == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"messages": [*ASK, {"role": "assistant", "content": "I"}]}, "follows it"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "must have a `role` and a `content`"),
        ("chat/completions", {"messages": ASK, "quatrain": PLACE}, "leave it out"),
        ("chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}}, "must be"),
        ("completions", {"prompt": ["a", "b"]}, "has one prompt"),
        ("completions", {"prompt": "a", "echo": True}, "neither echo, logprobs above 0 nor"),
        ("completions", {"prompt": "a", "prompt_logprobs": 0}, "nor prompt_logprobs"),
    ],
)
def test_what_a_session_refuses(path, body, message):
    with session_of("x") as (_, session, _, http):
        answer = http.post(
            f"/s/{session.id}/v1/{path}",
            json={"model": MODEL, **body},
            headers={"Authorization": f"Bearer {session.key}"},
        )
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert session.tree.rows() == []
    assert session.refused is None


def test_ids_are_turns_too():
    with session_of(["ab", "cd", "ef"]) as (client, session, service, http):
        headers = {"Authorization": f"Bearer {session.key}"}

        def generate(ids):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 9}}
            answer = http.post(f"/s/{session.id}/inference/v1/generate", json=body, headers=headers).json()
            return answer["choices"][0]["token_ids"]

        prompt = session.prompt.input_ids.tolist()
        first = generate(prompt)
        second = generate([*prompt, *first, 5])
        said = client.completions.create(model="any", prompt=[*prompt, *first, 5, *second, 6])
        [row] = session.tree.rows()
    assert [turn.prompt_ids for turn in row.path] == service.prompts
    assert len(row.path) == 3
    assert said.choices[0].text == "ef"
    assert row.path[0].sequence_id == row.path[2].sequence_id == 26


def test_the_untrained_policy_is_no_turn():
    with session_of("x") as (client, session, _, _):
        other = client.with_options(base_url=f"{str(client.base_url).removesuffix('v1/')}untrained/v1")
        assert say(other, ASK, temperature=0).choices[0].message.content == "x"
    assert session.tree.turns == []


def test_the_untrained_policy_is_sampled_as_the_trained_one():
    """Catches answers of a helper that have the run's temperature and not its filters."""
    held = Held(TOKENIZER, "x")
    with session_of("", service=held) as (client, _, _, _):
        other = client.with_options(base_url=f"{str(client.base_url).removesuffix('v1/')}untrained/v1")
        found = []
        for own in ({}, {"temperature": 0.5, "top_p": 0.9, "extra_body": {"top_k": 5}}):
            with pytest.raises(openai.APITimeoutError):
                say(other, ASK, timeout=1, **own)
            sampling = held.owners[0].sampling
            found.append((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p))
    assert found == [(0.7, 1.0, 3, 0.0), (0.5, 0.9, 5, 0.0)]


def test_room_is_held_for_answers_in_progress():
    """Four siblings share the room; two requests at once do not get it twice."""
    held = Held(TOKENIZER, "a" * 40)
    with session_of("", max_new_tokens=24, service=held) as (client, session, _, _):
        with pytest.raises(openai.APITimeoutError):
            say(client, ASK, n=4, timeout=1)
        assert [owner.sampling.max_new_tokens for owner in held.owners] == [6] * 4
        with pytest.raises(openai.BadRequestError, match="give requests at the same time `max_tokens`"):
            say(client, ASK)
        held.answer()
        deadline = time.monotonic() + 20
        while any(turn.reserved for turn in session.tree.turns):
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Held(Scripted):
    """Answers when it is told to."""

    def start(self, requests, listener):
        self.owners, self.asked = [request.own for request in requests], (requests, listener)
        done = Future()
        done.set_result(list(range(len(requests))))
        return done

    def answer(self):
        super().start(*self.asked)


def test_a_repetition_that_comes_before_the_break_is_seen_keeps_the_answer():
    with session_of("late", service=Held(TOKENIZER, "late")) as (_, session, held, http):
        path, headers = f"/s/{session.id}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        body = {"model": MODEL, "messages": ASK}
        with pytest.raises(httpx.TimeoutException):
            http.post(path, json=body, headers=headers, timeout=0.8)
        threading.Timer(2.0, held.answer).start()
        answer = http.post(path, json=body, headers={**headers, "x-stainless-retry-count": "1"})
        assert answer.json()["choices"][0]["message"]["content"] == "late"
        time.sleep(0.7)  # the break of the first is seen by now
        assert len(session.tree.rows()) == 1


def test_variables_of_the_template_stay_with_the_dialogue():
    name = "qwen3"
    if name not in TOKENIZERS:
        pytest.skip("no template with variables")
    tokenizer = TOKENIZERS[name]
    service = Scripted(tokenizer, "one", "two")
    with session_of("x", service=service, tokenizer=tokenizer) as (client, session, _, _):
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        first = say(client, ASK, extra_body=extra).choices[0].message.model_dump()
        say(client, [*ASK, first, more()], extra_body=extra)
        say(client, [*ASK, first, more()])
    one, two, other = session.tree.turns
    assert two.parent is one
    assert tokenizer.decode(two.given).endswith(tokenizer.decode(one.prompt_ids)[-20:])
    assert other.parent is None


def test_few_shot_answers_may_open_a_dialogue():
    opening = [{"role": "assistant", "content": "Hello."}, *ASK]
    with session_of(["one", "two"]) as (client, session, _, _):
        first = say(client, opening).choices[0].message.model_dump()
        say(client, [*opening, first, more()])
    [row] = session.tree.rows()
    assert len(row.path) == 2
