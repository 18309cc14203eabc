"""Signals that stop a run: SIGTERM, SIGHUP and SIGINT end it where its state is whole, a second one at once.

`loop/open_run.py` opens a `Stop` for a run and says where it may end. `launch.py` uses `Signals` alone. In a
run of several processes, `rendezvous.py` carries the messages of the `Agreement` on where all of them stop.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, NoReturn

from quatrain.cluster.start_thread import start_thread

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
UNHANDLED = (signal.SIG_DFL, signal.default_int_handler)
REPEATED_S = 1.0
"""Signals this soon after the first are the same request: schedulers and `timeout` send it to a process and
to its group."""
DEAF_S = 2.0
"""Seconds after a signal without Python in the run's thread, after which another thread saves."""
ADVICE_S = 1.0
"""Seconds in which a second signal finds out how to go on; a file system may hang."""
STDERR = 2
END = b"\0"
"""Ends the thread that reads signals; no signal has this number."""
SHOW_CURSOR = "\x1b[?25h"

logger = logging.getLogger(__name__)


class Stopped(KeyboardInterrupt):
    """A run was stopped by a signal, after a checkpoint of its last finished step if it had one.

    A KeyboardInterrupt, because what lets an interrupt through must let every such signal through.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number
        self.advice = ""
        """What was saved and how to go on; `loop/open_run.py` sets it."""

    @property
    def status(self) -> int:
        """Exit status of the process: 143, 129 or 130."""
        return 128 + self.number

    def __str__(self) -> str:
        return "; ".join(filter(None, (signal.Signals(self.number).name, self.advice)))


class Signals:
    """While it is open, the first of SIGNALS calls `on_first`, and a later one ends the process.

    `on_first`, and `on_second` before the end, are called with the signal's number in a thread, because the
    main thread may be compiling or waiting for a device; what `on_second` returns is printed. `in_main` is
    called for each signal in the main thread, as soon as that runs Python again.
    Signals that are ignored (`nohup`) or handled by others stay as they are. Outside the main thread, where
    Python allows no handlers, nothing is changed.
    """

    def __init__(
        self,
        on_first: Callable[[int], None],
        *,
        on_second: Callable[[int], str | None] = lambda number: None,
        in_main: Callable[[int], None] = lambda number: None,
    ):
        self._on_first, self._on_second, self._in_main = on_first, on_second, in_main
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Signals:
        global _open
        ours = [number for number in SIGNALS if signal.getsignal(number) in UNHANDLED]
        if not ours or threading.current_thread() is not threading.main_thread():
            return self
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # Python calls a handler only where its main thread runs Python; the pipe is written to at once.
        self._thread = start_thread(self._watch, reading, name="signals")
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, frame: self._in_main(number)) for number in ours
        }
        _open = self
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is None:
            return
        self.restore(self._wakeup_before)
        os.write(self._writing, END)  # forked children may keep the pipe open
        self._thread.join()
        os.close(self._writing)

    def restore(self, wakeup: int = -1) -> None:
        """Set the handlers of before; a child process that is forked calls it too."""
        global _open
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        _open = None

    def _watch(self, reading: int) -> None:
        first: float | None = None
        while (received := os.read(reading, 1)) != END:
            number, now = received[0], time.monotonic()
            if number not in SIGNALS:
                continue
            if first is None:
                first = now
                # In a thread of its own: what it prints may have to wait, and a second signal may not.
                start_thread(self._on_first, number, name="first signal")
            elif now - first >= REPEATED_S:
                self._end(number)
        os.close(reading)

    def _end(self, number: int) -> None:
        advice = self._on_second(number)
        name = signal.Signals(number).name
        ended = "; ".join(filter(None, (f"ended at once by a second signal, {name}", advice))) + "\n"
        with suppress(OSError, ValueError):
            if select.select([], [STDERR], [], 0)[1]:  # else writing would wait for a reader
                os.write(STDERR, ((SHOW_CURSOR if os.isatty(STDERR) else "") + ended).encode())
        os._exit(128 + number)


_open: Signals | None = None
_forking = threading.local()


def _block() -> None:
    _forking.blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock(in_child: bool) -> None:
    if in_child and _open is not None:
        _open.restore()  # a forked child would write its own signals into the pipe of its parent
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked_before)


# Blocked meanwhile: a signal between the fork and `restore` would be one for the parent's handler.
os.register_at_fork(
    before=_block, after_in_parent=partial(_unblock, False), after_in_child=partial(_unblock, True)
)


_leave: Callable[[Stopped], NoReturn] | None = None


@contextmanager
def leaving(leave: Callable[[Stopped], NoReturn]) -> Iterator[None]:
    """Within the block a run may end the process, which is its own, by `leave`, called in another thread.

    It does where its thread hears no signal: the exception `Stopped` would come when that has compiled.
    """
    global _leave
    before, _leave = _leave, leave
    try:
        yield
    finally:
        _leave = before


class Stop:
    """Raises `Stopped` in the thread that opened it, after one of SIGNALS, where the run may end.

    That is at each `safe_point`, and in a run of one process anywhere within `interruptible`. There another
    thread calls `save` if the run's own has not heard the signal after DEAF_S seconds, because it compiles or
    waits for a device; and if the process is the run's (`leaving`), also `conclude`, and ends it. The run's
    thread does nothing meanwhile: where it comes back to Python, it waits. `agreement` is that of a run of
    several processes, which all end at the same safe point.
    """

    def __init__(self, agreement: Agreement | None = None):
        self.advice: Callable[[], str] = lambda: ""
        """What was saved and how to go on, for a second signal."""
        self.save: Callable[[], None] = lambda: None
        """Saves the last finished step."""
        self.conclude: Callable[[Stopped], None] = lambda stopped: None
        """Closes what the run has open."""
        self._agreement = agreement
        self._signals = Signals(self._ask, on_second=self._how_to_go_on, in_main=self._note)
        self._owner = threading.current_thread()
        self._number: int | None = None
        self._whole: Callable[[], bool] | None = None
        """In a block that may end anywhere: whether the state of the last finished step is whole."""
        self._context = copy_context()
        self._heard = threading.Event()
        self._deciding = threading.RLock()
        """Held while the run's thread or another decides that it ends the run."""

    def __enter__(self) -> Stop:
        self._signals.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._signals.__exit__(*raised)

    def safe_point(self) -> None:
        """The state of the last finished step is whole here, and every process of the run comes by.

        Does nothing in other threads than that of the run, such as the rollout's.
        """
        if threading.current_thread() is not self._owner:
            return
        if self._agreement is not None:
            self._agreement.safe_point()
        elif self._number is not None:
            raise Stopped(self._number)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The block may end anywhere: it takes long and leaves the state and all files as they are.

        Both ends are safe points. With several processes, only these and those within the block are.
        """
        with self.interruptible_while(lambda: True):
            yield
        self.safe_point()

    @contextmanager
    def interruptible_while(self, whole: Callable[[], bool]) -> Iterator[None]:
        """The block may end wherever `whole()`: the state and all files are as they were at its begin.

        Its begin is a safe point, its end is none.
        """
        try:
            self._context = copy_context()  # with the run's log
            self._whole = whole if self._agreement is None else None
            self.safe_point()
            yield
        finally:
            self._whole = None

    def _ask(self, number: int) -> None:
        if self._agreement is not None:
            return self._agreement.ask(number)
        _announce(number)
        if not self._heard.wait(DEAF_S):
            self._context.run(self._end_beside, number)
        return None

    def _note(self, number: int) -> None:
        self._heard.set()
        with self._deciding:
            self._number = self._number or number
            if self._whole is not None and self._whole():
                self._whole = None
                raise Stopped(self._number)

    def _end_beside(self, number: int) -> None:
        """Saves, and ends the process if it is the run's, beside a thread that hears no signal."""
        with self._deciding:
            if self._heard.is_set() or self._whole is None or not self._whole():
                return
            try:
                self.save()
                if _leave is not None:
                    stopped = Stopped(number)
                    self.conclude(stopped)
                    _leave(stopped)
            except Exception:  # the run's own thread will save
                logger.exception("the run could not be stopped while its thread computes")

    def _how_to_go_on(self, number: int) -> str | None:
        found: list[str] = []
        start_thread(lambda: found.append(self.advice()), name="advice").join(ADVICE_S)
        return found[0] if found else None


def _announce(number: int) -> None:
    logger.warning(
        "%s: the run stops as soon as its state is whole, and saves it; a second signal ends it at once",
        signal.Signals(number).name,
    )


class Agreement:
    """Finds the safe point at which all processes of a run stop, without cost while nobody asks.

    Every process passes the same safe points in the same order. Once one has asked, process 0 asks each how
    many it has passed, and from its answer on a process waits at the next one. The greatest of these numbers
    is the last safe point that is passed: none has passed more, and each gets so far without the others.
    `send` sends a message to all `peers`: those of process 0 are all others, that of the others is process 0.
    """

    def __init__(self, *, leads: bool, peers: int, send: Callable[[Mapping[str, Any]], None]):
        self._leads, self._peers, self._send = leads, peers, send
        self._changed = threading.Condition()
        self._passed = 0
        self._number: int | None = None
        self._last: int | None = None
        self._answers: dict[int, int] = {}

    def safe_point(self) -> None:
        """Raises Stopped where all processes stop."""
        # Where somebody has asked, nobody passes another safe point until the last one is known: a process
        # that went on could be beyond it.
        with self._changed:
            self._changed.wait_for(lambda: self._number is None or self._last is not None)
            if self._number is not None and self._passed == self._last:
                raise Stopped(self._number)
            self._passed += 1

    def ask(self, number: int) -> None:
        """Ask that all processes stop because of signal `number`."""
        # Process 0 alone begins, so that two that ask at once are one request.
        if self._leads:
            self._hold(number)
        else:
            self._send({"stop": number})

    def receive(self, process: int, message: Mapping[str, Any]) -> bool:
        """Handles a message of `process`; False if it is no part of an agreement."""
        if "stop" in message:
            self._hold(message["stop"])
        elif "passed" in message:
            self._answer(process, message["passed"])
        elif "last" in message:
            self._decide(message["last"])
        else:
            return False
        return True

    def _hold(self, number: int) -> None:
        with self._changed:
            if self._number is not None:
                return
            self._number, passed = number, self._passed
        _announce(number)
        self._send({"stop": number} if self._leads else {"passed": passed})
        if self._leads:
            self._answer(0, passed)

    def _answer(self, process: int, passed: int) -> None:
        with self._changed:
            self._answers[process] = passed
            complete = len(self._answers) > self._peers
            last = max(self._answers.values())
        if complete:
            self._send({"last": last})
            self._decide(last)

    def _decide(self, last: int) -> None:
        with self._changed:
            self._last = last
            self._changed.notify_all()
