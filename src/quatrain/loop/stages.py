"""The four stages of a training step, and the rollout engine that the configuration asks for.

Used by `build.py`, by evaluation, and by users who write a training loop themselves, as
`quatrain.build_stages`. Every stage makes itself (`of`); which of them samples is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.cluster.processes import num_processes
from quatrain.config.errors import installation
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.episodes.environment_episodes import EnvironmentPlayer
from quatrain.episodes.episode_rules import episode_rules
from quatrain.loop.judge import connect_judge
from quatrain.loop.policy import LoadedPolicy, load_policy
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.engine_worker import EngineWorker, weights_reader
from quatrain.rollout.own_sampler import users_sampler
from quatrain.rollout.rollouts import Rollouts, SingleTurns
from quatrain.rollout.start_fleet import start_fleet
from quatrain.types.batches import RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.types.player import Player
from quatrain.types.rollouts import OnProgress, Sampling
from quatrain.types.sampler import Sampler
from quatrain.update.learner import Learner
from quatrain.update.teacher import Teacher, TeacherLoader, as_stage
from quatrain.update.teacher_prompts import TeacherPrompts


@dataclass(frozen=True)
class Stages:
    """The four stages of a training step: rollout, reward, advantage and update; and the teacher, if any.

    A teacher of losses over all words is no stage: it is a part of the update.
    """

    rollout: Rollouts
    reward: RewardScorer
    advantage: AdvantageEstimator
    update: Learner
    teacher: Teacher | None = None

    def teacher_kl(self, params: Any) -> Callable[[RolloutBatch], Metric | None] | None:
        """What computes the KL of `params` to the teacher on completions; None without a teacher."""
        words = self.update.trainer.teacher
        scorer = self.teacher if words is None else words.scorer
        return None if scorer is None else partial(self.update.teacher_kl, scorer, params)


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
    scorer = RewardScorer.of(config, loaded, reward_functions)
    teacher = TeacherLoader(config, loaded).load(TeacherPrompts.of(config.distill, loaded))
    return Stages(
        build_engine(config, loaded, scorer, on_progress=on_progress),
        scorer,
        AdvantageEstimator.of(config),
        Learner.of(config, loaded, steps=steps, reference=reference, teacher=teacher),
        as_stage(teacher),
    )


def build_engine(
    config: Config,
    loaded: LoadedPolicy,
    scorer: RewardScorer | None = None,
    prompts: PromptSource | None = None,
    on_progress: OnProgress | None = None,
) -> Rollouts:
    """What samples for `loaded`, and plays the episodes: line 1 of a training step.

    It has no weights until its `sync_weights` is called. `on_progress` is called with the progress of the
    rollout. Reward functions of `scorer` may get the environments of episodes, which are kept for them.
    Prompt caches have room for the usual lengths of `prompts`. Waits until each worker or server has started;
    raises ValueError, which names it, if one fails to or cannot serve this run, for an agent of the running
    program, and for one without the packages of the extra `serve`.
    """
    if scorer is not None:
        loaded = keeping_environments(config, loaded, scorer)
    if prompts is not None:
        loaded = replace(loaded, usual_prompt=prompts.usual_longest(config.data.batch_size))
    sampler = build_sampler(config, loaded)
    try:
        sees = loaded.arch.vision is not None
        if sees and sampler.cannot_see is not None and prompts is not None and prompts.has_pictures:
            raise ValueError(f"prompts have pictures: {sampler.cannot_see}")
        player = build_player(config, loaded, sampler)
    except BaseException:
        sampler.close()
        raise
    rollout = config.rollout
    made = Rollouts(
        sampler, loaded.tokenizer, Sampling.of(rollout), player, rollout.greedy_baseline, on_progress
    )
    if scorer is not None and scorer.judge is not None:
        try:
            connect_judge(config, loaded, made, scorer.judge)
        except BaseException:
            made.close()
            raise
    return made


def keeping_environments(config: Config, loaded: LoadedPolicy, scorer: RewardScorer) -> LoadedPolicy:
    """`loaded`, whose environments outlive their episodes if reward functions of `scorer` get them.

    Raises ValueError if the environments are not in this process.
    """
    if loaded.environments is None or not scorer.asks_for_environments:
        return loaded
    if count := config.rollout.environment_workers:
        raise ValueError(
            "rollout.environment_workers must be 0 if a reward function gets the `environments` of episodes, "
            f"which are objects of this process; got {count}; set 0, or give the class a method get_reward "
            "and take the reward `environment`"
        )
    return replace(loaded, environments=loaded.environments.keeping())


def build_sampler(config: Config, loaded: LoadedPolicy) -> Sampler:
    """The engine on this run's devices, a fleet of workers or servers, or the class `rollout.sampler`."""
    rollout = config.rollout
    if rollout.sampler is not None:
        sampler = users_sampler(config, loaded, rollout.sampler)
    elif rollout.has_fleet:
        sampler = start_fleet(config, loaded, engine_worker)
    else:
        sampler = EngineService(
            RolloutEngine.of(config, loaded, per_request_sampling=rollout.has_episodes),
            # Ahead of training it samples while training computes; else whoever waits for it has the time.
            thread="quatrain-engine" if rollout.max_staleness else None,
            led=num_processes() > 1 and rollout.has_episodes,
        )
    if rollout.in_flight and not sampler.exchanges_in_flight:
        sampler.close()
        raise ValueError(
            "rollout.in_flight needs a sampler that says of each token which version of the weights sampled "
            "it; the workers or servers of this run do not; set false, or sample on devices of this run"
        )
    return sampler


def build_player(config: Config, loaded: LoadedPolicy, sampler: Sampler) -> Player:
    """What plays the episodes: an agent, environments, or nobody, where a completion is one turn."""
    if config.rollout.agent is not None:
        try:  # other runs need no HTTP server
            from quatrain.episodes.agent_player import agent_player
        except ImportError as error:
            raise ValueError(
                f"rollout.agent needs the packages of an HTTP server ({error}); {installation('serve')}"
            ) from None

        return agent_player(config, loaded, config.rollout.agent, sampler)
    if loaded.environments is not None:
        return EnvironmentPlayer(episode_rules(config, loaded, loaded.environments))
    return SingleTurns()


def engine_worker(config: Config, usual_prompt: int, name: str) -> EngineWorker:
    """A rollout worker in this process, for a `worker_config`; it loads the model but no weights.

    With adapters, it loads the base, because only adapters are published.
    """
    loaded = load_policy(config, critic=False, weights=config.lora.rank > 0, environments=False)
    loaded = replace(loaded, usual_prompt=usual_prompt)
    rollout = config.rollout
    engine = RolloutEngine.of(config, loaded, per_request_sampling=rollout.has_episodes)
    read = weights_reader(loaded.arch, loaded.meshes.rollout, loaded.params)
    return EngineWorker(
        engine, read, name=name, num_slots=rollout.max_concurrency, timeout_s=rollout.timeout_s
    )
