"""Reads the values in calls of tools: JSON, values as Gemma and Python write them, and texts that get a type.

Used by the readers of `call_forms.py`. What is read is untrusted: it is parsed, and never evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quatrain.config.errors import SHOWN_VALUE_LENGTH, shown

MOST_NESTED = 100
"""Levels of lists and objects in a value that is no JSON."""
_SPACE, BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;,]*")


class Reading:
    """A text that is read, and the JSON schemas of the arguments of tools, by the tools' names.

    A pattern that was searched for is not searched for in the same part again, so that reading takes time in
    proportion to the text.
    """

    def __init__(self, text: str, schemas: Mapping[str, Any]):
        self.text, self.schemas = text, schemas
        self._searched: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def search(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """The first match of `pattern`, which looks at nothing before it, from `at` on."""
        begin, found = self._searched.get(pattern, (len(self.text) + 1, None))
        if begin > at or (found is not None and found.start() < at):
            begin, found = at, pattern.search(self.text, at)
            self._searched[pattern] = begin, found
        return found

    def skip(self, at: int, pattern: re.Pattern[str] = _SPACE) -> int:
        """The position after the white space, or what else `pattern` is, at `at`."""
        found = pattern.match(self.text, at)
        return found.end() if found else at

    def typed(self, name: str, key: str, text: str) -> Any:
        """An argument that is written as a text: as the schema says; without one as JSON, if it is any."""
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        own = properties.get(key) if isinstance(properties, Mapping) else None
        kinds = _kinds(own)
        try:
            value = DECODER.decode(_PYTHON_WORDS.get(text.strip(), text.strip()))
        except (ValueError, RecursionError):
            return text
        if "string" in kinds and not (value is None and "null" in kinds):
            return text
        if kinds and _kind(value) not in kinds:
            if isinstance(value, float) and value.is_integer() and "integer" in kinds:
                return int(value)
            return value if isinstance(value, int) and "number" in kinds else text
        return text if isinstance(value, str) else value


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _kinds(schema: Any, depth: int = 8) -> set[str]:
    """The types that a JSON schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {*kind} if isinstance(kind, list) else set()
    for each in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(each)
        kinds |= (
            set[str]().union(*(_kinds(one, depth - 1) for one in inner)) if isinstance(inner, list) else set()
        )
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {_kind(value) for value in schema["enum"]}
    return {str(kind) for kind in kinds}


def _kind(value: Any) -> str:
    """The type of a value in the words of JSON schemas."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
    return next((kind for type_, kind in kinds if isinstance(value, type_)), "object")


class Malformed(ValueError):
    """What is wrong with a call, and where reading it ended."""

    def __init__(self, reason: str, end: int):
        super().__init__(reason)
        self.end = end


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


DECODER = json.JSONDecoder(parse_constant=_no_number)


_TAG_END = re.compile("</tool_call>")


def decoded(
    reading: Reading, at: int, begin: int, closing: re.Pattern[str] | None = _TAG_END
) -> tuple[Any, int]:
    """The JSON value at a position, and where it ends; messages count characters from `begin`.

    Raises Malformed, whose end is that of the text if a string is not closed, or what `closing` matches: what
    looks like other markup may be of the string.
    """
    try:
        return DECODER.raw_decode(reading.text, at)
    except json.JSONDecodeError as error:
        reason, end = f"{error.msg} at character {error.pos - begin}", error.pos
        in_string = error.msg.startswith(("Unterminated", "Invalid"))
    except RecursionError:
        reason, end, in_string = "it is nested too deep", at, True
    except ValueError as error:  # numbers that Python does not read
        reason, end, in_string = str(error), at, True
    raise Malformed(
        f"is no valid JSON: {reason}", before_closing(reading, end, closing) if in_string else end
    )


def before_closing(reading: Reading, at: int, closing: re.Pattern[str] | None) -> int:
    """Where what cannot be read from `at` on ends: before its closing marker, else with the text."""
    found = reading.search(closing, at) if closing else None
    return found.start() if found else len(reading.text)


def json_values(
    reading: Reading,
    at: int,
    end: int,
    tags: tuple[str, ...] = (),
    closing: re.Pattern[str] | None = _TAG_END,
) -> tuple[list[Any], int]:
    """The JSON values up to `end` or one of `tags`; the items of a list are values of their own."""
    values: list[Any] = []
    begin = at = reading.skip(at)
    while at < end and not reading.text.startswith(tags, at):
        value, at = decoded(reading, at, begin, closing)
        values += value if isinstance(value, list) else [value]
        at = reading.skip(at, BETWEEN)
    return values, at


class Literals:
    """Reads values of Gemma's calls and of Python: numbers, words, lists, objects, and strings in `quotes`.

    Keys of objects stand in quotes or plain.
    """

    def __init__(self, reading: Reading, quote: str | None = None):
        self._reading, self._text = reading, reading.text
        self._quote = None if quote is None else re.compile(re.escape(quote))

    def value(self, at: int, depth: int = 0) -> tuple[Any, int]:
        """The value at a position, and where it ends; raises Malformed."""
        at = self._reading.skip(at)
        if depth > MOST_NESTED:
            raise Malformed("it is nested too deep", at)
        if (string := self._string(at)) is not None:
            return string
        opened = self._text[at : at + 1]
        if opened in ("[", "("):
            return self._items(at + 1, "]" if opened == "[" else ")", depth)
        if opened == "{":
            return self.mapping(at + 1, depth)
        word = _WORD.match(self._text, at)
        if word is None:
            raise Malformed(f"got {start_of(self._text, at)} in place of a value", at)
        try:
            return DECODER.decode(_PYTHON_WORDS.get(word[0].strip(), word[0].strip())), word.end()
        except (ValueError, RecursionError):
            if self._quote is None:
                raise Malformed(f"got {start_of(self._text, at)} in place of a value", at) from None
            return word[0].strip(), word.end()

    def mapping(self, at: int, depth: int = 0) -> tuple[dict[str, Any], int]:
        """The members of an object after its `{`, and where it ends."""
        values: dict[str, Any] = {}
        at = self._reading.skip(at)
        while not self._text.startswith("}", at):
            if (quoted := self._string(at)) is not None:
                key, at = quoted
            elif (plain := _PLAIN_KEY.match(self._text, at)) is not None:
                key, at = plain[0].strip(), plain.end()
            else:
                raise Malformed(f"got {start_of(self._text, at)} in place of key:value", at)
            at = self._reading.skip(at)
            if not self._text.startswith(":", at):
                raise Malformed(f"got {start_of(self._text, at)} in place of a `:`", at)
            values[key], at = self.value(at + 1, depth + 1)
            at = self._next(at, "}")
        return values, at + 1

    def _items(self, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self._reading.skip(at)
        while not self._text.startswith(closing, at):
            value, at = self.value(at, depth + 1)
            values.append(value)
            at = self._next(at, closing)
        return values, at + 1

    def _next(self, at: int, closing: str) -> int:
        """The position after a comma, or of what closes; raises Malformed for what is neither."""
        at = self._reading.skip(at)
        if self._text.startswith(",", at):
            return self._reading.skip(at + 1)
        if not self._text.startswith(closing, at):
            raise Malformed(f"got {start_of(self._text, at)} in place of `,` or `{closing}`", at)
        return at

    def _string(self, at: int) -> tuple[str, int] | None:
        """The string at a position, and where it ends; None if there is none. Raises Malformed for half."""
        quote = self._quote.match(self._text, at) if self._quote else None
        if self._quote is not None and quote:
            end = self._reading.search(self._quote, quote.end())
            if end is None:
                raise Malformed("a text is not closed", len(self._text))
            return self._text[quote.end() : end.start()], end.end()
        if not self._text.startswith(('"', "'"), at):
            return None
        if self._text.startswith('"', at):
            try:
                return DECODER.raw_decode(self._text, at)
            except ValueError:  # Python's has escapes that JSON has not
                pass
        found = _STRING.match(self._text, at)
        if found is None:
            raise Malformed("a text is not closed", len(self._text))
        inner = (
            found[1] if found[1] is not None else found[2] if found[2] is not None else found[3] or found[4]
        )
        return _ESCAPE.sub(_unescaped, inner or ""), found.end()


_WORD = re.compile(r"[^\s\[\](){},:<\"'=][^\[\](){},:<\"'=]*")
_PLAIN_KEY = re.compile(r"[^\s\[\](){},:<\"'][^\[\](){},:<\"']*")
_STRING = re.compile(
    r'"""((?:[^"\\]|\\.|"(?!""))*+)"""'
    r"|'''((?:[^'\\]|\\.|'(?!''))*+)'''"
    r'|"((?:[^"\\\n]|\\.)*+)"'
    r"|'((?:[^'\\\n]|\\.)*+)'",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U000[0-9A-Fa-f]{5}|x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def _unescaped(found: re.Match[str]) -> str:
    what = found[1]
    if what[0] in "uUx" and len(what) > 1:
        return chr(int(what[1:], 16))
    return _ESCAPED.get(what, what if what in "\\'\"" else found[0])


def start_of(text: str, at: int, end: int | None = None) -> str:
    """The text from a position on, shortened, for a message."""
    return shown(text[at : min(len(text) if end is None else end, at + 2 * SHOWN_VALUE_LENGTH)])
