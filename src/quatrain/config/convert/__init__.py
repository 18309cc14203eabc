"""`quatrain convert`: a configuration of verl, TRL or Tunix as one of quatrain.

Data flow: text of the file -> `read_theirs` (dotted keys) -> `verl.py`, `trl.py` or `tunix.py` (what depends
on values) and the table of names in `config/aliases.py` (all other keys) -> `translation.py` -> YAML.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.config.aliases import LIBRARIES, library_of
from quatrain.config.convert import trl, trl_given, tunix, verl
from quatrain.config.convert.script import OVERRIDE, is_unset, overrides_of
from quatrain.config.convert.translation import Translation
from quatrain.config.dump import by_dotted_key
from quatrain.config.errors import ConfigError, listed, shown
from quatrain.config.settings import parse_yaml

_MODULES = {"verl": verl, "trl": trl, "tunix": tunix}
_GIVEN = {f"trl-{kind}": f"TRL ({name})" for kind, name in trl_given.KINDS.items()}
"""Trainers of TRL on data that exist, as values of `--from`, and as messages name them."""
_RLOO = "trl-rloo"

OF_GRPO = {
    *("num_generations", "reward_funcs", "use_vllm", "vllm_mode", "scale_rewards", "steps_per_generation"),
    *("generation_batch_size", "epsilon", "num_iterations"),
}
"""Keys of TRL that only its trainers with rollouts have."""


class Converted(NamedTuple):
    """The YAML of quatrain, and what the reader of it has to fill in."""

    text: str
    warnings: list[str]


def convert(
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    *,
    library: str | None = None,
    devices: int | None = None,
) -> Converted:
    """The configuration in `text`, with `overrides` in Hydra's form, as one that `load_config` reads.

    Args:
        source: name of the file, for comments and errors.
        library: `verl`, `trl`, `tunix`, `trl-rloo`, or one of TRL's trainers on data that exist, as
            `trl-sft`; null: found by the keys.
        devices: devices of the run, for sizes that are given per device; null: what the file says, or 1.

    Raises ConfigError for text that is no configuration, and for one of an unknown library.
    """
    given = read_theirs(text, source, overrides)
    name = library or _library(given, source)
    rloo = name == _RLOO or (name == "trl" and _is_rloo(given))
    name = "trl" if rloo else name
    if name not in (*_MODULES, *_GIVEN):
        raise ConfigError(
            f"{source} must be a configuration of {listed(LIBRARIES.values())}; its keys are those of none "
            f"({listed(given)}); name the library, as --from verl"
            if name is None
            else f"--from must be {' or '.join((*LIBRARIES, _RLOO, *_GIVEN))}; got {shown(name)}"
        )
    shown_name = "TRL (RLOO)" if rloo else (LIBRARIES | _GIVEN)[name]
    module = trl_given if name in _GIVEN else _MODULES[name]
    translation = Translation(shown_name, source, given)
    module.translate(translation, devices)
    translation.put_the_rest(module.DEFAULTS)
    translation.refuse()
    needed = {"model.path": "the model that is trained"}
    if name in _GIVEN:
        task = translation.lines["run.task"].value
        needed |= {f"{task}.data": "what it is trained on"}
    else:
        needed |= {"data.train": "its training prompts", "reward.functions": "which scores completions"}
    missing = [f"{key}, {what}" for key, what in needed.items() if key not in translation.lines]
    warnings = [
        f"{source} does not say {each}: the default of quatrain stands until you set it" for each in missing
    ]
    header = [
        f"Translated by `quatrain convert` from {source}, a configuration of {shown_name}. Behind each "
        f"value: the key that it comes from, or a default of {shown_name} that differs from quatrain's. At "
        "the end: keys that are not translated, with the reason. Keys that are null there are left out.",
        *(f"To fill in: {each}." for each in missing),
    ]
    return Converted(translation.render(header), warnings)


def _library(given: dict[str, object], source: str) -> str | None:
    """The library of a file, and which trainer of TRL, by its keys; None if they are those of none."""
    name = library_of(given)
    if name != "trl" or OF_GRPO & given.keys():
        return name
    if kind := trl_given.kind_of(given):
        return f"trl-{kind}"
    if "max_length" in given:  # which GRPO and RLOO do not have
        raise ConfigError(
            f"{source} has keys of several trainers of TRL ({listed(given)}); name the trainer, as --from "
            f"{' or '.join(_GIVEN)}"
        )
    return name


def _is_rloo(given: dict[str, object]) -> bool:
    return bool({"normalize_advantages", "reward_clip_range"} & given.keys())


def read_file(path: Path) -> str:
    """The text of another library's file; raises ConfigError."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the other library's configuration") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(f"{path} must be a file of text: YAML, JSON, or a script with KEY=VALUE") from None


_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?\s*(\.*[\w.]+)\s*(?:,\s*(.*?))?\}")
_MAX_FILLED = 10


def read_theirs(text: str, source: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """{dotted key: value} of a file, and after it of `overrides` in Hydra's form (`+key=value`, `~key`).

    The text is YAML or JSON with nested or dotted keys, a list of overrides, or a shell script whose command
    has them. Raises ConfigError.
    """
    is_script = False
    if text.strip():
        values = _parse(text, source)
        if isinstance(values, dict):
            theirs = dict(by_dotted_key(values))
        elif isinstance(values, list) and all(isinstance(each, str) and "=" in each for each in values):
            theirs = _of_overrides(values, {})
        else:
            theirs, is_script = _of_script(text), True
    else:
        theirs = {}
    theirs = _of_overrides(overrides, theirs)
    if unset := [key for key, value in theirs.items() if is_script and is_unset(value)]:
        said = listed((f"{key}={theirs[key]}" for key in unset), len(unset))
        raise ConfigError(
            f"{source} must say its values itself; got {said}, from the environment, an argument, a command "
            f"or arithmetic with one; give the values after the file: quatrain convert {source} "
            f"{' '.join(f'{key}=VALUE' for key in unset)}"
        )
    if not theirs:
        raise ConfigError(
            f"{source} must be a configuration of {listed(LIBRARIES.values())}: YAML, JSON, or a script with "
            "KEY=VALUE; found no keys in it"
        )
    return {key: _filled(value, key, theirs) for key, value in theirs.items()}


def _parse(text: str, source: str) -> Any:
    if text.lstrip()[0] in "{[":
        try:
            return json.loads(text)
        except ValueError:
            pass  # YAML's flow style begins so too
    try:
        return parse_yaml(text, source)
    except ConfigError:
        if _of_script(text):
            return None
        raise


def _of_overrides(words: Sequence[str], before: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with Hydra's overrides: `key=value`, `+key=value`, `++key=value`; `~key` deletes."""
    values = dict(before)
    for word in words:
        found = OVERRIDE.fullmatch(word)
        if word.startswith("~"):
            gone = word.lstrip("~").partition("=")[0]
            values = {k: v for k, v in values.items() if k != gone and not k.startswith(f"{gone}.")}
        elif found is None:
            raise ConfigError(f"an override must be KEY=VALUE, as in Hydra; got {shown(word)}")
        else:
            values |= by_dotted_key({found["key"]: _value(found["value"])})
    return values


def _value(text: str) -> Any:
    try:
        return parse_yaml(text, "an override")
    except ConfigError:
        return text


def _of_script(text: str) -> dict[str, Any]:
    return _of_overrides(overrides_of(text), {})


def _filled(value: Any, key: str, values: Mapping[str, Any], depth: int = _MAX_FILLED) -> Any:
    """`value` with OmegaConf's `${key}` and `${oc.select:key,default}` filled in from `values`.

    One whose key the file does not have is null, as a key that is not given; `???` is too.
    """
    if not isinstance(value, str) or not depth:
        return value
    if value == "???":
        return None
    found = _INTERPOLATION.fullmatch(value)
    if found is None:
        return _INTERPOLATION.sub(lambda m: str(_filled(m[0], key, values, depth - 1) or m[0]), value)
    name = found[1]
    if name.startswith("."):  # beside this key
        name = ".".join([*key.split(".")[: -len(name) + len(name.lstrip("."))], name.lstrip(".")])
    if name in values:
        return _filled(values[name], name, values, depth - 1)
    return None if found[2] is None else _filled(_value(found[2]), key, values, depth - 1)
