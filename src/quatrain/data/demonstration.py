"""What a demonstration adds to its prompt: the text that follows where the chat template begins the answer.

Data flow: rows (`rows.py`) -> `prepared`, with the columns `prompt`, `answer` and `completion` (a column
`messages`, as in data sets for supervised training, becomes the prompt and, if it ends with the assistant's
message, the demonstration) -> `Answers.text` -> `tokenizer.encode_further` -> `Demonstration.completion_ids`
(`prompts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from quatrain.config.errors import listed, shown
from quatrain.config.schema import DataConfig
from quatrain.data.messages import THOUGHTS, joined_text, thought_of, unfit_text
from quatrain.data.rows import Row
from quatrain.data.tokenizer import encode_further, fill_template
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


def chosen(messages: Sequence[Any]) -> int:
    """The number of the demonstration among messages: the last of the assistant that may be trained.

    If none may, the last message.
    """
    for number in range(len(messages) - 1, 0, -1):
        message = messages[number]
        is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
        if is_answer and is_trained(message) is not False:
            return number
    return len(messages) - 1


def asks_for_more(messages: Any) -> bool:
    """Whether messages beside the demonstration say that they are to be trained."""
    if not isinstance(messages, list):
        return False
    number = chosen(messages)
    others = (message for at, message in enumerate(messages) if at != number)
    return any(isinstance(message, Mapping) and is_trained(message) for message in others)


def checked_completion(completion: Any) -> None:
    """Raises ValueError unless `completion` is a text, or an assistant's message with a text."""
    message = completion if isinstance(completion, Mapping) else {}
    content = joined_text(message.get("content")) if message else completion
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError(
            "the demonstration of the column `messages`, its last message, must be text without tool_calls; "
            "write the calls into its content as the model is to write them, or remove the row"
        )
    if not isinstance(content, str) or not content:
        raise ValueError(
            f"the column `completion` must be a string with text; it is {type(completion).__name__} "
            f"{shown(completion)}"
        )
    thought = thought_of(message)
    if reason := unfit_text(content) or unfit_text(thought):
        raise ValueError(f"the column `completion` {reason}; correct the text")
    if thought and "</think>" in content:
        raise ValueError(
            f"a demonstration must have its thought once; it is in a field of its own ({shown(thought)}) and "
            "in the content, before </think>; remove one of them"
        )


def unread_fields(completion: Any) -> list[str]:
    """The fields with text of a demonstrated message that are no part of what is trained."""
    if not isinstance(completion, Mapping):
        return []
    known = {"role", "content", "id", "type", *THOUGHTS, *FLAGS}
    return [name for name, value in completion.items() if name not in known and _has_text(value)]


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
    """The texts of demonstrations for a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer

    def ids(self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], completion: Any) -> list[int]:
        """The token ids of `text`, and the end token unless a template has written it into the text."""
        ids = encode_further(self._tokenizer, self.text(prompt, tools, completion))
        return ids if ids[-1:] == [self._tokenizer.eos_token_id] else [*ids, self._tokenizer.eos_token_id]

    def text(self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], completion: Any) -> str:
        """The text that follows the tokens of `prompt`, for a completion that `checked_completion` takes.

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
                "a demonstration must not begin with <think> where the chat template has written an empty "
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

    def _with_thought(
        self, prompt: PromptText, tools: Sequence[Mapping[str, Any]], content: str, thought: str
    ) -> str:
        """A thought and a content as the chat template writes them behind the prompt."""
        if isinstance(prompt, str):
            raise ValueError(
                "a demonstration with a thought in a field of its own needs a prompt of messages, which the "
                "chat template renders; write the thought into its content"
            )
        answer = {"role": "assistant", "content": content, "reasoning_content": thought}
        asked = self._fill(prompt, tools, add=True)
        whole = self._fill([*prompt, answer], tools, add=False)
        if whole.startswith(asked) and whole.endswith(self._form.behind):
            text = whole[len(asked) : len(whole) - len(self._form.behind)]
            written = "".join(text.split())
            if all("".join(part.split()) in written for part in (thought, content)):
                return text
        opening = self._form.opening
        if opening.rstrip().endswith("<think>"):  # R1's template begins the thought, and leaves it out later
            return f"{thought.strip()}\n</think>\n\n{content}"
        raise ValueError(
            "the chat template must write the thought of a demonstration (`reasoning_content`, `thinking` or "
            f"`reasoning`) behind the prompt; it does not write {shown(thought)}; write the thought into the "
            "content as the model is to write it (<think>…</think>), or set data.chat_template or "
            "data.chat_template_kwargs so that it is written"
        )

    def _fill(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, add: bool
    ) -> str:
        # The prompt is looked for where it is rendered (`left_out`), and the answer is looked for here.
        since = len(messages)
        return fill_template(self._tokenizer, messages, add_generation_prompt=add, tools=tools, since=since)

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


def _content(completion: Any) -> str:
    """The text of a completion that `checked_completion` takes, without its thought."""
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


MESSAGES = "messages"
ENVIRONMENTS = "environments"
"""The column that episodes add for reward functions that get their environments."""


def prepared(spec: str, rows: list[Row], data: DataConfig, *, demonstrations: bool = False) -> list[Row]:
    """The rows of one file or data set with the columns `prompt`, `answer` and `completion`, if it has them.

    The columns that they come from stay. With `demonstrations`, `completion` is the last of the assistant's
    messages in `messages` that may be trained (`demonstration.chosen`), a mapping, unless there is a column
    `completion`; the messages before it are the prompt. Raises ValueError, with the row, for a value of
    `messages` that is no list, and for a demonstration that does not end with the assistant's message.
    """
    has = rows[0]
    if not demonstrations and data.answer_column in has:
        rows = [row | {"answer": row[data.answer_column]} for row in rows]
    if data.question_column is not None or "prompt" in has or MESSAGES not in has:
        return rows
    own = demonstrations and "completion" not in has
    return [_from_messages(f"{spec}, row {number}", row, own) for number, row in enumerate(rows, start=1)]


def _from_messages(where: str, row: Row, demonstration: bool) -> Row:
    messages = row[MESSAGES]
    column, remedy = f"{where}: the column `{MESSAGES}`", "correct the row or remove it"
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{column} must be a non-empty list of messages; it is {shown(messages)}; {remedy}")
    role = messages[-1].get("role") if isinstance(messages[-1], Mapping) else None
    if role == "assistant" and len(messages) == 1:
        raise ValueError(f"{column} must have a message before the assistant's; it has none; {remedy}")
    if not demonstration:
        return row | {"prompt": messages[:-1] if role == "assistant" else messages}
    if role != "assistant":
        raise ValueError(
            f"{column} must end with the assistant's message, which is the demonstration; it ends with the "
            f"role {shown(role)}; {remedy}"
        )
    try:
        number = chosen(messages)
        asks_for_more(messages)  # checks the flags of the others
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from error
    # A column-oriented file gives all messages the same fields.
    answer = {field: value for field, value in messages[number].items() if value is not None}
    return row | {"prompt": messages[:number], "completion": answer}
