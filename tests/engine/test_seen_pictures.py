"""Prompts with pictures: whatever is shared, cut, kept or computed again, a sequence is that of it alone."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import host_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed, of_golden
from pictured import MadeUpFeatures, picture, tokens_of

from quatrain.config.schema import RolloutConfig
from quatrain.data.expansion import BLIND
from quatrain.engine import groups, session
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.groups import (
    Admitted,
    Continuation,
    Group,
    UsualSampling,
    calls,
    extension,
    pack_prompts,
    seen_by,
)
from quatrain.engine.service import EngineService
from quatrain.engine.session import Session, SessionSettings
from quatrain.models.decoder import forward, logits
from quatrain.models.params import init_params
from quatrain.models.prefix_tree import RowForms
from quatrain.models.rope import Rope
from quatrain.models.vision import Inserts
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling


def words(seed, count):
    return np.random.default_rng(seed).integers(10, 280, count).tolist()


BEGIN, END = words(1, 40), words(2, 5)
CAT, DOG, LARGE = picture(3, 4), picture(3, 4, number=1), picture(6, 9)
CAT_PROMPT, DOG_PROMPT = [BEGIN, CAT, END], [BEGIN, DOG, END]
"""Their token ids are the same."""


@dataclass(frozen=True)
class Model:
    arch: Any
    params: Any
    features: MadeUpFeatures

    @classmethod
    def of(cls, arch, params):
        return cls(arch, params, MadeUpFeatures(arch.hidden_size))


@pytest.fixture(scope="module")
def model(small_arch, small_params):
    """A model whose rotary positions have three axes, and a level of deepstack."""
    return Model.of(changed(small_arch, rope=Rope(sections=(2, 1, 1), alternating=True)), small_params)


@pytest.fixture(scope="module")
def delta():
    """A model of a DeltaNet layer and one of attention."""
    arch = of_golden("qwen3_5_text", vocab_size=290)
    rope = replace(arch.attentions[0].rope, sections=(1, 1, 0), alternating=True)
    arch = changed(replace(arch, layers=arch.layers[:2]), rope=rope)
    params = init_params(arch, jax.random.key(3))
    return Model.of(arch, jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params))


def session_of(
    model, tokenizer, *, n=1, requests=False, share=0.5, most=None, features=True, temperature=0.0
):
    where = "xla", one_device(), 1 << 24
    settings = SessionSettings(
        model.arch, tokenizer, (0,), 11, jnp.dtype("float32"), *where, prefix_share=share
    )
    settings = replace(settings, features=model.features if features else None)
    return Session(settings, Sampling(n, 12, temperature), most, per_request_sampling=requests)


def prompt_of(runs, number=0):
    ids, pictures = tokens_of(runs)
    return Prompt(number, np.array(ids, np.int32), "", pictures=pictures)


def sampled(session, model, prompts, preempt=lambda who, round: False):
    """The completions of `n` samples of each prompt."""
    tickets = session.submit(prompts, 3)
    for round in range(100):
        for who in session._scheduler.placed:
            if preempt(who, round):
                session._scheduler.preempt(*who)
        if session.finished(tickets):
            return session.take(tickets)
        session.advance(model.params, 1)
    raise AssertionError("never ends")


def check(model, prompt, completion, computed_by):
    """The tokens are the likeliest after those before them, of the sequence alone, with their pictures."""
    ids, pictures = [*prompt.input_ids.tolist(), *completion.tokens], prompt.pictures
    turns = None if pictures is None else model.features.turns(pictures, len(ids))
    features = None if pictures is None else model.features.of_tokens(pictures, len(ids))
    if computed_by == "host":
        tokens, logprobs, _ = host_model.forward(model.arch, model.params, ids, turns, features)
    else:
        scores = alone(model, ids, turns, features)
        tokens, logprobs = scores.argmax(axis=-1), scores.max(axis=-1)
    first = len(prompt.input_ids) - 1
    assert completion.tokens == [int(token) for token in tokens[first:-1]]
    np.testing.assert_allclose(completion.logprobs, logprobs[first:-1], atol=1e-4)


def alone(model, ids, turns, features, width=256):
    """[T, V]: log-probabilities of what follows each token of one sequence; its features are not shared."""
    of_tokens = [None] * len(ids) if features is None else features
    table = np.zeros((1, 1 + model.features.vision.levels, width, model.arch.hidden_size), np.float32)
    rows, places = np.full((1, width), -1, np.int32), np.zeros((3, 1, width), np.int32)
    places[:, 0, : len(ids)] = np.arange(len(ids)) if turns is None else turns
    for i, feature in enumerate(of_tokens):
        if feature is not None:
            table[0, :, i], rows[0, i] = feature, i
    padded = np.array([ids + [0] * (width - len(ids))], np.int32)
    real = (np.arange(width) < len(ids))[None].astype(np.int32)
    found = _scores(model.params, model.arch, padded, real, places, Inserts(table, rows))
    return np.asarray(jax.nn.log_softmax(found[0, : len(ids)]))


@partial(jax.jit, static_argnames="arch")
def _scores(params, arch, ids, real, turns, inserts):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    run = forward(params, arch, ids, positions, real, turns=turns, inserts=inserts)
    return logits(params, arch, run.hidden)


PACKS = {
    "equal ids": [CAT_PROMPT, DOG_PROMPT],
    "a prefix that ends in a picture": [CAT_PROMPT, [BEGIN, CAT]],
    "neighbours, twice, and text": [[[5], CAT, DOG, [6], CAT, [7]], [words(3, 9)], [DOG, [8]]],
    "in parts": [[words(4, 120), LARGE, words(5, 40)], [words(6, 130)], CAT_PROMPT],
}


@pytest.mark.parametrize("kind", ["model", "delta"])
@pytest.mark.parametrize("case", PACKS)
def test_a_sample_is_that_of_its_sequence_alone(computed_by, request, tokenizer, monkeypatch, case, kind):
    """V4, V6: packed side by side, with a common prefix, in parts that cut a picture, and preempted."""
    for module in (groups, session):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 128)
    model = request.getfixturevalue(kind)
    prompts = [prompt_of(runs, number) for number, runs in enumerate(PACKS[case])]
    made = session_of(model, tokenizer, n=2)
    done = sampled(made, model, prompts, lambda who, round: round == 1 and who[1] == 1)
    assert made.stats.recomputed_tokens > 0
    for i, completion in enumerate(done):
        check(model, prompts[i // 2], completion, computed_by)


def test_equal_ids_with_other_pictures_are_other_sequences(computed_by, model, tokenizer):
    """What a comparison of ids alone would share: the same completion for both."""
    prompts = [prompt_of(CAT_PROMPT), prompt_of(DOG_PROMPT, 1)]
    np.testing.assert_array_equal(prompts[0].input_ids, prompts[1].input_ids)
    one, other = sampled(session_of(model, tokenizer), model, prompts)
    assert one.tokens != other.tokens


class Asking:
    """Requests to a session that keeps contexts."""

    def __init__(self, session, model, computed_by):
        self.session, self.model, self.computed_by, self.before = session, model, computed_by, 0

    def ask(self, runs, name="a"):
        """The tokens that were prefilled for this context."""
        prompt, sampling = prompt_of(runs), Sampling(1, 12, 0.0)
        [ticket] = self.session.submit_own([prompt], [PerRequestSampling(sampling, 5, 1, 1, session=name)])
        while not self.session.finished([ticket]):
            self.session.advance(self.model.params, 1)
        [self.last] = self.session.take([ticket])
        check(self.model, prompt, self.last, self.computed_by)
        before, self.before = self.before, self.session.stats.prefilled_tokens
        return self.before - before


def test_kept_contexts_are_found_by_their_pictures(computed_by, model, tokenizer):
    """V6 in a session of a server: a dialogue about another picture goes on from the text before it."""
    asking = Asking(session_of(model, tokenizer, requests=True), model, computed_by)
    assert asking.ask(CAT_PROMPT) == 40 + 12 + 5
    assert asking.ask(DOG_PROMPT) == 12 + 5
    assert asking.ask([BEGIN, CAT]) == 1  # the hit ends within the picture
    assert asking.ask([*CAT_PROMPT, words(7, 30)]) == 30
    turn = asking.last.tokens  # whose last token has no keys
    assert asking.ask([*CAT_PROMPT, words(7, 30), turn, [6], DOG, [5]]) == 1 + 1 + 12 + 1


def test_a_state_is_found_by_the_pictures_before_it(computed_by, delta, tokenizer):
    """DeltaNet layers have one state of the whole context: that of another picture is none of it."""
    asking = Asking(session_of(delta, tokenizer, requests=True), delta, computed_by)
    asking.ask(CAT_PROMPT)
    turn = asking.last.tokens
    # Another's, as a client's last state takes the place of the one before.
    assert asking.ask([*DOG_PROMPT, turn, [6]], "b") == 57 + len(turn) + 1
    assert asking.ask([*CAT_PROMPT, turn, [6]]) == 2


def test_text_alone_has_the_programs_of_text(computed_by, model, tokenizer, monkeypatch):
    """V14: whatever the model could see, nothing is added to what a session of text hands over."""
    given = []
    for name in ("prefill", "extend", "decode", "restore"):
        program = getattr(session, f"{name}_program")

        def noting(backend, program=program):
            return lambda *args, **static: (given.append(args), program(backend)(*args, **static))[1]

        monkeypatch.setattr(session, f"{name}_program", noting)
    monkeypatch.setattr(session, "PREFILL_TOKENS", 32)
    prompts = [prompt_of([words(8, 9)]), prompt_of([words(9, 50)], 1)]
    made = session_of(model, tokenizer, n=2)
    sampled(made, model, prompts, lambda who, round: round == 1 and who[1] == 1)
    kinds = {type(part).__name__ for args in given for part in args}
    assert {"Packed", "Extended", "Slots", "Restored"} <= kinds
    for part in (part for args in given for part in args):
        for each in (part, getattr(part, "continued", part)):
            assert [getattr(each, name, None) for name in ("turns", "inserts", "shifts")] == [None] * 3


def admitted(prompt):
    group = Group.of(prompt, 0, (0,), 1)
    group.seen = seen_by(prompt, MadeUpFeatures(8))
    return Admitted(group, 0, 0)


def check_given(prompt, tokens, places, turns, features, rows):
    """These tokens of a prompt have their rotary positions and features at these places of a row."""
    expected, pictures = MadeUpFeatures(8), prompt.pictures
    np.testing.assert_array_equal(turns[:, places], expected.turns(pictures, len(pictures))[:, tokens])
    for place, feature in zip(places, expected.of_tokens(pictures, len(pictures))[tokens], strict=True):
        if feature is None:
            assert rows[place] == -1
        else:
            assert rows[place] >= 0
            np.testing.assert_array_equal(features[:, rows[place]], feature)


def test_rows_of_several_replicas_have_their_own_features():
    """The table of each replica has its own pictures, once each; the first row has a common prefix."""
    prompts = [[prompt_of(CAT_PROMPT), prompt_of(DOG_PROMPT)], [prompt_of([[5], LARGE, [6], CAT, CAT])]]
    packs = [[admitted(prompt) for prompt in own] for own in prompts]
    packed = pack_prompts(packs, 1, 4, RowForms(0), UsualSampling(), features=MadeUpFeatures(8))
    features, rows = packed.inserts
    assert (features.shape, features.dtype) == ((2, 2, 96, 8), np.float32)  # 66 features, rounded up
    assert not features[0, :, 24:].any()
    assert packed.turns.dtype == rows.dtype == np.int32
    common, starts = packed.num_common.tolist(), packed.starts.reshape(2, -1)
    assert common == [40, 0]
    for replica, own in enumerate(prompts):
        for i, prompt in enumerate(own):
            places = np.arange(len(prompt.input_ids))
            places[common[replica] :] += starts[replica, i] - common[replica]
            given = packed.turns[replica], features[replica], rows[replica]
            check_given(prompt, slice(None), places, *given)


def test_parts_of_contexts_have_the_features_of_their_tokens():
    """On two replicas; a part that begins within a picture goes on with the placeholder that it begins with.

    What is padding has no features, or experts would read those of the last one.
    """
    prompts = [[prompt_of([words(1, 5), LARGE, [6], CAT])], [prompt_of(CAT_PROMPT), prompt_of([CAT, [7]])]]
    left = [
        [Continuation(admitted(prompt).group, 0, i, 0) for i, prompt in enumerate(own)] for own in prompts
    ]
    for own in left:
        own[0].pause = 37  # so that the next part begins within the picture, or three tokens before it
    parts = 0
    for resumed in (False, True):
        for batch, width, most in calls(left):
            made = extension(batch, 1, width, most, 4, UsualSampling(), MadeUpFeatures(8)).continued
            features, rows = made.inserts
            count = len(made.input_ids) // 2
            for replica, items in enumerate(batch):
                for i, item in enumerate(items):
                    prompt, at = item.group.prompt, replica * count + i
                    tokens = slice(item.done, item.done + min(width, item.left))
                    places = np.arange(tokens.stop - tokens.start)
                    check_given(prompt, tokens, places, made.turns[at], features[replica], rows[at])
                    assert (rows[at, len(places) :] == -1).all()
                    parts += 1
        assert resumed or left[0][0].done == 37
        for own in left:
            own[0].pause = None
        left = [[item for item in own if item.left] for own in left]
    assert parts == 5


def test_a_picture_without_features_is_an_error(model, tokenizer):
    made = session_of(model, tokenizer, features=False)
    with pytest.raises(
        ValueError, match=r"the model does not see pictures, and a prompt has some; set model\.vision"
    ):
        made.submit([prompt_of(CAT_PROMPT)], 3)
    assert not made.num_groups


def test_the_tower_is_that_of_the_features(model, tokenizer):
    """The engine has the text model; a tower that is trained goes with its weights, as a copy."""
    loaded = []
    features = MadeUpFeatures(model.arch.hidden_size)
    features.load = lambda params, version: loaded.append((params["vision"]["scale"], version))
    made = [
        RolloutEngine(model.arch, RolloutConfig(), tokenizer, stop_ids=(0,), seed=1, features=each)
        for each in (None, features)
    ]
    services = [EngineService(engine, thread=None) for engine in made]
    assert [service.cannot_see for service in services] == [BLIND, None]
    tower = jnp.ones(3)
    copied = made[1].copy_weights({**model.params, "vision": {"scale": tower}})
    made[1].sync_weights(copied, 4)
    [(scale, version)] = loaded
    assert version == 4
    np.testing.assert_array_equal(scale, tower)
    assert scale.unsafe_buffer_pointer() != tower.unsafe_buffer_pointer()
    assert "vision" not in made[1]._params


def test_on_a_device_too(model, tokenizer, monkeypatch):
    """The compiled programs: packed with a common prefix, in parts, preempted, and scored when given."""
    for module in (groups, session):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 128)
    prompts = [prompt_of(CAT_PROMPT), prompt_of(DOG_PROMPT, 1), prompt_of(PACKS["in parts"][0], 2)]
    engine = RolloutEngine(
        *(model.arch, RolloutConfig(n=2, max_new_tokens=12, temperature=0.0), tokenizer),
        stop_ids=(0,),
        seed=11,
        features=model.features,
    )
    engine.sync_weights(model.params, 1)
    made = session_of(model, tokenizer, n=2)
    done = sampled(made, model, prompts, lambda who, round: round == 1 and who[1] == 1)
    assert made.stats.recomputed_tokens > 0
    for i, completion in enumerate(done):
        check(model, prompts[i // 2], completion, "jax")
    whole = [[*prompts[i // 2].input_ids.tolist(), *each.tokens] for i, each in enumerate(done[:4])]
    seen = [prompts[i // 2].pictures for i in range(4)]
    scores = [each for part in engine.score(whole, 0, pictures=seen) for each in part]
    for i, each in enumerate(scores):
        np.testing.assert_allclose(each.logprobs[-len(done[i].tokens) :], done[i].logprobs, atol=1e-4)
