"""Which prompts are drawn by how often they have been answered right so far (`data.curriculum`).

Data flow: `PromptPosition.rates` -> `Curriculum.draw` -> prompts of a training step -> their rewards ->
`Curriculum.learned` -> `PromptPosition.rates` of the next step, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quatrain.config.errors import listed
from quatrain.config.schema import Config
from quatrain.config.sections.data import CurriculumValues
from quatrain.data.prompts import PromptSource
from quatrain.reward.scorer import RewardScorer
from quatrain.types.batches import Rates, RewardedBatch
from quatrain.types.metrics import Metric


class Curriculum:
    """Draws prompts of `prompts` by their rates, running means of a reward function's values.

    A prompt whose rate lies in [low, high] is drawn with the weight 1, another with the weight `outside`, a
    prompt without a rate as one with the rate `prior`. Of a mixture, the stream says how many prompts of a
    step are of each data set, and the rates which of them.
    """

    def __init__(self, values: CurriculumValues, prompts: PromptSource, *, seed: int):
        self._values, self._prompts, self._seed = values, prompts, seed

    @classmethod
    def of(cls, config: Config, prompts: PromptSource, reward: RewardScorer) -> Curriculum | None:
        """That of the configuration; None if it is off.

        Raises ValueError unless `reward` has the function that it needs.
        """
        values = config.data.difficulty
        if values is None:
            return None
        if values.reward not in (functions := reward.function_names):
            raise ValueError(
                f"data.curriculum.reward must be one of the run's reward functions, {listed(functions)}; "
                f"got {values.reward}; set it to one of them, or add it to reward.functions"
            )
        return cls(values, prompts, seed=config.seed)

    def draw(self, first: int, count: int, rates: Rates) -> list[int]:
        """The rows at `count` positions from `first` on; a function of the seed, of these and of `rates`.

        Without replacement, by the smallest of exponential variates over weights (Efraimidis and Spirakis,
        2006), so a row comes twice only if its data set has fewer rows than places.
        """
        sources = [self._prompts.source_of(at) for at in range(first, first + count)]
        within = self._bands(rates, self._values.prior)[1]
        uniform = np.random.default_rng((self._seed, first)).random(len(self._prompts))
        keys = -np.log1p(-uniform) / np.where(within, 1.0, self._values.outside)
        rows = np.empty(count, np.int64)
        for source in set(sources):
            places = [place for place, each in enumerate(sources) if each == source]
            own = self._prompts.rows_of(source)
            by_key = own.start + np.argsort(keys[own.start : own.stop], kind="stable")
            rows[places] = np.resize(by_key, len(places))
        return rows.tolist()

    def learned(self, rates: Rates, first: int, rows: Sequence[int], batch: RewardedBatch) -> Rates:
        """The rates after `batch`, whose groups from number `first` on are of the prompts `rows`.

        rate + newest * (mean of the group's values - rate), and the mean itself for the first group of a
        prompt. Samples on which the function abstained or failed, and episodes that a fault ended, which it
        does not see, do not count; a group of such alone changes nothing.
        """
        known = list(rates) or [None] * len(self._prompts)
        episodes = batch.rollouts.episodes.first_rows
        groups = batch.rollouts.group_ids[episodes]
        values = batch.judged_by(self._values.reward)
        values = np.where(batch.rollouts.ended_by_fault, np.nan, values)[episodes]
        for group, row in enumerate(rows, start=first):
            own = values[(groups == group) & ~np.isnan(values)]
            if own.size:
                mean, before = float(own.mean(dtype=np.float64)), known[row]
                known[row] = mean if before is None else before + self._values.newest * (mean - before)
        return tuple(known)

    def metrics(self, rates: Rates) -> dict[str, Metric]:
        """How many prompts are in each band, and the mean of the rates."""
        below, within, above = (int(band.sum()) for band in self._bands(rates, np.nan))
        seen = [rate for rate in rates if rate is not None]
        sizes = {"below": below, "within": within, "above": above, "unseen": len(self._prompts) - len(seen)}
        counted = {f"curriculum/{name}": Metric(size, reduction="sum") for name, size in sizes.items()}
        return {**counted, "curriculum/rate": Metric(float(np.sum(seen)), len(seen))}

    def _bands(self, rates: Rates, unseen: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which rows are below, within and above the band, where those without a rate have `unseen`."""
        known = np.array(rates or [None] * len(self._prompts), np.float64)  # None becomes NaN
        known = np.where(np.isnan(known), unseen, known)
        low, high = self._values.low, self._values.high
        return known < low, (low <= known) & (known <= high), known > high
