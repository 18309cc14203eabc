"""Objects in buckets, `gs://` and `s3://`, through fsspec: read into a cache, listed, written and deleted.

Used by `data` and `weights` for what a configuration names, `run` for checkpoints, `cli` for exports.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from quatrain.config.errors import installation, listed
from quatrain.config.places import cache_folder, is_bucket, local_path
from quatrain.config.secrets import redact

COMPLETE = "commit_success.txt"
"""The object of a checkpoint that Orbax writes last: a bucket cannot rename a folder at once."""
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
CREDENTIALS = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role; AWS_ENDPOINT_URL for another store",
}
VERSION = ("size", "ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")
"""What a store says of an object that tells whether it has changed; each names a part of these."""
LONGEST_REASON = 300


def keep_no_listings(scheme: str) -> None:
    """File systems of `scheme` that fsspec makes from now on, also for Orbax, list anew each time.

    Others write to buckets too, which a kept listing would hide.
    """
    from fsspec.config import conf

    conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)


@contextmanager
def _at(url: str) -> Iterator[Any]:
    """The file system of `url`; what it raises becomes a ValueError, whatever the library and its class."""
    scheme = url.partition("://")[0]
    try:
        import fsspec

        keep_no_listings(scheme)
        yield fsspec.filesystem(scheme)
    except ImportError as error:
        raise ValueError(
            f"{url} needs the package {PACKAGES[scheme]}: {installation('buckets')}, or give a local path"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise ValueError(
            f"{url} cannot be read or written ({redact(reason, os.environ):.{LONGEST_REASON}}): check the "
            f"name, the network and the credentials ({CREDENTIALS[scheme]})"
        ) from error


def entries(url: str, pattern: str = "*") -> list[str]:
    """The names of what is directly below `url` and matches `pattern`, sorted; none if nothing is there."""
    with _at(url) as files:
        # Not `glob` and `exists`: they take an error of the network for nothing.
        try:
            found = files.ls(url, detail=False)
        except FileNotFoundError:
            found = []
    names = {PurePosixPath(each).name for each in found if not each.endswith("/")}
    return sorted(name for name in names if fnmatchcase(name, pattern))


def local_copy(url: str, names: Sequence[str] = ()) -> Path:
    """A copy of the object at `url`, or with `names` a folder with those directly below that match one.

    It is in `buckets/` in the folder for caches, under a name made of what the store says of the objects, so
    that one that has changed is copied again. A copy gets its name when it is whole. Raises ValueError if the
    store cannot be read, has no such object, or an object changes while it is copied.
    """
    before = _versions(url, names)
    if not before:
        raise ValueError(
            f"a model in a bucket is a folder with files such as {listed(names)}; {url} has none: check the "
            "name"
        )
    folder = cache_folder(os.environ) / "buckets"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([url, before]).encode()).hexdigest()[:32]
    copy, part = folder / digest, folder / f"{digest}.part"
    local = PurePosixPath(url).name
    with FileLock(folder / f"{digest}.lock"):  # processes of one machine copy once
        if not copy.is_dir():
            shutil.rmtree(part, ignore_errors=True)
            inner = part / local if names else part
            inner.mkdir(parents=True)
            targets = [inner / PurePosixPath(each).name for each in before]
            with _at(url) as files:
                files.get(list(before), list(map(str, targets)))
            sizes = [str(target.stat().st_size) for target in targets]
            if _versions(url, names) != before or sizes != [version[0] for version in before.values()]:
                raise ValueError(f"{url} has changed while it was copied; give the same command again")
            part.rename(copy)
    return copy / local


def local_file(path: str) -> Path:
    """The file at `path`, or the copy of one in a bucket."""
    return local_copy(path) if is_bucket(path) else local_path(path)


def _versions(url: str, names: Sequence[str]) -> dict[str, list[str]]:
    """What the store says of each object, by its name there."""
    if names:
        wanted = [each for each in entries(url) if any(fnmatchcase(each, name) for name in names)]
        objects = [f"{url.rstrip('/')}/{each}" for each in wanted]
    else:
        objects = [url]
    with _at(url) as files:
        found = {each: files.info(each) for each in objects}
    return {each: [str(info.get(key)) for key in VERSION] for each, info in found.items()}


def upload(folder: Path, url: str, *, last: str) -> None:
    """Send all files of `folder`; the one called `last` after the others, so who finds it finds a whole."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / last)
    with _at(url) as there:
        for group in (files, [folder / last]):
            names = [f"{url.rstrip('/')}/{file.relative_to(folder).as_posix()}" for file in group]
            there.put(list(map(str, group)), names)


def check_writable(url: str) -> None:
    """Raises ValueError if no object can be written below `url`."""
    with _at(url) as files:
        files.pipe_file(f"{url}/.write_probe", b"probe")
        files.rm_file(f"{url}/.write_probe")


def complete_steps(url: str) -> list[int]:
    """The numbers that name the complete checkpoints below `url`, in increasing order."""
    return [step for step in numbered(url) if COMPLETE in entries(f"{url}/{step}")]


def numbered(url: str) -> list[int]:
    """The numbers that name something directly below `url`, in increasing order."""
    return sorted(int(name) for name in entries(url) if name.isdigit())


def last_written(url: str) -> float:
    """When the checkpoint at `url` was completed, in seconds since 1970."""
    with _at(url) as files:
        return float(files.modified(f"{url}/{COMPLETE}").timestamp())


def delete(url: str) -> None:
    """Delete all below `url`; a checkpoint is not complete from the first moment on."""
    with _at(url) as files, suppress(FileNotFoundError):
        _unmark(files, url)
        files.rm(url, recursive=True)


def move(url: str, to: str) -> None:
    """Move all below `url`, object by object; what is there is not complete from the first moment on."""
    with _at(url) as files:
        _unmark(files, url)
        found, name = files.find(url), url.partition("://")[2]
        files.copy(found, [to + each.partition(name)[2] for each in found])
        files.rm(url, recursive=True)


def _unmark(files: Any, url: str) -> None:
    with suppress(FileNotFoundError):
        files.rm_file(f"{url}/{COMPLETE}")
