"""A judge behind a server with OpenAI's chat completions: within its limits, tried again, never twice.

Data flow: `Question`s of `judge.py` -> one request each (`servers/client.py`) -> `Outcome`s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from quatrain.cluster.rendezvous import is_loopback
from quatrain.config.sections.judge import JudgeConfig
from quatrain.data.messages import text_of
from quatrain.reward.judge.judgements import Failed, NoJudgement, Outcome, judgement_in, schema
from quatrain.reward.judge.limits import Limits, Spending
from quatrain.reward.judge.questions import Keep, Question
from quatrain.servers.client import Refusal, ServerClient, ServerLost, Unfit, all_of, shortened

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before the second attempt, which double with each further one up to the longest."""
LETTERS_PER_TOKEN = 3
"""Of a text whose tokens only the server can count: fewer than usual, so that a limit holds."""
_KEY = "name the variable that has its key in reward.judge.key_variable"
NO_USE = {
    401: _KEY,
    403: _KEY,
    404: "reward.judge.base_url mostly ends in /v1, and reward.judge.served_model must be one of its models",
}
"""Statuses of a wrong key, address or name of a model, with which no question will be answered; remedies."""
Pause = Callable[[float], Any]
Found = TypeVar("Found")


class _UsedUp(Exception):
    """Nothing is left of the budget."""


class ServerJudge:
    """The judge of `config` at its `base_url`. `close` ends the connections.

    Raises ValueError if the variable of its key is not set, or the address is none.
    """

    is_everywhere = False
    """The main process alone asks."""

    def __init__(
        self,
        config: JudgeConfig,
        spending: Spending,
        limits: Limits | None = None,
        pause: Pause = asyncio.sleep,
    ):
        assert config.base_url is not None
        self._config, self._spending, self._pause = config, spending, pause
        self._limits = Limits(config.rpm, config.tpm) if limits is None else limits
        key = None
        if config.key_variable is not None and not (key := os.environ.get(config.key_variable)):
            raise ValueError(
                f"reward.judge.key_variable names an environment variable with the key of {config.base_url}; "
                f"{config.key_variable} is not set; set it, in the environment or in .env, or leave the key "
                "out"
            )
        try:
            self._client = ServerClient(
                config.base_url,
                timeout_s=config.timeout_s,
                at_once=config.concurrency,
                token=key,
                by_proxy=not is_loopback(urlsplit(config.base_url).hostname or ""),
            )
        except Unfit as error:
            raise ValueError(f"reward.judge.base_url: {error}") from error
        self._model = config.served_model
        self._takes_schema: bool | None = None
        """Whether the server takes `response_format`; None: it was not asked yet."""
        self._probe = asyncio.Lock()
        self._lost_in_a_row = 0
        self._told_until = 0.0
        """By `time.monotonic`, when a long pause ends that was warned of."""

    def identity(self) -> list[Any]:
        """What the judge is, for the cache; asks the server for its model's name unless that is known.

        Raises ValueError if it cannot say.
        """
        if self._model is None:
            self._model = self._run(self._only_model())
        return ["server", self._config.base_url, self._model, self._config.body]

    def ask(self, questions: Sequence[Question], keep: Keep) -> tuple[list[Outcome], Counter[str]]:
        """The outcome of each question, and counts of requests, tokens and retries; `keep` gets each at once.

        Raises ValueError for a server that will answer none: a wrong key, address or model.
        """
        counts: Counter[str] = Counter()
        self._lost_in_a_row = 0
        works = (self._asked(question, keep, counts) for question in questions)
        return self._run(all_of(works)), counts

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def _run(self, work: Coroutine[Any, Any, Found]) -> Found:
        try:
            return self._client.run(work)
        except (Unfit, Refusal, ServerLost) as error:
            remedy = NO_USE.get(error.status) if isinstance(error, Refusal) else None
            text = f"the judge at {self._config.base_url}: {error}"
            raise ValueError(f"{text}; {remedy}" if remedy else text) from error

    async def _asked(self, question: Question, keep: Keep, counts: Counter[str]) -> Outcome:
        async with self._client.room:
            if self._lost_in_a_row >= self._config.concurrency:
                # Each would wait for its own retries, and hold the step for hours.
                return NoJudgement(
                    "lost",
                    f"it was not asked, because the server failed {self._lost_in_a_row} times in a row",
                )
            outcome = await self._tried(question, counts)
        lost = isinstance(outcome, NoJudgement) and outcome.kind in ("timeout", "lost")
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        keep(question, outcome)
        return outcome

    async def _tried(self, question: Question, counts: Counter[str]) -> Outcome:
        """The outcome of up to `retries` further attempts; what a server said that is no judgement is one."""
        attempt = 0
        while True:
            try:
                return await self._attempt(question, counts)
            except ServerLost as error:
                if attempt == self._config.retries:
                    kind: Failed = "timeout" if error.timed_out else "lost"
                    return NoJudgement(kind, f"{error} (after {attempt} retries)")
                wait_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
                if error.retry_after_s is not None:
                    wait_s = error.retry_after_s
                    self._limits.pause(wait_s)
                    self._warn_of_pause(wait_s, error)
            except Refusal as error:
                if error.status in NO_USE:
                    raise
                return NoJudgement("refused", str(error))
            attempt += 1
            counts["retries"] += 1
            await self._pause(wait_s)

    def _warn_of_pause(self, wait_s: float, error: ServerLost) -> None:
        """Says once of a long pause that the run waits, as nothing else does."""
        if wait_s > LONGEST_PAUSE_S and time.monotonic() >= self._told_until:
            self._told_until = time.monotonic() + wait_s
            logger.warning(
                "the judge at %s is not asked for %.0f s, because it wants that (Retry-After): %s; if its "
                "limits are known, set reward.judge.rpm and tpm; a run that is interrupted and resumed asks "
                "nothing again that was answered",
                *(self._config.base_url, wait_s, error),
            )

    async def _attempt(self, question: Question, counts: Counter[str]) -> Outcome:
        try:
            return self._outcome(await self._answer(question.text, counts))
        except _UsedUp:
            return NoJudgement("budget", "reward.judge.budget is used up")

    async def _answer(self, text: str, counts: Counter[str]) -> Any:
        """The answer to a request with the schema, if the server takes one, or else without."""
        if self._takes_schema is None:
            async with self._probe:  # the others wait for what the first one finds
                if self._takes_schema is None:
                    return await self._probed(text, counts)
        return await self._post(text, counts, with_schema=self._takes_schema)

    async def _probed(self, text: str, counts: Counter[str]) -> Any:
        try:
            answer = await self._post(text, counts, with_schema=True)
        except Refusal as refused:
            if refused.status in NO_USE:
                raise
            # It raises if that was not the reason; the next question then finds out.
            answer = await self._post(text, counts, with_schema=False)
            self._takes_schema = False
            logger.info(
                "the judge at %s takes no response_format of json_schema (%s); its texts are read instead",
                *(self._config.base_url, refused),
            )
            return answer
        self._takes_schema = True
        return answer

    async def _post(self, text: str, counts: Counter[str], *, with_schema: bool) -> Any:
        """The answer to one request, which the limits let through; raises _UsedUp without a budget for it."""
        config = self._config
        estimate = len(text) // LETTERS_PER_TOKEN + config.most_tokens
        if not self._spending.reserve(estimate):
            raise _UsedUp
        answer: Any = None
        used, was_sent = [0, 0], False

        def on_sent() -> None:
            nonlocal was_sent
            was_sent = True
            counts["requests"] += 1
            self._spending.send()

        try:
            admitted = await self._limits.admit(estimate)
            async with asyncio.timeout(config.timeout_s):  # of the whole answer; httpx limits each read
                body, timeout_s = self._body(text, with_schema), config.timeout_s
                answer = await self._client.ask(
                    "/chat/completions", body, timeout_s=timeout_s, on_sent=on_sent
                )
            used = _usage(answer, text)
            admitted.tokens = sum(used)
        except TimeoutError as error:
            late = ServerLost(f"it did not answer within {config.timeout_s:g} s (reward.judge.timeout_s)")
            late.timed_out = True
            raise late from error
        finally:
            self._spending.settle(estimate, sum(used), sent=was_sent)
            counts.update(tokens_in=used[0], tokens_out=used[1])
        return answer

    def _body(self, text: str, with_schema: bool) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "temperature": config.judging_temperature,
            "max_tokens": config.max_tokens,
        }
        if with_schema:
            named = {"name": "judgement", "schema": schema(config.scale), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return {name: value for name, value in {**body, **config.body}.items() if value is not None}

    async def _only_model(self) -> str:
        answer = await self._client.ask("/models")
        try:
            names = [each["id"] for each in answer["data"]]
        except (TypeError, KeyError) as error:
            raise Unfit(
                f"it lists no models at /models (it answers {shortened(answer)}); name one in "
                "reward.judge.served_model"
            ) from error
        if len(names) != 1:
            raise Unfit(
                f"it has {len(names)} models ({', '.join(names[:5])}…); name one in reward.judge.served_model"
            )
        return str(names[0])

    def _outcome(self, answer: Any) -> Outcome:
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            said, refusal = text_of(message), message.get("refusal")
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            short = shortened(answer)
            return NoJudgement("unreadable", f"no chat completion ({type(error).__name__}): {short}")
        if refusal or reason == "content_filter":
            return NoJudgement("refused", shortened(refusal or "the answer was filtered (content_filter)"))
        cut_at = self._config.most_tokens if reason == "length" else None
        return judgement_in(said, self._config.scale, cut_at=cut_at)


def _usage(answer: Any, text: str) -> list[int]:
    """[tokens of the request, tokens of the answer] as the server counts them, or else estimated."""
    try:
        usage = answer["usage"]
        counted = [usage["prompt_tokens"], usage["completion_tokens"]]
        if all(type(each) is int and each >= 0 for each in counted):
            return counted
    except (TypeError, KeyError):
        pass
    try:
        said = len(str(answer["choices"][0]["message"]["content"]))
    except (TypeError, KeyError, IndexError):
        said = 0
    return [math.ceil(len(text) / LETTERS_PER_TOKEN), math.ceil(said / LETTERS_PER_TOKEN)]
