"""Sessions: what the server keeps of an agent's episode, and what the episode's requests may do.

Data flow: `Sessions.open` -> an id and a key, with which an agent asks -> each request `begin`s turns of the
session's tree, with the sampling of the run -> `end` -> `Session.tree`, at the end of the episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from starlette.responses import Response

from quatrain.engine.groups import PerRequestSampling
from quatrain.serve.requests import AnyRequest, BadRequest, CompletionRequest
from quatrain.serve.turn_tree import Found, Turn, TurnTree
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling


@dataclass(frozen=True)
class SessionRules:
    """What the episodes of a batch have in common.

    The policy answers at most `max_turns` times and samples at most `sampling.max_new_tokens` tokens in all;
    a sequence has at most `max_tokens` tokens. `seed` and `step` are those of the run and its training step.
    """

    sampling: Sampling
    seed: int
    step: int
    max_turns: int
    max_tokens: int


@dataclass(eq=False)
class Reply:
    """The answer to a request, which goes on being sampled if the client leaves: it may ask again."""

    task: asyncio.Task[Response] | None = None
    turns: Sequence[Turn] = ()
    has_left: bool = False

    def begin(self, turns: Sequence[Turn]) -> None:
        """The turns that answer the request."""
        self.turns = turns
        self.read_by_client(not self.has_left)

    def read_by_client(self, read: bool) -> None:
        """Whether the client waits for the answer, or has left before it came."""
        self.has_left = not read
        for turn in self.turns:
            turn.is_known = read


@dataclass(eq=False)
class Session:
    """An episode: a sample of `prompt`, number `sample` of `rules.sampling.n`."""

    rules: SessionRules
    prompt: Prompt
    sample: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Authorises the requests of this episode alone, until it ends."""
    tree: TurnTree = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    """Calls that were found, requests that were repeated, fields that the session overrode."""
    refused: Literal["turns", "length"] | None = None
    """The limit that a request met."""
    replies: dict[bytes, Reply] = field(default_factory=dict)
    """Whole answers that are sampled or were given, by digests of their requests; the last of equal ones."""
    idempotency_keys: set[str] = field(default_factory=set)
    """Of the requests that came."""

    def __post_init__(self) -> None:
        sampling = self.rules.sampling
        sequence_id = (self.prompt.group_id * sampling.n + self.sample) % 2**32
        self.tree = TurnTree(sequence_id, self.prompt.text, self.prompt.input_ids.tolist())

    def check(self, asked: AnyRequest) -> None:
        """Raises BadRequest for what a request must not ask for in a session."""
        if asked.quatrain is not None:
            raise BadRequest(
                "`quatrain` is the place of a sequence, as a session has; leave it out", "quatrain"
            )
        if not isinstance(asked, CompletionRequest):
            return
        if asked.echo or asked.num_likeliest or len(asked.prompts) != 1 or not asked.wanted_tokens:
            raise BadRequest(
                "in a session, a completion has one prompt, at least one token, and neither echo nor "
                "logprobs above 0; leave them out",
                "prompt",
            )

    def begin(self, found: Found, asked: AnyRequest) -> tuple[list[Turn], list[PerRequestSampling]]:
        """The turns of a request, which asks for `asked.n` answers, and how each is sampled.

        Raises BadRequest where the episode has no room for them, in the form that agents take as the sign to
        shorten their history.
        """
        rules, turns, count = self.rules, self.tree.turns, asked.n
        most, used = rules.sampling.max_new_tokens, sum(len(turn.tokens) for turn in turns)
        room = min(most - used, rules.max_tokens - len(found.ids))
        if len(turns) + count > rules.max_turns:
            self.refused = "turns"
            text = f"an episode has at most {rules.max_turns} answers (rollout.max_turns), which are used up"
            raise BadRequest(f"maximum context length: {text}", code=_NO_ROOM)
        if room < 1:
            self.refused = "length"
            raise BadRequest(
                f"maximum context length: a sequence has at most {rules.max_tokens} tokens, and an episode "
                f"at most {most} that are sampled (rollout.max_new_tokens); the prompt has "
                f"{len(found.ids)}, and {used} were sampled; shorten the messages, or end the episode",
                asked.prompt_field,
                code=_NO_ROOM,
            )
        wanted = asked.wanted_tokens
        sampling = replace(
            rules.sampling,
            n=1,
            max_new_tokens=room if wanted is None else min(room, wanted),
            stop=(*rules.sampling.stop, *asked.stop_strings),
        )
        own = partial(PerRequestSampling, sampling, rules.seed, rules.step)
        begun = [self.tree.begin(found) for _ in range(count)]
        return begun, [own(turn.sequence_id, turn.offset) for turn in begun]


_NO_ROOM = "context_length_exceeded"


class Sessions:
    """The sessions that are open, by their ids and keys."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}

    def open(self, rules: SessionRules, prompt: Prompt, sample: int) -> Session:
        """A new session."""
        session = Session(rules, prompt, sample)
        self._by_id[session.id] = self._by_key[_digest(session.key)] = session
        return session

    def close(self, session: Session) -> None:
        """Its requests are refused from now on, and those in progress end."""
        self._by_id.pop(session.id, None)
        self._by_key.pop(_digest(session.key), None)
        for reply in session.replies.values():
            if reply.task is not None:
                reply.task.cancel()

    def named(self, identity: str) -> Session | None:
        """The session with this id."""
        return self._by_id.get(identity)

    def of_key(self, key: str) -> Session | None:
        """The session with this key."""
        return self._by_key.get(_digest(key))


def _digest(key: str) -> bytes:
    """Looked up in place of a key, so that the time of a lookup tells nothing of it."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
