"""The exception for invalid configurations, the words of its messages, and the search for the nearest key.

Used for every configuration source: YAML files, `--set`, the environment and `.env` files. The words are also
those of messages about other files (`files.py`).
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from quatrain.config.secrets import redact_tokens

SHOWN_VALUE_LENGTH = 80
SHOWN_PROBLEMS = 10
SHOWN_NAMES = 12
SHOWN_KEYS = 1000
"""More than any configuration of verl, TRL or Tunix has."""
UNKNOWN_KEY = "unknown key"
NEAR = 0.65
"""Similarity of two words, twice their common letters by all letters, from which one may be meant."""


class ConfigError(ValueError):
    """An invalid configuration; `problems` has one message per invalid key, `remedy` one for all of them.

    `str()` puts each of the first SHOWN_PROBLEMS on a line, names the other unknown keys and counts the rest.
    """

    def __init__(self, problems: str | Sequence[str], remedy: str = ""):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        others = self.problems[SHOWN_PROBLEMS:]
        beginning = f"{UNKNOWN_KEY} "
        keys = [text.removeprefix(beginning).split(" ")[0] for text in others if text.startswith(beginning)]
        more = (
            [f"and {len(keys)} more unknown keys: {listed(keys, SHOWN_KEYS if remedy else SHOWN_NAMES)}"]
            if keys
            else []
        )
        if len(others) > len(keys):
            more.append(f"and {len(others) - len(keys)} more problems")
        super().__init__("\n".join([*self.problems[:SHOWN_PROBLEMS], *more, *filter(None, [remedy])]))


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
    """The valid dotted keys most similar to `key`, by its full path or last part alone; none if none is near.

    The last part alone finds a key that the user put into the wrong section, or into none: then there are as
    many as there are sections with such a key. A word that has little in common with any is no misspelling.
    """

    similarities: dict[str, float] = {}
    for candidate in valid:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        similarity = max(whole, 0.9 * last)
        # Of the whole path, a common section is a large part, whatever stands behind it.
        if last >= NEAR or ("." not in key and similarity >= NEAR):
            similarities[candidate] = similarity
    most = max(similarities.values(), default=0.0)
    return [candidate for candidate, value in similarities.items() if value == most]


def of_which_nearest(key: str, valid: Iterable[str]) -> str:
    """`, of which the nearest is …`, for a message about a name that is not valid; empty if none is near."""
    return "".join(f", of which the nearest is {name}" for name in nearest_keys(key, valid)[:1])


def disk_is_full(error: BaseException) -> bool:
    """Whether what could not be written lacked space; libraries hide the error's number in their texts."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def listed(names: Iterable[object], most: int = SHOWN_NAMES) -> str:
    """The first names as text for an error message, and the number of the others; `none` without names."""
    every = list(names)
    first = ", ".join(f"{name!s:.{SHOWN_VALUE_LENGTH}}" for name in every[:most])
    more = len(every) - most
    return (f"{first} and {more} more" if more > 0 else first) or "none"


def installation(*extras: str) -> str:
    """The command that installs optional packages of quatrain, for messages; it is in no package registry."""
    return f"`pip install -e '.[{','.join(extras)}]'` in the repository of quatrain"


def shown(value: object) -> str:
    """`value` as text for an error message, redacted and truncated to SHOWN_VALUE_LENGTH characters.

    Tokens of known services are redacted too: one may have been written in the place of its variable's name.
    """
    try:
        text = redact_tokens(repr(value), os.environ)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of more than 4,300 digits"
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
