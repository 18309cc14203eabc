"""The door of the training server: who is let in, what each request is answered, in which order, to whom."""

import base64
import errno
import os
import threading
import time

import pytest
from door import BROKEN, NoClient, NoRows, Program, opened

from quatrain.serve.tinker import api, http, store
from quatrain.serve.tinker.http import REFUSED


@pytest.fixture
def server(tmp_path, small_arch, tokenizer, monkeypatch):
    with opened(tmp_path / "state", small_arch, tokenizer, monkeypatch) as found:
        yield found


@pytest.fixture
def with_settings(tmp_path, small_arch, tokenizer, monkeypatch):
    """with_settings(**settings) -> (server, client), while the test runs."""
    contexts = []

    def begin(**settings):
        contexts.append(opened(tmp_path / "state", small_arch, tokenizer, monkeypatch, **settings))
        return contexts[-1].__enter__()

    yield begin
    for each in contexts:
        each.__exit__(None, None, None)


def trained(server, **lora):
    """A program whose training client is made."""
    program = Program(server[1], **lora)
    assert program.result(program.create()) == {"type": "create_model", "model_id": program.model}
    return program


def sampler_of(program, number=0, **fields):
    asked = {"session_id": program.session, "sampling_session_seq_id": number, **fields}
    return program.post("create_sampling_session", **asked).json()["sampling_session_id"]


def sample(program, sampler, seq_id=0, n=1, **params):
    return program.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=seq_id,
        num_samples=n,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]},
        sampling_params=params,
    )


# Who is let in


@pytest.mark.parametrize("given", [None, "", "sk-something", "xtml-a"])
def test_requests_without_a_key_are_not_let_in(server, given):
    """Catches a page in a browser, which cannot send the header, that reaches the server."""
    for method, path in (("GET", "healthz"), ("POST", "create_session"), ("GET", "checkpoints")):
        headers = {} if given is None else {"X-API-Key": given}
        answer = server[1].request(method, f"/api/v1/{path}", headers=headers)
        assert answer.status_code == 401
        assert "TINKER_API_KEY" in answer.json()["detail"]


def test_with_a_key_of_its_own_the_server_takes_no_other(with_settings):
    """Catches any key that begins right, and the page of the server without the key."""
    _, client = with_settings(key="tml-secret")
    for key, status in (("tml-a", 401), ("tml-secret1", 401), ("tml-secret", 200)):
        assert client.get("/api/v1/healthz", headers={"X-API-Key": key}).status_code == status
    assert client.get("/").status_code == client.get("/training/x").status_code == 401
    assert client.get("/").headers["www-authenticate"].startswith("Basic")
    for password, status in (("tml-other", 401), ("tml-secret", 200)):
        word = base64.b64encode(f"me:{password}".encode()).decode()
        assert client.get("/", headers={"Authorization": f"Basic {word}"}).status_code == status
    for odd in ("Basic", "Basic %%%", "Basic /w==", "Bearer dG1sLXNlY3JldA=="):
        assert client.get("/", headers={"Authorization": odd}).status_code == 401


def test_a_key_sees_only_what_was_made_with_it(server):
    """Catches a session, training client, sampler, checkpoint or result that another key can reach."""
    mine, other = trained(server), Program(server[1], key="tml-b")
    assert "path" in mine.result(mine.of_model("save_weights", 1, path="one"))
    sampler = sampler_of(mine, base_model="small/model")
    promise = mine.step(2)
    mine.result(promise)
    refused = [
        other.post("get_info", model_id=mine.model),
        other.forward_backward(3, model=mine.model),
        other.post("optim_step", model_id=mine.model, seq_id=3, adam_params={}),
        other.get(f"sessions/{mine.session}"),
        other.post(f"sessions/{mine.session}/finish", reason={"type": "success"}),
        other.get(f"samplers/{sampler}"),
        sample(other, sampler),
        other.get(f"training_runs/{mine.model}"),
        other.post("weights_info", tinker_path=f"tinker://{mine.model}/weights/one"),
        other.http.delete(
            f"/api/v1/training_runs/{mine.model}/checkpoints/weights/one", headers={"X-API-Key": "tml-b"}
        ),
    ]
    assert [each.status_code for each in refused] == [404] * len(refused)
    assert other.post("session_heartbeat", session_id=mine.session).status_code == 410
    assert other.post("retrieve_future", request_id=promise.json()["request_id"]).status_code == 410
    assert other.post("cancel_future", request_id=promise.json()["request_id"]).status_code == 410
    assert (
        other.get("checkpoints").json()["checkpoints"]
        == other.get("training_runs").json()["training_runs"]
        == []
    )
    assert other.get("sessions").json()["sessions"] == [other.session]
    assert len(mine.get("checkpoints").json()["checkpoints"]) == 1
    assert "tinker://" not in other.post("get_info", model_id=mine.model).json()["detail"]


# What is refused


def test_what_is_wrong_with_a_body_is_a_status_with_a_detail(server):
    """Catches a 5xx, at which the client tries again for minutes, and an empty 400, taken for a proxy's."""
    program = Program(server[1])
    key = {"X-API-Key": "tml-a"}
    json = {**key, "Content-Type": "application/json"}
    for content, headers, status in (
        (b"{}", {**key, "Content-Type": "text/plain"}, 415),
        (b"{}", key, 415),
        (b"{}", {**json, "Content-Encoding": "gzip"}, 415),
        (b"{", json, 422),
        (b"[1]", json, 422),
        (b"[" * 100_000, json, 422),
        (b"\xff\xfe", json, 422),
        (b'{"request_id": 1}', json, 422),
        (b'{"request_id": "\\ud800"}', json, 422),
        (b'{"request_id": "x", "what": 1}', json, 422),
    ):
        answer = server[1].post("/api/v1/retrieve_future", content=content, headers=headers)
        assert (answer.status_code, bool(answer.json()["detail"])) == (status, True), content[:20]
    for body, status, headers in (
        (b"\xff" * 20, 422, {}),
        (b"", 422, {}),
        (b"", 415, {"Content-Encoding": "zstd"}),
        (b"", 415, {"Content-Type": "application/json"}),
    ):
        answer = program.send(body, headers)
        assert (answer.status_code, bool(answer.json()["detail"])) == (status, True)


def test_a_body_has_a_limit(server, monkeypatch):
    """Catches a body that is kept in memory whatever its size."""
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    answer = Program(server[1]).send(b"x" * 1001)
    assert answer.status_code == 413
    assert "1000 bytes" in answer.json()["detail"]


def test_what_is_not_here_says_what_to_do_instead(server):
    """Catches paths of the service that are answered 404 without a word, or 5xx."""
    program = Program(server[1])
    for method, path in REFUSED:
        place = path.format(model="m", kind="weights", name="n", session="s")
        answer = program.http.request(method, f"/api/v1{place}", headers={"X-API-Key": "tml-a"}, json={})
        assert (answer.status_code, answer.json()["detail"]) == (422, REFUSED[method, path])
    for method, path, status in (("GET", "nothing", 404), ("GET", "asample", 405), ("PUT", "healthz", 405)):
        answer = program.http.request(method, f"/api/v1/{path}", headers={"X-API-Key": "tml-a"})
        assert (answer.status_code, "docs/tinker.md" in answer.json()["detail"]) == (status, True)
    assert program.get("checkpoints?limit=x").status_code == 422
    assert program.get("checkpoints?offset=-1").status_code == 422


def test_what_cannot_be_trained_is_refused(server):
    """Catches another base, another optimizer, rank 0 and too large a rank that are taken."""
    program = Program(server[1])
    for number, (changed, status, words) in enumerate(
        [
            ({"base": "another/model"}, 200, "served here: /a/folder/tiny, small/model"),
            ({"base": "../../etc"}, 200, "served here"),
            ({"lora_config": {"rank": 1000}}, 200, "shorter side"),
            ({"lora_config": {"rank": 0}}, 422, "rank"),
            ({"lora_config": None}, 422, "lora_config"),
            ({"optimizer_config": {"type": "dimuon"}}, 422, "adamw"),
        ]
    ):
        answer = program.create(number, **changed)
        assert answer.status_code == status
        found = (
            program.result(answer)
            if status == 200
            else {"category": "user", "error": answer.json()["detail"]}
        )
        assert found["category"] == "user"
        assert words in found["error"]
    assert NoClient.made == []
    assert server[0].api.tenants.used_bytes == 0


# Names of requests


def test_a_repeated_request_is_not_done_again(server):
    """Catches a second session, client or step for a request whose answer was lost."""
    program = Program(server[1])
    header = {"headers": {"X-Idempotency-Key": "i"}}
    sessions = [program.post("create_session", tags=[], **header).json()["session_id"] for _ in range(2)]
    assert sessions[0] == sessions[1] != program.session
    assert program.post("create_session", tags=[]).json()["session_id"] not in sessions
    other = Program(server[1], key="tml-b")
    assert other.post("create_session", tags=[], **header).json()["session_id"] != sessions[0]
    for ask in (program.create, lambda: program.forward_backward(1), lambda: program.step(2)):
        first, second = ask(), ask()
        assert first.json() == second.json()
        assert first.json()["model_id"] == program.model
        program.result(first)
        assert ask().json() == first.json()
    [client] = NoClient.made
    assert client.asked == [("gradient", 1), ("step", 0.5)]
    assert NoRows.opened[0].rows[-1][0] == 1


def test_a_base_is_called_by_its_names_and_variants(server):
    """Catches a name with the end of a variant that is not known, and an answer with the end."""
    program = Program(server[1])
    program.result(program.create(base="small/model:peft:65536"))
    info = program.post("get_info", model_id=program.model).json()
    assert info["model_name"] == info["model_data"]["model_name"] == "small/model"
    assert info["model_data"]["tokenizer_id"] == "/a/folder/tiny"
    assert (info["is_lora"], info["lora_rank"]) == (True, 4)
    names = [each["model_name"] for each in program.get("get_server_capabilities").json()["supported_models"]]
    assert names == ["/a/folder/tiny", "small/model"]


# The order of a training client's requests


def test_requests_of_a_training_client_run_in_their_order(server):
    """Catches a chunk that runs when it comes, and a step that overtakes a gradient."""
    program = trained(server)
    late = [program.step(4), program.forward_backward(3, [3]), program.forward_backward(2, [2])]
    assert NoClient.made[0].asked == []
    first = program.forward_backward(1, [1])
    for each in (first, *late):
        program.result(each)
    assert NoClient.made[0].asked == [("gradient", 1), ("gradient", 2), ("gradient", 3), ("step", 0.5)]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda program: program.forward_backward(1, loss="stable_reinforce"), "loss_fn=ppo"),
        (lambda program: program.forward_backward(1, [10**6]), "token ids"),
        (lambda program: program.of_model("optim_step", 1, optimizer_params={"type": "dimuon"}), "AdamW"),
        (lambda program: program.of_model("save_weights", 1, path="../x"), "name"),
        (lambda program: program.of_model("save_weights", 1), "path"),
        (lambda program: program.of_model("save_weights_for_sampler", 1, path="a", kind="x"), "kind"),
        (
            lambda program: program.of_model("load_weights", 1, path="tinker://x/y", optimizer=True),
            "tinker://",
        ),
        (lambda program: program.of_model("load_weights", 1, optimizer=True), "path"),
    ],
)
def test_an_error_of_a_training_clients_request_takes_its_turn(server, ask, words):
    """Catches a status in place of a promise: all later requests would wait for that number for ever."""
    program = trained(server)
    later = program.forward_backward(2, forward_only=True)
    failed = program.result(ask(program))
    assert failed["category"] == "user"
    assert words in failed["error"]
    assert isinstance(program.result(later), bytes)


def test_after_a_gradient_has_failed_the_next_step_is_not_taken(server):
    """Catches a step with half of a gradient, and a step that is refused for a failed pass without one."""
    program = trained(server)
    failed = program.result(program.forward_backward(1, [BROKEN]))
    assert (failed["category"], "no memory" in failed["error"]) == ("server", True)
    assert "request 1 failed: the device has no memory left" in program.result(program.step(2))["error"]
    assert program.result(program.step(3)) == {"metrics": {"grad_norm:mean": 0.5}}
    program.result(program.forward_backward(4, [10**6]))
    assert "request 4 failed: datum 0" in program.result(program.step(5))["error"]
    program.result(program.forward_backward(6, [BROKEN], forward_only=True))
    assert "metrics" in program.result(program.step(7))
    program.result(program.forward_backward(8, [10**6], forward_only=True))
    assert "metrics" in program.result(program.step(9))


def test_a_training_client_that_is_gone_is_404_with_its_newest_checkpoint(
    with_settings, tmp_path, small_arch, tokenizer, monkeypatch
):
    """Catches a request that waits for ever for those before it, which another server has answered."""
    server = with_settings()
    program = trained(server)
    for seq_id, name in ((1, "one"), (2, "two")):
        program.result(program.of_model("save_weights", seq_id, path=name))
    program.result(program.of_model("save_weights_for_sampler", 3, path="for-sampler"))
    program.post(f"sessions/{program.session}/finish", reason={"type": "success"})
    server[0].close()
    with opened(tmp_path / "state", small_arch, tokenizer, monkeypatch) as again:
        program.http = again[1]
        for answer in (program.step(4), program.forward_backward(4), program.forward_backward(4, [10**6])):
            assert answer.status_code == 404
            assert f"tinker://{program.model}/weights/two" in answer.json()["detail"]
        other = Program(again[1])
        made = other.post(
            "load_weights",
            session_id=other.session,
            model_seq_id=0,
            path=f"tinker://{program.model}/weights/two",
            optimizer=True,
        )
        path = f"tinker://{program.model}/weights/two"
        assert other.result(made) == {"type": "load_weights", "path": path, "model_id": other.model}
        assert NoClient.made[0].asked == [("load", True)]
        assert NoClient.made[0].lora.rank == 4
        assert other.post("get_info", model_id=other.model).json()["lora_rank"] == 4


# Sessions


def test_a_full_disk_fails_the_save_alone(server, monkeypatch):
    """Its promise is a user's error with the remedy; the next request and the next save are as ever."""
    program = trained(server)
    assert "path" in program.result(program.of_model("save_weights", 1, path="one"))

    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", full)
        failed = program.result(program.of_model("save_weights", 2, path="two"))
    assert failed["category"] == "user", failed
    assert "No space left on device" in failed["error"]
    assert "free space" in failed["error"]
    assert program.result(program.step(3))["metrics"]
    assert program.result(program.of_model("save_weights", 4, path="two"))["path"].endswith("/weights/two")


def test_a_session_ends_without_a_sign_of_life(server):
    """Catches the memory of a program that has left, and one that is ended although it lives."""
    door, client = server
    silent, alive = trained(server), Program(client)
    assert alive.result(alive.create())["model_id"] == alive.model
    held = silent.forward_backward(7)
    now = time.monotonic()
    door.api.tenants._clock = lambda: now + 800
    assert alive.post("session_heartbeat", session_id=alive.session).json() == {"type": "session_heartbeat"}
    door.api.tenants._clock = lambda: now + 1000
    for session in door.api.tenants.silent():
        door.api.end(session, "silence")
    assert silent.post("session_heartbeat", session_id=silent.session).status_code == 410
    assert silent.step(1).status_code == 404
    assert silent.post("retrieve_future", request_id=held.json()["request_id"]).status_code == 410
    assert alive.result(alive.step(1))["metrics"]
    assert [model.id for session in door.api.tenants for model in session.models.values()] == [alive.model]
    door.worker.call("x", lambda: None).result()
    assert [rows.is_closed for rows in NoRows.opened] == [True, False]


def test_a_program_that_finishes_frees_what_it_has_and_keeps_its_checkpoints(server):
    """Catches samplers and training clients that stay, and a second finish that is an error."""
    door, _ = server
    program = trained(server)
    path = program.result(program.of_model("save_weights", 1, path="one"))["path"]
    answer = program.result(program.of_model("save_weights_for_sampler", 2, sampling_session_seq_id=0))
    assert answer["sampling_session_id"] == f"{program.session}:sample:0"
    assert door.api.tenants.used_bytes > 0
    for _ in range(2):
        done = program.post(f"sessions/{program.session}/finish", reason={"type": "errored"}, detail="x")
        assert (done.status_code, done.json()) == (200, {})
    door.worker.call("x", lambda: None).result()
    assert (door.samplers.closed, door.api.tenants.used_bytes) == ([1], 0)
    assert program.post("session_heartbeat", session_id=program.session).status_code == 410
    assert program.create(1).status_code == 404
    assert program.get("checkpoints").json()["checkpoints"][0]["tinker_path"] == path
    assert program.get(f"sessions/{program.session}").json()["training_run_ids"] == []


def test_a_session_tells_what_it_has(server):
    """Catches what one session has in the answer for another, and the last instead of the first page."""
    program = trained(server)
    odd = program.post("create_session", tags=[], user_metadata={"a": "é"}, display_name="n").json()[
        "session_id"
    ]
    found = program.get(f"sessions/{odd}").json()
    assert (found["user_metadata"], found["display_name"]) == ({"a": "é"}, "n")
    sampler_of(program, base_model="small/model")
    found = program.get(f"sessions/{program.session}").json()
    assert found["training_run_ids"] == [program.model]
    assert found["sampler_ids"] == [f"{program.session}:sample:0"]
    assert program.get("sessions").json()["sessions"] == [odd, program.session]
    assert program.get("sessions?limit=1&offset=1").json()["sessions"] == [program.session]


def test_a_replaced_loss_is_said(with_settings):
    """Catches a recipe that trains with another loss without a word."""
    server = with_settings(replace_stable_reinforce="ppo")
    program = trained(server)
    said = program.post("create_session", tags=[]).json()
    assert "stable_reinforce is computed as ppo" in said["warning_message"]
    assert isinstance(program.result(program.forward_backward(1, loss="cross_entropy")), bytes)


def test_the_end_of_the_server_ends_the_journals(server):
    """Catches pages that say for ever that a client trains: of one that is there, and of a session that has
    ended while the device was busy."""
    door = server[0]
    trained(server)
    ended, begun = trained(server), threading.Event()
    busy = door.worker.call("x", lambda: (begun.set(), time.sleep(0.2)))
    assert begun.wait(10)
    ended.post(f"sessions/{ended.session}/finish", reason={"type": "success"})
    door.api.close()
    assert busy.done()
    assert [rows.is_closed for rows in NoRows.opened] == [True, True]


# Memory


def test_training_clients_have_a_limit(with_settings):
    """Catches a client beyond the limit, one that counts although it was not made, and one that stays."""
    server = with_settings(max_models=2)
    program = Program(server[1])
    program.result(program.create(0, lora_config={"rank": 1000}))
    for number in (1, 2):
        assert "model_id" in program.result(program.create(number))
    assert "tinker.max_models" in program.result(program.create(3))["error"]
    program.post(f"sessions/{program.session}/finish", reason={"type": "success"})
    assert trained(server)


def test_weights_of_samplers_make_room_for_others(with_settings):
    """Catches memory beyond the plan, a sampler in use that is closed, and one with a name that is gone."""
    server = with_settings(room=10_000_000)
    door, program = server[0], trained(server)
    model = door.api.tenants.used_bytes
    door.api.tenants.room = model + 2 * model // 4
    path = program.result(program.of_model("save_weights_for_sampler", 1, path="named"))["path"]
    named = sampler_of(program, 0, model_path=path)
    assert isinstance(program.result(sample(program, named)), bytes)
    for seq_id, number in ((2, 1), (3, 2)):
        program.result(program.of_model("save_weights_for_sampler", seq_id, sampling_session_seq_id=number))
    assert door.samplers.closed == [1]
    assert isinstance(program.result(sample(program, named, 1)), bytes)
    assert door.samplers.closed == [1, 2]
    gone = program.result(sample(program, f"{program.session}:sample:1"))
    assert (gone["category"], "under a name" in gone["error"]) == ("user", True)
    door.samplers.held = True
    waiting = [sample(program, named, 2), sample(program, f"{program.session}:sample:2")]
    refused = program.result(program.of_model("save_weights_for_sampler", 4, sampling_session_seq_id=3))
    assert "no room for the weights of one more sampler" in refused["error"]
    assert "no room for one more training client" in program.result(program.create(1))["error"]
    door.samplers.held = False
    door.worker.call("x", lambda: None).result()
    assert all(isinstance(program.result(each), bytes) for each in waiting)
    assert door.samplers.closed == [1, 2]


def test_what_has_no_room_takes_none_from_others(with_settings):
    """Catches a request that is refused, and for which another program has lost a sampler without a name."""
    server = with_settings(room=10_000_000)
    door, program, other = server[0], trained(server), trained(server)
    door.api.tenants.room = door.api.tenants.used_bytes * 5 // 4
    made = program.result(program.of_model("save_weights_for_sampler", 1, sampling_session_seq_id=1))
    base = sampler_of(other, 0, base_model="small/model")
    assert all(
        isinstance(each.result(sample(each, of)), bytes)
        for each, of in ((program, made["sampling_session_id"]), (other, base))
    )
    refused = other.result(other.create(1))
    assert "no room for one more training client" in refused["error"]
    door.worker.call("x", lambda: None).result()
    assert door.samplers.closed == []
    assert isinstance(program.result(sample(program, made["sampling_session_id"], 1)), bytes)


def test_a_number_names_one_training_client_and_one_sampler(server):
    """Catches a second one under the same number: the first keeps memory that nobody counts."""
    door, program = server[0], trained(server)
    door.api.promises.forget(program.session)  # as ten minutes after the answer was fetched
    assert "new number" in program.result(program.create())["error"]
    first = program.result(program.of_model("save_weights_for_sampler", 1, sampling_session_seq_id=0))
    again = program.result(program.of_model("save_weights_for_sampler", 2, sampling_session_seq_id=0))
    assert "new number" in again["error"]
    used = door.api.tenants.used_bytes
    assert (len(NoClient.made), len(door.samplers.snapshots)) == (1, 1)
    assert sampler_of(program, 0, base_model="small/model") == first["sampling_session_id"]
    path = program.result(program.of_model("save_weights", 3, path="one"))["path"]
    info, found = door.store.info, []

    def slow(*args):
        if not found:  # the same request comes again while the first is looked up
            found.append(None)
            other = threading.Thread(target=lambda: found.append(sampler_of(program, 1, model_path=path)))
            other.start()
            other.join(10)
            found.append(door.api.tenants._sessions[program.session].samplers[1])
        return info(*args)

    door.store.info = slow
    sampler_of(program, 1, model_path=path)
    assert door.api.tenants._sessions[program.session].samplers[1] is found[-1]
    assert door.api.tenants.used_bytes == used


def test_room_is_made_while_the_session_is_busy(with_settings):
    """Catches memory that is given to another before it is free: the closing waits for all that its session
    had asked for before."""
    server = with_settings(room=10_000_000)
    door, program, other = server[0], trained(server), trained(server)
    models = door.api.tenants.used_bytes
    door.api.tenants.room = models + models // 8
    program.result(program.of_model("save_weights_for_sampler", 1, sampling_session_seq_id=1))
    end = threading.Event()

    def units():
        while not end.is_set():
            yield time.sleep(0.001)

    busy = door.worker.submit(program.session, units)
    other.result(other.of_model("save_weights_for_sampler", 1, sampling_session_seq_id=1))
    door.worker.call("x", lambda: None).result()
    door.worker.call("x", lambda: None).result()
    assert (door.samplers.closed, busy.done()) == ([1], False)
    end.set()


def test_weights_that_were_to_make_room_go_with_their_session(with_settings):
    """Catches memory that stays for ever: a session's end forgets the closing that was asked for before."""
    server = with_settings(room=10_000_000)
    door, program = server[0], trained(server)
    model = door.api.tenants.used_bytes
    door.api.tenants.room = model + model // 4
    program.result(program.of_model("save_weights_for_sampler", 1, sampling_session_seq_id=1))
    begun, end = threading.Event(), threading.Event()
    door.worker.call(program.session, lambda: (begun.set(), end.wait(10)))  # for which the closing waits
    assert begun.wait(10)
    program.of_model("save_weights_for_sampler", 2, sampling_session_seq_id=2)
    assert (door.api.tenants.used_bytes, list(door.samplers.snapshots)) == (model + model // 4, [1])
    program.post(f"sessions/{program.session}/finish", reason={"type": "success"})
    end.set()
    door.worker.call("x", lambda: None).result()
    assert (door.samplers.snapshots, door.samplers.closed) == ({}, [1])


# Samplers


def test_a_sampler_is_of_the_base_or_of_a_checkpoint(server):
    """Catches a sampler of other weights, and of what is not there."""
    door, program = server[0], trained(server)
    program.result(program.step(1))
    saved = program.result(program.of_model("save_weights", 2, path="one"))["path"]
    for number, (fields, step) in enumerate(
        [({"base_model": "small/model"}, 0), ({"model_path": saved}, 1), ({"model_path": saved}, 1)]
    ):
        sampler = sampler_of(program, number, **fields)
        assert sampler == sampler_of(program, number, **fields)
        found = program.get(f"samplers/{sampler}").json()
        assert found == {
            "sampler_id": sampler,
            "base_model": fields.get("base_model", "/a/folder/tiny"),
            **({"model_path": saved} if step else {}),
        }
        assert isinstance(program.result(sample(program, sampler)), bytes)
        snapshot = door.samplers.snapshots[number + 1][0]
        assert (snapshot.step, snapshot.adapters is None, snapshot.model) == (step, not step, -1 + step)
    assert len(NoClient.made) == 1, "a sampler made a training client"
    asked = {"session_id": program.session, "sampling_session_seq_id": 9}
    for fields, status in (
        ({"model_path": f"tinker://{program.model}/weights/two"}, 404),
        ({"model_path": "/etc/passwd"}, 404),
        ({"base_model": "another"}, 422),
        ({}, 422),
    ):
        assert program.post("create_sampling_session", **asked, **fields).status_code == status
    assert sample(program, f"{program.session}:sample:9").status_code == 404


def test_samples_are_promised_with_an_id_each_and_told_together(server):
    """Catches a promise without the ids that the client asserts, completions of another copy of the sampler,
    and a poll that waits although something has come."""
    program = Program(server[1])
    sampler = sampler_of(program, base_model="small/model")
    copies = [program.post("join_sampling_session", sampling_session_id=sampler).json() for _ in range(2)]
    assert [each["client_counter"] for each in copies] == [1, 2]
    first, failed, of_copy = (
        sample(program, sampler, 0, n=3),
        sample(program, sampler, 1, max_tokens=99),
        sample(program, sampler, 10**9),
    )
    assert len(set(first.json()["sample_sequence_ids"])) == 3
    assert isinstance(program.result(first), bytes)
    assert program.result(failed) == {"error": "max_tokens must be less", "category": "user"}
    program.result(of_copy)

    def told(copy, cursor=0):
        target = {"sampling_session_id": sampler, "cloned_sampler_id": copy}
        return program.post("retrieve_futures", target=target, prev_cursor=cursor, timeout=0).json()

    ids = [each.json()["request_id"] for each in (first, failed, of_copy)]
    found = told(0)
    states = {each["request_id"]: each["state"] for each in found["completions"]}
    assert states == {ids[0]: "finished", ids[1]: "failed"}
    assert told(0, found["cursor"])["completions"] == []
    assert [each["request_id"] for each in told(1)["completions"]] == [ids[2]]
    assert sample(program, sampler, 3, temperature=-1).status_code == 422
    assert sample(program, sampler, 3, n=10**4).status_code == 422
    assert program.post("retrieve_future", request_id="nothing").status_code == 410


def test_a_poll_is_answered_before_the_client_gives_it_up(server, monkeypatch):
    """Catches a poll that never ends, and one whose answer the client logs as a warning."""
    monkeypatch.setattr(api, "POLL_S", 0.05)
    door, program = server[0], Program(server[1])
    door.samplers.held = True
    promise = sample(program, sampler_of(program, base_model="small/model"))
    request_id = promise.json()["request_id"]
    running = program.post("retrieve_future", request_id=request_id)
    again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    assert (running.status_code, running.json()) == (408, again)
    assert program.post("cancel_future", request_id=request_id).json() == {}
    assert "error" in program.result(promise)
    door.worker.call("x", lambda: None).result()
    assert door.samplers.asked == {1: None}


def test_requests_that_wait_have_a_limit(server, monkeypatch):
    """Catches a queue without an end, and a refusal at which the client does not try again."""
    monkeypatch.setattr(api, "MOST_WAITING", 2)
    program = trained(server)
    held = [program.forward_backward(3), program.forward_backward(2)]
    full = program.forward_backward(4)
    assert (full.status_code, "send it again" in full.json()["detail"]) == (429, True)
    other = trained(server)
    assert isinstance(other.result(other.forward_backward(1)), bytes)
    release = threading.Event()
    busy = server[0].worker.call(program.session, lambda: release.wait(10))
    assert program.forward_backward(1).status_code == 429
    release.set()
    busy.result()
    while server[0].worker.num_waiting(program.session):
        time.sleep(0.001)
    held.append(program.forward_backward(1))
    assert all(isinstance(program.result(each), bytes) for each in held)


def test_what_waits_and_what_is_not_fetched_have_a_limit_in_bytes(server, monkeypatch):
    """Catches a program that fills the memory of the server with bodies that wait, or with results."""
    program = trained(server)
    monkeypatch.setattr(api, "MOST_WAITING_BYTES", 100)
    held = program.forward_backward(2, [1] * 50)
    assert program.forward_backward(3).status_code == 429
    assert isinstance(program.result(program.forward_backward(1)), bytes)
    assert isinstance(program.result(held), bytes)
    program.result(program.forward_backward(3, [1] * 50))
    monkeypatch.setattr(server[0].api.promises, "_most_bytes", 1)
    for answer in (program.forward_backward(4), program.step(4)):
        assert (answer.status_code, "fetched" in answer.json()["detail"]) == (429, True)


def test_the_page_shows_who_trains(server):
    """Catches texts of programs that a browser would run, and a page without its numbers."""
    program = trained(server)
    sampler_of(program, base_model="small/model")
    program.forward_backward(9)
    page = server[1].get("/").text
    assert f'<a href="/training/{program.session}%3Atrain%3A0">{program.model}</a>' in page
    assert f"{program.session}:sample:0" in page
    assert "bytes of adapters" in page
    assert server[1].get(f"/training/{program.model}").status_code == 404
    program.result(program.forward_backward(1))
    program.result(program.step(2))
    assert server[1].get(f"/training/{program.model}").text == f"the page of {program.session}_train_0"
    assert server[1].get("/training/<b>").status_code == 404


def test_the_device_that_has_failed_is_told(server):
    """Catches a server that says it is well when nothing is computed any more."""
    door, program = server[0], trained(server)
    assert program.get("healthz").json() == {"status": "ok"}
    door.samplers.round = lambda key: 1 / 0
    sampler = sampler_of(program, base_model="small/model")
    assert program.result(sample(program, sampler))["category"] == "server"
    assert program.get("healthz").status_code == 503
    assert "division by zero" in server[1].get("/").text
    assert program.result(program.step(1))["category"] == "server"
