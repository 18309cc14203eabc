"""The four stages of a training step, built from the configuration.

Stands between `policy.py`, which loads the model, and the training loop. `quatrain.build_stages` is for
those who write the loop themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.cluster.processes import decided_by_main
from quatrain.config.schema import Config
from quatrain.policy import LoadedPolicy, build_engine, build_policy_spec
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.engine import OnProgress
from quatrain.rollout.interface import Rollouts
from quatrain.update.learner import Learner


@dataclass(frozen=True)
class Stages:
    """Rollout, reward, advantage and update: one line of a training step each."""

    rollout: Rollouts
    reward: RewardScorer
    advantage: AdvantageEstimator
    update: Learner


def build_stages(
    config: Config,
    loaded: LoadedPolicy,
    *,
    steps: int,
    reference: Any = None,
    on_progress: OnProgress | None = None,
) -> Stages:
    """The stages of a run of `steps` training steps, which the learning-rate schedule spans.

    `reference`: the frozen parameters that KL is taken to, needed where `update.kl_coef` is not 0.
    `on_progress` is called by the rollout after each of its decode calls. Raises ValueError for a reward
    function, estimator or loss that cannot be imported or does not fit.
    """
    return Stages(
        build_engine(config, loaded, on_progress=on_progress),
        build_scorer(config),
        AdvantageEstimator(config.advantage),
        build_learner(config, loaded, steps=steps, reference=reference),
    )


def build_scorer(config: Config) -> RewardScorer:
    """The reward stage; of several processes the main one alone calls the reward functions."""
    return RewardScorer(config.reward, decide=decided_by_main)


def build_learner(config: Config, loaded: LoadedPolicy, *, steps: int, reference: Any = None) -> Learner:
    """The update stage of a run of `steps` training steps; `reference` as for `build_stages`."""
    assert config.update.mini_batch_size is not None, "batch sizes are derived before they come here"
    mini_batches = math.ceil(config.data.batch_size / config.update.mini_batch_size)
    return Learner(
        build_policy_spec(config, loaded, temperature=config.rollout.temperature or 1.0),
        config.update,
        config.logprob,
        config.optimizer,
        max_new_tokens=config.rollout.max_new_tokens,
        total_steps=steps * config.update.epochs * mini_batches,
        seed=config.seed,
        reference=reference,
        optimizer_memory="host" if config.offload.optimizer else "device",
    )
