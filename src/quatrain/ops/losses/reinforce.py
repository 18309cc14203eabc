"""REINFORCE without correction for an older policy."""

from quatrain.ops.tokens import ScoredTokens, TokenLoss


def reinforce(tokens: ScoredTokens) -> TokenLoss:
    """loss = -A logprobs: REINFORCE (Williams, 1992), without correction for an older policy.

    The old log-probabilities play no part: with several optimizer steps per training step, the later ones
    use the samples as if the current policy had drawn them. Reads `logprobs` and `advantages`.
    """
    return TokenLoss(-tokens.advantages * tokens.logprobs)
