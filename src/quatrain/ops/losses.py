"""Policy losses per token, and the token weights that aggregate them.

Data flow: log-probabilities and advantages -> token losses on the device; the completion mask -> token
weights on the host. The loss of a mini-batch is sum(weights * token_loss), however it is cut into pieces.

In the formulas A is the advantage of a token, d = clamp(logprobs - old_logprobs, -20, 20) its log-ratio and
r = exp(d) its probability ratio; sg stops the gradient. A token whose log-ratio is clamped has gradient 0
wherever the gradient of a loss flows through r.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.ops.covariance import tokens_between_covariances, tokens_of_highest_covariance
from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.tokens import ScoredTokens, TokenLoss, with_mini_batch_columns


def ppo_clip(
    tokens: ScoredTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Clipped surrogate loss of each token, with asymmetric bounds and an optional dual clip.

    With r = exp(clamp(logprobs - old_logprobs, -20, 20)):
    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), and with a dual clip c, where A < 0,
    loss = min(that, -c A). A clipped token has gradient zero; a ratio exactly on a bound is not clipped.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds from 1, >= 0.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        The token loss, float32, and as means the fractions of tokens that were clipped: `clip_low_fraction`
        (A < 0 and r below its bound), `clip_high_fraction` (A > 0 and r above its bound) and
        `clip_dual_fraction` (A < 0 and r > c; zero without a dual clip), which exclude each other, and their
        sum, `clip_fraction`.

    Source: PPO (arXiv 1707.06347), asymmetric bounds DAPO (2503.14476), dual clip (1912.09729).
    """
    return _surrogate(jnp.exp(_log_ratio(tokens)), tokens.advantages, clip_low, clip_high, dual_clip)


def reinforce(tokens: ScoredTokens) -> TokenLoss:
    """loss = -A logprobs: REINFORCE (Williams, 1992), without correction for an older policy.

    The old log-probabilities play no part: with several optimizer steps per training step, the later ones
    use the samples as if the current policy had drawn them. Reads `logprobs` and `advantages`.
    """
    return TokenLoss(-tokens.advantages * tokens.logprobs)


def gpg(tokens: ScoredTokens) -> TokenLoss:
    """loss = -A logprobs: group policy gradient (GPG, arXiv 2504.02546); the same function as `reinforce`.

    The factor that makes up for groups without signal is in the advantage: `advantage.estimator: gpg`.
    """
    return reinforce(tokens)


def gspo(tokens: ScoredTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """`ppo_clip` with the ratio of the whole sequence: GSPO in its token form (arXiv 2507.18071).

    The ratio of a token is s = exp(clamp(sg(m) + logprobs - sg(logprobs), -20, 20)) with m the mean of
    logprobs - old_logprobs over the sequence: its value is the geometric mean of the sequence's ratios, its
    gradient s times that of the token's logprobs. loss = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A).

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds from 1, >= 0. The defaults are the paper's; a mean over
            a sequence varies far less than a ratio, so the keys of `update` are not used.

    Returns:
        As `ppo_clip`; with one advantage per sequence, all its tokens are clipped or none.

    The paper's objective is a mean over sequences: `update.loss_aggregation: seq_mean_token_mean`. verl
    clamps the log-ratio at 10.
    """
    logprobs = tokens.logprobs
    mean = jax.lax.stop_gradient(tokens.sequence_mean(logprobs - tokens.old_logprobs))
    log_ratio = logprobs - jax.lax.stop_gradient(logprobs) + mean
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return _surrogate(ratio, tokens.advantages, clip_low, clip_high, None)


def cispo(tokens: ScoredTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs (CISPO, MiniMax-M1, arXiv 2506.13585).

    The clipped ratio is a weight: unlike in `ppo_clip`, no token loses its gradient.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds of the weight from 1, >= 0. By default the weight is at
            most 5 and has no lower bound (1 - clip_low is 0), as in the paper, which names no upper bound.

    Returns:
        The token loss, and as means the fractions of tokens whose weight was clipped, whatever the sign of A:
        `clip_low_fraction`, `clip_high_fraction` and their sum, `clip_fraction`.
    """
    ratio = jnp.exp(_log_ratio(tokens))
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    weight = jax.lax.stop_gradient(_selected(ratio, low, 1 - clip_low, high, 1 + clip_high))
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, _fractions(clip_low=low, clip_high=high))


def sapo(tokens: ScoredTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """loss = -(4 / tau) sigmoid(tau (r - 1)) A, with tau = tau_pos where A > 0 and tau_neg elsewhere.

    Soft adaptive policy optimization (SAPO, arXiv 2511.20347): a smooth gate in place of clipping. At r = 1
    the gradient is that of REINFORCE with the advantage A; far from it, it falls to 0. The value at r = 1 is
    -(2 / tau) A, so it is not comparable with that of other losses.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        tau_pos, tau_neg: how fast the gradient falls with |r - 1|, > 0.

    Raises:
        ValueError: for a tau that is not above 0.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"{name} must be above 0, got {tau}; set update.loss_args.{name}")
    taus = jnp.where(tokens.advantages > 0, jnp.float32(tau_pos), jnp.float32(tau_neg))
    gate = 4 / taus * jax.nn.sigmoid(taus * (jnp.exp(_log_ratio(tokens)) - 1))
    return TokenLoss(-gate * tokens.advantages)


def gmpo(tokens: ScoredTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """loss = -s A, with s the geometric mean of the sequence's clipped ratios (GMPO, arXiv 2507.20673).

    s = exp(mean of c over the sequence), with c = min(d, clip_high) where A > 0, c = max(d, -clip_low) where
    A < 0, and c = d where A = 0. The gradient of each token's loss flows through all tokens of its sequence.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: bounds of the log-ratio (not of the ratio), >= 0: ratios are clipped at
            exp(-clip_low) and exp(clip_high). The defaults are the paper's.

    Returns:
        The token loss, and as means the fractions of tokens that were clipped: `clip_low_fraction` (A < 0),
        `clip_high_fraction` (A > 0) and their sum, `clip_fraction`.

    The paper's objective is a mean over sequences: `update.loss_aggregation: seq_mean_token_mean`. verl
    always takes the mean over the sequences of a micro-batch, and does not clamp the log-ratio.
    """
    advantages, log_ratio = tokens.advantages, _log_ratio(tokens)
    low = (advantages < 0) & (log_ratio < -clip_low)
    high = (advantages > 0) & (log_ratio > clip_high)
    ratio = jnp.exp(tokens.sequence_mean(_selected(log_ratio, low, -clip_low, high, clip_high)))
    return TokenLoss(-ratio * advantages, _fractions(clip_low=low, clip_high=high))


@with_mini_batch_columns(tokens_between_covariances)
def clip_cov(
    tokens: ScoredTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> TokenLoss:
    """`ppo_clip`, with loss and gradient 0 for a few tokens of high covariance (Clip-Cov, arXiv 2505.22617).

    The tokens are drawn from the whole mini-batch: `ops/covariance.py:tokens_between_covariances`, which
    also says what differs from verl.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `advantages` and the column `high_covariance`.
        clip_low, clip_high, dual_clip: as for `ppo_clip`.
        clip_cov_ratio: fraction of the completion tokens that are drawn, in [0, 1]; at least one is.
        clip_cov_lb, clip_cov_ub: covariances among which tokens are drawn.

    Returns:
        As `ppo_clip`, and as a mean the fraction of tokens drawn, `high_covariance_fraction`.
    """
    clipped = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    chosen = tokens.column("high_covariance")
    return TokenLoss(
        jnp.where(chosen > 0, 0, clipped.loss), {**clipped.means, "high_covariance_fraction": chosen}
    )


@with_mini_batch_columns(tokens_of_highest_covariance)
def kl_cov(tokens: ScoredTokens, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> TokenLoss:
    """loss = -r A, plus ppo_kl_coef |d| for a few tokens of high covariance (KL-Cov, arXiv 2505.22617).

    Nothing is clipped. The tokens are chosen from the whole mini-batch:
    `ops/covariance.py:tokens_of_highest_covariance`, which also says what differs from verl.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `advantages` and the columns `high_covariance` and `moved`.
        kl_cov_ratio: fraction of the completion tokens that are chosen, in [0, 1]; at least one is.
        ppo_kl_coef: weight of their |d|, which is `moved` x d: the sign, which is the gradient, is that of
            the whole mini-batch's log-probabilities. It is 0 in the first optimizer step of a training step,
            where d is the rounding error of a micro-batch, and for a |d| of at most `LEAST_DISTANCE`.

    Returns:
        The token loss, and as a mean the fraction of tokens chosen, `high_covariance_fraction`.
    """
    log_ratio = _log_ratio(tokens)
    penalty = ppo_kl_coef * tokens.column("moved") * log_ratio
    return TokenLoss(
        -jnp.exp(log_ratio) * tokens.advantages + penalty,
        {"high_covariance_fraction": tokens.column("high_covariance")},
    )


def _log_ratio(tokens: ScoredTokens) -> jax.Array:
    return jnp.clip(tokens.logprobs - tokens.old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _surrogate(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """`ppo_clip` of any ratio."""
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    dual = (advantages < 0) & (ratio > dual_clip) if dual_clip is not None else jnp.zeros_like(low)
    # Selecting the bound equals the max and min, and gives exact gradients where the two sides tie.
    used = _selected(ratio, low, 1 - clip_low, high, 1 + clip_high)
    if dual_clip is not None:
        used = jnp.where(dual, dual_clip, used)
    return TokenLoss(-used * advantages, _fractions(clip_low=low, clip_high=high, clip_dual=dual))


def _selected(
    values: jax.Array, low: jax.Array, lower_bound: float, high: jax.Array, upper_bound: float
) -> jax.Array:
    """`values`, with the lower bound where `low` is True and the upper bound where `high` is True."""
    return jnp.where(low, lower_bound, jnp.where(high, upper_bound, values))


def _fractions(**clipped: jax.Array) -> dict[str, jax.Array]:
    """Metrics `<name>_fraction` of masks that exclude each other, and their sum `clip_fraction`."""
    hits = {f"{name}_fraction": hit.astype(jnp.float32) for name, hit in clipped.items()}
    return {"clip_fraction": jnp.stack(list(hits.values())).sum(axis=0), **hits}


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""(tokens, **arguments of its own) -> token loss; arguments without a default are keys of `update`."""


def token_mean(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / N: every completion token weighs the same (DAPO, arXiv 2503.14476)."""
    return mask / max(mask.sum(), 1)


def seq_mean_token_mean(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / (n_i B'): every completion weighs the same, shared by its tokens (GRPO, arXiv 2402.03300)."""
    lengths = mask.sum(axis=1, keepdims=True)
    return mask / (np.maximum(lengths, 1) * max((lengths > 0).sum(), 1))


def seq_mean_token_sum(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / B': the loss of a completion is the sum over its tokens; completions are averaged."""
    return mask / max(mask.any(axis=1).sum(), 1)


def seq_mean_token_sum_norm(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / (B' L): `seq_mean_token_sum` over the constant L = max_new_tokens (Dr. GRPO, arXiv 2503.20783)."""
    return mask / (max(mask.any(axis=1).sum(), 1) * max_new_tokens)


LOSS_AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}


def token_weights(name: str, completion_mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Weight of each token in the loss of one mini-batch; 0 outside the mask.

    With m the mask, n_i its row sums, N = sum n_i and B' the rows with n_i > 0, the weight is m / N,
    m / (n_i B'), m / B' or m / (B' L): see `LOSS_AGGREGATIONS`. Computed from the whole mini-batch before
    it is cut, so that loss and gradient are plain sums over micro-batches and devices.

    Args:
        name: a key of `LOSS_AGGREGATIONS`.
        completion_mask: [B, T] bool, whole mini-batch. Any pattern; rows without tokens weigh nothing.
        max_new_tokens: L, the longest possible completion in tokens.

    Returns:
        [B, T] float32, computed in float64. All zero for a mini-batch without completion tokens.

    Raises:
        ValueError: for an unknown name, a mask that is not a boolean matrix, or L < 1.
    """
    if name not in LOSS_AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {name!r}; use one of {', '.join(LOSS_AGGREGATIONS)}")
    if completion_mask.ndim != 2 or completion_mask.dtype != np.bool_:
        raise ValueError(
            f"completion_mask must be bool [B, T], got {completion_mask.dtype.name} {completion_mask.shape}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return LOSS_AGGREGATIONS[name](completion_mask, max_new_tokens).astype(np.float32)
