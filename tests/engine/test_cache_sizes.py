"""The sizes of the cache: few of them, never less than is needed, and never more than was reserved."""

from itertools import pairwise

import numpy as np
import pytest

from quatrain.engine.admission import Admission
from quatrain.engine.cache import FEWEST_OF_TURNS, CacheShape, Ring, Room
from quatrain.engine.groups import Group, prompt_positions
from quatrain.engine.scheduler import Scheduler
from quatrain.types.batches import Prompt


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


def test_what_samples_need_counts_what_is_kept_of_them():
    """A suspended sample has more tokens in its prefix slot than its context before the turn had."""
    prompt = Prompt(0, np.arange(1, 11, dtype=np.int32), "", {})
    groups = {ticket: Group.of(prompt, 0, (0, 1), limit) for ticket, limit in ((0, 30), (1, 50))}
    groups[1].kept = 44
    groups[0].completions[1].extend(range(7), [-1.0] * 7, 0)
    admission = Admission(Scheduler(4), Room(1 << 20, 64, 32), groups, 2, None, None, turns=True)
    assert admission._need(0, (0, 1)) == (10, 6, 30)  # the last token was no input yet
    assert admission._need(1, ()) == (44, 0, 50)
    assert admission._need(0, (0, 1)).and_(admission._need(1, ())) == (44, 6, 50)


def test_a_cache_has_the_bytes_of_its_positions_and_states():
    room = Room(10_000, 10, 32, state_bytes=100)
    shape = CacheShape((Ring(4, 64), Ring(1, 128)), 3, 96)
    assert (shape.slots, shape.num_positions) == (5, 4 * 64 + 128 + 3 * 96)
    assert room._bytes(shape) == (256 + 128 + 288) * 10 + (5 + 3) * 100
    assert room.fits(shape)
    assert not room.fits(shape._replace(prefix_slots=6))  # 10,700 bytes
    assert room.prefix_slots(shape) == 5  # 5,660 bytes are left, and one takes 1,060
    assert room.slots(64) == 13  # of 740 bytes
    assert room.fitting(128) == 6  # of 1,480 bytes: a slot and a prefix slot have a state each
    assert [room.ring(needed, 200) for needed in (1, 32, 33, 150, 400)] == [32, 32, 64, 224, 224]
