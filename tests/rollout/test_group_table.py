"""Property: whatever happens to workers, each group comes out exactly once, or its failure is raised."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.rollout.group_table import GroupFailed, GroupTable
from quatrain.rollout.worker import FinishedGroup, GroupSpec
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import PerRequestSampling

PROMPT = Prompt(1, np.ones(1, np.int32), "p")
SAMPLING = Sampling(n=1, max_new_tokens=1)
OPERATION = st.tuples(
    st.sampled_from(["give", "finish", "fail", "lose"]), st.integers(0, 2), st.integers(0, 3)
)


def spec(number):
    return GroupSpec(number, PROMPT, 0, SAMPLING)


def finished(number):
    return FinishedGroup(number, [(PROMPT, Completion())])


@given(st.integers(1, 6), st.integers(0, 3), st.lists(OPERATION, max_size=60))
def test_each_group_comes_out_once(count, retries, operations):
    table, failures = GroupTable(retries), dict.fromkeys(range(count), 0)
    table.add(map(spec, range(count)))
    has = {worker: [] for worker in "abc"}
    for what, index, room in operations:
        worker = "abc"[index]
        try:
            if what == "give":
                has[worker] += [each.number for each in table.give(worker, room)]
            elif what == "lose":
                numbers, has[worker] = has[worker], []
                for number in numbers:
                    failures[number] += 1
                assert table.lose(worker, "died") == len(numbers)
            elif has[worker]:
                number = has[worker].pop()
                failures[number] += what == "fail"
                group = finished(number) if what == "finish" else FinishedGroup(number, error="raised")
                table.finish(worker, group)
        except GroupFailed:
            assert max(failures.values()) == retries + 1
            return
        assert max(failures.values()) <= retries
        held = [number for numbers in has.values() for number in numbers]
        assert len(set(held)) == len(held)
        assert {n for n in range(count) if table.is_given(n)} == set(held)
        for each in has.values():
            assert len(each) == 1 or all(failures[number] < 2 for number in each) or not each
    for _ in range(count):
        for worker in "abc":
            has[worker] += [each.number for each in table.give(worker, count)]
            for number in has[worker]:
                table.finish(worker, finished(number))
            has[worker].clear()
    assert [group.number for group in table.take(range(count))] == list(range(count))
    assert len(table) == 0


def test_a_group_that_failed_is_given_to_another_worker_if_there_is_one():
    table = GroupTable(5)
    table.add([spec(1), spec(2)])
    table.add([spec(3)], only="a")
    assert [each.number for each in table.give("a", 3, "ab")] == [1, 2, 3]
    for number in (1, 3):
        table.finish("a", FinishedGroup(number, error="raised"))
    assert [each.number for each in table.give("a", 3, "ab")] == [3]  # it is for this worker alone
    assert table.num_waiting("a", "ab") == 0
    assert table.num_waiting("a", "a") == 1  # the other one is lost
    assert [each.number for each in table.give("b", 3, "ab")] == [1]
    table.finish("b", FinishedGroup(1, error="raised"))
    assert table.num_waiting("a", "ab") == table.num_waiting("b", "ab") == 1


def test_what_cannot_be_is_refused():
    table = GroupTable(3)
    table.add([spec(1)])
    with pytest.raises(ValueError, match="unique"):
        table.add([spec(1)])
    with pytest.raises(ValueError, match="does not have"):
        table.finish("a", finished(1))
    table.give("a", 1)
    with pytest.raises(ValueError, match="0 samples"):
        table.finish("a", FinishedGroup(1))
    with pytest.raises(ValueError, match="finished groups"):
        table.take([1])
    table.finish("a", finished(1))
    with pytest.raises(ValueError, match="does not have"):
        table.finish("a", finished(1))


def test_a_group_that_failed_twice_gets_a_worker_though_others_keep_coming():
    table, worker = GroupTable(3), "a"
    table.add([spec(0), spec(1)])
    for _ in range(2):
        table.give(worker, 2)
        table.finish(worker, FinishedGroup(0, error="raised"))
    for number in range(2, 5):
        table.add([spec(number)])
        assert table.give(worker, 2) == []  # until group 1 is finished
    table.finish(worker, finished(1))
    assert [each.number for each in table.give(worker, 2)] == [0]


def test_a_turn_that_failed_too_often_is_finished_with_its_error():
    own = PerRequestSampling(SAMPLING, 0, 0, 1)
    table = GroupTable(1)
    table.add([replace(spec(0), own=own)])
    for _ in range(2):
        table.give("a", 1)
        table.lose("a", "died")
    [group] = table.take([0])
    assert group.error == "it failed 2 times, last on a: died"


def test_withdrawn_groups_are_forgotten_when_their_worker_no_longer_has_them():
    table = GroupTable(3)
    table.add(map(spec, range(4)))
    assert [each.number for each in table.give("a", 3)] == [0, 1, 2]
    table.finish("a", finished(0))
    table.withdraw([0, 1, 2, 3, 99])
    assert (len(table), table.num_unfinished) == (2, 2)
    table.finish("a", finished(1))
    table.lose("a", "died")
    assert (len(table), table.num_unfinished) == (0, 0)


def turn(number, session):
    own = PerRequestSampling(SAMPLING, 0, 0, 0, session=session)
    return replace(spec(number), own=own)


def test_the_turns_of_a_session_go_to_the_worker_that_has_its_context():
    """P10: each of two workers computed the whole dialogue again whenever a turn went to the other."""
    table, able = GroupTable(2), ("a", "b")

    def given(worker, room=9):
        return [each.number for each in table.give(worker, room, able)]

    table.add(turn(number, str(number)) for number in range(4))
    assert [given("a", 2), given("b")] == [[0, 1], [2, 3]]
    for number, worker in enumerate("aabb"):
        table.finish(worker, finished(number))
    table.take(range(4))
    table.add(turn(10 + number, str(number)) for number in range(4))
    assert table.num_waiting("b", able) == 2
    assert [given("b"), given("a")] == [[12, 13], [10, 11]]
    table.lose("b", "died")
    able = ("a",)  # nobody waits for one that is lost
    assert sorted(given("a")) == [12, 13]


def test_a_worker_with_more_than_its_part_is_not_waited_for():
    """Eight dialogues that began on one worker would keep it busy while the other has nothing to do."""
    table, able = GroupTable(2), ("a", "b")
    table.add(turn(number, str(number)) for number in range(8))
    table.give("a", 8, able)
    for number in range(8):
        table.finish("a", finished(number))
    table.take(range(8))
    table.add(turn(10 + number, str(number)) for number in range(8))
    assert not table.give("b", 8, able)
    assert len(table.give("a", 6, able)) == 6
    assert len(table.give("b", 8, able)) == 2
