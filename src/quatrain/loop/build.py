"""Loads the policy given by the configuration (tokenizer, architecture, parameters), and the other models.

Builds the policy's engine and the scorer of rewards. Used by training, evaluation, warm start and export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from quatrain.backend import Backend, this_backend
from quatrain.cluster.processes import decided_by_main, is_main_process, num_processes
from quatrain.config.derive import environment_tokens, longest_of_run, longest_sequence
from quatrain.config.errors import installation
from quatrain.config.roles import Role, resolve_roles
from quatrain.config.rollout_worker import devices_of_worker, worker_config
from quatrain.config.schema import Config
from quatrain.data.chat_template import begun_answer, with_chat_template
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.data.turns import TurnsOfRow
from quatrain.data.vocabulary import check_same_tokens
from quatrain.engine.engine import RolloutEngine, records_routes
from quatrain.engine.service import EngineService
from quatrain.environments.environment import EnvironmentCalls
from quatrain.environments.environment_threads import InThreads
from quatrain.environments.environment_workers import InWorkers
from quatrain.environments.episodes import EpisodeRules
from quatrain.environments.load_environment import AnyEnvironments, load_environments, load_tools
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.models.attention.probe import trusted_attention
from quatrain.models.expert_probe import trusted_experts
from quatrain.models.families import Architecture
from quatrain.models.lora import merged, with_adapters, with_lora
from quatrain.models.params import check_policy
from quatrain.parallel.mesh import make_mesh, mesh_shape, role_mesh, to_memory
from quatrain.report.start_up import stage
from quatrain.reward.model import load_reward_models
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.engine_worker import EngineWorker, weights_reader
from quatrain.rollout.fleet import Fleet
from quatrain.rollout.fleet_episodes import FleetEpisodes
from quatrain.rollout.fleet_service import FleetService
from quatrain.rollout.publish import Folder, InMemory, Publisher
from quatrain.rollout.server_routes import RouteRules
from quatrain.rollout.supervisor import WorkerFactory
from quatrain.types.batches import brief
from quatrain.types.rollouts import OnProgress, Rollouts, Sampling
from quatrain.update.teacher import Teacher, TeacherLoader, WordTeacher
from quatrain.update.teacher_prompts import TeacherPrompts
from quatrain.weights.load import BUILTIN, Model, load_model
from quatrain.workers.pool import default_workers


@dataclass(frozen=True)
class Meshes:
    """The device mesh of each role. Roles with the same devices have them in the same order."""

    train: Mesh
    rollout: Mesh
    reference: Mesh
    critic: Mesh
    reward: Mesh
    teacher: Mesh


@dataclass(frozen=True)
class LoadedPolicy:
    """Tokenizer, architecture and loaded parameters of a model; the tokens `stop_ids` end a completion.

    The parameters are sharded on the training mesh.
    """

    tokenizer: Any
    arch: Architecture
    params: Any
    stop_ids: tuple[int, ...]
    meshes: Meshes
    sampling: Mapping[str, Any]
    """Settings of sampling in the model's generation_config.json, for the export."""
    critic_arch: Architecture | None = None
    """None without a critic."""
    critic_params: Any = None
    """Sharded on the critic's mesh; None without a critic, or if it starts from the policy's weights."""
    attention: str = "xla"
    """The attention implementation of the policy, whose kernel was probed on these devices."""
    backend: Backend = field(default_factory=this_backend)
    """The settings for these devices, with the product of experts that was probed on them."""
    environments: AnyEnvironments | None = None
    """What makes the environments of episodes; None if completions have one turn."""
    turns: TurnsOfRow | None = None
    """What renders the turns of episodes."""

    __repr__ = brief

    @property
    def required_by(self) -> Mapping[str, str]:
        """Data columns that the environments need -> what needs them, for error messages."""
        if self.environments is None:
            return {}
        return dict.fromkeys(self.environments.required_columns, f"the {self.environments.name}")


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

    Parameters are sharded by `mesh` over the devices of all processes. Raises ValueError if a mesh does not
    match the number of devices or cannot shard the model, the devices lack pinned host memory needed for
    offloading, the tokenizer has more tokens than the model's vocabulary, the longest sequence has more
    tokens than the model has positions, the kernel `model.attention` cannot run the model, it cannot have
    the adapters of `lora`, or environments or tools cannot be used, with this chat template or at all.
    """
    stage("devices")
    meshes = role_meshes(config)
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
        weights=weights,
    )
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
    backend = _backend(config, model.arch)
    critic_arch, critic_params = (
        _load_critic(config, tokenizer, model.arch, meshes, weights=weights) if critic else (None, None)
    )
    if config.lora.rank and adapters:
        model = _with_lora(config, model, meshes.train)
    stop_ids = stop_token_ids(tokenizer, model.arch.eos_token_ids)
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
        *(_environments(config, tokenizer, stop_ids) if environments else (None, None)),
    )


def _environments(
    config: Config, tokenizer: Any, stop_ids: Sequence[int]
) -> tuple[AnyEnvironments | None, TurnsOfRow | None]:
    """What makes the environments of episodes, and what renders their turns; None for single turns."""
    rollout = config.rollout
    if rollout.environment is None and not rollout.tools:
        return None, None
    spec = rollout.environment
    environments = load_tools(rollout.tools) if spec is None else load_environments(spec)
    return environments, environments.turns(tokenizer, stop_ids)


def _episode_rules(config: Config, loaded: LoadedPolicy) -> EpisodeRules | None:
    """The rules of episodes, with their environments in threads or processes of the main process."""
    rollout = config.rollout
    if loaded.environments is None or loaded.turns is None:
        return None
    timeout_s, workers = rollout.environment_timeout_s, rollout.environment_workers
    calls: EnvironmentCalls | None = None
    if is_main_process() and workers:
        calls = InWorkers(rollout.environment or rollout.tools, workers, timeout_s)
    elif is_main_process():
        calls = InThreads(loaded.environments, timeout_s)
    return EpisodeRules(
        loaded.tokenizer,
        loaded.turns,
        calls,
        max_turns=rollout.max_turns,
        max_environment_tokens=environment_tokens(config),
        max_tokens=loaded.arch.longest,
        kind=loaded.environments.kind,
    )


def _with_lora(config: Config, base: Model, mesh: Mesh) -> Model:
    """The model with new adapters, which are drawn from the run's seed."""
    arch = with_lora(base.arch, config.lora)
    if base.params is None:
        return replace(base, arch=arch)
    return replace(
        base, arch=arch, params=with_adapters(base.params, arch, jax.random.key(config.seed), mesh)
    )


def _check_positions(config: Config, arch: Architecture) -> None:
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
    """Architecture and parameters of the critic, as the fields of `LoadedPolicy` have them."""
    path = config.critic.path
    if not config.critic.enabled:
        return None, None
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
    _attention(config, arch)
    return arch, model.params


def role_meshes(config: Config) -> Meshes:
    """The mesh of each role, over the devices of all processes.

    Raises ValueError if a mesh does not match its devices (`config.roles`).
    """
    roles = resolve_roles(config, jax.device_count(), num_processes())
    train = role_mesh(roles.train)

    def of(role: Role) -> Mesh:
        if role.devices == roles.train.devices:
            return make_mesh(role.mesh, list(train.devices.flat))
        return role_mesh(role)

    frozen = of(roles.reference), of(roles.critic), of(roles.reward), of(roles.teacher)
    return Meshes(train, of(roles.rollout), *frozen)


def build_engine(
    config: Config, loaded: LoadedPolicy, *, on_progress: OnProgress | None = None, usual_prompt: int = 1
) -> Rollouts:
    """What samples for `loaded`: an engine on this run's devices, or a fleet of workers or servers.

    It has no weights until its `sync_weights` is called. `on_progress` is called with the progress of the
    rollout. The prompt cache always has room for prompts of `usual_prompt` tokens. Waits until each worker or
    server has started; raises ValueError, which names it, if one fails to or cannot serve this run.
    """
    rollout = config.rollout
    if rollout.agent is not None:
        return agent_rollouts(config, loaded, on_progress=on_progress, usual_prompt=usual_prompt)
    if not rollout.has_fleet:
        return local_engine(config, loaded, on_progress=on_progress, usual_prompt=usual_prompt)
    rules = _episode_rules(config, loaded) if rollout.servers else None  # workers on Ray have environments
    if rules is None:
        return _fleet(config, loaded, on_progress, usual_prompt)
    try:
        fleet = _fleet(config, loaded, on_progress, usual_prompt)
    except BaseException:
        rules.close()
        raise
    return FleetEpisodes(
        fleet,
        rules,
        seed=config.seed,
        tokenizer=loaded.tokenizer,
        greedy_baseline=rollout.greedy_baseline,
        on_progress=on_progress,
    )


def _fleet(config: Config, loaded: LoadedPolicy, on_progress: OnProgress | None, usual_prompt: int) -> Fleet:
    """The fleet of `rollout.workers` or `rollout.servers`, all of which have started."""
    rollout = config.rollout
    factories, publisher = (
        rollout_workers(config, loaded, usual_prompt) if is_main_process() else ([], InMemory())
    )
    fleet = Fleet(
        factories,
        publisher,
        # Servers load whole models; quatrain's own workers have the base, and take adapters.
        prepare=partial(merged, arch=loaded.arch, dtype=config.model.dtype) if rollout.servers else None,
        sampling=Sampling.of(rollout),
        tokenizer=loaded.tokenizer,
        dtype=config.model.dtype,
        timeout_s=rollout.timeout_s,
        greedy_baseline=rollout.greedy_baseline,
        on_progress=on_progress,
    )
    try:
        fleet.wait_for_start()
    except BaseException:
        fleet.close()
        raise
    return fleet


def agent_rollouts(
    config: Config, loaded: LoadedPolicy, *, on_progress: OnProgress | None = None, usual_prompt: int = 1
) -> Rollouts:
    """What samples by the agent `rollout.agent`, with the parameters of `build_engine`.

    Its turns are sampled by an engine on this run's devices, or by a fleet of workers or servers. Raises
    ValueError for an agent of the running program, in a run of several processes, and without the packages
    of the extra `serve`.
    """
    try:
        from quatrain.agents.play import AgentRollouts, AgentRules
        from quatrain.agents.workers import check_agent  # other runs need no HTTP server
    except ImportError as error:
        raise ValueError(
            f"rollout.agent needs the packages of an HTTP server ({error}); {installation('serve')}"
        ) from None

    rollout = config.rollout
    assert rollout.agent is not None
    if num_processes() > 1:
        raise ValueError(
            f"rollout.agent needs a run of one process; this one has {num_processes()}; use the devices of "
            "one host, or an environment (rollout.environment)"
        )
    check_agent(rollout.agent, rollout.agent_args, rollout.agent_python)
    rules = AgentRules(
        agent=rollout.agent,
        args=rollout.agent_args,
        num_workers=rollout.agent_workers or default_workers(),
        concurrency=rollout.agent_concurrency,
        timeout_s=rollout.agent_timeout_s,
        max_turns=rollout.max_turns,
        more_tokens=config.data.max_prompt_length + environment_tokens(config),
        longest=loaded.arch.longest,
        seed=config.seed,
        python=rollout.agent_python,
    )
    service: EngineService | FleetService
    if rollout.has_fleet:
        service = FleetService(_fleet(config, loaded, None, usual_prompt))
    else:
        service = EngineService(_engine_of_turns(config, loaded, usual_prompt), name="quatrain-agents-engine")
    return AgentRollouts(
        service,
        rules,
        tokenizer=loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        sampling=Sampling.of(rollout),
        model=config.model.path,
        vocab_size=loaded.arch.vocab_size,
        greedy_baseline=rollout.greedy_baseline,
        on_progress=on_progress,
    )


def _engine_of_turns(config: Config, loaded: LoadedPolicy, usual_prompt: int) -> RolloutEngine:
    """An engine for the turns of agents, each of which has a sampling of its own."""
    one = {"n": 1, "stop": (), "max_new_tokens": loaded.arch.longest}
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=one)})
    return local_engine(changed, loaded, usual_prompt=usual_prompt, per_request_sampling=True)


def rollout_workers(
    config: Config, loaded: LoadedPolicy, usual_prompt: int
) -> tuple[Sequence[WorkerFactory], Publisher]:
    """The factories of a fleet's workers, and what publishes weights for them."""
    rollout = config.rollout
    if rollout.servers:
        return _servers(config, loaded)
    from quatrain.rollout import ray_worker  # imports little; ray itself only with workers

    factories, publisher = ray_worker.workers(
        partial(engine_worker, worker_config(config), usual_prompt),
        rollout.workers,
        platform=this_backend().kind,
        devices=devices_of_worker(config),
        timeout_s=rollout.timeout_s,
    )
    if rollout.weights_dir is None:
        return factories, publisher
    own = _weights_folder(config, rollout.weights_dir)
    folder = Folder(own, loaded.arch, loaded.sampling, on_close=publisher.close)
    return factories, folder


def _servers(config: Config, loaded: LoadedPolicy) -> tuple[Sequence[WorkerFactory], Publisher]:
    """The factories of workers that are inference servers, which load weights from folders."""
    from quatrain.rollout import http_worker  # other runs need no HTTP client

    rollout = config.rollout
    routes = RouteRules.of(loaded.arch) if records_routes(rollout, loaded.arch) else None
    rules = http_worker.ServerRules(
        loaded.tokenizer,
        loaded.stop_ids,
        loaded.arch.vocab_size,
        config.seed,
        Sampling.of(rollout),
        routes,
        needs_routes=config.update.router_aux_coef > 0,
    )
    factories = http_worker.workers(
        rollout.servers, rules, max_concurrency=rollout.max_concurrency, timeout_s=rollout.timeout_s
    )
    own = _run_folder(config) / "weights"
    if rollout.weights_dir is not None:
        own = _weights_folder(config, rollout.weights_dir)
    return factories, Folder(own, replace(loaded.arch, lora=None), loaded.sampling)


def _weights_folder(config: Config, weights_dir: str) -> Path:
    """The folder of this run in `weights_dir`, which other runs may use too; the same when it is resumed.

    Its name is that of the run, with a digest of the path of the run's folder, which the run has locked.
    """
    run = _run_folder(config).resolve()
    return Path(weights_dir) / f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"


def _run_folder(config: Config) -> Path:
    return Path(config.run.dir) / (config.run.name or "")


def engine_worker(config: Config, usual_prompt: int, name: str) -> EngineWorker:
    """A rollout worker in this process, for a `worker_config`; it loads the model but no weights.

    With adapters, it loads the base, because only adapters are published.
    """
    loaded = load_policy(config, critic=False, weights=config.lora.rank > 0)
    make = local_engine if config.rollout.agent is None else _engine_of_turns
    engine = make(config, loaded, usual_prompt=usual_prompt)
    read = weights_reader(loaded.arch, loaded.meshes.rollout, loaded.params)
    rollout = config.rollout
    return EngineWorker(
        engine, read, name=name, num_slots=rollout.max_concurrency, timeout_s=rollout.timeout_s
    )


def local_engine(
    config: Config,
    loaded: LoadedPolicy,
    *,
    on_progress: OnProgress | None = None,
    usual_prompt: int = 1,
    per_request_sampling: bool = False,
) -> RolloutEngine:
    """The rollout engine on devices of this run, with the parameters of `build_engine`.

    With `per_request_sampling`, each sequence has a sampling of its own.
    """
    return RolloutEngine(
        loaded.arch,
        config.rollout,
        loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        seed=config.seed,
        dtype=config.model.dtype,
        attention=loaded.attention,
        mesh=loaded.meshes.rollout,
        on_progress=on_progress,
        usual_prompt=usual_prompt,
        episodes=_episode_rules(config, loaded),
        per_request_sampling=per_request_sampling,
        backend=loaded.backend,
    )


def _backend(config: Config, arch: Architecture) -> Backend:
    """The settings for these devices, with `model.experts`; raises ValueError if it cannot be used."""
    model, backend = config.model, this_backend()
    experts = trusted_experts(model.experts, arch, platform=backend.kind, dtype=model.dtype)
    return replace(backend, experts=experts) if arch.routes else backend


def _attention(config: Config, arch: Architecture) -> str:
    """The attention kernel for `model.attention` on this platform; raises ValueError if it is unavailable."""
    model = config.model
    return trusted_attention(model.attention, arch, platform=this_backend().kind, dtype=model.dtype)


def build_critic_spec(config: Config, loaded: LoadedPolicy) -> CriticSpec:
    """The settings for computing values of micro-batches."""
    assert loaded.critic_arch is not None, "critic.enabled is derived before it comes here"
    return CriticSpec(
        loaded.critic_arch,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=_attention(config, loaded.critic_arch),
        mesh=loaded.meshes.critic,
        backend=_backend(config, loaded.critic_arch) if loaded.critic_arch.routes else this_backend(),
    )


def build_scorer(
    config: Config,
    loaded: LoadedPolicy,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    *,
    imported: RewardScorer | None = None,
) -> RewardScorer:
    """The reward stage, with its reward models loaded on their mesh.

    `functions` are Python functions for entries of `reward.functions`, called in this process. `imported` is
    what `import_rewards` made of them, whose worker processes are used.

    In a run of several processes, only the main process calls the reward functions, and all compute the
    scores of reward models together. Raises ValueError for a function that cannot be imported or called, and
    for a reward model that is missing, damaged or of an unsupported kind.
    """
    models = load_reward_models(
        config.reward,
        config.model,
        mesh=loaded.meshes.reward,
        memory="host" if config.offload.reward_models else "device",
        longest=longest_of_run(config),
    )
    return RewardScorer(
        config.reward,
        models=models,
        functions=functions,
        decide=decided_by_main,
        episodes=config.rollout.has_episodes,
        opening=begun_answer(loaded.tokenizer),
        faults_abstain=config.rollout.agent_failure == "abstain",
        workers_of=imported,
    )


def import_rewards(
    config: Config, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> RewardScorer:
    """The reward functions alone, imported, their signatures checked: before there is a tokenizer.

    Raises ValueError for a function that cannot be imported or called.
    """
    return RewardScorer(
        without_reward_models(config).reward,
        functions=functions,
        decide=decided_by_main,
        episodes=config.rollout.has_episodes,
    )


def without_reward_models(config: Config) -> Config:
    """`config` without the entries of `reward.functions` that are reward models."""
    functions = {
        name: entry for name, entry in config.reward.functions.items() if name not in config.reward.models
    }
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})


def teacher_prompts(config: Config, loaded: LoadedPolicy) -> TeacherPrompts | None:
    """The prompts of the teacher's own, if `distill.prompt` says any."""
    prompt = config.distill.prompt
    return None if prompt is None else TeacherPrompts(prompt, loaded.tokenizer, loaded.turns)


def build_teachers(
    config: Config, loaded: LoadedPolicy, *, weights: bool = True, longest_prompt: int = 0
) -> tuple[Teacher | None, WordTeacher | None]:
    """(the teacher that is a stage; that of losses over all words, a part of the update).

    At most one of them is not None: both are without `distill.teacher`, and without `weights`, after the
    checks. `longest_prompt`: tokens of the longest of the teacher's own prompts (`TeacherPrompts.longest`).

    Raises ValueError for one that cannot be loaded, or has other tokens than the policy.
    """
    loader = TeacherLoader(
        config.distill,
        config.model,
        loaded.tokenizer,
        loaded.meshes.teacher,
        memory="host" if config.offload.teacher else "device",
        share_prompts=config.update.shares_prompts,
        longest=longest_of_run(config) + max(longest_prompt - config.data.max_prompt_length, 0),
        longest_own=min(loaded.arch.longest, config.logprob.max_tokens_per_device or loaded.arch.longest),
        seed=config.seed,
        vocab_size=loaded.arch.vocab_size,
        timeout_s=config.rollout.timeout_s,
    )
    teacher = loader.load(teacher_prompts(config, loaded), weights=weights)
    return (None, teacher) if isinstance(teacher, WordTeacher) else (teacher, None)


def build_policy_spec(config: Config, loaded: LoadedPolicy, *, temperature: float) -> PolicySpec:
    """The settings for computing log-probabilities of micro-batches at `temperature`."""
    return PolicySpec(
        loaded.arch,
        temperature=temperature,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=loaded.attention,
        mesh=loaded.meshes.train,
        backend=loaded.backend,
    )
