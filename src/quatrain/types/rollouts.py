"""Sampling parameters, finished completions, and the batch that is made of them.

Data flow: a `Sampler` -> `Completion`s -> `rollout_batch` -> `RolloutBatch`, for the reward stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quatrain.config.schema import RolloutConfig
from quatrain.config.sections.rollout import MOST_KEPT
from quatrain.types.answer_text import CONTEXT, AnswerTokens
from quatrain.types.batches import Prompt, RolloutBatch, brief
from quatrain.types.kept import KEPT, KeptRow, KeptSets
from quatrain.types.metrics import Metric, Metrics, describe
from quatrain.types.pictures import PICTURES, Pictures, joined, stacked
from quatrain.types.piece import Piece
from quatrain.types.routes import ROUTES, live_of


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Each prompt gets `n` samples of at most `max_new_tokens` tokens. Temperature 0 is greedy decoding, and
    `top_k` 0 keeps all tokens. A completion ends after the token that completes one of the strings `stop`.
    With `replays`, the words that each token was drawn from are recorded: those that a grammar allows, or
    with a `top_k` of at most MOST_KEPT those that pass all filters.
    """

    n: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    replays: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"rollout.{name} must be at least 1, got {value}; set it to 1 or more")
        for rule, value, holds in (
            ("temperature >= 0 (0: greedy)", self.temperature, 0 <= self.temperature < math.inf),
            ("top_k >= 0 (0: off)", self.top_k, self.top_k >= 0),
            ("0 < top_p <= 1 (1: off)", self.top_p, 0 < self.top_p <= 1),
            ("0 <= min_p <= 1 (0: off)", self.min_p, 0 <= self.min_p <= 1),
        ):
            if not holds:
                raise ValueError(f"sampling needs {rule}, got {value}")

    @classmethod
    def of(cls, config: RolloutConfig) -> Sampling:
        """The sampling parameters of training, from the section `rollout` of the configuration."""
        sampling = {name: getattr(config, name) for name in cls.__dataclass_fields__}
        return cls(**{**sampling, "top_k": config.most_words})

    @property
    def num_kept(self) -> int:
        """The most words that a recorded list has; 0: there are none, as nothing bounds them."""
        return self.top_k if self.replays and self.temperature > 0 and self.top_k <= MOST_KEPT else 0


@dataclass(frozen=True)
class RolloutProgress:
    """Progress of a call of `Rollouts.generate` or `Rollouts.wait`.

    `total` is the number of completions that it waits for; `completions` counts also those of other prompts
    that are in flight.
    """

    completions: int
    total: int
    tokens_per_s: float
    slots_in_use: int

    def __str__(self) -> str:
        return (
            f"{self.completions}/{self.total} completions, {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.slots_in_use} slots"
        )


OnProgress = Callable[[RolloutProgress], None]


@dataclass
class Completion(Piece):
    """The tokens after a prompt, in turns of the policy.

    Its columns begin with the first token of the prompt; samples of a group share the arrays of these.
    """

    finish_reason: str = "length"
    turns: list[int] = field(default_factory=lambda: [0])
    """The index of the first token of each turn of the policy."""
    tail: int = field(default=0, compare=False)
    """The index of the first token that can still be part of a stop string."""
    cached: int = field(default=0, compare=False)
    """Tokens of the context that were not computed for it, because a kept context had them."""

    __repr__ = brief

    @property
    def last_turn(self) -> list[int]:
        """The tokens of the policy's last turn."""
        return self.tokens[self.turns[-1] :]

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append `tokens` that were sampled from weights of one `version`."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def begin_turn(self, tokens: Sequence[int], so_far: Pictures | None = None) -> None:
        """Append `tokens` that the policy did not sample, after which its next turn begins.

        `so_far` are the pictures of the whole sequence up to these tokens' end; None: they brought none.
        """
        if so_far is not None:
            self.record(PICTURES, 0, so_far.per_token())
        self.append(Piece.given(tokens))
        self.turns.append(len(self.tokens))
        self.tail = len(self.tokens)
        self.finish_reason = "length"


def rollout_batch(
    samples: Sequence[tuple[Prompt, Completion]],
    tokenizer: Any,
    metrics: Metrics,
    episodes: Sequence[int] | None = None,
) -> RolloutBatch:
    """The batch of finished `samples`, in the given order, with `metrics` and metrics of the lengths added.

    `tokenizer` decodes completions to the text that reward functions get (`AnswerTokens.text`); in an episode
    of several turns, the last turn. `episodes` has the number of each row's episode, if it may have
    several. The batch has `routes` and `kept` words if one of the completions has, and `pictures` if a
    sequence has.
    """
    lengths = [(len(prompt.input_ids), len(completion.tokens)) for prompt, completion in samples]
    shape = (len(samples), max((sum(both) for both in lengths), default=0))
    input_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    versions, attention = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, ((prompt, completion), (before, new)) in enumerate(zip(samples, lengths, strict=True)):
        span = slice(before, before + new)
        input_ids[row, :before], input_ids[row, span] = prompt.input_ids, completion.tokens
        logprobs[row, span], versions[row, span] = completion.logprobs, completion.versions
        attention[row, : before + new] = True
    reasons = np.array([completion.finish_reason for _, completion in samples], np.str_)
    names = samples[0][0].columns if samples else ()
    answers = AnswerTokens(tokenizer)
    batch = RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention,
        completion_mask=versions >= 0,
        rollout_logprobs=logprobs,
        policy_version=versions,
        finish_reason=reasons,
        group_ids=np.array([prompt.group_id for prompt, _ in samples], np.int64),
        prompts=tuple(prompt.text for prompt, _ in samples),
        completions=tuple(
            answers.text(c.last_turn, context_of(prompt.input_ids, c)) for prompt, c in samples
        ),
        columns={name: tuple(prompt.columns[name] for prompt, _ in samples) for name in names},
        episode_ids=None if episodes is None else np.array(episodes, np.int64),
        routes=_routes([completion.columns.get(ROUTES, ()) for _, completion in samples], lengths, shape[1]),
        pictures=stacked((sequence_pictures(*sample) for sample in samples), shape[1]),
        kept=_kept([completion.columns.get(KEPT, ()) for _, completion in samples], versions),
    )
    prompts = np.array([before for before, _ in lengths])
    return replace(batch, metrics={**_length_metrics(batch, prompts), **metrics})


def context_of(prompt_ids: np.ndarray, completion: Completion) -> list[int]:
    """The last tokens before the last turn of a completion, which may begin it."""
    given = completion.tokens[: completion.turns[-1]]
    return [*prompt_ids[-CONTEXT:].tolist(), *given[-CONTEXT:]][-CONTEXT:]


def sequence_pictures(prompt: Prompt, completion: Completion) -> Pictures | None:
    """Of the prompt and the completion behind it, the picture that each token stands for."""
    rows = completion.columns.get(PICTURES)
    before = prompt.pictures if rows is None else Pictures.of(np.concatenate(rows))
    known = 0 if before is None else len(before)
    return joined((before, known), (None, len(prompt.input_ids) + len(completion.tokens) - known))


def _routes(
    recorded: Sequence[Sequence[np.ndarray]], lengths: Sequence[tuple[int, int]], width: int
) -> np.ndarray | None:
    """[B, width, L, k]: what was recorded of each row, but of its last token; None if nothing was."""
    some = next((parts[0] for parts in recorded if parts), None)
    if some is None:
        return None
    routes = np.full((len(recorded), width, *some.shape[1:]), live_of(some.dtype), some.dtype)
    for row, (parts, (before, new)) in enumerate(zip(recorded, lengths, strict=True)):
        known = np.concatenate([*parts, routes[row, :0]])[: before + new - 1]
        routes[row, : len(known)] = known
    return routes


def _kept(recorded: Sequence[Sequence[np.ndarray]], versions: np.ndarray) -> KeptSets | None:
    """Of [B, T]: the sets of sampled tokens; those of tokens that another row trains are left out."""
    if not any(recorded):
        return None
    kept = KeptSets.stacked([KeptRow.of(parts) for parts in recorded], versions.shape[1])
    return None if kept is None else kept.only(versions >= 0)


def _length_metrics(batch: RolloutBatch, prompts: np.ndarray) -> Mapping[str, Metric]:
    """Lengths of the episodes: prompt and total those of the first row, completion that of all rows."""
    episodes = batch.episodes
    first_rows = episodes.first_rows
    truncated = batch.finish_reason[first_rows] == "length"
    return {
        **describe("length/prompt", prompts[first_rows], ("mean", "max")),
        **describe("length/completion", episodes.total(batch.completion_lengths), ("mean", "max")),
        **describe("length/total", batch.lengths[first_rows], ("mean", "max")),
        "rollout/truncated_fraction": Metric(float(truncated.sum()), len(truncated)),
    }
