"""The rules of a run's episodes, made of the configuration and the environments that it names."""

from __future__ import annotations

from quatrain.cluster.processes import is_main_process
from quatrain.config.derive import environment_tokens
from quatrain.config.schema import Config
from quatrain.data.policy import Policy
from quatrain.episodes.environment_episodes import EpisodeRules
from quatrain.episodes.environment_threads import InThreads
from quatrain.episodes.environment_workers import EnvironmentCalls, InWorkers
from quatrain.episodes.load_environment import AnyEnvironments


def episode_rules(config: Config, policy: Policy, environments: AnyEnvironments) -> EpisodeRules:
    """The rules of episodes with `environments`, which run in threads or processes of the main process."""
    rollout = config.rollout
    calls: EnvironmentCalls | None = None  # environments are in the main process alone
    assert policy.turns is not None, "who loads environments also loads what renders their turns"
    timeout_s, workers = rollout.environment_timeout_s, rollout.environment_workers
    if is_main_process() and workers:
        calls = InWorkers(rollout.environment or rollout.tools, workers, timeout_s)
    elif is_main_process():
        calls = InThreads(environments, timeout_s)
    return EpisodeRules(
        policy.tokenizer,
        policy.turns,
        calls,
        max_turns=rollout.max_turns,
        max_environment_tokens=environment_tokens(config),
        max_tokens=policy.arch.longest,
        seed=config.seed,
        kind=environments.kind,
    )
