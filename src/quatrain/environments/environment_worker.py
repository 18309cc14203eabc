"""Runs environments in the threads of a worker process (`workers/worker.py`).

Data flow: requests of `environment_workers.py` (operation, episode, argument) -> `InThreads` -> a reply with
the `value` or the `fault` of a call, and news when a call hangs. When no more requests can come, the
environments that are being closed may end.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from quatrain.environments.environment import EnvironmentFault, StepResult, format_error, run_guarded
from quatrain.environments.environment_threads import InThreads
from quatrain.environments.load_environment import load_environments, load_tools

if TYPE_CHECKING:
    from quatrain.workers.worker import Connection


def serve(connection: Connection, settings: Mapping[str, Any]) -> None:
    """Answers requests until no more can come; the first is to load the environment."""
    number, _ = connection.request()
    specs = settings["specs"]
    try:
        environments = load_tools(specs) if isinstance(specs, list) else load_environments(specs)
    except BaseException as error:  # of the user's module
        text = str(error) if isinstance(error, ValueError) else format_error(error)
        return connection.reply(number, kind="refused", detail=text)
    connection.reply(number, value={})
    calls = InThreads(environments, settings["timeout_s"], partial(connection.reply, None, hangs=True))
    while True:
        try:
            number, operation, *arguments = connection.request()
        except EOFError:
            return calls.drain()
        _do(calls, partial(connection.reply, number), operation, *arguments)


def _do(
    calls: InThreads, reply: Callable[..., None], operation: str, episode: int = 0, argument: Any = None
) -> None:
    """Begins what is asked for."""
    match operation:
        case "begin":
            try:
                columns = run_guarded("copying the columns", partial(pickle.loads, argument))
            except EnvironmentFault as fault:
                return reply(value={"fault": fault.args})
            future: Future[Any] = calls.begin(episode, columns)
        case "step":
            future = calls.step(episode, argument)
        case "end":
            future = calls.end(episode)
        case _:  # ping or abandon
            if operation == "abandon":
                calls.abandon(episode)
            return reply(value={})
    return future.add_done_callback(partial(_answer, reply))


def _answer(reply: Callable[..., None], future: Future[Any]) -> None:
    """Replies the result or the fault of a call."""
    fault = future.exception()
    if fault is not None:
        return reply(value={"fault": fault.args})
    value = future.result()
    value = [value.messages, value.reward, value.done] if isinstance(value, StepResult) else value
    try:
        reply(value={"value": value})
    except (TypeError, ValueError, RecursionError) as error:
        text = f"an environment in a worker must return what JSON can have: {format_error(error)}; correct it"
        reply(value={"fault": (text, "invalid", "")})
    return None
