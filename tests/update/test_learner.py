from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_loss
from rollouts import at_version

from quatrain.config.schema import LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import LoRA
from quatrain.models.decoder import forward, logits
from quatrain.models.lora import with_adapters
from quatrain.ops.losses import LOSS_AGGREGATIONS, POLICY_LOSSES
from quatrain.ops.packing import width_buckets
from quatrain.parallel.mesh import to_memory
from quatrain.types.batches import AdvantagedBatch
from quatrain.update.learner import Learner, TooManyBadSteps


@pytest.fixture
def make_learner(small_arch):
    def make(
        update=None,
        optimizer=None,
        *,
        mini_batch_size=4,
        micro_batch_size=5,
        max_tokens=None,
        reference=None,
        arch=small_arch,
        **knobs,
    ) -> Learner:
        config = UpdateConfig(
            mini_batch_size=mini_batch_size,
            micro_batch_size=None if max_tokens else micro_batch_size,
            max_tokens_per_device=max_tokens,
            **{"loss_aggregation": "token_mean", **(update or {})},
        )
        defaults = {"name": "sgd", "learning_rate": 0.5, "beta1": 0.0}
        optimizer = OptimizerConfig(**{**defaults, **(optimizer or {})})
        return Learner(
            PolicySpec(arch, temperature=0.8, remat="none"),
            config,
            LogprobConfig(max_tokens_per_device=48) if max_tokens else LogprobConfig(micro_batch_size=7),
            optimizer,
            max_new_tokens=9,
            total_steps=10,
            reference=reference,
            **{"seed": 3, **knobs},
        )

    return make


def _copy(params):
    return jax.tree.map(jnp.array, params)


def _changes(before, after) -> float:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after))
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def _logprobs(learner: Learner, params, batch: AdvantagedBatch) -> np.ndarray:
    r = batch.rollouts
    table = TokenTable(r.input_ids, r.attention_mask, r.completion_mask, {})
    return predict_tokens(params, table, model=learner.policy, planner=MicroBatchPlanner(rows=7))


def test_logprobs_are_those_of_the_whole_row(make_learner, make_batch, small_arch, small_params):
    batch = make_batch(0)
    r = batch.rollouts
    positions = np.broadcast_to(np.arange(r.input_ids.shape[1]), r.input_ids.shape)
    compiled = jax.jit(forward, static_argnames="arch")
    segments = r.attention_mask.astype(np.int32)
    hidden = compiled(small_params, small_arch, r.input_ids, positions, segments).hidden
    all_logprobs = jax.nn.log_softmax(logits(small_params, small_arch, hidden)[:, :-1] / 0.8)
    picked = np.take_along_axis(np.asarray(all_logprobs), r.input_ids[:, 1:, None], axis=2)[..., 0]
    expected = np.where(r.completion_mask, np.pad(picked, ((0, 0), (1, 0))), 0)
    np.testing.assert_allclose(_logprobs(make_learner(), small_params, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_step_makes_good_completions_likelier(make_learner, make_batch, small_params):
    learner, batch = make_learner(), make_batch(1)
    before = _logprobs(learner, small_params, batch)
    state = learner.step(learner.init(_copy(small_params)), batch)
    gain = ((_logprobs(learner, state.params, batch) - before) * batch.advantages).sum()
    assert gain > 0
    assert (state.step, state.train_step) == (1, 1)
    assert state.metrics["update/ratio_mean"].result() == pytest.approx(1.0)
    assert state.metrics["update/ratio_max"].result() == pytest.approx(1.0)


def test_on_policy_step_is_plain_policy_gradient(make_learner, make_batch, small_params):
    """With old = current the clipped loss has the gradient of -A log p, and its value is -mean(A)."""
    learner, batch = make_learner(), make_batch(2)
    state = learner.step(learner.init(_copy(small_params)), batch)
    mean = batch.advantages.sum() / batch.rollouts.completion_mask.sum()
    assert state.metrics["loss"].result() == pytest.approx(-mean, rel=1e-4)


def test_no_learning_rate_no_change(make_learner, make_batch, small_params):
    learner = make_learner(optimizer={"name": "adamw", "learning_rate": 0.0})
    state = learner.step(learner.init(_copy(small_params)), make_batch(3))
    assert _changes(small_params, state.params) == 0.0


WHOLE_STEPS = {
    "two epochs of two mini-batches": {"epochs": 2},
    "with KL and entropy": {"epochs": 2, "kl_coef": 0.2, "entropy_coef": 0.1},
    "to the sampler's log-probabilities": {"old_logprobs": "rollout", "dual_clip": 3.0},
}


@pytest.mark.parametrize(
    ("name", "aggregation", "budgets"),
    [
        ("with KL and entropy", "token_mean", (40,)),
        *(
            pytest.param(name, how, (40, 15), marks=pytest.mark.slow)
            for name in WHOLE_STEPS
            for how in LOSS_AGGREGATIONS
        ),
    ],
)
def test_a_training_step_is_the_same_in_rows_and_in_tokens(
    make_learner, make_batch, small_params, name, aggregation, budgets
):
    """All of it: old and reference log-probabilities, mini-batches, epochs."""
    config = {**WHOLE_STEPS[name], "loss_aggregation": aggregation}
    reference = jax.tree.map(lambda x: x * 1.05, small_params)
    batch = make_batch(13, groups=5)
    states = []
    for planner in ({"micro_batch_size": 4}, *({"max_tokens": budget} for budget in budgets)):
        learner = make_learner(
            config, {"learning_rate": 0.05}, mini_batch_size=3, reference=reference, **planner
        )
        states.append(learner.step(learner.init(_copy(small_params)), batch))
    rows, *packed = states
    assert rows.step == 2 * config.get("epochs", 1)
    assert _changes(small_params, rows.params) > 1e-4
    for state in packed:
        for a, b in zip(jax.tree.leaves(rows.params), jax.tree.leaves(state.params)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        for metric in ("loss", "update/entropy", "update/ratio_mean", "update/ratio_max", "update/grad_norm"):
            # Losses cancel: the mean is a fiftieth of what is added, whose roundings it has.
            expected = pytest.approx(rows.metrics[metric].result(), rel=2e-5, abs=1e-6)
            assert state.metrics[metric].result() == expected


def test_nothing_compiles_once_every_width_was_seen(make_learner, make_batch, small_params, monkeypatch):
    """12 steps of random lengths and counts: a compilation comes with a new width of the ladder, or not."""
    learner = make_learner({"epochs": 2}, mini_batch_size=4, max_tokens=192)
    state = learner.init(_copy(small_params))
    rng = np.random.default_rng(0)
    widths, seen, settled = set(), set(), 0
    plans = MicroBatchPlanner.plans

    def noted(self, table):
        cuts = plans(self, table)
        widths.update((self.max_tokens, cut.width) for cut in cuts)
        return cuts

    monkeypatch.setattr(MicroBatchPlanner, "plans", noted)
    for step in range(12):
        batch = make_batch(step, groups=int(rng.integers(1, 7)), n=int(rng.integers(1, 9)))
        widths.clear()
        state = learner.step(state, at_version(batch, state.step))
        if widths <= seen:
            assert state.metrics["update/compilations"].result() == 0
            settled += 1
        seen |= widths
    assert settled > 4
    assert len(seen) > 2
    assert seen <= {(tokens, width) for tokens in (192, 48) for width in width_buckets(tokens)}


def test_epochs_and_mini_batches_count_and_move_the_ratio(make_learner, make_batch, small_params):
    learner = make_learner({"epochs": 3}, mini_batch_size=2)
    batch = make_batch(4, groups=5)
    state = learner.step(learner.init(_copy(small_params)), batch)
    assert state.metrics["update/optimizer_steps"].result() == 9  # 3 epochs of ceil(5 / 2) mini-batches
    assert state.step == 9
    assert state.metrics["update/ratio_max"].result() > 1.001
    tokens = batch.rollouts.completion_mask.sum()
    assert state.metrics["update/ratio_mean"].count == 3 * tokens  # every token, once an epoch


def test_old_logprobs_of_the_rollout_set_the_ratio(make_learner, make_batch, small_params):
    batch = make_batch(5)
    learner = make_learner({"old_logprobs": "rollout"})
    state = learner.step(learner.init(_copy(small_params)), batch)
    gap = _logprobs(learner, small_params, batch) - batch.rollouts.rollout_logprobs
    ratio = np.exp(np.clip(gap, -20, 20))[batch.rollouts.completion_mask]
    assert state.metrics["update/ratio_mean"].result() == pytest.approx(ratio.mean(), rel=1e-3)
    assert state.metrics["rollout/logprob_diff_mean"].result() == pytest.approx(
        np.abs(gap)[batch.rollouts.completion_mask].mean(), rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_pulls_back_to_the_reference(make_learner, make_batch, small_arch, small_params, estimator):
    batch = make_batch(6)
    reference = jax.tree.map(lambda x: x * 1.1, small_params)
    silent = replace(batch, advantages=np.zeros_like(batch.advantages))
    learner = make_learner(
        {"kl_coef": 1.0, "kl_estimator": estimator, "old_logprobs": "recompute"}, reference=reference
    )
    state = learner.step(learner.init(_copy(small_params)), silent)
    mask = batch.rollouts.completion_mask
    gap = (_logprobs(learner, small_params, batch) - _logprobs(learner, reference, batch))[mask]
    expected = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[estimator].mean()
    assert state.metrics["update/kl"].result() == pytest.approx(expected, rel=1e-3)
    assert state.metrics["loss"].result() == pytest.approx(expected, rel=1e-3)
    assert _changes(small_params, state.params) > 0


def test_a_loss_of_ones_own_trains_and_is_compiled_once(make_learner, make_batch, small_params):
    learner = make_learner({"loss": f"{sequence_loss.__file__}:sequence_ratio"})
    state = learner.step(learner.init(_copy(small_params)), make_batch(1))
    assert state.metrics["update/longest"].result() == 9
    state = learner.step(state, at_version(make_batch(1), state.step))
    assert state.metrics["update/compilations"].result() == 0
    assert state.metrics["update/sequence_ratio"].result() == pytest.approx(1.0)


@pytest.mark.slow
def test_entropy_bonus_raises_entropy(make_learner, make_batch, small_params):
    batch = make_batch(7)
    silent = replace(batch, advantages=np.zeros_like(batch.advantages))
    learner = make_learner({"entropy_coef": 0.1})
    state = learner.init(_copy(small_params))
    entropies = []
    for _ in range(4):
        state = learner.step(state, at_version(silent, state.step))
        entropies.append(state.metrics["update/entropy"].result())
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_stale_tokens_need_a_correction(make_learner, make_batch, small_params):
    batch = at_version(make_batch(3), 0)
    learner = make_learner()
    state = learner.step(learner.init(_copy(small_params)), batch)
    assert state.step == 1
    message = r"policy_version 0 to 0, and the .* with version 1; call sync_weights\(state\.params, "
    with pytest.raises(ValueError, match=message):
        learner.step(state, batch)
    with pytest.raises(ValueError, match=r"or set update\.correction to truncate or mask \("):
        learner.step(state, at_version(batch, 2))
    for update in ({"correction": "mask"}, {"old_logprobs": "rollout"}):
        learner = make_learner(update)
        state = learner.step(learner.step(learner.init(_copy(small_params)), batch), batch)
        assert state.step == 2
        assert ("update/behaviour_kl" in state.metrics) == ("correction" in update)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_ratio_to_the_sampler_corrects_losses_that_have_a_ratio(make_learner, loss):
    assert make_learner({"loss": loss, "old_logprobs": "rollout"}).corrects_staleness == (
        loss not in ("reinforce", "gpg")
    )
    assert make_learner({"loss": loss, "correction": "mask"}).corrects_staleness
    assert not make_learner({"loss": loss}).corrects_staleness


def test_a_batch_without_signal_is_skipped_and_counted(make_learner, make_batch, small_params):
    batch = make_batch(8)
    learner = make_learner(optimizer={"name": "adamw"})
    state = learner.step(learner.init(_copy(small_params)), make_batch(9))
    before = _copy(state.params)
    silent = replace(batch, advantages=np.zeros_like(batch.advantages))
    state = learner.step(state, at_version(silent, state.step))
    assert _changes(before, state.params) == 0.0  # momentum would have moved it
    assert state.metrics["update/skipped_steps"].result() == 1
    assert (state.step, state.train_step) == (1, 2)
    assert "loss" not in state.metrics


@pytest.mark.parametrize("update", [{"loss": "dro"}, {"sampler_kl_coef": 0.1}])
def test_a_penalty_on_the_distance_from_the_sampler_needs_no_signal(
    make_learner, make_batch, small_params, update
):
    """Catches a step that is skipped although its gradient is not 0."""
    batch = make_batch(8)
    learner = make_learner(update)
    state = learner.init(_copy(small_params))
    before = _copy(state.params)
    state = learner.step(state, replace(batch, advantages=np.zeros_like(batch.advantages)))
    assert state.metrics["update/skipped_steps"].result() == 0
    assert state.metrics["update/sampler_kl"].result() > 0
    assert _changes(before, state.params) > 0


def test_a_step_that_is_not_finite_is_not_applied(make_learner, make_batch, small_params):
    broken = _copy(small_params)
    broken["final_norm"] = broken["final_norm"].at[0].set(jnp.nan)
    learner = make_learner({"max_bad_steps": 2}, optimizer={"name": "adamw"})
    state = learner.init(broken)
    state = learner.step(state, make_batch(10))
    assert (state.step, state.bad_steps) == (0, 1)
    assert state.metrics["update/bad_steps"].result() == 1
    assert _changes(small_params["embed"], state.params["embed"]) == 0.0
    assert not any(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    with pytest.raises(TooManyBadSteps, match="max_bad_steps=2") as stopped:
        learner.step(state, make_batch(11))
    assert stopped.value.state.bad_steps == 2
    assert _changes(small_params["embed"], stopped.value.state.params["embed"]) == 0.0


def test_the_schedule_counts_optimizer_steps_that_are_not_applied(make_learner, make_batch, small_params):
    """Two optimizer steps a training step; the second has none with a signal, the third no finite one."""
    linear = {"name": "adamw", "learning_rate": 1.0, "schedule": "linear", "beta1": 0.9}
    learner = make_learner(optimizer=linear, mini_batch_size=2)
    state, rates = learner.init(_copy(small_params)), []
    for factor in (1, 0, 1e37, 1):  # the third gradient's norm overflows
        batch = make_batch(8)
        batch = replace(batch, advantages=batch.advantages * np.float32(factor))
        state = learner.step(state, at_version(batch, state.step))
        rates.append(state.metrics["update/learning_rate"].result())
    assert rates == pytest.approx([0.9, 0.7, 0.5, 0.3])  # 1 - s / 10 of the steps 1, 3, 5 and 7
    assert (state.step, state.train_step) == (4, 4)
    counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == jnp.int32]
    assert counts == [4, 8]  # of the moments, whose bias is corrected by applied steps, and of the schedule


def test_bfloat16_parameters_have_float32_moments(make_learner, make_batch, small_params):
    learner = make_learner(optimizer={"name": "adamw", "learning_rate": 0.1})
    state = learner.init(jax.tree.map(lambda x: x.astype(jnp.bfloat16), small_params))
    moments = [leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert set(moments) == {jnp.dtype("float32")}
    state = learner.step(state, make_batch(12))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert state.step == 1


def test_offloaded_state_and_reference_wait_in_the_hosts_memory(make_learner, make_batch, small_params):
    """The same weights, bit for bit; only where things are between steps differs."""
    states = {}
    for memory in ("device", "host"):
        learner = make_learner(
            {"kl_coef": 1.0, "kl_estimator": "k3", "old_logprobs": "recompute"},
            {"name": "adamw", "learning_rate": 0.1},
            reference=to_memory(memory, _copy(small_params)),
            optimizer_memory=memory,
        )
        state = learner.init(_copy(small_params))
        for seed in (1, 2):
            state = learner.step(state, at_version(make_batch(seed), state.step))
        states[memory] = state
        kept = {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.opt_state, learner.reference))}
        assert kept == {"pinned_host" if memory == "host" else "device"}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
    assert _changes(states["device"].params, states["host"].params) == 0
    assert _changes(states["device"].params, small_params) > 0.01


def test_bfloat16_parameters_are_rounded_by_seed_and_step(make_learner, make_batch, small_params):
    """The same step twice is the same to the bit; float32 parameters are not rounded at all."""

    def stepped(dtype, *, step=0, seed=3, **optimizer):
        learner = make_learner(optimizer={"learning_rate": 1e-3, **optimizer}, seed=seed)
        state = learner.init(jax.tree.map(lambda x: x.astype(dtype), _copy(small_params)))
        return learner.step(replace(state, step=step), at_version(make_batch(4), step)).params

    first = stepped(jnp.bfloat16)
    assert _changes(first, stepped(jnp.bfloat16)) == 0
    assert _changes(first, stepped(jnp.bfloat16, step=1)) > 0
    assert _changes(first, stepped(jnp.bfloat16, seed=1)) > 0
    nearest = stepped(jnp.bfloat16, stochastic_rounding=False)
    assert _changes(first, nearest) > 0
    exact = stepped(jnp.float32)
    assert _changes(exact, stepped(jnp.float32, stochastic_rounding=False)) == 0
    lost = np.mean(np.asarray(nearest["embed"]) == np.asarray(small_params["embed"].astype(jnp.bfloat16)))
    assert lost > 0.5  # smaller than half the distance of two numbers


@pytest.mark.slow
def test_small_updates_of_bfloat16_parameters_are_lost_only_by_rounding_to_the_nearest(
    make_learner, make_batch, small_params
):
    """The part of the change in float32 that is left, at steps of a hundredth of a number's distance."""
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _copy(small_params))
    exact, kept = None, {}
    for name, dtype, stochastic in (
        ("float32", jnp.float32, True),
        ("stochastic", jnp.bfloat16, True),
        ("nearest", jnp.bfloat16, False),
    ):
        rounding = {} if stochastic else {"stochastic_rounding": False}
        learner = make_learner(optimizer={"name": "adamw", "learning_rate": 1e-5, **rounding})
        state = learner.init(jax.tree.map(lambda x, dtype=dtype: jnp.array(x, dtype), start))
        for _ in range(15):
            state = learner.step(state, at_version(make_batch(4), state.step))
        change = np.concatenate(
            [
                np.ravel(np.asarray(new, np.float64) - np.asarray(old, np.float64))
                for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(start))
            ]
        )
        exact = change if exact is None else exact
        kept[name] = change @ exact / (exact @ exact)
    assert kept["stochastic"] == pytest.approx(1, abs=0.15)
    assert kept["nearest"] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_policy_that_waits_in_the_hosts_memory_is_trained_to_the_bit(
    make_learner, make_batch, small_arch, small_params, rank
):
    """Also the frozen base under adapters, which goes on waiting in the same arrays."""
    found = {}
    arch = replace(small_arch, lora=LoRA(rank, 4.0, ("qkv", "down")) if rank else None)
    for memory in ("device", "host"):
        learner = make_learner(
            {"old_logprobs": "recompute"}, {"name": "adamw"}, policy_memory=memory, arch=arch
        )
        params = _copy(small_params)
        if rank:
            params = with_adapters(params, arch, jax.random.key(2))
        before = _copy(learner.policy.trained(params))
        state = learner.init(params)
        embed = state.params["embed"]
        for seed in (1, 2):
            state = learner.step(state, at_version(make_batch(seed), state.step))
            kept = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
            assert kept == {"pinned_host" if memory == "host" else "device"}
        assert rank == 0 or state.params["embed"] is embed
        found[memory] = to_memory("device", learner.policy.trained(state.params))
    assert _changes(found["device"], found["host"]) == 0
    assert _changes(found["device"], before) > 0.01


@pytest.mark.parametrize(
    ("loss", "cuttings"),
    [
        ("clip_cov", ({"max_tokens": 40},)),
        *(
            pytest.param(loss, ({"micro_batch_size": 2}, {"max_tokens": 40}), marks=pytest.mark.slow)
            for loss in ("clip_cov", "kl_cov")
        ),
    ],
)
def test_tokens_chosen_over_the_mini_batch_do_not_depend_on_the_cut(
    make_learner, make_batch, small_params, loss, cuttings
):
    """Two mini-batches: the second chooses by log-probabilities after the first optimizer step.

    `kl_cov` is below with one cut, and with others, without a model, in `equivalence/test_partition.py`.
    """
    some = {"clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0}}
    update = {"loss": loss, "loss_args": some.get(loss, {"kl_cov_ratio": 0.2})}
    batch = make_batch(11, groups=6)
    states = [
        learner.step(learner.init(_copy(small_params)), batch)
        for learner in (
            make_learner(update, mini_batch_size=3, **sizes)
            for sizes in ({"micro_batch_size": 100}, *cuttings)
        )
    ]
    chosen = [state.metrics["update/high_covariance_fraction"].result() for state in states]
    assert 0 < chosen[0] < 1
    assert chosen == [pytest.approx(chosen[0])] * len(states)
    for state in states[1:]:
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(states[0].params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_rounding_decides_no_gradient_of_kl_cov(
    make_learner, make_batch, small_arch, small_params, old_logprobs
):
    """In bfloat16 the update rounds otherwise than the sampler and the pass of old log-probabilities."""
    batch, after = make_batch(11, groups=6), []
    for coef in (0.0, 100.0):
        arguments = {"kl_cov_ratio": 0.5, "ppo_kl_coef": coef}
        update = {"loss": "kl_cov", "old_logprobs": old_logprobs, "loss_args": arguments}
        learner = make_learner(update, mini_batch_size=6)
        policy = PolicySpec(small_arch, temperature=0.8, remat="none", dtype="bfloat16")
        learner.policy = learner.trainer.model = policy
        rollouts = replace(batch.rollouts, rollout_logprobs=_logprobs(learner, small_params, batch))
        sampled = replace(batch, rewarded=replace(batch.rewarded, rollouts=rollouts))
        state = learner.step(learner.init(_copy(small_params)), sampled)
        assert state.metrics["update/high_covariance_fraction"].result() > 0.2
        assert state.metrics["update/ratio_max"].result() > 1.001
        after.append(state.params)
    assert _changes(*after) == 0


def test_truncated_completions_are_left_out_of_numerator_and_denominator(
    make_learner, make_batch, small_params
):
    """The same step as on the batch without these sequences."""
    batch = make_batch(12, groups=3)
    cut = np.zeros(len(batch.rollouts), bool)
    cut[[1, 4, 5]] = True
    reasons = np.where(cut, "length", "stop")
    marked = replace(batch.rewarded, rollouts=replace(batch.rollouts, finish_reason=reasons))
    rest = _rows(batch, np.flatnonzero(~cut))
    update = {"epochs": 2, "loss_aggregation": "seq_mean_token_mean"}
    states = []
    for mask, each in ((True, replace(batch, rewarded=marked)), (False, rest)):
        learner = make_learner(update | {"mask_truncated": mask}, mini_batch_size=3)
        states.append(learner.step(learner.init(_copy(small_params)), each))
    masked, expected = states
    assert masked.metrics["update/masked_sequences"].result() == 3
    assert masked.metrics["loss"].result() == pytest.approx(expected.metrics["loss"].result(), abs=1e-6)
    for a, b in zip(jax.tree.leaves(masked.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_signal_in_truncated_completions_alone_is_no_signal(make_learner, make_batch, small_params):
    batch = make_batch(14)
    cut = np.arange(len(batch.rollouts)) % 2 == 0
    rollouts = replace(batch.rollouts, finish_reason=np.where(cut, "length", "stop"))
    advantages = np.where(cut[:, None], batch.advantages, np.float32(0))
    assert advantages.any()
    marked = AdvantagedBatch(replace(batch.rewarded, rollouts=rollouts), advantages)
    learner = make_learner({"mask_truncated": True})
    state = learner.step(learner.init(_copy(small_params)), marked)
    assert state.metrics["update/skipped_steps"].result() == 1
    assert _changes(small_params, state.params) == 0.0


def test_groups_without_signal_are_left_out_of_numerator_and_denominator(
    make_learner, make_batch, small_params
):
    """The same step as on the batch without that group."""
    batch = make_batch(13, groups=3)
    silent = batch.rollouts.group_ids == batch.rollouts.group_ids[4]
    batch = replace(batch, advantages=np.where(silent[:, None], np.float32(0), batch.advantages))
    rest = _rows(batch, np.flatnonzero(~silent))
    states = []
    for mask, each in ((True, batch), (False, rest)):
        learner = make_learner({"mask_zero_signal": mask, "entropy_coef": 0.1}, mini_batch_size=3)
        states.append(learner.step(learner.init(_copy(small_params)), each))
    masked, expected = states
    assert masked.metrics["update/masked_groups"].result() == 1
    assert "update/masked_groups" not in expected.metrics
    assert masked.metrics["loss"].result() == pytest.approx(expected.metrics["loss"].result(), abs=1e-6)
    for a, b in zip(jax.tree.leaves(masked.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture
def with_rejected(make_learner, make_batch, small_params):
    """(batch, which sequences have a mean ratio above a bound, the rule that rejects them)."""
    batch = make_batch(15, groups=3)
    gaps = _logprobs(make_learner(), small_params, batch) - batch.rollouts.rollout_logprobs
    lengths = batch.rollouts.completion_lengths
    means = np.where(lengths, gaps.sum(axis=1) / np.maximum(lengths, 1), -np.inf)
    shift = np.sort(means)[-3] - 0.1  # bounds are around 1
    mask, sampled = batch.rollouts.completion_mask, batch.rollouts.rollout_logprobs
    shifted = np.where(mask, sampled + shift, sampled).astype(np.float32)
    rollouts = replace(batch.rollouts, rollout_logprobs=shifted)
    batch = replace(batch, rewarded=replace(batch.rewarded, rollouts=rollouts))
    means -= shift
    high = float(np.exp(np.sort(means)[-3]) * 1.001)  # the two of the greatest mean are rejected
    gone = np.exp(means) > high
    assert gone.sum() == 2
    return batch, gone, {"reject": {"geometric": [1e-8, high]}}


def test_dropped_sequences_are_left_out_of_numerator_and_denominator(
    make_learner, small_params, with_rejected
):
    """The same step as on the batch without them."""
    batch, gone, rule = with_rejected
    states = []
    for rejects, each in ((rule | {"rejected": "drop"}, batch), ({}, _rows(batch, np.flatnonzero(~gone)))):
        learner = make_learner({"old_logprobs": "recompute", **rejects}, mini_batch_size=3)
        states.append(learner.step(learner.init(_copy(small_params)), each))
    dropped, expected = states
    lengths = batch.rollouts.completion_lengths
    fraction = lengths[gone].sum() / lengths.sum()
    assert dropped.metrics["update/dropped_fraction"].result() == pytest.approx(fraction)
    assert dropped.metrics["loss"].result() == pytest.approx(expected.metrics["loss"].result(), abs=1e-6)
    for a, b in zip(jax.tree.leaves(dropped.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_kept_sequences_that_are_rejected_count_in_the_denominator(make_learner, small_params, with_rejected):
    """Rejected tokens have a weight of 0, so the loss is that of the others, over all tokens."""
    batch, gone, rule = with_rejected
    update = {"old_logprobs": "recompute", **rule, "rejected": "keep"}
    kept = make_learner(update, mini_batch_size=3)
    kept = kept.step(kept.init(_copy(small_params)), batch)
    lengths = batch.rollouts.completion_lengths
    tokens, lost = lengths.sum(), lengths[gone].sum()
    assert kept.metrics["update/rejected_fraction/geometric"].result() == pytest.approx(lost / tokens)
    assert kept.metrics["update/effective_sample_fraction"].result() == pytest.approx(1 - lost / tokens)
    rest = batch.advantages[~gone][batch.rollouts.completion_mask[~gone]]
    assert kept.metrics["loss"].result() == pytest.approx(-rest.sum() / tokens, rel=1e-4, abs=1e-6)


def _rows(batch: AdvantagedBatch, rows: np.ndarray) -> AdvantagedBatch:
    """The sequences `rows` of `batch`."""
    r = batch.rollouts
    arrays = ("input_ids", "attention_mask", "completion_mask", "rollout_logprobs", "policy_version")
    taken = {name: getattr(r, name)[rows] for name in (*arrays, "finish_reason", "group_ids")}
    texts = {name: ("",) * len(rows) for name in ("prompts", "completions")}
    rewards = batch.rewarded.rewards[rows]
    rollouts = replace(r, **taken, **texts)
    rewarded = replace(batch.rewarded, rollouts=rollouts, rewards=rewards, rewards_per_function=rewards[None])
    return AdvantagedBatch(rewarded, batch.advantages[rows])
