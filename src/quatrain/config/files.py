"""Files that others wrote: JSON read within bounds, and its values checked against a typed description.

Data flow: a path -> `read_json` -> values -> `checked` -> an instance of a `Description`. Used for model
folders, GGUF headers, checkpoints and metrics. A `Description` is what a configuration's section is for the
configuration: types are not converted, numbers have bounds. Keys that it does not name are ignored.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from quatrain.config.errors import SHOWN_VALUE_LENGTH, rule, shown

MAX_JSON_BYTES = 2**26
"""Size of the largest JSON file that is read; the index of a model of 1e12 parameters has about 10 MB."""
MAX_DEPTH = 64
"""How deep lists and objects may be nested."""
_SHOWN_KEYS = 5
CORRECT = "correct the file, or fetch it again"
_FETCH = "fetch it again"


class Description(BaseModel):
    """The types and bounds of the values of one kind of file."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, strict=True, protected_namespaces=()
    )


Described = TypeVar("Described", bound=Description)


def checked(
    kind: type[Described], values: Mapping[str, Any], source: str, *, remedy: str = CORRECT
) -> Described:
    """`values` as a `kind`; raises ValueError that names `source`, each bad key, its rule and its value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
    more = len(problems) - _SHOWN_KEYS
    listed = "; ".join(problems[:_SHOWN_KEYS]) + (f"; and {more} more" if more > 0 else "")
    raise ValueError(f"{source}: {listed}; {remedy}")


def _problem(detail: Mapping[str, Any]) -> str:
    key = ".".join(str(part)[:SHOWN_VALUE_LENGTH] for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{key} must be given"
    if detail["type"] == "extra_forbidden":
        return f"{key} is not supported"
    # The configuration's rule for text has advice on YAML.
    said = "must be text" if detail["type"] == "string_type" else rule(detail)
    return f"{key} {said}, not {shown(detail['input'])}"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises ValueError for a file over MAX_JSON_BYTES, and for content that is not UTF-8, not JSON, nested
    deeper than Python can read, or no object.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path} must have at most {MAX_JSON_BYTES} bytes; it has {size}; {_FETCH}")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_FETCH}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object; it contains a {type(value).__name__}; {_FETCH}")
    return value


def too_deep(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether lists, tuples and mappings in `value` are nested deeper than `depth`."""
    if isinstance(value, Mapping):
        return depth <= 0 or any(too_deep(inner, depth - 1) for inner in value.values())
    if isinstance(value, list | tuple):
        return depth <= 0 or any(too_deep(inner, depth - 1) for inner in value)
    return False
