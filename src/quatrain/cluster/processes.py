"""Joining the processes that train together, what they tell each other, and leaving.

Stands under every room that writes files or prints: only the main process does. The command line joins
before anything is computed and leaves at the end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from quatrain.cluster import roll_call
from quatrain.cluster.detect import Place, detect

FAILED = 1
# JAX's runtime connects processes that were all there a moment ago.
CONNECT_S = 30
# A process that died breaks the others' collectives a little before the line to it ends.
NEWS_S = 2.0
LONGEST_SHOWN_VALUE = 80

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Membership:
    lines: roll_call.Lines
    shutdown_timeout_s: float


_membership: _Membership | None = None


def is_main_process() -> bool:
    """True in the one process that writes the run's files and talks to the user (process 0)."""
    return jax.process_index() == 0


def num_processes() -> int:
    """Processes that train together; 1 unless `jax.distributed` was initialised."""
    return jax.process_count()


def process_index() -> int:
    """Which of them this one is, from 0."""
    return jax.process_index()


def joined() -> bool:
    """Whether this process trains together with others; asking initialises no device."""
    return jax.distributed.is_initialized()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_timeout_s: int = 300,
    heartbeat_timeout_s: int = 60,
    shutdown_timeout_s: int = 600,
) -> None:
    """Joins the other processes, before anything is computed; does nothing where there is only this one.

    `coordinator` (HOST:PORT of process 0), `num_processes` and `process_id` come together; without them the
    cluster says them, where there is one (`clusters.detect`). From then on, a process that fails or dies
    ends the others within `heartbeat_timeout_s`, with an error that names it. Raises ValueError for bad
    arguments, OSError where this process cannot listen, and TimeoutError within `start_timeout_s` where the
    coordinator is not reached or a process does not arrive.
    """
    place = _given(coordinator, num_processes, process_id) or detect(os.environ)
    if place is None or place.num_processes == 1:
        return
    if joined():
        raise RuntimeError("processes join once; this one has joined already")
    if place.process_id == 0:
        lines = roll_call.call_roll(place.coordinator, place.num_processes, start_timeout_s)
    else:
        arguments = (place.coordinator, place.num_processes, place.process_id, start_timeout_s)
        lines = {0: roll_call.answer_roll(*arguments)}
    host, _ = roll_call.split_address(place.coordinator)
    # SIGTERM ends a process, alone or not; JAX's service would only take note of it.
    with suppress(AttributeError):  # the name of a service some versions may not have
        jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        coordinator_bind_address=place.coordinator if roll_call.is_loopback(host) else None,
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=min(start_timeout_s, CONNECT_S),
        heartbeat_timeout_seconds=heartbeat_timeout_s,
        shutdown_timeout_seconds=shutdown_timeout_s,
    )
    global _membership
    open_lines = roll_call.Lines(place.process_id, lines, _end_after, silence_s=heartbeat_timeout_s)
    _membership = _Membership(open_lines, shutdown_timeout_s)


def _given(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Place | None:
    """The place the user gives, checked; None where nothing is given."""
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    named = [f"{option} {value}" for option, value in given.items() if value is not None]
    if not named:
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"{', '.join(given)} come together; got only {' and '.join(named)}; give all three, or none "
            "where a TPU pod, SLURM or GKE says them"
        )
    roll_call.split_address(coordinator)
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(
            f"process ids count from 0 to one less than the processes, of which there is one at least; got "
            f"--num-processes {num_processes} and --process-id {process_id}; give each process its own id"
        )
    return Place(coordinator, num_processes, process_id)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every process, in process order, in every process; `value` is what JSON can hold."""
    if not joined():
        return [value]
    content = np.frombuffer(json.dumps([jax.process_index(), value]).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([content.size], np.int32))
    # A power of two, so that few sizes are compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    # JSON ends where the padding begins; rows come in the order of devices, which need not be that of ids.
    return [value for _, value in sorted(json.loads(row.tobytes().rstrip(b"\0")) for row in rows)]


def decided_by_main(decide: Callable[[], Any]) -> Any:
    """What `decide` gives in the main process, in every process; it is called there alone.

    For what need not come out the same in each: files, clocks, a user's code. What JSON can hold.
    """
    return gather_objects(decide() if is_main_process() else None)[0]


def assert_same(what: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError in all processes where a key of `values` is not the same in all.

    The message names each such key with the value of each process. `values` holds what JSON can hold, and
    no secrets.
    """
    each = gather_objects(dict(values))
    keys = sorted({key for mapping in each for key in mapping})
    different = [
        f"{key} is "
        + ", ".join(f"{_shown(mapping, key)} in process {process}" for process, mapping in enumerate(each))
        for key in keys
        if any(key not in mapping or mapping[key] != each[0].get(key) for mapping in each)
    ]
    if different:
        raise ValueError(
            f"all processes need the same {what}: {'; '.join(different)}; start all with the same"
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "missing"
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN_VALUE else text[: LONGEST_SHOWN_VALUE - 1] + "…"


def shutdown() -> None:
    """Leaves once all processes have come to it; does nothing where this one is alone.

    Raises TimeoutError after `shutdown_timeout_s`, naming those that did not come.
    """
    global _membership
    if _membership is None:
        return
    _membership.lines.leave(_membership.shutdown_timeout_s)
    jax.distributed.shutdown()
    _membership.lines.close()
    _membership = None


def hear() -> None:
    """Waits a moment for the news that another process failed first, with which this one ends.

    For a process that has met an error: a collective breaks where the process at its other end has died.
    """
    if _membership is not None:
        time.sleep(NEWS_S)


def abandon(message: str, status: int = FAILED) -> None:
    """Ends this process with `status` after it has failed, and tells the others, who end with an error.

    Returns where this process is alone.
    """
    if _membership is not None:
        _membership.lines.fail(f"failed: {message}")
        _exit(status)


def _end_after(process: int, message: str) -> NoReturn:
    """Called when another process has failed or died; the main thread may wait for it in a collective.

    Asks JAX nothing: where no device was used yet, it would wait for the one that is gone.
    """
    logger.error("process %d %s", process, message)
    _exit(roll_call.ANOTHER_FAILED)


def _exit(status: int) -> NoReturn:
    """Ends at once: an orderly exit of JAX would wait for processes that do not come."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
