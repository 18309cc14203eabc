"""`quatrain convert`: a configuration of verl, TRL or Tunix as one of quatrain.

Data flow: text of the file -> `read.py` (dotted keys) -> `verl.py`, `trl.py` or `tunix.py` (what depends on
values) and the table of names in `config/aliases.py` (all other keys) -> `translation.py` -> YAML.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quatrain.config.aliases import LIBRARIES, library_of
from quatrain.config.convert import trl, tunix, verl
from quatrain.config.convert.read import read_theirs
from quatrain.config.convert.translation import Translation
from quatrain.config.errors import ConfigError, listed, shown

_MODULES = {"verl": verl, "trl": trl, "tunix": tunix}


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
        library: `verl`, `trl` or `tunix`; null: found by the keys.
        devices: devices of the run, for sizes that are given per device; null: what the file says, or 1.

    Raises ConfigError for text that is no configuration, and for one of an unknown library.
    """
    given = read_theirs(text, source, overrides)
    name = library or library_of(given)
    if name not in _MODULES:
        raise ConfigError(
            f"{source} must be a configuration of {listed(LIBRARIES.values())}; its keys are those of none "
            f"({listed(given)}); name the library, as --from verl"
            if name is None
            else f"--from must be {' or '.join(LIBRARIES)}; got {shown(name)}"
        )
    shown_name = "TRL (RLOO)" if name == "trl" and _is_rloo(given) else LIBRARIES[name]
    translation = Translation(shown_name, source, given)
    _MODULES[name].translate(translation, devices)
    translation.put_the_rest(_MODULES[name].DEFAULTS)
    translation.refuse()
    needed = {"model.path": "the model that is trained", "data.train": "its training prompts"}
    missing = [f"{key}, {what}" for key, what in needed.items() if key not in translation.lines]
    if "reward.functions" not in translation.lines:
        missing.append("reward.functions, which scores completions")
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
