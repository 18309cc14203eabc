"""`quatrain serve` as a process: a model is served until a signal, and what cannot be served is refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from queue import Queue

import httpx2 as httpx
import jax
import numpy as np
import openai
import pytest
import uvicorn
from servers import service_of
from starlette.testclient import TestClient

from quatrain.config.load import load_config
from quatrain.loop.policy import load_policy
from quatrain.loop.serve import serve, serving_engine, weights_of
from quatrain.models.lora import adapters_of, merged, merged_architecture, with_trained
from quatrain.rollout.publish import Adapted, Folder, Stream, gathered
from quatrain.servers.kinds import version_of
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import Request
from quatrain.weights.hf import save_hf

QUATRAIN = (sys.executable, "-m", "quatrain")


@pytest.fixture(scope="module")
def folder(small_arch, small_params, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "final"
    save_hf(path, small_arch, small_params)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def config(folder):
    return load_config(None, [f"model.path={folder}"], {}).config


def test_a_model_is_served_until_a_signal(folder, tmp_path):
    command = [*QUATRAIN, "serve", "--set", f"model.path={folder}", "--port", "0"]
    environ = {name: value for name, value in os.environ.items() if name != "QUATRAIN_SERVE_TOKEN"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as process:
        try:
            line = process.stdout.readline()
            url = re.search(r"is served at (http://127\.0\.0\.1:\d+/v1);", line)[1]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                [model] = client.models.list().data
                assert model.id == str(folder)
                answer = client.completions.create(
                    model=model.id, prompt="1 + 2", max_tokens=5, temperature=0
                )
                assert 1 <= answer.usage.completion_tokens <= 5
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert not list(tmp_path.iterdir())


def test_others_are_served_with_a_token_only(config, monkeypatch):
    monkeypatch.delenv("QUATRAIN_SERVE_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        with pytest.raises(ValueError, match="QUATRAIN_SERVE_TOKEN is not set"):
            serve(config, host=host, port=0, ready=print)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_requests_may_name_the_host_and_the_model_as_given(config, monkeypatch, host):
    servers, urls = Queue(), Queue()

    class Server(uvicorn.Server):
        def run(self, sockets=None):
            servers.put(self)
            super().run(sockets)

    monkeypatch.setattr(uvicorn, "Server", Server)
    options = {"host": host, "port": 0, "ready": urls.put, "name": "mine"}
    thread = threading.Thread(target=serve, args=(config,), kwargs=options, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=urls.get(timeout=120), trust_env=False) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
            assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
    finally:
        servers.get(timeout=120).should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_the_first_weights_have_the_label_of_no_run(config, monkeypatch):
    """Catches a server that was started again, or stands behind the same proxy as another, which says that it
    has version 0 of a run: it is not loaded, and samples from the weights before a warm start."""
    labels = []

    class Server:
        def __init__(self, settings):
            self._app = settings.app

        def run(self, sockets):
            with TestClient(self._app, base_url="http://localhost") as client:
                labels.append(client.get("/version").json()["weight_version"])

    monkeypatch.setattr(uvicorn, "Server", Server)
    serve(config, host="127.0.0.1", port=0, ready=print)
    assert list(map(version_of, labels)) == [-1]


def test_an_address_that_is_taken_is_refused_before_the_model_is_loaded(config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be used.*choose another port"):
            serve(config, host="127.0.0.1", port=port, ready=print)


def test_weights_of_another_architecture_are_refused(config, small_arch, small_params, tokenizer, tmp_path):
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    engine = serving_engine(config, loaded)
    assert engine._prefix_share == 0.5  # contexts of requests are kept, though none has said so
    read = weights_of(loaded.arch, config, engine)
    assert jax.tree.structure(read(config.model.path)) == jax.tree.structure(small_params)
    save_hf(tmp_path, small_arch, small_params)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"rope_theta": ', '"rope_theta": 1'))
    with pytest.raises(ValueError, match=r"new weights must be of the model that is served"):
        read(str(tmp_path))
    engine.close()


def test_adapters_are_merged_onto_the_model_that_is_served(config, folder, tmp_path):
    """To the bit as the run merges them; those of another base, or half a folder, are refused."""
    of_run = load_config(None, [f"model.path={folder}", "lora.rank=2", "lora.alpha=6"], {}).config
    trained = load_policy(of_run, critic=False, environments=False)
    params = jax.tree.map(lambda leaf: leaf + 0.01, trained.params)
    params = with_trained(trained.params, adapters_of(params), trained.arch)
    adapted = Adapted(trained.arch, str(folder), trained.frozen_fingerprints["base"])
    stream = Stream(merged_architecture(trained.arch), {}, adapted=adapted, kept=2)
    pieces = stream.publish(gathered(params, "float32"), 1)
    whole = Folder(tmp_path / "whole", merged_architecture(trained.arch))
    expected = merged(params, trained.arch, "float32")
    whole.publish(gathered(expected, "float32"), 1)
    assert pieces.num_bytes < (tmp_path / "whole/v000001/model.safetensors").stat().st_size / 2

    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    engine = serving_engine(config, loaded)
    read = weights_of(loaded.arch, config, engine)
    jax.tree.map(np.testing.assert_array_equal, read(str(pieces.path)), expected)
    base = json.loads((pieces.path / "base.json").read_text())
    (pieces.path / "base.json").write_text(json.dumps({**base, "fingerprint": "0123456789abcdef"}))
    with pytest.raises(ValueError, match="must be used with the base"):
        read(str(pieces.path))
    (pieces.path / "base.json").unlink()
    with pytest.raises(ValueError, match=r"base.json.* is none: .*write it with"):
        read(str(pieces.path))
    stream.close()
    engine.close()


def test_requests_end_with_the_service(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)
    service.close()
    with pytest.raises(RuntimeError, match="was closed"):
        service.start([Request(Prompt(0, np.ones(1, np.int32), ""), 0, Sampling(1, 1))], print).result()
