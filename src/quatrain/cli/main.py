"""The command line: `quatrain train | eval | sft | launch | plan | config | report | samples | …`.

Data flow: arguments and `.env` -> `config.load` -> the command's function. Modules that need JAX are imported
inside the commands, so that `--help` and `config` are fast.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import quatrain
from quatrain.cluster.launcher import end_with_launcher
from quatrain.run.streams import console_messages, fitted, guarded_output

if TYPE_CHECKING:
    from quatrain.config.load import Resolved
    from quatrain.config.schema import Config

USER_ERROR, FAILED_RUN, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="quatrain",
    help="""Reinforcement-learning post-training of language models in JAX.

    Without a CONFIG, every command uses the quickstart: a small model that trains offline in minutes.""",
    epilog="Start with [bold]quatrain train[/]. Help for one command: [bold]quatrain train --help[/].",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [KEY=VALUE …]",
        show_default=False,
        help="Configuration file; default: the quickstart. KEY=VALUE is --set KEY=VALUE.",
    ),
]
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [FOLDER] [KEY=VALUE …]",
        show_default=False,
        help="Configuration file; default: the run's, or the quickstart. FOLDER: of a run, or of a model in "
        "Hugging Face's form. KEY=VALUE is --set KEY=VALUE.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Set one configuration key, e.g. [cyan]rollout.n=16[/]; the value is YAML. Repeatable.",
    ),
]

CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default=False,
        help="Address of process 0, if several processes run together and no cluster is detected.",
    ),
]
NumProcessesOption = Annotated[
    int | None, typer.Option(metavar="N", show_default=False, help="Number of processes that run together.")
]
ProcessIdOption = Annotated[
    int | None, typer.Option(metavar="I", show_default=False, help="Number of this process, from 0.")
]


def _examples(*lines: str) -> str:
    # Each line is a separate paragraph, because the help formatter joins the lines of a paragraph.
    return "\n\n".join(["[bold]Examples[/]", *(f"[cyan]quatrain {line}[/]" for line in lines)])


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quatrain {quatrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        "train",
        "train configs/gsm8k_smollm2_cpu.yaml run.steps=5",
        "train configs/gsm8k_smollm2_cpu.yaml --set data.train=train.jsonl",
        "train --print-config",
        "train --resume runs/quickstart-20260101-120000",
    )
)
def train(
    words: Words = None,
    set_: SetOption = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved configuration and exit.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check configuration, data, model and reward functions, print the plan, and exit.",
        ),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto",
            show_default=False,
            help="Resume a run (its name or folder) from its last checkpoint; auto: the run called run.name, "
            "begun if there is none, or without a run.name the run with the newest checkpoint.",
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    num_processes: NumProcessesOption = None,
    process_id: ProcessIdOption = None,
) -> None:
    """Train a model by reinforcement learning: rollout, reward, advantage, update."""
    config, overrides = _config_and_overrides(words, set_)
    if config is None and resume is not None:
        config, resume = _run_to_resume(resume, overrides)
    resolved = _resolve(config, overrides)
    if print_config:
        _print_config(resolved)
        return
    with _together(resolved, coordinator, num_processes, process_id) as resolved:
        from quatrain.loop.train import train as run

        if dry_run:
            from quatrain.loop.train import dry_run as check

            plan, warnings = check(resolved, resume=resume)
            typer.echo(plan)
            for warning in warnings:
                _complain("warning", warning)
        else:
            run(resolved, resume=resume)


@app.command(
    name="eval",
    epilog=_examples(
        "eval",
        "eval configs/gsm8k_smollm2_cpu.yaml --set eval.final_num_prompts=100",
        "eval runs/my-run eval.n=8",
        "eval configs/gsm8k_smollm2_cpu.yaml exported/",
    ),
)
def evaluate(
    words: RunWords = None,
    set_: SetOption = None,
    coordinator: CoordinatorOption = None,
    num_processes: NumProcessesOption = None,
    process_id: ProcessIdOption = None,
) -> None:
    """Measure a model's accuracy on the evaluation prompts; of a run's folder: as the run does."""
    config, overrides = _config_and_overrides(words, set_, folders=True)
    if config is None and (folder := next(filter(os.path.isdir, words or ()), None)):
        raise ValueError(
            "a model's folder is evaluated on the prompts and with the lengths of a configuration; got none; "
            f"give it too: quatrain eval CONFIG.yaml {folder}"
        )
    resolved = _resolve(config, overrides, trains=False)
    with _together(resolved, coordinator, num_processes, process_id) as resolved:
        from quatrain.cluster.processes import is_main_process
        from quatrain.loop.evaluate import evaluate_run

        numbers = evaluate_run(resolved)
        if is_main_process():
            _print_numbers(numbers)


@app.command(epilog=_examples("sft", "sft --set sft.steps=400 --set sft.learning_rate=5e-4"))
def sft(
    words: Words = None,
    set_: SetOption = None,
    coordinator: CoordinatorOption = None,
    num_processes: NumProcessesOption = None,
    process_id: ProcessIdOption = None,
) -> None:
    """Train on demonstrations: run only the supervised warm start."""
    resolved = _resolve(*_config_and_overrides(words, set_))
    with _together(resolved, coordinator, num_processes, process_id) as resolved:
        from quatrain.loop.train import train_sft

        train_sft(resolved)


@app.command(
    epilog=_examples(
        "launch --processes 2 --devices-per-process 4 -- train",
        "launch --processes 2 -- train configs/gsm8k_smollm2_cpu.yaml --set run.steps=5",
    )
)
def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND …", show_default=False, help="train, eval or sft, with its arguments."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(metavar="N", help="Number of processes to start.")] = 2,
    devices_per_process: Annotated[
        int, typer.Option(metavar="D", help="Number of CPU devices that each process simulates.")
    ] = 1,
    port: Annotated[
        int | None, typer.Option(show_default=False, help="Port of the coordinator; default: a free one.")
    ] = None,
) -> None:
    """Run a command in several processes on this machine's CPU, to simulate several hosts."""
    from quatrain.cluster.launch import launch as run

    status = run(command or (), processes=processes, devices_per_process=devices_per_process, port=port)
    raise typer.Exit(status)


@app.command(
    epilog=_examples(
        "config",
        "config configs/gsm8k_qwen25_0p5b.yaml --set rollout.n=16",
        "config configs/gsm8k_qwen25_0p5b.yaml --json",
    )
)
def config(
    words: Words = None,
    set_: SetOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: configuration, origin of each value, warnings.")
    ] = False,
) -> None:
    """Print the resolved configuration, each value with the layer it came from."""
    _print_config(_resolve(*_config_and_overrides(words, set_)), as_json=as_json)


@app.command(
    epilog=_examples(
        "plan",
        "plan configs/gsm8k_qwen25_0p5b.yaml --devices 8 --processes 2 --set rollout.mesh=-1,1,2",
        "plan configs/gsm8k_qwen25_0p5b.yaml --set update.mini_batch_size=16 --json",
        "plan configs/gsm8k_smollm2_cpu.yaml --devices 8 --params --device-memory 16GiB",
        "plan configs/gsm8k_smollm2_cpu.yaml --devices 8 --fit --device-memory 16GiB",
    )
)
def plan(
    words: Words = None,
    set_: SetOption = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices of all processes together.")] = 1,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that the devices belong to.")
    ] = 1,
    params: Annotated[
        bool,
        typer.Option(
            "--params",
            help="Print instead how parameters are sharded, and the bytes on each device. Activations are an "
            "estimate. Temporary memory of decoding and of the runtime is not counted.",
        ),
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Print instead with which meshes, remat, budgets and offloading the run fits into "
            "--device-memory, the cheapest first, and the --set line of the first.",
        ),
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="With --params or --fit: memory of a device, e.g. 80GB, 24GiB or 16e9; --params warns of "
            "what does not fit, and says with what it fits.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: values, units, formulas, warnings.")
    ] = False,
) -> None:
    """Print every batch size of a training step, with unit and formula; or the memory on each device."""
    if device_memory is not None and not (params or fit):
        raise ValueError(
            f"--device-memory is compared with the bytes that --params prints; got {device_memory} without "
            "--params; add --params, or --fit"
        )
    if fit and (device_memory is None or params):
        raise ValueError(
            "--fit needs --device-memory, and goes without --params; give --fit --device-memory SIZE"
        )
    config, overrides = _config_and_overrides(words, set_)
    resolved = _resolve(config, overrides)
    if not (params or fit):
        from quatrain.plan.batches import plan as plan_batches
        from quatrain.plan.batches import render

        batches = plan_batches(resolved.config, devices=devices, processes=processes)
        typer.echo(json.dumps(batches.to_dict(), indent=2) if as_json else render(batches))
        return
    from quatrain.config.load import load_config
    from quatrain.plan import device_memory as report
    from quatrain.plan import fit as fits
    from quatrain.plan.placement import placement

    def with_further(further: Sequence[str]) -> Config:
        return load_config(config, [*overrides, *further], os.environ).config

    memory = None if device_memory is None else report.parse_bytes(device_memory)
    if fit:
        assert memory is not None
        found = fits.fit(with_further, devices=devices, processes=processes, device_memory=memory)
        typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else fits.render(found))
        return
    placed = placement(resolved.config, devices=devices, processes=processes, device_memory=memory)
    if memory is not None and placed.largest > memory:
        remedy = fits.remedy(with_further, placed, devices=devices, processes=processes)
        placed = replace(placed, remedy=remedy)
    typer.echo(json.dumps(placed.to_dict(), indent=2) if as_json else report.render(placed))


@app.command(
    epilog=_examples(
        "export runs/my-run exported/",
        "export runs/my-run exported/ --step 50",
        "export runs/my-run --push OWNER/NAME",
    )
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            show_default=False,
            help="Folder to write the model to; may be left out with --push.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N|best",
            show_default=False,
            help="Training step of the checkpoint, or best, that with the best checkpoint.best_metric; "
            "default: the latest.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            show_default=False,
            help="Repository on the Hugging Face Hub to send the model and its card to; needs HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository of --push public if it is new.")
    ] = False,
) -> None:
    """Write a run's weights as a Hugging Face folder (safetensors, config, tokenizer), or push it."""
    from quatrain.config.environment import load_dotenv
    from quatrain.config.places import HUB_ID
    from quatrain.loop.export import export as write

    if push is not None and not HUB_ID.fullmatch(push):
        raise ValueError(f"--push names a repository on the Hugging Face Hub, as OWNER/NAME; got {push!r}")
    if public and push is None:
        raise ValueError("--public is for the repository of --push; give --push OWNER/NAME too")
    if output is None and push is None:
        raise ValueError(
            "nothing says where the model goes; give a folder OUTPUT, --push OWNER/NAME, or both"
        )
    load_dotenv(os.environ)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if output is None else output
        if push is not None:
            from quatrain.loop import hub
            from quatrain.loop.export import check_export

            check_export(run, folder, step=step)  # a misspelt RUN leaves no empty repository
            hub.make_repository(push, private=not public)
        found = write(run, folder, step=step)
        if output is not None:
            typer.echo(f"step {found} of {run} is in {output}")
        if push is not None:
            try:
                address = hub.push(folder, push, run=run, step=found)
            except (ValueError, OSError) as error:
                if output is None:
                    raise
                again = f"quatrain export {shlex.quote(str(run))} --step {found} --push {push}"
                raise ValueError(
                    f"{error}; the model is in {output}; to push again, leave OUTPUT out:\n  {again}"
                ) from error
            typer.echo(f"step {found} of {run}, with its card: {address}")


@app.command(
    epilog=_examples(
        "report runs/my-run",
        "report first second --output comparison.html",
        "report my-run --serve",
    )
)
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN …", help="Folders or names of runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="File to write; default: report.html in the run's folder, needed for several runs.",
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page live on this machine, while a run is in progress.")
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="N", help="Port for --serve; 0: any free one.", min=0, max=65535)
    ] = 8765,
) -> None:
    """Write the run page: curves, completions, plan and configuration in one HTML file."""
    folders = _run_folders(runs)
    if serve:
        from quatrain.report.page_server import serve as serve_page

        serve_page(
            folders, port=port, ready=lambda url: typer.echo(f"the run page is at {url}; Ctrl-C ends it")
        )
        return
    if output is None and len(folders) > 1:
        raise ValueError(
            f"the page of several runs needs --output, the file to write: got {len(folders)} runs without "
            "it; add --output comparison.html"
        )
    from quatrain.report.page import Page
    from quatrain.run.run_dir import RunDir

    path = output or RunDir(folders[0]).page
    Page(folders).write(path)
    typer.echo(f"the run page is {path}")


@app.command(epilog=_examples("samples my-run", "samples runs/my-run --step 10", "samples my-run --eval"))
def samples(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, help="Training step; default: the last.")
    ] = None,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Print the completions of the evaluation after that step instead.")
    ] = False,
) -> None:
    """Print the completions of a training step, each prompt with its group, sorted by reward."""
    from rich.console import Console

    from quatrain.report.print_samples import print_samples

    (folder,) = _run_folders([run])
    print_samples(folder, Console(), step=step, evaluation=evaluation)


@app.command(
    epilog=_examples(
        "serve --set model.path=runs/my-run/final",
        "serve runs/my-run --port 9000 --name my-model",
        "serve configs/gsm8k_smollm2_cpu.yaml --set rollout.max_concurrency=16",
    )
)
def serve(
    words: RunWords = None,
    set_: SetOption = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; any but this machine's own needs QUATRAIN_SERVE_TOKEN to be set.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", help="Port to listen on; 0: any free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Name of the model for clients (`model` in requests); default: its path.",
        ),
    ] = None,
) -> None:
    """Serve a model, or that of a run (its folder), over HTTP with OpenAI's interface."""
    if name is not None and not name.strip():
        raise ValueError("--name must be the name that requests give the model; got an empty one")
    resolved = _resolve(*_config_and_overrides(words, set_, folders=True), trains=False)
    try:
        from quatrain.serve.server import serve as run
    except ImportError as error:
        raise ValueError(
            f"quatrain serve needs starlette and uvicorn: {error}; install them with "
            "`pip install 'quatrain[serve]'`"
        ) from error
    from quatrain.parallel.compilation_cache import compilation_cache

    model = resolved.config.model.path if name is None else name
    with compilation_cache(resolved.config.run.compilation_cache):
        run(
            resolved.config,
            name=model,
            host=host,
            port=port,
            ready=lambda url: typer.echo(f"{model} is served at {url}/v1; Ctrl-C ends it"),
        )


@app.command(epilog=_examples("bench", "bench configs/gsm8k_smollm2_cpu.yaml --steps 3"))
def bench(
    words: Words = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps to time.")] = 5,
) -> None:
    """Time the stages of the training step on this machine."""
    resolved = _resolve(*_config_and_overrides(words, set_))
    from quatrain.cli.bench import bench as run
    from quatrain.parallel.compilation_cache import compilation_cache

    with compilation_cache(resolved.config.run.compilation_cache):
        _print_numbers(run(resolved, steps))


def _print_numbers(numbers: dict[str, float]) -> None:
    """One JSON object, three digits after the point."""
    typer.echo(json.dumps({name: round(value, 3) for name, value in numbers.items()}, indent=2))


def _config_and_overrides(
    words: Sequence[str] | None, set_: Sequence[str] | None, *, folders: bool = False
) -> tuple[Path | None, list[str]]:
    """(configuration file, overrides) of a command's words; a word with `=` that is no file is an override.

    Overrides of the words come after those of `--set`. With `folders`, one word may be the folder of a run or
    of a model.
    """
    named = [word for word in words or () if "=" not in word or os.path.exists(word)]
    overrides = [*(set_ or ()), *(word for word in words or () if word not in named)]
    paths = [Path(word) for word in named]
    found = [path for path in paths if folders and path.is_dir()]
    configs = [path for path in paths if path not in found]
    if len(configs) > 1 or len(found) > 1:
        raise ValueError(
            f"a command takes one CONFIG.yaml{' and one FOLDER' if folders else ''}, and settings as "
            f"KEY=VALUE; got {', '.join(named)}; to combine configurations, name one in the other, as "
            "extends: other.yaml"
        )
    config = configs[0] if configs else None
    return _of_folder(found[0], config, overrides) if found else (config, overrides)


def _resolve(path: Path | None, overrides: Sequence[str], *, trains: bool = True) -> Resolved:
    """The final configuration; its warnings go to stderr, here and nowhere else."""
    from quatrain.config.environment import load_dotenv, warn_if_others_can_read
    from quatrain.config.load import load_config

    dotenv = load_dotenv(os.environ)
    readable = warn_if_others_can_read(dotenv) if dotenv else None
    resolved = load_config(path, overrides, os.environ, trains=trains)
    for warning in filter(None, (readable, *resolved.warnings)):
        _complain("warning", warning)
    return resolved


@contextmanager
def _together(
    resolved: Resolved, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Iterator[Resolved]:
    """Connects the processes that run one command, disconnects them at the end; yields their configuration.

    A run of one process connects to nothing. Within the block, compiled programs are kept as
    `run.compilation_cache` says.
    """
    from quatrain.cluster import processes as hosts
    from quatrain.cluster.stop import Stopped

    settings = resolved.config.distributed
    hosts.initialize(
        coordinator,
        num_processes,
        process_id,
        start_timeout_s=settings.start_timeout_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        shutdown_timeout_s=settings.shutdown_timeout_s,
    )
    from quatrain.parallel.compilation_cache import compilation_cache

    try:
        resolved = _one_configuration(resolved)
        with compilation_cache(resolved.config.run.compilation_cache):
            yield resolved
    except Stopped as stopped:  # in all processes at once
        speaks = hosts.is_main_process()
        hosts.shutdown()
        if speaks:
            _complain("stopped", str(stopped))
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted")
    hosts.shutdown()


def _one_configuration(resolved: Resolved) -> Resolved:
    """The configuration of all processes; raises ValueError if they were given different ones.

    Derived values are taken from process 0: a name derived from the time differs between processes.
    """
    from quatrain.cluster.processes import assert_same, gather_objects
    from quatrain.config.derive import value_at
    from quatrain.config.dump import by_dotted_key, plain
    from quatrain.config.load import DERIVED

    derived = {key for key, layer in resolved.provenance.items() if layer == DERIVED}
    first, *others = gather_objects({key: value_at(resolved.config, key) for key in sorted(derived)})
    config = resolved.config
    for key, value in first.items():
        if all(key in other for other in others):
            section, name = key.split(".")
            agreed = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: agreed})
    resolved = replace(resolved, config=config)
    assert_same("configuration", dict(by_dotted_key(plain(resolved))))
    return resolved


def _run_to_resume(run: str, overrides: Sequence[str]) -> tuple[Path | None, str]:
    """(configuration file in the folder of `run`, value of `resume`); `run` is a path, a name, or `auto`.

    The file is None if `auto` finds no run. The value is the path of that folder; for a run without a
    checkpoint it stays `auto`, which starts the run again.
    """
    from quatrain.run.run_dir import auto_run, checkpoint_steps, find_run

    # Other overrides may need the run's own configuration to be valid.
    settings = _run_settings([each for each in overrides if re.split(r"[.=]", each)[0].strip() == "run"])
    runs = Path(settings.config.run.dir)
    if run == "auto":
        folder = auto_run(runs, settings.config.run.name or "", settings.chose("run.name"))
        if folder is None or not (folder / "config.yaml").is_file():
            return None, run
        return folder / "config.yaml", str(folder) if checkpoint_steps(folder) else run
    folder = find_run(run, runs)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} has no config.yaml to resume the run with; give a CONFIG.yaml too")
    return folder / "config.yaml", str(folder.absolute())


def _of_folder(folder: Path, config: Path | None, overrides: list[str]) -> tuple[Path | None, list[str]]:
    """(configuration file, overrides) with the model in `folder`: that of a run, or a model's own.

    The configuration is `config`, or else the run's, also for the folder `final/` of a run.
    """
    is_run = (folder / "config.yaml").is_file()
    run, final = (folder, folder / "final") if is_run else (folder.absolute().parent, folder)
    if config is None and (run / "config.yaml").is_file() and (is_run or folder.name == "final"):
        config = run / "config.yaml"
    if any(override.partition("=")[0].strip() == "model.path" for override in overrides):
        if not is_run:
            raise ValueError(f"{folder} and model.path both name a model; leave one of the two out")
        return config, overrides
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
    return config, [
        *(f"{key}={json.dumps(str(final))}" for key in ("model.path", "model.tokenizer")),
        *overrides,
    ]


def _run_settings(overrides: list[str]) -> Resolved:
    """The configuration without a file, for `run.dir` and `run.name`."""
    from quatrain.config.environment import load_dotenv
    from quatrain.config.load import load_config

    load_dotenv(os.environ)
    return load_config(None, overrides, os.environ)


def _run_folders(runs: list[str]) -> list[Path]:
    """The folders of `runs`, each a path or a name under `run.dir`."""
    from quatrain.run.run_dir import find_run

    root = Path(_run_settings([]).config.run.dir)
    return [find_run(run, root) for run in runs]


def _print_config(resolved: Resolved, *, as_json: bool = False) -> None:
    from quatrain.config.dump import dump_yaml, to_json

    typer.echo(to_json(resolved) if as_json else dump_yaml(resolved), nl=as_json)


def _complain(kind: str, message: str) -> None:
    for line in _redact(message).splitlines():
        typer.echo(fitted(line if line.startswith(" ") else f"{kind}: {line}", sys.stderr), err=True)


def main() -> None:
    """The command `quatrain`; a reader of its output that leaves, such as `head`, does not end it.

    If it succeeds, but standard output could not be written, as on a full disk, its status is USER_ERROR.
    """
    end_with_launcher(os.environ)
    status: Any = None
    with guarded_output(_redact) as lost, console_messages(_redact):
        try:
            _main()
        except SystemExit as stop:
            status = stop.code
        sys.stdout.flush()
        if lost and not status:
            status = USER_ERROR
            _complain("error", f"part of standard output is lost, because it could not be written: {lost[0]}")
    sys.exit(status)


def _redact(text: str) -> str:
    from quatrain.config.secrets import redact

    return redact(text, os.environ)


def _print_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(_redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def _main() -> None:
    """Runs the command line; prints an error of the user as one line on stderr.

    With `QUATRAIN_DEBUG=1` it prints a traceback instead.
    """
    try:
        app()
    except KeyboardInterrupt:
        _complain("error", "interrupted")
        _end(INTERRUPTED, "interrupted")
    except Exception as error:
        # Messages of ValueError, OSError and quatrain's exception classes are written for users.
        own = type(error).__module__.startswith("quatrain.")
        asked = isinstance(error, ValueError | OSError)
        message = str(error) or type(error).__name__
        hosts = _with_others()
        if hosts is not None:
            hosts.wait_for_failure_message()
        if os.environ.get("QUATRAIN_DEBUG") == "1" or not (own or asked):
            if hosts is None:
                sys.excepthook = _print_fault
                raise
            traceback.print_exc()
            _end(FAILED_RUN, message)
        _complain("error", message)
        _end(USER_ERROR if asked else FAILED_RUN, message)


def _with_others() -> ModuleType | None:
    """The module `cluster.processes` in a run of several processes; None in a run of one process."""
    hosts = sys.modules.get("quatrain.cluster.processes")
    return hosts if hosts is not None and hosts.joined() else None


def _end(status: int, message: str) -> NoReturn:
    """Exits with `status`; the other processes of the run receive `message` and end too."""
    hosts = _with_others()
    if hosts is not None:
        hosts.abandon(_redact(message), status)
    sys.exit(status)


if __name__ == "__main__":
    main()
