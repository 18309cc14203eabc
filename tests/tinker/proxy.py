"""A proxy that records requests, and may lose every seventh answer after the server has computed it."""

import http.client
import itertools
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

EVERY = 7
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Asked(NamedTuple):
    """A request of a program."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def proxied(port, *, loses=False):
    """(the URL of a proxy of the local `port`, the requests through it, how many answers were lost as [n]).

    With `loses`, an answer that is lost is a 503, and every other time a cut connection.
    """
    requests, lost = [], [0]
    calls, lock = itertools.count(1), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            with lock:
                call = next(calls)
                requests.append(Asked(self.command, self.path, headers, body))
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            if loses and call % EVERY == 0 and answer.status < 400:
                lost[0] += 1
                if call % (2 * EVERY) == 0:
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(503)
                content = b"{}"
            else:
                self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = forward

        def log_message(self, *_):
            """Nothing: tests print their own figures."""

        def finish(self):
            if not self.close_connection or not self.wfile.closed:
                try:
                    super().finish()
                except (OSError, ValueError):
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests, lost
    finally:
        server.shutdown()
        server.server_close()
