"""The configuration layers set by the user, a YAML file, `--set` and the environment, as lists of settings.

Data flow: text -> `parse_yaml` -> `Setting`s checked against the schema's keys -> `load.py` merges them. YAML
is read with the scalars of YAML 1.2 (`1e-6` is a number; `off` and `1:30` are strings). A repeated key is an
error.
"""

import copy
import functools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from quatrain.config.aliases import LIBRARIES, library_of, suggestion
from quatrain.config.errors import (
    SHOWN_KEYS,
    SHOWN_PROBLEMS,
    SHOWN_VALUE_LENGTH,
    UNKNOWN_KEY,
    ConfigError,
    listed,
    nearest_keys,
    shown,
)
from quatrain.config.places import beside, local_path
from quatrain.config.schema import Config, is_mapping, sections, valid_keys

# Bounds of a file: aliases of aliases let a few lines stand for more values than memory holds.
MAX_CHARS = 2**17
MAX_NODES = 10_000
"""Keys and values of a configuration; the schema has about 150 keys."""
# Longer ones take quadratic time to read, and from 4,300 digits on Python refuses to print them.
MAX_DIGITS = 30
MAX_EXTENDS = 20
ENVIRONMENT_PREFIX = "QUATRAIN__"
QUICKSTART = Path(__file__).with_name("quickstart.yaml")

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One value set by a layer: the path of its key, the value, and the layer's name."""

    path: KeyPath
    value: Any
    layer: str

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2; repeated keys are an error."""

    # Empty at first: the table of SafeLoader reads YAML 1.1, where `off` is false and 1:30 a number.
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 - PyYAML's name for its own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            # PyYAML would raise a TypeError without a line, as such a key cannot be hashed.
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error("a key must be text, but this one is a list or a mapping", key_node)
            # PyYAML takes the last of two and says nothing: the first value would be lost in silence.
            if key_node.value in seen:
                raise _error(f"the key {key_node.value!r} is given twice; keep one", key_node)
            # `n:5` is a text in YAML, and would only be told as an unknown key of that name.
            missing = value_node.value == "" and not value_node.style
            if missing and (words := re.fullmatch(r"(\w+):(\S+)", key_node.value)):
                said = f"{key_node.value!r} is a key without a value; a colon needs a space after it: "
                raise _error(f"{said}{words[1]}: {words[2]}", key_node)
            # `<<` may occur twice: each merges another mapping, and explicit keys override both.
            if key_node.tag != "tag:yaml.org,2002:merge":
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "").lower()
    if len(text) > MAX_DIGITS:
        raise _error(f"a whole number has at most {MAX_DIGITS} digits", node)
    # Base 0 would refuse leading zeros, which are decimal in YAML 1.2.
    return int(text, 0 if text.lstrip("+-").startswith(("0x", "0o")) else 10)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_EXPONENT = r"(?:[eE][-+]?[0-9]+)?"
_PATTERNS = {
    "merge": (r"<<", "<"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    "float": (
        rf"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?){_EXPONENT}"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
SCALARS = {
    f"tag:yaml.org,2002:{name}": (re.compile(f"(?:{pattern})$"), list(first))
    for name, (pattern, first) in _PATTERNS.items()
}
"""The scalars of YAML 1.2 that are no texts: tag -> form, first characters."""
for _tag, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document; raises ConfigError naming `source` and the line.

    A run reads its config.yaml again and again (page, samples, what has changed): a text is parsed once.
    """
    return copy.deepcopy(_parsed(text, source))  # a copy, because lists and mappings of it may be changed


@functools.lru_cache(maxsize=16)
def _parsed(text: str, source: str) -> Any:
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{source}: a configuration has at most {MAX_CHARS} characters; shorten it")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_NODES:
            raise ConfigError(
                f"{source}: a configuration has at most {MAX_NODES} keys and values, counted wherever an "
                "alias (*name) repeats them; remove some"
            )
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    # A tag that does not match its text (`!!int x`) raises whatever error its conversion raises.
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"{source}: not valid YAML: a tag does not fit its value ({error}); leave the tag out"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "reason", None) or "it cannot be read"
        raise ConfigError(f"{source}: not valid YAML: {reason}") from None


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of nodes at and below `node`, counted again for every alias; `sizes` has those known."""
    if id(node) not in sizes:
        sizes[id(node)] = MAX_NODES + 1  # that of an alias of the node in itself
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def file_layer(path: Path | None) -> list[Setting]:
    """The settings of a YAML file and before them those of the files that it extends, lowest layer first.

    None is the quickstart file in this package. `extends` is a path or a list of paths, relative to the file
    that names them. A file that several others extend counts once, where it is named first. Raises
    ConfigError for files that extend each other.
    """
    settings: list[Setting] = []
    problems: list[str] = []
    done: set[Path] = set()
    others: dict[Path, str] = {}
    """Files of other libraries, with the library's name."""

    def read(file: Path, extending: tuple[Path, ...] = ()) -> None:
        """Appends the settings of `file`, after its bases'; `extending` are the files that lead to it."""
        # Resolved, because one file has many names: relative ones, links, `a/../b`.
        if file.resolve() in [each.resolve() for each in extending]:
            circle = " extends ".join(map(str, (*extending, file)))
            raise ConfigError(f"extends must not lead back to the same file: {circle}; remove one of them")
        if len(extending) > MAX_EXTENDS:
            raise ConfigError(
                f"{file}: at most {MAX_EXTENDS} files may extend each other in a row; join some"
            )
        if file.resolve() in done:
            return
        data = _mapping_in(file, extending)
        bases = data.pop("extends", [])
        bases = [bases] if isinstance(bases, str) else bases
        if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
            raise ConfigError(
                f"{file}: extends must be the path of a configuration, or a list of paths; got {shown(bases)}"
            )
        # Bases first: their settings come before those of this file, which override them.
        for base in bases:
            read(file.parent / local_path(base), (*extending, file))
        done.add(file.resolve())
        if library := library_of(data):
            others[file] = LIBRARIES[library]
        layer = "quickstart" if path is None else f"file {file}"
        of_file: list[Setting] = []
        for name, value in data.items():
            if value is not None or name not in sections():  # else all keys of a section are commented out
                _collect((str(name),), value, layer, of_file, problems)
        # Paths are beside the file that names them, also where another file extends it from elsewhere.
        settings.extend(replace(each, value=beside(each.key, each.value, file.parent)) for each in of_file)

    read(path or QUICKSTART)
    if problems:
        remedies = (
            f"{file} is a configuration of {library}; translate it: quatrain convert {file} > mine.yaml"
            for file, library in others.items()
        )
        raise ConfigError(problems, "\n".join(remedies))
    return settings


def _mapping_in(file: Path, extending: Sequence[Path]) -> dict[Any, Any]:
    data = parse_yaml(_read(file, extending), str(file))
    if data is None:
        instead = "do not extend it" if extending else "leave CONFIG out for the quickstart"
        raise ConfigError(f"{file}: the file is empty; write a key, or {instead}")
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: the top level must be a mapping of keys to values; got {shown(data)}")
    return data


def _read(path: Path, extending: Sequence[Path]) -> str:
    try:
        with path.open(encoding="utf-8-sig") as opened:
            # One more than is allowed shows that the file is too long, however long it is.
            return opened.read(MAX_CHARS + 1)
    except FileNotFoundError:
        near = sorted({str(p) for folder in (path.parent, Path("configs")) for p in folder.glob("*.y*ml")})
        found = f"; configurations nearby: {', '.join(near[:10])}" if near else ""
        by = f" (which {extending[-1]} extends)" if extending else ""
        raise ConfigError(f"{path}: there is no such configuration file{by}{found}") from None
    except IsADirectoryError:
        instead = f"give the YAML file itself, as {path / 'config.yaml'}"
        if (path / "config.json").is_file():
            instead = f"give a YAML file, and the folder of a model as model.path={path}"
        raise ConfigError(f"{path}: this is a folder; {instead}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text; give a YAML file") from None


def override_layer(overrides: Sequence[str]) -> list[Setting]:
    """The settings of `--set key.sub=value`, in order."""
    settings: list[Setting] = []
    problems: list[str] = []
    # A text is a sequence too: each of its letters would be told as a malformed override.
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            f"overrides must be a list of KEY=VALUE; got {shown(overrides)}; give ['rollout.n=16', 'seed=1']"
        )
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"--set needs KEY=VALUE, as --set rollout.n=16; got {shown(text)}")
            continue
        _collect(tuple(key.split(".")), _parse_value(value, f"--set {key}"), "--set", settings, problems)
    if problems:
        raise ConfigError(problems)
    return settings


def environment_layer(environ: Mapping[str, str]) -> list[Setting]:
    """The settings of the variables `QUATRAIN__SECTION__KEY`; other variables are ignored."""
    settings: list[Setting] = []
    problems: list[str] = []
    came_from: dict[KeyPath, str] = {}
    # Sorted: the order of variables differs between shells, and so would the errors.
    for variable in sorted(environ):
        if not variable.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        path = tuple(variable[len(ENVIRONMENT_PREFIX) :].lower().split("__"))
        if path in came_from:
            problems.append(f"{came_from[path]} and {variable} both set {'.'.join(path)}; unset one")
            continue
        came_from[path] = variable
        value = _parse_value(environ[variable], variable)
        _collect(path, value, f"environment {variable}", settings, problems)
    if problems:
        raise ConfigError(problems)
    return settings


def _parse_value(text: str, source: str) -> Any:
    try:
        return parse_yaml(text, source)
    except ConfigError as error:
        raise ConfigError(f"{error}; put text with special characters in quotes") from None


def _collect(path: KeyPath, value: Any, layer: str, settings: list[Setting], problems: list[str]) -> None:
    """Appends the settings at and below `path` to `settings`; an unknown key goes to `problems` instead."""
    nested = sections()
    key = ".".join(path)
    if path[0] in nested and len(path) == 1:
        if not isinstance(value, dict):
            some = next(iter(nested[key].model_fields))
            problems.append(
                f"{key} is a section and takes keys, as {key}.{some}; got {shown(value)} (from {layer})"
            )
            return
        for name, inner in value.items():
            _collect((*path, str(name)), inner, layer, settings, problems)
        return
    keys = valid_keys()
    if len(path) > 2 and is_mapping(path[:2]):
        # The rest of the path is the name of one entry, which may contain dots: `package.module:function`.
        settings.append(Setting((*path[:2], ".".join(path[2:])), value, layer))
    elif key in keys:
        settings.append(Setting(path, value, layer))
    elif isinstance(value, dict) and any(suggestion(f"{key}.{leaf}") for leaf in _leaves(value)):
        for name, inner in value.items():  # another library's section: each of its keys has its counterpart
            _collect((*path, str(name)), inner, layer, settings, problems)
    else:
        problems.append(f"{UNKNOWN_KEY} {shown(key)} (from {layer})")
        # The search compares with every key: hundreds of unknown keys, as in the file of another library,
        # would take seconds for advice that is not shown.
        if len(problems) <= SHOWN_PROBLEMS and len(key) <= SHOWN_VALUE_LENGTH:
            if known := suggestion(key):
                problems[-1] += f"; {known}"
                return
            nearest = nearest_keys(".".join(path[:2]), keys if len(path) > 1 else [*keys, *nested])
            if nearest:
                problems[-1] += f"; the nearest valid key is {' or '.join(map(repr, nearest))}"
            elif path[0] in nested:
                problems[-1] += (
                    f"; the keys of {path[0]} are {listed(nested[path[0]].model_fields, SHOWN_KEYS)}"
                )
            else:
                problems[-1] += f"; the keys and sections are {listed(Config.model_fields, SHOWN_KEYS)}"


def _leaves(value: dict[Any, Any]) -> Iterator[str]:
    """The dotted keys in nested mappings."""
    for name, inner in value.items():
        yield from (f"{name}.{leaf}" for leaf in _leaves(inner)) if isinstance(inner, dict) else (str(name),)
