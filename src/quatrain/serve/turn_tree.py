"""An agent's requests as a tree of turns: which answer a request continues, and the rows that training gets.

Data flow: the messages or ids of a request -> `TurnTree.find` -> the ids of its prompt and the turn that it
continues -> `begin` -> sampled -> `TurnTree.end`; at the end of the episode `rows`. A request that continues
an answer has the ids of that answer as they were sampled, with what the chat template writes after it. All
others are rendered anew and begin a root: what the policy said in them is context there, and not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from quatrain.data.messages import call_of, is_picture
from quatrain.types.pictures import Pictures, Tokens, joined
from quatrain.types.piece import Piece

Messages = Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class Turn:
    """One answer of the policy.

    `prompt_ids` is the whole context, which begins with the ids of `parent`, and `pictures` are those of it.
    The randomness of its tokens derives from `sequence_id` and their positions from `offset` on. `twin` is
    its number among the turns with the same context. `messages` are those of the dialogue up to and with the
    answer.
    """

    parent: Turn | None
    prompt_ids: list[int]
    twin: int
    sequence_id: int
    offset: int
    messages: Messages = ()
    sampled: Piece = field(default_factory=Piece)
    """The answer; its columns begin with token `first_of_columns` of the context."""
    finish_reason: str = "length"
    is_known: bool = True
    """Whether the agent may have read the answer."""
    reason: str | None = None
    """Of a root that is not the first: why it continues no answer."""
    reserved: int = 0
    """Tokens that it may still have, until its answer is complete."""
    cached: int = 0
    """Tokens of its context that were not computed, as a kept context had them."""
    pictures: Pictures | None = None
    """Which picture each of `prompt_ids` stands for; None: all are text."""
    signature: str = ""
    """Names it to clients that give signatures back: derives from the sample, the context and `twin`."""

    @property
    def tokens(self) -> list[int]:
        """The ids of the answer."""
        return self.sampled.tokens

    @property
    def ids(self) -> list[int]:
        """The ids of the context and the answer."""
        return self.prompt_ids + self.tokens

    @property
    def given(self) -> list[int]:
        """The ids between the parent's answer and this one; of a root, all of its context."""
        return self.prompt_ids[0 if self.parent is None else len(self.parent.ids) :]

    @property
    def first_of_columns(self) -> int:
        """The number of the first token of which its parent has no rows: the parent's last."""
        return 0 if self.parent is None else len(self.parent.ids) - 1

    def answer(self, sampled: Piece) -> None:
        """Takes what was sampled, whose columns have rows of all of the context: of these its own alone."""
        first, end = self.first_of_columns, len(self.prompt_ids) + len(sampled.tokens)
        columns = {name: sampled.rows(name, first, end) for name in sampled.columns}
        self.sampled, self.reserved = replace(sampled, columns=columns), 0

    @property
    def recomputed(self) -> int:
        """Tokens of its context that were computed for its parent, and for it again."""
        known = 0 if self.parent is None else len(self.parent.ids) - 1
        return max(known - self.cached, 0)

    @property
    def path(self) -> list[Turn]:
        """The turns from a root to this one."""
        path, turn = [self], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


class Row(NamedTuple):
    """A path from a root to a leaf, and those of its turns that are trained in this row."""

    path: list[Turn]
    owned: frozenset[Turn]


class Found(NamedTuple):
    """The ids of a request's prompt, and the turn whose answer they continue; None: they begin a root."""

    ids: list[int]
    parent: Turn | None = None
    is_prompt: bool = False
    """Whether the dialogue is the prompt of the data."""
    reason: str | None = None
    """Why a further root continues no answer."""
    pictures: Pictures | None = None
    """Which picture each of the ids stands for."""


class TurnTree:
    """The turns of an episode: of the sample with `sequence_id`, for the data's `prompt`.

    A root that is the prompt has the random numbers of the sample. `tokens` are the prompt's.
    """

    def __init__(self, sequence_id: int, prompt: Messages, tokens: Tokens):
        self.turns: list[Turn] = []
        """In the order in which they began."""
        self._sequence_id, self._tokens = sequence_id, tokens
        self._prompt = _forms(prompt)
        self._answers: dict[bytes, list[Turn]] = {}
        self._twins: dict[bytes, int] = {}

    def find(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]],
        render: Callable[[], Tokens],
        suffix: Callable[[Messages, Sequence[int], Messages], Tokens],
        hints: Collection[str] = (),
    ) -> Found:
        """What a request with these messages continues: the longest part of them that ends with an answer.

        The answer is one of this tree, with the same tools; of several with equal messages, the one whose
        signature is in `hints`, else that with the calls' ids, else the last. `suffix(opening, sampled, new
        messages)` are the tokens between an answer and the next, `render` those of all messages. Messages
        are as `data.messages.checked_messages` has them.
        """
        forms = _forms(messages)
        found: tuple[int, Turn] | None = None
        for place, key in enumerate(_keys(tools, forms)):
            if key in self._answers:
                found = place, _chosen(self._answers[key], messages[place], hints)
        if found is None:
            whole = render()
            return Found(whole.ids, None, forms == self._prompt, self._why_anew(forms), whole.pictures)
        place, turn = found
        opening = messages[: len(turn.path[0].messages) - 1]  # up to the first sampled answer
        new = suffix(opening, turn.tokens, messages[place + 1 :])
        before = (turn.pictures, len(turn.prompt_ids)), (None, len(turn.tokens))
        pictures = joined(*before, (new.pictures, len(new.ids)))
        return Found(turn.ids + new.ids, turn, pictures=pictures)

    def find_ids(self, ids: list[int]) -> Found:
        """What a request with these ids continues: the longest turn with which they begin.

        Pictures are those of what it continues, or of the prompt that it begins with: ids alone stand for
        none.
        """
        begun = [turn for turn in self.turns if turn.tokens and turn.ids == ids[: len(turn.ids)]]
        longest = max(begun, key=lambda turn: len(turn.ids), default=None)
        if longest is not None:
            known = len(longest.prompt_ids)
            pictures = joined((longest.pictures, known), (None, len(ids) - known))
            return Found(ids, longest, pictures=pictures)
        known, why, pictures = len(self._tokens.ids), "other ids" if self.turns else None, None
        if ids[:known] == self._tokens.ids:  # the prompt, or words of the agent's own behind it
            pictures = joined((self._tokens.pictures, known), (None, len(ids) - known))
        return Found(ids, None, ids == self._tokens.ids, why, pictures)

    def begin(self, found: Found) -> Turn:
        """A turn whose answer is to be sampled.

        It goes on with the random numbers of its parent, and a root that is the data's prompt with those of
        the sample. Another root, and a further answer to the same context, have numbers of their own, which
        derive from the context and depend on no time.
        """
        ids, parent = found.ids, found.parent
        context = _context(ids, found.pictures)
        twin = self._twins.get(context, 0)
        self._twins[context] = twin + 1
        sequence_id, offset = self._sequence_id, 0
        own = _digest(self._sequence_id.to_bytes(8), context, twin.to_bytes(8))
        if twin or not (found.is_prompt or parent):
            sequence_id = int.from_bytes(own[:4])
        elif parent is not None:
            sequence_id, offset = parent.sequence_id, parent.offset + len(ids) - len(parent.prompt_ids)
        if parent is not None:
            parent.is_known = True
        turn = Turn(parent, ids, twin, sequence_id, offset, reason=found.reason, pictures=found.pictures)
        turn.signature = f"q1.{own.hex()}"
        self.turns.append(turn)
        return turn

    def end(self, turn: Turn, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> None:
        """Its answer, the last of `messages`, may be continued from now on."""
        turn.messages = messages
        *_, key = _keys(tools, _forms(messages))
        self._answers.setdefault(key, []).append(turn)

    def rows(self) -> list[Row]:
        """The paths to the leaves, that to the last request first; every sampled turn is owned by one.

        Its owner is the first leaf in an order that follows from the contexts alone, as does that of the
        other rows. Left out are answers that the agent cannot have read, and those that were not sampled to
        their end.
        """
        known = [turn for turn in self.turns if turn.is_known and turn.tokens]
        parents = {turn.parent for turn in known}
        leaves = [turn for turn in known if turn not in parents]
        last, owners = leaves[-1:], dict[Turn, Turn]()
        leaves.sort(key=lambda leaf: (_context(leaf.prompt_ids, leaf.pictures), leaf.twin))
        for leaf in leaves:
            for turn in leaf.path:
                owners.setdefault(turn, leaf)
        return [
            Row(leaf.path, frozenset(turn for turn in leaf.path if owners[turn] is leaf))
            for leaf in (*last, *(leaf for leaf in leaves if leaf not in last))
        ]

    def _why_anew(self, forms: Sequence[bytes]) -> str | None:
        """Where the messages of a root first differ from the dialogue before it."""
        before = next((_forms(turn.messages) for turn in reversed(self.turns) if turn.messages), None)
        if before is None:
            return None
        differs = [old != new for old, new in zip(before, forms, strict=False)]
        if any(differs):
            return f"message {differs.index(True)} changed"
        return "asked again" if len(forms) < len(before) else "other tools"


def _forms(messages: Messages) -> list[bytes]:
    """The messages of a dialogue in a form that does not depend on the client.

    They have the role, the text without outer white space and the names of pictures in their places, and
    calls by name and arguments, whose numbers are as a client in JavaScript has them. Left out is what
    clients drop or write anew: the ids of calls, thoughts in a field of their own, null fields. The result of
    a tool has the place of its call among the last ones.
    """
    forms, places = [], dict[str, int]()
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        form: dict[str, Any] = {"role": role, "content": _content(message["content"])}
        if calls := message.get("tool_calls"):
            form["calls"] = [[call_of(call)["name"], _plain(call_of(call)["arguments"])] for call in calls]
            places = {str(call.get("id")): place for place, call in enumerate(calls)}
        if role == "tool":
            form["call"] = places.get(str(message.get("tool_call_id")))
        forms.append(_as_json(form))
    return forms


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """A text, or texts and pictures in turn."""
    if isinstance(content, str):
        return content.strip()
    parts: list[Any] = []
    for part in content:
        if is_picture(part):
            parts.append([part["image"].name])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += part["text"]
        else:
            parts.append(part["text"])
    each = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in each if part]


def _keys(tools: Sequence[Mapping[str, Any]], forms: Sequence[bytes]) -> Iterator[bytes]:
    """Of each message a digest of the dialogue up to it, and of the tools."""
    key = _digest(_as_json(list(tools)))
    for form in forms:
        key = _digest(key, form)
        yield key


def _plain(value: Any) -> Any:
    """JSON with each number in one form: 1.0 as 1, and an integer beyond 2**53 rounded to a double."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        with suppress(OverflowError):
            return int(float(value))
    return value


def _chosen(turns: Sequence[Turn], message: Mapping[str, Any], hints: Collection[str]) -> Turn:
    """The turn with a signature of `hints`, else that with the ids of the calls of `message`, or the last."""
    signed = [turn for turn in turns if turn.signature in hints]
    if signed:
        return signed[-1]
    ids = [call.get("id") for call in message.get("tool_calls", ())]
    same = [
        turn for turn in turns if [call.get("id") for call in turn.messages[-1].get("tool_calls", ())] == ids
    ]
    return (same or turns)[-1]


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _context(ids: Sequence[int], pictures: Pictures | None) -> bytes:
    """A digest of the tokens of a context: of their ids, and of the pictures that they stand for."""
    return _digest(_as_bytes(ids), *(() if pictures is None else (pictures.ids.tobytes(),)))


def _as_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _digest(*parts: bytes) -> bytes:
    """A digest of the parts, each with its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()
