import threading
from contextlib import closing

import pytest

from quatrain.workers.loop_thread import ClosedError, LoopThread, map_in_threads


def test_work_is_done_in_order_in_one_thread_which_ends_last_of_all():
    seen = []

    def see(what):
        seen.append((what, threading.current_thread()))

    thread = LoopThread("work", "the work is over", lambda: see("end"))
    for number in range(3):
        thread.do(see, number)
    thread.close()
    thread.close()
    assert [what for what, _ in seen] == [0, 1, 2, "end"]
    assert len({of for _, of in seen}) == 1
    with pytest.raises(ClosedError, match="the work is over"):
        thread.do(see, 3)


def test_a_thread_without_work_is_not_started_and_one_may_close_itself():
    before, ended = set(threading.enumerate()), threading.Event()
    with closing(LoopThread("work", "the work is over", ended.set)) as thread:
        assert set(threading.enumerate()) == before
        thread.do(thread.close)
        assert ended.wait(10)


def test_a_function_of_items_in_threads_stops_at_an_error():
    assert map_in_threads(str, range(5), 2) == ["0", "1", "2", "3", "4"]
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda number: 1 / number, [1, 0, 2], 1)
