"""Rollout workers as actors of Ray, on this machine or on a cluster.

Data flow: `workers` -> factories of `RayWorker`, each of which starts an actor; the calls of a `RayWorker` ->
the `Worker` inside its actor. Weights are put into Ray's object store once a version, and the encoded bytes
of a picture once for all workers and groups. Only this module imports ray.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from quatrain.config.errors import installation
from quatrain.rollout.publish import Publisher
from quatrain.rollout.supervisor import STARTING, WorkerFactory
from quatrain.rollout.worker import FinishedGroup, GroupSpec, State, Worker, WorkerLost, WorkerRefused
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Picture, Pictures

CONTROL = "control"
"""The concurrency group of calls that an actor answers while it computes."""
CONNECT_S = 10.0
"""Seconds in which a cluster must answer."""
KEPT_BYTES = 2**28
"""Bytes of encoded pictures that stay in the object store for further groups."""
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "cpu": lambda devices: {"num_cpus": 0, "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}},
    "gpu": lambda devices: {"num_gpus": devices},
    "tpu": lambda devices: {"resources": {"TPU": devices}},
}
"""Ray's options of an actor on each platform: the devices that it gets for itself; CPU cores are shared."""

logger = logging.getLogger(__name__)


def workers(
    make: Callable[[str], Worker], count: int, *, platform: str, devices: int, timeout_s: float
) -> tuple[list[WorkerFactory], Publisher]:
    """Factories of `count` workers, and the publisher of their weights.

    `make` makes a worker of the given name; it is called in the actor's process, whose working directory is
    that of this process. `devices`: accelerators of each worker. A cluster is found as by `ray.init`: that of
    `RAY_ADDRESS`, or one that was started on this machine; otherwise, on a CPU, Ray is started here and
    ended by the publisher's `close`. Raises ValueError if ray is not installed or cannot start.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"rollout.workers needs Ray, which cannot be imported: {error}; install it with "
            f"{installation('ray')}, or set rollout.workers to 0"
        ) from error
    own = _start(ray, alone=platform == "cpu")
    options = {"num_cpus": 1, **OPTIONS[platform](devices)}
    _warn_of_missing_devices(ray, options, count, STARTING * timeout_s)

    pictures = StoredPictures(ray)

    def factory(number: int) -> Worker:
        name = f"ray {number}"
        return RayWorker(ray, options, partial(make, name), name, pictures, timeout_s=timeout_s)

    return [partial(factory, number) for number in range(count)], ObjectStore(ray, owned=own)


class RayWorker:
    """A `Worker` in an actor. Raises WorkerLost if the actor has died or does not answer in `timeout_s`."""

    labels_versions = True

    def __init__(
        self,
        ray: ModuleType,
        options: dict[str, Any],
        make: Callable[[], Worker],
        name: str,
        pictures: StoredPictures,
        *,
        timeout_s: float,
    ):
        self._ray, self._timeout_s, self.name, self._pictures = ray, timeout_s, name, pictures
        self._actor = _actor_class(ray).options(**options).remote(os.getcwd())
        try:
            self.process, self.num_slots = self._get(self._actor.start.remote(make), STARTING * timeout_s)
        except BaseException:
            self.close()
            raise
        self.name = f"{name}, process {self.process}"

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """The actor reads the weights from the object store."""
        loaded: int = self._get(self._actor.call.remote("load", weights, version, timeout_s), timeout_s)
        return loaded

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Sends groups to the actor; their pictures by reference."""
        stored = self._pictures.of([group.prompt for group in groups])
        submitted = self._actor.submit.remote([_without_bytes(group) for group in groups], version, stored)
        self._get(submitted, self._timeout_s)

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Groups that the actor has finished."""
        taking = self._actor.take.remote(timeout_s)
        finished: list[FinishedGroup] = self._get(taking, self._timeout_s)
        return finished

    def state(self) -> State:
        """What the worker in the actor does."""
        state: State = self._get(self._actor.state.remote(), self._timeout_s)
        return state

    def close(self) -> None:
        """Kills the actor."""
        self._ray.kill(self._actor, no_restart=True)

    def _get(self, reference: Any, timeout_s: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except errors.GetTimeoutError as error:
            raise WorkerLost(f"its actor gave no answer for {timeout_s:g} s") from error
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError):  # to start it again would not help
                raise WorkerRefused(
                    f"rollout worker {self.name}, whose mesh is rollout.mesh, cannot serve this run: {cause}"
                ) from error
            raise WorkerLost(str(cause) or repr(cause)) from error
        except errors.RayError as error:
            raise WorkerLost(f"its actor has died: {_first_line(error)}") from error


class ObjectStore:
    """Publishes weights in Ray's object store: on one machine, all workers read the same memory."""

    def __init__(self, ray: ModuleType, *, owned: bool):
        self._ray, self._owned = ray, owned

    def publish(self, weights: Any, version: int) -> Any:
        """The reference of the stored weights, whose object is freed with the last reference."""
        return self._ray.put(weights)

    def discard(self, handle: Any) -> None:
        """Nothing to do: the caller drops its reference."""

    def close(self) -> None:
        """Ends Ray if this run has started it."""
        if self._owned:
            self._owned = False
            self._ray.shutdown()


class StoredPictures:
    """Encoded pictures in Ray's object store, each once; the last ones stay, up to KEPT_BYTES."""

    def __init__(self, ray: ModuleType):
        self._ray, self._lock, self._num_bytes = ray, threading.Lock(), 0
        self._kept: OrderedDict[int, tuple[Any, int]] = OrderedDict()  # references and sizes, by id

    def of(self, prompts: Iterable[Prompt]) -> dict[int, Any]:
        """References of the bytes of the pictures of `prompts`, by their ids.

        Raises ValueError for a file that has changed.
        """
        used = {each.id: each for prompt in prompts if prompt.pictures for each in prompt.pictures.used}
        with self._lock:  # the workers' threads share it
            for number, picture in used.items():
                if number not in self._kept:
                    content = picture.encoded
                    if Picture.of(content, picture.size) != picture:  # workers would see another than we
                        file = f"{picture.source!r} has changed"
                        raise ValueError(f"the file of a picture must not change during a run; {file}")
                    self._kept[number] = self._ray.put(content), len(content)
                    self._num_bytes += len(content)
                self._kept.move_to_end(number)
            found = {number: self._kept[number][0] for number in used}
            while self._num_bytes > KEPT_BYTES:
                _, (_, num_bytes) = self._kept.popitem(last=False)
                self._num_bytes -= num_bytes
        return found


def _without_bytes(group: GroupSpec) -> GroupSpec:
    """A group whose pictures have no bytes; text and columns, which have them again, no worker reads."""
    pictures = group.prompt.pictures
    if pictures is None:
        return group
    named = {picture.id: replace(picture, source=b"") for picture in pictures.used}
    prompt = replace(group.prompt, text="", columns={}, pictures=Pictures(pictures.ids, named))
    return replace(group, prompt=prompt)


def _with_bytes(group: GroupSpec, contents: Mapping[int, bytes]) -> GroupSpec:
    """The inverse of `_without_bytes`, but for text and columns."""
    pictures = group.prompt.pictures
    if pictures is None:
        return group
    whole = {number: replace(each, source=contents[number]) for number, each in pictures.by_id.items()}
    return replace(group, prompt=replace(group.prompt, pictures=Pictures(pictures.ids, whole)))


class _Actor:
    """What runs in the actor's process."""

    def __init__(self, directory: str):
        os.chdir(directory)

    def start(self, make: Callable[[], Worker]) -> tuple[int, int | None]:
        self._worker = make()
        return os.getpid(), self._worker.num_slots

    def submit(self, groups: Sequence[GroupSpec], version: int, stored: Mapping[int, Any]) -> None:
        contents = dict(zip(stored, _values_of([*stored.values()]), strict=True))
        self._worker.submit([_with_bytes(group, contents) for group in groups], version)

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        return [
            # Who asked has the pictures.
            replace(group, samples=[(replace(prompt, pictures=None), done) for prompt, done in group.samples])
            for group in self._worker.take(timeout_s)
        ]

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def state(self) -> State:
        return self._worker.state()


def _values_of(references: list[Any]) -> list[Any]:
    """What was put into the object store, in an actor."""
    if not references:
        return []
    import ray

    values: list[Any] = ray.get(references)
    return values


def _actor_class(ray: ModuleType) -> Any:
    """`_Actor` for Ray; its `state` is answered by a thread of its own."""
    state = ray.method(concurrency_group=CONTROL)(_Actor.state)
    controlled = type("RolloutWorker", (_Actor,), {"state": state})
    return ray.remote(concurrency_groups={CONTROL: 1})(controlled)


def _start(ray: ModuleType, *, alone: bool) -> bool:
    """Connects to a cluster, or, if it may be `alone`, starts Ray here; whether this process has done so.

    On accelerators there must be a cluster: Ray started here would give workers the devices that train.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "not set")
    try:
        _connect_to(address)
        with _signal_handlers_kept(), warnings.catch_warnings():
            # Ray's processes are forked and become another program at once, which is safe beside threads.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(None if alone else "auto", include_dashboard=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"rollout.workers needs a Ray cluster; connecting to one (RAY_ADDRESS is {address}) failed: "
            f"{_first_line(error)}; start one with `ray start --head`, or, on a CPU, unset RAY_ADDRESS to "
            "start Ray for this run alone"
        ) from error
    return True


def _warn_of_missing_devices(ray: ModuleType, options: dict[str, Any], count: int, limit_s: float) -> None:
    """Warns if the cluster has too few accelerators for `count` workers now; it may grow."""
    each = {"GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    there = ray.cluster_resources()
    for name, number in each.items():
        if count * number > there.get(name, 0):
            logger.warning(
                "rollout.workers %d need %d %s, and the Ray cluster has %d now; a worker that gets none for "
                "%g s ends the run",
                *(count, count * number, name, there.get(name, 0), limit_s),
            )


def _connect_to(address: str) -> None:
    """Raises OSError if nobody answers at HOST:PORT; ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets a handler of SIGTERM, which would replace the one that ends a run with a checkpoint."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
