"""The training server's HTTP interface: Tinker's, under `/api/v1`, and a page for people at `/`.

Data flow: a request -> checked (`asks.py`, `wire.py`) -> what it names (`tenants.py`) -> a promise
(`promises.py`) -> work of the device's thread (`worker.py`) -> its result, fetched by `retrieve_future`. The
event loop alone calls these; bodies are parsed in threads.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from quatrain.config.schema import TinkerConfig
from quatrain.config.secrets import TINKER_KEY
from quatrain.serve.tinker import asks, messages, wire
from quatrain.serve.tinker.calls import Base, LoraRequest, Refused, Sample, Snapshot, Units
from quatrain.serve.tinker.checkpoint import Kind, Missing
from quatrain.serve.tinker.http import (
    FLAGS,
    PROTOBUF,
    REFUSED,
    Json,
    asked_of,
    body_of,
    detail,
    failed,
    not_here,
    page_of,
    said,
    unknown_path,
)
from quatrain.serve.tinker.journal import Journal, Rows
from quatrain.serve.tinker.overview import overview
from quatrain.serve.tinker.promises import Promises, UnknownPromise, then
from quatrain.serve.tinker.sampling import Samplers
from quatrain.serve.tinker.store import Store
from quatrain.serve.tinker.tenants import (
    Made,
    Model,
    SamplerOf,
    Session,
    Tenants,
    Unknown,
    has_failed,
    num_parameters,
)
from quatrain.serve.tinker.training import TrainingClient, snapshot_of
from quatrain.serve.tinker.wire import Limits
from quatrain.serve.tinker.worker import Worker
from quatrain.workers.loop_thread import carry_out

METRICS = "metrics.jsonl"
KEY_START = "tml-"
"""How keys begin; the client refuses others."""
logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
Asked = TypeVar("Asked", bound=asks.Ask)
Handler = Callable[[Request, str], Awaitable[Response]]
"""What answers a request of the owner, a hash of its API key."""

MOST_WAITING = 10_000
"""Requests without a result, of all sessions."""
MOST_WAITING_BYTES = 2**31
"""Of the bodies of these."""
POLL_S = 20.0
"""Seconds after which a poll is answered that nothing came: the client's own limit is 45."""
MOST_SESSIONS = 10_000
CLONE = 10**9
"""Requests of each copy of a sampler are numbered from a multiple of it."""
SWEEP_S = 10.0
"""Seconds between two looks for silent sessions."""
EXPIRE_S = 3600.0
"""Seconds between two looks for checkpoints that have expired."""
CLOSER = "samplers that make room"
"""Has turns of the device beside the sessions."""
BYTES_OF_TRAINING = 16
"""Of each adapter parameter: its weight, gradient sum and two moments, all float32."""
BYTES_OF_SAMPLING = 4


class TinkerApi:
    """Answers requests to train adapters of `base` and to sample with them.

    `names` are what programs may call the base, the first of them the folder with its tokenizer. `room` are
    the bytes of a device for training clients and weights of samplers. `key`: the only API key that is taken;
    None: any. Of the folder of a training client, `rows` opens what takes its figures, and `run_page` makes
    their page, one at a time.
    """

    def __init__(
        self,
        base: Base,
        worker: Worker,
        samplers: Samplers,
        store: Store,
        settings: TinkerConfig,
        *,
        names: Sequence[str],
        room: int,
        key: str | None = None,
        rows: Callable[[Path], Rows],
        run_page: Callable[[Path], str],
    ):
        self._base, self._worker, self._samplers, self._store = base, worker, samplers, store
        self._settings, self._names, self._key = settings, tuple(names), key
        self._rows, self._run_page = rows, run_page
        self._limits = Limits(base.longest, base.arch.vocab_size, settings.replace_stable_reinforce)
        self.promises = Promises()
        self.tenants = Tenants(
            most_models=settings.max_models,
            room=room,
            timeout_s=settings.session_timeout_s,
            close=self._close_sampler,
        )
        self._journals: set[Journal] = set()  # that are open; the thread's of the device, as long as it lives
        self._named_sessions: dict[tuple[str, str], str] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._making_page = asyncio.Lock()  # or those who wait would take all threads, which parse bodies

    @property
    def name(self) -> str:
        """What programs call the base: the folder with its tokenizer."""
        return self._names[0]

    @property
    def has_key(self) -> bool:
        """Whether one key alone is taken."""
        return self._key is not None

    @property
    def routes(self) -> list[BaseRoute]:
        """For an application that checks the hosts that requests name."""
        kinds: dict[tuple[str, str], Handler] = {
            ("GET", "/healthz"): self._healthz,
            ("GET", "/get_server_capabilities"): self._capabilities,
            ("POST", "/client/config"): partial(said, FLAGS),
            ("POST", "/client/dynamic_config"): partial(
                said, {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
            ),
            ("POST", "/telemetry"): partial(said, {"status": "accepted"}),
            ("POST", "/create_session"): self._create_session,
            ("POST", "/session_heartbeat"): self._heartbeat,
            ("GET", "/sessions"): self._sessions,
            ("GET", "/sessions/{session}"): self._session,
            ("POST", "/sessions/{session}/finish"): self._finish,
            ("POST", "/create_model"): self._create_model,
            ("POST", "/get_info"): self._info,
            ("POST", "/forward_backward"): self._forward_backward,
            ("POST", "/optim_step"): self._optim_step,
            ("POST", "/save_weights"): self._save_weights,
            ("POST", "/save_weights_for_sampler"): self._save_for_sampler,
            ("POST", "/load_weights"): self._load_weights,
            ("POST", "/create_sampling_session"): self._create_sampler,
            ("POST", "/join_sampling_session"): self._join_sampler,
            ("GET", "/samplers/{sampler}"): self._sampler,
            ("POST", "/asample"): self._asample,
            ("POST", "/retrieve_future"): self._retrieve,
            ("POST", "/retrieve_futures"): self._retrieve_several,
            ("POST", "/cancel_future"): self._cancel,
            ("GET", "/training_runs"): self._runs,
            ("GET", "/training_runs/{model}"): self._run,
            ("GET", "/training_runs/{model}/checkpoints"): self._checkpoints,
            ("GET", "/checkpoints"): self._checkpoints,
            ("DELETE", "/training_runs/{model}/checkpoints/{kind}/{name}"): self._delete,
            ("PUT", "/training_runs/{model}/checkpoints/{kind}/{name}/ttl"): self._set_ttl,
            ("POST", "/weights_info"): self._weights_info,
            **{place: partial(not_here, why) for place, why in REFUSED.items()},
        }
        tinker = Starlette(
            routes=[
                Route(path, self._answered(handler), methods=[method])
                for (method, path), handler in kinds.items()
            ],
            exception_handlers={HTTPException: unknown_path, Exception: failed},
        )
        pages = [Route("/", self._page), Route("/training/{model}", self._page_of_run)]
        return [Mount("/api/v1", tinker), *pages]

    def _answered(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.create_task(self._keep())
            try:
                return await handler(request, self._owner(request))
            except HTTPException as error:
                return detail(error.status_code, error.detail)
            except Unknown as error:
                return detail(404, str(error))
            except UnknownPromise as error:
                return detail(410, str(error))
            except Refused as error:
                return detail(422, str(error))
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

    def _owner(self, request: Request) -> str:
        """A hash of the request's API key; raises HTTPException where that is not taken."""
        key = request.headers.get("x-api-key", "")
        known = (
            key.startswith(KEY_START)
            if self._key is None
            else hmac.compare_digest(key.encode(), self._key.encode())
        )
        if not known:
            needed = (
                f"the value of {TINKER_KEY}" if self._key else f"any API key that begins with `{KEY_START}`"
            )
            raise HTTPException(401, f"requests need the header X-API-Key with {needed}: set TINKER_API_KEY")
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    async def _keep(self) -> None:
        """Ends silent sessions and deletes checkpoints that have expired, as long as the server runs."""
        expired = -EXPIRE_S
        while True:
            for session in self.tenants.silent():
                self.end(session, f"no sign of life for {self._settings.session_timeout_s} s")
            if time.monotonic() - expired >= EXPIRE_S:
                expired = time.monotonic()
                try:
                    await asyncio.to_thread(self._store.expire, time.time())
                except Exception as error:  # it is tried again, and sessions end meanwhile
                    logger.warning("checkpoints that have expired could not be deleted: %s", error)
            await asyncio.sleep(SWEEP_S)

    def end(self, session: Session, why: str) -> None:
        """Ends a session: its training clients and samplers are freed, and its checkpoints stay."""
        if session.ended is not None:
            return
        for model in session.models.values():
            model.lane.close(f"the session has ended: {why}")
        self.promises.forget(session.id)
        self._worker.forget(session.id)
        # What frees memory comes after this, or it would be forgotten too: all that the device has of this
        # session, whatever is noted here.
        for model in self.tenants.end(session, why):
            self._worker.call(session.id, partial(self._close_journal, model))
        self._worker.call(session.id, lambda: self._samplers.forget(session.id))

    def _close_journal(self, model: Model) -> None:
        if model.is_alive:
            model.journal.close()
            self._journals.discard(model.journal)

    def close(self) -> None:
        """Ends the device's thread after the unit that runs, and the journals that are open."""
        self._worker.close()
        # Not by jobs, of which the thread does no more: a page would say for ever that its client trains.
        for journal in self._journals:
            journal.close()
        self._journals.clear()

    # Sessions

    async def _healthz(self, request: Request, owner: str) -> Response:
        error = self._worker.error
        return Json({"status": "ok"}) if error is None else detail(503, error)

    async def _capabilities(self, request: Request, owner: str) -> Response:
        facts = {"max_context_length": self._base.longest, "trainable": True, "sampleable": True}
        return Json({"supported_models": [{"model_name": name, **facts} for name in self._names]})

    async def _create_session(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.CreateSession, request)
        named = (owner, request.headers.get("x-idempotency-key", ""))
        name = self._named_sessions.get(named) if named[1] else None
        if name is None:
            if sum(1 for _ in self.tenants) >= MOST_SESSIONS:
                raise HTTPException(
                    429, f"{MOST_SESSIONS} sessions have begun and not ended; try again later"
                )
            name = self.tenants.begin(owner, asked.user_metadata, asked.display_name).id
            self._named_sessions[named] = name
            while len(self._named_sessions) > MOST_WAITING:
                del self._named_sessions[next(iter(self._named_sessions))]
        answer = {"type": "create_session", "session_id": name}
        if (loss := self._settings.replace_stable_reinforce) is not None:
            answer["warning_message"] = (
                f"loss_fn stable_reinforce is computed as {loss} here (tinker.replace_stable_reinforce)"
            )
        return Json(answer)

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.Heartbeat, request)
        try:
            self.tenants.session(owner, asked.session_id)
        except Unknown as error:
            return detail(410, str(error))
        return Json({"type": "session_heartbeat"})

    async def _sessions(self, request: Request, owner: str) -> Response:
        names = [session.id for session in self.tenants if session.owner == owner]
        return page_of("sessions", names[::-1], request)

    async def _session(self, request: Request, owner: str) -> Response:
        session = self.tenants.any_session(owner, request.path_params["session"])
        return Json(
            {
                "training_run_ids": [model.id for model in session.models.values()],
                "sampler_ids": [sampler.id for sampler in session.samplers.values()],
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    async def _finish(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.FinishSession, request)
        session = self.tenants.any_session(owner, request.path_params["session"])
        self.end(session, f"its program has finished: {asked.reason.type}")
        return Json({})

    # Training clients

    async def _create_model(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.CreateModel, request)
        session, number = self.tenants.session(owner, asked.session_id), asked.model_seq_id

        def begin() -> Future[Any]:
            name, lora = self._base_name(asked.base_model), asked.lora()

            def make() -> TrainingClient:
                return TrainingClient(self._base, lora, number)

            model = self._new_model(session, number, name, lora, make, asked.user_metadata)
            return then(model.made, lambda client: {"type": "create_model", "model_id": model.id})

        return self._promised_model(session, number, begin)

    async def _load_weights(self, request: Request, owner: str) -> Response:
        """Into a training client, or into a new one, of which it is the first request."""
        try:
            asked = await asked_of(asks.LoadWeights, request)
        except Refused as error:
            return self._refused_in_order(owner, error)
        if asked.model_id is not None:
            model = self._model(owner, asked.model_id)
            return self._promised_turn(model, asked.address[1], lambda: self._begin_load(model, asked))
        name, number = asked.address
        session = self.tenants.session(owner, name)

        def begin() -> Future[Any]:
            lora = self._saved_lora(owner, asked.path)
            base = self._names[0] if asked.base_model is None else self._base_name(asked.base_model)

            def make() -> TrainingClient:
                trained = self._store.load(owner, asked.path)
                client = TrainingClient(self._base, trained.lora, number)
                client.load(trained, moments=asked.optimizer)
                return client

            model = self._new_model(session, number, base, lora, make, asked.user_metadata)
            return then(model.made, lambda client: _loaded(model, asked.path))

        return self._promised_model(session, number, begin)

    def _new_model(
        self,
        session: Session,
        number: int,
        name: str,
        lora: LoraRequest,
        make: Callable[[], TrainingClient],
        user_metadata: Mapping[str, Any] | None,
    ) -> Model:
        """A training client, which `make` makes in the thread of the device."""
        if (there := session.models.get(number)) is not None and there.is_alive:
            raise Refused(f"model_seq_id must be a new number; training client {there.id} is there already")
        num_bytes = BYTES_OF_TRAINING * num_parameters(self._base, lora)
        self.tenants.admit_model(num_bytes)
        model = Model(f"{session.id}:train:{number}", session, number, name, lora, num_bytes)

        def made() -> Made:
            client = make()
            self._store.note_run(session.owner, model.id, lora, user_metadata)
            journal = Journal(self._rows(self._store.run_folder(model.id)))
            self._journals.add(journal)
            return Made(client, journal)

        model.made = self._worker.call(session.id, made)
        session.models[number] = model
        return model

    def _promised_model(self, session: Session, number: int, begin: Callable[[], Future[Any]]) -> Response:
        return self._promised(
            session, ("model", session.id, number), begin, model_id=f"{session.id}:train:{number}"
        )

    async def _info(self, request: Request, owner: str) -> Response:
        model = self._model(owner, (await asked_of(asks.GetInfo, request)).model_id)
        data = {
            "arch": self._base.arch.family,
            "model_name": model.name,
            "tokenizer_id": self._names[0],
        }
        return Json(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": data,
                "is_lora": True,
                "lora_rank": model.lora.rank,
                "model_name": model.name,
            }
        )

    async def _forward_backward(self, request: Request, owner: str) -> Response:
        body = await body_of(request, PROTOBUF)
        try:
            model_id, seq_id, asked = await asyncio.to_thread(wire.read_pass, body, self._limits)
        except Refused as error:
            voids = error.address is not None and not messages.is_forward_only(body)
            return self._refused_in_order(owner, error, voids=voids)
        model = self._model(owner, model_id)

        def units() -> Units[bytes]:
            try:
                passed = yield from model.client.run(asked)
            except Exception as error:
                if not asked.forward_only:
                    model.void(f"request {seq_id} failed: {error}")
                raise
            model.journal.passed(asked, passed)
            return wire.write_passed(passed)

        return self._promised_turn(
            model, seq_id, lambda: self._worker.submit(model.session.id, units), body_bytes=len(body)
        )

    async def _optim_step(self, request: Request, owner: str) -> Response:
        def begin(model: Model, asked: asks.OptimStep) -> Future[Any]:
            numbers = asked.numbers()

            def units() -> Units[dict[str, Any]]:
                try:
                    metrics = yield from model.client.optim_step(numbers)
                except Exception:
                    model.journal.void()
                    raise
                model.journal.stepped(model.client.step, numbers, metrics)
                return {"metrics": metrics}

            return self._worker.submit(model.session.id, units)

        return await self._of_model(owner, request, asks.OptimStep, begin)

    async def _save_weights(self, request: Request, owner: str) -> Response:
        def begin(model: Model, asked: asks.SaveWeights) -> Future[Any]:
            return self._save(model, "weights", asked.path, asked, overwrite=asked.overwrite)

        return await self._of_model(owner, request, asks.SaveWeights, begin)

    async def _save_for_sampler(self, request: Request, owner: str) -> Response:
        def begin(model: Model, asked: asks.SaveWeightsForSampler) -> Future[Any]:
            if asked.path is not None:
                return self._save(model, "sampler_weights", asked.path, asked)
            number = asked.sampling_session_seq_id
            assert number is not None
            sampler = self._new_sampler(model.session, number, model.name, model.lora)
            opened = self._open(sampler, lambda: model.client.snapshot())
            answer = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
            return then(opened, lambda key: answer)

        return await self._of_model(owner, request, asks.SaveWeightsForSampler, begin)

    def _save(
        self,
        model: Model,
        kind: Kind,
        name: str,
        asked: asks.SaveWeights | asks.SaveWeightsForSampler,
        *,
        overwrite: bool = False,
    ) -> Future[Any]:
        def units() -> Units[dict[str, Any]]:
            trained = model.client.trained(moments=kind == "weights")
            yield
            path = yield from self._store.save(
                model.session.owner,
                model.id,
                kind,
                name,
                trained,
                overwrite=overwrite,
                ttl_seconds=asked.ttl_seconds,
                user_metadata=asked.user_metadata,
            )
            model.journal.saved(asked.user_metadata)
            return {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler", "path": path}

        return self._worker.submit(model.session.id, units)

    def _begin_load(self, model: Model, asked: asks.LoadWeights) -> Future[Any]:
        def load() -> dict[str, Any]:
            model.client.load(self._store.load(model.session.owner, asked.path), moments=asked.optimizer)
            model.journal.void()
            return _loaded(model, asked.path)

        return self._worker.call(model.session.id, load)

    def _model(self, owner: str, model_id: str) -> Model:
        """The training client; where it is gone, the error names its newest checkpoint."""
        try:
            return self.tenants.model(owner, model_id)
        except Unknown as error:
            raise Unknown(f"{error}; {self._saved(owner, model_id)}") from error

    def _saved(self, owner: str, model_id: str) -> str:
        """What there is of a training client that is gone: its program has to begin anew from there."""
        try:
            all_saved = self._store.checkpoints(owner, model_id)
        except Refused:
            return "make one with create_lora_training_client"
        saved = [each for each in all_saved if each["checkpoint_type"] == "training"]
        if not saved:
            return "it has no checkpoint; make a new one with create_lora_training_client"
        return (
            f"its newest checkpoint is {saved[0]['tinker_path']}; go on from there with "
            "create_training_client_from_state_with_optimizer"
        )

    def _saved_lora(self, owner: str, path: str) -> LoraRequest:
        """The adapters of a checkpoint; raises Refused if there is none."""
        info = self._store.info(owner, path)
        parts = {name: info[name] for name in ("train_mlp", "train_attn", "train_unembed")}
        return LoraRequest(info["lora_rank"], **parts)

    async def _of_model(
        self,
        owner: str,
        request: Request,
        kind: type[Asked],
        begin: Callable[[Model, Asked], Future[Any]],
    ) -> Response:
        """The promise of a request of a training client."""
        try:
            asked = await asked_of(kind, request)
        except Refused as error:
            return self._refused_in_order(owner, error)
        model_id, seq_id = asked.address
        model = self._model(owner, model_id)
        return self._promised_turn(model, seq_id, lambda: begin(model, asked))

    def _refused_in_order(self, owner: str, error: Refused, *, voids: bool = False) -> Response:
        """What is wrong with a request of a training client is the error of its promise, in its turn.

        A status would lose its number, for which all later requests would wait.
        """
        if error.address is None or ":train:" not in error.address[0]:
            raise error
        (model_id, seq_id), why = error.address, str(error)
        model = self._model(owner, model_id)

        def refuse() -> None:
            if voids:
                model.void(f"request {seq_id} failed: {why}")
            raise error

        return self._promised_turn(model, seq_id, lambda: self._worker.call(model.session.id, refuse))

    def _promised_turn(
        self, model: Model, seq_id: int, begin: Callable[[], Future[Any]], *, body_bytes: int = 0
    ) -> Response:
        return self._promised(
            model.session,
            (model.id, seq_id),
            lambda: model.lane.offer(seq_id, begin),
            body_bytes=body_bytes,
            # Where nothing of the session runs: what is held would wait for ever for this, which it leaves no
            # room.
            has_place=model.lane.is_due(seq_id) and not self._worker.num_waiting(model.session.id),
            model_id=model.id,
        )

    def _promised(
        self,
        session: Session,
        name: Hashable,
        begin: Callable[[], Future[Any]],
        group: Hashable = None,
        *,
        body_bytes: int = 0,
        has_place: bool = False,
        **more: Any,
    ) -> Response:
        if not has_place and self.promises.is_crowded(session.id, MOST_WAITING, MOST_WAITING_BYTES):
            raise HTTPException(
                429,
                f"{MOST_WAITING} requests or {MOST_WAITING_BYTES} bytes of them wait already, the most that "
                "this server takes; send it again",
            )
        if self.promises.is_full(session.id):
            raise HTTPException(429, "too many results wait to be fetched; fetch some, and send it again")
        promise = self.promises.begin(
            name, session.owner, begin, owner=session.id, group=group, body_bytes=body_bytes
        )
        return Json({"request_id": promise.request_id, **more})

    def _base_name(self, name: str) -> str:
        """The base as a program asked for it, without the name of a variant; raises Refused."""
        for each in (name, name.partition(":")[0]):
            if each in self._names:
                return each
        raise Refused(f"base_model {name[:200]!r} is not served here; served here: {', '.join(self._names)}")

    # Samplers

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.CreateSamplingSession, request)
        session = self.tenants.session(owner, asked.session_id)
        if asked.sampling_session_seq_id not in session.samplers:
            lora, name = None, self._names[0]
            if asked.model_path is not None:
                lora = await self._stored(self._saved_lora, owner, asked.model_path)
            if asked.base_model is not None:
                name = self._base_name(asked.base_model)
            if asked.sampling_session_seq_id not in session.samplers:  # it may have come twice meanwhile
                self._new_sampler(session, asked.sampling_session_seq_id, name, lora, asked.model_path)
        sampler = session.samplers[asked.sampling_session_seq_id]
        return Json({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    def _new_sampler(
        self, session: Session, number: int, name: str, lora: LoraRequest | None, path: str | None = None
    ) -> SamplerOf:
        """A sampler without weights yet; raises Refused for a number that another one has."""
        if number in session.samplers:
            raise Refused(
                f"sampling_session_seq_id must be a new number; sampler {session.samplers[number].id} is "
                "there already"
            )
        num_bytes = 0 if lora is None else BYTES_OF_SAMPLING * num_parameters(self._base, lora)
        sampler = SamplerOf(f"{session.id}:sample:{number}", session, name, num_bytes, path, lora is None)
        session.samplers[number] = sampler
        return sampler

    def _open(self, sampler: SamplerOf, snapshot: Callable[[], Snapshot]) -> Future[int]:
        """Gives a sampler its weights, which `snapshot` makes in the thread of the device."""
        self.tenants.make_room(sampler.num_bytes, "the weights of one more sampler")
        self.tenants.touch(sampler)
        owner = sampler.session.id

        sampler.opened = self._worker.call(owner, lambda: self._samplers.open(snapshot(), owner))
        return sampler.opened

    def _opened(self, sampler: SamplerOf) -> Future[int]:
        """The key of a sampler, whose weights are read again where they made room for others."""
        owner, path = sampler.session.owner, sampler.path
        if sampler.opened is not None and not has_failed(sampler.opened):
            return sampler.opened
        if sampler.of_base:
            return self._open(sampler, lambda: Snapshot(None, None, -1, 0))
        if path is None:
            raise Refused(
                f"the weights of sampler {sampler.id} had to make room for those of newer ones; save them "
                "under a name (save_weights_for_sampler), by which they are read again"
            )

        return self._open(sampler, lambda: snapshot_of(self._base, self._store.load(owner, path)))

    def _close_sampler(self, sampler: SamplerOf) -> None:
        """In a turn of its own: its session may have much to do before, for which others would wait, or take
        memory that is not free yet."""
        assert sampler.opened is not None, "only what is open is closed"
        then(sampler.opened, lambda key: self._worker.call(CLOSER, lambda: self._samplers.close(key)))

    async def _join_sampler(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.JoinSamplingSession, request)
        sampler = self.tenants.sampler(owner, asked.sampling_session_id)
        sampler.num_copies += 1
        return Json({"type": "join_sampling_session", "client_counter": sampler.num_copies})

    async def _sampler(self, request: Request, owner: str) -> Response:
        sampler = self.tenants.sampler(owner, request.path_params["sampler"])
        path = {} if sampler.path is None else {"model_path": sampler.path}
        return Json({"sampler_id": sampler.id, "base_model": sampler.name, **path})

    async def _asample(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.ASample, request)
        sample, csr = asked.sample(self._limits), asked.csr()
        sampler = self.tenants.sampler(owner, asked.sampling_session_id)
        group = (sampler.id, asked.seq_id // CLONE)
        name = (sampler.id, asked.seq_id)
        ids = [f"{sampler.id}:{asked.seq_id}:{number}" for number in range(asked.num_samples)]
        return self._promised(
            sampler.session,
            name,
            lambda: self._begin_sample(sampler, sample, csr),
            group,
            sample_sequence_ids=ids,
        )

    def _begin_sample(self, sampler: SamplerOf, sample: Sample, csr: wire.Csr | None) -> Future[Any]:
        owner = sampler.session.id
        self.tenants.touch(sampler)
        opened = self._opened(sampler)
        sampled = chained(opened, lambda key: self._worker.sample(owner, key, sample))
        sampler.waiting.add(sampled)
        sampled.add_done_callback(sampler.waiting.discard)
        return then(sampled, lambda each: wire.write_sampled(each, csr))

    # Promises

    async def _retrieve(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.RetrieveFuture, request)
        result = await self.promises.retrieve(asked.request_id, owner, POLL_S)
        if result is None:
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return Json(again, status_code=408)
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        return Json(result)

    async def _retrieve_several(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.RetrieveFutures, request)
        target = asked.target
        sampler = self.tenants.sampler(owner, target.sampling_session_id)
        completions, cursor = await self.promises.completed(
            sampler.session.id,
            (sampler.id, target.cloned_sampler_id),
            asked.prev_cursor,
            POLL_S if asked.timeout is None else min(asked.timeout, POLL_S),
            asked.retrieved_request_ids,
        )
        return Json({"completions": completions, "cursor": cursor})

    async def _cancel(self, request: Request, owner: str) -> Response:
        self.promises.cancel((await asked_of(asks.CancelFuture, request)).request_id, owner)
        return Json({})

    # Checkpoints

    async def _runs(self, request: Request, owner: str) -> Response:
        return page_of("training_runs", await asyncio.to_thread(self._store.runs, owner), request)

    async def _run(self, request: Request, owner: str) -> Response:
        return Json(await self._stored(self._store.run, owner, request.path_params["model"]))

    async def _checkpoints(self, request: Request, owner: str) -> Response:
        model_id = request.path_params.get("model")
        return page_of("checkpoints", await self._stored(self._store.checkpoints, owner, model_id), request)

    async def _delete(self, request: Request, owner: str) -> Response:
        await self._stored(self._store.delete, owner, _path_of(request))
        return Response(status_code=204)

    async def _set_ttl(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.SetTtl, request)
        await self._stored(self._store.set_ttl, owner, _path_of(request), asked.ttl_seconds)
        return Response(status_code=204)

    async def _weights_info(self, request: Request, owner: str) -> Response:
        asked = await asked_of(asks.WeightsInfo, request)
        return Json(await self._stored(self._store.info, owner, asked.tinker_path))

    async def _stored(self, function: Callable[..., T], *args: Any) -> T:
        """What the store says."""
        try:
            return await asyncio.to_thread(function, *args)
        except Missing as error:
            raise Unknown(str(error)) from error

    # For people

    async def _page(self, request: Request) -> Response:
        if (refusal := self._refused_reader(request)) is not None:
            return refusal
        return HTMLResponse(overview(self._base, self.tenants, self.promises, self._worker))

    def _refused_reader(self, request: Request) -> Response | None:
        """Browsers send no header of their own: with a key, they ask for it as a password."""
        if self._key is None:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        with suppress(ValueError):
            password = base64.b64decode(given).decode().partition(":")[2]
            if scheme.lower() == "basic" and hmac.compare_digest(password.encode(), self._key.encode()):
                return None
        return PlainTextResponse(
            f"this page needs the value of {TINKER_KEY} as its password",
            status_code=401,
            headers={"WWW-Authenticate": 'Basic realm="quatrain", charset="UTF-8"'},
        )

    async def _page_of_run(self, request: Request) -> Response:
        if (refusal := self._refused_reader(request)) is not None:
            return refusal
        try:
            folder = self._store.run_folder(request.path_params["model"])
            if not (folder / METRICS).is_file():
                raise Missing(f"training client {request.path_params['model']} has taken no step yet")
            async with self._making_page:
                return HTMLResponse(await asyncio.to_thread(self._run_page, folder))
        except Missing as error:
            return PlainTextResponse(str(error), status_code=404)


def chained(first: Future[T], begin: Callable[[T], Future[U]]) -> Future[U]:
    """The future of what `begin` begins with the result of `first`; its cancellation is passed on."""
    result: Future[U] = Future()

    def went(done: Future[T]) -> None:
        if result.cancelled():
            return
        try:
            second = begin(done.result())
        except Exception as error:
            with suppress(InvalidStateError):  # cancelled meanwhile
                result.set_exception(error)
            return
        second.add_done_callback(lambda each: carry_out(each.result, result))
        result.add_done_callback(lambda each: second.cancel() if each.cancelled() else None)

    first.add_done_callback(went)
    return result


def _loaded(model: Model, path: str) -> dict[str, Any]:
    return {"type": "load_weights", "path": path, "model_id": model.id}


def _path_of(request: Request) -> str:
    return "tinker://{model}/{kind}/{name}".format(**request.path_params)
