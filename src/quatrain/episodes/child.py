"""Runs agents in a process of their own: many at a time, in one event loop, each with its time limit.

Data flow: an episode, from `agent_processes.py` -> the user's function, with a `Client` -> its reward and
metrics, or its fault. A function that is no coroutine runs in a thread. It uses the standard library alone
until the user's module is imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import re
import shlex
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from quatrain.workers.descendants import end_descendants
from quatrain.workers.faults import LONGEST_ERROR, Fault, fault_of
from quatrain.workers.user_code import check_arguments, find_function

if TYPE_CHECKING:
    from quatrain.workers.worker_script import Connection

COMMAND = "command:"
CANCEL_S = 5.0
"""Seconds that an agent gets to return after its time is over."""
MOST_IN_THREADS = 512
"""Agents that are no coroutines, at a time."""


@dataclass(frozen=True)
class Client:
    """Where an agent asks the policy, as an OpenAI client does, and which episode it plays."""

    base_url: str
    """The policy; each answer is a turn of the episode, and trained."""
    api_key: str = field(repr=False)
    model: str
    untrained_base_url: str
    """The same policy, whose answers are not trained: a simulated user, a judge."""
    seed: int
    """For the agent's own randomness: the same for the same sample of the same training step."""
    step: int
    sample: int
    greedy: bool
    """Whether answers are the likeliest: an evaluation."""

    def role(self, name: str) -> Client:
        """The same policy as another agent of this episode: with dialogues and a reward of its own.

        The agent then returns the rewards by role.
        """
        episode = self.untrained_base_url.removesuffix("/untrained/v1")
        return replace(self, base_url=f"{episode}/role/{quote(name, safe='')}/v1")

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, train: bool = True, **fields: Any
    ) -> dict[str, Any]:
        """The policy's answer to `messages`, as a message; `fields` are others of a chat request.

        For agents without an OpenAI client. `train`: whether the answer is trained. Raises RuntimeError with
        the server's words where it refuses the request.
        """
        return await asyncio.to_thread(self._chat, list(messages), train, fields)

    def _chat(self, messages: list[Any], train: bool, fields: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps({"model": self.model, "messages": messages, **fields}).encode()
        url = self.base_url if train else self.untrained_base_url
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the policy refused the request: {error.read().decode()}") from None


def host(settings: Mapping[str, Any]) -> Callable[[Connection], None]:
    """What plays episodes in a process; imports the agent."""
    for name in ("NO_PROXY", "no_proxy"):  # the policy is on this machine, whatever proxy leads elsewhere
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
    return partial(_serve, loaded(settings["spec"], settings["args"]), settings["timeout_s"])


def _serve(agent: Callable[..., Any], timeout_s: float, connection: Connection) -> None:
    loop, tasks = asyncio.new_event_loop(), set[asyncio.Task[None]]()  # a loop holds its tasks weakly
    loop.set_default_executor(ThreadPoolExecutor(MOST_IN_THREADS))

    def begin(reply: Callable[..., None], episode: bytes) -> None:
        hangs = partial(connection.reply, None, hangs=True)
        task = loop.create_task(_answered(reply, hangs, agent, episode, timeout_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        for reply, _, episode in connection.requests():
            loop.call_soon_threadsafe(begin, reply, episode)
        loop.call_soon_threadsafe(loop.stop)

    # The main thread is the agents': some of their libraries use signals, which no other may.
    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


def loaded(spec: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """The agent `path.py:function` or `command: PROGRAM …`, with its arguments by name.

    Raises ValueError if there is none, or if it does not take the arguments.
    """
    if spec.startswith(COMMAND):
        if args:
            raise ValueError("rollout.agent_args must be empty for a command; write them into the command")
        try:
            command = shlex.split(spec.removeprefix(COMMAND))
            if not command:
                raise ValueError("it names no program")
        except ValueError as error:
            raise ValueError(
                f"{spec!r} must be a program and its arguments, as a shell reads them, as command: sh play.sh"
                f"; {error}; correct it"
            ) from None
        return partial(_command, command)
    name = f"agent {spec!r}"
    function = find_function(spec, {}, "agent")
    check_arguments(function, name, given=args, inputs=("client", "row"), key="rollout.agent_args")
    try:
        inspect.signature(function).bind(client=None, row=None, **args)
    except TypeError as error:
        raise ValueError(
            f"{name} must take (client, row), and what rollout.agent_args gives; it takes "
            f"{inspect.signature(function)}: {error}"
        ) from None
    return partial(function, **args)


async def _answered(
    reply: Callable[..., None],
    hangs: Callable[[], None],
    agent: Callable[..., Any],
    episode: bytes,
    timeout_s: float,
) -> None:
    """Plays an episode, and replies its reward or its fault."""
    try:
        reply(value=await _played(hangs, agent, episode, timeout_s))
    except BaseException as error:  # also what ends a loop or a task, such as an agent's own CancelledError
        reply(fault=fault_of("the agent", error).args)


async def _played(
    hangs: Callable[[], None], agent: Callable[..., Any], episode: bytes, timeout_s: float
) -> dict[str, Any]:
    """What the agent returns: a coroutine function here, another in a thread."""
    asked = pickle.loads(episode)
    call = partial(agent, client=Client(**asked["client"]), row=asked["row"])
    loop = asyncio.get_running_loop()
    ends = loop.time() + timeout_s

    async def within(work: asyncio.Future[Any]) -> Any:
        """What `work` returns within the time that is left."""
        # Waited for, and not `wait_for`, which would wait for an agent that suppresses its cancellation.
        done, _ = await asyncio.wait({work}, timeout=max(ends - loop.time(), 0))
        if not done:
            if isinstance(work, asyncio.Task):
                work.cancel()
            done, _ = await asyncio.wait({work}, timeout=CANCEL_S)
            if not done:
                hangs()
            raise Fault(f"the agent took longer than {timeout_s:g} s (rollout.agent_timeout_s)", "timeout")
        return work.result()

    if inspect.iscoroutinefunction(agent):
        return _checked(await within(asyncio.ensure_future(_guarded(call()))))
    returned = await within(loop.run_in_executor(None, call))
    if inspect.isawaitable(returned):
        returned = await within(asyncio.ensure_future(_guarded(returned)))
    return _checked(returned)


async def _guarded(work: Awaitable[Any]) -> Any:
    """What `work` returns; what would end the loop, and all its episodes, is the agent's fault."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise fault_of("the agent", error) from None


def _checked(returned: Any) -> dict[str, Any]:
    """The reward (None: reward functions judge; or by role) and the metrics that an agent returned."""
    value: Any = returned if isinstance(returned, Mapping) else {"reward": returned}
    reward, metrics = value.get("reward"), value.get("metrics", {})
    by_role = isinstance(reward, Mapping) and len(reward) > 0
    rewards = reward if by_role else {"": reward}
    unknown = sorted(map(str, value.keys() - {"reward", "metrics"}))
    are_rewards = all(isinstance(k, str) and (v is None or _is_number(v)) for k, v in rewards.items())
    if unknown or not are_rewards or not isinstance(metrics, Mapping):
        raise Fault(
            'an agent must return a finite number, None, or {"reward": a number or None, or {role: a number '
            f'or None}}, "metrics": {{name: number}}}}; it returned {str(returned)[:200]!r}',
            "invalid",
        )
    for name, value in metrics.items():
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) and _is_number(value)):
            text = "metrics of an agent must be finite numbers, with names of letters, digits and `.-_`"
            raise Fault(f"{text}; it returned {name!r}: {value!r}"[:LONGEST_ERROR], "invalid")
    numbers = {role: None if value is None else float(value) for role, value in rewards.items()}
    return {
        "reward": numbers if by_role else numbers[""],
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def _is_number(value: Any) -> bool:
    """Whether a value is one finite number, also of numpy."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _asking(client: Client) -> dict[str, str]:
    """The variables by which clients of OpenAI's and of Anthropic's interfaces ask the policy.

    Command-line agents write titles and summaries with a smaller model, which is the policy untrained here.
    """
    helper = f"{client.model}:untrained"
    return {
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "OPENAI_MODEL": client.model,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it would send each dialogue to OpenAI
        "ANTHROPIC_BASE_URL": client.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": client.api_key,
        "ANTHROPIC_AUTH_TOKEN": client.api_key,
        "ANTHROPIC_MODEL": client.model,
        "ANTHROPIC_SMALL_FAST_MODEL": helper,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": helper,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each request, and stands in the prompt
    }


async def _command(command: Sequence[str], client: Client, row: Mapping[str, Any]) -> Any:
    """Runs a program that asks the policy; its last line may be a JSON object with `reward`.

    What else it prints goes to the run's log.
    """
    with tempfile.TemporaryDirectory(prefix="quatrain-agent-") as folder:
        path, *printed = (Path(folder) / name for name in ("row.json", "output", "errors"))
        path.write_text(json.dumps({"client": asdict(client), **row}, default=str), encoding="utf-8")
        environment = {
            **os.environ,
            **_asking(client),
            "QUATRAIN_ROW": str(path),
            "QUATRAIN_SEED": str(client.seed),
        }
        # Files and no pipes: what was printed before the time was over is there too.
        with printed[0].open("wb") as output, printed[1].open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,  # it is in this process's group, with which it ends
            )
        try:
            await process.wait()
        finally:
            if process.returncode is None:  # its time is over
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGSTOP)  # a shell would go on with its next command
                    end_descendants(process.pid)
                    process.kill()
                await process.wait()
            said, complaints = (each.read_text("utf-8", "backslashreplace").strip() for each in printed)
            lines = said.splitlines()
            last = None if process.returncode else _last_word(lines)
            for text in ("\n".join(lines[:-1] if last else lines), complaints):
                if text:
                    print(text)
    if process.returncode:
        ends = [text[-LONGEST_ERROR:] for text in (said, complaints) if text]
        raise Fault(f"the agent's program ended with status {process.returncode}", "error", "\n".join(ends))
    return last


def _last_word(lines: Sequence[str]) -> Mapping[str, Any] | None:
    """The reward in the last line that a program printed; None if it has none."""
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return last if isinstance(last, Mapping) and "reward" in last else None
