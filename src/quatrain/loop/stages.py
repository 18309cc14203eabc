"""The four stages of a training step, built from the configuration.

Used by `run.py` with a policy loaded by `build.py`, and by users who write a training loop themselves, as
`quatrain.build_stages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.rules import FILTERS
from quatrain.config.schema import Config, CriticConfig, UpdateConfig
from quatrain.loop.build import (
    LoadedPolicy,
    build_critic_spec,
    build_engine,
    build_policy_spec,
    build_scorer,
    build_teachers,
)
from quatrain.reward.scorer import RewardScorer
from quatrain.types.rollouts import OnProgress, Rollouts
from quatrain.update.critic import Critic
from quatrain.update.distillation import Distillation
from quatrain.update.learner import KLReward, Learner
from quatrain.update.teacher import Teacher, WordTeacher


@dataclass(frozen=True)
class Stages:
    """The four stages of a training step: rollout, reward, advantage and update; and the teacher, if any."""

    rollout: Rollouts
    reward: RewardScorer
    advantage: AdvantageEstimator
    update: Learner
    teacher: Teacher | None = None


def build_stages(
    config: Config,
    loaded: LoadedPolicy,
    *,
    steps: int,
    reference: Any = None,
    on_progress: OnProgress | None = None,
    reward_functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Stages:
    """The stages of a run of `steps` training steps, the length of the learning-rate schedule.

    `reference`: frozen parameters of the reference policy, needed for KL in the loss or in the reward. The
    rollout calls `on_progress` after each decode call. `reward_functions` has Python functions for entries of
    `reward.functions`, by their names there; they are called in this process. Raises ValueError for a reward
    function, estimator or loss that cannot be imported or has an invalid signature, and for a reward model
    or a teacher that cannot be loaded.
    """
    scorer = build_scorer(config, loaded, reward_functions)
    of_tokens, of_words = build_teachers(config, loaded)
    return Stages(
        build_engine(config, keeping_environments(config, loaded, scorer), on_progress=on_progress),
        scorer,
        build_advantage(config),
        build_learner(config, loaded, steps=steps, reference=reference, teacher=of_words or of_tokens),
        of_tokens,
    )


def keeping_environments(config: Config, loaded: LoadedPolicy, scorer: RewardScorer) -> LoadedPolicy:
    """`loaded`, whose environments outlive their episodes if reward functions of `scorer` get them.

    Raises ValueError if the environments are not in this process.
    """
    if loaded.environments is None or not scorer.asks_for_environments:
        return loaded
    rollout = config.rollout
    for key in ("environment_workers", "workers"):
        if count := getattr(rollout, key):
            raise ValueError(
                f"rollout.{key} must be 0 if a reward function gets the `environments` of episodes, which "
                f"are objects of this process; got {count}; set 0, or give the class a method get_reward "
                "and take the reward `environment`"
            )
    return replace(loaded, environments=loaded.environments.keeping())


def build_advantage(config: Config) -> AdvantageEstimator:
    """The advantage stage; raises ValueError where the estimator takes what the run does not bring."""
    estimator = AdvantageEstimator(config.advantage)
    for name, key, brought in (
        ("values", "critic.enabled", config.critic.enabled),
        ("baseline_rewards", "rollout.greedy_baseline", config.rollout.greedy_baseline),
    ):
        takes = name in estimator.inputs
        if takes != bool(brought):
            verb = "takes" if takes else "does not take"
            raise ValueError(
                f"{key} must be true if the advantage estimator takes {name}, and only then; "
                f"advantage.estimator {config.advantage.estimator} {verb} {name}, and {key} is "
                f"{str(bool(brought)).lower()}; set {key} to {str(takes).lower()}, or take another estimator"
            )
    if config.rollout.agent is not None:
        estimator.check_episodes()
    return estimator


def build_learner(
    config: Config,
    loaded: LoadedPolicy,
    *,
    steps: int,
    reference: Any = None,
    teacher: Teacher | WordTeacher | None = None,
) -> Learner:
    """The update stage of a run of `steps` training steps; for `reference` see `build_stages`."""
    critic = build_critic(config, loaded, steps=steps) if config.critic.enabled else None
    reward = config.reward
    kl_reward = KLReward(reward.kl_coef, reward.kl_target, reward.kl_horizon) if reward.kl_coef else None
    policy_steps = max(steps - config.critic.warmup_steps, 1)
    learner = Learner(
        build_policy_spec(config, loaded, temperature=config.rollout.temperature or 1.0),
        config.update,
        config.logprob,
        config.optimizer,
        max_new_tokens=config.rollout.max_new_tokens,
        total_steps=policy_steps * _optimizer_steps(config, config.update),
        seed=config.seed,
        reference=reference,
        critic=critic,
        kl_reward=kl_reward,
        distillation=Distillation.of(config.distill, steps),
        teacher=teacher if isinstance(teacher, WordTeacher) else None,
        num_words=teacher.top.num_words if isinstance(teacher, Teacher) and teacher.top else None,
        optimizer_memory="host" if config.offload.optimizer else "device",
        policy_memory="host" if config.offload.policy else "device",
        logs_logprobs=config.logging.sample_tokens,
    )
    if config.rollout.max_staleness and not learner.corrects_staleness:
        raise ValueError(
            f"rollout.max_staleness {config.rollout.max_staleness} needs a correction for older weights, and "
            f"update.loss {config.update.loss} does not read old log-probabilities, so that "
            "update.old_logprobs rollout corrects nothing; set update.old_logprobs to auto and "
            "update.correction to truncate or mask"
        )
    if learner.reads_sampler and not config.rollout.samples_the_policy:
        raise ValueError(
            f"update.loss {config.update.loss} reads the sampler's log-probabilities, which must be those of "
            f"the policy's own distribution; {FILTERS} make the sampler draw from another; unset these, or "
            "take another loss"
        )
    return learner


def build_critic(config: Config, loaded: LoadedPolicy, *, steps: int) -> Critic:
    """The critic of a run of `steps` training steps."""
    return Critic(
        build_critic_spec(config, loaded),
        config.critic,
        config.update,
        config.critic_optimizer,
        max_new_tokens=config.rollout.max_new_tokens,
        total_steps=steps * _optimizer_steps(config, config.critic),
        seed=config.seed,
        memory="host" if config.offload.critic else "device",
    )


def _optimizer_steps(config: Config, sizes: UpdateConfig | CriticConfig) -> int:
    """Optimizer steps of a training step, of the policy or of the critic."""
    return sizes.epochs * math.ceil(config.data.batch_size / sizes.mini_batch_size)
