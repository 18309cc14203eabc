"""The two halves of an optimizer step, and losses that couple sequences: exact however cut and summed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coupled_losses import Pairs, pairs_loss, with_reference
from routed_models import routed_model, routes_of_rows

from quatrain.config.schema import OptimizerConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.decoder import forward
from quatrain.models.params import init_params
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import one_device
from quatrain.types.metrics import Metric
from quatrain.update.coupled import Coupled, CoupledLoss, check_coupled
from quatrain.update.trainer import ModelState, StepTotals, Trainer

ROWS = MicroBatchPlanner(rows=4)
"""Two micro-batches of `_pairs`, of one shape."""
SHARED = MicroBatchPlanner(max_tokens=32, num_shards=2, share_prompts=True, line_tokens=16)
MORE_CUTTINGS = (
    MicroBatchPlanner(rows=1),
    MicroBatchPlanner(rows=2),
    MicroBatchPlanner(rows=1000),
    MicroBatchPlanner(max_tokens=40),
    MicroBatchPlanner(max_tokens=40, num_shards=3),
    MicroBatchPlanner(max_tokens=64, share_prompts=True),
)


def surprise(tokens):
    return TokenLoss(-tokens.logprobs, {"sft/loss": -tokens.logprobs})


def _trainer(model, planner=ROWS, **optimizer) -> Trainer:
    settings = {"name": "sgd", "learning_rate": 0.1, "beta1": 0.0, **optimizer}
    return Trainer(model, planner, OptimizerConfig(**settings), total_steps=10, seed=0)


def _copy(params):
    return jax.tree.map(jnp.array, params)


def _gradient(trainer, params, table, objective, *before, **settings):
    """(gradient, totals, what `forward_backward` returns)."""
    totals = StepTotals()
    found = trainer.forward_backward(ModelState(params, None), table, objective, totals, *before, **settings)
    return jax.tree.map(lambda x: np.asarray(x[0]), found.total), totals, found


def _assert_same(got, expected, tolerance=1e-5):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert largest > 1e-3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


@pytest.fixture(scope="module")
def policy(small_arch, small_params):
    return PolicySpec(small_arch), small_params


@pytest.fixture(scope="module")
def scorer(small_arch):
    arch = replace(small_arch, head="value_head")
    params = init_params(arch, jax.random.key(7))
    return CriticSpec(arch), params | {"score": jax.random.normal(jax.random.key(8), (1, arch.hidden_size))}


@pytest.fixture
def pairs(make_batch):
    """Four pairs of completions of a prompt; one completion has no token."""
    r = make_batch(20, n=2).rollouts
    table = TokenTable(r.input_ids, r.attention_mask, r.completion_mask, {}, r.group_ids)
    return with_reference(table)


@pytest.fixture
def scored_pairs(pairs):
    """The same sequences, each with one scored place, behind its last token."""
    sequences = [ids[: int(length)] for ids, length in zip(pairs.input_ids, pairs.lengths, strict=True)]
    return replace(TokenTable.scored_at_end(sequences), group_ids=pairs.group_ids, of_rows=pairs.of_rows)


@pytest.fixture
def targets(pairs, small_arch):
    """Targets that are not the tokens, behind the last too; weights of either sign, for each token."""
    rng = np.random.default_rng(3)
    wider = ((0, 0), (0, 1))
    ids, attention, completion = (
        np.pad(x, wider) for x in (pairs.input_ids, pairs.attention_mask, pairs.completion_mask)
    )
    ends = np.arange(ids.shape[1]) == pairs.lengths[:, None]
    targets = rng.integers(0, small_arch.vocab_size, ids.shape).astype(np.int32)
    table = TokenTable(ids, attention, completion | ends, {}, pairs.group_ids, targets=targets)
    return table.with_columns(weights=rng.normal(size=ids.shape).astype(np.float32))


def _differentiated(model, params, table):
    """Loss and gradient of `Pairs` by automatic differentiation of the whole, in one pass."""
    ((_, batch),) = micro_batches(table, MicroBatchPlanner(rows=1000), one_device())

    def loss(params):
        [predicted, *_] = model.predict(params, batch).numbers
        return pairs_loss(jnp.where(batch.mask, predicted, 0).sum(axis=1), table.of_rows["reference"])

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    ("model", "table", "cuttings"),
    [
        ("policy", "pairs", (ROWS, SHARED)),
        ("scorer", "scored_pairs", (SHARED,)),
        pytest.param("policy", "pairs", MORE_CUTTINGS, marks=pytest.mark.slow),
        pytest.param("scorer", "scored_pairs", (ROWS, *MORE_CUTTINGS), marks=pytest.mark.slow),
    ],
)
def test_no_cut_changes_the_gradient_of_a_coupled_loss(request, model, table, cuttings):
    """It is that of automatic differentiation through all predictions; catches slopes in a wrong order."""
    (model, params), table = map(request.getfixturevalue, (model, table))
    loss, expected = _differentiated(model, params, table)
    for planner in cuttings:
        gradient, totals, found = _gradient(_trainer(model, planner), params, table, Pairs())
        _assert_same(gradient, expected)
        assert found.loss == pytest.approx(float(loss), rel=1e-5)
        assert totals.metrics["batch/tokens"].result() == table.lengths.sum()


def test_a_step_reports_the_coupled_loss_and_its_metrics_once(policy, pairs):
    model, params = policy
    trainer, totals = _trainer(model), StepTotals()
    predicted = predict_tokens(params, pairs, model=model, planner=ROWS).astype(np.float64)
    expected = Pairs()(predicted, pairs)
    state = trainer.step(trainer.init(_copy(params)), pairs, Pairs(), totals, 0)
    assert (state.step, totals.applied, totals.bad) == (1, 1, 0)
    assert totals.metrics["loss"].result() == pytest.approx(expected.loss, rel=1e-6)
    assert totals.metrics["pairs/accuracy"] == expected.metrics["pairs/accuracy"]
    assert totals.metrics["update/grad_norm"].result() > 1e-2
    after = predict_tokens(state.params, pairs, model=model, planner=ROWS)
    assert Pairs()(after.astype(np.float64), pairs).loss < expected.loss
    compiled = num_compilations()
    other = replace(pairs, of_rows={"reference": np.ones(8)}).with_columns(margins=after)
    trainer.step(state, other, Pairs(), totals, 1)
    assert num_compilations() == compiled  # what the loss is made of is in no program


@pytest.mark.parametrize("planner", [ROWS, SHARED])
def test_targets_are_any_tokens_and_what_is_predicted_comes_back(policy, targets, planner):
    """Against a plain pass over whole rows; catches targets that are read from the tokens, predictions in the
    order of the buffers, and a gradient that knows the cut."""
    (model, params), mask = policy, targets.completion_mask
    positions = np.broadcast_to(np.arange(targets.input_ids.shape[1]), targets.input_ids.shape)
    compiled = jax.jit(forward, static_argnames="arch")
    segments = targets.attention_mask.astype(np.int32)
    hidden = compiled(params, model.arch, targets.input_ids, positions, segments).hidden
    logits = np.pad(np.asarray(hidden @ params["embed"].T, np.float64)[:, :-1], ((0, 0), (1, 0), (0, 0)))
    chosen = np.take_along_axis(logits, targets.targets[..., None], axis=2)[..., 0]
    expected = np.where(mask, chosen - np.log(np.exp(logits).sum(axis=2)), 0)
    trainer = _trainer(model, planner)
    gradient, _, found = _gradient(trainer, params, targets, surprise, want=True)
    assert found.predictions.shape == mask.shape
    np.testing.assert_allclose(found.predictions, expected, rtol=1e-5, atol=1e-5)
    weighted = -(expected * targets.columns["weights"])[mask].sum()
    assert float(found.stats[0]["sum"]["loss"]) == pytest.approx(weighted, rel=1e-5)
    other, _, unasked = _gradient(_trainer(model), params, targets, surprise)
    assert unasked.predictions is None
    _assert_same(gradient, other)


def test_two_calls_and_one_step_are_one_call_on_both_tables(policy, targets):
    model, params = policy
    first, second = targets.take(np.arange(4)), targets.take(np.arange(4, 8))
    trainer = _trainer(model)
    expected, whole, both = _gradient(trainer, params, targets, surprise)
    _, _, before = _gradient(trainer, params, first, surprise)
    gradient, _, found = _gradient(trainer, params, second, surprise, before)
    _assert_same(gradient, expected)
    steps = []
    for sums, totals in ((both, whole), (found, StepTotals())):
        state = trainer.optim_step(trainer.init(_copy(params)), sums, totals, 0)
        steps.append((state.params, totals.metrics))
    _assert_same(steps[0][0], steps[1][0])
    for name in ("loss", "sft/loss", "update/grad_norm"):
        assert steps[1][1][name].result() == pytest.approx(steps[0][1][name].result(), rel=1e-5), name
    assert steps[1][1]["sft/loss"].count == targets.completion_mask.sum()


def test_objectives_of_both_kinds_add_up_in_one_step(policy, pairs):
    """Their gradients, losses and metrics; a user's coupled loss beside a loss of tokens."""
    model, params = policy
    trainer, totals = _trainer(model), StepTotals()
    weighted = pairs.weighted("token_mean", 9)
    expected = [_gradient(trainer, params, t, o)[0] for t, o in ((pairs, Pairs()), (weighted, surprise))]
    _, _, found = _gradient(trainer, params, pairs, Pairs(), want=True)
    coupled = found.loss
    np.testing.assert_array_equal(found.predictions, predict_tokens(params, pairs, model=model, planner=ROWS))
    gradient, _, found = _gradient(trainer, params, weighted, surprise, found)
    _assert_same(gradient, jax.tree.map(np.add, *expected))
    trainer.optim_step(trainer.init(_copy(params)), found, totals, 0)
    metrics = {name: metric.result() for name, metric in totals.metrics.items()}
    assert metrics["loss"] == pytest.approx(coupled + metrics["sft/loss"], rel=1e-6)
    assert metrics["pairs/accuracy"] in (0, 0.25, 0.5, 0.75, 1)


def test_a_step_is_its_two_halves_to_the_bit_and_compiles_nothing_more(policy, pairs):
    """Other numbers are data: a learning rate of 0 compiles nothing, and moves nothing."""
    model, params = policy
    trainer = _trainer(model, name="adamw", beta1=0.9)
    table = pairs.weighted("token_mean", 9)

    def halves(state, **numbers):
        found = trainer.forward_backward(state, table, surprise, StepTotals())
        return trainer.optim_step(state, found, StepTotals(), 3, **numbers)

    whole = trainer.step(trainer.init(_copy(params)), table, surprise, StepTotals(), 3)
    compiled = num_compilations()
    other = halves(trainer.init(_copy(params)))
    got = jax.device_get((other.params, other.opt_state))
    still = trainer.optimizer.numbers(3)._replace(learning_rate=np.float32(0))
    third = halves(other, numbers=still)
    assert num_compilations() == compiled
    assert third.step == 2
    expected = jax.device_get((whole.params, whole.opt_state))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(third.params), jax.tree.leaves(got[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


class Returns(Coupled):
    """What it is given."""

    def __init__(self, found):
        self.found = found

    def __call__(self, predicted, table):
        return self.found


def test_a_loss_without_numbers_is_a_bad_step_and_not_an_error(policy, pairs):
    """Where the model itself has none: as for a loss of tokens, which is counted and not applied."""
    model, params = policy
    trainer, totals = _trainer(model), StepTotals()
    broken = _copy(params) | {"final_norm": params["final_norm"] * np.nan}
    state = trainer.step(trainer.init(broken), pairs, Returns(None), totals, 0)
    assert (state.step, state.bad_steps, totals.bad) == (0, 1, 1)
    np.testing.assert_array_equal(state.params["embed"], params["embed"])


SLOPES = np.zeros((8, 11))


def _at(row, place, value):
    slopes = SLOPES.copy()
    slopes[row, place] = value
    return slopes


@pytest.mark.parametrize(
    ("slopes", "loss", "metrics", "message"),
    [
        (SLOPES[0], 1.0, {}, r"have the shape \[B, T\].*got slopes \[11\] for predictions \[8, 11\]"),
        (SLOPES[:, 1:], 1.0, {}, r"got slopes \[8, 10\]"),
        (_at(2, 10, np.nan), 1.0, {}, "finite float32 numbers; got nan for token 10 of sequence 2"),
        (_at(2, 10, 1e39), 1.0, {}, "finite float32 numbers; got 1e[+]39 for token 10 of sequence 2"),
        (_at(3, 0, 0.5), 1.0, {}, "0 outside table.completion_mask.*got 0.5 for token 0 of sequence 3"),
        (SLOPES, np.inf, {}, "a coupled loss is a finite number; got inf"),
        (SLOPES, 1.0, {"gap": 0.5}, "are of types.metrics.Metric; got 0.5 for 'gap'"),
        (SLOPES, 1.0, {"loss": Metric(1.0)}, "got 'loss', which is logged already"),
    ],
)
def test_what_is_no_coupled_loss_is_refused(pairs, slopes, loss, metrics, message):
    with pytest.raises(ValueError, match=message):
        check_coupled(CoupledLoss(slopes, loss, metrics), pairs)


def test_a_refused_loss_leaves_the_sums_so_far(policy, pairs):
    model, params = policy
    trainer = _trainer(model)
    expected, _, before = _gradient(trainer, params, pairs, Pairs())
    with pytest.raises(ValueError, match="finite float32 numbers"):
        _gradient(trainer, params, pairs, Returns(CoupledLoss(SLOPES * np.nan, 1.0, {})), before)
    _assert_same(jax.tree.map(lambda x: np.asarray(x[0]), before.total), expected, 0)


def test_a_coupled_loss_of_a_model_with_experts_keeps_what_routers_report(make_batch):
    """The auxiliary loss is added to C, and the parts of two calls to each other."""
    arch, params = routed_model(num_hidden_layers=1, mlp_only_layers=[])
    r = make_batch(20, n=2).rollouts
    routes = routes_of_rows(params, arch, r.input_ids, r.lengths)
    masks = r.attention_mask, r.completion_mask
    table = with_reference(TokenTable(r.input_ids, *masks, {}, r.group_ids, None, routes))
    model, table = PolicySpec(arch), table.balanced(0.5, 8)
    trainer, totals = _trainer(model), StepTotals()
    predicted = predict_tokens(params, table, model=model, planner=ROWS).astype(np.float64)
    state = trainer.init(_copy(params))
    found = trainer.forward_backward(state, table, Pairs(), StepTotals())
    found = trainer.forward_backward(state, table, Pairs(), totals, found)
    trainer.optim_step(state, found, totals, 0)
    metrics = {name: metric.result() for name, metric in totals.metrics.items()}
    assert metrics["update/router_aux_loss"] > 0.1
    loss = 2 * Pairs()(predicted, table).loss + metrics["update/router_aux_loss"]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert totals.metrics["pairs/accuracy"].count == 2 * 4
    inputs = int(table.lengths.sum()) - len(table)
    assert totals.metrics["moe/entropy"].count == 2 * inputs
    assert totals.expert_tokens.sum() == 2 * inputs * 2
    once = _trainer(model).step(trainer.init(_copy(params)), table, Pairs(), totals := StepTotals(), 0)
    assert once.step == 1
    assert metrics["moe/entropy"] == pytest.approx(totals.metrics["moe/entropy"].result())
    twice = 2 * totals.metrics["update/router_aux_loss"].result()
    assert metrics["update/router_aux_loss"] == pytest.approx(twice, rel=1e-5)
