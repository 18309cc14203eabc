import json
import platform
import subprocess
import sys
from functools import partial

import jax
import pytest

import quatrain
from quatrain.config.load import load_config
from quatrain.run import description
from quatrain.run.description import describe, paths_in
from quatrain.run.run_dir import RunDir


def configured(*overrides):
    return load_config(None, overrides, environ={}).config


def starts(run):
    return json.loads(run.description.read_text())["starts"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with a reward function and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("KEY = 'hunter2hunter2'\n\ndef score(completions):\n    return 1\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


def test_a_run_says_what_made_it(here, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")
    monkeypatch.setattr(sys, "argv", ["quatrain", "train", "--set", "x=a b", "hunter2hunter2"])
    config = configured("reward.functions={rewards.py:score: 1.0, correct: 1.0}", "data.train=rows.jsonl")
    run = RunDir.create(here / "runs", "first")
    describe(run, config, {}, {"run.steps": ["2", "3"]})
    (start,) = starts(run)
    assert start["changed_keys"] == {"run.steps": ["2", "3"]}
    assert start["command"] == "quatrain train --set 'x=a b' [redacted]"
    assert start["working_folder"] == str(here)
    assert start["run_folder"] == str(here / "runs" / "first")
    assert start["step"] == 0
    assert start["versions"]["python"] == platform.python_version()
    assert (start["versions"]["jax"], start["versions"]["jaxlib"]) == (jax.__version__, jax.lib.__version__)
    assert start["versions"]["quatrain"] == quatrain.__version__
    assert start["commits"]["working_folder"] is None
    assert (start["devices"]["platform"], start["devices"]["count"]) == ("cpu", jax.device_count())
    assert start["paths"] == {name: str(here / name) for name in ("rows.jsonl", "rewards.py")}
    assert start["code"] == {str(here / "rewards.py"): "code/rewards.py"}
    assert (run.code / "rewards.py").read_text().startswith("KEY = '[redacted]'\n")


def test_a_token_written_in_code_or_in_the_command_is_redacted(here, monkeypatch):
    token = "hf_" + "aB3" * 8
    (here / "rewards.py").write_text(f"KEY = '{token}'\n")
    monkeypatch.setattr(sys, "argv", ["quatrain", "train", "--set", f"reward.functions={{f: {token}}}"])
    run = RunDir.create(here / "runs", "first")
    describe(run, configured("update.loss=rewards.py:score"), {}, {})
    assert (run.code / "rewards.py").read_text() == "KEY = '[redacted]'\n"
    assert starts(run)[0]["command"] == "quatrain train --set 'reward.functions={f: [redacted]}'"


def test_each_start_is_added_and_code_that_changed_is_copied_beside_the_earlier(here):
    run, config = RunDir.create(here / "runs", "first"), configured("update.loss=rewards.py:score")
    describe(run, config, {}, {})
    (run.checkpoints / "3").mkdir(parents=True)
    describe(run, config, {}, {})
    (here / "rewards.py").write_text("changed = 1\n")
    describe(run, config, {}, {})
    assert [start["step"] for start in starts(run)] == [0, 3, 3]
    assert [*starts(run)[1]["code"].values(), *starts(run)[2]["code"].values()] == [
        "code/rewards.py",
        "code/rewards.1.py",
    ]
    assert (run.code / "rewards.1.py").read_text() == "changed = 1\n"


def test_code_is_found_in_modules_without_importing_them_and_of_functions_from_python(here, monkeypatch):
    package = here / "mine_of_a_test"
    package.mkdir()
    for name in ("__init__.py", "losses.py"):
        (package / name).write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(here))
    run = RunDir.create(here / "runs", "first")

    class Judge:
        def __call__(self, completions):
            return 1

    functions = {"a": partial(configured, "x"), "b": Judge(), "c": len, "d": eval("lambda: 1")}
    config = configured("update.loss=mine_of_a_test.losses:f", "rollout.environment=gone.module:Game")
    describe(run, config, functions, {})
    assert sorted(starts(run)[0]["code"]) == sorted([str(package / "losses.py"), __file__])


@pytest.mark.parametrize(
    "setting",
    [
        "dpo.loss=rewards.py:score",
        "rm.loss=rewards.py:score",
        "rollout.agent=rewards.py:score",
        "rollout.sampler=rewards.py:score",
    ],
)
def test_code_of_losses_of_pairs_agents_and_samplers_is_copied(here, setting):
    """They decide what is trained as other losses and environments do, and were in no run's folder."""
    task = setting.partition(".")[0]
    own = {"dpo": {"task": task}, "rm": {"task": task}}.get(task, {})
    data = [f"{task}.data=rows.jsonl"] if own else []
    config = load_config(None, [setting, *data], environ={}, **own).config
    run = RunDir.create(here / "runs", "first")
    describe(run, config, {}, {})
    assert starts(run)[0]["code"] == {str(here / "rewards.py"): "code/rewards.py"}
    hub = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"agent": "json:tasks", "sampler": None})}
    )
    assert not [path for path in description._code_files(hub) if path.parent.name == "json"]


def test_paths_are_told_from_other_texts(here):
    (here / "trained").mkdir()
    (here / "correct").mkdir()
    options = (
        "model.path=./trained",
        "data.system_prompt=rows.jsonl or what is like it",
        "run.dir=elsewhere",
    )
    assert paths_in(configured(*options)) == {"./trained": str(here / "trained")}


def test_the_commit_of_a_repository_and_whether_tracked_files_differ(here):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "rewards.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    found = description._commit(here)
    assert len(found["hash"]) == 40
    assert found["changed_files"] == 0
    (here / "rewards.py").write_text("")
    assert description._commit(here / "rewards.py") == found | {"changed_files": 1}
    assert description._commit(here / "rows.jsonl") is None  # not tracked


def test_without_git_there_is_no_commit(here, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert description._commit(here) is None


def test_a_damaged_description_is_told_and_written_again(here, caplog):
    run = RunDir.create(here / "runs", "first")
    run.description.write_text('{"starts": [')
    describe(run, configured(), {}, {})
    assert len(starts(run)) == 1
    assert "run.json was damaged" in caplog.text
