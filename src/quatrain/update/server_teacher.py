"""A teacher behind an inference server, which gives log-probabilities of the tokens of a prompt.

Data flow: `TokenTable` -> one request for each sequence, token ids in and log-probabilities out
(`servers/`) -> `TeacherScores` -> `Teacher.score`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any, TypeVar

import numpy as np

from quatrain.cluster.processes import decided_by_main
from quatrain.data.tokenizer import encode
from quatrain.data.vocabulary import TEXTS
from quatrain.forward.table import TokenTable
from quatrain.ops.logprobs import LOWEST
from quatrain.ops.top_words import LEAST_REST, NO_WORD
from quatrain.servers.client import Refusal, ServerClient, ServerLost, Unfit, all_of
from quatrain.servers.kinds import KINDS, Pairs, PromptScores, Quatrain
from quatrain.servers.server import described
from quatrain.update.teacher_scores import TeacherScores, TopWords

AT_ONCE = 32
"""Sequences that are asked for at one time."""
SAME = 1e-2
"""Largest difference, in nats, of the log-probabilities of a text and of its ids when a server is probed."""

BLIND_TEACHER = (
    "a teacher on a server (distill.teacher) gets no pictures; give the folder of a model with a tower"
)
Found = TypeVar("Found")


class ServerTeacher:
    """A `Source` that is the server at `address`, at temperature 1.

    It gives `num_words` of the likeliest words, or none. It is probed when it is made. A server that does not
    answer is asked again for `timeout_s` seconds; then ConnectionError is raised, and the run ends: it never
    trains without its teacher. Raises ValueError if the server gives no log-probabilities of prompts, or has
    other tokens than `tokenizer`. In a run of several processes the main one asks.
    """

    def __init__(self, address: str, tokenizer: Any, *, timeout_s: float, num_words: int = 0):
        self.address, self._timeout_s, self._num_words = address, timeout_s, num_words
        owner, model, self.longest = decided_by_main(
            lambda: self._asked(lambda client: described(client.ask_patiently))
        )
        # Any other server with OpenAI's completions may be a teacher: it is asked as `quatrain serve` is.
        self._kind = KINDS.get(owner, Quatrain)(model)
        decided_by_main(lambda: self._asked(lambda client: self._probe(client, tokenizer)))

    def _asked(self, work: Callable[[ServerClient], Coroutine[Any, Any, Found]]) -> Found:
        """What `work` finds with a client of the server; its errors name the teacher."""
        try:
            with closing(ServerClient(self.address, timeout_s=self._timeout_s, at_once=AT_ONCE)) as client:
                return client.run(work(client))
        except Refusal as error:
            raise ValueError(f"the teacher at {self.address}: it refused a question: {error}") from error
        except Unfit as error:
            raise ValueError(f"the teacher at {self.address}: {error}") from error
        except ServerLost as error:
            raise ConnectionError(f"the teacher at {self.address}: {error}") from error

    def scores(self, table: TokenTable, own: Any = None, top: TopWords | None = None) -> TeacherScores:
        """As `OwnWeights.scores`, with a word more than `top` asks for: the token itself."""
        if table.pictures is not None:
            raise ValueError(BLIND_TEACHER)
        sequences = [table.input_ids[row, :length].tolist() for row, length in enumerate(table.lengths)]
        mask = table.completion_mask
        result = np.zeros(mask.shape, np.float32)
        width = 0 if top is None else top.count + 1
        words = np.full((*mask.shape, width), NO_WORD, np.int32)
        word_logprobs = np.full((*mask.shape, width + 1), LOWEST, np.float32)
        # Decided by the main process: two answers of a server may differ by rounding, and each process of a
        # mesh must have the same batch.
        for row, (logprobs, pairs) in enumerate(decided_by_main(lambda: self._of_all(sequences))):
            places = np.flatnonzero(mask[row])
            result[row, places] = np.asarray(logprobs, np.float64)[places]
            if top is None:
                continue
            for place in places:
                ids, values = _outcomes(pairs[place], width, top.num_words)
                words[row, place, : len(ids)] = ids
                word_logprobs[row, place, [*range(len(ids)), -1]] = values
        return TeacherScores(result) if top is None else TeacherScores(result, words, word_logprobs)

    def _of_all(self, sequences: Sequence[list[int]]) -> list[PromptScores]:
        return self._asked(
            lambda client: all_of(self._of_prompt(client, ids, self._num_words) for ids in sequences)
        )

    async def _of_prompt(self, client: ServerClient, prompt: list[int] | str, num_words: int) -> PromptScores:
        """The scores of each token of `prompt`; raises Unfit for an answer without them."""
        async with client.room:
            answer = await client.ask_patiently(*self._kind.score_request(prompt, num_words))
        try:
            logprobs, words = self._kind.read_scores(answer, prompt, num_words)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unfit(
                "it must give a log-probability for each token of a prompt (echo or prompt_logprobs of "
                "/v1/completions, or return_logprob of SGLang's /generate); its answer has none "
                f"({type(error).__name__})"
            ) from error
        length = len(logprobs) if isinstance(prompt, str) else len(prompt)
        # Above 0 by rounding alone; SAME lies far over that, and under any error that matters.
        if len(logprobs) != length or not all(math.isfinite(x) and x < SAME for x in logprobs[1:]):
            raise Unfit(
                "it must give a finite log-probability for each token of a prompt; of one with "
                f"{length} tokens it gave {len(logprobs)} values"
            )
        if num_words:
            self._check_words(words, length)
        return logprobs, words

    def _check_words(self, words: Sequence[Pairs], length: int) -> None:
        """Raises Unfit unless each place has `num_words` words, which are part of one distribution."""
        fewest = min(map(len, words[1:]), default=self._num_words) if len(words) == length else 0
        mass = max((sum(math.exp(x) for _, x in pairs) for pairs in words[1:]), default=0.0)
        if fewest < self._num_words or mass > 1 + SAME:
            raise Unfit(
                f"it must give the {self._num_words} likeliest words in the place of each token of a prompt "
                f"(distill.top_k), with probabilities that are at most 1 together; it gave {fewest} words "
                f"and {mass:.4g}; set a smaller distill.top_k, or raise the limit of the server (vLLM: "
                "--max-logprobs)"
            )

    async def _probe(self, client: ServerClient, tokenizer: Any) -> None:
        """Raises Unfit if the server reads a text in other ids than `tokenizer`, or gives no words."""
        for text in TEXTS:
            ids = encode(tokenizer, text)
            # Without words: they are found by ids, and those of a text are the server's.
            by_text, _ = await self._of_prompt(client, text, 0)
            by_ids, _ = await self._of_prompt(client, ids, self._num_words)
            same = len(by_text) == len(by_ids)
            if not same or not np.allclose(by_text[1:], by_ids[1:], rtol=0, atol=SAME):
                raise Unfit(
                    f"it must have the policy's tokenizer; it reads {text!r} as {len(by_text)} tokens, or "
                    f"others, where the policy's has {len(by_ids)}: {ids}; start it with a model of the same "
                    "tokenizer"
                )


def _outcomes(pairs: Pairs, most: int, num_words: int) -> tuple[list[int], list[float]]:
    """The likeliest `most` words below `num_words`, and the log-probabilities of them and of all others."""
    kept = sorted((pair for pair in pairs if pair[0] < num_words), key=lambda pair: -pair[1])[:most]
    values = [min(value, 0.0) for _, value in kept]
    rest = 1 - math.fsum(map(math.exp, values))
    return [word for word, _ in kept], [*values, math.log(max(rest, LEAST_REST))]
