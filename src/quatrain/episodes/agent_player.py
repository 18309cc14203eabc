"""The player of `rollout.agent`, made of the configuration and what samples the agents' turns."""

from __future__ import annotations

from quatrain.config.derive import environment_tokens
from quatrain.config.schema import Config
from quatrain.data.policy import Policy
from quatrain.episodes.agent_episodes import AgentPlayer, AgentRules
from quatrain.episodes.agent_processes import check_agent
from quatrain.types.sampler import Sampler
from quatrain.workers.pool import default_workers


def agent_player(config: Config, policy: Policy, agent: str, sampler: Sampler) -> AgentPlayer:
    """What plays episodes by `agent`, whose turns `sampler` samples.

    Raises ValueError for an agent of the running program.
    """
    rollout = config.rollout
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
    return AgentPlayer(
        sampler,
        rules,
        tokenizer=policy.tokenizer,
        stop_ids=policy.stop_ids,
        model=config.model.path,
        vocab_size=policy.arch.vocab_size,
    )
