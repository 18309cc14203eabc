"""REINFORCE with a quadratic penalty on the distance from the sampler (DRO)."""

from quatrain.ops.kl import k2
from quatrain.ops.losses._shared import check_bounds
from quatrain.ops.tokens import ScoredTokens, TokenLoss

WITHOUT_SIGNAL = True
LEVELS = ("token", "sequence")


def dro(tokens: ScoredTokens, *, beta: float = 0.05, level: str = "token") -> TokenLoss:
    """loss = -A logprobs + beta g^2 / 2, with g = logprobs - rollout_logprobs, the log-ratio to the sampler.

    Direct reward optimisation (DRO, arXiv 2405.19107): up to the factor 1 / beta and a constant it is the
    squared error (A - beta g)^2 / 2 of the paper, with the advantage in place of reward minus value. The
    policy is drawn to where beta g is A, and no ratio multiplies anything, so tokens may be of any weights.

    Args:
        tokens: reads `logprobs`, `rollout_logprobs` and `advantages`.
        beta: weight of the penalty, > 0 (the paper's tau). 0.05 is that of Tinker's and verl's examples.
        level: `token`: g is the token's, as in Tinker and in verl's `dro`. `sequence`: it is that of the
            whole sequence, G, as in the paper and in Kimi k1.5 (2501.12599); the sum of the tokens' losses is
            then that of the sequence, -A sum(logprobs) + beta G^2 / 2. G grows with the length, so beta is
            smaller.

    Returns:
        The token loss, and as a mean g^2 / 2 of the token, `sampler_kl`.

    Raises:
        ValueError: for a `beta` that is not above 0, and for another `level`.

    The paper penalises the distance from a reference policy and learns the value together with the policy;
    here it is the distance from what sampled the token, as in Tinker, and the estimator brings the advantage.
    The paper's objective is a mean over sequences: `update.loss_aggregation: seq_mean_token_sum`.
    """
    check_bounds(positive=True, beta=beta)
    if level not in LEVELS:
        raise ValueError(
            f"level must be {' or '.join(LEVELS)}, got {level!r}; set update.loss_args.level to one of them"
        )
    of_token = penalty = k2(tokens.logprobs, tokens.rollout_logprobs)
    if level == "sequence":
        gap = tokens.sequence_sum(tokens.logprobs - tokens.rollout_logprobs)
        penalty = 0.5 * gap * gap / tokens.sequence_lengths.clip(1)
    return TokenLoss(beta * penalty - tokens.advantages * tokens.logprobs, {"sampler_kl": of_token})
