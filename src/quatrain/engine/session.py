"""Continuous batching: applies the scheduler's decisions to the caches on the device, round by round.

Called by `engine.py`. A round assigns waiting samples to free slots, prefills prompts that are not in the
prompt cache yet, and runs up to TOKENS_PER_CALL decode steps of all slots. Weights may change between rounds.

A sample that is preempted (`admission.py`) keeps its tokens alone. When it has a slot again, its prompt is
computed unless its group has it still, and then its own tokens, into the slot.

Each turn of an episode or a dialogue is a request of its own, whose prompt is all that came before it. A
session of requests may keep contexts beside the cache (`contexts.py`): a context that begins like one of them
is computed from there on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from quatrain.backend import Backend, this_backend
from quatrain.engine.admission import Admission
from quatrain.engine.cache import FEWEST_OF_REQUESTS, Cache, Room
from quatrain.engine.contexts import EndedTurn, Found, KeptContexts
from quatrain.engine.decode import (
    TOKENS_PER_CALL,
    Decoded,
    Program,
    Slots,
    decode_program,
    extend_program,
    prefill_program,
    restore_program,
)
from quatrain.engine.groups import (
    PREFILL_TOKENS,
    Admitted,
    Continuation,
    FirstTokens,
    Group,
    Pack,
    PerRequestSampling,
    Restoration,
    UsualSampling,
    as_jit_arguments,
    calls,
    extension,
    masks_of,
    pack_prompts,
    prompt_positions,
    prompt_routes,
    restoration,
    sampling_numbers,
    seen_by,
    split_into_packs,
)
from quatrain.engine.masks import Guide
from quatrain.engine.one_by_one import one_by_one
from quatrain.engine.scheduler import Occupant, Scheduler
from quatrain.engine.speculation import Drafts, drafts_of, speculate_program, steps_of
from quatrain.engine.stop_strings import cut_at_stop_strings
from quatrain.models.architecture import Architecture
from quatrain.models.decode_step import Sharing
from quatrain.models.feature_store import FeatureStore
from quatrain.models.kv_cache import bytes_per_position, bytes_per_state
from quatrain.ops.kept_words import list_width
from quatrain.parallel.mesh import mesh_shape
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.routes import ROUTES


@dataclass(frozen=True)
class SessionSettings:
    """What a session needs besides weights and `Sampling`.

    `cache_bytes` limits its KV cache per device; the cache has room for prompts of `usual_prompt` tokens.
    `records_routes`: completions have the routes of their tokens. Of the cache's memory, a session of
    requests keeps contexts in `prefix_share`; `in_flight`: weights change while sessions of clients go on.
    """

    arch: Architecture
    tokenizer: Any
    stop_ids: tuple[int, ...]
    seed: int
    dtype: Any
    attention: str
    mesh: Mesh
    cache_bytes: int
    usual_prompt: int = 1
    records_routes: bool = False
    backend: Backend = field(default_factory=this_backend)
    prefix_share: float = 0.0
    in_flight: bool = False
    features: FeatureStore | None = None
    """Those of pictures; None: the sampler reads text alone."""
    guide: Callable[[], Guide] | None = None
    """Of grammars; made when one comes."""
    num_drafts: int = 0
    """Drafts that a decode step checks of each slot; 0: none, and other programs."""

    @property
    def num_replicas(self) -> int:
        """Replicas of the sampler, one per data shard; each decodes its own slots."""
        return mesh_shape(self.mesh).num_data_shards

    @property
    def tokens_per_call(self) -> int:
        """The most tokens that a decode call gives a sample."""
        return TOKENS_PER_CALL * (1 + self.num_drafts)

    @property
    def program(self) -> Program:
        """The static argument of the compiled functions."""
        static = self.arch, self.stop_ids, self.dtype, self.attention, self.mesh
        return Program(*static, self.backend, records_routes=self.records_routes)


@dataclass(frozen=True)
class EngineStats:
    """Totals of a session so far: seconds, completions, tokens, slot-steps (decode steps of one slot)."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    completions: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0
    useful_slot_steps: int = 0
    """Slot-steps that produced a token of a completion, or with drafts several."""
    step_tokens: int = 0
    """Tokens of completions that these produced."""
    drafts: int = 0
    """Drafts that slot-steps have checked."""
    widest_slot_steps: int = 0
    """Slot-steps if the number of slots had always been its maximum."""
    preempted: int = 0
    """How often a sample lost its slot because the cache had no room for all."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed once more."""
    context_tokens: int = 0
    """Tokens of contexts in a session that keeps some."""
    cached_tokens: int = 0
    """Of these, those that were not computed, as a kept context had them."""
    evicted_tokens: int = 0
    """Tokens of kept contexts that were given up for others."""

    def plus(self, **more: float) -> EngineStats:
        """These totals with `more` added to the named fields."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    def __add__(self, later: EngineStats) -> EngineStats:
        return self.plus(**vars(later))

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        return self.plus(**{name: -value for name, value in vars(earlier).items()})


_Live = tuple[int, Group, int]
"""A slot, the group of its sample, and the index of the sample in its group."""


class Session:
    """Groups with the same `Sampling`, of which at most `max_concurrency` sequences run at once.

    Fewer run where the cache has no room for more (`admission.py`); `submit` raises ValueError if it has none
    for one. Raises ValueError for a `max_concurrency` below the number of replicas.

    With `per_request_sampling`, groups have one sample each with a sampling of its own (`submit_own`);
    `sampling` is not used.
    """

    def __init__(
        self,
        settings: SessionSettings,
        sampling: Sampling,
        max_concurrency: int | None,
        *,
        per_request_sampling: bool = False,
    ):
        self.sampling, self.stats = sampling, EngineStats()
        self.per_request_sampling = per_request_sampling
        self._settings = settings
        self._program = settings.program
        self._usual = UsualSampling(None if per_request_sampling else sampling, settings.seed)
        replicas = settings.num_replicas
        if max_concurrency is not None and max_concurrency < replicas:
            raise ValueError(
                "max_concurrency must be at least 1 for each replica of the sampler; got "
                f"{max_concurrency} and {replicas} replicas; raise it, or take fewer replicas"
            )
        self._scheduler = Scheduler(1, replicas, varying=per_request_sampling)
        self._groups: dict[int, Group] = {}
        self._cache: Cache | None = None
        self._kept: KeptContexts | None = None
        fewest, share = settings.usual_prompt, int(settings.prefix_share * settings.cache_bytes)
        if per_request_sampling and share:
            of = settings.arch, settings.dtype, settings.mesh
            self._kept = kept = KeptContexts(*of, share, in_flight=settings.in_flight)
            self._scheduler.home = lambda ticket: kept.home(ticket, self._groups[ticket])
            # Blocks are copied whole: from so many positions on, their number is a multiple of a block's.
            fewest = max(fewest, FEWEST_OF_REQUESTS)
        self._room = Room(
            settings.cache_bytes - (0 if self._kept is None else self._kept.num_bytes),
            bytes_per_position(settings.arch, settings.dtype, mesh_shape(settings.mesh).tp),
            prompt_positions(fewest),
            bytes_per_state(settings.arch, settings.dtype, mesh_shape(settings.mesh).tp),
            varying=per_request_sampling,
        )
        self._admission = Admission(
            self._scheduler,
            self._room,
            self._groups,
            group_size=1 if per_request_sampling else sampling.n,
            most_slots=None if max_concurrency is None else max_concurrency // replicas,
            max_new_tokens=None if per_request_sampling else sampling.max_new_tokens,
            tokens_per_call=settings.tokens_per_call,
        )
        self._most_slots = 0
        self._shifted = False
        """Whether positions of some group are shifted; a session of text alone has the programs of text."""

    @property
    def num_groups(self) -> int:
        """Unfinished groups, and finished groups that were not taken yet."""
        return self._scheduler.num_unfinished + self._scheduler.num_finished

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return self._scheduler.num_live

    def submit(self, prompts: Sequence[Prompt], step: int) -> tuple[int, ...]:
        """Queue a group for each prompt; their tickets. Raises ValueError as `check_memory` does."""
        self.check_memory(prompts)
        limit, numbers = self.sampling.max_new_tokens, range(self.sampling.n)
        return self._submit([Group.of(prompt, step, numbers, limit) for prompt in prompts])

    def submit_own(self, prompts: Sequence[Prompt], owners: Sequence[PerRequestSampling]) -> tuple[int, ...]:
        """Queue a sample for each prompt, whose `group_id` is 0; their tickets.

        Raises ValueError if the cache of one sequence does not fit, and for a grammar that is not taken.
        """
        groups = list(map(Group.alone, prompts, owners))
        for group in groups:
            if group.own is not None and group.own.grammar is not None:
                assert self._settings.guide is not None, "the engine takes grammars only with one"
                group.matcher = self._settings.guide().matcher(group.own.grammar)
            self._check_fits(len(group.context), group.limit, "shorten the prompt or lower max_tokens")
        return self._submit(groups)

    def check_memory(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError if the cache of the longest sequence of these prompts does not fit alone."""
        longest = max((len(prompt.input_ids) for prompt in prompts), default=1)
        remedy = "lower rollout.max_new_tokens or data.max_prompt_length"
        self._check_fits(longest, self.sampling.max_new_tokens, remedy)

    def _check_fits(self, prompt: int, limit: int, remedy: str) -> None:
        positions = self._room.positions(prompt, limit)
        whole = replace(self._room, num_bytes=self._settings.cache_bytes)
        if self._kept is not None and whole.fitting(whole.positions(prompt, limit)):
            # What fits alone goes before all that is kept; what never fits is refused, and costs nothing.
            while self._kept.num_bytes and not self._room.fitting(positions):
                self._kept.halve()
                self._room = replace(whole, num_bytes=whole.num_bytes - self._kept.num_bytes)
                self._admission.room = self._room
                positions = self._room.positions(prompt, limit)
        if not self._room.fitting(positions):
            raise ValueError(
                "the KV cache of a sequence must fit into the memory for it: a prompt of "
                f"{prompt} tokens and a completion of up to {limit} need {self._room.share(positions)}; "
                f"{remedy}"
            )

    def completions(self, ticket: int) -> list[Completion]:
        """What there is of the samples of a group."""
        return self._groups[ticket].completions

    def failure(self, ticket: int) -> str | None:
        """Why the sample of a group did not come to its end; None: it did, or goes on."""
        return self._groups[ticket].failure

    def cancel(self, ticket: int) -> None:
        """Forget a group of one sample, finished or not."""
        self._scheduler.cancel(ticket)
        self.take([ticket])
        self._free_cache()

    def forget(self, session: str) -> None:
        """No request of this session of a client comes any more; what was kept for it may go."""
        if self._kept is not None:
            self._kept.forget(session)

    def release(self) -> None:
        """Free the memory of kept contexts, unless a group is in flight."""
        if self._kept is not None and not self._scheduler.num_unfinished:
            self._kept.release()

    def forget_contexts(self) -> None:
        """What is kept is of other weights than those that have its version now."""
        if self._kept is not None:
            self._kept.forget_all()

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of kept contexts in use."""
        return 0 if self._kept is None else self._kept.num_used

    def _submit(self, groups: Sequence[Group]) -> tuple[int, ...]:
        for group in groups:
            group.seen = seen_by(group.prompt, self._settings.features)
            sampling = self.sampling if group.own is None else group.own.sampling
            group.num_kept, group.replays = sampling.num_kept, sampling.replays
            self._shifted |= group.shift != 0
        tickets = tuple(self._scheduler.submit(len(group.completions)) for group in groups)
        self._groups.update(zip(tickets, groups, strict=True))
        return tickets

    def finished(self, tickets: Sequence[int]) -> bool:
        """Whether all these groups are finished."""
        return all(self._scheduler.is_finished(ticket) for ticket in tickets)

    def take(self, tickets: Sequence[int]) -> list[Completion]:
        """Removes these finished groups: their samples."""
        for ticket in tickets:
            self._scheduler.take(ticket)
            if self._kept is not None:
                self._kept.end(ticket)
        taken = [self._groups.pop(ticket) for ticket in tickets]
        return [completion for group in taken for completion in group.completions]

    def advance(self, params: Any, version: int) -> None:
        """Runs one round: prefill of admitted prompts, then one decode call, with weights `params`."""
        if self._kept is not None:
            self._kept.begin(version)
        self._resize()
        began = time.perf_counter()
        # Again and again: samples whose first token is their last make room for others.
        while admitted := self._scheduler.admit():
            self._prefill(admitted, params, version)
        self._restore(self._scheduler.fill(), params)
        decoding = time.perf_counter()
        if self._scheduler.num_live:
            self._decode(params, version)
        ended = time.perf_counter()
        self.stats = self.stats.plus(prefill_s=decoding - began, decode_s=ended - decoding)
        if self._kept is not None:
            self.stats = replace(self.stats, evicted_tokens=self._kept.evicted_tokens)
        self._free_cache()

    def _free_cache(self) -> None:
        """Frees the cache if no group is in flight; contexts are kept for the next ones."""
        # The update that follows a batch needs the memory; prompts of the next one are others.
        if not self._scheduler.num_unfinished:
            self._cache = None
            self._scheduler.resize((), 0)

    def _resize(self) -> None:
        """Changes the numbers of slots, prefix slots and positions to those that the next round needs."""
        scheduler, settings = self._scheduler, self._settings
        shape = self._admission.next_shape()
        rings = tuple(ring.slots for ring in shape.rings)
        self.stats = replace(self.stats, preempted=self._admission.num_preempted)
        self._most_slots = max(self._most_slots, shape.slots)
        if self._cache is None:
            scheduler.resize(rings, shape.prefix_slots)
            place = settings.arch, settings.dtype, settings.mesh, shape
            self._cache = Cache.empty(*place, from_first=settings.num_drafts > 0)
        elif self._cache.shape != shape or scheduler.misplaced:
            slots, prefix_slots = scheduler.resize(rings, shape.prefix_slots)
            used = [0] * len(rings)
            for slot, group, index in self._live():
                ring, _ = scheduler.place(slot)
                used[ring] = max(used[ring], group.turn_length(index) - 1)
            self._cache = self._cache.rearranged(shape, slots, prefix_slots, used)

    def _prefill(self, admitted: Sequence[tuple[int, int]], params: Any, version: int) -> None:
        """Computes the contexts of groups that were admitted."""
        left, prefix_slots, waited = list(admitted), self._scheduler.num_prefix_slots, dict[int, int]()
        if self._kept is None:
            found = [Found(ticket, self._groups[ticket], *divmod(at, prefix_slots)) for ticket, at in left]
            self._prefill_wave(found, params, version)
            return
        while left:
            found, left = self._kept.wave(left, self._groups, prefix_slots, waited)
            assert self._cache is not None
            self._cache = replace(self._cache, prompts=self._kept.load(self._cache.prompts, found))
            for ticket, group, *_, hit, _ in found:
                # One that was preempted has asked before: what it finds again saves nobody a prefill.
                if not self._scheduler.has_begun(ticket):
                    group.completions[0].cached = hit.length
                    sizes = {"context_tokens": len(group.context), "cached_tokens": hit.length}
                    self.stats = self.stats.plus(**sizes)
            self._prefill_wave(found, params, version)

    def _prefill_wave(self, found: Sequence[Found], params: Any, version: int) -> None:
        """Computes what is left of contexts: of long ones, and after kept ones, in parts; others packed."""
        items: list[list[Admitted]] = [[] for _ in range(self._settings.num_replicas)]
        parts: list[list[Continuation]] = [[] for _ in items]
        for ticket, group, replica, here, hit, pause in found:
            if len(group.context) > PREFILL_TOKENS or hit.length or pause is not None:
                parts[replica].append(Continuation(group, ticket, here, hit.length, pause))
            else:
                items[replica].append(Admitted(group, ticket, here))
            if self._scheduler.has_begun(ticket):
                self.stats = self.stats.plus(recomputed_tokens=len(group.context) - hit.length)
        # For each call one pack per replica, empty if a replica has fewer packs than others.
        slots = self._scheduler.num_slots if self.per_request_sampling else 0
        split = partial(split_into_packs, slots_of_requests=slots)
        for packs in zip_longest(*map(split, items)):
            self._prefill_packs([pack or [] for pack in packs], params, version)
        paused = [[item for item in own if item.pause is not None] for own in parts]
        self._extend(parts, params, version)
        if self._kept is not None and self._cache is not None:
            # At once, not at the end of their turns: those that begin alike are in the next wave.
            self._kept.keep_contexts(self._cache.prompts, found)
        for item in chain.from_iterable(paused):
            item.pause = None
        self._extend(paused, params, version)

    def _prefill_packs(self, packs: list[Pack], params: Any, version: int) -> None:
        sizes = self.sampling.n, self._scheduler.num_prefix_slots
        forms, varying = self._program.forms, self.per_request_sampling
        features = self._settings.features
        packed = pack_prompts(packs, *sizes, forms, self._usual, varying=varying, features=features)
        self.stats = self.stats.plus(prefilled_tokens=int(np.count_nonzero(packed.segment_ids)))
        groups = [item.group for pack in packs for item in pack]
        drawn = self._compute(prefill_program, packed, params, groups)
        routes, size = drawn.routes, len(drawn.tokens) // len(packs)
        for replica, pack in enumerate(packs):
            for i, (group, ticket, _) in enumerate(pack, replica * size):
                if routes is not None:
                    group.record(0, *prompt_routes(packed, routes, i, replica))
                self._begin(group, ticket, drawn, i, version)

    def _begin(self, group: Group, ticket: int, drawn: FirstTokens, at: int, version: int) -> None:
        """Appends the first token of each sample, from the first replica that computed the prompt."""
        # A preempted sample has its first token already: it had lost keys and values alone.
        if group.turn_length(0):
            return
        firsts = zip(group.completions, drawn.tokens[at], drawn.logprobs[at], strict=True)
        for index, (completion, token, logprob) in enumerate(firsts):
            place, masks = (at, slice(index, index + 1)), drawn.masks
            group.record_kept(index, drawn.kept, place, None if masks is None else masks[at : at + 1])
            completion.extend([token], [logprob], version)
        group.consume(drawn.tokens[at][0], self._settings.stop_ids)
        for index in self._ended([(group, index) for index in range(len(group.completions))]):
            self._scheduler.finish_waiting(ticket, index)
        self.stats = self.stats.plus(decoded_tokens=len(group.completions))

    def _extend(self, left: list[list[Continuation]], params: Any, version: int) -> None:
        """Computes what is left of contexts of each replica, part after part, and draws the first tokens."""
        split = partial(calls, varying=self.per_request_sampling, kept=self._kept is not None)
        for batch, width, most in split(left):
            sizes = width, most, self._scheduler.num_prefix_slots
            extended = extension(batch, self.sampling.n, *sizes, self._usual, self._settings.features)
            self.stats = self.stats.plus(prefilled_tokens=int(np.sum(extended.continued.counts)))
            drawn = self._compute(extend_program, extended, params, [i.group for own in batch for i in own])
            for replica, items in enumerate(batch):
                for i, item in enumerate(items, replica * (len(drawn.tokens) // len(batch))):
                    if (routes := drawn.routes) is not None:
                        # A view would keep the array of the whole call as long as the sample lives.
                        item.group.record(item.done, routes[i, : min(width, item.left)].copy())
                    if item.left <= width and item.pause is None:
                        self._begin(item.group, item.ticket, drawn, i, version)

    def _restore(self, filled: Sequence[tuple[int, Occupant]], params: Any) -> None:
        """Computes the tokens again that samples have whose slot is another one now.

        Slots of all samples begin with the states of their prefix slots."""
        scheduler, replicas = self._scheduler, self._settings.num_replicas
        assert self._cache is not None
        if self._settings.arch.deltas:
            begun = [(slot, who.prefix_slot % scheduler.num_prefix_slots) for slot, who in filled]
            self._cache = self._cache.begun(
                [(slot // scheduler.num_slots, *scheduler.place(slot), prefix) for slot, prefix in begun]
            )
        for ring, (num_slots, _) in enumerate(self._cache.shape.rings):
            left: list[list[Restoration]] = [[] for _ in range(replicas)]
            for slot, who in filled:
                group, (own, here) = self._groups[who.ticket], scheduler.place(slot)
                # Without the last token: it is the input of the next step, which writes its keys.
                if own == ring and (count := group.turn_length(who.sample) - 1):
                    prefix_slot = who.prefix_slot % scheduler.num_prefix_slots
                    begin = self._cache.begin(ring, count)
                    item = Restoration(group, who.sample, here, prefix_slot, begin)
                    left[slot // scheduler.num_slots].append(item)
            for batch, width, most in calls(left, varying=self.per_request_sampling):
                sizes = width, most, num_slots, scheduler.num_prefix_slots
                restored = restoration(batch, *sizes, shifted=self._shifted)
                self.stats = self.stats.plus(recomputed_tokens=int(np.sum(restored.continued.counts)))
                caches = self._cache.generated[ring], self._cache.prompts
                run = restore_program(self._program.backend)
                self._cache = self._cache.with_ring(
                    ring, run(params, *caches, restored, program=self._program)
                )

    def _compute(
        self, program: Callable[..., Any], packed: Any, params: Any, groups: Sequence[Group]
    ) -> FirstTokens:
        """Fills prefix slots with contexts of `groups`: what was drawn after them."""
        assert self._cache is not None
        prompts, *drawn = program(self._program.backend)(
            params, self._cache.prompts, packed, program=self._program_of(groups)
        )
        self._cache = replace(self._cache, prompts=prompts)
        tokens, logprobs, kept, routes = jax.device_get(drawn)
        return FirstTokens(tokens.tolist(), logprobs.tolist(), kept, routes, packed.masks)

    def _program_of(self, groups: Iterable[Group | None]) -> Program:
        """The static argument for these groups, some of which may record what tokens are drawn from."""
        most = max((group.num_kept for group in groups if group is not None), default=0)
        return replace(self._program, most_kept=list_width(most)) if most else self._program

    def _decode(self, params: Any, version: int) -> None:
        """A call for each ring that has live slots; the host reads the results of all of them together."""
        assert self._cache is not None
        scheduler, cache, replicas = self._scheduler, self._cache, self._settings.num_replicas
        every = zip(*map(scheduler.ring_slots, range(replicas)), strict=True)
        rings = [list(chain.from_iterable(slots)) for slots in every]
        live = {slot: (slot, group, index) for slot, group, index in self._live()}
        running = [ring for ring, slots in enumerate(rings) if not live.keys().isdisjoint(slots)]
        begun = {ring: self._slots(rings[ring]) for ring in running}
        # Those with masks first: the host makes their next ones while the devices compute the other rings.
        running.sort(key=lambda ring: begun[ring].masks is None)
        of_ring = {}
        for ring in running:
            program, sharing = self._program_of(self._groups_in(rings[ring])), self._sharing(rings[ring])
            drafts = self._drafts(ring, rings[ring])
            of_ring[ring] = partial(self._call, ring, program, sharing, params, drafts)
        results = [of_ring[ring](begun[ring]) for ring in running]
        masks = dict[int, np.ndarray]()  # [B, steps, ceil(V / 32)] of each ring with grammars
        for i, ring in enumerate(running):
            if begun[ring].masks is not None:
                groups, stop_ids = self._groups_in(rings[ring]), self._settings.stop_ids
                given = begun[ring], results[i], groups, stop_ids
                results[i], masks[ring] = one_by_one(of_ring[ring], *given)
        results = jax.device_get(results)
        before = {slot: group.turn_length(index) for slot, group, index in live.values()}
        begins, slot_steps, most_steps, checked = {}, 0, 0, 0
        places = dict[int, tuple[Decoded, int]]()
        written = dict[int, int]()
        for ring, decoded in zip(running, results, strict=True):
            steps = int(decoded.num_steps)
            self._cache = self._cache.with_ring(ring, self._cache.generated[ring], steps)
            slot_steps, most_steps = slot_steps + steps * len(rings[ring]), max(most_steps, steps)
            for i, slot in enumerate(rings[ring]):
                if slot in live:
                    _, group, index = live[slot]
                    # A step writes the keys of its input; that of the first step is the token of the prefill.
                    begins[slot] = cache.begin(ring, group.turn_length(index) - 1)
                    places[slot], count = (decoded, i), decoded.counts[i]
                    checked += 0 if decoded.drafted is None else int(decoded.drafted[i])
                    tokens, logprobs = decoded.tokens[i, :count], decoded.logprobs[i, :count]
                    if decoded.routes is not None:
                        first = len(group.context) + group.turn_length(index) - 1
                        group.completions[index].record(ROUTES, first, decoded.routes[i, :count].copy())
                    of_steps = masks[ring][i, :count] if ring in masks else None
                    group.record_kept(index, decoded.kept, (i, slice(count)), of_steps)
                    group.completions[index].extend(tokens.tolist(), logprobs.tolist(), version)
                    # Before a stop string cuts the turn: a state of DeltaNet layers has read all of these.
                    written[slot] = group.turn_length(index)
        samples = list(live.values())
        ended = [samples[i] for i in self._ended([(group, index) for _, group, index in samples])]
        useful = {slot: group.turn_length(index) - before[slot] for slot, group, index in samples}
        tokens_drawn = sum(useful.values())
        useful_steps = sum(steps_of(*places[slot], kept) for slot, kept in useful.items())
        self._keep_turns(ended, begins, written)
        for slot, _, _ in ended:
            self._scheduler.finish(slot)
        self.stats = self.stats.plus(
            decoded_tokens=tokens_drawn,
            slot_steps=slot_steps,
            useful_slot_steps=useful_steps,
            step_tokens=tokens_drawn,
            drafts=checked,
            widest_slot_steps=most_steps * self._most_slots * replicas,
        )

    def _call(
        self,
        ring: int,
        program: Program,
        sharing: Sharing,
        params: Any,
        drafts: Drafts | None,
        slots: Slots,
        step: int = 0,
    ) -> Decoded:
        """What a decode call of a ring will give, of which the round has run `step` steps."""
        assert self._cache is not None
        generated = self._cache.generated[ring]
        arrays = params, generated, self._cache.prompts, slots, sharing
        if drafts is None:
            position = np.int32((self._cache.ring_positions[ring] + step) % generated.positions)
            run = decode_program(self._program.backend)
            generated, decoded = run(*arrays, position, program=program)
        else:
            # One step of sequences with a grammar has the mask of one token, and so no drafts.
            count = self._settings.num_drafts if slots.masks is None else 0
            run = speculate_program(self._program.backend)
            generated, decoded = run(*arrays, drafts, program=program, num_drafts=count)
        self._cache = self._cache.with_ring(ring, generated)
        return decoded

    def _drafts(self, ring: int, slots: Sequence[int]) -> Drafts | None:
        """What drafts of the samples in slots of a ring are looked up in; None: there are no drafts."""
        if not self._settings.num_drafts:
            return None
        assert self._cache is not None
        scheduler, shape = self._scheduler, self._cache.shape
        occupants = [scheduler.slots[slot] for slot in slots]
        return drafts_of(
            [None if ticket is None else self._groups[ticket] for ticket in scheduler.prefix_slots],
            [None if who is None else (self._groups[who.ticket], who.sample) for who in occupants],
            self.sampling.n,
            shape.prompt_positions,
            shape.rings[ring].positions,
        )

    def _keep_turns(self, ended: list[_Live], begins: Mapping[int, int], written: Mapping[int, int]) -> None:
        """Keeps the contexts and turns of samples that have ended.

        `begins` has the ring position of the turn's first token for each slot, `written` its tokens before it
        was cut at a stop string.
        """
        if self._kept is None or not ended:
            return
        scheduler, turns = self._scheduler, []
        for slot, group, index in ended:
            who = self._occupant(slot)
            replica, prefix_slot = divmod(who.prefix_slot, scheduler.num_prefix_slots)
            whole = group.turn_length(index) == written[slot]
            place = replica, prefix_slot, *scheduler.place(slot)
            turns.append(EndedTurn(who.ticket, group, *place, begins[slot], whole))
        assert self._cache is not None
        self._kept.keep_turns(self._cache, turns)

    def _ended(self, samples: Sequence[tuple[Group, int]]) -> list[int]:
        """Indices of `samples` whose turn has ended; they are counted, and truncated after a stop string, or
        after the first of its own stop tokens, which the program does not know."""
        with_stop = []
        for group, index in samples:
            stop = self.sampling.stop if group.own is None else group.own.sampling.stop
            if group.own is not None and group.own.stop_ids:
                most = self._settings.tokens_per_call
                _cut_at_stop_ids(group.completions[index], group.own.stop_ids, most)
            if stop:
                with_stop.append((group.completions[index], stop))
        if with_stop:
            for completion in cut_at_stop_strings(self._settings.tokenizer, with_stop):
                completion.finish_reason = "stop"
        ended = []
        for i, (group, index) in enumerate(samples):
            completion = group.completions[index]
            if completion.tokens[-1] in self._settings.stop_ids:
                completion.finish_reason = "stop"
            if completion.finish_reason == "stop" or group.left(index) <= 0 or group.failure is not None:
                ended.append(i)
        self.stats = self.stats.plus(completions=len(ended))
        return ended

    def _live(self) -> list[_Live]:
        """The slots in use, each with the group and the index of its sample."""
        return [
            (slot, self._groups[occupant.ticket], occupant.sample)
            for slot, occupant in enumerate(self._scheduler.slots)
            if occupant is not None
        ]

    def _groups_in(self, ring: Sequence[int]) -> list[Group | None]:
        """The group of the sample in each slot."""
        occupants = (self._scheduler.slots[slot] for slot in ring)
        return [None if who is None else self._groups[who.ticket] for who in occupants]

    def _occupant(self, slot: int) -> Occupant:
        occupant = self._scheduler.slots[slot]
        assert occupant is not None
        return occupant

    def _slots(self, ring: Sequence[int]) -> Slots:
        """The last token, lengths, sequence id and step of the sequence in each slot of a ring; masks if they
        follow grammars."""
        count = len(ring)
        tokens, live = np.zeros(count, np.int32), np.zeros(count, bool)
        # 1 also where no sequence is: attention to no key at all would be NaN.
        lengths, limits, prompt_lengths = (np.ones(count, np.int32) for _ in range(3))
        offsets, sequence_ids, steps = (np.zeros(count, np.uint32) for _ in range(3))
        shifts = np.zeros(count, np.int32)
        owners: list[PerRequestSampling | None] = [None] * count
        for i, slot in enumerate(ring):
            if (occupant := self._scheduler.slots[slot]) is None:
                continue
            group, index = self._groups[occupant.ticket], occupant.sample
            tokens[i], lengths[i] = group.completions[index].tokens[-1], group.turn_length(index)
            limits[i] = lengths[i] + group.left(index)
            prompt_lengths[i], offsets[i] = len(group.context), group.position
            sequence_ids[i] = group.sequence_ids(self.sampling.n)[index]
            steps[i], live[i], shifts[i] = group.step, True, group.shift
            owners[i] = group.own
        arrays = as_jit_arguments(tokens, lengths, limits, prompt_lengths, offsets, sequence_ids, steps, live)
        [shift] = as_jit_arguments(shifts) if self._shifted else [None]
        numbers = sampling_numbers(owners, self._usual)
        return Slots._make([*arrays, numbers, shift, masks_of([self._groups_in(ring)], count)])

    def _sharing(self, ring: Sequence[int]) -> Sharing:
        """Which slots of a ring attend to which prefix slot, as indices on their replica."""
        scheduler = self._scheduler
        num_slots = len(ring) // self._settings.num_replicas
        most = min(self.sampling.n, num_slots)
        members: list[list[int]] = [[] for _ in scheduler.prefix_slots]
        place = np.zeros(len(ring), np.int32)
        for i, slot in enumerate(ring):
            if (occupant := scheduler.slots[slot]) is not None:
                here = members[occupant.prefix_slot]
                place[i] = occupant.prefix_slot % scheduler.num_prefix_slots * most + len(here)
                here.append(i % num_slots)
        # Padding names slot 0, which is computed once more; `place` reads none of it.
        table = np.array([slots + [0] * (most - len(slots)) for slots in members], np.int32)
        lengths = [0 if t is None else len(self._groups[t].context) for t in scheduler.prefix_slots]
        return Sharing(*as_jit_arguments(table, place, np.array(lengths, np.int32)))


def _cut_at_stop_ids(completion: Completion, stop_ids: tuple[int, ...], most: int) -> None:
    """Drops what a round has sampled, at `most` so many tokens, after the first of `stop_ids`."""
    first = max(len(completion.tokens) - most, 0)
    new = completion.tokens[first:]  # of what came before, none has ended the turn
    ends = next((at for at, token in enumerate(new, first + 1) if token in stop_ids), None)
    if ends is not None:
        completion.cut(ends)
        completion.finish_reason = "stop"
