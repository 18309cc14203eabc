"""Merges the configuration layers into one frozen configuration and records which layer set each value.

Layers, later ones override earlier ones: schema defaults, YAML file (or the quickstart file in this package),
`--set`, `QUATRAIN__A__B` environment variables; keys that are still null are then derived. The command line
passes each stage its section of the result, a `Resolved`.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from quatrain.config.aliases import value_for
from quatrain.config.derive import derived_values
from quatrain.config.errors import (
    SHOWN_KEYS,
    UNKNOWN_KEY,
    ConfigError,
    listed,
    of_which_nearest,
    rule,
    shown,
)
from quatrain.config.fields import Section, value_at
from quatrain.config.schema import Config, inner_section, is_mapping, valid_keys
from quatrain.config.secrets import REDACTED
from quatrain.config.sections.update import HAVE_BETA2
from quatrain.config.settings import (
    ENVIRONMENT_PREFIX,
    QUICKSTART,
    KeyPath,
    Setting,
    environment_layer,
    file_layer,
    override_layer,
)
from quatrain.config.tasks import COMMANDS, has_part
from quatrain.config.warnings import warnings_about

DEFAULT = "default"
DERIVED = "derived"
MODEL, RANK = ("model", "path"), ("lora", "rank")
OPTIMIZER, BETA2 = ("optimizer", "name"), ("optimizer", "beta2")
TASK = ("run", "task")
SFT_STEPS, SFT_RATE = ("sft", "steps"), ("sft", "learning_rate")
ITS_SECTIONS, ITS_KEYS = ("sft", "optimizer"), (("model", "remat"),)
"""What the quickstart sets for a small model with random weights, and no other should have."""


@dataclass(frozen=True)
class Resolved:
    """A final configuration, the layer that set each dotted key (`provenance`), and warnings for the user.

    Layers are called `default`, `quickstart` or `file PATH`, `--set`, `environment VARIABLE` and `derived`.
    Each entry of a mapping has a dotted key, such as `reward.functions.correct`.
    """

    config: Config
    provenance: dict[str, str]
    warnings: list[str] = field(default_factory=list)

    def chose(self, key: str) -> bool:
        """Whether a layer set `key`, rather than its default or what was derived for it."""
        return self.provenance.get(key, DEFAULT) not in (DEFAULT, DERIVED)

    if not TYPE_CHECKING:  # a type checker is to see that there is no such name

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"what load_config returns has no {name!r}; the configuration is its .config: give "
                "load_config(…).config"
            )


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    task: str | None = None,
    now: datetime | None = None,
    trains: bool = True,
    reads: Sequence[str] = ("",),
) -> Resolved:
    """The configuration of a YAML file (None: the embedded quickstart), `--set` overrides and environment.

    `environ` is the process's environment unless given, `now` the present unless given (it names the run).
    `task` is that of the command, `rl`, `sft`, `dpo` or `rm`; None: what `run.task` says. Unless it `trains`,
    there are no warnings about training, and keys without a part in the training of `run.task` may be set.
    `reads` are how the dotted keys begin that are read: in others, of the `config.yaml` of a run,
    `[redacted]` may stand in place of a secret.
    Raises ConfigError with one message per bad key: the rule, the value received and its layer.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(path, str | Path | None):
        raise ConfigError(
            f"a configuration is the path of a YAML file; got {shown(path)}; give settings as "
            "overrides=['rollout.n=16']"
        )
    file = None if path is None else Path(path)
    # Before the file: whether the quickstart's settings suit depends on the model that these choose.
    from_overrides, from_environment = override_layer(overrides), environment_layer(environ)
    from_file, unsuitable = file_layer(file), list[str]()
    later = [*from_overrides, *from_environment]
    if task is not None:
        _check_task(task, [*from_file, *later])
        if task != "rl":
            later.append(Setting(TASK, task, f"quatrain {COMMANDS[task]}"))
    if file is None:
        from_file, unsuitable = _for_the_model(_for_the_task(from_file, later), later)
    merged = _Merge(trains)
    merged.add(from_file)
    merged.add(later)
    # Before types are checked, which would complain of `[redacted]` without saying what it is.
    merged.refuse_redacted(tuple(reads))
    config = merged.resolved((file or QUICKSTART).stem, environ, now or datetime.now(UTC))
    warnings = [*_overridden(from_overrides, from_environment), *_misspelt_variables(environ)]
    resolved = Resolved(config, merged.provenance(config), warnings)
    if trains:
        resolved.warnings.extend([*unsuitable, *warnings_about(config, environ, resolved.chose)])
    return resolved


def keys_read_by(command: str) -> list[str]:
    """The dotted keys that a command reads, with all others at their defaults; all if it trains nothing."""
    task = next((task for task, name in COMMANDS.items() if name == command), None)
    merged = _Merge(trains=False)
    merged.add([Setting(TASK, task, "the command")] if task else [])
    config = merged.config(rules=False)
    return [key for key in valid_keys() if task is None or has_part(config, key)]


def check(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with these values by dotted key, over the defaults; empty if they load."""
    merged = _Merge(trains=True)
    merged.add(Setting(tuple(key.split(".")), value, "the file") for key, value in values.items())
    try:
        merged.resolved(QUICKSTART.stem, {}, datetime.now(UTC))
    except ConfigError as error:
        return error.problems
    return ()


def _check_task(task: str, settings: Sequence[Setting]) -> None:
    """Raises ConfigError for a layer that sets `run.task` for another command than that of `task`."""
    if task not in COMMANDS:
        raise ConfigError(f"task must be one of {listed(COMMANDS)}; got {shown(task)}; name one of them")
    for other in settings:
        if other.path == TASK and other.value is not None and other.value != task:
            command = COMMANDS.get(str(other.value))
            remedy = f"use quatrain {command}, or " if command else ""
            raise ConfigError(
                f"run.task is that of the command, {task} for quatrain {COMMANDS[task]}; got "
                f"{shown(other.value)} (from {other.layer}); {remedy}leave it out"
            )


def _for_the_task(quickstart: Sequence[Setting], later: Sequence[Setting]) -> list[Setting]:
    """The quickstart's settings that have a part in a run of the task of the `later` layers."""
    merged = _Merge(trains=False)
    merged.add([*quickstart, *later])
    config = merged.config(rules=False)
    return [setting for setting in quickstart if has_part(config, setting.key)]


def _for_the_model(
    quickstart: Sequence[Setting], later: Sequence[Setting]
) -> tuple[list[Setting], list[str]]:
    """The quickstart's settings without those that suit its model alone, if `later` layers train another.

    With adapters its learning rates, which are for all weights, stay; both cases give warnings.
    """
    values = {setting.path: setting.value for setting in (*quickstart, *later)}
    model = next(setting.value for setting in quickstart if setting.path == MODEL)
    if values[MODEL] != model:
        its = [s for s in quickstart if s.path[0] in ITS_SECTIONS or s.path in ITS_KEYS]
        theirs = [name for name in ITS_SECTIONS if any(s.path[0] == name for s in its)]
        rate = f"{values.get(TASK, 'optimizer')}.learning_rate"
        return [s for s in quickstart if s not in its], [
            f"model.path is not the quickstart's {model}, and without a CONFIG the defaults hold for "
            f"{listed([*theirs, *map('.'.join, ITS_KEYS)])}, whose values in the quickstart suit that model "
            f"alone; set what you need, as --set {rate}=…"
        ]
    if values.get(OPTIMIZER, HAVE_BETA2[0]) not in HAVE_BETA2:
        quickstart = [s for s in quickstart if s.path != BETA2]  # else refused, though nobody asked for it
    idle = {setting.path for setting in later} | ({SFT_RATE} if not values.get(SFT_STEPS) else set())
    rates = [s for s in quickstart if s.path[-1] == "learning_rate" and s.path not in idle]
    return list(quickstart), [
        f"lora.rank is {shown(values[RANK])} and {rate.key} is the quickstart's {rate.value:g}, for training "
        f"all weights: adapters need about ten times as much; set {rate.key}={10 * rate.value:g}"
        for rate in rates
        if values.get(RANK)
    ]


class _Merge:
    """The merged values of the layers added so far, and the layer that set each; later layers override."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self._values: dict[KeyPath, Any] = {}
        self._layers: dict[str, str] = {}

    def add(self, settings: Iterable[Setting]) -> None:
        for setting in settings:
            if len(setting.path) > 2:
                self._set_entry(setting)
            else:
                self._set(setting)

    def _set(self, setting: Setting) -> None:
        # A mapping is replaced whole, so layers that lower ones gave its entries no longer hold.
        inside = f"{setting.key}."
        self._layers = {k: layer for k, layer in self._layers.items() if not k.startswith(inside)}
        self._layers[setting.key] = setting.layer
        value = setting.value
        if isinstance(value, str) and inner_section(setting.key) is not None:
            value = {value: True}  # the short form, as `reward.judge: self`
        if is_mapping(setting.path) and isinstance(value, dict):
            # YAML reads a name such as 1 as a number; names of entries are texts everywhere else.
            value = {str(name): entry for name, entry in value.items()}
            self._layers |= {inside + name: setting.layer for name in value}
        self._values[setting.path] = value

    def _set_entry(self, setting: Setting) -> None:
        parent, name = setting.path[:2], setting.path[2]
        # From the default where no layer has set the mapping: one entry more keeps the usual ones.
        key = ".".join(parent)
        current = self._values.get(parent, value_at(Config(), key))
        current = {} if current is None and inner_section(key) is not None else current
        if not isinstance(current, dict):
            return  # a lower layer set a value that is not a mapping; validation reports it
        if setting.layer.startswith("environment"):
            # Variable names are usually upper case: an existing entry is matched regardless of case.
            name = next((known for known in current if known.lower() == name), name)
        self._values[parent] = {**current, name: setting.value}
        self._layers[".".join((*parent, name))] = setting.layer

    def refuse_redacted(self, reads: tuple[str, ...]) -> None:
        """Raises ConfigError for a value that stands for a secret, as in the `config.yaml` of a run.

        Of the keys that begin as `reads` say.
        """
        redacted = [".".join(path) for path, value in self._values.items() if REDACTED in repr(value)]
        if redacted := [key for key in redacted if key.startswith(reads)]:
            raise ConfigError(
                [
                    f"{key} has {REDACTED} in place of a secret that was kept out of the file (from "
                    f"{self._layers.get(key, DEFAULT)}); set it again, as --set {key}=…, or in that file"
                    for key in redacted
                ]
            )

    def resolved(self, stem: str, environ: Mapping[str, str], now: datetime) -> Config:
        """The validated configuration, with what is derived (`derived_values`) as one more layer."""
        derived = derived_values(self.config(), stem, environ, now, trains=self._trains)
        self.add(Setting(tuple(key.split(".")), value, DERIVED) for key, value in derived.items())
        # Validated again: rules across sections hold for derived values as for given ones.
        return self.config()

    def config(self, *, rules: bool = True) -> Config:
        """The validated configuration, perhaps without the rules across sections; raises ConfigError."""
        nested: dict[str, Any] = {}
        for path, value in self._values.items():
            if len(path) == 1:
                nested[path[0]] = value
            else:
                nested.setdefault(path[0], {})[path[1]] = value
        try:
            return Config.model_validate(nested, context={"trains": self._trains, "rules": rules})
        except ValidationError as error:
            raise ConfigError([self._problem(detail) for detail in error.errors()]) from None

    def _problem(self, detail: Any) -> str:
        context = detail.get("ctx", {})
        across = detail["type"] == "across_sections"
        key = context["key"] if across else _dotted(detail["loc"])
        value = context["value"] if across else detail["input"]
        # An entry of a mapping has the layer and the default of the key that it is in.
        known = next((k for k in valid_keys() if key == k or key.startswith(f"{k}.")), key)
        default = _as_yaml(value_at(Config(), known)) if known in valid_keys() else "none"
        inside = (layer for each, layer in self._layers.items() if each.startswith(f"{key}."))
        layer = self._layers.get(key) or self._layers.get(known) or next(inside, DEFAULT)
        if detail["type"] == "extra_forbidden" and (section := inner_section(known)):
            keys = of_which_nearest(key, [f"{known}.{name}" for name in section.model_fields])
            names = keys or f"; the keys of {known} are {listed(section.model_fields, SHOWN_KEYS)}"
            return f"{UNKNOWN_KEY} {shown(key)} (from {layer}){names}"
        ours = value_for(known, value)
        here = f"; here it is {ours}" if ours else ""
        return f"{key} {rule(detail)}; got {_as_yaml(value)} (from {layer}; default: {default}){here}"

    def provenance(self, config: Config) -> dict[str, str]:
        """The layer of every key of `config`, in the schema's order."""
        layers: dict[str, str] = {}
        for key in valid_keys():
            value = value_at(config, key)
            inside = type(value).model_fields if isinstance(value, Section) else value
            names = [f"{key}.{name}" for name in inside] if isinstance(inside, dict) and inside else [key]
            whole = DEFAULT if is_mapping(tuple(key.split("."))) else self._layers.get(key, DEFAULT)
            layers |= {name: self._layers.get(name, whole) for name in names}
        return layers


def _dotted(place: tuple[str | int, ...]) -> str:
    """The key at a place of pydantic's, without what names no key: `[key]`, and the form of an entry."""
    entry = place[:2] == ("reward", "functions") and place[3:4] in (("entry",), ("weight",))
    parts = (*place[:3], *place[4:]) if entry else place
    return ".".join(str(part) for part in parts if part != "[key]")


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return shown(list(value) if isinstance(value, tuple) else value)


def _misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that is a key but for its underscores, as `QUATRAIN_RUN_STEPS`."""
    keys = {f"{ENVIRONMENT_PREFIX[:-1]}{key.replace('.', '_')}".upper(): key for key in valid_keys()}
    meant = ((variable, keys.get(variable.upper())) for variable in sorted(environ))
    return [
        f"{variable} sets nothing: a variable has two underscores before a section and a key; rename it to "
        f"{ENVIRONMENT_PREFIX}{key.replace('.', '__').upper()}"
        for variable, key in meant
        if key
    ]


def _overridden(overrides: Sequence[Setting], environment: Sequence[Setting]) -> list[str]:
    """A warning for each `--set` that is overridden by an environment variable with another value."""
    last = {setting.path: setting for setting in overrides}
    warnings = []
    for variable in environment:
        for path, given in last.items():
            shorter = min(len(path), len(variable.path))
            same = [p.lower() for p in path[:shorter]] == [p.lower() for p in variable.path[:shorter]]
            # A variable that sets one entry of a mapping does not override the rest of the mapping.
            if same and len(variable.path) <= len(path) and given.value != variable.value:
                name = variable.layer.removeprefix("environment ")
                warnings.append(
                    f"--set {given.key}={_as_yaml(given.value)} is overridden by the environment: {name} is "
                    f"{_as_yaml(variable.value)}; unset the variable to use --set"
                )
    return warnings
