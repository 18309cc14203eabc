"""The commands about runs that have begun or ended: `quatrain report | samples | export`.

Data flow: the folder of a run -> a page, text in a terminal, or the folder of a model.
"""

import os
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from quatrain.cli.arguments import argument, examples, flag, option, run_folders

app = typer.Typer(rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "report runs/my-run", "report first second --output comparison.html", "report my-run --serve"
    )
)
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN …", help="Folders or names of runs.")],
    output: Annotated[
        Path | None,
        option("File to write; default: report.html in the run's folder, needed for several runs.", "FILE"),
    ] = None,
    serve: Annotated[
        bool, flag("--serve", "Show the page live on this machine, while a run is in progress.")
    ] = False,
    port: Annotated[
        int, option("Port for --serve; 0: any free one.", "N", shown=True, min=0, max=65535)
    ] = 8765,
) -> None:
    """Write the run page: curves, completions, plan and configuration in one HTML file."""
    folders = run_folders(runs)
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
    try:
        Page(folders).write(path)
    except OSError as error:
        raise ValueError(
            f"the run page must be a file that can be written; {path} is not ({error.strerror}); give "
            "another with --output FILE"
        ) from error
    typer.echo(f"the run page is {path}")


@app.command(epilog=examples("samples my-run", "samples runs/my-run --step 10", "samples my-run --eval"))
def samples(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name.")],
    step: Annotated[int | None, option("Training step; default: the last.", "N")] = None,
    evaluation: Annotated[
        bool, flag("--eval", "Print the completions of the evaluation after that step instead.")
    ] = False,
) -> None:
    """Print the completions of a training step, each prompt with its group, sorted by reward."""
    from rich.console import Console

    from quatrain.report.print_samples import print_samples

    (folder,) = run_folders([run])
    print_samples(folder, Console(), step=step, evaluation=evaluation)


@app.command(
    epilog=examples(
        "export runs/my-run exported/",
        "export my-run exported/ --step 50",
        "export tinker-state/ID/weights/final exported/",
        "export runs/my-run s3://my-bucket/models/my-run",
        "export runs/my-run --push OWNER/NAME",
    )
)
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder or name, or the folder of a training server's checkpoint."
        ),
    ],
    output: Annotated[
        str | None,
        argument(
            "Folder to write the model to, or gs://BUCKET/NAME or s3://BUCKET/NAME; may be left out with "
            "--push.",
            "OUTPUT",
        ),
    ] = None,
    step: Annotated[
        str | None,
        option(
            "Training step of the checkpoint, or best, that with the best checkpoint.best_metric; "
            "default: the latest.",
            "N|best",
        ),
    ] = None,
    push: Annotated[
        str | None,
        option(
            "Repository on the Hugging Face Hub to send the model and its card to; needs HF_TOKEN.",
            "OWNER/NAME",
        ),
    ] = None,
    public: Annotated[bool, flag("--public", "Make the repository of --push public if it is new.")] = False,
) -> None:
    """Write the weights of a run, or of a checkpoint of `quatrain serve --train`, as a Hugging Face folder
    (safetensors, config, tokenizer), or push those of a run."""
    from quatrain.config.dotenv import load_dotenv
    from quatrain.config.places import FOLDER_OR_BUCKET, HUB_ID, is_bucket, names_no_bucket
    from quatrain.loop.export import export as write
    from quatrain.serve.tinker.checkpoint import META

    if push is not None and not HUB_ID.fullmatch(push):
        raise ValueError(f"--push names a repository on the Hugging Face Hub, as OWNER/NAME; got {push!r}")
    if public and push is None:
        raise ValueError("--public is for the repository of --push; give --push OWNER/NAME too")
    if output is None and push is None:
        raise ValueError(
            "nothing says where the model goes; give a folder OUTPUT, --push OWNER/NAME, or both"
        )
    if names_no_bucket(output):
        raise ValueError(f"OUTPUT {FOLDER_OR_BUCKET}; got {output}; correct it")
    load_dotenv(os.environ)
    of_server = (Path(run) / META).is_file()
    if of_server and (push is not None or step is not None):
        raise ValueError(
            f"{run} is one checkpoint of a training server; leave --step and --push out, which are for runs, "
            "and give OUTPUT"
        )
    home = Path(run) if of_server else run_folders([run])[0]
    url = output if output is not None and is_bucket(output) else None
    if url is not None:
        from quatrain.loop.export import check_output

        check_output(url)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if output is None or url is not None else Path(output)
        if push is not None:
            from quatrain.loop import hub
            from quatrain.loop.export import check_export

            check_export(home, folder, step=step)  # a misspelt RUN leaves no empty repository
            hub.make_repository(push, private=not public)
        found = write(home, folder, step=step)
        if output is not None:
            if url is not None:
                from quatrain.loop.export import send

                send(folder, url)
            typer.echo(f"step {found} of {home} is in {output}")
        if push is not None:
            try:
                address = hub.push(folder, push, run=home, step=found)
            except (ValueError, OSError) as error:
                if output is None:
                    raise
                again = f"quatrain export {shlex.quote(str(home))} --step {found} --push {push}"
                raise ValueError(
                    f"{error}; the model is in {output}; to push again, leave OUTPUT out:\n  {again}"
                ) from error
            typer.echo(f"step {found} of {home}, with its card: {address}")
