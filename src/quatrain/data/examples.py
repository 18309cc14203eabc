"""Examples for supervised training, and what all readers of rows with answers share.

Data flow: rows (`rows.py`) -> `GivenReader` -> ids as a rollout would have them, by `Dialogue` -> `Table`
(`prompts.load_table`) -> `Example`s, addressed by their place in an endless shuffled stream.

An example of a conversation is an episode: its prompt, an answer with its end token, what the chat template
writes up to the next answer (`TurnTemplate.suffix`), the next answer, and so on. What stands behind the last
trained answer is left out, because it would change nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from quatrain.config.data_sets import TrainingSpec
from quatrain.config.errors import listed, shown
from quatrain.config.schema import DataConfig
from quatrain.data.answers import Answers, checked_answer, is_trained, unread_fields, unwritten
from quatrain.data.chat_template import VARIABLES, variables_of
from quatrain.data.expansion import expanded, sees
from quatrain.data.left_out import REFUSED_OF_ROWS
from quatrain.data.messages import MESSAGES, checked_messages, joined_text, tools_of, without_nulls
from quatrain.data.prompts import (
    NO_PICTURE_LEFT,
    Source,
    TokenRows,
    check_columns_of,
    check_depth,
    check_message_list,
    check_prompt_column,
    is_json_of_messages,
    load_table,
    placing,
    prompt_of_row,
    typed,
    with_pictures,
    with_system,
)
from quatrain.data.rows import NO_ROWS, GivenRows, Row, read_rows
from quatrain.data.token_table import Table, TokenRow
from quatrain.data.tokenizer import encode, fill_template, render, render_completed, stop_token_ids
from quatrain.data.turns import TurnTemplate
from quatrain.types.batches import Example, PromptText
from quatrain.types.pictures import TEXT as NO_PICTURE
from quatrain.types.pictures import Tokens, joined

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TrainOn = Literal["completion", "assistant", "all"]
"""What is trained of a row: its last answer, every answer, or every token."""
OnLong = Literal["error", "skip", "truncate"]
"""What becomes of a row that is too long: it ends the run, is left out, or its end is cut off."""
Messages = list[dict[str, Any]]
COMPLETION, TEXT = "completion", "text"
_ABOUT_TEXT = (
    f"rows with a `{TEXT}` have no answers; set sft.train_on=all, which trains every token, or give "
    "`messages`, or `prompt` and `completion`"
)
_ROLE = re.compile(r"""["'](?:role|from)["']\s*:""")
"""What the JSON of messages has, and that of other answers has not."""


_Given = TypeVar("_Given")


class GivenSource(Source, Generic[_Given]):
    """Tokenised rows with answers: `batch` by stream position for training, `head` in file order.

    `made` makes what is trained on of a row and its number in the table.
    """

    def __init__(
        self,
        spec: TrainingSpec | Sequence[str],
        reader: GivenReader,
        made: Callable[[TokenRow, int], _Given],
        *,
        seed: int,
        shuffle: bool,
    ):
        super().__init__(load_table(spec, reader), seed=seed, shuffle=shuffle)
        self._made = made
        self.warnings += reader.warnings(self._table)

    def batch(self, index: int, size: int) -> list[_Given]:
        """Batch number `index`, from 0, of the stream in batches of `size` rows."""
        return self._take(self._numbers(index * size, size))

    def head(self, count: int | None = None) -> list[_Given]:
        """The first `count` rows in file order (None: all)."""
        return self._take(range(len(self))[:count])

    def _take(self, numbers: Sequence[int]) -> list[_Given]:
        return [self._made(*each) for each in zip(self._table.take(numbers), numbers, strict=True)]


ExampleSource = GivenSource[Example]


def _example(row: TokenRow, number: int) -> Example:
    pieces = (row.input_ids, *row.parts)
    # Trained answers are the parts 0, 2, …
    trained = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
    ids, scored, pictures = np.concatenate(pieces), np.concatenate(trained), row.pictures
    if pictures is not None:
        pictures = pictures[: len(ids)]
        scored &= pictures.ids == NO_PICTURE  # nobody writes placeholders
    return Example(ids, scored, row.source, pictures)


def load_examples(
    spec: TrainingSpec | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    train_on: TrainOn,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
) -> ExampleSource:
    """The examples of the data set `spec` (see `read_rows`), with ids as a rollout would have them.

    A row has `prompt` and `completion`, two texts or two lists of messages (a prompt of messages may have a
    text as its completion), `messages`, or with `train_on="all"` a `text`; beside them, `tools` and
    `chat_template_kwargs` for the chat template. `data.question_column` and `data.system_prompt` are as in
    `load_prompts`.

    With `train_on="completion"` the last answer is trained, behind the messages before it as the template
    writes them in a prompt; with "assistant" every answer, of `completion` or of `messages`; with "all" every
    token but the first, of messages as the template writes them. Messages whose flag (`weight`, `train`) is 0
    are not trained, and rows without another answer are left out and counted. The token that ends an answer
    is trained with it, what a template writes behind that token is not. `stop_ids` are the tokens that end a
    completion (`Answers`).

    No example has more tokens than the least of `most_tokens`, limits by what messages call them; `on_long`
    says what becomes of longer ones. `rows` are as in `load_prompts`. Raises ValueError for invalid data,
    with the data set and the row, for conversations with several trained answers whose template writes
    earlier turns otherwise later on, and if processes have read different data.
    """
    dialogues = Dialogues(tokenizer, stop_ids)
    form = ExampleForm(data, train_on, dialogues)
    reader = GivenReader(form, rows, most_tokens, on_long)
    return ExampleSource(spec, reader, _example, seed=seed, shuffle=data.shuffle)


def check_example_columns(
    spec: TrainingSpec | Sequence[str], data: DataConfig, train_on: TrainOn, rows: GivenRows = NO_ROWS
) -> None:
    """Raises the ValueError of `load_examples` for columns, without a tokenizer."""
    check_columns_of(spec, GivenReader(ExampleForm(data, train_on), rows))


class Form(Protocol):
    """What the rows of a kind of training have, and what is made of each."""

    @property
    def what(self) -> str:
        """The name of what a row is, in the plural, for messages."""

    @property
    def section(self) -> str:
        """The section of the configuration with the key `on_long`."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def sees(self) -> bool:
        """Whether the model sees pictures, and this kind of training has them."""

    def check_columns(self, spec: str, columns: Collection[str]) -> None: ...

    def token_rows(self, row: Row, number: int) -> list[TokenRow]:
        """What the row is as tokens; nothing if a flag says that it is not trained."""

    def size(self, row: TokenRow) -> int:
        """Tokens of the longest sequence of a row."""

    def cut(self, row: TokenRow, limit: int) -> TokenRow | None:
        """The row with at most the first `limit` tokens; None if nothing is left to train."""


@dataclass(frozen=True)
class GivenReader:
    """The `prompts.Reader` of rows with answers."""

    form: Form
    given: GivenRows
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    on_long: OnLong = "error"

    def rows(self, spec: str) -> list[Row]:
        return read_rows(spec, self.given)

    def check_columns(self, spec: str, columns: Collection[str]) -> None:
        self.form.check_columns(spec, columns)

    def tokenised(self, spec: str, rows: list[Row]) -> TokenRows:
        """The rows as tokens, of those that flags and lengths leave."""

        def of_row(row: Row, number: int) -> list[TokenRow]:
            check_depth(row)
            return self.form.token_rows(row, number)

        numbered = dict(enumerate(rows, start=1))
        made = with_pictures(spec, numbered, self.form.data, self.form.sees, of_row)
        kept, longer, truncated = self._within_limits(spec, [row for rows in made for row in rows])
        filtered = sum(not rows for rows in made)
        return kept, 0, truncated, filtered, longer, len(rows) - len(made)

    def check_not_empty(self, spec: str, size: int, skipped: int, filtered: int) -> None:
        if size == 0 and skipped == filtered == 0:
            raise ValueError(NO_PICTURE_LEFT.format(spec, "row"))
        if size == 0 and skipped == 0:
            raise ValueError(
                f"{spec}: no row is left: the flags (weight, train) of {filtered} rows say that they are not "
                "trained; give other rows, or correct the flags"
            )
        if size == 0:
            flagged = f", and the flags (weight, train) of {filtered} say that they are not trained"
            raise ValueError(
                f"{spec}: no row is left: with {self._key}={self.on_long}, nothing is left of {skipped} "
                f"{self.form.what} that are longer than {self._limit[0]} tokens"
                f"{flagged if filtered else ''}; give other rows, or raise the limit"
            )

    @property
    def _key(self) -> str:
        return f"{self.form.section}.on_long"

    @property
    def _limit(self) -> tuple[str, int]:
        return min(self.most_tokens.items(), key=lambda each: each[1], default=("none", 2**62))

    def _within_limits(self, spec: str, rows: list[TokenRow]) -> tuple[list[TokenRow], int, int]:
        """The rows with at most as many tokens as the least limit, how many were left out, how many cut."""
        name, limit = self._limit
        sizes = [self.form.size(row) for row in rows]
        long = [number for number, size in enumerate(sizes) if size > limit]
        if long and self.on_long == "error":
            raise ValueError(
                f"{spec}: {len(long)} of {len(rows)} {self.form.what} are longer than {name} tokens (row "
                f"{rows[long[0]].number} has {sizes[long[0]]}; the longest has {max(sizes)}); shorten them, "
                f"or set {self._key} to skip, which leaves them out, or to truncate, which cuts off their end"
            )
        if self.on_long == "skip":
            return [row for row, size in zip(rows, sizes, strict=True) if size <= limit], len(long), 0
        cut = {number: self.form.cut(rows[number], limit) for number in long}
        kept = [row for number, each in enumerate(rows) if (row := cut.get(number, each)) is not None]
        return kept, len(rows) - len(kept), len(long) - (len(rows) - len(kept))

    def warnings(self, table: Table) -> list[str]:
        """What is left out, cut or not trained of a table, for the log."""
        what, found = self.form.what, []
        for kind in NOTES:
            notes = table.tally(partial(_note, kind))
            found += [
                f"{count} of {table.size} {what} (the first is row {row}) {note}"
                for note, (count, row) in notes.items()
            ]
        name, limit = self._limit
        if table.filtered:
            found.append(f"{table.filtered} rows are left out, because their flag (weight, train) is 0")
        if table.truncated:
            found.append(
                f"{table.truncated} {what} are cut to {limit} tokens ({self._key}={self.on_long}), because "
                f"they are longer than {name}"
            )
        if table.longer:
            why = "" if self.on_long == "skip" else ", and nothing trained would be left of them"
            found.append(
                f"{table.longer} {what} are left out ({self._key}={self.on_long}), because they are longer "
                f"than {name} tokens{why}"
            )
        return found


NOTES = ("json", "ends", "begun", "fields", "flags", "first", "variables", "margin", "cut", "given")
"""What notes of rows are about, in the order of their warnings."""


def _note(kind: str, row: TokenRow) -> str | None:
    return row.notes.get(kind)


def note_answers(
    dialogue: Dialogue, prompt: PromptText, answers: Sequence[Any], columns: Mapping[str, Any]
) -> dict[str, str]:
    """Notes on answers to `prompt`: what they repeat of it or leave open, and what is not trained of them."""
    notes = {}
    texts = [answer if isinstance(answer, str) else joined_text(answer["content"]) for answer in answers]
    if any(is_json_of_messages(text) and _ROLE.search(text) for text in texts if text):
        notes["json"] = (
            "have the JSON of messages as an answer, which is trained as it stands, brackets and quotation "
            "marks included; give the list itself instead of its text (json.loads makes one of the other)"
        )
    if any(dialogue.of.ends_early(text) for text in texts if text):
        notes["ends"] = (
            "have an answer with a token that ends completions before its last, behind which a rollout has "
            "nothing, and which is trained as it stands; remove what a template has written into the text"
        )
    if any(dialogue.answers.repeats(prompt, answer) for answer in answers):
        notes["begun"] = "repeat what their prompt has begun of the answer, as <think>, which is trained once"
    elif any(dialogue.answers.leaves_open(prompt, answer) for answer in answers):
        notes["begun"] = "do not end the thought that their prompt has begun, with </think>"
    if fields := list(dict.fromkeys(name for answer in answers for name in unread_fields(answer))):
        notes["fields"] = (
            f"have the fields {listed(fields)}, which are not trained; write what is into `content`"
        )
    if isinstance(prompt, str) and columns.get(VARIABLES):
        notes["variables"] = (
            f"have `{VARIABLES}`, which no chat template gets, because the prompt is a text; give messages"
        )
    return notes


class Dialogues:
    """Makes the ids of rows' dialogues, as a rollout with the same tokenizer has them.

    Raises ValueError for a tokenizer without an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int] | None = None):
        self.tokenizer = tokenizer
        self.stop_ids = stop_token_ids(tokenizer, ()) if stop_ids is None else tuple(stop_ids)
        self._turns = TurnTemplate(tokenizer, self.stop_ids)
        self._answers = {"{}": Answers(tokenizer, self.stop_ids)}
        added = tokenizer.added_tokens_decoder
        self._ends = tuple(added[index].content for index in self.stop_ids if index in added)

    def ends_early(self, text: str) -> bool:
        """Whether a text has a token that ends completions, other than as its end."""
        before = next((text.removesuffix(end) for end in self._ends if text.endswith(end)), text)
        return any(end in before for end in self._ends)

    def of(self, row: Row) -> Dialogue:
        """What makes the ids of a row with its `tools` and `chat_template_kwargs`."""
        variables = variables_of(row, self.tokenizer.chat_template)
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._answers:
            self._answers[key] = Answers(self.tokenizer, self.stop_ids, variables)
        return Dialogue(self, self._turns.of_row(row), self._answers[key], tools_of(row), variables)


@dataclass(frozen=True)
class Dialogue:
    """Makes the ids of one row."""

    of: Dialogues
    turns: TurnTemplate
    answers: Answers
    tools: list[dict[str, Any]]
    variables: Mapping[str, Any]

    def prompt(self, text: PromptText) -> Tokens:
        """The tokens of a prompt, up to the start of the answer."""
        return render(self.of.tokenizer, text) if isinstance(text, str) else self.turns.prompt(text)

    def answer(self, prompt: PromptText, answer: Any) -> list[int]:
        """The ids of an answer to `prompt`, with its end token."""
        return self.answers.ids(prompt, self.tools, answer)

    def completed(self, prompt: PromptText, answer: Any) -> list[int]:
        """The ids of a prompt with its answer as a reward model reads them."""
        given: dict[str, Any] = {"variables": self.variables, "refused": REFUSED_OF_ROWS}
        return render_completed(self.of.tokenizer, prompt, answer, self.tools, **given)

    def parts(self, messages: Messages, trained: Sequence[int]) -> list[Tokens]:
        """The tokens of the prompt of the first trained message, its own, those up to the next, and so on.

        Raises ValueError if the template writes what stands before the last of them otherwise.
        """
        prompt = tuple(messages[: trained[0]])
        parts = [self.prompt(prompt)]
        for last, at in zip((None, *trained), trained, strict=False):
            if last is not None:
                check_before_answer(messages[:at])
                parts.append(self.turns.suffix(prompt, parts[-1].ids, messages[last + 1 : at]))
            parts.append(Tokens(self.answer(tuple(messages[:at]), messages[at])))
        if len(trained) > 1:
            self._check_kept(messages[: trained[-1]], [index for part in parts[:-1] for index in part.ids])
        return parts

    def _check_kept(self, messages: Messages, ids: list[int]) -> None:
        """Raises ValueError unless the template writes `messages` as `ids` have them, white space apart."""
        written = self._squeezed(self.turns.prompt(tuple(messages)).ids)
        trained = self._squeezed(ids)
        if written != trained:
            same = [one == other for one, other in zip(written, trained, strict=False)]
            at = max(0, [*same, False].index(False) - 10)
            raise ValueError(
                "where several answers of a conversation are trained, the chat template must write earlier "
                f"turns as they were trained; where {shown(trained[at:])} was, it writes later "
                f"{shown(written[at:])}; set sft.train_on=completion, which trains the last answer behind "
                "the others as the template writes them, or set data.chat_template to one that changes none"
            )

    def _squeezed(self, ids: list[int]) -> str:
        # Without special tokens: a rollout keeps the end token that was sampled, as gpt-oss' <|return|>,
        # where the template writes another in earlier turns.
        return "".join(self.of.tokenizer.decode(ids, skip_special_tokens=True).split())

    def whole(self, messages: Messages) -> Tokens:
        """The tokens of a conversation as the template writes it, without what is behind the last end."""
        tokenizer = self.of.tokenizer
        text = fill_template(
            tokenizer,
            messages,
            add_generation_prompt=False,
            tools=self.tools,
            variables=self.variables,
            refused=REFUSED_OF_ROWS,
        )
        if missing := unwritten(messages[-1], text):
            raise ValueError(
                f"the chat template must write the last answer; it does not write {shown(missing)}; write it "
                "into the content as the model is to write it, or set data.chat_template"
            )
        found = expanded(tokenizer, text, messages, partial(encode, tokenizer, add_special_tokens=False))
        ids, pictures = found
        last = max((at for at, index in enumerate(ids) if index in self.of.stop_ids), default=len(ids))
        if tokenizer.decode(ids[last + 1 :]).strip():
            return found
        return Tokens(ids[: last + 1], pictures if pictures is None else pictures[: last + 1])


def check_before_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless the messages before an answer end with another than the assistant's."""
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            "the message before an answer that is trained must be another than the assistant's; "
            + ("it is the assistant's" if messages else "there is none")
            + "; join the messages of the assistant that follow each other, or remove the row"
        )


def conversation(
    given: Sequence[Any],
    data: DataConfig,
    column: str,
    placed: Callable[[list[Any]], list[Any]] = list,
) -> Messages:
    """The checked messages of a conversation of `column`, with `data.system_prompt`.

    `placed` puts pictures into them. Raises ValueError for one that does not end with the assistant's
    message.
    """
    messages = checked_messages(placed([without_nulls(message) for message in given]))
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"the column `{column}` must end with the assistant's message, which is trained; it ends with "
            f"the role {shown(messages[-1]['role'])}; correct the row or remove it"
        )
    return with_system(messages, data)


def prompt_messages(prompt: Any, data: DataConfig, column: str) -> list[Any]:
    """The messages of a prompt whose answer is given as messages, without the run's system message."""
    if isinstance(prompt, str) and (column == data.question_column or data.system_prompt is not None):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        return prompt
    raise ValueError(
        f"the column `{column}` must be a list of messages where the answer is one; it is {typed(prompt)}; "
        "give both as messages, or both as texts; data.question_column and data.system_prompt make messages "
        "of a prompt that is a text"
    )


def int32(ids: Sequence[int]) -> np.ndarray:
    """Token ids as a table has them; they are not changed."""
    array = np.asarray(ids, np.int32)
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class ExampleForm:
    """Rows for supervised training."""

    data: DataConfig
    train_on: TrainOn
    dialogues: Dialogues | None = None
    """None where columns alone are checked."""
    what: str = "examples"
    section: str = "sft"

    @property
    def sees(self) -> bool:
        return self.dialogues is not None and sees(self.dialogues.tokenizer)

    def check_columns(self, spec: str, columns: Collection[str]) -> None:
        if COMPLETION in columns:
            return check_prompt_column(spec, columns, self.data)
        if self.data.question_column is None and MESSAGES in columns:
            return None
        if self.data.question_column is None and "prompt" not in columns and TEXT in columns:
            if self.train_on == "all":
                return None
            raise ValueError(f"{spec}: {_ABOUT_TEXT}")
        preferences = "; train on preferences with `quatrain dpo` or `quatrain rm`"
        remedy = "rename a column, or name that of the prompt in data.question_column"
        if self.data.question_column is not None and MESSAGES in columns:
            remedy = f"unset data.question_column, beside which `{MESSAGES}` is not read"
        raise ValueError(
            f"{spec}: supervised training needs the columns `prompt` and `completion`, `messages`, or, with "
            f"sft.train_on=all, `{TEXT}`; the columns are {listed(columns)}; {remedy}"
            f"{preferences if 'chosen' in columns else ''}"
        )

    def token_rows(self, row: Row, number: int) -> list[TokenRow]:
        assert self.dialogues is not None, "columns alone are checked"
        dialogue = self.dialogues.of(row)
        if self._is_text(row):
            if self.train_on != "all":  # a row of a data set whose other rows have answers
                raise ValueError(_ABOUT_TEXT)
            return [self._of_text(row, number)]
        if self.data.question_column is None and row.get(COMPLETION) is None and MESSAGES in row:
            messages = row[MESSAGES]
            check_message_list("", messages)
            return self._of_messages(dialogue, row, number, messages)
        prompt, completion = row.get(self.data.question_column or "prompt"), row.get(COMPLETION)
        column = self.data.question_column or "prompt"
        if isinstance(completion, Mapping):
            completion = [completion]
        if isinstance(completion, list) and completion:
            before = prompt_messages(prompt, self.data, column)
            return self._of_messages(dialogue, row, number, [*before, *completion], len(before))
        checked_answer(completion)
        text = prompt_of_row(row, self.data, self.sees)
        parts = [dialogue.prompt(text), Tokens(dialogue.answer(text, completion))]
        notes = note_answers(dialogue, text, [completion], row)
        return [self._row(row, number, text, parts, notes)]

    def _is_text(self, row: Row) -> bool:
        others = (self.data.question_column, COMPLETION, "prompt", MESSAGES)
        return row.get(TEXT) is not None and all(row.get(name) is None for name in others if name)

    def _of_text(self, row: Row, number: int) -> TokenRow:
        assert self.dialogues is not None
        text, tokenizer = row[TEXT], self.dialogues.tokenizer
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the column `{TEXT}` must be a string with text; it is {typed(text)}")
        ids = encode(tokenizer, text, closed=False)
        ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, int(tokenizer.eos_token_id)]
        return self._row(row, number, text, [Tokens(ids)], {})

    def _of_messages(
        self, dialogue: Dialogue, row: Row, number: int, given: list[Any], prompt: int | None = None
    ) -> list[TokenRow]:
        """The row of a conversation whose first `prompt` messages are not trained; None: the first one."""
        placed = placing(row) if self.sees else list
        messages = conversation(given, self.data, COMPLETION if row.get(COMPLETION) else MESSAGES, placed)
        # A system message may have been added, behind which an answer can be trained.
        first = 1 if prompt is None else prompt + len(messages) - len(given)
        answers = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
        kept = [at for at in answers if is_trained(messages[at]) is not False]
        if not kept:
            return []
        trained = kept[-1:] if self.train_on == "completion" else kept
        for at in trained:
            checked_answer(messages[at], COMPLETION if COMPLETION in row else MESSAGES)
        if self.train_on == "all":
            if len(kept) < len(answers):
                raise ValueError(
                    "sft.train_on=all trains every token, and a message has a flag (weight, train) that is "
                    "0; set sft.train_on=assistant, or remove the flag"
                )
            parts = [dialogue.whole(messages)]
        else:
            check_before_answer(messages[: trained[0]])
            parts = dialogue.parts(messages, trained)
        text = tuple(messages[: trained[0]])
        notes = note_answers(dialogue, text, [messages[at] for at in trained], row)
        if self.train_on == "completion" and any(is_trained(messages[at]) for at in kept[:-1]):
            notes["flags"] = (
                "have further messages with a weight or a flag that asks to train them; only the last of the "
                "assistant's is trained, so set sft.train_on=assistant"
            )
        if self.train_on == "assistant" and prompt is None and messages[0]["role"] == "assistant":
            notes["first"] = (
                "begin with the assistant's message, which is not trained, because nothing is before it"
            )
        return [self._row(row, number, text, parts, notes)]

    def _row(
        self, row: Row, number: int, text: PromptText, parts: Sequence[Tokens], notes: Mapping[str, str]
    ) -> TokenRow:
        pictures = joined(*((part.pictures, len(part.ids)) for part in parts))
        ids = [part.ids for part in parts]
        if self.train_on == "all":
            whole = [*chain.from_iterable(ids)]
            ids = [whole[:1], whole[1:]]
        first, *others = map(int32, ids)
        return TokenRow(number, text, first, kept_columns(row), tuple(others), notes=notes, pictures=pictures)

    def size(self, row: TokenRow) -> int:
        return len(row.input_ids) + sum(map(len, row.parts))

    def cut(self, row: TokenRow, limit: int) -> TokenRow | None:
        if self.train_on == "all" and row.pictures is not None:
            return None  # the end may be within a picture
        parts, room = [], limit - len(row.input_ids)
        for part in row.parts:
            if room > 0:
                parts.append(part[:room])
            room -= len(part)
        if len(parts) % 2 == 0:  # what is behind the last trained answer
            parts = parts[:-1]
        return replace(row, parts=tuple(parts)) if parts else None


def kept_columns(row: Row) -> dict[str, Any]:
    """The columns that warnings of `Source` read."""
    return {name: row[name] for name in ("tools",) if name in row}
