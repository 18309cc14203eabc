"""The rollouts of `rollout.agent`, made of the configuration and what samples the agents' turns."""

from __future__ import annotations

from collections.abc import Callable

from quatrain.agents.play import AgentRollouts, AgentRules
from quatrain.agents.workers import check_agent
from quatrain.cluster.processes import num_processes
from quatrain.config.derive import environment_tokens
from quatrain.config.schema import Config
from quatrain.data.policy import Policy
from quatrain.engine.service import EngineService
from quatrain.rollout.fleet_service import FleetService
from quatrain.types.rollouts import OnProgress, Sampling
from quatrain.workers.pool import default_workers


def agent_rollouts(
    config: Config,
    policy: Policy,
    agent: str,
    make_service: Callable[[], EngineService | FleetService],
    *,
    on_progress: OnProgress | None = None,
) -> AgentRollouts:
    """What samples by `agent`, whose turns are sampled by what `make_service` makes.

    Raises ValueError, before anything is made, for an agent of the running program and in a run of several
    processes.
    """
    rollout = config.rollout
    if num_processes() > 1:
        raise ValueError(
            f"rollout.agent needs a run of one process; this one has {num_processes()}; use the devices of "
            "one host, or an environment (rollout.environment)"
        )
    check_agent(agent, rollout.agent_args, rollout.agent_python)
    rules = AgentRules(
        agent=agent,
        args=rollout.agent_args,
        num_workers=rollout.agent_workers or default_workers(),
        concurrency=rollout.agent_concurrency,
        timeout_s=rollout.agent_timeout_s,
        max_turns=rollout.max_turns,
        more_tokens=config.data.max_prompt_length + environment_tokens(config),
        longest=policy.arch.longest,
        seed=config.seed,
        python=rollout.agent_python,
    )
    return AgentRollouts(
        make_service(),
        rules,
        tokenizer=policy.tokenizer,
        stop_ids=policy.stop_ids,
        sampling=Sampling.of(rollout),
        model=config.model.path,
        vocab_size=policy.arch.vocab_size,
        greedy_baseline=rollout.greedy_baseline,
        on_progress=on_progress,
    )
