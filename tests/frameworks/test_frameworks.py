"""What frameworks of others get of `quatrain serve`, each in its own words (`make test-hubs`)."""

import pytest
from frameworks import ANSWERS, HUBS, MODEL, checked, free_port, save_model, served

pytestmark = pytest.mark.hubs

OF_ALL = ("chat", "parallel", "lacks")
LOOPS = ("tools", "messages_tools", "responses_tools")
STREAMS = ("stream", "messages_stream", "responses_stream")
CITIES = (
    "structured", "structured_by_a_tool", "structured_stream", "responses_structured", "messages_structured"
)  # fmt: skip
CHECKS = {
    "openai": (
        *OF_ALL, "stream", "tools", "required", "structured", "json_object", "cancel", "models",
        "responses_chat", "responses_stream", "responses_tools", "responses_structured", "responses_parallel",
        "responses_cancel", "responses_lacks",
    ),
    "anthropic": (*OF_ALL, "stream", "tools", "required", "structured", "cancel", "models", "count"),
    "litellm": (
        *OF_ALL, "stream", "tools", "structured", "cancel", "models",
        "messages_chat", "messages_stream", "messages_tools", "responses_chat",
    ),
    "langchain": (
        *OF_ALL, "stream", "tools", "structured", "structured_by_a_tool", "cancel", "models",
        "messages_chat", "messages_stream", "messages_tools",
        "responses_chat", "responses_stream", "responses_tools", "responses_structured",
    ),
    "pydantic_ai": (
        *OF_ALL, "stream", "tools", "structured", "structured_by_a_tool", "cancel", "models",
        "messages_chat", "messages_stream", "messages_tools",
        "responses_chat", "responses_stream", "responses_tools", "responses_structured",
    ),
    "instructor": (*OF_ALL, "stream", "required", "structured", "structured_stream", "cancel", "models"),
    "dspy": (*OF_ALL, "fields", "tools", "structured", "cancel"),
    "inspect": (*OF_ALL, "tools", "structured", "cancel", "scores", "responses_chat"),
    "smolagents": (*OF_ALL, "stream", "tools", "structured", "cancel", "models"),
    "lm_eval": (*OF_ALL, "loglikelihoods"),
}  # fmt: skip
"""What is checked of each; a check that is not named for a framework is something that it does not do."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(its URL, the folder of its model)"""
    place = tmp_path_factory.mktemp("served")
    model = save_model(place / "model")
    with served(place, model, free_port()) as url:
        yield url, model


@pytest.mark.parametrize("name", CHECKS)
def test_a_framework_gets_the_basics(tmp_path, server, name):
    """A change of an answer, an event or an error that one of these packages does not read."""
    url, model = server
    python = name if name == "instructor" else "frameworks"
    assert (HUBS / python / "bin" / "python").is_file(), "run scripts/install_hubs.py first"
    found = checked(tmp_path / name, url, model, name, python, CHECKS[name])
    failed = {check: each.get("traceback") for check, each in found.items() if "error" in each}
    assert not failed, "\n".join(f"{name}, {check}:\n{trace}" for check, trace in failed.items())
    assert list(found) == list(CHECKS[name])
    for check, each in found.items():
        look_at(check, each["value"])


def look_at(check, value):
    """Whether a check found what the model says, and the server promises."""
    if check.endswith("parallel"):
        assert len(value) == 8, check
        assert all(text in ANSWERS for text in value), (check, value)
    elif check.endswith("chat"):
        assert value in ANSWERS, check
    elif check in STREAMS:
        assert "".join(value) in ANSWERS, check
        assert len(list(filter(None, value))) > 1 or "".join(value) == ANSWERS[1], (check, value)
    elif check in LOOPS:
        assert value["calls"], check
        assert all(set(call) == {"a", "b"} for call in value["calls"]), (check, value)
        assert value["text"], check
    elif check == "required":
        assert set(value) == {"a", "b"}
        assert all(isinstance(number, int) for number in value.values())
    elif check in CITIES:
        assert list(value) == ["name", "size", "people", "rivers"], (check, value)
        assert value["size"] in ("small", "large")
        assert isinstance(value["people"], int)
        assert all(isinstance(river, str) for river in value["rivers"])
    elif check == "json_object":
        assert isinstance(value, dict)
    elif check == "fields":
        assert isinstance(value["sum"], int)
        assert str(value["sum"]) in value["text"]
    elif check.endswith("cancel"):
        assert value < 60
    elif check == "models":
        assert value == [MODEL]
    elif check == "count":
        assert value[0] == value[1]
    elif check == "scores":
        assert value == ["C"] * 4  # both answers have the target
    elif check == "loglikelihoods":
        assert value[1] < value[0] < 0
    else:
        assert check.endswith("lacks")
        word = {"lacks": "logit_bias: must be 0", "responses_lacks": "background"}[check]
        assert word in value["text"] or "tools.0.type: must be" in value["text"], value
