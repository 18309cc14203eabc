"""Brings the columns of a data set into the form that is tokenised: `prompt`, `answer` and `completion`.

Data flow: rows (`rows.py`) -> `prepared` -> `prompts.py`. A column `messages`, as in data sets for
supervised training, becomes the prompt and, if it ends with the assistant's message, the demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping

from quatrain.config.errors import shown
from quatrain.config.schema import DataConfig
from quatrain.data.demonstration import asks_for_more, chosen
from quatrain.data.rows import Row

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
