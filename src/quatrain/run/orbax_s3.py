"""Lets Orbax keep arrays in `s3://`: it knows `gs://` alone; TensorStore, which it writes with, has both.

Data flow: the address of a checkpoint -> Orbax -> the specification of a key-value store, changed here ->
TensorStore. Everything else of a checkpoint Orbax writes through etils, which knows both.
"""

import os
from collections.abc import Callable
from typing import Any

S3 = "s3://"
_LOCAL = "/quatrain-s3/"
"""Stands for `s3://` in the path that Orbax is given: it takes absolute paths of files."""
_FILE = "file://"


def teach_s3() -> None:
    """Has Orbax write arrays with TensorStore's driver for S3 from now on, in this process.

    Raises ValueError for a version of Orbax that has no such place.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = getattr(tensorstore_utils, "build_kvstore_tspec", None)
    if build is None:
        raise ValueError(
            "checkpoints in s3:// need a version of orbax-checkpoint whose arrays can be led there, as "
            "0.12.8; install that version, or set checkpoint.dir to gs:// or a folder"
        )
    if not isinstance(build, _Builder):
        tensorstore_utils.build_kvstore_tspec = _Builder(build)


class _Builder:
    """Orbax's function from the path of a checkpoint to a specification, for S3 too."""

    def __init__(self, build: Callable[..., dict[str, Any]]):
        self._build = build

    def __call__(self, directory: str, *args: Any, **options: Any) -> Any:
        if not directory.startswith(S3):
            return self._build(directory, *args, **options)
        return _in_s3(self._build(_LOCAL + directory.removeprefix(S3), *args, **options))


def _in_s3(spec: Any) -> Any:
    """`spec` with each store of files below `_LOCAL` replaced by one in S3."""
    if isinstance(spec, str) and spec.startswith(_FILE + _LOCAL):
        return _store(spec.removeprefix(_FILE))
    if isinstance(spec, dict) and spec.get("driver") == "file" and spec["path"].startswith(_LOCAL):
        return _store(spec["path"])
    if isinstance(spec, dict):
        return {key: _in_s3(value) for key, value in spec.items()}
    return [_in_s3(each) for each in spec] if isinstance(spec, list) else spec


def _store(path: str) -> dict[str, Any]:
    bucket, _, name = path.removeprefix(_LOCAL).partition("/")
    # The variables by which s3fs finds its server.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint and not region:
        region = "us-east-1"  # another store than Amazon's cannot be asked for it
    given: dict[str, Any] = {"endpoint": endpoint, "aws_region": region}
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # else it complains of each file that could have some
        given["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", "bucket": bucket, "path": name} | {key: given[key] for key in given if given[key]}
