"""The exception for invalid configurations, the words of its messages, and the search for the nearest key.

Used for every configuration source: YAML files, `--set`, the environment and `.env` files. The words are also
those of messages about other files (`files.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from quatrain.config.secrets import redact

SHOWN_VALUE_LENGTH = 80
SHOWN_PROBLEMS = 10
SHOWN_NAMES = 12


class ConfigError(ValueError):
    """An invalid configuration; `problems` has one message per invalid key.

    `str()` puts each of the first SHOWN_PROBLEMS on a line and counts the others.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        others = len(self.problems) - SHOWN_PROBLEMS
        counted = [f"and {others} more problems"] if others > 0 else []
        super().__init__("\n".join([*self.problems[:SHOWN_PROBLEMS], *counted]))


_RULES = {
    "missing": "must be given",
    "string_type": "must be text; put it in quotes if YAML reads it as a number or a boolean",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "dict_type": "must be a mapping of names to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list, as [a, b]",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}


def rule(detail: Mapping[str, Any]) -> str:
    """The rule that a value breaks, from an entry of pydantic's `ValidationError.errors()`: `must be …`."""
    known = _RULES.get(detail["type"])
    if known:
        return known
    text: str = detail["msg"]
    if detail["type"] == "across_sections":
        return text
    for beginning in ("Input should be ", "Value error, "):
        text = text.removeprefix(beginning)
    for beginning in ("String should have ", "List should have "):
        text = text.replace(beginning, "must have ")
    return text if text.startswith("must") else f"must be {text}"


def nearest_keys(key: str, valid: Iterable[str]) -> list[str]:
    """The valid dotted keys most similar to `key`, by the full path or by the last part alone.

    The last part alone finds a key that the user put into the wrong section, or into none: then there are as
    many as there are sections with such a key.
    """

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last)

    similarities = {candidate: similarity(candidate) for candidate in valid}
    most = max(similarities.values())
    return [candidate for candidate, value in similarities.items() if value == most]


def disk_is_full(error: BaseException) -> bool:
    """Whether what could not be written lacked space; libraries hide the error's number in their texts."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def listed(names: Iterable[object]) -> str:
    """The first names as text for an error message, and the number of the others; `none` without names."""
    every = list(names)
    first = ", ".join(f"{name!s:.{SHOWN_VALUE_LENGTH}}" for name in every[:SHOWN_NAMES])
    more = len(every) - SHOWN_NAMES
    return (f"{first} and {more} more" if more > 0 else first) or "none"


def installation(*extras: str) -> str:
    """The command that installs optional packages of quatrain, for messages; it is in no package registry."""
    return f"`pip install -e '.[{','.join(extras)}]'` in the repository of quatrain"


def shown(value: object) -> str:
    """`value` as text for an error message, redacted and truncated to SHOWN_VALUE_LENGTH characters."""
    try:
        text = redact(repr(value), os.environ)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of more than 4,300 digits"
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
