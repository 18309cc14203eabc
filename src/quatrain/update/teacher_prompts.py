"""Prompts of the teacher's own: what it reads in place of the policy's, before the same completion.

Data flow: `RolloutBatch` -> `TeacherPrompts.table`, the ids that the teacher reads -> `Teacher.score` ->
`TeacherPrompts.back`, log-probabilities at the places of the policy's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from quatrain.config.errors import listed, shown
from quatrain.data.tokenizer import encode, fill_template, render
from quatrain.data.turns import TurnsOfRow
from quatrain.forward.table import TokenTable
from quatrain.types.batches import PromptText, RolloutBatch
from quatrain.workers.user_code import find_function

_FUNCTION = re.compile(r"\S+\.py:\w+|[\w.]+:\w+")
_COLUMN = re.compile(r"{(\w+)}")


class TeacherPrompts:
    """What the teacher reads before a completion: `spec`, a text with {columns}, or a function of the row.

    A text becomes a system message before the messages of a prompt, or the end of the one that it has, or
    lines before a prompt that is a text. A function gets the row, its data columns and `prompt`, and returns
    a text or messages. Prompts are rendered with the policy's `tokenizer`, and by `turns` if episodes have
    several. Raises ValueError for a function that cannot be imported.
    """

    def __init__(self, spec: str, tokenizer: Any, turns: TurnsOfRow | None = None):
        self._spec, self._tokenizer, self._turns = spec, tokenizer, turns
        self._function: Callable[..., Any] | None = None
        if _FUNCTION.fullmatch(spec):
            self._function = find_function(spec, MappingProxyType({}), "teacher's prompt")
        self._generation: list[int] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The data columns that the text names."""
        return () if self._function else tuple(dict.fromkeys(_COLUMN.findall(self._spec)))

    def text(self, prompt: PromptText, columns: Mapping[str, Any]) -> PromptText:
        """The teacher's prompt in place of `prompt`, of a row with `columns`."""
        if self._function is not None:
            written = self._function({**columns, "prompt": prompt})
            return written if isinstance(written, str) else tuple(written)
        if missing := [name for name in self.columns if name not in columns]:
            raise ValueError(
                f"distill.prompt names the column {missing[0]!r}; the data has {listed(columns) or 'none'}"
            )
        own = _COLUMN.sub(lambda found: str(columns[found[1]]), self._spec)
        if isinstance(prompt, str):
            return f"{own}\n{prompt}"
        first, *rest = prompt
        if first["role"] == "system":
            return ({**first, "content": f"{first['content']}\n\n{own}"}, *rest)
        return ({"role": "system", "content": own}, *prompt)

    def ids(self, prompt: PromptText, columns: Mapping[str, Any], policy_ids: np.ndarray) -> np.ndarray:
        """[P'] int32 ids of the teacher's prompt, where the policy's is `policy_ids`.

        Raises ValueError if the two do not end with the same beginning of an answer.
        """
        text = self.text(prompt, columns)
        ids = self._turns(columns).prompt(text) if self._turns else render(self._tokenizer, text)
        count = 0 if isinstance(text, str) else len(self._generation_ids())
        mine, its = ids[len(ids) - count :], policy_ids[len(policy_ids) - count :].tolist()
        if mine != its:
            raise ValueError(
                "the teacher's prompt (distill.prompt) must end as the policy's, with the beginning of an "
                f"answer: it ends with {shown(self._tokenizer.decode(mine))}, the policy's with "
                f"{shown(self._tokenizer.decode(its))}; end its messages with the user's"
            )
        return np.asarray(ids, np.int32)

    def _generation_ids(self) -> list[int]:
        """The ids that the chat template writes at the beginning of an answer."""
        if self._generation is None:
            question = [{"role": "user", "content": "QUESTION"}]
            closed, begun = (
                fill_template(self._tokenizer, question, add_generation_prompt=on) for on in (False, True)
            )
            self._generation = encode(self._tokenizer, begun.removeprefix(closed), add_special_tokens=False)
        return self._generation

    def table(self, rollouts: RolloutBatch) -> TokenTable:
        """What the teacher reads: its prompt, then the row's own ids from the first sampled token on."""
        starts = rollouts.completion_mask.argmax(axis=1)
        rows = []
        for row, start in enumerate(starts):
            columns = {name: values[row] for name, values in rollouts.columns.items()}
            policy_ids = rollouts.input_ids[row, :start]
            prompt = self.ids(rollouts.prompts[row], columns, policy_ids) if start else np.zeros(1, np.int32)
            rows.append((prompt, rollouts.input_ids[row, start : rollouts.lengths[row]]))
        width = max(len(prompt) + len(rest) for prompt, rest in rows)
        ids = np.zeros((len(rows), width), np.int32)
        attention, scored = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
        for row, (prompt, rest) in enumerate(rows):
            first, end = len(prompt), len(prompt) + len(rest)
            ids[row, :end] = np.concatenate([prompt, rest])
            attention[row, :end] = True
            scored[row, first:end] = rollouts.completion_mask[row, starts[row] : rollouts.lengths[row]]
        return TokenTable(ids, attention, scored, {}, rollouts.group_ids, rollouts.episode_ids)

    @staticmethod
    def back(values: np.ndarray, table: TokenTable, rollouts: RolloutBatch) -> np.ndarray:
        """[B, T, ...]: `values` [B, T', ...] of `table`'s scored tokens, at their places in `rollouts`."""
        mask = rollouts.completion_mask
        same = np.array_equal(table.input_ids[table.completion_mask], rollouts.input_ids[mask])
        assert same, "the teacher reads the tokens that the policy sampled"
        result = np.zeros((*mask.shape, *values.shape[2:]), values.dtype)
        result[mask] = values[table.completion_mask]
        return result
