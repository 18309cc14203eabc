"""Groups in flight: the scheduler's decisions carried out on the device, round by round.

Called by `engine.py`. A round gives free slots to waiting samples, computing their prompts where no sample of
the group has run yet, and decodes TOKENS_PER_CALL tokens of every slot. Weights may change between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quatrain.models.architecture import Architecture
from quatrain.models.attention import supports_shared_prefixes
from quatrain.models.decode_step import Sharing
from quatrain.models.kv_cache import CachePart, bytes_per_column, empty_cache
from quatrain.ops.ladder import round_up
from quatrain.parallel.mesh import mesh_shape
from quatrain.rollout.decode import (
    TOKENS_PER_CALL,
    Program,
    Slots,
    decode_program,
    prefill_program,
    rearrange,
)
from quatrain.rollout.groups import (
    FEWEST_COLUMNS,
    Admitted,
    Group,
    Pack,
    as_jit_arguments,
    pack_prompts,
    prompt_columns,
    sequence_id,
    split_into_packs,
)
from quatrain.rollout.interface import Completion, Sampling
from quatrain.rollout.scheduler import Scheduler
from quatrain.types import Prompt


@dataclass(frozen=True)
class Sampler:
    """What a session samples from beside the weights.

    `cache_bytes` bounds its cache on a device, which has room for prompts of `usual_prompt` tokens at least.
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

    @property
    def num_replicas(self) -> int:
        """Copies of the model that decode side by side."""
        return mesh_shape(self.mesh).num_data_shards

    def program(self, sampling: Sampling) -> Program:
        """What the compiled functions are made for."""
        token = sampling.of_one_token()
        return Program(self.arch, token, self.stop_ids, self.dtype, self.attention, self.mesh)


@dataclass(frozen=True)
class Tally:
    """What the work so far came to; seconds, tokens and slot-steps (one slot, one decode step)."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    completions: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0
    useful_slot_steps: int = 0
    """Those that gave a token of a completion."""
    widest_slot_steps: int = 0
    """What they would have been on the widest batch."""

    def plus(self, **more: float) -> Tally:
        """This and more."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    def __sub__(self, earlier: Tally) -> Tally:
        return self.plus(**{name: -value for name, value in vars(earlier).items()})


@dataclass(frozen=True)
class _Cache:
    """Both parts of the cache; `column` of the ring `own` is written next.

    `shape`: slots, rows, columns of a prompt, columns of a slot; of one replica.
    """

    prompts: CachePart
    own: CachePart
    column: int
    shape: tuple[int, int, int, int]


class Session:
    """The groups that share one `Sampling`, at most `max_concurrency` of their sequences at once (None: all).

    Raises ValueError where the cache of that many does not fit, on `submit`.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling, max_concurrency: int | None):
        self.sampling, self.tally = sampling, Tally()
        self._sampler, self._limit = sampler, max_concurrency
        self._program = sampler.program(sampling)
        self._share = supports_shared_prefixes(sampler.attention)
        self._scheduler = Scheduler(0, sampler.num_replicas)
        self._groups: dict[int, Group] = {}
        self._cache: _Cache | None = None
        self._seed = jnp.uint32(sampler.seed)
        self._prompt_columns = prompt_columns(sampler.usual_prompt)
        self._most_slots = 0

    @property
    def num_groups(self) -> int:
        """Groups with samples to go, and those finished that nobody has taken."""
        return self._scheduler.num_unfinished + self._scheduler.num_finished

    @property
    def num_finished(self) -> int:
        """Groups ready to be taken."""
        return self._scheduler.num_finished

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return self._scheduler.num_live

    def submit(self, prompts: Sequence[Prompt], step: int) -> None:
        """Queue a group for each prompt."""
        longest = max((len(prompt.input_ids) for prompt in prompts), default=1)
        columns = max(self._prompt_columns, prompt_columns(longest))
        demand = self._scheduler.demand + len(prompts) * self.sampling.n
        self._scheduler.max_slots = self._most_at_once(columns, demand)
        self._prompt_columns = columns
        for prompt in prompts:
            ticket = self._scheduler.submit(self.sampling.n)
            self._groups[ticket] = Group(prompt, step, [Completion() for _ in range(self.sampling.n)])

    def take(self, count: int) -> list[Group]:
        """Up to `count` finished groups, those submitted first first."""
        return [self._groups.pop(ticket) for ticket in self._scheduler.take(count)]

    def advance(self, params: Any, version: int) -> None:
        """One round with these weights."""
        self._resize()
        began = time.perf_counter()
        while admitted := self._scheduler.admit():
            for packs in self._packs(admitted):
                self._prefill(packs, params, version)
        self._scheduler.fill()
        decoding = time.perf_counter()
        if self._scheduler.num_live:
            self._decode(params, version)
        ended = time.perf_counter()
        self.tally = self.tally.plus(prefill_s=decoding - began, decode_s=ended - decoding)
        if not self._scheduler.num_unfinished:
            self._cache = None
            self._scheduler.resize(0, 0)

    def _most_at_once(self, prompt_columns: int, demand: int) -> int:
        """Sequences that a replica decodes at once.

        Raises ValueError where that many of `demand` need too much memory.
        """
        sampler, replicas = self._sampler, self._sampler.num_replicas
        columns = prompt_columns + _own_columns(self.sampling.max_new_tokens, self.sampling)
        each = columns * bytes_per_column(sampler.arch, sampler.dtype, mesh_shape(sampler.mesh).tp)
        fitting = sampler.cache_bytes // each
        most = self._limit // replicas if self._limit else max(fitting, 1)
        together = min(most, -(-demand // replicas))
        if together > fitting:
            each_of = f" on each of {replicas} replicas" if replicas > 1 else ""
            raise ValueError(
                f"the cache of the sequences that decode at once has to fit: {together}{each_of} of up to "
                f"{columns} tokens need {together * each / 2**20:.1f} MiB of "
                f"{sampler.cache_bytes / 2**20:.1f} MiB, which is enough for {fitting}; "
                + (
                    f"set rollout.max_concurrency to {fitting * replicas} or fewer"
                    if fitting
                    else "lower rollout.max_new_tokens or data.max_prompt_length"
                )
            )
        return min(most, max(fitting, 1))

    def _resize(self) -> None:
        """Bring the number of slots, rows and columns to what the coming round wants."""
        scheduler, sampler = self._scheduler, self._sampler
        slots = scheduler.wanted_slots()
        rows = scheduler.wanted_rows(slots)
        lengths = [len(self._completion(slot).tokens) for slot in self._live_slots()]
        used = max(lengths, default=1) - 1
        shape = (
            slots,
            rows,
            self._prompt_columns,
            _own_columns(used + TOKENS_PER_CALL, self.sampling),
        )
        self._most_slots = max(self._most_slots, slots)
        if self._cache is None:
            scheduler.resize(slots, rows)
            self._cache = self._empty(shape)
        elif self._cache.shape != shape:
            moved = (list(range(slots)) * sampler.num_replicas, list(range(rows)) * sampler.num_replicas)
            if self._cache.shape[:2] != (slots, rows):
                moved = scheduler.resize(slots, rows)
            self._cache = self._rearranged(self._cache, shape, *moved, used)

    def _empty(self, shape: tuple[int, int, int, int]) -> _Cache:
        slots, rows, prompt_columns, own_columns = shape
        empty = partial(empty_cache, self._sampler.arch, dtype=self._sampler.dtype, mesh=self._sampler.mesh)
        return _Cache(empty(rows, prompt_columns), empty(slots, own_columns), 0, shape)

    def _rearranged(
        self, cache: _Cache, shape: tuple[int, int, int, int], slots: list[int], rows: list[int], used: int
    ) -> _Cache:
        """`cache` in another shape: these slots and rows, the last `used` columns of the ring in order."""
        old, (_, _, prompt_columns, own_columns) = cache.shape, shape
        prompts, own, column = cache.prompts, cache.own, cache.column
        mesh, replicas = self._sampler.mesh, self._sampler.num_replicas
        if old[1:3] != shape[1:3] or rows != list(range(old[1])) * replicas:
            prompts = rearrange(prompts, np.array(rows), np.arange(prompt_columns), mesh)
        if (old[0], old[3]) != (shape[0], own_columns) or slots != list(range(old[0])) * replicas:
            columns = (column - used + np.arange(own_columns)) % old[3]
            own, column = rearrange(own, np.array(slots), columns, mesh), used % own_columns
        return _Cache(prompts, own, column, shape)

    def _packs(self, admitted: list[tuple[int, int]]) -> Iterator[list[Pack]]:
        """What to prefill together, a pack for each replica: empty ones where others have more."""
        replicas = range(self._sampler.num_replicas)
        rows = self._scheduler.num_rows
        given: list[list[Admitted]] = [[] for _ in replicas]
        for ticket, row in admitted:
            given[row // rows].append(Admitted(self._groups[ticket], ticket, row % rows))
        for packs in zip_longest(*(split_into_packs(each, share=self._share) for each in given)):
            yield [pack or [] for pack in packs]

    def _prefill(self, packs: list[Pack], params: Any, version: int) -> None:
        assert self._cache is not None
        packed = pack_prompts(packs, self.sampling.n, self._cache.shape[1], share=self._share)
        self.tally = self.tally.plus(prefilled_tokens=int(np.count_nonzero(packed.segment_ids)))
        prompts, *first = prefill_program(self._program.backend)(
            params, self._cache.prompts, packed, self._seed, program=self._program
        )
        self._cache = replace(self._cache, prompts=prompts)
        tokens, logprobs = (x.tolist() for x in jax.device_get(first))
        size = len(tokens) // len(packs)
        for replica, pack in enumerate(packs):
            for i, (group, ticket, _) in enumerate(pack, replica * size):
                if not group.completions[0].tokens:
                    self._begin(group, ticket, tokens[i], logprobs[i], version)

    def _begin(
        self, group: Group, ticket: int, tokens: list[int], logprobs: list[float], version: int
    ) -> None:
        """The first token of each sample; where several replicas computed it, that of the first is it."""
        for completion, token, logprob in zip(group.completions, tokens, logprobs, strict=True):
            completion.extend([token], [logprob], version)
        for sample in self._ended(group.completions):
            self._scheduler.finish_waiting(ticket, sample)
        self.tally = self.tally.plus(decoded_tokens=self.sampling.n)

    def _decode(self, params: Any, version: int) -> None:
        assert self._cache is not None
        cache = self._cache
        own, decoded = decode_program(self._program.backend)(
            params,
            cache.own,
            cache.prompts,
            self._slots(),
            self._sharing(),
            np.int32(cache.column),
            self._seed,
            program=self._program,
        )
        decoded = jax.device_get(decoded)
        steps = int(decoded.num_steps)
        self._cache = replace(cache, own=own, column=(cache.column + steps) % cache.shape[3])
        live = self._live_slots()
        completions = [self._completion(slot) for slot in live]
        before = sum(len(completion.tokens) for completion in completions)
        for slot, completion in zip(live, completions, strict=True):
            count = decoded.counts[slot]
            completion.extend(
                decoded.tokens[slot, :count].tolist(), decoded.logprobs[slot, :count].tolist(), version
            )
        for i in self._ended(completions):
            self._scheduler.finish(live[i])
        useful = sum(len(completion.tokens) for completion in completions) - before
        self.tally = self.tally.plus(
            decoded_tokens=useful,
            slot_steps=steps * len(self._scheduler.slots),
            useful_slot_steps=useful,
            widest_slot_steps=steps * self._most_slots * self._sampler.num_replicas,
        )

    def _ended(self, completions: list[Completion]) -> list[int]:
        """Which are complete, cut after their stop string where they have one; counts them."""
        if self.sampling.stop:
            self._cut_at_stop_strings(completions)
        ended = []
        for i, completion in enumerate(completions):
            if completion.tokens[-1] in self._sampler.stop_ids:
                completion.finish_reason = "stop"
            if completion.finish_reason == "stop" or len(completion.tokens) >= self.sampling.max_new_tokens:
                ended.append(i)
        self.tally = self.tally.plus(completions=len(ended))
        return ended

    def _cut_at_stop_strings(self, completions: list[Completion]) -> None:
        """Cut each completion after the token that completes a stop string."""

        def matches(text: str) -> bool:
            return any(stop in text for stop in self.sampling.stop)

        tokenizer = self._sampler.tokenizer
        texts = tokenizer.batch_decode([completion.tokens for completion in completions])
        for completion, text in zip(completions, texts, strict=True):
            if not matches(text):
                continue
            length = len(completion.tokens)
            while length > 1 and matches(tokenizer.decode(completion.tokens[: length - 1])):
                length -= 1
            completion.cut(length)
            completion.finish_reason = "stop"

    def _live_slots(self) -> list[int]:
        return [slot for slot, who in enumerate(self._scheduler.slots) if who is not None]

    def _completion(self, slot: int) -> Completion:
        who = self._scheduler.slots[slot]
        assert who is not None
        return self._groups[who.ticket].completions[who.sample]

    def _slots(self) -> Slots:
        """What the device needs to know of the sequence in each slot."""
        count = len(self._scheduler.slots)
        tokens, steps = np.zeros(count, np.int32), np.zeros(count, np.uint32)
        lengths, prompt_lengths = (np.ones(count, np.int32) for _ in range(2))
        sequence_ids, live = np.zeros(count, np.uint32), np.zeros(count, bool)
        for slot, who in enumerate(self._scheduler.slots):
            if who is None:
                continue
            group = self._groups[who.ticket]
            completion = group.completions[who.sample]
            tokens[slot], lengths[slot] = completion.tokens[-1], len(completion.tokens)
            prompt_lengths[slot] = len(group.prompt.input_ids)
            sequence_ids[slot] = sequence_id(group.prompt, self.sampling.n, who.sample)
            steps[slot], live[slot] = group.step, True
        return Slots(*as_jit_arguments(tokens, lengths, prompt_lengths, sequence_ids, steps, live))

    def _sharing(self) -> Sharing:
        """Which slots attend to which row of the prompt cache, counted on their replica."""
        scheduler = self._scheduler
        most = min(self.sampling.n, scheduler.num_slots)
        members: list[list[int]] = [[] for _ in scheduler.rows]
        place = np.zeros(len(scheduler.slots), np.int32)
        for slot, who in enumerate(scheduler.slots):
            if who is not None:
                place[slot] = who.row % scheduler.num_rows * most + len(members[who.row])
                members[who.row].append(slot % scheduler.num_slots)
        table = np.array([slots + [0] * (most - len(slots)) for slots in members], np.int32)
        lengths = [0 if t is None else len(self._groups[t].prompt.input_ids) for t in scheduler.rows]
        return Sharing(*as_jit_arguments(table, place, np.array(lengths, np.int32)))


def _own_columns(needed: int, sampling: Sampling) -> int:
    """Columns of a slot's ring for `needed` tokens: doubling, as many as the longest completion at most."""
    columns = FEWEST_COLUMNS
    while columns < needed:
        columns *= 2
    return min(columns, round_up(sampling.max_new_tokens))
