"""Group policy gradient (GPG)."""

from quatrain.ops.losses.reinforce import reinforce
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def gpg(tokens: ScoredTokens) -> TokenLoss:
    """loss = -A logprobs: group policy gradient (GPG, arXiv 2504.02546); the same function as `reinforce`.

    The factor that makes up for groups without signal is in the advantage: `advantage.estimator: gpg`.
    """
    return reinforce(tokens)
