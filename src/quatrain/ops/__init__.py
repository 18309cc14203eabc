"""Pure maths: arrays in, arrays out."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any


def functions_of(package: str, path: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """By name, the function of each module of `package`, in the folders `path`, that is called like it.

    Modules whose names begin with `_` are left out. `config/algorithms.py` reads the same files.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(path) if module.name[0] != "_")
    return {name: getattr(importlib.import_module(f"{package}.{name}"), name) for name in names}
