"""What a call of the training server costs beside the device's work.

    quatrain serve --set model.path=builtin:tiny --train --port 8001
    python benchmarks/tinker.py http://127.0.0.1:8001 builtin:tiny

Calls go in turns to the running server, as its clients send them, and straight to a training client and a
sampler of the same model in this process, without HTTP, promises, threads and turns. Prints JSON: medians in
milliseconds of `--calls` calls each of forward, forward_backward and optim_step, one after the other, and the
seconds of batches of `--samples` samples in flight; the difference is what the server adds.

The server must have no other clients, and no other work runs on the machine. The first calls of each kind,
which compile, are dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any, TypeVar

import httpx2
import jax
import numpy as np

from quatrain.config.load import load_config
from quatrain.loop.policy import load_policy
from quatrain.loop.training_server import base_of
from quatrain.serve.tinker.calls import AdamNumbers, Base, Datum, LoraRequest, Pass, Sample, Snapshot, Units
from quatrain.serve.tinker.messages import FLOAT32, INT64, ForwardBackwardRequest
from quatrain.serve.tinker.sampling import Samplers
from quatrain.serve.tinker.training import TrainingClient

Name = TypeVar("Name")

RANK, MAX_TOKENS = 8, 8
WARM = 3
"""Calls of each kind that are dropped."""
KEY = "tml-benchmark"
SAMPLED = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "stop": []}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of `quatrain serve MODEL --train`")
    parser.add_argument("model", help="the model that it serves")
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--datums", type=int, default=4, help="of a call")
    parser.add_argument("--tokens", type=int, default=16, help="of a datum and of a prompt")
    parser.add_argument("--samples", type=int, default=64, help="in flight")
    parser.add_argument("--batches", type=int, default=10, help="of samples")
    args = parser.parse_args(arguments)
    base = loaded_base(args.model)
    with Server.opened(args.url, args.samples) as server, asyncio.Runner() as loop:
        seconds = timed(
            {
                (where, name): call
                for where, calls in (
                    ("served", served_calls(server, args)),
                    ("alone", direct_calls(base, args)),
                )
                for name, call in calls.items()
            },
            args.calls,
        )
        served, alone = (
            {name: each for (at, name), each in seconds.items() if at == where}
            for where in ("served", "alone")
        )
        numbers = count()
        batches = timed(
            {
                "served": lambda: loop.run(server.batch(next(numbers), args)),
                "alone": direct_batches(base, args),
            },
            args.batches,
        )
        loop.run(server.aclose())
    each = 1000 / args.samples
    report = {
        "device": jax.devices()[0].device_kind,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "calls": {
            name: {
                "served_ms": round(1000 * served[name], 3),
                "alone_ms": round(1000 * alone[name], 3),
                "overhead_ms": round(1000 * (served[name] - alone[name]), 3),
            }
            for name in served
        },
        f"{args.samples} samples in flight": {
            "served_s": round(batches["served"], 4),
            "alone_s": round(batches["alone"], 4),
            "overhead_ms_each": round(each * (batches["served"] - batches["alone"]), 3),
        },
    }
    print(json.dumps(report, indent=1))


def timed(calls: dict[Name, Callable[[], Any]], number: int) -> dict[Name, float]:
    """Median seconds of each call; all are done in turns, so that a drift of the machine is in each."""
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(WARM + number):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(each[WARM:]) for name, each in seconds.items()}


def tokens_of(number: int, length: int) -> np.ndarray:
    """[length] int32, other ones for each number: contexts are kept, and would be found."""
    return np.random.default_rng(number).integers(1, 10, length).astype(np.int32)


class Server:
    """A model of a session of the running server, and a sampler of the base."""

    def __init__(self, client: httpx2.Client, samples: httpx2.AsyncClient):
        self._client, self._samples, self._seq_id = client, samples, 0
        (model, *_) = self._client.get("/api/v1/get_server_capabilities").json()["supported_models"]
        name = model["model_name"]
        self._session = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        self.model = self.result(
            self.post(
                "create_model",
                session_id=self._session,
                model_seq_id=0,
                base_model=name,
                lora_config={"rank": RANK, "seed": 0},
            )
        )["model_id"]
        self.sampler = self.post(
            "create_sampling_session", session_id=self._session, sampling_session_seq_id=0, base_model=name
        )["sampling_session_id"]

    @classmethod
    @contextmanager
    def opened(cls, url: str, num_samples: int) -> Iterator[Server]:
        """The server at `url`; its session is finished with the block."""
        limits, headers = httpx2.Limits(max_connections=num_samples), {"X-API-Key": KEY}
        samples = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120)
        with httpx2.Client(base_url=url, headers=headers, timeout=120) as client:
            server = cls(client, samples)
            yield server
            server.post(f"sessions/{server._session}/finish", reason={"type": "success"})

    def post(self, path: str, **fields: Any) -> Any:
        return self._client.post(f"/api/v1/{path}", json=fields).raise_for_status().json()

    def result(self, promise: dict[str, Any]) -> Any:
        """What comes of a promise: JSON, or bytes."""
        while True:
            answer = self._client.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != 408:
                return _result(answer)

    def next(self) -> dict[str, Any]:
        self._seq_id += 1
        return {"model_id": self.model, "seq_id": self._seq_id}

    def forward(self, data: Sequence[Datum], forward_only: bool) -> None:
        request = ForwardBackwardRequest(**self.next(), loss_fn="cross_entropy", forward_only=forward_only)
        for datum in data:
            given = request.data.add()
            given.model_input.add().encoded_text.tokens = datum.tokens.tobytes()
            for name, values, dtype in (
                ("target_tokens", datum.targets.astype(np.int64), INT64),
                ("weights", datum.columns["weights"], FLOAT32),
            ):
                tensor = given.loss_fn_inputs.add(key=name).value
                tensor.dense, tensor.dtype = values.tobytes(), dtype
                tensor.shape.extend(values.shape)
        self.result(
            self._client.post(
                "/api/v1/forward_backward",
                content=request.SerializeToString(),
                headers={"Content-Type": "application/x-protobuf"},
            )
            .raise_for_status()
            .json()
        )

    def optim_step(self) -> None:
        self.result(self.post("optim_step", **self.next(), adam_params={"learning_rate": 1e-4}))

    async def batch(self, batch: int, args: argparse.Namespace) -> None:
        """Samples in flight at once."""
        numbers = range(batch * args.samples, (batch + 1) * args.samples)
        await asyncio.gather(*(self._sample(number, args.tokens) for number in numbers))

    async def aclose(self) -> None:
        """Closes the connections of samples."""
        await self._samples.aclose()

    async def _sample(self, number: int, length: int) -> None:
        client = self._samples
        asked = {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens_of(number, length).tolist()}]},
            "sampling_params": SAMPLED,
        }
        promise = (await client.post("/api/v1/asample", json=asked)).raise_for_status().json()
        while True:
            answer = await client.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != 408:
                _result(answer)
                return


def _result(answer: httpx2.Response) -> Any:
    answer.raise_for_status()
    if not answer.headers["content-type"].startswith("application/json"):
        return answer.content
    result = answer.json()
    if "error" in result:
        raise SystemExit(f"the server refused a call: {result['error']}")
    return result


def data_of(args: argparse.Namespace) -> list[Datum]:
    """The datums of a call."""
    rows = [tokens_of(number, args.tokens + 1) for number in range(args.datums)]
    weights = np.ones(args.tokens, np.float32)
    return [Datum(row[:-1], row[1:], {"weights": weights}) for row in rows]


def served_calls(server: Server, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The calls over HTTP, by name."""
    data = data_of(args)
    return {
        "forward": lambda: server.forward(data, True),
        "forward_backward": lambda: server.forward(data, False),
        "optim_step": server.optim_step,
    }


def direct_calls(base: Base, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The same calls of a training client in this process, by name."""
    client = TrainingClient(base, LoraRequest(RANK, seed=0), 0)
    data = tuple(data_of(args))
    forward, both = (Pass(data, "cross_entropy", forward_only=only) for only in (True, False))
    return {
        "forward": lambda: whole(client.run(forward)),
        "forward_backward": lambda: whole(client.run(both)),
        "optim_step": lambda: whole(client.optim_step(AdamNumbers(learning_rate=1e-4))),
    }


def whole(units: Units[Any]) -> Any:
    """What `units` return."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def direct_batches(base: Base, args: argparse.Namespace) -> Callable[[], None]:
    """What samples the next of the same batches in this process."""
    samplers = Samplers(base, most=1)
    key = samplers.open(Snapshot(None, None, -1, 0), "benchmark")
    batches = count()

    def batch() -> None:
        first, done = next(batches) * args.samples, []
        for number in range(first, first + args.samples):
            asked = Sample(tokens_of(number, args.tokens), max_tokens=MAX_TOKENS, stop=())
            samplers.start(key, asked, done.append)
        while len(done) < args.samples:
            samplers.round(key)
        for each in done:
            if isinstance(each, Exception):
                raise each

    return batch


def loaded_base(model: str) -> Base:
    """The model as the server has it."""
    config = load_config(overrides=[f"model.path={model}"]).config
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    return base_of(config, loaded, model)


if __name__ == "__main__":
    main()
