"""What a trained answer adds to the messages before it: what follows where the chat template begins it.

Data flow: a row's messages (`examples.py`, `preferences.py`) -> `is_trained`, `checked_answer` ->
`Answers.ids` -> the tokens of the answer and the token that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quatrain.config.errors import listed, shown
from quatrain.data.messages import THOUGHTS, joined_text, thought_of, unfit_text
from quatrain.data.tokenizer import encode_further, fill_template, stop_token_ids
from quatrain.types.batches import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FLAGS = ("weight", "train", "training", "loss", "loss_mask")
"""Fields that say of an assistant's message whether it is trained: those of OpenAI and Mistral, axolotl,
ms-swift and verl."""

_QUESTION, _ANSWER = "QUESTION", "ANSWER"
_TAG = re.compile(r"[<\[]")
_BEGUN = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""What a prompt that is a text begins of its answer."""


def is_trained(message: Mapping[str, Any]) -> bool | None:
    """Whether an assistant's message is to be trained; None if it does not say.

    Raises ValueError for a flag that is neither 0 or false nor 1 or true.
    """
    given = {flag: message[flag] for flag in FLAGS if message.get(flag) is not None}
    wrong = {flag: value for flag, value in given.items() if value not in (0, 1)}
    if wrong:
        raise ValueError(
            f"the flags {listed(FLAGS)} of a message must be 0 or false (not trained), or 1 or true; got "
            f"{shown(wrong)}; correct the message"
        )
    return all(given.values()) if given else None


def checked_answer(answer: Any, name: str = "completion") -> None:
    """Raises ValueError unless `answer` is a text, or an assistant's message with a text or calls.

    `name` is the column that it comes from.
    """
    message = answer if isinstance(answer, Mapping) else {}
    content = joined_text(message.get("content")) if message else answer
    if message.get("function_call"):
        raise ValueError(
            "an answer that is trained must have its calls in `tool_calls`, not in `function_call`, their "
            "older form; rename the field, with a list of {name, arguments}, or remove the row"
        )
    if message.get("tool_calls"):
        content = content or ""
    elif not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"the column `{name}` must be a string with text, or messages whose answers have text; it is "
            f"{type(answer).__name__} {shown(answer)}; correct the row or remove it"
        )
    thought = thought_of(message)
    if reason := unfit_text(content) or unfit_text(thought):
        raise ValueError(f"the column `{name}` {reason}; correct the text")
    if thought and "</think>" in content:
        raise ValueError(
            f"an answer must have its thought once; it is in a field of its own ({shown(thought)}) and "
            "in the content, before </think>; remove one of them"
        )


def unread_fields(answer: Any) -> list[str]:
    """The fields with text of an answer that are no part of what is trained."""
    if not isinstance(answer, Mapping):
        return []
    known = {"role", "content", "tool_calls", "id", "type", *THOUGHTS, *FLAGS}
    return [name for name, value in answer.items() if name not in known and _has_text(value)]


def _has_text(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_text, inner))


class _Form(NamedTuple):
    """What the template writes of a short dialogue: after the question, before and behind the answer."""

    opening: str
    """Up to the start of the answer."""
    before: str | None
    """Between there and the answer's text; None: the answer does not begin as `opening` does."""
    behind: str


class Answers:
    """The tokens of answers for a tokenizer's chat template, which reads `variables`.

    `stop_ids` are the tokens that end a completion; by default, those that the tokenizer and its template
    name. Raises ValueError for a tokenizer without an end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_ids: Sequence[int] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ):
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "training on answers needs a tokenizer with an end token; this one has no eos_token; set "
                "model.tokenizer to one that has it"
            )
        self._tokenizer, self._variables = tokenizer, variables
        self._stop_ids = stop_token_ids(tokenizer, ()) if stop_ids is None else tuple(stop_ids)

    def ids(self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], answer: Any) -> list[int]:
        """The token ids of an answer that `checked_answer` takes, with the token that ends it.

        That token is the one which the chat template writes there, and the tokenizer's end token behind a
        prompt that is a text; it is not repeated where the answer's text ends with it. An answer with calls
        is written by the template. Raises ValueError for an answer that the template does not write behind
        `prompt`, and as `text` does.
        """
        if isinstance(answer, Mapping) and answer.get("tool_calls"):
            return self._with_calls(prompt, tools, answer)
        eos = self._tokenizer.eos_token_id
        end = eos if isinstance(prompt, str) else self._end
        ids = encode_further(self._tokenizer, self.text(prompt, tools, answer))
        return ids if ids[-1:] in ([end], [eos]) else [*ids, end]

    def text(self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], completion: Any) -> str:
        """The text that follows the tokens of `prompt`, for an answer of `checked_answer` without calls.

        A thought is written as the template writes it. What the template has begun of the answer, as
        `<think>`, is not repeated. Raises ValueError for a thought that the template does not write, and for
        one behind an empty thought that the template has written.
        """
        content = _content(completion)
        thought = thought_of(completion) if isinstance(completion, Mapping) else ""
        if thought:
            return self._with_thought(prompt, tools, content, thought)
        opening = self._opening(prompt)
        repeated = _repeated(opening, content)
        rest = content[repeated:]
        if (
            not repeated
            and "</think>" in opening.rpartition("<think>")[2]
            and content.lstrip().startswith("<think>")
        ):
            raise ValueError(
                "an answer must not begin with <think> where the chat template has written an empty "
                f"thought ({shown(opening[opening.rindex('<think>') :])}); let the template begin no answer "
                "(data.chat_template_kwargs, as enable_thinking), or remove the thought"
            )
        before = None if isinstance(prompt, str) or repeated else self._form.before
        # What the template writes in between is part of what a model has to say: the space of Llama 2's, the
        # channel of gpt-oss'. An empty thought, as Qwen3's writes it, is not: the model may think.
        if before is None or "<think>" in before:
            return rest
        is_there = (
            content[:1].isspace() if not before.strip() else content.lstrip().startswith(_first(before))
        )
        return rest if is_there else before + rest

    def repeats(self, prompt: PromptText, completion: Any) -> bool:
        """Whether a completion repeats what its prompt has begun of the answer."""
        return bool(_repeated(self._opening(prompt), _content(completion)))

    def leaves_open(self, prompt: PromptText, completion: Any) -> bool:
        """Whether a completion does not end the thought that its prompt has begun."""
        if isinstance(completion, Mapping) and thought_of(completion):
            return False
        begun = self._opening(prompt).rpartition("<think>")
        return bool(begun[1]) and not begun[2].strip() and "</think>" not in _content(completion)

    def _opening(self, prompt: PromptText) -> str:
        if not isinstance(prompt, str):
            return self._form.opening
        begun = _BEGUN.search(prompt)
        return begun[0] if begun else ""

    def _with_calls(
        self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]
    ) -> list[int]:
        """The ids of an answer with calls, up to the last token that ends a completion."""
        if isinstance(prompt, str):
            raise ValueError(
                "an answer with tool_calls needs a prompt of messages, behind which the chat template writes "
                "the calls; give messages, or write the calls into a text"
            )
        asked = self._fill(prompt, tools, add=True)
        whole = self._fill([*prompt, answer], tools, add=False, since=len(prompt))  # looks for the calls
        text = whole.removeprefix(asked)
        missing = unwritten(answer, text)
        if text == whole or missing:
            raise ValueError(
                "the chat template must write an answer with tool_calls behind its prompt; it "
                + (f"does not write {shown(missing)}" if missing else "writes other text before the answer")
                + "; write the calls into the content as the model is to write them, or set "
                "data.chat_template to one that writes them"
            )
        # As `text` does: an empty thought, which Qwen3's writes of the last answer only, is not trained.
        before = self._form.before or ""
        if "<think>" in before and text.startswith(before) and not thought_of(answer):
            text = text.removeprefix(before).lstrip()
        ids = encode_further(self._tokenizer, text)
        ends = [place for place, index in enumerate(ids) if index in self._stop_ids]
        if ends:
            return ids[: ends[-1] + 1]
        # A template without an end token, as GLM's, whose next message begins with one.
        return [*encode_further(self._tokenizer, text.removesuffix(self._form.behind)), self._end]

    def _with_thought(
        self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], content: str, thought: str
    ) -> str:
        """A thought and a content as the chat template writes them behind the prompt."""
        if isinstance(prompt, str):
            raise ValueError(
                "an answer with a thought in a field of its own needs a prompt of messages, which the "
                "chat template renders; write the thought into its content"
            )
        answer = {"role": "assistant", "content": content, "reasoning_content": thought}
        asked = self._fill(prompt, tools, add=True)
        whole = self._fill([*prompt, answer], tools, add=False)
        if whole.startswith(asked) and whole.endswith(self._form.behind):
            text = whole[len(asked) : len(whole) - len(self._form.behind)]
            if not unwritten(answer, text):
                return text
        opening = self._form.opening
        if opening.rstrip().endswith("<think>"):  # R1's template begins the thought, and leaves it out later
            return f"{thought.strip()}\n</think>\n\n{content}"
        raise ValueError(
            "the chat template must write the thought of an answer (`reasoning_content`, `thinking` or "
            f"`reasoning`) behind the prompt; it does not write {shown(thought)}; write the thought into the "
            "content as the model is to write it (<think>…</think>), or set data.chat_template or "
            "data.chat_template_kwargs so that it is written"
        )

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add: bool,
        since: int | None = None,
    ) -> str:
        # The prompt is looked for where it is rendered (`left_out`), and an answer's text is looked for here.
        since = len(messages) if since is None else since
        return fill_template(
            self._tokenizer,
            messages,
            add_generation_prompt=add,
            tools=tools,
            variables=self._variables,
            since=since,
        )

    @cached_property
    def _end(self) -> int:
        """The token that ends an answer: which the template writes behind one, if it ends completions."""
        ids = encode_further(self._tokenizer, self._form.behind.lstrip()) if self._form.behind.strip() else []
        return ids[0] if ids and ids[0] in self._stop_ids else int(self._tokenizer.eos_token_id)

    @cached_property
    def _form(self) -> _Form:
        question = {"role": "user", "content": _QUESTION}
        try:
            asked = self._fill([question], (), add=True)
            whole = self._fill([question, {"role": "assistant", "content": _ANSWER}], (), add=False)
        except ValueError:  # a template that takes other dialogues only
            return _Form("", None, "")
        front, _, behind = whole.rpartition(_ANSWER)
        before = front.removeprefix(asked) if front.startswith(asked) else None
        return _Form(asked.rpartition(_QUESTION)[2], before, behind)


def unwritten(answer: Mapping[str, Any], text: str) -> str:
    """The thought or content of an answer that is not in `text`, white space apart; empty: both are."""
    written = "".join(text.split())
    parts = (thought_of(answer), _content(answer))
    return next((part for part in parts if "".join(part.split()) not in written), "")


def _content(completion: Any) -> str:
    """The text of an answer that `checked_answer` takes, without its thought."""
    text = joined_text(completion["content"]) if isinstance(completion, Mapping) else completion
    return text or ""


def _first(text: str) -> str:
    """The first tag or word of a text."""
    found = re.match(r"\s*(<[^>]*>|\S+)", text)
    return found[1] if found else ""


def _repeated(opening: str, content: str) -> int:
    """How many characters at the beginning of `content` repeat the end of `opening`, from a tag on."""
    blank = len(content) - len(content.lstrip())
    for found in _TAG.finditer(opening):
        tail = opening[found.start() :]
        for begun in (tail, tail.rstrip()):
            if content[blank:].startswith(begun):
                rest = content[blank + len(begun) :]
                # The template has written its own white space.
                return len(content) - len(rest if begun == tail else rest.lstrip())
    return 0
