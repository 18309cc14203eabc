"""Routing replay: the update's experts are the sampler's, however a batch is cut, and in bfloat16 too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import local_rollouts
from routed_models import routed_model

from quatrain.config.schema import LogprobConfig, LoraConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.blocks.experts import RouterSums
from quatrain.models.decoder import forward
from quatrain.models.lora import with_adapters, with_lora
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import AdvantagedBatch, Prompt, RewardedBatch, RolloutBatch
from quatrain.update.gradient import _router_stats, sum_gradients
from quatrain.update.learner import Learner
from quatrain.update.objective import PolicyObjective

LIVE = 255
WHOLE = MicroBatchPlanner(rows=100)
CUTTINGS = (
    MicroBatchPlanner(rows=2),
    MicroBatchPlanner(max_tokens=80, share_prompts=True),
    MicroBatchPlanner(max_tokens=160, num_shards=2, share_prompts=True, line_tokens=80),
    MicroBatchPlanner(max_tokens=1000, share_prompts=True),
)


def _sampled(arch, params, tokenizer, *, dtype="float32", n=4, new=24, **options) -> RolloutBatch:
    config = RolloutConfig(n=n, max_new_tokens=new, **options)
    stop_ids = tuple(range(0, 290, 41))
    engine = local_rollouts(arch, config, tokenizer, stop_ids=stop_ids, seed=1, dtype=dtype)
    engine.sync_weights(params, 0)
    rng = np.random.default_rng(0)
    common = rng.integers(1, 290, 33)
    ids = [np.concatenate([common, rng.integers(1, 290, size)]).astype(np.int32) for size in (5, 1, 17, 9)]
    return engine.generate([Prompt(i, each, "") for i, each in enumerate(ids)])


def _gap(arch, params, batch, *, dtype="float32", planner=CUTTINGS[1], replayed=True) -> np.ndarray:
    """Absolute differences of the trainer's log-probabilities from the sampler's, of sampled tokens."""
    table = TokenTable.of_policy(batch, arch) if replayed else TokenTable.of(batch)
    own = predict_tokens(params, table, model=PolicySpec(arch, dtype, remat="none"), planner=planner)
    return np.abs(own - batch.rollout_logprobs)[batch.completion_mask]


def _forced(batch: RolloutBatch, seed: int = 0) -> RolloutBatch:
    """`batch` with random experts in place of the recorded ones."""
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((*batch.routes.shape[:3], 8)), axis=-1)[..., :2].astype(np.uint8)
    return replace(batch, routes=np.where(batch.routes == LIVE, batch.routes, routes))


@pytest.fixture(scope="module")
def model():
    return routed_model()


@pytest.fixture(scope="module")
def sampled(model, tokenizer):
    return _sampled(*model, tokenizer)


def test_in_float32_the_sampler_is_the_trainer(model, sampled):
    for planner in (WHOLE, CUTTINGS[1]):
        assert _gap(*model, sampled, planner=planner).max() < 1e-4


def test_a_recording_shifted_by_one_token_is_noticed(model, sampled):
    """Replay is not a wish: with the experts of neighbours, log-probabilities are others."""
    for shift in (1, -1):
        routes = np.roll(sampled.routes, shift, axis=1)
        routes[np.arange(len(sampled)), sampled.lengths - 1] = LIVE
        routes[~sampled.attention_mask] = LIVE
        assert _gap(*model, replace(sampled, routes=routes)).max() > 1e-2


@pytest.mark.slow
def test_in_bfloat16_the_gap_is_that_of_a_model_without_choices(model, tokenizer):
    """The largest difference is at most twice that of the same model with one expert of one."""
    dtype = "bfloat16"
    batch = _sampled(*model, tokenizer, dtype=dtype, n=8)
    alone = routed_model(num_experts=1, num_experts_per_tok=1)
    without = _sampled(*alone, tokenizer, dtype=dtype, n=8)
    replayed, live = (_gap(*model, batch, dtype=dtype, replayed=replayed) for replayed in (True, False))
    assert replayed.max() <= 2 * _gap(*alone, without, dtype=dtype).max()
    assert live.max() > 2 * replayed.max()


@cache
def _objective():
    """That of `_learner`, so that one program computes the gradients of both."""
    return PolicyObjective.of(UpdateConfig(entropy_coef=0.1), on_policy=False)


def _gradient(arch, params, table, planner, **settings):
    policy = replace(PolicySpec(arch, remat="none"), **settings)
    batches = (b for _, b in micro_batches(table, planner, one_device(), policy.forms))
    grads, stats, _ = sum_gradients(params, batches, model=policy, objective=_objective())
    return jax.tree.map(np.asarray, (grads, stats))


def _mini_batch(arch, batch: RolloutBatch, coef: float = 0.0) -> TokenTable:
    advantages = np.where(batch.completion_mask, np.random.default_rng(0).normal(size=(len(batch), 1)), 0)
    sampled = batch.rollout_logprobs
    columns = {"advantages": advantages.astype(np.float32), "rollout_logprobs": sampled}
    columns["old_logprobs"] = sampled
    table = TokenTable.of_policy(batch, arch).with_columns(**columns).weighted("token_mean", 24)
    return table.balanced(coef, 8) if coef else table


def _assert_same(got, expected):
    (got_gradient, got_stats), (gradient, stats) = got, expected
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    for a, b in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest)
    for kind in ("sum", "max", "routers"):
        assert got_stats[kind].keys() == stats[kind].keys()
        for name, value in stats[kind].items():
            np.testing.assert_allclose(got_stats[kind][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("coef", "remat", "cuttings"),
    [
        (3.0, "layer", CUTTINGS[2:3]),
        *(
            pytest.param(*each, CUTTINGS, marks=pytest.mark.slow)
            for each in ((0.0, "none"), (3.0, "none"), (3.0, "dots"), (3.0, "layer"))
        ),
    ],
)
def test_no_cut_changes_gradient_auxiliary_loss_or_metrics(model, sampled, coef, remat, cuttings):
    """With experts that the routers would not choose, so that replay is seen; prompts shared or not."""
    table = _mini_batch(model[0], _forced(sampled), coef)
    whole = _gradient(*model, table, WHOLE)
    assert whole[1]["routers"]["changed"] > 0.5 * whole[1]["routers"]["replayed"] > 0
    if coef:
        assert whole[1]["routers"]["balance_loss"] == pytest.approx(coef, rel=0.2)
        more = _gradient(*model, _mini_batch(model[0], _forced(sampled), 2 * coef), WHOLE)
        router = [grads["layers"][0]["router"] for grads, _ in (whole, more)]
        assert np.abs(router[0] - router[1]).max() > 1e-3
    for planner in cuttings:
        _assert_same(_gradient(*model, table, planner, remat=remat), whole)


def test_the_auxiliary_loss_is_that_of_the_whole_batch(model, sampled):
    """coef / L · Σ E Σ f p, from the probabilities of the routers on whole rows."""
    ids, lengths = sampled.input_ids, sampled.lengths
    columns = np.arange(ids.shape[1])
    counted = (columns < (lengths - 1)[:, None]).astype(np.float32)
    positions = np.broadcast_to(columns, ids.shape)
    real = sampled.attention_mask.astype(np.int32)
    arch, params = model

    @jax.jit
    def summed(params):
        forwarded = forward(params, arch, ids, positions, real, counted=counted, packed=False)
        return forwarded.sums.probabilities

    probabilities = np.asarray(summed(params)) / counted.sum()
    routes = sampled.routes[counted > 0]
    chosen = np.stack([np.bincount(routes[:, layer].reshape(-1), minlength=8) for layer in (0, 1)])
    parts = chosen / chosen.sum(axis=1, keepdims=True)
    expected = 0.7 / 2 * (8 * parts * probabilities).sum()
    stats = _gradient(*model, _mini_batch(arch, sampled, 0.7), WHOLE)[1]
    assert stats["routers"]["balance_loss"] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(stats["routers"]["expert_tokens"], chosen)


def _learner(arch, learning_rate=1e-3, **options) -> Learner:
    """With the micro-batches, the objective and so the programs of `CUTTINGS[1]`."""
    settings = {
        "mini_batch_size": 2,
        "loss_aggregation": "token_mean",
        "max_tokens_per_device": 80,
        "share_prompts": True,
        "entropy_coef": 0.1,
        "router_aux_coef": 0.5,
    }
    update = UpdateConfig(**settings | options)
    logprob, optimizer = (
        LogprobConfig(max_tokens_per_device=80),
        OptimizerConfig(learning_rate=learning_rate),
    )
    return Learner(
        PolicySpec(arch, remat="none"), update, logprob, optimizer, max_new_tokens=24, total_steps=10, seed=0
    )


def _advantaged(batch: RolloutBatch) -> AdvantagedBatch:
    rewards = np.random.default_rng(1).normal(size=len(batch)).astype(np.float32)
    advantages = np.where(batch.completion_mask, rewards[:, None], 0).astype(np.float32)
    return AdvantagedBatch(RewardedBatch(batch, rewards, rewards[None], ("r",)), advantages)


def _stepped(model, batch, **options):
    learner = _learner(model[0], **options)
    params = jax.tree.map(jnp.copy, model[1])
    return learner.step(learner.init(params), _advantaged(batch))


def _results(state) -> dict[str, float]:
    return {name: metric.result() for name, metric in state.metrics.items()}


def test_every_pass_of_the_update_takes_the_recorded_experts(model, sampled):
    """Old log-probabilities, both epochs and all optimizer steps: the ratio is 1 before the first of them,
    which it is not if one pass takes other experts than another."""
    forced = _forced(sampled)
    # The greatest ratio of four steps with a rate near 0: each step had the experts of the first pass.
    still = _learner(model[0], old_logprobs="recompute", epochs=2, learning_rate=1e-9)
    state = still.step(still.init(jax.tree.map(jnp.copy, model[1])), _advantaged(forced))
    results = _results(state)
    assert results["update/optimizer_steps"] == 4
    assert results["moe/replay_changed"] > 0.5
    assert results["update/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_metrics_of_a_training_step(model, sampled):
    results = _results(_stepped(model, sampled, epochs=2))
    assert results["moe/replay_changed"] == 0  # float32, and the weights that sampled
    assert 1 < results["moe/load_max"] < 8
    assert 0 < results["moe/entropy"] < np.log(8)
    inputs = sampled.attention_mask.copy()
    inputs[np.arange(len(sampled)), sampled.lengths - 1] = False
    chosen = [np.bincount(sampled.routes[inputs][:, layer].reshape(-1), minlength=8) for layer in (0, 1)]
    assert results["moe/dead_experts"] == sum((each == 0).sum() for each in chosen)
    assert results["moe/load_max"] == pytest.approx(8 * max((each / each.sum()).max() for each in chosen))
    assert results["update/router_aux_loss"] == pytest.approx(0.5, rel=0.3)


def test_without_recorded_routes_a_pass_chooses_anew(model, sampled):
    """A model that chooses live is the sampler, counts no change, and has no loads for an auxiliary loss."""
    assert _gap(*model, sampled, replayed=False).max() < 1e-4
    with pytest.raises(ValueError, match=r"update\.router_aux_coef needs recorded routes"):
        TokenTable.of(sampled).balanced(0.1, 8)
    sums = RouterSums(np.ones((2, 8)), np.ones((2, 8)), np.ones(2), np.ones(2))
    stats = _router_stats(sums, SimpleNamespace(routes=None, counts=np.ones(1), balance=None))
    assert stats.keys() == {"expert_tokens", "entropy"}


@pytest.mark.slow
def test_without_recorded_routes_the_update_chooses_anew(model, sampled):
    results = _results(_stepped(model, replace(sampled, routes=None), router_aux_coef=0))
    assert "moe/replay_changed" not in results
    assert results["moe/load_max"] > 1
    assert results["rollout/logprob_diff_max"] < 1e-4
    with pytest.raises(ValueError, match=r"update\.router_aux_coef needs recorded routes"):
        _stepped(model, replace(sampled, routes=None), router_aux_coef=0.1)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda routes: np.concatenate([routes, routes[:, :, :1]], axis=2), r"got uint8 \[16, \d+, 3, 2\]"),
        (lambda routes: routes[:, :, :1], r"got uint8 \[16, \d+, 1, 2\]"),
        (lambda routes: routes[..., :1], r"got uint8 \[16, \d+, 2, 1\]"),
        (
            lambda routes: np.where(routes < LIVE, routes.astype(np.uint16), 2**16 - 1),
            r"got uint16 \[16, \d+, 2, 2\]",
        ),
        (lambda routes: np.where(routes == LIVE, LIVE, routes + 1), "from 0 to 7; got expert 8"),
    ],
    ids=["layers", "layer", "k", "dtype", "experts"],
)
def test_routes_of_another_model_are_refused(model, sampled, change, got):
    other = replace(sampled, routes=change(sampled.routes))
    with pytest.raises(
        ValueError, match=rf"must be those of the model .* uint8 \[B, T, 2, 2\].*{got}; train on"
    ):
        _stepped(model, other)


def test_routes_are_refused_by_a_model_without_experts(small_arch, small_params, sampled):
    learner = _learner(small_arch, router_aux_coef=0)
    state = learner.init(jax.tree.map(jnp.copy, small_params))
    with pytest.raises(ValueError, match=r"it has no experts \(family llama\), got routes \[16, "):
        learner.step(state, _advantaged(sampled))


@pytest.mark.slow
def test_the_auxiliary_loss_is_trained(model, sampled):
    """With the recorded loads, after an epoch it is smaller than in a run without it."""
    losses = []
    for coef in (0.0, 10.0):
        state = _stepped(model, sampled, router_aux_coef=coef)
        assert ("update/router_aux_loss" in state.metrics) == bool(coef)
        stats = _gradient(model[0], state.params, _mini_batch(model[0], sampled, 1.0), WHOLE)[1]["routers"]
        losses.append(float(stats["balance_loss"]))
    assert losses[1] < losses[0] - 0.05


@pytest.mark.slow
def test_the_reference_of_adapters_takes_the_routes_and_another_model_its_own(model, sampled):
    """The base has the policy's routers. Forced experts change its log-probabilities, and not the other's."""
    forced, arch = _forced(sampled), with_lora(model[0], LoraConfig(rank=2))
    adapted = with_adapters(jax.tree.map(jnp.copy, model[1]), arch, jax.random.key(0))
    learner = _learner(arch, kl_coef=0.1)
    learner.reference = adapted
    of_base = learner._reference_logprobs(adapted, forced)
    assert np.abs(of_base - learner._reference_logprobs(adapted, sampled)).max() > 1e-2
    np.testing.assert_allclose(of_base, learner._logprobs(adapted, learner._table(forced)), atol=1e-5)
    learner = _learner(model[0], kl_coef=0.1)
    learner.reference = model[1]
    ref, same = (learner._reference_logprobs(model[1], each) for each in (forced, sampled))
    np.testing.assert_array_equal(ref, same)
