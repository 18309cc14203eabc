"""Preferences: pairs of answers to a prompt, and answers that were called good or bad.

Data flow: rows (`rows.py`) -> `GivenReader` (`examples.py`) with a `PairForm` or a `JudgedForm` -> `Table` ->
`Pair`s for DPO and reward models, `Judged` answers for KTO.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quatrain.config.data_sets import TrainingSpec
from quatrain.config.errors import listed, shown
from quatrain.config.schema import DataConfig
from quatrain.data.answers import checked_answer, is_trained
from quatrain.data.examples import (
    Dialogue,
    Dialogues,
    GivenReader,
    GivenSource,
    Messages,
    OnLong,
    check_before_answer,
    conversation,
    int32,
    kept_columns,
    note_answers,
    prompt_messages,
)
from quatrain.data.expansion import sees
from quatrain.data.pictures import has_pictures
from quatrain.data.prompts import check_columns_of, check_prompt_column, prompt_of, typed
from quatrain.data.rows import NO_ROWS, GivenRows, Row
from quatrain.data.token_table import TokenRow
from quatrain.data.tokenizer import encode
from quatrain.types.batches import Judged, Pair, PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
COMPLETION, LABEL = "completion", "label"


PairSource = GivenSource[Pair]
JudgedSource = GivenSource[Judged]


def _pair(row: TokenRow, number: int) -> Pair:
    chosen, rejected = row.parts
    return Pair(row.input_ids, chosen, rejected, row.columns.get(MARGIN), number, row.source)


def _judged(row: TokenRow, number: int) -> Judged:
    (completion,) = row.parts
    return Judged(row.input_ids, completion, row.columns[LABEL], number, row.source)


def load_pairs(
    spec: TrainingSpec | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
    section: str = "dpo",
    margins: bool = False,
    cut_counts: bool = False,
    scored: bool = False,
) -> PairSource:
    """The pairs of the data set `spec`, with ids as a rollout would have them.

    A row has `chosen` and `rejected`, answers to `prompt` (texts, or lists of messages; a text may also
    answer messages), or, without `prompt`, whole texts or whole conversations; conversations must be the same
    up to the last answer. The prompt of whole texts is what their tokens have in common. `tools`,
    `chat_template_kwargs`, `data.question_column` and `data.system_prompt` are as in `load_examples`, and so
    are `most_tokens` and `on_long`, for the longer sequence of a pair. Texts end with the tokenizer's end
    token.

    `margins` says that the column `margin`, a number or null, is read; `cut_counts`, that the loss depends on
    where whole texts are cut; `section`, where messages say that keys are. If the pairs
    are `scored`, their ids are those that a reward model reads (`render_completed`), with what the template
    writes behind the answer.

    Raises ValueError, with the data set and the row, for answers that are equal or empty, for conversations
    that differ before the last answer, and as `load_examples` does.
    """
    form = PairForm(data, Dialogues(tokenizer, stop_ids), section, margins, cut_counts, scored)
    reader = GivenReader(form, rows, most_tokens, on_long)
    return PairSource(spec, reader, _pair, seed=seed, shuffle=data.shuffle)


def load_judged(
    spec: TrainingSpec | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    rows: GivenRows = NO_ROWS,
    most_tokens: Mapping[str, int] = MappingProxyType({}),
    on_long: OnLong = "error",
    stop_ids: Sequence[int] | None = None,
    section: str = "dpo",
) -> JudgedSource:
    """The judged answers of the data set `spec`: `prompt`, `completion` and `label`, true for a good answer.

    A row with `chosen` and `rejected` is two answers, the good one first. All else is as in `load_pairs`.
    """
    form = JudgedForm(data, Dialogues(tokenizer, stop_ids), section)
    reader = GivenReader(form, rows, most_tokens, on_long)
    return JudgedSource(spec, reader, _judged, seed=seed, shuffle=data.shuffle)


def check_pair_columns(
    spec: TrainingSpec | Sequence[str], data: DataConfig, rows: GivenRows = NO_ROWS, *, section: str = "dpo"
) -> None:
    """Raises the ValueError of `load_pairs` for columns, without a tokenizer."""
    check_columns_of(spec, GivenReader(PairForm(data, section=section), rows))


def check_judged_columns(
    spec: TrainingSpec | Sequence[str], data: DataConfig, rows: GivenRows = NO_ROWS, *, section: str = "dpo"
) -> None:
    """Raises the ValueError of `load_judged` for columns, without a tokenizer."""
    check_columns_of(spec, GivenReader(JudgedForm(data, section=section), rows))


class _Answered(NamedTuple):
    """A prompt, and the answers to it as they are given and as tokens."""

    text: PromptText
    prompt_ids: list[int]
    given: list[Any]
    answers: list[list[int]]


@dataclass(frozen=True)
class PairForm:
    """Rows with a chosen and a rejected answer."""

    data: DataConfig
    dialogues: Dialogues | None = None
    """None where columns alone are checked."""
    section: str = "dpo"
    margins: bool = False
    cut_counts: bool = False
    scored: bool = False
    what: str = "pairs"

    @property
    def sees(self) -> bool:
        return self.dialogues is not None and sees(self.dialogues.tokenizer)

    def check_columns(self, spec: str, columns: Collection[str]) -> None:
        question = self.data.question_column
        if missing := [name for name in (CHOSEN, REJECTED) if name not in columns]:
            judged = LABEL in columns and COMPLETION in columns
            raise ValueError(
                f"{spec}: pairs need the columns `{CHOSEN}` and `{REJECTED}`; there is no `{missing[0]}`, "
                f"the columns are {listed(columns)}; "
                + ("train on judged answers with dpo.loss=kto, or make pairs" if judged else "rename one")
            )
        if question is not None or "prompt" in columns:
            check_prompt_column(spec, columns, self.data)

    def token_rows(self, row: Row, number: int) -> list[TokenRow]:
        _check_text(row, self.sees)
        found = self._answered(row)
        if found is None:
            return []
        assert self.dialogues is not None
        columns, notes = kept_columns(row), {}
        if self.margins:
            columns[MARGIN] = _margin(row)
        elif row.get(MARGIN) is not None:
            notes["margin"] = f"have a `{MARGIN}`, which only `quatrain rm` reads"
        dialogue = self.dialogues.of(row)
        if self.scored and (dialogue.tools or dialogue.variables):
            notes["given"] = (
                "have `tools` or `chat_template_kwargs`, which are trained on; a reward model gets neither "
                "where it scores completions (`model:` in reward.functions)"
            )
        if self.cut_counts and not self._has_prompt(row) and isinstance(found.text, str):
            notes["cut"] = (
                "have no `prompt`, so it ends where the tokens of both texts differ first; this loss depends "
                "on where answers begin, so give the prompts, if they begin earlier"
            )
        notes |= note_answers(dialogue, found.text, found.given, row)
        answers = tuple(map(int32, found.answers))
        return [TokenRow(number, found.text, int32(found.prompt_ids), columns, answers, notes=notes)]

    def _has_prompt(self, row: Row) -> bool:
        return row.get(self.data.question_column or "prompt") is not None

    def _answered(self, row: Row) -> _Answered | None:
        """The prompt and the two answers of a row; None if a flag says that one is not trained."""
        assert self.dialogues is not None, "columns alone are checked"
        chosen, rejected = (_unwrapped(row.get(name), name) for name in (CHOSEN, REJECTED))
        if isinstance(chosen, str) is not isinstance(rejected, str):
            raise ValueError(
                f"`{CHOSEN}` and `{REJECTED}` must both be texts or both be messages; they are "
                f"{typed(chosen)} and {typed(rejected)}; give both in one form"
            )
        dialogue = self.dialogues.of(row)
        if not isinstance(chosen, str):
            found = self._of_messages(dialogue, row, chosen, rejected)
        elif self._has_prompt(row):
            text = self._prompt_text(row)
            found = self._to_prompt(dialogue, text, [chosen, rejected])
        else:
            found = self._of_texts(row, chosen, rejected)
        if found is not None and found.answers[0] == found.answers[1]:
            raise ValueError(
                f"`{CHOSEN}` and `{REJECTED}` must be two different answers; both are "
                f"{shown(found.given[0])}; correct the row or remove it"
            )
        return found

    def _prompt_text(self, row: Row) -> PromptText:
        column = self.data.question_column or "prompt"
        return prompt_of(row[column], self.data, column)

    def _of_messages(self, dialogue: Dialogue, row: Row, chosen: Any, rejected: Any) -> _Answered | None:
        both = [self._whole(row, name, given) for name, given in ((CHOSEN, chosen), (REJECTED, rejected))]
        before, others = (messages[:-1] for messages in both)
        if before != others:
            same = [one == other for one, other in zip(before, others, strict=False)]
            at = [*same, False].index(False)
            raise ValueError(
                f"the conversations of `{CHOSEN}` and `{REJECTED}` must be the same up to the last answer; "
                f"they differ from message {at + 1} on; end both with the first answer that differs"
            )
        last = [messages[-1] for messages in both]
        if any(is_trained(message) is False for message in last):
            return None
        check_before_answer(before)
        return self._to_prompt(dialogue, tuple(before), last)

    def _to_prompt(self, dialogue: Dialogue, text: PromptText, given: list[Any]) -> _Answered:
        """Both answers to a prompt; for a reward model with what both have in common as the prompt."""
        found = answered(dialogue, text, given, (CHOSEN, REJECTED))
        if not self.scored:
            return found
        both = [dialogue.completed(text, answer) for answer in given]
        # Where a tokenizer joins the end of a prompt with an answer, less of the prompt is common.
        cut = min(len(found.prompt_ids), in_common(both), *(len(ids) - 1 for ids in both))
        return found._replace(prompt_ids=both[0][:cut], answers=[ids[cut:] for ids in both])

    def _whole(self, row: Row, name: str, given: list[Any]) -> Messages:
        """The whole conversation of an answer, which may have its prompt in the column of prompts."""
        begins = isinstance(given[0], Mapping) and given[0].get("role") in ("system", "developer", "user")
        if begins or not self._has_prompt(row):
            messages = conversation(given, self.data, name)
            if self._has_prompt(row):
                self._check_same_prompt(row, name, messages)
            return messages
        column = self.data.question_column or "prompt"
        return conversation([*prompt_messages(row[column], self.data, column), *given], self.data, name)

    def _check_same_prompt(self, row: Row, name: str, messages: Messages) -> None:
        """Raises ValueError if a whole conversation has another prompt than the row, beside it."""
        prompt = row[self.data.question_column or "prompt"]
        if isinstance(prompt, str):
            same = any(message["content"].strip() == prompt.strip() for message in messages[:-1])
        else:
            mine = prompt_of(prompt, self.data)
            same = tuple(messages[: len(mine)]) == mine
        if not same:
            raise ValueError(
                f"the conversation of `{name}` begins with {shown(messages[0])}, and the row has the prompt "
                f"{shown(prompt)}, which is not in it; leave out one of the two"
            )

    def _of_texts(self, row: Row, chosen: str, rejected: str) -> _Answered:
        """Whole texts: the prompt is what their tokens have in common at the beginning."""
        assert self.dialogues is not None
        for name, text in ((CHOSEN, chosen), (REJECTED, rejected)):
            checked_answer(text, name)
        if self.data.system_prompt is not None:
            raise ValueError(
                "data.system_prompt makes messages of a prompt, and whole texts have none; add the column "
                "`prompt`, or unset data.system_prompt"
            )
        tokenizer = self.dialogues.tokenizer
        both = [encode(tokenizer, text, closed=False) for text in (chosen, rejected)]
        common, shorter = in_common(both), min(map(len, both))
        if chosen != rejected and common == shorter:
            raise ValueError(
                f"`{CHOSEN}` and `{REJECTED}` without a `prompt` must differ before one of them ends, which "
                f"would have an empty answer; {shown(min(chosen, rejected, key=len))} begins the "
                "other; give the prompt, or correct the row"
            )
        if common == 0:
            raise ValueError(
                f"`{CHOSEN}` and `{REJECTED}` must begin with the same prompt; they differ from the first "
                "token on; give the prompt in the column `prompt`"
            )
        eos = int(tokenizer.eos_token_id)
        answers = [[*ids[common:], *([] if ids[-1] == eos else [eos])] for ids in both]
        return _Answered(tokenizer.decode(both[0][:common]), both[0][:common], [chosen, rejected], answers)

    def size(self, row: TokenRow) -> int:
        return len(row.input_ids) + max(map(len, row.parts))

    def cut(self, row: TokenRow, limit: int) -> TokenRow | None:
        """Both answers cut; None if nothing is left of them, or they no longer differ."""
        room = limit - len(row.input_ids)
        parts = tuple(part[: max(room, 0)] for part in row.parts)
        if room <= 0 or (len(parts) == 2 and np.array_equal(*parts)):
            return None
        return replace(row, parts=parts)


@dataclass(frozen=True)
class JudgedForm:
    """Rows with an answer and whether it is good; rows with pairs are two."""

    data: DataConfig
    dialogues: Dialogues | None = None
    section: str = "dpo"
    what: str = "answers"

    @property
    def sees(self) -> bool:
        return self.dialogues is not None and sees(self.dialogues.tokenizer)

    @property
    def _pairs(self) -> PairForm:
        # Each answer is judged alone: what both have in common does not cancel, as in a difference.
        return PairForm(self.data, self.dialogues, self.section, cut_counts=True)

    def check_columns(self, spec: str, columns: Collection[str]) -> None:
        if COMPLETION not in columns and CHOSEN in columns:  # whatever a column `label` is about
            return self._pairs.check_columns(spec, columns)
        if missing := [name for name in (COMPLETION, LABEL) if name not in columns]:
            raise ValueError(
                f"{spec}: judged answers need the columns `prompt`, `{COMPLETION}` and `{LABEL}`, or pairs "
                f"in `{CHOSEN}` and `{REJECTED}`; there is no `{missing[0]}`, the columns are "
                f"{listed(columns)}; rename one"
            )
        return check_prompt_column(spec, columns, self.data)

    def token_rows(self, row: Row, number: int) -> list[TokenRow]:
        _check_text(row, self.sees)
        if row.get(COMPLETION) is None and row.get(CHOSEN) is not None:
            return [
                replace(pair, parts=(part,), columns={**pair.columns, LABEL: label})
                for pair in self._pairs.token_rows(row, number)
                for part, label in zip(pair.parts, (True, False), strict=True)
            ]
        assert self.dialogues is not None
        label, column = row.get(LABEL), self.data.question_column or "prompt"
        if label not in (0, 1) or not isinstance(label, bool | int):
            raise ValueError(
                f"the column `{LABEL}` must be true or 1 for a good answer, false or 0 for a bad one; it is "
                f"{typed(label)}; correct the row"
            )
        given: Any
        dialogue, completion = self.dialogues.of(row), _unwrapped(row.get(COMPLETION), COMPLETION)
        if isinstance(completion, str):
            text, given = prompt_of(row.get(column), self.data, column), completion
        else:
            before = prompt_messages(row.get(column), self.data, column)
            *before, answer = conversation([*before, *completion], self.data, COMPLETION)
            if is_trained(answer) is False:
                return []
            check_before_answer(before)
            text, given = tuple(before), answer
        found = answered(dialogue, text, [given], (COMPLETION,))
        notes = note_answers(dialogue, text, [given], row)
        columns = {**kept_columns(row), LABEL: bool(label)}
        parts = tuple(map(int32, found.answers))
        return [TokenRow(number, text, int32(found.prompt_ids), columns, parts, notes=notes)]

    def size(self, row: TokenRow) -> int:
        return self._pairs.size(row)

    def cut(self, row: TokenRow, limit: int) -> TokenRow | None:
        return self._pairs.cut(row, limit)


def in_common(both: Sequence[Sequence[int]]) -> int:
    """The number of token ids that two texts have in common at the beginning."""
    first, second = (np.array(ids[: min(map(len, both))]) for ids in both)
    return int(np.logical_and.accumulate(first == second).sum())


def answered(dialogue: Dialogue, text: PromptText, given: list[Any], names: Sequence[str]) -> _Answered:
    """The answers `given`, of the columns `names`, to a prompt."""
    for answer, name in zip(given, names, strict=True):
        checked_answer(answer, name)
    return _Answered(
        text, dialogue.prompt(text).ids, given, [dialogue.answer(text, answer) for answer in given]
    )


def _check_text(row: Row, sees: bool) -> None:
    """Raises ValueError for a row with pictures, where the model would see some."""
    if sees and has_pictures(row):
        raise ValueError(
            "preferences are trained on texts alone, and the row has pictures; remove it, or train with "
            "`quatrain train` or `quatrain sft`, which read pictures"
        )


def _unwrapped(given: Any, name: str) -> Any:
    """An answer as a text, or as a non-empty list of messages; ValueError for others."""
    if isinstance(given, Mapping):
        return [given]
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given):
        return given
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    raise ValueError(
        f"the column `{name}` must be one answer, a text or a list of messages; it is {typed(given)}; "
        + ("several answers are not ranked: make a row of each pair" if several else "correct the row")
    )


def _margin(row: Row) -> float | None:
    margin = row.get(MARGIN)
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(
            f"the column `{MARGIN}` must be a finite number, by how much the chosen answer is better, or "
            f"null; it is {typed(margin)}; correct the row"
        )
    return float(margin)
