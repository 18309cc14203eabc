"""The tokens of requests' prompts: of texts, of ids, and of messages, which continue turns of a session.

Data flow: a checked request -> `Prompts` -> `Tokens`, for `answering.py`. The tokenizer belongs to one thread
at a time: texts are encoded in threads, under one lock.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from quatrain.data.chat_template import check_variables
from quatrain.data.messages import MAX_TEXT_CHARS, checked_messages
from quatrain.data.pictures import PictureReader, is_picture_part
from quatrain.data.tokenizer import encode_further, render
from quatrain.data.tool_calls import begun_call
from quatrain.data.turns import TurnTemplate
from quatrain.serve.grammars import Grammars
from quatrain.serve.requests import NO_ROOM, AnyRequest, BadRequest, ChatRequest, CompletionRequest
from quatrain.serve.turn_tree import Found, TurnTree
from quatrain.types.pictures import Picture, Pictures, Tokens, joined
from quatrain.types.sampler import Sampler

MOST_TEMPLATES = 64
"""Lists of tools whose templates are kept."""


class ChatPrompt(NamedTuple):
    """The tokens of a chat, the text of those at its end that begin the answer, and what it continues.

    `grammar` is what the rest of the answer follows; None: any text. `messages` are as `checked_messages` has
    them; without a tree, there are neither these nor `found`.
    """

    tokens: Tokens
    begun: str
    found: Found | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    grammar: str | None = None


class Prompts:
    """Makes the prompts of requests to `sampler` with `tokenizer`; its vocabulary has `vocab_size` words.

    `stop_ids` end an answer.
    """

    def __init__(self, sampler: Sampler, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]):
        self._sampler, self._tokenizer = sampler, tokenizer
        self._vocab_size, self._stop_ids = vocab_size, stop_ids
        self._templates: dict[str, TurnTemplate] = {}
        self._grammars = Grammars(sampler, tokenizer)
        self.lock = asyncio.Lock()
        """Held while the tokenizer is used."""

    async def of_chat(self, asked: ChatRequest, tree: TurnTree | None) -> ChatPrompt:
        """The prompt of a chat, which goes on with an answer of `tree` if there is one that it continues.

        Whoever calls it holds `lock`.
        """
        if tree is None:
            return await asyncio.to_thread(self._alone, asked)
        return await asyncio.to_thread(self._continued, asked, tree)

    async def of_text(self, prompt: str | list[int], name: str = "prompt") -> Tokens:
        """The tokens of a text, or of a list that has their ids already, which stand for no picture."""
        if isinstance(prompt, list):
            outside = [token for token in prompt if token >= self._vocab_size]
            if outside or not prompt:
                what = f"{outside[0]}" if outside else "none"
                raise BadRequest(
                    f"a prompt has at least one token id, each below {self._vocab_size}; got {what}", name
                )
            return Tokens(prompt)
        async with self.lock:
            with _at_fault(name):
                return await asyncio.to_thread(render, self._tokenizer, prompt)

    def with_pictures(self, asked: CompletionRequest, alone: bool) -> Tokens:
        """The ids of a request with pictures, in their places; `alone`: it is no turn of a session."""
        with _at_fault("pictures"):
            if self._sampler.cannot_see is not None:
                raise ValueError(f"a prompt has pictures: {self._sampler.cannot_see}")
            [ids, *more] = asked.prompts
            if more or isinstance(ids, str) or not alone:
                raise ValueError(
                    "they stand in one prompt of token ids, which continues no session; give messages with "
                    "`image_url` instead"
                )
            tokens: list[Picture | None] = [None] * len(ids)
            for given in asked.pictures:
                picture = PictureReader().read(given.url)
                size = self._tokenizer.expansion.vision.num_placeholders(picture.size)
                for start, count in given.places:
                    room = tokens[start : start + count] if min(start, count) >= 0 else []
                    if not count or room != [None] * count:
                        raise ValueError(
                            f"places must lie within the {len(ids)} tokens of the prompt, and apart from one "
                            f"another; got {start} and the {count} from there"
                        )
                    tokens[start : start + count] = [picture] * count
                if (total := sum(count for _, count in given.places)) % size:
                    raise ValueError(
                        f"a picture of {picture.size[0]}x{picture.size[1]} pixels stands for {size} tokens "
                        f"here; got {total}; serve the model that the ids were made for, with its "
                        "data.image_max_pixels"
                    )
        return Tokens(ids, Pictures.of(tokens))

    def _alone(self, asked: ChatRequest) -> ChatPrompt:
        tokens, begun = self._rendered(asked)
        return ChatPrompt(tokens, begun, grammar=self._grammars.of(asked))

    def _continued(self, asked: ChatRequest, tree: TurnTree) -> ChatPrompt:
        with _at_fault(asked.prompt_field):
            seen = self._seen(asked.messages)
            messages = checked_messages(seen)
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the last message must not be the assistant's: nothing follows it", "messages")
        begun = self._begun(asked)

        def suffix(opening: Sequence[Any], sampled: Sequence[int], new: Sequence[Any]) -> Tokens:
            written = self._template(*key_of(asked)).suffix(tuple(opening), sampled, new)
            further = encode_further(self._tokenizer, begun)
            pictures = joined((written.pictures, len(written.ids)), (None, len(further)))
            return Tokens(written.ids + further, pictures)

        with _at_fault(asked.prompt_field):
            found = tree.find(
                messages, key_of(asked), lambda: self._rendered(asked, seen)[0], suffix, asked.hints
            )
        grammar = self._grammars.of(asked)
        return ChatPrompt(Tokens(found.ids, found.pictures), begun, found, messages, grammar)

    def _template(self, *key: Any) -> TurnTemplate:
        """What renders the turns of episodes with these tools and variables, as `key_of` has them."""
        text = json.dumps(key, sort_keys=True)
        if text not in self._templates:
            if len(self._templates) >= MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            *tools, variables = key
            self._templates[text] = TurnTemplate(self._tokenizer, self._stop_ids, tools, variables)
        return self._templates[text]

    def _begun(self, asked: ChatRequest) -> str:
        """The text with which the answer must begin."""
        if not asked.must_call:
            return ""
        with _at_fault("tool_choice"):
            return begun_call(self._tokenizer, asked.offered_tools, asked.called)

    def _seen(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Messages with the pictures of their data URLs read; raises ValueError where they are not seen."""
        contents = [each["content"] for each in messages if isinstance(each.get("content"), list)]
        if not any(map(is_picture_part, itertools.chain(*contents))):
            return messages
        if self._sampler.cannot_see is not None:
            raise ValueError(f"messages have pictures: {self._sampler.cannot_see}")
        return PictureReader().placed(messages)

    def _rendered(
        self, asked: ChatRequest, seen: Sequence[dict[str, Any]] | None = None
    ) -> tuple[Tokens, str]:
        """The tokens of a chat's prompt, and the text of those at its end that begin the answer.

        `seen` are its messages, if their pictures are read already.
        """
        tools, variables, begun = asked.offered_tools, asked.chat_template_kwargs, self._begun(asked)
        if variables:
            with _at_fault("chat_template_kwargs"):
                check_variables(variables, self._tokenizer.chat_template, "chat_template_kwargs")
        with _at_fault(asked.prompt_field):
            messages = self._seen(asked.messages) if seen is None else seen
            return render(self._tokenizer, messages, tools, variables=variables, begun=begun), begun


def key_of(asked: AnyRequest) -> list[Mapping[str, Any]]:
    """The tools of a chat, then the variables of its template: what the dialogues of one sequence share."""
    return [*asked.offered_tools, asked.chat_template_kwargs] if isinstance(asked, ChatRequest) else [{}]


@contextmanager
def _at_fault(field: str) -> Iterator[None]:
    """Raises BadRequest, which names `field`, for a ValueError."""
    try:
        yield
    except ValueError as error:
        if f"at most {MAX_TEXT_CHARS} characters" in str(error):  # longer than any model's positions
            raise BadRequest(f"maximum context length: {error}; shorten it", field, code=NO_ROOM) from error
        raise BadRequest(str(error), field) from error
