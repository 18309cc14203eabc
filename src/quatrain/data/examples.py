"""Examples for supervised training, from rows with messages, with prompt and completion, or with a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from quatrain.config.schema import DataConfig
from quatrain.data.prompts import _Source
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.types.batches import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TrainOn = Literal["completion", "assistant", "all"]
OnLong = Literal["error", "skip", "truncate"]


class ExampleSource(_Source):
    """Tokenised examples, addressed by their place in an endless shuffled stream."""

    def batch(self, index: int, size: int) -> list[Example]:
        """Batch number `index`, from 0, of the stream in batches of `size` examples."""
        raise NotImplementedError

    def head(self, count: int | None = None) -> list[Example]:
        """The first `count` examples in file order (None: all)."""
        raise NotImplementedError

    def digests(self) -> dict[str, str]:
        """`Table.digests` of all rows."""
        raise NotImplementedError


def load_examples(
    spec: str | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    train_on: TrainOn,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
) -> ExampleSource:
    """The examples of `spec`."""
    raise NotImplementedError
