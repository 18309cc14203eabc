"""The overrides in a shell script that starts another library: `key=value` words, with variables filled in.

Read are assignments (`NAME=value`, also after `export` and the like), `$NAME`, `${NAME}`, `${NAME:-default}`,
`$((arithmetic))`, arrays of overrides, and lines that go on. Nothing is run: what a command, the environment
or an argument of the script would give stays as it is written, and `is_unset` finds it.
"""

import ast
import operator
import re
import shlex
from collections.abc import Mapping
from typing import Any

OVERRIDE = re.compile(r"(?P<sign>[+~]{0,2})(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_ARRAY = re.compile(r"^\s*\w+\+?=\((?!\()")
_NAME = re.compile(r"\$(\w+)")
_BRACES = re.compile(r"(\w+)(?::?[-=](.*))?", re.DOTALL)
_UNSET = re.compile(r"\$\w+|\$\{\w+([^\w.].*)?\}|\$\([^(].*\)|`.*`", re.DOTALL)
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b),
    ast.LShift: lambda a, b: a << min(b, 64),
    ast.RShift: operator.rshift,
}
_MAX_DEPTH = 20


def overrides_of(text: str) -> list[str]:
    """The words `key.key=value` of a script, in order."""
    variables: dict[str, str] = {}
    overrides: list[str] = []
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in code.replace("\\\n", " ").splitlines():
        words = _words(line, variables)
        while words and (words[0] in _DECLARES or words[0].startswith("-")):
            words = words[1:]
        found = [(word, match) for word in words if (match := OVERRIDE.fullmatch(word))]
        if found and len(found) == len(words) and "." not in found[0][1]["key"]:
            variables |= {match["key"]: match["value"].rstrip(";") for _, match in found}
        else:
            overrides += [word for word, match in found if "." in match["key"]]
    return overrides


def is_unset(value: Any) -> bool:
    """Whether a value is a variable, a command or arithmetic that the script alone does not say."""
    return isinstance(value, str) and ("$((" in value or _UNSET.fullmatch(value) is not None)


def _words(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a line, filled in; none if a quotation mark is closed in another line."""
    if _ARRAY.match(line):
        line = _ARRAY.sub("", line)
    if line.rstrip().endswith(")") and line.count("(") < line.count(")"):
        line = line.rstrip()[:-1]
    kept: list[str] = []
    text = re.sub(r"(?<=\S)#", "\1", _filled(line, variables, kept))  # no comment begins within a word
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return []
    words = [word.replace("\1", "#") for word in words]
    return [re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], word) for word in words]


def _filled(text: str, variables: Mapping[str, str], kept: list[str], depth: int = _MAX_DEPTH) -> str:
    """`text` with what is known; what is in brackets and is not becomes `\\0number\\0`, a place of `kept`."""
    parts, at = [], 0
    while (dollar := text.find("$", at)) >= 0 and depth:
        parts.append(text[at:dollar])
        opened = text[dollar + 1 : dollar + 2]
        if opened in ("{", "(") and (end := _closed(text, dollar + 1)):
            inside = text[dollar + 2 : end - 1]
            parts.append(
                _of_braces(text[dollar:end], inside, variables, kept, depth)
                if opened == "{"
                else _of_parentheses(text[dollar:end], inside, variables, kept, depth)
            )
            at = end
        elif name := _NAME.match(text, dollar):
            parts.append(_known(name[1], variables, kept) or name[0])
            at = name.end()
        else:
            parts.append("$")
            at = dollar + 1
    return "".join([*parts, text[at:]])


def _known(name: str, variables: Mapping[str, str], kept: list[str]) -> str:
    """The value of a variable; empty if the script does not set it."""
    return _filled(variables.get(name, ""), {}, kept, 1)


def _closed(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`; 0 if none does."""
    opens, closes = text[start], {"{": "}", "(": ")"}[text[start]]
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == opens) - (text[at] == closes)
        if not depth:
            return at + 1
    return 0


def _of_braces(whole: str, inside: str, variables: Mapping[str, str], kept: list[str], depth: int) -> str:
    """The value of `${NAME}` or `${NAME:-default}`, or a place of `kept`."""
    found = _BRACES.fullmatch(inside)
    if found is None:
        return _kept(whole, kept)
    if found[1] in variables:
        return _known(found[1], variables, kept)
    if found[2] is None:
        return _kept(whole, kept)
    default = found[2]
    if len(default) > 1 and default[0] == default[-1] == '"':
        default = default[1:-1]
    return _filled(default, variables, kept, depth - 1)


def _of_parentheses(
    whole: str, inside: str, variables: Mapping[str, str], kept: list[str], depth: int
) -> str:
    """The number of `$((arithmetic))`, or a place of `kept`."""
    if inside.startswith("(") and inside.endswith(")"):
        expression = _filled(inside[1:-1], variables, [], depth - 1)
        expression = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), expression)
        try:
            return str(_number(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            pass
    return _kept(whole, kept)


def _kept(text: str, kept: list[str]) -> str:
    """A place of `kept` for `text`, at whose spaces no word ends."""
    kept.append(text)
    return f"\0{len(kept) - 1}\0"


def _number(node: ast.expr) -> int:
    """The value of integers, + - * / % and shifts, as a shell computes it; raises ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no arithmetic of integers")
