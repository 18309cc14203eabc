"""The losses of the interface: what each takes of a request, and its formula as an objective of tokens.

Data flow: `Pass` -> `ForLoss.of`, which checks it -> a `TokenTable` and an objective -> `training.py`. A loss
is a sum over rows; nothing is divided. Thresholds and betas are columns of the table, not constants of a
program: no configuration compiles anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.errors import listed, shown
from quatrain.forward.table import TokenTable, padded
from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.losses.cispo import cispo as clipped_weight
from quatrain.ops.losses.gspo import gspo as sequence_ratio
from quatrain.ops.losses.ppo_clip import ppo_clip
from quatrain.ops.tokens import LISTED_WORDS, ListedTokens, ScoredTokens, TokenLoss
from quatrain.ops.top_words import NO_WORD
from quatrain.serve.tinker.calls import Datum, Pass, Refused
from quatrain.types.metrics import Metric
from quatrain.update.gradient import Objective

LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
SEQUENCE = "sequence_ratio_mask"
MOST = float(np.finfo(np.float32).max)
"""The largest number that float32 has."""


def cross_entropy(tokens: ScoredTokens) -> TokenLoss:
    """-logprobs; the weight of a row is the request's, of any sign."""
    return TokenLoss(-tokens.logprobs)


def listed_cross_entropy(tokens: ListedTokens) -> TokenLoss:
    """-Σ w logprobs over the targets that each row lists."""
    return TokenLoss(-(tokens.column("listed_weights") * tokens.listed).sum(axis=-1))


def ppo(tokens: ScoredTokens) -> TokenLoss:
    """-min(r A, clip(r, low, high) A); with the bounds 0 and infinity it is importance sampling, -r A."""
    return _of_ratio(tokens, ppo_clip(tokens, **_distances(tokens), dual_clip=None))


def cispo(tokens: ScoredTokens) -> TokenLoss:
    """-sg(clip(r, low, high)) A logprobs."""
    return _of_ratio(tokens, clipped_weight(tokens, **_distances(tokens)))


def dro(tokens: ScoredTokens) -> TokenLoss:
    """-(A logprobs - β d² / 2) with d = clamp(logprobs - old_logprobs, -20, 20) (arXiv 2405.19107)."""
    penalty = 0.5 * tokens.column(BETA) * jnp.square(_log_ratio(tokens))
    return _of_ratio(tokens, TokenLoss(penalty - tokens.advantages * tokens.logprobs))


def gspo(tokens: ScoredTokens) -> TokenLoss:
    """`ppo` with the ratio of the sequence, the geometric mean over the rows whose mask is above 0."""
    of_mean = replace(tokens, mask=tokens.mask & (tokens.column(SEQUENCE) > 0))
    return _of_ratio(tokens, sequence_ratio(of_mean, **_distances(tokens)))


def _distances(tokens: ScoredTokens) -> dict[str, jax.Array]:
    """The bounds of the ratio as the losses of `ops` have them, which are exact from 0.5 to 2."""
    return {"clip_low": 1 - tokens.column(LOW), "clip_high": tokens.column(HIGH) - 1}


def _log_ratio(tokens: ScoredTokens) -> jax.Array:
    return jnp.clip(tokens.logprobs - tokens.old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _of_ratio(tokens: ScoredTokens, loss: TokenLoss) -> TokenLoss:
    """The loss of rows that have an advantage, and sums of their ratios; exactly 0 for the others."""
    counted = tokens.advantages != 0
    ratio = jnp.where(counted, jnp.exp(_log_ratio(tokens)), 0.0)
    clipped = jnp.where(counted, loss.means.get("clip_fraction", 0.0), 0.0)
    means = {"ratio": ratio, "clip_fraction": clipped}
    return TokenLoss(jnp.where(counted, loss.loss, 0.0), means, {"ratio_max": ratio})


@dataclass(frozen=True)
class Loss:
    """What a loss takes of a request, by the names of the interface."""

    objective: Objective
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    """Every datum has these beside its targets."""
    further: tuple[str, ...] = ()
    """A datum may have these."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """Those of `loss_fn_config`, or inputs of every datum, with their defaults; None: one must be given."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the objective that no request changes."""


LOSSES = {
    "cross_entropy": Loss(cross_entropy, inputs=(), further=("weights",)),
    "importance_sampling": Loss(ppo, fixed={LOW: 0.0, HIGH: np.inf}),
    "ppo": Loss(ppo, numbers={LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(cispo, numbers={LOW: 0.0, HIGH: 4.0}),
    "dro": Loss(dro, numbers={BETA: None}),
    "gspo": Loss(gspo, further=(SEQUENCE,), numbers={LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
}


@dataclass(frozen=True)
class ForLoss:
    """A request in the form that the trainer computes with."""

    objective: Objective
    table: TokenTable
    lists: bool
    """Whether rows have lists of targets, the column `LISTED_WORDS`."""
    num_counted: int
    """Rows with a weight or an advantage other than 0."""

    @classmethod
    def of(cls, asked: Pass) -> Self:
        """`asked`, whose arrays have the shapes that `Datum` says, checked.

        Raises Refused for a loss that is not computed here, and for inputs and numbers that a loss does not
        take, lacks, or cannot use.
        """
        loss, width = _checked(asked), max(datum.targets[:1].size for datum in asked.data)
        if width > 1 and asked.loss != "cross_entropy":
            raise Refused(
                f"loss_fn {asked.loss} takes one target for each row, target_tokens [T]; got [T, {width}]; "
                "send the sampled tokens alone, or use cross_entropy"
            )
        # A power of two, since a program is compiled for each width.
        rows = _Rows(asked.data, 1 << max(width - 1, 0).bit_length())
        targets = rows.column([datum.targets for datum in asked.data], NO_WORD)
        real = rows.scored[..., None] & (targets != NO_WORD)
        if asked.loss == "cross_entropy":
            weights = np.where(real, rows.inputs("weights", 1.0), 0.0).astype(np.float32)
            counted = (weights != 0).any(axis=-1)
            columns = {"weights": weights[..., 0]}
        else:
            columns = _of_ratios(asked, loss, rows, real[..., 0])
            counted = columns["advantages"] != 0
        table = TokenTable(rows.input_ids, rows.attention, real[..., 0], columns, targets=targets[..., 0])
        if width > 1:
            given = {"weights": rows.scored.astype(np.float32), "listed_weights": weights}
            columns = {**given, LISTED_WORDS: targets}
            table = replace(table, completion_mask=rows.scored, columns=columns, targets=None)
        objective = listed_cross_entropy if width > 1 else loss.objective
        return cls(objective, table, width > 1, int(counted.sum()))

    def metrics(self, found: Mapping[str, Metric]) -> dict[str, float]:
        """The metrics of the interface, of those of a call; of ratios over the rows that count, or 0."""
        metrics = {"loss:sum": found["loss"].value, "tokens:sum": float(self.num_counted)}
        if "ratio" in found:
            num = max(self.num_counted, 1)
            metrics |= {f"{name}:mean": found[name].value / num for name in ("ratio", "clip_fraction")}
            metrics["ratio:max"] = found["ratio_max"].value
        return metrics


class _Rows:
    """The rows of datums at their places in a table, where the token after each would stand."""

    def __init__(self, data: Sequence[Datum], width: int) -> None:
        self.data, self.width = data, width
        self.input_ids, self.attention = padded([datum.tokens for datum in data], behind=1)
        self.scored = np.zeros(self.attention.shape, bool)
        self.scored[:, 1:] = self.attention[:, :-1]

    def column(self, each: Sequence[np.ndarray], none: float) -> np.ndarray:
        """[B, T, width], of an array [T] or [T, K] of each datum; `none` where there is nothing."""
        found = np.full((*self.scored.shape, self.width), none, each[0].dtype)
        for row, values in enumerate(each):
            values = values if values.ndim == 2 else values[:, None]
            found[row, 1 : len(values) + 1, : values.shape[1]] = values
        return found

    def inputs(self, name: str, default: float) -> np.ndarray:
        """[B, T, width] float32: the input `name`, or `default` of datums that do not have it."""
        every = [datum.columns.get(name) for datum in self.data]
        shapes = [datum.targets.shape for datum in self.data]
        filled = (np.full(shape, default) if x is None else x for x, shape in zip(every, shapes, strict=True))
        return self.column([x.astype(np.float32) for x in filled], 0.0)


def _of_ratios(asked: Pass, loss: Loss, rows: _Rows, real: np.ndarray) -> dict[str, np.ndarray]:
    """The columns [B, T] of a loss of ratios, whose rows are `real`."""
    old, advantages = (rows.inputs(name, 0.0)[..., 0] for name in ("logprobs", "advantages"))
    columns = {"old_logprobs": old, "advantages": np.where(real, advantages, 0).astype(np.float32)}
    for name, default in {**loss.numbers, **loss.fixed}.items():
        columns[name] = rows.inputs(name, asked.numbers.get(name, default))[..., 0]
    if LOW in columns and (columns[LOW] > columns[HIGH]).any():
        at = np.unravel_index(np.argmax(columns[LOW] > columns[HIGH]), real.shape)
        raise Refused(
            f"{LOW} must be at most {HIGH}, both as ratios; got {columns[LOW][at]:g} and "
            f"{columns[HIGH][at]:g}; the defaults of {asked.loss} are {loss.numbers[LOW]} and "
            f"{loss.numbers[HIGH]}"
        )
    if SEQUENCE in loss.further:
        inside = rows.inputs(SEQUENCE, 0.0)[..., 0] > 0
        # By default a sequence is its rows with an advantage; each datum has a mask or has none.
        without = np.array([SEQUENCE not in datum.columns for datum in asked.data])
        inside = np.where(without[:, None], columns["advantages"] != 0, inside)
        columns["advantages"] = np.where(inside, columns["advantages"], 0).astype(np.float32)
        columns[SEQUENCE] = inside.astype(np.float32)
    return {**columns, "weights": real.astype(np.float32)}


def _checked(asked: Pass) -> Loss:
    """The loss of `asked`, whose inputs and numbers it takes; else raises Refused."""
    if not asked.data:
        raise Refused("a request must have at least one datum; got none")
    if asked.loss == "stable_reinforce":
        raise Refused(
            "loss_fn stable_reinforce is computed only by Tinker's service; use importance_sampling, ppo, "
            "cispo, dro or gspo (in the cookbook: loss_fn=ppo)"
        )
    loss = LOSSES.get(asked.loss)
    if loss is None:
        raise Refused(f"loss_fn must be one of {listed(LOSSES)}; got {shown(asked.loss)}")
    for name, value in asked.numbers.items():
        if name not in loss.numbers:
            known = listed(loss.numbers) if loss.numbers else "nothing"
            raise Refused(f"loss_fn_config of {asked.loss} has {known}; got {shown(name)}; leave it out")
        if not abs(value) <= MOST:
            raise Refused(f"{name} must be a finite number of float32; got {value}")
    required = {*loss.inputs}
    for name, default in loss.numbers.items():
        having = sum(name in datum.columns for datum in asked.data)
        if having and name in asked.numbers:
            raise Refused(f"{name} must be given once; got it in loss_fn_config and in loss_fn_inputs")
        if having or (default is None and name not in asked.numbers):
            # Of rows: in some datums alone, the others would have a default that nobody asked for.
            required.add(name)
    for number, datum in enumerate(asked.data):
        if missing := sorted(required - {*datum.columns}):
            remedy = " or to loss_fn_config" if missing[0] in loss.numbers else ""
            raise Refused(
                f"loss_fn {asked.loss} needs {listed(sorted(required))}; datum {number} has no {missing[0]}; "
                f"add it to loss_fn_inputs{remedy}"
            )
        if more := sorted({*datum.columns} - {*required, *loss.further}):
            takes = listed(["target_tokens", *sorted({*required, *loss.further, *loss.numbers})])
            raise Refused(
                f"loss_fn {asked.loss} takes the inputs {takes}; datum {number} has {shown(more[0])}; leave "
                "it out"
            )
    return loss
