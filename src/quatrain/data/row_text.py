"""Texts with the names of data columns in braces, which a row fills: `The answer is {answer}.`

Used for the teacher's own prompts (`distill.prompt`) and the questions to a judge (`reward.judge`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quatrain.config.errors import listed, shown

_BRACES = re.compile(r"{{|}}|{(\w+)}|[{}]")
"""A literal brace, written twice, the name of a column, or a brace that is neither."""


class RowText:
    """`text`, in which `{name}` stands for a value and a literal brace is written twice.

    `key` names it in messages, and `otherwise` is a further remedy. Raises ValueError for braces around
    anything but a name.
    """

    def __init__(self, text: str, key: str, *, otherwise: str = ""):
        self._text, self._key, self._otherwise = text, key, otherwise
        if wrong := next((found for found in _BRACES.finditer(text) if found[0] in ("{", "}")), None):
            raise ValueError(
                f"{key} must have braces around the names of data columns alone, as {{answer}}; got "
                f"{shown(text[wrong.start() :])}; name a column, or write a literal brace twice{otherwise}"
            )
        self.columns = tuple(dict.fromkeys(filter(None, _BRACES.findall(text))))
        """The names in braces, each once."""

    def filled(self, values: Mapping[str, Any], written: Callable[[Any], str] = str) -> str:
        """The text with `values`, as `written` writes them; what they have in braces stays as it is.

        Raises ValueError for a value that is missing or null.
        """
        if missing := [name for name in self.columns if name not in values]:
            known = listed(values) or "none"
            raise ValueError(f"{self._key} names the column {missing[0]!r}; the data has {known}")
        if null := [name for name in self.columns if values[name] is None]:
            raise ValueError(
                f"{self._key} names the column {null[0]!r}, which must not be null; give a value, or remove "
                f"the row{self._otherwise}"
            )
        return _BRACES.sub(lambda found: written(values[found[1]]) if found[1] else found[0][0], self._text)
