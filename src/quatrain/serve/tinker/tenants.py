"""Who uses the server: the sessions of API keys, and the training clients and samplers of each.

Data flow: a request (`api.py`) -> the session, training client or sampler that it names, if its key made it.
A session without a sign of life loses what it has. The event loop's thread alone calls all of this.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jax

from quatrain.models.lora import trained_part
from quatrain.models.params import is_spec, param_specs
from quatrain.serve.tinker.calls import Base, LoraRequest, Refused
from quatrain.serve.tinker.journal import Journal
from quatrain.serve.tinker.promises import Lane
from quatrain.serve.tinker.training import TrainingClient, adapted

MOST_ENDED = 1000
"""Sessions that have ended and are remembered, so that what asks for them learns why."""


class Unknown(LookupError):
    """What a request names is not here, or was made with another key, which is told the same."""


class Made(NamedTuple):
    """What the thread of the device makes of a training client."""

    client: TrainingClient
    journal: Journal


@dataclass(eq=False)
class Model:
    """A training client of a session."""

    id: str
    session: Session
    number: int
    """`model_seq_id`."""
    name: str
    """Of the base, as the program asked for it."""
    lora: LoraRequest
    num_bytes: int
    made: Future[Made] = field(default_factory=Future)
    """Done in the thread of the device, before anything else of this training client is."""
    lane: Lane = field(default_factory=Lane)

    @property
    def is_alive(self) -> bool:
        """Whether it was made, or will be."""
        return not has_failed(self.made)

    @property
    def client(self) -> TrainingClient:
        """What computes, for the thread of the device; raises Refused if it could not be made."""
        return self._made.client

    @property
    def journal(self) -> Journal:
        """Its figures, for the thread of the device; raises Refused if it could not be made."""
        return self._made.journal

    @property
    def _made(self) -> Made:
        if not self.is_alive:
            raise Refused(f"training client {self.id} was not made; make a new one")
        return self.made.result(timeout=0)

    def void(self, why: str) -> None:
        """Clears its gradient; the next optimizer step is not taken, for the reason `why`."""
        self.client.void(why)
        self.journal.void()


@dataclass(eq=False)
class SamplerOf:
    """A sampler of a session."""

    id: str
    session: Session
    name: str
    """Of the base, as the program asked for it."""
    num_bytes: int
    path: str | None
    """Of the checkpoint with its weights, which are read again where they had to make room."""
    of_base: bool
    """Whether it has no weights of its own."""
    opened: Future[int] | None = None
    """Its key among the samplers of the device; None: it has no weights there now."""
    waiting: set[Future[Any]] = field(default_factory=set)
    """Requests without an answer yet."""
    used: float = 0.0
    num_copies: int = 0
    """Copies of the sampler in other processes of its program, which count their requests from elsewhere."""


@dataclass(eq=False)
class Session:
    """What one program has here."""

    id: str
    owner: str
    """A hash of its API key."""
    user_metadata: Mapping[str, Any] | None
    display_name: str | None
    began: datetime
    seen: float
    models: dict[int, Model] = field(default_factory=dict)
    samplers: dict[int, SamplerOf] = field(default_factory=dict)
    ended: str | None = None
    """Why."""


class Tenants:
    """All sessions, with at most `most_models` training clients, and with `room` bytes for these and for the
    weights of samplers.

    `close` frees a sampler that is open. Sessions end after `timeout_s` without a sign of life.
    """

    def __init__(
        self,
        *,
        most_models: int | None,
        room: int,
        timeout_s: float,
        close: Callable[[SamplerOf], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.room = room
        self._most_models, self._timeout_s = most_models, timeout_s
        self._close, self._clock = close, clock
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """The sessions that have not ended, oldest first."""
        return (session for session in self._sessions.values() if session.ended is None)

    def begin(
        self, owner: str, user_metadata: Mapping[str, Any] | None = None, display_name: str | None = None
    ) -> Session:
        """A new session; its name is not to be guessed, and none that a server before this one gave."""
        name = secrets.token_hex(8)
        session = Session(name, owner, user_metadata, display_name, datetime.now(UTC), self._clock())
        self._sessions[name] = session
        for ended in [s for s in self._sessions.values() if s.ended is not None][:-MOST_ENDED]:
            del self._sessions[ended.id]
        return session

    def session(self, owner: str, name: str) -> Session:
        """That of `name`, which has given a sign of life; raises Unknown."""
        session = self.any_session(owner, name)
        if session.ended is not None:
            raise Unknown(f"session {name} has ended ({session.ended}); make a new ServiceClient")
        session.seen = self._clock()
        return session

    def any_session(self, owner: str, name: str) -> Session:
        """That of `name`, also if it has ended; raises Unknown."""
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise Unknown(
                f"this server has no session {name[:100]!r} of this key: it was started again, or the key "
                "is another; make a new ServiceClient"
            )
        return session

    def model(self, owner: str, model_id: str) -> Model:
        """The training client of that id; raises Unknown."""
        name, _, number = model_id.partition(":train:")
        model = self.session(owner, name).models.get(_number(number))
        if model is None:
            raise Unknown(f"this server has no training client {model_id[:100]!r}")
        return model

    def sampler(self, owner: str, sampler_id: str) -> SamplerOf:
        """The sampler of that id; raises Unknown."""
        name, _, number = sampler_id.partition(":sample:")
        sampler = self.session(owner, name).samplers.get(_number(number))
        if sampler is None:
            raise Unknown(
                f"this server has no sampler {sampler_id[:100]!r}; make one with save_weights_and_get_"
                "sampling_client or create_sampling_client"
            )
        return sampler

    def admit_model(self, num_bytes: int) -> None:
        """Makes room for one more training client; raises Refused if there is none."""
        number = len(self._models())
        if self._most_models is not None and number >= self._most_models:
            raise Refused(
                f"this server has at most {self._most_models} training clients (tinker.max_models), and has "
                f"{number}; end a program, or wait until one has ended"
            )
        self.make_room(num_bytes, "one more training client")

    def make_room(self, num_bytes: int, what: str) -> None:
        """Frees weights of samplers without requests, the longest unused first.

        Raises Refused, with nothing freed, if that were not enough.
        """
        idle = [sampler for sampler in self._open() if sampler.num_bytes and not sampler.waiting]
        idle.sort(key=lambda sampler: sampler.used)
        if self.used_bytes - sum(sampler.num_bytes for sampler in idle) + num_bytes > self.room:
            raise Refused(
                f"the device has no room for {what}: it needs {num_bytes:,} bytes, and of {self.room:,} "
                f"bytes for adapters {self.used_bytes:,} are used; take a smaller rank, or end a program"
            )
        while self.used_bytes + num_bytes > self.room:
            self.close_sampler(idle.pop(0))

    def close_sampler(self, sampler: SamplerOf) -> None:
        """Frees the weights of a sampler; one with a path reads them again when it is asked."""
        if sampler.opened is not None:
            self._close(sampler)
            sampler.opened = None

    @property
    def used_bytes(self) -> int:
        """What training clients and the weights of samplers take."""
        models = sum(model.num_bytes for model in self._models())
        return models + sum(sampler.num_bytes for sampler in self._open())

    def touch(self, sampler: SamplerOf) -> None:
        """The sampler is used now."""
        sampler.used = self._clock()

    def end(self, session: Session, why: str) -> list[Model]:
        """Ends a session; its training clients, which the caller ends, as what its samplers have."""
        models = list(session.models.values())
        session.models, session.samplers, session.ended = {}, {}, why
        return models

    def silent(self) -> list[Session]:
        """Sessions that have given no sign of life for too long."""
        return [session for session in self if self._clock() - session.seen > self._timeout_s]

    def _models(self) -> list[Model]:
        return [model for session in self for model in session.models.values() if model.is_alive]

    def _open(self) -> list[SamplerOf]:
        samplers = [sampler for session in self for sampler in session.samplers.values()]
        return [each for each in samplers if each.opened is not None and not has_failed(each.opened)]


def has_failed(future: Future[Any]) -> bool:
    """Whether it is done and has no result."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def _number(text: str) -> int:
    """The number of a training client or sampler, as this server writes it; -1 for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1


def num_parameters(base: Base, lora: LoraRequest) -> int:
    """Of the adapters of a training client; raises Refused if the base cannot have them."""
    try:
        arch = adapted(base.arch, lora.rank)
    except ValueError as error:
        raise Refused(str(error)) from error
    specs = jax.tree.leaves(trained_part(param_specs(arch), arch), is_leaf=is_spec)
    return sum(math.prod(spec.shape) for spec in specs)
