"""A policy loss without the correction for stale data, for `staleness.py`: it shows why there is one."""

from __future__ import annotations

from quatrain.ops.corrections import behaviour_weights
from quatrain.ops.losses.ppo_clip import ppo_clip
from quatrain.ops.tokens import ScoredTokens, TokenLoss

CAP = 2.0
"""`update.correction_cap` of the runs: its default."""


def uncorrected(
    tokens: ScoredTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """`ppo_clip` divided by the weights that `update.correction: truncate` multiplies it by."""
    weights, _ = behaviour_weights(
        tokens.old_logprobs, tokens.rollout_logprobs, correction="truncate", cap=CAP
    )
    plain = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return TokenLoss(plain.loss / weights, plain.means, plain.peaks)
