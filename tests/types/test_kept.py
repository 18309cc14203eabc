"""Sets of words beside tokens: rows of a column, sets of a batch, and what other processes are told."""

import json

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.cluster.processes import _read, _written
from quatrain.episodes.agent_episodes import _completion
from quatrain.rollout.rollouts import _plain, _row
from quatrain.serve.turn_tree import TurnTree
from quatrain.types.batches import Prompt
from quatrain.types.kept import KEPT, KeptRow, KeptSets, all_words, listed_rows
from quatrain.types.pictures import PicturesInJson, Tokens
from quatrain.types.piece import Piece
from quatrain.types.rollouts import Completion, rollout_batch

MASKS = [np.array([0b110, 0], np.uint32), np.array([0, 1], np.uint32)]


class WithoutText:
    all_special_ids = ()

    def decode(self, tokens, **_):
        return ""


def column(*sets):
    rows = all_words(len(sets))
    rows[:] = [
        None if each is None else each if isinstance(each, np.ndarray) else np.int32(each) for each in sets
    ]
    return rows


def plain(rows):
    return [None if each is None else (each.dtype.name, each.tolist()) for each in rows]


COLUMN = column(None, [3, 5], None, MASKS[0], [7], MASKS[1], MASKS[0])


def test_rows_are_what_programs_return():
    rows = listed_rows(np.array([[4, 2, 9], [8, 1, 1]]), np.array([3, 1]))
    assert [each.tolist() for each in rows] == [[4, 2, 9], [8]]


def test_a_row_is_the_sets_of_its_column():
    row = KeptRow.of([COLUMN[:3], COLUMN[3:]])
    assert row.counts.tolist() == [0, 2, 0, 0, 1, 0, 0]
    assert row.words.tolist() == [3, 5, 7]
    assert len(row.masks) == 2
    assert plain(row.column) == plain(COLUMN)


def test_sets_of_a_batch_are_taken_cut_and_told_apart():
    """Would fail if equal masks were stored twice, or the words of a row left out moved those of others."""
    again = [each if each is None else each.copy() for each in COLUMN]
    sets = KeptSets.stacked([KeptRow.of([COLUMN]), None, KeptRow.of([column(*again)])], 9)
    assert len(sets.masks) == 2
    for row, expected in ((0, COLUMN), (1, column(*[None] * 9)), (2, COLUMN)):
        assert plain(sets.row(row).column) == plain(expected) + [None] * (9 - len(expected))
    taken = sets.take(np.array([2, 1]))
    assert plain(taken.row(0).column) == plain(sets.row(2).column)
    wanted = np.zeros((3, 9), bool)
    wanted[2, [1, 3]] = True
    only = sets.only(wanted)
    assert plain(only.row(0).column) == [None] * 9
    assert plain(only.row(2).column) == [None, *plain(COLUMN)[1:4], *[None] * 5]
    assert sets.listed(2, np.array([4, 1, 0]), 3).tolist() == [[7, -1, -1], [3, 5, -1], [-1, -1, -1]]
    assert KeptSets.stacked([None, KeptRow.of([column(None)])], 4) is None


def sample(tokens=(3, 4), **columns):
    completion = Completion(columns=columns)
    completion.extend(tokens, [-1.0] * len(tokens), 0)
    return Prompt(0, np.array([1, 2], np.int32), ""), completion


def test_sets_follow_their_tokens_into_the_batch():
    """A completion that is cut loses the sets of its end, and tokens that were given have none."""
    prompt, completion = sample((3, 4, 5), **{KEPT: [column(None, None, [3, 8]), column([4], [5, 6])]})
    completion.cut(2)
    completion.begin_turn([9, 9])
    later = Completion(columns={KEPT: [column(None, None, None, None, None, None, [7, 1])]})
    later.extend([7], [-1.0], 0)
    completion.append(later, 0)
    batch = rollout_batch([(prompt, completion)], WithoutText(), {})
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 9, 9, 7]]
    assert plain(batch.kept.row(0).column) == plain(column(None, None, [3, 8], [4], None, None, [7, 1]))


@pytest.mark.parametrize("pattern", ["free, schema", "free, schema, free, schema", "schema, free, schema"])
def test_turns_that_follow_a_schema_have_their_sets_whatever_came_before(pattern):
    """An agent asks for a schema in some turns of a dialogue. Would fail if a turn lost its sets because one
    before it has none: it was then trained over all words."""
    tree = TurnTree(0, [], Tokens([1, 2, 3]))
    ids, expected = [1, 2, 3], [None] * 3
    for number, kind in enumerate(pattern.split(", ")):
        answer = [10 + 2 * number, 11 + 2 * number]
        sets = [None, None] if kind == "free" else [[token, 70] for token in answer]
        turn = tree.begin(tree.find_ids(ids))
        columns = {} if kind == "free" else {KEPT: [all_words(len(ids)), column(*sets)]}
        turn.answer(Piece(answer, [-1.0, -1.0], [0, 0], columns))
        ids, expected = [*ids, *answer, 9], [*expected, *sets, None]  # the agent writes 9
    [row] = tree.rows()
    completion = _completion(row)
    batch = rollout_batch([(Prompt(0, np.array([1, 2, 3], np.int32), ""), completion)], WithoutText(), {})
    assert batch.input_ids.tolist() == [ids[:-1]]
    assert plain(batch.kept.row(0).column) == plain(column(*expected[:-1]))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[3, 8], [5]], "each sampled token once in its set; got 1 that are not"),
        ([[3, 3], [4]], "each sampled token once in its set"),
        ([MASKS[0], [4]], "each sampled token in its set; got 1 that are not"),
    ],
)
def test_a_token_outside_its_set_is_an_error_when_the_batch_is_made(sets, message):
    with pytest.raises(ValueError, match=f"field kept: expected {message}"):
        rollout_batch([sample(**{KEPT: [column(None, None, *sets)]})], WithoutText(), {})


def test_words_of_another_vocabulary_are_refused():
    sets = KeptSets.stacked([KeptRow.of([column([3, 70])])], 1)
    sets.check_vocabulary(71)
    with pytest.raises(ValueError, match="ids from 0 to 69, as the model has; got ids from 0 to 70"):
        sets.check_vocabulary(70)
    with pytest.raises(ValueError, match="masks of 64 words"):
        KeptSets.stacked([KeptRow.of([column(MASKS[0])])], 1).check_vocabulary(70)


def test_other_processes_are_told_the_sets():
    """Arrays of objects have no bytes that another process could read."""
    prompt, completion = sample(
        **{KEPT: [column(None, None), column([3, 8], np.array([0b10000], np.uint32))]}
    )
    told = json.dumps(_plain(prompt, prompt, completion), default=_written(PicturesInJson()))
    _, found = _row(prompt, json.loads(told, object_hook=_read(PicturesInJson())))
    assert plain(np.concatenate(found.columns[KEPT])) == plain(np.concatenate(completion.columns[KEPT]))
    assert rollout_batch([(prompt, found)], WithoutText(), {}).kept.has_set.sum() == 2


def test_batches_without_sets_have_none():
    assert make_rollouts(["a"]).kept is None
