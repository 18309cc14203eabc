"""The policy from its configuration: tokenizer, architecture, parameters, and the engine to sample from it.

Stands under training, evaluation, warm start and export, which all begin here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from quatrain.backend import this_backend
from quatrain.cluster.processes import num_processes
from quatrain.config.roles import Role, resolve_roles
from quatrain.config.schema import Config
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.models.attention.kernels import choose_attention
from quatrain.models.families import Architecture
from quatrain.parallel.mesh import make_mesh, role_mesh, to_memory
from quatrain.rollout.engine import OnProgress, RolloutEngine
from quatrain.update.gradient import PolicySpec
from quatrain.weights.load import load_model


@dataclass(frozen=True)
class Meshes:
    """The devices of each role. Those that share their devices have them in one order."""

    train: Mesh
    rollout: Mesh
    reference: Mesh


@dataclass(frozen=True)
class LoadedPolicy:
    """Tokenizer, architecture and freshly loaded parameters; `stop_ids` end a completion.

    The parameters lie on the mesh of training.
    """

    tokenizer: Any
    arch: Architecture
    params: Any
    stop_ids: tuple[int, ...]
    meshes: Meshes


def load_policy(config: Config) -> LoadedPolicy:
    """Load what `model.path` and `model.tokenizer` name; a builtin model is drawn from the run's seed.

    Parameters lie on the devices of all processes, as `mesh` arranges them. Raises ValueError where a mesh
    does not multiply to the devices or cannot share the model, what is offloaded has no memory to go to, the
    tokenizer has more tokens than the model's vocabulary, the longest sequence more than the model has
    positions, and where `model.attention` names a kernel that cannot run the model.
    """
    meshes = role_meshes(config)
    if config.offload.reference or config.offload.optimizer:
        to_memory("host", {})
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    own_eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    model = load_model(
        config.model.path,
        dtype=config.model.param_dtype,
        seed=config.seed,
        vocab_size=len(tokenizer),
        eos_token_ids=own_eos,
        mesh=meshes.train,
    )
    if len(tokenizer) > model.arch.vocab_size:
        raise ValueError(
            f"a tokenizer fits its model's vocabulary: {config.model.tokenizer} has {len(tokenizer)} tokens, "
            f"{config.model.path} {model.arch.vocab_size}; set model.tokenizer to the one it was trained with"
        )
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    if longest > model.arch.max_position:
        raise ValueError(
            f"a sequence fits the positions its model knows: data.max_prompt_length + rollout.max_new_tokens "
            f"is {longest} tokens, {config.model.path} knows {model.arch.max_position}; lower one of the two"
        )
    for section in (config.update, config.logprob):
        _attention(config, model.arch, packed=section.max_tokens_per_device is not None)
    stop_ids = stop_token_ids(tokenizer, model.arch.eos_token_ids)
    return LoadedPolicy(tokenizer, model.arch, model.params, stop_ids, meshes)


def role_meshes(config: Config) -> Meshes:
    """The devices of all processes, arranged for each role.

    Raises ValueError where they do not come out even (`config.roles`).
    """
    roles = resolve_roles(config, jax.device_count(), num_processes())
    train = role_mesh(roles.train)

    def of(role: Role) -> Mesh:
        if role.devices == roles.train.devices:
            return make_mesh(role.mesh, list(train.devices.flat))
        return role_mesh(role)

    return Meshes(train, of(roles.rollout), of(roles.reference))


def build_engine(
    config: Config, loaded: LoadedPolicy, *, on_progress: OnProgress | None = None, usual_prompt: int = 1
) -> RolloutEngine:
    """The rollout engine of `loaded`, without weights until `sync_weights`.

    `on_progress` is told how far it is, after each of its decode calls. `usual_prompt` are the tokens of a
    prompt that its cache always has room for.
    """
    return RolloutEngine(
        loaded.arch,
        config.rollout,
        loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        seed=config.seed,
        dtype=config.model.dtype,
        attention=_attention(config, loaded.arch, prompts=True),
        mesh=loaded.meshes.rollout,
        on_progress=on_progress,
        usual_prompt=usual_prompt,
    )


def _attention(config: Config, arch: Architecture, *, packed: bool = True, prompts: bool = False) -> str:
    """The attention of `model.attention` on this platform; raises ValueError for one that cannot be had."""
    name, platform, dtype = config.model.attention, this_backend().kind, config.model.dtype
    if prompts and name == "cudnn":
        name = "auto"  # the engine packs prompts, which cuDNN cannot keep apart
    return choose_attention(name, arch, platform=platform, dtype=dtype, packed=packed)


def build_policy_spec(config: Config, loaded: LoadedPolicy, *, temperature: float) -> PolicySpec:
    """How micro-batches become log-probabilities, at `temperature`."""
    return PolicySpec(
        loaded.arch,
        temperature=temperature,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=config.model.attention,
        mesh=loaded.meshes.train,
    )
