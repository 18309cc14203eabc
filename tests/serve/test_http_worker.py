"""Inference servers as workers of a fleet: quatrain's own, and fakes of vLLM and SGLang with their faults."""

import asyncio
import base64
import itertools
import json
import math
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2 as httpx
import jax
import numpy as np
import pytest
from fleets import closing
from rollouts import fleet_rollouts, local_rollouts
from runs import small_run
from servers import served, service_of

from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import load_tokenizer
from quatrain.loop import run
from quatrain.loop.train import train
from quatrain.rollout.fleet import KEPT_VERSIONS
from quatrain.rollout.group_table import GroupFailed
from quatrain.rollout.http_worker import HttpWorker, workers
from quatrain.rollout.publish import Folder, Stream, gathered
from quatrain.rollout.supervisor import WorkersLost
from quatrain.rollout.worker import GroupSpec, WorkerLost, WorkerRefused
from quatrain.servers import pieces
from quatrain.servers.client import Refusal, ServerClient
from quatrain.servers.expert_routes import RouteRules
from quatrain.servers.kinds import Quatrain
from quatrain.servers.server import ServerRules
from quatrain.servers.vllm_extension import Reload
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.routes import routes_to_text
from quatrain.weights.hf import load_hf

TOKEN = "the-token-of-the-tests"
LENGTHS = (5, 2, 17, 9, 3)
PROMPTS = [
    Prompt(20 + i, np.arange(3, 3 + length, dtype=np.int32), f"prompt {i}", {"answer": i})
    for i, length in enumerate(LENGTHS)
]
SAMPLING = Sampling(n=3, max_new_tokens=12, temperature=0.9)
LIMIT_S = 60
"""A test that takes longer hangs."""


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", TOKEN)


@pytest.fixture
def rules(small_arch, tokenizer):
    return ServerRules(tokenizer, (0, 7), small_arch.vocab_size, 11, SAMPLING)


def fleet_of(addresses, rules, folder, arch, timeout_s=20.0, **options):
    """`folder` None: weights go over HTTP."""
    factories = workers(addresses, rules, max_concurrency=None, timeout_s=timeout_s)
    fleet = fleet_rollouts(
        factories,
        Stream(arch, {}, kept=KEPT_VERSIONS) if folder is None else Folder(folder, arch),
        sampling=rules.sampling,
        tokenizer=rules.tokenizer,
        dtype="float32",
        timeout_s=timeout_s,
        **options,
    )
    return closing(fleet, LIMIT_S)


@pytest.fixture
def own_server(computed_by, small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer, seed=99)
    with served(service, small_arch, tokenizer, token=TOKEN) as url:
        yield url, service


@pytest.mark.parametrize("way", ["folder", "stream"])
def test_tokens_and_weights_are_those_of_an_engine_in_process(
    own_server, rules, small_arch, small_params, tokenizer, tmp_path, way
):
    """Also over HTTP: a piece that is missing, or changes in another place, would sample other tokens."""
    folder = tmp_path / "weights" if way == "folder" else None
    rules = replace(rules, needs_receiver=folder is None)
    settings = RolloutConfig(n=3, max_new_tokens=12, temperature=0.9)
    engine = local_rollouts(small_arch, settings, tokenizer, stop_ids=(0, 7), seed=11, cache_bytes=1 << 26)
    with fleet_of([own_server[0]], rules, folder, small_arch) as fleet:
        for version, factor in ((5, 1.0), (6, 1.5), (7, None)):
            if factor is not None:
                params = jax.tree.map(lambda x, factor=factor: x * factor, small_params)
            else:  # little has changed
                params = {**params, "final_norm": params["final_norm"] * 0.5}
            for each in (engine, fleet):
                each.sync_weights(params, version)
            batch, expected = (each.generate(PROMPTS, step=3) for each in (fleet, engine))
            np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
            np.testing.assert_array_equal(batch.policy_version, expected.policy_version)
            np.testing.assert_allclose(batch.rollout_logprobs, expected.rollout_logprobs, atol=5e-5)
            np.testing.assert_array_equal(batch.finish_reason, expected.finish_reason)
            assert batch.completions == expected.completions
            assert batch.columns == expected.columns
    assert not (tmp_path / "weights").exists()


def test_a_vllm_gets_what_has_changed_over_http(vllm, rules, small_arch, small_params):
    """By the extension's own methods; what a worker says that is not the first of its machine is not read."""
    first, second = Reload(), Reload()
    first.local_rank, second.local_rank = 0, 1
    loaded, sent = [], []

    def call(body):
        name, given = body["method"], body.get("kwargs", {})
        if name == "put_quatrain_weights":
            sent.append(len(given["message"]))
        if name in ("begin_quatrain_weights", "put_quatrain_weights"):
            assert not vllm.paused
            return 200, {"results": [getattr(each, name)(**given) for each in (first, second)]}
        if name == "load_quatrain_weights":
            loaded.append(load_hf(given["path"])[1])
        return None

    vllm.faults["/collective_rpc"] = call
    rules = replace(rules, needs_receiver=True)
    with listening(vllm) as url, fleet_of([url], rules, None, small_arch) as fleet:
        for version, factor in ((4, 1.0), (5, 0.5)):
            params = {**small_params, "final_norm": small_params["final_norm"] * factor}
            fleet.sync_weights(params, version)
            fleet.generate(PROMPTS[:1], step=3)
            jax.tree.map(np.testing.assert_array_equal, loaded.pop(), params)
            total, sent[:] = sum(sent), []
            assert total > 100_000 if version == 4 else 0 < total < 5_000


def test_a_vllm_loads_what_it_is_sent_when_it_is_whole():
    """Catches half a model that vLLM's workers load."""
    worker = Reload()
    worker.local_rank = 0
    path = worker.begin_quatrain_weights({"a": 3}, pieces.PIECE_BYTES)["path"]
    with pytest.raises(pieces.NotWhole, match=r"lacks 1 of 1 pieces"):
        worker.load_quatrain_weights(path)
    worker._quatrain_receiver.close()


def test_a_server_that_takes_no_weights_over_http_is_refused(rules, tokenizer, small_arch):
    sglang = Fake("sglang", tokenizer, small_arch.vocab_size)
    with listening(sglang) as url, pytest.raises(WorkerRefused, match=r"SGLang loads.*weights_dir to a"):
        HttpWorker(url, replace(rules, needs_receiver=True), num_slots=None, timeout_s=10)


def test_a_piece_that_comes_out_wrong_is_sent_whole(own_server, rules, small_arch, small_params, caplog):
    """As if the server's memory were damaged: its digest shows it, before anything is loaded."""
    stream = Stream(small_arch, {}, kept=KEPT_VERSIONS)
    worker = HttpWorker(own_server[0], rules, num_slots=None, timeout_s=20)
    weights = gathered(small_params, "float32")
    begun = worker._client.run(worker._server.load(stream.publish(weights, 1), 1, 20))
    assert begun == 1
    other = {**weights, "final_norm": weights["final_norm"] * 0.5}
    pieces = stream.publish(other, 2)
    asked = Quatrain("small").begin(pieces)
    path = worker._client.run(worker._client.ask(*asked))["path"]
    with (Path(path) / "model.safetensors").open("r+b") as file:
        file.seek(-4000, 2)
        file.write(bytes(100))
    assert worker.load(pieces, 2, 20) == 2
    assert (Path(path) / "model.safetensors").read_bytes() == (pieces.path / "model.safetensors").read_bytes()
    worker.close()
    stream.close()
    assert not pieces.path.exists()


def test_a_server_without_room_for_what_it_is_sent_says_so(
    own_server, rules, small_arch, small_params, monkeypatch
):
    """Catches a full disk that is reported as a server with another model."""
    stream = Stream(small_arch, {}, kept=KEPT_VERSIONS)
    weights = stream.publish(gathered(small_params, "float32"), 1)
    worker = HttpWorker(own_server[0], rules, num_slots=None, timeout_s=20)
    monkeypatch.setattr(pieces, "_roomiest", lambda num_bytes: (Path("/somewhere"), 10))
    with pytest.raises(WorkerRefused, match=r"quatrain at .*refused them: .*/somewhere has 0.0 GB") as error:
        worker.load(weights, 1, 20)
    assert "the model that is trained" not in str(error.value)
    worker.close()
    stream.close()


def test_a_sender_that_another_took_over_is_no_wrong_model(own_server, rules, small_arch, small_params):
    """Catches a run that ends because a worker that was given up goes on sending to its server: pieces of an
    earlier sender, and files that another one replaces, cost the worker alone."""
    stream = Stream(small_arch, {}, kept=KEPT_VERSIONS)
    first = stream.publish(gathered(small_params, "float32"), 1)
    worker, other = (HttpWorker(own_server[0], rules, num_slots=None, timeout_s=20) for _ in range(2))
    plain = worker._server._kind.put

    def begin(files):  # called in the loop of the clients, which cannot ask meanwhile
        headers = {"Authorization": f"Bearer {TOKEN}"}
        body = {"files": files, "piece_bytes": pieces.PIECE_BYTES}
        httpx.post(f"{own_server[0]}/weights/begin", json=body, headers=headers).raise_for_status()

    def late(message):  # the other begins, and has sent nothing yet
        begin(first.files)
        return plain(message)

    worker._server._kind.put = late
    with pytest.raises(WorkerLost, match=r"status 503, .*another sender has begun"):
        worker.load(first, 1, 20)
    worker._server._kind.put = plain
    assert other.load(first, 1, 20) == 1
    loading = worker._server._kind.loading

    def later(path, version, timeout_s):
        begin({"config.json": 3})
        return loading(path, version, timeout_s)

    worker._server._kind.loading = later
    with pytest.raises(WorkerLost, match=r"status 409, .*lacks all pieces"):
        worker.load(first, 1, 20)
    for each in (worker, other, stream):
        each.close()


def test_a_fleet_of_servers_survives_the_end_of_one(
    own_server, rules, small_arch, small_params, tokenizer, tmp_path
):
    other = service_of(small_arch, small_params, tokenizer)
    with (
        served(other, small_arch, tokenizer, token=TOKEN) as second,
        fleet_of([own_server[0], second], rules, tmp_path, small_arch) as fleet,
    ):
        fleet.sync_weights(small_params, 1)
        expected = fleet.generate(PROMPTS, step=3)
        other.close()  # it answers 503 from now on
        batch = fleet.generate(PROMPTS, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)


def test_a_server_without_a_token_lets_nobody_change_its_weights(
    small_arch, small_params, tokenizer, rules, monkeypatch
):
    service = service_of(small_arch, small_params, tokenizer)
    with (
        served(service, small_arch, tokenizer) as url,
        pytest.raises(WorkerRefused, match=r"quatrain at http.*change its weights.*QUATRAIN_SERVE_TOKEN"),
    ):
        HttpWorker(url, rules, num_slots=None, timeout_s=20)


class Fake:
    """A server that answers as `kind` does; `faults`: functions by path of (body) -> (status, JSON).

    Its tokens are numbers from the seed; its log-probabilities those of an even distribution.
    """

    def __init__(self, kind, tokenizer, vocab_size):
        self.kind, self.tokenizer, self.vocab_size = kind, tokenizer, vocab_size
        self.faults, self.asked, self.label, self.paused = {}, [], "default", False
        self.logprob = lambda temperature: -math.log(vocab_size) if temperature > 0.1 else 0.0
        self.routes = lambda ids: None  # [tokens, layers, k] int32 of an input of `ids`
        self.versions = None  # a label for each of `count` tokens, if it labels them
        self.kept = lambda tokens: None  # the words that each was drawn from

    def answer(self, method, path, body):
        self.asked.append((path, body))
        for prefix, fault in list(self.faults.items()):
            if path.startswith(prefix):
                result = fault(body)
                if result is not None:
                    return result
        return getattr(self, f"{self.kind}_answer")(path.partition("?")[0], body)

    def sampled(self, seed, sampling):
        count = 1 + seed % sampling["max"]
        tokens = [8 + (seed + i) % 20 for i in range(count)]
        return tokens, [self.logprob(sampling["temperature"])] * count

    def vllm_answer(self, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "fake", "owned_by": "vllm"}]}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return 200, {"status": path}
        if path == "/collective_rpc":
            if body["method"] == "quatrain_extension":
                return 200, {"results": ["Reload"]}
            assert self.paused
            assert body["method"] == "load_quatrain_weights"
            self.loaded = body["kwargs"]["path"]
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/reset_encoder_cache":
            return 200, ""
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True}
        if path == "/v1/completions":
            prompt = body["prompt"]
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            kind = {"max": body["max_tokens"], "temperature": body["temperature"]}
            tokens, logprobs = self.sampled(body["seed"], kind)
            choice = {
                "text": self.tokenizer.decode(tokens),
                "finish_reason": "length",
                "token_ids": tokens,
                "logprobs": {"token_logprobs": logprobs},
                "prompt_token_ids": ids,
            }
            if self.versions is not None:
                choice["weight_versions"] = self.versions(len(tokens))
            if (routes := self.routes([*ids, *tokens][:-1])) is not None:
                choice["routed_experts"] = routes if isinstance(routes, str) else routes_to_text(routes)
            return 200, {"choices": [choice]}
        if path == "/inference/v1/generate":
            asked = body["sampling_params"]
            tokens, logprobs = self.sampled(asked["seed"], {**asked, "max": asked["max_tokens"]})
            content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, logprobs)]
            choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": content}}
            choice["sampling_mask"] = self.kept(tokens)
            return 200, {"choices": [choice], "prompt_token_ids": body["token_ids"]}
        return 404, {"error": {"message": "not found"}}

    def sglang_answer(self, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "fake", "owned_by": "sglang"}]}
        if path == "/get_model_info":
            return 200, {"model_path": "fake", "weight_version": self.label}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return 200, {"status": "ok"}
        if path == "/update_weights_from_disk":
            assert self.paused
            self.loaded, self.label = body["model_path"], body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        if path == "/generate":
            parameters = body["sampling_params"]
            ids = self.tokenizer.encode(body["text"]) if "text" in body else body["input_ids"]
            kind = {"max": parameters["max_new_tokens"], "temperature": parameters["temperature"]}
            tokens, logprobs = self.sampled(parameters["sampling_seed"], kind)
            meta = {
                "id": "1",
                "finish_reason": {"type": "length", "length": len(tokens)},
                "prompt_tokens": len(ids),
                "weight_version": self.label,
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens)],
            }
            if body.get("return_sampling_mask"):
                meta["output_token_sampling_mask"] = self.kept(tokens)
            if self.versions is not None:
                labels, start, meta["weight_versions"] = self.versions(len(tokens)), 0, []
                for label, same in itertools.groupby(labels):
                    span = {"version": str(label), "start": start, "end": start + len(list(same))}
                    meta["weight_versions"].append(span)
                    start = span["end"]
            if body.get("return_routed_experts"):
                routes = self.routes([*ids, *tokens][:-1])
                is_array = isinstance(routes, np.ndarray)
                meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode() if is_array else routes
            return 200, {"text": self.tokenizer.decode(tokens), "output_ids": tokens, "meta_info": meta}
        return 404, {"detail": "Not Found"}


@contextmanager
def listening(fake):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            answer = fake.answer(self.command, self.path, json.loads(body) if body else None)
            if answer == "reset":
                self.close_connection = True
                return
            status, value = answer
            content = json.dumps(value).encode() if value != "" else b""
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = respond

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of connections; one too many would be reset
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(params=["vllm", "sglang"])
def fake(request, tokenizer, small_arch):
    return Fake(request.param, tokenizer, small_arch.vocab_size)


@pytest.fixture
def vllm(tokenizer, small_arch):
    return Fake("vllm", tokenizer, small_arch.vocab_size)


def test_ids_seeds_weights_and_labels(fake, rules, small_arch, small_params, tmp_path):
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        batch = fleet.generate(PROMPTS, step=3)
        again = fleet.generate(PROMPTS, step=3)
        other = fleet.generate(PROMPTS, step=4)
        assert fake.loaded == str(tmp_path / "v000004")
        assert fake.label == "4"
        assert not fake.paused
    assert len(batch) == 15
    assert set(batch.policy_version[batch.completion_mask].tolist()) == {4}
    np.testing.assert_array_equal(batch.input_ids, again.input_ids)
    assert batch.input_ids.shape != other.input_ids.shape or (batch.input_ids != other.input_ids).any()
    seeds = [
        (body.get("sampling_params") or body).get("sampling_seed", body.get("seed"))
        for path, body in fake.asked
        if path in ("/generate", "/v1/completions")
    ]
    assert len(set(seeds[-15:])) == 15
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for path, body in fake.asked:
        if path in ("/generate", "/v1/completions"):
            assert neutral.items() <= (body.get("sampling_params") or body).items()
    if fake.kind == "vllm":
        salts = [body["cache_salt"] for path, body in fake.asked if path == "/v1/completions"]
        assert set(salts[-45:]) == {"quatrain 4"}


def test_tokens_have_the_versions_that_their_server_labels_them_with(fake, rules):
    """Else tokens of newer weights would be trained on as those of the older version of the server."""
    fake.versions = lambda count: ["default"] * count
    with listening(fake) as url:
        worker = HttpWorker(url, replace(rules, needs_versions=True), num_slots=None, timeout_s=20)
        assert worker.labels_versions
        fake.label, fake.versions = "4", lambda count: [4] * (count // 2) + [5] * (count - count // 2)
        worker.submit([GroupSpec(0, PROMPTS[0], 3, SAMPLING)], 4)
        [group] = finished_of(worker, 1)
        for _, completion in group.samples:
            assert completion.versions == fake.versions(len(completion.tokens))
        fake.versions = lambda count: ["default"] * count  # of no run, which cannot be trained on
        worker.submit([GroupSpec(1, PROMPTS[0], 3, SAMPLING)], 4)
        [group] = finished_of(worker, 1)
        assert "must return the version of each token's weights, a number from 0" in group.error
        worker.close()


def test_a_server_that_labels_no_versions_is_refused_where_weights_change_in_flight(fake, rules):
    """By its own answer: it would be found out after the first exchange of weights, if at all."""
    with (
        listening(fake) as url,
        pytest.raises(WorkerRefused, match=rf"{url}: it must say which version .* for rollout\.in_flight"),
    ):
        HttpWorker(url, replace(rules, needs_versions=True), num_slots=None, timeout_s=20)


def test_requests_of_a_session_name_it():
    """A proxy that spreads requests over servers could not keep a session on one of them without its name."""
    seen = []

    def answer(request):
        seen.append(request.headers.get("x-session-id"))
        return httpx.Response(200, json={})

    client = ServerClient("http://server", timeout_s=5)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=client.address)
    client.run(client.ask("/a", {}, session="episode 7"))
    client.run(client.ask("/a", {}))
    client.close()
    assert seen == ["episode 7", None]


def once(answer):
    """The fault of the first request alone."""
    left = [answer]
    return lambda body: left.pop() if left else None


def after_the_probe(fake, fault):
    """A fault of requests for groups: the probe has no group's prompt."""
    ids = [prompt.input_ids.tolist() for prompt in PROMPTS]

    def on_groups(body):
        prompt = body.get("prompt", body.get("input_ids"))
        return fault(body) if prompt in ids else None

    fake.faults["/v1/completions"] = fake.faults["/generate"] = on_groups


@pytest.mark.parametrize(
    "answer", [(500, {"error": "out of memory"}), (429, "busy"), "reset"], ids=["500", "429", "reset"]
)
def test_a_failed_request_costs_time_and_no_group(fake, rules, small_arch, small_params, tmp_path, answer):
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        after_the_probe(fake, once(answer))
        batch = fleet.generate(PROMPTS, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert batch.metrics["fleet/restarts"].result() == 1


def test_a_restarted_server_has_other_weights_and_is_loaded_again(
    fake, rules, small_arch, small_params, tmp_path
):
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        fake.label = "default"
        batch = fleet.generate(PROMPTS, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert fake.label == "4"
        fake.label = "3"  # another run has loaded its weights
        batch = fleet.generate(PROMPTS, step=3)
        assert fake.label == "4"
        assert batch.metrics["fleet/stale_groups"].result() >= 1


def answered(kind, tokens=(8, 9), logprobs=(-1.0, -1.0), **fields):
    """The answer of a server of the kind; `fields` replace those of the choice, or of SGLang's meta_info."""
    if kind == "vllm":
        named = {"token_ids": list(tokens), "logprobs": {"token_logprobs": list(logprobs)}}
        return 200, {"choices": [{"text": "a b", "finish_reason": "length", **named, **fields}]}
    pairs = [[value, token, None] for value, token in zip(logprobs, tokens)]
    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": 3, "output_token_logprobs": pairs}
    return 200, {"meta_info": {**meta, "weight_version": "4", **fields}}


BAD_LOGPROBS = [math.nan, math.inf, -math.inf, 0.5, -1e300, -(10**400), None, True, "-1", [-1.0]]
QUICK_BAD_LOGPROBS = BAD_LOGPROBS[:1] + BAD_LOGPROBS[3:5] + BAD_LOGPROBS[6:7] + BAD_LOGPROBS[8:9]


@pytest.mark.parametrize(
    "logprob",
    [
        pytest.param(value, marks=[pytest.mark.slow] * (value not in QUICK_BAD_LOGPROBS), id=str(value)[:10])
        for value in BAD_LOGPROBS
    ],
)
def test_one_bad_log_probability_costs_its_group_which_is_sampled_again(
    fake, rules, small_arch, small_params, tmp_path, logprob, caplog
):
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        after_the_probe(fake, once(answered(fake.kind, logprobs=[logprob, -1.0])))
        batch = fleet.generate(PROMPTS, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert batch.metrics["fleet/retried_groups"].result() == 1
        assert batch.metrics["fleet/restarts"].result() == 0
    assert f"at {url}: it must return a log-probability for each token" in caplog.text
    assert "it is given out again" in caplog.text


MALFORMED = {
    "vllm": [
        answered("vllm", logprobs=[-1.0]),
        answered("vllm", logprobs=[-1.0] * 3),
        answered("vllm", token_ids=None),
        answered("vllm", logprobs=[-1.0, -1.0], tokens=[8, 10**7]),
        answered("vllm", tokens=[8, True]),
        answered("vllm", tokens=[], logprobs=[]),
        answered("vllm", weight_versions=[4]),
        answered("vllm", weight_versions=[4, "4"]),
        answered("vllm", weight_versions=[4, -1]),
        answered("vllm", weight_versions="4, 4"),
        (200, {"choices": ["text"]}),
        (200, {"choices": []}),
        (200, [1]),
        (200, ""),
    ],
    "sglang": [
        answered("sglang", output_token_logprobs=None),
        answered("sglang", output_token_logprobs=[[-1.0]]),
        answered("sglang", output_token_logprobs=[-1.0, 8]),
        answered("sglang", finish_reason=None),
        answered("sglang", tokens=[8, None]),
        (200, {"meta_info": "none"}),
        (200, [1]),
    ],
}


@pytest.mark.parametrize(
    ("kind", "answer"), [(kind, answer) for kind, answers in MALFORMED.items() for answer in answers]
)
def test_a_malformed_answer_costs_its_group(
    kind, answer, tokenizer, rules, small_arch, small_params, tmp_path
):
    fake = Fake(kind, tokenizer, small_arch.vocab_size)
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        after_the_probe(fake, once(answer))
        batch = fleet.generate(PROMPTS, step=3)
        assert len(batch) == 15
        assert batch.metrics["fleet/retried_groups"].result() == 1
        assert batch.metrics["fleet/restarts"].result() == 0


def test_what_one_server_answers_badly_another_is_given(fake, rules, small_arch, small_params, tmp_path):
    other = Fake(fake.kind, fake.tokenizer, fake.vocab_size)
    with (
        listening(fake) as url,
        listening(other) as second,
        fleet_of([url, second], rules, tmp_path, small_arch) as fleet,
    ):
        fleet.sampler.wait_for_start()
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS * 3, step=3)
        after_the_probe(fake, lambda body: answered(fake.kind, logprobs=[math.nan, -1.0]))
        batch = fleet.generate(PROMPTS * 3, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert batch.metrics["fleet/restarts"].result() == 0
        retried = batch.metrics["fleet/retried_groups"].result()
        assert 0 < retried <= 15  # each once at most: the other server gets it then


def test_answers_that_stay_unusable_end_the_run_by_name(vllm, rules, small_arch, small_params, tmp_path):
    other = Fake("vllm", vllm.tokenizer, vllm.vocab_size)
    with (
        listening(vllm) as url,
        listening(other) as second,
        fleet_of([url, second], rules, tmp_path, small_arch) as fleet,
    ):
        fleet.sync_weights(small_params, 4)
        for server in (vllm, other):
            after_the_probe(server, without("logprobs"))
        message = r"failed 4 times, last on worker \d: vLLM at http.*: it must return a log-prob.*mend"
        with pytest.raises(GroupFailed, match=message) as error:
            fleet.generate(PROMPTS, step=3)
        assert "\n" not in str(error.value)


def test_after_a_refusal_the_server_stops_decoding_the_others_of_the_group(
    own_server, rules, small_params, small_arch, tmp_path, monkeypatch
):
    url, service = own_server
    spec = GroupSpec(0, PROMPTS[0], 3, replace(SAMPLING, n=4))
    worker = HttpWorker(url, replace(rules, needs_versions=True), num_slots=None, timeout_s=20)
    worker.load(Folder(tmp_path, small_arch).publish(gathered(small_params, "float32"), 4), 4, 20)
    sample = worker._sample

    async def refused(spec, number, version):
        if number:
            return await sample(spec, number, version)
        while service.num_running < 3:
            await asyncio.sleep(0.01)
        raise Refusal(400, "too long")

    monkeypatch.setattr(worker, "_sample", refused)
    service.pause()  # none of them can end by itself
    worker.submit([spec], 4)
    [group] = worker.take(20)
    assert group.error == f"quatrain at {url} refused it: status 400, too long"
    end = time.monotonic() + 20
    while service.num_running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert service.totals.sequences_cancelled == 3
    service.resume()
    monkeypatch.undo()
    worker.submit([replace(spec, number=1)], 4)
    assert len(finished_of(worker, 1)[0].samples) == 4
    worker.close()


def finished_of(worker, count):
    found = []
    while len(found) < count:
        found += worker.take(20)
    return found


def test_a_refused_group_ends_the_run_by_name(fake, rules, small_arch, small_params, tmp_path):
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        after_the_probe(fake, lambda body: (400, {"error": {"message": "prompt too long"}}))
        with pytest.raises(GroupFailed, match="prompt too long"):
            fleet.generate(PROMPTS[:1], step=3)


def failing_load(body):
    return None if body.get("method") == "quatrain_extension" else (500, {"error": "no such file"})


def test_a_server_that_fails_to_load_is_not_left_paused(fake, rules, small_arch, small_params, tmp_path):
    load = "/collective_rpc" if fake.kind == "vllm" else "/update_weights_from_disk"
    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch, timeout_s=2.0) as fleet:
        fake.faults[load] = failing_load
        fleet.sync_weights(small_params, 4)
        with pytest.raises(WorkersLost, match=r"status 500.*no such file"):
            fleet.generate(PROMPTS, step=3)
        wait_until(lambda: not fake.paused)  # the next worker may be in a load


def test_a_server_that_refuses_the_weights_ends_the_run_by_name(
    fake, rules, small_arch, small_params, tmp_path
):
    """As one that has another model, or another file system; unless a newer version is there."""
    load = "/collective_rpc" if fake.kind == "vllm" else "/update_weights_from_disk"

    def refuses(body):
        if body.get("method") == "quatrain_extension":
            return None
        return 400, {"error": {"message": "another architecture"}}

    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fake.faults[load] = refuses
        fleet.sync_weights(small_params, 4)
        message = f"at {url}: it must load .*v000004: status 400, .*another architecture.*weights_dir"
        with pytest.raises(WorkerRefused, match=message):
            fleet.generate(PROMPTS, step=3)
        worker = HttpWorker(url, rules, num_slots=None, timeout_s=10)
        with pytest.raises(WorkerLost, match="did not load"):
            worker.load(str(tmp_path / "v000001"), 1, 10)
        worker.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_asks_for_another_token_says_so(vllm, rules, status):
    vllm.faults["/v1/models"] = lambda body: (status, {"error": {"message": "no such key"}})
    with listening(vllm) as url, pytest.raises(WorkerRefused, match=rf"{url}: it asks for a token.*_TOKEN"):
        HttpWorker(url, rules, num_slots=None, timeout_s=10)


def test_a_load_that_never_returns_ends_at_its_deadline(vllm, rules, small_arch, small_params, tmp_path):
    asleep = threading.Event()
    sleep_once = once_then(lambda: asleep.wait(20))
    vllm.faults["/collective_rpc"] = lambda body: sleep_once(body) if "kwargs" in body else None
    with listening(vllm) as url, fleet_of([url], rules, tmp_path, small_arch, timeout_s=1.5) as fleet:
        fleet.sync_weights(small_params, 4)
        began = time.monotonic()
        fleet.generate(PROMPTS, step=3)
        assert time.monotonic() - began < 10
        assert not vllm.paused
        asleep.set()


def test_a_server_whose_worker_is_closed_in_a_load_goes_on(fake, rules):
    path = "/collective_rpc" if fake.kind == "vllm" else "/update_weights_from_disk"
    loading, end = threading.Event(), threading.Event()

    def load(body):
        if body.get("method") != "quatrain_extension":
            loading.set()
            assert end.wait(20)
            return 200, {"success": True}

    with listening(fake) as url:
        worker = HttpWorker(url, rules, num_slots=None, timeout_s=20)
        fake.faults[path] = load
        thread = threading.Thread(target=load_quietly, args=(worker,), daemon=True)
        thread.start()
        assert loading.wait(20)
        assert fake.paused
        worker.close()
        assert not fake.paused  # at once: the thread of the load may end with the process
        fake.paused = True  # as if the server had taken both requests in the other order
        end.set()
        thread.join(20)
        assert not thread.is_alive()
        assert not fake.paused


def test_the_client_of_a_closed_worker_is_closed_after_the_last_answer(fake, rules):
    """What is opened in a client that is closed meanwhile would stay open. Groups are not waited for."""
    asked, answer = queue.Queue(), threading.Event()

    def wait(body):
        asked.put(body)
        assert answer.wait(20)

    with listening(fake) as url:
        worker = HttpWorker(url, rules, num_slots=None, timeout_s=20)
        http = worker._client._http
        fake.faults["/weight_info"] = fake.faults["/get_model_info"] = wait
        worker.submit([GroupSpec(0, PROMPTS[0], 3, SAMPLING)], 4)
        loading = threading.Thread(target=load_quietly, args=(worker,), daemon=True)
        loading.start()
        for _ in range(2):
            asked.get(timeout=20)
        worker.close()
        wait_until(lambda: list(worker._client._works.values()) == [False])  # the load alone is waited for
        assert not http.is_closed
        answer.set()
        wait_until(lambda: http.is_closed)
        loading.join(20)
        assert worker.take(0) == []


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


def load_quietly(worker):
    with suppress(WorkerLost):
        worker.load("weights", 4, 20)


def once_then(action):
    left = [action]

    def fault(body):
        if left:
            left.pop()()

    return fault


def without(*names):
    """A choice without these fields."""

    def fault(body):
        fields = {"token_ids": [8, 9], "logprobs": {"token_logprobs": [-1.0, -1.0]}}
        choice = {"text": "a b", "finish_reason": "length", **fields}
        return 200, {"choices": [{name: value for name, value in choice.items() if name not in names}]}

    return fault


def replaced(**fields):
    choice = {"text": "a b", "finish_reason": "length", "token_ids": [8, 9]}
    choice["logprobs"] = {"token_logprobs": [-1.0, -1.0]}
    return lambda body: (200, {"choices": [{**choice, **fields}]})


BAD_SERVERS = {
    "text only": (
        {"/v1/completions": without("token_ids")},
        "1 to 8 token ids, .*text does not determine.*got null",
    ),
    "no log-probabilities": (
        {"/v1/completions": without("logprobs")},
        "a log-probability for each token.*2 tokens and null",
    ),
    "too few": (
        {"/v1/completions": replaced(logprobs={"token_logprobs": [-1.0]})},
        "a log-probability for each token",
    ),
    "above 0": (
        {"/v1/completions": replaced(logprobs={"token_logprobs": [-1.0, 0.5]})},
        "each a number of at most 0",
    ),
    "null": (
        {"/v1/completions": replaced(logprobs={"token_logprobs": [None, -1.0]})},
        "each a number of at most 0",
    ),
    "ids out of range": ({"/v1/completions": replaced(token_ids=[8, 10**7])}, "below the vocabulary's size"),
    "another vocabulary": (
        {"/v1/completions": replaced(prompt_token_ids=[1, 2, 3])},
        "its tokenizer must be that of training",
    ),
    "no answer": ({"/v1/completions": lambda body: (200, {"hello": 1})}, "is no completion"),
    "no weight verbs": (
        {"/weight_info": lambda body: (404, {"detail": "Not Found"})},
        "VLLM_SERVER_DEV_MODE=1",
    ),
    "no worker extension": (
        {"/collective_rpc": lambda body: (500, {"error": "no such method"})},
        "--worker-extension-cls quatrain.servers.vllm_extension.Reload",
    ),
    "refuses": (
        {"/v1/completions": lambda body: (400, {"error": {"message": "no such field"}})},
        "refused a question.*no such field",
    ),
    "another server": (
        {"/v1/models": lambda body: (200, {"data": [{"id": "m", "owned_by": "llamacpp"}]})},
        "no server of `quatrain serve`, vLLM or SGLang.*owned by 'llamacpp'",
    ),
    "no model": (
        {"/v1/models": lambda body: (200, {"data": []})},
        "/v1/models must name its model: it answered .*; give the address of the server itself, up to /v1",
    ),
}


@pytest.mark.parametrize("name", BAD_SERVERS)
def test_a_server_that_cannot_serve_is_refused_at_the_start(vllm, rules, name):
    faults, message = BAD_SERVERS[name]
    vllm.faults |= faults
    with listening(vllm) as url, pytest.raises(WorkerRefused, match=message) as error:
        HttpWorker(url, rules, num_slots=None, timeout_s=10)
    assert url in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("text only", "no log-probabilities", "another vocabulary", "no weight verbs")
        ),
    ],
)
def test_a_run_with_a_server_that_cannot_serve_ends_before_its_warm_start(name, tmp_path, monkeypatch):
    """With an error of the kind that configurations have, and nothing left behind."""
    began = []
    monkeypatch.setattr(run, "warm_start", lambda *args, **options: began.append(args))
    tokenizer = load_tokenizer("builtin:tiny")
    good, bad = (Fake("vllm", tokenizer, len(tokenizer)) for _ in range(2))
    faults, message = BAD_SERVERS.get(name, ({}, "GET /v1/models failed: ConnectError"))
    bad.faults |= faults
    with listening(good) as first, listening(bad) as second:
        second = "http://127.0.0.1:9" if name == "nobody" else second
        servers = (f"rollout.servers=[{first},{second}]", "rollout.timeout_s=2")
        with pytest.raises(ValueError, match=message) as error:
            train(small_run(tmp_path, "r", *servers))
    assert second in str(error.value)
    assert first not in str(error.value)
    assert "\n" not in str(error.value)
    assert not began
    assert not list(tmp_path.iterdir())


def test_unprocessed_log_probabilities_are_refused(vllm, rules):
    vllm.logprob = lambda temperature: -2.0
    with (
        listening(vllm) as url,
        pytest.raises(WorkerRefused, match=r"after temperature.*--logprobs-mode processed_logprobs"),
    ):
        HttpWorker(url, rules, num_slots=None, timeout_s=10)


def test_nobody_answers(rules, small_arch, small_params, tmp_path):
    with fleet_of(["http://127.0.0.1:9"], rules, tmp_path, small_arch, timeout_s=1.5) as fleet:
        fleet.sync_weights(small_params, 4)
        with pytest.raises(WorkersLost, match=r"GET /v1/models failed: ConnectError"):
            fleet.generate(PROMPTS, step=3)


def test_a_host_that_has_no_address_is_refused_at_once(rules, monkeypatch):
    """To try again would not help; a name server that fails for a while is another matter."""
    address = "http://no-such-host.invalid:9"
    for number, error in ((socket.EAI_NONAME, WorkerRefused), (socket.EAI_AGAIN, WorkerLost)):

        def fails(*args, number=number, **options):
            raise socket.gaierror(number, "not known")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        with pytest.raises(error, match="not known"):
            HttpWorker(address, rules, num_slots=None, timeout_s=5.0)


def drop_the_connection(body):
    return "reset"


def test_a_connection_that_drops_does_not_mean_a_missing_extension(vllm, rules):
    vllm.faults["/collective_rpc"] = drop_the_connection
    with listening(vllm) as url, pytest.raises(WorkerLost, match=r"collective_rpc failed"):
        HttpWorker(url, rules, num_slots=None, timeout_s=10)
    vllm.faults["/collective_rpc"] = lambda body: (503, "starting")
    with listening(vllm) as url, pytest.raises(WorkerLost, match=r"status 503.*starting"):
        HttpWorker(url, rules, num_slots=None, timeout_s=10)


RESTARTS = {
    "another server": ({"/v1/models": (200, {"data": [{"id": "m"}]})}, "no server of"),
    "no models": ({"/v1/models": (404, "no route")}, "no route.*up to /v1"),
    "no extension": ({"/collective_rpc": (500, "starting")}, "no worker extension"),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_server_that_served_the_run_is_lost_and_not_refused(vllm, rules, name):
    faults, message = RESTARTS[name]
    with listening(vllm) as url:
        [connect] = workers([url], rules, max_concurrency=None, timeout_s=10)
        connect().close()
        vllm.faults |= {path: lambda body, answer=answer: answer for path, answer in faults.items()}
        with pytest.raises(WorkerLost, match=message):
            connect()
        [other] = workers([url], rules, max_concurrency=None, timeout_s=10)
        with pytest.raises(WorkerRefused, match=message):
            other()
        vllm.faults.clear()
        connect().close()


def test_a_proxy_that_finds_no_server_for_a_while_costs_no_group(
    vllm, rules, small_arch, small_params, tmp_path
):
    with listening(vllm) as url, fleet_of([url], rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        vllm.faults["/v1/models"] = once((404, "no server"))
        after_the_probe(vllm, once((502, "")))
        batch = fleet.generate(PROMPTS, step=3)
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert batch.metrics["fleet/restarts"].result() == 2


def test_requests_may_wait_in_the_servers_queue(fake, rules, small_arch, small_params, tmp_path):
    one_at_a_time = threading.Lock()

    def queued(body):
        with one_at_a_time:
            time.sleep(0.2)

    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch, timeout_s=1.0) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        after_the_probe(fake, queued)
        began = time.monotonic()
        batch = fleet.generate(PROMPTS, step=3)
        assert time.monotonic() - began > 2
        assert batch.metrics["fleet/restarts"].result() == 0
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)


def test_a_server_that_stops_answering_is_lost(fake, rules, small_arch, small_params, tmp_path, caplog):
    stopped, left = threading.Event(), [True] * 4

    def stops(body):
        if left:
            left.pop()
        else:
            stopped.wait(20)

    with listening(fake) as url, fleet_of([url], rules, tmp_path, small_arch, timeout_s=1.0) as fleet:
        fleet.sync_weights(small_params, 4)
        expected = fleet.generate(PROMPTS, step=3)
        after_the_probe(fake, stops)
        other = threading.Timer(1.5, lambda: left.extend([True] * 100))
        other.start()
        batch = fleet.generate(PROMPTS, step=3)
        stopped.set()
        other.cancel()
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        assert batch.metrics["fleet/restarts"].result() >= 1
        assert "it has answered no request for 1 s (rollout.timeout_s)" in caplog.text


ROUTES = RouteRules((1, 3), 4, 2, 40, np.dtype(np.uint8))
"""Of a model with experts in two of its four layers."""


def _routes(ids, layers=4):
    """[tokens, layers, 2] int32, which name token and layer."""
    experts = np.array(ids)[:, None, None] % 30 + np.arange(layers)[:, None] + np.array([0, 5])
    return experts.astype(np.int32)


@pytest.fixture
def routed_rules(rules):
    return replace(rules, routes=ROUTES)


@pytest.mark.parametrize("layers", [2, 4], ids=["layers with experts", "all layers"])
def test_routes_of_servers_stand_beside_their_tokens(
    fake, routed_rules, small_arch, small_params, tmp_path, caplog, layers
):
    """Those of all tokens but the last, as vLLM and SGLang return them: of all layers of the model."""
    fake.routes = _routes if layers == 4 else lambda ids: np.ascontiguousarray(_routes(ids)[:, [1, 3]])
    with listening(fake) as url, fleet_of([url], routed_rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        batch = fleet.generate(PROMPTS, step=3)
    assert batch.routes.dtype == np.uint8
    for ids, length, routes in zip(batch.input_ids, batch.lengths, batch.routes):
        np.testing.assert_array_equal(routes[: length - 1], _routes(ids[: length - 1])[:, [1, 3]])
        assert (routes[length - 1 :] == 255).all()
    assert not caplog.records


def _kept(tokens):
    return [[token, (token + 1) % 50, *range(60, 60 + token % 3)] for token in tokens]


@pytest.fixture
def filtered_rules(rules):
    return replace(rules, sampling=replace(SAMPLING, top_p=0.9, top_k=20, replays=True))


def test_kept_words_of_servers_stand_beside_their_tokens(
    fake, filtered_rules, small_arch, small_params, tmp_path
):
    """Lists of ids, as vLLM and SGLang return them; the sets of prompts' tokens are none."""
    fake.kept = _kept
    with listening(fake) as url, fleet_of([url], filtered_rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        batch = fleet.generate(PROMPTS, step=3)
    np.testing.assert_array_equal(batch.kept.has_set, batch.completion_mask)
    for row, (ids, sampled) in enumerate(zip(batch.input_ids, batch.completion_mask, strict=True)):
        sets = [each.tolist() for each in batch.kept.row(row).column[sampled]]
        assert sets == _kept(ids[sampled].tolist())


def test_a_vllm_without_its_interface_of_ids_is_refused_with_the_remedy(vllm, filtered_rules):
    """Its completions have no words; and a request without a bound on them would be refused by others."""
    vllm.faults["/inference"] = lambda body: (404, {"error": {"message": "not found"}})
    with listening(vllm) as url, pytest.raises(WorkerRefused, match=r"must return the words.*scale-out"):
        HttpWorker(url, filtered_rules, num_slots=None, timeout_s=20)
    asked = [body for path, body in vllm.asked if path == "/v1/completions"]
    assert {body["top_k"] for body in asked} == {20}


@pytest.mark.parametrize(
    ("kept", "got"),
    [
        (lambda tokens: None, "it returns none"),
        (lambda tokens: _kept(tokens)[1:], "different words below"),
        (lambda tokens: [[*words, words[0]] for words in _kept(tokens)], "different words below"),
        (lambda tokens: [words[1:] for words in _kept(tokens)], "with the token among them"),
        (lambda tokens: [[*words, 10**6] for words in _kept(tokens)], "different words below"),
        (lambda tokens: [[*range(21), *range(21, 60)]] * len(tokens), "return 1 to 20 different"),
        (lambda tokens: "no list", "different words below"),
    ],
    ids=["none", "a token less", "a word twice", "without the token", "no word", "too many", "no list"],
)
def test_a_server_without_kept_words_is_refused_at_its_probe(fake, filtered_rules, kept, got):
    fake.kept = kept
    with listening(fake) as url, pytest.raises(WorkerRefused, match=got):
        HttpWorker(url, filtered_rules, num_slots=None, timeout_s=20)


def test_servers_without_routes_are_used_after_one_warning(
    fake, routed_rules, small_arch, small_params, tmp_path, caplog
):
    with listening(fake) as url, fleet_of([url, url], routed_rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        batch, _ = (fleet.generate(PROMPTS, step=step) for step in (3, 4))
    assert batch.routes is None
    (warning,) = [each.getMessage() for each in caplog.records if "routes" in each.getMessage()]
    assert "returns no routes of experts, so that the update chooses them anew" in warning
    assert "1 to 5 % of tokens go through another expert in at least one of the 2 layers" in warning
    assert "start it with --enable-return-routed-experts" in warning


def test_a_server_without_routes_is_refused_where_the_auxiliary_loss_needs_them(fake, routed_rules):
    rules = replace(routed_rules, needs_routes=True)
    with (
        listening(fake) as url,
        pytest.raises(WorkerRefused, match=r"for update\.router_aux_coef; got none; st"),
    ):
        HttpWorker(url, rules, num_slots=None, timeout_s=20)
    fake.routes = _routes
    with listening(fake) as url:
        HttpWorker(url, rules, num_slots=None, timeout_s=20).close()


def test_a_run_with_the_auxiliary_loss_ends_before_it_samples_without_routes(tmp_path):
    tokenizer = load_tokenizer("builtin:tiny")
    with listening(Fake("vllm", tokenizer, len(tokenizer))) as url:
        settings = ("model.path=builtin:tiny_moe", f"rollout.servers=[{url}]", "update.router_aux_coef=0.1")
        with pytest.raises(
            ValueError, match=r"must return the experts .* for update\.router_aux_coef; got none"
        ):
            train(small_run(tmp_path, "r", *settings))


@pytest.mark.parametrize(
    ("routes", "got"),
    [
        (lambda ids: _routes(ids)[:-1], "array"),
        (lambda ids: _routes(ids, 3), "array"),
        (lambda ids: _routes(ids) + 30, r"from 0 to 39; got \d+ to \d+"),
        (lambda ids: _routes(ids) * 0, "2 different ones in a layer; got one twice"),
        (lambda ids: "no base64", "a value of type str"),
    ],
    ids=["a token less", "another number of layers", "another number of experts", "twice", "no array"],
)
def test_routes_of_another_model_or_length_are_refused(fake, routed_rules, routes, got):
    fake.routes = routes
    with (
        listening(fake) as url,
        pytest.raises(
            WorkerRefused, match=rf"experts of all tokens of a sequence but the last.*{got}.*record_routes"
        ),
    ):
        HttpWorker(url, routed_rules, num_slots=None, timeout_s=20)


def test_a_server_that_stops_returning_routes_ends_the_run(
    fake, routed_rules, small_arch, small_params, tmp_path
):
    """As one whose answers cannot be trained on, after four tries."""
    fake.routes = _routes
    with listening(fake) as url, fleet_of([url], routed_rules, tmp_path, small_arch) as fleet:
        fleet.sync_weights(small_params, 4)
        assert fleet.generate(PROMPTS, step=3).routes is not None
        fake.routes = lambda ids: None
        with pytest.raises(GroupFailed, match=r"must return the experts of all tokens .* got none"):
            fleet.generate(PROMPTS, step=3)


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
def test_what_a_server_had_kept_of_a_prompt_is_read_if_it_says_so(usage):
    """An agent's contexts would count as computed again by servers that had kept them."""
    choice = {"token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    assert Quatrain("m").read({"choices": [choice], "usage": usage}).cached == 0
    told = {"prompt_tokens_details": {"cached_tokens": 7}}
    assert Quatrain("m").read({"choices": [choice], "usage": told}).cached == 7
