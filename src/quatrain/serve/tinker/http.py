"""What all paths of the training server's interface share: bodies in, JSON and errors out; what is refused.

Data flow: a request of starlette -> `asked_of`, `body_of` -> `api.py` -> `Json`, `detail`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quatrain.serve.tinker.asks import Ask, parsed
from quatrain.serve.tinker.calls import Refused
from quatrain.serve.tinker.store import paged
from quatrain.serve.tinker.wire import MOST_BYTES

Asked = TypeVar("Asked", bound=Ask)
JSON, PROTOBUF = "application/json", "application/x-protobuf"
FLAGS = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "pjwt_auth_enabled": False,
    "custom_loss_server_side": False,
    # Otherwise a client polls for every sample on a connection of its own: up to 2,000 of them.
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
}
A_FOLDER = "a checkpoint is a folder on the server's disk, which `quatrain export` makes a model of"
_CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"
REFUSED = {
    ("POST", "/copy_weights"): f"checkpoints are not copied: {A_FOLDER}",
    ("POST", "/save_weights_external"): f"checkpoints are not written elsewhere: {A_FOLDER}",
    ("GET", f"{_CHECKPOINT}/archive"): f"checkpoints are not packed: {A_FOLDER}",
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): f"checkpoints are not written elsewhere: {A_FOLDER}",
    ("POST", f"{_CHECKPOINT}/publish"): f"checkpoints are not published: {A_FOLDER}",
    ("DELETE", f"{_CHECKPOINT}/publish"): "no checkpoint is published, so none can be taken back",
    ("POST", "/create_custom_loss"): "losses of one's own run in the client (forward_backward_custom)",
    ("POST", "/auth/token"): "this server takes API keys alone; set TINKER_API_KEY",
    ("PUT", "/sessions/{session}/project"): "this server has no projects; leave project_id out",
    ("POST", "/sessions/search"): "sessions are not searched; list them with GET /api/v1/sessions",
}
"""(method, path) of what Tinker's service has and this server does not -> what to do instead."""


def page_of(name: str, records: Sequence[Any], request: Request) -> Response:
    """The records from `offset` on, `limit` of them."""
    numbers = {}
    for key, default in (("limit", 100), ("offset", 0)):
        given = request.query_params.get(key, str(default))
        if not (given.isdecimal() and len(given) < 10):
            raise Refused(f"{key} must be a whole number from 0 on; got {given[:100]!r}")
        numbers[key] = int(given)
    return Json(paged(name, records, **numbers))


class Json(JSONResponse):
    """JSON in ASCII: texts of clients may have what UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


async def said(answer: Mapping[str, Any], request: Request, owner: str) -> Response:
    """Always the same, whatever comes."""
    await body_of(request, JSON)
    return Json(answer)


async def not_here(why: str, request: Request, owner: str) -> Response:
    return detail(422, why)


async def asked_of(kind: type[Asked], request: Request) -> Asked:
    """The request in a body of JSON; raises Refused."""
    return parsed(kind, await body_of(request, JSON))


async def body_of(request: Request, kind: str) -> bytes:
    """The body of a request, which says that it is of this kind; raises HTTPException."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != kind:
        raise HTTPException(415, f"this path takes `Content-Type: {kind}`; got {given[:100] or 'none'}")
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise HTTPException(415, f"bodies have no Content-Encoding here; got {coding[:100]}; leave it out")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"a body has at most {MOST_BYTES} bytes; send fewer datums at once")
    return bytes(body)


def detail(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in Tinker's form."""
    return Json({"detail": message}, status_code=status, headers=headers)


async def unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"this server does not have {request.method} {request.url.path[:100]!r}; see docs/tinker.md"
    return detail(error.status_code, message, error.headers)


async def failed(request: Request, error: Exception) -> Response:
    return detail(500, f"the request failed: {type(error).__name__}: {error}")
