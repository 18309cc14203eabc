"""The reward of an episode: the weighted sum of what its functions gave, less the penalty on being cut.

Data flow: values of each function (`scorer.py`) -> `Totals` -> `RewardedBatch.rewards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from quatrain.config.sections.reward import RewardConfig

OVERLONG = "overlong"


@dataclass(frozen=True)
class Totals:
    """Sums of weighted values, with the stop-properly penalty of `reward.truncated_factor` or `_reward`."""

    weights: np.ndarray
    """[F] float64."""
    penalised: np.ndarray
    """[F] bool: the functions whose sum the penalty changes, all but `overlong`, a penalty of its own."""
    factor: float | None = None
    reward: float | None = None

    @classmethod
    def of(cls, config: RewardConfig, specs: Sequence[str], *, penalises: bool = True) -> Self:
        """The totals of the entries `specs` of `config`; without a penalty unless it `penalises`."""
        weights = np.array([config.entries[spec].weight for spec in specs], np.float64)
        penalised = np.array([spec != OVERLONG for spec in specs], bool)
        forms = (config.truncated_factor, config.truncated_reward) if penalises else (None, None)
        return cls(weights, penalised, *forms)

    @property
    def has_penalty(self) -> bool:
        return self.factor is not None or self.reward is not None

    def __call__(self, raw: np.ndarray, truncated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rewards [E] float32 of values [F, E], NaN where a function abstained, and what was taken off.

        A function that abstains takes no part; where all do, the reward is NaN. In float64, rounded once.
        With R the sum of the penalised functions and L that of `overlong`, the reward of a `truncated` [E]
        episode is min(R, c R) + L with the factor c, and c + L with the reward c, where any of the penalised
        functions gave one. What was taken off [E] float64 is negative where the penalty is a higher reward.

        The penalty is that of ProRL v2, "stop properly", as in OpenRLHF (one coefficient, a factor from 0 to
        1, a reward below 0) and in NeMo-RL (the factor). Deviations: a negative R is not multiplied, which
        would make a cut completion better than the same one that ended; and L is added in full, where
        NeMo-RL leaves it out.
        """
        weighted = self.weights[:, None] * raw
        kept = np.nansum(weighted[self.penalised], axis=0)
        whole = np.nansum(weighted, axis=0)
        judged = ~np.isnan(weighted[self.penalised]).all(axis=0)
        penalised = np.full_like(kept, self.reward) if self.reward is not None else kept
        if self.factor is not None:
            penalised = np.minimum(kept, self.factor * kept)
        taken = np.where(truncated & judged, kept - penalised, 0.0)
        rewards = (whole - taken).astype(np.float32)
        rewards[np.isnan(raw).all(axis=0)] = np.nan
        return rewards, taken
