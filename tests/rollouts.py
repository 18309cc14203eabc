"""Rollout batches of given texts and of given versions, for tests of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.rollout.fleet import Fleet
from quatrain.rollout.rollouts import Rollouts, SingleTurns
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.types.rollouts import Sampling


def local_rollouts(
    arch: Any, config: Any, tokenizer: Any, *, player: Any = None, thread: str | None = None, **options: Any
) -> Rollouts:
    """Line 1 on an engine with these `options`, which is its attribute `engine`."""
    on_progress = options.pop("on_progress", None)
    turns = player is not None
    engine = RolloutEngine(arch, config, tokenizer, per_request_sampling=turns, **options)
    rollouts = Rollouts(
        EngineService(engine, thread=thread),
        tokenizer,
        Sampling.of(config),
        player or SingleTurns(),
        bool(config.greedy_baseline),
        on_progress,
    )
    rollouts.engine = engine
    return rollouts


def fleet_rollouts(
    factories: Any, publisher: Any, *, sampling: Sampling, tokenizer: Any, player: Any = None, **options: Any
) -> Rollouts:
    """Line 1 on a fleet with these `options`."""
    greedy, on_progress = options.pop("greedy_baseline", False), options.pop("on_progress", None)
    fleet = Fleet(factories, publisher, **options)
    return Rollouts(fleet, tokenizer, sampling, player or SingleTurns(), greedy, on_progress)


def make_rollouts(
    completions: Sequence[str], prompts: Sequence[Any] | None = None, **columns: Sequence[Any]
) -> RolloutBatch:
    """A batch with these texts; each sequence has one prompt token and one completion token."""
    rows = len(completions)
    mask = np.tile([False, True], (rows, 1))
    return RolloutBatch(
        input_ids=np.ones((rows, 2), np.int32),
        attention_mask=np.ones((rows, 2), np.bool_),
        completion_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.array(["stop"] * rows),
        group_ids=np.arange(rows, dtype=np.int64),
        prompts=tuple(prompts or ["q"] * rows),
        completions=tuple(completions),
        columns={name: tuple(values) for name, values in columns.items()},
    )


def at_version(batch: AdvantagedBatch, version: int) -> AdvantagedBatch:
    """`batch` as if weights of `version`, in optimizer steps, had sampled it."""
    versions = np.where(batch.rollouts.completion_mask, version, -1).astype(np.int32)
    rollouts = replace(batch.rollouts, policy_version=versions)
    return replace(batch, rewarded=replace(batch.rewarded, rollouts=rollouts))


def take_rows(batch: RewardedBatch, rows: np.ndarray) -> RewardedBatch:
    """The sequences `rows` of `batch`, in this order."""

    values = {each.name: getattr(batch.rollouts, each.name) for each in fields(batch.rollouts)}
    taken = {name: value[rows] for name, value in values.items() if isinstance(value, np.ndarray)}
    taken |= {name: tuple(values[name][row] for row in rows) for name in ("prompts", "completions")}
    rollouts, raw = replace(batch.rollouts, **taken), batch.rewards_per_function[:, rows]
    return replace(batch, rollouts=rollouts, rewards=batch.rewards[rows], rewards_per_function=raw)
