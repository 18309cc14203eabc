"""Environments called in threads and in worker processes: results, time limits, and what goes wrong."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from quatrain.episodes.environment import Ended, StepResult
from quatrain.episodes.environment_threads import MOST_AT_ONCE, InThreads
from quatrain.episodes.environment_workers import InWorkers
from quatrain.episodes.load_environment import load_environment, load_tools
from quatrain.workers.faults import Fault
from quatrain.workers.worker_process import LONGEST_OUTPUT

GAME = '''
import os, re, signal, stat, sys, time
from pathlib import Path
from quatrain import StepResult

def say(value):
    return StepResult([{"role": "user", "content": str(value)}], 0.25)

class Game:
    """Does what its columns and completions say."""

    def __init__(self):
        self.columns, self.count = {}, 0

    def reset(self, **columns):
        self.columns = columns
        self.do("reset")
        columns.get("letters", []).append("z")
        return f"{columns.get('letters')}"

    def do(self, method):
        action, _, value = self.columns.get(method, "").partition(" ")
        return getattr(self, f"_{action}")(value) if action else None

    def step(self, completion):
        self.count += 1
        self.columns["step"] = completion
        return self.do("step")

    def get_reward(self):
        self.do("get_reward")
        return self.count

    def close(self):
        self.do("close")

    def _count(self, value): return say(f"{value}{self.count}")
    def _stop(self, value): return None
    def _sleep(self, value): time.sleep(float(value)); return say("awake")
    def _wait(self, path):  # until there is such a file
        while not Path(path).exists():
            time.sleep(0.01)
        return say("waited")
    def _write(self, path): Path(path).write_text("closed")
    def _raise(self, name): raise __builtins__[name]("no such word")
    def _number(self, value): return 7
    def _flood(self, value): return say("x" * 2_000_000)
    def _print(self, value): print(value); print("to stderr", file=sys.stderr); return say("printed")
    def _print_much(self, value): print(("x" * 99 + "\\n") * 100_000); return say("printed")
    def _pid(self, value): return say(os.getpid())
    def _platforms(self, value): return say(os.environ["JAX_PLATFORMS"])
    def _exit(self, value): os._exit(int(value))
    def _signal(self, value): os.kill(os.getpid(), int(value)); time.sleep(5)
    def _in_c(self, value): re.match(r"(a+)+$", "a" * 40 + "b")
    def _memory(self, value): bytearray(2**30)
    def _fork(self, value): return say("forked" if os.fork() else "child")
    def _nonsense(self, value):
        for number in map(int, os.listdir("/proc/self/fd")):
            if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b"nonsense\\n")
        time.sleep(5)

    def _forge(self, value):
        for number in map(int, os.listdir("/proc/self/fd")):
            if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b'{"call": %d, "value": 5}\\n' % int(value))
        time.sleep(5)

def double(number: int) -> int:
    """Doubles.

    Args:
        number: A number.
    """
    return 2 * number
'''
WAIT_S = 30.0
"""More than any call needs on a machine with other work."""
LIMIT_S = 0.5
"""The time limit where calls exceed it."""
MODES = ["threads", "workers"]
CALL = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "game.py"
    path.write_text(GAME)
    return f"{path}:Game"


def calls_of(mode, spec, timeout_s):
    if mode == "threads":
        return InThreads(load_environment(spec), timeout_s)
    return InWorkers(spec, 1, timeout_s)


@pytest.fixture(scope="module", params=MODES)
def shared(request, spec):
    with closing(calls_of(request.param, spec, WAIT_S)) as calls:
        yield calls


@pytest.fixture
def calls(shared):
    """Calls of Game, for tests that do not end them; their episodes are forgotten."""
    yield shared
    for episode in range(200):
        shared.abandon(episode)


@pytest.fixture(params=MODES)
def make(request, spec):
    """A function that makes the calls of Game with a time limit."""
    made = []

    def make(timeout_s=WAIT_S):
        made.append(calls_of(request.param, spec, timeout_s))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


@pytest.fixture
def workers(spec):
    """A function that makes calls of Game in worker processes."""
    made = []

    def make(num_workers=1, timeout_s=WAIT_S, memory_mb=None):
        made.append(InWorkers(spec, num_workers, timeout_s, memory_mb))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


def got(future):
    return future.result(WAIT_S)


def fault(future):
    """The fault of a call, which must have no other exception."""
    with pytest.raises(Fault) as caught:
        got(future)
    return caught.value


def text(future):
    """The content of the one message of a turn."""
    (message,) = got(future).messages
    return message["content"]


def begun(calls, *episodes, **columns):
    for future in [calls.begin(episode, columns) for episode in episodes]:
        got(future)
    return calls


def comes(condition):
    """Whether a condition becomes true."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_gone(process):
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def test_an_episode(calls):
    assert got(calls.begin(3, {"letters": ["a"]})) == "['a', 'z']"
    assert got(calls.step(3, "count n")) == StepResult(({"role": "user", "content": "n1"},), 0.25)
    assert text(calls.step(3, "count n")) == "n2"
    assert got(calls.step(3, "stop")) is None
    assert got(calls.end(3)) == Ended(3.0, {})


@pytest.mark.parametrize("kind", MODES)
def test_tools(kind, spec):
    tools = [spec.replace(":Game", ":double")]
    made = InThreads(load_tools(tools), WAIT_S) if kind == "threads" else InWorkers(tools, 1, WAIT_S)
    with closing(made) as calls:
        assert got(calls.begin(0, {})) is None
        assert text(calls.step(0, CALL)) == "8"
        assert got(calls.end(0)) == Ended(0.0, {"tool_calls": 1, "malformed_calls": 0, "tool_errors": 0})


def test_two_hundred_episodes_at_once(calls):
    episodes = range(200)
    begun(calls, *episodes)
    for turn in range(1, 4):
        futures = {episode: calls.step(episode, f"count {episode}-") for episode in episodes}
        assert [text(future) for future in futures.values()] == [f"{episode}-{turn}" for episode in episodes]
    assert [got(calls.end(episode)) for episode in episodes] == [Ended(3.0, {})] * 200


def test_an_environment_that_changes_its_columns_does_not_change_others(calls):
    columns = {"letters": ["a"]}
    futures = [calls.begin(episode, columns) for episode in range(3)]
    assert [got(future) for future in futures] == ["['a', 'z']"] * 3
    assert columns == {"letters": ["a"]}


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("raise KeyError", "error", "step raised KeyError: 'no such word' (game.py, line "),
        ("raise SystemExit", "error", "step raised SystemExit: no such word"),
        ("raise KeyboardInterrupt", "error", "step raised KeyboardInterrupt: no such word"),
        (
            "number",
            "invalid",
            "step must return a quatrain.StepResult(messages, reward, done) or None; got 7",
        ),
        ("flood", "too_long", "at most 1000000 characters; step returned more; cut"),
    ],
)
def test_a_fault_costs_its_episode_alone(calls, spec, action, kind, message):
    begun(calls, 0, 1)
    raised = fault(calls.step(0, action))
    assert raised.kind == kind
    assert str(raised).startswith(f"environment {spec}: ")
    assert message in str(raised)
    assert raised.__traceback__ is None or "game.py" not in str(raised.__traceback__.tb_frame)
    calls.abandon(0)
    assert text(calls.step(1, "count ")) == "1"


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_a_fault_in_reset_and_at_the_end(calls, method, tmp_path):
    closed = tmp_path / "closed"
    future = calls.begin(0, {method: "raise LookupError", "close": f"write {closed}"})
    if method == "get_reward":
        got(future)
        future = calls.end(0)
    assert f"{method} raised LookupError" in str(fault(future))
    calls.abandon(0)
    assert comes(closed.exists)


def test_a_call_that_takes_long_holds_up_no_other(calls, tmp_path):
    release = tmp_path / "release"
    begun(calls, 0, 1)
    slow = calls.step(0, f"wait {release}")
    assert [text(calls.step(1, "count ")) for _ in range(20)] == [str(turn) for turn in range(1, 21)]
    assert not slow.done()
    release.touch()
    assert text(slow) == "waited"


def test_a_call_that_takes_too_long_is_a_fault_and_its_result_is_ignored(make, tmp_path):
    release, closed = tmp_path / "release", tmp_path / "closed"
    calls = make(LIMIT_S)
    begun(calls, 0, close=f"write {closed}")
    begun(calls, 1)
    started = time.monotonic()
    late = calls.step(0, f"wait {release}")
    raised = fault(late)
    assert LIMIT_S <= time.monotonic() - started < LIMIT_S + 2
    assert raised.kind == "timeout"
    assert "step took longer than 0.5 s; rollout.environment_timeout_s sets the limit" in str(raised)
    assert "in _wait" in raised.detail
    calls.abandon(0)
    assert text(calls.step(1, "count ")) == "1"
    assert not closed.exists()
    release.touch()  # the call returns, and only then the environment is closed
    assert comes(closed.exists)
    assert late.exception() is raised
    assert text(calls.step(1, "count ")) == "2"


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_a_reset_and_an_end_that_take_too_long(make, method, tmp_path):
    calls = make(LIMIT_S)
    future = calls.begin(0, {method: f"wait {tmp_path / 'release'}"})
    if method == "get_reward":
        got(future)
        future = calls.end(0)
    raised = fault(future)
    assert raised.kind == "timeout"
    assert f"{'reset' if method == 'reset' else 'end'} took longer than 0.5 s" in str(raised)
    calls.abandon(0)
    (tmp_path / "release").touch()


@pytest.mark.parametrize("close", ["sleep 1000", "raise OSError"])
def test_an_environment_that_does_not_close_is_a_warning(make, close, caplog):
    calls = begun(make(LIMIT_S), 0, close=close)
    with caplog.at_level(logging.INFO):
        assert got(calls.end(0)) == Ended(0.0, {})
        message = "close took longer than 0.5 s" if "sleep" in close else "close raised OSError: no such word"
        assert comes(lambda: message in caplog.text)


def test_abandoned_environments_are_closed(calls, tmp_path):
    files = [tmp_path / str(episode) for episode in range(3)]
    for episode, file in enumerate(files):
        begun(calls, episode, close=f"write {file}")
    running = calls.step(2, f"wait {tmp_path / 'release'}")
    for episode in range(3):
        calls.abandon(episode)
        calls.abandon(episode)
    calls.abandon(99)
    assert comes(lambda: files[0].exists() and files[1].exists())
    assert not files[2].exists()  # its call has not returned
    (tmp_path / "release").touch()
    assert comes(files[2].exists)
    assert text(running) == "waited"


def test_closing_faults_what_has_not_ended(make):
    calls = begun(make(), 0, 1)
    future = calls.step(0, "sleep 1000")
    calls.close()
    calls.close()
    for unfinished in (future, calls.step(1, "count "), calls.begin(2, {})):
        raised = fault(unfinished)
        assert raised.kind == "crash"
        assert "the run has ended its environments" in str(raised)


def test_a_call_begins_from_a_callback_and_an_error_of_a_callback_harms_nothing(calls, caplog):
    seen = []
    begun(calls, 0)

    def again(future):
        seen.append(text(future))
        if len(seen) < 5:
            calls.step(0, "count ").add_done_callback(again)
        raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL):
        calls.step(0, "count ").add_done_callback(again)
        assert comes(lambda: len(seen) == 5)
    assert text(calls.step(0, "count ")) == "6"


# Threads


def test_calls_that_hang_leave_their_places_to_others_whose_time_begins_then(spec, tmp_path):
    release = tmp_path / "release"
    with closing(InThreads(load_environment(spec), LIMIT_S)) as calls:
        begun(calls, *range(MOST_AT_ONCE + 1))
        started = time.monotonic()
        hanging = [calls.step(episode, f"wait {release}") for episode in range(MOST_AT_ONCE)]
        waiting = calls.step(MOST_AT_ONCE, f"sleep {LIMIT_S / 2}")
        assert text(waiting) == "awake"
        assert time.monotonic() - started >= 1.5 * LIMIT_S
        assert {fault(future).kind for future in hanging} == {"timeout"}
        release.touch()


def test_many_threads_that_hang_are_a_warning(spec, tmp_path, caplog):
    with closing(InThreads(load_environment(spec), LIMIT_S)) as calls:
        begun(calls, *range(MOST_AT_ONCE))
        hanging = [calls.step(e, f"wait {tmp_path / 'release'}") for e in range(MOST_AT_ONCE)]
        assert {fault(future).kind for future in hanging} == {"timeout"}
        (tmp_path / "release").touch()
    assert caplog.text.count("32 calls hang in threads, which Python cannot end; with rollout.env") == 1


def test_a_call_that_waits_is_dropped_with_its_episode(spec, tmp_path):
    release = tmp_path / "release"
    with closing(InThreads(load_environment(spec), WAIT_S)) as calls:
        begun(calls, *range(MOST_AT_ONCE + 1), close=f"write {tmp_path / 'closed'}")
        running = [calls.step(episode, f"wait {release}") for episode in range(MOST_AT_ONCE)]
        dropped = calls.step(MOST_AT_ONCE, "count ")
        calls.abandon(MOST_AT_ONCE)
        assert "step: the run has discarded the episode" in str(fault(dropped))
        release.touch()
        assert {text(future) for future in running} == {"waited"}
        assert comes((tmp_path / "closed").exists)


def test_quick_calls_start_no_threads(spec):
    with closing(InThreads(load_environment(spec), WAIT_S)) as calls:
        begun(calls, 0)
        before = set(threading.enumerate())
        for turn in range(1, 200):
            assert text(calls.step(0, "count ")) == str(turn)
        assert len(set(threading.enumerate()) - before) <= 2


KEPT = weakref.WeakSet()


class Kept:
    def __init__(self):
        KEPT.add(self)

    def step(self, completion):
        raise LookupError(completion)


def test_environments_are_forgotten_when_their_episodes_end():
    with closing(InThreads(load_environment(Kept), WAIT_S)) as calls:
        begun(calls, 0, 1)
        raised = fault(calls.step(0, "x"))
        got(calls.end(1))
        calls.abandon(0)
        assert comes(lambda: not KEPT)
        assert raised.kind == "error"


@pytest.mark.parametrize("mode", MODES)
def test_a_system_without_threads_is_a_fault(mode, spec, monkeypatch):
    with closing(calls_of(mode, spec, WAIT_S)) as calls:

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        futures = [calls.begin(episode, {}) for episode in range(3)]
        message = "reset could not be called" if mode == "threads" else "its process could not be started"
        assert f"{message}: can't start new thread" in str(fault(futures[2]))


CLOSED = []


class Closing:
    def step(self, completion):
        return StepResult([], done=True)

    def close(self):
        CLOSED.append(self)


def test_episodes_abandoned_at_any_moment_are_closed_once():
    with closing(InThreads(load_environment(Closing), WAIT_S)) as calls:
        begun(calls, *range(500))
        assert not CLOSED
        for episode in range(500):
            step = calls.step(episode, "")
            if episode % 2:
                got(step)
            calls.abandon(episode)
        assert comes(lambda: len(CLOSED) == 500)
    assert len(set(CLOSED)) == 500


# Worker processes


def test_new_episodes_go_to_the_process_with_the_fewest(workers):
    calls = workers(num_workers=2)
    pids = [text(begun(calls, episode).step(episode, "pid")) for episode in range(4)]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    got(calls.end(1))
    calls.abandon(3)
    assert text(begun(calls, 4).step(4, "pid")) == pids[1]
    assert text(begun(calls, 5).step(5, "pid")) == pids[1]
    assert text(begun(calls, 6).step(6, "pid")) == pids[0]
    assert text(calls.step(6, "platforms")) == "cpu"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("exit 3", "its process exited with status 3"),
        (f"signal {int(signal.SIGSEGV)}", "its process was ended by signal SIGSEGV"),
        ("nonsense", "its process sent a reply that is none"),
    ],
)
def test_a_process_that_dies_ends_its_episodes_and_is_replaced(workers, action, message):
    calls = begun(workers(), 0, 1, 2)
    process = text(calls.step(0, "pid"))
    busy = calls.step(2, "sleep 1000")
    faults = [fault(calls.step(0, action)), fault(busy), fault(calls.step(1, "count "))]
    assert {raised.kind for raised in faults} == {"crash"}
    assert all(f"step: {message}" in str(raised) for raised in faults)
    for episode in range(3):
        calls.abandon(episode)
    assert comes(lambda: is_gone(process))
    assert text(begun(calls, 3).step(3, "pid")) != process


def test_a_process_with_a_call_that_hangs_ends_after_its_other_episodes(workers, tmp_path):
    calls = begun(workers(timeout_s=LIMIT_S), 0, 1)
    process = text(calls.step(1, "pid"))
    assert fault(calls.step(0, "sleep 1000")).kind == "timeout"
    calls.abandon(0)
    assert text(begun(calls, 2, close=f"write {tmp_path / 'closed'}").step(2, "pid")) != process
    assert text(calls.step(1, "pid")) == process
    assert got(calls.end(1)) == Ended(2.0, {})
    assert comes(lambda: is_gone(process))


def test_an_episode_abandoned_in_a_process_that_ends_is_closed_first(workers, tmp_path):
    calls = workers(timeout_s=LIMIT_S)
    begun(calls, 0)
    begun(calls, 1, close=f"write {tmp_path / 'closed'}")
    process = text(calls.step(1, "pid"))
    assert fault(calls.step(0, "sleep 1000")).kind == "timeout"
    calls.abandon(0)
    calls.abandon(1)
    assert comes(lambda: is_gone(process))
    assert (tmp_path / "closed").read_text() == "closed"


@pytest.mark.parametrize("action", ["in_c", f"signal {int(signal.SIGSTOP)}"])
def test_a_process_that_hangs_as_a_whole_is_ended(workers, action):
    calls = begun(workers(timeout_s=LIMIT_S), 0, 1)
    process = text(calls.step(1, "pid"))
    started = time.monotonic()
    raised = fault(calls.step(0, action))
    assert raised.kind == "timeout"
    assert "step: its process did not answer for 1.5 s, and was ended" in str(raised)
    assert time.monotonic() - started < 5.0
    assert fault(calls.step(1, "count ")).kind == "crash"
    assert comes(lambda: is_gone(process))


def test_a_module_may_take_longer_to_load_than_a_call(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(3.0)\n" + GAME)
    with closing(InWorkers(f"{path}:Game", num_workers=1, timeout_s=LIMIT_S, memory_mb=2048)) as calls:
        assert text(begun(calls, 0).step(0, "count ")) == "1"


def test_a_reply_of_no_form_is_a_crash(workers):
    calls = begun(workers(), 0)
    raised = fault(calls.step(0, "forge 3"))  # after the calls that load and begin
    assert raised.kind == "crash"
    assert "step: its process sent a reply that is none" in str(raised)
    assert fault(calls.step(0, "count ")).kind == "crash"


def test_no_process_is_left_when_the_calls_are_closed(workers):
    before = set(threading.enumerate())
    calls = begun(workers(num_workers=2), 0, 1)
    processes = [text(calls.step(episode, "pid")) for episode in range(2)]
    hanging = calls.step(0, "sleep 1000")
    started = time.monotonic()
    calls.close()
    assert time.monotonic() - started < 5.0
    assert all(is_gone(process) for process in processes)
    assert fault(hanging).kind == "crash"
    assert comes(lambda: set(threading.enumerate()) <= before)


def test_a_process_does_not_end_with_the_thread_that_needed_it(workers):
    calls = workers()
    thread = threading.Thread(target=begun, args=(calls, 0))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert text(calls.step(0, "count ")) == "1"


def test_what_environments_print_is_logged_up_to_a_limit(workers, spec, caplog):
    calls = begun(workers(), 0)
    with caplog.at_level(logging.INFO):
        assert text(calls.step(0, "print hello")) == "printed"
        assert f"environment {spec} printed: hello\nto stderr" in caplog.text
        caplog.clear()
        assert text(calls.step(0, "print_much")) == "printed"
    assert " more bytes are left out)" in caplog.text
    assert all(len(record.getMessage()) < LONGEST_OUTPUT + 200 for record in caplog.records)
    assert len(caplog.records) < 20


def test_a_memory_limit(workers):
    calls = begun(workers(memory_mb=512), 0, 1)
    assert "step raised MemoryError" in str(fault(calls.step(0, "memory")))
    assert text(calls.step(1, "count ")) == "1"


def test_an_environment_that_forks_answers_once(workers):
    calls = begun(workers(), 0)
    assert text(calls.step(0, "fork")) == "forked"
    assert text(calls.step(0, "count ")) == "2"


def test_columns_that_cannot_be_copied_are_refused(workers):
    with pytest.raises(ValueError, match=r"can be copied for environments in worker processes .* change the"):
        workers().begin(0, {"lock": threading.Lock()})


class OfThisProgram:
    pass


def test_columns_that_the_worker_cannot_read_are_a_fault(workers, monkeypatch):
    monkeypatch.setattr(OfThisProgram, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OfThisProgram", OfThisProgram, raising=False)
    calls = workers()
    raised = fault(calls.begin(0, {"object": OfThisProgram()}))
    assert "copying the columns raised AttributeError" in str(raised)
    calls.abandon(0)
    assert text(begun(calls, 1).step(1, "count ")) == "1"


def test_an_environment_that_cannot_be_loaded(spec):
    with closing(InWorkers(spec.replace(":Game", ":Gamble"), 1, WAIT_S)) as calls:
        for episode in range(2):
            raised = fault(calls.begin(episode, {}))
            assert raised.kind == "error"
            assert "has no attribute 'Gamble'" in str(raised)
            calls.abandon(episode)


def test_an_environment_of_the_running_program_is_refused():
    with pytest.raises(ValueError, match=r"must be named as .* got '__main__:Game', of the running program"):
        InWorkers("__main__:Game", 1, WAIT_S)


PROGRAM = """
import sys, time
from quatrain.episodes.environment_workers import InWorkers

calls = InWorkers(sys.argv[1], 1, 30.0)
calls.begin(0, {}).result()
print(calls.step(0, "pid").result().messages[0]["content"], flush=True)
time.sleep(1000)
"""


def test_a_process_ends_with_its_program(spec):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, spec]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        process = int(program.stdout.readline())
        assert not is_gone(process)
        program.kill()
    assert comes(lambda: is_gone(process))
