"""Reads a `.env` file, which sets environment variables before the configuration is loaded.

A variable that is set already stays. The values of the file are secrets from then on (`secrets.py`).
"""

import io
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dotenv.parser import parse_stream

from quatrain.config.errors import ConfigError
from quatrain.config.secrets import remember_dotenv


def find_dotenv(directory: Path, home: Path | None) -> Path | None:
    """The first existing file of `<repository>/.env` and `~/.env`; None if there is none.

    Outside a git repository `<directory>/.env` is looked up instead of the repository's file.
    """
    directory = directory.resolve()
    root = next((p for p in (directory, *directory.parents) if (p / ".git").exists()), directory)
    candidates = [folder / ".env" for folder in (root, home) if folder is not None]
    return next((path for path in candidates if path.is_file()), None)


def parse_dotenv(text: str, source: str) -> dict[str, str]:
    """The variables of a `.env` file in python-dotenv's syntax; `${NAME}` in a value is not substituted.

    Raises ConfigError for a line that sets no variable and for a variable set twice. The error names `source`
    and the line number but does not show the line, which may contain a secret.
    """
    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        name, value, written = binding.key, binding.value, binding.original.string
        blank_lines = written[: len(written) - len(written.lstrip())].count("\n")
        place = f"{source}, line {binding.original.line + blank_lines}"
        if not written.strip() or written.lstrip().startswith("#"):
            continue
        if name is None or value is None or not name.isidentifier() or "\0" in value:
            raise ConfigError(f"{place}: expected KEY=VALUE, with matching quotes if any")
        if name in variables:
            raise ConfigError(f"{place}: {name} is set a second time; keep one line")
        variables[name] = value
    return variables


def load_dotenv(environ: MutableMapping[str, str], directory: Path | None = None) -> Path | None:
    """Sets variables of `environ` from the first `.env` file found; returns that file, or None.

    `directory` defaults to the working directory. A variable that is already set, even to the empty string,
    is not changed.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    path = find_dotenv(directory or Path.cwd(), Path(home) if home != "~" else None)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text") from None
    variables = parse_dotenv(text, str(path))
    remember_dotenv(variables, values_of_keys())
    for name, value in variables.items():
        environ.setdefault(name, value)
    return path


def values_of_keys() -> set[str]:
    """The texts that configuration keys have by default or offer for a choice: no secrets."""
    from quatrain.config.schema import Config, fields  # only with a file: commands without one start faster

    choices = (_choices(field.annotation) for field in fields().values())
    return _texts(Config().model_dump()).union(*choices)


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {text for inner in value.values() for text in _texts(inner)}
    return {value} if isinstance(value, str) else set()


def _choices(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {value for value in get_args(annotation) if isinstance(value, str)}
    return {text for inner in get_args(annotation) for text in _choices(inner)}


def warn_if_others_can_read(path: Path) -> str | None:
    """The warning for a `.env` file that others than its owner can read; None for a private one."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & (stat.S_IRGRP | stat.S_IROTH):
        return None
    return f"{path} holds secrets and can be read by others (mode {mode:03o}); run chmod 600 {path}"
