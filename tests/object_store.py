"""Buckets in memory: fsspec's memory file system as `s3://` and `gs://`, and the same objects over HTTP.

Orbax reaches a bucket twice: through fsspec, and with the arrays through TensorStore's own clients. Both must
see the same objects. Real clients and servers are those of `tests/buckets/` (slow).
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry


class Bucket(MemoryFileSystem):
    """Objects by name, `/bucket/name`; as in a real bucket, a folder is there where objects are."""

    protocol = ("s3", "gs", "gcs")
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


class _Store(BaseHTTPRequestHandler):
    """As much of the interfaces of S3 and of Google Cloud Storage as TensorStore uses."""

    protocol_version = "HTTP/1.1"
    objects: Objects
    query: dict[str, str]
    google: bool

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

    def _name(self):
        """`/bucket/name` of the object, or `/bucket/` where it is listed."""
        address = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(address.query).items()}
        _, google, rest = address.path.partition("/storage/v1/b/")
        self.google = bool(google)
        if not google:
            return unquote(address.path)
        bucket, _, name = rest.partition("/o")
        return f"/{bucket}/{self.query.get('name', unquote(name.lstrip('/')))}"

    def _handle(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, writes = self._name(), self.command in ("PUT", "POST")
        self.objects.asked.append(f"{self.command} {name}")
        if self.command in self.objects.refused:
            return self._fail(403, "AccessDenied")
        if "list-type" in self.query or (self.google and not name.partition("/")[2].partition("/")[2]):
            return self._list(name.rstrip("/") + "/")
        found = Bucket.store.get(name)
        version = _version(found)
        same = (self.headers.get("If-Match") or self.query.get("ifGenerationMatch", "")).strip('"')
        other = self.headers.get("If-None-Match") or self.query.get("ifGenerationNotMatch", "")
        if (same and same != version) or (writes and other == "*" and found is not None):
            return self._fail(412, "PreconditionFailed")
        if writes:
            found = Bucket.store[name] = MemoryFile(Bucket(), name, body)
            return self._answer(200, self._described(name, found), ETag=f'"{_version(found)}"')
        if found is None:
            return self._fail(404, "NoSuchKey")
        if self.command == "DELETE":
            del Bucket.store[name]
            return self._answer(204)
        if other.strip('"') == version:
            return self._answer(304)
        return self._read(name, found)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _read(self, name, found):
        content = found.getvalue()
        told = {"ETag": f'"{_version(found)}"', "x-goog-generation": _version(found)}
        if self.google and self.query.get("alt") != "media":
            return self._answer(200, self._described(name, found))
        if not self.headers.get("Range"):
            return self._answer(200, content, **told)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        size = len(content)
        start, end = (int(first), int(last or size - 1)) if first else (size - int(last), size - 1)
        part = content[start : end + 1]
        spans = f"bytes {start}-{start + len(part) - 1}/{size}"
        return self._answer(206, part, Content_Range=spans, **told)

    def _described(self, name, found):
        told = {"name": name.lstrip("/").partition("/")[2], "generation": _version(found)}
        return json.dumps({**told, "size": str(found.size)}).encode() if self.google else b""

    def _list(self, bucket):
        names = [name.removeprefix(bucket) for name in sorted(Bucket.store) if name.startswith(bucket)]
        if self.google:
            start, end = self.query.get("startOffset", ""), self.query.get("endOffset")
            items = [{"name": name} for name in names if name >= start and (end is None or name < end)]
            return self._answer(200, json.dumps({"items": items}).encode())
        wanted = [name for name in names if name.startswith(self.query.get("prefix", ""))]
        keys = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in wanted)
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
        return self._answer(200, text.encode(), Content_Type="application/xml")


def _version(found):
    """A number that changes with the content of an object; 0: there is none."""
    return "0" if found is None else str(int(hashlib.md5(found.getvalue()).hexdigest()[:13], 16) + 1)


@cache
def _address():
    """Where the objects are served, in this process from now on: TensorStore asks once for the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@contextmanager
def buckets_in_memory(cache_folder):
    """`Objects`, which `s3://` and `gs://` lead to within the block; `cache_folder`: for copies."""
    objects = _Store.objects = Objects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", _address())
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing-secret")
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", _address())
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "nobody")
        patch.setenv("XDG_CACHE_HOME", str(cache_folder))
        for scheme in Bucket.protocol:
            patch.setitem(_registry, scheme, Bucket)
        Bucket.store.clear()
        yield objects
        Bucket.store.clear()
