"""What a teacher says of a table of tokens: log-probabilities, and its likeliest words if they are asked for.

Data flow: parameters and a `TokenTable` -> `model_scores` -> `TeacherScores` -> `Teacher.score`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_columns, predict_tokens
from quatrain.forward.specs import PolicySpec, TopWordsSpec
from quatrain.forward.table import TokenTable
from quatrain.ops.logprobs import LOWEST
from quatrain.ops.top_words import NO_WORD


@dataclass(frozen=True)
class TopWords:
    """Which words a teacher is asked for: the `count` likeliest of the first `num_words`."""

    count: int
    num_words: int


class TeacherScores(NamedTuple):
    """Of a table [B, T]; arbitrary outside the scored tokens but for `logprobs`, which are 0 there."""

    logprobs: np.ndarray
    """[B, T] float32: of the tokens."""
    words: np.ndarray | None = None
    """[B, T, k] int32: the likeliest words; `NO_WORD` where there are fewer."""
    word_logprobs: np.ndarray | None = None
    """[B, T, k + 1] float32: of `words`, and of all others together; LOWEST for `NO_WORD`."""
    outside_mass: np.ndarray | None = None
    """[B, T] float32: probability of words that only the teacher has; None where this is not known."""


def model_scores(
    params: Any, table: TokenTable, *, model: PolicySpec, planner: MicroBatchPlanner, top: TopWords | None
) -> TeacherScores:
    """What `model` says of `table`; with `top`, also its likeliest words."""
    if top is None:
        return TeacherScores(predict_tokens(params, table, model=model, planner=planner))
    spec = model.extended(TopWordsSpec, count=top.count, num_words=top.num_words)
    return TeacherScores(*predict_columns(params, table, model=spec, planner=planner, count=4))


class Gathered:
    """The scores of a table [B, T] that sources give for some of its rows each; NaN for all others."""

    def __init__(self, table: TokenTable, width: int | None):
        shape = table.completion_mask.shape
        # NaN is what no source has filled in: 0 would be a certain token.
        logprobs = np.where(table.completion_mask, np.float32(np.nan), np.float32(0))
        self.scores = TeacherScores(logprobs)
        if width is not None:
            words = np.full((*shape, width), NO_WORD, np.int32)
            word_logprobs = np.full((*shape, width + 1), LOWEST, np.float32)
            self.scores = TeacherScores(logprobs, words, word_logprobs, np.zeros(shape, np.float32))

    def add(self, rows: np.ndarray, scores: TeacherScores) -> None:
        """Those of `rows`."""
        self.scores.logprobs[rows] = scores.logprobs
        if self.scores.words is None:
            return
        assert scores.words is not None, "a source gives the words that it is asked for"
        assert scores.word_logprobs is not None, "a source gives the words that it is asked for"
        assert self.scores.word_logprobs is not None, "words have log-probabilities"
        assert self.scores.outside_mass is not None, "words have log-probabilities"
        # A server gives one word more than a model, the sampled one; narrower rows leave `NO_WORD` before the
        # rest.
        count = scores.words.shape[-1]
        self.scores.words[rows, :, :count] = scores.words
        self.scores.word_logprobs[rows, :, :count] = scores.word_logprobs[..., :-1]
        self.scores.word_logprobs[rows, :, -1] = scores.word_logprobs[..., -1]
        if scores.outside_mass is not None:
            self.scores.outside_mass[rows] = scores.outside_mass
