"""What a run shows in a terminal of 80 columns, and what it leaves in its log."""

import os
import pty
import re
import sys
import termios
import threading
import time
from contextlib import contextmanager

import pytest
from runs import small_run

from quatrain.loop.train import train
from quatrain.update.learner import Learner

COLUMNS = 80


@contextmanager
def terminal(monkeypatch):
    """Within the block standard error is a terminal of 80 columns; the list has its lines after that."""
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, COLUMNS))
    sent, lines = [], []

    def read():
        while True:
            try:
                sent.append(os.read(reading, 65536))
            except OSError:  # the other side is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(writing, "w", encoding="utf-8") as stream:
        patch.setenv("TERM", "xterm")
        patch.delenv("COLUMNS", raising=False)
        patch.setattr(sys, "stderr", stream)
        yield lines
    reader.join()
    os.close(reading)
    text = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(sent).decode())  # colours
    text = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "\n", text)
    lines += [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.usefixtures("narrow_model")
def test_nothing_is_wider_than_the_terminal_and_the_log_has_the_steps(tmp_path, monkeypatch):
    plain_step = Learner.step

    def slow_step(self, state, batch):
        """So long that the lines below are drawn while it runs."""
        time.sleep(0.5)
        return plain_step(self, state, batch)

    monkeypatch.setattr(Learner, "step", slow_step)
    options = ("sft.steps=0", "eval.every_steps=1")
    with terminal(monkeypatch) as begun:
        run = train(small_run(tmp_path, "narrow", *options, "run.steps=2")).run
    with terminal(monkeypatch) as resumed:
        train(small_run(tmp_path, "narrow", *options, "run.steps=3"), resume="narrow")
    for line in (*begun, *resumed):
        assert len(line) <= COLUMNS or line.strip().startswith(str(run)), line

    text = "\n".join(begun)
    for step in (1, 2):
        assert re.search(rf"^train {step}/2  reward \d\.\d{{3}}  accuracy \d\.\d{{3}}  ", text, re.MULTILINE)
    assert re.search(r"^train  1/2  ━+  \d:\d\d elapsed  \d:\d\d left$", text, re.MULTILINE)
    assert "evaluation at step 1: accuracy" in text
    end = text[text.index("held-out accuracy") :]
    assert re.findall(rf"{re.escape(str(run))}(\S*)", end) == ["/report.html", "", "/final"]

    log = (run / "run.log").read_text()
    assert re.findall(r"train (\d/\d) \| reward", log) == ["1/2", "2/2", "3/3"]
    assert "train  2/3" in "\n".join(resumed)
    assert "train  0/3" not in "\n".join(resumed)
