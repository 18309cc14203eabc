"""The prompts that each training step is trained on, with dynamic sampling.

Data flow: `PromptSource` -> `PromptSampler.take`, which has prompts completed and scored (`step.collect`) ->
`RewardedBatch`, for `step.learn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quatrain.data.prompts import PromptSource
from quatrain.loop.curriculum import Curriculum
from quatrain.ops.advantages.gdpo import gdpo
from quatrain.plan.batch_plan import PictureTokens
from quatrain.types.batches import Prompt, PromptPosition, RewardedBatch
from quatrain.types.join import join_groups
from quatrain.types.metrics import Metric
from quatrain.types.pictures import TEXT

STEPS_WITHOUT_SIGNAL = 5
"""Training steps in a row in which dynamic sampling finds no group with signal, after which the run ends."""
LEAST_SIGNAL = 1e-5
"""Advantages by `gdpo`, sums of numbers about 1, that are not rounding."""

Sample = Callable[[Sequence[Prompt]], RewardedBatch]
"""Has prompts completed and scored."""


class NoSignal(RuntimeError):
    """Dynamic sampling found no group with signal in `STEPS_WITHOUT_SIGNAL` training steps in a row."""

    def __init__(self, rounds: int, prompts: int):
        super().__init__(
            f"in {STEPS_WITHOUT_SIGNAL} training steps in a row, no two samples of a prompt had different "
            "rewards (with advantage.estimator gdpo: an advantage from the values of its functions; the last "
            f"of these steps drew {prompts} prompts in {rounds} rounds); resume with a "
            "higher rollout.temperature or rollout.dynamic_sampling_rounds, or start another run with easier "
            "or harder prompts, a larger rollout.n or another reward"
        )


def picture_tokens(prompts: PromptSource) -> PictureTokens | None:
    """The placeholders of prompts, of all processes, each of which must ask; None without pictures."""
    tally = prompts.tally(
        lambda row: None if row.pictures is None else str(np.count_nonzero(row.pictures.ids != TEXT))
    )
    if not tally:
        return None
    counts = {int(tokens): count for tokens, (count, _) in tally.items()}
    total = sum(counts.values())
    return PictureTokens(total, sum(map(math.prod, counts.items())) / total, max(counts))


class PromptSampler:
    """Which prompts a training step is trained on: the stream of `prompts`, and dynamic sampling.

    A step has `batch_size` groups. With one round they are the next prompts of the stream. With several
    (`rollout.dynamic_sampling_rounds`), they are the next `batch_size` groups with signal: further prompts
    are drawn until so many are found. The stream goes on after the last group used, so that groups beyond it
    are drawn again by the next step, and groups without signal are the only ones that are not trained on. If
    the rounds do not suffice, the first groups without signal fill the batch. With a `curriculum`, which has
    one round, the rates of prompts say which stand at the next positions, and change with each batch.
    `by_function`: advantages come from the values of each reward function, as those of `gdpo`.
    """

    def __init__(
        self,
        prompts: PromptSource,
        *,
        batch_size: int,
        rounds: int,
        curriculum: Curriculum | None = None,
        by_function: bool = False,
    ):
        self._prompts, self._batch_size, self._rounds = prompts, batch_size, rounds
        self._curriculum, self._by_function = curriculum, by_function

    def next(self, position: PromptPosition) -> tuple[list[Prompt], PromptPosition]:
        """The prompts of the step at `position`, without dynamic sampling, and the next position."""
        end = position.next_prompt + self._batch_size
        return self._prompts.take(position.next_prompt, self._batch_size), PromptPosition(end)

    def take(self, position: PromptPosition, sample: Sample) -> tuple[RewardedBatch, PromptPosition]:
        """The rewarded batch of the training step that begins at `position`, and where the next one begins.

        Raises NoSignal in the fifth step in a row in which dynamic sampling finds no group with signal.
        """
        first, wanted = position.next_prompt, self._batch_size
        if self._curriculum is not None:
            return self._by_rates(self._curriculum, position, sample)
        if self._rounds == 1:
            prompts, position = self.next(position)
            return sample(prompts), position
        parts, signal, end = self._drawn(first, sample)
        without = 0 if signal else position.steps_without_signal + 1
        if without == STEPS_WITHOUT_SIGNAL:
            raise NoSignal(len(parts), end - first)
        used = signal[:wanted]
        fill = [group for group in range(first, end) if group not in signal][: wanted - len(used)]
        next_prompt = end if fill else used[-1] + 1
        counts = {
            "rounds": len(parts),
            "drawn_groups": end - first,
            "dropped_groups": next_prompt - first - wanted,
            "returned_groups": end - next_prompt,
            "filled_groups": len(fill),
        }
        batch = join_groups(parts, sorted(used + fill))
        counted = {f"dynamic_sampling/{name}": Metric(n, reduction="sum") for name, n in counts.items()}
        return replace(batch, metrics={**batch.metrics, **counted}), PromptPosition(next_prompt, without)

    def _by_rates(
        self, curriculum: Curriculum, position: PromptPosition, sample: Sample
    ) -> tuple[RewardedBatch, PromptPosition]:
        first, count = position.next_prompt, self._batch_size
        rows = curriculum.draw(first, count, position.rates)
        batch = sample(self._prompts.rows(rows, first))
        rates = curriculum.learned(position.rates, first, rows, batch)
        batch = replace(batch, metrics={**batch.metrics, **curriculum.metrics(rates)})
        return batch, PromptPosition(first + count, rates=rates)

    def _drawn(self, first: int, sample: Sample) -> tuple[list[RewardedBatch], list[int], int]:
        """The batch of each round, the groups with signal, and the position after the last prompt drawn."""
        parts: list[RewardedBatch] = []
        signal: list[int] = []
        end = first
        while len(parts) < self._rounds and len(signal) < self._batch_size:
            missing = self._batch_size - len(signal)
            expected = math.ceil(missing * (end - first) / len(signal)) if signal else missing
            count = min(expected, self._batch_size)
            parts.append(sample(self._prompts.take(end, count)))
            signal += groups_with_signal(parts[-1], by_function=self._by_function)
            end += count
        return parts, signal, end


def source_metrics(prompts: Sequence[Prompt], batch: RewardedBatch) -> dict[str, Metric]:
    """Metrics `source/<source>/…` of the samples of each data set of `prompts`; none where there is one."""
    rollouts, first = batch.rollouts, batch.rollouts.episodes.first_rows
    if not any(prompt.source for prompt in prompts):
        return {}
    named = {prompt.group_id: prompt.source for prompt in prompts}
    sources = np.array([named[group] for group in rollouts.group_ids[first].tolist()])
    values = {"reward": batch.rewards[first]}
    raw = zip(batch.function_names, batch.rewards_per_function[:, first], strict=True)
    values |= {f"reward/{name}": of_function for name, of_function in raw}
    values["completion_length"] = rollouts.episodes.total(rollouts.completion_lengths)
    metrics: dict[str, Metric] = {}
    for source in sorted(set(sources.tolist()) - {""}):
        own = sources == source
        metrics[f"source/{source}/samples"] = Metric(int(own.sum()), reduction="sum")
        for name, each in values.items():
            finite = each[own & np.isfinite(each)]
            metrics[f"source/{source}/{name}"] = Metric(float(finite.sum(dtype=np.float64)), finite.size)
    return metrics


def groups_with_signal(batch: RewardedBatch, *, by_function: bool = False) -> list[int]:
    """The ids, in increasing order, of the groups with different rewards, for one role where there are some.

    They are those of the samples and of the greedy completion, if there is one. A sample without a reward,
    because all reward functions abstained, does not count. `by_function`: those with an advantage by `gdpo`,
    which samples of the same sum may have.
    """
    rollouts = batch.rollouts
    if by_function and batch.function_weights is not None:
        once = rollouts.episodes.first_rows
        functions = batch.rewards_per_function[:, once].T, batch.function_weights
        sums = gdpo(batch.rewards[once], rollouts.compared_ids[once], *functions, scale="none")
        return np.unique(rollouts.group_ids[once][np.abs(sums) > LEAST_SIGNAL]).tolist()
    _, rows, membership = np.unique(rollouts.compared_ids, return_index=True, return_inverse=True)
    groups = rollouts.group_ids[rows]
    least, most = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    for rewards in (batch.rewards, batch.baseline_rewards):
        if rewards is not None:
            np.fmin.at(least, membership, rewards)
            np.fmax.at(most, membership, rewards)
    return np.unique(groups[least < most]).tolist()
