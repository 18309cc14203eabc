"""Buckets in memory: fsspec's memory file system as `s3://` and `gs://`, and the same objects over HTTP.

Orbax reaches a bucket twice: through fsspec, and with the arrays through TensorStore's own client of S3. Both
must see the same objects. The store with a real server and a real client is `tests/buckets/` (slow).
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry


class Bucket(MemoryFileSystem):
    """Objects by name, `/bucket/name`; as in a real bucket, a folder is there where objects are."""

    protocol = ("s3", "gs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(str(path).removeprefix("s3://").removeprefix("gs://"))

    def mkdir(self, path, create_parents=True, **kwargs):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    def exists(self, path, **kwargs):
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def _open(self, path, mode="rb", **kwargs):
        return BytesIO(self.cat_file(path)) if mode == "rb" else super()._open(path, mode, **kwargs)


class Objects:
    """What is in the buckets, `s3://` and `gs://` alike; and what they refuse."""

    def __init__(self):
        self.refused: set[str] = set()
        """Methods, as `PUT`, that are answered with 403."""
        self.asked: list[str] = []
        """`METHOD /bucket/name` of each request over HTTP."""

    def names(self, url: str = "s3://") -> list[str]:
        """The names of the objects below `url`, without the part that it has."""
        start = Bucket._strip_protocol(url).rstrip("/") + "/"
        return sorted(name.removeprefix(start) for name in Bucket.store if name.startswith(start))

    def put(self, url: str, content: bytes) -> None:
        """Write an object."""
        name = Bucket._strip_protocol(url)
        Bucket.store[name] = MemoryFile(Bucket(), name, content)

    def get(self, url: str) -> bytes:
        """Read an object."""
        return Bucket.store[Bucket._strip_protocol(url)].getvalue()


class _S3(BaseHTTPRequestHandler):
    """As much of S3's interface as TensorStore uses."""

    protocol_version = "HTTP/1.1"
    objects: Objects

    def log_message(self, *args):
        pass

    def _answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status, code):
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode(), Content_Type="application/xml")

    def _handle(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        name = unquote(address.path)
        self.objects.asked.append(f"{self.command} {name}")
        if self.command in self.objects.refused:
            return self._fail(403, "AccessDenied")
        if "list-type" in (query := parse_qs(address.query)):
            return self._list(name, query.get("prefix", [""])[0])
        found = Bucket.store.get(name)
        etag = None if found is None else f'"{hashlib.md5(found.getvalue()).hexdigest()}"'
        if self.command == "PUT":
            wanted, absent = self.headers.get("If-Match"), self.headers.get("If-None-Match")
            if (wanted and wanted != etag) or (absent and found is not None):
                return self._fail(412, "PreconditionFailed")
            Bucket.store[name] = MemoryFile(Bucket(), name, body)
            return self._answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        if found is None:
            return self._fail(404, "NoSuchKey")
        if self.command == "DELETE":
            del Bucket.store[name]
            return self._answer(204)
        content = found.getvalue()
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            size = len(content)
            start, end = (int(first), int(last or size - 1)) if first else (size - int(last), size - 1)
            part = content[start : end + 1]
            spans = f"bytes {start}-{start + len(part) - 1}/{size}"
            return self._answer(206, part, ETag=etag, Content_Range=spans)
        return self._answer(200, content, ETag=etag)

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle

    def _list(self, bucket, prefix):
        start = f"{bucket.rstrip('/')}/"
        names = [name.removeprefix(start) for name in Bucket.store if name.startswith(start + prefix)]
        keys = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in sorted(names))
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
        self._answer(200, text.encode(), Content_Type="application/xml")


@contextmanager
def buckets_in_memory(cache):
    """`Objects`, which `s3://` and `gs://` lead to within the block; `cache` is the folder for caches."""
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("S3", (_S3,), {"objects": objects}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_address[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing-secret")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for scheme in Bucket.protocol:
            patch.setitem(_registry, scheme, Bucket)
        Bucket.store.clear()
        try:
            yield objects
        finally:
            Bucket.store.clear()
            server.shutdown()
            server.server_close()
