"""Inference servers as rollout workers: one request for each sample, token ids in and out.

Data flow: `workers` -> factories of `HttpWorker`, each of which probes its server; `submit` -> requests of
`servers/`, in its event loop -> `FinishedGroup`, to `take`. Servers load weights as folders of safetensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.rollout.worker import FinishedGroup, GroupSpec, State, Worker, WorkerLost, WorkerRefused
from quatrain.servers.client import Refusal, ServerClient, ServerLost, Unfit, all_of
from quatrain.servers.kinds import Asked, ServerAnswer
from quatrain.servers.server import Server, ServerRules
from quatrain.types.kept import KEPT, all_words
from quatrain.types.rollouts import Completion
from quatrain.types.routes import ROUTES

NOT_WHOLE = 409
"""The status with which `quatrain serve` refuses to load files that are sent and have not all come."""
CLOSE_S = 5.0
"""Longest wait for a server to go on when its worker is closed while it loads weights."""


def workers(
    addresses: Sequence[str], rules: ServerRules, *, max_concurrency: int | None, timeout_s: float
) -> list[partial[Worker]]:
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
        self.num_slots = num_slots
        self._seed, self._timeout_s = rules.seed, timeout_s
        self._changed = threading.Condition()
        self._unfinished: set[int] = set()
        self._finished: list[FinishedGroup] = []
        self._error: Exception | None = None
        self._progressed = 0.0
        self._loading = False
        self._client = ServerClient(address, timeout_s=timeout_s, at_once=num_slots)
        try:
            self._server = self._client.run(Server.probed(self._client, rules))
        except BaseException as error:
            self.close()
            if isinstance(error, ServerLost | Refusal | Unfit):
                raise _of_worker(error, f"{self._client.name}: ") from error
            raise
        self.name = self._client.name

    @property
    def labels_versions(self) -> bool:
        """Whether its completions have the version of the weights of each token, not of the group alone."""
        return self._server.labels_versions

    @property
    def cannot_see(self) -> str | None:
        """Why it gets no prompts with pictures (`Server.cannot_see`)."""
        return self._server.cannot_see

    @property
    def takes_adapters(self) -> bool:
        """Whether it merges adapters into the base that it has (`Quatrain.takes_adapters`)."""
        return self._server.takes_adapters

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """The server loads `weights`, a folder or `Pieces`; the version that it says it has then.

        Raises WorkerRefused if it answers that it cannot: it has another model, cannot read the folder, or
        has no room for what it is sent.
        """
        self._loading = True
        try:
            return self._client.run(self._server.load(weights, version, timeout_s))
        except Refusal as error:
            path = Path(weights)
            # What was to be loaded is gone meanwhile: here for a newer version, there by another sender.
            if error.status == NOT_WHOLE or not path.is_dir():
                raise WorkerLost(f"it did not load {path}: {error}") from error
            shared = ", where it can read that folder (rollout.weights_dir)"
            raise WorkerRefused(
                f"{self.name}: it must load the weights of this run, and refused {path}: {error}; start it "
                f"with the model that is trained{shared if isinstance(weights, str) else ''}"
            ) from error
        except Unfit as error:
            raise _of_worker(error, f"{self.name}: ") from error
        except ServerLost as error:
            raise _of_worker(error) from error
        finally:
            self._loading = False

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Asks for each sample of each group."""
        with self._changed:
            # What it did before says nothing about a server that was given nothing for a while.
            if not self._unfinished:
                self._progressed = time.monotonic()
            self._unfinished |= {spec.number for spec in groups}
        for spec in groups:
            self._client.start(self._sample_group(spec, version))

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
        if self._loading:
            # `load` does so too, but its thread may end with this process. RuntimeError: it was faster.
            with suppress(ServerLost, Refusal, RuntimeError):
                self._client.run(self._server.resume(CLOSE_S))
        self._client.close()

    async def _sample_group(self, spec: GroupSpec, version: int) -> None:
        """Asks for the samples of a group, and for the version of the weights before and after.

        A request that is refused, and an answer that cannot be trained on, cost this group alone.
        """
        try:
            # Also of a server that labels tokens: the label of one that was restarted shows that it is to
            # be loaded again, before its tokens are refused group by group.
            before = await self._server.version()
            numbers = range(spec.sampling.n)
            answers = await all_of(self._sample(spec, number, version) for number in numbers)
            # Of tokens without labels the older one counts: a newer version must not be claimed for them.
            version = min(before, await self._server.version())
        except (Refusal, Unfit) as error:
            # Not the worker: another server may answer it, and one bad answer says little of the others.
            refused = " refused it" if isinstance(error, Refusal) else ""
            self._finish(FinishedGroup(spec.number, error=f"{self.name}{refused}: {error}"))
        except Exception as error:
            with self._changed:
                lost = _of_worker(error) if isinstance(error, ServerLost) else error
                self._error = self._error or lost
                self._changed.notify_all()
        else:
            size = len(spec.prompt.input_ids)
            samples = [(spec.prompt, _completion(each, size, version)) for each in answers]
            self._finish(FinishedGroup(spec.number, samples))

    async def _sample(self, spec: GroupSpec, number: int, version: int) -> ServerAnswer:
        own = spec.own  # of a turn of an agent, whose draws go on from its episode's
        seed, offset = (self._seed, 0) if own is None else (own.seed, own.offset)
        place = seed, spec.step, spec.prompt.group_id, number, version, offset
        asked = Asked(spec.prompt.input_ids.tolist(), spec.sampling, *place, pictures=spec.prompt.pictures)
        # The fleet gives out a group more than fills the slots; it waits here, not in the server's memory.
        async with self._client.room:
            try:
                return await self._server.sample(asked, session="" if own is None else own.session)
            finally:
                self._progressed = time.monotonic()

    def _finish(self, group: FinishedGroup) -> None:
        with self._changed:
            self._unfinished.discard(group.number)
            self._finished.append(group)
            self._changed.notify_all()


def _completion(answer: ServerAnswer, num_prompt: int, version: int) -> Completion:
    """The completion of an answer to a prompt of so many tokens; tokens without labels are of `version`."""
    columns = {} if answer.routes is None else {ROUTES: [answer.routes]}
    if answer.kept is not None:
        columns[KEPT] = [all_words(num_prompt), answer.kept]
    return Completion(
        tokens=answer.tokens,
        # As the engine's, which are float32: a run with a server is then that with the engine, to the bit.
        logprobs=[float(np.float32(value)) for value in answer.logprobs],
        versions=answer.versions or [version] * len(answer.tokens),
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
        columns=columns,
        cached=answer.cached,
    )


def _of_worker(error: ServerLost | Refusal | Unfit, name: str = "") -> WorkerLost | WorkerRefused:
    """An error of a server as that of a worker, by which the fleet starts it again or ends the run."""
    if isinstance(error, ServerLost):
        return WorkerLost(f"{name}{error}")
    refused = "it refused a question: " if isinstance(error, Refusal) else ""
    return WorkerRefused(f"{name}{refused}{error}")
