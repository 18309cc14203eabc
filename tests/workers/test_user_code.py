import builtins
import os
import subprocess
import sys

import pytest

from quatrain.config.schema import RewardConfig
from quatrain.episodes.agent_processes import check_agent
from quatrain.episodes.environment_workers import InWorkers
from quatrain.reward.scorer import RewardScorer
from quatrain.workers.user_code import find_function

SOURCE = "import helpers\nfrom kit import part\n\ndef f():\n    return helpers.NAME + part.NAME\n"


def folder_of(path, name):
    (path / "kit").mkdir(parents=True)
    (path / "kit" / "__init__.py").touch()
    (path / "kit" / "part.py").write_text(f"NAME = 'kit of {name}'")
    (path / "helpers.py").write_text(f"NAME = '{name}, '")
    (path / "rewards.py").write_text(SOURCE)
    return f"{path / 'rewards.py'}:f"


def test_a_file_may_import_its_neighbours_and_each_gets_its_own(tmp_path):
    before, path = set(sys.modules), list(sys.path)
    one = find_function(folder_of(tmp_path / "one", "one"), {}, "function")
    two = find_function(folder_of(tmp_path / "two", "two"), {}, "function")
    assert (one(), two()) == ("one, kit of one", "two, kit of two")
    assert sys.path == path
    assert not {"helpers", "kit", "kit.part"} & (set(sys.modules) - before)


def test_nothing_is_written_beside_a_users_files(tmp_path, monkeypatch):
    """Also where Python keeps what it compiles, as it does unless it is told not to."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert find_function(folder_of(tmp_path, "one"), {}, "function")() == "one, kit of one"
    assert not sys.dont_write_bytecode
    assert [*tmp_path.rglob("__pycache__")] == []


def test_modules_from_elsewhere_stay_imported(tmp_path):
    sys.modules.pop("colorsys", None)
    (tmp_path / "a.py").write_text("import colorsys\n\ndef f():\n    return colorsys\n")
    assert find_function(f"{tmp_path}/a.py:f", {}, "function")() is sys.modules["colorsys"]


def test_a_neighbour_that_fails_is_named_and_leaves_nothing(tmp_path):
    path = list(sys.path)
    (tmp_path / "broken_helper.py").write_text("1 / 0")
    (tmp_path / "a.py").write_text("import broken_helper")
    with pytest.raises(ValueError, match=r"a\.py cannot be imported: ZeroDivisionError"):
        find_function(f"{tmp_path}/a.py:f", {}, "function")
    assert sys.path == path
    assert "broken_helper" not in sys.modules


@pytest.mark.parametrize("hash_seed", ["1", "2", "3", "4", "6", "7"])
def test_modules_of_a_neighbouring_package_are_forgotten_in_any_order(tmp_path, hash_seed):
    for name in ("one", "two"):
        package = tmp_path / name / "helpers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "core.py").write_text(f"WHERE = {name!r}\n")
        (tmp_path / name / "reward.py").write_text(
            "from helpers.core import WHERE\n\ndef where():\n    return WHERE\n"
        )
    script = (
        "from quatrain.workers.user_code import find_function\n"
        f"specs = [{str(tmp_path)!r} + f'/{{name}}/reward.py:where' for name in ('one', 'two')]\n"
        "print([find_function(spec, {}, 'reward function')() for spec in specs])"
    )
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['one', 'two']"


COUNTING = """\
import builtins
import shared
builtins.executed = [*getattr(builtins, "executed", ()), __file__.rpartition("/")[2]]
kept = []

def put(value):
    kept.append(value)
    return shared

def get():
    return kept
"""


@pytest.fixture
def executed():
    builtins.executed = []
    yield lambda: builtins.executed
    del builtins.executed


def test_a_file_is_executed_once_for_all_its_functions_and_for_those_that_import_it(
    tmp_path, executed, monkeypatch
):
    (tmp_path / "shared.py").write_text("import builtins\nbuiltins.executed.append('shared.py')")
    (tmp_path / "t.py").write_text(COUNTING)
    (tmp_path / "t-.py").write_text("import shared, t\n\ndef whole():\n    return t.kept, shared\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "t.py")
    monkeypatch.chdir(tmp_path)
    put = find_function(f"{tmp_path}/t.py:put", {}, "tool")
    shared = put("one")
    for spec in ("t.py:get", f"./../{tmp_path.name}/t.py:get", "link.py:get"):
        assert find_function(spec, {}, "tool")() == ["one"]
    assert find_function("t-.py:whole", {}, "tool")() == (["one"], shared)
    assert executed() == ["shared.py", "t.py"]
    assert not {"t", "shared"} & set(sys.modules)


def test_a_file_that_changed_or_whose_neighbour_changed_is_executed_again(tmp_path, executed):
    (tmp_path / "shared.py").write_text("")
    (tmp_path / "t.py").write_text(COUNTING)
    find_function(f"{tmp_path}/t.py:put", {}, "tool")("old")
    (tmp_path / "shared.py").write_text("NEW = 1")
    assert find_function(f"{tmp_path}/t.py:get", {}, "tool")() == []
    assert find_function(f"{tmp_path}/t.py:put", {}, "tool")("new").NEW == 1
    (tmp_path / "t.py").write_text(COUNTING + "\n")
    assert find_function(f"{tmp_path}/t.py:get", {}, "tool")() == []
    assert executed() == ["t.py"] * 3


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a reward function", lambda: RewardScorer(RewardConfig(functions={"__main__:f": 1.0}, workers=1))),
        ("environment in worker processes", lambda: InWorkers("__main__:f", 1, 1.0)),
        ("rollout.agent", lambda: check_agent("__main__:f", {}, None)),
    ],
)
def test_what_processes_cannot_import_is_refused_in_the_same_words(kind, make):
    """A function of a notebook that goes into a worker, where it is another module's or nobody's."""
    with pytest.raises(
        ValueError, match=f"{kind} must be named as .*got '__main__:f', of the running program"
    ):
        make()
