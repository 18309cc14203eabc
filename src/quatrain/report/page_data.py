"""Reads what the run page shows besides samples: metrics, configuration, plan, hints and state of a run.

Data flow: `metrics.jsonl`, `config.yaml`, `plan.json`, `hints.jsonl` and `run.json` of a run -> `run_data` ->
`page.py`.
A file that is missing, damaged, or of an earlier version costs a note in the page, never the page.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from quatrain.config.dump import by_dotted_key
from quatrain.config.schema import Config
from quatrain.config.settings import parse_yaml
from quatrain.report.hints import read_hints
from quatrain.report.page_samples import EVAL, STEP, number, sample_files
from quatrain.reward.forms import plain_json
from quatrain.run.catalogue import CATALOGUE, pattern_of
from quatrain.run.description import ended_with
from quatrain.run.metrics import read_metrics
from quatrain.run.run_dir import LOCK_FILES

RUNNING, FINISHED, ENDED = "running", "finished", "not finished"
UNSET = "not set"
CLIENT = "training_run.json"
"""A file in the folder of a training client of the server (`quatrain serve --train`), as no run has it."""
READ = ("metrics.jsonl", "config.yaml", "plan.json", "hints.jsonl", "run.json")


def run_data(folder: Path, *, ended: bool = False) -> dict[str, Any]:
    """All that the page shows of the run at `folder`, except samples, as JSON values.

    `ended`: the process that writes the run has done its work, although it is still alive.
    """
    notes: list[str] = []

    def read(name: str, of: Callable[[Path], Any], otherwise: Any) -> Any:
        """`of` the file `name`; `otherwise` without it, and with a note if it is damaged."""
        try:
            return of(folder / name)
        except FileNotFoundError:
            return otherwise
        except (OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError) as error:
            notes.append(f"{name} could not be read: {error}")
            return otherwise

    rows = read("metrics.jsonl", lambda path: _metric_rows(path, notes), [])
    if not (folder / "config.yaml").exists():
        notes.append("the run has no config.yaml")
    config = read("config.yaml", lambda path: config_rows(path.read_text("utf-8", errors="replace")), [])
    plan = read("plan.json", lambda path: _plan(json.loads(path.read_text("utf-8"))), None)
    hints, num_damaged = read("hints.jsonl", read_hints, ([], 0))
    notes += ["a damaged line of hints.jsonl was skipped"] * num_damaged
    starts = read(
        "run.json", lambda path: [*map(start_rows, json.loads(path.read_text("utf-8"))["starts"])], []
    )
    last_step = rows[-1]["step"] if rows else None
    values = {row["key"]: row["value"] for row in config}
    task = values.get("run.task", "rl")  # a run of an earlier version has none
    # The number 0 leaves it to epochs, as null does in `quatrain train`.
    total_steps = values.get("run.steps" if task == "rl" else f"{task}.steps") or None
    return {
        "state": _state(folder, ended, last_step, total_steps),
        "step": last_step,
        "total_steps": total_steps,
        "updated": _updated(folder),
        **columns(rows),
        "config": config,
        "plan": plan,
        "hints": hints,
        "starts": starts,
        "notes": notes,
    }


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The name of each run: its folder's, after as many parents as tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def run_stamp(folder: Path) -> list[Any]:
    """Size and time of each file that the page reads, and whether the run is being written."""
    named = [folder / name for name in READ]
    found: list[Any] = [_writer_is_alive(folder), *sample_files(folder, STEP), *sample_files(folder, EVAL)]
    for path in named:
        with suppress(OSError):
            status = path.stat()
            found.append((path.name, status.st_mtime_ns, status.st_size))
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics as one list per name, with null where a step has no value, and where one is not finite."""
    names: dict[str, list[Any]] = {}
    non_finite: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        for name, value in row.items():
            if name not in ("step", "non_finite"):
                names.setdefault(name, [None] * len(rows))[i] = number(value)
                if value is None:
                    non_finite.setdefault(name, []).append(row["step"])
    return {"steps": [row["step"] for row in rows], "metrics": names, "non_finite": non_finite}


def differing(configs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The keys whose values differ between runs, each with a value per run; `UNSET` where a run has none."""
    values = [{row["key"]: row["value"] for row in config} for config in configs]
    keys = list(dict.fromkeys(key for config in values for key in config))
    rows = [(key, [config.get(key, UNSET) for config in values]) for key in keys]
    return [{"key": key, "values": found} for key, found in rows if any(v != found[0] for v in found)]


def described(names: Sequence[str]) -> dict[str, list[str]]:
    """[unit, meaning] of each metric that the catalogue lists."""
    listed = [(name, CATALOGUE[pattern]) for name in names if (pattern := pattern_of(name)) is not None]
    return {name: [metric.unit, metric.meaning] for name, metric in listed}


@lru_cache(maxsize=16)  # a page is written after each step, of the same configurations
def config_rows(text: str) -> list[dict[str, Any]]:
    """Key, value, layer and default of each value in a `config.yaml`; raises ConfigError if it is damaged."""
    content = parse_yaml(text, "config.yaml")
    values = dict(by_dotted_key(content)) if isinstance(content, dict) else {}
    layers, defaults = dict(_layers(text)), _defaults()
    mappings = {key.rsplit(".", 1)[0] for key in values if key.count(".") == 2}
    left_out = [key for key in defaults if key not in values and key.rsplit(".", 1)[0] in mappings]
    rows = []
    for key, value in (*values.items(), *((key, UNSET) for key in left_out)):
        default, layer = defaults.get(key, UNSET), layers.get(key, "")
        differs, derived = value != default, layer in ("default", "derived")
        rows.append(
            {
                "key": key,
                "value": plain_json(value),
                "layer": layer,
                "default": default,
                "changed": differs and not derived,
                "derived": differs and derived,
            }
        )
    return rows


@cache
def _defaults() -> dict[str, Any]:
    return dict(by_dotted_key(Config().model_dump(mode="json")))


def _layers(text: str) -> Iterator[tuple[str, str]]:
    """(dotted key, layer) of the values of a `config.yaml`: the comment after each value."""
    lines = text.splitlines()

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.")
            else:
                # The mark of an empty mapping or a list may end on its line; what follows is the comment.
                end = value.end_mark
                rest = lines[end.line][end.column :] if end.line < len(lines) else ""
                yield name, rest.rpartition(" # ")[2].strip()

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from walk(root, "")


def _metric_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows = read_metrics(path)
    num_skipped = (len(path.read_bytes().splitlines()) if path.exists() else 0) - len(rows)
    if num_skipped > 0:
        notes.append(f"lines of metrics.jsonl that hold no whole row, skipped: {num_skipped}")
    return sorted(rows, key=lambda row: row["step"])


def _plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """{"rows": [{key, value, unit, why}], "warnings": […]} of what is in `plan.json`."""
    unit, why = plan.get("unit", {}), plan.get("why", {})
    rows = [
        {"key": key, "value": plain_json(value), "unit": str(unit.get(key, "")), "why": str(why.get(key, ""))}
        for key, value in plan.items()
        if key not in ("unit", "why", "warnings")
    ]
    return {"rows": rows, "warnings": [str(warning) for warning in plan.get("warnings", [])]}


def start_rows(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of what made the run at one of its starts, an entry of `run.json`."""
    devices, ended = start["devices"], start.get("ended_with_step")
    processes = f"{devices['processes']} process{'es' * (devices['processes'] != 1)}"
    commits = [
        (f"commit of {name.replace('_', ' ')}", f"{commit['hash']}, {commit['changed_files']} files changed")
        for name, commit in start["commits"].items()
        if commit is not None
    ]
    changed = start.get("changed_keys", {}).items()  # a start of an earlier version has none
    rows = [
        ("started", f"{start['time']}, after step {start['step']}"),
        ("command", start["command"]),
        ("working folder", start["working_folder"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())),
        *commits,
        ("devices", f"{devices['count']} {devices['kind']} in {processes}"),
        *((f"changed: {key}", f"{before} before, {now} now") for key, (before, now) in changed),
        *((f"copy of {path}", copy) for path, copy in start["code"].items()),
        ("ended", "with an error or a signal, or not yet" if ended is None else f"with step {ended}"),
    ]
    return [(name, str(text)) for name, text in rows]


def _state(folder: Path, ended: bool, last_step: int | None, total_steps: Any) -> str:
    if not ended and _writer_is_alive(folder):
        return RUNNING
    if (folder / CLIENT).is_file():  # whose end removes the lock's file
        return ENDED if (folder / LOCK_FILES[1]).is_file() else FINISHED
    # A run that finished and was resumed for more steps has the model of its first end.
    to_do = isinstance(total_steps, int) and last_step is not None and last_step < total_steps
    to_do &= last_step != ended_with(folder / "run.json")  # `run.stop_when` may end it earlier
    return FINISHED if (folder / "final").is_dir() and not to_do else ENDED


def _writer_is_alive(folder: Path) -> bool:
    """Whether the process that locked the run last is alive on this host.

    The lock itself is not tried, because that would make a run that starts at that moment fail.
    """
    try:
        owner = json.loads((folder / LOCK_FILES[1]).read_text(encoding="utf-8"))
        if owner["host"] != socket.gethostname():
            return False
        os.kill(int(owner["process"]), 0)
    except PermissionError:  # the process belongs to another user
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _updated(folder: Path) -> str | None:
    """When a metric was last written, as UTC."""
    try:
        written = (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(written))
