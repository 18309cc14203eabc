"""Data sets of the package reasoning-gym as rows, and their entries made again for the reward.

Data flow: `reasoning_gym:NAME?…` -> `gym_rows` -> `generate` in a worker process -> rows for `rows.py`, with
the column `rg`; and `rg` -> `entry` in a worker process of the rewards (`reward/reasoning_gym.py`). An entry
is made again, and not kept in its row, because JSON makes lists of its tuples, with which some data sets do
not accept their own answer. Only worker processes import the package: Python's sets of texts have the same
order in all of them, on which the entries of some data sets depend.
"""

import copy
import importlib.util
import json
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any, get_type_hints

from quatrain.config.data_sets import gym_query
from quatrain.config.errors import installation
from quatrain.workers.pool import Failure, Pool

LONGEST_S = 3600.0
"""Seconds in which the rows of a data set must be there; the slowest data sets make a hundred in a second."""


def check_installed(what: str) -> None:
    """Raises ValueError unless the package is installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"{what} needs the package reasoning-gym: {installation('reasoning-gym')}")


def gym_rows(spec: str) -> list[dict[str, Any]]:
    """The rows of a data set of reasoning-gym: `prompt` (a message with the question), `answer` and `rg`.

    `rg` names the entry: name, configuration, seed and index of its data set, and a digest of its question.
    Raises ValueError for an unknown name, and for a configuration that the data set does not have.
    """
    check_installed(f"data set {spec!r}")
    name, config = gym_query(spec)
    with closing(Pool("reasoning-gym", 1)) as pool:
        made = pool.submit(f"{__name__}:generate", {"name": name, "config": config}, LONGEST_S).result()
    if isinstance(made, Failure):
        why = made.detail.strip().splitlines()[-1]
        raise ValueError(
            f"data set {spec!r} cannot be generated ({made.kind}): {why}; correct its configuration"
        )
    if "refused" in made:
        raise ValueError(f"data set {spec!r}: {made['refused']}")
    seed = config.pop("seed")
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "answer": answer,
            "rg": {"name": name, "config": config, "seed": seed, "index": index, "digest": _digest(question)},
        }
        for index, (question, answer) in enumerate(made["entries"])
    ]


def _digest(question: str) -> str:
    return blake2b(question.encode(errors="surrogatepass"), digest_size=8).hexdigest()


# In worker processes:


def generate(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """{"entries": [[question, answer], …]}, or {"refused": why there is no such data set}."""
    try:
        _data_set(name, json.dumps(config))
    except ValueError as error:
        return {"refused": str(error)}
    entries = (_entry(name, json.dumps(config), index) for index in range(config["size"]))
    return {"entries": [(made["question"], made["answer"]) for made in entries]}


def entry(name: str, config: Mapping[str, Any], seed: int, index: int, digest: str) -> tuple[Any, Any]:
    """The data set, and the entry that a value of the column `rg` names; the caller may change the entry.

    Raises ValueError if its question is another one than in the data.
    """
    text = json.dumps({**config, "seed": seed})
    made = copy.deepcopy(_entry(name, text, index))
    if _digest(made["question"]) != digest:
        raise ValueError(
            f"entry {index} of reasoning-gym's {name} has another question here than in the data: these come "
            "from another version of the package, or reward.workers is 0, with which sets of texts have "
            "another order; generate the data again, or set reward.workers to 1 or more"
        )
    return _data_set(name, text), made


@lru_cache(maxsize=1024)
def _entry(name: str, config: str, index: int) -> Any:
    data_set, state = _data_set(name, config), random.getstate()
    random.seed(index)  # some entries draw from this generator too
    try:
        return data_set[index]
    finally:
        random.setstate(state)


@lru_cache(maxsize=256)
def _data_set(name: str, config: str) -> Any:
    """The data set `name` with a configuration in JSON; raises ValueError if there is none such."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS or name == "composite":
        mixture = "; for a mixture, give a list of data sets" if name == "composite" else ""
        names = ", ".join(sorted(DATASETS.keys() - {"composite"}))
        raise ValueError(f"reasoning-gym's data sets are {names}; got {name!r}; name one of these{mixture}")
    try:
        return create_dataset(name, **_typed(name, DATASETS[name][1], json.loads(config)))
    except ValueError:
        raise
    except Exception as error:  # an AssertionError, if it is a rule of the configuration
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"reasoning-gym's {name} refuses {config} ({why}); correct it") from error


def _typed(name: str, form: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the types of its fields, such as tuples, dates and enumerations."""
    from pydantic import TypeAdapter, ValidationError

    types = get_type_hints(form)
    known = {field.name: types[field.name] for field in fields(form)}
    typed = {}
    for key, value in config.items():
        if key not in known:
            raise ValueError(
                f"the parameters of {name} are {', '.join(known)}; got {key!r}; correct the name"
            )
        try:
            typed[key] = TypeAdapter(known[key]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            kind = known[key].__name__ if isinstance(known[key], type) else known[key]
            raise ValueError(
                f"the parameter {key} of {name} must be {kind}; got {value!r} ({error.errors()[0]['msg']}); "
                "correct it"
            ) from None
    return typed
