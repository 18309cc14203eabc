"""The chat template of a run: the tokenizer's own or `data.chat_template`, and the variables passed to it.

Data flow: tokenizer (`tokenizer.py`) -> `with_chat_template` -> prompts, and the exported model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quatrain.config.buckets import local_file
from quatrain.config.errors import listed, shown
from quatrain.config.schema import DataConfig
from quatrain.data.messages import without_nulls
from quatrain.data.tokenizer import fill_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CHARS = 1_000_000
VARIABLES = "chat_template_kwargs"
"""The column with the variables that the chat template gets for a row."""
RESERVED = frozenset(
    (
        *("conversation", "messages", "chat_template", "tools", "documents", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Variables that the data or the rendering sets, and arguments of the function that renders."""
# A tag that only transformers knows; it changes no text.
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def with_chat_template(tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> PreTrainedTokenizerFast:
    """`tokenizer` with the template and the variables of `data`; it is changed in place.

    `tokenizer.template_variables` are the variables that every rendering passes (`tokenizer.py`). Raises
    ValueError if the file is missing, the template is not valid, or it does not read a variable.
    """
    if data.chat_template is not None:
        tokenizer.chat_template = _template(data.chat_template)
    variables = dict(data.chat_template_kwargs)
    if variables:
        check_variables(variables, tokenizer.chat_template, "data.chat_template_kwargs")
    tokenizer.template_variables = variables
    return tokenizer


def begun_answer(tokenizer: PreTrainedTokenizerFast) -> str:
    """What the chat template writes of each answer, from `<think>` on, as that of DeepSeek R1 does."""
    question = [{"role": "user", "content": "QUESTION"}]
    try:
        _, _, text = fill_template(tokenizer, question, add_generation_prompt=True).rpartition("QUESTION")
    except ValueError:  # no template, or one that takes other messages only
        return ""
    _, tag, rest = text.rpartition("<think>")
    return tag + rest if tag else ""


def _template(value: str) -> str:
    """The template itself, of a template or of the path of a file."""
    text, name = value, "data.chat_template"
    if "{{" not in value and "{%" not in value:
        path = local_file(value)
        name = f"data.chat_template {path}"
        if not path.is_file():
            raise ValueError(
                f"data.chat_template must be a template, with {{{{ or {{%, or the path of a file; got "
                f"{shown(value)}, and there is no such file (looked in {path.parent.absolute()})"
            )
        try:
            with path.open(encoding="utf-8-sig") as file:
                text = file.read(MAX_CHARS + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} must be a text file in UTF-8: {error}") from error
    if len(text) > MAX_CHARS:
        raise ValueError(f"{name} must have at most {MAX_CHARS} characters; shorten it")
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{name} must be a chat template in Jinja; it has neither {{{{ nor {{%")
    _variables(text, name)
    return text


def variables_of(columns: Mapping[str, Any], template: Any) -> dict[str, Any]:
    """The variables for the chat template that the column `chat_template_kwargs` of a row has.

    A mapping, or its JSON text; null: none. Raises ValueError for others, and as `check_variables` does.
    """
    given = columns.get(VARIABLES)
    if given is None:
        return {}
    with suppress(ValueError, RecursionError):
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"the column `{VARIABLES}` must be a mapping of variables that the chat template reads, as "
            f"{{enable_thinking: false}}, or null; it is {shown(given)}; correct the row"
        )
    variables: dict[str, Any] = without_nulls(given)
    if variables:
        texts = tuple(template.values()) if isinstance(template, dict) else template
        _check_names(tuple(variables), texts)
    return variables


@lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...], template: Any) -> None:
    """`check_variables` for the column of rows, of which many have the same names."""
    texts = dict(enumerate(template)) if isinstance(template, tuple) else template
    check_variables(dict.fromkeys(names), texts, f"the column `{VARIABLES}`")


def check_variables(variables: Mapping[str, Any], template: Any, key: str) -> None:
    """Raises ValueError, which names `key`, for variables that a template does not read or rendering sets."""
    if not template:
        raise ValueError(
            f"{key} has {listed(variables)}, and the tokenizer has no chat template; set data.chat_template, "
            "or leave the key out"
        )
    if taken := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{key} must not have {listed(taken)}, which rendering sets itself; leave it out")
    read = _read_by(template)
    if unknown := sorted(variables.keys() - read):
        raise ValueError(
            f"{key} must name variables that the chat template reads, which are "
            f"{listed(sorted(read - RESERVED))}; got {listed(unknown)}; correct the name or leave it out"
        )


def reads_variable(template: Any, name: str) -> bool:
    """Whether a tokenizer's chat template, if it has one, reads a variable."""
    return bool(template) and name in _read_by(template)


def _read_by(template: Any) -> set[str]:
    """The variables that a tokenizer's chat template reads, or one of several."""
    texts = template.values() if isinstance(template, dict) else [template]
    return set().union(*(_variables(text, "the tokenizer's chat template") for text in texts))


def _variables(template: str, name: str) -> set[str]:
    """The variables that a template reads; it is parsed and not run. Raises ValueError if it is not valid."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:
        return find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"{name} must be a valid template: {error}{line}; correct it") from error
    except RecursionError as error:
        raise ValueError(f"{name} must be a valid template: it is nested too deep; correct it") from error
