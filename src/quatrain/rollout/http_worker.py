"""Inference servers as rollout workers: one request for each sample, token ids in and out.

Data flow: `workers` -> factories of `HttpWorker`, each of which probes its server; `submit` -> requests, in a
thread with an event loop -> `FinishedGroup`, to `take`. Servers get weights as folders of safetensors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

from quatrain.cluster.start_thread import start_thread
from quatrain.rollout.server_kinds import (
    TOKEN,
    Answer,
    Asked,
    Refusal,
    ServerError,
    ServerKind,
    kind_of,
    shortened,
)
from quatrain.rollout.server_routes import RouteRules
from quatrain.rollout.supervisor import WorkerFactory
from quatrain.rollout.worker import FinishedGroup, GroupSpec, State, Worker, WorkerLost, WorkerRefused
from quatrain.types.piece import Columns
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.routes import ROUTES

CONNECT_S = 10.0
"""Seconds in which a server must accept a connection."""
CONTROL_S = 60.0
"""Longest wait for the answer to a question that costs a server nothing."""
CLOSE_S = 5.0
"""Longest wait for a server to go on when its worker is closed while it loads weights."""
PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46"
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.01
"""Then the likeliest token is nearly certain, which unprocessed log-probabilities do not show."""
PROBE_GAP = 0.02
LOWEST = float(np.finfo(np.float32).min)
"""Log-probabilities are kept in float32, in which lower ones would be infinite."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerRules:
    """What the servers of a run have in common: tokenizer, stop tokens, seed, and training's sampling."""

    tokenizer: Any
    stop_ids: Sequence[int]
    vocab_size: int
    seed: int
    sampling: Sampling
    routes: RouteRules | None = None
    """The routes of experts that are to be recorded, if any are."""
    needs_routes: bool = False
    """Whether a server that returns none cannot serve the run (`update.router_aux_coef`)."""
    warning: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held from the warning about the first such server on: a run has one, however many servers start."""


def workers(
    addresses: Sequence[str], rules: ServerRules, *, max_concurrency: int | None, timeout_s: float
) -> list[WorkerFactory]:
    """Factories of a worker for each address; together they decode at most `max_concurrency` sequences."""
    slots = max_concurrency and -(-max_concurrency // len(addresses))
    served = set[str]()

    def connect(address: str) -> Worker:
        try:
            worker = HttpWorker(address, rules, num_slots=slots, timeout_s=timeout_s)
        except WorkerRefused as error:
            if address in served:  # it suits the run: a server or a proxy restarts, which is tried again
                raise WorkerLost(f"it served this run before, and not now: {error}") from error
            raise
        served.add(address)
        return worker

    return [partial(connect, address) for address in addresses]


class HttpWorker:
    """A `Worker` that is a server at `address`, which stays when the worker is closed.

    The server is probed at the start. Raises WorkerLost if it does not answer in `timeout_s`, answers with a
    status of 500 or more, or has weights that this run did not load; WorkerRefused if it cannot serve a run.
    Requests for samples may wait in the server's queue: it is lost if it answers none of them in `timeout_s`.
    """

    def __init__(self, address: str, rules: ServerRules, *, num_slots: int | None, timeout_s: float):
        self.name, self.num_slots = address, num_slots
        self._rules, self._timeout_s = rules, timeout_s
        self._changed = threading.Condition()
        self._unfinished: set[int] = set()
        self._finished: list[FinishedGroup] = []
        self._error: Exception | None = None
        self._progressed = 0.0
        self._loading = self._closed = False
        self._client_uses = 0
        self._routes = rules.routes
        """Those of its answers; None if it has none."""
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
        options: dict[str, Any] = {
            "base_url": address,
            "headers": headers,
            "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            "trust_env": False,
        }
        self._client = httpx.Client(**options)
        limits = httpx.Limits(max_connections=num_slots, max_keepalive_connections=num_slots)
        queued = httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None, read=None)
        self._requests = httpx.AsyncClient(**{**options, "timeout": queued}, limits=limits)
        self._loop = asyncio.new_event_loop()
        start_thread(self._run_loop, name=f"requests to {address}")
        try:
            self._kind: ServerKind = kind_of(self._call)
            self.name = f"{self._kind.name} at {address}"
            self._kind.prepare(self._call)
            self._probe()
        except BaseException as error:
            self.close()
            if isinstance(error, Refusal):
                raise WorkerRefused(f"{self.name}: it refused a question: {error}") from error
            if isinstance(error, WorkerRefused | WorkerLost):
                raise type(error)(f"{self.name}: {error}") from error
            raise

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """The server loads the folder `weights`; the version that it says it has then.

        Raises WorkerRefused if it answers that it cannot: it has another model, or cannot read the folder.
        """
        with self._changed:
            self._loading = True
        try:
            with self._client_in_use():
                self._kind.load(self._call, weights, version, timeout_s)
                return self._version()
        except Refusal as error:
            if not Path(weights).is_dir():  # a newer version has taken its place meanwhile
                raise WorkerLost(f"it did not load {weights}: {error}") from error
            raise WorkerRefused(
                f"{self.name}: it must load the weights of this run, and refused {weights}: {error}; start "
                "it with the model that is trained, where it can read that folder (rollout.weights_dir)"
            ) from error
        finally:
            with self._changed:
                self._loading = False

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Asks for each sample of each group."""
        with self._changed:
            if not self._unfinished:
                self._progressed = time.monotonic()
            self._unfinished |= {spec.number for spec in groups}
        for spec in groups:
            asyncio.run_coroutine_threadsafe(self._sample_group(spec, version), self._loop)

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Groups of which all samples have come."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            stalled = time.monotonic() - self._progressed > self._timeout_s
            if self._unfinished and not self._finished and stalled:
                raise WorkerLost(
                    f"it has answered no request for {self._timeout_s:g} s (rollout.timeout_s), and "
                    f"{len(self._unfinished)} groups wait for it"
                )
            finished, self._finished = self._finished, []
            return finished

    def state(self) -> State:
        """Busy as long as requests are unanswered; `take` knows their deadline."""
        return "busy" if self._unfinished else "idle"

    def close(self) -> None:
        """Takes back the requests; the server frees their slots, and goes on if it was paused for a load."""
        with self._changed:
            if self._closed:
                return
            self._closed, loading = True, self._loading
            if not self._client_uses:
                self._client.close()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if not loading:
            return
        # `load` does so too, but its thread may end with this process. If it is faster, the client is closed.
        with suppress(WorkerLost, Refusal, RuntimeError):
            self._kind.resume(partial(self._call, timeout_s=CLOSE_S))

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _end(self) -> None:
        await _cancelled(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
        await self._requests.aclose()
        self._loop.stop()

    async def _sample_group(self, spec: GroupSpec, version: int) -> None:
        """Asks for the samples of a group, and for the version of the weights before and after.

        A request that is refused, and an answer that cannot be trained on, cost this group alone.
        """
        try:
            before = await asyncio.to_thread(self._version)
            completions = await self._samples(spec, version)
            after = await asyncio.to_thread(self._version)
        except (Refusal, WorkerRefused) as error:
            refused = " refused it" if isinstance(error, Refusal) else ""
            self._finish(FinishedGroup(spec.number, error=f"{self.name}{refused}: {error}"))
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        else:
            samples = [(spec.prompt, self._stamped(*each, min(before, after))) for each in completions]
            self._finish(FinishedGroup(spec.number, samples))

    async def _samples(self, spec: GroupSpec, version: int) -> list[tuple[Answer, Columns]]:
        """The samples of a group. If one request fails, the others are cancelled.

        That closes their connections, by which the server knows that it need not go on decoding.
        """
        requests = [
            asyncio.ensure_future(self._sample(spec, number, version)) for number in range(spec.sampling.n)
        ]
        try:
            return await asyncio.gather(*requests)
        finally:
            await _cancelled(requests)

    async def _sample(self, spec: GroupSpec, number: int, version: int) -> tuple[Answer, Columns]:
        """A sample, and what else is known of its tokens."""
        prompt, own = spec.prompt.input_ids.tolist(), spec.own
        seed, offset = (self._rules.seed, 0) if own is None else (own.seed, own.offset)
        place = seed, spec.step, spec.prompt.group_id, number, version, offset
        asked = Asked(prompt, spec.sampling, *place, routes=self._routes is not None)
        path, body = self._kind.request(asked, self._rules.stop_ids)
        try:
            response = await self._requests.post(path, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise WorkerLost(f"a request failed: {_reason(error)}") from error
        self._progressed = time.monotonic()
        answer = self._kind.read(_value(response))
        self._check(answer, spec.sampling)
        if self._routes is None:
            return answer, {}
        routes = self._routes.read(answer.routes, len(prompt) + len(answer.tokens) - 1)
        return answer, {ROUTES: [routes]}

    def _finish(self, group: FinishedGroup) -> None:
        with self._changed:
            self._unfinished.discard(group.number)
            self._finished.append(group)
            self._changed.notify_all()

    def _stamped(self, answer: Answer, columns: Columns, version: int) -> Completion:
        """The completion, whose tokens are of the older version that the server said it had."""
        versions = answer.versions or [version] * len(answer.tokens)
        reason = "stop" if answer.finish_reason == "stop" else "length"
        return Completion(
            tokens=[int(token) for token in answer.tokens],
            logprobs=[float(np.float32(value)) for value in answer.logprobs],
            versions=[min(each, version) for each in versions],
            finish_reason=reason,
            columns=columns,
        )

    @contextmanager
    def _client_in_use(self) -> Iterator[None]:
        """Keeps the client open; after the last use it is closed if the worker is.

        A connection that a thread opens while another closes the client would stay open.
        """
        with self._changed:
            self._client_uses += 1
        try:
            yield
        finally:
            with self._changed:
                self._client_uses -= 1
                if self._closed and not self._client_uses:
                    self._client.close()

    def _version(self) -> int:
        label = self._kind.version(self._call)
        if not label.isdecimal():
            raise WorkerLost(f"it has weights that this run did not load: their label is {label!r}")
        return int(label)

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        limit = min(CONTROL_S, self._timeout_s) if timeout_s is None else timeout_s
        timeout = httpx.Timeout(limit, connect=min(CONNECT_S, limit))
        try:
            with self._client_in_use():
                response = self._client.request(method, path, json=body, params=params, timeout=timeout)
        except (httpx.HTTPError, OSError) as error:
            if _is_unknown_host(error):
                raise WorkerRefused(
                    f"rollout.servers must be at hosts that have an address; {self.name} has none "
                    f"({_reason(error)}); correct its name"
                ) from error
            raise WorkerLost(f"{method} {path} failed: {_reason(error)}") from error
        return _value(response)

    def _check(self, answer: Answer, sampling: Sampling) -> None:
        """Raises WorkerRefused for an answer that cannot be trained on, and WorkerLost for one cut short."""
        tokens, logprobs, versions = answer.tokens, answer.logprobs, answer.versions
        if answer.finish_reason not in ("stop", "length"):
            raise WorkerLost(f"a request ended with {answer.finish_reason!r}")
        numbers = all(type(value) in (int, float) and LOWEST <= value <= 1e-3 for value in logprobs)
        if len(logprobs) != len(tokens) or not numbers:
            raise WorkerRefused(
                f"it must return a log-probability for each token, each a number of at most 0; got "
                f"{len(tokens)} tokens and {shortened(logprobs)}"
            )
        ids = all(type(token) is int and 0 <= token < self._rules.vocab_size for token in tokens)
        if not ids or not 1 <= len(tokens) <= sampling.max_new_tokens:
            raise WorkerRefused(
                f"it must return 1 to {sampling.max_new_tokens} token ids, each below the vocabulary's size "
                f"of {self._rules.vocab_size}; got {shortened(tokens)}"
            )
        labels = versions is None or (
            isinstance(versions, list)
            and all(type(each) is int and each >= 0 for each in versions)
            and len(versions) == len(tokens)
        )
        if not labels:
            raise WorkerRefused(
                f"it must return the version of each token's weights, a number from 0; got {len(tokens)} "
                f"tokens and {shortened(versions)}"
            )

    def _probe(self) -> None:
        """Raises WorkerRefused if the server has another vocabulary, or log-probabilities of another kind."""
        rules = self._rules
        ids = rules.tokenizer.encode(PROBE_TEXT)
        sampling = Sampling(n=1, max_new_tokens=PROBE_TOKENS)
        asked = Asked(PROBE_TEXT, sampling, rules.seed, 0, 0, 0, 0)
        answer = self._probed(asked)
        seen = answer.prompt_tokens
        same = seen == ids if isinstance(seen, list) else seen in (None, len(ids))
        if not same:
            raise WorkerRefused(
                f"its tokenizer must be that of training: the text {PROBE_TEXT!r} has the ids "
                f"{shortened(ids)} here and {shortened(seen)} there; serve the model that is trained"
            )
        self._probe_routes(asked._replace(prompt=ids, routes=rules.routes is not None))
        if rules.sampling.temperature == 1:
            return
        cold = Sampling(n=1, max_new_tokens=PROBE_TOKENS, temperature=PROBE_TEMPERATURE)
        median = float(np.median(self._probed(asked._replace(prompt=ids, sampling=cold)).logprobs))
        if median < -PROBE_GAP:
            raise WorkerRefused(
                "its log-probabilities must be those of the distribution that tokens are drawn from, after "
                f"temperature and filters: at temperature {PROBE_TEMPERATURE:g} their median is "
                f"{median:.2f}, where about 0 is expected; start vLLM with --logprobs-mode "
                "processed_logprobs, or set rollout.temperature to 1"
            )

    def _probe_routes(self, asked: Asked) -> None:
        """Warns, once in a run, if routes are to be recorded, and none come with the tokens of `asked`.

        The server is then asked without them: `quatrain serve` refuses to return what it does not record.
        """
        why = ""
        try:
            answer = self._probed(asked)
        except Refusal as refusal:
            if not asked.routes:
                raise
            answer, why = self._probed(asked._replace(routes=False)), f" ({refusal})"
        if self._routes is None:
            return
        if answer.routes is not None:
            self._routes.read(answer.routes, len(asked.prompt) + len(answer.tokens) - 1)
            return
        if self._rules.needs_routes:
            raise WorkerRefused(
                f"it must return the experts of each token for update.router_aux_coef; got none{why}; start "
                f"it with {self._kind.routes_by}, or set update.router_aux_coef to 0"
            )
        if self._rules.warning.acquire(blocking=False):
            logger.warning(
                "%s returns no routes of experts%s, so that the update chooses them anew: %s; start it with "
                "%s, or set rollout.record_routes to false (said once, of the first such server)",
                *(self.name, why, self._routes.gap, self._kind.routes_by),
            )
        self._routes = None

    def _probed(self, asked: Asked) -> Answer:
        path, body = self._kind.request(asked, ())
        answer = self._kind.read(self._call("POST", path, body, timeout_s=self._timeout_s))
        self._check(answer, asked.sampling)
        return answer


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _value(response: httpx.Response) -> Any:
    """The JSON of a response; raises WorkerLost or `Refusal` by its status."""
    if response.status_code >= 500:
        lost = ServerError if response.status_code == 500 else WorkerLost
        raise lost(f"it answered with status {response.status_code}: {shortened(response.text)}")
    if response.status_code >= 400:
        try:  # the message of an error in OpenAI's form
            message = str(json.loads(response.text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = response.text
        raise Refusal(response.status_code, shortened(message))
    if not response.content:
        return {}
    try:
        return response.json()
    except ValueError:
        return response.text


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether `error` comes from a name that no host has; a name server that fails may answer later."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
