"""Connects a judge on this run's devices (`reward.judge`) with what samples its answers.

Used where the rollout is made (`stages.py`): the policy judges with the sampler of the rollout, another model
with an engine of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from quatrain.backend import this_backend
from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.config.derive import longest_of_run
from quatrain.config.schema import Config
from quatrain.config.sections.judge import SELF
from quatrain.data.grammars import of_answer
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.loop.policy import LoadedPolicy
from quatrain.models.probe import trusted_attention
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import mesh_shape, to_memory
from quatrain.reward.judge.judge import Judge
from quatrain.reward.judge.judgements import schema
from quatrain.reward.judge.on_engine import EngineJudge
from quatrain.rollout.rollouts import Rollouts, SingleTurns
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import AtOnce, Sampler
from quatrain.weights.load_model import load_model

logger = logging.getLogger(__name__)

RUBRIC_TOKENS = 1024
"""Tokens of a question beside the longest sequence of the run, for which a model's positions are chosen."""


def connect_judge(config: Config, loaded: LoadedPolicy, rollouts: Rollouts, judge: Judge) -> None:
    """Has a judge that is no server answered by the sampler of `rollouts`, or by another model beside it.

    Raises ValueError for a model that cannot be loaded, or without a tokenizer.
    """
    if judge.config.self:
        # An engine that is led is asked by the main process alone.
        led = num_processes() > 1 and config.rollout.has_episodes
        of_policy = _sampling_of(config, judge, rollouts.sampler, loaded.tokenizer, is_everywhere=not led)

        if judge.config.cache:
            rollouts.on_weights = lambda params: judge.begin(tree_fingerprint(params))
        if judge.config.cache is True and (every := config.checkpoint.every_steps):
            # A run is resumed from the newest checkpoint or, while that is written, from the one before it.
            judge.cache.most_weights = 2 * every + 1
        judge.connect(
            EngineJudge(
                judge.config,
                judge.spending,
                lambda prompts, sampling: of_policy.generate(prompts, sampling=sampling),
                loaded.tokenizer,
                loaded.arch.longest,
                lambda: [SELF, judge.weights],
                decided_by_main,
            )
        )
    elif judge.config.model is not None:
        judge.connect(_other_model(config, loaded, judge, judge.config.model))


def _other_model(config: Config, loaded: LoadedPolicy, judge: Judge, path: str) -> EngineJudge:
    """The judge that is the model at `path`, whose weights are on its devices while it is asked."""
    mesh, dtype = loaded.meshes.reward, config.model.dtype
    try:
        tokenizer = load_tokenizer(path)
        ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        given: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_ids": ends, "mesh": mesh}
        model = load_model(path, dtype=config.model.param_dtype, seed=config.seed, **given)
        if len(tokenizer) > model.arch.vocab_size:
            raise ValueError(
                "a tokenizer must not have more tokens than its model's vocabulary: it has "
                f"{len(tokenizer)}, the model {model.arch.vocab_size}; save the tokenizer that the model was "
                "trained with in its folder"
            )
        attention = trusted_attention("auto", model.arch, platform=this_backend().kind, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"reward.judge.model {path} cannot be used: {error}") from error
    arch = model.arch.for_length(longest_of_run(config) + RUBRIC_TOKENS + judge.config.max_tokens)
    # Each replica needs a slot; how many answers are asked for at the same time, `_sampling_of` sees to.
    slots = max(judge.config.concurrency, mesh_shape(mesh).num_data_shards)
    alone = {"max_concurrency": slots, "max_staleness": 0, "in_flight": False}
    plain = {"prefix_share": None, "record_routes": False, "speculate": 0}
    engine = RolloutEngine(
        arch,
        config.rollout.model_copy(update={**alone, **plain}),
        tokenizer,
        stop_ids=stop_token_ids(tokenizer, arch.eos_token_ids),
        seed=config.seed,
        dtype=dtype,
        attention=attention,
        mesh=mesh,
        per_request_sampling=True,
    )
    service = EngineService(engine, thread=None)
    own = _sampling_of(config, judge, service, tokenizer)
    params = to_memory("host" if config.offload.reward_models else "device", model.params)

    def generate(prompts: Sequence[Prompt], sampling: Sampling) -> RolloutBatch:
        own.sync_weights(params, 0)
        try:
            return own.generate(prompts, sampling=sampling)
        finally:
            own.release()

    # Other weights may be saved at the same path: what they say is not what is kept.
    weights = tree_fingerprint(model.params) if judge.config.cache else None
    identity = ["model", path, weights, config.seed, config.model.param_dtype, dtype]
    return EngineJudge(
        judge.config, judge.spending, generate, tokenizer, arch.longest, lambda: identity, decided_by_main
    )


def _sampling_of(
    config: Config, judge: Judge, sampler: Sampler, tokenizer: Any, *, is_everywhere: bool = True
) -> Rollouts:
    """What samples a judge's answers, by its grammar if the sampler follows grammars."""
    own, grammar = judge.config, None
    if sampler.cannot_constrain is None:  # a reason may take about half of the tokens, one a character
        grammar = of_answer(schema(own.scale, own.max_tokens // 2), tokenizer, blanks=1)
    else:
        logger.info("a judge's scores are read from its texts: %s", sampler.cannot_constrain)
    player = SingleTurns(AtOnce(sampler, own.concurrency), grammar, config.seed, is_everywhere)
    return Rollouts(sampler, tokenizer, Sampling(1, own.max_tokens), player)
