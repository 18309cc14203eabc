"""Whether inference servers compute what the trainer does, before training begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quatrain.config.schema import RolloutConfig
from quatrain.data.prompts import PromptSource
from quatrain.loop.stages import Stages
from quatrain.rollout.fleet import Fleet
from quatrain.update.learner import TrainState

PROBES = 4
"""Prompts for each inference server on which it is compared with the trainer before training begins."""
SERVER_TOLERANCE = 4
"""How many times `rollout.logprob_diff_warning` a server may differ from the trainer then."""


def compare_servers(
    stages: Stages,
    state: TrainState,
    source: PromptSource,
    config: RolloutConfig,
    event: Callable[[str], None],
) -> None:
    """Raises ValueError if a server and the trainer give the same tokens other log-probabilities."""
    limit = config.logprob_diff_warning
    if limit is None:
        event(
            "log-probabilities of servers and trainer are not compared, because "
            "rollout.logprob_diff_warning is null"
        )
        return
    engine, servers = stages.rollout, config.servers
    fleet = getattr(engine, "fleet", engine)  # that of agents, or the sampler itself
    assert isinstance(fleet, Fleet), "servers are workers of a fleet"
    prompts, sampling = source.head(PROBES), replace(engine.sampling, n=1)
    fleet.sync_weights(state.params, state.step)
    tickets = [fleet.submit(prompts, sampling=sampling, worker=each) for each in range(len(servers))]
    for server, ticket in zip(servers, tickets, strict=True):
        gap = stages.update.sampler_mismatch(state, fleet.wait(ticket))
        if not gap <= SERVER_TOLERANCE * limit:
            raise ValueError(
                "a server (rollout.servers) and the trainer must agree in log-probabilities of sampled "
                f"tokens; {server} differs by {gap:.3g} nats on average on the first {len(prompts)} "
                f"prompts, more than {SERVER_TOLERANCE} times rollout.logprob_diff_warning ({limit:g}). "
                "See that it computes in the trainer's precision (vLLM: --dtype float32 or model.dtype: "
                "bfloat16), returns processed log-probabilities (vLLM: --logprobs-mode "
                "processed_logprobs) and was started from this model without quantization"
            )
