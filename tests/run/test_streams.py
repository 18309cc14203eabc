import errno
import io
import logging
import os
import pty
import subprocess
import sys
import termios

import pytest

from quatrain.run.streams import ConsoleHandler, _Guarded, console_messages, fitted, guarded_output

PRINTS = (
    "import sys\nfrom quatrain.run.streams import guarded_output\n"
    "with guarded_output(str):\n"
    "    for i in range(20000):\n        print('line', i, file=getattr(sys, sys.argv[1]))\n"
    "    open(sys.argv[2], 'w').write('went on')\n"
)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_does_not_end_the_writer(stream, tmp_path):
    reading, writing = os.pipe()
    done = tmp_path / "done"
    command = [sys.executable, "-c", PRINTS, stream, str(done)]
    process = subprocess.Popen(command, **{stream: writing})
    os.close(writing)
    assert os.read(reading, 1) == b"l"
    os.close(reading)
    assert process.wait(60) == 0
    assert done.read_text() == "went on"


def test_printed_text_is_redacted(capsys):
    with guarded_output(lambda text: text.replace("hunter2", "***")):
        assert sys.stdout.write("a hunter2") == 9
        print("b", "hunter2", file=sys.stderr)
        sys.stderr.writelines(["c hun", "ter2"])
    assert capsys.readouterr() == ("a ***", "b ***\nc ***")


TELLS_LOSS = (
    "import sys\nfrom quatrain.run.streams import guarded_output\n"
    "with guarded_output(str) as lost:\n    print('x', flush=sys.argv[1] == 'flushed')\n"
    "    print('goes on', file=sys.stderr)\n"
    "sys.exit(lost[0].errno if lost else 0)\n"
)


@pytest.mark.parametrize("when", ["flushed", "at the end"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_text_for_a_full_disk_is_dropped_and_the_loss_is_told(when, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", TELLS_LOSS, when],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (errno.ENOSPC, "goes on\n")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_take_what_is_printed_and_leave_their_numbers_to_no_other_file(closed, tmp_path):
    code = (
        "import os, sys\nfrom quatrain.run.streams import guarded_output\n"
        "with guarded_output(str) as lost:\n    print('x')\n    print('x', file=sys.stderr)\n"
        "    number = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "    os.write(number, str(number).encode())\n    os.system('echo child; echo child >&2')\n"
        "assert not lost\n"
    )
    made = tmp_path / "made"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert int(made.read_text()) > 2
    assert (done.stdout, done.stderr) == (
        "" if ">&-" in closed.replace("2>&-", "") else "x\nchild\n",
        "" if "2>&-" in closed else "x\nchild\n",
    )


def test_other_errors_of_a_stream_are_told_too(monkeypatch):
    monkeypatch.setattr(sys.stdout, "write", lambda text: (_ for _ in ()).throw(OSError(9, "Bad file")))
    monkeypatch.setattr(_Guarded, "discard", lambda stream: None)
    with guarded_output(str) as lost:
        sys.stdout.write("x")
    assert [error.errno for error in lost] == [9]


def test_a_stream_is_otherwise_as_it_was(capsys):
    before = sys.stdout
    with guarded_output(str):
        print("a", end="")
        sys.stdout.writelines(["b", "c"])
        assert sys.stdout.encoding == before.encoding
        assert not sys.stdout.isatty()
    assert sys.stdout is before
    assert capsys.readouterr().out == "abc"


def test_messages_are_broken_between_words_at_the_width_of_a_terminal(capsys):
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, 30))
    with os.fdopen(writing, "w") as terminal, os.fdopen(reading, "rb"):
        text = "go on, as was said before, with:\n  quatrain train --resume /a/folder/of/a/run"
        assert fitted(text, terminal) == text.replace("before, with", "before,\n  with")
        path = "/a/folder/that/is/wider/than/it"
        assert fitted(f"the trained model: {path}", terminal) == f"the trained model:\n  {path}"
        termios.tcsetwinsize(writing, (0, 0))
        assert fitted("x " * 39 + "x yz", terminal) == "x " * 39 + "x\n  yz"
    assert fitted(text * 9, sys.stderr) == text * 9


def test_warnings_that_no_run_logs_look_like_those_of_a_run(capsys):
    with console_messages(lambda text: text.replace("hunter2", "***")):
        logging.getLogger("quatrain.data").warning("a %s", "hunter2")
        logging.getLogger("quatrain.data").info("not printed")
        prints_itself = logging.getLogger("hub")
        prints_itself.addHandler(logging.StreamHandler(io.StringIO()))
        logging.getLogger("hub.http").warning("printed by its own library")
        prints_itself.handlers.clear()
    assert capsys.readouterr().err == "warning: a ***\n"
    assert not any(isinstance(handler, ConsoleHandler) for handler in logging.getLogger().handlers)
