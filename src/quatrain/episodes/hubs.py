"""Environments of hubs as agents: of the packages verifiers and openenv, in an interpreter of their own.

Data flow: `rollout.agent: verifiers:TASKSET` or `openenv:URL` -> `hub_agent` -> the function of this package
that plays it in the agents' processes; `data.train: verifiers:TASKSET?…` -> `hub_rows` -> `tasks`, in a
process of the same interpreter -> rows.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from quatrain.config.data_sets import TrainingSpec, data_set_list, parameters
from quatrain.config.schema import Config
from quatrain.data.rows import GivenRows
from quatrain.workers.pool import Failure, Pool

VERIFIERS, OPENENV = "verifiers:", "openenv:"
LONGEST_S = 3600.0
"""Seconds in which the tasks of a taskset must be there."""
_HERE = Path(__file__).parent


def hub_agent(spec: str, args: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The function that plays an agent of a hub, with its arguments; another agent as it is."""
    if spec.startswith(VERIFIERS):
        name, config = parameters(spec, VERIFIERS)
        if config or not name:
            raise ValueError(
                "rollout.agent of verifiers must be verifiers:TASKSET, without parameters, which stand in "
                f"data.train, as verifiers:TASKSET?size=1000, and in rollout.agent_args; got {spec}"
            )
        return f"{_HERE / 'verifiers_child.py'}:agent", {"taskset": name, "config": dict(args)}
    if spec.startswith(OPENENV):
        url = spec.removeprefix(OPENENV)
        if "url" in args or not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(
                "rollout.agent of OpenEnv must be openenv:URL, as openenv:http://127.0.0.1:8000, its only "
                f"address; got {spec} and rollout.agent_args {dict(args)}; correct one of them"
            )
        return f"{_HERE / 'openenv_child.py'}:agent", {"url": url, **args}
    return spec, args


def hub_rows(config: Config, spec: TrainingSpec, given: GivenRows) -> GivenRows:
    """`given` with the rows of the data sets `verifiers:TASKSET?…` in `spec`.

    `size` and `skip` are the number of tasks, and of those that are left out before; other parameters are of
    the taskset's configuration. Raises ValueError for a taskset that cannot be loaded.
    """
    rows = dict(given)
    for each in data_set_list(spec):
        if each.startswith(VERIFIERS) and each not in rows:
            rows[each] = _tasks(config, each)
    return rows


def _tasks(config: Config, spec: str) -> list[dict[str, Any]]:
    if config.rollout.agent_python is not None:
        check_python(config.rollout.agent_python)
    name, taskset = parameters(spec, VERIFIERS)
    if not name:
        raise ValueError(f"data set {spec!r} must name a taskset of verifiers, as verifiers:TASKSET?size=100")
    skip, size = taskset.pop("skip", 0), taskset.pop("size", None)
    for key, value, least in (("skip", skip, 0), ("size", size, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(
                f"data set {spec!r}: {key} must be a whole number, at least {least}; got {value!r}; correct "
                "it"
            )
    options = config.rollout.agent_args if (config.rollout.agent or "").startswith(VERIFIERS) else {}
    given = {**options, "taskset": {**dict(options.get("taskset", {})), **taskset}}
    asked = {"taskset": name, "config": given, "skip": skip, "size": size}
    with closing(Pool("verifiers", 1, python=config.rollout.agent_python)) as pool:
        made = pool.submit(f"{_HERE / 'verifiers_child.py'}:tasks", asked, LONGEST_S).result()
    if isinstance(made, Failure):
        why = made.detail.strip().splitlines()[-1]
        raise ValueError(f"data set {spec!r}: its tasks cannot be listed ({made.kind}): {why}")
    return [{**row, "taskset": {"id": name, **taskset}} for row in made]


@cache
def check_python(python: str) -> None:
    """Raises ValueError unless `python` is an interpreter of Python 3.11 or newer; starts it once."""
    try:
        asked = [python, "-c", "import sys; print(sys.version_info >= (3, 11))"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said != "True":
        why = "is an older Python" if said == "False" else f"does not run: {said or 'it printed nothing'}"
        raise ValueError(
            f"rollout.agent_python must be an interpreter of Python 3.11 or newer; {python} {why}; give the "
            "path of one, as hub/bin/python, or null for the one that trains"
        )
