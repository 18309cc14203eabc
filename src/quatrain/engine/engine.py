"""The rollout engine: prompts in, completions with the sampler's log-probabilities out.

Data flow: list of `Prompt` -> `RolloutEngine.generate` -> `RolloutBatch`; or `submit`, followed by one or
more calls of `wait`. Each prompt is prefilled once, whatever the group size. The randomness of a token
depends only on (seed, training step, sequence id, position).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from quatrain.backend import Backend, this_backend
from quatrain.cluster.processes import gather_objects
from quatrain.config.schema import Config, RolloutConfig
from quatrain.data.policy import Policy
from quatrain.engine.decode import Program
from quatrain.engine.groups import PerRequestSampling
from quatrain.engine.scoring import Scores, packs_to_score, score_packs
from quatrain.engine.session import EngineStats, Sampler, Session
from quatrain.models.blocks.layer_run import keeps_dtype
from quatrain.models.families import Architecture
from quatrain.models.lora import adapters_of, copies_if_aliased, merged
from quatrain.models.params import partition
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import check_held, mesh_shape, one_device, reshard, shardings, to_memory
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.rollouts import (
    Completion,
    OnProgress,
    RolloutProgress,
    Rollouts,
    Sampling,
    rollout_batch,
)

CACHE_SHARE = 0.5
"""Fraction of an accelerator's free memory that the KV cache may use; on a CPU, half of it, of all memory."""


class AnySession(Protocol):
    """What the engine calls of a session: of `Session`, and of a session of episodes of several turns."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    def submit(self, prompts: Sequence[Prompt], step: int) -> tuple[int, ...]: ...

    def holds(self, tickets: Sequence[int]) -> bool: ...

    def finished(self, tickets: Sequence[int]) -> bool: ...

    def take(self, tickets: Sequence[int]) -> tuple[list[tuple[Prompt, Completion]], Metrics]: ...

    def advance(self, params: Any, version: int) -> None: ...

    def close(self) -> None: ...


class Episodes(Protocol):
    """Makes sessions of episodes, each of several turns (`environments.episodes.EpisodeRules`)."""

    @property
    def max_environment_tokens(self) -> int: ...

    def session(self, make_session: Callable[[Callable[[Completion], bool]], Any]) -> AnySession: ...

    def close(self) -> None: ...


class Ticket(NamedTuple):
    """Prompts that were submitted together: the numbers of their groups in a session."""

    session: AnySession
    groups: tuple[int, ...]


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


class RolloutEngine(Rollouts):
    """Samples completions from the weights that `sync_weights` last set.

    `stop_ids` are the token ids that end a completion; they are part of the completion and are trained on.
    `seed` is the seed of the run. `cache_bytes` limits the KV cache per device; None: a fraction of the
    memory (`CACHE_SHARE`). `attention` is the implementation of attention in the prefill
    (`models.attention`), `backend` the settings for these devices. `on_progress` is called after each decode
    call of `generate` or `wait`, in the thread that called these. The prompt cache always has
    room for prompts of `usual_prompt` tokens: programs are compiled for that size, which changes only for
    longer prompts. With `episodes`, each sample is an episode of several turns with an environment of its
    own, which `close` ends.

    With `per_request_sampling`, sequences that come one by one, each with a sampling of its own, share the
    slots (`submit_own`), instead of groups with the sampling of `config`.

    Adapters of `arch` are merged into their matrices by `copy_weights`, or computed beside them, as
    `config.lora` says.

    On `mesh`, by default one device, each data shard is a replica of the sampler. With several processes,
    each process must call the same methods with the same arguments in the same order, and gets the same
    results. Methods must then be called from one thread only: a call from a second thread would take effect
    between different decode calls in different processes.

    In a single process, the other methods may be called from a second thread while `wait` runs; they take
    effect between two decode calls. After `pause`, `wait` and `generate` block until `resume`.
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
        on_progress: OnProgress | None = None,
        usual_prompt: int = 1,
        episodes: Episodes | None = None,
        per_request_sampling: bool = False,
        backend: Backend | None = None,
    ):
        self._with_adapters = arch
        self.arch = replace(arch, lora=None) if config.lora == "merged" else arch
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.dtype = jnp.dtype(dtype)
        self.sampling = Sampling.of(config)
        self.mesh = mesh or one_device()
        self._places = shardings(self.mesh, partition(self.arch, mesh_shape(self.mesh)))
        self._max_concurrency = config.max_concurrency
        self.greedy_baseline = bool(config.greedy_baseline)
        self._records_routes = records_routes(config, arch)
        # With staleness, copies of the weights come after the cache is sized: one in use, others waiting.
        self._more_copies = (
            0 if not config.max_staleness else 2 if config.in_flight else config.max_staleness + 1
        )
        self._seed, self._attention, self._cache_bytes = seed, attention, cache_bytes
        self._on_progress = on_progress
        self._usual_prompt = usual_prompt
        self._backend = backend or this_backend()
        self._episodes, self._per_request_sampling = episodes, per_request_sampling
        self._params: Any = None
        self._copies_base = self.arch.lora is None
        self._version = -1
        self._sync_s = 0.0
        self._session: AnySession | None = None
        self._between_calls = threading.Lock()
        self._one_interruption = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._paused = self._closed = False

    @classmethod
    def of(
        cls,
        config: Config,
        policy: Policy,
        *,
        episodes: Episodes | None = None,
        on_progress: OnProgress | None = None,
        per_request_sampling: bool = False,
    ) -> Self:
        """The engine that samples from `policy` on devices of this run, without weights.

        With `per_request_sampling` it has room for sequences as long as the model reads, whatever training
        samples: what a request asks for is not known before it comes.
        """
        engine = cls(
            policy.arch,
            config.rollout,
            policy.tokenizer,
            stop_ids=policy.stop_ids,
            seed=config.seed,
            dtype=config.model.dtype,
            attention=policy.attention,
            mesh=policy.meshes.rollout,
            on_progress=on_progress,
            usual_prompt=policy.usual_prompt,
            episodes=episodes,
            per_request_sampling=per_request_sampling,
            backend=policy.backend,
        )
        if per_request_sampling:
            engine.sampling = replace(engine.sampling, n=1, stop=(), max_new_tokens=policy.arch.longest)
        return engine

    def sync_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from the next decode call on; their tokens are recorded with `version`.

        They are brought to this engine's mesh as by `copy_weights`, without a copy of what is there already.
        """
        check_held(params, "the parameters for sync_weights", "give it those of the newest state")
        began = time.perf_counter()
        with self._interruption():
            if self._session is None or not self._session.num_groups:
                self._params = None  # with nothing in flight, free the old weights before placing the new
        placed = self._placed(params)
        with self._interruption():
            self._params, self._version = placed, version
        self._sync_s = time.perf_counter() - began

    def copy_weights(self, params: Any) -> Any:
        """`params` on this engine's mesh, with matrices in its dtype, in arrays that training may not donate.

        They are copied from device to device. Arrays in the host's memory come to the devices one at a time.
        """
        return jax.block_until_ready(copies_if_aliased(self._placed(params), params))

    def _placed(self, params: Any) -> Any:
        """As `copy_weights`, but arrays that have that sharding and dtype already are not copied."""
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

        The KV cache is freed as soon as no group is in flight.
        """
        with self._interruption():
            self._params = None

    def _generated(self, prompts: Sequence[Prompt], step: int, sampling: Sampling) -> RolloutBatch:
        """In a session of its own: groups that were submitted but not waited for are not affected.

        Raises ValueError if there are no weights, because `sync_weights` was not called since the last update
        of the parameters, and if the KV cache does not fit.
        """
        with closing(self._new_session(sampling)) as session:
            return self._collect(Ticket(session, session.submit(prompts, step)))

    def generate_each(
        self, batches: Sequence[Sequence[Prompt]], *, sampling: Sampling, at_once: int
    ) -> Iterator[RolloutBatch]:
        """What `generate` returns for each of `batches`, in order; samples share `at_once` slots.

        A slot that becomes free is given to the next prompt of whatever batch. Episodes of a batch begin when
        those of the batch before have ended, so that few environments exist at once.
        """
        if self._episodes is not None:
            yield from super().generate_each(batches, sampling=sampling, at_once=at_once)
            return
        with closing(self._new_session(sampling, at_once)) as session:
            tickets = [Ticket(session, session.submit(prompts, 0)) for prompts in batches]
            for ticket in tickets:
                yield self._collect(ticket)

    def submit(self, prompts: Sequence[Prompt], *, step: int = 0, sampling: Sampling | None = None) -> Ticket:
        """Queue `prompts`; `wait` returns their completions for the ticket that this returns.

        Raises ValueError if `sampling` differs from that of groups still in flight, and if the KV cache does
        not fit.
        """
        spec = sampling or self.sampling
        session = self._session
        if session is None or (session.sampling != spec and not session.num_groups):
            session = self._session = self._new_session(spec)
        if session.sampling != spec:
            raise ValueError(
                f"all groups in flight must share one sampling: {session.num_groups} groups are sampled with "
                f"{session.sampling}, got {spec}; wait for these groups first"
            )
        with self._interruption():
            return Ticket(session, session.submit(prompts, step))

    def submit_own(self, prompts: Sequence[Prompt], owners: Sequence[PerRequestSampling]) -> list[Ticket]:
        """Queue a sequence for each prompt, whose `group_id` is 0, in an engine with `per_request_sampling`.

        A ticket for each; for `advance`, `finished`, `take`, `completion` and `cancel`. Raises ValueError if
        the KV cache of one of them does not fit.
        """
        session = self._session
        if session is None:
            session = self._session = self._new_session(self.sampling)
        assert isinstance(session, Session), "an engine with per_request_sampling has no episodes"
        with self._interruption():
            return [Ticket(session, (group,)) for group in session.submit_own(prompts, owners)]

    def completion(self, ticket: Ticket) -> Completion:
        """The tokens so far of a sequence that `submit_own` queued; not to be changed."""
        assert isinstance(ticket.session, Session)
        return ticket.session.completion(ticket.groups[0])

    def cancel(self, ticket: Ticket) -> None:
        """Forget a sequence that `submit_own` queued, finished or not."""
        assert isinstance(ticket.session, Session)
        with self._interruption():
            ticket.session.cancel(ticket.groups[0])

    def score(self, sequences: Sequence[Sequence[int]], num_likeliest: int) -> Iterator[list[Scores]]:
        """Log-probabilities of given tokens, by the weights that are set; the next sequences at each step.

        A step is one call of the device, between two rounds.
        """
        model = self.arch, self.stop_ids, self.dtype, self._attention, self.mesh
        program = Program(*model, self._backend)
        for packs in packs_to_score(sequences, mesh_shape(self.mesh).num_data_shards):
            with self._between_calls:
                scores = score_packs(program, self._weights(), packs, num_likeliest)
            yield scores

    def wait(self, ticket: Ticket) -> RolloutBatch:
        """The batch of the prompts that were submitted for `ticket`; decodes all that is in flight meanwhile.

        Blocks while paused. Raises ValueError for a ticket that was waited for before, and RuntimeError if
        the engine is closed meanwhile.
        """
        self._check_untaken(ticket)
        return self._collect(ticket)

    def advance(self) -> None:
        """Run one round of the groups that were submitted: prefill of new ones, and a decode call.

        For callers that take each ticket when it is finished instead of waiting for one. Blocks while paused.
        """
        if self._session is not None:
            self._round(self._session)

    def finished(self, ticket: Ticket) -> bool:
        """Whether all completions of the ticket have ended; raises ValueError if it was taken before."""
        self._check_untaken(ticket)
        return ticket.session.finished(ticket.groups)

    def take(self, ticket: Ticket) -> tuple[list[tuple[Prompt, Completion]], Metrics]:
        """The samples of a finished ticket, prompts in order, and metrics of their episodes."""
        with self._between_calls:
            return ticket.session.take(ticket.groups)

    @property
    def stats(self) -> EngineStats:
        """Totals of the groups that share a session with those in flight; zero if there was none."""
        return EngineStats() if self._session is None else self._session.stats

    def pause(self) -> None:
        """Returns when the running decode call has finished; no other starts before `resume`."""
        with self._interruption():
            self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._interruption():
            self._paused = False

    def close(self) -> None:
        """Discard groups in flight, the KV cache and the weights."""
        with self._interruption():
            self._closed, self._paused = True, False
            if self._session is not None:
                self._session.close()
            self._session = self._params = None
            if self._episodes is not None:
                self._episodes.close()

    @contextmanager
    def _interruption(self) -> Iterator[None]:
        """Runs the block between two decode calls of another thread, which waits until the block ends."""
        with self._one_interruption:
            self._running.clear()
            try:
                with self._between_calls:
                    yield
            finally:
                if not self._paused:
                    self._running.set()

    def _new_session(self, sampling: Sampling, at_once: int | None = None) -> AnySession:
        if self._cache_bytes is None:
            # Versions of a model with adapters beside a base that is not copied differ in the adapters alone.
            version = self._weights() if self._copies_base else adapters_of(self._weights())
            on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(version))
            self._cache_bytes = _memory_for_cache(self.mesh, self._more_copies * on_device)
        model = self.arch, self.tokenizer, self.stop_ids, self._seed, self.dtype, self._attention, self.mesh
        sampler = Sampler(*model, self._cache_bytes, self._usual_prompt)
        sampler = replace(sampler, records_routes=self._records_routes, backend=self._backend)
        if self._episodes is None:
            own = self._per_request_sampling
            return Session(
                sampler, sampling, self._max_concurrency, at_once=at_once, per_request_sampling=own
            )
        between_turns = sampling.max_new_tokens + self._episodes.max_environment_tokens
        sampler = replace(sampler, more_context=between_turns)
        return self._episodes.session(partial(Session, sampler, sampling, self._max_concurrency))

    def _weights(self) -> Any:
        call = "call sync_weights(state.params, state.step) before generate, wait and an evaluation"
        if self._params is None:
            raise ValueError(f"the rollout has no weights to sample from; {call}")
        check_held(self._params, "the weights that the rollout samples from", f"{call}, after each update")
        return self._params

    def _check_untaken(self, ticket: Ticket) -> None:
        if not ticket.session.holds(ticket.groups):
            raise ValueError("a ticket can be waited for once; this one was; submit its prompts again")

    def _round(self, session: AnySession) -> None:
        """One round of a session, with the weights that are set now."""
        while True:
            self._running.wait()
            with self._between_calls:
                if not self._running.is_set():  # paused after the wait, before the lock was taken
                    continue
                if self._closed:
                    raise RuntimeError("the rollout engine was closed while groups were in flight")
                session.advance(self._weights(), self._version)
                return

    def _collect(self, ticket: Ticket) -> RolloutBatch:
        session, groups = ticket
        before, compilations = session.stats, num_compilations()
        began = time.perf_counter()
        while not session.finished(groups):
            self._round(session)
            if self._on_progress is not None:
                done = session.stats - before
                rate = done.decoded_tokens / (time.perf_counter() - began)
                total = len(groups) * session.sampling.n
                self._on_progress(RolloutProgress(done.completions, total, rate, session.num_live))
        generated = time.perf_counter()
        samples, metrics = self.take(ticket)
        worked = work_metrics(session.stats - before, generated - began)
        batch = rollout_batch(samples, self.tokenizer, {**worked, **metrics})
        timings = {
            "time/rollout_sync_s": Metric(self._sync_s),
            "time/rollout_generate_s": Metric(generated - began, reduction="sum"),
            "time/rollout_flush_s": Metric(time.perf_counter() - generated, reduction="sum"),
            "rollout/compilations": Metric(num_compilations() - compilations, reduction="sum"),
        }
        return replace(batch, metrics={**batch.metrics, **timings})


def _memory_for_cache(mesh: Mesh, reserved: int = 0) -> int:
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
    return {
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
