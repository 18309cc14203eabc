"""A server of chat completions for the tests of judges, which misbehaves as told, and remembers requests."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REFUSES_SCHEMA = (400, {}, {"error": {"message": "response_format is not supported"}})
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


def said(text, **changes):
    """An answer with this text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice | changes], "usage": USAGE}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """More connections than a judge makes at once: none waits until it is given up."""


class JudgeServer:
    """Answers request number k (from 0) with `answer(k, body)`: a status, headers, and JSON or a text."""

    def __init__(self, answer=lambda number, body: said('{"reason": "so", "score": 0.5}'), models=("one",)):
        self.answer, self.models = answer, models
        self.requests, self.headers, self.most_at_once = [], [], 0
        self._now, self._lock = 0, threading.Lock()

    @property
    def texts(self):
        """The questions so far."""
        return [body["messages"][-1]["content"] for body in self.requests]

    def handle(self, headers, body):
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.answer(number, body)
        finally:
            with self._lock:
                self._now -= 1

    @contextmanager
    def running(self):
        """The address of its API, while the block runs."""
        own = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.reply(200, {}, {"data": [{"id": name} for name in own.models]})

            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                self.reply(*own.handle(dict(self.headers), content))

            def reply(self, status, headers, body):
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        server = _Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def slowly(seconds, answer):
    """`answer` after so many seconds."""
    time.sleep(seconds)
    return answer
