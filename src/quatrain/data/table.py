"""The tokenised rows of a data set, in every process or spread over them.

Between `prompts.py`, which fills it, and the sources there, which take rows by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quatrain.cluster.processes import gather_objects
from quatrain.types import Prompt, PromptText


@dataclass(frozen=True)
class TokenRow:
    """A row with its prompt as text and as [P] int32 tokens, and the columns beside it."""

    number: int
    """In its file, counting from 1."""
    text: PromptText
    input_ids: np.ndarray
    columns: Mapping[str, Any]

    def prompt(self, group_id: int) -> Prompt:
        """The row as the rollout takes it."""
        return Prompt(group_id=group_id, input_ids=self.input_ids, text=self.text, columns=self.columns)

    def packed(self) -> list[Any]:
        """What `unpacked` makes the row of: JSON, where its columns are."""
        return [self.number, self.text, self.input_ids.tolist(), dict(self.columns)]

    @classmethod
    def unpacked(cls, content: list[Any]) -> TokenRow:
        """The row of another process."""
        number, text, ids, columns = content
        return cls(number, text if isinstance(text, str) else tuple(text), np.array(ids, np.int32), columns)


@dataclass(frozen=True)
class Table:
    """`size` rows, of which `own` are here, by number; all of them unless it is `spread`.

    `skipped` and `truncated` count, of all processes, rows left out and prompts that lost their beginning.
    """

    own: Mapping[int, TokenRow]
    size: int
    skipped: int = 0
    truncated: int = 0
    spread: bool = False

    def take(self, numbers: Sequence[int]) -> list[TokenRow]:
        """The rows of these numbers; where the table is spread, each process has to ask for the same."""
        if not self.spread:
            return [self.own[number] for number in numbers]
        found: dict[str, list[Any]] = {}
        for part in gather_objects({n: self.own[n].packed() for n in numbers if n in self.own}):
            found |= part
        return [TokenRow.unpacked(found[str(number)]) for number in numbers]
