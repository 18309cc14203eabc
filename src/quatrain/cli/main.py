"""The command line: `quatrain train | sft | dpo | rm | eval | launch | plan | config | report | samples | …`.

Data flow: arguments and `.env` -> `config.load` -> the command's function. Modules that need JAX are imported
inside the commands, so that `--help` and `config` are fast.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import quatrain
from quatrain.cli import runs
from quatrain.cli.arguments import (
    Given,
    RunWords,
    SetOption,
    Words,
    argument,
    examples,
    flag,
    given,
    option,
    run_to_resume,
)
from quatrain.cluster.launcher import end_with_launcher
from quatrain.config.errors import installation
from quatrain.report.start_up import stage, starting
from quatrain.run.streams import console_messages, fitted, guarded_output

if TYPE_CHECKING:
    from quatrain.cluster.stop import Stopped
    from quatrain.config.load import Resolved
    from quatrain.config.schema import Config

PROGRESS_S = 2.0
"""Seconds between lines of what goes on, where a command computes for longer."""
USER_ERROR, FAILED_RUN, INTERRUPTED = 2, 1, 130
UsageError: Any = typer.BadParameter.__base__
"""Click's class, of the copy of click that typer has or of the package."""

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

_COORDINATOR = "Address of process 0, if several processes run together and no cluster is detected."
CoordinatorOption = Annotated[str | None, option(_COORDINATOR, "HOST:PORT")]
NumProcessesOption = Annotated[int | None, option("Number of processes that run together.", "N")]
ProcessIdOption = Annotated[int | None, option("Number of this process, from 0.", "I")]
TaskOption = Annotated[
    str | None,
    option("What is run: rl, sft, dpo or rm; default: as run.task says, else rl.", "TASK", "--task"),
]


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


_TRAINING = {
    "train": (
        "Train a model by reinforcement learning: rollout, reward, advantage, update.",
        "train",
        "train configs/gsm8k_smollm2_cpu.yaml run.steps=5",
        "train configs/gsm8k_smollm2_cpu.yaml --set data.train=train.jsonl",
        "train --print-config",
        "train --resume runs/quickstart-20260101-120000",
    ),
    "sft": (
        "Train a model on demonstrations: supervised training.",
        "sft",
        "sft --set sft.steps=400 --set sft.learning_rate=5e-4",
        "sft chat.yaml --dry-run",
        "sft --resume runs/chat-20260101-120000",
    ),
    "dpo": (
        "Train a model on preferences, which of two answers is the better one: DPO.",
        "dpo pairs.yaml",
        "dpo pairs.yaml dpo.loss=ipo dpo.beta=0.2",
        "dpo model.path=runs/chat/final dpo.data=pairs.jsonl",
    ),
    "rm": (
        "Train a reward model on preferences.",
        "rm pairs.yaml",
        "rm model.path=runs/chat/final rm.data=pairs.jsonl",
    ),
}
"""Commands that train: what each does, in a sentence, and examples."""


def _training(task: str) -> Callable[..., None]:
    """The command that trains, for runs of `task` (`run.task`)."""

    def train(
        words: Words = None,
        set_: SetOption = None,
        print_config: Annotated[
            bool, flag("--print-config", "Print the resolved configuration and exit.")
        ] = False,
        dry_run: Annotated[
            bool,
            flag("--dry-run", "Check all that the run is made from, print the plan, and exit."),
        ] = False,
        resume: Annotated[
            str | None,
            option(
                "Resume a run (its name or folder) from its last checkpoint; auto: the run called run.name, "
                "begun if there is none, or without a run.name the run with the newest checkpoint.",
                "RUN|auto",
            ),
        ] = None,
        coordinator: CoordinatorOption = None,
        num_processes: NumProcessesOption = None,
        process_id: ProcessIdOption = None,
    ) -> None:
        with starting(speaks=process_id in (None, 0) and not print_config):
            stage("configuration")
            config, overrides, _ = given(words, set_)
            if config is None and resume is not None:
                config, resume = run_to_resume(resume, overrides)
            resolved = _resolve(Given(config, overrides), task=task)
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

    return train


for _name, (_sentence, *_lines) in _TRAINING.items():
    app.command(name=_name, help=_sentence, epilog=examples(*_lines))(
        _training("rl" if _name == "train" else _name)
    )


@app.command(
    name="eval",
    epilog=examples(
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
    """Measure the accuracy of a model, or of that of a run, on the evaluation prompts."""
    config, overrides, folder = given(words, set_, folders=True)
    if config is None and folder is not None:
        raise ValueError(
            "a model's folder is evaluated on the prompts and with the lengths of a configuration; got none; "
            f"give it too: quatrain eval CONFIG.yaml {folder}"
        )
    with starting(speaks=process_id in (None, 0)):
        stage("configuration")
        resolved = _resolve(Given(config, overrides), trains=False)
        with _together(resolved, coordinator, num_processes, process_id) as resolved:
            from quatrain.cluster.processes import is_main_process
            from quatrain.loop.evaluate import evaluate_run

            numbers = evaluate_run(resolved)
            if is_main_process():
                _print_numbers(numbers)


@app.command(
    epilog=examples(
        "launch --processes 2 --devices-per-process 4 -- train",
        "launch --processes 2 -- train configs/gsm8k_smollm2_cpu.yaml --set run.steps=5",
    )
)
def launch(
    command: Annotated[
        list[str] | None, argument("train, eval, sft, dpo or rm, with its arguments.", "-- COMMAND …")
    ] = None,
    processes: Annotated[int, option("Number of processes to start.", "N", shown=True)] = 2,
    devices_per_process: Annotated[
        int, option("Number of CPU devices that each process simulates.", "D", shown=True)
    ] = 1,
    port: Annotated[int | None, option("Port of the coordinator; default: a free one.")] = None,
) -> None:
    """Run a command in several processes on this machine's CPU, to simulate several hosts."""
    from quatrain.cluster.launch import launch as run

    status = run(command or (), processes=processes, devices_per_process=devices_per_process, port=port)
    raise typer.Exit(status)


@app.command(
    epilog=examples(
        "config",
        "config configs/gsm8k_qwen25_0p5b.yaml --set rollout.n=16",
        "config configs/gsm8k_qwen25_0p5b.yaml --json",
    )
)
def config(
    words: Words = None,
    set_: SetOption = None,
    as_json: Annotated[
        bool, flag("--json", "Print JSON: configuration, origin of each value, warnings.")
    ] = False,
    changed: Annotated[bool, flag("--changed", "Print only values that are not the defaults.")] = False,
    task: TaskOption = None,
) -> None:
    """Print the resolved configuration, each value with the layer it came from."""
    _print_config(_resolve(given(words, set_), task=task), as_json=as_json, changed=changed)


@app.command(
    name="convert",
    epilog=examples(
        "convert verl.yaml > mine.yaml",
        "convert grpo_trl.yaml --devices 4 > mine.yaml",
        "convert actor_rollout_ref.rollout.n=5 data.train_batch_size=256 > mine.yaml",
    ),
)
def convert_(
    words: Annotated[
        list[str] | None,
        argument(
            "The other library's file: YAML, JSON, or a script with Hydra's overrides; and overrides.",
            "[THEIRS] [KEY=VALUE …]",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        option(
            "verl, trl, tunix, or trl-rloo, -sft, -dpo, -rm, -kto, -orpo; default: by its keys.",
            "LIBRARY",
            "--from",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        option(
            "Devices of the run, for sizes given per device; default: as the file says, else 1.", "N", min=1
        ),
    ] = None,
) -> None:
    """Translate a configuration of verl, TRL or Tunix."""
    from quatrain.config.convert import convert, read_file

    files = [word for word in words or () if ("=" not in word and word[0] != "~") or os.path.exists(word)]
    if len(files) > 1 or not words:
        raise ValueError(
            f"quatrain convert takes one file, or KEY=VALUE; got {', '.join(files) or 'none'}; give it as "
            "quatrain convert theirs.yaml > mine.yaml"
        )
    path = Path(files[0]) if files else None
    overrides = [word for word in words if word not in files]
    text, source = (read_file(path), path.name) if path else ("", "the command line")
    converted = convert(text, source, overrides, library=from_, devices=devices)
    typer.echo(converted.text, nl=False)
    for warning in converted.warnings:
        _complain("warning", warning)


@app.command(
    epilog=examples(
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
    devices: Annotated[int, option("Number of devices of all processes together.", shown=True, min=1)] = 1,
    processes: Annotated[
        int, option("Number of processes that the devices belong to.", shown=True, min=1)
    ] = 1,
    params: Annotated[
        bool,
        flag(
            "--params",
            "Print instead how parameters are sharded, and the bytes on each device. Activations are an "
            "estimate. Temporary memory of decoding and of the runtime is not counted.",
        ),
    ] = False,
    fit: Annotated[
        bool,
        flag(
            "--fit",
            "Print instead with which meshes, remat, budgets and offloading the run fits into "
            "--device-memory, the cheapest first, and the --set line of the first.",
        ),
    ] = False,
    device_memory: Annotated[
        str | None,
        option(
            "Memory of a device, e.g. 80GB, 24GiB or 16e9: --params, which it implies without --fit, "
            "warns of what does not fit, and says with what it fits.",
            "SIZE",
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON: values, units, formulas, warnings.")] = False,
    task: TaskOption = None,
) -> None:
    """Print every batch size of a training step, with unit and formula; or the memory on each device."""
    params = params or (device_memory is not None and not fit)
    if fit and (device_memory is None or params):
        raise ValueError(
            "--fit needs --device-memory, and goes without --params; give --fit --device-memory SIZE"
        )
    config, overrides, _ = given(words, set_)
    resolved = _resolve(Given(config, overrides), task=task)
    if not (params or fit):
        from quatrain.plan.batch_plan import plan as plan_batches
        from quatrain.plan.batch_plan import render

        batches = plan_batches(resolved.config, devices=devices, processes=processes)
        _print_plan(batches, render, as_json)
        return
    from quatrain.config.load import load_config
    from quatrain.plan import device_memory as report
    from quatrain.plan import fit as fits
    from quatrain.plan.placement import placement

    def with_further(further: Sequence[str]) -> Config:
        return load_config(config, [*overrides, *further], os.environ, task=task).config

    last = time.monotonic()

    def progress(tried: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= PROGRESS_S:
            last = now
            typer.echo(f"{tried} combinations of mesh and switches computed", err=True)

    memory = None if device_memory is None else report.parse_bytes(device_memory)
    if fit:
        assert memory is not None
        found = fits.fit(
            with_further, devices=devices, processes=processes, device_memory=memory, progress=progress
        )
        _print_plan(found, fits.render, as_json)
        return
    placed = placement(resolved.config, devices=devices, processes=processes, device_memory=memory)
    if memory is not None and placed.largest > memory:
        remedy = fits.remedy(with_further, placed, devices=devices, processes=processes, progress=progress)
        placed = replace(placed, remedy=remedy)
    _print_plan(placed, report.render, as_json)


@app.command(
    epilog=examples(
        "serve --set model.path=runs/my-run/final",
        "serve runs/my-run --port 9000 --name my-model",
        "serve configs/gsm8k_smollm2_cpu.yaml --set rollout.max_concurrency=16",
        "serve models/smollm2 --train --port 8001",
    )
)
def serve(
    words: RunWords = None,
    set_: SetOption = None,
    host: Annotated[
        str,
        option(
            "Address to listen on; any but this machine's own needs QUATRAIN_SERVE_TOKEN to be set.",
            "ADDRESS",
            shown=True,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option("Port to listen on; 0: any free one.", "N", shown=True, min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, option("Name of the model for clients (`model` in requests); default: its path.", "MODEL")
    ] = None,
    train: Annotated[
        bool, flag("--train", "Also train: programs of the client tinker train adapters of the model.")
    ] = False,
) -> None:
    """Serve a model, or that of a run, over HTTP with OpenAI's interface, and with Tinker's."""
    if name is not None and not name.strip():
        raise ValueError("--name must be the name that requests give the model; got an empty one")
    resolved = _resolve(given(words, set_, folders=True), trains=False)
    with _served("serve", "serve"):
        from quatrain.loop.serve import serve as run
    with _served("serve --train", "tinker"):
        if train:
            pass

    def trains(url: str, folder: str, has_key: bool) -> None:
        key = "the value of QUATRAIN_TINKER_KEY" if has_key else "tml-local, or any that begins with tml-"
        typer.echo(f"programs train it with TINKER_BASE_URL={url} and TINKER_API_KEY: {key}")
        typer.echo(f"recipes take model_name={folder}")

    model = resolved.config.model.path if name is None else name
    with _cached(resolved):
        run(
            resolved.config,
            name=model,
            host=host,
            port=port,
            ready=lambda url: typer.echo(f"{model} is served at {url}/v1; Ctrl-C ends it"),
            compiles=lambda: typer.echo(
                "compiling the programs of an answer, which waits for them; answers of about the same length "
                "need no others",
                err=True,
            ),
            trains=trains if train else None,
        )


@app.command(
    epilog=examples(
        "agent my_agent.py:agent --rows 2",
        "agent my_agent.py:agent runs/my-run --rows 5",
        "agent 'command: node agent.js' configs/gsm8k_smollm2_cpu.yaml",
    )
)
def agent(
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="The agent, in the form of [cyan]rollout.agent[/].")
    ],
    words: RunWords = None,
    set_: SetOption = None,
    rows: Annotated[int, option("Rows of the training data.", "N", shown=True, min=1)] = 2,
) -> None:
    """Play an agent on rows of the data, and show the tree of its turns."""
    asked = given(words, set_, folders=True)
    asked = asked._replace(overrides=[*asked.overrides, f"rollout.agent={json.dumps(agent)}"])
    resolved = _resolve(asked, trains=False)
    with _served("agent", "serve"):
        from quatrain.loop.agent import play_rows
    with _cached(resolved):
        for text in play_rows(resolved, rows):
            typer.echo(text)


@app.command(epilog=examples("bench", "bench configs/gsm8k_smollm2_cpu.yaml --steps 3"))
def bench(
    words: Words = None,
    set_: SetOption = None,
    steps: Annotated[int, option("Number of training steps to time.", shown=True, min=1)] = 5,
) -> None:
    """Time the stages of the training step on this machine."""
    resolved = _resolve(given(words, set_), task="rl")
    from quatrain.cli.bench import bench as run

    with _cached(resolved):
        _print_numbers(run(resolved, steps))


app.add_typer(runs.app)


@contextmanager
def _served(command: str, extra: str) -> Iterator[None]:
    """The block imports what serves over HTTP, which needs packages of an extra."""
    packages = {"serve": "starlette and uvicorn", "tinker": "starlette, uvicorn and protobuf"}[extra]
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"quatrain {command} needs {packages}: {error}; install them with {installation(extra)}"
        ) from error


def _cached(resolved: Resolved) -> AbstractContextManager[Any]:
    """Within the block, compiled programs are kept as `run.compilation_cache` says."""
    from quatrain.parallel.compilation_cache import compilation_cache

    return compilation_cache(resolved.config.run.compilation_cache)


def _print_plan(plan: Any, render: Callable[[Any], str], as_json: bool) -> None:
    typer.echo(json.dumps(plan.to_dict(), indent=2) if as_json else render(plan))


def _print_numbers(numbers: dict[str, float]) -> None:
    """One JSON object, three digits after the point."""
    typer.echo(json.dumps({name: round(value, 3) for name, value in numbers.items()}, indent=2))


def _resolve(what: Given, *, task: str | None = None, trains: bool = True) -> Resolved:
    """The final configuration of a command; its warnings go to stderr, here and nowhere else.

    `task` is that of the command; None if it is for runs of any task, which `run.task` says.
    """
    from quatrain.config.dotenv import load_dotenv, warn_if_others_can_read
    from quatrain.config.load import load_config

    dotenv = load_dotenv(os.environ)
    readable = warn_if_others_can_read(dotenv) if dotenv else None
    resolved = load_config(what.config, what.overrides, os.environ, task=task, trains=trains)
    if resolved.config.run.task == "rm" and not trains:
        raise ValueError(
            "a model that completes prompts is needed; got run.task rm, whose model gives scores; name "
            "another model, or use this one as model:PATH in reward.functions"
        )
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
    stage("libraries")
    from quatrain.cluster import processes as hosts
    from quatrain.cluster.stop import Stopped, leaving

    settings = resolved.config.distributed
    hosts.initialize(coordinator, num_processes, process_id, **settings.model_dump())
    try:
        resolved = _one_configuration(resolved)
        with _cached(resolved), leaving(_leave):
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


def _leave(stopped: Stopped) -> NoReturn:
    """Ends the process while its main thread computes."""
    _complain("stopped", str(stopped))
    sys.stdout.flush()
    os._exit(stopped.status)


def _one_configuration(resolved: Resolved) -> Resolved:
    """The configuration of all processes; raises ValueError if they were given different ones.

    Derived values are taken from process 0: a name derived from the time differs between processes.
    """
    from quatrain.cluster.processes import assert_same, gather_objects
    from quatrain.config.derive import value_at
    from quatrain.config.dump import by_dotted_key, plain
    from quatrain.config.load import DERIVED
    from quatrain.config.schema import fields

    derived = {key for key, layer in resolved.provenance.items() if layer == DERIVED and key in fields()}
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


def _print_config(resolved: Resolved, *, as_json: bool = False, changed: bool = False) -> None:
    from quatrain.config.dump import dump_yaml, to_json

    write = to_json if as_json else dump_yaml
    typer.echo(write(resolved, changed=changed), nl=as_json)


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
        sys.exit(app(prog_name=app.info.name, standalone_mode=False) or 0)
    except UsageError as error:
        if message := _about_usage(error):
            _complain("error", message)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        _complain("error", "interrupted")
        _end(INTERRUPTED, "interrupted")
    except Exception as error:
        # Messages of ValueError, OSError and quatrain's exception classes are written for users.
        own = type(error).__module__.startswith("quatrain.")
        asked = isinstance(error, ValueError | OSError)
        message = str(error) or type(error).__name__
        if about := _about_platforms(error, os.environ.get("JAX_PLATFORMS")):
            message, asked = about, True
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


def _about_platforms(error: BaseException, platforms: str | None) -> str:
    """The message for JAX_PLATFORMS that JAX cannot use, an error deep in JAX; empty for any other error."""
    frames = traceback.extract_tb(error.__traceback__)
    if not platforms or not any(Path(frame.filename).name == "xla_bridge.py" for frame in frames):
        return ""
    reason = (str(error).partition(" (set JAX_PLATFORMS")[0].splitlines() or [""])[0].strip(" .")
    named = {name.strip() for name in platforms.split(",")}
    extra = "cuda" if {"cuda", "gpu"} & named else "tpu" if "tpu" in named else ""
    remedy = f", or install what such devices need with {installation(extra)}" if extra else ""
    return (
        f"JAX_PLATFORMS must name platforms that JAX finds here; got {platforms}: "
        f"{reason or 'JAX has no plugin for it'}; unset it, so that JAX takes the best that there is, set it "
        f"to cpu{remedy}"
    )


def _about_usage(error: Any) -> str:
    """The message of a click.UsageError; empty if the help was printed.

    It names the key of the configuration that is given as an option, as `--learning_rate`.
    """
    from quatrain.config.aliases import key_for
    from quatrain.config.load import keys_read_by

    command = error.ctx.command_path if error.ctx else "quatrain"
    params = error.ctx.command.params if error.ctx else ()
    options = {option for param in params for option in param.opts}
    option = getattr(error, "option_name", None)
    if option and "--set" in options and option not in options:
        name = option.lstrip("-").replace("-", "_")
        read = keys_read_by(command.rpartition(" ")[2])
        same = (key for key in read if name in (key, key.rpartition(".")[2]))
        if keys := [key for key in [key_for(name)] if key in read] or sorted(same):
            return (
                f"{option} is not an option of {command}; a key of the configuration is given as KEY=VALUE: "
                f"{' or '.join(f'{key}=…' for key in keys)}"
            )
    message: str = error.format_message()
    return message and f"{message} ({command} --help)"


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
