"""Token in, token out: the ids that the chat template writes between two turns of the assistant.

Data flow: messages of a prompt -> `TurnTemplate.prompt` -> the first ids of an episode; ids that the model
sampled and an environment's messages -> `TurnTemplate.suffix` -> the ids between this turn and the next. The
ids of an episode are those of the prompt, then sampled ids and suffixes in turn. Nothing sampled is rendered
or encoded again: text does not determine the ids that were sampled, and templates change what stands in
earlier turns (Qwen3's removes thoughts).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quatrain.config.errors import shown
from quatrain.data.chat_template import variables_of
from quatrain.data.expansion import expanded, sees
from quatrain.data.left_out import REFUSED, REFUSED_OF_ROWS
from quatrain.data.messages import TOOLS, checked_messages, named_picture, tools_of, with_picture_parts
from quatrain.data.tokenizer import encode_further, fill_template, render
from quatrain.types.pictures import Picture, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quatrain.types.batches import Message, PromptText

logger = logging.getLogger(__name__)

STAND_IN = "STANDIN"
"""What is rendered in place of the assistant's text; letters that no template changes."""
CALL_ID = "call00000"
"""Id of a tool call: nine letters and digits, which Mistral's templates ask for."""
_QUESTION = {"role": "user", "content": "QUESTION"}
_RESULT = {"role": "tool", "name": "tool", "tool_call_id": CALL_ID, "content": "RESULT"}


class TurnTemplate:
    """Renders the turns of episodes with a tokenizer's chat template.

    `stop_ids` are the ids that end a completion, `tools` the JSON schemas of functions that the model may
    call, which the template writes into the prompt, and `variables` are further ones that it reads. Raises
    ValueError if there are tools and the template takes no message with the result of one; warns if it does
    not write the schemas. Call it from one thread at a time.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._tokenizer, self._stop_ids, self._tools = tokenizer, frozenset(stop_ids), tuple(tools)
        self._variables, self._refused = variables, REFUSED
        added = tokenizer.added_tokens_decoder
        self._ends = {index: added[index].content for index in self._stop_ids if index in added}
        self._warned = False
        if self._tools:
            self._check_results()
            # Warns if the template does not write the descriptions of the tools.
            fill_template(tokenizer, [_QUESTION], add_generation_prompt=True, tools=self._tools)

    def prompt(self, messages: PromptText) -> Tokens:
        """The tokens of the prompt, up to the start of the assistant's first turn.

        Raises ValueError for a prompt that is a text: only a chat template can write a further turn.
        """
        return render(
            self._tokenizer,
            conversation(messages),
            self._tools,
            variables=self._variables,
            refused=self._refused,
        )

    def of_row(self, columns: Mapping[str, Any]) -> TurnTemplate:
        """What renders the episodes of a row with these columns: also its own tools, in the column `tools`.

        And with its variables, in the column `chat_template_kwargs`. The tools of an environment come first,
        because no others can be called; a warning says so.
        """
        tools = tools_of(columns)
        variables = variables_of(columns, self._tokenizer.chat_template)
        if not tools and not variables:
            return self
        if tools and self._tools:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the column `%s` is not written into prompts, because the environment has tools of its "
                    "own, which are; remove or rename the column",
                    TOOLS,
                )
            tools = []
        template = copy.copy(self)
        template._variables = {**self._variables, **variables}
        if tools:
            template._tools, template._refused = tuple(tools), REFUSED_OF_ROWS
        return template

    def suffix(self, prompt: PromptText, sampled: Sequence[int], messages: Sequence[Message]) -> Tokens:
        """The tokens from the end of the assistant's turn to the start of its next, with `messages` between.

        The template renders `prompt`, a fixed stand-in for the assistant's text, and `messages`; the suffix
        is what it writes after the stand-in. `prompt` is the prompt of the episode; earlier turns are left
        out, so an episode costs time in proportion to its length. `sampled` are the ids of the assistant's
        turn. If the last of them is a stop id, it stands for the end token that the template writes there;
        if none is (the turn was cut, or ended with a stop string), the template's own ends the turn.

        Raises ValueError if the template rejects the messages, or leaves out the assistant's text.
        """
        messages = checked_messages(messages)
        after = self._after_turn(conversation(prompt), messages)
        end = sampled[-1] if len(sampled) and sampled[-1] in self._stop_ids else None
        if end is None:
            return expanded(self._tokenizer, after, messages, self._encode)
        written = self._end_token(after)
        if written not in (None, end):
            # Another of the stop ids, unless it is the start of the next message, as in GLM-4.
            alone = self._end_token(self._after_stand_in(conversation(prompt), []))
            written = written if written == alone else None
        if written is not None:
            after = after.lstrip().removeprefix(self._ends[written])
        elif end is not None and self._ends.get(end) == "<|return|>":
            after = after.removeprefix("<|end|>")  # Harmony writes it where the last message had <|return|>
        return expanded(self._tokenizer, after, messages, partial(self._encode_after, end))

    def _after_turn(self, prompt: Sequence[Message], new: list[dict[str, Any]]) -> str:
        """What the template writes after the assistant's turn, whose text it may ask to be a call.

        gpt-oss' template takes results of tools after a call alone, and names the tool by it.
        """
        try:
            return self._after_stand_in(prompt, new)
        except ValueError as error:
            if not new or new[0]["role"] != "tool":
                raise
            try:
                return self._after_calls(prompt, new)
            except ValueError:
                raise error from None

    def _after_calls(self, prompt: Sequence[Message], new: list[dict[str, Any]]) -> str:
        """What the template writes from the end token of calls on, which the first of `new` answer."""
        results = itertools.takewhile(lambda message: message["role"] == "tool", new)
        calls = [
            {
                "id": result.get("tool_call_id") or CALL_ID,
                "type": "function",
                "function": {"name": result.get("name") or STAND_IN, "arguments": {"text": STAND_IN}},
            }
            for result in results
        ]
        turn, since = {"role": "assistant", "content": "", "tool_calls": calls}, len(prompt)
        text = self._fill([*checked_messages(prompt), turn], add_generation_prompt=False, since=since)
        before = text.rpartition(STAND_IN)[0]
        text = self._fill(
            [*checked_messages(prompt), turn, *new], add_generation_prompt=True, since=since + 1
        )
        after = text.removeprefix(before)
        ends = [place for end in self._ends.values() if (place := after.find(end)) >= 0]
        if after == text or not ends:
            raise ValueError("the chat template writes no end of calls")
        return after[min(ends) :]

    def _after_stand_in(self, prompt: Sequence[Message], new: list[dict[str, Any]]) -> str:
        """What the template writes after the assistant's text; up to its next turn, if anything is new."""
        stand_in, taken = STAND_IN, json.dumps(with_picture_parts(new, named_picture))
        if stand_in in taken:
            stand_in += hashlib.blake2b(taken.encode(), digest_size=8).hexdigest()
        dialogue = [*checked_messages(prompt), {"role": "assistant", "content": stand_in}, *new]
        text = self._fill(dialogue, add_generation_prompt=bool(new), since=len(dialogue) - len(new))
        _, found, after = text.rpartition(stand_in)
        if not found:
            raise ValueError(
                "a chat template must write the assistant's messages, for an episode of several turns; this "
                "one leaves them out; set data.chat_template to one that writes them"
            )
        return after

    def _end_token(self, text: str) -> int | None:
        """The stop id whose text `text` starts with, after white space (Llama 2 writes a space before it)."""
        text = text.lstrip()
        starts = (index for index, end in self._ends.items() if text.startswith(end))
        return max(starts, key=lambda index: len(self._ends[index]), default=None)

    def _encode_after(self, end: int, text: str) -> list[int]:
        """The ids of a text that follows the token `end`, in front of which some tokenizers write a space."""
        if end in self._ends:
            ids = self._encode(self._ends[end] + text)
            if ids[0] == end:
                return ids[1:]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return encode_further(self._tokenizer, text)

    def _fill(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, since: int = 0) -> str:
        return fill_template(
            self._tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self._tools,
            variables=self._variables,
            since=since,
        )

    def _check_results(self) -> None:
        try:
            self._after_turn([_QUESTION], [_RESULT])
            if sees(self._tokenizer) and not self._shows_results():
                logger.warning(
                    "the chat template does not write pictures of messages of the role `tool`: a tool that "
                    "returns one ends its episode with a fault; set data.chat_template to one that does"
                )
        except ValueError as error:
            raise ValueError(
                "a chat template must take messages of the role `tool`, for the results of tools; this one "
                f"does not: {error}; use a model whose template does (such as Qwen2.5, Qwen3 or Llama 3.1), "
                "set data.chat_template, or give rollout.environment a class whose step answers as the user"
            ) from error

    def _shows_results(self) -> bool:
        """Whether the template writes the picture that a tool returns."""
        tokenizer: Any = self._tokenizer
        result = {**_RESULT, "content": [{"type": "image", "image": Picture(1, (64, 64), b"")}]}
        try:
            after = self._after_turn([_QUESTION], [result])
        except ValueError:
            return False
        return tokenizer.expansion.placeholder in after


TurnsOfRow = Callable[[Mapping[str, Any]], TurnTemplate]
"""What renders the turns of episodes, given the data columns of their row."""


def conversation(prompt: PromptText) -> tuple[Message, ...]:
    """The messages of a prompt; raises ValueError for a prompt that is a text."""
    if isinstance(prompt, str):
        raise ValueError(
            "a prompt of an episode with an environment or tools must be a list of messages, because the "
            f"chat template writes the turns after it; got the text {shown(prompt)}; give messages, or set "
            "data.question_column or data.system_prompt, which make messages of a text"
        )
    return prompt
