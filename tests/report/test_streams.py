import os
import subprocess
import sys

import pytest

from quatrain.report.streams import guarded_output

PRINTS = (
    "import sys\nfrom quatrain.report.streams import guarded_output\n"
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


def test_text_for_a_full_disk_is_dropped():
    code = (
        "import sys\nfrom quatrain.report.streams import guarded_output\n"
        "with guarded_output(str):\n    print('x', flush=True)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_errors_of_a_stream_are_raised(monkeypatch):
    monkeypatch.setattr(sys.stdout, "write", lambda text: (_ for _ in ()).throw(OSError(9, "Bad file")))
    with guarded_output(str), pytest.raises(OSError, match="Bad file"):
        print("x")


def test_a_stream_is_otherwise_as_it_was(capsys):
    before = sys.stdout
    with guarded_output(str):
        print("a", end="")
        sys.stdout.writelines(["b", "c"])
        assert sys.stdout.encoding == before.encoding
        assert not sys.stdout.isatty()
    assert sys.stdout is before
    assert capsys.readouterr().out == "abc"
