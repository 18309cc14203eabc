from pathlib import Path

import pytest

from quatrain.config.places import HUB_ID, local_path


@pytest.mark.parametrize("name", ["owner/name", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_hub_ids(name):
    assert HUB_ID.fullmatch(name)


@pytest.mark.parametrize("name", ["name", "../name", "./name", "/owner/name", "~/name", "a/b/c", "a/.b"])
def test_paths_are_no_hub_ids(name):
    assert not HUB_ID.fullmatch(name)


def test_the_home_folder_is_filled_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("~/a.jsonl") == Path("/home/me/a.jsonl")
    assert local_path("a/~b") == Path("a/~b")
    assert local_path("~no-such-user-here/a") == Path("~no-such-user-here/a")
