"""The forms in which a reward function may be written and may return, brought into one of each.

Data flow: a function named in `reward.functions` (`user_code.find_function`) -> `prepared` -> a call, in a
worker process or in the process of the run -> `plain_rewards` -> `calls.py`. It imports neither JAX nor
numpy. Functions are called as in TRL, `f(completions=[…], …) -> [number]`. verl's form, `f(data_source,
solution_str, ground_truth, extra_info)` for one sample, is recognised by its parameter `solution_str`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from inspect import Parameter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quatrain.workers.user_code import VARIADIC, check_arguments, signature_of

if TYPE_CHECKING:
    import numpy as np

INPUTS = ("prompts", "completions", "completion_ids", "finish_reasons")
"""Arguments that every call in TRL's form may get, beside the columns."""
TRAINER_STATE = "trainer_state"
OF_TRL = ("log_metric", "log_extra", TRAINER_STATE)
"""Further arguments of TRL, which a function gets if it names them."""
VERL_INPUTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def prepared(function: Callable[..., Any], spec: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` with its arguments `args` bound, in TRL's form.

    A call of an asynchronous function returns its result. Raises ValueError if it does not take these
    arguments.
    """
    name = f"reward function {spec!r}"
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    names = (signature_of(function) or {}).keys()
    verl = "solution_str" in names and not {"completions", "prompts"} & names
    if args:
        inputs = VERL_INPUTS if verl else INPUTS
        check_arguments(
            function, name, given=args, inputs=inputs, key=f"the args of {spec!r} in reward.functions"
        )
        function = functools.partial(function, **args)
    if verl:
        return _in_lists(function, frozenset(args), waits)
    asked = [name for name in OF_TRL if name in names and name not in args]
    function = _awaited(function) if waits else function
    return _with_log(function, asked) if asked else function


@dataclass(frozen=True)
class TrainerState:
    """What is known of the state that TRL passes as `trainer_state`."""

    global_step: int
    """The training steps that made the weights that sampled."""


def _with_log(function: Callable[..., Any], asked: Sequence[str]) -> Callable[..., Any]:
    """A function that gets the arguments `asked` of TRL, as one that returns what it logs too."""

    def call(**arguments: Any) -> Logged:
        log = Log()
        given: dict[str, Any] = {"log_metric": log.log_metric, "log_extra": log.log_extra}
        if TRAINER_STATE in asked:
            given[TRAINER_STATE] = TrainerState(arguments.pop(TRAINER_STATE)[0])
        return log.with_(function(**arguments, **{name: given[name] for name in asked}))

    signature = inspect.signature(function)
    kept = [p for name, p in signature.parameters.items() if name not in asked or name == TRAINER_STATE]
    call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return call


def _awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    def wait(**arguments: Any) -> Any:
        return _run(function(**arguments))

    wait.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wait


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in the one loop of this process: what users' modules hold is bound to it."""
    import asyncio  # here, because processes that call functions must start quickly

    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    finally:
        future.cancel()  # if this thread is interrupted


@functools.cache
def _loop() -> Any:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="quatrain-async-rewards", daemon=True).start()
    return loop


async def _all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*coroutines)


def _in_lists(function: Callable[..., Any], bound: frozenset[str], waits: bool) -> Callable[..., Any]:
    """A function of one sample as a function of lists; `bound` are arguments with a value.

    The samples of a call are awaited together if the function `waits`.
    """
    parameters = signature_of(function) or {}
    needed = {
        name: parameter.default is Parameter.empty
        for name, parameter in parameters.items()
        if parameter.kind not in VARIADIC and name not in bound
    }
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        needed = {name: False for name in VERL_INPUTS if name not in bound} | needed

    def score(completions: list[str], **columns: list[Any]) -> Logged:
        rows = ({name: values[row] for name, values in columns.items()} for row in range(len(completions)))
        called = [
            function(solution_str=text, **_sample(row, needed))
            for text, row in zip(completions, rows, strict=True)
        ]
        returned = _run(_all(called)) if waits else called
        scored = [r if isinstance(r, Mapping) and "score" in r else {"score": r} for r in returned]
        log = Log()
        for key in dict.fromkeys(key for each in scored for key in each if key != "score"):
            rest = [None if log.takes(key, each.get(key)) else each.get(key) for each in scored]
            if any(value is not None for value in rest):
                log.log_extra(key, rest)
        return log.with_([each["score"] for each in scored])

    taken = {"completions": True}
    for name, required in needed.items():
        if name == "ground_truth":
            taken |= {"answer": required, "reward_model": False}
        elif name != "solution_str":
            taken[name] = required and name != "extra_info"
    score.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=Parameter.empty if required else None)
            for name, required in taken.items()
        ]
    )
    return score


def _sample(row: Mapping[str, Any], needed: Mapping[str, bool]) -> dict[str, Any]:
    """The keyword arguments of one sample other than its completion, from its columns.

    An argument with a default is left out where the data has no column for it.
    """
    given: dict[str, Any] = {name: row[name] for name in needed if name in row}
    if "extra_info" in row or needed.get("extra_info"):
        given["extra_info"] = row.get("extra_info") or {}
    if "ground_truth" in needed:
        verl = row.get("reward_model")
        truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
        if truth is not None or "answer" in row:
            given["ground_truth"] = truth if row.get("answer") is None else row["answer"]
    return given


# ------------------------------------------------------------------------------- what functions return

LONGEST_SHOWN_VALUE = 80
_NOT_LISTS = (str, bytes, bytearray, Mapping, Set)
_METRIC = re.compile(r"[\w.@-]+(?:/[\w.@-]+)*")
_TAKEN = frozenset(("mean", "std", "min", "max", "errors", "abstained", "seconds", "unlogged"))


class Log:
    """What a reward function logs in one call, beside its rewards."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        """Sum and number of the values of each metric."""
        self.columns: dict[str, list[Any]] = {}
        """A value for each sample of the call."""
        self.unlogged: list[str] = []
        """Why a value is in neither."""

    def takes(self, name: Any, value: Any) -> bool:
        """Adds a value to a metric, if it is a finite number and the name is that of a metric."""
        if not (isinstance(name, str) and _METRIC.fullmatch(name)) or _TAKEN & set(name.split("/")):
            return False
        try:
            number = _number(value)
        except Exception:  # of the value's own __float__
            return False
        if number is None or not math.isfinite(number):
            return False
        total = self.metrics.setdefault(name, [0.0, 0])
        total[0] += number
        total[1] += 1
        return True

    def log_metric(self, name: str, value: float) -> None:
        """TRL's argument: adds a value of this call to a metric, the mean over values."""
        if not self.takes(name, value):
            self.unlogged.append(f"log_metric({_shown(name)}, {_shown(value)})")

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's argument: adds a column to the samples, one value for each."""
        self.columns.setdefault(str(column), []).extend(map(plain_json, values))

    def with_(self, returned: Any) -> Logged:
        """What the function returned, with what it logged."""
        return Logged(returned, vars(self))


class Logged(NamedTuple):
    """What a reward function returned, and the fields of its `Log`."""

    returned: Any
    log: Mapping[str, Any]


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it; what JSON has no form for, such as a date, becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return str(value)


class FunctionScores(NamedTuple):
    """What one reward function or reward model says of B sequences."""

    values: Sequence[float] | np.ndarray
    """[B] raw rewards, NaN for an abstention."""
    counts: Mapping[str, int]
    """Numbers of sequences or tokens, by the last part of the metric `reward/<name>/…`."""
    seconds: float = 0.0
    """Seconds that it took."""
    metrics: Mapping[str, Sequence[float]] = MappingProxyType({})
    """Sum and number of the values that it logged, by the last part of the metric `reward/<name>/…`."""
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    """[B] each: what it logged for samples."""
    failed: Sequence[int] = ()
    """The places of the sequences on which it failed, whose raw reward may also be one that it gives."""


def plain_rewards(returned: Any) -> list[float | None] | str | dict[str, Any]:
    """The returned values as a list of numbers, None for abstentions; of `Logged`, {"values": …, "log": …}.

    If they are no list of numbers, a description of what the function must return and did: sets are refused,
    because their order is random, and generators, because they cannot be counted. An error that is raised by
    a method of a returned object is the function's error.
    """
    if isinstance(returned, Logged):
        return {"values": plain_rewards(returned.returned), "log": returned.log}
    try:
        if isinstance(returned, _NOT_LISTS) or not hasattr(returned, "__len__"):
            raise TypeError
        values = iter(returned)
    except TypeError:
        return f"a list with one number per completion; it returned {type(returned).__name__}"
    numbers: list[float | None] = []
    for value in values:
        try:
            numbers.append(_number(value))
        except (TypeError, ValueError, OverflowError):
            return f"numbers, or None to abstain; it returned a value {_shown(value)}"
    return numbers


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError
    return None if value is None else float(value)


def _shown(value: Any) -> str:
    name = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # of the value's own __repr__
        return name
    # Whole or not at all: part of a secret cannot be redacted.
    return f"{name} {text}" if len(text) <= LONGEST_SHOWN_VALUE else f"{name} of {len(text)} characters"
