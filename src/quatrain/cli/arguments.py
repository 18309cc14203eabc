"""What the arguments of commands name: a configuration, overrides, runs, and folders of models.

Data flow: the words after a command -> `Given` -> `config.load`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from quatrain.config.places import local_path

if TYPE_CHECKING:
    from quatrain.config.load import Resolved


def option(help: str, metavar: str | None = None, *names: str, shown: bool = False, **bounds: Any) -> Any:
    """An option; the help has its default if that is `shown`, and not where it says nothing, as null."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=shown, **bounds)


def flag(name: str, help: str) -> Any:
    """A switch, which is off unless `name` is given."""
    return typer.Option(name, help=help)


def argument(help: str, metavar: str) -> Any:
    """An argument without a name."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


_OF_CONFIG = "Configuration file; default: the quickstart. KEY=VALUE is --set KEY=VALUE."
_OF_RUN = (
    "Configuration file; default: the run's, or the quickstart. RUN: a run's name or folder. FOLDER: of a "
    "model in Hugging Face's form. KEY=VALUE is --set KEY=VALUE."
)
_SET = "Set one configuration key, e.g. [cyan]rollout.n=16[/]; the value is YAML. Repeatable."
Words = Annotated[list[str] | None, argument(_OF_CONFIG, "[CONFIG.yaml] [KEY=VALUE …]")]
RunWords = Annotated[list[str] | None, argument(_OF_RUN, "[CONFIG.yaml] [RUN|FOLDER] [KEY=VALUE …]")]
SetOption = Annotated[list[str] | None, option(_SET, "KEY=VALUE", "--set")]


class Given(NamedTuple):
    """What a command is given: a configuration file, overrides, and the folder of a run or of a model."""

    config: Path | None
    overrides: list[str]
    folder: Path | None = None


def examples(*lines: str) -> str:
    """The examples at the end of a command's help."""
    # Each line is a separate paragraph, because the help formatter joins the lines of a paragraph.
    return "\n\n".join(["[bold]Examples[/]", *(f"[cyan]quatrain {line}[/]" for line in lines)])


def given(words: Sequence[str] | None, set_: Sequence[str] | None, *, folders: bool = False) -> Given:
    """What `words` name, and `--set`; a word with `=` that is no file is an override.

    Overrides of the words come after those of `--set`. With `folders`, one word may be a run, by its name or
    its folder, or the folder of a model.
    """
    named = [word for word in words or () if "=" not in word or os.path.exists(word)]
    overrides = [*(set_ or ()), *(word for word in words or () if word not in named)]
    folder_of = {word: _folder(word, overrides) for word in named} if folders else {}
    found = [folder for folder in folder_of.values() if folder]
    configs = [Path(word) for word in named if not folder_of.get(word)]
    if len(configs) > 1 or len(found) > 1:
        raise ValueError(
            f"a command takes one CONFIG.yaml{' and one RUN or FOLDER' if folders else ''}, and settings as "
            f"KEY=VALUE; got {', '.join(named)}; to combine configurations, name one in the other, as "
            "extends: other.yaml"
        )
    config = configs[0] if configs else None
    return _of_folder(found[0], config, overrides) if found else Given(config, overrides)


def _folder(word: str, overrides: Sequence[str]) -> Path | None:
    """The folder that `word` names, a path or the name of a run; None if it names a configuration file."""
    path = Path(word)
    if path.is_dir():
        return path
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return None
    from quatrain.run.run_dir import find_run

    return find_run(word, local_path(_settings_of_runs(overrides).config.run.dir))


def _of_folder(folder: Path, config: Path | None, overrides: list[str]) -> Given:
    """What is given with the model in `folder`: that of a run, or a model's own.

    The configuration is `config`, or else the run's, also for the folder `final/` of a run.
    """
    is_run = (folder / "config.yaml").is_file()
    run, final = (folder, folder / "final") if is_run else (folder.absolute().parent, folder)
    if config is None and (run / "config.yaml").is_file() and (is_run or folder.name == "final"):
        config = run / "config.yaml"
    if any(override.partition("=")[0].strip() == "model.path" for override in overrides):
        if not is_run:
            raise ValueError(f"{folder} and model.path both name a model; leave one of the two out")
        return Given(config, overrides, folder)
    if is_run and not final.is_dir():
        raise ValueError(
            f"{folder} has no final/: the run did not come to its end; export a checkpoint with "
            f"`quatrain export {folder} OUTPUT`, and give --set model.path=OUTPUT"
        )
    if not is_run and not (final / "config.json").is_file():
        raise ValueError(
            f"a FOLDER must be that of a run (with config.yaml) or of a model (with config.json); "
            f"got {folder} with neither; give another"
        )
    model = [f"{key}={json.dumps(str(final))}" for key in ("model.path", "model.tokenizer")]
    return Given(config, [*model, *overrides], folder)


def run_to_resume(run: str, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """(configuration file in the folder of `run`, value of `resume`); `run` is a path, a name, or `auto`.

    The file is None if `auto` finds no run. The value is the path of that folder; for a run without a
    checkpoint it stays `auto`, which starts the run again.
    """
    from quatrain.run.run_dir import auto_run, checkpoint_steps, find_run

    settings = _settings_of_runs(overrides)
    runs = local_path(settings.config.run.dir)
    if run == "auto":
        folder = auto_run(runs, settings.config.run.name or "", settings.chose("run.name"))
        if folder is None or not (folder / "config.yaml").is_file():
            return None, run
        return folder / "config.yaml", str(folder) if checkpoint_steps(folder) else run
    folder = find_run(run, runs)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} has no config.yaml to resume the run with; give a CONFIG.yaml too")
    return folder / "config.yaml", str(folder.absolute())


def run_folders(runs: Sequence[str]) -> list[Path]:
    """The folders of `runs`, each a path or a name under `run.dir`."""
    from quatrain.run.run_dir import find_run

    root = local_path(_settings_of_runs([]).config.run.dir)
    return [find_run(run, root) for run in runs]


def _settings_of_runs(overrides: Sequence[str]) -> Resolved:
    """The configuration without a file, for `run.dir` and `run.name`."""
    from quatrain.config.dotenv import load_dotenv
    from quatrain.config.load import load_config
    from quatrain.config.settings import ENVIRONMENT_PREFIX

    load_dotenv(os.environ)
    # Other settings may need the run's own configuration, or its task, to be valid.
    keys = ("run.dir", "run.name")
    own = [each for each in overrides if each.partition("=")[0].strip() in keys]
    variables = {ENVIRONMENT_PREFIX + key.replace(".", "__").upper() for key in ("run", *keys)}
    environ = {name: value for name, value in os.environ.items() if name.upper() in variables}
    return load_config(None, own, environ)
