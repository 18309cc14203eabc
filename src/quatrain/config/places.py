"""Paths in the configuration: a local path, in which `~` is the home folder, an id on the Hub, or a bucket's.

Used wherever `model.path`, `model.tokenizer` or a data set is opened.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER_OR_BUCKET = "must be a folder, gs://BUCKET/NAME or s3://BUCKET/NAME"
"""The rule for what is written to either, which `names_no_bucket` breaks."""
_ADDRESS = re.compile(r"[A-Za-z][\w.+-]+:/")
_BUCKET = re.compile(r"(gs|s3)://[^/]")
_LONGEST = 1024
"""Characters of a path; a longer text is none."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A Hub id, `owner/name`. Other text that is not an existing file is reported as a missing file."""
MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""What is downloaded of a model's folder beside its weights."""


_IN_FILES = frozenset(
    {
        *(
            "data.train",
            "data.eval",
            "data.chat_template",
            "data.image_root",
            "model.path",
            "model.tokenizer",
        ),
        *("sft.data", "sft.eval", "dpo.data", "dpo.eval", "dpo.loss", "dpo.reference"),
        *("rm.data", "rm.eval", "rm.loss"),
        *("critic.path", "reward.functions", "eval.accuracy", "advantage.estimator", "update.loss"),
        *("rollout.environment", "rollout.tools", "rollout.agent", "rollout.agent_python"),
        *("rollout.sampler", "distill.teacher", "distill.prompt"),
        *("reward.judge", "reward.judge.model", "reward.judge.template", "reward.judge.cache"),
    }
)
"""Keys whose values may name files."""
_MODEL = "model:"


def beside(key: str, value: Any, folder: Path) -> Any:
    """`value` of `key` in a configuration file of `folder`, with the paths that are there alone.

    So a configuration runs from any folder, with the data and functions that stand beside it.
    """
    if key not in _IN_FILES:
        return value
    if key == "reward.functions" and isinstance(value, dict):
        return {_beside(name, folder): entry for name, entry in value.items()}
    if key == "reward.judge" and isinstance(value, dict):
        return {name: beside(f"{key}.{name}", entry, folder) for name, entry in value.items()}
    if isinstance(value, dict):
        return {name: beside(key, entry, folder) for name, entry in value.items()}
    if isinstance(value, list):
        return [beside(key, entry, folder) for entry in value]
    return _beside(value, folder)


def _beside(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or "\n" in value or len(value) > _LONGEST:
        return value
    kind = _MODEL if value.startswith(_MODEL) else ""
    function = re.fullmatch(r"(.+\.py)(:\w+)", value)
    path, rest = (function[1], function[2]) if function else (value.removeprefix(kind), "")
    if not path or Path(path).is_absolute() or path.startswith("~") or _is_there(Path(), path):
        return value
    return f"{kind}{folder / path}{rest}" if _is_there(folder, path) else value


def _is_there(folder: Path, path: str) -> bool:
    if (folder / path).exists():
        return True
    return "*" in path and any(folder.glob(path))


def local_path(path: str | Path) -> Path:
    """`path` with a leading `~` or `~user` replaced by that user's home folder."""
    return Path(os.path.expanduser(path))


def is_bucket(path: object) -> bool:
    """Whether `path` names objects in a bucket: `gs://BUCKET/NAME` or `s3://BUCKET/NAME`."""
    return isinstance(path, str) and path.startswith(("gs://", "s3://"))


def has_scheme(path: object) -> bool:
    """Whether `path` names something elsewhere, by whatever scheme, as `s3a://BUCKET/NAME` or `gs:/NAME`."""
    return isinstance(path, str) and bool(_ADDRESS.match(path))


def names_no_bucket(path: object) -> bool:
    """Whether `path` is an address, and none of a bucket: of another scheme, or without a bucket's name."""
    return has_scheme(path) and not _BUCKET.match(str(path))


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder `quatrain` in the user's folder for caches."""
    caches = environ.get("XDG_CACHE_HOME", "")
    return Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache"), "quatrain")
