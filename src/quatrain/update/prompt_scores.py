"""How inference servers are asked for log-probabilities of a prompt's tokens, and of likelier ones.

Data flow: ids -> path and JSON of a request -> its answer -> `PromptScores`, for `server_teacher.py`. vLLM
and `quatrain serve` have OpenAI's completions, with `echo` for the tokens alone and vLLM's `prompt_logprobs`
for the likeliest in their place too; SGLang has an interface of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Pairs = list[tuple[int, float]]
"""(word, log-probability) each."""


class PromptScores(NamedTuple):
    """Of a prompt's tokens: log-probabilities, NaN for the first, and the likeliest words in their place."""

    logprobs: list[float]
    words: list[Pairs] | None = None


class Echo:
    """OpenAI's completions with an echo."""

    asks = "echo and logprobs of /v1/completions"

    def request(self, model: str, prompt: list[int] | str, num_words: int) -> tuple[str, dict[str, Any]]:
        """The path and JSON of a request."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0}
        return "/v1/completions", {**body, "echo": True, "logprobs": 0}

    def read(self, answer: Any, prompt: list[int] | str) -> PromptScores:
        """The scores in an answer; raises KeyError, IndexError, TypeError or ValueError without them."""
        values = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]  # without the sampled token
        return PromptScores([math.nan, *map(float, values[1:])])


class PromptLogprobs:
    """vLLM's field of completions: of each place, a mapping from token ids to log-probabilities."""

    asks = "prompt_logprobs of /v1/completions"

    def request(self, model: str, prompt: list[int] | str, num_words: int) -> tuple[str, dict[str, Any]]:
        """As `Echo.request`."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0}
        return "/v1/completions", {**body, "prompt_logprobs": num_words}

    def read(self, answer: Any, prompt: list[int] | str) -> PromptScores:
        """As `Echo.read`; the token itself is among the words."""
        places = answer["choices"][0]["prompt_logprobs"]
        words: list[Pairs] = [
            [(int(word), float(found["logprob"])) for word, found in (place or {}).items()]
            for place in places
        ]
        own = [dict(pairs)[token] for pairs, token in zip(words[1:], prompt[1:], strict=True)]  # type: ignore[index]
        return PromptScores([math.nan, *own], words)


class Generate:
    """SGLang's `/generate`: lists of [log-probability, token id, text]."""

    asks = "return_logprob of /generate"

    def request(self, model: str, prompt: list[int] | str, num_words: int) -> tuple[str, dict[str, Any]]:
        """As `Echo.request`."""
        given = {"text" if isinstance(prompt, str) else "input_ids": prompt}
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num_words}
        return "/generate", {
            **given,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            **asked,
            "stream": False,
        }

    def read(self, answer: Any, prompt: list[int] | str) -> PromptScores:
        """As `Echo.read`."""
        meta = answer["meta_info"]
        own = [(int(entry[1]), entry[0]) for entry in meta["input_token_logprobs"]]
        logprobs = [math.nan, *(float(value) for _, value in own[1:])]
        if isinstance(prompt, str) or not (lists := meta.get("input_top_logprobs")):
            return PromptScores(logprobs)
        words: list[Pairs] = [[(int(entry[1]), float(entry[0])) for entry in place or ()] for place in lists]
        for pairs, token, value in zip(words[1:], prompt[1:], logprobs[1:], strict=True):
            if token not in (word for word, _ in pairs):
                pairs.append((token, value))
        return PromptScores(logprobs, words)


Form = Echo | PromptLogprobs | Generate
SGLANG = "sglang"
"""Who owns the models of SGLang's `/v1/models`."""


def form_of(owner: str, num_words: int) -> Form:
    """How a server is asked whose models `owner` owns, for the tokens alone or for `num_words` words too."""
    if owner == SGLANG:
        return Generate()
    return PromptLogprobs() if num_words else Echo()
