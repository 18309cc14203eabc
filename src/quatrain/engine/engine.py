"""The engine: contexts in, sampled tokens with their log-probabilities out, in rounds that its owner runs.

Data flow: `Request`s -> `RolloutEngine.submit` -> a call of `advance` for each round -> `take`. Each prompt
is prefilled once, whatever the number of its samples. The randomness of a token depends only on (seed,
training step, sequence id, position). Its owner is an `EngineService`, which alone calls it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from quatrain.backend import Backend, this_backend
from quatrain.cluster.processes import gather_objects
from quatrain.config.schema import Config, RolloutConfig
from quatrain.data.policy import Policy
from quatrain.engine.decode import Program
from quatrain.engine.masks import Guide, guide_of, why_not
from quatrain.engine.scoring import Scores, packs_to_score, score_packs
from quatrain.engine.session import EngineStats, Session, SessionSettings
from quatrain.models.blocks.layer_run import keeps_dtype
from quatrain.models.families import Architecture
from quatrain.models.feature_store import FeatureStore
from quatrain.models.lora import VISION, adapters_of, copies_if_aliased, merged, merged_architecture
from quatrain.models.params import partition
from quatrain.parallel.mesh import (
    check_held,
    copy_if_aliased,
    mesh_shape,
    one_device,
    reshard,
    shardings,
    to_memory,
)
from quatrain.types.metrics import Metric
from quatrain.types.pictures import Pictures
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import Request

CACHE_SHARE = 0.5
"""Fraction of an accelerator's free memory that the KV cache may use; on a CPU, half of it, of all memory."""


class Ticket(NamedTuple):
    """A request that was submitted: its group in a session."""

    session: Session
    group: int


def records_routes(config: RolloutConfig, arch: Architecture) -> bool:
    """Whether the experts of each token are recorded (`rollout.record_routes`).

    Raises ValueError if they are to be, and `arch` has none.
    """
    if config.record_routes is True and arch.routes is None:
        raise ValueError(
            "rollout.record_routes must be auto or false for a model without experts; the model "
            f"({arch.family}) has none; set auto"
        )
    return config.record_routes is not False and arch.routes is not None


def num_drafts(config: RolloutConfig, arch: Architecture) -> int:
    """Drafts that a decode step checks (`rollout.speculate`).

    Raises ValueError if there are some, and `arch` has DeltaNet layers.
    """
    if config.speculate and arch.deltas:
        raise ValueError(
            f"rollout.speculate must be 0 for a model with DeltaNet layers ({arch.family}), got "
            f"{config.speculate}: a rejected draft would stay in their states; set 0"
        )
    return config.speculate


class RolloutEngine:
    """Samples completions from the weights that `sync_weights` last set.

    `stop_ids` are the token ids that end a completion; they are part of the completion and are trained on.
    `seed` is the seed of the run. `cache_bytes` limits the KV cache per device; None: a fraction of the
    memory (`CACHE_SHARE`). `attention` is the implementation of attention in the prefill
    (`models.attention`), `backend` the settings for these devices. The prompt cache always has room for
    prompts of `usual_prompt` tokens: programs are compiled for that size, which changes only for longer
    prompts.

    `features` are those of pictures, of a model that sees; without them a prompt with pictures is refused.
    The tower is theirs: this engine has the text model.

    With `per_request_sampling`, turns that come one by one, each with a sampling of its own, share the slots;
    otherwise all samples in flight have one sampling, and those of a prompt share its keys and values, or
    each has its own (`Request.own`).

    Adapters of `arch` are merged into their matrices by `copy_weights`, or computed beside them, as
    `config.lora` says.

    On `mesh`, by default one device, each data shard is a replica of the sampler. With several processes,
    each process must call the same methods with the same arguments in the same order, and gets the same
    results. One thread calls it, but for `copy_weights`, which any may.
    """

    def __init__(
        self,
        arch: Architecture,
        config: RolloutConfig,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        seed: int,
        dtype: str = "float32",
        attention: str = "xla",
        mesh: Mesh | None = None,
        cache_bytes: int | None = None,
        usual_prompt: int = 1,
        per_request_sampling: bool = False,
        backend: Backend | None = None,
        features: FeatureStore | None = None,
    ):
        self._features = features
        arch = replace(arch, vision=None)
        self._with_adapters = arch
        self.arch = merged_architecture(arch) if config.lora == "merged" else arch
        self.tokenizer, self.seed = tokenizer, seed
        self.stop_ids = tuple(stop_ids)
        self.dtype = jnp.dtype(dtype)
        # Turns with a sampling of their own do not read that of the session.
        self.sampling = Sampling(1, 1) if per_request_sampling else Sampling.of(config)
        self.mesh = mesh or one_device()
        self._places = shardings(self.mesh, partition(self.arch, mesh_shape(self.mesh)))
        self._max_concurrency = config.max_concurrency
        self._records_routes = records_routes(config, arch)
        self._num_drafts = num_drafts(config, arch)
        # With staleness, copies of the weights come after the cache is sized: one in use, others waiting.
        self._more_copies = (
            0 if not config.max_staleness else 2 if config.in_flight else config.max_staleness + 1
        )
        self._attention, self._cache_bytes = attention, cache_bytes
        self._prefix_share, self._in_flight = config.prefix_share or 0.0, config.in_flight
        self._usual_prompt = usual_prompt
        self._backend = backend or this_backend()
        self.per_request_sampling = per_request_sampling
        self._params: Any = None
        self._copies_base = self.arch.lora is None
        self._version = -1
        self.sync_s = 0.0
        """Seconds that the last `sync_weights` took."""
        self._session: Session | None = None
        self._before = EngineStats()

    @classmethod
    def of(
        cls,
        config: Config,
        policy: Policy,
        *,
        per_request_sampling: bool = False,
        cache_bytes: int | None = None,
    ) -> Self:
        """The engine that samples from `policy` on devices of this run, without weights."""
        return cls(
            policy.arch,
            config.rollout,
            policy.tokenizer,
            stop_ids=policy.stop_ids,
            seed=config.seed,
            dtype=config.model.dtype,
            attention=policy.attention,
            mesh=policy.meshes.rollout,
            cache_bytes=cache_bytes,
            usual_prompt=policy.usual_prompt,
            per_request_sampling=per_request_sampling,
            backend=policy.backend,
            features=policy.store,
        )

    def sync_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from the next decode call on; their tokens are recorded with `version`.

        They are brought to this engine's mesh as by `copy_weights`, without a copy of what is there already.
        """
        check_held(params, "the parameters for sync_weights", "give it those of the newest state")
        began = time.perf_counter()
        if self._session is None or not self._session.num_groups:
            self._params = None  # with nothing in flight, free the old weights before placing the new
        if self._features is not None:
            self._features.load(params, version)
        placed = self.placed(params)
        if version == self._version and self._session is not None:
            self._session.forget_contexts()  # which are found by the version; these may be other weights
        self._params, self._version = placed, version
        self.sync_s = time.perf_counter() - began

    def copy_weights(self, params: Any) -> Any:
        """`params` on this engine's mesh, with matrices in its dtype, in arrays that training may not donate.

        They are copied from device to device. Arrays in the host's memory come to the devices one at a time.
        A tower that is trained is copied where it is.
        """
        copied = copies_if_aliased(self.placed(params), _text_of(params), self._with_adapters)
        if VISION in params:
            copied = {**copied, VISION: jax.tree.map(copy_if_aliased, params[VISION], params[VISION])}
        return jax.block_until_ready(copied)

    def placed(self, params: Any) -> Any:
        """The text model as `copy_weights` gives it, but arrays that have that sharding and dtype already are
        not copied."""
        params = _text_of(params)
        if self.arch.lora is None:
            params = merged(params, self._with_adapters, self.dtype)

        def place(path: Any, array: jax.Array, target: NamedSharding) -> jax.Array:
            here = to_memory("device", array)
            keeps = keeps_dtype(path[-1].key, here.ndim)
            moved = reshard(here if keeps else here.astype(self.dtype), target)
            return moved if here is array else jax.block_until_ready(moved)

        placed = jax.block_until_ready(jax.tree_util.tree_map_with_path(place, params, self._places))
        to, of = placed["embed"], params["embed"]  # without a copy, their shardings, memory included, agree
        self._copies_base |= to.dtype != of.dtype or not to.sharding.is_equivalent_to(of.sharding, of.ndim)
        return placed

    def release(self) -> None:
        """Free the weights until the next `sync_weights`.

        The KV cache is freed as soon as no group is in flight, contexts that are kept beside it by this.
        """
        self._params = None
        if self._session is not None:
            self._session.release()

    def forget(self, session: str) -> None:
        """No sequence of this session of a client comes any more: contexts kept for it go first."""
        if self._session is not None:
            self._session.forget(session)

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of contexts that are kept beside the KV cache."""
        return 0 if self._session is None else self._session.num_kept_blocks

    @property
    def sees(self) -> bool:
        """Whether prompts may have pictures."""
        return self._features is not None

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue the turns of `requests`; a ticket for each.

        Raises ValueError if the KV cache has no room for one of them, or the engine does not follow the
        grammar of one; if there are no weights, because
        `sync_weights` was not called since the last update of the parameters, and, without
        `per_request_sampling`, if their sampling differs from that of turns still in flight.
        """
        self._weights()
        has_grammar = any(each.own is not None and each.own.grammar is not None for each in requests)
        if has_grammar and self.cannot_constrain is not None:
            raise ValueError(f"the answer would be any text: {self.cannot_constrain}")
        if self.per_request_sampling:
            session = self._session = self._session or self._new_session(self.sampling, own=True)
            return self._submit_own(session, requests)
        first = requests[0]
        if self._session is None or not self._session.num_groups:
            self._before = self.stats
            # Anew for each batch: sizes that one needed do not change the programs and sums of the next.
            self._session = self._new_session(first.sampling, own=first.own is not None)
        if not all(map(self.fits, requests)):
            raise ValueError(
                f"all groups in flight must share one sampling: {self._session.num_groups} groups are "
                f"sampled with {self._session.sampling}, got {first.sampling}; wait for these groups first"
            )
        if first.own is not None:
            return self._submit_own(self._session, requests)
        prompts = [request.prompt for request in requests]
        return [Ticket(self._session, group) for group in self._session.submit(prompts, first.step)]

    def _submit_own(self, session: Session, requests: Sequence[Request]) -> list[Ticket]:
        owners = [request.own for request in requests if request.own is not None]
        prompts = [replace(request.prompt, group_id=0) for request in requests]  # its place is in `own`
        return [Ticket(session, group) for group in session.submit_own(prompts, owners)]

    def fits(self, request: Request) -> bool:
        """Whether a request may be sampled beside those in flight."""
        session, own = self._session, request.own is not None
        if session is None or not session.num_groups or own != session.per_request_sampling:
            return session is None or not session.num_groups
        return own or session.sampling == request.sampling

    def completions(self, ticket: Ticket) -> Sequence[Completion]:
        """The tokens so far of each turn of a request; not to be changed."""
        return ticket.session.completions(ticket.group)

    def failure(self, ticket: Ticket) -> str | None:
        """Why a request did not come to its end, though it is finished; None: it did."""
        return ticket.session.failure(ticket.group)

    @property
    def cannot_constrain(self) -> str | None:
        """Why it follows no grammar, and what to do about it; None: it does."""
        return why_not(self.stop_ids)

    @cached_property
    def guide(self) -> Guide:
        """What compiles grammars; any thread may ask it. Raises ValueError if there can be none."""
        return guide_of(self.tokenizer, self.arch.vocab_size, self.stop_ids)

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request, finished or not."""
        ticket.session.cancel(ticket.group)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        num_likeliest: int,
        listed: np.ndarray | None = None,
        *,
        pictures: Sequence[Pictures | None] | None = None,
    ) -> Iterator[list[Scores]]:
        """Log-probabilities of given tokens, by the weights that are set; the next sequences at each step.

        A step is one call of the device, between two rounds. `listed` [T, W] int32 are words to score in the
        place of each of the T tokens of a single sequence; -1: none. `pictures` are those of each sequence,
        or of its beginning. Raises ValueError at once if there are some, and the engine has no features.
        """
        model = self.arch, self.stop_ids, self.dtype, self._attention, self.mesh
        program = Program(*model, self._backend)
        num_replicas = mesh_shape(self.mesh).num_data_shards
        calls = packs_to_score(sequences, num_replicas, pictures, self._features)
        return (
            score_packs(program, self._weights(), packs, num_likeliest, listed, self._features)
            for packs in calls
        )

    def advance(self) -> None:
        """Run one round of what was submitted: prefill of new requests, and a decode call."""
        if self._session is not None:
            self._session.advance(self._weights(), self._version)

    def finished(self, ticket: Ticket) -> bool:
        """Whether all turns of a request have ended."""
        return ticket.session.finished([ticket.group])

    def take(self, ticket: Ticket) -> Sequence[Completion]:
        """Removes a finished request: its turns."""
        return ticket.session.take([ticket.group])

    @property
    def stats(self) -> EngineStats:
        """Totals so far."""
        return self._before if self._session is None else self._before + self._session.stats

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return 0 if self._session is None else self._session.num_live

    def close(self) -> None:
        """Discard what is in flight, the KV cache and the weights."""
        self._session = self._params = None

    def _new_session(self, sampling: Sampling, *, own: bool) -> Session:
        if self._cache_bytes is None:
            # Versions of a model with adapters beside a base that is not copied differ in the adapters alone.
            version = self._weights() if self._copies_base else adapters_of(self._weights())
            on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(version))
            self._cache_bytes = memory_for_cache(self.mesh, self._more_copies * on_device)
        model = self.arch, self.tokenizer, self.stop_ids, self.seed, self.dtype, self._attention, self.mesh
        settings = SessionSettings(*model, self._cache_bytes, self._usual_prompt)
        settings = replace(settings, records_routes=self._records_routes, backend=self._backend)
        settings = replace(settings, prefix_share=self._prefix_share, in_flight=self._in_flight)
        settings = replace(settings, features=self._features, guide=lambda: self.guide)
        settings = replace(settings, num_drafts=self._num_drafts)
        return Session(settings, sampling, self._max_concurrency, per_request_sampling=own)

    def _weights(self) -> Any:
        call = "call sync_weights(state.params, state.step) before generate, wait and an evaluation"
        if self._params is None:
            raise ValueError(f"the rollout has no weights to sample from; {call}")
        check_held(self._params, "the weights that the rollout samples from", f"{call}, after each update")
        return self._params


def _text_of(params: Any) -> Any:
    """The parameters of the text model."""
    return {name: part for name, part in params.items() if name != VISION}


def memory_for_cache(mesh: Mesh, reserved: int = 0) -> int:
    """Bytes that the KV cache may use on each device of `mesh`; a CPU device uses memory of the host.

    `reserved` bytes of a device are left for what does not exist yet. The minimum over all processes, because
    all must compute the same schedule.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = CACHE_SHARE / 2 * host / jax.local_device_count()
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("bytes_limit" in stat for stat in stats):
        free = min(stat["bytes_limit"] - stat.get("bytes_in_use", 0) for stat in stats)
        room = CACHE_SHARE * max(free - reserved, 0)
    return min(int(x) for x in gather_objects(room))


def work_metrics(stats: EngineStats, seconds: float) -> dict[str, Metric]:
    """Metrics of the work of a session, of which `stats` are the totals, in so many seconds."""
    kept = {
        "rollout/prefix_hit_fraction": Metric(stats.cached_tokens, stats.context_tokens),
        "rollout/prefix_evicted_tokens": Metric(stats.evicted_tokens, reduction="sum"),
    }
    drafts = {
        "rollout/tokens_per_decode_step": Metric(stats.step_tokens, stats.useful_slot_steps),
        "rollout/draft_accept_fraction": Metric(stats.step_tokens - stats.useful_slot_steps, stats.drafts),
    }
    return {
        **(kept if stats.context_tokens else {}),
        **(drafts if stats.drafts else {}),
        "rollout/prefill_s": Metric(stats.prefill_s, reduction="sum"),
        "rollout/prefill_tokens": Metric(stats.prefilled_tokens, reduction="sum"),
        "rollout/decode_s": Metric(stats.decode_s, reduction="sum"),
        "rollout/tokens_per_s": Metric(stats.decoded_tokens, seconds),
        "rollout/slot_utilisation": Metric(stats.useful_slot_steps, stats.widest_slot_steps),
        "rollout/wasted_decode_fraction": Metric(
            stats.slot_steps - stats.useful_slot_steps, stats.slot_steps
        ),
        "rollout/preempted": Metric(stats.preempted, reduction="sum"),
        "rollout/recomputed_tokens": Metric(stats.recomputed_tokens, reduction="sum"),
    }
