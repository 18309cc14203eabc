"""Functions that the configuration names: built in, or a user's own as `path/file.py:function`.

Stands under the stages: rewards, advantage estimators and policy losses are found here, and their arguments
are checked here against the function's signature, before anything is computed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_function(spec: str, builtin: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    """The function `spec`: a key of `builtin`, `package.module:function` or `path/file.py:function`.

    `what` is what it is called in errors, for example "reward function". Raises ValueError where there is no
    such name, the module or file cannot be imported or lacks the attribute, and where that is not callable.
    """
    where, colon, attribute = spec.rpartition(":")
    if not colon:
        if spec in builtin:
            return builtin[spec]
        raise ValueError(
            f"{what} {spec!r} is unknown; built in are {', '.join(builtin)}; your own is "
            f"`package.module:function` or `path/file.py:function`"
        )
    name = f"{what} {spec!r}"
    module = _import_file(name, Path(where).expanduser()) if where.endswith(".py") else _import(name, where)
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"{name}: {where} has no attribute {attribute!r}") from error
    if not callable(function):
        raise ValueError(f"{name} must be callable; it is a {type(function).__name__}")
    return function


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name}: {module} cannot be imported ({type(error).__name__}: {error}); "
            f"install it, or give the file as `path/file.py:function`"
        ) from error


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{name}: no such file (looked in {path.parent.absolute()})")
    module_name = "quatrain_user_" + re.sub(r"\W", "_", str(path.absolute()))
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"{name}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def own_arguments(
    function: Callable[..., Any],
    name: str,
    *,
    inputs: Sequence[str],
    shared: Mapping[str, Any],
    given: Mapping[str, Any],
    key: str,
) -> dict[str, Any]:
    """The keyword arguments of `function` beside its `inputs`, checked against its signature.

    An argument without a default comes from `given`, the value of the configuration's `key` (for example
    `update.loss_args`), or, where its name is one of `shared`, from the key of that name in the same section.

    Args:
        name: what the function is called in errors.
        inputs: parameters that the stage fills for every batch.
        shared: keys of the section, and their values, that a function asks for by naming them.
        given: the values that the user gave.

    Raises:
        ValueError: for an argument that the function does not take, one that it needs and that is not given,
            one that is also a key of the section, and a value of another type than the annotation.
    """
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in inputs and parameter.kind not in VARIADIC
    }
    section = key.rpartition(".")[0]
    arguments: dict[str, Any] = {}
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument in shared:
            if argument in given:
                raise ValueError(
                    f"{key} has {argument}, which {name} takes from {section}.{argument}; set that instead"
                )
            arguments[argument] = shared[argument]
    own = {argument: p for argument, p in parameters.items() if argument not in arguments}
    unknown = sorted(set(given) - set(own))
    missing = [argument for argument, p in own.items() if p.default is p.empty and argument not in given]
    if unknown or missing:
        wrong = f"got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} is missing"
        raise ValueError(f"{name} takes from {key} {_listed(own)}; {wrong}")
    return arguments | {
        argument: _typed(function, name, key, argument, given[argument]) for argument in given
    }


def tokens_parameter(function: Callable[..., Any], name: str) -> tuple[str]:
    """The name of the first parameter, which takes the tokens; raises ValueError where there is none."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in kinds:
        raise ValueError(
            f"{name} must take the tokens as its first argument: (tokens, *, ...); it takes "
            f"{inspect.signature(function)}"
        )
    return (parameters[0].name,)


def _listed(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The parameters with their types and defaults, as in a signature."""
    return ", ".join(str(p).replace("'", "") for p in parameters.values()) or "no arguments"


def _typed(function: Callable[..., Any], name: str, key: str, argument: str, value: Any) -> Any:
    """`value`, or ValueError where it does not fit the parameter's annotation."""
    try:
        annotation = get_type_hints(function).get(argument, Any)
    except Exception:  # an annotation that cannot be resolved says nothing about the value
        return value
    try:
        return TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        raise ValueError(
            f"{name} takes {argument} as {getattr(annotation, '__name__', annotation)}; "
            f"{key}.{argument} is {value!r}; change it"
        ) from None
