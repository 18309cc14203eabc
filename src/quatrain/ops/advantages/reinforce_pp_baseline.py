"""REINFORCE++ with the group's mean reward as baseline."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.advantages.reinforce_pp import reinforce_pp
from quatrain.ops.masked import segment_means, segment_sizes

SCALES = ("batch", "none")
COMPARES_SAMPLES = True


def reinforce_pp_baseline(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    episode_ids: np.ndarray | None = None,
    gamma: float = 1.0,
    scale: str = "batch",
) -> np.ndarray:
    """`reinforce_pp` of r - mean_g in place of the reward r (REINFORCE++-baseline, arXiv 2501.03262).

    A group of one is left out of the whitening and has advantage 0 (verl: its reward). A group of equal
    rewards has a small advantage all the same, because the mean over tokens that whitening subtracts is
    rarely 0. Token rewards are not centred (verl centres their sum over the sequence).
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        return np.where(segment_sizes(groups) > 1, rewards - segment_means(rewards, groups), np.nan)

    check_scale("reinforce_pp_baseline", scale, SCALES)
    centred = np.where(
        np.isnan(rewards), np.nan, by_rows(formula, rewards, group_ids, episode_ids=episode_ids)
    )
    return reinforce_pp(centred, completion_mask, token_rewards, gamma, scale)
