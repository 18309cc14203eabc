"""Finds the calls of tools in a completion, in the forms in which chat models write them.

Data flow: a completion -> `tool_calls` -> `ToolCall`s, for `tools.py`; a completion while it comes ->
`CallStream` -> the text outside of calls, and the calls, for `quatrain serve`; a chat template ->
`warn_of_unread`, at the start. The forms are the rows of the table in `types/call_forms.py`. A completion is
untrusted: it is parsed, and never evaluated.

A call that begins with a marker may stand anywhere; without one, the whole answer must be calls. A call is
decoded from its beginning on, so its arguments may contain any text, that of the markup too. Calls in
thoughts do not count: thoughts end at the first `</think>` outside of a call, and begin at `<think>`, or with
the completion if the template wrote `<think>`.
"""

from __future__ import annotations

import json
import logging
import os.path
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from quatrain.config.errors import shown
from quatrain.data.messages import unfit
from quatrain.data.tokenizer import encode, fill_template
from quatrain.data.turns import CALL_ID, STAND_IN
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.call_forms import (
    FENCE,
    MARKUP,
    OPENINGS,
    THOUGHT,
    THOUGHT_END,
    WHOLE,
    WHOLE_OPENING,
    Found,
    ToolCall,
    form_of,
    schemas_of,
)
from quatrain.types.call_values import Reading

logger = logging.getLogger(__name__)

_TAGS = (THOUGHT, THOUGHT_END, *OPENINGS)
_LONGEST_TAG = max(map(len, _TAGS))
_BEGUN_METHOD = re.compile(r"[A-Za-z_]\w*(\.(c(a(l(l(\(.*)?)?)?)?)?)?", re.DOTALL)
_BEGUN_LINE = re.compile(r"([A-Za-z_][\w.-]*)(\s*)(.?)", re.DOTALL)
_LOOKED_AT = 200
"""Characters that show whether an answer may begin with a call."""
_NO_SCHEMAS: Mapping[str, Any] = MappingProxyType({})


def tool_calls(completion: str, schemas: Mapping[str, Any] = _NO_SCHEMAS) -> list[ToolCall]:
    """The calls in a completion, in order; empty if there is none.

    `schemas` are those of the tools' arguments, by name, which give values that are written as text a type.
    """
    return [call for _, _, calls in _blocks(completion, schemas) for call in calls]


def split_calls(completion: str, schemas: Mapping[str, Any] = _NO_SCHEMAS) -> tuple[str, list[ToolCall]]:
    """The text outside of calls, and the calls that can be made; a malformed call stays text.

    So does one that no message can have, such as one with half a surrogate pair. If there are calls, the text
    does not end with white space.
    """
    found: list[ToolCall] = []
    text, at = "", 0
    for begin, end, calls in _blocks(completion, schemas):
        # A malformed one stays text: a client would otherwise lose what the model wrote.
        if all(map(_can_be_made, calls)):
            text, at = text + completion[at:begin], end
            found += calls
    return ((text + completion[at:]).rstrip(), found) if found else (completion, [])


def _can_be_made(call: ToolCall) -> bool:
    message = {"tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}}]}
    return call.problem is None and unfit(message) is None


class CallStream:
    """The text and the calls of a completion that begins with `begun`, while it comes."""

    def __init__(self, begun: str = "", schemas: Mapping[str, Any] = _NO_SCHEMAS):
        self._text, self._at, self._sent, self._schemas = begun, 0, 0, schemas
        self._no_close = 0
        """The thoughts that begin at `_at` do not end before it."""
        self._may_be_whole = True
        """Whether an answer that consists of calls may begin at `_at`."""

    def push(self, text: str) -> str:
        """The text that became certain: no call can reach it, whatever follows.

        White space is certain once other text follows it. From what may be the first call on, text waits for
        the end.
        """
        self._text += text
        # White space waits: `split_calls` strips it before a call, and what was sent cannot be taken back.
        certain = self._text[self._sent : self._end()].rstrip()
        self._sent += len(certain)
        return certain

    def skip(self, text: str) -> None:
        """Takes text that was said elsewhere, and may have calls; without calls, none of it is text."""
        self._text += text
        self._sent = len(self._text)

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text outside of calls, and the calls, as `split_calls` finds them."""
        text, calls = split_calls(self._text, self._schemas)
        return text[self._sent :], calls

    def _end(self) -> int:
        """Where the text ends that no call can reach."""
        while True:
            if self._may_be_whole and self._may_begin():
                return self._at
            self._may_be_whole = False
            markup = MARKUP.search(self._text, self._at)
            self._at = markup.start() if markup else _part_of_tag(self._text, self._at)
            if markup is None or markup[0] in OPENINGS:
                return self._at
            # From where the last search ended: else long thoughts, which come in pieces, take quadratic time.
            close = self._text.find(THOUGHT_END, max(self._at, self._no_close))
            if close < 0:
                self._no_close = len(self._text) - len(THOUGHT_END)
                return len(self._text)
            self._at, self._may_be_whole = close + len(THOUGHT_END), True

    def _may_begin(self) -> bool:
        """Whether an answer that consists of calls may begin at `_at`, if more text comes."""
        opening = WHOLE_OPENING.match(self._text, self._at)
        assert opening  # it matches nothing, too
        rest = self._text[opening.end() : opening.end() + _LOOKED_AT]
        if not rest or rest[0] in "{[":
            return True
        markers = ("<|python_tag|>", FENCE, *(["json"] if opening[2] else []))
        if any(marker.startswith(rest) for marker in markers) or _BEGUN_METHOD.fullmatch(rest):
            return True
        line = _BEGUN_LINE.match(rest)
        if line is None or line[1] not in self._schemas:
            return line is not None and line.end(1) == len(rest) and self._begins_name(rest)
        return not line[3] or (line[3] == "{" and "\n" in line[2])

    def _begins_name(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._schemas)


def _part_of_tag(text: str, at: int) -> int:
    """Where the beginning of a tag starts with which `text` ends, at or after `at`; else its length."""
    for place in range(max(at, len(text) - _LONGEST_TAG + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in _TAGS):
            return place
    return len(text)


def _blocks(completion: str, schemas: Mapping[str, Any]) -> list[tuple[int, int, list[ToolCall]]]:
    """The blocks of calls, in order: where each begins and ends, and the calls in it."""
    # Without the white space at the end, which no form of a whole answer has to allow for then.
    reading = Reading(completion.rstrip(), schemas)
    text = reading.text
    marked: list[tuple[int, int, list[ToolCall]]] = []
    begin, (whole, at) = 0, _whole(reading, 0)
    while markup := MARKUP.search(text, at):
        at = markup.end()
        if markup[0] in OPENINGS:
            # Decoded from here on and not searched for its end: arguments may contain the markup of a call.
            if form := form_of(text, at, markup[0]):
                calls, at = form.read(reading, at, form)
                closing = form.closed.match(text, reading.skip(at)) if form.closed else None
                at = closing.end() if closing else at
                marked += [(markup.start(), at, calls)] if calls else []
            continue
        # The template wrote the `<think>`: all before was a thought, and the calls in it no calls.
        if markup[0] == THOUGHT_END:
            marked = []
        else:
            end = text.find(THOUGHT_END, at)
            at = len(text) if end < 0 else end + len(THOUGHT_END)
        begin, (whole, at) = at, _whole(reading, at)
    # Calls with a marker win: an answer with both is text around them.
    return marked or ([(begin, len(text), whole)] if whole else [])


def _whole(reading: Reading, at: int) -> Found:
    """The calls of an answer, which begins at `at`, if it consists of calls."""
    found = (form.read(reading, at, form) for form in WHOLE)
    return next((each for each in found if each.calls), Found([], at))


# ------------------------------------------------------------------------------- what a template writes

_QUESTION = {"role": "user", "content": "QUESTION"}
_ARGUMENTS = {"text": 'one "word" {2}', "count": 3, "flag": True}
_TOOL = {
    "type": "function",
    "function": {
        "name": STAND_IN,
        "description": "A function.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "count": {"type": "integer", "description": "A number."},
                "flag": {"type": "boolean", "description": "A flag."},
            },
        },
    },
}


def warn_of_unread(tokenizer: Any, *, has_tools: bool = True) -> None:
    """Warns if the chat template writes past calls of tools in a form that is not read back from an answer.

    With tools (`has_tools`), also if it writes none.
    """
    name = os.path.basename(os.path.normpath(getattr(tokenizer, "name_or_path", "") or "the tokenizer"))
    try:
        written, before = written_call(tokenizer, _ARGUMENTS)
    except ValueError as error:
        if has_tools:
            logger.warning("the chat template of %s writes no past calls of tools: %s", name, error)
        return
    answer = AnswerTokens(tokenizer)
    ids = (encode(tokenizer, text, add_special_tokens=False) for text in (written, before))
    found = tool_calls(answer.text(*ids), schemas_of([_TOOL]))
    if [(call.name, call.arguments) for call in found] != [(STAND_IN, _ARGUMENTS)]:
        read = "no call" if not found else found[0].problem or shown(dict(found[0].arguments))
        logger.warning(
            "calls of tools may not be found in this model's answers: the chat template of %s writes a call "
            "as %s, and what is read back is %s; the forms that are read are listed in docs/episodes.md; set "
            "data.chat_template to one that writes one of them",
            name,
            shown(written),
            read,
        )


def written_call(
    tokenizer: Any, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, str]:
    """What the chat template writes of an answer that calls a tool, and what stands before the answer."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": STAND_IN, "arguments": dict(arguments)}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked: list[dict[str, Any]] = [dict(_QUESTION)]
    # Not all that is written before an answer comes again: templates leave `<think>` out of past ones.
    before = fill_template(tokenizer, asked, add_generation_prompt=True, tools=tools)
    whole = fill_template(tokenizer, [*asked, answer], add_generation_prompt=False, tools=tools)
    size = len(_common(before, whole))
    return whole[size:], whole[:size]


def _common(one: str, other: str) -> str:
    """What two texts begin with."""
    pairs = zip(one, other, strict=False)
    return one[: next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


class Beginning(NamedTuple):
    """What calls begin with, in the form of a chat template: before the name of the tool, and behind it."""

    before: str
    after: str

    def named(self, name: str) -> str:
        """The beginning of a call of this tool, up to the end of its name."""
        own = json.dumps(name, ensure_ascii=False)[1:-1] if self.before.endswith('"') else name
        return self.before + own

    def begun(self, name: str) -> str:
        """The beginning of a call of this tool, up to its arguments, without white space at its end."""
        return self.named(name) + self.after.rstrip(" \n{<")


def beginning_of_calls(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Beginning:
    """What the chat template begins calls with; raises ValueError if it writes them in a form that is not
    read."""
    try:
        # Two calls that differ in their arguments alone: what they begin with is what can be given.
        pair = [written_call(tokenizer, arguments, tools)[0] for arguments in ({}, {"key": 1})]
        blocks = _blocks(pair[0], {STAND_IN: None})
    except ValueError as error:
        raise ValueError(_NOT_BEGUN.format(error)) from None
    harmony = AnswerTokens(tokenizer).is_harmony and pair[0].lstrip().startswith("to=")
    if not harmony and not blocks:
        raise ValueError(_NOT_BEGUN.format(f"it writes {shown(pair[0])}"))
    common = _common(*pair)[0 if harmony else blocks[0][0] :]
    if arguments_first := _ARGUMENTS_FIRST.match(common):  # a name must be known before them
        common = f'{arguments_first[1]}"name": "{STAND_IN}", {arguments_first[2]}'
    before, _, after = common.partition(STAND_IN)
    return Beginning(before, after)


def begun_call(tokenizer: Any, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """The text with which a call of the tool `name` begins, up to its arguments; None: any, up to the name.

    It ends before white space, which vocabularies mostly join with what follows. Raises ValueError if the
    chat template writes calls in a form that is not read.
    """
    beginning = beginning_of_calls(tokenizer, tools)
    return beginning.before if name is None else beginning.begun(name)


_ARGUMENTS_FIRST = re.compile(rf'((?:(?!{STAND_IN}).)*)("(?:arguments|parameters)":)', re.DOTALL)
_NOT_BEGUN = (
    "a call can be begun only if the chat template writes calls in a form that is read (docs/episodes.md): "
    "{}; let tool_choice be auto, or set data.chat_template to one that writes such a form"
)
