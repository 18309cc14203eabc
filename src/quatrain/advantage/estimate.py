"""Rewards to per-token advantages, with the configured estimator.

Line 3 of a training step: `RewardedBatch` -> `AdvantageEstimator.estimate` -> `AdvantagedBatch`.
"""

import inspect
from typing import Any, Self

import numpy as np

from quatrain.config.schema import AdvantageConfig, Config
from quatrain.ops.advantages import ADVANTAGE_ESTIMATORS, TokenAdvantages
from quatrain.types.batches import ENVIRONMENT, FAULTS, AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric, describe
from quatrain.workers.user_code import find_function, own_arguments

TOKEN_INPUTS = ("completion_mask", "token_rewards", "values")
"""[B, T] bool; both [B, T] float32 and 0 outside the completion mask: rewards of single tokens and a critic's
values."""
ROUNDING = 4 * np.finfo(np.float32).eps
"""Differences of float32 rewards up to this part of their sizes are 0."""
OF_FUNCTIONS = ("function_rewards", "function_weights")
"""[B, F] float32, the values of each reward function, NaN where it abstained; [F] float32, their weights."""
INPUTS = ("rewards", "group_ids", *TOKEN_INPUTS, "baseline_rewards", "episode_ids", *OF_FUNCTIONS)
"""What an estimator may name: [B] float32, NaN where nothing was scored; [B] int64; TOKEN_INPUTS; [B]
float32, the reward of the greedy completion of the same prompt; [B] int64, equal in the rows of one episode;
OF_FUNCTIONS.

For an estimator that does not name `token_rewards`, `rewards` includes their sum over the episode. For one
that does, what an environment gave for a turn is a reward of the turn's last token, and no part of `rewards`.
With `advantage.turn_credit` an estimator that does not is called for each turn too, with what it gave.
Where an episode has several rows, an estimator that names no input of tokens gets one item for each episode.
"""

BROUGHT_BY = {
    "values": "values come with a critic (`advantage.estimator: gae` brings one)",
    "baseline_rewards": "they come with greedy completions: set rollout.greedy_baseline to true",
    "function_weights": "they come with the reward stage: give RewardedBatch its function_weights",
}
"""What brings the inputs that not every batch has."""


class AdvantageEstimator:
    """The estimator named in `config`, with its arguments; a null scale is the estimator's own default.

    An estimator is a function of some of `INPUTS`, and of arguments from `advantage.args`, which returns one
    advantage per sequence [B] or one per token [B, T], or `TokenAdvantages`: advantages of either shape and
    the returns [B, T] that a critic is trained on. Entries outside the completion mask are ignored.
    Raises ValueError for an estimator that cannot be imported, and for arguments that it does not take.
    """

    def __init__(self, config: AdvantageConfig):
        self._name = f"advantage estimator {config.estimator!r}"
        self._is_built_in, self._turn_credit = config.estimator in ADVANTAGE_ESTIMATORS, config.turn_credit
        self._function = find_function(config.estimator, ADVANTAGE_ESTIMATORS, "advantage estimator")
        given = dict(config.args)
        if config.scale is not None:
            if "scale" in given:
                raise ValueError("advantage.args has scale; set the key advantage.scale instead")
            given["scale"] = config.scale
        self._arguments = own_arguments(
            self._function, self._name, inputs=INPUTS, shared={}, given=given, key="advantage.args"
        )
        parameters = inspect.signature(self._function).parameters
        self.inputs = tuple(name for name in INPUTS if name in parameters)
        """The inputs that the estimator names."""
        if "rewards" not in self.inputs:
            raise ValueError(
                f"{self._name} must take `rewards`; it takes {inspect.signature(self._function)}; "
                f"its inputs are {', '.join(INPUTS)}"
            )
        if self._turn_credit:
            self._check_turn_credit()
        if self._is_built_in:  # called on two groups, to check the ranges of arguments
            rows, tokens = np.zeros(4, np.float32), np.zeros((4, 1), np.float32)
            example = rows, np.array([0, 0, 1, 1]), tokens == 0, tokens, tokens, rows, np.arange(4)
            try:
                self._call(dict(zip(INPUTS, (*example, tokens, rows[:1]), strict=True)))
            except ValueError as error:
                raise ValueError(f"{self._name} cannot be used: {error}") from error

    @classmethod
    def of(cls, config: Config) -> Self:
        """The advantage stage; raises ValueError where the estimator takes what the run does not bring."""
        estimator = cls(config.advantage)
        for name, key, brought in (
            ("values", "critic.enabled", config.critic.enabled),
            ("baseline_rewards", "rollout.greedy_baseline", config.rollout.greedy_baseline),
        ):
            takes = name in estimator.inputs
            if takes != brought:
                verb = "takes" if takes else "does not take"
                raise ValueError(
                    f"{key} must be true if the advantage estimator takes {name}, and only then; "
                    f"advantage.estimator {config.advantage.estimator} {verb} {name}, and {key} is "
                    f"{str(brought).lower()}; set {key} to {str(takes).lower()}, or take another estimator"
                )
        if config.rollout.agent is not None:
            estimator.check_episodes()
        return estimator

    def _call(self, inputs: dict[str, Any]) -> Any:
        for values in inputs.values():
            if values is not None:
                values.setflags(write=False)
        return self._function(**{name: inputs[name] for name in self.inputs}, **self._arguments)

    def estimate(self, rewarded: RewardedBatch) -> AdvantagedBatch:
        """Advantages of all completion tokens, alike within a sequence where the estimator returns [B].

        The estimator's returns, if it has any, are those of the result.
        A batch in which every group has zero signal is no error: its advantages are all 0 and
        `advantage/zero_signal_fraction` is 1. The other metrics are over the sequences with a reward (their
        tokens, where the estimator returns [B, T]). Raises ValueError where the estimator fails, changes its
        inputs, or returns another shape or a value that is not finite.
        """
        rollouts = rewarded.rollouts
        mask, groups, (of_row, first_rows) = rollouts.completion_mask, rollouts.group_ids, rollouts.episodes
        by_episode = self._by_episode(rollouts)
        returned = self._returned(rewarded, first_rows if by_episode else np.arange(len(mask)))
        returns = None
        if isinstance(returned, TokenAdvantages):
            returned, returns = returned
            returns = np.where(mask, self._checked(returns, "returns", mask, (mask.shape,)), np.float32(0))
        shapes = ((len(first_rows),),) if by_episode else (mask.shape[:1], mask.shape)
        estimated = self._checked(returned, "advantages", mask, shapes)
        estimated = estimated[of_row] if by_episode else estimated
        advantages = np.where(mask, estimated.reshape(len(mask), -1), np.float32(0))
        scored = ~np.isnan(rewarded.rewards)
        once = first_rows[scored[first_rows]]
        described = estimated[once] if estimated.ndim == 1 else advantages[mask & scored[:, None]]
        metrics = describe("advantage", described, ("mean", "std", "min", "max"))
        signal = np.asarray((estimated if estimated.ndim == 1 else advantages.any(axis=1)) != 0)
        num_groups, num_with_signal = (len(np.unique(ids)) for ids in (groups, groups[signal]))
        metrics["advantage/zero_signal_fraction"] = Metric(num_groups - num_with_signal, num_groups)
        return AdvantagedBatch(rewarded, advantages, metrics, returns)

    def _check_turn_credit(self) -> None:
        reason = None
        if "token_rewards" in self.inputs:
            reason = "places the reward of a turn at the turn's last token anyway; set false"
        elif "function_rewards" in self.inputs:
            reason = "reads the values of reward functions, not the rewards of turns; set false"
        elif {"values", "baseline_rewards"}.intersection(self.inputs):
            reason = (
                "compares whole episodes with a critic or a greedy completion; set false, or take an "
                "estimator that compares samples, such as grpo or rloo"
            )
        if reason is not None:
            raise ValueError(f"advantage.turn_credit must be false for the {self._name}: it {reason}")

    def check_episodes(self) -> None:
        """Raises ValueError for a user's that takes tokens, and not the ids of episodes of several rows."""
        if self._takes_tokens and not self._is_built_in and "episode_ids" not in self.inputs:
            raise ValueError(
                f"{self._name} takes arrays of tokens, and episodes may have several rows; it must take "
                "`episode_ids` [B] too, which are equal in the rows of one episode; each of these rows has "
                "the episode's reward"
            )

    @property
    def _takes_tokens(self) -> bool:
        return any(name in self.inputs for name in TOKEN_INPUTS)

    def _by_episode(self, rollouts: RolloutBatch) -> bool:
        """Whether the estimator gets one item for each episode, not for each row."""
        if rollouts.episode_ids is None or "episode_ids" in self.inputs:
            return False
        self.check_episodes()
        return not self._takes_tokens

    def _returned(self, rewarded: RewardedBatch, rows: np.ndarray) -> Any:
        """What the estimator returns for its inputs of `rows`, unchecked."""
        for name, remedy in BROUGHT_BY.items():
            if name in self.inputs and getattr(rewarded, name) is None:
                raise ValueError(f"{self._name} takes {name}, and the batch has none; {remedy}")
        mask, episodes = rewarded.rollouts.completion_mask, rewarded.rollouts.episodes
        rewards, token_rewards, by_turn = rewarded.rewards, rewarded.token_rewards, None

        def of_episode(values: np.ndarray) -> np.ndarray:
            """[B] float64: the sum of `values` [B, T] over the tokens of each row's episode."""
            return episodes.total(values.sum(axis=1, dtype=np.float64))[episodes.of_row]

        if token_rewards is None:
            token_rewards = np.zeros(mask.shape, np.float32)
        elif "token_rewards" not in self.inputs:
            rewards = (rewards + of_episode(token_rewards)).astype(np.float32)
        if ("token_rewards" in self.inputs or self._turn_credit) and rewarded.environment_weight:
            by_turn = _turn_rewards(rewarded)
            rest = rewards - of_episode(by_turn)
            # Where the turns earned all of it, rounding would be a reward: an estimator may divide by it.
            rounding = ROUNDING * (np.abs(rewards) + of_episode(np.abs(by_turn)))
            rewards = np.where(np.abs(rest) <= rounding, 0, rest).astype(np.float32)
            token_rewards = token_rewards + by_turn
        inputs = {
            "rewards": rewards,
            "group_ids": rewarded.rollouts.compared_ids,
            "completion_mask": mask,
            "token_rewards": token_rewards,
            "values": rewarded.values,
            "baseline_rewards": rewarded.baseline_rewards,
            "episode_ids": episodes.of_row,
            "function_rewards": rewarded.rewards_per_function.T,
        }
        if len(rows) < len(mask):
            inputs = {name: None if values is None else values[rows] for name, values in inputs.items()}
        inputs["function_weights"] = rewarded.function_weights
        try:
            if self._turn_credit and by_turn is not None:
                return self._with_turns(inputs, by_turn, rewarded.rollouts.ended_by_fault)
            return self._call(inputs)
        except (Exception, SystemExit) as error:
            read_only = "read-only" in str(error)
            remedy = "; its inputs cannot be changed: work on a copy" if read_only else ""
            raise ValueError(f"{self._name} failed: {type(error).__name__}: {error}{remedy}") from error

    def _with_turns(self, inputs: dict[str, Any], earned: np.ndarray, faults: np.ndarray) -> np.ndarray:
        """[B, T]: the advantages by the other rewards, and at each turn those by what it earned.

        Turns of the same number are compared. NaN, and so no part of the statistics, is an episode without
        this turn or without a reward, and one of `faults`, whose reward is not the environment's.
        """
        mask = inputs["completion_mask"]
        begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
        number = np.where(mask, begins.cumsum(axis=1), 0)
        advantages = self._of_sequences(inputs, mask)
        for turn in range(1, number.max(initial=0) + 1):
            here = number == turn
            has_it = here.any(axis=1) & ~np.isnan(inputs["rewards"]) & ~faults
            rewards = np.where(has_it, np.where(here, earned, 0).sum(axis=1), np.nan).astype(np.float32)
            advantages += self._of_sequences(inputs | {"rewards": rewards, "completion_mask": here}, here)
        return advantages

    def _of_sequences(self, inputs: dict[str, Any], mask: np.ndarray) -> np.ndarray:
        """[B, T] float32: an estimator's advantages [B], at the tokens of `mask`."""
        return np.where(
            mask, self._checked(self._call(inputs), "advantages", mask, (mask.shape[:1],))[:, None], 0
        )

    def _checked(
        self, returned: Any, what: str, mask: np.ndarray, shapes: tuple[tuple[int, ...], ...]
    ) -> np.ndarray:
        """`returned` as float32, of one of `shapes` and finite on completion tokens."""
        values = np.asarray(returned)
        if values.shape not in shapes or not np.issubdtype(values.dtype, np.number):
            forms = [f"one per {'sequence' if len(shape) == 1 else 'token'} {shape}" for shape in shapes]
            raise ValueError(
                f"{self._name} must return {what} as numbers, {' or '.join(forms)}; it returned "
                f"{values.dtype} of shape {values.shape}"
            )
        if not np.isfinite(values if values.ndim == 1 else values[mask]).all():
            raise ValueError(
                f"{self._name} must return finite {what}; among them is NaN or infinity; a reward is NaN "
                "where nothing was scored: give such a sequence 0"
            )
        return values.astype(np.float32)


def _turn_rewards(rewarded: RewardedBatch) -> np.ndarray:
    """[B, T] float32: the part of `rewards` that each turn earned, at its last token; 0 elsewhere.

    It is the weighted reward of the turn by its environment. An episode has none if a fault ended it, or if
    the function `environment` did not score it.
    """
    rollouts = rewarded.rollouts
    earned = np.zeros(rollouts.completion_mask.shape, np.float32)
    raw = rewarded.rewards_per_function[rewarded.function_names.index(ENVIRONMENT)]
    whole = np.array(rollouts.columns["environment_reward"], np.float32)
    mask = np.pad(rollouts.completion_mask, ((0, 0), (0, 1)))
    last = mask[:, :-1] & ~mask[:, 1:]
    for row, rewards in enumerate(rollouts.columns["turn_rewards"]):
        ends = np.flatnonzero(last[row])
        if len(ends) == len(rewards) and raw[row] == whole[row] and rollouts.finish_reason[row] not in FAULTS:
            earned[row, ends] = rewarded.environment_weight * np.array(rewards)
    return earned
