"""Losses on preferences: of pairs of answers, and of answers that were called good or bad.

Data flow: log-probabilities (or a reward model's scores) of the answers of a mini-batch, summed on the host
-> one of these functions -> the loss of each pair and its slopes, which `update/preferences.py` spreads over
tokens. Pure numpy, float64. The loss of a mini-batch is the mean over its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MOST_MEAN_LOGPROB = -1e-7
"""Largest mean log-probability of which `orpo` takes the odds, about the resolution of float32 at 1: a
probability of 1 has infinite odds."""


class Pairs(NamedTuple):
    """B pairs of answers to one prompt each; all arrays [B] float64."""

    chosen: np.ndarray
    """Of the better answer: the sum of its tokens' log-probabilities in nats; of a reward model its score."""
    rejected: np.ndarray
    """The same of the other answer."""
    ref_chosen: np.ndarray
    """The sum of log-probabilities of the better answer under the frozen reference; 0 where there is none."""
    ref_rejected: np.ndarray
    chosen_tokens: np.ndarray
    """Number of scored tokens of the better answer, at least 1."""
    rejected_tokens: np.ndarray
    margin: np.ndarray
    """By how much the row says that the better answer is better; 0 where it does not say."""

    @property
    def chosen_log_ratio(self) -> np.ndarray:
        """[B] log-probability of the better answer under the policy minus that under the reference."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_log_ratio(self) -> np.ndarray:
        """[B] the same of the other answer."""
        return self.rejected - self.ref_rejected

    @property
    def delta(self) -> np.ndarray:
        """[B] Δ, the difference of the two log-ratios (Rafailov et al., arXiv 2305.18290, equation 7)."""
        return self.chosen_log_ratio - self.rejected_log_ratio


class PairLosses(NamedTuple):
    """What a loss on pairs returns; all arrays [B]."""

    losses: np.ndarray
    """The loss of each pair."""
    chosen: np.ndarray
    """Derivative of the sum of all losses with respect to `Pairs.chosen` of each pair."""
    rejected: np.ndarray
    """The same with respect to `Pairs.rejected`."""


PairLoss = Callable[..., PairLosses]
"""(pairs, **arguments) -> `PairLosses`."""


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """log σ(x), without overflow."""
    return -np.logaddexp(0.0, -x)


def sigmoid_of(x: np.ndarray) -> np.ndarray:
    """σ(x), without overflow."""
    return np.exp(log_sigmoid(x))


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float) -> PairLosses:
    """-(1 - ε) log σ(βΔ) - ε log σ(-βΔ): DPO (arXiv 2305.18290), with ε > 0 cDPO (Mitchell, 2023).

    TRL's `sigmoid` has no ε; its `aot` of a single pair is this.
    """
    x, right, wrong = beta * pairs.delta, 1 - label_smoothing, label_smoothing
    slope = -beta * (right * sigmoid_of(-x) - wrong * sigmoid_of(x))
    return PairLosses(-right * log_sigmoid(x) - wrong * log_sigmoid(-x), slope, -slope)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float) -> PairLosses:
    """(-(1 - ε) log σ(βΔ) + ε log σ(-βΔ)) / (1 - 2ε), ε < 1/2: unbiased where a part ε of the pairs is the
    wrong way round (Chowdhury et al., arXiv 2403.00409).
    """
    x, right, wrong = beta * pairs.delta, 1 - label_smoothing, label_smoothing
    scale = 1 - 2 * label_smoothing
    slope = -beta * (right * sigmoid_of(-x) + wrong * sigmoid_of(x)) / scale
    return PairLosses((-right * log_sigmoid(x) + wrong * log_sigmoid(-x)) / scale, slope, -slope)


def hinge(pairs: Pairs, *, beta: float) -> PairLosses:
    """max(0, 1 - βΔ): SLiC-HF (Zhao et al., arXiv 2305.10425) with log-ratios, as in TRL."""
    x = beta * pairs.delta
    slope = np.where(x < 1, -beta, 0.0)
    return PairLosses(np.maximum(1 - x, 0.0), slope, -slope)


def ipo(pairs: Pairs, *, beta: float) -> PairLosses:
    """(Δ' - 1 / (2β))², Δ' with each log-ratio divided by its answer's tokens (Azar et al., arXiv 2310.12036,
    equation 17).

    Per token as in TRL, whose authors confirmed it with those of the paper.
    """
    chosen, rejected = pairs.chosen_tokens, pairs.rejected_tokens
    gap = pairs.chosen_log_ratio / chosen - pairs.rejected_log_ratio / rejected - 1 / (2 * beta)
    return PairLosses(gap**2, 2 * gap / chosen, -2 * gap / rejected)


def orpo(pairs: Pairs, *, beta: float) -> PairLosses:
    """-p_c - β log σ(log odds(p_c) - log odds(p_r)), p the mean log-probability of an answer's tokens.

    log odds(p) = p - log(1 - exp(p)), and β is the paper's λ. No reference is read. The first term is that of
    supervised training on the better answer, by sequences as in the paper's equation 6; TRL takes it over
    prompt and answer, and means over the tokens of a batch. The odds of a probability above
    exp(`MOST_MEAN_LOGPROB`) are those there. Source: Hong et al., arXiv 2403.07691.
    """
    chosen, slope_chosen = _log_odds(pairs.chosen / pairs.chosen_tokens)
    rejected, slope_rejected = _log_odds(pairs.rejected / pairs.rejected_tokens)
    x = chosen - rejected
    slope = beta * sigmoid_of(-x)
    return PairLosses(
        -pairs.chosen / pairs.chosen_tokens - beta * log_sigmoid(x),
        -(1 + slope * slope_chosen) / pairs.chosen_tokens,
        slope * slope_rejected / pairs.rejected_tokens,
    )


def _log_odds(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log odds of mean log-probabilities [B], and their derivatives."""
    held = np.minimum(mean, MOST_MEAN_LOGPROB)
    rest = -np.expm1(held)
    return held - np.log(rest), np.where(mean > MOST_MEAN_LOGPROB, 0.0, 1 / rest)


def simpo(pairs: Pairs, *, beta: float, gamma: float = 0.5) -> PairLosses:
    """-log σ(β p_c - β p_r - γ), p the mean log-probability of an answer's tokens; no reference is read.

    Source: Meng et al., arXiv 2405.14734, equation 6; TRL's `CPOTrainer` with `cpo_alpha` 0 is the same.
    """
    chosen, rejected = pairs.chosen_tokens, pairs.rejected_tokens
    x = beta * (pairs.chosen / chosen - pairs.rejected / rejected) - gamma
    slope = -beta * sigmoid_of(-x)
    return PairLosses(-log_sigmoid(x), slope / chosen, -slope / rejected)


def bradley_terry(pairs: Pairs, *, center: float) -> PairLosses:
    """-log σ(r_c - r_r - m) + center (r_c + r_r)², r the scores and m the margin: of reward models.

    Sources: Ouyang et al., arXiv 2203.02155; the margin: Llama 2, arXiv 2307.09288; `center`, which keeps
    scores around 0: Eisenstein et al., arXiv 2312.09244.
    """
    x, total = pairs.chosen - pairs.rejected - pairs.margin, pairs.chosen + pairs.rejected
    slope = -sigmoid_of(-x)
    centering = 2 * center * total
    return PairLosses(-log_sigmoid(x) + center * total**2, slope + centering, centering - slope)


PREFERENCE_LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "robust": robust,
    "hinge": hinge,
    "orpo": orpo,
    "simpo": simpo,
}
"""`dpo.loss`, beside `kto`, which is not of pairs."""
SCORE_LOSSES: dict[str, PairLoss] = {"bradley_terry": bradley_terry}
"""`rm.loss`."""


class Judgements(NamedTuple):
    """What `kto` returns of B answers."""

    losses: np.ndarray
    """[B] the loss of each answer."""
    slopes: np.ndarray
    """[B] derivative of the sum of all losses with respect to each answer's log-probability."""
    kl: float
    """The estimate of the KL of the policy to the reference, in nats, from which answers are judged."""


def kto(
    log_ratios: np.ndarray,
    good: np.ndarray,
    mismatched: np.ndarray,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Judgements:
    """w (1 - σ(±β(ρ - z))), + and `desirable_weight` for good answers, - and `undesirable_weight` for others.

    ρ [B] `log_ratios` are log-probabilities of answers under the policy minus those under the reference,
    `good` [B] says which are good, and z = max(0, mean of `mismatched`) is the KL, estimated by log-ratios of
    answers to other prompts; no gradient flows through z. Source: Ethayarajh et al., arXiv 2402.01306,
    equation 7, as TRL has it.
    """
    kl = max(float(mismatched.mean()), 0.0)
    sign, weight = np.where(good, 1.0, -1.0), np.where(good, desirable_weight, undesirable_weight)
    x = sign * beta * (log_ratios - kl)
    below = sigmoid_of(-x)  # 1 - σ(x), without cancellation
    return Judgements(weight * below, -weight * sign * beta * below * sigmoid_of(x), kl)
