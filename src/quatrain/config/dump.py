"""Writes a resolved configuration as YAML, with the layer that set each value in a comment, or as JSON.

Data flow: `Resolved` -> the output of `quatrain config` and the file `config.yaml` in a run's folder. Both
are valid configuration files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from quatrain.config.layers import parse_yaml
from quatrain.config.load import Resolved
from quatrain.config.secrets import redact, redact_values

# Column at which the comments start.
COMMENT_COLUMN = 40
HEADER = "# The final configuration of a run; the comment after a value names the layer that set it."


def dump_yaml(resolved: Resolved) -> str:
    """YAML that can be loaded again, `# layer` after each value; values of secret variables are redacted."""
    layers = redact_values(resolved.provenance, os.environ)
    return "\n".join([HEADER, *_lines(plain(resolved), layers, "", 0)]) + "\n"


def to_json(resolved: Resolved) -> str:
    """One JSON object with `config`, `provenance` (layer by dotted key) and `warnings`; secrets redacted."""
    content = {
        "config": plain(resolved),
        "provenance": redact_values(resolved.provenance, os.environ),
        "warnings": [redact(warning, os.environ) for warning in resolved.warnings],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def plain(resolved: Resolved) -> dict[str, Any]:
    """The configuration as JSON values; secrets are redacted."""
    values: dict[str, Any] = redact_values(resolved.config.model_dump(mode="json"), os.environ)
    return values


def by_dotted_key(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value in nested mappings; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from by_dotted_key(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lines(values: dict[str, Any], provenance: dict[str, str], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict) and value and key not in provenance:
            if depth == 0:
                yield ""
            yield f"{indent}{_scalar(name)}:"
            yield from _lines(value, provenance, f"{key}.", depth + 1)
        else:
            text = f"{indent}{_scalar(name)}: {_inline(value)}"
            yield f"{text:<{COMMENT_COLUMN}}  # {provenance[key]}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar(name)}: {_inline(each)}' for name, each in value.items())}}}"
    return f"[{', '.join(map(_inline, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    """One value on one line, quoted only if the unquoted text would not be read back as the same value."""
    if not isinstance(value, str):
        return yaml.safe_dump(value, width=math.inf).removesuffix("...\n").strip()
    if not set(value) & set(",[]{}\"'\n") and _reads_back(value):
        return value
    quoted = yaml.safe_dump(value, default_style='"', width=math.inf, allow_unicode=True)
    return quoted.rstrip("\n")


def _reads_back(text: str) -> bool:
    # Other YAML readers follow YAML 1.1, where `no` is false and `1:30` is 90. A value stays unquoted only if
    # YAML 1.1 and 1.2 agree on it.
    line = f"{text}: {text}  # comment"
    try:
        return parse_yaml(line, "") == yaml.safe_load(line) == {text: text}
    except (ValueError, yaml.YAMLError):
        return False
