"""The losses of the interface: the formula of each as an objective of tokens, and the table of a request.

Data flow: `Pass`, which `wire.py` has checked -> `ForLoss.of` -> a `TokenTable` and an objective -> the
trainer (`training.py`) -> predictions -> `ForLoss.logprobs`. A loss is a sum over rows; nothing is divided.
Thresholds and betas are columns of the table, not constants of a program: no configuration compiles anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.forward.table import TokenTable, padded
from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.losses.cispo import cispo as clipped_weight
from quatrain.ops.losses.dro import dro as quadratic_penalty
from quatrain.ops.losses.gspo import gspo as sequence_ratio
from quatrain.ops.losses.ppo_clip import ppo_clip
from quatrain.ops.tokens import LISTED_WORDS, ListedTokens, ScoredTokens, TokenLoss
from quatrain.ops.top_words import NO_WORD
from quatrain.serve.tinker.calls import Datum, Pass, Refused
from quatrain.types.metrics import Metric
from quatrain.update.gradient import Objective

LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
SEQUENCE = "sequence_ratio_mask"
MOST_FLOAT = float(np.finfo(np.float32).max)
MOST_CELLS = 2**26
"""Of an array with lists of targets, on the host or in a micro-batch: 256 MiB."""


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
    """-(A logprobs - β (logprobs - old_logprobs)² / 2)."""
    # Where no row counts the square may overflow, and its gradient would be NaN times 0.
    counted, own = tokens.advantages != 0, jax.lax.stop_gradient(tokens.logprobs)
    sampler = jnp.where(counted, tokens.old_logprobs, own)
    given = replace(tokens, columns={**tokens.columns, "rollout_logprobs": sampler})
    # `_of_ratio` has the metrics of all losses of ratios, and no other.
    beta: Any = tokens.column(BETA)
    return _of_ratio(tokens, TokenLoss(quadratic_penalty(given, beta=beta).loss))


def gspo(tokens: ScoredTokens) -> TokenLoss:
    """`ppo` with the ratio of the sequence, the geometric mean over the rows whose mask is above 0."""
    of_mean = replace(tokens, mask=tokens.mask & (tokens.column(SEQUENCE) > 0))
    return _of_ratio(tokens, sequence_ratio(of_mean, **_distances(tokens)))


def _distances(tokens: ScoredTokens) -> dict[str, Any]:
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
    """How a loss is computed."""

    objective: Objective
    numbers: Mapping[str, float | None]
    """Further columns, which a datum or `loss_fn_config` has, and what they are where neither does; None: one
    of them does."""


LOSSES = {
    "importance_sampling": Loss(ppo, {LOW: 0.0, HIGH: np.inf}),
    "ppo": Loss(ppo, {LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(cispo, {LOW: 0.0, HIGH: 4.0}),
    "dro": Loss(dro, {BETA: None}),
    "gspo": Loss(gspo, {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
}
"""Those of ratios; the other one is cross-entropy."""


class _Cells(NamedTuple):
    """The targets of a datum that are some, and their places in lists without gaps."""

    real: np.ndarray
    """[T, K] bool."""
    rows: np.ndarray
    """[cells]: the row of each."""
    ranks: np.ndarray
    """[cells]: how many stand before it in its row."""

    @classmethod
    def of(cls, targets: np.ndarray) -> Self:
        """Those of [T] or [T, K] targets, of which NO_WORD is none."""
        real = targets.reshape(len(targets), -1) != NO_WORD
        return cls(real, np.nonzero(real)[0], (np.cumsum(real, axis=1) - 1)[real])


@dataclass(frozen=True)
class ForLoss:
    """A request in the form that the trainer computes with."""

    objective: Objective
    table: TokenTable
    lists: bool
    """Whether rows have several targets, the column `LISTED_WORDS`."""
    num_counted: int
    """Rows with a weight or an advantage other than 0."""
    cells: tuple[_Cells, ...]
    owners: np.ndarray
    """[B, T]: the row of the table in which a place of a row is scored (`_scored_once`)."""

    @classmethod
    def of(cls, asked: Pass, most_tokens: int) -> Self:
        """The table of `asked`, whose datums have up to `most_tokens`.

        Raises Refused for longer ones, lists of targets that need too much memory, and numbers that a loss
        cannot use.
        """
        for number, datum in enumerate(asked.data):
            if len(datum.tokens) > most_tokens:
                raise Refused(
                    f"datum {number}: model_input must have at most {most_tokens} tokens, which this server "
                    f"computes at once; got {len(datum.tokens)}; shorten it"
                )
        rows = _Rows(asked.data, most_tokens)
        real = rows.scored & (rows.targets[..., 0] != NO_WORD)
        if asked.loss == "cross_entropy":
            objective: Objective = cross_entropy
            weights = rows.column("weights", 1.0)
            counted = (weights != 0).any(axis=-1)
            columns = {"weights": weights[..., 0]}
        else:
            loss = LOSSES[asked.loss]
            objective, columns = loss.objective, _of_ratios(asked, loss, rows)
            counted = columns["advantages"] != 0
        table = TokenTable(rows.input_ids, rows.attention, real, columns, targets=rows.targets[..., 0])
        owners = np.repeat(np.arange(len(table))[:, None], real.shape[1], axis=1)
        lists = rows.targets.shape[-1] > 1
        if not lists:
            table, owners = _scored_once(table, counted | (columns.get(SEQUENCE, counted) > 0))
        else:
            assert asked.loss == "cross_entropy", "a loss of ratios has one target for each row"
            objective = listed_cross_entropy
            columns = {"weights": real.astype(np.float32), "listed_weights": weights}
            table = replace(table, columns={**columns, LISTED_WORDS: rows.targets}, targets=None)
        return cls(objective, table, lists, int(counted.sum()), tuple(rows.cells), owners)

    def logprobs(self, predictions: np.ndarray, asked: Pass) -> list[np.ndarray]:
        """Those of each datum of `asked` in the shape of its targets, of [B, T] or [B, T, W] of the table."""
        found = []
        predictions = predictions[self.owners, np.arange(self.owners.shape[1])]
        for predicted, cells, datum in zip(predictions, self.cells, asked.data, strict=True):
            values = np.zeros(cells.real.shape, np.float32)
            values[cells.real] = predicted[(cells.rows + 1, cells.ranks)[: predicted.ndim]]
            found.append(values.reshape(datum.targets.shape))
        return found

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

    def __init__(self, data: Sequence[Datum], most_tokens: int) -> None:
        self.data, self.cells = data, [_Cells.of(datum.targets) for datum in data]
        self.input_ids, self.attention = padded([datum.tokens for datum in data], behind=1)
        self.scored = np.zeros(self.attention.shape, bool)
        self.scored[:, 1:] = self.attention[:, :-1]
        width = max(int(each.ranks.max(initial=0)) for each in self.cells) + 1
        # A power of two, since a program is compiled for each width.
        self.width = 1 << (width - 1).bit_length()
        if width > 1 and self.width * max(self.scored.size, most_tokens) > MOST_CELLS:
            raise Refused(
                f"lists of targets must fit {MOST_CELLS} cells: {self.width}, for up to {width} targets of a "
                f"row, times {list(self.scored.shape)}, the datums and the tokens of the longest, or times "
                f"the {most_tokens} tokens computed at once; send fewer datums at once, or fewer targets"
            )
        self.targets = self._put([datum.targets for datum in data], NO_WORD)

    def column(self, name: str, default: float) -> np.ndarray:
        """[B, T, width] float32: the input `name`, `default` in datums without it, 0 where no target is."""
        shapes = (datum.targets.shape for datum in self.data)
        defaults = (np.full(shape, default, np.float32) for shape in shapes)
        return self._put([d.columns.get(name, x) for d, x in zip(self.data, defaults, strict=True)], 0)

    def _put(self, each: Sequence[np.ndarray], none: int) -> np.ndarray:
        found = np.full((*self.scored.shape, self.width), none, each[0].dtype)
        for row, (values, cells) in enumerate(zip(each, self.cells, strict=True)):
            found[row, cells.rows + 1, cells.ranks] = values.reshape(cells.real.shape)[cells.real]
        return found


def _scored_once(table: TokenTable, counted: np.ndarray) -> tuple[TokenTable, np.ndarray]:
    """`table` with what datums begin with in common scored once, and [B, T] the row that scores each place.

    Programs send the samples of a prompt with the prompt before each, in which nothing is `counted` [B, T].
    Its log-probabilities are the same in all of them: one has them computed, for all, and so the samples may
    share the prompt as those of `quatrain train` do. Where something is counted each has a gradient of its
    own.
    """
    assert table.targets is not None
    own = np.arange(len(table))
    owners = np.repeat(own[:, None], table.input_ids.shape[1], axis=1)
    first_counted = np.where(counted.any(axis=1), counted.argmax(axis=1), table.lengths)
    groups, alike = own.copy(), np.zeros_like(own)
    for place in range(table.input_ids.shape[1]):
        if (alike == own).all():
            break
        # `alike`: the first row with the same tokens before this place.
        groups = np.where(first_counted == place, alike, groups)
        owners[:, place] = _first_alike(alike, table.targets[:, place])
        alike = _first_alike(alike, table.input_ids[:, place])
    elsewhere = (owners != own[:, None]) & ~counted
    owners = np.where(elsewhere, owners, own[:, None])
    mask = table.completion_mask & ~elsewhere
    return replace(table, completion_mask=mask, group_ids=groups, scored_once=True), owners


def _first_alike(before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[B]: of each row, the first with the same number in `before` [B] and the same of `tokens` [B]."""
    keys = (before << 32) + tokens
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    return first[number]


def _of_ratios(asked: Pass, loss: Loss, rows: _Rows) -> dict[str, np.ndarray]:
    """The columns [B, T] of a loss of ratios."""
    columns = {"weights": rows.scored.astype(np.float32)}
    columns |= {name: rows.column(name, 0.0)[..., 0] for name in ("logprobs", "advantages")}
    columns["old_logprobs"] = columns.pop("logprobs")
    for name, default in loss.numbers.items():
        value = asked.numbers.get(name, default)
        assert value is not None, f"{asked.loss} has {name}"
        if abs(value) > MOST_FLOAT and name in asked.numbers:
            raise Refused(f"{name} must be a number of float32; got {value}; give a smaller one")
        columns[name] = rows.column(name, value)[..., 0]
    if LOW in columns and (above := columns[LOW] > columns[HIGH]).any():
        low, high = (float(columns[name][above][0]) for name in (LOW, HIGH))
        raise Refused(
            f"{LOW} must be at most {HIGH}; got {low:g} and {high:g}; the defaults of {asked.loss} are "
            f"{loss.numbers[LOW]} and {loss.numbers[HIGH]}"
        )
    if asked.loss == "gspo":
        # Without a mask a sequence is its rows with an advantage.
        masked = np.array([SEQUENCE in datum.columns for datum in rows.data])[:, None]
        inside = np.where(masked, rows.column(SEQUENCE, 0.0)[..., 0] > 0, columns["advantages"] != 0)
        columns["advantages"] = columns["advantages"] * inside
        columns[SEQUENCE] = inside.astype(np.float32)
    return columns
