"""Values of configuration keys that have several written forms, brought into one before they are typed.

Used by `schema.py`, whose fields name these functions as validators. Each raises PydanticCustomError
with the rule: one error where a union of types would raise one for each type.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic_core import PydanticCustomError

RESERVED_SETS = {"final", "reward"}
"""Names that metrics of evaluations have after `eval/`."""
MAX_DEPTH = 8
"""Levels of lists and mappings in an argument."""


def data_sets(spec: object) -> object:
    """One data set as text, several as a tuple; a list of one is the one."""
    if isinstance(spec, str):
        return spec
    if not isinstance(spec, list | tuple) or not spec or not all(isinstance(s, str) and s for s in spec):
        raise PydanticCustomError(
            "data_sets", "must be a data set, or a list of data sets, as [a.jsonl, b.parquet]"
        )
    return spec[0] if len(spec) == 1 else tuple(spec)


def data_set_list(spec: str | tuple[str, ...]) -> tuple[str, ...]:
    """The data sets of a value that `data_sets` returned."""
    return (spec,) if isinstance(spec, str) else spec


def shown_data_sets(spec: str | tuple[str, ...]) -> str:
    """The data sets of a value that `data_sets` returned, as text for messages."""
    return ", ".join(data_set_list(spec))


def evaluation_sets(sets: object) -> object:
    """One data set, several as one, or a mapping from names to these."""
    if not isinstance(sets, dict):
        return data_sets(sets)
    if not sets or not all(map(_is_set_name, sets)):
        raise PydanticCustomError(
            "evaluation_sets",
            "must be data sets, or a mapping from names to data sets; a name has letters, digits, '_', '.' "
            "and '-' and is not {reserved}",
            {"reserved": " or ".join(sorted(RESERVED_SETS))},
        )
    return {name: data_sets(spec) for name, spec in sets.items()}


def _is_set_name(name: object) -> bool:
    letters = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    return bool(letters) and name not in RESERVED_SETS


def plain_value(value: object, depth: int = MAX_DEPTH) -> object:
    """`value` if it consists of numbers, text, booleans, null, and lists and mappings of these."""
    if depth and isinstance(value, list | tuple):
        return [plain_value(each, depth - 1) for each in value]
    if depth and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: plain_value(each, depth - 1) for name, each in value.items()}
    finite = isinstance(value, float) and math.isfinite(value)
    if finite or value is None or isinstance(value, int | str | bool):
        return value
    raise PydanticCustomError(
        "plain_value", "must be a number, text, true, false, null, or a list or mapping of these"
    )


def reward_entry(entry: Any) -> Any:
    """An entry of `reward.functions`: its weight, or a mapping with the keys of `schema.RewardEntry`.

    A mapping is returned unchanged: the fields of `RewardEntry` are checked after it.
    """
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return entry
    if isinstance(entry, dict):
        unknown = sorted(str(name) for name in entry if name not in ("weight", "args", "data_source"))
        if not unknown:
            return entry
        raise PydanticCustomError(
            "reward_entry",
            "must have no other keys than weight, args and data_source; it has {unknown}",
            {"unknown": ", ".join(unknown)},
        )
    if hasattr(entry, "weight"):
        return entry
    raise PydanticCustomError(
        "reward_entry",
        "must be a number, or a mapping as {weight: 1.0, args: {name: value}, data_source: [name]}",
    )
