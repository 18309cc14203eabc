"""Writes a resolved configuration as YAML, with the layer that set each value in a comment, or as JSON.

Data flow: `Resolved` -> the output of `quatrain config` and the file `config.yaml` in a run's folder. Both
are valid configuration files.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from quatrain.config.load import DEFAULT, DERIVED, Resolved
from quatrain.config.schema import Config, sections
from quatrain.config.secrets import redact, redact_values
from quatrain.config.settings import SCALARS

# Column at which the comments start.
COMMENT_COLUMN = 40
HEADER = "# The final configuration; after each value, a comment names its layer."


def dump_yaml(resolved: Resolved, *, changed: bool = False) -> str:
    """YAML that can be loaded again, `# layer` after each value; values of secret variables are redacted.

    `changed`: only values that a layer sets to another than the default; what is derived is left out.
    """
    layers = redact_values(resolved.provenance, os.environ)
    return "\n".join([HEADER, *_lines(_shown(resolved, changed), layers, "", 0)]) + "\n"


def to_json(resolved: Resolved, *, changed: bool = False) -> str:
    """One JSON object with `config`, `provenance` (layer by dotted key) and `warnings`; secrets redacted."""
    content = {
        "config": _shown(resolved, changed),
        "provenance": redact_values(resolved.provenance, os.environ),
        "warnings": [redact(warning, os.environ) for warning in resolved.warnings],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def plain(resolved: Resolved) -> dict[str, Any]:
    """The configuration as JSON values; secrets are redacted."""
    values: dict[str, Any] = redact_values(resolved.config.model_dump(mode="json"), os.environ)
    return values


def _shown(resolved: Resolved, changed: bool) -> dict[str, Any]:
    values = plain(resolved)
    if not changed:
        return values
    defaults = Config().model_dump(mode="json")
    layers = (DEFAULT, DERIVED)
    chosen = {key for key, layer in resolved.provenance.items() if layer not in layers}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if name in sections() else {}
        found = {
            key: each
            for key, each in inner.items()
            if each != defaults[name][key] and any(f"{c}.".startswith(f"{name}.{key}.") for c in chosen)
        }
        if found or (name not in sections() and name in chosen and value != defaults[name]):
            kept[name] = found or value
    return kept


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
            yield f"{indent}{inline(name)}:"
            yield from _lines(value, provenance, f"{key}.", depth + 1)
        else:
            text = f"{indent}{inline(name)}: {inline(value)}"
            yield f"{text:<{COMMENT_COLUMN}}  # {provenance[key]}"


def sections_yaml(values: Mapping[str, Any]) -> str:
    """YAML of some sections or keys of a configuration, which can be loaded; secrets are redacted."""
    shown = redact_values(dict(values), os.environ)
    return str(yaml.dump(shown, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


def inline(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Quotes each text that YAML 1.1, which other readers follow, or YAML 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # In double quotes, a text of several lines stays on one.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _tag, (_pattern, _first) in SCALARS.items():
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
