"""Training on preferences: pairs of answers, or answers called good or bad, as losses of a whole mini-batch.

Data flow: `Pair`s or `Judged` answers -> `pair_table` or `judged_table` -> predictions (log-probabilities of
a policy, scores of a reward model) -> `Preference`, `RewardPairs` or `Judgement`, which sum them by sequence,
apply a loss of `ops/preferences.py` or a user's own, and give each token its slope.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quatrain.config.schema import Config
from quatrain.config.sections.given import WITHOUT_REFERENCE, DPOConfig, RMConfig
from quatrain.forward.table import TokenTable, padded
from quatrain.ops.preferences import (
    PREFERENCE_LOSSES,
    SCORE_LOSSES,
    PairLosses,
    Pairs,
    kto,
)
from quatrain.types.batches import Judged, Pair
from quatrain.types.metrics import Metric, combine, describe, mean_of_rows
from quatrain.update.coupled import Coupled, CoupledLoss
from quatrain.workers.user_code import find_function, first_parameter, own_arguments

logger = logging.getLogger(__name__)
KTO = "kto"
"""`dpo.loss` of single answers instead of pairs."""
OF_SECTION = "beta", "label_smoothing", "gamma", "center"
"""Keys of `dpo` and `rm` that are passed to a loss if it has a parameter of that name without a default."""
WRONG_SLOPE = 0.01
"""Difference of a slope from the change of the loss, as a part of it, above which a warning is logged."""


def coupled_of(config: Config) -> Coupled:
    """The objective of `quatrain dpo` or `quatrain rm`.

    Raises ValueError for a loss that cannot be imported, that does not take its arguments, or that fails on
    pairs made up for this check.
    """
    if config.run.task == "rm":
        return RewardPairs.of(config.rm)
    return Judgement.of(config.dpo) if config.dpo.loss == KTO else Preference.of(config.dpo)


def reads_reference(config: Config) -> bool:
    """Whether the objective of `coupled_of` reads log-probabilities of a frozen reference."""
    return config.run.task == "dpo" and config.dpo.reads_reference


def pair_table(
    pairs: Sequence[Pair], *, scored_at_end: bool = False, pad_token_id: int | None = None
) -> TokenTable:
    """2B sequences: each prompt with its better answer, then each with its other one; the answers are scored.

    The two of a pair have one of `group_ids`, so that their prompt is computed once. With `scored_at_end`
    each has one scored place, whose prediction is the score of the whole (`TokenTable.scored_at_end`).
    `of_rows` has "reference", zeros that the log-probabilities of a reference replace, in the same order.
    """
    answers = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    prompts = [pair.prompt_ids for pair in pairs] * 2
    if scored_at_end:
        table = TokenTable.scored_at_end(_joined(prompts, answers), pad_token_id)
    else:
        table = _answers_scored(prompts, answers)
    return _with_rows(table, pairs, margin=[pair.margin or 0.0 for pair in pairs])


def judged_table(judged: Sequence[Judged], others: Mapping[int, np.ndarray]) -> TokenTable:
    """2B sequences: each prompt with its own answer, then each with that to another prompt; all are scored.

    `others` are those of `other_answers`. `of_rows` has "reference", as that of `pair_table`.
    """
    answers = [each.completion_ids for each in judged] + [others[each.number] for each in judged]
    table = _answers_scored([each.prompt_ids for each in judged] * 2, answers)
    return _with_rows(table, judged, label=[each.label for each in judged])


def other_answers(judged: Sequence[Judged]) -> dict[int, np.ndarray]:
    """For each prompt of all rows, by number, the answer of the nearest row before it with another prompt.

    By their log-ratios `kto` estimates the KL to the reference; the rows are a circle. No prompt is longer
    with it than the longest row: the answer's last tokens are cut, which a warning counts. Fixed for a data
    set, and not drawn anew with each batch as in TRL, so that the log-probabilities of the reference are
    computed once. With one prompt in all rows each gets the answer before its own.
    """
    longest = max((len(each.prompt_ids) + len(each.completion_ids) for each in judged), default=0)
    rows, found, cut = len(judged), dict[int, np.ndarray](), 0
    other: Judged | None = None
    for place in range(2 * rows):  # twice around the circle: once to find that of the first rows
        row, before = judged[place % rows], judged[(place - 1) % rows]
        if not np.array_equal(before.prompt_ids, row.prompt_ids):
            other = before
        if place >= rows:
            answer = (other or before).completion_ids
            found[row.number] = answer[: longest - len(row.prompt_ids)]
            cut += len(found[row.number]) < len(answer)
    if cut:
        logger.warning(
            "%d of %d answers to other prompts, by which kto estimates the KL to the reference, are cut: "
            "with the prompt they would be longer than the longest row, %d tokens",
            *(cut, len(found), longest),
        )
    return found


def _joined(prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> list[list[int]]:
    return [np.concatenate(parts).tolist() for parts in zip(prompts, answers, strict=True)]


def _answers_scored(prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> TokenTable:
    """A table of prompts with answers, of which the answers' tokens are scored."""
    ids, attention = padded(_joined(prompts, answers))
    starts = np.array([len(prompt) for prompt in prompts])
    return TokenTable(ids, attention, attention & (np.arange(ids.shape[1]) >= starts[:, None]), {})


def _with_rows(table: TokenTable, rows: Sequence[Pair | Judged], **numbers: Sequence[float]) -> TokenTable:
    """`table`, of two sequences for each row of data, with groups, and with numbers of rows for both."""
    of_rows = {name: np.array(values, np.float64) for name, values in numbers.items()}
    of_rows["source"] = np.array([row.source for row in rows])
    of_rows = {name: np.tile(values, 2) for name, values in of_rows.items()}
    of_rows["reference"] = np.zeros(len(table))
    return replace(table, group_ids=np.tile(np.arange(len(rows)), 2), of_rows=of_rows)


def _sums(predicted: np.ndarray, table: TokenTable) -> np.ndarray:
    """[2, B] float64: predictions summed over the scored tokens of each sequence."""
    return _halves(np.where(table.completion_mask, predicted, 0).sum(axis=1, dtype=np.float64))


def _halves(of_sequences: np.ndarray) -> np.ndarray:
    """[2, B]: numbers [2B] of the first half of a table's sequences, and of the second."""
    return of_sequences.reshape(2, -1)


def _spread(slopes: np.ndarray, table: TokenTable) -> np.ndarray:
    """[2B, T]: for each scored token the slope [2B] of its sequence."""
    return np.where(table.completion_mask, slopes[:, None], 0.0)


def _mean(values: np.ndarray) -> Metric:
    return Metric(float(values.sum()), values.size)


def _by_source(metrics: Mapping[str, np.ndarray], table: TokenTable) -> dict[str, Metric]:
    """Means of numbers [B] of rows, and of those of each source."""
    of_row = table.of_rows["source"][: len(table) // 2]
    found = (mean_of_rows(name, values, np.ones(len(values)), of_row) for name, values in metrics.items())
    return combine(*found)


@dataclass(frozen=True)
class _OfPairs(Coupled):
    """The mean of a loss over pairs: one of `ops/preferences.py`, or a user's function of `Pairs`.

    A user's returns, as those do, the loss of each pair and the derivatives of their sum with respect to
    `Pairs.chosen` and `Pairs.rejected`, [B] each.
    """

    name: str
    """The loss as the configuration has it, for errors."""
    loss: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self, predicted: np.ndarray, table: TokenTable) -> CoupledLoss:
        """The loss of a `pair_table`; raises ValueError for what a user's loss returns in other shapes."""
        assert table.group_ids is not None, "a table of pairs"
        assert (np.diff(_halves(table.group_ids), axis=0) == 0).all(), "better answers, then the others"
        size = len(table) // 2
        tokens = np.maximum(table.completion_mask.sum(axis=1), 1).astype(np.float64)
        reference, margin = _halves(table.of_rows["reference"]), table.of_rows["margin"][:size]
        pairs = Pairs._make([*_sums(predicted, table), *reference, *_halves(tokens), margin])
        found = self._losses(pairs)
        slopes = np.concatenate([found.chosen, found.rejected]) / size
        metrics = self._metrics(pairs, found.losses, table)
        return CoupledLoss(_spread(slopes, table), float(found.losses.mean()), metrics)

    @abstractmethod
    def _metrics(self, pairs: Pairs, losses: np.ndarray, table: TokenTable) -> dict[str, Metric]:
        """What is logged of a mini-batch."""

    def _losses(self, pairs: Pairs) -> PairLosses:
        returned = self.loss(pairs, **self.arguments)
        try:
            found = PairLosses(*(np.asarray(part, np.float64) for part in returned))
        except (TypeError, ValueError):
            found = None
        shape = pairs.chosen.shape
        if found is None or any(part.shape != shape for part in found):
            kind = f"a {type(returned).__name__}" if found is None else f"shapes {[p.shape for p in found]}"
            raise ValueError(
                f"a loss of pairs must return three arrays of a number for each pair, shape {shape}: its "
                "losses, and their slopes with respect to pairs.chosen and to pairs.rejected; it returned "
                f"{kind}; return PairLosses(losses, chosen, rejected)"
            )
        return found

    def check(self) -> None:
        """Raises ValueError where the loss fails on pairs made up for this, before a model is loaded.

        Logs a warning where its slopes are not those of its losses: it may hold a part of them fixed.
        """
        pairs = _made_up_pairs()
        try:
            found = self._losses(pairs)
            if bad := [name for name, part in found._asdict().items() if not np.isfinite(part).all()]:
                raise ValueError(f"it must return finite numbers; those of {', '.join(bad)} are not")
            for side, slopes in (("chosen", found.chosen), ("rejected", found.rejected)):
                changes = self._changes(pairs, side)
                off = np.abs(slopes - changes).max() / max(np.abs(changes).max(), 1e-3)
                if off > WRONG_SLOPE:
                    logger.warning(
                        "the slopes of %s with respect to pairs.%s are %s on pairs made up for a check, "
                        "where its losses change by %s; that is right if it holds a part of the loss fixed",
                        *(self.name, side, np.round(slopes, 4).tolist(), np.round(changes, 4).tolist()),
                    )
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be used: {error}") from error
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self.name} failed: {type(error).__name__}: {error}") from error

    def _changes(self, pairs: Pairs, side: str, step: float = 1e-3) -> np.ndarray:
        """[B] central differences of the sum of all losses with respect to `pairs.<side>`."""

        def total(change: np.ndarray) -> float:
            return float(self._losses(pairs._replace(**{side: getattr(pairs, side) + change})).losses.sum())

        changes = step * np.eye(len(pairs.chosen))
        return np.array([(total(change) - total(-change)) / (2 * step) for change in changes])


def _made_up_pairs() -> Pairs:
    """Five pairs as a model might score them, for checks of a loss."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 9, (2, 5)).astype(np.float64)
    sums = -rng.uniform(0.5, 3.0, (2, 5)) * tokens
    return Pairs._make([*sums, *(sums + rng.normal(size=(2, 5))), *tokens, rng.exponential(1.0, 5)])


def _found(
    key: str, section: DPOConfig | RMConfig, builtin: Mapping[str, Callable[..., Any]]
) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Name, function and arguments of the loss of the section `key`.

    Raises ValueError for a key of the section that is set and that a user's loss does not take.
    """
    name = f"{key}.loss {section.loss!r}"
    loss = find_function(section.loss, builtin, "loss of pairs")
    arguments = own_arguments(
        loss,
        name,
        inputs=first_parameter(loss, name, "pairs"),
        shared={each: getattr(section, each) for each in OF_SECTION if hasattr(section, each)},
        given=section.loss_args,
        key=f"{key}.loss_args",
    )
    fields = type(section).model_fields
    # Not `beta`: rewards that are logged have it too. And other keys than these are refused elsewhere.
    for each in fields.keys() & {*OF_SECTION[1:]} if ":" in section.loss else ():
        if getattr(section, each) != fields[each].default and each not in arguments:
            raise ValueError(
                f"{key}.{each} has no effect for {name}, which has no argument {each} without a default; "
                f"set {each} in {key}.loss_args, or leave this key at its default"
            )
    return name, loss, arguments


@dataclass(frozen=True)
class Preference(_OfPairs):
    """A loss on pairs of answers, of their log-probabilities under the policy and the reference."""

    beta: float

    @classmethod
    def of(cls, config: DPOConfig) -> Preference:
        """The loss of `config`; raises ValueError as `coupled_of`."""
        found = cls(*_found("dpo", config, PREFERENCE_LOSSES), config.beta)
        found.check()
        return found

    def _metrics(self, pairs: Pairs, losses: np.ndarray, table: TokenTable) -> dict[str, Metric]:
        # Without a reference, the mean log-probability of an answer is what the losses compare.
        alone = self.loss in [PREFERENCE_LOSSES[name] for name in WITHOUT_REFERENCE]
        chosen = self.beta * (pairs.chosen / pairs.chosen_tokens if alone else pairs.chosen_log_ratio)
        rejected = self.beta * (pairs.rejected / pairs.rejected_tokens if alone else pairs.rejected_log_ratio)
        metrics = _by_source({"dpo/loss": losses, "dpo/accuracy": _right(chosen - rejected)}, table) | {
            "dpo/margin": _mean(chosen - rejected),
            "dpo/reward_chosen": _mean(chosen),
            "dpo/reward_rejected": _mean(rejected),
            "dpo/logprob_chosen": _mean(pairs.chosen),
            "dpo/logprob_rejected": _mean(pairs.rejected),
        }
        if not alone:
            moved, tokens = float(pairs.chosen_log_ratio.sum()), float(pairs.chosen_tokens.sum())
            metrics["dpo/kl_chosen"] = Metric(moved, tokens)
        return metrics


@dataclass(frozen=True)
class RewardPairs(_OfPairs):
    """A loss on pairs of answers, of the scores that a reward model gives them."""

    @classmethod
    def of(cls, config: RMConfig) -> RewardPairs:
        """The loss of `config`; raises ValueError as `coupled_of`."""
        found = cls(*_found("rm", config, SCORE_LOSSES))
        found.check()
        return found

    def _metrics(self, pairs: Pairs, losses: np.ndarray, table: TokenTable) -> dict[str, Metric]:
        gaps, scores = pairs.chosen - pairs.rejected, np.concatenate([pairs.chosen, pairs.rejected])
        stats = describe("rm/reward", scores, ("mean", "min", "max", "std"))
        return {
            **_by_source({"rm/loss": losses, "rm/accuracy": _right(gaps)}, table),
            "rm/margin": _mean(gaps),
            **{name.replace("reward/", "reward_"): metric for name, metric in stats.items()},
        }


def _right(gaps: np.ndarray) -> np.ndarray:
    """[B]: 1 for a pair whose better answer has the larger reward, 1/2 for a tie, else 0."""
    return (np.sign(gaps) + 1) / 2


@dataclass(frozen=True)
class Judgement(Coupled):
    """`kto`: answers that were called good or bad, against the KL that other answers estimate."""

    beta: float
    desirable_weight: float
    undesirable_weight: float

    @classmethod
    def of(cls, config: DPOConfig) -> Judgement:
        """The loss of `config`."""
        return cls(config.beta, config.desirable_weight, config.undesirable_weight)

    def __call__(self, predicted: np.ndarray, table: TokenTable) -> CoupledLoss:
        """The loss of a `judged_table`; sequences of its second half have slope 0."""
        sums = _sums(predicted, table)
        own, (ratios, mismatched) = sums[0], sums - _halves(table.of_rows["reference"])
        good = table.of_rows["label"][: len(own)] > 0
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        found = kto(ratios, good, mismatched, beta=self.beta, **weights)
        slopes = np.concatenate([found.slopes / len(own), np.zeros(len(own))])
        rewards = self.beta * ratios
        metrics = _by_source({"dpo/loss": found.losses}, table) | {
            "dpo/kl": Metric(found.kl * len(own), len(own)),
            "dpo/reward_chosen": _mean(rewards[good]),
            "dpo/reward_rejected": _mean(rewards[~good]),
            "dpo/logprob_chosen": _mean(own[good]),
            "dpo/logprob_rejected": _mean(own[~good]),
        }
        return CoupledLoss(_spread(slopes, table), float(found.losses.mean()), metrics)
