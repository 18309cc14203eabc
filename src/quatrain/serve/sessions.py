"""Sessions: what the server keeps of an agent's episode, and what the episode's requests may do.

Data flow: `Sessions.open` -> an id and a key, with which an agent asks -> each request `begin`s turns of the
session's tree, with the sampling of the run -> `end` -> `Session.tree`, at the end of the episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from starlette.responses import Response

from quatrain.data.messages import as_messages
from quatrain.serve.requests import NO_ROOM, AnyRequest, BadRequest, ChatRequest, CompletionRequest
from quatrain.serve.turn_tree import Found, Messages, Turn, TurnTree
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Tokens
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling

MOST_ROLES = 64
"""Roles that an episode may have."""
MOST_AT_ONCE = 64
"""Requests of a session that may be in progress."""
PAUSE_S = 0.02
"""Seconds between two looks whether the requests of a session have ended."""


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
    waiting: int = 0
    """Clients that wait for it: the first, and those that ask again before its connection is seen to be
    broken."""
    is_given: bool = False
    stop: Callable[[], None] = lambda: None
    """Ends the sampling of a stream that has not begun; once it has, who reads it does."""

    def update(self) -> None:
        """Notes whether the agent may have read the answer, or will."""
        for turn in self.turns:
            turn.is_known = self.is_given or self.waiting > 0

    def release(self) -> None:
        """Its turns get no more tokens."""
        for turn in self.turns:
            turn.reserved = 0


@dataclass(eq=False)
class Session:
    """What one role plays in an episode, which is a sample of `prompt`, number `sample` of
    `rules.sampling.n`. Most episodes have one role, without a name."""

    rules: SessionRules
    prompt: Prompt
    sample: int
    role: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Authorises the requests of this episode alone, until it ends."""
    tree: TurnTree = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    """Calls that were found, requests that were repeated, fields that the session overrode."""
    refused: Literal["turns", "length"] | None = None
    """The limit that the last request met; None once another was taken."""
    replies: dict[bytes, list[Reply]] = field(default_factory=dict)
    """Answers that are sampled or were given, by digests of their requests."""
    named_answers: dict[str, Messages] = field(default_factory=dict)
    """By the ids of answers that requests may go on with: the messages up to and with the answer."""
    idempotency_keys: set[str] = field(default_factory=set)
    """Of the requests that came."""
    is_open: bool = True
    in_progress: int = 0
    """Requests that are being answered, also those whose client has left."""
    untrained: Counter[bytes] = field(default_factory=Counter)
    """Requests outside of the tree so far, by digests."""
    roles: dict[str, Session] = field(default_factory=dict)
    """The sessions of the episode's other roles, which have asked."""

    def __post_init__(self) -> None:
        messages = as_messages(self.prompt.text)
        tokens = Tokens(self.prompt.input_ids.tolist(), self.prompt.pictures)
        self.tree = TurnTree(self.sequence_id, messages, tokens)

    @property
    def sequence_id(self) -> int:
        """The id that the randomness of the sample derives from; each role has its own."""
        of_sample = (self.prompt.group_id * self.rules.sampling.n + self.sample) % 2**32
        if not self.role:
            return of_sample
        own = hashlib.blake2b(f"{of_sample}/{self.role}".encode(), digest_size=4).digest()
        return int.from_bytes(own)

    def every_role(self) -> list[Session]:
        """This session, and those of the episode's other roles."""
        return [self, *self.roles.values()]

    def of_role(self, role: str) -> Session:
        """The session of a role of this episode, with the same id and key; opened when it is first named.

        "" is this one.

        Raises BadRequest for a name of other signs, and for too many roles.
        """
        if role in ("", self.role):
            return self
        if (known := self.roles.get(role)) is not None:
            return known
        if not is_role(role):
            raise BadRequest(
                f"a role has a name of 1 to 64 letters, digits and `.-_`; got {role[:100]!r}; rename it"
            )
        if len(self.roles) >= MOST_ROLES:
            raise BadRequest(f"an episode has at most {MOST_ROLES} roles; use those that it has")
        opened = Session(self.rules, self.prompt, self.sample, role, self.id, self.key)
        opened.is_open = self.is_open
        return self.roles.setdefault(role, opened)

    @contextmanager
    def work(self) -> Iterator[None]:
        """The time in which a request is answered; the session ends after it.

        Raises BadRequest if it has ended, and for too many requests at once.
        """
        if not self.is_open:
            raise BadRequest("the episode of this key has ended", status=401)
        if self.in_progress >= MOST_AT_ONCE:
            raise BadRequest(
                f"an episode has at most {MOST_AT_ONCE} requests at a time; wait for some answers", status=429
            )
        self.in_progress += 1
        try:
            yield
        finally:
            self.in_progress -= 1

    def outside(self, asked: AnyRequest, body: bytes) -> AnyRequest:
        """A request whose answer is not trained, with the sampling of the session where it has none.

        Its seed derives from the session, the request and the number of equal ones before it.
        """
        sampling, digest = self.rules.sampling, hashlib.blake2b(body, digest_size=16).digest()
        place = f"{self.rules.seed}/{self.rules.step}/{self.sequence_id}/{self.untrained[digest]}/"
        self.untrained[digest] += 1
        own = hashlib.blake2b(place.encode() + digest, digest_size=4).digest()
        filters = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {"seed": int.from_bytes(own), **filters}
        if isinstance(asked, ChatRequest) and asked.wanted_tokens is None:
            given["max_tokens"] = sampling.max_new_tokens
        return asked.model_copy(update={k: v for k, v in given.items() if getattr(asked, k) is None})

    def check(self, asked: AnyRequest) -> None:
        """Raises BadRequest for what a request must not ask for in a session."""
        if asked.quatrain is not None:
            raise BadRequest(
                "`quatrain` is the place of a sequence, as a session has; leave it out", "quatrain"
            )
        has_format = isinstance(asked, ChatRequest) and asked.response_format is not None
        if has_format and not self.rules.sampling.replays:
            raise BadRequest(
                'response_format must be {"type": "text"} in an answer that is trained: this run records no '
                "words that tokens are drawn from (rollout.replay_mask false); ask the untrained model "
                "(docs/agents.md), or leave it out",
                "response_format",
            )
        if not isinstance(asked, CompletionRequest):
            return
        if asked.echo or asked.num_scored is not None or len(asked.prompts) != 1 or not asked.wanted_tokens:
            raise BadRequest(
                "in a session, a completion has one prompt, at least one token, and neither echo, logprobs "
                "above 0 nor prompt_logprobs; leave them out",
                "prompt",
            )

    def begin(self, found: Found, asked: AnyRequest) -> tuple[list[Turn], list[PerRequestSampling]]:
        """The turns of a request, which asks for `asked.n` answers, and how each is sampled.

        Raises BadRequest where the episode has no room for them, in the form that agents take as the sign to
        shorten their history.
        """
        rules, turns, count = self.rules, self.tree.turns, asked.n
        most, used = rules.sampling.max_new_tokens, sum(len(turn.tokens) for turn in turns)
        reserved = sum(turn.reserved for turn in turns)
        room = min((most - used - reserved) // count, rules.max_tokens - len(found.ids))
        # Not those that failed, or whose stream broke: who asks again for them has no answer yet.
        answers = sum(bool(turn.tokens or turn.reserved) for turn in turns)
        if answers + count > rules.max_turns:
            self.refused = "turns"
            self.counts["refused_requests"] += 1
            text = f"an episode has at most {rules.max_turns} answers (rollout.max_turns), which are used up"
            raise BadRequest(f"maximum context length: {text}", code=NO_ROOM)
        if room < 1:
            self.refused = "length"
            self.counts["refused_requests"] += 1
            longest = rules.max_tokens - 1
            held = "; give requests at the same time `max_tokens`" if reserved else ""
            raise BadRequest(
                f"maximum context length: a sequence has at most {rules.max_tokens} tokens, and an episode "
                f"at most {most} that are sampled (rollout.max_new_tokens); the prompt has "
                f"{len(found.ids)}, {used} were sampled, and {reserved} are held for answers in progress; "
                f"shorten the messages, or end the episode{held}",
                asked.prompt_field,
                code=NO_ROOM,
                too_long=(len(found.ids), longest) if len(found.ids) > longest else None,
            )
        wanted = asked.wanted_tokens
        sampling = replace(
            rules.sampling,
            n=1,
            max_new_tokens=room if wanted is None else min(room, wanted),
            stop=(*rules.sampling.stop, *asked.stop_strings),
        )
        own = partial(PerRequestSampling, sampling, rules.seed, rules.step, session=self.id)
        self.refused = None
        begun = [self.tree.begin(found) for _ in range(count)]
        for turn in begun:
            turn.reserved = sampling.max_new_tokens
        return begun, [own(sequence_id=turn.sequence_id, offset=turn.offset) for turn in begun]


def is_role(name: str) -> bool:
    """Whether a role of an agent may have this name."""
    return re.fullmatch(r"[\w.-]{1,64}", name) is not None


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

    async def close(self, session: Session) -> None:
        """Its requests are refused from now on; returns when those in progress have ended."""
        self._by_id.pop(session.id, None)
        self._by_key.pop(_digest(session.key), None)
        for each in session.every_role():
            each.is_open = False
        while any(each.in_progress for each in session.every_role()):
            await asyncio.sleep(PAUSE_S)

    def named(self, identity: str) -> Session | None:
        """The session with this id."""
        return self._by_id.get(identity)

    def of_key(self, key: str) -> Session | None:
        """The session with this key."""
        return self._by_key.get(_digest(key))


def _digest(key: str) -> bytes:
    """Looked up in place of a key, so that the time of a lookup tells nothing of it."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
