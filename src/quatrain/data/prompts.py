"""Tokenised prompts and demonstrations, addressed by their index in an endless shuffled stream.

Second step of the data flow: rows (`rows.py`) -> `Prompt`s for rollout and evaluation, token pairs for
the supervised warm start.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import numpy as np

from quatrain.cluster.processes import assert_same, gather_objects, joined, num_processes, process_index
from quatrain.config.errors import listed
from quatrain.config.files import MAX_DEPTH, too_deep
from quatrain.config.schema import DataConfig
from quatrain.config.secrets import redact
from quatrain.config.values import data_set_list, data_sets, shown_data_sets
from quatrain.data.columns import MESSAGES, check_answer_column, prepared
from quatrain.data.messages import checked_messages, unfit_text
from quatrain.data.rows import Row, data_files, read_rows
from quatrain.data.table import Table, TokenRow
from quatrain.data.tokenizer import render
from quatrain.types.batches import EPISODE_COLUMNS, REWARD_ARGUMENTS, Demonstration, Prompt, PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quatrain.data.turns import TurnTemplate

USUAL_BATCHES = 0.95
"""Fraction of the batches for whose longest prompt the rollout's cache has room from the start."""


_JSON_OF_MESSAGES = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|messages|from|value)["']\s*:""")


class _Stream:
    """Row numbers of an endless stream over `num_rows` rows, reshuffled in each epoch by `seed`.

    Without `shuffle` they are in order in every epoch.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        rows = grain.MapDataset.range(num_rows)
        # grain accepts 32-bit seeds only.
        self._indices = (rows.shuffle(seed=seed % 2**32) if shuffle else rows).repeat()

    def draws(self, first: int, count: int) -> list[tuple[int, int]]:
        """(position in the stream, row number) for `count` positions, starting at `first`."""
        return [(at, int(self._indices[at])) for at in range(first, first + count)]


class PromptSource:
    """Tokenised prompts: `take` by stream position for training, `head` in file order for evaluation.

    What is taken depends only on the seed and the position, so a checkpoint needs to store one number to
    resume.
    """

    def __init__(self, table: Table, *, seed: int, shuffle: bool = True):
        self._table = table
        self._stream = _Stream(table.size, seed, shuffle)
        self.skipped = table.skipped
        """Number of rows skipped because their prompt is longer than `data.max_prompt_length`."""
        self.truncated = table.truncated
        """Number of rows whose prompt was cut to its last `data.max_prompt_length` tokens."""
        self.filtered = table.filtered
        """Number of rows left out by `data.min_pass_rate` and `data.max_pass_rate`."""
        self.tally = table.tally
        self.warnings = _about_json(table)
        """What is probably not intended, for the log."""

    def __len__(self) -> int:
        return self._table.size

    def batch(self, index: int, size: int) -> list[Prompt]:
        """Batch number `index`, from 0, of the stream in batches of `size` prompts."""
        return self.take(index * size, size)

    def take(self, first: int, count: int) -> list[Prompt]:
        """`count` prompts from position `first` on; a prompt's `group_id` is its position in the stream."""
        positions, numbers = zip(*self._stream.draws(first, count), strict=True)
        return [row.prompt(at) for at, row in zip(positions, self._table.take(numbers), strict=True)]

    def head(self, count: int | None = None) -> list[Prompt]:
        """The first `count` prompts in file order (None: all); a prompt's `group_id` is its row number."""
        numbers = range(self._table.size)[:count]
        return [row.prompt(number) for number, row in enumerate(self._table.take(numbers))]

    def digests(self, first: int | None = None) -> dict[str, str]:
        """A digest of the prompts, of their tokens and of each column, of the `first` rows (None: all)."""
        return self._table.digests(first)

    def first_by(self, column: str) -> dict[Any, Prompt]:
        """The first prompt with each value of a column; where processes share the rows, of this one's rows.

        Rows without the column, and values that are neither text nor numbers, count as None.
        """
        found: dict[Any, Prompt] = {}
        for number in sorted(self._table.own):
            value = self._table.own[number].columns.get(column)
            key = value if isinstance(value, str | int) else None
            if key not in found:
                found[key] = self._table.own[number].prompt(number)
        return found

    def values_of(self, column: str) -> list[Any]:
        """The values of a column, each once, of all processes; those that are no text or number are None."""
        return list(
            dict.fromkeys(value for part in gather_objects(list(self.first_by(column))) for value in part)
        )

    def usual_longest(self, batch_size: int) -> int:
        """Tokens that the longest prompt of USUAL_BATCHES of the batches does not exceed; at least 1.

        The prompts of a batch are taken as independent draws: the p-quantile of the lengths, where
        p^batch_size is USUAL_BATCHES. Where processes share the rows, the largest of their answers.
        """
        lengths = [len(row.input_ids) for row in self._table.own.values()]
        own = np.quantile(lengths, USUAL_BATCHES ** (1 / batch_size), method="higher") if lengths else 1
        return max(int(each) for each in gather_objects(int(own)))


class DemonstrationSource:
    """Tokenised demonstrations, addressed by index as in `PromptSource`."""

    def __init__(self, table: Table, tokenizer: PreTrainedTokenizerFast, *, seed: int, shuffle: bool = True):
        self._table = table
        self._tokenizer = tokenizer
        self._stream = _Stream(table.size, seed, shuffle)
        self.skipped = table.skipped
        self.truncated = table.truncated
        self.warnings = _about_json(table)

    def __len__(self) -> int:
        return self._table.size

    def batch(self, index: int, size: int) -> list[Demonstration]:
        """`size` demonstrations from stream position index * size on."""
        numbers = [number for _, number in self._stream.draws(index * size, size)]
        return [_demonstration(row, self._tokenizer) for row in self._table.take(numbers)]


def load_prompts(
    spec: str | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    required_columns: Mapping[str, str] | Collection[str] = (),
    check_prompt: Callable[[PromptText], None] = lambda prompt: None,
    by_pass_rate: bool = False,
    turns: TurnTemplate | None = None,
) -> PromptSource:
    """The prompts of the data set `spec` (see `read_rows`), rendered, tokenised and checked for length.

    `spec` may be several data sets, which are read as one, in their order; each must have the columns that
    are needed. The prompt is the column `prompt`: a string, tokenised unchanged, or a list of role/content
    messages, rendered with the chat template; without it, the column `messages` without an assistant's last
    message. If `data.question_column` is set, that column is the prompt, as a user message. If
    `data.system_prompt` is set, a string prompt also becomes a user message, and the system message is put
    first. All other columns, and a question column, are passed to the reward functions; with
    `data.answer_column`, that column also as `answer`.

    `required_columns` names the columns that the rewards need, optionally as a mapping to the reward that
    needs each. `check_prompt` is called with each prompt and raises ValueError if the rewards cannot score
    it. With `by_pass_rate`, rows whose pass rate is below `data.min_pass_rate` or above `data.max_pass_rate`
    are left out. `turns` renders the prompts of episodes.

    Raises ValueError for invalid data, naming the data set and the row, and if processes have
    read different data.
    """
    by_pass_rate = by_pass_rate and (data.min_pass_rate, data.max_pass_rate) != (None, None)

    def check_columns(spec: str, row: Row) -> None:
        _check_columns(spec, row, data)
        check_answer_column(spec, row, data)
        _check_required(spec, row, required_columns)
        if by_pass_rate and data.pass_rate_column not in row:
            raise ValueError(
                f"{spec}: data.min_pass_rate and data.max_pass_rate need the column "
                f"`{data.pass_rate_column}` (data.pass_rate_column); the columns are {listed(row)}; name "
                "another column, or unset these keys"
            )

    def keep(spec: str, number: int, row: Row) -> bool:
        return not by_pass_rate or _pass_rate_within(spec, number, row, data)

    def rows_of(spec: str) -> list[Row]:
        return prepared(spec, read_rows(spec), data)

    def check_rows(spec: str, rows: Sequence[Row]) -> None:
        _check_answers(spec, rows)
        if turns is not None:
            _check_episode_columns(spec, rows[0])

    encode = turns.prompt if turns is not None else partial(render, tokenizer)
    reader = _Reader(data, encode, rows_of, check_columns, check_rows, check_prompt, keep)
    return PromptSource(_load(spec, reader), seed=seed, shuffle=data.shuffle)


def load_demonstrations(
    spec: str | Sequence[str], data: DataConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> DemonstrationSource:
    """The demonstrations of `spec`: prompts as in `load_prompts`, and the text column `completion`.

    Without these columns, the messages of the column `messages`, of which the last one, the assistant's, is
    the completion. Completion ids end with the tokenizer's end token. Raises ValueError in the cases of
    `load_prompts`.
    """

    def check_columns(spec: str, row: Row) -> None:
        _check_columns(spec, row, data)
        _check_required(spec, row, {"completion": "the supervised warm start"})

    def rows_of(spec: str) -> list[Row]:
        return prepared(spec, read_rows(spec), data, demonstrations=True)

    if tokenizer.eos_token_id is None:
        raise ValueError("the warm start needs a tokenizer with an end token; this one has no eos_token")
    encode = partial(render, tokenizer)
    reader = _Reader(data, encode, rows_of, check_columns, _check_completions)
    return DemonstrationSource(_load(spec, reader), tokenizer, seed=seed, shuffle=data.shuffle)


class _TokenRows(NamedTuple):
    rows: list[TokenRow]
    skipped: int = 0
    truncated: int = 0
    filtered: int = 0


_Encode = Callable[[PromptText], list[int]]
_Keep = Callable[[str, int, Row], bool]
"""Whether a row is used, from the source, the row's number from 1, and the row."""


def _keep_all(spec: str, number: int, row: Row) -> bool:
    return True


def _accept_all(prompt: PromptText) -> None:
    pass


@dataclass(frozen=True)
class _Reader:
    """How rows are read, checked and tokenised; `spec` is a file or data set everywhere.

    `check_columns` is called with a row that has every column, `check_rows` with the source and its rows.
    Rows for which `keep` is false are left out and counted.
    """

    data: DataConfig
    encode: _Encode
    rows: Callable[[str], list[Row]]
    check_columns: Callable[[str, Row], None]
    check_rows: Callable[[str, Sequence[Row]], None]
    check_prompt: Callable[[PromptText], None] = _accept_all
    keep: _Keep = _keep_all

    def tokenised(self, spec: str, rows: list[Row]) -> _TokenRows:
        """The rows as tokens; their prompts are checked."""
        self.check_rows(spec, rows)
        found = _tokenise(spec, rows, self.data, self.encode, self.keep)
        for row in found.rows:
            _check_prompt(spec, row, self.check_prompt)
        return found


def _load(spec: str | Sequence[str], reader: _Reader) -> Table:
    """The tokenised rows of one or several data sets, numbered consecutively.

    In a run of several processes, each reads a part of the files if there are several.
    """
    specs: tuple[str, ...] = data_set_list(data_sets(spec))  # type: ignore[arg-type]
    name = shown_data_sets(specs)
    files = [(each, file) for each in specs for file in _files(each)] if joined() else []
    if len(files) > 1:
        return _load_share(name, files, reader)
    parts = {}
    for each in dict.fromkeys(specs):
        parts[each] = reader.rows(each)
        reader.check_columns(each, parts[each][0])
    empty: Row = dict.fromkeys(column for rows in parts.values() for column in rows[0])
    whole = {each: [empty | row for row in rows] for each, rows in parts.items()}
    tokenised = {each: reader.tokenised(each, rows) for each, rows in whole.items()}
    found = [tokenised[each] for each in specs]
    rows = [row for part in found for row in part.rows]
    skipped, truncated, filtered = (sum(counts) for counts in zip(*(part[1:] for part in found), strict=True))
    _check_not_empty(name, len(rows), skipped, filtered, reader.data)
    table = Table(dict(enumerate(rows)), len(rows), skipped, truncated, filtered)
    if joined():
        digests = {f"{name}, {part}": digest for part, digest in table.digests().items()}
        assert_same("data set", {name: f"{len(rows)} rows", **digests})
    return table


def _files(spec: str) -> list[str]:
    """The files of a pattern; another data set is one by itself."""
    return [str(file) for file in data_files(spec)] or [spec]


def _load_share(name: str, files: Sequence[tuple[str, str]], reader: _Reader) -> Table:
    """Process i of N reads the files i, i + N, ...; rows are numbered consecutively over all files.

    `files` has the data set of each file and the file.
    """
    assert_same("data set", {name: [Path(file).name for _, file in files]})
    own = {i: reader.rows(files[i][1]) for i in range(process_index(), len(files), num_processes())}
    columns = _from_all_processes({i: list(rows[0]) for i, rows in own.items()})
    for spec in dict.fromkeys(spec for spec, _ in files):
        mine = [column for i, (of, _) in enumerate(files) if of == spec for column in columns[i]]
        reader.check_columns(spec, dict.fromkeys(mine))
    empty: Row = dict.fromkeys(column for i in range(len(files)) for column in columns[i])
    tokenised = {}
    for i, rows in own.items():
        tokenised[i] = reader.tokenised(files[i][1], [empty | row for row in rows])
        _check_serialisable(files[i][1], tokenised[i].rows)
    counts = _from_all_processes(
        {
            i: [len(found.rows), found.skipped, found.truncated, found.filtered]
            for i, found in tokenised.items()
        }
    )
    starts = list(accumulate((counts[i][0] for i in range(len(files))), initial=0))
    rows_here = {starts[i] + k: row for i, found in tokenised.items() for k, row in enumerate(found.rows)}
    size, skipped, truncated, filtered = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    _check_not_empty(name, size, skipped, filtered, reader.data)
    return Table(rows_here, size, skipped, truncated, filtered, spread=True)


def _check_not_empty(spec: str, size: int, skipped: int, filtered: int, data: DataConfig) -> None:
    if size == 0 and filtered:
        raise ValueError(
            f"{spec}: no prompt is left: {filtered} have a pass rate below data.min_pass_rate="
            f"{data.min_pass_rate} or above data.max_pass_rate={data.max_pass_rate}, and {skipped} are "
            f"longer than data.max_prompt_length={data.max_prompt_length} tokens; widen the range"
            + ("" if not skipped else ", or raise data.max_prompt_length")
        )
    if size == 0:
        raise ValueError(
            f"{spec}: all prompts are longer than data.max_prompt_length={data.max_prompt_length} tokens "
            "and data.on_long_prompt=skip leaves none; raise data.max_prompt_length"
        )


def _from_all_processes(own: Mapping[int, list]) -> dict[int, list]:
    """The entries of `own`, a mapping by file number, of all processes; the same in every process."""
    return {int(i): value for part in gather_objects(dict(own)) for i, value in part.items()}


def _check_serialisable(spec: str, rows: Sequence[TokenRow]) -> None:
    for row in rows:
        try:
            json.dumps(row.packed())
        except TypeError as error:
            raise ValueError(
                f"{spec}, row {row.number}: processes exchange the rows of a data set in several files as "
                f"JSON, so the columns must be JSON-serialisable ({error}); use text and numbers, or put the "
                "data set into one file"
            ) from None


def _check_columns(spec: str, row: Row, data: DataConfig) -> None:
    question, columns = data.question_column, listed(row)
    if question is None and "prompt" not in row:
        raise ValueError(
            f"{spec}: no column `prompt`; the columns are {columns}. Name the one with the question in "
            f"data.question_column, or give messages in the column `messages`"
        )
    if question is not None and question not in row:
        raise ValueError(
            f"{spec}: no column `{question}`, which data.question_column names; the columns are {columns}"
        )
    if question not in (None, "prompt") and "prompt" in row:
        raise ValueError(
            f"{spec}: two prompt columns, `prompt` and `{question}` (data.question_column), where one is "
            f"needed; unset data.question_column or rename a column"
        )
    for name in REWARD_ARGUMENTS:
        if name in row:
            raise ValueError(
                f"{spec}: a column is called `{name}`, which is the name of another argument of reward "
                f"functions; rename the column"
            )


def _check_episode_columns(spec: str, row: Row) -> None:
    for name in EPISODE_COLUMNS:
        if name in row and name != MESSAGES:  # the dialogue begins with these messages
            raise ValueError(
                f"{spec}: a column is called `{name}`, in which episodes have rewards of their environment; "
                "rename the column"
            )


def _check_required(spec: str, row: Row, required: Mapping[str, str] | Collection[str]) -> None:
    for name in required:
        # Reward functions receive the prompt as `prompts`, not as a column.
        if name not in row or name == "prompt":
            needed_by = required[name] if isinstance(required, Mapping) else "a reward function"
            columns = listed(column for column in row if column != "prompt")
            raise ValueError(f"{spec}: {needed_by} needs the column `{name}`; the columns are {columns}")


def _check_prompt(spec: str, row: TokenRow, check: Callable[[PromptText], None]) -> None:
    try:
        check(row.text)
    except ValueError as error:
        raise ValueError(f"{spec}, row {row.number}: {error}") from error


def _about_json(table: Table) -> list[str]:
    """A warning if prompts are JSON of messages, which are read as text."""

    def kind(row: TokenRow) -> str | None:
        text = row.text if isinstance(row.text, str) else row.text[-1].get("content", "")
        return "json" if _JSON_OF_MESSAGES.match(text) else None

    return [
        f"{count} of {table.size} prompts (the first is row {row}) are the JSON of messages as a text, which "
        "is trained on as plain text, brackets and quotation marks included; give the list itself instead of "
        "its text (json.loads makes one of the other), so that the chat template renders the messages"
        for count, row in table.tally(kind).values()
    ]


def _check_answers(spec: str, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows, start=1):
        answer = row.get("answer")
        if isinstance(answer, str) and not answer.rpartition("####")[2].strip():
            raise ValueError(
                f"{spec}, row {number}: the column `answer` must have text (after its last ####, if any), "
                f"or be null in a row that is not scored for correctness; it is {_shown(answer)}; "
                f"give the answer or remove the row"
            )


def _pass_rate_within(spec: str, number: int, row: Row, data: DataConfig) -> bool:
    """Whether the pass rate of a row is from `data.min_pass_rate` to `data.max_pass_rate`, both included."""
    rate = row[data.pass_rate_column]
    with suppress(ValueError):
        rate = float(rate) if isinstance(rate, str) else rate  # a cell of a .csv file, such as 0.50
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(
            f"{spec}, row {number}: the column `{data.pass_rate_column}` must be a pass rate from 0 to 1, "
            f"because data.min_pass_rate or data.max_pass_rate is set; "
            f"{'there is none' if rate is None else f'it is {_shown(rate)}'}; give the rate, remove the row, "
            "or unset these keys"
        )
    low, high = data.min_pass_rate, data.max_pass_rate
    return (low is None or rate >= low) and (high is None or rate <= high)


def _tokenise(spec: str, rows: list[Row], data: DataConfig, encode: _Encode, keep: _Keep) -> _TokenRows:
    limit = data.max_prompt_length
    kept = [(number, row) for number, row in enumerate(rows, start=1) if keep(spec, number, row)]
    filtered = len(rows) - len(kept)
    tokenised = [_token_row(spec, number, row, data, encode) for number, row in kept]
    long = [row for row in tokenised if len(row.input_ids) > limit]
    if not long:
        return _TokenRows(tokenised, filtered=filtered)
    longest = max(len(row.input_ids) for row in long)
    found = (
        f"{spec}: {len(long)} of {len(kept)} prompts are longer than data.max_prompt_length={limit} tokens "
        f"(row {long[0].number} has {len(long[0].input_ids)}; the longest has {longest})"
    )
    if data.on_long_prompt == "error":
        raise ValueError(f"{found}; raise it, or set data.on_long_prompt to skip or truncate_left")
    if data.on_long_prompt == "truncate_left":
        return _TokenRows([_truncated(row, limit) for row in tokenised], 0, len(long), filtered)
    return _TokenRows([row for row in tokenised if len(row.input_ids) <= limit], len(long), 0, filtered)


def _truncated(row: TokenRow, limit: int) -> TokenRow:
    return TokenRow(row.number, row.text, row.input_ids[-limit:], row.columns)


def _token_row(spec: str, number: int, row: Row, data: DataConfig, encode: _Encode) -> TokenRow:
    deep = [name for name, value in row.items() if too_deep(value)]
    if deep:
        raise ValueError(
            f"{spec}, row {number}: columns must not be nested deeper than {MAX_DEPTH} levels, as "
            f"{listed(deep)} is; flatten the column or remove it"
        )
    try:
        text = _prompt_text(row, data)
        ids = np.asarray(encode(text), dtype=np.int32)
    except ValueError as error:
        raise ValueError(f"{spec}, row {number}: {error}") from error
    ids.setflags(write=False)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return TokenRow(number, text, ids, columns)


def _prompt_text(row: Row, data: DataConfig) -> PromptText:
    """The prompt of one row: text, or messages with the system message first; `render` validates messages."""
    column = data.question_column or "prompt"
    value = row[column]
    if isinstance(value, str):
        if data.question_column is None and data.system_prompt is None:
            return value
        messages = [{"role": "user", "content": value}]
    elif data.question_column is None and isinstance(value, list):
        messages = [_without_nulls(message) for message in value]
    else:
        wanted = "a string" if data.question_column else "a string or a list of messages"
        raise ValueError(f"the column `{column}` must be {wanted}; it is {_shown(value)}")
    return _with_system(checked_messages(messages), data.system_prompt)


def _without_nulls(value: Any) -> Any:
    # A column-oriented file gives all messages, and the arguments of all tool calls, the same keys: a missing
    # key is read as None.
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(each) for key, each in value.items() if each is not None}


def _with_system(messages: list[dict[str, Any]], system_prompt: str | None) -> PromptText:
    roles = [message["role"] for message in messages]
    if roles[-1] == "assistant":
        raise ValueError(
            "the last message of a prompt must not be the assistant's, because the model writes the "
            "assistant's next turn; end the prompt with another message"
        )
    if system_prompt is None:
        return tuple(messages)
    if "system" in roles:
        raise ValueError(
            "the prompt has a system message and data.system_prompt adds another; unset data.system_prompt "
            "or remove the message"
        )
    return ({"role": "system", "content": system_prompt}, *messages)


def _shown(value: object) -> str:
    text = redact(repr(value), os.environ)  # before a secret is cut
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _check_completions(spec: str, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows, start=1):
        completion = row["completion"]
        if not isinstance(completion, str) or not completion:
            raise ValueError(
                f"{spec}, row {number}: the column `completion` must be a string with text; it is "
                f"{_shown(completion)}"
            )
        reason = unfit_text(completion)
        if reason:
            raise ValueError(f"{spec}, row {number}: the column `completion` {reason}; correct the text")


def _demonstration(row: TokenRow, tokenizer: PreTrainedTokenizerFast) -> Demonstration:
    ids = tokenizer.encode(row.columns["completion"], add_special_tokens=False)
    ended = ids[-1:] == [tokenizer.eos_token_id]  # a chat template has written it already
    end = [] if ended else [tokenizer.eos_token_id]
    return Demonstration(row.input_ids, np.asarray([*ids, *end], dtype=np.int32))
