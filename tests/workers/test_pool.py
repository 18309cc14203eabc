import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from contextvars import ContextVar, copy_context
from pathlib import Path

import pytest

from quatrain.workers.loop_thread import LoopThread
from quatrain.workers.pool import Failure, Pool
from quatrain.workers.worker_process import LONGEST_OUTPUT, WorkerProcess

FUNCTIONS = """
import os, signal, threading, time

def process(): return os.getpid()
def leaves(): os._exit(7)
def raises(): raise KeyError("x")
def sleeps(): time.sleep(1000)
def prints(size): print("y"); print("x" * size); return size
def ends_later():
    threading.Timer(0.05, os._exit, (0,)).start()
def stops_later():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
def hangs_later():  # the thread holds the interpreter's lock
    threading.Timer(0.05, in_c).start()
def takes(data): return len(data)
def an_object(): return object()
def gets(number): os.kill(os.getpid(), number); time.sleep(0.05); return "alive"
def child_gets(number):
    child = __import__("subprocess").Popen(["sleep", "1000"])
    child.send_signal(number)
    return child.wait()
def forked_child_gets(number):
    child = os.fork()
    if not child:
        time.sleep(1000)
    time.sleep(0.1)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def starts_programs(then="nothing"):
    # A program in a session of its own, and one whose parent has ended; `then` the process may end.
    import subprocess
    orphan = subprocess.run(
        ["sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], start_new_session=True, capture_output=True, text=True
    )
    own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    programs = [own.pid, int(orphan.stdout)]
    with open("programs", "w") as file:
        file.write(" ".join(map(str, programs)))
    if then == "hangs": time.sleep(1000)
    if then == "leaves": os._exit(7)
    if then == "is killed": os.kill(os.getpid(), signal.SIGKILL)
    if then == "kills its group": os.killpg(0, signal.SIGKILL)
    if then == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
    return programs
def starts_a_child(): return __import__("subprocess").Popen(["sleep", "1000"]).pid
def in_c(): __import__("re").match(r"(a+)+$", "a" * 40 + "b")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(file):
    with closing(Pool("function", 1, memory_mb=512)) as pool:
        yield pool


def call(pool, spec, timeout_s=5.0, **arguments):
    return pool.submit(str(spec), pickle.dumps(arguments), timeout_s).result(20)


def ended(process, within_s=5.0):
    """Whether the process ends; a zombie counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_process_is_kept_after_an_exception_and_replaced_after_an_exit(pool, file):
    first = call(pool, f"{file}:process")
    raised = call(pool, f"{file}:raises")
    assert raised.kind == "error"
    assert raised.detail.endswith("KeyError: 'x'")
    assert call(pool, f"{file}:process") == first
    assert call(pool, f"{file}:leaves") == Failure("exit", "its process exited with status 7")
    assert call(pool, f"{file}:process") != first


@pytest.mark.parametrize("name", ["ends_later", "stops_later"])
def test_a_process_that_ended_or_stopped_between_two_calls_is_replaced_without_a_failure(pool, file, name):
    first = call(pool, f"{file}:process")
    assert call(pool, f"{file}:{name}") is None
    time.sleep(0.2)
    second = call(pool, f"{file}:process")
    assert isinstance(second, int)
    assert second != first
    assert ended(first)


def test_a_process_that_does_not_read_its_request_takes_too_long(pool, file):
    assert call(pool, f"{file}:takes", data=b"") == 0
    assert call(pool, f"{file}:hangs_later") is None
    time.sleep(0.2)
    assert call(pool, f"{file}:takes", 0.5, data=b"x" * 2**24).kind == "timeout"
    assert call(pool, f"{file}:takes", data=b"x" * 2**24) == 2**24


def test_a_value_that_json_does_not_have_is_an_error(pool, file):
    assert "not JSON serializable" in call(pool, f"{file}:an_object").detail


def test_the_time_limit_does_not_include_the_import(pool, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(0.6)\ndef one(): return 1\n")
    assert call(pool, f"{slow}:one", 0.3) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_stop_a_run_end_no_worker_but_its_children(pool, file, number):
    assert call(pool, f"{file}:gets", number=int(number)) == "alive"
    assert call(pool, f"{file}:child_gets", number=int(number)) == -number
    assert call(pool, f"{file}:forked_child_gets", number=int(number)) == -number


def test_output_is_passed_on_up_to_a_limit(file):
    printed = []
    with closing(Pool("function", 1, on_output=lambda spec, text: printed.append((spec, text)))) as pool:
        call(pool, f"{file}:prints", size=3)
        call(pool, f"{file}:prints", size=LONGEST_OUTPUT + 5)
    assert printed[0] == (f"{file}:prints", "y\nxxx")
    assert printed[1][1] == "y\n(16390 more bytes are left out)"


def test_where_a_function_hangs_is_printed(file):
    printed = []
    with closing(Pool("function", 1, on_output=lambda spec, text: printed.append(text))) as pool:
        assert call(pool, f"{file}:in_c", 1.0).kind == "timeout"
    assert "in in_c" in printed[0]


def test_children_of_a_process_end_with_it(pool, file):
    child = call(pool, f"{file}:starts_a_child")
    assert not ended(child, 0.1)
    pool.close()
    assert ended(child)


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        ("hangs", "timeout"),
        ("leaves", "exit"),
        ("is killed", "crash"),
        ("kills its group", "crash"),
        ("crashes", "crash"),
    ],
)
def test_programs_with_sessions_of_their_own_end_with_the_process(tmp_path, file, monkeypatch, then, kind):
    """A process group does not have them, and a parent that has ended no longer leads to them."""
    monkeypatch.chdir(tmp_path)
    with closing(Pool("function", 1)) as pool:
        failure = call(pool, f"{file}:starts_programs", 1.5, then=then)
        assert failure.kind == kind
        if kind == "exit":
            assert failure.detail == "its process exited with status 7"
        for program in Path("programs").read_text().split():
            assert ended(program)


def test_programs_go_on_between_calls_and_end_with_the_pool(tmp_path, file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(Pool("function", 1)) as pool:
        programs = call(pool, f"{file}:starts_programs")
        assert call(pool, f"{file}:takes", data=b"x") == 1
        assert not any(ended(program, 0.05) for program in programs)
    assert all(ended(program, 0.1) for program in programs)


def test_programs_end_with_a_host_that_is_let_end(tmp_path, file, monkeypatch):
    """Processes of environments, tools and agents are not killed but let end: they leave by themselves."""
    monkeypatch.chdir(tmp_path)
    ends = threading.Event()

    def starts_a_process():
        settings = Pool("function", 1)._settings
        process = WorkerProcess(thread.loop, "a host", settings, lambda what, text: None)
        programs = process.call("call", 9.0, 0.0, f"{file}:starts_programs", pickle.dumps({}))
        programs.add_done_callback(lambda _: process.let_end(9.0))

        def look():
            thread.loop.call_later(0.02, look if process.failure is None else ends.set)

        look()

    thread = LoopThread("a-test", "closed", lambda: None)
    with closing(thread):
        thread.do(starts_a_process)
        assert ends.wait(20)
    assert all(ended(program, 0.1) for program in Path("programs").read_text().split())


def test_closing_ends_calls_that_run_and_refuses_others(file):
    pool = Pool("function", 1)
    process = call(pool, f"{file}:process")
    hanging = pool.submit(f"{file}:sleeps", pickle.dumps({}), 1000.0)
    waiting = pool.submit(f"{file}:sleeps", pickle.dumps({}), 1000.0)
    time.sleep(0.1)
    began = time.perf_counter()
    pool.close()
    assert time.perf_counter() - began < 2.0
    assert hanging.result(0).kind == "crash"
    assert waiting.cancelled()
    assert ended(process, 0.1)
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.submit(f"{file}:process", pickle.dumps({}), 1.0)
    pool.close()


def test_many_threads_may_call_at_once(file):
    with closing(Pool("function", 3)) as pool:
        results = []

        def work():
            results.extend(call(pool, f"{file}:takes", data=b"x" * size) for size in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == sorted([*range(20)] * 4)


PROGRAM = """
import pickle, signal, sys
from quatrain.workers.pool import Pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
pool = Pool("function", 1)
print(pool.submit(sys.argv[1] + ":process", pickle.dumps({}), 5.0).result(), flush=True)
print(*pool.submit(sys.argv[1] + ":starts_programs", pickle.dumps({}), 5.0).result(), flush=True)
pool.submit(sys.argv[1] + ":in_c", pickle.dumps({}), 20.0)
print("hangs", flush=True)
try:
    __import__("time").sleep(1000)
finally:
    pool.close()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_program_however_it_ends(file, tmp_path, number):
    """With what they have started, also where nobody is left that could end it."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    with program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        programs = program.stdout.readline().split()
        assert program.stdout.readline() == "hangs\n"
        time.sleep(0.2)
        os.killpg(program.pid, number)  # as a terminal does on Ctrl-C
        _, printed = program.communicate(timeout=20)
    assert ended(worker)
    assert all(ended(each) for each in programs)
    assert "worker_script.py" not in printed
    assert printed.count("Traceback") == (number == signal.SIGINT)


def test_what_a_call_prints_is_its_callers_also_after_waiting(file):
    """With one worker, the second call waits; what it prints belongs to the run that asked for it."""
    run, printed = ContextVar("run", default=""), []

    def ask(name, pool):
        run.set(name)
        return pool.submit(f"{file}:prints", {"size": 1}, 30.0)

    with closing(Pool("function", 1, on_output=lambda spec, text: printed.append((run.get(), text)))) as pool:
        calls = [copy_context().run(ask, name, pool) for name in ("first", "second")]
        assert [call.result(30.0) for call in calls] == [1, 1]
    assert [name for name, text in printed] == ["first", "second"]
