"""Losses over the vocabulary: the gradient of the naive formula, whatever the cut, on every mesh; weights."""

import dataclasses

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
from quatrain.update.teacher import FrozenModel, WordTeacher

KINDS = ("reverse_kl", "forward_kl", "jsd")
QUICK_KINDS = ["jsd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "jsd")]
"""`jsd` has both divergences, and `ops/test_distill.py` each by itself."""
TEMPERATURE = 0.8


@pytest.fixture
def make_learner(small_arch, teacher_arch, teacher_params):
    def make(kind, *, tokens=None, rl_weight=0.0, update=None, max_tokens=64, memory="device", **knobs):
        sizes = {"max_tokens_per_device": tokens} if tokens else {"micro_batch_size": 5}
        config = UpdateConfig(
            mini_batch_size=4, **{"loss_aggregation": "seq_mean_token_mean", **(update or {}), **sizes}
        )
        distill = DistillConfig(teacher="x", loss=kind, beta=0.3, weight=0.7, rl_weight=rl_weight)
        spec = PolicySpec(teacher_arch, temperature=TEMPERATURE)
        model = FrozenModel(teacher_params, spec, max_tokens=max_tokens, memory=memory)
        return Learner(
            PolicySpec(small_arch, temperature=TEMPERATURE, remat="none"),
            config,
            LogprobConfig(max_tokens_per_device=48) if tokens else LogprobConfig(micro_batch_size=7),
            OptimizerConfig(name="sgd", learning_rate=0.5, beta1=0.0, max_grad_norm=None),
            max_new_tokens=9,
            total_steps=10,
            seed=3,
            distillation=Distillation.of(distill, 10),
            teacher=WordTeacher(model, kind=kind, beta=0.3),
            **knobs,
        )

    return make


def _step(learner, params, batch):
    return learner.step(learner.init(jax.tree.map(jnp.array, params)), batch)


def _naive(kind, arch, params, teacher_arch, teacher_params, batch, taught):
    """The loss of `kind` by whole arrays of logits, over the words that both models have."""
    r, words = batch.rollouts, arch.vocab_size
    positions = np.broadcast_to(np.arange(r.input_ids.shape[1]), r.input_ids.shape)
    segments = r.attention_mask.astype(np.int32)

    def log_softmax(params, arch):
        hidden = forward(params, arch, r.input_ids, positions, segments).hidden
        return jax.nn.log_softmax(logits(params, arch, hidden)[:, :-1, :words] / TEMPERATURE)

    log_p, log_q = log_softmax(params, arch), log_softmax(teacher_params, teacher_arch)
    if kind == "forward_kl":
        values = (jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1)
    elif kind == "reverse_kl":
        values = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    else:
        log_m = jnp.log(0.7 * jnp.exp(log_p) + 0.3 * jnp.exp(log_q))
        values = 0.3 * (jnp.exp(log_q) * (log_q - log_m)).sum(axis=-1)
        values += 0.7 * (jnp.exp(log_p) * (log_p - log_m)).sum(axis=-1)
    weights = token_weights("seq_mean_token_mean", r.completion_mask & taught[:, None], 9)
    return 0.7 * (jnp.asarray(weights)[:, 1:] * values).sum()


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_step_is_that_of_the_naive_loss_however_it_is_cut(
    make_learner, make_batch, small_arch, small_params, teacher_arch, teacher_params, kind
):
    """Sequences of more than 13 tokens have no teacher; their tokens are in no denominator."""
    batch = make_batch(0, holes=True)
    taught = batch.rollouts.lengths <= 13
    assert 0 < taught.sum() < len(taught)
    loss, gradient = jax.jit(
        jax.value_and_grad(
            lambda params: _naive(kind, small_arch, params, teacher_arch, teacher_params, batch, taught)
        )
    )(small_params)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, small_params, gradient)
    options = [{}, {"tokens": 40}, {"tokens": 15, "memory": "host"}]
    for option in options if kind == "reverse_kl" else options[:2]:
        state = _step(make_learner(kind, max_tokens=13, **option), small_params, batch)
        assert state.metrics["loss"].result() == pytest.approx(float(loss), rel=1e-5)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    moved = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    assert moved > 1e-3


@pytest.mark.slow
def test_rewards_and_divergence_are_added(make_learner, make_batch, small_params):
    """What a step does with both is the sum of what it does with each, for plain gradient descent."""
    batch = make_batch(1)
    nothing = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    both, words = (
        _step(make_learner("reverse_kl", rl_weight=0.5), small_params, each) for each in (batch, nothing)
    )
    assert words.metrics["update/skipped_steps"].result() == 0
    assert words.metrics["distill/loss"].result() > 0.1
    learner = make_learner("reverse_kl", rl_weight=0.5)
    learner.objective = dataclasses.replace(learner.objective, distillation=None)
    learner.trainer.teacher = None
    half = dataclasses.replace(batch, advantages=batch.advantages * np.float32(0.5))
    rewards = _step(learner, small_params, half)
    for start, a, b, c in zip(
        *(jax.tree.leaves(x) for x in (small_params, both.params, words.params, rewards.params)), strict=True
    ):
        np.testing.assert_allclose(a - start, (b - start) + (c - start), rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_the_update_goes_on_for_epochs_and_mini_batches(make_learner, make_batch, small_params):
    learner = make_learner("forward_kl", tokens=40, update={"epochs": 3})
    batch = make_batch(2)
    state = _step(learner, small_params, batch)
    assert state.step == 3
    first = _step(make_learner("forward_kl", tokens=40), small_params, batch)
    assert state.metrics["distill/loss"].result() < first.metrics["distill/loss"].result()
