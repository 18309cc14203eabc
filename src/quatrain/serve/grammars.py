"""The grammar that the answer to a chat follows: that of `response_format`, or of the call of a tool.

Data flow: a checked request -> `Grammars.of` -> `PerRequestSampling.grammar`.
"""

from __future__ import annotations

import json
from typing import Any

from quatrain.data.grammars import of_answer, of_call
from quatrain.serve.requests import BadRequest, ChatRequest
from quatrain.types.sampler import Sampler

MOST_CALLS = 64
"""Lists of tools whose grammars are kept."""


class Grammars:
    """Makes the grammars of answers that `sampler` samples, in the forms of the template of `tokenizer`."""

    def __init__(self, sampler: Sampler, tokenizer: Any):
        self._sampler, self._tokenizer = sampler, tokenizer
        self._made: dict[str, str | None] = {}

    def of(self, asked: ChatRequest) -> str | None:
        """The grammar of an answer; None: it may be any text, behind what is begun of a call.

        Raises BadRequest for a format that the sampler does not follow, and for a schema that it does not
        take.
        """
        schema, refusal = asked.json_schema, self._sampler.cannot_constrain
        if schema is None and not asked.must_call:
            return None
        field = "tool_choice" if asked.must_call else "response_format"
        if refusal is not None:
            if asked.must_call:  # the call is begun, and its schema was never promised
                return None
            raise BadRequest(f'{field} must be {{"type": "text"}} here: {refusal}; or leave it out', field)
        key = json.dumps([schema, asked.offered_tools, asked.called])
        try:
            if key not in self._made:
                while len(self._made) >= MOST_CALLS:
                    del self._made[next(iter(self._made))]
                self._made[key] = self._grammar(asked)
            grammar = self._made[key]
            if grammar is not None:
                self._sampler.check_grammar(grammar)
        except ValueError as error:
            what = "the schemas of tools" if asked.must_call else "the schema of an answer"
            raise BadRequest(f"{what} must be one that a grammar can be made of: {error}", field) from error
        return grammar

    def _grammar(self, asked: ChatRequest) -> str | None:
        if asked.json_schema is None:
            return of_call(self._tokenizer, asked.offered_tools, asked.called)
        return of_answer(asked.json_schema, self._tokenizer, asked.offered_tools)
