"""The critic's loss: values of tokens against their returns.

Data flow: `update/critic.py` -> `value_loss` of the values of a micro-batch and the columns of its tokens.
"""

import jax.numpy as jnp
import numpy as np

from quatrain.ops.tokens import TokenLoss, ValuedTokens


def value_loss(tokens: ValuedTokens, *, clip_value: float | None) -> TokenLoss:
    """Half the squared error of each value, or of the value held near the old one if that error is larger.

    With v the value, v_old the value at the start of the training step and R the return:
    loss = max((v - R)^2, (clip(v, v_old - clip_value, v_old + clip_value) - R)^2) / 2. A token whose clipped
    error is larger has gradient zero. `clip_value` > 0 is in the unit of the values; None: not clipped.
    Means: `value_mean`, `return_mean` and `clip_fraction` (tokens whose clipped error is larger). Source: PPO
    as in OpenAI's baselines (Engstrom et al., arXiv 2005.12729); verl has the same formula.
    """
    error = jnp.square(tokens.values - tokens.returns)
    clipped = jnp.zeros(error.shape, bool)
    if clip_value is not None:
        near = jnp.clip(tokens.values, tokens.old_values - clip_value, tokens.old_values + clip_value)
        held = jnp.square(near - tokens.returns)
        clipped = held > error
        error = jnp.where(clipped, held, error)
    means = {
        "value_mean": tokens.values,
        "return_mean": tokens.returns,
        "clip_fraction": clipped.astype(jnp.float32),
    }
    return TokenLoss(0.5 * error, means)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(returns - values) / Var(returns), over all elements: 1 for a perfect critic, 0 for a constant.

    Population variances in float64. None where it is not defined: no elements, or equal returns.
    """
    spread = np.var(returns, dtype=np.float64) if returns.size else 0.0
    if not spread:
        return None
    return float(1 - np.var(np.asarray(returns, np.float64) - values) / spread)
