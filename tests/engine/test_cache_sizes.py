"""The sizes of the cache: few of them, never less than is needed, and never more than was reserved."""

from itertools import pairwise

import numpy as np
import pytest

from quatrain.engine.admission import Admission
from quatrain.engine.cache import FEWEST_OF_REQUESTS, CacheShape, Ring, Room
from quatrain.engine.groups import Group, prompt_positions
from quatrain.engine.scheduler import Scheduler
from quatrain.types.batches import Prompt


@pytest.mark.parametrize("usual", [20, 300])
def test_contexts_of_requests_have_few_sizes(usual):
    room = Room(1 << 30, 1, prompt_positions(usual), varying=True)
    sizes = {tokens: room.context(tokens) for tokens in range(1, 5000)}
    assert all(tokens <= positions for tokens, positions in sizes.items())
    assert room.context(1) == max(FEWEST_OF_REQUESTS, room.fewest_positions)
    assert all(longer == 2 * shorter for shorter, longer in pairwise(sorted(set(sizes.values()))))


def test_without_requests_the_cache_is_that_of_the_longest_prompt():
    room = Room(1 << 30, 1, prompt_positions(20))
    assert [room.context(tokens) for tokens in (1, 32, 33, 200)] == [32, 32, 48, 256]


def test_what_samples_need_is_the_most_of_each():
    groups = {
        ticket: Group.of(Prompt(0, np.ones(size, np.int32), "", {}), 0, (0, 1), limit)
        for ticket, size, limit in ((0, 10, 30), (1, 44, 50))
    }
    groups[0].completions[1].extend(range(7), [-1.0] * 7, 0)
    admission = Admission(Scheduler(4), Room(1 << 20, 64, 32), groups, 2, None, None)
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
