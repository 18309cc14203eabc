"""Drafts by looking up what followed before."""

import numpy as np
import pytest

from quatrain.ops.ngrams import LONGEST, NOTHING, followers


def by_hand(history, end, count, own):
    """As `followers`, of one sequence, place by place."""
    best = (0, None)
    for place in range(1, len(history)):
        matched = 0
        while (
            matched < LONGEST
            and end - 1 - matched >= own
            and place - 1 - matched >= 0
            and history[place - 1 - matched] == history[end - 1 - matched] != NOTHING
        ):
            matched += 1
        if history[place] != NOTHING and matched and matched >= best[0]:
            best = (matched, place)
    if best[1] is None:
        return [NOTHING] * count
    place = best[1]
    if place >= own:
        return [history[place + i % (end - place)] for i in range(count)]
    return [history[place + i] if place + i < len(history) else NOTHING for i in range(count)]


def test_followers_are_those_of_the_longest_latest_match():
    """Against a search place by place. Fails if a shorter or an earlier match wins, if one goes across
    NOTHING or from the sequence into others, or if a sequence is not repeated at its end."""
    rng = np.random.default_rng(0)
    rows, ends, own = [], [], 17
    for _ in range(64):
        others = rng.integers(0, 3, own)
        others[rng.integers(0, own, 3)] = NOTHING
        others[-1] = NOTHING
        size = int(rng.integers(1, 14))
        rows.append([*others, *rng.integers(0, 3, size), *[NOTHING] * (14 - size)])
        ends.append(own + size)
    history, ends = np.array(rows, np.int32), np.array(ends, np.int32)
    found = np.asarray(followers(history, ends, 3, own))
    expected = [by_hand(list(row), int(end), 3, own) for row, end in zip(history, ends)]
    np.testing.assert_array_equal(found, expected)
    assert (found != NOTHING).mean() > 0.5


def test_a_sequence_that_repeats_itself_goes_on():
    """Fails if the drafts end where the sequence ends."""
    history = np.array([[7, 8, 9, 7, 8, NOTHING, NOTHING]], np.int32)
    assert np.asarray(followers(history, np.array([5], np.int32), 5)).tolist() == [[9, 7, 8, 9, 7]]


def test_shapes_that_do_not_fit_are_refused():
    """Fails if a table of other shapes gives drafts of other sequences."""
    with pytest.raises(ValueError, match="expected history"):
        followers(np.zeros((2, 4), np.int32), np.zeros(3, np.int32), 2)
