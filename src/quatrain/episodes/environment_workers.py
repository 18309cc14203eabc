"""Environments in worker processes, each of which hosts many.

Data flow: `InWorkers` -> a process (`workers/worker_script.py`) -> `host`, which runs the environments
in threads with the time limit -> replies. An environment lives in one process. Replies are JSON, not pickles,
because a tool may run what the model wrote.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from quatrain.config.errors import listed
from quatrain.config.sections.rollout import COLUMN
from quatrain.data.messages import with_picture_parts
from quatrain.data.pictures import PictureReader, url_part
from quatrain.episodes.environment import CLOSED, Ended, InitialObservation, StepResult
from quatrain.episodes.environment_threads import InThreads
from quatrain.episodes.load_environment import AnyEnvironments, load_environments, load_tools
from quatrain.workers.faults import Fault, FaultKind, format_error, run_guarded
from quatrain.workers.loop_thread import ClosedError, LoopThread, running_future
from quatrain.workers.pool import Failure, Host, Hosts, Kind
from quatrain.workers.user_code import check_importable
from quatrain.workers.worker_process import GRACE_S, NO_REPLY, not_started, pickled

if TYPE_CHECKING:
    from quatrain.workers.worker_script import Connection


class InWorkers:
    """`InThreads` in up to `num_workers` processes, which start when they are needed.

    `specs` is the environment `path.py:Class`, or several by a column, as `rollout.environment` has them, or
    a list of tools `path.py:function`; the processes import them. Each call may take `timeout_s` seconds. A
    process in which a call takes too long gets no new episodes, and is ended after its others; all the
    episodes in a process that dies have "crash" faults. `memory_mb` are the MiB of private memory of a
    process, 8 of them for each thread; None: not limited. `begin` raises ValueError for columns that cannot
    be pickled.

    Raises ValueError for a class or function of the running program, which other processes cannot import.
    """

    keeps = False

    def __init__(
        self,
        specs: str | Mapping[str, str] | Sequence[str],
        num_workers: int,
        timeout_s: float,
        memory_mb: int | None = None,
    ):
        # Named as `load_environment.py` names them.
        if isinstance(specs, str):
            paths, self._name = [specs], f"environment {specs}"
        elif isinstance(specs, Mapping):
            paths = [path for name, path in specs.items() if name != COLUMN]
            self._name = f"environments of the column `{specs[COLUMN]}`"
        else:
            paths = specs = list(specs)
            self._name = f"tools {listed(str(path).rpartition(':')[2] for path in paths)}"
        for path in paths:
            what = f"{self._name.split()[0]} in worker processes"
            check_importable(path, what, "set rollout.environment_workers to 0")
        settings = {
            "host": f"{__name__}:host",
            "specs": specs,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
        }
        self._homes: dict[int, Host] = {}  # of the episodes
        self._thread = LoopThread("quatrain-environments", CLOSED, lambda: self._hosts.kill_all(CLOSED))
        limit_s = timeout_s + GRACE_S
        self._hosts = Hosts(
            *(self._thread, "environments", self._name, settings),
            most=num_workers,
            end_s=limit_s,
            answer_s=limit_s,
        )

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[InitialObservation]:
        return self._ask("begin", episode, pickled(columns, "environments in worker processes"))

    def step(self, episode: int, completion: str) -> Future[StepResult | None]:
        return self._ask("step", episode, completion)

    def end(self, episode: int) -> Future[Ended]:
        return self._ask("end", episode)

    def kept(self, episode: int) -> None:
        return None

    def abandon(self, episode: int) -> None:
        self._ask("abandon", episode)

    def close(self) -> None:
        self._thread.close()

    def _ask(self, operation: str, episode: int, argument: Any = None) -> Future[Any]:
        future = running_future()
        try:
            self._thread.do(self._pass_on, future, operation, episode, argument)
        except RuntimeError as error:
            closed = isinstance(error, ClosedError)
            self._settle(future, operation, Failure("crash", CLOSED) if closed else not_started(error))
        return future

    # In the thread:

    def _pass_on(self, future: Future[Any], operation: str, episode: int, argument: Any) -> None:
        if operation == "begin":
            self._homes[episode] = self._hosts.chosen(episode)
        # Kept by episode, because a retired process still serves those that live in it.
        host = self._homes.get(episode)
        if host is None:  # abandoned before
            return self._settle(future, operation, Failure("crash", "there is no such episode"))
        if operation in ("end", "abandon"):
            del self._homes[episode]
        reply = host.call(operation, episode, *([] if argument is None else [argument]))
        if operation == "abandon":
            return host.leave(episode)
        return reply.add_done_callback(partial(self._answered, future, operation, episode, host))

    def _answered(
        self, future: Future[Any], operation: str, episode: int, host: Host, reply: Future[Any]
    ) -> None:
        if operation == "end":
            host.leave(episode)
        try:
            self._settle(future, operation, reply.result())
        except (ValueError, LookupError, TypeError):  # users' code wrote into the socket
            self._settle(future, operation, NO_REPLY)
            host.kill(NO_REPLY)

    def _settle(self, future: Future[Any], operation: str, outcome: Any) -> None:
        match outcome:
            case Failure(kind, detail):
                text = f"{self._name}: {'reset' if operation == 'begin' else operation}: {detail}"
                future.set_exception(Fault(text, _FAULTS.get(kind, "crash")))
            case Fault():
                future.set_exception(outcome)
            case value:
                future.set_result(_VALUES[operation](value))


EnvironmentCalls = InThreads | InWorkers
_FAULTS: Mapping[Kind, FaultKind] = {"timeout": "timeout", "refused": "error"}
_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "begin": lambda value: _messages(value) if isinstance(value, list) else value,
    "step": lambda value: None if value is None else StepResult(_messages(value[0]), value[1], value[2]),
    "end": lambda value: Ended(*value),
}


def _messages(value: list[Any]) -> tuple[Any, ...]:
    """Messages that a process sent. Of pictures the header is read again: no size is taken on trust."""
    return tuple(PictureReader(verify=False).placed(value))


def host(settings: Mapping[str, Any]) -> Callable[[Connection], None]:
    """What serves environments in a process, in threads; imports users' classes and functions."""
    specs = settings["specs"]
    environments = load_tools(specs) if isinstance(specs, list) else load_environments(specs)
    return partial(_serve, environments, settings["timeout_s"])


def _serve(environments: AnyEnvironments, timeout_s: float, connection: Connection) -> None:
    calls = InThreads(environments, timeout_s, partial(connection.reply, None, hangs=True))
    for reply, operation, episode, *arguments in connection.requests():
        if operation == "abandon":
            calls.abandon(episode)
            reply(value={})
            continue
        try:
            # Unpickled here and not with the request: columns of a class that is not known here are a fault
            # of this episode, and not the end of the process.
            if operation == "begin":
                arguments = [run_guarded("copying the columns", partial(pickle.loads, *arguments))]
            getattr(calls, operation)(episode, *arguments).add_done_callback(partial(_answer, reply))
        except Fault as fault:
            reply(fault=fault.args)
    calls.drain()  # those that are being closed may end


def _answer(reply: Callable[..., None], future: Future[Any]) -> None:
    """Replies the result or the fault of a call."""
    fault = future.exception()
    if fault is not None:
        return reply(fault=fault.args)
    value = future.result()
    if isinstance(value, StepResult):
        value = [with_picture_parts(value.messages, url_part), value.reward, value.done]
    elif isinstance(value, tuple) and not isinstance(value, Ended):
        value = with_picture_parts(value, url_part)
    try:
        reply(value=value)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"an environment in a worker must return what JSON can have: {format_error(error)}; correct it"
        reply(fault=(text, "invalid", ""))
    return None
