"""Loads the policy that the configuration names, with its critic and what its episodes are played with.

Used by training, evaluation, warm start, export and serving, and by users as `quatrain.load_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from quatrain.backend import this_backend
from quatrain.cluster.processes import num_processes
from quatrain.config.data_sets import TrainingSpec, shown_data_sets
from quatrain.config.derive import longest_of_run, longest_sequence
from quatrain.config.schema import Config
from quatrain.data.chat_template import with_chat_template
from quatrain.data.expansion import with_vision
from quatrain.data.pixels import Pixels, with_limits
from quatrain.data.policy import Meshes, Policy
from quatrain.data.prompts import PromptSource, load_prompts
from quatrain.data.rows import GivenRows
from quatrain.data.tokenizer import for_scoring, load_tokenizer, stop_token_ids
from quatrain.data.vocabulary import check_same_tokens
from quatrain.episodes.hubs import hub_rows
from quatrain.episodes.load_environment import AnyEnvironments, load_environments, load_tools
from quatrain.models.families import Architecture
from quatrain.models.feature_store import FeatureStore
from quatrain.models.lora import with_adapters, with_lora
from quatrain.models.params import check_policy
from quatrain.models.probe import trusted_attention, trusted_backend
from quatrain.parallel.mesh import mesh_shape, to_memory
from quatrain.report.start_up import stage
from quatrain.reward.scorer import RewardScorer
from quatrain.update.server_teacher import BLIND_TEACHER
from quatrain.weights.load_model import (
    BUILTIN,
    Model,
    load_architecture,
    load_model,
    load_processor,
    load_tower,
)


@dataclass(frozen=True, repr=False)
class LoadedPolicy(Policy):
    """A policy, with what makes the environments of its episodes; None if completions have one turn."""

    environments: AnyEnvironments | None = None

    @property
    def required_by(self) -> Mapping[str, str]:
        """Data columns that the environments need -> what needs them, for error messages."""
        if self.environments is None:
            return {}
        return dict.fromkeys(self.environments.required_columns, f"the {self.environments.name}")

    def prompts(
        self,
        config: Config,
        spec: TrainingSpec,
        scorer: RewardScorer,
        rows: GivenRows,
        needed: Mapping[str, str],
        *,
        by_pass_rate: bool = False,
    ) -> PromptSource:
        """The prompts of the data set `spec`, with the columns that episodes, rewards and `needed` name.

        Raises ValueError, which names it, if it is invalid, or has pictures, which servers would not see.
        """
        source = load_prompts(
            spec,
            config.data,
            self.tokenizer,
            seed=config.seed,
            required_columns={**scorer.required_by, **self.required_by, **needed},
            check_prompt=scorer.check_prompt,
            turns=self.turns,
            by_pass_rate=by_pass_rate,
            rows=hub_rows(config, spec, rows),
        )
        if self.arch.vision is not None and source.has_pictures:
            if config.distill.servers:
                raise ValueError(f"{shown_data_sets(spec)} has pictures: {BLIND_TEACHER}")
            if why := self._blind(config):
                raise ValueError(
                    f"what reads prompts with pictures must see them, and {shown_data_sets(spec)} has some; "
                    f"{why}"
                )
        return source

    def _blind(self, config: Config) -> str | None:
        """What reads the policy's prompts without their pictures, and the remedy; None: nothing does."""
        if self.critic_arch is not None and self.critic_arch.vision is None:
            return (
                f"the critic {config.critic.path} has no tower: name one that has, or set critic.path to null"
            )
        if models := config.reward.models:
            return f"reward models read texts: leave {', '.join(models)} out of reward.functions"
        if config.reward.judges:
            return "a judge reads texts: leave reward.judge out"
        for path in config.distill.models:
            if load_architecture(path, vocab_size=len(self.tokenizer), vision=None).vision is None:
                return f"the teacher {path} has no tower: name one that has in distill.teacher"
        distill = config.distill
        if distill.models and distill.loss != "sampled" and not distill.top_k:
            return "a teacher of all words reads texts: set distill.top_k, or distill.loss to sampled"
        # Each call of the tower is one of all processes; two threads would make them in any order, and hang.
        if config.rollout.max_staleness and num_processes() > 1:
            return (
                "in several processes nothing may be sampled ahead with pictures: set rollout.max_staleness "
                "to 0"
            )
        return None


def load_policy(
    config: Config,
    *,
    critic: bool = True,
    weights: bool = True,
    adapters: bool = True,
    environments: bool = True,
) -> LoadedPolicy:
    """Loads `model.path` and `model.tokenizer`; a built-in model is initialised from the run's seed.

    With `critic`, it also loads the critic, if the configuration has one. Without `weights`, the parameters
    are None, and everything else is read and checked. With `adapters`, the policy has those of `lora`, if
    the configuration has any, as they are before training. With `environments`, what makes the environments
    of `rollout.environment` or `rollout.tools` is imported.

    The policy of `quatrain rm` has a score head, and a tokenizer that closes texts as completions end.

    Parameters are sharded by `mesh` over the devices of all processes. Raises ValueError if a mesh does not
    match the number of devices or cannot shard the model, the devices lack pinned host memory needed for
    offloading, the tokenizer has more tokens than the model's vocabulary, the longest sequence has more
    tokens than the model has positions, the kernel `model.attention` cannot run the model, it cannot have
    the adapters of `lora`, or environments or tools cannot be used, with this chat template or at all.
    """
    stage("devices")
    meshes = Meshes.of(config)
    if any(config.offload.model_dump().values()):
        to_memory("host", {})
    stage("tokenizer")
    tokenizer = with_chat_template(load_tokenizer(config.model.tokenizer), config.data)
    own_eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    stage(f"{'weights' if weights else 'architecture'} of {config.model.path}")
    model = load_model(
        config.model.path,
        dtype=config.model.param_dtype,
        seed=config.seed,
        vocab_size=len(tokenizer),
        eos_token_ids=own_eos,
        mesh=meshes.train,
        head="value_head" if config.run.task == "rm" else "lm_head",
        weights=weights,
        # A score head reads texts alone: its class in transformers has no tower.
        vision="none" if config.run.task == "rm" else config.model.vision,
    )
    if model.arch.vision:
        model = replace(model, arch=replace(model.arch, vision=with_limits(model.arch.vision, config.data)))
    tokenizer = with_vision(tokenizer, model.arch.vision)
    check_policy(model.arch, mesh_shape(meshes.train), mesh_shape(meshes.rollout))
    model = replace(model, arch=model.arch.for_length(longest_of_run(config)))
    if len(tokenizer) > model.arch.vocab_size:
        raise ValueError(
            "a tokenizer must not have more tokens than its model's vocabulary: "
            f"{config.model.tokenizer} has {len(tokenizer)} tokens, {config.model.path} "
            f"{model.arch.vocab_size}; set model.tokenizer to the one the model was trained with"
        )
    _check_positions(config, model.arch)
    attention = _attention(config, model.arch)
    backend = trusted_backend(config.model, model.arch)
    critic_arch, critic_params = (
        _load_critic(config, tokenizer, model.arch, meshes, weights=weights) if critic else (None, None)
    )
    if config.lora.rank and adapters:
        model = _with_lora(config, model, meshes.train)
    stop_ids = stop_token_ids(tokenizer, model.arch.eos_token_ids)
    if config.run.task == "rm":
        tokenizer = for_scoring(tokenizer, stop_ids)
        # The last token of a row is scored, and whoever loads the export pools before this token.
        model = replace(model, arch=replace(model.arch, pad_token_id=tokenizer.pad_token_id))
    made = _environments(config) if environments else None
    return LoadedPolicy(
        tokenizer,
        model.arch,
        model.params,
        stop_ids,
        meshes,
        model.sampling,
        critic_arch,
        critic_params,
        attention,
        backend,
        None if made is None else made.turns(tokenizer, stop_ids),
        model.whole,
        _store(config, model, meshes.train),
        environments=made,
    )


def _environments(config: Config) -> AnyEnvironments | None:
    """What makes the environments of episodes; None for single turns."""
    if config.rollout.environment is not None:
        return load_environments(config.rollout.environment)
    return load_tools(config.rollout.tools) if config.rollout.tools else None


def _with_lora(config: Config, base: Model, mesh: Mesh) -> Model:
    """The model with new adapters, which are drawn from the run's seed."""
    arch = with_lora(base.arch, config.lora)
    if base.params is None:
        return replace(base, arch=arch)
    return replace(
        base, arch=arch, params=with_adapters(base.params, arch, jax.random.key(config.seed), mesh)
    )


def _store(config: Config, loaded: Model, mesh: Mesh) -> FeatureStore | None:
    """What makes features of pictures; None for a model that reads text alone."""
    arch, path, model = loaded.arch, config.model.path, config.model
    if arch.vision is None:
        return None
    # In the dtype of its products: a frozen tower is exported from its files, whatever it is here.
    frozen = partial(load_tower, path, arch, mesh, model.dtype)
    processor = loaded.whole.processor if loaded.whole else load_processor(path)
    pixels = Pixels(arch.vision, processor)
    store = FeatureStore(arch, mesh, model.dtype, model.vision_cache_bytes, pixels, frozen=frozen)
    # The update reads states below the projector from the first step on; a sampler need not be here.
    if store.kept == "states" and loaded.params is not None:
        store.load(loaded.params, 0)
    return store


def _check_positions(config: Config, arch: Architecture) -> None:
    """Of what is sampled; rows of given data are read for their lengths (`loop/given.py`)."""
    if not config.generates:
        return
    lengths = {"rollout": config.rollout.max_new_tokens, "eval": config.eval.max_new_tokens or 0}
    for section, length in lengths.items():
        longest = config.data.max_prompt_length + length
        if longest > arch.max_position:
            raise ValueError(
                "a sequence must not be longer than its model's maximum number of positions: "
                f"data.max_prompt_length + {section}.max_new_tokens is {longest} tokens, {config.model.path} "
                f"has {arch.max_position} positions; lower one of the two, or give the model a rope kind for "
                "longer sequences in its config.json (rope_parameters, max_position_embeddings)"
            )


def _load_critic(
    config: Config, tokenizer: Any, policy: Architecture, meshes: Meshes, *, weights: bool
) -> tuple[Architecture | None, Any]:
    """Architecture and parameters of the critic, as the fields of `Policy` have them."""
    path = config.critic.path
    if not config.critic.enabled:
        return None, None
    if policy.vision and policy.vision.trained != "frozen":  # by default, of a built-in model
        raise ValueError(
            f"with a critic a tower must be frozen, or left out; got model.vision {policy.vision.trained}; "
            "set model.vision to none, or take an advantage.estimator without a critic"
        )
    if path is None:
        return replace(policy, head="value_head"), None
    if not path.startswith(BUILTIN):
        try:
            check_same_tokens(load_tokenizer(path), tokenizer)
        except ValueError as error:
            raise ValueError(f"critic.path {path} cannot be used: {error}") from error
    model = load_model(
        path,
        dtype=config.model.param_dtype,
        seed=config.seed,
        vocab_size=len(tokenizer),
        mesh=meshes.critic,
        head="value_head",
        weights=weights,
        vision=None if policy.vision else "none",
    )
    longest = min(longest_sequence(config), policy.max_position)
    if longest > model.arch.max_position or len(tokenizer) > model.arch.vocab_size:
        raise ValueError(
            f"a critic must have a position for each token of the longest sequence ({longest}) and an "
            f"embedding for each token of the tokenizer ({len(tokenizer)}); {path} has "
            f"{model.arch.max_position} positions and {model.arch.vocab_size} embeddings; choose another "
            "critic, or set critic.path to null"
        )
    arch = model.arch.for_length(longest_of_run(config))
    if arch.vision is not None:
        arch = replace(arch, vision=with_limits(arch.vision, config.data))
    _attention(config, arch)
    return arch, model.params


def _attention(config: Config, arch: Architecture) -> str:
    """The attention kernel for `model.attention` on this platform; raises ValueError if it is unavailable."""
    model = config.model
    return trusted_attention(model.attention, arch, platform=this_backend().kind, dtype=model.dtype)
