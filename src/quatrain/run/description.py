"""What made a run: command, versions, commits, devices, absolute paths, and copies of users' code.

`loop/open_run.py` calls `describe` each time that a run starts or goes on. Data flow: configuration
and process -> `run.json` and `code/` in the folder of the run; docs/checkpoint.md has the form.
"""

import inspect
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from quatrain import __version__
from quatrain.cluster.processes import is_main_process, num_processes
from quatrain.config.fields import REWARD_MODEL
from quatrain.config.schema import Config
from quatrain.config.secrets import redact_tokens, redact_values
from quatrain.run.run_dir import RunDir, write_whole

GIT_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


def describe(
    run: RunDir, config: Config, functions: Mapping[str, Callable[..., Any]], changed: Mapping[str, Any]
) -> None:
    """Adds this start to `run.json`, in the main process; files with users' code are copied to `code/`.

    `functions`: reward functions that were given from Python. `changed`: `RunDir.changed_keys`. Secrets are
    redacted, and in the copies and the command also tokens of known services that no variable holds.
    """
    if not is_main_process():
        return
    files = [*_code_files(config), *_files_of(functions)]
    device = jax.devices()[0]
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": max(run.steps(), default=0),
        "command": redact_tokens(shlex.join(sys.argv), os.environ),
        "working_folder": os.getcwd(),
        "run_folder": str(run.path),
        "versions": {
            "python": platform.python_version(),
            "quatrain": __version__,
            **{name: version(name) for name in ("jax", "jaxlib")},
        },
        "commits": {"quatrain": _commit(Path(__file__)), "working_folder": _commit(Path.cwd())},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": num_processes(),
        },
        "changed_keys": dict(changed),
        "paths": paths_in(config),
        "code": {str(path): _copied(path, run.code) for path in dict.fromkeys(files)},
    }
    _write(run, [*starts_in(run.description), redact_values(start, os.environ)])


def describe_end(run: RunDir, step: int) -> None:
    """Adds to this start in `run.json`, in the main process, that the run ended with `step` as its last."""
    if is_main_process() and (starts := starts_in(run.description)):
        starts[-1]["ended_with_step"] = step
        _write(run, starts)


def ended_with(path: Path) -> int | None:
    """The last step of the run whose `run.json` is at `path`; None if its last start has not ended so."""
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["starts"][-1].get("ended_with_step")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def has_ended_with(path: Path, step: int) -> bool:
    """Whether a start of the run whose `run.json` is at `path` has ended with `step`, and its results."""
    return any(start.get("ended_with_step") == step for start in starts_in(path))


def _write(run: RunDir, starts: Sequence[Any]) -> None:
    write_whole(run.description, json.dumps({"starts": starts}, indent=2, ensure_ascii=False) + "\n")


def paths_in(config: Config) -> dict[str, str]:
    """The texts of the configuration that are the path of a file or folder, each with its absolute path."""
    paths = (text.rpartition(":")[0] if ".py:" in text else text for text in _texts(config.model_dump()))
    names = (path.removeprefix(REWARD_MODEL) for path in paths)
    # Without a mark of a path, `train` would be one where a folder is called so.
    return {
        name: os.path.abspath(os.path.expanduser(name))
        for name in names
        if ("/" in name or "." in name) and os.path.exists(os.path.expanduser(name))
    }


def _texts(value: Any) -> Iterator[str]:
    """All texts in `value`, names in mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (*_texts(name), *_texts(inner))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def _code_files(config: Config) -> Iterator[Path]:
    """The files of functions and classes that the configuration names by a path or by a module."""
    reward, rollout = config.reward, config.rollout
    functions = (config.advantage.estimator, config.update.loss, config.dpo.loss, config.rm.loss)
    agent = rollout.agent if ".py:" in (rollout.agent or "") else None  # not `verifiers:`, which is a module
    players = (rollout.environment, rollout.tools, agent, rollout.sampler)
    for text in _texts([reward.functions, players, functions, config.eval.accuracy]):
        where, colon, _ = text.rpartition(":")
        path = Path(where).expanduser() if where.endswith(".py") else _file_of_module(where)
        if colon and path is not None and path.suffix == ".py" and path.is_file():
            yield path.resolve()


def _file_of_module(name: str) -> Path | None:
    """The file of a module, found without importing it or the packages that it is in."""
    path: Sequence[str] | None = None
    origin = None
    for at in range(len(parts := name.split("."))):
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if spec is None:
            return None
        path, origin = spec.submodule_search_locations, spec.origin
    return None if origin is None else Path(origin)


def _files_of(functions: Mapping[str, Callable[..., Any]]) -> Iterator[Path]:
    """The files of functions given from Python; one that was defined in a session has none."""
    for function in functions.values():
        while isinstance(function, partial):
            function = function.func
        code = function if inspect.isroutine(function) else type(function)
        with suppress(TypeError):  # it is built in
            path = Path(inspect.getsourcefile(inspect.unwrap(code)) or "")
            if path.is_file():
                yield path.resolve()


def _copied(path: Path, folder: Path) -> str:
    """The name in the run's folder of a copy of the file `path`, which is made unless there is one."""
    text = redact_tokens(path.read_text(encoding="utf-8", errors="surrogateescape"), os.environ)
    folder.mkdir(exist_ok=True)
    number, copy = 0, folder / path.name
    while copy.exists() and copy.read_text(encoding="utf-8", errors="surrogateescape") != text:
        number += 1
        copy = folder / f"{path.stem}.{number}{path.suffix}"
    copy.write_text(text, encoding="utf-8", errors="surrogateescape")
    return f"{folder.name}/{copy.name}"


def _commit(path: Path) -> dict[str, Any] | None:
    """The commit that the folder, or the tracked file, `path` is at; None without git or outside of it."""
    folder = path if path.is_dir() else path.parent

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
        return found.stdout.strip()

    try:
        if path.is_file() and not git("ls-files", path.name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"hash": git("rev-parse", "HEAD"), "changed_files": len(changed.splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None


def starts_in(path: Path) -> list[Any]:
    """The starts in the file `run.json`; none if there is no file, or with a warning if it is damaged."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        return list(starts)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        logger.warning("%s was damaged, and what it said of earlier starts is lost", path)
        return []
