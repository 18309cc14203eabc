"""vLLM's `generate`: token ids to token ids.

Data flow: a body -> `GENERATE.request` -> `GenerateRequest`; the `Choice`s of its answer -> `GeneratedIds` ->
JSON, for `answering.py`. There is no stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quatrain.serve.choice import Choice, finite_logprobs, named_by_id, usage_of
from quatrain.serve.protocols.openai import OpenAi, openai_error
from quatrain.serve.protocols.protocol import AnswerForm
from quatrain.serve.requests import BadRequest, GenerateRequest
from quatrain.serve.text import Vocabulary
from quatrain.types.sampler import Progress


class Generate(OpenAi[GenerateRequest]):
    """As OpenAI's protocols, but for the answer."""

    def answer(
        self,
        asked: GenerateRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """As in every protocol."""
        return GeneratedIds(asked, model, choices, prompts)


class GeneratedIds(AnswerForm):
    """The JSON of an answer, which has ids and no text."""

    def __init__(
        self,
        asked: GenerateRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
    ):
        self._asked, self._model, self.choices, self._prompts = asked, model, choices, prompts

    def whole(self, version: int) -> dict[str, Any]:
        """The answer."""
        choices = [{"index": index, **self._facts(choice)} for index, choice in enumerate(self.choices)]
        usage = usage_of(self.choices, self._prompts, self._asked.n)
        head = {"request_id": self._asked.request_id, "model": self._model}
        return {**head, "choices": choices, "usage": usage, "weight_version": version}

    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """None: its requests ask for no stream."""
        return iter(())

    def failed(self, error: BadRequest) -> Iterator[dict[str, Any]]:
        """The error itself."""
        yield openai_error(error)

    def _facts(self, choice: Choice) -> dict[str, Any]:
        piece = choice.sampled
        facts: dict[str, Any] = {"finish_reason": choice.finish_reason, "logprobs": None}
        if self._asked.wants_logprobs:
            pairs = zip(map(named_by_id, piece.tokens), finite_logprobs(piece), strict=True)
            facts["logprobs"] = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        facts |= {"token_ids": piece.tokens, "weight_versions": piece.versions}
        if self._asked.return_routed_experts:
            facts["routed_experts"] = choice.routed_experts()
        if self._asked.return_sampling_mask:
            facts["sampling_mask"] = choice.sampling_mask()
        return facts


GENERATE = Generate(GenerateRequest)
