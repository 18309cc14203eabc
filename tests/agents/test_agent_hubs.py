"""Environments of hubs as agents, without their packages: names, rows, interpreters and what is missing."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from quatrain.config.load import load_config
from quatrain.episodes import openenv_child
from quatrain.episodes.hubs import check_python, hub_agent, hub_rows

PACKAGE = """
from types import SimpleNamespace


def load_environment(config):
    tasks = [
        SimpleNamespace(
            data=SimpleNamespace(
                idx=i, name=name, prompt=f"{config['taskset']['ask']} {name}", system_prompt=None
            )
        )
        for i, name in enumerate(("a", "b", "c", "d"))
    ]
    return SimpleNamespace(taskset=Tasks(tasks))


class Tasks(list):
    bounded = True

    def skip(self, count):
        return Tasks(self[count:])

    def take(self, count):
        return Tasks(self[:count])


def resolve_env_config(config):
    return config
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A configuration whose processes find a package that does what verifiers' does with tasks."""
    folder = tmp_path / "verifiers" / "v1"
    for path in (folder / "configs", folder / "utils"):
        path.mkdir(parents=True)
    for path in (folder.parent, folder, folder / "configs", folder / "utils"):
        (path / "__init__.py").touch()
    (folder / "configs" / "agent.py").write_text(
        "def agent_config_fields(config):\n    return {'agent': 1}\n"
    )
    (folder / "utils" / "loaders.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return load_config(None, ["rollout.agent=verifiers:words"]).config


def test_the_tasks_of_a_taskset_are_rows(config):
    spec = "verifiers:words?ask=Say&skip=1&size=2"
    rows = hub_rows(config, (spec, "other.jsonl"), {"given": []})
    assert list(rows) == ["given", spec]
    assert rows[spec] == [
        {
            "prompt": [{"role": "user", "content": f"Say {name}"}],
            "task": i,
            "name": name,
            "taskset": {"id": "words", "ask": "Say"},
        }
        for i, name in ((1, "b"), (2, "c"))
    ]


@pytest.mark.parametrize("query", ["size=0", "skip=-1", "size=x", "size"])
def test_wrong_parameters_of_tasks(config, query):
    with pytest.raises(ValueError, match=r"data set 'verifiers:words\?.*' ?: .*must be"):
        hub_rows(config, f"verifiers:words?{query}", {})


def test_an_interpreter_that_is_none_is_named_before_tasks_are_listed():
    settings = ["rollout.agent=verifiers:words", "rollout.agent_python=nowhere/python"]
    with pytest.raises(ValueError, match=r"rollout\.agent_python must be .*nowhere/python does not run"):
        hub_rows(load_config(None, settings).config, "verifiers:words", {})


def test_another_interpreter_lacks_the_package_of_a_hub():
    settings = ["rollout.agent=verifiers:words", f"rollout.agent_python={sys.executable}"]
    with pytest.raises(
        ValueError, match=r"hub/bin/pip install verifiers==0\.4\.0 uv`, and set rollout\.agent_python"
    ):
        hub_rows(load_config(None, settings).config, "verifiers:words", {})


def test_agents_of_hubs_are_functions_of_this_package():
    path, arguments = hub_agent("verifiers:words", {"agent": {"harness": {"id": "null"}}})
    assert path.endswith("verifiers_child.py:agent")
    assert arguments == {"taskset": "words", "config": {"agent": {"harness": {"id": "null"}}}}
    path, arguments = hub_agent("openenv:http://127.0.0.1:80", {"max_concurrent": 2})
    assert path.endswith("openenv_child.py:agent")
    assert arguments == {"url": "http://127.0.0.1:80", "max_concurrent": 2}
    assert hub_agent("mine.py:play", {"a": 1}) == ("mine.py:play", {"a": 1})
    for wrong in ("verifiers:words?size=3", "verifiers:"):
        with pytest.raises(ValueError, match="must be verifiers:TASKSET"):
            hub_agent(wrong, {})
    for wrong, args in (("openenv:localhost:80", {}), ("openenv:http://a", {"url": "http://b"})):
        with pytest.raises(ValueError, match="must be openenv:URL"):
            hub_agent(wrong, args)


@pytest.mark.parametrize(
    ("program", "why"),
    [("nowhere/python", "does not run"), ("/bin/true", "printed nothing"), ("/bin/echo", "does not run")],
)
def test_interpreters_that_are_none(program, why):
    check_python(sys.executable)
    with pytest.raises(ValueError, match=f"rollout.agent_python must be .*{why}"):
        check_python(program)


class _Over:
    """An environment of openenv that shows `A maze.` and is over."""

    async def connect(self):
        pass

    close = connect

    async def reset(self):
        return SimpleNamespace(observation={"text": "A maze."}, done=False)


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        ("Play.", "Play.\n\nA maze."),
        (
            [{"type": "image_url", "image_url": {"url": "data:"}}],
            [
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "text", "text": "\n\nA maze."},
            ],
        ),
    ],
)
def test_the_first_observation_ends_the_prompt(monkeypatch, content, asked):
    """A prompt with pictures has parts, to which a text would be added letter by letter."""
    monkeypatch.setattr(openenv_child, "_client", lambda url: _Over())
    monkeypatch.setattr(openenv_child, "_schema", lambda url: {"action": {}})
    seen = []

    class Client:
        async def chat(self, messages, tools):
            seen.extend(messages)
            return {"role": "assistant", "content": "Done."}

    row = {"prompt": [{"role": "user", "content": content}]}
    asyncio.run(openenv_child.agent(Client(), row, "http://a"))
    assert seen[0]["content"] == asked
    assert row["prompt"][0]["content"] == content
