"""Tokens chosen by the covariance of their log-probability and advantage, for `clip_cov` and `kl_cov`.

Data flow: log-probabilities and advantages of a whole mini-batch -> here (host-side numpy), before it is cut
into micro-batches -> the column `high_covariance`, 1.0 on chosen tokens, and for `kl_cov` the column
`moved` -> the losses in `losses/`.

Both functions follow "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv
2505.22617): an update lowers the policy's entropy mainly through the few tokens whose log-probability and
advantage vary together. With N the number of completion tokens of the mini-batch, means over these tokens:
cov_t = (A_t - mean A) (logprob_t - mean logprob). A row without completion tokens changes nothing. N and the
means are those of the whole mini-batch, where verl has those of one micro-batch. Arrays are [B, T]: floats,
and the bool `mask` of the completion tokens; columns are float32. Ratios are fractions of N in [0, 1], others
are a ValueError.
"""

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
    """`high_covariance`: 1 on max(1, floor(ratio N)) of the tokens with lb <= cov <= ub, or on all if fewer.

    `rng` decides which are drawn. Deviations from verl: tokens that are clipped by their ratio can be drawn
    too, and the bounds belong to the interval.
    """
    covariances = _covariances(logprobs, advantages, mask)
    between = np.flatnonzero((covariances >= clip_cov_lb) & (covariances <= clip_cov_ub))
    num_drawn = min(_number("clip_cov_ratio", clip_cov_ratio, covariances), between.size)
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
    """`high_covariance`: 1 on the max(1, floor(ratio N)) tokens of highest covariance, if it is above 0.

    `moved`: on these tokens the sign of logprobs - old_logprobs where it is beyond `LEAST_DISTANCE`, else 0.
    Deviations from verl: tokens with the same covariance as the last are taken too, so that the choice does
    not depend on the order of rows, and those whose covariance is not positive never. `rng` is not used.
    """
    covariances = _covariances(logprobs, advantages, mask)
    least = np.sort(covariances)[-_number("kl_cov_ratio", kl_cov_ratio, covariances) :].min(initial=np.inf)
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


def _number(name: str, ratio: float, tokens: np.ndarray) -> int:
    """max(1, floor(ratio N)); raises ValueError where the argument `name` of the loss is no fraction."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {ratio}; set update.loss_args.{name}")
    return max(int(ratio * tokens.size), 1)


def _column(chosen: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    column = np.zeros(mask.shape, np.float32)
    column[mask] = chosen
    return {"high_covariance": column}
