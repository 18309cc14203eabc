"""The command line: `quatrain train | eval | sft | plan | config | export | bench`.

Data flow: arguments and `.env` -> `config.load` -> the command's own function. What needs JAX is imported
inside the commands, so help and configuration answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import quatrain

if TYPE_CHECKING:
    from quatrain.config.load import Resolved

USER_ERROR, FAILED_RUN, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="quatrain",
    help="""Reinforcement-learning post-training of language models in JAX.

    Without a CONFIG every command takes the embedded quickstart: a small model, offline, in minutes.""",
    epilog="Try [bold]quatrain train[/]. Help on one command: [bold]quatrain train --help[/].",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG.yaml", show_default=False, help="Configuration file; without it, the quickstart."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Set one key, as [cyan]rollout.n=16[/]; the value is YAML. Repeatable.",
    ),
]


def _examples(*lines: str) -> str:
    # Each line a paragraph of its own: the help formatter joins the lines of one paragraph.
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
        "train configs/gsm8k_smollm2_cpu.yaml --set run.steps=5",
        "train configs/gsm8k_smollm2_cpu.yaml --set data.train=../shared/data/gsm8k/train.jsonl",
        "train --print-config",
        "train --resume runs/quickstart-20260101-120000",
    )
)
def train(
    config: ConfigArgument = None,
    set_: SetOption = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the final configuration and stop.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto",
            show_default=False,
            help="Go on from the last checkpoint of a run (its folder or name), or of the newest one (auto).",
        ),
    ] = None,
) -> None:
    """Train a model by reinforcement: rollout, reward, advantages, update."""
    if config is None and resume is not None:
        config, resume = _run_to_resume(resume, set_)
    resolved = _resolve(config, set_)
    if print_config:
        _print_config(resolved)
        return
    from quatrain.train import train as run

    run(resolved, resume=resume)


@app.command(
    name="eval",
    epilog=_examples(
        "eval",
        "eval configs/gsm8k_smollm2_cpu.yaml --set eval.final_num_prompts=100",
        "eval configs/gsm8k_smollm2_cpu.yaml --set model.path=runs/my-run/final",
    ),
)
def evaluate(config: ConfigArgument = None, set_: SetOption = None) -> None:
    """Measure a model's accuracy on the evaluation prompts."""
    resolved = _resolve(config, set_)
    from quatrain.evaluate import evaluate_run

    _print_numbers(evaluate_run(resolved))


@app.command(epilog=_examples("sft", "sft --set sft.steps=400 --set sft.learning_rate=5e-4"))
def sft(config: ConfigArgument = None, set_: SetOption = None) -> None:
    """Train on demonstrations: the supervised warm start by itself."""
    resolved = _resolve(config, set_)
    from quatrain.train import supervise

    supervise(resolved)


@app.command(
    epilog=_examples(
        "config",
        "config configs/gsm8k_qwen25_0p5b.yaml --set rollout.n=16",
        "config configs/gsm8k_qwen25_0p5b.yaml --json",
    )
)
def config(
    config: ConfigArgument = None,
    set_: SetOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: config, provenance, warnings.")
    ] = False,
) -> None:
    """Print the final configuration, each value with the layer it came from."""
    _print_config(_resolve(config, set_), as_json=as_json)


@app.command(
    epilog=_examples(
        "plan",
        "plan configs/gsm8k_qwen25_0p5b.yaml --devices 8 --processes 2 --mesh 1,-1,1 --rollout-mesh -1,1,2",
        "plan configs/gsm8k_qwen25_0p5b.yaml --set update.mini_batch_size=16 --json",
    )
)
def plan(
    config: ConfigArgument = None,
    set_: SetOption = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices of all processes.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes the devices belong to.")] = 1,
    mesh: Annotated[
        str, typer.Option(metavar="DP,FSDP,TP", help="Their arrangement in training; one number may be -1.")
    ] = "auto",
    rollout_mesh: Annotated[
        str, typer.Option(metavar="DP,FSDP,TP", help="Their arrangement in the rollout.")
    ] = "-1,1,1",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: values, units, formulas, warnings.")
    ] = False,
) -> None:
    """Print every batch number of a training step, with its unit and formula."""
    resolved = _resolve(config, set_)
    from quatrain.config.plan import plan as plan_batches
    from quatrain.config.plan import render

    batch_plan = plan_batches(
        resolved.config,
        devices=devices,
        processes=processes,
        mesh=mesh,
        rollout_mesh=rollout_mesh,
    )
    typer.echo(json.dumps(batch_plan.to_dict(), indent=2) if as_json else render(batch_plan))


@app.command(epilog=_examples("export runs/my-run exported/", "export runs/my-run exported/ --step 50"))
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to write.")],
    step: Annotated[
        int | None, typer.Option(show_default=False, help="Training step of the checkpoint; the latest.")
    ] = None,
) -> None:
    """Write a run's weights as a Hugging Face folder (safetensors, config, tokenizer)."""
    from quatrain.config.environment import load_dotenv
    from quatrain.export import export as write

    load_dotenv(os.environ)
    found = write(run, output, step=step)
    typer.echo(f"step {found} of {run} is in {output}")


@app.command(epilog=_examples("bench", "bench configs/gsm8k_smollm2_cpu.yaml --steps 3"))
def bench(
    config: ConfigArgument = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to time.")] = 5,
) -> None:
    """Time the stages of the training step."""
    resolved = _resolve(config, set_)
    from quatrain.bench import bench as run

    _print_numbers(run(resolved, steps))


def _print_numbers(numbers: dict[str, float]) -> None:
    """One JSON object, three digits after the point."""
    typer.echo(json.dumps({name: round(value, 3) for name, value in numbers.items()}, indent=2))


def _resolve(path: Path | None, overrides: list[str] | None) -> Resolved:
    """The final configuration; its warnings go to stderr, here and nowhere else."""
    from quatrain.config.environment import load_dotenv
    from quatrain.config.load import load_config

    load_dotenv(os.environ)
    resolved = load_config(path, overrides or (), os.environ)
    for warning in resolved.warnings:
        _complain("warning", warning)
    return resolved


def _run_to_resume(run: str, overrides: list[str] | None) -> tuple[Path | None, str]:
    """The configuration kept in the folder of `run` (its path, its name, or `auto`), and the run to resume.

    No configuration where `auto` finds no run.
    """
    from quatrain.config.environment import load_dotenv
    from quatrain.config.load import load_config

    load_dotenv(os.environ)
    runs = Path(load_config(None, overrides or (), os.environ).config.run.dir)
    if run == "auto":
        from quatrain.report.run_dir import newest_run

        newest = newest_run(runs)
        return (newest / "config.yaml", str(newest)) if newest else (None, run)
    candidates = [folder / "config.yaml" for folder in (Path(run), runs / run)]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"no run {run!r} to resume: there is neither {candidates[0]} nor {candidates[1]}"
        )
    return found, run


def _print_config(resolved: Resolved, *, as_json: bool = False) -> None:
    from quatrain.config.dump import dump_yaml, to_json

    typer.echo(to_json(resolved) if as_json else dump_yaml(resolved), nl=as_json)


def _complain(kind: str, message: str) -> None:
    from quatrain.config.environment import redact

    for line in redact(message, os.environ).splitlines():
        typer.echo(f"{kind}: {line}", err=True)


def main() -> None:
    """Runs the command line; a user's error is one line on stderr (`QUATRAIN_DEBUG=1`: a traceback)."""
    try:
        app()
    except KeyboardInterrupt:
        _complain("error", "interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:
        # Errors with a name of the project's own are meant to be read, as are ValueError and OSError.
        own = type(error).__module__.startswith("quatrain.")
        asked = isinstance(error, ValueError | OSError)
        if os.environ.get("QUATRAIN_DEBUG") == "1" or not (own or asked):
            raise
        _complain("error", str(error) or type(error).__name__)
        sys.exit(USER_ERROR if asked else FAILED_RUN)


if __name__ == "__main__":
    main()
