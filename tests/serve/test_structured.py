"""Structured outputs as clients see them: formats of answers, and calls that must be made."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jsonschema
import numpy as np
import openai
import pytest
from architectures import changed
from chat_templates import FAMILIES, tokenizer_of
from json_schemas import random_schema
from servers import MODEL, served, service_of

from quatrain.engine import masks
from quatrain.episodes.agent_episodes import _completion
from quatrain.serve.sessions import SessionRules, Sessions
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling, rollout_batch
from quatrain.types.sampler import Sampler

pytestmark = pytest.mark.usefixtures("all_computed_by")

ASK = [{"role": "user", "content": "How many?"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"enum": [1, 2, 3]}},
    "required": ["ok", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def tool(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", SCHEMA), tool("now", {"type": "object", "additionalProperties": False})]


@pytest.fixture(scope="module")
def server(all_computed_by, small_arch, small_params, tokenizer):
    ends = {"stop_ids": (tokenizer.eos_token_id,)}
    service = service_of(small_arch, small_params, tokenizer, prefix_share=0.5, **ends)
    sessions = Sessions()
    with served(service, small_arch, tokenizer, sessions=sessions) as url:
        yield url, sessions


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def calling(all_computed_by, small_arch, small_params):
    """A client of a model whose template writes calls as Hermes does."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    arch = changed(small_arch, vocab_size=len(tokenizer))
    params = {**small_params, "embed": small_params["embed"][: len(tokenizer)]}
    assert len(params["embed"]) == len(tokenizer)
    service = service_of(arch, params, tokenizer, stop_ids=(tokenizer.eos_token_id,))
    with (
        served(service, arch, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        yield client


def ask(client, *, seed=0, **options):
    options = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": seed, **options}
    return client.chat.completions.create(**options)


def in_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def check_schemas(client, count):
    """P19: `count` schemas beside requests without any; how many answers came to their end."""
    schemas = [random_schema(seed) for seed in range(count)]

    def free(seed):
        return (
            ask(client, seed=seed, max_tokens=60, extra_body={"return_token_ids": True}).choices[0].token_ids
        )

    def structured(seed):
        how = {"temperature": 0.7, "top_p": 0.95} if seed % 3 else {}
        return ask(client, seed=seed, response_format=in_format(schemas[seed]), **how).choices[0]

    alone = [free(seed) for seed in range(8)]
    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(structured, seed) for seed in range(count)]
        beside = [threads.submit(free, seed) for seed in range(8)]
        assert [each.result() for each in beside] == alone
    ended = 0
    for schema, answer in zip(schemas, (each.result() for each in answers)):
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer.message.content), schema)
    return ended


def test_answers_fit_their_schemas_and_others_are_what_they_were(client):
    """A mask of another sequence, or an answer that ends before its grammar does."""
    assert check_schemas(client, 24) >= 12


@pytest.mark.slow
def test_two_hundred_schemas(client):
    """P19, the long form."""
    assert check_schemas(client, 200) >= 100


def test_a_stream_and_several_answers_are_the_whole_one(client):
    whole = ask(client, n=3, seed=4, response_format=FORMAT, logprobs=True)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert all(each.logprob <= 0 for each in choice.logprobs.content)
    said = dict.fromkeys(range(3), "")
    for event in ask(client, n=3, seed=4, response_format=FORMAT, stream=True):
        for choice in event.choices:
            said[choice.index] += choice.delta.content or ""
    assert list(said.values()) == [choice.message.content for choice in whole.choices]
    any_object = ask(client, response_format={"type": "json_object"}, max_tokens=1, temperature=0)
    assert any_object.choices[0].message.content == "{"


def test_the_package_parses_what_it_asked_for(client):
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        ok: bool
        word: str = pydantic.Field(max_length=3)

    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Answer, max_tokens=300, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_must_be_made_fits_the_schema_of_its_tool(calling, choice):
    """Its beginning alone was given before, and a model wrote behind it what it liked."""
    made = []
    for seed in range(6):
        [answer] = ask(calling, seed=seed, tools=TOOLS, tool_choice=choice).choices
        assert answer.finish_reason == "tool_calls"
        [call] = answer.message.tool_calls
        made.append(call.function.name)
        schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == made[-1])
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert not answer.message.content
    assert set(made) == ({"add", "now"} if choice == "required" else {"add"})


def test_a_format_beside_tools_leaves_the_choice(calling):
    """Frameworks ask for both: tools until all is known, and then an answer that they can parse."""
    kinds = set()
    for seed in range(12):
        [answer] = ask(calling, seed=seed, tools=TOOLS, response_format=FORMAT).choices
        kinds.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        else:
            assert len(answer.message.tool_calls) == 1
    assert kinds == {"stop", "tool_calls"}


REFUSED = {
    "a schema": ({"response_format": in_format({"not": {}})}, "response_format", "Unimplemented keys"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format",
        "a JSON schema",
    ),
    "a format": ({"response_format": {"type": "regex"}}, "response_format", "json_object"),
    "a tool's schema": (
        {"tools": [tool("f", {"type": "object", "not": {}})], "tool_choice": "required"},
        "tool_choice",
        "Unimplemented keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_grammar_is_made_of_is_refused(calling, name):
    options, field, message = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(calling, **options)
    assert error.value.param == field


def test_without_the_library_formats_are_refused_and_calls_begun(calling, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="extra `serve`") as error:
        ask(calling, response_format=FORMAT)
    assert error.value.param == "response_format"
    [answer] = ask(calling, tools=TOOLS, tool_choice="required", max_tokens=4).choices
    assert answer.message.content.startswith("<tool_call>")


@contextmanager
def trained(server, tokenizer, **sampling):
    """A client of a trained session, and its tree."""
    url, sessions = server
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    rules = SessionRules(Sampling(1, 200, **sampling), seed=1, step=2, max_turns=4, max_tokens=800)
    session = sessions.open(rules, Prompt(3, np.array(ids, np.int32), ASK), 0)
    place = f"{url}/s/{session.id}/v1"
    with openai.OpenAI(base_url=place, api_key=session.key, max_retries=0) as client:
        yield client, session


def test_without_a_record_an_answer_that_is_trained_follows_no_grammar(server, tokenizer):
    """Its words were not drawn from what the trainer takes them to be drawn from."""
    with trained(server, tokenizer) as (client, session):
        with pytest.raises(openai.BadRequestError, match="this run records no words that tokens are drawn"):
            ask(client, response_format=FORMAT)
        other = client.with_options(base_url=f"{server[0]}/s/{session.id}/untrained/v1")
        jsonschema.validate(json.loads(ask(other, response_format=FORMAT).choices[0].message.content), SCHEMA)


def test_an_answer_that_is_trained_has_the_sets_of_its_grammar(server, tokenizer):
    """Two turns: the row of the episode has a mask for each sampled token, that token in it, and equal masks
    once. Would fail if a turn that goes on took the place of its parent's last token for one of a prompt."""
    with trained(server, tokenizer, replays=True) as (client, session):
        asked = ask(client, response_format=FORMAT)
        [first] = asked.choices
        jsonschema.validate(json.loads(first.message.content), SCHEMA)
        answered = {"role": "assistant", "content": first.message.content}
        said = [answered, {"role": "user", "content": "Again?"}]
        again = client.chat.completions.create(
            model=MODEL, messages=[*ASK, *said], response_format=FORMAT, max_tokens=100
        )
        jsonschema.validate(json.loads(again.choices[0].message.content), SCHEMA)
    [row] = session.tree.rows()
    assert len(row.path) == 2
    batch = rollout_batch([(session.prompt, _completion(row))], tokenizer, {})
    kept, sampled = batch.kept, batch.completion_mask
    assert kept.has_set[sampled].all()
    assert not kept.counts.any()
    assert 3 < len(kept.masks) < sampled.sum()
    few = [int(np.bitwise_count(kept.masks[number]).sum()) for number in kept.mask_ids[sampled]]
    assert min(few) == 1


def test_a_sampler_says_itself_that_it_follows_no_grammar():
    class Own(Sampler):
        def start(self, requests, listener):
            raise NotImplementedError

        def load(self, weights, version):
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"any text: rollout\.sampler must follow"):
        Own().check_grammar("start: /a/")
    assert masks.why_not(()) == masks.NO_END
