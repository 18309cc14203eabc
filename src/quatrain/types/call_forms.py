"""The forms in which models write calls of tools: one table, a row a form, and what reads each.

Used by `answer_text.py`, which keeps the markers in the text of an answer, and by
`data/tool_calls.py`, which finds the calls in it. What is read is untrusted: it is parsed, and never
evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quatrain.config.errors import shown
from quatrain.types.call_values import (
    BETWEEN,
    DECODER,
    Literals,
    Malformed,
    Reading,
    before_closing,
    decoded,
    json_values,
    start_of,
)

_OBJECT = '{"name": the tool\'s name, "arguments": {name: value}} in JSON'
_NAME = r"[A-Za-z_][\w.-]*"
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")


@dataclass(frozen=True)
class ToolCall:
    """A call that a completion contains; `problem` says what is wrong with one that cannot be made."""

    name: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    problem: str | None = None


class Found(NamedTuple):
    """Calls, and the position where reading them ended."""

    calls: list[ToolCall]
    end: int


def is_call(value: Any) -> bool:
    """Whether a JSON value has the name and the arguments of a call."""
    if not isinstance(value, dict):
        return False
    inner = value.get("function", value)
    return isinstance(inner, dict) and "name" in inner and ("arguments" in inner or "parameters" in inner)


def call_of_json(value: Any) -> ToolCall:
    """The call that a JSON value describes, also in OpenAI's form, with `function` around it."""
    if not isinstance(value, dict):
        return malformed(f"got {shown(value)}")
    identity = value.get("id")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name, given = inner.get("name"), (inner.get("arguments"), inner.get("parameters"))
    if not isinstance(name, str):
        return malformed(f"its name is {shown(name)}")
    return _with_arguments(name, next((each for each in given if each not in (None, "")), None), identity)


def _with_arguments(name: str, arguments: Any, identity: Any = None, form: str = _OBJECT) -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments.strip() or "null")
        except (ValueError, RecursionError):
            return malformed(f"the arguments are the text {shown(arguments)}", name, form)
    if not isinstance(arguments, dict | None):
        return malformed(f"the arguments are {shown(arguments)}", name, form)
    return ToolCall(name, arguments or {}, identity if isinstance(identity, str) else None)


def malformed(reason: str, name: str | None = None, form: str = _OBJECT) -> ToolCall:
    """A call that cannot be made, and why."""
    return ToolCall(name, problem=f"a call must be {form}; this one is not: {reason}")


# ----------------------------------------------------------------------------------- readers of the forms


def _json_block(reading: Reading, at: int, form: Form) -> Found:
    """Calls as JSON, each after the other or in a list, up to the closing marker or another opening."""
    try:
        tags = (*form.closing, form.opening)
        values, end = json_values(reading, at, len(reading.text), tags, form.closed)
    except Malformed as error:
        return Found([malformed(f"it {error}")], error.end)
    return Found([*map(call_of_json, values)] or [malformed("there is nothing in it")], end)


def _mistral(reading: Reading, at: int, form: Form) -> Found:
    """A name, perhaps an id, and the arguments in JSON."""
    head = _MISTRAL.match(reading.text, at)
    if head is None:
        return Found([malformed(f"got {start_of(reading.text, at)}", form=form.written)], at)
    name, begin = head[1], head.end()
    try:
        arguments, end = decoded(reading, begin, begin, None)
    except Malformed as error:
        return Found([malformed(f"the arguments {error}", name, form.written)], error.end)
    return Found([_with_arguments(name, arguments, head[2], form.written)], end)


def _mistral_list(reading: Reading, at: int, form: Form) -> Found:
    """A list of calls in JSON, with or without ids, or one call."""
    begin = reading.skip(at)
    try:
        value, end = decoded(reading, begin, begin, None)
        values = value if isinstance(value, list) else [value]
        while reading.text.startswith("{", after := reading.skip(end, BETWEEN)):
            value, end = decoded(reading, after, begin, None)
            values.append(value)
    except Malformed as error:
        return Found([malformed(f"it {error}")], error.end)
    return Found([*map(call_of_json, values)] or [malformed("there is nothing in it")], end)


def _parameters(reading: Reading, at: int, form: Form) -> Found:
    """`<function=name>`, and between `<parameter=key>` and `</parameter>` each argument as a text."""
    head = _FUNCTION.match(reading.text, at)
    assert head is not None, "the row's opening says so"
    name, at = head[1].strip(), head.end()
    arguments: dict[str, Any] = {}
    while (key := _PARAMETER.match(reading.text, at)) is not None:
        # A value may hold the text of the markup: it ends where another parameter or the call's end follows.
        end = reading.search(_PARAMETER_END, key.end()) or reading.search(_PARAMETER_CUT, key.end())
        if end is None:
            return _cut(reading, name, f"the parameter {shown(key[1])} is not closed", key.end(), form)
        value = reading.text[key.end() : end.start()]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key[1].strip()] = reading.typed(name, key[1].strip(), value)
        at = end.end()
    closing = _FUNCTION_END.match(reading.text, at)
    if closing is None:
        return _cut(reading, name, f"got {start_of(reading.text, at)} in place of </function>", at, form)
    return Found([ToolCall(name, arguments)], closing.end())


def _keys(reading: Reading, at: int, form: Form) -> Found:
    """A name, and for each argument its key and its value, a text or JSON, in tags."""
    head = _GLM_NAME.match(reading.text, at)
    assert head is not None, "the row's opening says so"
    name, at = head[1], head.end()
    arguments: dict[str, Any] = {}
    while (key := _GLM_KEY.match(reading.text, at)) is not None:
        end = reading.search(_GLM_VALUE_END, key.end())
        if end is None:
            return _cut(reading, name, f"the value of {shown(key[1])} is not closed", key.end(), form)
        arguments[key[1].strip()] = reading.typed(name, key[1].strip(), reading.text[key.end() : end.start()])
        at = end.end()
    if not reading.text.startswith("</tool_call>", at := reading.skip(at)):
        return _cut(reading, name, f"got {start_of(reading.text, at)} in place of </tool_call>", at, form)
    return Found([ToolCall(name, arguments)], at)


def _cut(reading: Reading, name: str, reason: str, at: int, form: Form) -> Found:
    return Found([malformed(reason, name, form.written)], before_closing(reading, at, form.closed))


def _gemma(reading: Reading, at: int, form: Form) -> Found:
    """`call:name{key:value,…}`, with texts between markers of their own."""
    head = _GEMMA.match(reading.text, at)
    if head is None:
        return _cut(reading, "", f"got {start_of(reading.text, at)}", at, form)
    try:
        arguments, end = Literals(reading, form.quote).mapping(head.end())
    except Malformed as error:
        return _cut(reading, head[1], str(error), error.end, form)
    return Found([ToolCall(head[1], arguments)], end)


def _python(reading: Reading, at: int, form: Form) -> Found:
    """Calls of functions with arguments by name, one a line or in a list; values of Python or JSON."""
    calls: list[ToolCall] = []
    name = None
    is_list = reading.text.startswith("[", at := reading.skip(at))
    at = reading.skip(at + is_list, BETWEEN)
    try:
        while at < len(reading.text) and not reading.text.startswith(("]", *form.closing), at):
            head = _PYTHON_CALL.match(reading.text, at)
            if head is None:
                raise Malformed(f"got {start_of(reading.text, at)} in place of name(key=value)", at)
            name = head[1]
            arguments, at = _keywords(reading, head.end())
            calls.append(ToolCall(name, arguments))
            at = reading.skip(at, BETWEEN)
    except Malformed as error:
        return _cut(reading, name or "", str(error), error.end, form)
    if is_list and not reading.text.startswith("]", at):
        return _cut(reading, name or "", "the list is not closed", at, form)
    at = reading.skip(at + is_list)
    return Found(calls or [malformed("there is nothing in it", form=form.written)], at)


def _keywords(reading: Reading, at: int) -> tuple[dict[str, Any], int]:
    """The arguments after the `(` of a call, and where the call ends."""
    arguments: dict[str, Any] = {}
    literals, at = Literals(reading), reading.skip(at)
    while not reading.text.startswith(")", at):
        key = _KEY.match(reading.text, at)
        if key is None:
            raise Malformed(f"got {start_of(reading.text, at)} in place of key=value", at)
        arguments[key[1]], at = literals.value(key.end())
        at = reading.skip(at)
        if not reading.text.startswith((",", ")"), at):
            raise Malformed(f"got {start_of(reading.text, at)} in place of `,` or `)`", at)
        at = reading.skip(at + reading.text.startswith(",", at))
    return arguments, at + 1


def _deepseek(reading: Reading, at: int, form: Form) -> Found:
    """Calls between markers of their own; the arguments in JSON, of V3 and R1 in a ``` block."""
    calls: list[ToolCall] = []
    at = reading.skip(at)
    while (head := _DEEPSEEK.match(reading.text, at)) is not None:
        name = head[1] or head[2]
        try:
            arguments, at = decoded(reading, head.end(), head.end(), _DEEPSEEK_END)
        except Malformed as error:
            return Found([*calls, malformed(f"the arguments {error}", name, form.written)], error.end)
        calls.append(_with_arguments(name, arguments, None, form.written))
        at = reading.skip(at, _DEEPSEEK_AFTER)
    return Found(calls or [malformed(f"got {start_of(reading.text, at)}", form=form.written)], at)


def _harmony(reading: Reading, at: int, form: Form) -> Found:
    """A message to a function, whose header has the name."""
    head = _HARMONY_HEAD.match(reading.text, at)
    if head is None or (to := _HARMONY_TO.search(head[0])) is None:
        return Found([], at)
    name, begin = to[1], reading.skip(head.end())
    if reading.text.startswith(form.closing, begin):
        return Found([ToolCall(name)], begin)
    try:
        arguments, end = decoded(reading, begin, begin, form.closed)
    except Malformed as error:
        return Found([malformed(f"the arguments {error}", name, form.written)], error.end)
    return Found([_with_arguments(name, arguments, None, form.written)], end)


_MISTRAL = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(\[ARGS\]\s*|(?=\{{))?")
_FUNCTION = re.compile(r"\s*(?:<function=)?([^>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_PARAMETER_CUT = re.compile(r"(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"\s*</function>")
_GLM_NAME = re.compile(rf"\s*({_NAME})\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
_GEMMA = re.compile(rf"\s*call:\s*({_NAME})\s*\{{")
_PYTHON_CALL = re.compile(rf"({_NAME})\s*\(\s*")
_DEEPSEEK = re.compile(
    rf"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>({_NAME})\s*```(?:json)?|({_NAME})<｜tool▁sep｜>)\s*"
)
_DEEPSEEK_END = re.compile(r"<｜tool▁call▁end｜>")
_DEEPSEEK_AFTER = re.compile(r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>\s*)?")
_HARMONY_HEAD = re.compile(r"(?:(?!<\|message\|>|<\|start\|>).){0,300}<\|message\|>", re.DOTALL)
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


# ---------------------------------------------------------------------- readers of answers that are calls


def _whole_json(reading: Reading, at: int, form: Form) -> Found:
    """An object or a list of objects in JSON, perhaps in a ``` block; several after each other."""
    text, opening = reading.text, WHOLE_OPENING.match(reading.text, at)
    assert opening  # it matches nothing, too
    if text.startswith("[TOOL_CALLS]", opening.end()):  # a block of its own, and no list
        return Found([], at)
    at, is_closed = opening.end(), text.endswith(FENCE) if opening[2] else True
    end = len(text) - len(FENCE) if opening[2] and is_closed else len(text)
    if text.startswith(("{", "["), at):
        try:
            values, _ = json_values(reading, at, end)
        except Malformed as error:
            after = reading.search(MARKUP, error.end)
            said = text[at : after.start() if after else end]
            may_be = is_closed or text.find(FENCE, error.end) < 0  # text after a block: an example
            if may_be and '"name"' in said and ('"arguments"' in said or '"parameters"' in said):
                return Found([malformed(f"it {error}")], error.end)
        else:
            if values and is_call(values[0]):
                return Found([*map(call_of_json, values)], len(text))
    return Found([malformed(f"got {start_of(text, at, end)}")] if opening[1] else [], at)


def _whole_tag(reading: Reading, at: int, form: Form) -> Found:
    """The rest of an answer that begins with a marker, as if it were a whole one."""
    begin = at - len(form.opening)
    return next(
        (found for read in (_method, _whole_json) if (found := read(reading, begin, form)).calls),
        Found([], at),
    )


def _method(reading: Reading, at: int, form: Form) -> Found:
    """The call `name.call(key="value", …)`, whose values are JSON."""
    method = _METHOD.match(reading.text, at)
    if method is None or not reading.text.endswith(")"):
        return Found([], at)
    arguments: dict[str, Any] = {}
    name, at, end = method[1], method.end(), len(reading.text) - 1
    while at < end:
        key = _KEY.match(reading.text, at)
        if key is None:
            reason = f"got {start_of(reading.text, at, end)} in place of key=value"
            return Found([malformed(reason, name)], at)
        try:
            arguments[key[1]], at = decoded(reading, key.end(), key.end())
        except Malformed as error:
            return Found([malformed(f"{key[1]} {error}", name)], error.end)
        at = reading.skip(at, BETWEEN)
    return Found([ToolCall(name, arguments)], len(reading.text))


def _whole_python(reading: Reading, at: int, form: Form) -> Found:
    """Calls in a list: `[name(key="value"), …]`."""
    if _PYTHON_LIST.match(reading.text, at) and reading.text.endswith("]"):
        found = _python(reading, at, form)
        if found.end == len(reading.text) and all(call.problem is None for call in found.calls):
            return found
    return Found([], at)


def _whole_lines(reading: Reading, at: int, form: Form) -> Found:
    """Of GLM-4: the name of a tool in a line, then its arguments in JSON; several after each other."""
    calls: list[ToolCall] = []
    begin = at
    while (head := _LINE.match(reading.text, at)) is not None and head[1] in reading.schemas:
        try:
            arguments, at = decoded(reading, head.end(), head.end())
        except Malformed as error:
            return Found([*calls, malformed(f"the arguments {error}", head[1], form.written)], error.end)
        calls.append(_with_arguments(head[1], arguments, None, form.written))
    return Found(calls, len(reading.text)) if reading.skip(at) == len(reading.text) else Found([], begin)


FENCE = "```"
WHOLE_OPENING = re.compile(r"\s*(<\|python_tag\|>\s*)?(```(json)?\s*)?(?:functools(?=\[))?")
_METHOD = re.compile(r"\s*(?:<\|python_tag\|>\s*)?([A-Za-z_]\w*)\.call\(\s*")
_PYTHON_LIST = re.compile(rf"\s*\[\s*{_NAME}\(")
_LINE = re.compile(rf"\s*({_NAME})[^\S\n]*\n\s*(?=\{{)")


# ------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Form:
    """A form of calls, and the models whose templates write it.

    A block of calls begins with the marker `opening`, which `follows` follows; `read` reads from behind the
    marker on; the block ends with one of `closing`, or where reading ended. Without `opening`, a whole answer
    has the form, or one that begins after its thoughts. `tokens` are further markers inside. `quote` begins
    and ends texts in it.
    """

    models: str
    written: str
    read: Callable[[Reading, int, Form], Found]
    opening: str = ""
    closing: tuple[str, ...] = ()
    follows: str = ""
    tokens: tuple[str, ...] = ()
    quote: str | None = None

    @property
    def closed(self) -> re.Pattern[str] | None:
        """What closes a block."""
        return re.compile("|".join(map(re.escape, self.closing))) if self.closing else None


_TAGS = ("<tool_call>", ("</tool_call>",))
_XML = "<function=name> <parameter=key> value </parameter> </function>"
_PYTHON = "name(key=value)"

# Rows with the same opening are tried in this order.
FORMS = (
    Form("Qwen3-Coder, Qwen3.5", _XML, _parameters, *_TAGS, follows=r"\s*<function=[^>\n]+>"),
    Form("the same without <tool_call>", _XML, _parameters, "<function=", ("</tool_call>",), r"[^<>\n]+>"),
    Form(
        "GLM-4.5",
        "name <arg_key>key</arg_key> <arg_value>value</arg_value>",
        _keys,
        *_TAGS,
        follows=_GLM_NAME.pattern,
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Form("Qwen2.5, Qwen3, Hermes, Granite, SmolLM3", _OBJECT, _json_block, *_TAGS),
    Form("Mistral before 2025", _OBJECT, _mistral_list, "[TOOL_CALLS]", follows=r"\s*[\[{]"),
    Form(
        "Ministral 3, Mistral Small 3.2, Devstral",
        "[TOOL_CALLS]name[ARGS]{key: value}",
        _mistral,
        "[TOOL_CALLS]",
        tokens=("[ARGS]", "[CALL_ID]"),
    ),
    Form("Phi-4-mini", _OBJECT, _json_block, "<|tool_call|>", ("<|/tool_call|>",)),
    Form(
        "Gemma 4",
        "call:name{key:value}",
        _gemma,
        "<|tool_call>",
        ("<tool_call|>",),
        tokens=('<|"|>',),
        quote='<|"|>',
    ),
    Form(
        "FunctionGemma",
        "call:name{key:value}",
        _gemma,
        "<start_function_call>",
        ("<end_function_call>",),
        tokens=("<escape>",),
        quote="<escape>",
    ),
    Form("Gemma 3", _PYTHON, _python, "```tool_code", (FENCE,)),
    Form("OLMo 3", _PYTHON, _python, "<function_calls>", ("</function_calls>",)),
    Form(
        "DeepSeek V3, R1 and V3.1",
        "name and arguments in JSON between its markers",
        _deepseek,
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁calls▁end｜>",),
        tokens=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    Form(
        "gpt-oss",
        "a message to=functions.name with arguments in JSON",
        _harmony,
        "<|start|>assistant",
        ("<|call|>", "<|end|>", "<|return|>"),
        r"\s*(?:<\|channel\|>)?[^<]*\bto=",
    ),
    Form("Llama 3 after a text", _OBJECT, _whole_tag, "<|python_tag|>"),
    Form("Llama 3, its built-in tools", "name.call(key=value)", _method),
    Form("Llama 3, Gemma 3, Phi-4-mini (functools[…]) and others", _OBJECT, _whole_json),
    Form("Llama 3.2 and 4, Gemma 3", f"[{_PYTHON}]", _whole_python),
    Form("GLM-4", "the name in a line, then the arguments in JSON", _whole_lines),
)
WHOLE = tuple(form for form in FORMS if not form.opening)
OPENINGS = tuple(dict.fromkeys(form.opening for form in FORMS if form.opening))
MARKERS = frozenset(
    token
    for form in FORMS
    for token in (form.opening, *form.closing, *form.tokens)
    if token and FENCE not in token and form.read is not _harmony
)
"""Texts of tokens that a call has, which are special tokens in some vocabularies.

Those of Harmony's messages are other models' ends of turns, and markers where it has all of them.
"""
THOUGHT, THOUGHT_END = "<think>", "</think>"
MARKUP = re.compile("|".join(map(re.escape, (THOUGHT, THOUGHT_END, *OPENINGS))))


def form_of(text: str, at: int, opening: str) -> Form | None:
    """The form of a block that begins with `opening`, which ends at `at`; None if it begins none."""
    rows = (form for form in FORMS if form.opening == opening)
    return next((form for form in rows if re.compile(form.follows).match(text, at)), None)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schemas of the arguments of tools in OpenAI's form, by the tools' names."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
