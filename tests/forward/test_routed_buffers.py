"""Routes of experts in micro-batches: each stands beside its token, whatever the layout."""

import numpy as np
import pytest

from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.table import TokenTable
from quatrain.models.prefix_tree import RowForms
from quatrain.parallel.mesh import one_device
from quatrain.types.routes import live_of

LIVE = live_of(np.uint8)
LAYERS, K, EXPERTS = 2, 3, 200
COUNTED = RowForms(counted=True)
CUTTINGS = (
    MicroBatchPlanner(rows=2),
    MicroBatchPlanner(max_tokens=60),
    MicroBatchPlanner(max_tokens=60, share_prompts=True),
    MicroBatchPlanner(max_tokens=300, share_prompts=True),
    MicroBatchPlanner(max_tokens=120, num_shards=2, share_prompts=True, line_tokens=60),
)


def _table(common: int = 0, groups: int = 3, n: int = 3, seed: int = 0) -> TokenTable:
    """Groups of ragged sequences, all beginning with `common` tokens; routes name their tokens."""
    rng = np.random.default_rng(seed)
    rows = groups * n
    prompts = common + np.repeat(rng.integers(1, 6, groups), n)
    lengths = prompts + rng.integers(1, 9, rows)
    columns = np.arange(lengths.max())
    attention = columns < lengths[:, None]
    ids = rng.integers(1, EXPERTS, attention.shape)
    ids[:, :common] = ids[0, :common]
    shared = columns < prompts[:, None]
    ids = np.where(shared, np.repeat(ids[::n], n, axis=0), ids)
    ids = np.where(attention, ids, 0).astype(np.int32)
    inputs = columns < (lengths - 1)[:, None]
    layers = np.arange(LAYERS)[:, None] * 50 + np.arange(K)
    routes = np.where(inputs[..., None, None], (ids[..., None, None] + layers) % EXPERTS, LIVE)
    group_ids = np.repeat(np.arange(groups), n)
    return TokenTable(ids, attention, attention & ~shared, {}, group_ids, None, routes.astype(np.uint8))


@pytest.mark.parametrize("planner", CUTTINGS)
@pytest.mark.parametrize("common", [0, 40])
def test_routes_stand_beside_their_tokens(planner, common):
    table = _table(common)
    layers = np.arange(LAYERS)[:, None] * 50 + np.arange(K)
    live_tokens = 0
    for _, batch in micro_batches(table, planner, one_device(), COUNTED):
        routes, ids = np.asarray(batch.routes), np.asarray(batch.input_ids)
        live = (routes == LIVE).all(axis=(2, 3))
        expected = (ids[..., None, None] + layers) % EXPERTS
        np.testing.assert_array_equal(routes[~live], expected[~live])
        assert live[np.asarray(batch.segment_ids) == 0].all()
        live_tokens += int((live & (np.asarray(batch.segment_ids) != 0)).sum())
        predictors = np.asarray(batch.predictors)[np.asarray(batch.mask)]
        rows = np.nonzero(np.asarray(batch.mask))[0]
        assert not live[rows, predictors].any()  # every token is predicted from a recorded route
    assert live_tokens == len(table)  # the last of each sequence


@pytest.mark.parametrize("planner", CUTTINGS)
@pytest.mark.parametrize("common", [0, 40])
def test_sums_weighted_by_counts_do_not_depend_on_the_cut(planner, common):
    """Of every sequence all tokens count but the last, also those that sequences share."""
    table = _table(common)
    by_token = np.zeros(EXPERTS)
    for _, batch in micro_batches(table, planner, one_device(), COUNTED):
        np.add.at(by_token, np.asarray(batch.input_ids), np.asarray(batch.counts))
    inputs = table.attention_mask.copy()
    inputs[np.arange(len(table)), table.lengths - 1] = False
    assert by_token.tolist() == np.bincount(table.input_ids[inputs], minlength=EXPERTS).tolist()


def test_a_prompt_alone_counts_without_its_last_token():
    """Its sequence is the shared prompt and nothing else."""
    ids = np.array([[1, 2, 3, 4], [1, 2, 3, 0]], np.int32)
    attention, completion = ids > 0, np.array([[0, 0, 0, 1], [0, 0, 0, 0]], bool)
    table = TokenTable(ids, attention, completion, {}, np.array([5, 5]))
    planner = MicroBatchPlanner(max_tokens=8, share_prompts=True)
    ((_, batch),) = micro_batches(table, planner, one_device(), COUNTED)
    assert batch.input_ids[0, :4].tolist() == [1, 2, 3, 4]
    assert batch.counts[0].tolist() == [2, 2, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("common", [0, 40])
def test_tokens_with_other_routes_are_not_shared(common):
    """Two samplers may differ in a prompt's experts; each sequence keeps its own."""
    table = _table(common)
    planner = MicroBatchPlanner(max_tokens=1000, share_prompts=True)
    shared = planner.plans(table)[0]
    routes = table.routes.copy()
    place = common // 2
    routes[4, place] = routes[4, place, :, ::-1]  # the second group's second sequence
    other = TokenTable(
        table.input_ids, table.attention_mask, table.completion_mask, {}, table.group_ids, None, routes
    )
    (cut,) = planner.plans(other)
    assert shared.num_common == common
    assert cut.num_common == 0  # shorter than what is worth sharing
    by_row = {int(row): segment for buffer in cut.buffers for segment in buffer for row in segment.rows}
    assert by_row[4].num_shared == place
    for _, batch in micro_batches(other, planner, one_device(), COUNTED):
        changed = np.asarray(batch.routes)[0, :, 0, 0] != (np.asarray(batch.input_ids)[0] % EXPERTS)
        recorded = (np.asarray(batch.routes) != LIVE).any(axis=(2, 3))[0]
        assert (changed & recorded).sum() == 1


def test_a_model_without_experts_has_neither_routes_nor_counts():
    table = TokenTable(*list(vars(_table()).values())[:5])
    ((_, batch),) = micro_batches(table, MicroBatchPlanner(max_tokens=500), one_device())
    assert batch.routes is None
    assert batch.counts is None
    assert batch.balance is None


def test_the_auxiliary_loss_of_even_loads_is_its_coefficient():
    """With loads and probabilities even, and by hand for uneven ones."""
    ids = np.arange(1, 10).reshape(1, 9).astype(np.int32)
    attention = np.ones_like(ids, bool)
    routes = np.full((1, 9, 1, 2), LIVE, np.uint8)
    routes[0, :8, 0] = [[0, 1], [2, 3]] * 4
    table = TokenTable(ids, attention, attention, {}, None, None, routes)
    balance = table.balanced(0.5, 4).balance
    np.testing.assert_allclose(balance, np.full((1, 4), 0.5 * 4 / 8 / 4), rtol=1e-6)
    probabilities = np.full((8, 4), 0.25)
    assert (balance * probabilities.sum(axis=0)).sum() == pytest.approx(0.5)
    routes[0, :8, 0] = [0, 1]
    uneven = TokenTable(ids, attention, attention, {}, None, None, routes).balanced(0.5, 4).balance
    np.testing.assert_allclose(uneven, 0.5 * 4 / 8 * np.array([[0.5, 0.5, 0, 0]]), rtol=1e-6)


def test_the_auxiliary_loss_needs_routes():
    table = TokenTable(*list(vars(_table()).values())[:5])
    with pytest.raises(ValueError, match=r"update\.router_aux_coef needs recorded routes"):
        table.balanced(0.1, EXPERTS)
