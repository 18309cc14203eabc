"""A teacher behind an inference server, which gives log-probabilities of the tokens of a prompt.

Data flow: `TokenTable` -> one request for each sequence, token ids in and log-probabilities out
(`prompt_scores.py`) -> `TeacherScores` -> `Teacher.score`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2 as httpx
import numpy as np

from quatrain.cluster.processes import decided_by_main
from quatrain.config.errors import shown
from quatrain.config.secrets import SERVE_TOKEN
from quatrain.data.tokenizer import encode
from quatrain.data.vocabulary import TEXTS
from quatrain.forward.table import TokenTable
from quatrain.ops.logprobs import LOWEST
from quatrain.ops.top_words import LEAST_REST, NO_WORD
from quatrain.update.prompt_scores import Form, Pairs, PromptScores, form_of
from quatrain.update.teacher_scores import TeacherScores, TopWords

AT_ONCE = 32
"""Sequences that are asked for at one time."""
CONNECT_S, PAUSE_S = 10.0, 1.0
"""Seconds in which a server must accept a connection, and between two attempts to ask it."""
TRY_AGAIN = (408, 429)
"""Statuses below 500 of a server that may answer later: it timed out, or has too many requests."""
UP_TO_V1 = "give the address of the server itself, up to /v1, as http://host:8000"
SAME = 1e-2
"""Largest difference, in nats, of the log-probabilities of a text and of its ids when a server is probed."""


class ServerTeacher:
    """A `Source` that is the server at `address`, at temperature 1.

    It gives `num_words` of the likeliest words, or none. It is probed when it is made. A server that does not
    answer is asked again for `timeout_s` seconds; then ConnectionError is raised, and the run ends: it never
    trains without its teacher. Raises ValueError if the server gives no log-probabilities of prompts, or has
    other tokens than `tokenizer`. In a run of several processes the main one asks.
    """

    def __init__(self, address: str, tokenizer: Any, *, timeout_s: float, num_words: int = 0):
        self.address, self._timeout_s, self._num_words = address, timeout_s, num_words
        self._model, self.longest, self._owner = decided_by_main(self._described)
        self._form = form_of(self._owner, num_words)
        decided_by_main(lambda: self._probe(tokenizer))

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(SERVE_TOKEN)) else {}
        timeout = httpx.Timeout(self._timeout_s, connect=CONNECT_S, pool=None)
        try:
            return httpx.Client(base_url=self.address, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise ValueError(
                f"the teacher {self.address} must be an address such as http://host:8000; {error}; correct it"
            ) from error

    def scores(self, table: TokenTable, own: Any = None, top: TopWords | None = None) -> TeacherScores:
        """As `OwnWeights.scores`, with a word more than `top` asks for: the token itself."""
        sequences = [table.input_ids[row, :length].tolist() for row, length in enumerate(table.lengths)]
        mask = table.completion_mask
        result = np.zeros(mask.shape, np.float32)
        width = 0 if top is None else top.count + 1
        words = np.full((*mask.shape, width), NO_WORD, np.int32)
        word_logprobs = np.full((*mask.shape, width + 1), LOWEST, np.float32)
        for row, found in enumerate(decided_by_main(lambda: self._of_all(sequences))):
            places = np.flatnonzero(mask[row])
            result[row, places] = np.asarray(found.logprobs, np.float64)[places]
            if top is None:
                continue
            for place in places:
                assert found.words is not None, "words were asked for"
                ids, values = _outcomes(found.words[place], width, top.num_words)
                words[row, place, : len(ids)] = ids
                word_logprobs[row, place, [*range(len(ids)), -1]] = values
        return TeacherScores(result) if top is None else TeacherScores(result, words, word_logprobs)

    def _of_all(self, sequences: Sequence[list[int]]) -> list[PromptScores]:
        with self._client() as client, ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(partial(self._of_prompt, client, self._form), sequences))

    def _of_prompt(self, client: httpx.Client, form: Form, prompt: list[int] | str) -> PromptScores:
        """The scores of each token of `prompt`; raises ValueError for an answer without them."""
        path, body = form.request(self._model, prompt, self._num_words)
        answer = self._asked(client, "POST", path, body)
        try:
            found = form.read(answer, prompt)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"the teacher at {self.address} must give a log-probability for each token of a prompt "
                f"({form.asks}); its answer has none ({type(error).__name__})"
            ) from error
        length = len(found.logprobs) if isinstance(prompt, str) else len(prompt)
        if len(found.logprobs) != length or not all(
            math.isfinite(x) and x < SAME for x in found.logprobs[1:]
        ):
            raise ValueError(
                f"the teacher at {self.address} must give a finite log-probability for each token of a "
                f"prompt; of one with {length} tokens it gave {len(found.logprobs)} values"
            )
        if form is self._form and self._num_words and not isinstance(prompt, str):
            self._check_words(found.words, length)
        return found

    def _check_words(self, words: Sequence[Pairs] | None, length: int) -> None:
        """Raises ValueError unless there are `num_words` words in each place, which are part of one
        distribution."""
        fewest = min(map(len, words[1:]), default=self._num_words) if words and len(words) == length else 0
        mass = max((sum(math.exp(x) for _, x in pairs) for pairs in (words or [])[1:]), default=0.0)
        if fewest < self._num_words or mass > 1 + SAME:
            raise ValueError(
                f"the teacher at {self.address} must give the {self._num_words} likeliest words in the place "
                f"of each token of a prompt (distill.top_k), with probabilities that are at most 1 together; "
                f"it gave {fewest} words and {mass:.4g}; set a smaller distill.top_k, or raise the server's "
                "limit (vLLM: --max-logprobs)"
            )

    def _described(self) -> tuple[str, int, str]:
        """(the name of its model, the most tokens of a sequence, whose the model is)."""
        with self._client() as client:
            answer = self._asked(client, "GET", "/v1/models", None)
        try:
            model = answer["data"][0]
            owner = str(model.get("owned_by", ""))
            return str(model["id"]), int(model.get("max_model_len") or 2**31) - 1, owner
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"distill.teacher {self.address} must be a server with OpenAI's interface; /v1/models names "
                f"no model; {UP_TO_V1}"
            ) from error

    def _probe(self, tokenizer: Any) -> None:
        """Raises ValueError if the server reads a text in other ids than `tokenizer`, or gives no words."""
        of_text = form_of(self._owner, 0)
        with self._client() as client:
            for text in TEXTS:
                ids = encode(tokenizer, text)
                by_text = self._of_prompt(client, of_text, text).logprobs
                by_ids = self._of_prompt(client, self._form, ids).logprobs
                same = len(by_text) == len(by_ids)
                if not same or not np.allclose(by_text[1:], by_ids[1:], rtol=0, atol=SAME):
                    raise ValueError(
                        f"the teacher at {self.address} must have the policy's tokenizer; it reads {text!r} "
                        f"as {len(by_text)} tokens, or others, where the policy's has {len(by_ids)}: {ids}; "
                        "start it with a model of the same tokenizer"
                    )

    def _asked(self, client: httpx.Client, method: str, path: str, body: Any) -> Any:
        """The JSON of an answer, which is asked for until it comes or `timeout_s` is over."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                response = client.request(method, path, json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                status, problem = response.status_code, f"status {response.status_code}, {response.text:.200}"
                if status < 300:
                    return self._json(response)
                if status < 400:
                    problem = f"status {status} to {response.headers.get('Location', 'nowhere')}"
                if status < 500 and status not in TRY_AGAIN:
                    remedy = f"; {UP_TO_V1}" if status < 400 or status == 404 else ""
                    raise ValueError(f"the teacher at {self.address} refused a question: {problem}{remedy}")
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"the teacher at {self.address} did not answer for {self._timeout_s:g} s "
                    f"(rollout.timeout_s): {problem}"
                )
            time.sleep(PAUSE_S)

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise ValueError(
                f"the teacher at {self.address} must answer {response.request.url.path} in JSON; it answered "
                f"{shown(response.text)}; {UP_TO_V1}"
            ) from error


def _outcomes(pairs: Pairs, most: int, num_words: int) -> tuple[list[int], list[float]]:
    """The likeliest `most` words below `num_words`, and the log-probabilities of them and of all others."""
    kept = sorted((pair for pair in pairs if pair[0] < num_words), key=lambda pair: -pair[1])[:most]
    values = [min(value, 0.0) for _, value in kept]
    rest = 1 - math.fsum(map(math.exp, values))
    return [word for word, _ in kept], [*values, math.log(max(rest, LEAST_REST))]
