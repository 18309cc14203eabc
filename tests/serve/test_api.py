"""The server as its clients see it: the openai package, and requests that are wrong."""

import asyncio
import hashlib
import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anthropic
import httpx2 as httpx
import jax
import numpy as np
import openai
import pytest
from rollouts import local_rollouts
from servers import MODEL, served, service_of

from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import render
from quatrain.engine.service import ServiceFailed
from quatrain.models.decoder import forward, logits
from quatrain.serve.http import CHANGING
from quatrain.serve.requests import MOST_SEQUENCES
from quatrain.serve.text import TextStream
from quatrain.servers.client import BYTES
from quatrain.servers.pieces import PIECE_BYTES
from quatrain.types.batches import Prompt
from quatrain.weights.hf import save_hf

pytestmark = pytest.mark.usefixtures("all_computed_by")


TOKEN = "the-token-of-the-tests"
PROMPT = [3, 4, 5, 6, 8]
FEW_BYTES = 1 << 17
"""Of a cache: a few requests with long answers."""


@pytest.fixture(scope="module")
def server(all_computed_by, small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer, max_concurrency=8)
    with served(service, small_arch, tokenizer, token=TOKEN) as url:
        yield url, service


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=TOKEN, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def http(server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server[0], headers=headers, timeout=120) as client:
        yield client


def complete(client, prompt=PROMPT, *, own=None, **options):
    extra = {"return_token_ids": True, **(own or {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, logprobs=0, extra_body=extra, **{"max_tokens": 12, **options}
    )


def test_with_little_memory_requests_are_preempted_and_answered_the_same(
    small_arch, small_params, tokenizer, client
):
    """Requests of several samplings, all at once, by a server whose cache holds few of them."""
    few = service_of(small_arch, small_params, tokenizer, cache_bytes=FEW_BYTES)
    asked = [
        {"prompt": PROMPT[:k], "seed": k, "temperature": 0.3 * k, "max_tokens": 90} for k in range(1, 6)
    ] * 2

    def all_at_once():
        while few.num_running < len(asked):
            time.sleep(0.01)
        few.resume()

    def answers(to, begin=lambda: None):
        with ThreadPoolExecutor(len(asked)) as threads:
            answered = threads.map(lambda options: complete(to, **options).choices[0], asked)
            begin()
            found = list(answered)
        return [(choice.token_ids, choice.finish_reason) for choice in found]

    with (
        served(few, small_arch, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as short,
    ):
        few.pause()
        found = answers(short, all_at_once)
        assert few.engine.stats.preempted > 0
    assert found == answers(client)


def test_tokens_are_those_that_training_samples(small_arch, small_params, tokenizer, client):
    settings = RolloutConfig(n=3, max_new_tokens=12, temperature=0.9)
    engine = local_rollouts(small_arch, settings, tokenizer, stop_ids=(0, 7), seed=11, cache_bytes=1 << 26)
    engine.sync_weights(small_params, 0)
    prompt = Prompt(21, np.array(PROMPT, np.int32), "")
    batch = engine.generate([prompt], step=5)
    for sample in range(3):
        place = {"step": 5, "group_id": 21, "sample": sample, "n": 3}
        answer = complete(client, seed=11, temperature=0.9, own={"quatrain": place})
        [choice] = answer.choices
        mask = batch.completion_mask[sample]
        assert choice.token_ids == batch.input_ids[sample][mask].tolist()
        np.testing.assert_allclose(
            choice.logprobs.token_logprobs, batch.rollout_logprobs[sample][mask], atol=1e-5
        )
        assert choice.text == batch.completions[sample]
        assert choice.finish_reason == batch.finish_reason[sample]
        assert choice.prompt_token_ids == PROMPT
        assert choice.weight_versions == [0] * len(choice.token_ids)
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == len(choice.token_ids)


def test_several_prompts_and_samples_come_in_order(client, tokenizer):
    texts = ["1 + 2", "What is 3?"]
    answer = complete(client, texts, n=3, seed=4, temperature=1.2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice, text in zip(answer.choices, [text for text in texts for _ in range(3)]):
        assert choice.prompt_token_ids == render(tokenizer, text).ids
    assert len({tuple(choice.token_ids) for choice in answer.choices}) > 2
    again = complete(client, texts, n=3, seed=4, temperature=1.2)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    other = complete(client, texts, n=3, temperature=1.2)
    assert [choice.text for choice in other.choices] != [choice.text for choice in answer.choices]


def test_a_chat_is_streamed(client, tokenizer):
    messages = [{"role": "user", "content": "How much is 1 + 2?"}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 20, "seed": 3, "logprobs": True}
    whole = client.chat.completions.create(**options, extra_body={"return_token_ids": True})
    [choice] = whole.choices
    assert choice.prompt_token_ids == render(tokenizer, messages).ids
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert len(choice.logprobs.content) == len(choice.token_ids)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(**options, **streamed, extra_body={"return_token_ids": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == choice.message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == choice.finish_reason
    assert parts[-1].usage.completion_tokens == len(choice.token_ids)
    logprobs = [
        each.logprob
        for part in parts
        if part.choices and part.choices[0].logprobs
        for each in part.choices[0].logprobs.content
    ]
    assert logprobs == [each.logprob for each in choice.logprobs.content]


def test_a_stop_string_ends_the_text_before_it(client):
    whole = complete(client, max_tokens=30, seed=9, temperature=1.5).choices[0]
    stop = re.search("[ -~]{2}", whole.text[3:])[0]
    for stream in (False, True):
        answer = complete(client, max_tokens=30, seed=9, temperature=1.5, stop=[stop], stream=stream)
        choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == whole.text[: whole.text.index(stop)]
        assert choices[-1].finish_reason == "stop"


@partial(jax.jit, static_argnames="arch")
def _forward(params, arch, ids, real):
    return jax.nn.log_softmax(
        logits(params, arch, forward(params, arch, ids, np.arange(64)[None], real).hidden)
    )[0]


def own_logprobs(arch, params, ids):
    """[T - 1, V]: the model's own distribution after each token but the last."""
    row, real = np.zeros((2, 1, 64), np.int32)
    row[0, : len(ids)], real[0, : len(ids)] = ids, 1
    return np.asarray(_forward(params, arch, row, real))[: len(ids) - 1]


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_an_echo_has_the_prompts_log_probabilities(http, small_arch, small_params, tokenizer, num_tokens):
    prompts = [render(tokenizer, text).ids for text in ("How much is 12 + 30?", "How much is 7", "x")]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": num_tokens, "temperature": 0}
    asked = {**body, "logprobs": 2, "echo": True, "return_token_ids": True}
    answer = http.post("/v1/completions", json=asked).json()
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = [*prompt, *choice["token_ids"]]
        texts = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, choice["token_ids"]))
        assert choice["text"] == "".join(texts)
        assert num_tokens or (choice["token_ids"], choice["finish_reason"]) == ([], "length")
        found, wanted = choice["logprobs"], own_logprobs(small_arch, small_params, ids)
        assert [found["token_logprobs"][0], found["top_logprobs"][0]] == [None, None]
        values, alternatives = found["token_logprobs"][1:], found["top_logprobs"][1:]
        np.testing.assert_allclose(values, wanted[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
        for value, name, top, row in zip(values, found["tokens"][1:], alternatives, wanted, strict=True):
            assert top[name] >= value
            np.testing.assert_allclose(list(top.values())[:2], -np.sort(-row)[: len(top)][:2], atol=1e-5)
            if row.max() == pytest.approx(value, abs=1e-6):
                assert value == max(top.values())  # to the bit: so clients see what is greedy
        assert len(found["text_offset"]) == len(found["tokens"]) == len(ids)
        assert "".join(found["tokens"][: len(prompt)]) == tokenizer.decode(prompt)


def test_an_echoed_text_is_returned_as_it_came(http, tokenizer):
    body = {"model": MODEL, "prompt": ["1 + 2", "3"], "n": 2, "max_tokens": 3, "echo": True, "seed": 1}
    plain = http.post("/v1/completions", json={**body, "echo": False}).json()["choices"]
    echoed = http.post("/v1/completions", json={**body, "logprobs": 0}).json()["choices"]
    for text, before, after in zip(["1 + 2", "1 + 2", "3", "3"], plain, echoed, strict=True):
        assert after["text"] == text + before["text"]
        assert after["logprobs"]["top_logprobs"] is None
        assert after["logprobs"]["token_logprobs"][0] is None
        assert len(after["logprobs"]["tokens"]) == len(render(tokenizer, text).ids) + 3
        assert len(text) in after["logprobs"]["text_offset"]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"] is None


def test_alternatives_are_those_of_the_models_own_distribution(http, small_arch, small_params):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0.5, "top_p": 0.5, "seed": 2}
    asked = {**body, "logprobs": 5, "return_token_ids": True}
    [choice] = http.post("/v1/completions", json=asked).json()["choices"]
    ids = [*PROMPT, *choice["token_ids"]]
    wanted = own_logprobs(small_arch, small_params, ids)[len(PROMPT) - 1 :]
    found = choice["logprobs"]
    np.testing.assert_allclose(
        found["token_logprobs"], wanted[np.arange(len(wanted)), choice["token_ids"]], atol=1e-5
    )
    for name, top, row in zip(found["tokens"], found["top_logprobs"], wanted, strict=True):
        assert name in top
        np.testing.assert_allclose(list(top.values())[:5], -np.sort(-row)[:5], atol=1e-5)


@pytest.mark.parametrize("count", [0, 3, 64])
def test_prompt_log_probabilities_are_in_the_form_of_vllm(http, small_arch, small_params, tokenizer, count):
    body = {"model": MODEL, "prompt": [PROMPT, PROMPT[:1]], "max_tokens": 1, "prompt_logprobs": count}
    answer = http.post("/v1/completions", json={**body, "logprobs": 1}).json()
    first, single = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert single == [None]
    assert first[0] is None
    assert len(first) == len(PROMPT)
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) <= 2
    wanted = own_logprobs(small_arch, small_params, PROMPT)
    for token, place, row in zip(PROMPT[1:], first[1:], wanted, strict=True):
        best = np.argsort(-row)[:count]
        assert set(place) == {str(token), *map(str, best)}
        for word, found in place.items():
            assert found["logprob"] == pytest.approx(row[int(word)], abs=1e-5)
            assert found["decoded_token"] == tokenizer.decode([int(word)], skip_special_tokens=True)
            if found["rank"] is not None:
                assert row[best[found["rank"] - 1]] == pytest.approx(row[int(word)], abs=1e-5)


def test_prompt_log_probabilities_that_are_refused(http):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    for given, said in (
        ({"prompt_logprobs": 65}, "64"),
        ({"prompt_logprobs": 1, "stream": True}, "streamed"),
    ):
        answer = http.post("/v1/completions", json={**body, **given})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]


def test_prompts_are_scored_between_rounds_and_not_while_paused(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)
    service.pause()
    waiting, left = service.score([PROMPT, PROMPT[:2]], 1), service.score([PROMPT], 1)
    assert left.cancel()
    time.sleep(0.1)
    assert not waiting.done()
    service.resume()
    assert [len(scores.logprobs) for scores in waiting.result(60)] == [5, 2]
    service.pause()
    unanswered = service.score([PROMPT], 0)
    service.close()
    for future in (unanswered, service.score([PROMPT], 0)):
        with pytest.raises(ServiceFailed, match="closed"):
            future.result(10)
    assert service.totals.scored_tokens == 7


def test_text_offsets_count_in_the_whole_completion_also_in_a_stream(client, tokenizer):
    options = {"max_tokens": 40, "seed": 2, "temperature": 2}
    whole = complete(client, **options).choices[0]
    parts = [part.choices[0] for part in complete(client, **options, stream=True)]
    assert len(parts) > 3
    offsets = [at for part in parts for at in part.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset
    names = [name for part in parts for name in part.logprobs.tokens]
    assert names == whole.logprobs.tokens
    assert "".join(part.text for part in parts) == whole.text
    special = [tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids]
    for name, token, at in zip(names, whole.token_ids, offsets, strict=True):
        if name.startswith("bytes:"):
            assert tokenizer.decode([token]) == "\ufffd"
        else:
            assert name == tokenizer.decode([token])
            assert name in special or whole.text[at:].startswith(name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [None, ["e", "a", "t", "o"]], ids=["end", "stop"])
def test_the_tokens_of_a_chat_are_those_of_its_text(client, tokenizer, stream, stop):
    special, num_special = set(tokenizer.all_special_tokens), 0
    for seed in range(6):
        options = {"max_tokens": 40, "temperature": 2, "seed": seed, "stop": stop}
        options |= {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        ids = client.chat.completions.create(**options, extra_body={"return_token_ids": True}).choices[0]
        assert len(ids.logprobs.content) == len(ids.token_ids)
        num_special += sum(token in tokenizer.all_special_ids for token in ids.token_ids)
        answer = client.chat.completions.create(**options, stream=stream)
        parts = [part.choices[0] for part in answer] if stream else answer.choices
        text, tokens = "", []
        for part in parts:
            text += (part.delta if stream else part.message).content or ""
            tokens += part.logprobs.content if part.logprobs else []
            said = b"".join(bytes(token.bytes) for token in tokens)
            if part.finish_reason is None:  # an event has the tokens of its text
                assert said.decode(errors="replace").rstrip("\ufffd") == text.rstrip("\ufffd")
        assert text == ids.message.content
        assert not special & {token.token for token in tokens}
        said = said.decode(errors="replace")
        if stop is None:
            assert said == text
        elif parts[-1].finish_reason == "stop":
            assert said.startswith(text)
            assert len(said) - len(text) <= max((len(token.token) for token in tokens[-1:]), default=0)
    assert stop or num_special


def test_text_is_decoded_beside_the_event_loop(client, monkeypatch):
    on_the_loop = []
    push = TextStream.push

    def noting(self, tokens, *, finished):
        try:
            on_the_loop.append(asyncio.get_running_loop())
        except RuntimeError:
            on_the_loop.append(None)
        return push(self, tokens, finished=finished)

    monkeypatch.setattr(TextStream, "push", noting)
    complete(client)
    list(complete(client, stream=True))
    assert len(on_the_loop) >= 2  # one of each request at least; how many more is a matter of time
    assert set(on_the_loop) == {None}


def test_requests_share_the_slots(server, client):
    answers = []
    kinds = [{"temperature": 0}, {"top_p": 0.5}, {"extra": {"top_k": 2}}, {"extra": {"min_p": 0.2}}]
    alone = [
        complete(client, seed=5, max_tokens=40, own=kind.get("extra"), **_without(kind)) for kind in kinds
    ]

    def ask(number):
        kind = kinds[number]
        answers.append(
            (number, complete(client, seed=5, max_tokens=40, own=kind.get("extra"), **_without(kind)))
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answer in answers:
        assert answer.choices[0].token_ids == alone[number].choices[0].token_ids, kinds[number]
    assert len(answers) == len(kinds)


def _without(kind):
    return {name: value for name, value in kind.items() if name != "extra"}


def test_a_client_that_leaves_frees_its_slots(server, http):
    service = server[1]
    http.post("/pause", json={}).raise_for_status()
    cancelled = service.totals.sequences_cancelled
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    with (
        pytest.raises(httpx.ReadTimeout),
        http.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=0.3) as answer,
    ):
        answer.read()
    deadline = time.monotonic() + 20
    while service.num_running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.num_running == 0
    assert service.totals.sequences_cancelled == cancelled + 2
    http.post("/resume", json={}).raise_for_status()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_slots_while_tokens_come(server, http, monkeypatch, stream):
    service = server[1]
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 600, "stream": stream}
    http.post("/v1/completions", json=body).raise_for_status()  # compiles: no round is slow afterwards
    advance = service.engine.advance

    def slowly():
        time.sleep(0.1)
        advance()

    monkeypatch.setattr(service.engine, "advance", slowly)
    cancelled = service.totals.sequences_cancelled
    with http.stream("POST", "/v1/completions", json=body) if stream else pytest.raises(httpx.ReadTimeout):
        if not stream:
            http.post("/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 4  # all tokens take 7 seconds
    while time.monotonic() < deadline:  # on a busy machine the client may leave before its request has begun
        if service.totals.sequences_cancelled > cancelled and not service.num_running:
            break
        time.sleep(0.05)
    assert service.totals.sequences_cancelled == cancelled + 1
    assert service.num_running == 0


def test_weights_that_are_sent_are_loaded_when_they_are_whole(http):
    """Catches half a model that is loaded, and a sender that a restarted server refuses for good."""
    content = b"abc"
    said = {"number": 0, "digest": hashlib.blake2b(content, digest_size=16).hexdigest(), "changes": False}

    def put(stream):
        message = json.dumps({**said, "stream": stream}).encode() + b"\n" + content
        return http.post("/weights/put", content=message, headers={"Content-Type": BYTES})

    late = put("of the server before")
    assert (late.status_code, "begin again" in late.text) == (503, True)
    files = {"files": {"a": 3, "b": 3}, "piece_bytes": PIECE_BYTES}
    begun = http.post("/weights/begin", json=files).json()
    assert put(begun["stream"]).json() == said["digest"]
    early = http.post("/weights", json={"path": begun["path"], "version": 9})
    assert early.status_code == 409
    assert "lacks 1 of 2 pieces" in early.json()["error"]["message"]


def test_new_weights_are_used_from_the_next_token_on(server, http, small_arch, small_params, tmp_path):
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": 0,
        "return_token_ids": True,
    }
    before = http.post("/v1/completions", json=body).json()["choices"][0]
    doubled = jax.tree.map(lambda x: x * 1.5, small_params)
    save_hf(tmp_path / "new", small_arch, doubled)
    save_hf(tmp_path / "old", small_arch, small_params)
    loaded = http.post("/weights", json={"path": str(tmp_path / "new"), "version": 7})
    assert loaded.json() == {"weight_version": 7}
    answer = http.post("/v1/completions", json=body).json()
    [choice] = answer["choices"]
    assert set(choice["weight_versions"]) == {7}
    assert answer["weight_version"] == 7
    assert choice["logprobs"]["token_logprobs"] != before["logprobs"]["token_logprobs"]
    assert http.get("/version").json()["weight_version"] == 7
    http.post("/weights", json={"path": str(tmp_path / "old"), "version": 0}).raise_for_status()
    after = http.post("/v1/completions", json=body).json()["choices"][0]
    assert after["logprobs"] == before["logprobs"]
    missing = http.post("/weights", json={"path": str(tmp_path / "none"), "version": 8})
    assert missing.status_code == 400
    assert str(tmp_path / "none") in missing.json()["error"]["message"]
    assert http.get("/version").json()["weight_version"] == 0


@pytest.mark.parametrize("model", ["gpt", "\ud800"])
def test_any_model_is_answered_by_the_one_of_the_server(http, model):
    answer = posted(http, {**GOOD, "model": model, "max_tokens": 2})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


def test_generate_samples_what_a_completion_does(http):
    sampling = {"max_tokens": 12, "temperature": 0.9, "seed": 3}
    body = {**GOOD, **sampling, "return_token_ids": True, "logprobs": 0}
    [wanted] = http.post("/v1/completions", json=body).json()["choices"]
    body = {"token_ids": PROMPT, "sampling_params": {**sampling, "logprobs": 1}}
    [found] = http.post("/inference/v1/generate", json=body).json()["choices"]
    assert found["token_ids"] == wanted["token_ids"]
    logprobs = [each["logprob"] for each in found["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, wanted["logprobs"]["token_logprobs"], atol=1e-5)
    body["sampling_params"]["stop_token_ids"] = wanted["token_ids"][2:3]
    [ended] = http.post("/inference/v1/generate", json=body).json()["choices"]
    first = wanted["token_ids"].index(wanted["token_ids"][2])
    assert ended["token_ids"] == wanted["token_ids"][: first + 1]
    assert ended["finish_reason"] == "stop"
    names = {**GOOD, **sampling, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    [named] = http.post("/v1/completions", json=names).json()["choices"]
    ids = [*PROMPT, *wanted["token_ids"]]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    tops = named["logprobs"]["top_logprobs"][1:]
    assert all(top.keys() <= {f"token_id:{token}" for token in range(10**4)} for top in tops)
    assert all(f"token_id:{token}" in top for token, top in zip(ids[1:], tops, strict=True))


def test_health_models_and_metrics(http):
    assert http.get("/health").json() == {"status": "ok"}
    [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert model["max_model_len"] > 100
    lines = http.get("/metrics").text.splitlines()
    values = dict(line.split() for line in lines if not line.startswith("#"))
    assert float(values["quatrain_requests_total"]) > 0
    assert values["quatrain_sequences_running"] == "0"


def test_a_model_can_be_asked_for_by_name(http, client):
    [model] = http.get("/v1/models").json()["data"]
    assert http.get(f"/v1/models/{MODEL}").json() == model
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="this server has the model small"):
        client.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("GET", "/", 404, "'/'"),
        ("POST", "/v1/embeddings", 404, "'/v1/embeddings'"),
        ("POST", "/v1/embeddings", 404, "docs/serve.md"),
        ("GET", "/v1/chat", 404, "'/v1/chat'"),
        ("GET", "/v1/completions", 405, "takes the methods POST; got GET"),
        ("DELETE", "/v1/models/small", 405, "got DELETE"),
        ("OPTIONS", "/v1/chat/completions", 405, "got OPTIONS"),
    ],
)
def test_unknown_paths_and_methods_get_errors_in_openais_form(http, method, path, status, named):
    answer = http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (None, None)  # not the status: OpenAI's is text or null
    assert named in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


TOO_LONG = {
    "/v1/completions": {"prompt": [3] * 10**5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1 + 2 " * 10**5}]},
    "/inference/v1/generate": {"token_ids": [3] * 10**5},
}


@pytest.mark.parametrize(
    ("path", "stream"),
    [*((path, False) for path in TOO_LONG), ("/v1/completions", True), ("/v1/chat/completions", True)],
)
def test_too_long_a_prompt_says_so_in_the_words_that_agents_look_for(http, path, stream):
    body = {**TOO_LONG[path], "model": MODEL, "max_tokens": 4, **({"stream": True} if stream else {})}
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in error["message"]
    assert error["param"] in body


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (401, {"method": "GET", "url": "/v1/models", "headers": {"Authorization": "Bearer no"}}),
        (404, {"method": "GET", "url": "/v1/models/other"}),
        (400, {"method": "POST", "url": "/v1/chat/completions", "json": {"model": MODEL, "messages": []}}),
        (400, {"method": "POST", "url": "/v1/completions", "json": []}),
        (400, {"method": "POST", "url": "/weights", "json": {"path": "/none", "version": 1}}),
        (415, {"method": "POST", "url": "/v1/completions", "content": b"{}"}),
        (413, {"method": "POST", "url": "/v1/completions", "json": {"prompt": "a" * 33 * 2**20}}),
    ],
)
def test_other_errors_have_no_code(http, status, request_):
    answer = http.request(**request_)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] is None  # OpenAI's schema: text or null


GOOD = {"model": MODEL, "prompt": PROMPT}
BAD = {
    "no prompt": ({"model": MODEL}, 400, "prompt"),
    "empty prompt": ({**GOOD, "prompt": []}, 400, "at least one"),
    "empty text": ({**GOOD, "prompt": ""}, 400, "at least one token"),
    "token out of range": ({**GOOD, "prompt": [3, 10**6]}, 400, "1000000"),
    "negative token": ({**GOOD, "prompt": [-1]}, 400, "prompt"),
    "temperature": ({**GOOD, "temperature": -1}, 400, "temperature"),
    "tiny temperature": ({**GOOD, "temperature": 1e-6}, 400, "0.01"),
    "not a number": ({**GOOD, "temperature": "warm"}, 400, "temperature"),
    "top_p": ({**GOOD, "top_p": 0}, 400, "top_p"),
    "no tokens": ({**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    "no tokens and a long prompt": (
        {**GOOD, "prompt": [3] * 10**5, "max_tokens": 0, "echo": True},
        400,
        "positions",
    ),
    "a stream of alternatives": ({**GOOD, "logprobs": 1, "stream": True}, 400, "stream"),
    "a streamed echo": ({**GOOD, "echo": True, "stream": True}, 400, "stream"),
    "too many samples": ({**GOOD, "n": MOST_SEQUENCES + 1}, 400, "n:"),
    "too many sequences": ({**GOOD, "prompt": [[3]] * 600, "n": 2}, 400, "1200"),
    "alternatives": ({**GOOD, "logprobs": 6}, 400, "logprobs"),
    "unknown field": ({**GOOD, "guided_json": {}}, 400, "guided_json is not supported"),
    "not finite": ({**GOOD, "temperature": math.nan}, 400, "temperature"),
    "infinite temperature": ({**GOOD, "temperature": math.inf}, 400, "temperature"),
    "hot": ({**GOOD, "temperature": 101}, 400, "temperature"),
    "infinite top_k": ({**GOOD, "top_k": math.inf}, 400, "top_k"),
    "negative top_k": ({**GOOD, "top_k": -2}, 400, "top_k"),
    "top_p above 1": ({**GOOD, "top_p": 1.01}, 400, "top_p"),
    "top_p is not a number": ({**GOOD, "top_p": math.nan}, 400, "top_p"),
    "min_p above 1": ({**GOOD, "min_p": 1.01}, 400, "min_p"),
    "no samples": ({**GOOD, "n": 0}, 400, "n:"),
    "huge n": ({**GOOD, "n": 10**30}, 400, "n:"),
    "half a seed": ({**GOOD, "seed": 0.5}, 400, "seed"),
    "huge token": ({**GOOD, "prompt": [10**30]}, 400, "prompt"),
    "a token that is no number": ({**GOOD, "prompt": [[3], [None]]}, 400, "prompt"),
    "long prompt": ({**GOOD, "prompt": [3] * 10**6}, 400, "positions"),
    "long text": ({**GOOD, "prompt": "a" * 5_000_000}, 400, "characters"),
    "half a character": ({**GOOD, "prompt": "\ud800"}, 400, "Unicode"),
    "a model that is no text": ({**GOOD, "model": 3}, 400, "model"),
    "huge step": (
        {**GOOD, "seed": 1, "quatrain": {"step": 2**32, "group_id": 0, "sample": 0, "n": 1}},
        400,
        "quatrain",
    ),
    "repetition": ({**GOOD, "repetition_penalty": 1.1}, 400, "repetition_penalty"),
    "penalty": ({**GOOD, "presence_penalty": 1}, 400, "presence_penalty"),
    "bias": ({**GOOD, "logit_bias": {"3": 1}}, 400, "logit_bias"),
    "empty stop": ({**GOOD, "stop": [""]}, 400, "stop"),
    "place without seed": (
        {**GOOD, "quatrain": {"step": 0, "group_id": 0, "sample": 0, "n": 1}},
        400,
        "seed",
    ),
    "not an object": ([1], 400, "JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_one_error_in_openais_form(http, name):
    body, status, named = BAD[name]
    answer = posted(http, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert named in error["message"]
    is_long = "positions" in named or "characters" in named
    assert error["code"] == ("context_length_exceeded" if is_long else None)
    assert ("maximum context length" in error["message"]) == is_long
    assert "\n" not in error["message"]
    assert_it_goes_on(http)


def posted(http, body):
    """The answer to a completion request that may have NaN and infinity, which httpx refuses to send."""
    return http.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )


def assert_it_goes_on(http):
    assert http.get("/health").json() == {"status": "ok"}
    answer = http.post("/v1/completions", json={**GOOD, "max_tokens": 2, "seed": 1})
    assert answer.status_code == 200, answer.text


LONG = {"role": "user", "content": "~" * 2040}
EXTREMES = {
    "top_k": [{"top_k": -1}, {"top_k": 2**31 - 1}, {"top_k": 2**31}, {"top_k": 10**30}],
    "top_p": [{"top_p": 5e-324}, {"top_p": 1e-46}, {"top_p": 1e-38}, {"top_p": 1e-9}],
    "min_p": [{"min_p": 5e-324}, {"min_p": 1e-46}, {"min_p": 1}],
    "temperature": [{"temperature": 100}, {"temperature": 0.01}, {"temperature": -0.0}],
    "seed": [{"seed": -(10**30)}, {"seed": 10**4000}],
    "place": [
        {
            "seed": 1,
            "quatrain": {"step": 2**32 - 1, "group_id": 2**63 - 1, "sample": 2**32 - 1, "n": 2**32 - 1},
        }
    ],
    "length": [{"prompt": [3] * 2047, "max_tokens": most} for most in (1, 2, 10**9, 10**30)],
    "samples": [{"n": MOST_SEQUENCES}],
    "neutral penalties": [{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values_are_followed(http, name):
    for fields in EXTREMES[name]:
        answer = posted(http, {**GOOD, "max_tokens": 3, "logprobs": 0, "return_token_ids": True, **fields})
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert all(map(math.isfinite, choice["logprobs"]["token_logprobs"])), fields
    assert_it_goes_on(http)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_more_tokens_than_the_positions_leave_end_as_length(http, path):
    asked = {"prompt": [3] * 2044} if path == "/v1/completions" else {"messages": [LONG]}
    body = {"model": MODEL, **asked, "max_tokens": 10**9, "temperature": 0, "return_token_ids": True}
    [choice] = http.post(path, json=body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["prompt_token_ids"]) + len(choice["token_ids"]) == 2048


def test_a_tiny_top_p_and_a_huge_top_k_do_what_they_say(http):
    def tokens(**fields):
        body = {**GOOD, "max_tokens": 20, "seed": 3, "return_token_ids": True, **fields}
        [choice] = posted(http, body).json()["choices"]
        return choice["token_ids"]

    assert tokens(top_p=1e-46) == tokens(temperature=0)
    assert tokens(top_k=2**40) == tokens() != tokens(temperature=0)


CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "no role": ({"messages": [{"content": "hello"}]}, "role"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "the model does not see pictures",
    ),
    "half a character": ({"messages": [{"role": "\ud800", "content": "hello"}]}, "role"),
    "repetition": (
        {"messages": [{"role": "user", "content": "hello"}], "repetition_penalty": 2},
        "repetition_penalty",
    ),
    "tools": ({"messages": [{"role": "user", "content": "hello"}], "tools": [{}]}, "tools"),
    "a format": (
        {"messages": [{"role": "user", "content": "hello"}], "response_format": {"type": "xml"}},
        "response_format",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_bad_chat(http, name):
    body, named = CHATS[name]
    content = json.dumps({"model": MODEL, **body})
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_bodies_that_are_not_json(http):
    assert http.post("/v1/completions", content=b"{}").status_code == 415
    json_kind = {"Content-Type": "application/json"}
    assert http.post("/v1/completions", content=b"{", headers=json_kind).status_code == 400
    assert http.post("/v1/completions", content=b"[" * 100_000, headers=json_kind).status_code == 400
    long = b" " * (33 * 2**20)
    assert http.post("/v1/completions", content=long, headers=json_kind).status_code == 413


def test_a_server_with_a_token_answers_nobody_without_it(server, http):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with httpx.Client(base_url=server[0], headers=headers) as stranger:
            assert stranger.get("/health").status_code == 200
            paths = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
            for path in (*paths, *CHANGING):
                assert stranger.post(path, json=GOOD).status_code == 401
            assert stranger.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400


def test_without_a_token_weights_are_not_changed(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)
    with served(service, small_arch, tokenizer) as url, httpx.Client(base_url=url) as http:
        for path in CHANGING:
            answer = http.post(path, json={"path": "x", "version": 1})
            assert answer.status_code == 403
            assert "QUATRAIN_SERVE_TOKEN" in answer.json()["error"]["message"]
        assert http.get("/v1/models").status_code == 200


@pytest.mark.filterwarnings("ignore")
def test_a_fault_of_the_server_is_an_error_in_openais_form(server, http, monkeypatch):
    def fail(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(server[1], "start", fail)
    answer = http.post("/v1/completions", json=GOOD, headers={"Connection": "close"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the request failed: RuntimeError: a fault"
    monkeypatch.undo()
    assert_it_goes_on(http)


def test_a_failed_engine_is_reported_and_hangs_nobody(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)

    def fail():
        raise RuntimeError("out of memory")

    service.engine.advance = fail
    with served(service, small_arch, tokenizer) as url, httpx.Client(base_url=url, timeout=30) as http:
        answer = http.post("/v1/completions", json=GOOD)
        assert answer.status_code == 503
        assert "out of memory" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json=GOOD).status_code == 503
        health = http.get("/health")
        assert (health.status_code, "out of memory" in health.text) == (503, True)


def test_what_was_kept_of_a_prompt_is_in_the_usage(small_arch, small_params, tokenizer, monkeypatch):
    """Clients could not see why an answer to a long prompt is fast or slow; and of another's prompt they must
    see nothing where a salt keeps them apart."""
    monkeypatch.setattr("quatrain.serve.answering.MOST_OTHERS", 3)
    service = service_of(small_arch, small_params, tokenizer, prefix_share=0.5)
    with (
        served(service, small_arch, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        ask = partial(client.completions.create, model=MODEL, prompt=[*range(8, 98)], max_tokens=4)

        def cached(answer):
            return answer.usage.prompt_tokens_details.cached_tokens

        assert cached(ask()) == 0
        assert cached(ask(n=2)) == 89
        *_, last = ask(stream=True, stream_options={"include_usage": True})
        assert cached(last) == 89
        assert [cached(ask(extra_body={"cache_salt": "mine"})) for _ in range(2)] == [0, 89]
        chat = partial(client.chat.completions.create, model=MODEL, max_tokens=4)
        messages = [{"role": "user", "content": "a question " * 10}]
        first = chat(messages=messages, extra_headers={"X-Session-ID": "me"})
        messages += [first.choices[0].message, {"role": "user", "content": "and then?"}]
        assert cached(chat(messages=messages, extra_headers={"X-Session-ID": "me"})) > 16
        assert chat(messages=messages, extra_body={"prompt_cache_key": "you"}).usage.prompt_tokens
        owners = service.engine._session._kept._stores[0]._owners
        assert list(owners) == ["me", "you"]
        for _ in range(4):
            ask()
        service.run(lambda: None).result()
        assert "me" not in owners
        lines = dict(line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    assert int(lines["quatrain_prefix_cached_tokens_total"]) > 6 * 89
    assert int(lines["quatrain_prefix_blocks_used"]) > 4
    assert lines["quatrain_prefix_evicted_tokens_total"] == "0"


def test_messages_are_answered_as_a_chat_and_their_context_is_kept(small_arch, small_params, tokenizer):
    """The same tokens and counts of an engine; what was computed for one request is read for the next."""
    service = service_of(small_arch, small_params, tokenizer, prefix_share=0.5)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a question " * 10}]}
    with (
        served(service, small_arch, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as chats,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
    ):
        said = chats.chat.completions.create(**asked, max_tokens=4, temperature=0)
        fields = {**asked, "max_tokens": 4, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            streamed = events.get_final_message()
        number = client.messages.count_tokens(**asked).input_tokens
    assert number == said.usage.prompt_tokens
    for answer in (whole, streamed):
        assert "".join(block.text for block in answer.content) == said.choices[0].message.content
        assert answer.usage.output_tokens == said.usage.completion_tokens
        assert (answer.usage.cache_read_input_tokens, answer.usage.input_tokens) == (number - 1, 1)
