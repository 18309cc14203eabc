import numpy as np
import pytest
from architectures import of_golden

from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner, common_prefix_tokens, describe_plans
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.delta_rule import FROM_SAVED, FROM_ZERO, NOWHERE
from quatrain.models.layers import BRANCHES_PER_GROUP
from quatrain.models.prefix_tree import RowForms
from quatrain.ops import packing
from quatrain.ops.packing import DEFAULT_COST
from quatrain.parallel.mesh import one_device


def _table() -> TokenTable:
    input_ids = np.array([[5, 6, 7, 0], [8, 9, 10, 11], [12, 13, 0, 0]], np.int32)
    attention = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
    completion = np.array([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    advantages = np.where(completion, [[1], [2], [3]], 0).astype(np.float32)
    return TokenTable(input_ids, attention, completion, {"advantages": advantages})


def test_scored_tokens_are_listed_with_the_column_that_predicts_them():
    (rows, batch), (last_rows, last) = micro_batches(_table(), MicroBatchPlanner(rows=2), one_device())
    assert rows.tolist() == [0, 1]
    assert last_rows.tolist() == [2]
    assert batch.input_ids.shape == last.input_ids.shape == batch.targets.shape == (2, 16)
    assert batch.mask.sum(axis=1).tolist() == [1, 2]
    assert batch.targets[0, :1].tolist() == [7]
    assert batch.predictors[0, :1].tolist() == [1]
    assert batch.targets[1, :2].tolist() == [9, 11]  # the token between them is not the policy's
    assert batch.predictors[1, :2].tolist() == [0, 2]
    assert batch.columns["advantages"][1, :2].tolist() == [2.0, 2.0]
    assert batch.segment_ids[0].tolist() == [1, 1, 1] + [0] * 13
    assert not last.mask.any()
    assert not last.segment_ids[1].any()  # the last micro-batch is padded with an empty row


def test_packed_sequences_stand_one_after_another():
    ((rows, batch),) = micro_batches(_table(), MicroBatchPlanner(max_tokens=10), one_device())
    assert rows.tolist() == [0, 1, 2]
    assert batch.packed
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 2, 3, 3, 0]]
    assert batch.targets[0, :3].tolist() == [7, 9, 11]
    assert batch.predictors[0, :3].tolist() == [1, 3, 5]
    assert batch.columns["advantages"][0, :3].tolist() == [1.0, 2.0, 2.0]
    assert batch.mask[0].tolist() == [True] * 3 + [False] * 7


def _rows(cut) -> list[list[int]]:
    """The sequences of each buffer."""
    return [[int(row) for segment in buffer for row in segment.rows] for buffer in cut.buffers]


def test_shards_take_turns_line_by_line():
    (cut,) = MicroBatchPlanner(rows=2, num_shards=2).plans(_table())
    assert _rows(cut) == [[0], [1], [2], []]
    (cut,) = MicroBatchPlanner(rows=8, num_shards=2).plans(
        _table()
    )  # more rows than a shard's share: no empty ones
    assert _rows(cut) == [[0], [1], [2], []]
    (cut,) = MicroBatchPlanner(max_tokens=4, num_shards=4).plans(_table())  # more shards than sequences
    assert sorted(_rows(cut)) == [[], [0], [1], [2]]


def test_a_sequence_longer_than_the_budget_is_refused():
    with pytest.raises(ValueError, match="4"):
        MicroBatchPlanner(max_tokens=3).plans(_table())


def _group() -> TokenTable:
    """Three samples of the prompt 1 2 3, of 2, 0 and 1 tokens, and one of another group."""
    input_ids = np.array([[1, 2, 3, 10, 11], [1, 2, 3, 0, 0], [1, 2, 3, 12, 0], [1, 2, 20, 0, 0]], np.int32)
    attention = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], bool)
    completion = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0]], bool)
    return TokenTable(input_ids, attention, completion, {}, np.array([7, 7, 7, 4]))


def test_a_group_has_its_prompt_once():
    ((rows, batch),) = micro_batches(
        _group(), MicroBatchPlanner(max_tokens=9, share_prompts=True), one_device()
    )
    assert rows.tolist() == [0, 1, 2, 3]
    assert batch.shared
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 12, 1, 2, 20]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1, 2, 2, 2]]
    assert batch.branch_ids.tolist() == [[0, 0, 0, 1, 1, 3, 0, 0, 1]]
    assert batch.targets[0, :4].tolist() == [10, 11, 12, 20]
    # Both samples begin after the prompt's last token.
    assert batch.predictors[0, :4].tolist() == [2, 3, 2, 7]


def test_buffers_have_chunks_for_a_model_with_delta_layers_alone():
    planner = MicroBatchPlanner(max_tokens=9, share_prompts=True)
    ((_, without),) = micro_batches(_group(), planner, one_device())
    ((_, batch),) = micro_batches(_group(), planner, one_device(), RowForms(chunked=True))
    assert without.chunks is None
    assert batch.chunks is not None
    saved, nowhere = FROM_SAVED, NOWHERE
    assert list(zip(*(each[0, :5].tolist() for each in batch.chunks), strict=True)) == [
        (0, 3, FROM_ZERO, 0),  # the prompt, after which each of two samples begins
        (3, 2, saved, nowhere),
        (5, 1, saved, nowhere),
        (6, 2, FROM_ZERO, 0),
        (8, 1, saved, nowhere),
    ]
    assert not batch.chunks.counts[0, 5:].any()
    forms = [PolicySpec(of_golden(case)).forms.chunked for case in ("qwen3", "qwen3_next")]
    assert forms == [False, True]


def test_a_group_too_long_for_a_buffer_is_split_and_its_prompt_repeated():
    cuts = MicroBatchPlanner(max_tokens=5, share_prompts=True).plans(_group())
    held = sorted(
        (segment.rows.tolist(), segment.num_tokens)
        for cut in cuts
        for buffer in cut.buffers
        for segment in buffer
    )
    assert held == [([0, 1], 5), ([2], 4), ([3], 3)]
    metrics = describe_plans(_group(), cuts, DEFAULT_COST)
    assert metrics["batch/shared_fraction"].result() == 3 / 15


@pytest.fixture
def short_prefixes(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_COMMON_PREFIX", 2)


def test_a_line_has_what_all_sequences_begin_with_once(short_prefixes):
    ((rows, batch),) = micro_batches(
        _group(), MicroBatchPlanner(max_tokens=7, share_prompts=True), one_device()
    )
    assert rows.tolist() == [0, 1, 2, 3]
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 12, 20]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 3, 2]]
    assert batch.segment_ids.tolist() == [[1] * 7]
    # The sample of three has no token of its own.
    first, second = BRANCHES_PER_GROUP, 2 * BRANCHES_PER_GROUP
    assert batch.branch_ids.tolist() == [[0, 0, first, first + 1, first + 1, first + 3, second + 1]]
    assert batch.targets[0, :4].tolist() == [10, 11, 12, 20]
    assert batch.predictors[0, :4].tolist() == [2, 3, 2, 1]
    assert batch.mask[0].tolist() == [True] * 4 + [False] * 3


def test_each_line_has_the_common_prefix_and_the_cap_counts_it(short_prefixes):
    planner = MicroBatchPlanner(max_tokens=5, num_shards=2, share_prompts=True)
    (cut,) = planner.plans(_group())
    held = {
        tuple(np.concatenate([s.rows for s in buffer]).tolist()): cut.work(buffer) for buffer in cut.buffers
    }
    assert held == {(0, 1): (5, 5**2), (2, 3): (5, 2**2 + (3**2 - 2**2) + (4**2 - 2**2))}
    assert cut.width == 5
    metrics = describe_plans(_group(), [cut], DEFAULT_COST)
    assert metrics["batch/padding_fraction"].result() == 0
    assert metrics["batch/shared_fraction"].result() == 5 / 15
    assert metrics["global_seqlen/balanced_max"].result() == 5


def test_widths_are_those_of_the_packer_with_a_common_prefix_too():
    """100 tokens, then 50, 60, ... of each: widths are filled, not those of what stands beside it."""
    own = np.arange(50, 150, 10)
    lengths = 100 + own
    attention = np.arange(lengths.max()) < lengths[:, None]
    ids = np.where(np.arange(lengths.max()) < 100, 1, 2 + np.arange(10)[:, None]) * attention
    completion = attention & (np.arange(lengths.max()) >= 100)
    table = TokenTable(ids.astype(np.int32), attention, completion, {}, np.arange(10))
    for max_tokens in (300, 700, 2000):
        cuts = MicroBatchPlanner(max_tokens=max_tokens, share_prompts=True).plans(table)
        assert {cut.num_common for cut in cuts} == {100}
        assert sorted(np.concatenate([cut.sequences for cut in cuts])) == list(range(10))
        ladder = packing.width_buckets(max_tokens)
        for cut in cuts:
            filled = max(cut.work(buffer)[0] for buffer in cut.buffers)
            assert cut.width in ladder
            assert filled <= cut.width <= max_tokens
    assert [cut.width for cut in cuts] == [1152]  # for 1,050 tokens; nine sixteenths of 2,000


def test_a_common_prefix_has_no_sampled_token_and_is_never_all_of_a_sequence(short_prefixes):
    table = _group()
    assert common_prefix_tokens(table, 5) == 2
    assert common_prefix_tokens(table, 4) == 0  # nothing fits: the packer says so
    assert common_prefix_tokens(table.take(np.array([], int)), 4) == 0
    assert common_prefix_tokens(table.take(np.array([1, 1])), 5) == 2  # of three tokens
    table.completion_mask[3, 1] = True
    assert common_prefix_tokens(table, 5) == 0
    with pytest.raises(ValueError, match="max_tokens=4 cannot hold the sequence of 5 tokens"):
        MicroBatchPlanner(max_tokens=4, share_prompts=True).plans(_group())


def test_a_short_common_prefix_is_not_shared():
    length = packing.LEAST_COMMON_PREFIX
    ids = np.ones((2, length + 1), np.int32)
    completion = np.broadcast_to(np.arange(length + 1) == length, ids.shape)
    table = TokenTable(ids, np.ones(ids.shape, bool), completion, {}, np.arange(2))
    assert common_prefix_tokens(table, 100) == length
    table.input_ids[0, length - 1] = 2
    assert common_prefix_tokens(table, 100) == 0


def test_only_tokens_that_are_equal_are_shared():
    table = _group()

    def segments():
        ((buffer,),) = (
            cut.buffers for cut in MicroBatchPlanner(max_tokens=100, share_prompts=True).plans(table)
        )
        return {tuple(segment.rows.tolist()): (segment.num_shared, segment.num_tokens) for segment in buffer}

    table.input_ids[2, 1] = 9  # the prompts of a group should be equal; where they are not, nothing breaks
    assert segments() == {(3,): (2, 3), (0, 1, 2): (1, 1 + 4 + 2 + 3)}
    table.input_ids[2, 0] = 9
    assert segments() == {(3,): (2, 3), (0,): (0, 5), (1,): (0, 3), (2,): (0, 4)}


def test_a_micro_batch_has_the_columns_of_its_table():
    _, batch = next(micro_batches(_table(), MicroBatchPlanner(rows=3), one_device()))
    assert set(batch.columns) == {"advantages"}


def test_sequences_of_a_row_are_numbered_where_they_have_scored_tokens():
    ((_, batch),) = micro_batches(_table(), MicroBatchPlanner(max_tokens=10), one_device())
    assert batch.sequence_ids[0, :3].tolist() == [0, 1, 1]  # the third sequence has none


def test_cuts_are_described():
    table = _table()
    metrics = describe_plans(table, MicroBatchPlanner(rows=1, num_shards=2).plans(table), DEFAULT_COST)
    results = {name: metric.result() for name, metric in metrics.items()}
    assert results["batch/micro_batches"] == 2
    assert results["batch/tokens"] == 9
    assert results["batch/padding_fraction"] == 1 - 9 / 64  # 2 micro-batches of 2 rows of 16
    assert results["global_seqlen/max"] == 7  # the first shard has sequences of 3 and 4 tokens
    assert results["global_seqlen/min"] == 2
    assert results["global_seqlen/minmax_diff"] == 5
    assert results["global_seqlen/mean"] == 4.5
    assert results["batch/imbalance"] == pytest.approx(2.0)  # the second: four tokens beside none
    balanced = describe_plans(table, MicroBatchPlanner(max_tokens=5, num_shards=2).plans(table), DEFAULT_COST)
    assert balanced["global_seqlen/balanced_max"].result() == 5
    assert balanced["global_seqlen/balanced_min"].result() == 4
