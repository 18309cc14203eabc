"""Preferences: pairs of answers, and answers that were called good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from quatrain.config.schema import DataConfig
from quatrain.data.examples import OnLong
from quatrain.data.prompts import _Source
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.types.batches import Judged, Pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PairSource(_Source):
    """Tokenised pairs, addressed by their place in an endless shuffled stream."""

    def batch(self, index: int, size: int) -> list[Pair]:
        """Batch number `index`, from 0, of the stream in batches of `size` pairs."""
        raise NotImplementedError

    def head(self, count: int | None = None) -> list[Pair]:
        """The first `count` pairs in file order (None: all)."""
        raise NotImplementedError


class JudgedSource(_Source):
    """Tokenised judged answers, addressed by their place in an endless shuffled stream."""

    def batch(self, index: int, size: int) -> list[Judged]:
        """Batch number `index`, from 0, of the stream in batches of `size` answers."""
        raise NotImplementedError

    def head(self, count: int | None = None) -> list[Judged]:
        """The first `count` answers in file order (None: all)."""
        raise NotImplementedError


def load_pairs(
    spec: str | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
    margins: bool = False,
    by_length: bool = False,
) -> PairSource:
    """The pairs of `spec`."""
    raise NotImplementedError


def load_judged(
    spec: str | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
) -> JudgedSource:
    """The judged answers of `spec`; each pair of paired data is two."""
    raise NotImplementedError
