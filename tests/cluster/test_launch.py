import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from quatrain.cli import main as cli
from quatrain.cluster import launch as launch_module
from quatrain.cluster.launch import launch

# What a process finds out about its own place, before the options that `launch` adds.
ECHO = "import os, sys; print(sys.argv[1:], os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'])"
PLACE = "import sys, time, os, signal; me = int(sys.argv[sys.argv.index('--process-id') + 1])\n"


def run(code, capfd, *, processes=2, grace_s=5.0, **options):
    """Exit status, stdout and stderr of `code` launched as `train`."""
    program = (sys.executable, "-c", code)
    options = {"devices_per_process": 3, "program": program, "grace_s": grace_s, **options}
    status = launch(["train", "c.yaml"], processes=processes, **options)
    out, err = capfd.readouterr()
    return status, sorted(out.splitlines()), err.splitlines()


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_each_process_is_told_its_place_and_its_lines_bear_its_id(capfd, monkeypatch, port):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    status, out, err = run(ECHO, capfd, port=port)
    told = (
        "['train', 'c.yaml', '--coordinator', '127.0.0.1:{}', '--num-processes', '2', '--process-id', '{}']"
    )
    flags = "--xla_a=1 --xla_force_host_platform_device_count=3 cpu"
    assert (status, err) == (0, [])
    assert out == [f"[{i}] {told.format(port, i)} {flags}" for i in range(2)]


def test_the_processes_share_a_secret_that_is_new_each_time(capfd):
    secrets = []
    for _ in range(2):
        _, out, _ = run("import os; print(os.environ['QUATRAIN_CLUSTER_TOKEN'])", capfd)
        assert out[0].removeprefix("[0] ") == out[1].removeprefix("[1] ")
        secrets.append(out[0])
    assert len(secrets[0]) > 40
    assert secrets[0] != secrets[1]


def test_stderr_stays_stderr_and_broken_text_is_shown(capfd):
    code = "import sys; sys.stderr.buffer.write(b'a\\xff\\nno newline'); print('é')"
    status, out, err = run(code, capfd, processes=1)
    assert (status, out, err) == (0, ["[0] é"], ["[0] a�", "[0] no newline"])


def test_lines_that_only_tell_of_connections_are_left_out(capfd):
    line = "[Gloo] Rank 1 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7"
    kept = ["7", "", f"accuracy 0.5{line}", "[Gloo] Rank 3 failed"]
    pieces = [f"[Gloo] Rank {line}", line.removeprefix("[Gloo] Rank "), "ranks is : 7"]  # of several threads
    numbers = [line.removesuffix("7") * 3 + line, "77", "", "7"]
    text = "\n".join([*numbers, line, *kept, *pieces, line, ""])
    status, out, err = run(f"print({text!r}, end='')", capfd, processes=1)
    assert (status, err) == (0, [])
    assert out == sorted(f"[0] {line}" for line in kept)


def test_a_free_port_is_chosen(capfd):
    code = "import sys; print(sys.argv[sys.argv.index('--coordinator') + 1])"
    status, out, _ = run(code, capfd)
    addresses = {line.split()[1] for line in out}
    assert status == 0
    assert len(addresses) == 1
    assert int(addresses.pop().removeprefix("127.0.0.1:")) > 0


def test_the_first_failure_ends_the_others_and_is_the_exit_status(capfd):
    code = PLACE + "print('here', flush=True)\nif me == 1: sys.exit(7)\ntime.sleep(600)"
    status, out, err = run(code, capfd, processes=3)
    assert (status, out) == (7, ["[0] here", "[1] here", "[2] here"])
    assert err == ["error: process 1 exited with 7; the others were ended"]


def test_a_process_that_ended_because_another_did_is_not_to_blame(capfd):
    code = PLACE + "sys.exit(3) if me == 0 else (time.sleep(0.5), sys.exit(9))"
    status, _, err = run(code, capfd)
    assert (status, err) == (9, ["error: process 1 exited with 9; the others were ended"])


@pytest.mark.parametrize("status", [3, 134])
def test_a_process_that_no_longer_answers_is_to_blame(capfd, monkeypatch, status):
    """Process 1 stands still. The other finds that out, and ends with the status of one that follows."""
    monkeypatch.setattr(launch_module, "FAILURE_MESSAGE_S", 0.3)
    code = PLACE + f"sys.exit({status}) if me == 0 else os.kill(os.getpid(), signal.SIGSTOP)"
    found, _, err = run(code, capfd, grace_s=0.5)
    assert (found, err) == (status, ["error: process 1 no longer answered; the others were ended"])


def stopped(first, capfd, monkeypatch, tmp_path):
    """Exit status and last error line of two processes that are stopped by SIGTERM, which the second ignores.

    `first` is the code of process 0, run before it waits.
    """
    monkeypatch.setattr(launch_module, "FAILURE_MESSAGE_S", 0.3)
    ready = str(tmp_path / "ready")
    code = PLACE + (
        "if me == 0:\n"
        f"    {first}\n"
        f"    open({ready!r}, 'w').close()\n"
        "else:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    while not os.path.exists({ready!r}): time.sleep(0.01)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    status, _, err = run(code, capfd, grace_s=0.5)
    return status, err[-1]


def test_a_stop_ends_when_a_process_fails_and_another_goes_on(capfd, monkeypatch, tmp_path):
    first = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    found = stopped(first, capfd, monkeypatch, tmp_path)
    assert found == (5, "error: process 0 exited with 5; the others were ended")


def test_a_stop_ends_when_it_kills_a_process_and_another_goes_on(capfd, monkeypatch, tmp_path):
    """As at the start of a process, before it handles signals: the others cannot go on without it."""
    began = time.monotonic()
    status, line = stopped("pass", capfd, monkeypatch, tmp_path)
    assert (status, line) == (143, "SIGTERM: all processes are stopped; a second signal ends them at once")
    assert time.monotonic() - began < 30


def test_a_signal_is_128_and_its_number(capfd):
    code = PLACE + "os.kill(os.getpid(), signal.SIGKILL) if me == 0 else time.sleep(600)"
    status, _, err = run(code, capfd)
    assert (status, err) == (137, ["error: process 0 exited with 137; the others were ended"])


def test_what_ignores_sigterm_is_killed_with_its_own_children(capfd, tmp_path):
    code = PLACE + (
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"ready = {str(tmp_path / 'ready')!r}\n"
        "if me == 0:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    print(child.pid, flush=True)\n"
        "    open(ready, 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(ready): time.sleep(0.01)\n"
        "sys.exit(4)\n"
    )
    status, out, _ = run(code, capfd, grace_s=0.5)
    grandchild = int(out[0].removeprefix("[0] "))
    assert status == 4
    assert not is_running(grandchild)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def launcher(code=""):
    """A running launcher of two processes, which run `code` and wait, and their process ids."""
    program = f"import os, signal, sys, time\n{code}\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    script = (
        "import signal, sys\nfrom quatrain.cluster.launch import launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where a shell had it ignored
        f"program = (sys.executable, '-c', {program!r})\n"
        "sys.exit(launch(['train'], processes=2, devices_per_process=1, program=program, grace_s=0.2))"
    )
    popen = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return popen, [int(popen.stdout.readline().split()[1]) for _ in range(2)]


def all_ended(pids):
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all(number):
    popen, pids = launcher()
    popen.send_signal(number)
    _, err = popen.communicate(timeout=60)
    assert popen.returncode == 128 + number
    assert f"{number.name}: all processes are stopped; a second signal ends them at once" in err
    assert all_ended(pids)


SAVES = (
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('saved', flush=True), sys.exit(143)))"
)


def test_processes_get_the_time_that_they_need_to_stop():
    popen, _ = launcher(SAVES)
    popen.send_signal(signal.SIGTERM)
    out, _ = popen.communicate(timeout=60)
    assert popen.returncode == 143
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_second_signal_ends_all_at_once():
    """Whoever hears it, as a run does, says how to go on."""
    popen, pids = launcher(
        "came = []\n"
        "def hear(*_):\n"
        "    came.append(1)\n"
        "    if len(came) == 2: print('go on so', flush=True), os._exit(143)\n"
        "signal.signal(signal.SIGTERM, hear)"
    )
    popen.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert popen.poll() is None
    popen.send_signal(signal.SIGTERM)
    out, _ = popen.communicate(timeout=60)
    assert popen.returncode == 143
    assert sorted(out.splitlines()) == ["[0] go on so", "[1] go on so"]
    assert all_ended(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_processes_end_with_a_launcher_that_is_killed():
    code = (
        "from quatrain.cluster.launcher import end_with_launcher\nend_with_launcher(os.environ)\n"
        "assert 'QUATRAIN_LAUNCHER' not in os.environ"
    )
    popen, pids = launcher(code)
    popen.kill()
    popen.communicate(timeout=60)
    assert all_ended(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_whose_launcher_ended_before_it_began_ends_too():
    code = (
        "import os\nfrom quatrain.cluster.launcher import *\nend_with_launcher(os.environ)\nprint('went on')"
    )
    environ = {**os.environ, "QUATRAIN_LAUNCHER": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (
            [],
            {},
            "train, eval, sft, dpo or rm, given after two dashes; got no command; write quatrain",
        ),
        (
            ["plan"],
            {},
            "train, eval, sft, dpo or rm, given after two dashes; got 'plan'; write",
        ),
        (["train"], {"processes": 0}, "--processes must be at least 1; got 0"),
        (["train"], {"devices_per_process": 0}, "--devices-per-process must be at least 1; got 0"),
        (["train"], {"port": 65536}, "--port must be a port that is not in use; got 65536"),
        (["train", "--process-id=1"], {}, "--process-id for each process; got --process-id=1; leave it out"),
    ],
)
def test_bad_input_is_refused(command, options, message):
    with pytest.raises(ValueError, match=message):
        launch(command, **{"processes": 2, "devices_per_process": 1, **options})


def test_a_port_in_use_is_refused(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=rf"got {port} \(Address already in use\); choose another"),
    ):
        launch(["train"], processes=2, devices_per_process=1, port=port)


@pytest.fixture
def quatrain(monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["quatrain", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return call


def test_the_command_line_hands_over(quatrain, monkeypatch):
    calls = []

    def note(command, **options):
        calls.append((list(command), options))
        return 7

    monkeypatch.setattr("quatrain.cluster.launch.launch", note)
    arguments = ("--processes", "3", "--devices-per-process", "4", "--port", "70", "--")
    command = ("train", "c.yaml", "--set", "seed=3", "--resume", "auto")
    assert quatrain("launch", *arguments, *command)[0] == 7
    assert calls == [(list(command), {"processes": 3, "devices_per_process": 4, "port": 70})]


def test_the_command_line_without_a_command_is_an_error(quatrain):
    status, _, err = quatrain("launch", "--processes", "2")
    assert status == 2
    assert err.startswith(
        "error: launch runs the command train, eval, sft, dpo or rm, given after two dashes"
    )


def test_a_command_that_fails_at_once_is_reported_with_its_message(quatrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = quatrain("launch", "--", "train", "missing.yaml")
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert "[0] error: missing.yaml: there is no such configuration file" in lines
    assert lines[-1] in [f"error: process {i} exited with 2; the others were ended" for i in range(2)]
    assert os.listdir(tmp_path) == []
