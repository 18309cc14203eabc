import gzip
import http.client
import json
import re
import threading
from pathlib import Path

import pytest
from page_runs import make_run, step_samples, write_rows

from quatrain.report.page_server import HOST, address, server


@pytest.fixture
def served(tmp_path):
    """The folder of a run and a function that asks the server of its page."""
    folder = make_run(tmp_path)
    with server([folder], port=0) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = http_server.server_port

        def ask(path, **headers):
            connection = http.client.HTTPConnection(HOST, port)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, dict(answer.headers), body

        yield folder, ask, port
        http_server.shutdown()
        thread.join()


def test_a_page_without_data_and_data_that_changes(served):
    folder, ask, _ = served
    status, _, body = ask("/")
    assert status == 200
    assert b"data-live" in body
    assert b"chunk-data" not in re.sub(rb"<script>.*", b"", body, flags=re.DOTALL)

    status, headers, body = ask("/data")
    assert json.loads(gzip.decompress(body))["runs"][0]["step"] == 3
    tag = headers["ETag"]
    assert ask("/data", **{"If-None-Match": tag})[0] == 304

    write_rows(folder / "samples" / "step_000004.jsonl", step_samples(4))
    status, _, body = ask("/data", **{"If-None-Match": tag})
    assert status == 200
    assert json.loads(gzip.decompress(body))["runs"][0]["samples"]["step"]["steps"][-1]["step"] == 4
    assert len(json.loads(gzip.decompress(ask("/chunk/0-step-4")[2]))) == 3


@pytest.mark.parametrize(
    "path", ["/chunk/0-step-99", "/chunk/9-step-1", "/chunk/0-x-1", "/../config.yaml", "/x"]
)
def test_there_is_nothing_else(served, path):
    assert served[1](path)[0] == 404


def test_a_picture_is_served_as_one_and_nothing_else_of_its_folder(served):
    folder, ask, _ = served
    (folder / "pictures").mkdir()
    (folder / "pictures" / "0123456789abcdef.webp").write_bytes(b"RIFF")
    status, headers, body = ask("/picture/0123456789abcdef")
    assert (status, headers["Content-Type"], body) == (200, "image/webp", b"RIFF")
    assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/picture/1123456789abcdef", "/picture/0123456789abcdef.webp", "/picture/../config.yaml"):
        assert ask(path)[0] == 404


def test_a_request_for_another_host_is_refused(served):
    _, ask, port = served
    assert ask("/data", Host=f"evil.example:{port}")[0] == 421
    assert ask("/data", Host=f"localhost:{port}")[0] == 200


def test_only_this_machine_is_served(tmp_path):
    with server([Path(tmp_path)], port=0) as first:
        assert first.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_the_users_mistake(tmp_path):
    with server([Path(tmp_path)], port=0) as first:
        assert address(first) == f"http://127.0.0.1:{first.server_port}/"
        with pytest.raises(ValueError, match="--port must be a free port"):
            server([Path(tmp_path)], port=first.server_port)
