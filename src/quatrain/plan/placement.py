"""Plans the memory on each device of a run: sharded parameters, optimizer state, activations, KV cache.

Data flow: `Config` and the number of devices -> `placement` -> `plan.device_memory`, for `quatrain plan
--params`. Only shapes are used: no weights are read and no array is created.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from quatrain.config.derive import environment_tokens, longest_of_run, longest_sequence
from quatrain.config.mesh import MeshShape
from quatrain.config.mesh_axes import CP
from quatrain.config.roles import Roles, devices_of_worker, resolve_roles, worker_config
from quatrain.config.schema import Config, CriticConfig, OptimizerConfig, UpdateConfig
from quatrain.data.pixels import with_limits
from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.engine import CACHE_SHARE
from quatrain.engine.groups import prompt_positions
from quatrain.engine.prefix_store import BLOCK
from quatrain.models.blocks.layer_run import keeps_dtype
from quatrain.models.families import Architecture
from quatrain.models.flops import parameters_read
from quatrain.models.kv_cache import bytes_of_largest, bytes_per_position, bytes_per_state
from quatrain.models.lora import is_adapter, merged_architecture, trained_part, with_lora
from quatrain.models.params import ParamSpec, abstract_params, check_policy, is_spec, param_specs, partition
from quatrain.ops.kept_words import list_width
from quatrain.ops.shape_buckets import power_of_two, round_up
from quatrain.plan.activations import (
    OFF_BY,
    OFF_BY_WITH_EXPERTS,
    activations,
    elements_on_device,
    sum_on_device,
)
from quatrain.plan.batch_plan import given_sequences
from quatrain.plan.device_memory import (
    CRITIC_PHASES,
    PHASES,
    REFERENCE_PASS,
    MemoryPart,
    ParameterKind,
    Phase,
    Placement,
    RoleName,
    in_units,
)
from quatrain.plan.pictures import IF_ANY, tower_at_work, tower_bytes
from quatrain.plan.pictures import update_parts as picture_parts
from quatrain.update.optimizer import OptimizerForm, is_matrix
from quatrain.weights.load_model import BUILTIN, classifier_architecture, load_architecture

AT_WORK = 6
"""Of the largest matrix, the copies that Muon's iteration has at once; 3.4 to 5.9 were measured on meshes."""
FROZEN = "; frozen"
OFFLOADED = "; in host memory while not in use"


def placement(
    config: Config,
    *,
    devices: int = 1,
    processes: int = 1,
    device_memory: int | None = None,
    arch: Architecture | None = None,
) -> Placement:
    """The memory plan of a final configuration on `devices` devices with equal memory.

    If rollout workers or servers sample, these devices have no copy of the weights for it and no KV cache. A
    worker then has a plan of its own; servers have none. Neither have those of a run on given data, unless
    evaluations sample.

    `device_memory`: bytes of a device, also of a worker's; if given, there are warnings about parts that do
    not fit. `arch`: that of the policy, if it is known. Raises ValueError if the architecture cannot be
    loaded, or cannot be sharded by `mesh` or `rollout.mesh` (`params.partition`).
    """
    known = arch or architecture(config)
    plan = _Plan(config, known, resolve_roles(config, devices, processes))
    check_policy(known, plan.mesh, plan.rollout_mesh)
    update = plan.update_parts(config.update, "gradient", "optimizer_step")
    parts = (*plan.persistent_parts(), *update, *plan.critic_parts())
    result = Placement(plan.roles, tuple(plan.kinds()), parts, device_memory, host=tuple(plan.host_parts()))
    if not config.generates:
        result = replace(result, samples=False)
        return replace(result, warnings=tuple(plan.phase_warnings(result)))
    if not config.rollout.has_fleet:
        return _with_cache(plan, result)
    rollout, worker, warnings = config.rollout, None, tuple(plan.phase_warnings(result))
    elsewhere = f"rollout.servers ({len(rollout.servers)}) sample; their memory is not planned here"
    if rollout.workers:
        roles = resolve_roles(worker_config(config), devices_of_worker(config))
        check_policy(known, roles.rollout.mesh)
        plan = _Plan(worker_config(config), known, roles, num_workers=rollout.workers)
        worker = _with_cache(plan, Placement(roles, (), tuple(plan.worker_parts()), device_memory))
        warnings += worker.warnings
        where = f"each on devices of its own with mesh {roles.rollout.mesh}"
        elsewhere = f"rollout.workers ({rollout.workers}) sample, {where}"
    return replace(result, warnings=warnings, worker=worker, elsewhere=elsewhere)


def _with_cache(plan: _Plan, result: Placement) -> Placement:
    """The plan of the devices that sample, with the KV cache for which the other parts leave room."""
    memory, room = result.device_memory, None
    if memory is not None:
        (roles,) = (together for together in result.role_groups if "rollout" in together)
        used = (sum(p.num_bytes for p in result.parts_of(phase, roles)) for phase in plan.sampling_phases)
        room = int(CACHE_SHARE * max(memory - max(used), 0))
    kept = None if room is None else int(plan.prefix_share * room)
    while room is not None and kept and room - kept < plan.one_sequence:  # as the engine does
        kept //= 2
    live = None if room is None or kept is None else room - kept
    result = replace(result, parts=(*result.parts, plan.cache(live), *plan.kept_contexts(kept)))
    warnings = (
        *plan.phase_warnings(result),
        *plan.cache_warnings(result, room),
        *(() if kept is None else plan.kept_warnings(kept)),
    )
    return replace(result, warnings=warnings)


def architecture(config: Config) -> Architecture:
    """The architecture of the policy, without its weights."""
    path, vocab_size = config.model.path, None
    if path.startswith(BUILTIN):
        vocab_size = len(load_tokenizer(config.model.tokenizer))
    vision = "none" if config.run.task == "rm" else config.model.vision
    arch = load_architecture(path, vocab_size=vocab_size, vision=vision).for_length(longest_of_run(config))
    if arch.vision:
        arch = replace(arch, vision=with_limits(arch.vision, config.data))
    if config.run.task == "rm":
        arch = replace(arch, head="value_head")
    return with_lora(arch, config.lora)


@dataclass(frozen=True)
class _Plan:
    config: Config
    arch: Architecture
    roles: Roles
    num_workers: int = 0
    """If it is the plan of a rollout worker: how many there are."""

    @property
    def mesh(self) -> MeshShape:
        """Mesh shape of training."""
        return self.roles.train.mesh

    @property
    def rollout_mesh(self) -> MeshShape:
        """Mesh shape of the rollout."""
        return self.roles.rollout.mesh

    @property
    def sampling_phases(self) -> tuple[Phase, ...]:
        """The stages in which the rollout may sample: all of them with `rollout.max_staleness`."""
        return PHASES if self.config.rollout.max_staleness else ("rollout",)

    def kinds(self) -> Iterator[ParameterKind]:
        """The parameters on the training mesh; those of one name and shape in several layers are one kind."""
        arch = self.arch.with_tower
        kinds = Counter(_named("", param_specs(arch), partition(arch, self.mesh)))
        for (name, spec, place), count in kinds.items():
            itemsize = jnp.dtype(spec.dtype or self.config.model.param_dtype).itemsize
            size = count * itemsize * elements_on_device(spec.shape, place, self.mesh)
            yield ParameterKind(name, count, spec.shape, spec.axes, tuple(place), size)

    def host_parts(self) -> Iterator[MemoryPart]:
        """What is in the memory of the host: the routes of experts of a batch, the features of pictures."""
        rollout, routes = self.config.rollout, self.arch.routes
        if self.arch.vision:
            why = f"model.vision_cache_bytes; those of the batch at hand, if they are more{IF_ANY}"
            yield MemoryPart("vision_store", self.config.model.vision_cache_bytes, why)
        if routes is None or rollout.record_routes is False or self.config.run.on_given_data:
            return
        layers, k, _ = routes
        sequences, tokens = self.config.data.batch_size * rollout.n, longest_sequence(self.config)
        batches = 1 + rollout.max_staleness
        of_token = layers * k * routes.dtype.itemsize
        ahead = f" x {batches} batches (1 + rollout.max_staleness)" if rollout.max_staleness else ""
        why = (
            f"at most {sequences} sequences x {tokens} tokens x {of_token} B (layers of experts x experts of "
            f"a token x bytes = {layers} x {k} x {routes.dtype.itemsize}){ahead}; none with "
            "rollout.record_routes false"
        )
        yield MemoryPart("routes", sequences * tokens * of_token * batches, why)

    def persistent_parts(self) -> Iterator[MemoryPart]:
        """The parts that exist during the whole run."""
        yield from self._policy(("gradient", "optimizer_step") if self.config.offload.policy else None)
        if self.config.generates and not self.config.rollout.has_fleet:
            yield self._sampler()
            if self.arch.vision:
                longest, phases = self.config.data.max_prompt_length, self.sampling_phases
                yield tower_at_work(self.arch.vision, self.config.model.dtype, longest, phases)
        elif self.config.rollout.servers and self.arch.lora:
            yield self._merged_for_servers()
        if self.config.run.task == "dpo":
            yield from self._reference_of_pairs()
        yield from self._optimizer(self.config.optimizer, self.config.offload.optimizer, "optimizer_step")
        yield from self._reward_model_parts()
        yield from self._teacher_parts()
        if self.config.needs_reference:
            yield self._reference()

    def worker_parts(self) -> Iterator[MemoryPart]:
        """The parts of a rollout worker beside the KV cache: it has a base only if adapters are sent."""
        parts = (*(self._policy(None) if self.arch.lora else ()), self._sampler())
        yield from (replace(part, phases=("rollout",)) for part in parts)

    def _policy(self, phases: tuple[Phase, ...] | None) -> Iterator[MemoryPart]:
        """The weights and their adapters; `phases` is None if they do not wait in the host's memory."""
        lora, dtype = self.arch.lora, self.config.model.param_dtype
        waits, phases = OFFLOADED * bool(phases), phases or PHASES
        adapters = self._weights(self.mesh, dtype, trained=True) if lora else 0
        if self.config.run.task == "dpo":
            phases = (REFERENCE_PASS, *phases)
        tower, vision = tower_bytes(self.arch, self.mesh, dtype), self.arch.vision
        frozen = vision is None or vision.trained == "frozen"
        why = f"model.param_dtype {dtype} on mesh {self.mesh}{FROZEN * bool(lora)}"
        rope = self.arch.attentions[0].rope
        if rope and rope.kind == "longrope":
            tokens, factors = longest_of_run(self.config), "long" if rope.long else "short"
            why += f"; rotary embeddings with longrope's {factors} factors, for {tokens} tokens"
        # A frozen tower is none of the parameters (`param_specs`).
        text = self._weights(self.mesh, dtype) - adapters - tower * (not frozen)
        yield MemoryPart("weights", text, why + waits, phases)
        if vision:
            why = f"model.vision {vision.trained}; model.param_dtype {dtype} on mesh {self.mesh}"
            why += f"; brought when the first picture comes{IF_ANY}" if frozen else waits
            yield MemoryPart("tower", tower, why, PHASES if frozen else phases)
        if not frozen:
            why = "as it was after the last update, for the features that the sampler reads"
            yield MemoryPart("tower_copy", tower, why)
        if lora:
            scored = " and the score head" * (self.arch.head == "value_head")
            why = f"lora.rank {lora.rank} on {', '.join(lora.targets)}{scored}, in float32"
            yield MemoryPart("adapters", adapters, why + waits, phases)

    def update_parts(
        self, sizes: UpdateConfig | CriticConfig, gradient: Phase, step: Phase
    ) -> Iterator[MemoryPart]:
        """The parts that exist only during the update, in its phases `gradient` and `step`."""
        sums = self._weights(self.mesh, "float32", trained=True)
        why = "of adapters, " * bool(self.arch.lora) + "accumulated over micro-batches, in float32"
        yield MemoryPart("gradients", sums, why, (gradient, step))
        yield self._activations(sizes, gradient)
        if self.arch.vision:
            most, model = self._most_placeholders(sizes), self.config.model
            yield from picture_parts(self.arch.vision, most, model.dtype, model.remat, gradient)
        if sizes is self.config.update and not self.config.run.on_given_data:
            yield from self._sampling_mask(gradient)
        if self.mesh.dp > 1:
            yield MemoryPart(
                "gradient_sum", sums, f"sum of the gradients of {self.mesh.dp} dp replicas", (step,)
            )

    def critic_parts(self) -> Iterator[MemoryPart]:
        """The parts of the critic; nothing without one."""
        critic, host = self.config.critic, self.config.offload.critic
        if not critic.enabled:
            return
        arch = self.arch
        if critic.path is not None:
            vocab_size = arch.vocab_size if critic.path.startswith(BUILTIN) else None
            arch = load_architecture(critic.path, vocab_size=vocab_size)
        roles = replace(self.roles, train=self.roles.critic)
        plan = replace(self, arch=replace(arch, head="value_head"), roles=roles)
        parts = (
            *plan._policy(CRITIC_PHASES if host else None),
            *plan._optimizer(self.config.critic_optimizer, host, "critic_optimizer_step"),
            *plan.update_parts(critic, *CRITIC_PHASES),
        )
        yield from (replace(part, key=f"critic_{part.key}", role="critic") for part in parts)

    def _reward_model_parts(self) -> Iterator[MemoryPart]:
        """The weights of each reward model, and of a judge that is another model."""
        dtype, mesh = self.config.model.param_dtype, self.roles.reward.mesh
        host = self.config.offload.reward_models
        phases = () if host and not self.config.rollout.max_staleness else PHASES
        for number, (entry, path) in enumerate(self.config.reward.models.items(), 1):
            try:
                arch = replace(classifier_architecture(path), head="value_head")
                size = replace(self, arch=arch)._weights(mesh, dtype)
            except ValueError as error:
                raise ValueError(f"the reward model {entry} cannot be used: {error}") from error
            why = f"{path}: model.param_dtype {dtype} on mesh {mesh}{OFFLOADED * host}"
            key = "reward_model_weights" if number == 1 else f"reward_model_{number}_weights"
            yield MemoryPart(key, size, why, phases, "reward")
        judge = self.config.reward.judge
        if judge is not None and judge.model is not None and self.config.reward.judges:
            path = judge.model
            size_of_vocabulary = self.arch.vocab_size if path.startswith(BUILTIN) else None
            arch = load_architecture(path, vocab_size=size_of_vocabulary)
            why = f"{path}: model.param_dtype {dtype} on mesh {mesh}{OFFLOADED * host}"
            yield MemoryPart(
                "judge_weights", replace(self, arch=arch)._weights(mesh, dtype), why, phases, "reward"
            )

    def _teacher_parts(self) -> Iterator[MemoryPart]:
        """The weights of each teacher; nothing without one."""
        config, mesh = self.config, self.roles.teacher.mesh
        dtype, host = config.model.param_dtype, config.offload.teacher
        top_k, over_words = config.distill.top_k, config.distill.loss != "sampled"
        tokens = self._tokens_of_micro_batch(config.update)[0]
        if over_words and top_k:
            # Numbers of words, and log-probabilities of them and the rest; a server gives a word more.
            width = top_k + bool(config.distill.servers)
            why = f"{tokens} tokens x {width} words (distill.top_k) and the rest, int32 and float32"
            yield MemoryPart("teacher_words", 4 * tokens * (2 * width + 1), why, ("gradient",))
        over_words = over_words and not top_k
        waiting: tuple[Phase, ...] = ("gradient",) if over_words else ()
        for number, path in enumerate(config.distill.models, 1):
            arch = load_architecture(
                path, vocab_size=self.arch.vocab_size if path.startswith(BUILTIN) else None
            )
            size = replace(self, arch=arch)._weights(mesh, dtype)
            why = f"{path}: model.param_dtype {dtype} on mesh {mesh}{FROZEN}{OFFLOADED * host}"
            key = "teacher" if number == 1 else f"teacher_{number}"
            yield MemoryPart(key, size, why, waiting if host else PHASES, "teacher")
            if over_words:
                states = tokens * arch.hidden_size * jnp.dtype(config.model.dtype).itemsize
                why = f"hidden states of {tokens} tokens x {arch.hidden_size}, {config.model.dtype}"
                yield MemoryPart("teacher_states", states, why, ("gradient",), "teacher")

    def _reference_of_pairs(self) -> Iterator[MemoryPart]:
        """The reference of preferences: another model before the first step, and none while training."""
        config, mesh = self.config, self.mesh
        path, dtype = config.dpo.reference, config.model.param_dtype
        if not config.dpo.reads_reference or path == "initial":
            return
        arch = load_architecture(path, vocab_size=self.arch.vocab_size if path.startswith(BUILTIN) else None)
        size = replace(self, arch=arch)._weights(mesh, dtype)
        why = f"{path}: model.param_dtype {dtype} on mesh {mesh}; dropped before the first step"
        yield MemoryPart("reference", size, why, (REFERENCE_PASS,))

    def cache(self, room: int | None) -> MemoryPart:
        """The KV cache of a replica, in its padded shape, with the layer that is in memory twice as it grows.

        The sequences of a training step decode at once, each with the longest completion; where the cache may
        have `room` bytes alone, as many as fit in it with the lengths that they have.
        """
        rollout, slots = self.config.rollout, self._slots()
        # A turn of an episode is a request of its own: its context is all that came before, and its prefix
        # slot is shared with no other.
        prefix_slots = slots if rollout.has_episodes else min(power_of_two(-(-slots // rollout.n)), slots)
        prompt, own = self._cache_positions()
        what = "episodes" if rollout.has_episodes else "prompts"
        why = (
            f"{slots} sequences at once x {own} tokens + {prefix_slots} {what} x {prompt}, each token "
            f"{in_units(self._position_bytes())} ({self.config.model.dtype}, tp {self.rollout_mesh.tp})"
        )
        size, one = (slots * own + prefix_slots * prompt) * self._position_bytes(), self.one_sequence
        if state := self._state_bytes():
            size += (slots + prefix_slots) * state
            why += f"; {slots + prefix_slots} states of DeltaNet layers x {in_units(state)}"
        if room is not None and size > room:
            size = max(room, one)
            why += (
                f"; at most {CACHE_SHARE * (1 - self.prefix_share):g} of the free memory: {size // one} of "
                "them, or more shorter ones"
            )
        largest = bytes_of_largest(self.arch, self.config.model.dtype, self.rollout_mesh.tp)
        twice = min(max(slots * own, prefix_slots * prompt), size // self._position_bytes()) * largest
        why += f"; and {in_units(twice)}, the largest layer, which is in memory twice while it grows"
        return MemoryPart("kv_cache", size + twice, why, self.sampling_phases, "rollout")

    @property
    def prefix_share(self) -> float:
        """The share of the cache's memory in which contexts are kept."""
        rollout = self.config.rollout
        return (rollout.prefix_share or 0.0) if rollout.has_episodes else 0.0

    def kept_contexts(self, room: int | None) -> Iterator[MemoryPart]:
        """What is kept of contexts on a replica, in at most `room` bytes: blocks, and states beside them."""
        if not self.prefix_share:
            return
        phases, states = self.sampling_phases, self._state_bytes()
        tokens, of_block = self._kept_tokens(room)
        _, reach = self._contexts_of_a_step()
        why = (
            f"{tokens // BLOCK} blocks x {BLOCK} tokens = {tokens} tokens, of {reach} that the contexts of a "
            f"step can reach (rollout.prefix_share {self.prefix_share:g}); allocated as they come into use"
        )
        yield MemoryPart("prefix_store", tokens // BLOCK * of_block, why, phases, "rollout")
        if states:
            episodes, _ = self._contexts_of_a_step()
            count = 2 * episodes if room is None else min(2 * episodes, room // 2 // states)
            why = f"{count} states of DeltaNet layers x {in_units(states)}: of an episode's prompt and turn"
            yield MemoryPart("states", count * states, why, phases, "rollout")

    def _contexts_of_a_step(self) -> tuple[int, int]:
        """(episodes that are played at a time on a replica, tokens that their contexts can reach)."""
        most, episodes = self.config.rollout.agent_concurrency, self._share()
        if most is not None:
            episodes = min(episodes, -(-most // self.rollout_mesh.num_data_shards))
        return episodes, episodes * longest_sequence(self.config)

    def _kept_tokens(self, room: int | None) -> tuple[int, int]:
        """(tokens of blocks that a replica keeps at most, bytes of a block)."""
        of_block, (episodes, _) = BLOCK * self._position_bytes(), self._contexts_of_a_step()
        blocks = episodes * -(-longest_sequence(self.config) // BLOCK)
        if room is not None:
            blocks = min(blocks, (room // 2 if self._state_bytes() else room) // of_block)
        return blocks * BLOCK, of_block

    def _slots(self) -> int:
        """Sequences that a replica decodes at once, where the memory lets it."""
        most, slots = self.config.rollout.max_concurrency, round_up(self._share(), minimum=1)
        return slots if most is None else min(slots, most // self.rollout_mesh.num_data_shards)

    def _share(self) -> int:
        """Sequences of a training step per replica; of a worker's, if all workers have as many groups."""
        groups = -(-self.config.data.batch_size // max(self.num_workers, 1))
        return -(-groups * self.config.rollout.n // self.rollout_mesh.num_data_shards)

    def _cache_positions(self) -> tuple[int, int]:
        """Columns of the KV cache for a prompt and a completion; in episodes, before a turn and for it."""
        longest = self.config.rollout.max_new_tokens
        if self.config.data.eval is not None:
            longest = max(longest, self.config.eval.max_new_tokens or 0)
        before = self.config.data.max_prompt_length
        if self.config.rollout.has_episodes:
            before += environment_tokens(self.config) + longest
        return prompt_positions(before), round_up(longest)

    @property
    def one_sequence(self) -> int:
        """Bytes of the cache of the longest sequence alone."""
        return sum(self._cache_positions()) * self._position_bytes() + 2 * self._state_bytes()

    def _state_bytes(self) -> int:
        """Bytes of a sequence, whatever its tokens, in DeltaNet layers."""
        return bytes_per_state(self.arch, self.config.model.dtype, self.rollout_mesh.tp)

    def _position_bytes(self) -> int:
        return bytes_per_position(self.arch, self.config.model.dtype, self.rollout_mesh.tp)

    def _weights(self, mesh: MeshShape, dtype: str, *, trained: bool = False) -> int:
        """Bytes on one device of the parameters, or of those that are trained."""
        return _weight_bytes(self.arch, mesh, dtype, trained)

    def _reference(self) -> MemoryPart:
        """The reference policy: a copy of the parameters on the devices of its role.

        With adapters it is the base, with copies of adapters after a warm start or if it follows the policy.
        """
        config, mesh = self.config, self.roles.reference.mesh
        if self.arch.lora:
            copied = config.sft.steps or config.update.reference_sync_steps
            size = self._weights(self.mesh, "float32", trained=True) if copied else 0
            return MemoryPart(
                "reference", size, "the weights of the frozen base" + ", and adapters" * bool(copied)
            )
        coefs = {"update.kl_coef": config.update.kl_coef, "reward.kl_coef": config.reward.kl_coef}
        uses = [f"{key} is {coef:g}" for key, coef in coefs.items() if coef]
        uses += ["distill.teacher is initial"] * ("initial" in config.distill.own)
        used = " and ".join(uses)
        why, host = f"{used}; on mesh {mesh}", config.offload.reference
        size = self._weights(mesh, config.model.param_dtype)
        return MemoryPart("reference", size, why + OFFLOADED * host, () if host else PHASES, "reference")

    def _sampler(self) -> MemoryPart:
        """The sampler's copies of the weights, with what a decode step reads if it leaves experts out."""
        part = self._rollout_weights()
        if self.arch.routes is None:
            return part
        slots, arch = self._slots(), replace(self.arch, lora=None)
        itemsize = jnp.dtype(self.config.model.dtype).itemsize
        read, whole = (
            in_units(round(itemsize * parameters_read(arch, tokens, self.rollout_mesh)))
            for tokens in (slots, math.inf)
        )
        why = f"; a decode step of {slots} sequences reads about {read} of a device's {whole}"
        return replace(part, why=f"{part.why}{why}, if they choose experts evenly")

    def _rollout_weights(self) -> MemoryPart:
        """The sampler's copies of the weights, in the dtype of activations except norms and routers.

        They are freed when a batch is complete. Arrays that training has on the same devices in the same
        dtype are not copied, unless those wait in the host's memory, or batches are sampled ahead: then one
        copy is in use and one waits for each further batch, and none is freed. A frozen base is not copied
        for that, but the matrices into which adapters are merged are always copies. A rollout worker trains
        nothing, and has a base only with adapters.
        """
        model, rollout, lora = self.config.model, self.config.rollout, self.arch.lora
        lag, key = rollout.max_staleness, "rollout_weights"
        same = self.roles.rollout == self.roles.train and (bool(lora) or not self.num_workers)
        if same and not lag and not lora and model.dtype == model.param_dtype:
            return MemoryPart(key, 0, "the training weights are used", role="rollout")
        merges = bool(lora) and rollout.lora == "merged"
        merged = lora.targets if lora and merges else ()

        def num_bytes(path: Any, spec: ParamSpec, place: PartitionSpec) -> int:
            name, trained_in = path[-1].key, spec.dtype or model.param_dtype
            dtype = trained_in if keeps_dtype(name, len(spec.shape)) else model.dtype
            frozen = bool(lora) and not is_adapter(name)
            there = same and dtype == trained_in and (frozen or not lag) and not self.config.offload.policy
            if there and name not in merged:
                return 0
            return elements_on_device(spec.shape, place, self.rollout_mesh) * jnp.dtype(dtype).itemsize

        arch = replace(merged_architecture(self.arch) if merges else self.arch, vision=None)
        places = partition(arch, self.rollout_mesh)
        sizes = jax.tree_util.tree_map_with_path(num_bytes, param_specs(arch), places, is_leaf=is_spec)
        why = f"model.dtype {model.dtype} on rollout.mesh {self.rollout_mesh}"
        if lora:
            what = "adapters merged into copies of their matrices" if merges else "base and adapters"
            why = f"{what}, {why}"
        copies = 1 + (min(lag, 1) if rollout.in_flight else lag)
        if copies > 1:
            which = "in use and next" if rollout.in_flight else "rollout.max_staleness + 1"
            why = f"{copies} copies ({which}), each {why}"
        return MemoryPart(key, copies * sum(jax.tree.leaves(sizes)), why, self.sampling_phases, "rollout")

    def _merged_for_servers(self) -> MemoryPart:
        """The matrices into which adapters are merged before they are published, on the training mesh."""
        lora, dtype = self.arch.lora, self.config.model.dtype
        assert lora is not None
        specs, shardings = (
            [[part[name] for name in lora.targets if name in part] for part in (*tree["layers"], tree)]
            for tree in (param_specs(self.arch), partition(self.arch, self.mesh))
        )
        elements = sum_on_device(specs, shardings, self.mesh)
        why = f"adapters merged into copies of their matrices, model.dtype {dtype}, until servers have them"
        return MemoryPart("merged_weights", elements * jnp.dtype(dtype).itemsize, why, ("rollout",))

    def _optimizer(self, config: OptimizerConfig, offloaded: bool, step: Phase) -> Iterator[MemoryPart]:
        """Its state, whose moments are sharded like their parameters, and what Muon has at work."""
        moment = f", its first moment in {config.state_dtype}" if config.state_dtype != "float32" else ""
        why = f"{config.name}, in float32{moment}{OFFLOADED * offloaded}"
        size = _optimizer_bytes(config, self.arch, self.mesh)
        yield MemoryPart("optimizer_state", size, why, (step,) if offloaded else PHASES)
        if config.name == "muon":
            why = f"estimate: {AT_WORK} x the largest matrix, whole on each device, in float32"
            yield MemoryPart("orthogonalised", AT_WORK * self._largest_matrix() * 4, why, (step,))

    def _largest_matrix(self) -> int:
        """Elements of the largest parameter that Muon orthogonalises, where a device has its matrices whole.

        Only the matrices of different heads and experts are on different devices.
        """
        shapes, places = abstract_params(self.arch, jnp.float32), partition(self.arch, self.mesh)
        sizes = jax.tree.map(
            lambda is_one, x, spec: (
                is_one and elements_on_device(x.shape, PartitionSpec(*spec[: x.ndim - 2]), self.mesh)
            ),
            is_matrix(shapes),
            shapes,
            places,
        )
        return max(jax.tree.leaves(sizes))

    def _tokens_of_micro_batch(self, sizes: UpdateConfig | CriticConfig) -> tuple[int, str]:
        """(tokens of the largest micro-batch on a device, the same in words)."""
        longest = longest_sequence(self.config)
        if self.config.run.on_given_data:
            sequences = given_sequences(self.config).high
        else:
            sequences = sizes.mini_batch_size * self.config.rollout.n
        if sizes.micro_batch_size is None:
            assert sizes.max_tokens_per_device is not None, "a micro-batch has one of two limits"
            tokens = min(sizes.max_tokens_per_device, -(-round_up(sequences * longest) // self.mesh.cp))
            return tokens, f"{tokens} tokens"
        rows = min(sizes.micro_batch_size, -(-sequences // self.mesh.num_data_shards))
        words = f"{rows} x {round_up(longest)} tokens" + f" / {CP} {self.mesh.cp}" * (self.mesh.cp > 1)
        return rows * -(-round_up(longest) // self.mesh.cp), words

    def _sampling_mask(self, phase: Phase) -> Iterator[MemoryPart]:
        """Of the largest micro-batch, a bit for each token and word, and lists of words; or nothing."""
        rollout = self.config.rollout
        if not (rollout.replays and rollout.has_filters):
            return
        # Each `cp` device has those of all of its data shard's tokens, each `tp` device those of its words.
        tokens = self._tokens_of_micro_batch(self.config.update)[0] * self.mesh.cp
        words, width = -(-self.arch.vocab_size // self.mesh.tp), list_width(rollout.most_words)
        why = (
            f"{tokens} tokens x {words} words / 8, and lists of {width} words (rollout.top_k), int32; none "
            "with rollout.replay_mask false"
        )
        yield MemoryPart("sampling_mask", 4 * tokens * (-(-words // 32) + width), why, (phase,))

    def _most_placeholders(self, sizes: UpdateConfig | CriticConfig) -> int:
        """Of the largest micro-batch, on a data shard: each picture stands once in a buffer."""
        config, tokens = self.config, self._tokens_of_micro_batch(sizes)[0] * self.mesh.cp
        if config.run.on_given_data or config.rollout.has_episodes:  # pictures may be anywhere
            return tokens
        in_own_buffers = 1 if sizes.micro_batch_size is None else config.rollout.n
        return min(tokens, sizes.mini_batch_size * in_own_buffers * config.data.max_prompt_length)

    def _activations(self, sizes: UpdateConfig | CriticConfig, phase: Phase) -> MemoryPart:
        """The activations of the largest micro-batch."""
        model = self.config.model
        tokens, words = self._tokens_of_micro_batch(sizes)
        dtypes = {"dtype": model.dtype, "param_dtype": model.param_dtype}
        size = activations(self.arch, tokens=tokens, remat=model.remat, mesh=self.mesh, **dtypes)
        layers = f"{size.num_layers} x {in_units(size.kept)} kept (model.remat {model.remat})"
        working = f"the larger of a layer {in_units(size.layer)} and the head {in_units(size.head)}"
        rest = f"gradients not yet accumulated {in_units(size.gradients)}"
        off_by = OFF_BY_WITH_EXPERTS if self.arch.routes else OFF_BY
        why = f"estimate, error {off_by}, for {words}: {layers} + {working} + {rest}"
        return MemoryPart("activations", size.total, why, (phase,))

    def phase_warnings(self, result: Placement) -> Iterator[str]:
        """Warnings about phases that need more memory than a device has, if that is known."""
        memory = result.device_memory
        for phase, roles, total in result.totals().values():
            if memory is None or total <= memory:
                continue
            left, excess = memory, []
            for part in result.parts_of(phase, roles):  # memory is assigned in order
                left -= part.num_bytes
                excess += [part.key] * (left < 0 < part.num_bytes)
            several = len(result.role_groups) > 1
            whose = "a rollout worker" if self.num_workers else " and ".join(roles) if several else ""
            where = f"each device of {whose}" if whose else "each device"
            yield (
                f"the {phase.replace('_', ' ')} needs {in_units(total)} on {where}, which has "
                f"{in_units(memory)}: {', '.join(excess)} do not fit; {self._remedy(phase, roles)}"
            )

    def cache_warnings(self, result: Placement, room: int | None) -> Iterator[str]:
        """A warning about a KV cache that is too small for one sequence, where everything together fits."""
        totals, one = result.totals().values(), self.one_sequence
        sampling = max(size for phase, roles, size in totals if phase == "rollout" and "rollout" in roles)
        if room is None or one <= room or sampling > (result.device_memory or 0):
            return
        replica = "replica of a rollout worker" if self.num_workers else "rollout replica"
        yield (
            f"the KV cache may use {CACHE_SHARE:g} of the free memory, {in_units(room)} on each {replica}, "
            f"but the longest sequence needs {in_units(one)}; {self._remedy('rollout', ('rollout',))}"
        )

    def kept_warnings(self, room: int) -> Iterator[str]:
        """A warning about kept contexts that have room for less than half of what is asked for again."""
        (tokens, _), (_, reach) = self._kept_tokens(room), self._contexts_of_a_step()
        if self.prefix_share and tokens < reach / 2:
            yield (
                f"kept contexts have room for {tokens} tokens, less than half of the {reach} that those of "
                "the episodes played at a time can reach, so that contexts are computed again; lower "
                "rollout.agent_concurrency, or raise rollout.prefix_share"
            )

    def _remedy(self, phase: Phase, roles: tuple[RoleName, ...]) -> str:
        """What to change if `phase` does not fit into the devices of `roles`."""
        if not {"train", "rollout"} & set(roles):
            places = " and ".join(f"placement.{role}" for role in roles)
            return f"name more devices in {places}, or offload what waits"
        if phase == "rollout" and not self.config.rollout.has_fleet:
            meshes = "rollout.mesh" if self.num_workers else "mesh and rollout.mesh"
            sizes = "rollout.max_new_tokens or data.max_prompt_length"
            return f"raise fsdp or tp of {meshes}, or lower {sizes}"
        remedy = "raise fsdp or tp of mesh"
        if phase in ("optimizer_step", "critic_optimizer_step"):
            return f"{remedy}, and lower dp if it is more than 1"
        if phase in ("gradient", "critic_gradient"):
            section = "critic" if phase == "critic_gradient" else "update"
            in_rows = (self.config.critic if section == "critic" else self.config.update).micro_batch_size
            remedy += f", or lower {section}.{'micro_batch_size' if in_rows else 'max_tokens_per_device'}"
            remedy += ", or set model.remat to layer" * (self.config.model.remat != "layer")
        return remedy


def _named(name: str, specs: Any, places: Any) -> Iterator[tuple[str, ParamSpec, PartitionSpec]]:
    """(name, spec, place) of each parameter of a tree; those of a list have the name of the list."""
    if is_spec(specs):
        yield name.removeprefix("."), specs, places
        return
    keys = range(len(specs)) if isinstance(specs, list) else specs
    for key in keys:
        yield from _named(name if isinstance(key, int) else f"{name}.{key}", specs[key], places[key])


@lru_cache(maxsize=1024)
def _weight_bytes(arch: Architecture, mesh: MeshShape, dtype: str, trained: bool) -> int:
    """Bytes on one device of the parameters, or of those that are trained; `fit.py` asks again and again."""
    trees = param_specs(arch), partition(arch, mesh)
    if trained:
        trees = trained_part(trees[0], arch), trained_part(trees[1], arch)
    return sum_on_device(*trees, mesh, lambda spec: jnp.dtype(spec.dtype or dtype).itemsize)


@lru_cache(maxsize=1024)
def _optimizer_bytes(config: OptimizerConfig, arch: Architecture, mesh: MeshShape) -> int:
    """Bytes on one device of the optimizer's state."""
    form = OptimizerForm.of(config)
    params, state = _abstract_state(form, arch)
    specs = form.places(params, trained_part(partition(arch, mesh), arch))
    return sum_on_device(state, specs, mesh, lambda x: x.dtype.itemsize)


@lru_cache(maxsize=8)
def _abstract_state(form: OptimizerForm, arch: Architecture) -> tuple[Any, Any]:
    """What is trained and the optimizer's state, as shapes; `fit.py` asks for the same few many times."""
    params = trained_part(abstract_params(arch, jnp.float32), arch)
    return params, jax.eval_shape(form.init, params)
