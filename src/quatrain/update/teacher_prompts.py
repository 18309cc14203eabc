"""Prompts of the teacher's own: what it reads in place of the policy's, before the same completion.

Data flow: `RolloutBatch` -> `TeacherPrompts.table`, the ids that the teacher reads -> `Teacher.score` ->
`TeacherPrompts.back`, log-probabilities at the places of the policy's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from quatrain.config.errors import shown
from quatrain.config.schema import DistillConfig
from quatrain.data.messages import INSTRUCTIONS, checked_messages, tools_of
from quatrain.data.policy import Policy
from quatrain.data.prompts import PromptSource
from quatrain.data.row_text import RowText
from quatrain.data.token_table import TokenRow
from quatrain.data.tokenizer import encode_further, fill_template, render
from quatrain.data.turns import TurnsOfRow
from quatrain.forward.table import TokenTable
from quatrain.types.batches import PromptText, RolloutBatch
from quatrain.types.pictures import Pictures, Tokens, joined, stacked
from quatrain.workers.user_code import find_function

_FUNCTION = re.compile(r".+\.py:\w+|[\w.]+:\w+")
OTHERWISE = ", or give a function as path/file.py:function"


class TeacherPrompts:
    """What the teacher reads before a completion: `spec`, a text with {columns}, or a function of the row.

    A text, in which a literal brace is written twice, becomes a system message before the messages of a
    prompt, or the end of the one that it has, or lines before a prompt that is a text. A function, which a
    `spec` is that ends in `.py:name`, gets the row, its data columns and `prompt`, and returns a text or
    messages. Prompts are rendered with the policy's `tokenizer`, and by `turns` if episodes have several.
    Raises ValueError for a function that cannot be imported, and for braces around anything but a name.
    """

    def __init__(self, spec: str, tokenizer: Any, turns: TurnsOfRow | None = None):
        self._spec, self._tokenizer, self._turns = spec, tokenizer, turns
        self._function: Callable[..., Any] | None = None
        if _FUNCTION.fullmatch(spec):
            self._function = find_function(spec, MappingProxyType({}), "teacher's prompt (distill.prompt)")
        else:
            self._text = RowText(spec, "distill.prompt", otherwise=OTHERWISE)
        self._generation: list[int] | None = None

    @classmethod
    def of(cls, config: DistillConfig, policy: Policy) -> Self | None:
        """Those of `distill.prompt`; None if it is null."""
        return None if config.prompt is None else cls(config.prompt, policy.tokenizer, policy.turns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The data columns that the text names."""
        return () if self._function else self._text.columns

    def text(self, prompt: PromptText, columns: Mapping[str, Any]) -> PromptText:
        """The teacher's prompt in place of `prompt`, of a row with `columns`.

        Raises ValueError for a column that is missing or null, and for a function that fails.
        """
        if self._function is not None:
            return self._written(self._function, {**columns, "prompt": prompt})
        own = self._text.filled(columns)
        if isinstance(prompt, str):
            return f"{own}\n{prompt}"
        first, *rest = prompt
        if first["role"] in INSTRUCTIONS:
            content = first["content"]
            if isinstance(content, list):  # parts, with pictures
                return ({**first, "content": [*content, {"type": "text", "text": f"\n\n{own}"}]}, *rest)
            return ({**first, "content": f"{content}\n\n{own}"}, *rest)
        return ({"role": "system", "content": own}, *prompt)

    def _written(self, function: Callable[..., Any], row: Mapping[str, Any]) -> PromptText:
        """What `function` makes of `row`; raises ValueError where that is no prompt."""
        try:
            written = function(row)
            return written if isinstance(written, str) else tuple(checked_messages(written))
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"distill.prompt {self._spec} must return messages, or a text; it failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def longest(self, name: str, source: PromptSource, taught: Callable[[Mapping[str, Any]], bool]) -> int:
        """Tokens of the longest prompt of the data set `name`; all those of rows that are `taught` are made.

        Raises ValueError, which names the row, for a prompt that cannot be made.
        """

        def size(row: TokenRow) -> int:
            try:
                if not taught(row.columns):
                    return 0
                return len(self.tokens(row.text, row.columns, row.input_ids).ids)
            except ValueError as error:
                raise ValueError(f"{name}, row {row.number}: {error}") from error

        return source.largest(size)

    def tokens(self, prompt: PromptText, columns: Mapping[str, Any], policy_ids: np.ndarray) -> Tokens:
        """The tokens of the teacher's prompt, where the policy's has the ids `policy_ids`.

        Raises ValueError if the two do not end with the same beginning of an answer.
        """
        text = self.text(prompt, columns)
        tools = tools_of(columns)
        turns = self._turns
        rendered = turns(columns).prompt(text) if turns else render(self._tokenizer, text, tools)
        ids = rendered.ids
        count = 0 if isinstance(text, str) else len(self._generation_ids())
        mine, its = ids[len(ids) - count :], policy_ids[len(policy_ids) - count :].tolist()
        # A completion continues the beginning of an answer: after another one its tokens would mean something
        # else.
        if mine != its:
            raise ValueError(
                "the teacher's prompt (distill.prompt) must end as the policy's, with the beginning of an "
                f"answer: it ends with {shown(self._tokenizer.decode(mine))}, the policy's with "
                f"{shown(self._tokenizer.decode(its))}; end its messages with the user's"
            )
        return rendered

    def _generation_ids(self) -> list[int]:
        """The ids that the chat template writes at the beginning of an answer."""
        if self._generation is None:
            question = [{"role": "user", "content": "QUESTION"}]
            closed, begun = (
                fill_template(self._tokenizer, question, add_generation_prompt=on) for on in (False, True)
            )
            self._generation = encode_further(self._tokenizer, begun.removeprefix(closed))
        return self._generation

    def table(self, rollouts: RolloutBatch, taught: Sequence[bool]) -> TokenTable:
        """What the teacher reads: its prompt, then the row's own ids from the first sampled token on.

        Rows that are not `taught` keep the policy's prompt.
        """
        starts = rollouts.completion_mask.argmax(axis=1)
        rows, seen = [], list[Pictures | None]()
        for row, start in enumerate(starts):
            columns = {name: values[row] for name, values in rollouts.columns.items()}
            policy_ids, end = rollouts.input_ids[row, :start], rollouts.lengths[row]
            prompt = Tokens(policy_ids.tolist() if start else [0], _of(rollouts, row, 0, start or 1))
            if start and taught[row]:
                prompt = self.tokens(rollouts.prompts[row], columns, policy_ids)
            rest = rollouts.input_ids[row, start:end]
            rows.append((np.array(prompt.ids, np.int32), rest))
            size = len(prompt.ids), len(rest)
            seen.append(joined((prompt.pictures, size[0]), (_of(rollouts, row, start, end), size[1])))
        width = max(len(prompt) + len(rest) for prompt, rest in rows)
        ids = np.zeros((len(rows), width), np.int32)
        attention, scored = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
        for row, (prompt_ids, rest) in enumerate(rows):
            first, end = len(prompt_ids), len(prompt_ids) + len(rest)
            ids[row, :end] = np.concatenate([prompt_ids, rest])
            attention[row, :end] = True
            scored[row, first:end] = rollouts.completion_mask[row, starts[row] : rollouts.lengths[row]]
        groups = rollouts.group_ids, rollouts.episode_ids
        return TokenTable(ids, attention, scored, {}, *groups, pictures=stacked(seen, width))

    @staticmethod
    def back(values: np.ndarray, table: TokenTable, rollouts: RolloutBatch) -> np.ndarray:
        """[B, T, ...]: `values` [B, T', ...] of `table`'s scored tokens, at their places in `rollouts`."""
        mask = rollouts.completion_mask
        # Values are put back by their order: that is right only while both tables list the same tokens.
        same = np.array_equal(table.input_ids[table.completion_mask], rollouts.input_ids[mask])
        assert same, "the teacher reads the tokens that the policy sampled"
        result = np.zeros((*mask.shape, *values.shape[2:]), values.dtype)
        result[mask] = values[table.completion_mask]
        return result


def _of(rollouts: RolloutBatch, row: int, first: int, end: int) -> Pictures | None:
    """The pictures of some tokens of a row; None if they are text."""
    if rollouts.pictures is None:
        return None
    here = Pictures(rollouts.pictures.ids[row, first:end], rollouts.pictures.by_id)
    return here if here.ids.any() else None
