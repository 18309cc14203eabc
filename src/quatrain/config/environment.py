"""Secrets: reading them from `.env` files and the environment, and redacting them in all output.

Data flow: a `.env` file sets environment variables that are not set yet, before the configuration is loaded.
Every log, configuration dump and run file is written through `redact`.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dotenv.parser import parse_stream

from quatrain.config.errors import ConfigError

REDACTED = "[redacted]"
# Redacting shorter values, or switches such as HF_HUB_DISABLE_IMPLICIT_TOKEN=true, would hide ordinary text.
SHORTEST_SECRET = 4
SWITCHES = frozenset({"true", "false", "none", "null"})

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_KEY|PRIVATE_KEY|TOKEN|SECRET)$|PASSWORD|PASSWD", re.IGNORECASE
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: `*_API_KEY`, `*_TOKEN`, `*PASSWORD*` and so on."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str, environ: Mapping[str, str]) -> str:
    """`text` with the value of every secret variable of `environ` replaced by `[redacted]`."""
    values = {value.strip() for name, value in environ.items() if is_secret_name(name)}
    # A secret of several lines may be printed line by line; in JSON its quotes are escaped.
    values |= {line.strip() for value in values for line in value.splitlines()}
    values |= {json.dumps(value)[1:-1] for value in values}
    secrets = [v for v in values if len(v) >= SHORTEST_SECRET and v.lower() not in SWITCHES]
    # The longest first, because one secret may be a prefix of another.
    for secret in sorted(secrets, key=lambda v: (-len(v), v)):
        text = text.replace(secret, REDACTED)
    return text


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
    for name, value in parse_dotenv(text, str(path)).items():
        environ.setdefault(name, value)
    return path
