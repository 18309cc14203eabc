"""Finds users' environments and tools, and makes the environment of each sample.

Data flow: `path.py:Class` or `path.py:function` -> `Environments` -> a `CheckedEnvironment` for each sample;
the descriptions of tools -> `data/turns.py`, which writes them into the prompt. A class comes in one of two
forms: `Environment` (with a method `step`), or that of TRL's `environment_factory`, whose public methods are
the tools. Where a data column chooses among several, `EnvironmentsByColumn` makes that of the sample's row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, SupportsFloat

from quatrain.config.errors import listed, shown
from quatrain.config.sections.rollout import COLUMN
from quatrain.data.tool_calls import warn_of_unread
from quatrain.data.turns import TurnsOfRow, TurnTemplate
from quatrain.episodes.environment import CheckedEnvironment, InitialObservation, StepResult
from quatrain.episodes.tools import Tool, Tools
from quatrain.workers.faults import format_error, run_guarded
from quatrain.workers.user_code import find_function, parameters_of

PROMPT = "prompt"
"""The argument of `reset` that has the row's prompt; the others are data columns."""
_NO_TOOLS = frozenset({"reset", "close", "get_reward"})


@dataclass(frozen=True)
class Environments:
    """Makes the environments of a run, one for each sample."""

    name: str
    """What messages call the environment."""
    make: Callable[[], Any]
    tools: tuple[Tool, ...] = ()
    """The functions that the model may call, for the prompt."""
    accepts: frozenset[str] | None = None
    """Columns that `reset` takes; None: all."""
    required_columns: tuple[str, ...] = ()
    """Columns that `reset` needs."""
    kept: bool = False
    """Whether they are kept after their episodes, for reward functions."""

    def __call__(self, columns: Mapping[str, Any]) -> CheckedEnvironment:
        """A new environment, for a row with these columns; raises Fault if it cannot be made."""
        environment = run_guarded(f"{self.name}: making it", self.make)
        return CheckedEnvironment(self.name, environment, self.accepts)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON schemas of the tools, for the chat template."""
        return tuple(tool.schema for tool in self.tools)

    def turns(self, tokenizer: Any, stop_ids: Sequence[int]) -> TurnsOfRow:
        """What renders the turns of a row's episodes; raises ValueError if the chat template cannot."""
        template = TurnTemplate(tokenizer, stop_ids, self.schemas)
        if self.schemas:
            warn_of_unread(tokenizer)
        return template.of_row

    def keeping(self) -> Environments:
        """The same, kept after their episodes."""
        return replace(self, kept=True)

    def kind(self, columns: Mapping[str, Any]) -> str | None:
        """What tells the environment of a row from others, in metrics; None if there are no others."""
        return None


@dataclass(frozen=True)
class EnvironmentsByColumn:
    """`Environments` of a run whose rows choose theirs: by its name, in the column `column`."""

    column: str
    named: Mapping[str, Environments]
    kept: bool = False

    @property
    def name(self) -> str:
        """What messages call them, where no row is known."""
        return f"environments of the column `{self.column}`"

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The column of the name; `turns` checks those that the environment of a row needs."""
        return (self.column,)

    def __call__(self, columns: Mapping[str, Any]) -> CheckedEnvironment:
        """A new environment for a row with these columns, as `Environments` makes it."""
        return self.named[self.kind(columns)](columns)

    def turns(self, tokenizer: Any, stop_ids: Sequence[int]) -> TurnsOfRow:
        """What renders the turns of a row's episodes, with the tools of its environment.

        It raises ValueError for a row without a column that its environment needs.
        """
        templates = {
            name: TurnTemplate(tokenizer, stop_ids, environments.schemas)
            for name, environments in self.named.items()
        }
        if any(environments.schemas for environments in self.named.values()):
            warn_of_unread(tokenizer)

        def of_row(columns: Mapping[str, Any]) -> TurnTemplate:
            name = self.kind(columns)
            for column in self.named[name].required_columns:
                if columns.get(column) is None:
                    raise ValueError(
                        f"the {self.named[name].name} needs the column `{column}`, which this row has not; "
                        f"give it, or another environment in the column `{self.column}`"
                    )
            return templates[name].of_row(columns)

        return of_row

    def keeping(self) -> EnvironmentsByColumn:
        """The same, kept after their episodes."""
        return replace(self, kept=True)

    def kind(self, columns: Mapping[str, Any]) -> str:
        """The name of a row's environment; raises ValueError if there is none of that name."""
        name = columns.get(self.column)
        if not isinstance(name, str) or name not in self.named:
            raise ValueError(
                f"the column `{self.column}` must name one of the environments {listed(self.named)} of "
                f"rollout.environment; got {shown(name)}; add that environment, or correct the row"
            )
        return name


def load_environments(spec: str | Callable[[], Any] | Mapping[str, str]) -> AnyEnvironments:
    """The environments of `rollout.environment`: one for all rows, or by a column, as `load_environment`."""
    if not isinstance(spec, Mapping):
        return load_environment(spec)
    named = {name: load_environment(path) for name, path in spec.items() if name != COLUMN}
    return EnvironmentsByColumn(spec[COLUMN], named)


def load_environment(spec: str | Callable[[], Any]) -> Environments:
    """The environments of a class, or of a function that makes one: `path.py:Class`, or the class itself.

    It is called without arguments, for each sample. A function, and a class derived from `Tools`, is called
    once here, to learn the form and the tools of what it makes. Raises ValueError if there is no such class,
    if it cannot be made without arguments, and if it has neither a method `step` nor public methods that can
    be tools.
    """
    name = f"environment {spec if isinstance(spec, str) else getattr(spec, '__qualname__', spec)}"
    found = _found(spec, "environment")
    needed = [parameter for parameter, _, required in parameters_of(found) or [] if required]
    if needed:
        raise ValueError(
            f"{name} must be made without arguments; it needs {listed(needed)}; give them default values, or "
            "name a function that makes the environment"
        )
    made = None
    if not inspect.isclass(found) or issubclass(found, Tools):
        try:
            made = found()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{name} must make an environment; it raised {format_error(error)}") from error
        CheckedEnvironment(name, made).close()
    form: Any = found if inspect.isclass(found) else type(made)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    for method in ("reset", "step", "get_reward", "close"):
        if any(kind(getattr(form, method, None)) for kind in kinds):
            raise ValueError(
                f"{name} must have methods that return their result when they are called; {method} is "
                "asynchronous or a generator; write it without async and yield"
            )
    accepts, required = _columns(form)
    if callable(getattr(form, "step", None)):
        try:
            inspect.signature(form.step).bind("self", "completion")
        except TypeError as error:
            raise ValueError(
                f"{name} must have a method step(self, completion); it cannot be called so: {error}; correct "
                "it"
            ) from error
        known = made.tools if isinstance(made, Tools) else ()
        return Environments(name, found, known, accepts, required)
    tools = _methods(name, form)
    return Environments(name, lambda: ToolMethods(found(), tools), tools, accepts, required)


def load_tools(specs: Sequence[str | Callable[..., Any]]) -> Environments:
    """The environments over the functions `path.py:function`; raises ValueError as `Tools` does."""
    functions = [_found(spec, "tool") for spec in specs]
    tools = Tools(*functions).tools
    name = f"tools {listed(tool.name for tool in tools)}"
    return Environments(name, lambda: Tools(*functions, known=tools), tools)


AnyEnvironments = Environments | EnvironmentsByColumn


class ToolMethods:
    """An object whose public methods are tools: the form of TRL's `environment_factory`.

    `reset`, `close` and `get_reward` are no tools. Without `get_reward`, a number in the attribute `reward`
    is the reward of the episode: TRL's examples keep it there for a reward function. By how much the tools of
    a turn change it is the reward of that turn.
    """

    def __init__(self, made: Any, tools: Sequence[Tool]):
        self.made = made
        self._tools = Tools(*(getattr(made, tool.name) for tool in tools), known=tools)
        self.counts = self._tools.counts

        self._given = 0.0  # as rewards of turns so far
        self.reset: Callable[..., InitialObservation] = getattr(made, "reset", None) or (
            lambda **columns: None
        )
        self.close: Callable[[], None] = getattr(made, "close", None) or (lambda: None)

    def step(self, completion: str) -> StepResult | None:
        """Answers a turn with what the tools that it calls return."""
        before = self._account()
        turn = self._tools.step(completion)
        if turn is None or callable(getattr(self.made, "get_reward", None)):
            return turn  # `get_reward` may say nothing before the end
        earned = self._account() - before
        self._given += earned
        return replace(turn, reward=turn.reward + earned)

    def get_reward(self) -> Any:
        """The reward of the episode, of which the object keeps account, but what turns were given."""
        if callable(getattr(self.made, "get_reward", None)):
            return self.made.get_reward()
        return self._account() - self._given

    def _account(self) -> float:
        reward = getattr(self.made, "reward", 0.0)
        # Also of numpy, torch and JAX, whose scalars are arrays without dimensions.
        return float(reward) if isinstance(reward, SupportsFloat) else 0.0


def _found(spec: str | Callable[..., Any], what: str) -> Callable[..., Any]:
    return find_function(spec, {}, what) if isinstance(spec, str) else spec


def _columns(form: type) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """The columns that `reset` accepts (None: all), and those that it needs."""
    reset = getattr(form, "reset", None)
    parameters = None if reset is None else parameters_of(reset)
    if parameters is None:
        return None, ()
    own = parameters if isinstance(inspect.getattr_static(form, "reset"), staticmethod) else parameters[1:]
    kinds = {kind for _, kind, _ in parameters}
    accepts = None if "VAR_KEYWORD" in kinds else frozenset(name for name, _, _ in own)
    return accepts, tuple(name for name, _, required in own if required and name != PROMPT)


def _methods(name: str, form: type) -> tuple[Tool, ...]:
    """The public methods of a class as tools, in the order of their names, as in TRL."""
    methods = [
        (method, value)
        for method, value in inspect.getmembers_static(form)
        if not (method.startswith("_") or method in _NO_TOOLS)
        if inspect.isfunction(value) or isinstance(value, staticmethod | classmethod)
    ]
    if not methods:
        raise ValueError(
            f"{name} must have a method `step(completion)` that returns a quatrain.StepResult, or public "
            "methods that the model can call as tools; it has neither; add one"
        )
    try:
        return tuple(
            # Bound to anything, so that it has no `self`.
            Tool.of(MethodType(value, form) if inspect.isfunction(value) else getattr(form, method))
            for method, value in methods
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}, or give names with _ to methods that are no tools") from error
