"""Sequences that follow grammars, beside others: what each samples is what it samples alone."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from architectures import of_golden

from quatrain.data import grammars
from quatrain.engine import masks
from quatrain.engine.masks import Guide, guide_of
from quatrain.engine.session import Session, SessionSettings
from quatrain.models.decoder import forward, logits
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
GRAMMAR = grammars.of_schema(SCHEMA)
KINDS = (
    ({}, None),
    ({}, GRAMMAR),
    ({"temperature": 0.0}, GRAMMAR),
    ({"temperature": 0.7, "top_p": 0.8}, None),
    ({"top_k": 3}, GRAMMAR),
    ({"temperature": 1.4, "min_p": 0.02}, grammars.of_schema({"type": "integer"})),
    ({"stop": ("apples",)}, None),
)


@pytest.fixture(scope="module")
def delta():
    arch = of_golden("qwen3_5_text", vocab_size=294)
    arch = replace(arch, layers=arch.layers[:2])  # one of each kind
    return arch, init_params(arch, jax.random.key(3))


@pytest.fixture
def make_session(computed_by, small_arch, tokenizer):
    def make(arch=small_arch, *, most=None, memory=1 << 26, share=0.0, drafts=0):
        stop_ids = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        where = jnp.dtype("float32"), "xla", one_device(), memory
        guide = guide_of(tokenizer, arch.vocab_size, stop_ids)
        settings = SessionSettings(
            arch, tokenizer, stop_ids, 11, *where, prefix_share=share, guide=lambda: guide, num_drafts=drafts
        )
        return Session(settings, Sampling(1, 80), most, per_request_sampling=True)

    return make


def asked(number, length, kind, most=80):
    sampling, grammar = kind
    ids = np.random.default_rng(number).integers(8, 280, length).astype(np.int32)
    own = PerRequestSampling(
        Sampling(1, most, **sampling), 5, 1, number, session=str(number), grammar=grammar
    )
    return Prompt(0, ids, ""), own


def sampled(session, params, requests, preempted=lambda who: False, per_round=1):
    """The completions of requests, `per_round` of which come before each round."""
    tickets, waiting, done = [], list(requests), []
    while waiting or not session.finished(tickets):
        for _ in range(min(per_round, len(waiting))):
            prompt, own = waiting.pop(0)
            tickets += session.submit_own([prompt], [own])
        for who in session._scheduler.placed:
            if preempted(who):
                session._scheduler.preempt(*who)
        session.advance(params, 1)
    for ticket in tickets:
        assert session.failure(ticket) is None
        done += session.take([ticket])
    return done


def is_whole(tokenizer, completion):
    """Whether an answer has ended; raises if it does not follow SCHEMA then."""
    if completion.finish_reason == "stop":
        jsonschema.validate(json.loads(tokenizer.decode(completion.tokens, skip_special_tokens=True)), SCHEMA)
    return completion.finish_reason == "stop"


@pytest.mark.parametrize("which", ["attention", pytest.param("delta", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("most", "memory", "share", "chance", "drafts"),
    [
        pytest.param(None, 1 << 26, 0.0, 0.0, 0, marks=pytest.mark.slow),
        (None, 1 << 26, 0.5, 0.1, 0),
        pytest.param(3, 1 << 26, 0.5, 0.2, 0, marks=pytest.mark.slow),
        (None, 1 << 18, 0.0, 0.05, 0),
        (None, 1 << 26, 0.5, 0.1, 2),
    ],
)
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_each_samples_what_it_samples_alone(
    make_session, small_arch, small_params, delta, tokenizer, which, most, memory, share, chance, drafts
):
    """A mask of another sequence or step, a slot in the wrong ring, a matcher that lost a preempted token; a
    draft in a sequence with a grammar, whose mask is that of one token."""
    arch, params = (small_arch, small_params) if which == "attention" else delta
    drafts *= which == "attention"  # others have states
    lengths = np.random.default_rng(7).integers(1, 200, 24)
    requests = [asked(i, int(length), KINDS[i % len(KINDS)]) for i, length in enumerate(lengths)]
    session = make_session(
        arch, most=most, memory=memory if which == "attention" else 4 * memory, share=share, drafts=drafts
    )
    draw = np.random.default_rng(1)
    together = sampled(session, params, requests, lambda who: draw.random() < chance, per_round=3)
    assert session.stats.recomputed_tokens > 0 or not chance
    alone = make_session(arch)
    for request, found in zip(requests, together, strict=True):
        [expected] = sampled(alone, params, [request])
        assert found.tokens == expected.tokens
        assert found.finish_reason == expected.finish_reason
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-6)
    follow = [each for each, (_, own) in zip(together, requests) if own.grammar == GRAMMAR]
    assert sum(is_whole(tokenizer, each) for each in follow) > 2


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_others_have_the_ring_that_they_have_alone(make_session, small_params):
    """Rings that changed their sizes whenever a grammar came or went would compile programs each time."""
    session, shapes = make_session(), []
    free = [asked(i, 20, KINDS[0], most=120) for i in range(6)]
    tickets = [session.submit_own([prompt], [own])[0] for prompt, own in free]
    session.advance(small_params, 1)
    before = session._admission.shape.rings
    prompt, own = asked(9, 20, KINDS[1], most=24)
    [with_grammar] = session.submit_own([prompt], [own])
    while not session.finished([with_grammar]):
        session.advance(small_params, 1)
        shapes.append(session._admission.shape.rings)
    assert all(len(rings) == 2 and rings[0].slots == before[0].slots for rings in shapes)
    session.advance(small_params, 1)
    assert [ring.slots for ring in session._admission.shape.rings] == [before[0].slots]
    session.take([with_grammar])
    while not session.finished(tickets):
        session.advance(small_params, 1)


@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
def test_log_probabilities_are_those_of_the_allowed_words(make_session, small_arch, small_params, tokenizer):
    """P19 on a device: masks apply before temperature and filters, in the prefill as in every step."""
    requests = [asked(i, 20, kind, most=48) for i, kind in enumerate([*KINDS[:3], KINDS[4]])]
    found = sampled(make_session(), small_params, requests, per_round=4)
    stop_ids = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    guide = guide_of(tokenizer, small_arch.vocab_size, stop_ids)
    for (prompt, own), completion in zip(requests[1:], found[1:]):
        is_whole(tokenizer, completion)
        ids = np.zeros((1, 80), np.int32)  # one program for all of them
        ids[0, : len(prompt.input_ids) + len(completion.tokens)] = [*prompt.input_ids, *completion.tokens]
        at, real = np.arange(80)[None], np.ones_like(ids)
        hidden = forward(small_params, small_arch, ids, at, real).hidden
        scores = np.asarray(logits(small_params, small_arch, hidden))[0, len(prompt.input_ids) - 1 :]
        matcher = guide.matcher(GRAMMAR)
        for token, logprob, row in zip(completion.tokens, completion.logprobs, scores):
            bits = np.unpackbits(guide.masks([matcher]).view(np.uint8), bitorder="little")
            row = np.where(bits[: len(row)], row, -np.inf)
            if own.sampling.top_k:
                row = np.where(row >= np.sort(row)[-own.sampling.top_k], row, -np.inf)
            expected = jax.nn.log_softmax(row)
            assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
            assert own.sampling.temperature or token == row.argmax()
            matcher.consume(token)


DEVICES = """
import sys
sys.path[:0] = sys.argv[1:]
import jax
import numpy as np
from test_grammars import KINDS, asked

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.engine.engine import RolloutEngine
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh
from quatrain.types.sampler import Request

tokenizer = builtin_tokenizer()
arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
params, done = init_params(arch, jax.random.key(7)), []
for shape in (MeshShape(), MeshShape(2, 1, 2)):
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    settings = RolloutConfig(n=1, max_new_tokens=40, prefix_share=0.5)
    how = {"stop_ids": (tokenizer.eos_token_id,), "cache_bytes": 1 << 24, "per_request_sampling": True}
    engine = RolloutEngine(arch, settings, tokenizer, seed=1, mesh=mesh, **how)
    engine.sync_weights(params, 1)
    requests = [Request.alone(*asked(i, 20, KINDS[i % 3], most=40)) for i in range(6)]
    tickets = engine.submit(requests)
    while not all(map(engine.finished, tickets)):
        engine.advance()
    done.append([turn for ticket in tickets for turn in engine.take(ticket)])
for one, other in zip(*done):
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
"""


@pytest.mark.slow
def test_on_several_devices_each_samples_the_same():
    """Masks of two replicas, each of two devices that share the matrices."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", DEVICES, *folders], check=True, env=environment)


def test_stop_tokens_are_allowed_at_the_end_alone(tokenizer):
    """All of them, and not where they are letters of a text: the answer would end within it."""
    letter = tokenizer.convert_tokens_to_ids("a")
    guide = Guide(tokenizer, 310, (tokenizer.eos_token_id, letter))
    matcher = guide.matcher(grammars.of_schema({"enum": ["ab", "b"]}))

    def words():
        bits = np.unpackbits(guide.masks([None, matcher])[1].view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    for token in tokenizer.convert_tokens_to_ids(['"', "b", '"']):
        assert token in words()
        assert not words() & {letter, tokenizer.eos_token_id}
        matcher.consume(token)
    assert words() == {letter, tokenizer.eos_token_id}
    assert (guide.masks([None])[0] == 2**32 - 1).all()


REFUSED = {
    "a keyword": ({"not": {"type": "string"}}, "Unimplemented keys"),
    "a type": ({"type": "strin"}, "strin"),
    "a reference": ({"$ref": "http://localhost/x"}, "localhost/x"),
    "nothing": (False, "not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_is_not_taken_is_refused_in_the_words_of_the_library(tokenizer, name):
    schema, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        guide_of(tokenizer, 294, (290,)).check(grammars.of_schema(schema))


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_a_matcher_that_fails_ends_its_sequence_alone(make_session, small_params, monkeypatch):
    session = make_session()
    requests = [asked(i, 10, KINDS[i % 2], most=40) for i in range(4)]
    tickets = [session.submit_own([prompt], [own])[0] for prompt, own in requests]
    broken = session._groups[tickets[1]].matcher
    monkeypatch.setattr(broken, "consume", lambda token: broken.place.consume_token(3))
    while not session.finished(tickets):
        session.advance(small_params, 1)
    failures = [session.failure(ticket) is not None for ticket in tickets]
    assert failures == [False, True, False, False]
    assert "\n" not in session.failure(tickets[1])


def test_without_the_library_the_remedy_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    assert masks.why_not((290,)) == masks.INSTALL
    with pytest.raises(ValueError, match="extra `serve`"):
        guide_of(tokenizer, 294, (290,))
