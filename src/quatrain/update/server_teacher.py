"""A teacher behind an inference server, which gives log-probabilities of the tokens of a prompt.

Data flow: `TokenTable` -> one request for each sequence, token ids in and log-probabilities out, in OpenAI's
form of completions with an echo, as `quatrain serve` and vLLM have it -> `Teacher.score`.
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
from quatrain.config.secrets import SERVE_TOKEN
from quatrain.data.tokenizer import encode
from quatrain.data.vocabulary import TEXTS
from quatrain.forward.table import TokenTable

AT_ONCE = 32
"""Sequences that are asked for at one time."""
CONNECT_S, PAUSE_S = 10.0, 1.0
"""Seconds in which a server must accept a connection, and between two attempts to ask it."""
SAME = 1e-2
"""Largest difference, in nats, of the log-probabilities of a text and of its ids when a server is probed."""


class ServerTeacher:
    """A `Source` that is the server at `address`, at temperature 1.

    It is probed when it is made. A server that does not answer is asked again for `timeout_s` seconds; then
    ConnectionError is raised, and the run ends: it never trains without its teacher. Raises ValueError if the
    server gives no log-probabilities of prompts, or has other tokens than `tokenizer`. In a run of several
    processes the main one asks.
    """

    def __init__(self, address: str, tokenizer: Any, *, timeout_s: float):
        self.address, self._timeout_s = address, timeout_s
        self._model, self.longest = decided_by_main(self._described)
        decided_by_main(lambda: self._probe(tokenizer))

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(SERVE_TOKEN)) else {}
        timeout = httpx.Timeout(self._timeout_s, connect=CONNECT_S, pool=None)
        return httpx.Client(base_url=self.address, headers=headers, timeout=timeout, trust_env=False)

    def logprobs(self, table: TokenTable, own: Any = None) -> np.ndarray:
        """As `Source.logprobs`."""
        sequences = [table.input_ids[row, :length].tolist() for row, length in enumerate(table.lengths)]
        result = np.zeros(table.completion_mask.shape, np.float32)
        for row, values in enumerate(decided_by_main(lambda: self._of_all(sequences))):
            places = np.flatnonzero(table.completion_mask[row])
            result[row, places] = np.asarray(values, np.float64)[places]
        return result

    def _of_all(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        with self._client() as client, ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(partial(self._of_prompt, client), sequences))

    def _of_prompt(self, client: httpx.Client, prompt: list[int] | str) -> list[float]:
        """The log-probability of each token of `prompt`; NaN for the first, which has none."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0}
        answer = self._asked(client, "POST", "/v1/completions", {**body, "echo": True, "logprobs": 0})
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]  # without the sampled token
            found = [math.nan, *(float(value) for value in values[1:])]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"the teacher at {self.address} must give a log-probability for each token of a prompt "
                f"(echo and logprobs of /v1/completions); its answer has none ({type(error).__name__})"
            ) from error
        length = len(found) if isinstance(prompt, str) else len(prompt)
        if len(found) != length or not all(math.isfinite(x) and x < SAME for x in found[1:]):
            raise ValueError(
                f"the teacher at {self.address} must give a finite log-probability for each token of a "
                f"prompt; of one with {length} tokens it gave {len(found)} values"
            )
        return found

    def _described(self) -> tuple[str, int]:
        """(the name of its model, the most tokens of a sequence)."""
        with self._client() as client:
            answer = self._asked(client, "GET", "/v1/models", None)
        try:
            model = answer["data"][0]
            return str(model["id"]), int(model.get("max_model_len") or 2**31) - 1
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"distill.teacher {self.address} must be a server with OpenAI's interface; /v1/models names "
                "no model; give the address up to /v1, as http://host:8000"
            ) from error

    def _probe(self, tokenizer: Any) -> None:
        """Raises ValueError if the server reads a text in other ids than `tokenizer`."""
        with self._client() as client:
            for text in TEXTS:
                ids = encode(tokenizer, text)
                by_text, by_ids = (self._of_prompt(client, prompt) for prompt in (text, ids))
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
                if response.status_code < 400:
                    return response.json()
                problem = f"status {response.status_code}, {response.text:.200}"
                if response.status_code < 500:
                    raise ValueError(f"the teacher at {self.address} refused a question: {problem}")
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"the teacher at {self.address} did not answer for {self._timeout_s:g} s "
                    f"(rollout.timeout_s): {problem}"
                )
            time.sleep(PAUSE_S)
