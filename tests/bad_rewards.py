"""Reward functions that fail on the completion `bad` in every way known, and give others their length.

`FAILING` names the kind of each failure, `REFUSED` what an error that ends the run says, `HARMLESS` functions
that do odd things and return rewards. Used by tests/reward/test_bad_rewards.py; imports nothing of quatrain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

BAD = "bad"
LONG_S = 1000.0


def _rewards(completions, fail):
    return [fail() if completion == BAD else float(len(completion)) for completion in completions]


class _Value:
    """A number whose conversion does something else."""

    def __init__(self, act):
        self._act = act

    def __float__(self):
        return self._act()


def _raise(error):
    raise error


# Functions that take too long.
def spins(completions, **_):
    def fail():
        while True:
            pass

    return _rewards(completions, fail)


def spins_in_c(completions, **_):
    return _rewards(completions, lambda: re.match(r"(a+)+$", "a" * 40 + "b"))


def sleeps(completions, **_):
    return _rewards(completions, lambda: time.sleep(LONG_S))


def waits_for_a_lock(completions, **_):
    def fail():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    return _rewards(completions, fail)


def stops_itself(completions, **_):
    return _rewards(completions, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def ignores_signals(completions, **_):
    def fail():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(LONG_S)

    return _rewards(completions, fail)


def catches_everything(completions, **_):
    def fail():
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(LONG_S)

    return _rewards(completions, fail)


def prints_forever(completions, **_):
    def fail():
        while True:
            print("x" * 10000)

    return _rewards(completions, fail)


def waits_for_a_program(completions, **_):
    return _rewards(completions, lambda: subprocess.run(["sleep", str(LONG_S)], check=True))


def forks_and_waits(completions, **_):
    def fail():
        os.fork()
        time.sleep(LONG_S)

    return _rewards(completions, fail)


def a_value_that_sleeps(completions, **_):
    return _rewards(completions, lambda: _Value(lambda: time.sleep(LONG_S)))


def values_without_end(completions, **_):
    class Endless:
        def __len__(self):
            return len(completions)

        def __iter__(self):
            while True:
                time.sleep(0.01)
                yield 1.0

    return Endless() if BAD in completions else _rewards(completions, None)


def an_error_whose_text_sleeps(completions, **_):
    class Slow(Exception):
        def __str__(self):
            time.sleep(LONG_S)

    return _rewards(completions, lambda: _raise(Slow()))


# Functions whose process is ended by a signal.
def segmentation_fault(completions, **_):
    return _rewards(completions, lambda: ctypes.string_at(0))


def aborts(completions, **_):
    return _rewards(completions, os.abort)


def kills_itself(completions, **_):
    return _rewards(completions, lambda: os.kill(os.getpid(), signal.SIGKILL))


def terminates_itself(completions, **_):
    return _rewards(completions, lambda: os.kill(os.getpid(), signal.SIGUSR1))


def kills_its_group(completions, **_):
    return _rewards(completions, lambda: os.killpg(0, signal.SIGKILL))


def sets_an_alarm(completions, **_):
    def fail():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(LONG_S)

    return _rewards(completions, fail)


def limits_its_processor_time(completions, **_):
    def fail():
        signal.setitimer(signal.ITIMER_PROF, 0.05)
        while True:
            pass

    return _rewards(completions, fail)


def writes_into_every_file(completions, **_):
    def fail():
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, b"[] no reply\n")
        time.sleep(LONG_S)

    return _rewards(completions, fail)


# Functions that need too much memory.
def memory_bomb(completions, **_):
    def fail():
        kept = []
        while True:
            kept.append(bytearray(10**7))

    return _rewards(completions, fail)


def memory_bomb_of_objects(completions, **_):
    def fail():
        kept = [()]
        while True:
            kept = kept + kept

    return _rewards(completions, fail)


def memory_bomb_in_numpy(completions, **_):
    import numpy as np

    return _rewards(completions, lambda: np.ones(10**12).sum())


def one_huge_object(completions, **_):
    return _rewards(completions, lambda: len(b"x" * 10**13))


def raises_memory_error(completions, **_):
    return _rewards(completions, lambda: _raise(MemoryError()))


# Functions that leave.
def os_exit(completions, **_):
    return _rewards(completions, lambda: os._exit(0))


def os_exit_with_a_status(completions, **_):
    return _rewards(completions, lambda: os._exit(3))


def sys_exit(completions, **_):
    return _rewards(completions, sys.exit)


def sys_exit_with_a_text(completions, **_):
    return _rewards(completions, lambda: sys.exit("a text"))


def quits(completions, **_):
    return _rewards(completions, quit)


def exits_from_a_thread(completions, **_):
    def fail():
        threading.Thread(target=os._exit, args=(0,)).start()
        time.sleep(LONG_S)

    return _rewards(completions, fail)


def becomes_another_program(completions, **_):
    return _rewards(completions, lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]))


def closes_every_file(completions, **_):
    return _rewards(completions, lambda: os.closerange(0, 1000))


# Functions that raise an exception, or return values that are not finite.
def raises(completions, **_):
    return _rewards(completions, lambda: 1 / 0)


def raises_a_base_exception(completions, **_):
    return _rewards(completions, lambda: _raise(BaseException("base")))


def raises_an_interrupt(completions, **_):
    return _rewards(completions, lambda: _raise(KeyboardInterrupt()))


def raises_generator_exit(completions, **_):
    return _rewards(completions, lambda: _raise(GeneratorExit()))


def raises_an_error_without_text(completions, **_):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    return _rewards(completions, lambda: _raise(Mute()))


def raises_an_error_with_a_long_text(completions, **_):
    return _rewards(completions, lambda: _raise(ValueError("x" * 10**7)))


def raises_a_group(completions, **_):
    return _rewards(completions, lambda: _raise(ExceptionGroup("two", [ValueError(), KeyError()])))


def recurses(completions, **_):
    def fail():
        return fail()

    return _rewards(completions, fail)


def asks_a_question(completions, **_):
    return _rewards(completions, input)


def imports_what_is_missing(completions, **_):
    return _rewards(completions, lambda: __import__("no_such_module"))


def prints_half_a_surrogate_pair(completions, **_):
    return _rewards(completions, lambda: print("\udc80".encode()))


def a_value_that_raises(completions, **_):
    return _rewards(completions, lambda: _Value(lambda: _raise(RuntimeError("no number"))))


def values_that_raise(completions, **_):
    class Raising(list):
        def __iter__(self):
            raise RuntimeError("no values")

    values = _rewards(completions, lambda: 0.0)
    return Raising(values) if BAD in completions else values


def not_a_number(completions, **_):
    return _rewards(completions, lambda: float("nan"))


def infinite(completions, **_):
    return _rewards(completions, lambda: float("-inf"))


def too_large_for_float32(completions, **_):
    return _rewards(completions, lambda: 1e39)


FAILING = {
    **dict.fromkeys(
        (
            "spins",
            "spins_in_c",
            "sleeps",
            "waits_for_a_lock",
            "stops_itself",
            "ignores_signals",
            "catches_everything",
            "prints_forever",
            "waits_for_a_program",
            "forks_and_waits",
            "a_value_that_sleeps",
            "values_without_end",
            "an_error_whose_text_sleeps",
        ),
        "timeout",
    ),
    **dict.fromkeys(
        (
            "segmentation_fault",
            "aborts",
            "kills_itself",
            "terminates_itself",
            "kills_its_group",
            "sets_an_alarm",
            "limits_its_processor_time",
            "writes_into_every_file",
        ),
        "crash",
    ),
    **dict.fromkeys(
        (
            "memory_bomb",
            "memory_bomb_of_objects",
            "memory_bomb_in_numpy",
            "one_huge_object",
            "raises_memory_error",
        ),
        "memory",
    ),
    **dict.fromkeys(
        (
            "os_exit",
            "os_exit_with_a_status",
            "sys_exit",
            "sys_exit_with_a_text",
            "quits",
            "exits_from_a_thread",
            "becomes_another_program",
            "closes_every_file",
        ),
        "exit",
    ),
    **dict.fromkeys(
        (
            "raises",
            "raises_a_base_exception",
            "raises_an_interrupt",
            "raises_generator_exit",
            "raises_an_error_without_text",
            "raises_an_error_with_a_long_text",
            "raises_a_group",
            "recurses",
            "asks_a_question",
            "imports_what_is_missing",
            "prints_half_a_surrogate_pair",
            "a_value_that_raises",
            "values_that_raise",
            "not_a_number",
            "infinite",
            "too_large_for_float32",
        ),
        "error",
    ),
}
"""Function -> kind of its failure on the completion `bad`."""


def nothing(completions, **_):
    return None


def a_text(completions, **_):
    return "1" * len(completions)


def a_set(completions, **_):
    return set(range(len(completions)))


def a_mapping(completions, **_):
    return dict.fromkeys(range(len(completions)), 1.0)


def a_generator(completions, **_):
    return (1.0 for _ in completions)


def a_number(completions, **_):
    return 1.0


def too_few(completions, **_):
    return [1.0] * (len(completions) - 1)


def too_many(completions, **_):
    return [1.0] * (len(completions) + 1)


def texts(completions, **_):
    return ["1.0"] * len(completions)


def lists(completions, **_):
    return [[1.0]] * len(completions)


def complex_numbers(completions, **_):
    return [1j] * len(completions)


def objects_without_text(completions, **_):
    class Mute:
        def __repr__(self):
            raise RuntimeError

    return [Mute()] * len(completions)


REFUSED = {
    "nothing": "returned NoneType",
    "a_text": "returned str",
    "a_set": "returned set",
    "a_mapping": "returned dict",
    "a_generator": "returned generator",
    "a_number": "returned float",
    "too_few": "expected 1, got 0",
    "too_many": "expected 1, got 2",
    "texts": "a value str '1.0'",
    "lists": "a value list",
    "complex_numbers": "a value complex",
    "objects_without_text": "a value Mute",
}
"""Function -> what the error says that ends the run, for calls on one sample."""


def leaves_the_folder(completions, **_):
    os.chdir("/")
    return _rewards(completions, lambda: 3.0)


def closes_its_output(completions, **_):
    sys.stdout.close()
    sys.stderr.close()
    return _rewards(completions, lambda: 3.0)


def forks(completions, **_):
    os.fork()
    return _rewards(completions, lambda: 3.0)


def forks_and_leaves(completions, **_):
    if os.fork() == 0:
        sys.exit()
    return _rewards(completions, lambda: 3.0)


def changes_its_arguments(completions, **columns):
    rewards = _rewards(completions, lambda: 3.0)
    completions.clear()
    for values in columns.values():
        values.clear()
    return rewards


def leaves_an_alarm(completions, **_):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    return _rewards(completions, lambda: 3.0)


def prints_bytes(completions, **_):
    os.write(1, b"\xff\xfe\n")
    return _rewards(completions, lambda: 3.0)


def prints_much(completions, **_):
    print("x" * 10**6)
    return _rewards(completions, lambda: 3.0)


def an_array(completions, **_):
    import numpy as np

    return np.array(_rewards(completions, lambda: 3.0), np.float16)


HARMLESS = (
    "leaves_the_folder",
    "closes_its_output",
    "forks",
    "forks_and_leaves",
    "changes_its_arguments",
    "leaves_an_alarm",
    "prints_bytes",
    "prints_much",
    "an_array",
)
"""Functions that give `bad` 3 and fail nowhere."""
