"""Invariants 2 and 6: no cut into micro-batches and no order of the rows changes the gradient."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from quatrain.config.schema import UpdateConfig
from quatrain.ops.losses import LOSS_AGGREGATIONS
from quatrain.update.batcher import TokenTable, micro_batches
from quatrain.update.gradient import Policy, sum_gradients, table_logprobs
from quatrain.update.learner import PolicyObjective

OBJECTIVES = {
    "clip": {},
    "asymmetric dual clip": {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5},
    "kl and entropy": {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2},
}


def _table(arch, params, batch, seed: int) -> TokenTable:
    """Old and reference log-probabilities near the policy's own, so that some ratios are clipped."""
    rollouts = batch.rollouts
    columns = {"advantages": batch.advantages, "rollout_logprobs": rollouts.rollout_logprobs}
    table = TokenTable(rollouts.input_ids, rollouts.attention_mask, rollouts.completion_mask, columns)
    own = table_logprobs(params, table, policy=_policy(arch), rows_per_batch=len(table))
    rng = np.random.default_rng(seed)
    old, ref = (np.where(table.completion_mask, own + rng.normal(0, 0.4, own.shape), 0) for _ in range(2))
    return table.with_columns(old_logprobs=old.astype(np.float32), ref_logprobs=ref.astype(np.float32))


def _policy(arch) -> Policy:
    return Policy(arch, temperature=0.9, remat=False)


def _gradient(arch, params, table, rows_per_batch, objective):
    batches = (batch for _, batch in micro_batches(table, rows_per_batch))
    grads, stats = sum_gradients(params, batches, policy=_policy(arch), objective=objective)
    return jax.tree.map(np.asarray, (grads, stats))


def _assert_same(got, expected):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0]))
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest)
    for kind in ("sum", "max"):
        for name, value in expected[1][kind].items():
            np.testing.assert_allclose(got[1][kind][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_cut_changes_the_gradient(small_arch, small_params, make_batch, aggregation, name):
    objective = PolicyObjective(UpdateConfig(**OBJECTIVES[name]), on_policy=False)
    table = _table(small_arch, small_params, make_batch(21), 1).weighted(aggregation, 9)
    whole = _gradient(small_arch, small_params, table, len(table), objective)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole[0])) > 1e-3
    for rows in (1, 5):
        _assert_same(_gradient(small_arch, small_params, table, rows, objective), whole)


def test_no_order_of_the_rows_changes_the_gradient(small_arch, small_params, make_batch):
    objective = PolicyObjective(UpdateConfig(), on_policy=True)
    table = _table(small_arch, small_params, make_batch(22), 2)
    shuffled = table.take(np.random.default_rng(0).permutation(len(table)))
    expected = _gradient(small_arch, small_params, table.weighted("token_mean", 9), 5, objective)
    got = _gradient(small_arch, small_params, shuffled.weighted("token_mean", 9), 5, objective)
    _assert_same(got, expected)


def test_padding_changes_nothing(small_arch, small_params, make_batch):
    """A row is the same alone and beside a far longer one."""
    objective = PolicyObjective(UpdateConfig(), on_policy=False)
    table = _table(small_arch, small_params, make_batch(23), 3).weighted("seq_mean_token_sum", 9)
    wide = replace(
        table,
        input_ids=np.pad(table.input_ids, ((0, 1), (0, 40))),
        attention_mask=np.pad(table.attention_mask, ((0, 1), (0, 40))),
        completion_mask=np.pad(table.completion_mask, ((0, 1), (0, 40))),
        columns={name: np.pad(values, ((0, 1), (0, 40))) for name, values in table.columns.items()},
    )
    wide.attention_mask[-1] = True
    expected = _gradient(small_arch, small_params, table, 4, objective)
    _assert_same(_gradient(small_arch, small_params, wide, 4, objective), expected)
