"""Continuous batching: applies the scheduler's decisions to the caches on the device, round by round.

Called by `engine.py`. A round assigns waiting samples to free slots, prefills prompts that are not in the
prompt cache yet, and runs up to TOKENS_PER_CALL decode steps of all slots. Weights may change between rounds.
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
from quatrain.models.attention import unpacks
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
    """What a session needs besides weights and `Sampling`.

    `cache_bytes` limits its KV cache per device; the cache has room for prompts of `usual_prompt` tokens.
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
        """Replicas of the sampler, one per data shard; each decodes its own slots."""
        return mesh_shape(self.mesh).num_data_shards

    def program(self, sampling: Sampling) -> Program:
        """The static argument of the compiled functions."""
        token = sampling.of_one_token()
        return Program(self.arch, token, self.stop_ids, self.dtype, self.attention, self.mesh)


@dataclass(frozen=True)
class Tally:
    """Totals of a session so far: seconds, completions, tokens, slot-steps (decode steps of one slot)."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    completions: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0
    useful_slot_steps: int = 0
    """Slot-steps that produced a token of a completion."""
    widest_slot_steps: int = 0
    """Slot-steps if the number of slots had always been its maximum."""

    def plus(self, **more: float) -> Tally:
        """These totals with `more` added to the named fields."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    def __sub__(self, earlier: Tally) -> Tally:
        return self.plus(**{name: -value for name, value in vars(earlier).items()})


@dataclass(frozen=True)
class _Cache:
    """The KV cache: `prompts` and `generated`, a ring buffer whose next decode step writes `column`.

    `shape` is (slots, rows of prompts, columns of a prompt, columns of a slot) of one replica.
    """

    prompts: CachePart
    generated: CachePart
    column: int
    shape: tuple[int, int, int, int]


class Session:
    """Groups with the same `Sampling`, of which at most `max_concurrency` sequences run at once.

    With None, as many run as the cache has room for. `submit` raises ValueError if the cache of
    `max_concurrency` sequences does not fit.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling, max_concurrency: int | None):
        self.sampling, self.tally = sampling, Tally()
        self._sampler, self._limit = sampler, max_concurrency
        self._program = sampler.program(sampling)
        self._unpack = unpacks(sampler.attention)
        self._scheduler = Scheduler(0, sampler.num_replicas)
        self._groups: dict[int, Group] = {}
        self._cache: _Cache | None = None
        self._seed = jnp.uint32(sampler.seed)
        self._prompt_columns = prompt_columns(sampler.usual_prompt)
        self._most_slots = 0

    @property
    def num_groups(self) -> int:
        """Unfinished groups, and finished groups that were not taken yet."""
        return self._scheduler.num_unfinished + self._scheduler.num_finished

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return self._scheduler.num_live

    def submit(self, prompts: Sequence[Prompt], step: int) -> tuple[int, ...]:
        """Queue a group for each prompt; their numbers. Raises ValueError if the cache does not fit."""
        longest = max((len(prompt.input_ids) for prompt in prompts), default=1)
        columns = max(self._prompt_columns, prompt_columns(longest))
        demand = self._scheduler.demand + len(prompts) * self.sampling.n
        self._scheduler.max_slots = self._max_concurrent(columns, demand)
        self._prompt_columns = columns
        tickets = tuple(self._scheduler.submit(self.sampling.n) for _ in prompts)
        for ticket, prompt in zip(tickets, prompts, strict=True):
            self._groups[ticket] = Group(prompt, step, [Completion() for _ in range(self.sampling.n)])
        return tickets

    def holds(self, tickets: Sequence[int]) -> bool:
        """Whether all these groups were submitted, and not taken yet."""
        return all(ticket in self._groups for ticket in tickets)

    def finished(self, tickets: Sequence[int]) -> bool:
        """Whether all these groups are finished."""
        return all(self._scheduler.is_finished(ticket) for ticket in tickets)

    def take(self, tickets: Sequence[int]) -> list[Group]:
        """Removes and returns these finished groups."""
        for ticket in tickets:
            self._scheduler.take(ticket)
        return [self._groups.pop(ticket) for ticket in tickets]

    def advance(self, params: Any, version: int) -> None:
        """Runs one round: prefill of admitted prompts, then one decode call, with weights `params`."""
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

    def _max_concurrent(self, prompt_columns: int, demand: int) -> int:
        """The maximum number of sequences that one replica decodes at once.

        `demand` is the number of sequences of all replicas. Raises ValueError if the cache of that many
        sequences, at most `max_concurrency`, does not fit into the memory for it.
        """
        sampler, replicas = self._sampler, self._sampler.num_replicas
        columns = prompt_columns + _generated_columns(self.sampling.max_new_tokens, self.sampling)
        each = columns * bytes_per_column(sampler.arch, sampler.dtype, mesh_shape(sampler.mesh).tp)
        fitting = sampler.cache_bytes // each
        most = self._limit // replicas if self._limit else max(fitting, 1)
        together = min(most, -(-demand // replicas))
        if together > fitting:
            each_of = f" on each of {replicas} replicas" if replicas > 1 else ""
            raise ValueError(
                "the KV cache of all sequences that decode at once must fit into the memory for it: "
                f"{together} sequences{each_of} of up to {columns} tokens need "
                f"{together * each / 2**20:.1f} MiB of {sampler.cache_bytes / 2**20:.1f} MiB, "
                f"which is enough for {fitting}; "
                + (
                    f"set rollout.max_concurrency to {fitting * replicas} or fewer"
                    if fitting
                    else "lower rollout.max_new_tokens or data.max_prompt_length"
                )
            )
        return min(most, max(fitting, 1))

    def _resize(self) -> None:
        """Changes the numbers of slots, rows and columns to those that the next round needs."""
        scheduler, sampler = self._scheduler, self._sampler
        slots = scheduler.wanted_slots()
        rows = scheduler.wanted_rows(slots)
        lengths = [len(self._completion(slot).tokens) for slot in self._live_slots()]
        used = max(lengths, default=1) - 1
        shape = (
            slots,
            rows,
            self._prompt_columns,
            _generated_columns(used + TOKENS_PER_CALL, self.sampling),
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
        slots, rows, prompt_columns, generated_columns = shape
        empty = partial(empty_cache, self._sampler.arch, dtype=self._sampler.dtype, mesh=self._sampler.mesh)
        return _Cache(empty(rows, prompt_columns), empty(slots, generated_columns), 0, shape)

    def _rearranged(
        self, cache: _Cache, shape: tuple[int, int, int, int], slots: list[int], rows: list[int], used: int
    ) -> _Cache:
        """`cache` in another `shape`: its given `slots` and `rows`, and the ring's last `used` columns."""
        old, (_, _, prompt_columns, generated_columns) = cache.shape, shape
        prompts, generated, column = cache.prompts, cache.generated, cache.column
        mesh, replicas = self._sampler.mesh, self._sampler.num_replicas
        if old[1:3] != shape[1:3] or rows != list(range(old[1])) * replicas:
            prompts = rearrange(prompts, np.array(rows), np.arange(prompt_columns), mesh)
        if (old[0], old[3]) != (shape[0], generated_columns) or slots != list(range(old[0])) * replicas:
            columns = (column - used + np.arange(generated_columns)) % old[3]
            generated, column = rearrange(generated, np.array(slots), columns, mesh), used % generated_columns
        return _Cache(prompts, generated, column, shape)

    def _packs(self, admitted: list[tuple[int, int]]) -> Iterator[list[Pack]]:
        """For each prefill call, one pack per replica, empty if a replica has fewer packs than others."""
        replicas = range(self._sampler.num_replicas)
        rows = self._scheduler.num_rows
        given: list[list[Admitted]] = [[] for _ in replicas]
        for ticket, row in admitted:
            given[row // rows].append(Admitted(self._groups[ticket], ticket, row % rows))
        for packs in zip_longest(*map(split_into_packs, given)):
            yield [pack or [] for pack in packs]

    def _prefill(self, packs: list[Pack], params: Any, version: int) -> None:
        assert self._cache is not None
        packed = pack_prompts(packs, self.sampling.n, self._cache.shape[1], unpack=self._unpack)
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
        """Appends the first token of each sample, from the first replica that computed the prompt."""
        for completion, token, logprob in zip(group.completions, tokens, logprobs, strict=True):
            completion.extend([token], [logprob], version)
        for sample in self._ended(group.completions):
            self._scheduler.finish_waiting(ticket, sample)
        self.tally = self.tally.plus(decoded_tokens=self.sampling.n)

    def _decode(self, params: Any, version: int) -> None:
        assert self._cache is not None
        cache = self._cache
        generated, decoded = decode_program(self._program.backend)(
            params,
            cache.generated,
            cache.prompts,
            self._slots(),
            self._sharing(),
            np.int32(cache.column),
            self._seed,
            program=self._program,
        )
        decoded = jax.device_get(decoded)
        steps = int(decoded.num_steps)
        self._cache = replace(cache, generated=generated, column=(cache.column + steps) % cache.shape[3])
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
        """Indices of finished `completions`, which are counted, and truncated after a stop string."""
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
        """Truncates each completion after the token that completes a stop string."""

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
        return [slot for slot, occupant in enumerate(self._scheduler.slots) if occupant is not None]

    def _completion(self, slot: int) -> Completion:
        occupant = self._scheduler.slots[slot]
        assert occupant is not None
        return self._groups[occupant.ticket].completions[occupant.sample]

    def _slots(self) -> Slots:
        """The last token, lengths, sequence id and step of the sequence in each slot, as arrays."""
        count = len(self._scheduler.slots)
        tokens, steps = np.zeros(count, np.int32), np.zeros(count, np.uint32)
        lengths, prompt_lengths = (np.ones(count, np.int32) for _ in range(2))
        sequence_ids, live = np.zeros(count, np.uint32), np.zeros(count, bool)
        for slot, occupant in enumerate(self._scheduler.slots):
            if occupant is None:
                continue
            group = self._groups[occupant.ticket]
            completion = group.completions[occupant.sample]
            tokens[slot], lengths[slot] = completion.tokens[-1], len(completion.tokens)
            prompt_lengths[slot] = len(group.prompt.input_ids)
            sequence_ids[slot] = sequence_id(group.prompt, self.sampling.n, occupant.sample)
            steps[slot], live[slot] = group.step, True
        return Slots(*as_jit_arguments(tokens, lengths, prompt_lengths, sequence_ids, steps, live))

    def _sharing(self) -> Sharing:
        """Which slots attend to which row of the prompt cache, as indices on their replica."""
        scheduler = self._scheduler
        most = min(self.sampling.n, scheduler.num_slots)
        members: list[list[int]] = [[] for _ in scheduler.rows]
        place = np.zeros(len(scheduler.slots), np.int32)
        for slot, occupant in enumerate(scheduler.slots):
            if occupant is not None:
                place[slot] = occupant.row % scheduler.num_rows * most + len(members[occupant.row])
                members[occupant.row].append(slot % scheduler.num_slots)
        table = np.array([slots + [0] * (most - len(slots)) for slots in members], np.int32)
        lengths = [0 if t is None else len(self._groups[t].prompt.input_ids) for t in scheduler.rows]
        return Sharing(*as_jit_arguments(table, place, np.array(lengths, np.int32)))


def _generated_columns(needed: int, sampling: Sampling) -> int:
    """Columns of the ring buffer for `needed` tokens: FEWEST_COLUMNS, doubled until they suffice.

    At most as many as the longest completion has.
    """
    columns = FEWEST_COLUMNS
    while columns < needed:
        columns *= 2
    return min(columns, round_up(sampling.max_new_tokens))
