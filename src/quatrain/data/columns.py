"""Brings the columns of a data set into the form that is tokenised: `prompt`, `answer` and `completion`.

Data flow: rows (`rows.py`) -> `prepared` -> `prompts.py`. A column `messages`, as in data sets for
supervised training, becomes the prompt and, if it ends with the assistant's message, the demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quatrain.config.errors import listed, shown
from quatrain.config.schema import DataConfig
from quatrain.data.messages import joined_text
from quatrain.data.rows import Row

MESSAGES = "messages"


def prepared(spec: str, rows: list[Row], data: DataConfig, *, demonstrations: bool = False) -> list[Row]:
    """The rows of one file or data set with the columns `prompt`, `answer` and `completion`, if it has them.

    The columns that they come from stay. With `demonstrations`, `completion` is made of the last message of
    `messages`, unless there is a column `completion`. Raises ValueError, with the row, for a value of
    `messages` that is no list, and for a demonstration that does not end with the assistant's message.
    """
    has = rows[0]
    if not demonstrations and data.answer_column in has:
        rows = [row | {"answer": row[data.answer_column]} for row in rows]
    if data.question_column is not None or "prompt" in has or MESSAGES not in has:
        return rows
    own = demonstrations and "completion" not in has
    return [_from_messages(f"{spec}, row {number}", row, own) for number, row in enumerate(rows, start=1)]


def check_answer_column(spec: str, row: Row, data: DataConfig) -> None:
    """Raises ValueError if `row` lacks the column that `data.answer_column` names."""
    if data.answer_column is not None and data.answer_column not in row:
        raise ValueError(
            f"{spec}: no column `{data.answer_column}`, which data.answer_column names; the columns are "
            f"{listed(row)}; name another column, or unset the key"
        )


def _from_messages(where: str, row: Row, demonstration: bool) -> Row:
    messages = row[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: the column `{MESSAGES}` must be a non-empty list of messages; it is "
            f"{shown(messages)}; "
            "correct the row or remove it"
        )
    answered = _role(messages[-1]) == "assistant"
    prompt: Row = {"prompt": messages[:-1] if answered else messages}
    if answered and len(messages) == 1:
        raise ValueError(
            f"{where}: the column `{MESSAGES}` must have a message before the assistant's; it has none; "
            "correct the row or remove it"
        )
    if demonstration and not answered:
        raise ValueError(
            f"{where}: the column `{MESSAGES}` must end with the assistant's message, which is the "
            f"demonstration; it ends with the role {shown(_role(messages[-1]))}; correct the row or remove it"
        )
    if demonstration and messages[-1].get("tool_calls"):
        raise ValueError(
            f"{where}: the demonstration of the column `{MESSAGES}`, its last message, must be text without "
            "tool_calls; write the calls into its content as the model is to write them, or remove the row"
        )
    return row | prompt | ({"completion": joined_text(messages[-1].get("content"))} if demonstration else {})


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
