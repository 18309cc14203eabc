"""Requests that no client sends, while another program trains (`make test-tinker`)."""

import http.client
import json
import os
import random
import socket
import threading
import time

import pytest
from proxy import proxied
from tinker_server import PROGRAMS, finished, run_program, served, start_program

pytestmark = pytest.mark.tinker

REQUESTS = int(os.environ.get("QUATRAIN_FUZZ", "20000"))
THREADS = 6
KEY = "tml-fuzz"
ODD = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\0",
    "../" * 9, "tinker://a/b/c", "é" * 300, [], {}, [[]], [None], {"a": 1}, "9" * 400, [1] * 3000,
)  # fmt: skip
PATHS = (
    "", "/", "/api/v1", "/api/v1/", "/api/v1/nothing", "/api/v1/../../etc/passwd", "/training/x", "/%00",
    "/favicon.ico", "/api/v1/training_runs/%2e%2e/checkpoints", "/api/v1/samplers/x",
    "/api/v1/sessions/x/finish",
    "/api/v1/training_runs/a/checkpoints/weights/..%2f..%2fx", "/api/v1/checkpoints?limit=x&offset=-1",
)  # fmt: skip
WAITS_S = 3.0
"""Of an answer; a poll takes longer, and is then left in the middle."""


def changed_json(value, rng):
    """The value with one part of it replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        new = dict(value)
        draw = rng.random()
        if draw < 0.15:
            del new[key]
        elif draw < 0.25:
            new[rng.choice(["zzz", key + "_", ""])] = rng.choice(ODD)
        else:
            new[key] = changed_json(value[key], rng)
        return new
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], changed_json(value[place], rng), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 2, 1000])
    return rng.choice(ODD)


def changed_bytes(body, rng):
    body = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        place = rng.randrange(len(body) + 1)
        draw = rng.random()
        if draw < 0.4 and place < len(body):
            body[place] = rng.randrange(256)
        elif draw < 0.6:
            body[place:place] = rng.randbytes(rng.choice([1, 4, 64]))
        elif draw < 0.8:
            del body[place : place + rng.choice([1, 4, 64])]
        else:
            del body[place:]
    return bytes(body)


def changed(asked, rng):
    """A request near one that a program sent: (method, path, headers, body)."""
    method, path, headers, body = asked
    headers = {**headers, "X-API-Key": KEY}
    draw = rng.random()
    if draw < 0.7 and body:
        if "json" in headers.get("Content-Type", headers.get("content-type", "")):
            value = json.loads(body)
            for _ in range(rng.choice([1, 1, 2])):
                value = changed_json(value, rng)
            body = json.dumps(value).encode()
        else:
            body = changed_bytes(body, rng)
    elif draw < 0.8:
        path = (
            rng.choice(PATHS) if rng.random() < 0.5 else path + rng.choice(["/", "x", "/..", "?a=b", "%ff"])
        )
    elif draw < 0.85:
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
    elif draw < 0.93:
        name = rng.choice(["X-API-Key", "Content-Type", "Content-Encoding", "X-Idempotency-Key", "Host"])
        headers = {key: value for key, value in headers.items() if key.lower() != name.lower()}
        if rng.random() < 0.7:
            headers[name] = rng.choice(
                ["", "x", "tml-", "gzip", "zstd", "application/json", "evil.example", "a" * 5000]
            )
    elif draw < 0.96:
        body = rng.randbytes(rng.choice([0, 1, 10, 1000, 100_000]))
    else:
        body = b"[" * rng.choice([10, 100_000])
    return method, path or "/", headers, body


class Fuzzer(threading.Thread):
    """Sends its share of requests, and counts the answers by their status."""

    def __init__(self, server, requests, seed, count):
        super().__init__(daemon=True)
        self.server, self.requests, self.count = server, requests, count
        self.rng, self.statuses, self.bad = random.Random(seed), {}, []

    def run(self):
        for _ in range(self.count):
            if self.rng.random() < 0.005:
                self.raw()
                continue
            method, path, headers, body = changed(self.rng.choice(self.requests), self.rng)
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAITS_S)
            try:
                connection.request(method, path, body, headers)
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not sent at all
                status = type(error).__name__
            finally:
                connection.close()
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if isinstance(status, int) and status >= 500:
                self.bad.append((status, method, path, headers, body[:2000]))

    def raw(self):
        """Bytes that are no HTTP, or a body that never comes whole."""
        said = self.rng.choice(
            [b"\0" * 100, b"GET\r\n\r\n", b"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\n"
             b"X-API-Key: tml-fuzz\r\nContent-Length: 999999999999\r\n\r\n{", self.rng.randbytes(300)]
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=WAITS_S) as opened:
            opened.sendall(said)
        self.statuses["raw"] = self.statuses.get("raw", 0) + 1


def files_below(place):
    return {path.relative_to(place) for path in place.rglob("*") if "state" not in path.parts}


def test_a_tenant_trains_on_while_requests_are_fuzzed(tmp_path):
    """T12. Catches an error that ends the server or its thread, and requests that reach another program."""
    place = tmp_path / "server"
    place.mkdir()
    with served(place, "tinker.max_models=2000") as server:
        with proxied(server.port) as (url, requests, _):
            environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY}
            run_program(server, "every_call", tmp_path / "recorded", "forward", "checkpoints", "several",
                        "records", "stops", "prompt", "target", environment=environment)  # fmt: skip
        kept = [each for each in requests if "retrieve_future" not in each.path]
        kept += [each for each in requests if "retrieve_future" in each.path][:40]
        alone = run_program(server, "tenant", tmp_path / "alone", 3, 6)
        before, began = files_below(place), time.monotonic()
        fuzzers = [Fuzzer(server, kept, seed, REQUESTS // THREADS) for seed in range(THREADS)]
        for fuzzer in fuzzers:
            fuzzer.start()
        tenants = 0
        while tenants == 0 or any(fuzzer.is_alive() for fuzzer in fuzzers):
            tenant = tmp_path / f"tenant{tenants}"
            found = finished(start_program(server, [PROGRAMS / "tenant.py", 3, 6], tenant), tenant)
            assert found["digest"] == alone["digest"]
            assert sum(a != b for a, b in zip(found["tokens"], alone["tokens"])) <= 1
            tenants += 1
        statuses = {}
        for fuzzer in fuzzers:
            for status, count in fuzzer.statuses.items():
                statuses[status] = statuses.get(status, 0) + count
        print(f"\n{sum(statuses.values())} requests in {time.monotonic() - began:.0f} s beside {tenants} "
              f"programs: {dict(sorted(statuses.items(), key=lambda each: str(each[0])))}")  # fmt: skip
        assert not [bad for fuzzer in fuzzers for bad in fuzzer.bad]
        assert files_below(place) == before
        assert server.get("healthz") == {"status": "ok"}
