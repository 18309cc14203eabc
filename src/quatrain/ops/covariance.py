"""Tokens chosen by the covariance of their log-probability and advantage, for `clip_cov` and `kl_cov`.

Data flow: log-probabilities and advantages of a whole mini-batch -> here (host-side numpy), before it is cut
into micro-batches -> the column `high_covariance`, 1.0 on chosen tokens, and for `kl_cov` the column
`moved` -> the losses in `losses/`.

Both functions follow "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv
2505.22617): an update lowers the policy's entropy mainly through the few tokens whose log-probability and
advantage vary together. With N the number of completion tokens of the mini-batch, means over these tokens:
cov_t = (A_t - mean A) (logprob_t - mean logprob). A row without completion tokens changes nothing.
"""

from __future__ import annotations

import numpy as np

from quatrain.ops.masked import mean_and_std

LEAST_DISTANCE = 1e-3
"""Log-ratios up to this, in nats, count as 0 where their sign decides a gradient: rounding may reverse it."""


def tokens_between_covariances(
    logprobs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    rng: np.random.Generator,
    *,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> dict[str, np.ndarray]:
    """Draws max(1, floor(ratio N)) of the tokens with lb <= cov <= ub, or takes all if they are fewer.

    Deviations from verl: tokens that are clipped by their ratio can be drawn too, N and the means are those
    of the whole mini-batch and not of one micro-batch, and the bounds belong to the interval.

    Args:
        logprobs, advantages: [B, T] floats.
        mask: [B, T] bool, True on completion tokens.
        rng: decides which tokens are drawn.
        clip_cov_ratio: fraction of the completion tokens, in [0, 1].
        clip_cov_lb, clip_cov_ub: bounds of the covariance.

    Returns:
        `high_covariance`: [B, T] float32, 1 on the chosen tokens and 0 elsewhere.

    Raises:
        ValueError: for a fraction outside [0, 1].
    """
    _check_ratio("clip_cov_ratio", clip_cov_ratio)
    covariances = _covariances(logprobs, advantages, mask)
    between = np.flatnonzero((covariances >= clip_cov_lb) & (covariances <= clip_cov_ub))
    num_drawn = min(_number(clip_cov_ratio, covariances.size), between.size)
    chosen = np.zeros(covariances.size, bool)
    chosen[rng.choice(between, num_drawn, replace=False)] = True
    return _column(chosen, mask)


def tokens_of_highest_covariance(
    logprobs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    rng: np.random.Generator,
    *,
    old_logprobs: np.ndarray,
    kl_cov_ratio: float,
) -> dict[str, np.ndarray]:
    """Takes the max(1, floor(ratio N)) tokens of highest covariance, if it is above 0.

    Tokens with the same covariance as the last of them are taken too, so that the choice does not depend on
    the order of rows. Deviations from verl: those tokens are more than the ratio says, tokens whose
    covariance is not positive are never taken, and N and the means are those of the whole mini-batch and not
    of one micro-batch.

    Args:
        logprobs, advantages: [B, T] floats.
        mask: [B, T] bool, True on completion tokens.
        rng: unused.
        old_logprobs: [B, T] floats, to which the ratio of the loss is taken.
        kl_cov_ratio: fraction of the completion tokens, in [0, 1].

    Returns:
        `high_covariance`: [B, T] float32, 1 on the chosen tokens and 0 elsewhere; `moved`: [B, T] float32, on
        the chosen tokens the sign of logprobs - old_logprobs where it is beyond `LEAST_DISTANCE`, else 0.

    Raises:
        ValueError: for a fraction outside [0, 1].
    """
    _check_ratio("kl_cov_ratio", kl_cov_ratio)
    covariances = _covariances(logprobs, advantages, mask)
    least = np.sort(covariances)[-_number(kl_cov_ratio, covariances.size) :].min(initial=np.inf)
    chosen = _column((covariances >= least) & (covariances > 0), mask)
    distance = logprobs - old_logprobs
    moved = np.where(np.abs(distance) > LEAST_DISTANCE, np.sign(distance), 0)
    return {**chosen, "moved": (moved * chosen["high_covariance"]).astype(np.float32)}


def _covariances(logprobs: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] float64: of each completion token, the same to the last bit in any order of the rows."""
    centred = []
    for values in (advantages, logprobs):
        tokens = values[mask].astype(np.float64)
        centred.append(tokens - mean_and_std(tokens)[0])
    return centred[0] * centred[1]


def _number(ratio: float, num_tokens: int) -> int:
    return max(int(ratio * num_tokens), 1)


def _column(chosen: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    column = np.zeros(mask.shape, np.float32)
    column[mask] = chosen
    return {"high_covariance": column}


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {ratio}; set update.loss_args.{name}")
