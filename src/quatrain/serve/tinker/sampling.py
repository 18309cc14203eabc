"""Samples from snapshots of training clients: an engine for each snapshot that has work.

Data flow: a `Sample` (`calls.py`) -> `Samplers.start` -> rounds in the worker's thread -> `RolloutEngine`,
with `engine.score` for log-probabilities of the prompt and the likeliest tokens -> `Sampled`.

The engines share the base's arrays and the compiled programs, and divide the memory for caches. At most
`most` exist at a time; a snapshot without one waits until another has nothing in flight. Nobody overtakes: no
engine takes a request that came after one that waits for an engine, as a busy snapshot would otherwise keep
others waiting for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax
import numpy as np

from quatrain.config.derive import PREFIX_SHARE
from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine, Ticket, memory_for_cache
from quatrain.engine.scoring import Scores
from quatrain.models.architecture import Architecture
from quatrain.models.lora import with_trained
from quatrain.parallel.mesh import make_mesh, mesh_shape
from quatrain.serve.tinker.calls import Base, Likeliest, Refused, Sample, Sampled, Sequence, Snapshot
from quatrain.serve.tinker.training import adapted
from quatrain.serve.tinker.worker import is_of_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import PerRequestSampling, Request

NO_LOGPROB = -99999.0
"""The log-probability of a likeliest token where there is none."""

Done = Callable[[Sampled | Exception], None]


@dataclass
class _Asked:
    """A request, which its ticket numbers in the order of arrival."""

    sample: Sample
    done: Done
    requests: list[Request]
    turns: list[Ticket] = field(default_factory=list)
    """Of its sequences, in the engine."""
    completions: list[Completion] = field(default_factory=list)
    """Once all are whole."""
    scoring: Iterator[list[Scores]] = field(default_factory=lambda: iter(()))
    scores: list[Scores] = field(default_factory=list)
    """Of the prompt, if it is scored, and of each whole sequence, if it is."""

    @property
    def scores_prompt(self) -> bool:
        sample = self.sample
        listed = sample.target_prompt_logprobs is not None
        return sample.prompt_logprobs or sample.topk_prompt_logprobs > 0 or listed

    @property
    def can_score(self) -> bool:
        """Whether there is something to score now."""
        whole = len(self.completions) if self.sample.topk_sample_logprobs else 0
        return len(self.scores) < self.scores_prompt + whole

    def begin(self, engine: RolloutEngine) -> None:
        """Queues its sequences; raises ValueError if the cache has no room for one of them."""
        sample = self.sample
        self.turns = engine.submit(self.requests)
        if self.scores_prompt:
            listed = sample.target_prompt_logprobs
            if listed is not None:  # there, the first row is of the second token
                listed = np.concatenate([np.full_like(listed[:1], -1, shape=(1, listed.shape[1])), listed])
            self.scoring = engine.score([sample.tokens.tolist()], sample.topk_prompt_logprobs, listed)

    def look(self, engine: RolloutEngine) -> None:
        """Takes its sequences from the engine once all are whole."""
        sample = self.sample
        if not self.completions and all(map(engine.finished, self.turns)):
            self.completions = [turn for ticket in self.turns for turn in engine.take(ticket)]
            if sample.topk_sample_logprobs:
                whole = [[*sample.tokens.tolist(), *each.tokens] for each in self.completions]
                self.scoring = chain(self.scoring, engine.score(whole, sample.topk_sample_logprobs))

    @property
    def is_done(self) -> bool:
        return bool(self.completions) and not self.can_score

    def result(self) -> Sampled | Refused:
        """What has come of it."""
        sample, num_prompt = self.sample, len(self.sample.tokens)
        scores = self.scores[self.scores_prompt :]
        drawn = [np.array(each.logprobs, np.float32) for each in self.completions]
        # NaN stands for "none" in the answer, so one that the model gave would be taken for that.
        if not all(np.isfinite(x).all() for x in (*drawn, *(each.logprobs[1:] for each in self.scores))):
            return Refused(
                "the logits of these weights are not finite: training has diverged; sample from an earlier "
                "checkpoint, and train with a smaller learning rate"
            )
        sequences = []
        for number, (turn, logprobs) in enumerate(zip(self.completions, drawn, strict=True)):
            likeliest = _likeliest(scores[number], num_prompt) if scores else None
            if likeliest is not None:
                likeliest = Likeliest(*(x[num_prompt:] for x in likeliest))
            tokens = np.array(turn.tokens, np.int32)
            sequences.append(Sequence(tokens, logprobs, turn.finish_reason == "stop", likeliest))
        cached = self.completions[0].cached  # the other sequences find what the first has computed
        if not self.scores_prompt:
            return Sampled(sequences, cached_tokens=cached)
        of_prompt, last = self.scores[0], sample.prompt_logprobs_last_n
        first = max(1, 0 if last is None else num_prompt - last)
        logprobs = np.where(np.arange(num_prompt) < first, np.float32(np.nan), of_prompt.logprobs)
        listed = sample.target_prompt_logprobs
        return Sampled(
            sequences,
            logprobs if sample.prompt_logprobs else None,
            _likeliest(of_prompt, first) if sample.topk_prompt_logprobs else None,
            None
            if listed is None
            else np.where(listed < 0, np.float32(np.nan), of_prompt.listed_logprobs[1:]),
            cached,
        )


def _likeliest(scores: Scores, first: int) -> Likeliest:
    """The likeliest tokens in the place of each, none before the place `first`."""
    before = (np.arange(len(scores.likeliest)) < first)[:, None]
    ids = np.where(before, np.int32(0), scores.likeliest)
    return Likeliest(ids, np.where(before, np.float32(NO_LOGPROB), scores.likeliest_logprobs))


@dataclass
class _Sampler:
    """An open snapshot."""

    snapshot: Snapshot
    owner: str
    engine: RolloutEngine | None = None
    waiting: dict[int, _Asked] = field(default_factory=dict)
    """Requests that the engine does not have yet, by ticket."""
    running: dict[int, _Asked] = field(default_factory=dict)
    has_decoded: bool = False
    """Whether its last round was one of decoding."""
    last: int = 0
    """The number of its last round."""


class Samplers:
    """Snapshots of `base` with adapters, or alone, that clients sample from; one thread calls it.

    `cache_bytes` is the memory of a device for the caches of all engines; None: a fraction of what is free.
    `prefix_share` of it keeps contexts for further requests.
    """

    def __init__(
        self, base: Base, *, most: int, cache_bytes: int | None = None, prefix_share: float = PREFIX_SHARE
    ):
        self._base, self._most, self._prefix_share = base, most, prefix_share
        shape = mesh_shape(base.mesh)
        copies = shape.num_devices // (shape.tp * shape.ep)
        # As in training runs: each copy of the model is a replica of the sampler (`config.roles`).
        shape = MeshShape(dp=copies, tp=shape.tp, ep=shape.ep)
        self._mesh = make_mesh(shape, list(base.mesh.devices.flat))
        cache_bytes = memory_for_cache(self._mesh) if cache_bytes is None else cache_bytes
        self._cache_bytes = cache_bytes // most
        self._params: Any = None
        self._samplers: dict[int, _Sampler] = {}
        # By owner: requests so far of each (model, step, hash of the prompt). A sampler that makes room and
        # comes back, or another one of the same weights, must not draw the same tokens again.
        self._before: defaultdict[str, Counter[tuple[int, int, bytes]]] = defaultdict(Counter)
        self._key_of: dict[int, int] = {}
        self._num_keys = self._num_tickets = self._num_rounds = 0

    def open(self, snapshot: Snapshot, owner: str) -> int:
        """The key of a new sampler."""
        self._num_keys += 1
        self._samplers[self._num_keys] = _Sampler(snapshot, owner)
        return self._num_keys

    def close(self, key: int) -> None:
        """Forget a sampler; its requests fail. One that was forgotten is ignored."""
        if key not in self._samplers:
            return
        sampler = self._samplers[key]
        self._fail(sampler, Refused("the sampler was closed; make a new one from its checkpoint"))
        self._end(sampler)
        del self._samplers[key]

    def forget(self, owner: str) -> None:
        """Close all samplers of an owner, who has ended."""
        for key in [key for key, sampler in self._samplers.items() if sampler.owner == owner]:
            self.close(key)
        self._before.pop(owner, None)

    def start(self, key: int, sample: Sample, done: Done) -> int:
        """Queue a request; its ticket. `done` is called in a round with what comes of it.

        Raises Refused if the model cannot do what it asks for.
        """
        sampler = self._samplers[key]
        asked = _Asked(sample, done, self._requests(sampler, sample))
        self._num_tickets += 1
        sampler.waiting[self._num_tickets] = asked
        self._key_of[self._num_tickets] = key
        return self._num_tickets

    def cancel(self, ticket: int) -> None:
        """Forget a request, whose `done` is called no more; one that has finished is ignored."""
        key = self._key_of.pop(ticket, None)
        if key is None:
            return
        sampler = self._samplers[key]
        sampler.waiting.pop(ticket, None)
        asked = sampler.running.pop(ticket, None)
        if asked is not None and not asked.completions and sampler.engine is not None:
            for turn in asked.turns:
                sampler.engine.cancel(turn)

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """(owner, key) of the samplers whose next round does something."""
        return [(self._samplers[key].owner, key) for key in self._ready()[0]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters of all snapshots, each array once."""
        adapters = (sampler.snapshot.adapters for sampler in self._samplers.values())
        arrays = {id(array): array for array in jax.tree.leaves(list(adapters))}
        return sum(array.nbytes for array in arrays.values())

    def round(self, key: int) -> None:
        """One unit of work of a sampler among `waiting`: a round of its engine, or a step of scoring.

        An error fails the requests to this sampler, and no others; raises one that ends the device's work
        (`is_of_device`).
        """
        sampler = self._samplers[key]
        ready, barrier = self._ready()
        assert key in ready, f"sampler {key} has nothing to do"
        self._num_rounds += 1
        sampler.last = self._num_rounds
        try:
            engine = sampler.engine = sampler.engine or self._new_engine(sampler, ready)
            for ticket in [ticket for ticket in sampler.waiting if ticket < barrier]:
                self._begin(sampler, engine, ticket)
            self._advance(sampler, engine)
        except Exception as error:
            if is_of_device(error):
                raise
            self._fail(sampler, error)
            self._end(sampler)

    def _ready(self) -> tuple[list[int], float]:
        """(keys of samplers whose next round does something, the first ticket that waits for an engine)."""
        running = [key for key, sampler in self._samplers.items() if sampler.running]
        first = {
            key: next(iter(sampler.waiting))
            for key, sampler in self._samplers.items()
            if sampler.waiting and not sampler.running
        }
        begin = sorted(first, key=first.__getitem__)
        places = self._most - len(running)
        return [*running, *begin[:places]], min((first[key] for key in begin[places:]), default=math.inf)

    def _new_engine(self, sampler: _Sampler, ready: list[int]) -> RolloutEngine:
        """An engine with the sampler's weights; where there are `most`, the one that was used least recently
        of those without work ends."""
        idle = [k for k, other in self._samplers.items() if other.engine is not None and not other.running]
        if sum(other.engine is not None for other in self._samplers.values()) >= self._most:
            # Of those that are to have one next, none: they would be made anew.
            self._end(self._samplers[min(idle, key=lambda k: (k in ready, self._samplers[k].last))])
        if self._params is None:
            # Once, so that engines whose dtype or mesh is another one share the copy.
            self._params = self._engine(self._base.arch).placed(self._base.params)
        snapshot, params, arch = sampler.snapshot, self._params, self._base.arch
        if snapshot.lora is not None:
            arch = adapted(arch, snapshot.lora.rank)
            params = with_trained(params, snapshot.adapters, arch)
        engine = self._engine(arch)
        engine.sync_weights(params, 0)
        return engine

    def _engine(self, arch: Architecture) -> RolloutEngine:
        base = self._base
        return RolloutEngine(
            arch,
            RolloutConfig(lora="adapter", prefix_share=self._prefix_share, record_routes=False),
            base.tokenizer,
            stop_ids=(),  # each request says what ends it
            seed=base.seed,
            dtype=base.dtype,
            attention=base.attention,
            mesh=self._mesh,
            cache_bytes=self._cache_bytes,
            per_request_sampling=True,
            backend=base.backend,
        )

    def _begin(self, sampler: _Sampler, engine: RolloutEngine, ticket: int) -> None:
        asked = sampler.waiting.pop(ticket)
        try:
            asked.begin(engine)
        except ValueError as error:  # there is no room for it
            del self._key_of[ticket]
            asked.done(Refused(str(error)))
        else:
            sampler.running[ticket] = asked

    def _advance(self, sampler: _Sampler, engine: RolloutEngine) -> None:
        """Scores some sequences or decodes, in turn, and answers what is done."""
        scoring = next((asked for asked in sampler.running.values() if asked.can_score), None)
        decodes = any(not asked.completions for asked in sampler.running.values())
        if scoring is not None and (sampler.has_decoded or not decodes):
            scoring.scores += next(scoring.scoring)
            sampler.has_decoded = False
        elif decodes:
            engine.advance()
            sampler.has_decoded = True
        for ticket, asked in list(sampler.running.items()):
            asked.look(engine)
            if asked.is_done:
                del sampler.running[ticket], self._key_of[ticket]
                asked.done(asked.result())

    def _fail(self, sampler: _Sampler, error: Exception) -> None:
        """Fails all requests of a sampler."""
        failed = {**sampler.running, **sampler.waiting}
        sampler.running, sampler.waiting = {}, {}
        for ticket, asked in failed.items():
            del self._key_of[ticket]
            asked.done(error)

    def _end(self, sampler: _Sampler) -> None:
        """Frees the memory of a sampler's engine."""
        if sampler.engine is not None:
            sampler.engine.close()
        sampler.engine = None

    def _requests(self, sampler: _Sampler, sample: Sample) -> list[Request]:
        """The turns of a request, each with what its randomness derives from; raises Refused."""
        base = self._base
        if not 1 <= len(sample.tokens) <= base.longest:
            raise Refused(
                f"a prompt must have 1 to {base.longest} tokens, the model's positions; got "
                f"{len(sample.tokens)}; shorten it, or begin it with a token"
            )
        stop_ids = () if sample.stop == () else base.stop_ids
        ids = tuple(stop for stop in sample.stop or () if isinstance(stop, int))
        # A sequence ends in the last position, except for a prompt that fills all: whoever asks for its
        # log-probabilities gets a token, which nothing follows.
        room = max(base.longest - len(sample.tokens), 1)
        sampling = Sampling(
            n=1,
            max_new_tokens=room if sample.max_tokens is None else min(sample.max_tokens, room),
            temperature=sample.temperature,
            top_p=sample.top_p,
            top_k=max(sample.top_k, 0),
            stop=tuple(stop for stop in sample.stop or () if isinstance(stop, str)),
        )
        seed, step = self._randomness(sampler, sample)
        prompt = Prompt(0, np.asarray(sample.tokens, np.int32), "")
        own = PerRequestSampling(sampling, seed, step, 0, stop_ids=(*stop_ids, *ids))
        return [Request.alone(prompt, replace(own, sequence_id=j)) for j in range(sample.n)]

    def _randomness(self, sampler: _Sampler, sample: Sample) -> tuple[int, int]:
        """Two numbers of 32 bits: with those of the sequence and the token, all that the token derives from.

        They derive from the seeds of server and request, the model, the step of the snapshot, the prompt and
        how often the sampler's owner asked this model and step for it before: not from what else is asked
        for, nor from when. A request that has a seed repeats itself instead.
        """
        snapshot = sampler.snapshot
        prompt = hashlib.sha256(np.asarray(sample.tokens, "<i4").tobytes()).digest()
        before = 0
        if sample.seed is None:
            counts, name = self._before[sampler.owner], (snapshot.model, snapshot.step, prompt)
            before = counts[name]
            counts[name] += 1
        names = self._base.seed, sample.seed, snapshot.model, snapshot.step, before
        digest = hashlib.sha256(repr(names).encode() + prompt).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
