"""The forms of a data set in the configuration, brought into one before they are typed."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

REASONING_GYM = "reasoning_gym:"
"""The beginning of a data set of the package reasoning-gym, `reasoning_gym:NAME?size=500&seed=0&…`."""
GYM_DEFAULTS = {"size": 500, "seed": 0}


MOST_PARTS = 1_000_000
"""Largest sum of a mixture's weights as whole numbers; after so many rows, all sources have their shares."""


@dataclass(frozen=True)
class MixedSet:
    """A data set of a mixture, and its weight in it."""

    path: str
    weight: float


TrainingSpec = str | tuple[str, ...] | tuple[MixedSet, ...]
"""One data set, several that are read as one, or a mixture: what `training_sets` returns."""


def data_sets(spec: object) -> object:
    """One data set as text, several as a tuple; a list of one is the one."""
    if spec and isinstance(spec, str):
        return spec
    entries = spec if isinstance(spec, list | tuple) else ()
    if not entries or not all(isinstance(entry, str) and entry for entry in entries):
        weighted = any(isinstance(entry, Mapping) for entry in entries)
        whole = "; these are read whole and take no weights: give the names alone" if weighted else ""
        raise _rule(f"must be a data set, or a list of data sets, as [a.jsonl, b.parquet]{whole}")
    return entries[0] if len(entries) == 1 else tuple(entries)


def training_sets(spec: object) -> object:
    """As `data_sets`; or a mixture, a list of mappings `{path, weight}`, as a tuple of `MixedSet`s."""
    entries = spec if isinstance(spec, list | tuple) else ()
    mixed = [isinstance(entry, Mapping | MixedSet) for entry in entries]
    if isinstance(spec, Mapping):
        raise _rule(
            "must be a data set, or a list of data sets, as [a.jsonl, b.parquet], or a mixture, a list of "
            "{path, weight}; give a list, as [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
        )
    if not any(mixed):
        return data_sets(spec)
    if not all(mixed):
        raise _rule(
            "must be a list of names, which is read as one data set, or a list of {path, weight}, a mixture, "
            "and has both forms; give each entry a weight, as {path: a.jsonl, weight: 1}, or none"
        )
    sets = tuple(map(_mixed_set, entries))
    paths = [each.path for each in sets]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise _rule(f"must name each data set of a mixture once; {twice[0]} is there twice; add the weights")
    if sum(whole_weights(sets)) > MOST_PARTS:
        raise _rule(
            "must have weights in the proportions of whole numbers whose sum is at most "
            f"{MOST_PARTS:,}; these need larger ones; round the weights, as 0.333 and 0.667"
        )
    return sets if len(sets) > 1 else sets[0].path


def _mixed_set(entry: Any) -> MixedSet:
    if isinstance(entry, MixedSet):
        return entry
    path, weight = entry.get("path"), entry.get("weight")
    if set(entry) != {"path", "weight"} or not isinstance(path, str) or not path:
        raise _rule("must have entries {path, weight} in a mixture, with these two keys and a path as text")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or not weight > 0:
        raise _rule(
            f"must have a weight above 0, a finite number, for each data set of a mixture; that of {path} is "
            "not so; leave out a data set that is not to be drawn"
        )
    return MixedSet(path, float(weight))


def _rule(text: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}", {"rule": text})


def whole_weights(spec: TrainingSpec) -> tuple[int, ...]:
    """The weights of a mixture as the smallest whole numbers in the same proportions; () for other data sets.

    A weight is the decimal number that was written: 0.1 is a tenth, exactly.
    """
    weights = [Fraction(str(each.weight)) for each in spec if isinstance(each, MixedSet)]
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def data_set_list(spec: TrainingSpec) -> tuple[str, ...]:
    """The data sets of a value that `data_sets` or `training_sets` returned."""
    if isinstance(spec, str):
        return (spec,)
    return tuple(each if isinstance(each, str) else each.path for each in spec)


def shown_data_sets(spec: TrainingSpec) -> str:
    """The data sets of a value that `data_sets` or `training_sets` returned, as text for messages."""
    return ", ".join(data_set_list(spec))


def source_names(spec: TrainingSpec) -> dict[str, str]:
    """By data set, a short name that no other of `spec` has, for metrics: letters, digits, '_', '.' and '-'.

    The name of a file without its ending, or what a name of another kind says after `builtin:` and the like.
    """
    every = list(dict.fromkeys(data_set_list(spec)))
    short = {each: _plain(_short(each)) for each in every}
    used = Counter(short.values())
    names: dict[str, str] = {}
    for each in every:
        name = short[each] if used[short[each]] == 1 else _plain(each)
        numbered = (f"{name}-{number}" for number in count(2))
        names[each] = (
            name if name not in names.values() else next(n for n in numbered if n not in names.values())
        )
    return names


def _short(spec: str) -> str:
    name = re.sub(r"^[a-z_]+:", "", spec.partition("?")[0])
    return PurePath(name).stem if re.search(r"\.(jsonl?|parquet|csv)$", name) else name


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"


def is_gym(spec: TrainingSpec) -> bool:
    """Whether all data sets of a value that `training_sets` returned are of reasoning-gym."""
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
