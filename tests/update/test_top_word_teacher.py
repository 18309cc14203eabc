"""Losses over a teacher's top words: the gradient of the naive formula, whatever the cut and the teacher."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.schema import DistillConfig, LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.forward.specs import PolicySpec
from quatrain.models.decoder import forward, logits
from quatrain.ops.aggregation import token_weights
from quatrain.update.distillation import Distillation
from quatrain.update.learner import Learner
from quatrain.update.teacher import FrozenModel, OwnWeights, Teacher, WordTeacher
from quatrain.update.teacher_scores import TopWords

KINDS = ("reverse_kl", "forward_kl", "jsd")
QUICK_KINDS = ["jsd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "jsd")]
"""`jsd` has both divergences, and `ops/test_distill.py` each by itself."""
TEMPERATURE, RATE, WEIGHT, BETA = 0.8, 0.5, 0.7, 0.3


@pytest.fixture
def make_learner(small_arch):
    def make(kind, top_k, *, tokens=None, update=None, teacher=None, words=None) -> Learner:
        sizes = {"max_tokens_per_device": tokens} if tokens else {"micro_batch_size": 5}
        config = UpdateConfig(
            mini_batch_size=4, **{"loss_aggregation": "seq_mean_token_mean", **(update or {}), **sizes}
        )
        distill = DistillConfig(teacher="x", loss=kind, beta=BETA, weight=WEIGHT, rl_weight=0.0, top_k=top_k)
        return Learner(
            PolicySpec(small_arch, temperature=TEMPERATURE, remat="none"),
            config,
            LogprobConfig(max_tokens_per_device=48) if tokens else LogprobConfig(micro_batch_size=7),
            OptimizerConfig(name="sgd", learning_rate=RATE, beta1=0.0, max_grad_norm=None),
            max_new_tokens=9,
            total_steps=10,
            seed=3,
            distillation=Distillation.of(distill, 10),
            teacher=teacher,
            num_words=words,
        )

    return make


@pytest.fixture
def make_teacher(small_arch, teacher_arch, teacher_params):
    def make(top_k, *, max_tokens=64, memory="device", names=("default",), prompts=None) -> Teacher:
        spec = PolicySpec(teacher_arch, temperature=TEMPERATURE)
        model = FrozenModel(teacher_params, spec, max_tokens=max_tokens, memory=memory)
        return Teacher(dict.fromkeys(names, model), prompts, top=TopWords(top_k, small_arch.vocab_size))

    return make


def _step(learner, params, batch):
    return learner.step(learner.init(jax.tree.map(jnp.array, params)), batch)


def _scored(batch, teacher, own=None):
    return dataclasses.replace(batch, rewarded=teacher.score(batch.rewarded, own))


def _log_softmax(params, arch, r, words):
    """[B, T - 1, words], of whole arrays of logits."""
    return _whole(params, arch, r.input_ids, r.attention_mask, words)


@partial(jax.jit, static_argnames=("arch", "words"))
def _whole(params, arch, ids, mask, words):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    hidden = forward(params, arch, ids, positions, mask.astype(np.int32)).hidden
    return jax.nn.log_softmax(logits(params, arch, hidden)[:, :-1, :words] / TEMPERATURE)


def _naive(params, kind, top_k, arch, log_q, ids, mask, weights):
    """The loss of the outcomes by indicators of words in whole arrays; `log_q` [B, T - 1, V]."""
    log_p = _whole(params, arch, ids, mask, arch.vocab_size)
    order = jnp.argsort(-log_q, axis=-1)
    best = (jnp.argsort(order, axis=-1) < top_k).astype(jnp.float32)

    def outcomes(log_probs):
        rest = (jnp.exp(log_probs) * (1 - best)).sum(axis=-1, keepdims=True)
        return jnp.concatenate([jnp.take_along_axis(log_probs, order[..., :top_k], -1), jnp.log(rest)], -1)

    log_p, log_q = outcomes(log_p), outcomes(log_q)
    if kind == "forward_kl":
        values = (jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1)
    elif kind == "reverse_kl":
        values = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    else:
        log_m = jnp.log((1 - BETA) * jnp.exp(log_p) + BETA * jnp.exp(log_q))
        values = BETA * (jnp.exp(log_q) * (log_q - log_m)).sum(axis=-1)
        values += (1 - BETA) * (jnp.exp(log_p) * (log_p - log_m)).sum(axis=-1)
    return WEIGHT * (weights[:, 1:] * values).sum()


_naive_gradient = jax.jit(jax.value_and_grad(_naive), static_argnames=("kind", "top_k", "arch"))


def _expected(kind, top_k, arch, params, log_q, batch, taught):
    """(loss, parameters after a step of gradient descent) of the naive loss."""
    r = batch.rollouts
    weights = token_weights("seq_mean_token_mean", r.completion_mask & taught[:, None], 9)
    arrays = log_q, r.input_ids, r.attention_mask, np.asarray(weights)
    loss, gradient = _naive_gradient(params, kind, top_k, arch, *arrays)
    return float(loss), jax.tree.map(lambda p, g: p - RATE * g, params, gradient)


def _assert_is(state, expected, loss=None):
    if loss is not None:
        assert state.metrics["loss"].result() == pytest.approx(loss, rel=1e-5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_step_is_that_of_the_naive_loss_however_it_is_cut(
    make_learner, make_teacher, make_batch, small_arch, small_params, teacher_arch, teacher_params, kind
):
    """Sequences of more than 13 tokens have no teacher; their tokens are in no denominator."""
    batch = make_batch(0, holes=True)
    taught = batch.rollouts.lengths <= 13
    assert 0 < taught.sum() < len(taught)
    log_q = _log_softmax(teacher_params, teacher_arch, batch.rollouts, small_arch.vocab_size)
    loss, expected = _expected(kind, 4, small_arch, small_params, log_q, batch, taught)
    options = [{}, {"tokens": 40}, {"tokens": 15}]
    for option in options if kind == "reverse_kl" else options[:2]:
        memory = "host" if option == options[-1] else "device"
        scored = _scored(batch, make_teacher(4, max_tokens=13, memory=memory))
        state = _step(make_learner(kind, 4, **option), small_params, scored)
        _assert_is(state, expected, loss)
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (small_params, expected)), strict=True)
    ]
    assert max(moved) > 1e-3


@pytest.mark.slow
def test_what_is_logged(
    make_learner, make_teacher, make_batch, small_arch, small_params, teacher_arch, teacher_params
):
    """Masses of the four words under both, and that of the ten words that only the teacher has.

    All are means over the tokens that have a teacher, those of sequences of at most 13 tokens.
    """
    batch = make_batch(1)
    scored = _scored(batch, make_teacher(4, max_tokens=13))
    state = _step(make_learner("jsd", 4), small_params, scored)
    r, words = batch.rollouts, small_arch.vocab_size
    taught = r.lengths <= 13
    assert 0 < taught.sum() < len(taught)
    mask = r.completion_mask[:, 1:] & taught[:, None]
    every = np.exp(_log_softmax(teacher_params, teacher_arch, r, words + 10))
    log_q, log_p = (
        _log_softmax(params, arch, r, words)
        for params, arch in ((teacher_params, teacher_arch), (small_params, small_arch))
    )
    best = np.argsort(-np.asarray(log_q), axis=-1)[..., :4]
    found = scored.rewarded.metrics | state.metrics
    for name, log_probs in (("distill/topk_mass", log_q), ("distill/topk_mass_policy", log_p)):
        mass = np.exp(np.take_along_axis(np.asarray(log_probs), best, axis=-1)).sum(axis=-1)
        assert found[name].result() == pytest.approx(mass[mask].mean(), rel=1e-4)
    outside = every[..., words:].sum(axis=-1)[mask].mean()
    assert found["distill/outside_mass"].result() == pytest.approx(outside, rel=1e-4)
    log_q, log_p = (np.asarray(x, np.float64)[mask] for x in (log_q, log_p))
    log_m = np.log((1 - BETA) * np.exp(log_p) + BETA * np.exp(log_q))
    exact = BETA * (np.exp(log_q) * (log_q - log_m)).sum(axis=-1)
    exact = (exact + (1 - BETA) * (np.exp(log_p) * (log_p - log_m)).sum(axis=-1)).mean()
    assert found["distill/loss"].result() < exact
    model = make_teacher(4, max_tokens=13)._sources["default"]
    whole = make_learner("jsd", 0, teacher=WordTeacher(model, kind="jsd", beta=BETA), tokens=40)
    same = _step(whole, small_params, batch).metrics
    assert same["distill/outside_mass"].result() == pytest.approx(outside, rel=1e-4)
    assert same["distill/loss"].result() == pytest.approx(exact, rel=1e-4)
    untaught = (r.completion_mask.any(axis=1) & ~taught).sum()
    assert same["distill/no_teacher"].result() == untaught > 0
    assert found["distill/no_teacher"].result() == untaught


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_all_words_as_top_words_are_the_loss_over_all_words(
    make_learner, make_teacher, make_batch, small_arch, small_params, kind
):
    batch, every = make_batch(2, holes=True), small_arch.vocab_size
    model = make_teacher(every)._sources["default"]
    whole = make_learner(kind, 0, tokens=40, teacher=WordTeacher(model, kind=kind, beta=BETA))
    expected = _step(whole, small_params, batch)
    state = _step(make_learner(kind, every, tokens=40), small_params, _scored(batch, make_teacher(every)))
    _assert_is(state, expected.params, expected.metrics["loss"].result())


def test_each_row_has_the_words_of_its_own_teacher(
    make_learner, make_teacher, make_batch, small_arch, small_params, teacher_arch, teacher_params
):
    """Three sources: a model, the policy's own weights, and none."""
    batch = make_batch(3)
    names = [("math", "own", "chat")[row % 3] for row in range(len(batch.rollouts))]
    rollouts = dataclasses.replace(batch.rollouts, columns={"data_source": tuple(names)})
    batch = dataclasses.replace(batch, rewarded=dataclasses.replace(batch.rewarded, rollouts=rollouts))
    learner = make_learner("jsd", 4, tokens=40)
    model = make_teacher(4)._sources["default"]
    sources = {"math": model, "own": OwnWeights("policy", TEMPERATURE, 64), "chat": None}
    state = learner.init(jax.tree.map(jnp.array, small_params))
    top = TopWords(4, small_arch.vocab_size)
    scored = _scored(batch, Teacher(sources, top=top), partial(learner.own_scores, state.params))
    state = learner.step(state, scored)
    log_q = _log_softmax(teacher_params, teacher_arch, rollouts, small_arch.vocab_size)
    own = _log_softmax(small_params, small_arch, rollouts, small_arch.vocab_size)
    log_q = jnp.where((np.array(names) == "own")[:, None, None], own, log_q)
    taught = np.array(names) != "chat"
    loss, expected = _expected("jsd", 4, small_arch, small_params, log_q, batch, taught)
    _assert_is(state, expected, loss)


@pytest.mark.slow
def test_the_update_goes_on_for_epochs_and_mini_batches(make_learner, make_teacher, make_batch, small_params):
    scored = _scored(make_batch(4), make_teacher(4))
    state = _step(make_learner("jsd", 4, tokens=40, update={"epochs": 3}), small_params, scored)
    assert state.step == 3
    first = _step(make_learner("jsd", 4, tokens=40), small_params, scored)
    assert state.metrics["distill/loss"].result() < first.metrics["distill/loss"].result()


def test_a_batch_without_words_is_an_error(make_learner, make_batch, small_params):
    with pytest.raises(ValueError, match=r"the batch has none; call teacher\.score"):
        _step(make_learner("jsd", 4), small_params, make_batch(5))
