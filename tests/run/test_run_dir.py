import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quatrain.run import run_dir as module
from quatrain.run.metrics import MetricsFile, read_metrics
from quatrain.run.run_dir import LOCK_FILES, RunDir, checkpoint_steps, find_run


def with_checkpoint(run, *steps, age_s=0):
    for step in steps:
        folder = run.checkpoints / str(step)
        folder.mkdir(parents=True)
        stamp = folder.stat().st_mtime - age_s
        os.utime(folder, (stamp, stamp))
    return run


def test_a_fresh_run_has_its_folder_and_names(tmp_path):
    run = RunDir.create(tmp_path / "runs", "first")
    assert run == RunDir(tmp_path / "runs" / "first")
    assert (run.name, run.resumed, run.note) == ("first", False, "")
    names = [
        p.name for p in (run.config, run.metrics, run.samples, run.checkpoints, run.final, run.log, run.plot)
    ]
    assert names == ["config.yaml", "metrics.jsonl", "samples", "checkpoints", "final", "run.log", "plot.png"]
    assert {p.name for p in run.path.iterdir()} == {"samples", *LOCK_FILES}


def test_runs_may_be_in_the_home_folder(tmp_path, monkeypatch):
    """`run.dir: ~/runs` made a folder called `~` in the working folder; all other keys fill it in."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert RunDir.create("~/runs", "first", stores="~/runs").path == tmp_path / "home" / "runs" / "first"
    assert not Path("~").exists()


def test_a_taken_name_is_refused_with_both_remedies(tmp_path):
    RunDir.create(tmp_path, "first")
    with pytest.raises(ValueError, match=r"first exists; .*run\.name=.* `--resume first`"):
        RunDir.create(tmp_path, "first")


@pytest.mark.parametrize("name", ["", "a/b", "..", "auto", "a\\b"])
def test_a_name_is_one_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"run\.name must be a folder name"):
        RunDir.create(tmp_path, name)


def test_a_run_is_resumed_by_name_and_by_path(tmp_path):
    made = with_checkpoint(RunDir.create(tmp_path, "first"), 9, 10)
    made.close()
    (made.checkpoints / "11.orbax-checkpoint-tmp").mkdir()
    assert checkpoint_steps(made.path) == [9, 10]
    for resume in ("first", str(made.path)):
        run = RunDir.create(tmp_path, "second", resume=resume)
        assert (run.path, run.resumed) == (made.path, True)
        assert run.note.endswith("first from step 10")
        run.close()
    assert not (tmp_path / "second").exists()


def test_auto_takes_the_newest_checkpoint_where_nobody_chose_a_name(tmp_path):
    with_checkpoint(RunDir.create(tmp_path, "older"), 900, age_s=100)
    with_checkpoint(RunDir.create(tmp_path, "newer"), 5)
    RunDir.create(tmp_path, "without")
    assert RunDir.create(tmp_path, "third", resume="auto", named=False).name == "newer"


def test_auto_with_a_name_is_that_name_alone(tmp_path):
    with_checkpoint(RunDir.create(tmp_path, "other"), 5)
    run = RunDir.create(tmp_path, "third", resume="auto")
    assert (run.name, run.resumed) == ("third", False)
    assert run.note == f"there is no run third in {tmp_path}: starting a new run third"


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(tmp_path):
    run = RunDir.create(tmp_path / "runs", "third", resume="auto", named=False)
    assert (run.name, run.resumed) == ("third", False)
    assert "has a checkpoint: starting a new run third" in run.note


def test_a_run_is_found_by_its_name_before_a_folder_here_and_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/foo", "foo", "other"):
        (tmp_path / folder / "samples").mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()  # no run
    root = Path("runs")
    assert find_run("foo", root) == Path("runs/foo")
    assert find_run("./foo", root) == Path("foo")
    assert find_run("other", root) == Path("other")
    assert find_run(str(tmp_path / "foo"), root) == tmp_path / "foo"
    with pytest.raises(ValueError, match=r"the name of a run in runs, .*: got 'gone'; runs in runs: foo$"):
        find_run("gone", root)


def begun(root, name="mine"):
    """A run that was ended in its second step, with a checkpoint half written."""
    run = RunDir.create(root, name)
    run.write_config("seed: 1\n")
    for step in range(2):
        MetricsFile(run.metrics).write(step, {})
    (run.path / "reference" / "0").mkdir(parents=True)
    (run.checkpoints / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    return run


def test_auto_starts_a_run_without_a_checkpoint_again(tmp_path, caplog):
    begun(tmp_path)
    with_checkpoint(RunDir.create(tmp_path, "other"), 5)
    run = RunDir.create(tmp_path, "mine", resume="auto")
    assert (run.name, run.resumed, run.restarted) == ("mine", False, True)
    assert (
        run.note == f"{tmp_path / 'mine'} has no complete checkpoint: starting mine again from its beginning"
    )
    run.discard()  # for bad input: what the earlier attempt left stays
    assert [row["step"] for row in read_metrics(run.metrics)] == [0, 1]
    with caplog.at_level(logging.WARNING, "quatrain"):
        run.start_over()
    assert run.metrics.read_text() == ""
    assert len((run.path / "metrics.discarded.jsonl").read_text().splitlines()) == 2
    assert not (run.path / "reference").exists()
    assert len(caplog.messages) == 2


def test_auto_goes_on_with_the_run_of_that_name(tmp_path):
    with_checkpoint(begun(tmp_path), 7, age_s=100)
    with_checkpoint(RunDir.create(tmp_path, "other"), 9)
    run = RunDir.create(tmp_path, "mine", resume="auto")
    assert (run.name, run.resumed, run.restarted) == ("mine", True, False)


def test_a_folder_killed_before_its_configuration_was_written_is_started_again(tmp_path):
    RunDir.create(tmp_path, "mine")
    assert RunDir.create(tmp_path, "mine", resume="auto").restarted


@pytest.mark.parametrize("made", ["final", "thesis.txt"])
def test_auto_starts_nothing_again_that_is_more_than_a_beginning(made, tmp_path):
    if made == "final":  # as `quatrain sft` leaves it: a result without a checkpoint
        begun(tmp_path).final.mkdir()
    else:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / made).write_text("")
    with pytest.raises(ValueError, match="a new run must have an unused name"):
        RunDir.create(tmp_path, "mine", resume="auto")


def test_a_run_without_a_checkpoint_is_not_resumed_by_name(tmp_path):
    begun(tmp_path)
    with pytest.raises(ValueError, match=r"only a run with a checkpoint can be resumed: .*mine has none"):
        RunDir.create(tmp_path, "mine", resume="mine")


def test_what_cannot_be_resumed_is_an_error(tmp_path):
    RunDir.create(tmp_path, "empty")
    with pytest.raises(ValueError, match=r"got 'gone'; runs in .*: empty"):
        RunDir.create(tmp_path, "x", resume="gone")
    with pytest.raises(ValueError, match=r"runs in .*: none"):
        RunDir.create(tmp_path / "nowhere", "x", resume="gone")
    with pytest.raises(ValueError, match=r"only a run with a checkpoint can be resumed: .*empty has none"):
        RunDir.create(tmp_path, "x", resume="empty")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"must be writable: .*run\.dir="):
        RunDir.create(tmp_path / "file", "first")

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"must be writable: .*No space left on device.*free space"):
        RunDir.create(tmp_path, "second")


def test_only_the_main_process_makes_the_folder(tmp_path, monkeypatch):
    decided = (str(tmp_path / "first"), False, "a note", False, "")
    monkeypatch.setattr(module, "is_main_process", lambda: False)
    monkeypatch.setattr(module, "decided_by_main", lambda decide: decided)
    with pytest.raises(ValueError, match=r"process 0 does not see .*first, which process 0 has created"):
        RunDir.create(tmp_path, "first")
    (tmp_path / "first").mkdir()
    run = RunDir.create(tmp_path, "first")
    run.write_config("seed: 1\n")
    assert run.rewind(3) == 0
    assert list(run.path.iterdir()) == []
    assert run == RunDir(tmp_path / "first", False, "a note")


def test_an_earlier_configuration_is_kept(tmp_path, caplog):
    run = RunDir.create(tmp_path, "first")
    for text in ("seed: 1\n", "seed: 1\n", "seed: 2\n", "seed: 3\n"):
        run.write_config(text)
    assert run.config.read_text() == "seed: 3\n"
    assert (run.path / "config.1.yaml").read_text() == "seed: 1\n"
    assert (run.path / "config.2.yaml").read_text() == "seed: 2\n"
    assert caplog.messages == [
        "the configuration differs from the previous one, kept in config.1.yaml",
        "seed: 1 before, 2 now",
        "the configuration differs from the previous one, kept in config.2.yaml",
        "seed: 2 before, 3 now",
    ]


def test_each_key_that_changed_is_told_with_both_values(tmp_path, caplog):
    run = RunDir.create(tmp_path, "first")
    run.write_config("a: {b: 1, c: null}\nfunctions: {x.py:f: 1.0}\n")
    run.write_config("a: {b: 1, c: two}\nfunctions: {x.py:g: 1.0}\n")
    assert caplog.messages[1:] == [
        "a.c: None before, 'two' now",
        "functions.x.py:f: 1.0 before, absent now",
        "functions.x.py:g: absent before, 1.0 now",
    ]


def test_a_configuration_of_the_same_values_is_no_other_one(tmp_path, caplog):
    run = RunDir.create(tmp_path, "first")
    run.write_config("seed: 1  # --set\n")
    run.write_config("seed: 1  # file\n")
    assert run.config.read_text() == "seed: 1  # --set\n"
    assert not caplog.messages


def test_a_run_that_only_began_is_discarded(tmp_path):
    run = RunDir.create(tmp_path, "first")
    run.write_config("seed: 1\n")
    run.discard()
    assert not run.path.exists()
    kept = RunDir.create(tmp_path, "first")
    kept.metrics.write_text("")
    kept.discard()
    assert {p.name for p in kept.path.iterdir()} == {"metrics.jsonl", "samples", *LOCK_FILES}
    kept.close()
    resumed = RunDir.create(tmp_path, "x", resume=str(with_checkpoint(kept, 1).path))
    resumed.discard()
    assert resumed.metrics.exists()


def test_rewinding_is_counted_and_logged(tmp_path, caplog):
    run = RunDir.create(tmp_path, "first")
    file = MetricsFile(run.metrics)
    for step in range(4):
        file.write(step, {})
    with caplog.at_level(logging.WARNING, "quatrain"):
        assert run.rewind(1) == 2
    assert caplog.messages == ["2 lines of metrics after step 1 are now in metrics.discarded.jsonl"]
    assert [row["step"] for row in read_metrics(run.metrics)] == [0, 1]


def test_a_run_has_one_writer(tmp_path):
    """Whoever comes second changes nothing, until the first has ended, also if it was killed."""
    code = (
        "import sys, time; from quatrain.run.run_dir import RunDir; "
        f"run = RunDir.create({str(tmp_path)!r}, 'mine'); print('holds', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "holds\n"
        with_checkpoint(RunDir(tmp_path / "mine"), 1)
        before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
        for resume in ("mine", "auto"):
            with pytest.raises(ValueError, match=rf"only one process .* process {other.pid} on .* uses it"):
                RunDir.create(tmp_path, "mine", resume=resume)
        assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
        other.kill()
    taken = RunDir.create(tmp_path, "mine", resume="mine")
    assert json.loads((taken.path / ".lock.json").read_text())["process"] == os.getpid()


def test_there_is_a_configuration_at_every_moment(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "first")
    run.write_config("seed: 1\n")
    seen = []
    plain = Path.write_text

    def watched(path, *args, **kwargs):
        seen.append(run.config.read_text())
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", watched)
    monkeypatch.setattr(Path, "replace", lambda *paths: seen.append(run.config.read_text()))
    run.write_config("seed: 2\n")
    assert seen == ["seed: 1\n"] * 2
    assert (run.path / "config.1.yaml").read_text() == "seed: 1\n"


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuses(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(ValueError, match=r"file system with locks .* cannot be locked, No locks available"):
        RunDir.create(tmp_path, "first")


def test_checkpoints_may_be_in_another_folder_which_goes_on_without_the_runs(tmp_path):
    """Catches a run that is begun anew, or found by nobody, because its checkpoints are elsewhere."""
    stores = str(tmp_path / "stores")
    made = RunDir.create(tmp_path / "runs", "mine", stores=stores)
    assert (made.checkpoints, made.reference) == (
        tmp_path / "stores" / "mine" / "checkpoints", tmp_path / "stores" / "mine" / "reference"
    )  # fmt: skip
    made.close()
    made.discard()
    assert not list((tmp_path / "stores").iterdir())
    assert not made.path.exists()
    made = with_checkpoint(RunDir.create(tmp_path / "runs", "mine", stores=stores), 4)
    made.write_config("seed: 1\n")
    made.close()
    assert checkpoint_steps(made.path) == [4]
    for other in (None, str(tmp_path / "others")):
        with pytest.raises(ValueError, match=r"checkpoint\.dir of a resumed run must not change: .*mine has"):
            RunDir.create(tmp_path / "runs", "mine", resume="auto", stores=other)
    again = RunDir.create(tmp_path / "runs", "mine", resume="mine", stores=stores)
    assert (again.resumed, again.store) == (True, made.store)
    again.close()
    with pytest.raises(ValueError, match=r"must have an unused place for its checkpoints: .*stores/mine has"):
        RunDir.create(tmp_path / "elsewhere", "mine", stores=stores)
    fresh = RunDir.create(tmp_path / "elsewhere", "mine", resume="auto", stores=stores)
    assert (fresh.resumed, checkpoint_steps(fresh.path)) == (True, [4])
    assert "from step 4 in" in fresh.note
    fresh.close()
    fresh.discard()  # for bad input
    assert not fresh.path.exists()
    assert checkpoint_steps(made.path) == [4]


@pytest.mark.parametrize("left", [[], ["samples/"], [*LOCK_FILES, "samples/", "config.draft"]])
def test_auto_goes_on_from_the_checkpoints_where_the_folder_is_empty(left, tmp_path):
    """Catches a command that is refused, and told to be given again as it is: the folder is a new volume, or
    of a start that was killed before it wrote where the checkpoints are."""
    stores = str(tmp_path / "stores")
    with_checkpoint(RunDir.create(tmp_path / "first", "mine", stores=stores), 4).close()
    folder = tmp_path / "second" / "mine"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")
    run = RunDir.create(tmp_path / "second", "mine", resume="auto", stores=stores)
    assert (run.path, run.resumed, checkpoint_steps(folder)) == (folder, True, [4])
    assert "from step 4 in" in run.note


def test_a_place_of_checkpoints_has_one_writer(tmp_path):
    """Catches two machines that share it alone, and so write, and remove, the files of the same run."""
    stores = str(tmp_path / "stores")
    first = RunDir.create(tmp_path / "first", "mine", stores=stores)
    reference = tmp_path / "stores" / "mine" / "reference"
    reference.mkdir()
    with pytest.raises(ValueError, match=r"only one process may write the run in .*stores/mine: process"):
        RunDir.create(tmp_path / "second", "mine", stores=stores)
    assert not (tmp_path / "second").exists()
    first.close()
    second = RunDir.create(tmp_path / "second", "mine", stores=stores)
    second.close()
    second.discard()
    assert reference.exists()


def test_the_lock_of_the_checkpoints_is_released_if_the_folder_cannot_be_made(tmp_path):
    """Catches a run that holds the place of its checkpoints after it was refused."""
    stores = str(tmp_path / "stores")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the run's folder must be writable: .*file/mine") as kept:
        RunDir.create(tmp_path / "file", "mine", stores=stores)
    RunDir.create(tmp_path / "runs", "mine", stores=stores).close()
    with pytest.raises(ValueError, match=r"the checkpoints' folder must be writable: .*checkpoint\.dir="):
        RunDir.create(tmp_path / "runs", "other", stores=str(tmp_path / "file"))
    assert kept.value.__traceback__ is not None  # which keeps what it refers to


def test_checkpoints_may_be_placed_in_the_folder_of_runs(tmp_path):
    """Catches a folder that is made twice, or locked twice: it is that of the run itself."""
    made = RunDir.create(tmp_path, "mine", stores=str(tmp_path))
    assert (made.store, made.checkpoints) == ("", tmp_path / "mine" / "checkpoints")
    with_checkpoint(made, 4).close()
    assert RunDir.create(tmp_path, "mine", resume="auto", stores=str(tmp_path)).resumed


def test_a_run_with_its_checkpoints_in_its_folder_does_not_go_on_elsewhere(tmp_path):
    with_checkpoint(RunDir.create(tmp_path, "mine"), 4).close()
    with pytest.raises(ValueError, match=r"mine/checkpoints; got .*stores; set it back"):
        RunDir.create(tmp_path, "mine", resume="mine", stores=str(tmp_path / "stores"))
