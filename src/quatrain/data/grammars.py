"""Grammars that answers follow: of JSON schemas, and of calls of tools in the form of a chat template.

Data flow: a schema, or tools -> a grammar, the text that llguidance reads -> `PerRequestSampling.grammar` ->
`engine/masks.py`, which compiles it. Nothing is checked here: `Sampler.check_grammar` says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quatrain.data.tool_calls import Beginning, beginning_of_calls, written_call
from quatrain.data.turns import CALL_ID, STAND_IN
from quatrain.types.answer_text import CHANNEL, MESSAGE, AnswerTokens

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any object."""
MOST_BLANKS = 40
"""Characters of white space between two tokens of JSON: some models write it without end."""
_KEY, _VALUE, _OTHER_KEY, _OTHER_VALUE = "STANDKEY", "STANDVALUE", "OTHERKEY", "OTHERVALUE"
_NAME_LAST = re.compile(rf'^,\s*"name":\s*"{STAND_IN}"')
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords of a schema that limit nothing."""
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "$schema"})
"""Keywords of a schema of arguments between tags, of which those alone are written that it names."""
_NO_CALLS = (
    "response_format beside tools needs calls of which a grammar is known: that of this chat template, or "
    "of the schemas of these tools, is not (docs/serve.md); set tool_choice to none, or leave "
    "response_format out"
)

Schema = Mapping[str, Any] | bool


def of_schema(schema: Schema) -> str:
    """The grammar of a JSON value that fits a schema."""
    return _grammar(f"start: {_json(schema)}")


def of_answer(
    schema: Schema, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), *, blanks: int = MOST_BLANKS
) -> str:
    """The grammar of an answer in a chat: a JSON value that fits a schema, or a call of one of `tools`.

    `blanks`: characters of white space at most, at each place of the value that may have it.

    Raises ValueError if there are tools whose calls have no known grammar.
    """
    added = _added(tokenizer)
    head = _terms(f"{CHANNEL}final{MESSAGE}", added) if AnswerTokens(tokenizer).is_harmony else ""
    lines = [f"start: {head} {_json(schema, blanks)}"]
    if tools:
        form = _Form.of(tokenizer, tools)
        calls = None if form is None else form.calls(tools, None)
        if form is None or calls is None:
            raise ValueError(_NO_CALLS)
        lines = [f"{lines[0]} | {_terms(form.beginning.before, added)} call", *calls]
    return _grammar(*lines)


def of_call(tokenizer: Any, tools: Sequence[Mapping[str, Any]], name: str | None) -> str | None:
    """The grammar of what follows `begun_call`, up to the end of the call; None where none is known.

    `name` is the tool that is called; None: any of `tools`. Raises ValueError as `begun_call` does.
    """
    form = _Form.of(tokenizer, tools)
    calls = None if form is None else form.calls(tools, name)
    return None if calls is None else _grammar("start: call", *calls)


def _grammar(*lines: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}]}, ensure_ascii=False)


def _json(schema: Schema, blanks: int = MOST_BLANKS) -> str:
    """A term: a JSON value."""
    options = {"whitespace_pattern": f"[ \\n\\t]{{0,{blanks}}}", "lenient": False}
    whole = {**schema} if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return f"%json {json.dumps({**whole, 'x-guidance': options}, ensure_ascii=False)}"


def _added(tokenizer: Any) -> dict[str, int]:
    """The ids of tokens that are no part of a text's vocabulary, by their texts."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}


def _terms(text: str, added: Mapping[str, int]) -> str:
    """Terms: a text, in which `added` tokens are tokens: llguidance takes many of them for no text."""
    longest_first = sorted(added, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text) if added else [text]
    each = (
        f"<[{added[part]}]>" if part in added else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
    return " ".join(each) or '""'


class _Tags(NamedTuple):
    """What stands before the key of an argument, between it and its value, and behind that."""

    before: str
    between: str
    behind: str


class _Form(NamedTuple):
    """How a chat template writes a call, behind its beginning: arguments in JSON, or each in tags."""

    added: Mapping[str, int]
    beginning: Beginning
    middle: str
    """Between the name and the arguments."""
    end: str
    """From the arguments to the end of the call."""
    tags: _Tags | None
    """None: arguments are JSON."""

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> _Form | None:
        """The form; None if it is neither of these. Raises ValueError as `begun_call` does."""
        beginning, answers = beginning_of_calls(tokenizer, tools), AnswerTokens(tokenizer)
        first = {_KEY: _VALUE}
        texts = [
            _without_special(written_call(tokenizer, arguments, tools)[0], tokenizer, answers)
            for arguments in ({}, first, {**first, _OTHER_KEY: _OTHER_VALUE})
        ]
        found = _json_form(*texts) or _tagged_form(*texts)
        if found is None:
            return None
        head, end, tags = found
        _, named, middle = head.rpartition(STAND_IN)
        if not named:  # arguments stand before the name, which is begun first
            middle, end = beginning.after + " ", _NAME_LAST.sub("", end)
        end = end.partition("<|call|>")[0] if answers.is_harmony else end  # which ends the answer
        return cls(_added(tokenizer), beginning, middle, end.rstrip(), tags)

    def calls(self, tools: Sequence[Mapping[str, Any]], name: str | None) -> list[str] | None:
        """The rules of a call of one of `tools` behind its beginning; None where none are known."""
        rules = []
        for tool in tools:
            own, schema = tool["function"]["name"], tool["function"].get("parameters") or JSON_OBJECT
            if name not in (None, own):
                continue
            begun = self.beginning.before if name is None else self.beginning.begun(own)
            rest = (self.beginning.named(own) + self.middle).removeprefix(begun)
            arguments = _json(schema) if self.tags is None else _tagged(schema, self.tags, self.added)
            if arguments is None:
                return None
            rules.append(f"{_terms(rest, self.added)} {arguments} {self._closing}")
        names = [f"call_{number}" for number in range(len(rules))]
        lines = [f"call: {' | '.join(names)}", *map(": ".join, zip(names, rules, strict=True))]
        return lines if self.tags is None else [*lines, _free_text_rule(self.tags)]

    @property
    def _closing(self) -> str:
        before, has_id, after = self.end.partition(CALL_ID)
        terms = _terms(before, self.added)
        return f"{terms} /[a-zA-Z0-9]{{9}}/ {_terms(after, self.added)}" if has_id else terms


def _without_special(text: str, tokenizer: Any, answers: AnswerTokens) -> str:
    """A text as `AnswerTokens` has it, but with thoughts and headers: without special tokens but markers."""
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special and number not in answers.markers:
            text = text.replace(token.content, "")
    return text


def _common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


_Found = tuple[str, str, _Tags | None]


def _json_form(none: str, one: str, two: str) -> _Found | None:
    """(what stands before the arguments, what behind, no tags) of a call with none, one and two of them."""
    size = _common(none, one)
    if none[size - 1 : size + 1] != "{}":
        return None
    head, end = none[: size - 1], none[size + 1 :]
    for text, arguments in ((one, {_KEY: _VALUE}), (two, {_KEY: _VALUE, _OTHER_KEY: _OTHER_VALUE})):
        try:
            if not (text.startswith(head) and text.endswith(end)):
                return None
            if json.loads(text[len(head) : len(text) - len(end)]) != arguments:
                return None
        except ValueError:
            return None
    return head, end, None


def _tagged_form(none: str, one: str, two: str) -> _Found | None:
    """(what stands before the arguments, what behind, their tags), as `_json_form`."""
    size = _common(none, one)
    size -= none[:size].endswith("<")  # of a tag that follows either way
    head, end = none[:size], none[size:]
    argument = one[size : len(one) - len(end)]
    before, key, rest = argument.partition(_KEY)
    between, value, behind = rest.partition(_VALUE)
    another = before + _OTHER_KEY + between + _OTHER_VALUE + behind
    if not (key and value and behind.strip().startswith("</")) or one != head + argument + end:
        return None
    return (head, end, _Tags(before, between, behind)) if two == head + argument + another + end else None


# -------------------------------------------------------------------------------- arguments between tags


def _tagged(schema: Schema, tags: _Tags, added: Mapping[str, int]) -> str | None:
    """Terms: the arguments of a schema, each in its tags, in its order; None where none are known."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return None
    if (
        schema.keys()
        - _NOTES
        - {"type", "properties", "required", "additionalProperties", "$defs", "$schema"}
    ):
        return None
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not set(required) <= properties.keys():
        return None
    terms = []
    for key, own in properties.items():
        value = _tagged_value(own, schema.get("$defs", {}), tags, added)
        if value is None or not re.fullmatch(r"[^<>\n]+", key):
            return None
        term = f"{_terms(tags.before + key + tags.between, added)} {value}"
        terms.append(term if key in required else f"({term})?")
    return " ".join(terms) or '""'


def _tagged_value(own: Any, definitions: Any, tags: _Tags, added: Mapping[str, int]) -> str | None:
    """Terms: a value and what stands behind it, which `Reading.typed` reads as one that fits its schema."""
    if not isinstance(own, Mapping):
        return None
    kind, limits = own.get("type"), own.keys() - _NOTES
    behind = _terms(tags.behind, added)
    if kind == "string" and "enum" in limits and limits <= {"type", "enum"}:
        words = own["enum"]
        if not all(
            isinstance(word, str) and word == word.strip() and tags.behind.strip() not in word
            for word in words
        ):
            return None
        return f"({' | '.join(json.dumps(word, ensure_ascii=False) for word in words)}) {behind}"
    if kind == "string":
        return _free_text(tags, added) if limits == {"type"} else None
    if kind in ("integer", "number", "boolean", "array", "object"):
        whole = {**own, "$defs": definitions} if definitions else own
        return f"{_json(whole)} {behind}"
    return None


def _free_text_rule(tags: _Tags) -> str:
    """The rule of a text up to the tag behind it, which is part of what the rule reads."""
    return f"free_text[suffix={json.dumps(_closing_tag(tags))}]: /(?s:.*)/"


def _closing_tag(tags: _Tags) -> str:
    return tags.behind.lstrip().partition(">")[0] + ">"


def _free_text(tags: _Tags, added: Mapping[str, int]) -> str:
    """Terms: a text up to the tag behind it, which it may not contain."""
    if (close := _closing_tag(tags)) in added:
        return f"/(?s:.*)/ {_terms(tags.behind.lstrip(), added)}"
    return f"free_text {_terms(tags.behind.lstrip().removeprefix(close), added)}"
