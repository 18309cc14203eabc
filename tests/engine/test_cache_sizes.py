"""The sizes of the cache: few of them, never less than is needed, and never more than was reserved."""

from itertools import pairwise

import pytest

from quatrain.engine.cache import FEWEST_OF_TURNS, Room
from quatrain.engine.groups import prompt_positions


@pytest.mark.parametrize(("usual", "more"), [(20, 36), (300, 40), (500, 4000)])
def test_contexts_of_turns_have_few_sizes(usual, more):
    room = Room(1 << 30, 1, prompt_positions(usual), more)
    most = room.positions(usual, 8) - room.ring(8, 8)
    sizes = {tokens: room.context(tokens) for tokens in range(1, usual + more + 1)}
    assert all(tokens <= positions <= most for tokens, positions in sizes.items())
    assert room.context(1) == min(most, max(FEWEST_OF_TURNS, room.fewest_positions))
    doublings = sorted(set(sizes.values()))
    assert all(longer == min(most, 2 * shorter) for shorter, longer in pairwise(doublings))


def test_without_turns_the_cache_is_that_of_the_longest_prompt():
    room = Room(1 << 30, 1, prompt_positions(20))
    assert [room.context(tokens) for tokens in (1, 32, 33, 200)] == [32, 32, 48, 256]
