"""Invariants 1, 2 and 6: packed or padded, however cut and in whatever order, the gradient is the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_loss
from architectures import changed, family_cases, of_golden

from quatrain.backend import backend_of
from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models import attention
from quatrain.models.attention import kernels
from quatrain.models.params import init_params
from quatrain.ops.losses import LOSS_AGGREGATIONS, POLICY_LOSSES
from quatrain.ops.tokens import ScoredTokens
from quatrain.parallel.mesh import one_device
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVES = {
    "clip": {},
    "asymmetric dual clip": {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5},
    "kl and entropy": {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2},
}
ARGUMENTS = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}}  # so that some sequences are not clipped
SEQUENCE_LOSS = f"{sequence_loss.__file__}:sequence_ratio"
LONGEST = 9
"""Completion tokens of `make_batch`'s longest sequences; its prompts have up to 6."""
ALL_ROWS = MicroBatchPlanner(rows=1000)


COMMON_PREFIX = 40
"""Tokens: more than the least that stand in each buffer once."""


def _table(arch, params, batch, seed: int, num_common: int = 0) -> TokenTable:
    """Old and reference log-probabilities near the policy's own, so that some ratios are clipped.

    All sequences begin with `num_common` tokens, which are put before those of `batch`.
    """
    rollouts = batch.rollouts
    columns = {"advantages": batch.advantages, "rollout_logprobs": rollouts.rollout_logprobs}
    table = TokenTable(
        rollouts.input_ids, rollouts.attention_mask, rollouts.completion_mask, columns, rollouts.group_ids
    )
    rng = np.random.default_rng(seed)
    before = ((0, 0), (num_common, 0))
    table = TokenTable(
        np.pad(table.input_ids, before),
        np.pad(table.attention_mask, before, constant_values=True),
        np.pad(table.completion_mask, before),
        {name: np.pad(values, before) for name, values in columns.items()},
        table.group_ids,
    )
    table.input_ids[:, :num_common] = rng.integers(0, arch.vocab_size, num_common)
    own = predict_tokens(params, table, model=_policy(arch), planner=ALL_ROWS)
    old, ref = (np.where(table.completion_mask, own + rng.normal(0, 0.4, own.shape), 0) for _ in range(2))
    return table.with_columns(old_logprobs=old.astype(np.float32), ref_logprobs=ref.astype(np.float32))


def _plain_table(batch) -> TokenTable:
    r = batch.rollouts
    return TokenTable(r.input_ids, r.attention_mask, r.completion_mask, {}, r.group_ids)


@pytest.fixture(scope="module")
def arch(small_arch):
    """A layer that sees all tokens before, and one that sees five."""
    return changed(small_arch, windows=(None, 5))


def _policy(arch) -> PolicySpec:
    return PolicySpec(arch, temperature=0.9, remat="none")


def _gradient(arch, params, table, planner, objective, **settings):
    policy = replace(_policy(arch), **settings)
    batches = (b for _, b in micro_batches(table, planner, one_device(), policy.forms))
    grads, stats, _ = sum_gradients(params, batches, model=policy, objective=objective)
    return jax.tree.map(np.asarray, (grads, stats))


def _assert_same(got, expected, rounding=1):
    tolerance = 1e-5 * rounding
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0]))
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)
    for kind in ("sum", "max"):
        for name, value in expected[1][kind].items():
            np.testing.assert_allclose(got[1][kind][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


LONGEST_SEQUENCE = 15
CUTTINGS = (
    MicroBatchPlanner(max_tokens=64),
    MicroBatchPlanner(max_tokens=32, num_shards=3, share_prompts=True),
    MicroBatchPlanner(max_tokens=64, num_shards=2, share_prompts=True, line_tokens=20),
)
MORE_CUTTINGS = (
    MicroBatchPlanner(rows=1),
    MicroBatchPlanner(rows=5),
    MicroBatchPlanner(max_tokens=LONGEST_SEQUENCE),
    MicroBatchPlanner(rows=2, num_shards=3),
    MicroBatchPlanner(max_tokens=500),
    MicroBatchPlanner(max_tokens=32, num_shards=3),
    MicroBatchPlanner(max_tokens=LONGEST_SEQUENCE, share_prompts=True),
    MicroBatchPlanner(max_tokens=500, share_prompts=True),
)


@pytest.mark.parametrize(
    "cuttings", [CUTTINGS, pytest.param(MORE_CUTTINGS, marks=pytest.mark.slow)], ids=["three", "more"]
)
@pytest.mark.parametrize("loss", ["ppo_clip", pytest.param(SEQUENCE_LOSS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "kl and entropy")) for name in OBJECTIVES],
)
def test_no_cut_changes_the_gradient(arch, small_params, make_batch, loss, aggregation, name, cuttings):
    """`make_batch` has completions of no token, of one, and of the longest.

    A loss of whole sequences is compared without a model below.
    """
    clips = name == "asymmetric dual clip" and loss == SEQUENCE_LOSS  # it has a bound of its own
    config = UpdateConfig(loss=loss, **({} if clips else OBJECTIVES[name]))
    objective = PolicyObjective.of(config, on_policy=False)
    table = _table(arch, small_params, make_batch(20), 1).weighted(aggregation, LONGEST)
    whole = _gradient(arch, small_params, table, ALL_ROWS, objective)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole[0])) > 1e-3
    assert table.lengths.max() == LONGEST_SEQUENCE
    for planner in cuttings:
        _assert_same(_gradient(arch, small_params, table, planner, objective), whole)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_no_cut_changes_the_gradient_of_a_corrected_loss(small_arch, small_params, make_batch, correction):
    cap = {"truncate": 2.0, "mask": 8.0}[correction]
    config = UpdateConfig(correction=correction, correction_cap=cap, kl_coef=0.3, entropy_coef=0.2)
    table = _table(small_arch, small_params, make_batch(20), 1).weighted("token_mean", LONGEST)
    objective, plain = (
        PolicyObjective.of(each, on_policy=False)
        for each in (config, config.model_copy(update={"correction": "none"}))
    )
    whole = _gradient(small_arch, small_params, table, ALL_ROWS, objective)
    uncorrected = _gradient(small_arch, small_params, table, ALL_ROWS, plain)
    corrected = whole[1]["sum"]["update/corrected_fraction"] / whole[1]["sum"]["tokens"]
    assert 0.1 < corrected < 0.9
    with pytest.raises(AssertionError):
        _assert_same((uncorrected[0], whole[1]), whole)
    for planner in CUTTINGS[-1:]:
        _assert_same(_gradient(small_arch, small_params, table, planner, objective), whole)


REJECTIONS = {"geometric": [0.8, 1.3], "k3": 0.2, "negative_kl": 0.1}
OF_SEQUENCES = {"correction": "truncate", "correction_level": "sequence", "reject": REJECTIONS}


@pytest.mark.slow
def test_no_cut_changes_the_gradient_of_corrected_and_rejected_sequences(
    small_arch, small_params, make_batch
):
    config = UpdateConfig(**OF_SEQUENCES, kl_coef=0.3)
    table = _table(small_arch, small_params, make_batch(20), 1).weighted("token_mean", LONGEST)
    old, noise = table.columns["old_logprobs"], np.random.default_rng(0).normal(0, 0.5, table.input_ids.shape)
    table = table.with_columns(rollout_logprobs=np.where(table.completion_mask, old + np.float32(noise), 0))
    objective = PolicyObjective.of(config, on_policy=False)
    whole = _gradient(small_arch, small_params, table, ALL_ROWS, objective)
    sums = whole[1]["sum"]
    for name in ("corrected_fraction", *(f"rejected_fraction/{rule}" for rule in REJECTIONS)):
        assert 0.02 < sums[f"update/{name}"] / sums["tokens"] < 0.9, name
    for planner in CUTTINGS:
        _assert_same(_gradient(small_arch, small_params, table, planner, objective), whole)


ROWS = (MicroBatchPlanner(rows=5),)
SHARED = (MicroBatchPlanner(max_tokens=150, num_shards=2, share_prompts=True),)


@pytest.mark.parametrize(
    ("windows", "num_common", "cuttings"),
    [
        ((None, 5), COMMON_PREFIX, SHARED),
        *(
            pytest.param(
                windows,
                num_common,
                (*ROWS, MicroBatchPlanner(max_tokens=150), *SHARED),
                marks=pytest.mark.slow,
            )
            for windows in ((None, 5), (None, None))
            for num_common in (0, COMMON_PREFIX)
        ),
    ],
)
def test_attention_in_rows_of_whole_sequences_does_not_change_the_gradient(
    small_arch, small_params, make_batch, monkeypatch, windows, num_common, cuttings
):
    """A kernel for GPUs, whose place XLA's causal attention takes here."""
    monkeypatch.setattr(kernels, "obstacle", lambda *_: None)
    causal = partial(kernels.cudnn_attention, implementation="xla")
    monkeypatch.setitem(attention._CAUSAL, "cudnn", causal)
    arch = changed(small_arch, windows=windows)
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=False)
    table = _table(arch, small_params, make_batch(20), 1, num_common).weighted("token_mean", LONGEST)
    whole = _gradient(arch, small_params, table, ALL_ROWS, objective)
    settings = {"attention": "cudnn", "backend": backend_of("gpu")}
    for planner in cuttings:
        _assert_same(_gradient(arch, small_params, table, planner, objective, **settings), whole)


@pytest.mark.slow
def test_attention_with_the_mask_of_a_line_does_not_change_the_gradient(
    small_arch, small_params, make_batch, monkeypatch
):
    """The kernel for TPUs, interpreted; two lines a shard."""
    interpreted = partial(kernels.splash_masked_attention, interpret=True)
    monkeypatch.setattr(kernels, "splash_masked_attention", interpreted)
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=False)
    table = _table(small_arch, small_params, make_batch(20), 1, COMMON_PREFIX)
    table = table.weighted("token_mean", LONGEST)
    whole = _gradient(small_arch, small_params, table, ALL_ROWS, objective)
    planner = MicroBatchPlanner(max_tokens=200, share_prompts=True, line_tokens=100)
    assert len(planner.plans(table)[0].buffers) == 2
    settings = {"attention": "splash", "backend": backend_of("tpu")}
    _assert_same(_gradient(small_arch, small_params, table, planner, objective, **settings), whole)
    # Longer rows, whose mask would be too large, are unpacked.
    monkeypatch.setattr(attention, "MOST_MASKED", 99)
    monkeypatch.delattr(kernels, "splash_masked_attention")
    rows = partial(kernels.splash_attention, interpret=True)
    monkeypatch.setitem(attention._CAUSAL, "splash", rows)
    _assert_same(_gradient(small_arch, small_params, table, planner, objective, **settings), whole)


def _chosen(table: TokenTable, seed: int) -> dict[str, np.ndarray]:
    """In place of the tokens that `clip_cov` and `kl_cov` choose from a whole mini-batch: any of them."""
    rng = np.random.default_rng(seed)
    chosen = (table.completion_mask & (rng.random(table.completion_mask.shape) < 0.3)).astype(np.float32)
    return {"high_covariance": chosen, "moved": chosen * rng.choice(np.float32([-1, 1]), chosen.shape)}


@pytest.mark.slow
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_no_cut_changes_the_gradient_of_any_loss(small_arch, small_params, make_batch, loss):
    config = UpdateConfig(
        loss=loss, loss_args=ARGUMENTS.get(loss, {}), kl_coef=0.3, kl_estimator="k3_straight"
    )
    objective = PolicyObjective.of(config, on_policy=False)
    table = _table(small_arch, small_params, make_batch(20), 1).weighted("seq_mean_token_mean", LONGEST)
    if objective.mini_batch_columns is not None:
        table = table.with_columns(**_chosen(table, 2))
    whole = _gradient(small_arch, small_params, table, ALL_ROWS, objective)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole[0])) > 1e-3
    for planner in (*CUTTINGS, *MORE_CUTTINGS[:3]):
        _assert_same(_gradient(small_arch, small_params, table, planner, objective), whole)


def test_no_order_and_no_partition_changes_the_gradient(arch, small_params, make_batch):
    """In any order, under other group ids, groups torn apart, each part cut in its own way: the same sums.

    The cuttings are those of `test_no_cut_changes_the_gradient`, whose programs compute this too.
    """
    rng = np.random.default_rng(1)
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=False)
    table = _table(arch, small_params, make_batch(20), 1).weighted("token_mean", LONGEST)
    whole = _gradient(arch, small_params, table, ALL_ROWS, objective)
    renamed = replace(table, group_ids=rng.permutation(10**6)[table.group_ids])
    parts = zip(np.array_split(rng.permutation(len(renamed)), [5]), CUTTINGS[:2], strict=True)
    policy = _policy(arch)
    batches = [
        batch
        for rows, planner in parts
        for _, batch in micro_batches(renamed.take(rows), planner, one_device(), policy.forms)
    ]
    got = sum_gradients(small_params, batches, model=policy, objective=objective)
    _assert_same(jax.tree.map(np.asarray, got), whole)


def _random_planner(rng: np.random.Generator, table: TokenTable) -> MicroBatchPlanner:
    """Fixed rows or a token budget, over one to four shards: more shards than sequences included."""
    shards = int(rng.integers(1, 5))
    if rng.random() < 0.5:
        return MicroBatchPlanner(rows=int(rng.integers(1, 6)), num_shards=shards)
    cap = int(table.lengths.max())
    budget = int(rng.choice([cap, cap + 3, max(cap, 32), cap + 49]))
    line = int(rng.choice([cap, budget])) if rng.random() < 0.3 else None
    return MicroBatchPlanner(
        max_tokens=budget * (2 if line else 1),
        num_shards=shards,
        share_prompts=bool(rng.random() < 0.5),
        line_tokens=line,
    )


def _random_partition(rng: np.random.Generator, table: TokenTable) -> list[TokenTable]:
    parts = np.array_split(rng.permutation(len(table)), rng.integers(1, 4))
    return [table.take(part) for part in parts if len(part)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_no_order_and_no_random_partition_changes_the_gradient(small_arch, small_params, make_batch, seed):
    """In any order, under other group ids, groups torn apart, each part cut in its own way: the same sums."""
    rng = np.random.default_rng(seed)
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=bool(seed % 2))
    batch = make_batch(30 + seed, groups=int(rng.integers(1, 6)), holes=bool(seed % 2))
    table = _table(small_arch, small_params, batch, seed, num_common=COMMON_PREFIX * (seed % 3 == 1))
    table = table.weighted(rng.choice(list(LOSS_AGGREGATIONS)), LONGEST)
    whole = _gradient(small_arch, small_params, table, ALL_ROWS, objective)
    renamed = replace(table, group_ids=rng.permutation(10**6)[table.group_ids])
    parts = [(part, _random_planner(rng, part)) for part in _random_partition(rng, renamed)]
    batches = [batch for part, planner in parts for _, batch in micro_batches(part, planner, one_device())]
    got = sum_gradients(small_params, batches, model=_policy(small_arch), objective=objective)
    _assert_same(jax.tree.map(np.asarray, got), whole)


SCORED = (24, 80)
"""Rows and tokens to which the next tests pad micro-batches, so that one program computes each."""


def _with_padding(tree):
    """Arrays [R, K] as wide and as high as `SCORED`, or as they are where they are larger."""

    def pad(x):
        return np.pad(np.asarray(x), [(0, max(whole - size, 0)) for whole, size in zip(SCORED, x.shape)])

    return jax.tree.map(pad, tree)


@jax.jit
def _sums(mask, sequence_ids, columns):
    zeros = jnp.zeros(mask.shape, np.float32)
    tokens = ScoredTokens(zeros, zeros, mask, sequence_ids, columns)
    return tokens.sequence_sum(tokens.column("values"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_sums_over_sequences_are_the_same_under_any_partition(make_batch, seed):
    """Random numbers on each token; 20 partitions, packed or padded, with prompts shared or not."""
    rng = np.random.default_rng(seed)
    batch = make_batch(50 + seed, groups=int(rng.integers(2, 7)))
    table = _plain_table(batch)
    values = np.where(table.completion_mask, rng.normal(size=table.input_ids.shape), 0).astype(np.float32)
    table = table.with_columns(values=values)
    for _ in range(20):
        parts = [(part, _random_planner(rng, part)) for part in _random_partition(rng, table)]
        seen = 0
        for part, planner in parts:
            whole = part.columns["values"].sum(axis=1)
            for rows, micro in micro_batches(part, planner, one_device()):
                mask, *others = _with_padding((micro.mask, micro.sequence_ids, dict(micro.columns)))
                sums = np.asarray(_sums(mask, *others))
                lengths = part.completion_mask[rows].sum(axis=1)
                np.testing.assert_allclose(sums[mask], np.repeat(whole[rows], lengths), rtol=1e-5, atol=1e-5)
                seen += len(rows)
        assert seen == len(table)
    assert np.abs(values.sum(axis=1)).max() > 0.5


CORRECTED = {
    "corrected tokens": UpdateConfig(correction="truncate", correction_cap=1.3, kl_coef=0.3),
    "corrected and rejected sequences": UpdateConfig(**OF_SEQUENCES, kl_coef=0.3),
}
PENALISED = {
    "quadratic penalty": UpdateConfig(sampler_kl_coef=0.4),
    "quadratic penalty on sequences": UpdateConfig(loss="dro", loss_args={"level": "sequence", "beta": 0.2}),
}
SCORED_CONFIGS = (
    {name: UpdateConfig(loss=name, loss_args=ARGUMENTS.get(name, {})) for name in POLICY_LOSSES}
    | CORRECTED
    | PENALISED
)


@jax.jit
def _losses_and_gradients(mask, sequence_ids, columns):
    """By loss: each token's loss, and the gradient of the weighted sum in each token's log-probability.

    Of losses that are corrected also what is logged of each token.
    """

    def weighted(logprobs, objective):
        tokens = ScoredTokens(logprobs, jnp.zeros_like(logprobs), mask, sequence_ids, columns)
        token = objective(tokens)
        means = {name: jnp.broadcast_to(values, mask.shape) for name, values in token.means.items()}
        return jnp.where(mask, columns["weights"] * token.loss, 0).sum(), (token.loss, means)

    results = {}
    for name, config in SCORED_CONFIGS.items():
        objective = PolicyObjective.of(config, on_policy=False)
        gradient, (loss, means) = jax.grad(weighted, has_aux=True)(columns["logprobs"], objective)
        results[name] = {"loss": loss, "gradient": gradient, **(means if name in CORRECTED else {})}
    return results


def _by_token(mask, sequence_ids, columns, num_tokens: int) -> dict[str, dict[str, np.ndarray]]:
    """What `_losses_and_gradients` finds, in the order of the column `places`."""
    scored = _with_padding((mask, sequence_ids, dict(columns)))
    places = scored[2]["places"][scored[0]].astype(int)

    def ordered(values):
        result = np.zeros(num_tokens)
        result[places] = np.asarray(values)[scored[0]]
        return result

    return jax.tree.map(ordered, _losses_and_gradients(*scored))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_each_loss_of_each_token_is_the_same_under_any_partition(make_batch, seed):
    """Every built-in loss, corrected ones too, without a model: 5 partitions, packed or padded, with prompts
    shared or not."""
    rng = np.random.default_rng(seed)
    batch = make_batch(80 + seed, groups=int(rng.integers(2, 6)), holes=bool(seed % 2))
    table = _plain_table(batch)
    logprobs = -rng.exponential(size=table.input_ids.shape)
    # Weights of sequences differ too, as few as they are: some are corrected, and each rule rejects some.
    apart = rng.permutation(np.linspace(-0.6, 0.6, len(logprobs)))[:, None]
    columns = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + rng.normal(0, 0.4, logprobs.shape),
        "rollout_logprobs": logprobs + rng.normal(0, 0.4, logprobs.shape) + apart,
        "ref_logprobs": logprobs + rng.normal(0, 0.4, logprobs.shape),
        "advantages": batch.advantages,
        **_chosen(table, seed),
        "places": np.arange(logprobs.size).reshape(logprobs.shape),
    }
    columns = {
        name: np.where(table.completion_mask, values, 0).astype(np.float32)
        for name, values in columns.items()
    }
    table = table.with_columns(**columns).weighted(rng.choice(list(LOSS_AGGREGATIONS)), LONGEST)
    sequence_ids = np.zeros(table.completion_mask.shape, np.int32)
    expected = _by_token(table.completion_mask, sequence_ids, table.columns, logprobs.size)
    for name, results in expected.items():
        assert all(np.abs(results[kind]).max() > 1e-3 for kind in ("loss", "gradient")), name
    tokens = table.completion_mask.sum()
    for name in ("corrected_fraction", *(f"rejected_fraction/{rule}" for rule in REJECTIONS)):
        fraction = expected["corrected and rejected sequences"][f"update/{name}"].sum() / tokens
        assert 0.02 < fraction < 0.98, (name, fraction)
    for _ in range(5):
        got = jax.tree.map(np.zeros_like, expected)
        for part in _random_partition(rng, table):
            for _, micro in micro_batches(part, _random_planner(rng, part), one_device()):
                found = _by_token(micro.mask, micro.sequence_ids, micro.columns, logprobs.size)
                got = jax.tree.map(np.add, got, found)
        for name, results in expected.items():
            for kind, values in results.items():
                np.testing.assert_allclose(
                    got[name][kind], values, rtol=1e-5, atol=1e-6, err_msg=f"{name} {kind}"
                )


@pytest.mark.parametrize(
    ("window", "cuttings"),
    [
        (5, [(COMMON_PREFIX + 30, 2)]),
        pytest.param(None, [(COMMON_PREFIX + 30, 2)], marks=pytest.mark.slow),
        pytest.param(44, [(COMMON_PREFIX + 500, 1)], marks=pytest.mark.slow),
        pytest.param(
            None, [(COMMON_PREFIX + 500, 1), (COMMON_PREFIX + LONGEST_SEQUENCE, 1)], marks=pytest.mark.slow
        ),
        pytest.param(
            44, [(COMMON_PREFIX + 30, 2), (COMMON_PREFIX + LONGEST_SEQUENCE, 3)], marks=pytest.mark.slow
        ),
        pytest.param(4, [(COMMON_PREFIX + 30, 1), (COMMON_PREFIX + 500, 2)], marks=pytest.mark.slow),
    ],
)
def test_a_common_prefix_computed_once_changes_nothing(
    small_arch, small_params, make_batch, cuttings, window
):
    """Wherever buffers end, and where layers do not see far enough back for all of it."""
    arch = changed(small_arch, windows=(None, window))
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=False)
    table = _table(arch, small_params, make_batch(20), 1, num_common=COMMON_PREFIX)
    table = table.weighted("token_mean", LONGEST)
    expected = _gradient(arch, small_params, table, ALL_ROWS, objective)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0])) > 1e-3
    for budget, shards in cuttings:
        planner = MicroBatchPlanner(max_tokens=budget, num_shards=shards, share_prompts=True)
        cuts = planner.plans(table)
        assert {cut.num_common for cut in cuts} == {COMMON_PREFIX}
        assert max(cut.work(buffer)[0] for cut in cuts for buffer in cut.buffers) <= budget
        _assert_same(_gradient(arch, small_params, table, planner, objective), expected)


@pytest.mark.parametrize(
    "planner",
    [pytest.param(MicroBatchPlanner(rows=4), marks=pytest.mark.slow), MicroBatchPlanner(max_tokens=64)],
    ids=["fixed", "budget"],
)
def test_padding_changes_nothing(arch, small_params, make_batch, planner):
    """A row is the same alone and beside a far longer one."""
    objective = PolicyObjective.of(UpdateConfig(**OBJECTIVES["kl and entropy"]), on_policy=False)
    table = _table(arch, small_params, make_batch(20), 3).weighted("seq_mean_token_sum", LONGEST)
    wide = replace(
        table,
        input_ids=np.pad(table.input_ids, ((0, 1), (0, 40))),
        attention_mask=np.pad(table.attention_mask, ((0, 1), (0, 40))),
        completion_mask=np.pad(table.completion_mask, ((0, 1), (0, 40))),
        columns={name: np.pad(values, ((0, 1), (0, 40))) for name, values in table.columns.items()},
    )
    wide.attention_mask[-1] = True
    expected = _gradient(arch, small_params, table, ALL_ROWS, objective)
    _assert_same(_gradient(arch, small_params, wide, planner, objective), expected)


@pytest.mark.parametrize(
    "planner",
    [
        MicroBatchPlanner(rows=2, num_shards=2),
        pytest.param(MicroBatchPlanner(max_tokens=40), marks=pytest.mark.slow),
        MicroBatchPlanner(max_tokens=40, num_shards=2, share_prompts=True),
    ],
)
def test_logprobs_come_back_in_the_order_of_the_table(arch, small_params, make_batch, planner):
    table = _table(arch, small_params, make_batch(20), 1)
    whole = predict_tokens(small_params, table, model=_policy(arch), planner=ALL_ROWS)
    got = predict_tokens(small_params, table, model=_policy(arch), planner=planner)
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5)
    assert not got[~table.completion_mask].any()
    assert (got[table.completion_mask] < 0).all()


@pytest.mark.parametrize(
    ("case", "shares"),
    [
        ("gemma2", (True,)),
        *(pytest.param(*case.values, (False, True), marks=pytest.mark.slow) for case in family_cases()),
    ],
)
def test_packed_is_padded_for_every_family(case, shares, small_arch, make_batch):
    """Sliding windows shorter than the sequences, soft caps, biases and norms of queries included.

    `test_routing_replay.py` has experts in each cutting.
    """
    arch = of_golden(case, vocab_size=small_arch.vocab_size)
    rounding = 5 if case == "gemma4_text" else 1  # transformers with a cache differs from itself by as much
    params = init_params(arch, jax.random.key(3))
    objective = PolicyObjective.of(UpdateConfig(), on_policy=False)
    table = _table(arch, params, make_batch(25), 5).weighted("token_mean", LONGEST)
    padded = _gradient(arch, params, table, MicroBatchPlanner(rows=3), objective)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(padded[0])) > 1e-3
    for share in shares:
        planner = MicroBatchPlanner(max_tokens=70, share_prompts=share)
        _assert_same(_gradient(arch, params, table, planner, objective), padded, rounding)
