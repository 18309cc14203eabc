"""The exception for invalid configurations, and the search for the valid key closest to a misspelled one.

Used for every configuration source: YAML files, `--set`, the environment and `.env` files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from quatrain.config.secrets import redact

SHOWN_VALUE_LENGTH = 80


class ConfigError(ValueError):
    """An invalid configuration; `problems` has one message per invalid key, `str()` puts each on a line."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def nearest_key(key: str, valid: Iterable[str]) -> str:
    """The valid dotted key most similar to `key`, by the full path or by the last part alone.

    The last part alone finds a key that the user put into the wrong section.
    """

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last)

    return max(valid, key=similarity)


def shown(value: object) -> str:
    """`value` as text for an error message, redacted and truncated to SHOWN_VALUE_LENGTH characters."""
    text = redact(repr(value), os.environ)
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
