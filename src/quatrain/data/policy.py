"""The policy of a run as it is loaded: tokenizer, architecture, parameters, and the devices of each role.

Data flow: `Config` -> `load_policy` (`loop/policy.py`) -> the method `of` of each room that computes with it
or renders for it, and the readers of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

import jax
from jax.sharding import Mesh

from quatrain.backend import Backend, this_backend
from quatrain.cluster.processes import num_processes
from quatrain.config.roles import Role, resolve_roles
from quatrain.config.schema import Config
from quatrain.data.pixels import Pixels
from quatrain.data.turns import TurnsOfRow
from quatrain.models.families import Architecture
from quatrain.models.feature_store import FeatureStore
from quatrain.models.lora import frozen_part
from quatrain.models.params import abstract_params
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import make_mesh, role_mesh
from quatrain.types.batches import brief
from quatrain.weights.load_model import load_processor, load_tower
from quatrain.weights.whole import Whole


@dataclass(frozen=True)
class Meshes:
    """The device mesh of each role. Roles with the same devices have them in the same order."""

    train: Mesh
    rollout: Mesh
    reference: Mesh
    critic: Mesh
    reward: Mesh
    teacher: Mesh

    @classmethod
    def of(cls, config: Config) -> Self:
        """Those of `config`, over the devices of all processes.

        Raises ValueError if a mesh does not match its devices (`config.roles`).
        """
        roles = resolve_roles(config, jax.device_count(), num_processes())
        train = role_mesh(roles.train)

        def of(role: Role) -> Mesh:
            if role.devices == roles.train.devices:
                return make_mesh(role.mesh, list(train.devices.flat))
            return role_mesh(role)

        return cls(**{each.name: of(getattr(roles, each.name)) for each in fields(cls)})


@dataclass(frozen=True)
class Policy:
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
    turns: TurnsOfRow | None = None
    """What renders the turns of episodes; None if completions have one turn."""
    whole: Whole | None = None
    """What the parameters are a part of in the model's folder, for the export; None: it reads texts alone."""
    store: FeatureStore | None = None
    """What the tower makes of pictures, for the sampler and the update; None: the model reads text alone."""
    usual_prompt: int = 1
    """Tokens of the prompts that engines are built for: their prompt caches always have room for them."""

    __repr__ = brief

    @property
    def frozen_fingerprints(self) -> dict[str, str]:
        """Of what is not trained: of `base`, that of adapters or of a projector, and of a frozen `tower`."""
        found, frozen = dict[str, str](), frozen_part(self.params, self.arch)
        if jax.tree.leaves(frozen):
            found["base"] = tree_fingerprint(frozen)
        # Of the files: a frozen tower is in memory only where there are pictures.
        if self.arch.vision and self.arch.vision.trained == "frozen" and self.whole:
            found["tower"] = self.whole.fingerprint
        return found

    def store_beside(self, arch: Architecture, path: str, mesh: Mesh) -> FeatureStore | None:
        """The pictures for the model `path`, which reads what the policy samples; None if either sees none.

        Raises ValueError if it reads pictures in another way than the policy.
        """
        if self.store is None or arch.vision is None:
            return None
        frozen = partial(load_tower, path, arch, mesh, self.store.dtype)
        return self.store.beside(arch, mesh, frozen, Pixels(arch.vision, load_processor(path)))

    def abstract(self, dtype: str) -> tuple[Any, Any]:
        """(parameters, those of the critic or None) as `ShapeDtypeStruct`s of `dtype`."""
        params = abstract_params(self.arch, dtype, self.meshes.train)
        if self.critic_arch is None:
            return params, None
        return params, abstract_params(self.critic_arch, dtype, self.meshes.critic)
