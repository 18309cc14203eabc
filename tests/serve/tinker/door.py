"""A training server in this process whose device computes nothing, and programs that send it requests."""

import json
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
from starlette.applications import Starlette
from starlette.testclient import TestClient

from quatrain.backend import this_backend
from quatrain.config.sections.tinker import TinkerConfig
from quatrain.models.lora import adapter_names
from quatrain.models.params import leaf_at, param_specs
from quatrain.parallel.mesh import one_device
from quatrain.serve.tinker import messages
from quatrain.serve.tinker.api import TinkerApi
from quatrain.serve.tinker.calls import Base, Passed, Refused, Sampled, Sequence, Snapshot, Trained
from quatrain.serve.tinker.store import Store
from quatrain.serve.tinker.training import adapted
from quatrain.serve.tinker.worker import Worker

BROKEN = 5
"""A first token of a datum for which the device fails."""
CONFIG = {"seed": 0, "model": {"path": "builtin:tiny"}}


class NoClient:
    """In place of `TrainingClient`: notes what it is asked."""

    made: ClassVar = []

    def __init__(self, base, lora, model):
        self.base, self.lora, self.model, self.step, self.why = base, lora, model, 0, None
        self.asked = []
        self.made.append(self)

    def run(self, asked):
        self.asked.append(("forward" if asked.forward_only else "gradient", int(asked.data[0].tokens[0])))
        yield
        if asked.data[0].tokens[0] == BROKEN:
            raise MemoryError("the device has no memory left")
        return Passed([np.zeros(each.targets.shape, np.float32) for each in asked.data], {"loss:sum": 1.5})

    def void(self, why):
        self.why = why

    def optim_step(self, numbers):
        self.asked.append(("step", numbers.learning_rate))
        why, self.why = self.why, None
        if why is not None:
            raise Refused(f"step not taken: {why}")
        self.step += 1
        return {"grad_norm:mean": 0.5}
        yield

    def snapshot(self):
        return Snapshot({}, self.lora, self.model, self.step)

    def trained(self, moments):
        arch = adapted(self.base.arch, self.lora.rank)
        specs = param_specs(arch)

        def zeros(start):
            return {
                start + name.name: np.zeros(name.shape_in(leaf_at(specs, name.path).shape), np.float32)
                for name in adapter_names(arch)
            }

        state = {"count": np.array(self.step, np.int32), **zeros("mu."), **zeros("nu.")}
        return Trained(self.lora, self.model, self.step, zeros(""), state if moments else None)

    def load(self, trained, moments):
        self.asked.append(("load", moments))
        self.step = trained.step


class NoSamplers:
    """In place of `Samplers`: a sequence is the step of the snapshot, as soon as `held` is not set."""

    def __init__(self):
        self.snapshots, self.asked, self.held, self.closed = {}, {}, False, []

    def open(self, snapshot, owner):
        key = len(self.snapshots) + len(self.closed) + 1
        self.snapshots[key] = snapshot, owner
        return key

    def close(self, key):
        del self.snapshots[key]
        self.closed.append(key)

    def forget(self, owner):
        for key in [key for key, (_, other) in self.snapshots.items() if other == owner]:
            self.close(key)

    def start(self, key, sample, done):
        if sample.max_tokens == 99:
            raise Refused("max_tokens must be less")
        self.asked[len(self.asked) + 1] = key, sample, done
        return len(self.asked)

    def cancel(self, ticket):
        self.asked[ticket] = None

    @property
    def waiting(self):
        going = [] if self.held else [each[0] for each in self.asked.values() if each]
        return [(self.snapshots[key][1], key) for key in dict.fromkeys(going)]

    def round(self, key):
        for ticket, each in self.asked.items():
            if each and each[0] == key:
                tokens = np.array([self.snapshots[key][0].step], np.int32)
                each[2](Sampled([Sequence(tokens, np.zeros(1, np.float32), True)] * each[1].n))
                self.asked[ticket] = None


class NoRows:
    """In place of the files of a journal."""

    opened: ClassVar = []

    def __init__(self, folder):
        self.folder, self.rows, self.is_closed = folder, [], False
        self.opened.append(self)

    def write(self, step, numbers):
        self.rows.append((step, numbers))
        (self.folder / "metrics.jsonl").write_text(json.dumps(self.rows))

    def close(self):
        self.is_closed = True


class Door:
    """The server and what is behind its door."""

    def __init__(self, folder, arch, tokenizer, monkeypatch, *, key=None, room=1 << 40, **settings):
        where = one_device(), this_backend(), "xla", "float32", "none"
        self.base = Base("/a/folder/tiny", arch, {}, tokenizer, (0, 7), *where, 11, 1024, "0123456789abcdef")
        monkeypatch.setattr("quatrain.serve.tinker.api.TrainingClient", NoClient)
        NoClient.made, NoRows.opened = [], []
        self.store, self.samplers = Store(folder, self.base, CONFIG), NoSamplers()
        self.worker = Worker(self.samplers)
        self.api = TinkerApi(
            self.base,
            self.worker,
            self.samplers,
            self.store,
            TinkerConfig(**settings),
            names=[self.base.name, "small/model"],
            room=room,
            key=key,
            rows=NoRows,
            run_page=lambda place: f"the page of {place.name}",
        )

    def close(self):
        self.api.close()
        self.store.close()


@contextmanager
def opened(*args, **options):
    """(the server, a client of it) while the block runs."""
    door = Door(*args, **options)
    try:
        with TestClient(Starlette(routes=door.api.routes)) as http:
            yield door, http
    finally:
        door.close()


class Program:
    """A session of a program, with one training client."""

    def __init__(self, http, key="tml-a", **lora):
        self.http, self.key = http, key
        self.session = self.post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"]
        self.lora, self.model = {"rank": 4, **lora}, f"{self.session}:train:0"

    def post(self, path, /, *, headers=None, **fields):
        return self.http.post(
            f"/api/v1/{path}", json=fields, headers={"X-API-Key": self.key, **(headers or {})}
        )

    def get(self, path):
        return self.http.get(f"/api/v1/{path}", headers={"X-API-Key": self.key})

    def create(self, number=0, base="small/model", **fields):
        asked = {"session_id": self.session, "model_seq_id": number, "base_model": base}
        return self.post("create_model", **asked, **{"lora_config": self.lora, **fields})

    def of_model(self, path, seq_id, /, **fields):
        return self.post(path, model_id=self.model, seq_id=seq_id, **fields)

    def step(self, seq_id, rate=0.5):
        return self.of_model("optim_step", seq_id, adam_params={"learning_rate": rate})

    def forward_backward(self, seq_id, tokens=(1, 2), *, model=None, headers=None, **fields):
        body = messages.ForwardBackwardRequest(
            model_id=model or self.model,
            seq_id=seq_id,
            loss_fn=fields.pop("loss", "cross_entropy"),
            data=[_datum(tokens)],
            **fields,
        ).SerializeToString()
        return self.send(body, headers)

    def send(self, body, headers=None):
        kind = {"X-API-Key": self.key, "Content-Type": "application/x-protobuf", **(headers or {})}
        return self.http.post("/api/v1/forward_backward", content=body, headers=kind)

    def result(self, response):
        """What comes of a promise: JSON, or bytes."""
        assert response.status_code == 200, response.text
        fetched = self.post("retrieve_future", request_id=response.json()["request_id"])
        assert fetched.status_code == 200, fetched.text
        if fetched.headers["content-type"] == "application/x-protobuf":
            return fetched.content
        return fetched.json()


def _datum(tokens):
    text = {"encoded_text": {"tokens": np.asarray(tokens, "<i4").tobytes()}}
    targets = {"dense": np.asarray(tokens, "<i8").tobytes(), "dtype": messages.INT64, "shape": [len(tokens)]}
    return {"model_input": [text], "loss_fn_inputs": [{"key": "target_tokens", "value": targets}]}
