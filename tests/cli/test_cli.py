import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_runs import make_run

from quatrain.cli import main as cli
from quatrain.cluster import processes as hosts
from quatrain.cluster.stop import Stopped

COMMANDS = (
    "train",
    "eval",
    "sft",
    "dpo",
    "rm",
    "launch",
    "plan",
    "config",
    "report",
    "samples",
    "export",
    "bench",
    "serve",
)
HEAVY = ("jax", "numpy", "transformers", "optax", "orbax", "grain", "pyarrow")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """An empty working directory and home, and none of the environment's own settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    for name in list(os.environ):
        if name.startswith(("QUATRAIN_", "WANDB_")):
            monkeypatch.delenv(name)


def call(monkeypatch, capsys, *arguments):
    """Exit status, stdout, and stderr of `quatrain ARGUMENTS` without the lines of its start."""
    monkeypatch.setattr(sys, "argv", ["quatrain", *arguments])
    status = 0
    try:
        cli.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    err = "".join(line for line in captured.err.splitlines(True) if not line.startswith("start | "))
    return status, captured.out, err


@pytest.fixture
def quatrain(monkeypatch, capsys):
    return lambda *arguments: call(monkeypatch, capsys, *arguments)


def stand_in(monkeypatch, module, name, function):
    """Puts `function` in place of `quatrain.MODULE.NAME`, so that no JAX is imported and nothing runs."""
    assert find_spec(f"quatrain.{module}"), "a name of earlier times stands in for nothing"
    fake = types.ModuleType(f"quatrain.{module}")
    setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, f"quatrain.{module}", fake)


def imported_by(*commands):
    """Seconds of a fresh process that runs each command, and its heavy modules after each."""
    code = (
        "import json, sys\n"
        "from quatrain.cli.main import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['quatrain', *arguments]\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        f"    print('\\nIMPORTED', *arguments, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    started = time.perf_counter()
    process = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(process, capture_output=True, text=True, check=True)
    imported = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    return time.perf_counter() - started, imported


def test_configuration_and_help_import_nothing_heavy():
    """In one process: the first that imports something is the first whose line has it."""
    commands = (
        ("config",),
        ("config", "--json"),
        ("plan",),
        ("plan", "--json"),
        ("train", "--print-config"),
        ("--help",),
    )
    seconds, imported = imported_by(*commands)
    assert imported == [f"IMPORTED {' '.join(arguments)} []" for arguments in commands]
    # A second on an idle machine; this one may be busy.
    assert seconds < 10


START = f"""
import sys
from quatrain.report import start_up
say, seen = start_up._say, []

def noted(current):
    say(current)
    seen.append([current.stage, *(name in sys.modules for name in ("yaml", "jax"))])

class Heavy:
    def find_spec(self, name, *_):
        if name in {HEAVY!r}:
            sys.exit("the first import that takes seconds")

start_up._say = noted
from quatrain.cli.main import main
sys.argv = ["quatrain", *sys.argv[1:]]
sys.meta_path.insert(0, Heavy())
try:
    main()
finally:
    print(seen)
"""
"""Runs a command up to its first import of a heavy module."""


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_command_says_its_first_line_before_it_imports_what_takes_seconds(tmp_path, command):
    (tmp_path / "small.yaml").write_text("data: {train: gone.jsonl, eval: gone.jsonl}\nsft: {steps: 1}\n")
    run = [sys.executable, "-c", START, command, str(tmp_path / "small.yaml")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.startswith("start | configuration | 0:00 elapsed\nstart | libraries | ")
    assert done.stderr.endswith("the first import that takes seconds\n")
    assert done.stdout == "[['configuration', False, False], ['libraries', True, False]]\n"


def test_the_quickstart_installs_what_runs_need_and_tests_add_to_it():
    folder = Path(__file__).parents[2]
    made = ["make", "--no-print-directory", "-n", "-C", str(folder), "VENV=none"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = [
        subprocess.run([*made, target], capture_output=True, text=True, check=True, env=plain).stdout
        for target in ("train", "setup")
    ]
    assert ["[dev]" in text for text in said] == [False, True]
    assert all("-e '.[plot,vision]'" in text for text in said)


def test_config_prints_values_with_their_layers(quatrain):
    status, out, err = quatrain("config", "--set", "rollout.n=4", "--set", "rollout.temperature=0.5")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["n:", "4", "#", "--set"] in lines
    assert ["temperature:", "0.5", "#", "--set"] in lines


def test_print_config_is_the_same_text(quatrain):
    arguments = ("--set", "run.name=x")
    assert quatrain("train", "--print-config", *arguments) == quatrain("config", *arguments)


def test_config_prints_json(quatrain, monkeypatch):
    monkeypatch.setenv("QUATRAIN__ROLLOUT__N", "16")
    status, out, err = quatrain("config", "--json", "--set", "rollout.n=4")
    content = json.loads(out)
    assert status == 0
    assert content["config"]["rollout"]["n"] == 16
    assert content["provenance"]["rollout.n"] == "environment QUATRAIN__ROLLOUT__N"
    assert err.count("--set rollout.n=4 is overridden") == 1
    assert err.startswith("warning: ")


EXAMPLE = (
    *("--set", "data.batch_size=60", "--set", "rollout.n=12", "--set", "update.micro_batch_size=8"),
    *("--devices", "6", "--set", "rollout.mesh=-1,1,2"),
)


def test_plan_prints_a_table(quatrain):
    status, out, err = quatrain("plan", *EXAMPLE)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "sequences_per_step 720 sequences P x G = 60 x 12" in lines
    assert "sequences_per_shard 120 sequences B / D = 720 / 6" in lines


def test_plan_prints_json(quatrain):
    layout = ("--set", "mesh=2,1,3", "--processes", "2", "--set", "data.batch_size=1")
    status, out, err = quatrain("plan", *EXAMPLE, *layout, "--set", "rollout.n=1", "--json")
    content = json.loads(out)
    assert status == 0
    assert (content["data_shards"], content["devices_per_process"], content["rollout_replicas"]) == (2, 3, 3)
    assert content["unit"]["data_shards"] == "shards"
    assert content["why"]["data_shards"] == "D: dp x fsdp = 2 x 1"
    assert [warning.split(":")[0] for warning in content["warnings"]] == [
        "there are more data shards (2) than sequences of an optimizer step (1)",
        "update.micro_batch_size (8) is larger than the number of sequences per shard (1)",
        "there are more rollout replicas (3) than sequences of a training step (1)",
    ]
    assert "advantage" in err  # the configuration's own warnings stay on stderr


@pytest.mark.parametrize(
    ("platforms", "message"),
    [
        (
            "cuda",
            "JAX has no plugin for it; .* install what such devices need with `pip install -e '.\\[cuda\\]'`",
        ),
        ("cudaa", "'cudaa' is not in the list of known backends: .*; unset it, .*, set it to cpu$"),
    ],
)
def test_platforms_that_jax_does_not_find_are_one_error(quatrain, monkeypatch, platforms, message):
    """Catches the traceback of an error deep in JAX, which has no text for a plugin that is missing."""
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    code = "def fail(error): raise error"
    inside = {}
    exec(compile(code, "/site-packages/jax/_src/xla_bridge.py", "exec"), inside)
    error = AssertionError()
    if platforms == "cudaa":
        error = RuntimeError(
            "Unable to initialize backend 'cudaa': Backend 'cudaa' is not in the list of known backends: "
            "['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose an available backend)"
        )
    stand_in(monkeypatch, "loop.serve", "serve", lambda *args, **kwargs: inside["fail"](error))
    status, _, err = quatrain("serve")
    assert status == 2
    assert len(err.splitlines()) == 1
    assert re.search(f"error: JAX_PLATFORMS must name platforms .* got {platforms}: .*{message}", err.strip())


def test_only_changed_values_are_printed_and_load_again(quatrain, tmp_path):
    """Catches 160 lines of which a reader looks for five."""
    (tmp_path / "few.yaml").write_text("rollout: {n: 16}\nseed: 0\n")
    status, out, _ = quatrain("config", str(tmp_path / "few.yaml"), "run.name=x", "--changed")
    keys = [line.split(":")[0].strip() for line in out.splitlines() if line and not line.startswith("#")]
    assert status == 0
    assert {"rollout", "n", "run", "name"} <= set(keys)
    assert not {"seed", "temperature", "beta1"} & set(keys)
    (tmp_path / "again.yaml").write_text(out)
    assert quatrain("config", str(tmp_path / "again.yaml"), "--changed")[1].count("n: 16") == 1
    assert json.loads(quatrain("config", str(tmp_path / "few.yaml"), "--changed", "--json")[1])["config"][
        "rollout"
    ] == {"n": 16}


def test_convert_writes_yaml_and_says_what_is_missing(quatrain, tmp_path):
    theirs = tmp_path / "grpo.yaml"
    theirs.write_text("num_generations: 4\nmodel_name_or_path: org/model\n")
    status, out, err = quatrain("convert", str(theirs), "learning_rate=1e-5", "--devices", "2")
    assert status == 0
    assert "learning_rate: 1.0e-05" in out
    assert "on 2 devices" in out
    assert err.startswith("warning: grpo.yaml does not say data.train")
    assert quatrain("convert")[0] == 2


def test_plan_of_parameters(quatrain):
    layout = ("plan", "--params", "--devices", "8", "--set", "mesh=1,8,1")
    implied = [word for word in layout if word != "--params"]
    status, out, err = quatrain(*implied, "--device-memory", "1MiB")
    assert status == 0
    assert "error" not in err  # on a slow machine it has lines of progress
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers.o x 4 32.00 KiB embed=128/fsdp, heads=128" in lines
    assert any(line.startswith("warning: the gradient needs ") for line in lines)
    status, out, err = quatrain(*layout, "--json")
    content = json.loads(out)
    assert (status, content["warnings"]) == (0, [])
    table = {entry["name"]: entry for entry in content["parameters"]}
    assert table["layers.o"]["bytes_per_device"] == 4 * 128 * 128 * 4 // 8
    assert table["layers.o"]["partition_spec"] == ["fsdp", None]
    assert content["bytes_per_device"]["gradients"] == content["bytes_per_device"]["weights"]


def test_a_dotenv_file_is_read_and_kept_secret(quatrain, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / ".env").write_text("WANDB_API_KEY=very-secret\nQUATRAIN__SEED=7\n")
    status, out, err = quatrain("config", "--set", "data.system_prompt=very-secret")
    assert status == 0
    assert "wandb: online" in out
    assert "seed: 7" in out
    assert "very-secret" not in out + err
    assert "system_prompt: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("config", "--set", "rolout.n=1"),
            "error: unknown key 'rolout.n' (from --set); the nearest valid key is 'rollout.n'",
        ),
        (
            ("config", "--set", "rollout.n"),
            "error: --set needs KEY=VALUE, as --set rollout.n=16; got 'rollout.n'",
        ),
        (
            ("plan", "--devices", "6", "--set", "mesh=1,-1,4"),
            "error: the product of the axis sizes of mesh must be the number of devices; got dp 1, fsdp -1, "
            "tp 4 for 6 devices; change a number, or change the number of devices",
        ),
        (
            ("plan", "--params", "--device-memory", "much"),
            "error: a memory size must be at least 1MB, a number with a unit, e.g. 80GB, 24GiB or 16e9; got "
            "'much'",
        ),
        (("train", "missing.yaml"), "error: missing.yaml: there is no such configuration file"),
        (
            ("train", "--resume", "gone"),
            "error: RUN must be the name of a run in runs, or the folder of a run, with metrics.jsonl, "
            "config.yaml or samples/: got 'gone'; runs in runs: none",
        ),
    ],
)
def test_a_users_error_is_one_line_without_a_traceback(quatrain, arguments, message):
    assert quatrain(*arguments) == (2, "", f"{message}\n")


def test_each_problem_has_a_line_of_its_own(quatrain):
    status, _, err = quatrain("config", "--set", "rollout.n=0", "--set", "seed=x")
    assert status == 2
    assert [line.split()[:2] for line in err.splitlines()] == [["error:", "seed"], ["error:", "rollout.n"]]


def test_a_mistyped_option_or_command_exits_with_2(quatrain):
    assert quatrain("config", "--sett", "a=1")[0] == 2
    assert quatrain("trane")[0] == 2
    assert quatrain("plan", "--devices", "0")[0] == 2


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("QUATRAIN_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["quatrain", "config", "--set", "rollout.n=0"])
    with pytest.raises(ValueError, match=r"rollout\.n must be"):
        cli.main()


class Refused(RuntimeError):
    pass


Refused.__module__ = "quatrain.update.learner"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            OSError(28, "No space left on device", "runs/x"),
            2,
            "error: [Errno 28] No space left on device: 'runs/x'",
        ),
        (ValueError("bad rows"), 2, "error: bad rows"),
        (Refused("too many bad steps"), 1, "error: too many bad steps"),
    ],
)
def test_errors_of_a_run_are_one_line(quatrain, monkeypatch, error, status, line):
    def fail(resolved, *, resume):
        raise error

    stand_in(monkeypatch, "loop.train", "train", fail)
    assert quatrain("train") == (status, "", f"{line}\n")


def test_a_fault_of_the_program_keeps_its_traceback(quatrain, monkeypatch):
    def fail(resolved, *, resume):
        raise KeyError("x")

    stand_in(monkeypatch, "loop.train", "train", fail)
    with pytest.raises(KeyError):
        quatrain("train")


def test_an_error_never_shows_a_secret(quatrain, monkeypatch):
    def fail(resolved, *, resume):
        raise ValueError("cannot log in with hunter2-token")

    monkeypatch.setenv("HF_TOKEN", "hunter2-token")
    stand_in(monkeypatch, "loop.train", "train", fail)
    assert quatrain("train") == (2, "", "error: cannot log in with [redacted]\n")


def test_a_traceback_never_shows_a_secret(quatrain, monkeypatch, capsys):
    def fail(resolved, *, resume):
        raise KeyError("no hunter2-token")

    monkeypatch.setenv("HF_TOKEN", "hunter2-token")
    monkeypatch.setattr(sys, "excepthook", None)
    stand_in(monkeypatch, "loop.train", "train", fail)
    with pytest.raises(KeyError) as fault:
        quatrain("train")
    capsys.readouterr()  # its start
    sys.excepthook(fault.type, fault.value, fault.tb)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("KeyError: 'no [redacted]'\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_run_prints_its_line_and_exits_with_the_signals_status(quatrain, monkeypatch, number):
    def stop(resolved, *, resume):
        stopped = Stopped(number)
        stopped.advice = "step 3 is saved; go on with: quatrain train --resume x"
        raise stopped

    stand_in(monkeypatch, "loop.train", "train", stop)
    line = f"stopped: {number.name}; step 3 is saved; go on with: quatrain train --resume x\n"
    assert quatrain("train") == (128 + number, "", line)


def test_an_interrupt_exits_with_130(quatrain, monkeypatch):
    def interrupt(resolved, *, resume):
        raise KeyboardInterrupt

    stand_in(monkeypatch, "loop.train", "train", interrupt)
    assert quatrain("train")[0] == 130


def test_train_hands_over_configuration_and_resume(quatrain, monkeypatch):
    calls = []
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: calls.append((resolved.config.seed, resume)),
    )
    assert quatrain("train", "--set", "seed=3")[0] == 0
    assert quatrain("train", "--resume", "auto")[0] == 0
    assert calls == [(3, None), (0, "auto")]


def test_resuming_the_newest_run_takes_its_configuration(quatrain, monkeypatch):
    calls = []
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: calls.append((resolved.config.seed, Path(resume))),
    )
    for seed, name in enumerate(("older", "newest", "without")):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text(f"seed: {seed}\nrun: {{name: {name}}}\n")
    for age_s, name in ((100, "older"), (0, "newest")):
        folder = Path("runs", name, "checkpoints", "5")
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    assert quatrain("train", "--resume", "auto")[0] == 0
    assert calls == [(1, Path("runs/newest"))]


def test_auto_takes_the_run_of_the_name_that_is_set(quatrain, monkeypatch):
    calls = []
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: calls.append((resolved.config.seed, resolved.config.run.name, resume)),
    )
    for seed, name in enumerate(("other", "mine")):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text(f"seed: {seed}\nrun: {{name: {name}}}\n")
    Path("runs", "other", "checkpoints", "5").mkdir(parents=True)
    auto = ("train", "--resume", "auto", "--set")
    assert quatrain(*auto, "run.name=mine")[0] == 0
    Path("runs", "mine", "checkpoints", "2").mkdir(parents=True)
    assert quatrain(*auto, "run.name=mine")[0] == 0
    assert quatrain(*auto, "run.name=third")[0] == 0
    assert calls == [(1, "mine", "auto"), (1, "mine", "runs/mine"), (0, "third", "auto")]


def test_the_configuration_of_a_resumed_run_is_that_of_its_folder(quatrain, monkeypatch):
    """A folder `./mine` beside `runs/mine`: what is resumed is where its configuration is."""
    calls = []
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: calls.append((resolved.config.seed, Path(resume))),
    )
    here = Path.cwd()
    for seed, folder in enumerate(("mine", "runs/mine")):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.yaml").write_text(f"seed: {seed}\nrun: {{name: mine}}\n")
    for run in ("mine", "./mine", "runs/mine"):
        assert quatrain("train", "--resume", run)[0] == 0
    assert calls == [(1, here / "runs" / "mine"), (0, here / "mine"), (1, here / "runs" / "mine")]


@pytest.mark.parametrize("run", ["elsewhere/mine", "mine"])
def test_a_resumed_run_brings_its_own_configuration(quatrain, monkeypatch, run):
    calls = []
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: calls.append((resolved.config, resume)),
    )
    folder = Path(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "seed: 9\nrun: {name: mine}\ndata: {eval: e.jsonl}\nrollout: {workers: 2}\n"
    )
    if run == "mine":
        Path("elsewhere").mkdir()
        folder.rename("elsewhere/mine")
        arguments = ("--set", "run.dir=elsewhere")
    else:
        arguments = ()
    # A key that is only valid with the run's own configuration.
    changes = ("--set", "run.steps=5", "--set", "rollout.weights_dir=w")
    status, _, err = quatrain("train", "--resume", run, *arguments, *changes)
    assert (status, err) == (0, "")
    ((config, resume),) = calls
    assert config.rollout.weights_dir == "w"
    found = str(Path("elsewhere", "mine").absolute())
    assert (config.seed, config.run.name, config.run.steps, resume) == (9, "mine", 5, found)


def test_the_other_commands_hand_over(quatrain, monkeypatch):
    calls = []

    def told(answer, *call):
        calls.append(call)
        return answer

    accuracy = {"eval/accuracy_strict": 0.12345}
    stand_in(
        monkeypatch,
        "loop.evaluate",
        "evaluate_run",
        lambda resolved: told(accuracy, "eval", resolved.config.seed),
    )
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: told(
            None, resolved.config.run.task, resolved.config.given.steps, resolved.config.given.data
        ),
    )
    stand_in(
        monkeypatch, "loop.export", "export", lambda run, output, *, step: told(7, "export", run, output)
    )
    stand_in(monkeypatch, "cli.bench", "bench", lambda resolved, steps: told({}, "bench", steps))
    stand_in(
        monkeypatch,
        "loop.serve",
        "serve",
        lambda config, *, name, host, port, ready, compiles, trains: told(
            ready("http://here"), "serve", name, host, port
        ),
    )
    assert quatrain("eval", "--set", "seed=3") == (0, '{\n  "eval/accuracy_strict": 0.123\n}\n', "")
    assert quatrain("sft", "--set", "sft.steps=5")[0] == 0
    assert quatrain("dpo", "dpo.data=pairs.jsonl")[0] == 0
    assert quatrain("rm", "rm.data=pairs.jsonl", "rm.steps=2")[0] == 0
    make_run(Path("runs"), "x")
    assert quatrain("export", "runs/x", "out")[0] == 0
    assert quatrain("bench", "--steps", "2")[0] == 0
    served = "builtin:tiny is served at http://here/v1; Ctrl-C ends it\n"
    assert quatrain("serve", "--set", "seed=4", "--port", "0") == (0, served, "")
    exported = ("export", Path("runs/x"), Path("out"))
    assert calls == [
        ("eval", 3),
        ("sft", 5, "builtin:arithmetic"),
        ("dpo", 0, "pairs.jsonl"),
        ("rm", 2, "pairs.jsonl"),
        exported,
        ("bench", 2),
        ("serve", "builtin:tiny", "127.0.0.1", 0),
    ]
    assert quatrain("serve", "--name", "mine")[1].startswith("mine is served at")
    assert calls[-1] == ("serve", "mine", "127.0.0.1", 8000)
    assert quatrain("serve", "--name", "")[0] == 2


def test_a_page_is_written_into_the_runs_folder_or_where_it_is_asked_for(quatrain, tmp_path):
    folder = make_run(tmp_path / "runs", "first")
    make_run(tmp_path / "runs", "second")
    assert quatrain("report", "first") == (0, "the run page is runs/first/report.html\n", "")
    assert quatrain("report", str(folder), "--output", "a.html")[:2] == (0, "the run page is a.html\n")
    assert quatrain("report", "first", "second", "--output", "two.html")[0] == 0
    assert (tmp_path / "two.html").stat().st_size > (tmp_path / "a.html").stat().st_size
    status, _, err = quatrain("report", "first", "second")
    assert (status, err[:44]) == (2, "error: the page of several runs needs --outp")
    assert quatrain("report", "third")[0] == 2
    # The error named a draft of the page, and no remedy.
    for place, why in (("gone/a.html", "No such file or directory"), (str(tmp_path), "Is a directory")):
        status, _, err = quatrain("report", "first", "--output", place)
        assert (status, f"{place} is not ({why}); give another with --output FILE" in err) == (2, True)


def test_a_page_is_served(quatrain, tmp_path, monkeypatch):
    folder = make_run(tmp_path / "runs", "first")
    served = []
    monkeypatch.setattr(
        "quatrain.report.page_server.serve", lambda folders, *, port, ready: served.append((folders, port))
    )
    assert quatrain("report", "first", "--serve", "--port", "0")[0] == 0
    assert served == [([folder.relative_to(tmp_path)], 0)]


def test_samples_are_printed(quatrain, tmp_path):
    make_run(tmp_path / "runs", "first")
    status, out, _ = quatrain("samples", "first", "--step", "2")
    assert status == 0
    assert "needle2" in out
    assert "3 completions of 3 prompts" in quatrain("samples", "first", "--eval", "--step", "0")[1]
    status, _, err = quatrain("samples", "first", "--step", "9")
    assert (status, err.count("\n")) == (2, 1)


def test_help_lists_the_commands_with_examples(quatrain):
    status, out, _ = quatrain("--help")
    assert status == 0
    assert all(f"│ {command} " in out for command in COMMANDS)
    for command in COMMANDS:
        status, out, _ = quatrain(command, "--help")
        assert status == 0
        assert "Examples" in out
        assert f"quatrain {command}" in out


@pytest.mark.parametrize("command", ["train", "eval", "sft", "dpo", "rm"])
def test_a_place_among_processes_is_handed_over(quatrain, monkeypatch, command):
    places = []
    monkeypatch.setattr(hosts, "initialize", lambda *place, **timeouts: places.append((place, timeouts)))
    stand_in(monkeypatch, "loop.train", "train", lambda resolved, *, resume: None)
    stand_in(monkeypatch, "loop.evaluate", "evaluate_run", lambda resolved: {})
    place = ("--coordinator", "10.0.0.2:8476", "--num-processes", "2", "--process-id", "1")
    data = [f"{command}.data=pairs.jsonl"] if command in ("dpo", "rm") else []
    assert quatrain(command, *place, *data, "--set", "distributed.start_timeout_s=9")[0] == 0
    timeouts = {"start_timeout_s": 9, "heartbeat_timeout_s": 60, "shutdown_timeout_s": 600}
    assert places == [(("10.0.0.2:8476", 2, 1), timeouts)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dpo",), "error: dpo.data must name data with the columns `chosen` and `rejected`, or"),
        (
            ("dpo", "dpo.data=p.jsonl", "sft.steps=3"),
            "run quatrain sft first, and set model.path to the final/",
        ),
        (
            ("dpo", "dpo.data=p.jsonl", "rollout.n=4"),
            "error: rollout.n has no effect in quatrain dpo; use quat",
        ),
        (
            ("rm", "rm.data=p.jsonl", "advantage.estimator=gae"),
            "error: advantage.estimator has no effect in qu",
        ),
        (
            ("rm", "rm.data=p.jsonl", "critic.epochs=2"),
            "error: critic.epochs has no effect in quatrain rm; use",
        ),
        (
            ("dpo", "dpo.data=p.jsonl", "distill.teacher=m"),
            "error: distill.teacher has no effect in quatrain dpo",
        ),
        (
            ("dpo", "dpo.data=p.jsonl", "update.loss=gspo"),
            "error: update.loss has no effect in quatrain dpo; set ",
        ),
        (
            ("dpo", "dpo.data=p.jsonl", "update.kl_coef=1"),
            "error: update.kl_coef has no effect in quatrain dpo; ",
        ),
        (("dpo", "dpo.data=p.jsonl", "dpo.beta=0"), "error: dpo.beta must be greater than 0; got 0"),
        (
            ("dpo", "dpo.data=p.jsonl", "dpo.loss=robust", "dpo.label_smoothing=0.5"),
            "error: dpo.label_smoothing must be less than 0.5",
        ),
        (("train", "dpo.data=p.jsonl"), "error: dpo.data has no effect in quatrain train; run quatrain dpo"),
        (("train", "run.task=rm"), "got 'rm' (from --set); use quatrain rm, or leave it out"),
        (("plan", "--task", "dpo", "run.task=rm"), "got 'rm' (from --set); use quatrain rm, or leave it out"),
        (
            ("config", "--task", "ppo"),
            "error: task must be one of rl, sft, dpo, rm; got 'ppo'; name one of",
        ),
        (("bench", "run.task=sft"), "use quatrain sft, or leave it out"),
    ],
)
def test_what_a_command_does_not_do_is_refused_before_anything_is_made(quatrain, words, message):
    """Catches a key passed over in silence, and a folder of a run that never began."""
    for more in ((), ("--dry-run",)) if words[0] in ("train", "dpo", "rm") else ((),):
        status, out, err = quatrain(*words, *more)
        assert (status, out, [*Path().iterdir()]) == (2, "", [])
        assert message in err


def test_the_configuration_and_the_plan_of_a_task_are_printed(quatrain):
    status, out, err = quatrain("config", "--task", "dpo", "dpo.data=p.jsonl", "dpo.eval=e.jsonl", "--json")
    found = json.loads(out)
    assert (status, err, found["config"]["run"]["task"]) == (0, "", "dpo")
    assert found["provenance"]["run.task"] == "quatrain dpo"
    Path("rm.yaml").write_text("run: {task: rm}\nrm: {data: p.jsonl, eval: e.jsonl, batch_size: 8}\n")
    status, out, err = quatrain("plan", "rm.yaml", "--json")
    plan = json.loads(out)
    assert (status, err) == (0, "")
    assert (plan["rows_per_step"], plan["sequences_per_step"], plan["optimizer_steps"]) == (8, 16, None)
    status, out, _ = quatrain("rm", "rm.yaml", "rm.steps=7", "--print-config")
    assert (status, "  steps: 7" in out, "task: rm" in out) == (0, True, True)
    assert [*Path().iterdir()] == [Path("rm.yaml")]


@pytest.mark.parametrize(
    ("command", "row", "message"),
    [
        (
            "dpo",
            {"prompt": "a", "completion": "b", "label": True},
            "train on judged answers with dpo.loss=kto",
        ),
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "row 1: `chosen` and `rejected` must be two",
        ),
        (
            "rm",
            {"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]},
            "several answers are not ranked: make",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on_leave_no_folder(quatrain, command, row, message):
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    status, _, err = quatrain(
        command, f"{command}.data=rows.jsonl", f"{command}.eval=rows.jsonl", "--dry-run"
    )
    assert (status, [*Path().iterdir()]) == (2, [Path("rows.jsonl")])
    assert message in err


def test_what_a_run_on_given_data_trained_is_evaluated_and_served(quatrain, monkeypatch):
    """Catches keys of rollouts refused where a run is evaluated, and a reward model that is to answer."""
    calls = []
    stand_in(monkeypatch, "loop.evaluate", "evaluate_run", lambda resolved: calls.append(resolved) or {})
    stand_in(monkeypatch, "loop.serve", "serve", lambda config, **options: calls.append(config))
    for task in ("dpo", "rm"):
        folder = Path("runs", task)
        (folder / "final").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"run: {{task: {task}}}\n{task}: {{data: p.jsonl}}\n")
    words = ("rollout.max_new_tokens=9", "data.eval=e.jsonl")
    assert quatrain("eval", "dpo", *words) == (0, "{}\n", "")
    config = calls.pop().config
    assert (config.model.path, config.data.eval, config.rollout.max_new_tokens) == (
        "runs/dpo/final",
        "e.jsonl",
        9,
    )
    assert quatrain("serve", "dpo", "rollout.max_concurrency=3")[0] == 0
    assert calls.pop().rollout.max_concurrency == 3
    for command in ("eval", "serve"):
        status, _, err = quatrain(command, "rm", "data.eval=e.jsonl")
        assert (status, "got run.task rm, whose model gives scores; name another" in err) == (2, True)
    assert calls == []


def test_a_run_is_resumed_by_its_own_command(quatrain, monkeypatch):
    calls = []
    stand_in(monkeypatch, "loop.train", "train", lambda resolved, *, resume: calls.append((resolved, resume)))
    folder = make_run(Path("runs"), "mine")
    (folder / "config.yaml").write_text("run: {task: dpo, name: mine}\ndpo: {data: p.jsonl, steps: 9}\n")
    assert quatrain("dpo", "--resume", "mine")[0] == 0
    [(resolved, resume)] = calls
    assert (resolved.config.dpo.steps, resume) == (9, str(folder.absolute()))
    for command in ("train", "sft"):
        status, _, err = quatrain(command, "--resume", "mine")
        assert (status, "got 'dpo' (from file runs/mine/config.yaml); use quatrain dpo" in err) == (2, True)
    assert len(calls) == 1


def test_variables_of_a_run_do_not_keep_its_folder_from_being_found(quatrain, monkeypatch):
    """A variable that only the run's task or configuration makes valid was an error of every look-up."""
    calls = []
    stand_in(monkeypatch, "loop.train", "train", lambda resolved, *, resume: calls.append((resolved, resume)))
    folder = make_run(Path("elsewhere"), "mine")
    (folder / "config.yaml").write_text("run: {task: dpo, name: mine}\ndpo: {data: p.jsonl, steps: 9}\n")
    (folder / "checkpoints" / "3").mkdir(parents=True)
    monkeypatch.setenv("QUATRAIN__RUN__DIR", "elsewhere")
    monkeypatch.setenv("QUATRAIN__DPO__BETA", "0.3")
    for run in ("mine", "auto"):
        assert quatrain("dpo", "--resume", run)[0] == 0
    assert [(resolved.config.dpo.beta, Path(run).name) for resolved, run in calls] == [(0.3, "mine")] * 2
    assert quatrain("samples", "mine", "--step", "2")[0] == 0
    assert quatrain("report", "mine")[0] == 0
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("QUATRAIN__RUN__DIR", "~/elsewhere")
    assert quatrain("samples", "mine", "--step", "2")[0] == 0


def test_half_a_place_is_an_error(quatrain):
    status, _, err = quatrain("train", "--coordinator", "10.0.0.2:8476")
    assert status == 2
    assert err.startswith(
        "error: --coordinator, --num-processes, --process-id must be given together; got only"
    )


def test_what_every_process_derives_process_0_decides(quatrain, monkeypatch):
    names, compared = [], {}

    def gather(mine):
        assert mine["data.eval"] == "builtin:arithmetic-heldout"
        assert "logging.wandb" in mine
        return [{"run.name": "of-0", "logging.wandb": "offline"}, {**mine, "run.name": "of-1"}]

    monkeypatch.setattr(hosts, "gather_objects", gather)
    monkeypatch.setattr(hosts, "assert_same", lambda what, values: compared.update({what: values}))
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: names.append((resolved.config.run.name, resolved.config.logging.wandb)),
    )
    assert quatrain("train", "--set", "seed=3")[0] == 0
    assert names == [("of-0", "offline")]
    values = compared["configuration"]
    assert (values["run.name"], values["seed"], values["reward.functions.correct"]) == ("of-0", 3, 1.0)


def test_a_given_name_is_not_taken_from_process_0(quatrain, monkeypatch):
    names = []
    monkeypatch.setattr(hosts, "gather_objects", lambda mine: [{"run.name": "of-0"}, mine])
    monkeypatch.setattr(hosts, "assert_same", lambda what, values: None)
    stand_in(
        monkeypatch,
        "loop.train",
        "train",
        lambda resolved, *, resume: names.append(resolved.config.run.name),
    )
    assert quatrain("train", "--set", "run.name=mine")[0] == 0
    assert names == ["mine"]


@pytest.mark.parametrize(
    ("error", "status", "told", "shown"),
    [
        (
            ValueError("bad rows of hunter2-token"),
            2,
            "bad rows of [redacted]",
            "error: bad rows of [redacted]",
        ),
        (KeyError("x"), 1, "'x'", "Traceback"),
        (KeyboardInterrupt(), 130, "interrupted", ""),
    ],
)
def test_the_other_processes_hear_of_an_error(quatrain, monkeypatch, error, status, told, shown):
    heard = []

    def fail(resolved, *, resume):
        monkeypatch.setattr(hosts, "joined", lambda: True)
        raise error

    monkeypatch.setenv("HF_TOKEN", "hunter2-token")
    monkeypatch.setattr(hosts, "wait_for_failure_message", lambda: heard.append("waited for news"))
    monkeypatch.setattr(hosts, "abandon", lambda message, status: heard.append((message, status)))
    stand_in(monkeypatch, "loop.train", "train", fail)
    ended, _, err = quatrain("train")
    assert ended == status
    assert err.startswith(shown)
    assert heard[-1] == (told, status)
    assert heard[:-1] == ([] if status == 130 else ["waited for news"])


def test_version(quatrain):
    assert quatrain("--version")[1].startswith("quatrain 0.")


def test_a_run_is_evaluated_with_its_configuration_and_model(quatrain, monkeypatch, tmp_path):
    told = []
    stand_in(
        monkeypatch, "loop.evaluate", "evaluate_run", lambda resolved: told.append(resolved.config) or {}
    )
    run = tmp_path / "a run"
    status, _, message = _refused_eval(quatrain, run)
    assert (status, "with neither; give another" in message) == (2, True)
    (run / "config.yaml").write_text("seed: 7\nmodel:\n  path: elsewhere\n  tokenizer: elsewhere\n")
    status, _, message = quatrain("eval", str(run))
    assert (status, "has no final/: the run did not come to its end" in message) == (2, True)
    assert quatrain("eval", str(run), "--set", "model.path=other")[0] == 0
    (run / "final").mkdir()
    assert quatrain("eval", str(run), "--set", "eval.n=2")[0] == 0
    assert [config.model.path for config in told] == ["other", str(run / "final")]
    assert told[1].model.tokenizer == str(run / "final")
    assert (told[1].seed, told[1].eval.n) == (7, 2)


def _refused_eval(quatrain, run):
    run.mkdir()
    return quatrain("eval", str(run))


@pytest.mark.parametrize("arguments", [("plan", "--json"), ("config",), ("--version",), ("--help",)])
def test_a_result_that_cannot_be_written_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quatrain", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    message = "error: part of standard output is lost, because it could not be written: [Errno 28] "
    assert done.stderr == f"{message}No space left on device\n"


def test_the_error_of_a_result_that_cannot_be_written_needs_no_standard_error():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quatrain", "config"]
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_without_standard_output_succeeds(closed):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "quatrain", "config"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bare_words_are_overrides_after_those_of_set(quatrain):
    status, out, err = quatrain("config", "rollout.n=4", "--set", "rollout.n=2", "rollout.stop=[a=b]")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "n: 4 # --set" in lines
    assert any(line.startswith("stop:") and "a=b" in line for line in lines)
    Path("lr=1.yaml").write_text("rollout: {n: 3}")
    status, out, _ = quatrain("config", "lr=1.yaml", "seed=5", "--json")
    config = json.loads(out)["config"]
    assert (status, config["rollout"]["n"], config["seed"]) == (0, 3, 5)
    status, _, err = quatrain("plan", "rollout.n=24", "--json")
    assert (status, err) == (0, "")


@pytest.mark.parametrize("command", ["train", "eval", "sft", "dpo", "rm", "plan", "config", "serve", "bench"])
def test_every_command_with_a_configuration_takes_words(quatrain, command):
    status, _, err = quatrain(command, "rollout.nn=4")
    assert (status, "unknown key 'rollout.nn'" in err) == (2, True)
    status, _, err = quatrain(command, "a.yaml", "b.yaml")
    assert (status, "takes one CONFIG.yaml" in err, "got a.yaml, b.yaml" in err) == (2, True, True)


def test_the_model_of_a_folder_is_evaluated(quatrain, monkeypatch):
    calls = []
    stand_in(monkeypatch, "loop.evaluate", "evaluate_run", lambda resolved: calls.append(resolved) or {})
    Path("model").mkdir()
    status, _, err = quatrain("eval", "model")
    assert (status, "with neither; give another" in err) == (2, True)
    Path("model", "config.json").write_text("{}")
    status, _, err = quatrain("eval", "model")
    assert (status, "give it too: quatrain eval CONFIG.yaml model" in " ".join(err.split())) == (2, True)
    Path("mine.yaml").write_text("seed: 7\ndata: {eval: e.jsonl}\nmodel: {path: base, tokenizer: other}\n")
    Path("run", "final").mkdir(parents=True)
    Path("run", "config.yaml").write_text("seed: 8\ndata: {eval: e.jsonl}\nmodel: {path: base}\n")
    Path("run", "final", "config.json").write_text("{}")
    cases = [
        (("mine.yaml", "model"), "model", 7),
        (("model", "mine.yaml", "seed=9"), "model", 9),
        (("run",), "run/final", 8),
        (("run/final",), "run/final", 8),
        (("run", "mine.yaml"), "run/final", 7),
        (("run", "model.path=base"), "base", 8),
    ]
    for words, path, seed in cases:
        assert quatrain("eval", *words)[0] == 0
        config = calls.pop().config
        assert (config.model.path, config.seed, config.data.eval) == (path, seed, "e.jsonl")
        if path != "base":
            assert config.model.tokenizer == path
    status, _, err = quatrain("eval", "mine.yaml", "model", "model.path=base")
    assert (status, "model and model.path both name a model" in " ".join(err.split())) == (2, True)


def test_a_model_that_is_served_gets_no_warnings_about_training(quatrain, monkeypatch):
    stand_in(monkeypatch, "loop.serve", "serve", lambda config, **options: None)
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    assert quatrain("serve", "model") == (0, "", "")
    status, _, err = quatrain("config", "model.path=model")
    assert (status, "is not the quickstart's" in " ".join(err.split())) == (0, True)


def test_a_run_is_evaluated_served_and_exported_by_its_name(quatrain, monkeypatch):
    calls = []
    stand_in(monkeypatch, "loop.evaluate", "evaluate_run", lambda resolved: calls.append(resolved) or {})
    stand_in(monkeypatch, "loop.export", "export", lambda run, output, *, step: calls.append(run) or 3)
    folder = Path("runs", "first")
    (folder / "final").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 8\ndata: {eval: e.jsonl}\n")
    assert quatrain("eval", "first")[0] == 0
    assert (calls[0].config.model.path, calls[0].config.seed) == ("runs/first/final", 8)
    status, out, _ = quatrain("export", "first", "out")
    assert (status, out, calls[1]) == (0, "step 3 of runs/first is in out\n", folder)
    for command in ("eval", "serve", "export"):
        status, _, err = quatrain(command, "second", *(["out"] if command == "export" else []))
        assert (status, "got 'second'; runs in runs: first" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("output", ["gcs://b/x", "s3a://b/x", "S3://b/x", "s3://", "s3:///x"])
def test_nothing_is_exported_to_an_address_of_another_scheme(output, quatrain, monkeypatch):
    """Catches a model in a local folder that is called `gcs:`."""
    calls = []
    stand_in(monkeypatch, "loop.export", "export", lambda run, output, *, step: calls.append(run) or 3)
    folder = Path("runs", "first")
    (folder / "final").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 8\n")
    status, _, err = quatrain("export", "first", output)
    rule = f"OUTPUT must be a folder, gs://BUCKET/NAME or s3://BUCKET/NAME; got {output}; correct it"
    assert (status, rule in " ".join(err.split()), calls) == (2, True, [])


def test_a_checkpoint_of_a_training_server_is_exported_by_its_folder(quatrain, monkeypatch):
    """It is no run: it has one step, and no card to push."""
    calls = []
    stand_in(monkeypatch, "loop.export", "export", lambda run, output, *, step: calls.append(run) or 3)
    folder = Path("tinker-state", "s_train_0", "weights", "final")
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    status, out, _ = quatrain("export", str(folder), "out")
    assert (status, out, calls) == (0, f"step 3 of {folder} is in out\n", [folder])
    for option in (("--step", "3"), ("--push", "a/b")):
        status, _, err = quatrain("export", str(folder), "out", *option)
        assert (status, "leave --step and --push out" in " ".join(err.split())) == (2, True)
    assert calls == [folder]


def test_an_error_in_the_options_is_one_line_and_names_the_key(quatrain):
    cases = {
        ("train", "--set"): "error: Option '--set' requires an argument. (quatrain --help)",
        ("trian",): "error: No such command 'trian'. Did you mean 'train'? (quatrain --help)",
        ("samples",): "error: Missing argument 'RUN'. (quatrain samples --help)",
        ("samples", "x", "--stepp", "1"): "error: No such option: --stepp (Possible options: --help, --step) "
        "(quatrain samples --help)",
        ("train", "--learning_rate", "1"): "error: --learning_rate is not an option of quatrain train; a key "
        "of the configuration is given as KEY=VALUE: optimizer.learning_rate=…",
        (
            "sft",
            "--steps",
            "1",
        ): "error: --steps is not an option of quatrain sft; a key of the "
        "configuration is given as KEY=VALUE: sft.steps=…",
        ("dpo", "--learning_rate", "1"): "error: --learning_rate is not an option of quatrain dpo; a key of "
        "the configuration is given as KEY=VALUE: dpo.learning_rate=…",
        ("eval", "--num-generations", "8"): "error: --num-generations is not an option of quatrain eval; a "
        "key of the configuration is given as KEY=VALUE: rollout.n=…",
    }
    for words, message in cases.items():
        assert quatrain(*words) == (2, "", f"{message}\n")
    status, _, err = quatrain("serve", "--port", "99999")
    assert (status, err.startswith("error: Invalid value for '--port'"), err.count("\n")) == (2, True, 1)


def test_the_folder_of_a_model_is_no_configuration(quatrain):
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    status, _, err = quatrain("train", "model")
    assert (status, "give a YAML file, and the folder of a model as model.path=model" in err) == (2, True)


def test_a_word_longer_than_a_file_name_is_a_setting(quatrain):
    files = ",".join(f"part-{number}.jsonl" for number in range(60))
    status, out, _ = quatrain("config", "--json", f"data.train={files}")
    assert (status, json.loads(out)["config"]["data"]["train"]) == (0, files)
