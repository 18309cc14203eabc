"""Groups of several batches as one batch.

Used by `loop/prompts.py`, whose rounds of sampling give a batch each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from quatrain.types.batches import RewardedBatch, RolloutBatch
from quatrain.types.kept import KeptSets
from quatrain.types.metrics import combine
from quatrain.types.pictures import TEXT, Pictures
from quatrain.types.routes import live_of

PADDING = {
    "input_ids": 0,
    "attention_mask": False,
    "completion_mask": False,
    "rollout_logprobs": 0.0,
    "policy_version": -1,
}
"""The fields [B, T] of a `RolloutBatch`, each with the value of its padding."""


def join_groups(batches: Sequence[RewardedBatch], groups: Sequence[int]) -> RewardedBatch:
    """The sequences of `groups`, in this order, as one batch; `batches` are those of the reward stage.

    Its metrics are those of all `batches`, also of groups that are left out. Raises ValueError for batches
    with token rewards or values, which come after the reward stage.
    """
    if any(batch.token_rewards is not None or batch.values is not None for batch in batches):
        raise ValueError(
            "batches are joined before their tokens are scored; these have token rewards or values"
        )
    rollouts = [batch.rollouts for batch in batches]
    rows = _rows_of(groups, rollouts)
    greedy = [batch.baseline_rewards for batch in batches if batch.baseline_rewards is not None]
    failed = [batch.failed for batch in batches if batch.failed is not None]
    return RewardedBatch(
        _join_rollouts(rollouts, groups),
        np.concatenate([batch.rewards for batch in batches])[rows],
        np.concatenate([batch.rewards_per_function for batch in batches], axis=1)[:, rows],
        batches[0].function_names,
        combine(*(batch.metrics for batch in batches)),
        baseline_rewards=np.concatenate(greedy)[rows] if greedy else None,
        environment_weight=batches[0].environment_weight,
        function_weights=batches[0].function_weights,
        failed=np.concatenate(failed, axis=1)[:, rows] if len(failed) == len(batches) else None,
    )


def _join_rollouts(batches: Sequence[RolloutBatch], groups: Sequence[int]) -> RolloutBatch:
    rows = _rows_of(groups, batches)
    width = int(np.concatenate([batch.lengths for batch in batches])[rows].max(initial=0))
    baselines = [batch.baseline for batch in batches if batch.baseline is not None]

    def listed(parts: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
        items = list(chain.from_iterable(parts))
        return tuple(items[row] for row in rows)

    return RolloutBatch(
        **{
            name: np.concatenate([_as_wide(getattr(batch, name), width, value) for batch in batches])[rows]
            for name, value in PADDING.items()
        },
        finish_reason=np.concatenate([batch.finish_reason for batch in batches])[rows],
        group_ids=np.concatenate([batch.group_ids for batch in batches])[rows],
        prompts=listed(batch.prompts for batch in batches),
        completions=listed(batch.completions for batch in batches),
        columns={
            # A reward function may log a column in some of the batches alone.
            name: listed(batch.columns.get(name, (None,) * len(batch)) for batch in batches)
            for name in dict.fromkeys(chain.from_iterable(batch.columns for batch in batches))
        },
        metrics=combine(*(batch.metrics for batch in batches)),
        baseline=_join_rollouts(baselines, groups) if baselines else None,
        episode_ids=_episode_ids(batches, rows),
        routes=_routes(batches, rows, width),
        pictures=_pictures(batches, rows, width),
        kept=_kept(batches, rows, width),
    )


def _episode_ids(batches: Sequence[RolloutBatch], rows: np.ndarray) -> np.ndarray | None:
    """[B] int64: numbers of the episodes of all `batches`, of `rows`; None if each row is an episode."""
    if all(batch.episode_ids is None for batch in batches):
        return None
    before = np.cumsum([0] + [len(batch.episodes.first_rows) for batch in batches])
    counted = [batch.episodes.of_row + first for batch, first in zip(batches, before, strict=False)]
    return np.concatenate(counted)[rows]


def _routes(batches: Sequence[RolloutBatch], rows: np.ndarray, width: int) -> np.ndarray | None:
    """[B, width, L, k] of `rows` of all `batches`, live in those without routes; None if all have none."""
    some = next((batch.routes for batch in batches if batch.routes is not None), None)
    if some is None:
        return None
    live = live_of(some.dtype)
    parts = [
        np.full((len(batch), width, *some.shape[2:]), live, some.dtype)
        if batch.routes is None
        else _as_wide(batch.routes, width, live)
        for batch in batches
    ]
    return np.concatenate(parts)[rows]


def _kept(batches: Sequence[RolloutBatch], rows: np.ndarray, width: int) -> KeptSets | None:
    """Of [B, width], of `rows` of all `batches`; None if no token of these has a set."""
    if all(batch.kept is None for batch in batches):
        return None
    each = [(batch.kept, number) for batch in batches for number in range(len(batch))]
    chosen = [each[row] for row in rows.tolist()]
    return KeptSets.stacked([None if kept is None else kept.row(number) for kept, number in chosen], width)


def _pictures(batches: Sequence[RolloutBatch], rows: np.ndarray, width: int) -> Pictures | None:
    """Of [B, width], of `rows` of all `batches`; None if none of these has a picture."""
    ids = np.concatenate(
        [
            np.full((len(batch), width), TEXT, np.int64)
            if batch.pictures is None
            else _as_wide(batch.pictures.ids, width, TEXT)
            for batch in batches
        ]
    )[rows]
    some = [batch.pictures.by_id for batch in batches if batch.pictures is not None]
    by_id = {key: picture for each in some for key, picture in each.items()}
    return Pictures(ids, by_id) if ids.any() else None


def _rows_of(groups: Sequence[int], batches: Sequence[RolloutBatch]) -> np.ndarray:
    """[B] row numbers, counted through all `batches`, of the sequences of `groups`."""
    group_ids = np.concatenate([batch.group_ids for batch in batches])
    return np.concatenate([np.flatnonzero(group_ids == group) for group in groups])


def _as_wide(values: np.ndarray, width: int, padding: Any) -> np.ndarray:
    """[B, width, …]: `values` [B, T, …] without columns beyond `width`, or padded up to it."""
    added = [(0, 0)] * values.ndim
    added[1] = 0, max(width - values.shape[1], 0)
    return np.pad(values[:, :width], added, constant_values=padding)
