"""Finds functions named in the configuration: built-in ones, and users' as `path/file.py:function`.

The stages use it for reward functions, advantage estimators and policy losses. Their arguments are validated
against the function's signature before any computation.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from quatrain.config.errors import listed

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_function(spec: str, builtin: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    """The function `spec`: a key of `builtin`, `package.module:function` or `path/file.py:function`.

    `what` is the kind of function, for error messages, such as "reward function". Raises ValueError if the
    name is unknown, the module or file cannot be imported or lacks the attribute, or it is not callable.
    """
    where, colon, attribute = spec.rpartition(":")
    if not colon:
        if spec in builtin:
            return builtin[spec]
        if not builtin:
            form = "must be `path/file.py:name` or `package.module:name`; add a colon and the name"
            raise ValueError(f"{what} {spec!r} {form}")
        raise ValueError(
            f"{what} {spec!r} is unknown; built in are {', '.join(builtin)}; give a function of your own as "
            "`package.module:function` or `path/file.py:function`"
        )
    name = f"{what} {spec!r}"
    module = _import_file(name, Path(where).expanduser()) if where.endswith(".py") else _import(name, where)
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        own = [
            public
            for public, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and public[0] != "_"
        ]
        raise ValueError(
            f"{name}: {where} has no attribute {attribute!r}; it defines {listed(own)}; name one of them"
        ) from error
    if not callable(function):
        raise ValueError(f"{name} must be callable; it is a {type(function).__name__}")
    return function


def check_importable(spec: object, what: str, remedy: str = "") -> None:
    """Raises ValueError for a class or function of the running program, which processes cannot import."""
    if not isinstance(spec, str) or spec.startswith("__main__:"):
        raise ValueError(
            f"{what} must be named as `path/file.py:name`, which processes import; got {spec!r}, of the "
            f"running program; put it into a file{', or ' if remedy else ''}{remedy}"
        )


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name}: {module} cannot be imported ({type(error).__name__}: {error}); "
            f"install it, or give the file as `path/file.py:function`"
        ) from error


def _import_file(name: str, path: Path) -> ModuleType:
    """The module of the file `path`, which is executed once per process, until it or a neighbour changes."""
    if not path.is_file():
        raise ValueError(f"{name}: no such file (looked in {path.parent.absolute()})")
    path = path.resolve()
    # All modules of a folder or none: two that import each other must not be of different times.
    folder = _folders.get(path.parent)
    if folder is None or any(_stamp(file) != stamp for file, stamp in folder.stamps.items()):
        folder = _folders[path.parent] = _Folder()
    for loaded in folder.modules.values():
        if _file_of(loaded) == path:
            return loaded
    module_name = "quatrain_user_" + re.sub(r"\W", lambda match: f"_{ord(match[0]):x}_", str(path))
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # needed by dataclasses and pickle
    # Nothing is written beside a user's files; and a file that is edited twice in a second, with the same
    # length, would be read from what was compiled before.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with _neighbours(path, module, folder):
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        _folders.pop(path.parent, None)  # what it imported before it failed may be what is corrected next
        raise ValueError(f"{name}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = writes_none
    return module


@dataclass
class _Folder:
    """The modules that were executed from the files in a folder, until one of the files changes."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    """By the names that they import each other by."""
    stamps: dict[Path, tuple[int, int] | None] = field(default_factory=dict)
    """Time and size of each file when it was executed."""


_folders: dict[Path, _Folder] = {}


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def _stamp(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size
    return None


@contextmanager
def _neighbours(path: Path, module: ModuleType, known: _Folder) -> Iterator[None]:
    """Makes the modules beside the file `path` importable within the block, as Python does for a script.

    They are forgotten afterwards, so that another folder's files with neighbours of the same names get their
    own, and kept for the other files of this folder.
    """
    folder = path.parent
    importable = {path.stem: module} | known.modules
    before = set(sys.modules)
    sys.modules |= {name: value for name, value in importable.items() if name not in before}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        new = set(sys.modules) - before
        # They leave sys.modules, where the names of another folder's files would find them.
        # All are found before a package goes, without which its modules cannot be placed.
        beside = {name for name in new if _lies_in(folder, sys.modules.get(name.partition(".")[0]))}
        executed = {module.__name__: module} | {name: sys.modules.pop(name) for name in beside}
        known.modules |= executed
        for file in filter(None, map(_file_of, executed.values())):
            known.stamps.setdefault(file, _stamp(file))


def _lies_in(folder: Path, module: ModuleType | None) -> bool:
    """Whether a top-level module is a file or a package right in `folder`, not below it as installed ones."""
    file, packages = getattr(module, "__file__", None), getattr(module, "__path__", None)
    if packages is not None:
        return folder in (Path(package).resolve().parent for package in packages)
    return file is not None and Path(file).resolve().parent == folder


def signature_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; None for callables written in C that have no signature."""
    with suppress(ValueError, TypeError):
        return inspect.signature(function).parameters
    return None


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, str, bool]] | None:
    """Name, kind (as in `inspect.Parameter`) and whether it is required, for each of `signature_of`."""
    parameters = signature_of(function)
    if parameters is None:
        return None
    return [
        (name, p.kind.name, p.default is p.empty and p.kind not in VARIADIC) for name, p in parameters.items()
    ]


def check_arguments(
    function: Callable[..., Any],
    name: str,
    *,
    given: Mapping[str, Any],
    inputs: Sequence[str],
    key: str,
) -> None:
    """Raises ValueError unless `function` takes the arguments `given` by keyword, with values of their types.

    `inputs` are arguments that each call brings, and `key` is where `given` comes from, for messages. A
    function with `**kwargs` takes an argument of any name. A callable without a signature is not checked.
    """
    if taken := sorted(set(inputs) & set(given)):
        raise ValueError(
            f"{key} must not have {taken[0]}, which each call of the function gets; leave it out"
        )
    parameters = signature_of(function)
    if parameters is None:
        return
    unnamed = (*VARIADIC, inspect.Parameter.POSITIONAL_ONLY)
    settable = {a: p for a, p in parameters.items() if a not in inputs and p.kind not in unnamed}
    unknown = sorted(given.keys() - settable)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"{key} must be parameters of the function: {name} has {_listed(settable)}; got "
            f"{', '.join(unknown)}; correct the name, or leave it out"
        )
    for argument in given.keys() & settable:
        _typed(function, name, key, argument, given[argument])


def own_arguments(
    function: Callable[..., Any],
    name: str,
    *,
    inputs: Sequence[str],
    shared: Mapping[str, Any],
    given: Mapping[str, Any],
    key: str,
) -> dict[str, Any]:
    """The keyword arguments of `function` other than `inputs`, validated against its signature.

    They come from `given`, the user's value of the configuration's `key` (such as `update.loss_args`). A
    parameter without default that is in `shared`, the keys of the same section, has the value there.
    `inputs` are parameters that the stage passes for every batch; `name` is the function's in messages.

    Raises ValueError for an unknown argument, a missing required one, one that must be set by a key of the
    section instead, and a value whose type does not match the annotation.
    """
    parameters = {
        argument: p
        for argument, p in inspect.signature(function).parameters.items()
        if argument not in inputs and p.kind not in VARIADIC
    }
    required = [argument for argument, p in parameters.items() if p.default is p.empty]
    of_section = {argument: shared[argument] for argument in required if argument in shared}
    for argument in of_section.keys() & given.keys():
        there = f"{key.rpartition('.')[0]}.{argument}"
        raise ValueError(f"{key} has {argument}, but {name} takes it from {there}; set that instead")
    settable = {argument: p for argument, p in parameters.items() if argument not in of_section}
    unknown = sorted(given.keys() - settable)
    missing = [argument for argument in required if argument in settable and argument not in given]
    if unknown or missing:
        wrong = f"got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} is missing"
        raise ValueError(f"{name} takes from {key} {_listed(settable)}; {wrong}")
    return of_section | {
        argument: _typed(function, name, key, argument, given[argument]) for argument in given
    }


def first_parameter(function: Callable[..., Any], name: str, what: str) -> tuple[str]:
    """The name of the first parameter, which receives the `what`; raises ValueError if there is none."""
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise ValueError(
            f"{name} must take the {what} as its first argument: ({what}, *, ...); it takes {signature}"
        )
    return (first.name,)


def _listed(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The parameters with types and defaults, in the notation of a signature."""
    return ", ".join(str(p).replace("'", "") for p in parameters.values()) or "no arguments"


def _typed(function: Callable[..., Any], name: str, key: str, argument: str, value: Any) -> Any:
    """Returns `value`; raises ValueError if its type does not match the parameter's annotation."""
    # Imported here, because processes that only find functions must start quickly.
    from pydantic import TypeAdapter, ValidationError

    try:
        annotation = get_type_hints(function).get(argument, Any)
    except Exception:  # the value cannot be checked against an annotation that cannot be resolved
        return value
    try:
        return TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        raise ValueError(
            f"{name} takes {argument} as {getattr(annotation, '__name__', annotation)}; "
            f"{key}{'.' if ' ' not in key else ': '}{argument} is {value!r}; change it"
        ) from None
