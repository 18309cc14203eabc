"""Reads the parts of a request that is no OpenAI chat, each by its path: `messages.2.content.0.text`.

Data flow: the fields of a body -> these -> the fields of a `ChatRequest`, in `messages.py` and its like. A
fault is a BadRequest, which names the path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quatrain.config.errors import listed, shown
from quatrain.serve.requests import BadRequest


def fault(path: str, rule: str, got: Any, remedy: str = "correct it") -> BadRequest:
    """The error of a field at `path` that breaks a rule."""
    return BadRequest(f"{path}: {rule}; got {shown(got)}; {remedy}", path)


def text_at(path: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise fault(path, "must be a text", value)
    return value


def list_at(path: str, value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise fault(path, "must be a list", value)
    return value


def object_at(path: str, value: Any) -> dict[str, Any]:
    """The fields of an object that are not null, as a field that is null counts as left out."""
    if not isinstance(value, Mapping):
        raise fault(path, "must be an object", value)
    return {name: each for name, each in value.items() if each is not None}


def only(path: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises BadRequest if an object has other fields than the `known`."""
    for name in fields:
        if name not in known:
            place = f"{path}.{name}" if path else name
            raise BadRequest(f"{place} is not supported; leave it out", place)


def check_callers(path: str, fields: Mapping[str, Any]) -> None:
    """Raises BadRequest for a tool that the model may not call itself, or a call that it did not make."""
    callers = list_at(f"{path}.allowed_callers", fields.get("allowed_callers", ["direct"]))
    if "direct" not in callers:
        raise fault(f"{path}.allowed_callers", "must have `direct`, as no programs call tools here", callers)
    caller = object_at(f"{path}.caller", fields.get("caller", {"type": "direct"}))
    if caller != {"type": "direct"}:
        raise fault(f"{path}.caller", 'must be {"type": "direct"}, as no programs call tools here', caller)


def one_of(path: str, value: Any, known: Collection[str], remedy: str = "correct it") -> str:
    """One of the texts `known`."""
    if not isinstance(value, str) or value not in known:
        raise fault(path, f"must be one of {listed(list(known))}", value, remedy)
    return value
