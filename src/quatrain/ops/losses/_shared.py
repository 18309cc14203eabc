"""What several policy losses are made of."""

import math

import jax
import jax.numpy as jnp

from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def check_bounds(most: float = math.inf, *, positive: bool = False, **arguments: float | jax.Array) -> None:
    """Raises ValueError for an argument of a loss below 0, with `positive` also for 0, or above `most`.

    Arrays pass: the training server gives a number for each token, by rules of its own.
    """
    rule = "above 0" if positive else "0 or more" if most == math.inf else f"in [0, {most:g}]"
    for name, value in arguments.items():
        if isinstance(value, int | float) and not (0 <= value <= most and (value or not positive)):
            raise ValueError(f"{name} must be {rule}, got {value}; set update.loss_args.{name}")


def log_ratio(tokens: ScoredTokens) -> jax.Array:
    return jnp.clip(tokens.logprobs - tokens.old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogate(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """`ppo_clip` of any ratio."""
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    dual = (advantages < 0) & (ratio > dual_clip) if dual_clip is not None else jnp.zeros_like(low)
    # Selecting the bound equals the max and min, and gives exact gradients where the two sides tie.
    used = selected(ratio, low, 1 - clip_low, high, 1 + clip_high)
    if dual_clip is not None:
        used = jnp.where(dual, dual_clip, used)
    return TokenLoss(-used * advantages, fractions(clip_low=low, clip_high=high, clip_dual=dual))


def trust_region(tokens: ScoredTokens, low: jax.Array, high: jax.Array) -> TokenLoss:
    """-r A, and 0 on the tokens that have left a trust region: `low` where A < 0, `high` where A > 0."""
    low, high = (tokens.advantages < 0) & low, (tokens.advantages > 0) & high
    loss = jnp.where(low | high, 0.0, -jnp.exp(log_ratio(tokens)) * tokens.advantages)
    return TokenLoss(loss, fractions(clip_low=low, clip_high=high))


def selected(
    values: jax.Array, low: jax.Array, lower_bound: float, high: jax.Array, upper_bound: float
) -> jax.Array:
    """`values`, with the lower bound where `low` is True and the upper bound where `high` is True."""
    return jnp.where(low, lower_bound, jnp.where(high, upper_bound, values))


def fractions(**clipped: jax.Array) -> dict[str, jax.Array]:
    """Metrics `<name>_fraction` of masks that exclude each other, and their sum `clip_fraction`."""
    hits = {f"{name}_fraction": hit.astype(jnp.float32) for name, hit in clipped.items()}
    return {"clip_fraction": jnp.stack(list(hits.values())).sum(axis=0), **hits}
