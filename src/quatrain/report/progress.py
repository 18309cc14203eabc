"""Live progress on stderr: phase, step, reward or loss, accuracy, tokens per second, time left, stage.

The training loop updates it. In a terminal each step leaves a line, and below them lines are redrawn with the
time left and with the stage that runs within the step. If stderr is a file, a pipe or a CI log, plain lines
are printed, without control characters, and in every stage at least one in half a minute. The log of a run,
`run.log`, has the line of each step. While JAX compiles a program, the display says so, and which of how many
it is, where an earlier run of the same shapes has counted them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from quatrain.cluster.processes import is_main_process
from quatrain.cluster.start_thread import start_thread
from quatrain.parallel.compilation_cache import ProgramCount
from quatrain.parallel.compilations import (
    compile_seconds,
    compiling_for_s,
    num_compilations,
    watching_compilations,
)
from quatrain.report.start_up import clock, remind

logger = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 2.0
"""Minimum seconds between two plain lines of a phase; its first and last step are always printed."""
QUIET_INTERVAL_S = 30.0
"""Seconds without a plain line after which one is printed within a step."""
_BAR_CELLS = 16


@dataclass
class _State:
    """The values shown in the progress line."""

    phase: str = "train"
    total: int = 0
    step: int = 0
    stage: str = ""
    detail: str = ""
    beside: str = ""
    reward: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    started: float = 0.0
    first: int | None = None
    """Number of steps done before the first call of `step` in this phase; not 0 in a resumed run."""
    compiled_before_s: float = 0.0
    """Seconds that the process had spent compiling when the phase began."""
    computed_s: float = 0.0
    """Seconds of the phase until its last step ended, without those of compiling."""
    told_compiling: bool = False
    """Whether a plain line has said that this stage compiles."""
    told_stages: set[str] = field(default_factory=set)
    """The stages, without counts, of which a plain line has said before the first step's end that they
    compile."""


class Progress:
    """Shows the progress of a run; a context manager. Prints only in the main process.

    `first`: number of steps that an earlier part of the run has done. `programs`: how many programs an
    earlier run compiled; at its end, this one leaves its own count.

    ```python
    with Progress(total_steps=100) as progress:
        progress.phase("warm start", total=20)
        ...
        progress.phase("train")                 # total: that of the run
        progress.stage("rollout")
        progress.detail("12/32 completions")    # of the stage
        progress.step(1, reward=0.4, tokens_per_s=900)
    ```
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first: int | None = None,
        programs: ProgramCount | None = None,
        console: Console | None = None,
    ):
        self._total_steps = total_steps
        self._programs, self._programs_before = programs, num_compilations()
        self._told_of_next_run = False
        self._console = console or Console(stderr=True)
        in_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = is_main_process() and in_terminal
        self._plain = is_main_process() and not in_terminal
        self._began = time.monotonic()
        self._open = ExitStack()
        self._printing = threading.RLock()
        self.phase("train", first=first)

    def __enter__(self) -> Progress:
        self._open.enter_context(watching_compilations(self._begins_to_compile))
        if self._plain:
            self._open.enter_context(_every_second(self._break_silence))
        if self._live:
            live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # output to a piped stdout must not go to stderr
            )
            self._open.enter_context(live)
            self._open.callback(self._clear_stage)  # the last picture, which stays, has none
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing more; may be called again, and in another thread."""
        self._open.close()
        if self._programs is not None:
            self._programs.keep(num_compilations() - self._programs_before)

    def _clear_stage(self) -> None:
        self._state.stage = self._state.detail = self._state.beside = ""

    def phase(self, name: str, total: int | None = None, *, first: int | None = None) -> None:
        """Begin a phase of `total` steps (default: those of the run).

        `first`: number of steps already done; default: one less than the first step passed to `step`.
        """
        self._state = _State(
            name,
            total or self._total_steps,
            first or 0,
            started=time.monotonic(),
            first=first,
            compiled_before_s=compile_seconds(),
        )
        self._printed_at = float("-inf")
        self._quiet_since = self._state.started

    def stage(self, text: str) -> None:
        """Show the current stage of the step: rollout, reward, update, checkpoint …"""
        state = self._state
        state.stage, state.detail = text, ""
        state.told_compiling = False

    def detail(self, text: str) -> None:
        """Show the progress within the stage, until the next stage or step; may be called often."""
        self._state.detail = text
        self._break_silence()

    def beside(self, text: str) -> None:
        """Show what runs beside the stages of the step, in another thread; called often, from there."""
        self._state.beside = text
        self._break_silence()

    def step(
        self,
        step: int,
        *,
        reward: float | None = None,
        loss: float | None = None,
        accuracy: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Show that step `step` of the phase (counted from 1) is done. What is omitted keeps its value.

        `accuracy`: of the latest evaluation. The line of the step is logged too, only for the file of a log.
        """
        state = self._state
        if state.first is None:
            state.first = step - 1
        state.step, state.detail = step, ""
        state.reward = state.reward if reward is None else reward
        state.loss = state.loss if loss is None else loss
        state.accuracy = state.accuracy if accuracy is None else accuracy
        state.tokens_per_s = state.tokens_per_s if tokens_per_s is None else tokens_per_s
        state.computed_s = self._computed_s()
        logger.info(" | ".join(self._facts()), extra={"only_in_file": True})
        if self._live:
            line = Text("  ".join(self._facts(left=False)))
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        now = time.monotonic()
        if self._plain and (now - self._printed_at >= PLAIN_INTERVAL_S or step == state.total):
            self._printed_at = now
            self._print_plain()

    def _break_silence(self) -> None:
        """Without a terminal, print a line if none was printed for QUIET_INTERVAL_S seconds."""
        with self._printing:
            if self._plain and time.monotonic() - self._quiet_since >= QUIET_INTERVAL_S:
                self._print_plain(*self._doing())

    def _begins_to_compile(self) -> None:
        """Say in a plain line, once in a stage, that the stage compiles: that may take long.

        At once in the first step, of which each stage may take minutes; later after a silence, because a
        short stage may compile a small program.
        """
        state, silent_s = self._state, time.monotonic() - self._quiet_since
        name = state.stage.rstrip("0123456789/ ")
        is_first = state.step == (state.first or 0) and name not in state.told_stages
        if self._plain and not state.told_compiling and (is_first or silent_s >= PLAIN_INTERVAL_S):
            state.told_compiling = True
            state.told_stages.add(name)
            told = self._program() + ("" if self._told_of_next_run else self._of_next_run())
            self._told_of_next_run = True
            self._print_plain(": ".join(filter(None, (state.stage, told))))

    def _program(self) -> str:
        """Which program is compiled, counted from the begin of the display."""
        number = num_compilations() - self._programs_before + 1
        former = None if self._programs is None else self._programs.former
        return f"compiling program {number}" + (f" of about {former}" if former and number <= former else "")

    def _of_next_run(self) -> str:
        """What the next run will do, where no earlier one has compiled the same."""
        count = self._programs
        reads = count is not None and count.next_run_reads and count.former is None
        return " (the next run reads it from the cache)" if reads else ""

    def _print_plain(self, *more: str) -> None:
        with self._printing:
            self._quiet_since = time.monotonic()
            print(" | ".join((*self._facts(), *more)), file=self._console.file, flush=True)

    def _render(self) -> Group:
        """Progress and time left, the current stage, and what runs beside it, each on one line."""
        state = self._state
        filled = round(_BAR_CELLS * min(1.0, state.step / max(1, state.total)))
        line = Text("  ").join(
            (
                Text(state.phase, "bold"),
                Text(f"{state.step}/{state.total}"),
                Text.assemble(("━" * filled, "cyan"), ("━" * (_BAR_CELLS - filled), "bright_black")),
                *map(Text, self._times()),
            )
        )
        lines = [line, *(Text(doing, "cyan") for doing in self._doing())]
        for each in lines:
            each.no_wrap, each.overflow = True, "ellipsis"
        return Group(*lines)

    def _doing(self) -> list[str]:
        """What runs in the stage, and beside it."""
        state, compiling = self._state, compiling_for_s()
        detail = state.detail
        if compiling is not None:
            detail = f"{self._program()}, {clock(compiling)}{self._of_next_run()}"
        return [text for text in (": ".join(filter(None, (state.stage, detail))), state.beside) if text]

    def _facts(self, *, left: bool = True) -> list[str]:
        state = self._state
        facts = [
            f"{state.phase} {state.step}/{state.total}",
            None if state.reward is None else f"reward {state.reward:.3f}",
            None if state.loss is None else f"loss {state.loss:.4f}",
            None if state.accuracy is None else f"accuracy {state.accuracy:.3f}",
            None if state.tokens_per_s is None else f"{state.tokens_per_s:,.0f} tokens/s",
        ]
        return [*filter(None, facts), *self._times()[: 1 + left]]

    def _times(self) -> list[str]:
        """The time since the run began and, between the phase's first step and its last, what is left of it.

        One clock for all phases: a warm start, the steps and the last evaluation do not begin at 0 each.
        """
        state, elapsed = self._state, f"{clock(time.monotonic() - self._began)} elapsed"
        done, remaining = state.step - (state.first or 0), state.total - state.step
        if state.first is None or done < 1 or remaining < 1:
            return [elapsed]
        # At the mean pace of the steps done, without compiling: the programs of the first steps serve all. It
        # counts down within a step, for as long as the pace gives that step.
        pace = state.computed_s / done
        left = max(pace * remaining - (self._computed_s() - state.computed_s), pace * (remaining - 1))
        return [elapsed, f"{clock(left)} left"]

    def _computed_s(self) -> float:
        """Seconds of the phase without those of compiling, a program that is being compiled included."""
        state = self._state
        compiling = compile_seconds() - state.compiled_before_s
        return max(time.monotonic() - state.started - compiling, 0.0)


@contextmanager
def waiting() -> Iterator[None]:
    """Say that the stage of the start-up goes on, after each QUIET_INTERVAL_S seconds of silence."""
    with _every_second(partial(remind, QUIET_INTERVAL_S)):
        yield


@contextmanager
def _every_second(call: Callable[[], None]) -> Iterator[None]:
    """Calls `call` about once a second, in another thread, until the block ends."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(1.0):
            call()

    thread = start_thread(repeat, name="progress")
    try:
        yield
    finally:
        done.set()
        thread.join()
