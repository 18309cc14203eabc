import io
import re
import threading
import time
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from quatrain.report import progress as module
from quatrain.report import start_up
from quatrain.report.progress import Progress


def _wait_for(text, out):
    """Until the display, which is drawn a few times a second, shows `text`."""
    until = time.perf_counter() + 20
    while text not in out.getvalue():
        assert time.perf_counter() < until, out.getvalue()
        time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    # Its thread runs by the real clock, and would look at this one in the middle of a test's step.
    monkeypatch.setattr(module, "_every_second", lambda call: nullcontext())
    return now


def test_a_pipe_gets_plain_lines(clock):
    out = io.StringIO()
    with Progress(4, console=Console(file=out, width=20)) as progress:
        progress.phase("warm start", total=2)
        for step in (1, 2):
            progress.stage("update")
            clock[0] += 30
            progress.step(step, tokens_per_s=1234.5)
        progress.phase("train")
        for step in range(1, 5):
            clock[0] += 1800
            progress.step(step, reward=step / 4, accuracy=0.5 if step == 2 else None)
    assert out.getvalue().splitlines() == [
        "warm start 1/2 | 1,234 tokens/s | 0:30 elapsed | 0:30 left",
        "warm start 2/2 | 1,234 tokens/s | 1:00 elapsed",
        "train 1/4 | reward 0.250 | 31:00 elapsed | 1:30:00 left",
        "train 2/4 | reward 0.500 | accuracy 0.500 | 1:01:00 elapsed | 1:00:00 left",
        "train 3/4 | reward 0.750 | accuracy 0.500 | 1:31:00 elapsed | 30:00 left",
        "train 4/4 | reward 1.000 | accuracy 0.500 | 2:01:00 elapsed",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", out.getvalue())


def test_fast_steps_do_not_flood_a_pipe(clock):
    out = io.StringIO()
    with Progress(100, console=Console(file=out)) as progress:
        for step in range(1, 101):
            clock[0] += 0.1
            progress.step(step)
    steps = [int(re.match(r"train (\d+)/100", line)[1]) for line in out.getvalue().splitlines()]
    assert (steps[0], steps[-1]) == (1, 100)
    assert 4 <= len(steps) <= 7


def test_time_left_of_a_resumed_run_counts_only_its_own_steps(clock):
    out = io.StringIO()
    with Progress(100, console=Console(file=out)) as progress:
        clock[0] += 10
        progress.step(91)
    assert out.getvalue() == "train 91/100 | 0:10 elapsed | 1:30 left\n"


def test_a_long_step_says_how_far_it_is(clock):
    """Told every second what is decoded: a line after half a minute of silence, none in short steps."""
    out = io.StringIO()
    with Progress(3, console=Console(file=out)) as progress:
        progress.phase("train")
        for step in (1, 2):
            progress.stage("rollout")
            for done in range(40):
                clock[0] += 1
                progress.detail(f"{done}/40 completions")
            progress.stage("update")
            clock[0] += 25
            progress.step(step)
        progress.stage("export")
        progress.detail("")
    assert out.getvalue().splitlines() == [
        "train 0/3 | 0:30 elapsed | rollout: 29/40 completions",
        "train 1/3 | 1:05 elapsed | 2:10 left",
        "train 1/3 | 1:35 elapsed | 1:40 left | rollout: 29/40 completions",
        "train 2/3 | 2:10 elapsed | 1:05 left",
    ]


def test_a_detail_ends_with_its_stage():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with Progress(3, console=console) as progress:
        progress.stage("rollout")
        progress.detail("7/8 completions")
        _wait_for("rollout: 7/8 completions", out)
        progress.stage("reward")
        _wait_for("reward", out)
        progress.step(1)
    assert "completions" not in out.getvalue().split("reward")[1]


def test_a_terminal_gets_live_lines():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with Progress(10, console=console) as progress:
        progress.phase("train")
        progress.stage("evaluate")
        _wait_for("evaluate", out)
        progress.step(5, reward=1.5, accuracy=0.25, tokens_per_s=900)
    text = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", out.getvalue())
    assert "train  5/10" in text
    assert "reward 1.500  accuracy 0.250  900 tokens/s" in text
    assert "evaluate" not in text.split("train  5/10")[-1]
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_a_dumb_terminal_gets_plain_lines():
    out = io.StringIO()
    with Progress(1, console=Console(file=out, force_terminal=True, _environ={"TERM": "dumb"})) as progress:
        progress.step(1)
    assert "\x1b" not in out.getvalue()


def test_the_display_ends_with_an_error():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, _environ={"TERM": "xterm"})
    with pytest.raises(KeyError), Progress(1, console=console):
        raise KeyError
    assert out.getvalue().endswith("\x1b[?25h")


def test_other_processes_show_nothing(monkeypatch):
    monkeypatch.setattr(module, "is_main_process", lambda: False)
    out = io.StringIO()
    with Progress(1, console=Console(file=out, force_terminal=True)) as progress:
        progress.phase("train")
        progress.step(1)
    assert out.getvalue() == ""


@pytest.fixture
def compiler(monkeypatch):
    """compiler(programs=2, seconds=30.0, current_s=None) sets what this process has compiled so far."""
    state = {"programs": 0, "seconds": 0.0, "current_s": None}
    monkeypatch.setattr(module, "num_compilations", lambda: state["programs"])
    monkeypatch.setattr(module, "compile_seconds", lambda: state["seconds"])
    monkeypatch.setattr(module, "compiling_for_s", lambda: state["current_s"])
    return lambda **changes: state.update(changes)


def test_time_left_is_estimated_without_the_seconds_of_compiling(clock, compiler):
    out = io.StringIO()
    compiler(seconds=1000.0)
    with Progress(11, console=Console(file=out)) as progress:
        progress.phase("train")
        clock[0] += 50
        compiler(seconds=1040.0)
        progress.step(1)
        clock[0] += 10
        progress.step(2)
    assert out.getvalue().splitlines() == [
        "train 1/11 | 0:50 elapsed | 1:40 left",
        "train 2/11 | 1:00 elapsed | 1:30 left",
    ]


def test_time_left_falls_within_a_step_and_rests_while_a_program_is_compiled(clock, compiler):
    with Progress(4, console=Console(file=io.StringIO())) as progress:
        clock[0] += 20
        progress.step(1)

        def left():
            return progress._times()[1]

        assert left() == "1:00 left"
        clock[0] += 5
        assert left() == "0:55 left"
        clock[0] += 300
        compiler(seconds=300.0, current_s=300.0)
        assert left() == "0:55 left"
        clock[0] += 100
        assert left() == "0:40 left"  # no less than the steps after this one take


def test_a_resumed_run_is_shown_where_it_is(clock):
    out = io.StringIO()
    with Progress(100, first=90, console=Console(file=out)) as progress:
        progress._print_plain()
        progress.phase("train", first=89)
        clock[0] += 10
        progress.step(90)
    assert out.getvalue().splitlines() == [
        "train 90/100 | 0:00 elapsed",
        "train 90/100 | 0:10 elapsed | 1:40 left",
    ]


def test_each_step_has_a_line_in_the_log(clock, caplog):
    with caplog.at_level("INFO", "quatrain"), Progress(100, console=Console(file=io.StringIO())) as progress:
        for step in (1, 2):
            clock[0] += 0.1  # of which a pipe gets one line
            progress.step(step, reward=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "train 1/100 | reward 0.500 | 0:00 elapsed | 0:10 left",
        "train 2/100 | reward 0.500 | 0:00 elapsed | 0:10 left",
    ]
    assert all(record.only_in_file for record in caplog.records)


def test_lines_of_a_narrow_terminal_are_cut_with_a_mark():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=24, _environ={"TERM": "xterm"})
    with Progress(3, console=console) as progress:
        progress.stage("rollout")
        progress.detail("12/16 completions, 900 tokens/s")
        _wait_for("rollout: 12/16 completi…", out)
        progress.step(1, reward=0.5, accuracy=0.25)
    lines = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").split("\n")
    assert "train 1/3  reward 0.500…" in lines
    assert max(map(len, lines)) == 24


class Counted:
    """A `ProgramCount` of an earlier run."""

    def __init__(self, former, next_run_reads=True):
        self.former, self.next_run_reads, self.kept = former, next_run_reads, []

    def keep(self, count):
        self.kept.append(count)


def test_a_terminal_shows_which_program_is_compiled(compiler):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    compiler(programs=7)
    with Progress(3, console=console) as progress:
        progress.stage("update")
        compiler(programs=8, current_s=65.0)
        _wait_for("update: compiling program 2, 1:05", out)
        compiler(programs=9, current_s=None)
        progress.detail("3/4 micro-batches")
        _wait_for("update: 3/4 micro-batches", out)


def test_the_count_of_an_earlier_run_says_how_many_programs_there_are(clock, compiler):
    """And the first run says that the next one reads them, unless nothing is kept."""

    def told(programs):
        out = io.StringIO()
        compiler(programs=7)
        with Progress(3, console=Console(file=out), programs=programs) as progress:
            progress.stage("update")
            clock[0] += 5
            compiler(programs=19, current_s=0.0)
            progress._begins_to_compile()
            compiler(current_s=None)
        return out.getvalue().rpartition("update: ")[2].strip()

    known = Counted(16)
    assert told(known) == "compiling program 13 of about 16"
    assert known.kept == [12]
    assert told(Counted(None)) == "compiling program 13 (the next run reads it from the cache)"
    assert told(Counted(None, next_run_reads=False)) == told(None) == "compiling program 13"
    assert told(Counted(12)) == "compiling program 13"  # more than then


def test_plain_lines_say_once_that_the_next_run_reads_the_programs(clock):
    out = io.StringIO()
    with Progress(3, console=Console(file=out), programs=Counted(None)) as progress:
        for stage in ("rollout", "update"):
            progress.stage(stage)
            clock[0] += 5
            progress._begins_to_compile()
    assert out.getvalue().count("the next run") == 1


def test_a_plain_line_says_once_of_a_stage_that_it_compiles(clock, compiler):
    out = io.StringIO()
    with Progress(3, console=Console(file=out)) as progress:
        progress.phase("train")
        for stage in ("rollout", "update"):
            progress.stage(stage)
            for _ in range(3):
                clock[0] += 5
                compiler(current_s=0.0)
                progress._begins_to_compile()
                compiler(current_s=None)
        progress.step(1)
        progress.stage("rollout")
        clock[0] += 1
        progress._begins_to_compile()
    assert out.getvalue().splitlines() == [
        "train 0/3 | 0:05 elapsed | rollout: compiling program 1",
        "train 0/3 | 0:20 elapsed | update: compiling program 1",
        "train 1/3 | 0:30 elapsed | 1:00 left",
    ]


def test_the_first_step_says_at_once_that_it_compiles(clock):
    """A program that begins to compile at the begin of a stage was silent for half a minute."""
    out = io.StringIO()
    with Progress(3, console=Console(file=out)) as progress:
        progress.phase("train")
        progress._begins_to_compile()
        for done in range(3):
            progress.stage(f"evaluation {done}/8")
            progress._begins_to_compile()
        progress.step(1)
        progress.stage("update")
        progress._begins_to_compile()
    assert out.getvalue().splitlines() == [
        "train 0/3 | 0:00 elapsed | compiling program 1",
        "train 0/3 | 0:00 elapsed | evaluation 0/8: compiling program 1",
        "train 1/3 | 0:00 elapsed | 0:00 left",
    ]


def test_a_compilation_is_told_to_the_display_that_is_open(monkeypatch):
    told = []
    monkeypatch.setattr(Progress, "_begins_to_compile", lambda self: told.append(1))
    x = jnp.ones(7)
    with Progress(1, console=Console(file=io.StringIO())):
        jax.jit(lambda x: x * 3.25)(x)
    jax.jit(lambda x: x * 4.25)(x)
    assert told == [1]


def test_a_silent_stage_says_that_it_goes_on(clock, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_every_second", _by_hand(calls))
    out = io.StringIO()
    with Progress(3, console=Console(file=out)) as progress:
        progress.stage("update")
        for _ in range(75):
            clock[0] += 1
            calls[0]()
    assert out.getvalue().splitlines() == [
        "train 0/3 | 0:30 elapsed | update",
        "train 0/3 | 1:00 elapsed | update",
    ]


def test_the_start_says_its_stages_and_that_one_goes_on(clock, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(module, "_every_second", _by_hand(calls))
    start_up.stage("nobody has begun")
    with start_up.starting(), start_up.starting(), module.waiting():
        start_up.stage("tokenizer")
        clock[0] += 3
        start_up.stage("weights")
        for _ in range(65):
            clock[0] += 1
            calls[0]()
    with start_up.starting(speaks=False):
        start_up.stage("of another process")
    assert capsys.readouterr().err.splitlines() == [
        "start | tokenizer | 0:00 elapsed",
        "start | weights | 0:03 elapsed",
        "start | weights | 0:33 elapsed",
        "start | weights | 1:03 elapsed",
    ]


def _by_hand(calls):
    @contextmanager
    def every_second(call):
        calls.append(call)
        yield

    return every_second


def test_calls_come_about_once_a_second():
    told = threading.Event()
    with module._every_second(told.set):
        assert told.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_in_a_terminal_every_step_keeps_its_line():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with Progress(3, console=console) as progress:
        progress.phase("train")
        for step in (1, 2, 3):
            progress.step(step, reward=step / 4)
    text = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", out.getvalue())
    for step in (1, 2, 3):
        assert f"train {step}/3  reward {step / 4:.3f}" in text
