"""From a request's prompt to its answer: queued, sampled, recorded in its session, said whole or streamed.

Data flow: a checked request and its prompts -> `Answering.answer` -> the sampler -> `Progress` -> the
`AnswerForm` of the protocol -> a response of starlette. The event loop only passes these on: text is decoded
and written as JSON in threads.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from quatrain.data.messages import checked_messages
from quatrain.data.tool_calls import CallStream, tool_calls
from quatrain.serve.choice import Choice
from quatrain.serve.http import LOOK_S
from quatrain.serve.prompts import key_of
from quatrain.serve.protocols.protocol import AnswerForm, Protocol
from quatrain.serve.requests import AnyRequest, BadRequest, ChatRequest, GenerateRequest
from quatrain.serve.sessions import Reply, Session
from quatrain.serve.text import TextStream, ThoughtStream, TokenTexts, Vocabulary
from quatrain.serve.turn_tree import Found
from quatrain.types.answer_text import CONTEXT, AnswerTokens, Channels
from quatrain.types.batches import Prompt
from quatrain.types.call_forms import THOUGHT, schemas_of
from quatrain.types.pictures import Pictures, Tokens
from quatrain.types.sampler import PerRequestSampling, Progress, Sampler, ServiceFailed
from quatrain.types.sampler import Request as Turns

MOST_OTHERS = 512
"""Requests after which nobody is expected to go on with a dialogue that a client has named."""
PING_S = 15.0
"""Seconds after which a stream shows that it goes on, in a protocol that has an event for it."""
NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Events = AsyncIterator[tuple[int, Progress] | None]


@dataclass(frozen=True)
class Queued:
    """The keys of a request's sequences, and the queue of their progress."""

    keys: list[int]
    queue: asyncio.Queue[tuple[int, Progress]]


@dataclass(frozen=True)
class Recorded:
    """The turns of a session that answer a request, how each is sampled, and what a chat said and had."""

    session: Session
    reply: Reply
    owners: list[PerRequestSampling]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    """As `key_of` has them."""

    @classmethod
    def of(
        cls, request: Request, asked: AnyRequest, found: Found, messages: Sequence[Mapping[str, Any]] = ()
    ) -> Recorded:
        """Begins the turns of a request; raises BadRequest where the episode has no room for them."""
        session, reply = request.state.session, request.state.reply
        reply.turns, owners = session.begin(found, asked)
        reply.update()
        return cls(session, reply, owners, messages, key_of(asked))

    def end(self, form: AnswerForm) -> None:
        """Records the choices that have ended; the next request may continue them."""
        for turn, choice in zip(self.reply.turns, form.choices, strict=True):
            if turn.tokens or choice.finish_reason is None:
                continue
            turn.answer(choice.sampled)
            turn.finish_reason, turn.cached = choice.finish_reason, choice.cached
            self.session.counts["tool_calls"] += len(choice.called)
            if self.messages:
                if len(self.tools) > 1:
                    left = tool_calls(choice.content, schemas_of(self.tools[:-1]))
                    self.session.counts["malformed_calls"] += sum(call.problem is not None for call in left)
                answer = checked_messages([choice.message])
                self.session.tree.end(turn, [*self.messages, *answer], self.tools)
                form.ended(self.session, turn.messages)


class Answering:
    """Answers requests with what `sampler` samples; answers name the model `model`.

    Positions of prompt and completion together are at most `max_positions`, but in a session, whose rules
    count.
    """

    def __init__(self, sampler: Sampler, tokenizer: Any, model: str, max_positions: int):
        self._service, self._tokenizer, self._model = sampler, tokenizer, model
        self._max_positions = max_positions
        self._vocabulary = Vocabulary(tokenizer)
        self._answers = AnswerTokens(tokenizer)
        self._of_chat = Vocabulary(tokenizer, self._answers.markers)
        self._num_asked, self._named_at = 0, dict[str, int]()

    async def answer(
        self,
        protocol: Protocol[Any],
        request: Request,
        asked: AnyRequest,
        prompts: list[Tokens],
        begun: str = "",
        grammar: str | None = None,
        recorded: Recorded | None = None,
    ) -> Response:
        """The answer to a request with these prompts; that of a chat begins with the text `begun`, and what
        follows it is of the `grammar`.

        In a session, `recorded` are the turns that it is recorded in.
        """
        if not prompts:
            raise BadRequest("a request has at least one prompt; got an empty list", "prompt")
        if asked.num_scored is not None and not self._service.can_score:
            raise BadRequest(
                "the workers that sample here score no given tokens; leave out echo, logprobs above 0, and "
                "prompt_logprobs",
                "logprobs",
            )
        if recorded is None:
            owners = asked.sequences([len(prompt.ids) for prompt in prompts], self._max_positions)
            name = self._client_session(request, asked)
            owners = [replace(own, session=name, grammar=grammar) for own in owners]
        else:
            owners = [replace(own, grammar=grammar) for own in recorded.owners]
        repeated = [prompt for prompt in prompts for _ in range(asked.n)]
        queued = await self._queued(repeated[: len(owners)], owners)
        # What follows a grammar has no thoughts, also where the prompt begins some.
        splits = protocol.splits_thoughts and grammar is None
        choices = [self._choice(asked, prompt.ids, begun, splits) for prompt in repeated]
        for number, choice in enumerate(choices):
            signed = None if recorded is None else recorded.reply.turns[number].signature
            choice.signature = signed or f"q1.{secrets.token_hex(16)}"
        ids = [prompt.ids for prompt in prompts]
        form = protocol.answer(asked, self._model, choices, ids, self._vocabulary)
        session = getattr(request.state, "session", None)
        if asked.stream:
            if recorded is not None:
                recorded.reply.stop = partial(self._service.drop, queued.keys)
            parts = self._stream(protocol, form, queued, recorded, session)
            return StreamingResponse(parts, media_type="text/event-stream", headers=NO_CACHE)
        ends = frozenset(asked.stop_token_ids if isinstance(asked, GenerateRequest) else ())

        async def gone() -> bool:
            if session is not None and not session.is_open:
                return True
            return recorded is None and await request.is_disconnected()

        async with self._events(queued, gone, ends) as events:
            async for event in events:
                if event is not None:
                    number, progress = event
                    choices[number].add(progress)
        if not owners:
            for choice in choices:
                choice.add(Progress(finish_reason="length"))
        if asked.num_scored is not None:
            await self._score(request, choices, asked, [prompt.pictures for prompt in repeated])
        response = await asyncio.to_thread(lambda: JSONResponse(form.whole(self._service.version)))
        if recorded is not None:
            recorded.end(form)
        return response

    def _client_session(self, request: Request, asked: AnyRequest) -> str:
        """Whose contexts a request goes on with: those of its session, or of what the client names; "": none.

        What a client has named ends after MOST_OTHERS other requests: no client says when it has ended.
        """
        if (session := getattr(request.state, "session", None)) is not None:
            return session.id
        name = request.headers.get("x-session-id") or asked.prompt_cache_key
        self._num_asked += 1
        if name:
            self._named_at.pop(name, None)
            self._named_at[name] = self._num_asked
        oldest = next(iter(self._named_at), None)
        if oldest is not None and self._named_at[oldest] < self._num_asked - MOST_OTHERS:
            del self._named_at[oldest]
            self._service.forget(oldest)
        return name

    def _choice(self, asked: AnyRequest, prompt: Sequence[int], begun: str, splits_thoughts: bool) -> Choice:
        """What will come of a completion; markers of calls and thoughts are read in a chat alone."""
        if not isinstance(asked, ChatRequest):
            return Choice(
                TextStream(self._tokenizer, asked.stop_strings), TokenTexts(self._vocabulary), prompt
            )
        # Of Harmony, the prompt's last message has what is begun.
        begun = "" if self._answers.is_harmony else begun
        return Choice(
            TextStream(self._tokenizer, asked.stop_strings, self._answers.markers),
            TokenTexts(self._of_chat),
            prompt,
            Channels(self._answers, prompt),
            ThoughtStream(begun=self._begins_thoughts(prompt)) if splits_thoughts else None,
            CallStream(begun, schemas_of(asked.offered_tools)) if asked.offered_tools else None,
        )

    def _begins_thoughts(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with `<think>`."""
        return "".join(self._answers.pieces(prompt[-CONTEXT:])).rstrip().endswith(THOUGHT)

    async def _score(
        self,
        request: Request,
        choices: Sequence[Choice],
        asked: AnyRequest,
        pictures: Sequence[Pictures | None],
    ) -> None:
        """Gives each choice the scores of its tokens; without alternatives, those of its prompt suffice."""
        ids = [
            [*choice.prompt_ids, *(choice.sampled.tokens if asked.num_likeliest else ())]
            for choice in choices
        ]
        scoring = asyncio.wrap_future(self._service.score(ids, asked.num_scored or 0, pictures))
        try:
            while not (await asyncio.wait({scoring}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            for choice, scores in zip(choices, scoring.result(), strict=True):
                choice.scores = scores
        finally:
            scoring.cancel()

    async def _stream(
        self,
        protocol: Protocol[Any],
        form: AnswerForm,
        queued: Queued,
        recorded: Recorded | None,
        session: Session | None,
    ) -> AsyncIterator[str]:
        """The events of a stream; an error ends it in the protocol's form."""

        def written(events: Any) -> str:
            return "".join(map(protocol.event, events))

        async def has_ended() -> bool:
            return session is not None and not session.is_open

        try:
            async with self._events(queued, has_ended) as events:
                with nullcontext() if session is None else session.work():
                    for part in form.first():
                        yield protocol.event(part)
                    async for event in events:
                        if event is None:
                            if protocol.idle is not None:
                                yield protocol.event(protocol.idle)
                            continue
                        number, progress = event
                        text = await asyncio.to_thread(
                            lambda n, p: written(form.parts(n, p)), number, progress
                        )
                        if recorded is not None and progress.finish_reason is not None:
                            recorded.end(form)
                        yield text
            for part in form.last(self._service.version):
                yield protocol.event(part)
            if protocol.ending:
                yield protocol.ending
        except (BadRequest, ServiceFailed) as error:
            yield written(form.failed(BadRequest(str(error), status=503)))
        except ClientDisconnect:  # the session has ended
            return
        finally:
            if recorded is not None:
                recorded.reply.release()

    async def _queued(self, prompts: Sequence[Tokens], owners: Sequence[Any]) -> Queued:
        """Queues the sequences of a request; raises BadRequest if there is no room for one of them."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Progress]]()

        def listen(number: int, progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(queue.put_nowait, (number, progress))

        arrays = [Prompt(0, np.array(ids, np.int32), "", pictures=pictures) for ids, pictures in prompts]
        turns = list(map(Turns.alone, arrays, owners))
        submitted = self._service.start(turns, listen)
        try:
            return Queued(await asyncio.shield(asyncio.wrap_future(submitted)), queue)
        except ValueError as error:
            raise BadRequest(str(error), "max_tokens") from error
        except asyncio.CancelledError:
            submitted.add_done_callback(
                lambda done: None if done.exception() else self._service.drop(done.result())
            )
            raise

    @asynccontextmanager
    async def _events(
        self,
        queued: Queued,
        gone: Callable[[], Awaitable[bool]] | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> AsyncIterator[Events]:
        """The progress of queued sequences until all have ended; those left at the end are cancelled.

        A sequence also ends with the first token of `ends`. Every LOOK_S, `gone` is asked whether the client
        has left; then ClientDisconnect is raised. None comes each time after PING_S without progress.
        """

        async def events() -> Events:
            left, looked = set(range(len(queued.keys))), time.monotonic()
            heard = looked
            while left:
                if gone is not None and time.monotonic() - looked >= LOOK_S:
                    if await gone():
                        raise ClientDisconnect
                    looked = time.monotonic()
                try:
                    number, progress = await asyncio.wait_for(queued.queue.get(), LOOK_S)
                except TimeoutError:
                    if time.monotonic() - heard >= PING_S:
                        heard = time.monotonic()
                        yield None
                    continue
                if progress.error is not None:
                    raise ServiceFailed(progress.error)
                if number not in left:  # sampled after one of `ends`
                    continue
                if not ends.isdisjoint(progress.piece.tokens):
                    progress = _until(progress, ends)
                    self._service.drop([queued.keys[number]])
                if progress.finish_reason is not None:
                    left.remove(number)
                heard = time.monotonic()
                yield number, progress

        try:
            yield events()
        finally:
            self._service.drop(queued.keys)


def _until(progress: Progress, ends: frozenset[int]) -> Progress:
    """Progress up to and with the first token of `ends`, which is one of its tokens."""
    size = 1 + next(at for at, token in enumerate(progress.piece.tokens) if token in ends)
    progress.piece.cut(size)
    return replace(progress, finish_reason="stop")
