"""The tokenised rows of a data set, stored completely in every process or distributed over processes.

`prompts.py` builds a table when it loads a data set, and its sources take rows from the table by number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quatrain.cluster.processes import gather_objects
from quatrain.types.batches import Prompt, PromptText
from quatrain.types.pictures import Pictures

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class TokenRow:
    """A row: its prompt as text and as [P] int32 tokens, its other columns, and the tokens of its answers."""

    number: int
    """Number of the row in its file, counting from 1."""
    text: PromptText
    input_ids: np.ndarray
    columns: Mapping[str, Any]
    parts: tuple[np.ndarray, ...] = ()
    """int32 tokens behind the prompt. Of an example: an answer, what stands before the next, the next answer,
    and so on. Of a pair: the chosen and the rejected answer."""
    source: str = ""
    """Name of its data set (`source_names`); empty where there is no other."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What a warning says of this row, by what it is about; only where the row was read."""
    pictures: Pictures | None = None
    """Which picture each token of the prompt and of `parts` stands for; None: all are text."""

    def prompt(self, group_id: int) -> Prompt:
        """The row as a `Prompt`, the input of the rollout."""
        return Prompt(group_id, self.input_ids, self.text, self.columns, self.source, self.pictures)

    def packed(self) -> list[Any]:
        """The row as a list that `unpacked` restores; JSON if its columns are, but for pictures."""
        parts, pictures = [part.tolist() for part in self.parts], self.pictures
        ids = self.input_ids.tolist()
        seen = None if pictures is None else [pictures.ids.tolist(), pictures.used]
        return [self.number, self.text, ids, dict(self.columns), parts, self.source, seen]

    @classmethod
    def unpacked(cls, content: list[Any]) -> TokenRow:
        """The row that `packed` turned into `content`, for example in another process."""
        number, text, ids, columns, parts, source, seen = content
        prompt = text if isinstance(text, str) else tuple(text)
        behind = tuple(np.array(part, np.int32) for part in parts)
        pictures = None
        if seen is not None:
            pictures = Pictures(np.array(seen[0], np.int64), {picture.id: picture for picture in seen[1]})
        return cls(number, prompt, np.array(ids, np.int32), columns, behind, source, pictures=pictures)


@dataclass(frozen=True)
class Table:
    """A table of `size` rows; `own` holds, by number, those stored in this process.

    If `spread` is false, `own` holds all rows. `skipped`, `truncated` and `filtered` count the skipped rows,
    the truncated ones and those left out by their pass rates or flags, `longer` the rows with answers left
    out because of their length, and `unseen` those left out for a bad picture, of all processes.
    """

    own: Mapping[int, TokenRow]
    size: int
    skipped: int = 0
    truncated: int = 0
    filtered: int = 0
    longer: int = 0
    spread: bool = False
    sources: Mapping[str, int] = field(default_factory=dict)
    """The rows of each data set of a mixture, in the order of their numbers; empty for other tables."""
    weights: tuple[int, ...] = ()
    """The weights of `sources`, whole numbers."""
    unseen: int = 0

    def take(self, numbers: Sequence[int]) -> list[TokenRow]:
        """The rows with these numbers; if the table is spread, every process must pass the same numbers."""
        if not self.spread:
            return [self.own[number] for number in numbers]
        found: dict[str, list[Any]] = {}
        for part in gather_objects({n: self.own[n].packed() for n in numbers if n in self.own}):
            found |= part
        return [TokenRow.unpacked(found[str(number)]) for number in numbers]

    def tally(self, kind: Callable[[TokenRow], str | None]) -> dict[str, tuple[int, int]]:
        """Kind -> (number of rows, number of the first), of the rows of all processes; None: not counted."""
        here: dict[str, list[int]] = {}
        for row in self.own.values():
            if (name := kind(row)) is not None:
                here.setdefault(name, [0, row.number])[0] += 1
        total: dict[str, tuple[int, int]] = {}
        for part in gather_objects(here) if self.spread else [here]:
            for name, (count, number) in part.items():
                before, first = total.get(name, (0, number))
                total[name] = before + count, first
        return total

    def digests(self, first: int | None = None) -> dict[str, str]:
        """A digest of the prompts, of their tokens and of each column, of the `first` rows (None: all).

        Where there are pictures, also of these.

        A mixture has one more, of the weights and sizes of its data sets.

        Each is the sum modulo 2^64 of the hashes of every row's number and value, so that it does not depend
        on which process has a row.
        """
        here: Counter[str] = Counter()
        for number, row in self.own.items():
            if first is None or number < first:
                here["the prompts"] += _hash([number, row.text])
                here["the tokens of the prompts"] += _hash([number, row.input_ids.tolist()])
                if row.pictures is not None:
                    here["the pictures of the prompts"] += _hash([number, row.pictures.ids.tolist()])
                if row.parts:
                    here["the tokens of the answers"] += _hash([number, [p.tolist() for p in row.parts]])
                for name, value in row.columns.items():
                    here[f"the column `{name}`"] += _hash([number, value])
        sums: Counter[str] = Counter()
        for part in gather_objects(here) if self.spread else [here]:
            sums.update(part)
        if self.weights:
            sums["the data sets of the mixture"] = _hash([list(self.weights), list(self.sources.values())])
        return {name: f"{total % 2**64:016x}" for name, total in sums.items()}


def _hash(value: Any) -> int:
    # What is not JSON is hashed as its `repr`, in which an address would differ from process to process.
    text = json.dumps(value, default=lambda other: _ADDRESS.sub("", repr(other)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
