"""Serves the run page on this machine, live: the page asks for what changed while a run is in progress.

`quatrain report RUN --serve` calls it. The server listens on 127.0.0.1 only, answers GET only, and answers no
request for another host's name, so that no website can read a run through a reader's browser.
"""

import base64
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from quatrain.report.page import Page, shell
from quatrain.report.page_samples import pack

HOST = "127.0.0.1"
_CHUNK = re.compile(r"/chunk/(\d{1,4})-(step|eval)-(\d{1,18})")
_PICTURE = re.compile(r"/picture/([0-9a-f]{16})")


def serve(folders: Sequence[Path], *, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page of the runs until the process is interrupted; `ready` gets its address.

    `port` 0 takes any free port. Raises ValueError if the port cannot be used.
    """
    with server(folders, port=port) as http:
        ready(address(http))
        with suppress(KeyboardInterrupt):  # the way to end it
            http.serve_forever()


def server(folders: Sequence[Path], *, port: int) -> ThreadingHTTPServer:
    """A server of the page, which listens and does not answer yet."""
    try:
        return _Server(folders, port)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--port must be a free port of this machine: {port} cannot be used ({error}); choose another, "
            "or 0 for any free one"
        ) from error


def address(http: ThreadingHTTPServer) -> str:
    """The page's address."""
    return f"http://{HOST}:{http.server_port}/"


class _Server(ThreadingHTTPServer):
    """Has what is answered for each path; data is read again only if a file of the runs has changed."""

    def __init__(self, folders: Sequence[Path], port: int):
        super().__init__((HOST, port), _Handler)
        self._page = Page(folders, capped=False, keep_packed=False)
        self._data, self._stamp = b"", ""
        self._refreshing = threading.Lock()

    def content(self, path: str) -> tuple[str, bytes] | None:
        """(media type, bytes) of a path; None if there is nothing."""
        if path == "/":
            return "text/html; charset=utf-8", shell(self._page.title, live=True).encode(errors="replace")
        with self._refreshing:
            if path == "/data":
                stamp = self._page.stamp()
                if stamp != self._stamp:
                    self._data, self._stamp = base64.b64decode(pack(self._page.data(live=True))), stamp
                return "application/gzip", self._data
            if match := _CHUNK.fullmatch(path):
                packed = self._page.chunk(int(match[1]), match[2], int(match[3]))
                return None if packed is None else ("application/gzip", base64.b64decode(packed))
            if match := _PICTURE.fullmatch(path):
                file = self._page.pictures.file(match[1])
                return None if file is None else ("image/webp", file)
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET with what the server has."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        if self.headers.get("Host") not in (
            f"{HOST}:{server.server_port}",
            f"localhost:{server.server_port}",
        ):
            message = b"this server is for its own machine\n"
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", message)
            return
        content = server.content(self.path.partition("?")[0])
        if content is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing here\n")
            return
        media, body = content
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, media, b"", tag)
        else:
            self._answer(HTTPStatus.OK, media, body, tag)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: the page asks every few seconds."""

    def _answer(self, status: HTTPStatus, media: str, body: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": media,
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
            **({} if tag is None else {"ETag": tag}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
