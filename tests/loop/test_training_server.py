"""`quatrain serve --train`: programs train the served model on the port that answers OpenAI's clients."""

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Queue

import httpx2 as httpx
import numpy as np
import pytest
import uvicorn

from quatrain.config.derive import PREFIX_SHARE
from quatrain.config.load import load_config
from quatrain.data.tokenizer import load_tokenizer
from quatrain.loop import training_server as training
from quatrain.loop.policy import load_policy
from quatrain.loop.serve import serve
from quatrain.loop.training_server import Memory, _tokenizer_folder, training_server
from quatrain.serve.tinker import messages
from quatrain.weights.hf import save_hf

KEY = {"X-API-Key": "tml-a"}


@pytest.fixture(scope="module")
def folder(small_arch, small_params, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "final"
    save_hf(path, small_arch, small_params)
    tokenizer.save_pretrained(path)
    return path


def config_of(path, *settings):
    return load_config(None, [f"model.path={path}", *settings], {}, trains=False).config


class Served:
    """The server in a thread of this process, and a client of it."""

    def __init__(self, monkeypatch, config):
        servers, said = Queue(), Queue()

        class Server(uvicorn.Server):
            def run(self, sockets=None):
                servers.put(self)
                super().run(sockets)

        monkeypatch.setattr(uvicorn, "Server", Server)
        options = {"host": "127.0.0.1", "port": 0, "ready": said.put, "trains": lambda *each: said.put(each)}
        self.thread = threading.Thread(target=serve, args=(config,), kwargs=options, daemon=True)
        self.thread.start()
        self.url, self.trains, self.server = (self.next_of(each) for each in (said, said, servers))
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.http = httpx.Client(base_url=self.url, headers=KEY, timeout=120)

    def next_of(self, queue):
        while queue.empty():
            assert self.thread.is_alive()
            time.sleep(0.01)
        return queue.get()

    def post(self, path, /, **fields):
        return self.http.post(f"/api/v1/{path}", json=fields).raise_for_status().json()

    def result(self, promise):
        while (found := self.http.post("/api/v1/retrieve_future", json=promise | {})).status_code == 408:
            pass
        assert found.status_code == 200, found.text
        return found.json() if "json" in found.headers["content-type"] else found.content

    def promised(self, path, /, **fields):
        return self.result({"request_id": self.post(path, **fields)["request_id"]})

    def end(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def pass_of(model, seq_id, **fields):
    tokens = np.arange(3, 9)
    text = {"encoded_text": {"tokens": tokens.astype("<i4").tobytes()}}
    targets = {"dense": (tokens + 1).astype("<i8").tobytes(), "dtype": messages.INT64, "shape": [6]}
    data = [{"model_input": [text], "loss_fn_inputs": [{"key": "target_tokens", "value": targets}]}]
    request = messages.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, loss_fn="cross_entropy", data=data, **fields
    )
    return request.SerializeToString()


def test_a_program_trains_saves_samples_and_goes_on_elsewhere(folder, tmp_path, monkeypatch):
    """Catches rooms of the server that do not fit together, and a port on which OpenAI's clients are lost."""
    served = Served(monkeypatch, config_of(folder, f"tinker.state={tmp_path / 'state'}"))
    try:
        assert served.trains == (served.url, str(folder), False)
        session = served.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": str(folder)}
        model = served.promised("create_model", **asked, lora_config={"rank": 4})["model_id"]

        def loss(seq_id, **fields):
            body = pass_of(model, seq_id, **fields)
            kind = {"Content-Type": "application/x-protobuf"}
            promise = served.http.post("/api/v1/forward_backward", content=body, headers=kind).json()
            output = messages.ForwardBackwardOutput.FromString(
                served.result({"request_id": promise["request_id"]})
            )
            return next(each.value for each in output.metrics if each.key == "loss:sum")

        losses = []
        for seq_id in (1, 3, 5):
            losses.append(loss(seq_id))
            step = {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.02}}
            assert served.promised("optim_step", **step)["metrics"]["grad_norm:mean"] > 0
        assert losses[0] > losses[1] > losses[2]
        path = served.promised("save_weights", model_id=model, seq_id=7, path="one")["path"]
        sampler = served.promised(
            "save_weights_for_sampler", model_id=model, seq_id=8, sampling_session_seq_id=0
        )["sampling_session_id"]
        sampled = served.promised(
            "asample",
            sampling_session_id=sampler,
            seq_id=0,
            num_samples=2,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
            sampling_params={"max_tokens": 4},
        )
        assert len(messages.SampleResponse.FromString(sampled).sequences) == 2
        again = served.promised("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
        first, model = loss(9, forward_only=True), again["model_id"]
        assert loss(1, forward_only=True) == first < losses[2]
        page = served.http.get(f"/training/{session}:train:0").text
        assert page.lstrip().lower().startswith("<!doctype html>")
        assert model in served.http.get("/").text

        answer = served.http.post(
            "/v1/completions",
            json={"model": str(folder), "prompt": [3, 4], "max_tokens": 2, "temperature": 0},
        )
        assert answer.json()["usage"]["completion_tokens"] <= 2
        assert served.http.get("/v1/models").json()["data"][0]["id"] == str(folder)
        assert served.http.get("/api/v1/nothing").json()["detail"]
        assert served.http.get("/api/v1/healthz", headers={"Host": "example.org"}).status_code == 400
        # With Nagle's algorithm a body waits for the client to acknowledge the head: 40 ms each.
        for protocol in served.server.server_state.connections:
            accepted = protocol.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        runs = {place.parent for place in (tmp_path / "state").rglob("metrics.jsonl")}
        assert all((run / ".lock.json").exists() for run in runs)
    finally:
        served.end()
    assert runs
    assert not any((run / ".lock.json").exists() for run in runs), "pages say that these clients train"
    with pytest.raises(FileNotFoundError):  # the model's own folder has the tokenizer
        next((tmp_path / "state" / "tokenizer").iterdir())


@pytest.mark.parametrize(
    ("path", "state", "found"),
    [
        ("builtin:tiny", "/some/state", "/some/state/tokenizer/builtin-tiny"),
        ("builtin:tiny", "/state", "/state/tokenizer/builtin-tiny"),
        ("models/SmolLM2.Q4_1.gguf", "/some/state", "/some/state/tokenizer/SmolLM2.Q4_1"),
        ("org/name", "/some/state", "/some/state/tokenizer/name"),
    ],
)
def test_a_model_without_a_folder_gets_one_for_its_tokenizer(path, state, found):
    """Catches a name from which the client cuts a part, as `:tiny`, or a name of two slashes."""
    assert _tokenizer_folder(config_of(path), Path(state)) == Path(found)


def test_a_models_own_folder_is_its_name_unless_the_client_cuts_it(folder, tmp_path, monkeypatch):
    """Catches `/tmp/model`, which the client cuts to `/tmp`, and a folder with other tokens or templates."""
    state = tmp_path / "state"
    monkeypatch.chdir(folder.parent)
    assert _tokenizer_folder(config_of("final"), state) == folder
    assert _tokenizer_folder(config_of("final", "model.tokenizer=builtin:tiny"), state) != folder
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert _tokenizer_folder(config_of("final", f"data.chat_template={template}"), state) != folder
    monkeypatch.setattr(training, "local_path", lambda path: Path("/tmp"))
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/tmp/model"))
    assert _tokenizer_folder(config_of("final"), state) == state / "tokenizer" / "final"
    with pytest.raises(ValueError, match=r"tinker\.state must have no `:`"):
        _tokenizer_folder(config_of("builtin:tiny"), Path("/a:b/state"))


def test_the_tokenizer_that_programs_load_is_the_servers(narrow_model, tmp_path, monkeypatch):
    """Catches recipes that count and read other tokens than the server's, and a setting that samplers do not
    get."""
    monkeypatch.delenv("QUATRAIN_TINKER_KEY", raising=False)
    config = config_of(
        "builtin:tiny", f"tinker.state={tmp_path / 'state'}", "tinker.aliases={a/b: builtin:tiny}"
    )
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    memory = Memory(1 << 20, 1 << 20, 1)
    with training_server(config, loaded, memory, name="mine") as api:
        assert api.name == str(tmp_path / "state" / "tokenizer" / "builtin-tiny")
        written = load_tokenizer(api.name)
        text = "What is 12 + 30?"
        assert written.encode(text) == loaded.tokenizer.encode(text)
        assert written.chat_template == loaded.tokenizer.chat_template
        assert api._names == (api.name, "builtin:tiny", "mine", "a/b")
        assert api._samplers._prefix_share == PREFIX_SHARE
        with pytest.raises(ValueError, match="another one uses it"), training_server(config, loaded, memory):
            pass
    monkeypatch.setenv("QUATRAIN_TINKER_KEY", "secret")
    with pytest.raises(ValueError, match="must begin with `tml-`"), training_server(config, loaded, memory):
        pass
    monkeypatch.delenv("QUATRAIN_TINKER_KEY")
    none_kept = config_of("builtin:tiny", f"tinker.state={tmp_path / 'none'}", "rollout.prefix_share=0")
    with training_server(none_kept, loaded, memory) as api:
        assert api._samplers._prefix_share == 0
    state = tmp_path / "file"
    state.write_text("")
    other = config_of("builtin:tiny", f"tinker.state={state}")
    with pytest.raises(ValueError, match=r"tinker\.state"), training_server(other, loaded, memory):
        pass


def test_memory_is_divided_as_the_plan_says(folder, monkeypatch):
    """Catches caches and adapters that together are more than what is free, and samplers without a cache."""
    loaded = load_policy(config_of(folder), critic=False, adapters=False, environments=False)
    asked = []

    def free(mesh, reserved):
        asked.append(reserved)
        return 1_000_000_000

    monkeypatch.setattr(training, "memory_for_cache", free)
    # 2 layers x keys and values x 4 bytes x heads of 8: bytes of a token.
    token = training.bytes_per_position(loaded.arch, "float32")
    found = Memory.of(config_of(folder, "update.max_tokens_per_device=65536"), loaded)
    assert found == Memory(1_000_000_000, 1_000_000_000 // (found.num_samplers + 1), found.num_samplers)
    assert 1_000_000_000 // (65536 * token) > 5
    assert found.num_samplers == 2
    on_gpu = replace(loaded, backend=replace(loaded.backend, kind="gpu"))
    assert Memory.of(config_of(folder), on_gpu).num_samplers == 4
    scarce = config_of(folder, f"update.max_tokens_per_device={1_000_000_000 // (4 * token)}")
    assert Memory.of(scarce, on_gpu).num_samplers == 3
    assert Memory.of(config_of(folder, "tinker.max_samplers=3"), loaded).num_samplers == 3
    assert asked[0] > asked[1] > 0
    monkeypatch.setattr(training, "memory_for_cache", lambda mesh, reserved: 0)
    with pytest.raises(ValueError, match="none left"):
        Memory.of(config_of(folder), loaded)


def test_others_train_with_a_key_only(folder, monkeypatch):
    """Catches a server on the network that takes any key."""
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", "token")
    monkeypatch.delenv("QUATRAIN_TINKER_KEY", raising=False)
    with pytest.raises(ValueError, match="QUATRAIN_TINKER_KEY is not set"):
        serve(config_of(folder), host="0.0.0.0", port=0, ready=print, trains=print)


def test_aliases_are_of_the_served_model(folder):
    """Catches programs that ask for one model and train another."""
    with pytest.raises(ValueError, match=r"tinker\.aliases must be names of the model that is served"):
        config_of(folder, f"tinker.aliases={json.dumps({'Qwen/Qwen3.5-9B': 'models/other'})}")
    same = json.dumps({"Qwen/Qwen3.5-9B": f"{folder}/"})
    assert list(config_of(folder, f"tinker.aliases={same}").tinker.aliases) == ["Qwen/Qwen3.5-9B"]
