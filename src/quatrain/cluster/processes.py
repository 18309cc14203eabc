"""Connects the processes of a run, exchanges small objects between them, and disconnects them at the end.

Used by every package that writes files or prints, because only the main process does that. The command line
calls `initialize` before any computation and `shutdown` at the end.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from quatrain.cluster import rendezvous
from quatrain.cluster.detect import ClusterPlace, detect
from quatrain.cluster.stop import Agreement
from quatrain.types.pictures import IN_JSON, PicturesInJson

FAILED = 1
# Short, because all processes have just been reachable when JAX's runtime connects them.
CONNECT_S = 30
# When a process dies, collectives of the others fail slightly before their connection to it is closed.
FAILURE_MESSAGE_S = 2.0
LONGEST_SHOWN_VALUE = 80
# The most that one collective brings to a device, and the least that it is padded to; powers of two.
MOST_BYTES = 1 << 26
LEAST_BYTES = 1 << 8
ARRAY = "quatrain.array"  # the key that marks a numpy array in exchanged JSON

logger = logging.getLogger(__name__)


_connections: rendezvous.Connections | None = None
"""Of this process to the others of the run; None in a run of one process."""
_shutdown_timeout_s = 0.0


def is_main_process() -> bool:
    """True in the one process that writes the run's files and talks to the user (process 0)."""
    return jax.process_index() == 0


def num_processes() -> int:
    """Number of processes of the run; 1 unless `jax.distributed` was initialised."""
    return jax.process_count()


def process_index() -> int:
    """Rank of this process, from 0."""
    return jax.process_index()


def joined() -> bool:
    """Whether the run has several, connected processes; calling this does not initialise any device."""
    return jax.distributed.is_initialized()


def agreement() -> Agreement | None:
    """Where the processes of the run agree on a safe point to stop at; None in a run of one process."""
    return None if _connections is None else _connections.agreement


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_timeout_s: int = 300,
    heartbeat_timeout_s: int = 60,
    shutdown_timeout_s: int = 600,
) -> None:
    """Connects to the other processes of the run, before any computation.

    Does nothing in a run of one process.
    `coordinator` (HOST:PORT of process 0), `num_processes` and `process_id` must be given together; without
    them the cluster is detected (`detect.detect`). Afterwards, if a process fails or dies, the others end
    within `heartbeat_timeout_s` with an error that names it. Raises ValueError for invalid arguments, OSError
    if process 0 cannot listen on its port, and TimeoutError if the coordinator cannot be reached or a process
    does not connect within `start_timeout_s`.
    """
    place = _place_from_arguments(coordinator, num_processes, process_id) or detect(os.environ)
    if place is None or place.num_processes == 1:
        return
    if joined():
        raise RuntimeError("initialize must be called once per process; this process is connected already")
    token = _token(place.coordinator)
    address, count, process = place.coordinator, place.num_processes, place.process_id
    # First our own connections: where a process is missing, wrong or twice there, JAX's runtime ends all with
    # an abort in C++, which no Python can catch and which names neither the process nor the address; and
    # processes that differ in their number it connects without a word.
    if process == 0:
        connections = rendezvous.accept_processes(address, count, start_timeout_s, token)
    else:
        connections = {0: rendezvous.connect_to_main(address, count, process, start_timeout_s, token)}
    # `stop.py` handles SIGTERM; JAX's preemption service would catch the signal and only record it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=None if process else rendezvous.bind_address(address),
        num_processes=count,
        process_id=process,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=min(start_timeout_s, CONNECT_S),
        heartbeat_timeout_seconds=heartbeat_timeout_s,
        shutdown_timeout_seconds=shutdown_timeout_s,
    )
    global _connections, _shutdown_timeout_s
    _connections = rendezvous.Connections(process, connections, _end_after, silence_s=heartbeat_timeout_s)
    _shutdown_timeout_s = shutdown_timeout_s


def _token(coordinator: str) -> str:
    """The secret of the run's processes; raises ValueError if other hosts can connect and there is none."""
    token = os.environ.get(rendezvous.TOKEN, "")
    host, _ = rendezvous.split_address(coordinator)
    if not (token or rendezvous.is_loopback(host)):
        raise ValueError(
            f"processes that connect over a network need a secret that they share: {coordinator} is not an "
            f"address of this machine alone, and {rendezvous.TOKEN} is not set; set it to the same value in "
            "all processes, in the environment or in .env, e.g. that of `openssl rand -hex 32`"
        )
    return token


def _place_from_arguments(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> ClusterPlace | None:
    """The place given by the user's arguments, validated; None if there are none."""
    options = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    named = [f"{option} {value}" for option, value in options.items() if value is not None]
    if not named:
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"{', '.join(options)} must be given together; got only {' and '.join(named)}; give all three, "
            "or none on a TPU pod, under SLURM or on GKE, where they are detected"
        )
    rendezvous.split_address(coordinator)
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process ids must go from 0 to the number of processes minus 1; got "
            f"--num-processes {num_processes} and --process-id {process_id}; give each process its own id"
        )
    return ClusterPlace(coordinator, num_processes, process_id)


def gather_objects(value: Any) -> list[Any]:
    """The JSON-serialisable `value` of every process, in process order; the same list in every process.

    A value may also have pictures, of which the others get the encoded bytes.
    """
    if not joined():
        return [value]
    content = json.dumps(value, default=PicturesInJson().written).encode()
    # Rows come in device order, which may differ from the order of process ids. Sizes go first: all processes
    # must take part in each collective with arrays of one shape.
    heads = multihost_utils.process_allgather(_words_of(jax.process_index(), len(content)))
    processes, sizes = zip(*map(_numbers_in, heads))
    contents = [bytearray() for _ in sizes]
    for begin, length in _pieces(max(sizes), MOST_BYTES // len(sizes)):
        rows = multihost_utils.process_allgather(_piece(content, begin, length))
        for gathered, row, size in zip(contents, rows, sizes):
            gathered += row.tobytes()[: max(size - begin, 0)]
    return [_loaded(gathered) for _, gathered in sorted(zip(processes, contents))]


def _loaded(content: bytearray) -> Any:
    """The value of a text that may have pictures; without any, nothing is called for each object."""
    has_some = IN_JSON.encode() in content
    return json.loads(content, object_hook=PicturesInJson().read if has_some else None)


def decided_by_main(decide: Callable[[], Any]) -> Any:
    """Calls `decide` in the main process only and broadcasts its JSON-serialisable result to all processes.

    The result may also have numpy arrays, and pictures, of which the others get the encoded bytes.
    For results that could differ between processes: those that depend on files, clocks or users' code. Its
    memory does not depend on the number of processes.
    """
    if not joined():
        return decide()
    content = json.dumps(decide(), default=_written(PicturesInJson())).encode() if is_main_process() else b""
    [size] = _numbers_in(multihost_utils.broadcast_one_to_all(_words_of(len(content))))
    pieces = (_piece(content, *piece) for piece in _pieces(size, MOST_BYTES))
    decided = b"".join(multihost_utils.broadcast_one_to_all(piece).tobytes() for piece in pieces)
    return json.loads(decided[:size], object_hook=_read(PicturesInJson()))


def _written(pictures: PicturesInJson) -> Callable[[Any], dict[str, Any]]:
    """What makes of a numpy array or a picture what `_read` reads."""

    def written(value: Any) -> dict[str, Any]:
        if not isinstance(value, np.ndarray):
            return pictures.written(value)
        content = base64.b64encode(value.tobytes()).decode()
        return {ARRAY: content, "dtype": value.dtype.str, "shape": value.shape}

    return written


def _read(pictures: PicturesInJson) -> Callable[[dict[str, Any]], Any]:
    """What makes of JSON's objects the arrays and pictures that they stand for, or leaves them."""

    def read(values: dict[str, Any]) -> Any:
        if ARRAY not in values:
            return pictures.read(values)
        content = base64.b64decode(values[ARRAY])
        return np.frombuffer(content, values["dtype"]).reshape(values["shape"])

    return read


def _words_of(*numbers: int) -> np.ndarray:
    """64-bit numbers as pairs of 32-bit words: JAX's arrays have no 64-bit integers by default."""
    return np.array(numbers, np.uint64).view(np.uint32)


def _numbers_in(words: np.ndarray) -> list[int]:
    """The inverse of `_words_of`."""
    return [int(number) for number in np.ascontiguousarray(words, np.uint32).view(np.uint64)]


def _pieces(size: int, most: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of the pieces in which `size` bytes are exchanged, the last one padded.

    Lengths are powers of two of at most `most` bytes, so that few programs are compiled.
    """
    # A power of two, also where an odd number of processes shares MOST_BYTES: each size is one more
    # compilation.
    most = max(1 << most.bit_length() - 1, LEAST_BYTES)
    begin = 0
    while begin < size:
        length = min(max(1 << (size - begin - 1).bit_length(), LEAST_BYTES), most)
        yield begin, length
        begin += length


def _piece(content: bytes, begin: int, length: int) -> np.ndarray:
    """`length` bytes of `content` from `begin` on, padded with zeros, as 32-bit words.

    Words, because a broadcast is the sum of the main process's words and the others' zeros: bytes would be
    summed in wider words, and floating-point numbers would lose NaN payloads and the sign of zero.
    """
    return np.frombuffer(content[begin : begin + length].ljust(length, b"\0"), np.uint32)


def assert_same(what: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError in all processes if a key of `values` differs between processes.

    The message names each such key with the value of each process. `values` must be JSON-serialisable and
    contain no secrets.
    """
    by_process = gather_objects(dict(values))

    def shown(key: str) -> list[str]:
        texts = (json.dumps(v[key], ensure_ascii=False) if key in v else "missing" for v in by_process)
        most = LONGEST_SHOWN_VALUE
        return [text if len(text) <= most else text[: most - 1] + "…" for text in texts]

    different = [
        f"{key} is " + ", ".join(f"{text} in process {process}" for process, text in enumerate(shown(key)))
        for key in sorted(set().union(*by_process))
        if any(key not in values or values[key] != by_process[0].get(key) for values in by_process)
    ]
    if different:
        raise ValueError(
            f"all processes need the same {what}: {'; '.join(different)}; start all with the same"
        )


def shutdown() -> None:
    """Disconnects once all processes have called this; does nothing in a run of one process.

    Raises TimeoutError after `shutdown_timeout_s`, naming the processes that have not called it.
    """
    global _connections
    if _connections is None:
        return
    _connections.leave(_shutdown_timeout_s)
    jax.distributed.shutdown()
    _connections.close()
    _connections = None


def wait_for_failure_message() -> None:
    """Waits FAILURE_MESSAGE_S seconds, so that a message that another process failed first can end this one.

    Called after an error in this process, because a collective raises an error here if another process has
    died.
    """
    # The message, not this error, says what has happened: a collective breaks before the connection is
    # closed.
    if _connections is not None:
        time.sleep(FAILURE_MESSAGE_S)


def abandon(message: str, status: int = FAILED) -> None:
    """Tells the other processes that this one has failed, so that they end too, and exits with `status`.

    In a run of one process it does nothing and returns.
    """
    if _connections is not None:
        _connections.fail(f"failed: {message}")
        _exit(status)


def _end_after(process: int, message: str) -> NoReturn:
    """Ends this process because another has failed or died; the main thread may be blocked in a collective.

    No function of JAX is called: if no device was used yet, it would wait for the process that has died.
    """
    logger.error("process %d %s", process, message)
    _exit(rendezvous.ANOTHER_FAILED)


def _exit(status: int) -> NoReturn:
    """Exits immediately: a regular exit of JAX would wait for processes that have died."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
