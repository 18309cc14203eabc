"""The forms of a data set in the configuration, brought into one before they are typed."""

import json
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

REASONING_GYM = "reasoning_gym:"
"""The beginning of a data set of the package reasoning-gym, `reasoning_gym:NAME?size=500&seed=0&…`."""
GYM_DEFAULTS = {"size": 500, "seed": 0}


def data_sets(spec: object) -> object:
    """One data set as text, several as a tuple; a list of one is the one."""
    if spec and isinstance(spec, str):
        return spec
    if not isinstance(spec, list | tuple) or not spec or not all(isinstance(s, str) and s for s in spec):
        raise PydanticCustomError(
            "rule", "must be a data set, or a list of data sets, as [a.jsonl, b.parquet]"
        )
    return spec[0] if len(spec) == 1 else tuple(spec)


def data_set_list(spec: str | tuple[str, ...]) -> tuple[str, ...]:
    """The data sets of a value that `data_sets` returned."""
    return (spec,) if isinstance(spec, str) else spec


def shown_data_sets(spec: str | tuple[str, ...]) -> str:
    """The data sets of a value that `data_sets` returned, as text for messages."""
    return ", ".join(data_set_list(spec))


def is_gym(spec: str | tuple[str, ...]) -> bool:
    """Whether all data sets of a value that `data_sets` returned are of reasoning-gym."""
    return all(each.startswith(REASONING_GYM) for each in data_set_list(spec))


def parameters(spec: str, prefix: str) -> tuple[str, dict[str, Any]]:
    """The name in a data set `PREFIXNAME?KEY=VALUE&…`, and its parameters, of which each is JSON, or text.

    Raises ValueError for what has not this form.
    """
    name, _, query = spec.removeprefix(prefix).partition("?")
    given: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        key, equals, text = part.partition("=")
        if not (key and equals) or key in given:
            raise ValueError(
                f"data set {spec!r}: parameters must be NAME=VALUE, each name once, with & between them; got "
                f"{part!r}; correct it, as {prefix}{name}?size=2000&seed=1"
            )
        given[key] = unquote(text)
        with suppress(ValueError):
            given[key] = json.loads(given[key])
    return name, given


def gym_query(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of a reasoning-gym data set, and its configuration with `size` and `seed`.

    Raises ValueError for what is no such query.
    """
    name, given = parameters(spec, REASONING_GYM)
    given = GYM_DEFAULTS | given
    for key, least in (("size", 1), ("seed", 0)):
        if type(given[key]) is not int or given[key] < least:
            raise ValueError(
                f"data set {spec!r}: {key} must be a whole number, at least {least}; got {given[key]!r}; "
                "correct it"
            )
    return name, given


def heldout_gym(spec: str) -> str:
    """The data set whose seed is the first that no entry of the reasoning-gym data set `spec` is made with.

    Entry i of seed s is made with the seed s + i.
    """
    name, given = gym_query(spec)
    others = [part for part in spec.partition("?")[2].split("&") if part and part[:5] != "seed="]
    query = "&".join([*others, f"seed={given['seed'] + given['size']}"])
    return f"{REASONING_GYM}{name}?{query}"
