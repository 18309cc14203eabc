"""Two processes that meet, differ, fail, die and leave, on this machine's CPU."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from quatrain.run.checkpoint import Checkpointer

MEMBER = Path(__file__).with_name("member.py")
# Of a test that fails; none waits that long.
TIMEOUT_S = 120


@dataclass
class Ended:
    """How a process ended."""

    status: int
    out: str
    err: str


def run_together(*commands, folders=None):
    """The running processes of `commands`, at one address, each in its one of `folders`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    running = [
        subprocess.Popen(
            [
                *(sys.executable, *command, "--coordinator", address),
                *("--num-processes", str(len(commands)), "--process-id", str(process)),
            ],
            env=environ,
            cwd=folders and folders[process],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, command in enumerate(commands)
    ]
    return running


def ended(running):
    """How each ended; a process that hangs fails the test."""
    try:
        outputs = [popen.communicate(timeout=TIMEOUT_S) for popen in running]
    finally:
        for popen in running:
            popen.kill()
    return [Ended(popen.returncode, *output) for popen, output in zip(running, outputs)]


def members(mode, *options):
    return ended(run_together(*[(str(MEMBER), mode, *options)] * 2))


def met(process):
    """What a member says of its meeting; other lines are those of JAX's collectives."""
    return json.loads(next(line for line in process.out.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def together():
    return members("leave")


def test_objects_are_gathered_in_process_order(together):
    for process in together:
        assert met(process)["gathered"] == [{"id": 0, "text": ""}, {"id": 1, "text": "é" * 500}]


def test_what_the_main_process_decides_is_unchanged_in_every_process(together):
    expected = ["é" * 2000, -0.0, 0.1 + 0.2, float("nan"), float("-inf"), 5e-324, 2**70, True, None, ""]
    for process in together:
        assert list(map(repr, met(process)["decided"])) == list(map(repr, expected))


def test_differing_values_are_named_in_every_process(together):
    for process in together:
        assert met(process)["differing"] == (
            'all processes need the same data set: prompts.jsonl is "hash0" in process 0, "hash1" in process '
            "1; start all with the same"
        )


def test_devices_are_those_of_both(together):
    assert [met(process)["devices"] for process in together] == [[2, 4, 2]] * 2
    assert [met(process)["main"] for process in together] == [True, False]


def test_both_leave_with_0(together):
    assert [(process.status, process.out.splitlines()[-1]) for process in together] == [(0, "left")] * 2


@pytest.mark.parametrize(
    ("mode", "status", "news"),
    [
        ("dies", 9, "process 1 ended without an error message"),
        pytest.param(
            *("killed at once", -signal.SIGKILL, "process 1 ended without an error message"),
            marks=pytest.mark.slow,
        ),
        ("fails", 5, "process 1 failed: out of luck"),
    ],
)
def test_the_other_ends_when_one_does_and_names_it(mode, status, news):
    first, last = members(mode)
    assert (first.status, last.status) == (3, status)
    assert news in first.err
    assert "left" not in first.out


def test_both_end_when_one_cannot_write_its_part_of_a_checkpoint(tmp_path):
    first, last = members("cannot write", f"--directory={tmp_path}")
    assert (first.status, last.status) == (3, 5)
    assert f"process 1 failed: the checkpoint of step 2 cannot be written to {tmp_path}" in first.err
    assert Checkpointer(tmp_path).steps() == [1]


def test_both_get_the_judgements_that_were_asked_for_once(tmp_path):
    """Catches a judge that each process asks for itself, whose scores differ, or that each writes down."""
    main, other = [met(each)["judged"] for each in members("judges", f"--directory={tmp_path}")]
    for of_main, of_other in zip(main, other, strict=True):
        assert of_main["values"] == of_other["values"] == ["[0.75, 0.25, nan]", "[0.25, 0.75]"]
        assert of_main["counts"] == of_other["counts"]
        assert of_main["asked"] == ["one", "a", "three"]
        assert (of_main["kept"], of_other["kept"]) == (2, 0)
    assert [each["asked"] for each in other] == [[], ["one", "a", "three"]]


@pytest.mark.slow
def test_the_other_ends_when_one_no_longer_answers_and_names_it():
    waiting, stopped = run_together((str(MEMBER), "hangs"), (str(MEMBER), "hangs"))
    try:
        _, err = waiting.communicate(timeout=TIMEOUT_S)
    finally:
        waiting.kill()
        stopped.kill()
        stopped.communicate()
    assert waiting.returncode == -signal.SIGABRT
    assert "unhealthy (stopped sending heartbeats):\n1\n" in err


def quatrain(tmp_path, *arguments):
    return ("-m", "quatrain", "train", "--set", f"run.dir={tmp_path}", *arguments)


def test_processes_with_different_configurations_end_before_anything_starts(tmp_path):
    both = ended(
        run_together(
            quatrain(tmp_path, "--set", "seed=1", "--set", "rollout.n=4"),
            quatrain(tmp_path, "--set", "seed=2", "--set", "rollout.n=4"),
        )
    )
    # The slower one may hear of it from the other.
    assert {process.status for process in both} <= {2, 3}
    for process in both:
        assert (
            "all processes need the same configuration: seed is 1 in process 0, 2 in process 1; start all "
            "with the same"
        ) in process.err
        assert "Traceback" not in process.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # `data/test_table.py` has what processes compare
def test_processes_that_read_different_data_end_before_anything_is_trained(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, gold in zip(folders, (4, 5), strict=True):
        folder.mkdir()
        rows = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "2 + 3 =", "answer": f"{gold}"}]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = quatrain(
        *(tmp_path / "runs", "--set", "data.train=sums.jsonl", "--set", "data.batch_size=2"),
        *("--set", "sft.steps=0"),
    )
    both = ended(run_together(command, command, folders=folders))
    assert {process.status for process in both} <= {2, 3}
    for process in both:
        assert "all processes need the same data set: sums.jsonl, the column `answer` is " in process.err
        assert "Traceback" not in process.err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_coordinator_that_is_not_reached_is_one_line(tmp_path):
    command = quatrain(tmp_path, "--set", "distributed.start_timeout_s=1")
    done = subprocess.run(
        [
            sys.executable,
            *command,
            "--coordinator",
            "127.0.0.1:1",
            "--num-processes",
            "2",
            "--process-id",
            "1",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: process 1 could not reach the coordinator at 127.0.0.1:1 within 1 s (Connection refused);"
    )
