import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from quatrain.cluster.stop import Agreement, Signals, Stop, Stopped

LOOP = (
    "import os, signal, sys, time\nfrom quatrain.cluster.stop import *\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where a shell had it ignored
)


@pytest.fixture(autouse=True)
def _interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_script(code, *numbers, after_s=0.2):
    """Status and output of a process, once it has printed a line and got signals `numbers`."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    line = process.stdout.readline()
    for number in numbers:
        process.send_signal(number)
        time.sleep(after_s)
    out, _ = process.communicate(timeout=60)
    return process.returncode, line + out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_raised_where_the_run_may_be_interrupted(number):
    def waits_for_a_rollout(stop):
        with stop.interruptible():
            os.kill(os.getpid(), number)
            time.sleep(60)

    with Stop() as stop, pytest.raises(Stopped) as stopped:
        waits_for_a_rollout(stop)
    assert stopped.value.status == 128 + number
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_elsewhere_a_signal_waits_for_the_next_border():
    with Stop() as stop:
        with stop.interruptible():
            stop.safe_point()
        os.kill(os.getpid(), signal.SIGTERM)
        done = time.sleep(0.05) is None  # an update, or files that are being written
        with pytest.raises(Stopped):
            stop.safe_point()
        with pytest.raises(Stopped), stop.interruptible():
            pytest.fail("an interruptible block is not begun after a signal")
    assert done


def test_an_exception_that_is_swallowed_is_raised_again_at_the_next_border():
    def swallows(stop):
        with stop.interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            except BaseException:
                pass

    with Stop() as stop, pytest.raises(Stopped):
        swallows(stop)


def test_other_threads_neither_install_nor_raise_anything():
    def train():
        with Stop() as stop, stop.interruptible():
            stop.safe_point()
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train).result() is signal.SIG_DFL
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            pool.submit(stop.safe_point).result()  # the thread of a rollout
            with pytest.raises(Stopped):
                stop.safe_point()


def test_signals_that_others_handle_stay_theirs():
    before = signal.signal(signal.SIGTERM, mine := lambda *_: None)
    try:
        with Stop():
            assert signal.getsignal(signal.SIGTERM) is mine
            with Stop():  # a run within a run
                pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_under_nohup_outlives_its_terminal():
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += (
        "with Stop() as stop:\n    print('open', flush=True)\n    time.sleep(0.5)\n    stop.safe_point()\n"
    )
    assert run_script(code, signal.SIGHUP) == (0, "open\n")


BUSY = (
    "import hashlib\nwith Signals(lambda n: print('first', n, flush=True)):\n    print('open', flush=True)\n"
)


def test_a_second_signal_ends_a_process_whose_main_thread_computes():
    code = BUSY + "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    status, out = run_script(code, signal.SIGTERM, signal.SIGINT, after_s=1.2)
    assert status == 130
    assert out == "open\nfirst 15\nended at once by a second signal, SIGINT\n"


def test_a_second_signal_says_how_to_go_on():
    code = (
        "import hashlib\nwith Stop() as stop:\n    stop.advice = lambda: 'go on with:\\n  quatrain train'\n"
        "    print('open', flush=True)\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    status, out = run_script(code, signal.SIGTERM, signal.SIGTERM, after_s=1.2)
    assert status == 143
    assert out.endswith("ended at once by a second signal, SIGTERM; go on with:\n  quatrain train\n")


DEAF = """
import hashlib, threading
from quatrain.cluster import stop as module
module.DEAF_S = 0.1
def leave(stopped):
    print('left', flush=True)
    os._exit(stopped.status)
with Stop() as stop:
    stop.save = lambda: print('saved', flush=True)
    stop.conclude = lambda stopped: print('concluded', stopped, flush=True)
    try:
        with {leaving}, stop.interruptible_while(lambda: {whole}):
            threading.Timer(0.2, print, ('open',), dict(flush=True)).start()
            hashlib.pbkdf2_hmac('sha256', b'', b'', {rounds})
            time.sleep(0.1)
            print('went on', flush=True)
        stop.safe_point()
    except Stopped as stopped:
        print('raised', stopped, flush=True)
"""
LONG, SHORT = 2**31 - 1, 3_000_000


@pytest.mark.parametrize(
    ("leaving", "whole", "rounds", "status", "lines"),
    [
        ("leaving(leave)", True, LONG, 143, ["saved", "concluded SIGTERM", "left"]),
        ("module.suppress()", True, SHORT, 0, ["saved", "raised SIGTERM"]),
        ("leaving(leave)", False, SHORT, 0, ["went on", "raised SIGTERM"]),
    ],
    ids=["the process is the run's", "the process is another's", "the state is given away"],
)
def test_a_thread_that_hears_no_signal_does_not_keep_the_last_step_from_being_saved(
    leaving, whole, rounds, status, lines
):
    """Of a thread that compiles, Python's handlers run when it has compiled, minutes later."""
    code = DEAF.format(leaving=leaving, whole=whole, rounds=rounds)
    ended, out = run_script(code, signal.SIGTERM)
    assert ended == status
    first, announced, *said = out.splitlines()
    assert first == "open"
    assert announced.startswith("SIGTERM: the run stops")
    assert said == lines


def test_a_signal_that_is_sent_twice_at_once_is_one():
    code = BUSY + "    time.sleep(0.5)\nprint('went on')\n"
    status, out = run_script(code, signal.SIGTERM, signal.SIGTERM, after_s=0.05)
    assert (status, out) == (0, "open\nfirst 15\nwent on\n")


def test_the_signals_of_a_forked_child_are_its_own():
    code = (
        # Python 3.12 and later warn of a fork beside the thread of `Signals`.
        "import warnings\n"
        "warnings.filterwarnings('ignore', 'This process .* is multi-threaded', DeprecationWarning)\n"
        "with Signals(lambda n: print('first', n, flush=True)):\n"
        "    child = os.fork()\n"
        "    if not child:\n        time.sleep(60)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitpid(child, 0)[1], flush=True)\n    time.sleep(0.2)\n"
    )
    assert run_script(code) == (0, f"{signal.SIGTERM.value}\n")


def make_agreements(count):
    """The agreements of `count` processes, whose messages arrive by threads, and a function to end these."""
    inboxes = [SimpleQueue() for _ in range(count)]

    def sender(process):
        def send(message):
            for peer in range(1, count) if process == 0 else (0,):
                inboxes[peer].put((process, message))

        return send

    agreements = [
        Agreement(leads=i == 0, peers=count - 1 if i == 0 else 1, send=sender(i)) for i in range(count)
    ]

    def deliver(process):
        while (item := inboxes[process].get()) is not None:
            time.sleep(random.uniform(0, 0.002))
            assert agreements[process].receive(*item)

    threads = [threading.Thread(target=deliver, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()

    def close():
        for inbox, thread in zip(inboxes, threads, strict=True):
            inbox.put(None)
            thread.join()

    return agreements, close


@pytest.mark.parametrize("seed", range(12))
def test_all_processes_stop_at_the_same_border(seed):
    """Between some borders stands a collective, in which the others would wait for one that has stopped."""
    rng = random.Random(seed)
    count, borders = rng.randint(2, 4), 60
    collectives = {i for i in range(borders) if rng.random() < 0.3}
    meeting = threading.Barrier(count)
    agreements, close = make_agreements(count)
    asking = {rng.randrange(count): rng.randrange(borders - 20) for _ in range(2)}

    def process(index):
        own = random.Random(100 * seed + index)
        for i in range(borders):
            time.sleep(own.uniform(0, 0.001))
            if asking.get(index) == i:
                agreements[index].ask(signal.SIGTERM)
            try:
                agreements[index].safe_point()
            except Stopped:
                return i
            if i in collectives:
                meeting.wait(timeout=10)
        return None

    with ThreadPoolExecutor(count) as pool:
        ends = list(pool.map(process, range(count)))
    close()
    assert len(set(ends)) == 1
    assert ends[0] is not None
    assert min(asking.values()) <= ends[0] < borders


def test_processes_that_are_asked_after_their_last_border_finish():
    agreements, close = make_agreements(2)
    for agreement in agreements:
        agreement.safe_point()
    agreements[1].ask(signal.SIGTERM)
    close()
    assert not agreements[0].receive(1, {"done": True})


def test_signals_without_a_first_one_leave_nothing():
    threads = threading.active_count()
    wakeup = signal.set_wakeup_fd(-1)
    with Signals(lambda number: None):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(wakeup) == -1


def test_a_forked_child_does_not_keep_the_run_waiting():
    code = (
        "import os, time\nfrom quatrain.cluster.stop import Signals\n"
        "with Signals(print):\n"
        "    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)\n"
        "print('left', flush=True)\nos.kill(0, 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, start_new_session=True
    )
    assert done.stdout == "left\n"
