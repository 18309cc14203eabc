"""What a protocol is: how programs of one kind ask, and how they are told the answer.

Data flow: the body of a request -> `Protocol.request` -> a checked request of `requests.py` -> sampled ->
`Protocol.answer` -> JSON, whole or as the events of a stream. Rendering, sampling and recording know no
protocol.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from quatrain.serve.choice import Choice
from quatrain.serve.requests import AnyRequest, BadRequest, ChatRequest
from quatrain.serve.sessions import Session
from quatrain.serve.text import Vocabulary
from quatrain.types.sampler import Progress

Asked = TypeVar("Asked", bound=AnyRequest)


class AnswerForm(ABC):
    """The JSON of one answer, whose `choices` get the progress of the sequences.

    Either `whole` is called, with all progress added; or, in a stream, `first`, `parts` with each progress,
    and `last`, or `failed` in place of what is left. Every event is a dictionary, which `Protocol.event`
    writes.
    """

    choices: Sequence[Choice]

    @abstractmethod
    def whole(self, version: int) -> dict[str, Any]:
        """The answer to a request without a stream; `version` is that of the weights."""

    def first(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""
        return iter(())

    @abstractmethod
    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """The events of the progress of sequence `number`, which it adds to its choice."""

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """The events after the last token."""
        return iter(())

    def ended(self, session: Session, messages: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Notes in a session that a turn has ended, whose answer is the last of its dialogue's `messages`."""

    @abstractmethod
    def failed(self, error: BadRequest) -> Iterator[dict[str, Any]]:
        """The events of a stream that cannot go on."""


class Protocol(ABC, Generic[Asked]):
    """How programs of one kind ask for an answer, and how they are told it."""

    ending = ""
    """What ends a stream that did not fail."""
    splits_thoughts = False
    """Whether thoughts up to `</think>` have a place of their own in an answer, and are no text."""
    names_events = False
    """Whether the type of an event has a line of its own in a stream."""
    idle: ClassVar[Mapping[str, Any] | None] = None
    """The event by which a stream shows that it goes on, after PING_S without another; None: nothing."""

    @abstractmethod
    def request(self, body: bytes, changed: Counter[str] | None, session: Session | None) -> Asked:
        """The checked request; raises BadRequest, which names the field, if it is not one.

        In a session, fields that it overrides are left out and counted in `changed`; `session` is the one of
        which the answer is a turn.
        """

    @abstractmethod
    def answer(
        self,
        asked: Asked,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """The form of the answer to a request with these prompts, `asked.n` choices each."""

    @abstractmethod
    def error(self, error: BadRequest) -> dict[str, Any]:
        """The body of an error."""

    def event(self, value: Mapping[str, Any]) -> str:
        """The text of an event in a stream."""
        named = f"event: {value['type']}\n" if self.names_events else ""
        return f"{named}data: {json.dumps(dict(value), ensure_ascii=False, allow_nan=False)}\n\n"


class ChatProtocol(Protocol[ChatRequest]):
    """A protocol of chats, which can say how many tokens the prompt of a request has."""

    @abstractmethod
    def counted(self, body: bytes, session: Session | None) -> ChatRequest:
        """The checked request whose tokens are asked for; it may lack what only an answer needs."""

    @abstractmethod
    def count(self, number: int) -> dict[str, Any]:
        """The answer: so many tokens."""
