"""Requests in any number and length, as an outside agent's: few shapes, most of them in the first steps."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quatrain.engine import session as module
from quatrain.engine.cache import CacheShape
from quatrain.engine.decode import TOKENS_PER_CALL
from quatrain.engine.session import Session, SessionSettings
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling

STEPS, EPISODES = 40, 32


@dataclass(frozen=True)
class Shapes:
    """A cache without arrays, which notes in `seen` what would be compiled for those it stands for."""

    shape: CacheShape
    seen: set
    prompts: Any = None

    def __post_init__(self):
        object.__setattr__(self, "prompts", self.shape[1:])

    @property
    def generated(self):
        return self.shape.rings

    @property
    def ring_positions(self):
        return (0,) * len(self.shape.rings)

    def with_ring(self, ring, generated, steps=0):
        return self

    def begin(self, ring, written):
        return -written

    def rearranged(self, shape, slots, prefix_slots, used):
        for before, after in ((self.shape.rings, shape.rings), (self.shape[1:], shape[1:])):
            if before != after:
                self.seen.add((before, after))
        return Shapes(shape, self.seen)


@pytest.fixture
def session(monkeypatch, small_arch, tokenizer):
    """A session of requests without a device, and the set of what would be compiled for it."""
    seen = set()

    def empty(arch, dtype, mesh, shape, *, from_first):
        seen.update(("empty", part) for part in (shape.rings, shape[1:]))
        return Shapes(shape, seen)

    def prefill(params, prompts, packed, program):
        seen.add(("prefill", packed.input_ids.shape, packed.starts.shape, prompts))
        shape = packed.sequence_ids.shape
        return prompts, np.full(shape, 5), np.zeros(shape, np.float32), None, None

    def decode(params, ring, prompts, slots, sharing, position, program):
        seen.add(("decode", len(slots.tokens), ring, prompts))
        shape = len(slots.tokens), TOKENS_PER_CALL
        counts = np.clip(slots.limits - slots.lengths, 0, TOKENS_PER_CALL)
        tokens, logprobs = np.full(shape, 5), np.zeros(shape, np.float32)
        return ring, SimpleNamespace(
            num_steps=shape[1],
            counts=counts,
            tokens=tokens,
            logprobs=logprobs,
            routes=None,
            kept=None,
            drafted=None,
            ends=None,
        )

    monkeypatch.setattr(module, "Cache", SimpleNamespace(empty=empty))
    monkeypatch.setattr(module, "prefill_program", lambda backend: prefill)
    monkeypatch.setattr(module, "decode_program", lambda backend: decode)
    settings = SessionSettings(
        small_arch, tokenizer, (0,), 0, np.dtype("float32"), "xla", one_device(), 1 << 30
    )
    return Session(settings, Sampling(1, 512), None, per_request_sampling=True), seen


def play(session, rng, prompt, reply, said, latency=4):
    """A step: EPISODES episodes of up to three turns, each of which waits a few rounds before the next."""
    waiting = [(rng.randint(0, 3), rng.randint(*prompt), rng.randint(1, 3)) for _ in range(EPISODES)]
    live, now = {}, 0
    while waiting or live:
        for due, context, left in [each for each in waiting if each[0] <= now]:
            waiting.remove((due, context, left))
            tokens = rng.randint(*reply)
            own = PerRequestSampling(Sampling(1, tokens), 0, 0, 0)
            ids = np.full(context, rng.randint(3, 200), np.int32)
            [ticket] = session.submit_own([Prompt(0, ids, "")], [own])
            live[ticket] = context + tokens, left
        if live:
            session.advance(None, 0)
        now += 1
        for ticket in [each for each in live if session.finished([each])]:
            context, left = live.pop(ticket)
            session.take([ticket])
            if left > 1:
                waiting.append((now + rng.randint(0, latency), context + rng.randint(*said), left - 1))


@pytest.mark.parametrize(
    "lengths",
    [
        {"prompt": (35, 48), "reply": (4, 12), "said": (3, 6)},
        {"prompt": (30, 90), "reply": (8, 100), "said": (5, 60)},
    ],
    ids=["alike", "different"],
)
def test_after_the_third_step_of_an_agents_run_nearly_nothing_is_compiled(session, lengths):
    """Sizes that follow each round's number of requests, and their lengths, made each step compile."""
    session, seen = session
    rng, counts = random.Random(0), [0]
    for _ in range(STEPS):
        play(session, rng, **lengths)
        counts.append(len(seen))
    late = np.diff(counts)[3:]
    assert counts[-1] <= 45
    assert (late > 0).sum() <= len(late) // 10, np.diff(counts).tolist()
