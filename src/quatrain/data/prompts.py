"""Tokenised prompts, addressed by their index in an endless shuffled stream; what all readers of rows share.

Second step of the data flow: rows (`rows.py`) -> `Prompt`s for rollout and evaluation. `examples.py` and
`preferences.py` read rows that have answers with `load_table` too.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from quatrain.cluster.processes import assert_same, gather_objects, joined, num_processes, process_index
from quatrain.config.data_sets import (
    TrainingSpec,
    data_set_list,
    shown_data_sets,
    source_names,
    training_sets,
    whole_weights,
)
from quatrain.config.errors import listed, shown
from quatrain.config.files import MAX_DEPTH, too_deep
from quatrain.config.places import local_path
from quatrain.config.schema import DataConfig
from quatrain.data.chat_template import variables_of
from quatrain.data.expansion import BLIND, sees
from quatrain.data.left_out import REFUSED_OF_ROWS
from quatrain.data.messages import (
    INSTRUCTIONS,
    MESSAGES,
    TOOLS,
    checked_messages,
    pictures_of,
    tools_of,
    without_nulls,
)
from quatrain.data.pictures import IMAGES, BadPicture, PictureReader, column_of, has_pictures, has_unseen
from quatrain.data.rows import NO_ROWS, GivenRows, Row, data_files, folder_of, read_rows
from quatrain.data.stream import RowStream
from quatrain.data.token_table import Table, TokenRow
from quatrain.data.tokenizer import render
from quatrain.types.batches import (
    AGENT_ROLE,
    AGENT_SEQUENCE,
    ENVIRONMENTS,
    EPISODE_COLUMNS,
    REWARD_ARGUMENTS,
    Prompt,
    PromptText,
)
from quatrain.types.pictures import PicturesInJson, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quatrain.data.turns import TurnsOfRow

logger = logging.getLogger(__name__)
MOST_THREADS = 16
"""Pictures that are decoded at the same time."""
USUAL_BATCHES = 0.95
"""Fraction of the batches for whose longest prompt the rollout's cache has room from the start."""

NO_PICTURE_LEFT = (
    "{}: no {} is left: data.on_bad_image=skip leaves out every row; correct the pictures, or set it to "
    "error, which says what is wrong"
)
"""Of a data set and what its rows are."""

_JSON_OF_MESSAGES = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|messages|from|value)["']\s*:""")


class Source:
    """A table, and the endless stream of its rows (`RowStream`), reshuffled in each epoch by `seed`.

    What is taken depends only on the seed and the position, so a checkpoint needs to store one number to
    resume.
    """

    def __init__(self, table: Table, *, seed: int, shuffle: bool = True):
        self._table = table
        sizes = list(table.sources.values()) or [table.size]
        self._stream = RowStream(sizes, table.weights, seed=seed, shuffle=shuffle)
        self.skipped = table.skipped
        """Number of rows skipped because their prompt is longer than `data.max_prompt_length`."""
        self.truncated = table.truncated
        """Number of rows whose prompt was cut to its last `data.max_prompt_length` tokens; of rows with
        answers, of those whose end was cut."""
        self.filtered = table.filtered
        """Number of rows left out by `data.min_pass_rate` and `data.max_pass_rate`; of rows with answers, by
        a flag such as `weight: 0`."""
        self.longer = table.longer
        """Number of rows with answers that are left out because of their length."""
        self.unseen = table.unseen
        """Number of rows left out by `data.on_bad_image`, because a picture of theirs cannot be used."""
        self.warnings = [*_about_json(table), *_about_tools(table), *_about_pictures(table)]
        """What is probably not intended, for the log."""

    def __len__(self) -> int:
        return self._table.size

    @property
    def has_pictures(self) -> bool:
        """Whether a row has pictures, of all processes."""
        return any(gather_objects(any(row.pictures is not None for row in self._table.own.values())))

    def digests(self, first: int | None = None) -> dict[str, str]:
        """`Table.digests`: of the prompts, of their tokens and of each column, of the `first` rows."""
        return self._table.digests(first)

    def mixture(self, draws: int) -> list[str]:
        """What `draws` rows of a mixture take of each data set, in words; empty for others."""
        table, parts = self._table, sum(self._table.weights)
        return [
            f"mixture: {name}, weight {weight} of {parts}: {size} rows, "
            f"{weight * draws / parts / size:.3g} epochs of them"
            for (name, size), weight in zip(table.sources.items(), table.weights, strict=True)
        ]

    def _numbers(self, first: int, count: int) -> list[int]:
        """The numbers of the rows at `count` positions of the stream."""
        return [self._stream[at] for at in range(first, first + count)]


class PromptSource(Source):
    """Tokenised prompts: `take` by stream position for training, `head` in file order for evaluation."""

    def batch(self, index: int, size: int) -> list[Prompt]:
        """Batch number `index`, from 0, of the stream in batches of `size` prompts."""
        return self.take(index * size, size)

    def take(self, first: int, count: int) -> list[Prompt]:
        """`count` prompts from position `first` on; a prompt's `group_id` is its position in the stream."""
        return self.rows(self._numbers(first, count), first)

    def rows(self, numbers: Sequence[int], first: int) -> list[Prompt]:
        """The prompts of the rows with these numbers, as if they stood at the positions from `first` on."""
        return [row.prompt(at) for at, row in enumerate(self._table.take(numbers), start=first)]

    def source_of(self, position: int) -> int:
        """The number of the data set that the prompt at `position` is of; 0 unless they are a mixture."""
        return self._stream.source(position)

    def rows_of(self, source: int) -> range:
        """The numbers of the rows of a data set of a mixture; of others, 0 has all."""
        sizes = list(self._table.sources.values()) or [self._table.size]
        start = sum(sizes[:source])
        return range(start, start + sizes[source])

    def head(self, count: int | None = None) -> list[Prompt]:
        """The first `count` prompts in file order (None: all); a prompt's `group_id` is its row number."""
        numbers = range(self._table.size)[:count]
        return [row.prompt(number) for number, row in enumerate(self._table.take(numbers))]

    def tally(self, kind: Callable[[TokenRow], str | None]) -> dict[str, tuple[int, int]]:
        """`Table.tally`: by kind of row, the number of rows and of the first."""
        return self._table.tally(kind)

    def first_by(self, column: str) -> dict[Any, Prompt]:
        """The first prompt with each value of a column; where processes share the rows, of this one's rows.

        Rows without the column, and values that are neither text nor numbers, count as None.
        """
        first: dict[Any, Prompt] = {}
        for number, row in sorted(self._table.own.items()):
            value = row.columns.get(column)
            first.setdefault(value if isinstance(value, str | int) else None, row.prompt(number))
        return first

    def values_of(self, column: str) -> list[Any]:
        """The values of a column, each once, of all processes; those that are no text or number are None."""
        return list(dict.fromkeys(chain(*gather_objects(list(self.first_by(column))))))

    def largest(self, size: Callable[[TokenRow], int]) -> int:
        """The largest `size` of a row, of all processes."""
        return max(gather_objects(max(map(size, self._table.own.values()), default=0)))

    def usual_longest(self, batch_size: int) -> int:
        """Tokens that the longest prompt of USUAL_BATCHES of the batches does not exceed; at least 1.

        The prompts of a batch are taken as independent draws: the p-quantile of the lengths, where
        p^batch_size is USUAL_BATCHES. Where processes share the rows, the largest of their answers.
        """
        lengths = [len(row.input_ids) for row in self._table.own.values()]
        usual = np.quantile(lengths, USUAL_BATCHES ** (1 / batch_size), method="higher") if lengths else 1
        return max(gather_objects(int(usual)))


def load_prompts(
    spec: TrainingSpec | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    required_columns: Mapping[str, str] | Collection[str] = (),
    check_prompt: Callable[[PromptText], None] | None = None,
    by_pass_rate: bool = False,
    turns: TurnsOfRow | None = None,
    rows: GivenRows = NO_ROWS,
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
    are left out. `turns` renders the prompts of episodes. `rows` has the rows, as dicts, of data sets that
    are no files, by their names in `spec`.

    Raises ValueError for invalid data, naming the data set and the row, and if processes have
    read different data.
    """
    reader = _RowReader(
        data,
        _by_template(tokenizer) if turns is None else _by_turns(turns),
        required_columns,
        check_prompt=check_prompt,
        by_pass_rate=by_pass_rate and (data.min_pass_rate, data.max_pass_rate) != (None, None),
        episodes=turns is not None,
        given=rows,
        sees=sees(tokenizer),
    )
    return PromptSource(load_table(spec, reader), seed=seed, shuffle=data.shuffle)


def check_columns(
    spec: TrainingSpec | Sequence[str],
    data: DataConfig,
    required_columns: Mapping[str, str] | Collection[str],
    *,
    rows: GivenRows = NO_ROWS,
) -> None:
    """Raises the ValueError of `load_prompts` for columns, without a tokenizer."""
    check_columns_of(spec, _RowReader(data, lambda row, text: Tokens([]), required_columns, given=rows))


def check_columns_of(spec: TrainingSpec | Sequence[str], reader: Reader) -> None:
    """Raises ValueError for columns of the data sets `spec` that `reader` cannot read."""
    for each in dict.fromkeys(data_set_list(training_sets(spec))):  # type: ignore[arg-type]
        reader.check_columns(each, list(reader.rows(each)[0]))


def _by_template(tokenizer: PreTrainedTokenizerFast) -> _Encode:
    def encode(row: Row, text: PromptText) -> Tokens:
        variables = variables_of(row, tokenizer.chat_template)
        return render(tokenizer, text, tools_of(row), variables=variables, refused=REFUSED_OF_ROWS)

    return encode


def _by_turns(turns: TurnsOfRow) -> _Encode:
    return lambda row, text: turns(row).prompt(text)


_Made = TypeVar("_Made")
_Encode = Callable[["Row", PromptText], Tokens]
"""The tokens of the prompt of a row."""
TokenRows = tuple[list[TokenRow], int, int, int, int, int]
"""Rows, and the numbers of those skipped, truncated, filtered, left out with their answers, and left out for
a bad picture."""


class Reader(Protocol):
    """How the rows of a kind are read, checked and tokenised; `spec` is a file or data set."""

    @property
    def given(self) -> GivenRows: ...

    def rows(self, spec: str) -> list[Row]: ...

    def check_columns(self, spec: str, columns: Collection[str]) -> None: ...

    def tokenised(self, spec: str, rows: list[Row]) -> TokenRows: ...

    def check_not_empty(self, spec: str, size: int, skipped: int, filtered: int) -> None:
        """Raises ValueError if no row of all data sets is left; `skipped` are those left out as too long.

        Rows left out for a bad picture count as neither.
        """


@dataclass(frozen=True)
class _RowReader:
    """How prompts are read, checked and tokenised."""

    data: DataConfig
    encode: _Encode
    required: Mapping[str, str] | Collection[str]
    check_prompt: Callable[[PromptText], None] | None = None
    by_pass_rate: bool = False
    episodes: bool = False
    given: GivenRows = field(default_factory=dict)
    sees: bool = False

    def rows(self, spec: str) -> list[Row]:
        """With the columns `prompt` and `answer`, if they come from others, which stay."""
        rows = read_rows(spec, self.given)
        has = rows[0]
        if self.data.answer_column in has:
            rows = [row | {"answer": row[self.data.answer_column]} for row in rows]
        if self.data.question_column is not None or "prompt" in has or MESSAGES not in has:
            return rows
        return [_with_prompt(f"{spec}, row {number}", row) for number, row in enumerate(rows, start=1)]

    def check_columns(self, spec: str, columns: Collection[str]) -> None:
        """Raises ValueError if the columns of a data set lack one, or have one that must not be."""
        data, has = self.data, f"the columns are {listed(columns)}"
        check_prompt_column(spec, columns, data)
        if reserved := [name for name in (*REWARD_ARGUMENTS, AGENT_SEQUENCE, AGENT_ROLE) if name in columns]:
            raise ValueError(
                f"{spec}: a column is called `{reserved[0]}`, the name of another argument of reward "
                "functions; rename the column"
            )
        answer = data.answer_column
        if answer is not None and answer not in columns:
            raise ValueError(
                f"{spec}: no column `{answer}`, which data.answer_column names; {has}; name another column, "
                "or unset the key"
            )
        for name in self.required:
            # Reward functions receive the prompt as `prompts`, not as a column.
            if name not in columns or name == "prompt":
                needed_by = self.required[name] if isinstance(self.required, Mapping) else "a reward function"
                others = listed(column for column in columns if column != "prompt")
                remedy = "; reward functions get the prompts as `prompts`" if name == "prompt" else ""
                raise ValueError(
                    f"{spec}: {needed_by} needs the column `{name}`; the columns beside the prompt are "
                    f"{others}{remedy}"
                )
        if self.by_pass_rate and data.pass_rate_column not in columns:
            raise ValueError(
                f"{spec}: data.min_pass_rate and data.max_pass_rate need the column "
                f"`{data.pass_rate_column}` (data.pass_rate_column); {has}; name another column, or unset "
                "these keys"
            )

    def tokenised(self, spec: str, rows: list[Row]) -> TokenRows:
        """The rows as tokens, checked; of those that the pass rates and the length of prompts leave."""
        for name in (*EPISODE_COLUMNS, ENVIRONMENTS) if self.episodes else ():
            if name in rows[0] and name != MESSAGES:  # the dialogue begins with these messages
                raise ValueError(
                    f"{spec}: a column is called `{name}`, in which episodes have what is of their "
                    "environment; rename the column"
                )
        kept = {
            number: row
            for number, row in enumerate(rows, start=1)
            if self._is_kept(f"{spec}, row {number}", row)
        }
        tokenised = with_pictures(spec, kept, self.data, self.sees, self._token_row)
        found, skipped, truncated = _within_length(spec, tokenised, self.data)
        for token_row in found:
            with named(f"{spec}, row {token_row.number}"):
                if self.check_prompt is not None:
                    self.check_prompt(token_row.text)
        return found, skipped, truncated, len(rows) - len(kept), 0, len(kept) - len(tokenised)

    def _is_kept(self, where: str, row: Row) -> bool:
        """Whether a row is used, by its pass rate; raises ValueError for one that is malformed."""
        _check_answer(where, row)
        return not self.by_pass_rate or _pass_rate_within(where, row, self.data)

    def _token_row(self, row: Row, number: int) -> TokenRow:
        check_depth(row)
        text = prompt_of_row(row, self.data, self.sees)
        tokens = self.encode(row, text)
        ids = np.asarray(tokens.ids, dtype=np.int32)
        ids.setflags(write=False)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        if tokens.pictures is not None:
            columns[IMAGES] = pictures_of(text)
        return TokenRow(number, text, ids, columns, pictures=tokens.pictures)

    def check_not_empty(self, spec: str, size: int, skipped: int, filtered: int) -> None:
        data = self.data
        if size == 0 and filtered:
            raise ValueError(
                f"{spec}: no prompt is left: {filtered} have a pass rate below data.min_pass_rate="
                f"{data.min_pass_rate} or above data.max_pass_rate={data.max_pass_rate}, and {skipped} are "
                f"longer than data.max_prompt_length={data.max_prompt_length} tokens; widen the range, or "
                "raise data.max_prompt_length"
            )
        if size == 0:
            raise ValueError(
                f"{spec}: all prompts are longer than data.max_prompt_length={data.max_prompt_length} tokens "
                "and data.on_long_prompt=skip leaves none; raise data.max_prompt_length"
                if skipped
                else NO_PICTURE_LEFT.format(spec, "prompt")
            )


def _with_prompt(where: str, row: Row) -> Row:
    """A row with `messages`, of which those before the assistant's last are the prompt."""
    messages = row[MESSAGES]
    check_message_list(f"{where}: ", messages)
    role = messages[-1].get("role") if isinstance(messages[-1], Mapping) else None
    return row | {"prompt": messages[:-1] if role == "assistant" else messages}


def check_message_list(where: str, messages: Any) -> None:
    """Raises ValueError, which begins with `where`, unless `messages` is a list with a prompt."""
    column, remedy = f"{where}the column `{MESSAGES}`", "correct the row or remove it"
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{column} must be a non-empty list of messages; it is {shown(messages)}; {remedy}")
    role = messages[-1].get("role") if isinstance(messages[-1], Mapping) else None
    if role == "assistant" and len(messages) == 1:
        raise ValueError(f"{column} must have a message before the assistant's; it has none; {remedy}")


def check_prompt_column(spec: str, columns: Collection[str], data: DataConfig) -> None:
    """Raises ValueError unless a data set with these columns has one column with a prompt."""
    question, has = data.question_column, f"the columns are {listed(columns)}"
    if question is None and "prompt" not in columns:
        raise ValueError(
            f"{spec}: no column `prompt`; {has}. Name the one with the question in data.question_column, "
            "or give messages in the column `messages`"
        )
    if question is not None and question not in columns:
        raise ValueError(f"{spec}: no column `{question}`, which data.question_column names; {has}")
    if question not in (None, "prompt") and "prompt" in columns:
        raise ValueError(
            f"{spec}: two prompt columns, `prompt` and `{question}` (data.question_column), where one is "
            "needed; unset data.question_column or rename a column"
        )


def check_depth(row: Row) -> None:
    """Raises ValueError for a row with a column that is nested too deep."""
    deep = [name for name, value in row.items() if too_deep(value)]
    if deep:
        raise ValueError(
            f"columns must not be nested deeper than {MAX_DEPTH} levels, as {listed(deep)} is; flatten the "
            "column or remove it"
        )


@contextmanager
def named(where: str) -> Iterator[None]:
    """A ValueError of the block says where it is: in which row of which data set."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def load_table(spec: TrainingSpec | Sequence[str], reader: Reader) -> Table:
    """The tokenised rows of one or several data sets, or of a mixture, numbered consecutively.

    In a run of several processes, process i of N reads the files i, i + N, ... if there are several.
    """
    sets: TrainingSpec = training_sets(spec)  # type: ignore[assignment]
    specs, name = data_set_list(sets), shown_data_sets(sets)
    parts = [(each, each) for each in specs]
    patterns = {each: [] if each in reader.given else data_files(each) for each in specs}
    files = [(each, file) for each in specs for file in patterns[each] or [each]]
    if spread := joined() and len(files) > 1:
        assert_same("data set", {name: [Path(file).name for _, file in files]})
        parts = files
    here = range(process_index(), len(parts), num_processes()) if spread else range(len(parts))
    # A data set that is named twice is read once.
    read = {file: reader.rows(file) for file in dict.fromkeys(parts[i][1] for i in here)}
    columns = _of_all_parts({i: list(read[parts[i][1]][0]) for i in here}, spread)
    for each in dict.fromkeys(specs):
        of_set = [column for i, (of, _) in enumerate(parts) if of == each for column in columns[i]]
        reader.check_columns(each, dict.fromkeys(of_set))
    empty: Row = dict.fromkeys(column for i in range(len(parts)) for column in columns[i])
    tokenised = {file: reader.tokenised(file, [empty | row for row in rows]) for file, rows in read.items()}
    for file, part in tokenised.items() if spread else ():
        _check_serialisable(file, part[0])
    found = {i: tokenised[parts[i][1]] for i in here}
    seeing = _of_all_parts({i: [_has_pictures(part)] for i, part in found.items()}, spread)
    if any(chain.from_iterable(seeing.values())):
        found = {i: (_with_images(part[0]), *part[1:]) for i, part in found.items()}
    counts = _of_all_parts({i: [len(rows), *others] for i, (rows, *others) in found.items()}, spread)
    totals = {each: _totals(counts[i] for i, (of, _) in enumerate(parts) if of == each) for each in specs}
    size, skipped, truncated, filtered, longer, unseen = _totals(counts.values())
    weights = whole_weights(sets)
    # Of a mixture, every data set must have rows to draw; of others, all together.
    whole = _totals(counts.values())
    for each, own in totals.items() if weights else [(name, whole)]:
        reader.check_not_empty(each, own[0], own[1] + own[4], own[3])
    names = source_names(sets) if len(totals) > 1 else dict.fromkeys(specs, "")
    starts = list(accumulate((counts[i][0] for i in range(len(parts))), initial=0))
    rows_here = {
        starts[i] + k: replace(row, source=names[parts[i][0]])
        for i, part in found.items()
        for k, row in enumerate(part[0])
    }
    sources = {names[each]: own[0] for each, own in totals.items()} if weights else {}
    table = Table(rows_here, size, skipped, truncated, filtered, longer, spread, sources, weights, unseen)
    if joined() and not spread:
        digests = {f"{name}, {part}": digest for part, digest in table.digests().items()}
        assert_same("data set", {name: f"{size} rows", **digests})
    return table


def _has_pictures(part: TokenRows) -> bool:
    return any(row.pictures is not None for row in part[0])


def _with_images(rows: list[TokenRow]) -> list[TokenRow]:
    """The rows, each with the column `images`, which is empty where there are none."""
    return [
        row if row.columns.get(IMAGES) else replace(row, columns={**row.columns, IMAGES: []}) for row in rows
    ]


def with_pictures(
    spec: str, rows: Mapping[int, Row], data: DataConfig, sees: bool, made: Callable[[Row, int], _Made]
) -> list[_Made]:
    """What `made` makes of each row of `spec` and its number, whose pictures are read if the model sees them.

    Without the rows that `data.on_bad_image` leaves out. Raises ValueError, which names the row.
    """
    root = folder_of(spec) if data.image_root is None else local_path(data.image_root)
    reader, found, left_out = PictureReader(root, data.verify_images), [], 0
    # Most of the work is Pillow's, which runs beside Python; each has a decoded picture in memory.
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    try:
        seeing = {number: row for number, row in rows.items() if sees and has_pictures(row)}
        read = {number: threads.submit(reader.of_row, row) for number, row in seeing.items()}
        for number, row in rows.items():
            with named(f"{spec}, row {number}"):
                if not sees and has_unseen(row):
                    raise ValueError(BLIND)
                try:
                    found.append(made(read.pop(number).result() if number in read else row, number))
                except BadPicture as error:
                    if data.on_bad_image == "error":
                        raise BadPicture(
                            f"{error}; or set data.on_bad_image to skip, which leaves such rows out"
                        ) from error
                    if not left_out:
                        logger.warning("%s, row %d is left out: %s", spec, number, error)
                    left_out += 1
    finally:
        threads.shutdown(cancel_futures=True)
    return found


def _totals(counts: Iterable[Sequence[int]]) -> list[int]:
    """The numbers of `_TokenRows` of several parts, summed."""
    return [sum(each) for each in zip(*counts, strict=True)]


def _of_all_parts(here: dict[int, list], spread: bool) -> dict[int, list]:
    """The entries of `here`, a mapping by the number of a part, of all processes."""
    if not spread:
        return here
    return {int(i): value for part in gather_objects(here) for i, value in part.items()}


def _check_serialisable(spec: str, rows: Sequence[TokenRow]) -> None:
    for row in rows:
        try:
            json.dumps(row.packed(), default=PicturesInJson().written)
        except TypeError as error:
            raise ValueError(
                f"{spec}, row {row.number}: processes exchange the rows of a data set in several files as "
                f"JSON, so the columns must be JSON-serialisable ({error}); use text and numbers, or put the "
                "data set into one file"
            ) from None


def is_json_of_messages(text: str) -> bool:
    """Whether a text is probably the JSON of messages, which nobody has parsed."""
    return _JSON_OF_MESSAGES.match(text) is not None


def _about_json(table: Table) -> list[str]:
    """A warning if prompts are JSON of messages, which are read as text."""

    def kind(row: TokenRow) -> str | None:
        # An example of which all is trained may begin with the answer.
        last = row.text if isinstance(row.text, str) else row.text[-1].get("content") if row.text else ""
        return "json" if isinstance(last, str) and is_json_of_messages(last) else None

    return [
        f"{count} of {table.size} prompts (the first is row {row}) are the JSON of messages as a text, which "
        "is trained on as plain text, brackets and quotation marks included; give the list itself instead of "
        "its text (json.loads makes one of the other), so that the chat template renders the messages"
        for count, row in table.tally(kind).values()
    ]


def _about_tools(table: Table) -> list[str]:
    """Warnings if a column `tools` is not written into prompts."""

    def kind(row: TokenRow) -> str | None:
        if not row.columns.get(TOOLS):
            return None
        if not tools_of(row.columns):
            return "no descriptions of functions, which the chat template could write; rename the column"
        if isinstance(row.text, str):
            return "not written, because the prompt is a text; give messages, or remove the column"
        return None

    return [
        f"the column `{TOOLS}` of {count} of {table.size} rows (the first is row {row}) is {what}"
        for what, (count, row) in table.tally(kind).items()
    ]


def _about_pictures(table: Table) -> list[str]:
    """A warning if rows are left out for a picture; the log has said what is wrong with the first."""
    return [
        f"{table.unseen} rows are left out, because a picture of theirs cannot be used "
        "(data.on_bad_image=skip)"
    ] * bool(table.unseen)


def _check_answer(where: str, row: Row) -> None:
    answer = row.get("answer")
    if isinstance(answer, str) and not answer.rpartition("####")[2].strip():
        raise ValueError(
            f"{where}: the column `answer` must have text (after its last ####, if any), or be null in a row "
            f"that is not scored for correctness; it is {typed(answer)}; give the answer or remove the row"
        )


def _pass_rate_within(where: str, row: Row, data: DataConfig) -> bool:
    """Whether the pass rate of a row is from `data.min_pass_rate` to `data.max_pass_rate`, both included."""
    rate = row[data.pass_rate_column]
    with suppress(ValueError):
        rate = float(rate) if isinstance(rate, str) else rate  # a cell of a .csv file, such as 0.50
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(
            f"{where}: the column `{data.pass_rate_column}` must be a pass rate from 0 to 1, because "
            f"data.min_pass_rate or data.max_pass_rate is set; "
            f"{'there is none' if rate is None else f'it is {typed(rate)}'}; give the rate, remove the row, "
            "or unset these keys"
        )
    low, high = data.min_pass_rate, data.max_pass_rate
    return (low is None or rate >= low) and (high is None or rate <= high)


def _within_length(spec: str, rows: list[TokenRow], data: DataConfig) -> tuple[list[TokenRow], int, int]:
    """The rows after `data.on_long_prompt`, and how many were skipped and how many cut."""
    limit = data.max_prompt_length
    seeing = next((row for row in rows if row.pictures is not None), None)
    if data.on_long_prompt == "truncate_left" and seeing is not None:
        raise ValueError(
            f"{spec}: data.on_long_prompt=truncate_left must not be set with pictures, which it would cut; "
            f"row {seeing.number} has one; set it to skip or error"
        )
    long = [row for row in rows if len(row.input_ids) > limit]
    if long and data.on_long_prompt == "error":
        longest = max(len(row.input_ids) for row in long)
        shorter = "skip or truncate_left" if seeing is None else "skip"
        raise ValueError(
            f"{spec}: {len(long)} of {len(rows)} prompts are longer than data.max_prompt_length={limit} "
            f"tokens (row {long[0].number} has {len(long[0].input_ids)}; the longest has {longest}); raise "
            f"it, or set data.on_long_prompt to {shorter}"
        )
    if data.on_long_prompt == "truncate_left":
        return [replace(row, input_ids=row.input_ids[-limit:]) for row in rows], 0, len(long)
    return [row for row in rows if len(row.input_ids) <= limit], len(long), 0


def prompt_of_row(row: Row, data: DataConfig, sees: bool) -> PromptText:
    """The prompt of one row, with its pictures in their places if the model sees them."""
    column = data.question_column or "prompt"
    text = prompt_of(row.get(column), data, column, placing(row) if sees else None)
    if isinstance(text, str) and sees and column_of(row):
        raise BadPicture(
            "a prompt with pictures must be messages, because the chat template writes where they are; it is "
            "a text; give messages, or set data.question_column or data.system_prompt, which make some"
        )
    return text


def placing(row: Row) -> Callable[[list[Any]], list[Any]]:
    """What puts the pictures of a row, which are read, into messages."""
    return partial(PictureReader().placed, given=column_of(row))


def prompt_of(
    value: Any,
    data: DataConfig,
    column: str = "prompt",
    placed: Callable[[list[Any]], list[Any]] | None = None,
) -> PromptText:
    """The prompt of `column`: text, or messages with the system message first; `render` validates messages.

    `placed` puts pictures into messages. Raises ValueError for a value that is neither.
    """
    is_question = column == data.question_column
    if isinstance(value, str):
        if not is_question and data.system_prompt is None:
            return value
        messages = [{"role": "user", "content": value}]
    elif not is_question and isinstance(value, list):
        messages = [without_nulls(message) for message in value]
    else:
        wanted = "a string" if is_question else "a string or a list of messages"
        raise ValueError(f"the column `{column}` must be {wanted}; it is {typed(value)}")
    messages = checked_messages(messages if placed is None else placed(messages))
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message of a prompt must not be the assistant's, because the model writes the "
            "assistant's next turn; end the prompt with another message"
        )
    return tuple(with_system(messages, data))


def with_system(messages: list[dict[str, Any]], data: DataConfig) -> list[dict[str, Any]]:
    """Checked messages behind `data.system_prompt`; raises ValueError if they have a system message."""
    if data.system_prompt is None:
        return messages
    if not set(INSTRUCTIONS).isdisjoint(message["role"] for message in messages):
        raise ValueError(
            "the prompt has a system message and data.system_prompt adds another; unset data.system_prompt "
            "or remove the message"
        )
    return [{"role": "system", "content": data.system_prompt}, *messages]


def typed(value: object) -> str:
    """A value of the wrong type, for messages."""
    return f"{type(value).__name__} {shown(value)}"
