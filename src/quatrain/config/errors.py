"""The one error a wrong configuration raises, and the search for the key that was meant.

Used by every layer of `config`: YAML files, `--set`, the environment and `.env` files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

SHOWN_VALUE_LENGTH = 80


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` has one message per bad key, `str()` one per line."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def nearest_key(key: str, valid: Iterable[str]) -> str:
    """The valid dotted key most like `key`: by the full path, or by the last part (in the wrong section)."""

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last)

    return max(valid, key=similarity)


def shown(value: object) -> str:
    """`value` as a message shows it, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
