"""Random episodes of agents, as trees of turns, and the rows that they become.

Used by the tests of episodes of several rows, and by `make oracles`, which sums over turns one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from goldens import read_golden

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.params import leaf_at, tensor_names
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import RewardedBatch, RolloutBatch
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

MOST_NEW_TOKENS = 20
"""The constant by which `seq_mean_token_sum_norm` divides."""


@dataclass(frozen=True)
class Turn:
    """One answer: what was given since the answer `parent` (None: it begins anew), and what was sampled."""

    parent: int | None
    given: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True)
class Episode:
    """The turns of an episode, each after its parent, with its group and its reward."""

    turns: tuple[Turn, ...]
    group: int
    reward: float

    def path(self, turn: int) -> list[int]:
        """The turns from a root to `turn`."""
        parent = self.turns[turn].parent
        return [*([] if parent is None else self.path(parent)), turn]

    def context(self, turn: int) -> list[int]:
        """The ids before the answer `turn`."""
        *before, last = (self.turns[i] for i in self.path(turn))
        return [token for each in before for token in (*each.given, *each.sampled)] + [*last.given]

    @property
    def leaves(self) -> list[int]:
        """The turns that no other continues."""
        parents = {turn.parent for turn in self.turns}
        return [turn for turn in range(len(self.turns)) if turn not in parents]


def draw_episodes(seed: int, num_groups: int = 3, n: int = 3, vocab: int = 40) -> list[Episode]:
    """`n` episodes of each of `num_groups` prompts, of one to five turns; some branch, some begin anew."""
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab, rng.integers(least, most + 1)).tolist())

    episodes = []
    for group in rng.permutation(10 * num_groups)[:num_groups].tolist():
        prompt = ids(2, 5)
        for _ in range(n):
            turns = [Turn(None, prompt, ids(1, 4))]
            for number in range(1, rng.integers(1, 6)):
                if rng.random() < 0.25:
                    turns.append(Turn(None, ids(2, 5), ids(1, 4)))
                else:
                    turns.append(Turn(int(rng.integers(number)), ids(0, 3), ids(1, 4)))
            episodes.append(Episode(tuple(turns), group, float(rng.normal())))
    return episodes


def as_rows(episodes: Sequence[Episode], ends: Sequence[Sequence[int]], owners: int | None) -> RewardedBatch:
    """The batch of the paths to the turns `ends` of each episode, which have all turns of it.

    Each turn is in the completion mask of one row: the first that has it, or with a seed `owners`, one that
    is drawn. Rows that own no turn are left out.
    """
    rng = None if owners is None else np.random.default_rng(owners)
    rows: list[tuple[list[int], list[int], int]] = []
    for number, episode in enumerate(episodes):
        paths = [episode.path(end) for end in ends[number]]
        holders = [[i for i, path in enumerate(paths) if turn in path] for turn in range(len(episode.turns))]
        owner = [held[0] if rng is None else rng.choice(held) for held in holders]
        for i, path in enumerate(paths):
            ids, sampled = [], []
            for turn in path:
                given, answer = episode.turns[turn].given, episode.turns[turn].sampled
                ids += [*given, *answer]
                sampled += [0] * len(given) + [int(owner[turn] == i)] * len(answer)
            if any(sampled):
                rows.append((ids, sampled, number))
    shape = len(rows), max(len(ids) for ids, _, _ in rows)
    input_ids, attention, mask = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, (ids, sampled, _) in enumerate(rows):
        input_ids[row, : len(ids)], attention[row, : len(ids)], mask[row, : len(ids)] = ids, True, sampled
    of_row = np.array([number for _, _, number in rows])
    rollouts = RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention,
        completion_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(len(rows), "stop"),
        group_ids=np.array([episodes[number].group for number in of_row]),
        prompts=("",) * len(rows),
        completions=("",) * len(rows),
        episode_ids=of_row * 7 % 1009,
    )
    rewards = np.array([episodes[number].reward for number in of_row], np.float32)
    return RewardedBatch(rollouts, rewards, rewards[None], ("r",))


def leaf_rows(episodes: Sequence[Episode], owners: int | None = None) -> RewardedBatch:
    """A row for each leaf, as the rollout makes them."""
    return as_rows(episodes, [episode.leaves for episode in episodes], owners)


def turn_rows(episodes: Sequence[Episode]) -> RewardedBatch:
    """A row for each turn: every path is cut at every turn."""
    return as_rows(episodes, [range(len(episode.turns)) for episode in episodes], None)


def cut_rows(episodes: Sequence[Episode], seed: int) -> RewardedBatch:
    """A row for each leaf, and rows that end at some of the turns before; owners are drawn."""
    rng = np.random.default_rng(seed)
    ends = [
        rng.permutation([t for t in range(len(e.turns)) if t in e.leaves or rng.random() < 0.5]).tolist()
        for e in episodes
    ]
    return as_rows(episodes, ends, seed)


def episode_gradients(aggregation: str, rewarded: RewardedBatch) -> dict[str, np.ndarray]:
    """The gradient of each tensor of qwen2's golden model on a batch of episodes.

    The loss is REINFORCE with the rewards as advantages, weighed by `aggregation`, at temperature 1.
    """
    arch, params = read_golden("qwen2").model()
    rollouts, mask = rewarded.rollouts, rewarded.rollouts.completion_mask
    columns = {"advantages": np.where(mask, rewarded.rewards[:, None], np.float32(0))}
    columns |= dict.fromkeys(("rollout_logprobs", "old_logprobs"), rollouts.rollout_logprobs)
    table = TokenTable(
        rollouts.input_ids, rollouts.attention_mask, mask, columns, rollouts.group_ids, rollouts.episode_ids
    ).weighted(aggregation, MOST_NEW_TOKENS)
    objective = PolicyObjective.of(UpdateConfig(loss="reinforce"), on_policy=False)
    planner = MicroBatchPlanner(max_tokens=64, share_prompts=True)
    batches = [batch for _, batch in micro_batches(table, planner, one_device())]
    spec = PolicySpec(arch, temperature=1.0, remat="none")
    grads, *_ = sum_gradients(params, batches, model=spec, objective=objective)
    found = jax.tree.map(lambda gradient: np.asarray(gradient[0]), grads)  # of the one copy of the model
    return {name.name: name.of(leaf_at(found, name.path)) for name in tensor_names(arch)}
