"""Pieces of a sequence: joined, cut and told in parts, no token and no row of a column is lost or moved."""

import numpy as np
import pytest

from quatrain.types.piece import GIVEN, NOTHING, Piece

SEEN = "seen"


def rows(*tokens: int) -> list[np.ndarray]:
    """Rows of a column, which name the token they are of."""
    return [np.array(tokens, np.int32)[:, None]]


def sampled(*tokens: int, **columns) -> Piece:
    return Piece([*tokens], [-0.5 * token for token in tokens], [3] * len(tokens), columns)


def column(piece: Piece) -> list[int]:
    return [int(row[0]) for part in piece.columns.get(SEEN, ()) for row in part]


def test_joined_pieces_have_the_tokens_and_rows_of_each_in_turn():
    """A prompt of 1 and 2, an answer, what an environment wrote, and another answer; the last has no row."""
    piece = sampled(3, 4, seen=rows(1, 2, 3))
    piece.append(Piece.given([5]))
    piece.append(sampled(6, 7, seen=rows(4, 5, 6)))
    assert piece.tokens == [3, 4, 5, 6, 7]
    assert piece.logprobs == [-1.5, -2.0, 0.0, -3.0, -3.5]
    assert piece.versions == [3, 3, GIVEN, 3, 3]
    assert (piece.num_given, piece.num_sampled) == (1, 4)
    assert column(piece) == [1, 2, 3, 4, 5, 6]


def test_rows_that_are_known_stay_and_a_gap_is_left_out():
    piece = sampled(3, 4, seen=rows(1, 2, 3))
    piece.append(sampled(5, seen=rows(92, 93, 4)), 1)  # of what was computed again, and of the token before
    assert column(piece) == [1, 2, 3, 4]
    piece.append(sampled(6, seen=rows(6)), 5)
    assert (piece.tokens, column(piece)) == ([3, 4, 5, 6], [1, 2, 3, 4])


@pytest.mark.parametrize("length", range(6))
def test_what_is_cut_off_takes_its_rows_and_counts_along(length):
    piece = sampled(3, 4, seen=rows(1, 2, 3))
    piece.append(Piece.given([5]))
    piece.append(sampled(6, 7, seen=rows(4, 5, 6)))
    piece.cut(length)
    assert piece.tokens == [3, 4, 5, 6, 7][:length]
    assert column(piece) == [1, 2, 3, 4, 5, 6][: length + 1]
    assert piece.num_given == (length > 2)
    assert len(piece.logprobs) == len(piece.versions) == length


def test_parts_that_are_reported_are_the_whole():
    whole, mark, told = Piece(), NOTHING, Piece()
    for part in (sampled(3, seen=rows(1, 2)), Piece.given([4, 5]), sampled(6, seen=rows(3, 4, 5))):
        whole.append(part)
        told.append(whole.since(mark))
        mark = whole.mark
    assert told == whole
    assert (told.num_given, column(told)) == (2, [1, 2, 3, 4, 5])
    assert whole.since(mark) == Piece()


def test_a_piece_that_was_told_does_not_change_with_its_sequence():
    whole = sampled(3, seen=rows(1, 2))
    told = whole.since(NOTHING)
    whole.append(sampled(4, seen=rows(3)))
    assert (told.tokens, column(told)) == ([3], [1, 2])


def test_rows_of_some_tokens_are_found_across_parts():
    piece = sampled(3, 4, seen=[*rows(1, 2), *rows(3)])
    assert [int(row[0]) for part in piece.rows(SEEN, 1, 9) for row in part] == [2, 3]
    assert piece.rows(SEEN, 1, 1) == []
    assert piece.rows("none", 0, 9) == []
