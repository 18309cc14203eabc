"""What a judge may use: requests and tokens within a minute, and the budget of a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from quatrain.config.sections.judge import JudgeBudget
from quatrain.reward.judge.cache import Reported

MINUTE_S = 60.0


@dataclass
class Sent:
    """A request that was sent: when, and its tokens, estimated until its answer says."""

    at: float
    tokens: int


class Limits:
    """Lets requests through in their order: at most `rpm` of them, and `tpm` tokens, within any 60 seconds.

    A request that has more tokens than `tpm` by itself is sent alone. `clock` and `sleep` are those of
    asyncio unless given.
    """

    def __init__(
        self,
        rpm: int | None,
        tpm: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._rpm, self._tpm, self._clock, self._sleep = rpm, tpm, clock, sleep
        self._sent = deque[Sent]()
        self._not_before = 0.0
        self._turn = asyncio.Lock()
        self.waited_s = 0.0
        """Seconds that requests waited here, together."""

    async def admit(self, tokens: int) -> Sent:
        """Returns when a request of about so many tokens may be sent; it is counted from now on."""
        async with self._turn:  # which is handed on in the order of arrival
            while (wait_s := self._wait_s(tokens)) > 0:
                self.waited_s += wait_s
                await self._sleep(wait_s)
            sent = Sent(self._clock(), tokens)
            self._sent.append(sent)
            return sent

    def pause(self, seconds: float) -> None:
        """Nothing more is sent for so long: a server asked for it."""
        self._not_before = max(self._not_before, self._clock() + seconds)

    def _wait_s(self, tokens: int) -> float:
        now, sent = self._clock(), self._sent
        while sent and sent[0].at + MINUTE_S <= now:
            sent.popleft()
        free_at = [self._not_before]
        if self._rpm is not None and len(sent) >= self._rpm:
            free_at.append(sent[len(sent) - self._rpm].at + MINUTE_S)
        if self._tpm is not None:
            used = sum(each.tokens for each in sent)
            for each in sent:
                if used + tokens <= self._tpm:
                    break
                used -= each.tokens
                free_at.append(each.at + MINUTE_S)
        return max(free_at) - now


class Spending:
    """Requests and tokens that a judge has used in a run; `path` keeps them for a run that is resumed.

    Each request is reserved, then sent unless that fails, then settled.
    """

    def __init__(self, budget: JudgeBudget, path: Path | None = None):
        self._budget, self._path = budget, path
        self._file = Reported(
            "what the judge has used of its budget", "a run that is resumed would count from what was written"
        )
        self.requests = self.tokens = 0
        self._unsent_requests = self._asked_tokens = 0  # that are reserved
        if path is not None and path.is_file():
            try:
                used = json.loads(path.read_bytes())
                self.requests, self.tokens = int(used["requests"]), int(used["tokens"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path} must say what the judge has used of reward.judge.budget, as "
                    f'{{"requests": 0, "tokens": 0}}; it cannot be read ({type(error).__name__}: {error}); '
                    "write the numbers of the last metrics into it, or remove it to begin at 0"
                ) from error

    def __str__(self) -> str:
        parts = [
            f"{used} of {most} {name}"
            for name, used, most in (
                ("requests", self.requests, self._budget.requests),
                ("tokens", self.tokens, self._budget.tokens),
            )
            if most is not None
        ]
        return " and ".join(parts)

    def reserve(self, tokens: int) -> bool:
        """Whether the budget has a request of so many tokens left, beside those that are reserved."""
        most, budget = self._budget.tokens, self._budget
        if budget.requests is not None and self.requests + self._unsent_requests >= budget.requests:
            return False
        if most is not None and self.tokens + self._asked_tokens + tokens > most:
            return False
        self._unsent_requests += 1
        self._asked_tokens += tokens
        return True

    def send(self) -> None:
        """A reserved request goes out: it counts from now on, also if the run is killed before its answer."""
        self._unsent_requests -= 1
        self.requests += 1
        self._write()

    def settle(self, reserved: int, used: int, *, sent: bool) -> None:
        """A request for which `reserved` tokens were reserved has used so many, or was not `sent`."""
        self._unsent_requests -= not sent
        self._asked_tokens -= reserved
        self.tokens += used
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._file.write(self._path, json.dumps({"requests": self.requests, "tokens": self.tokens}))
