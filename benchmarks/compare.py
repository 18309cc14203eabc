"""One training step of ours against a peer's, in turns on the same machine.

    python benchmarks/compare.py --peer trl --steps 3 --data train.jsonl
    python benchmarks/compare.py --peer trl-sft --rows 4

The workload is that of `step.py`: SmolLM2-135M-Instruct in float32, 4 GSM8K prompts, 8 samples of each,
64 new tokens each (no early stop), one AdamW step, no KL. Three processes one after the other, ours, the
peer's, ours again, each with `--steps` measured steps after one that is dropped; figures are medians.

    trl     TRL's GRPOTrainer, transformers generate        whole step
    trl-pictures, trl-qwen3-vl                              whole step on rows with pictures
            TRL's GRPOTrainer
    trl-sft, trl-dpo, trl-rm                                optimizer step on given data (`given.py`)
            TRL's SFTTrainer, DPOTrainer, RewardTrainer
    tunix   Tunix's GRPOLearner, vanilla rollout            whole step
    hf      transformers generate                           rollout alone

With pictures the model is that of the quickstart, or has Qwen3-VL's sizes, with random weights, which need no
file (`picture_data.py`); the sizes of a step are those of `PICTURES` unless they are given, and `--vision`
says what of the tower both train.

A peer runs in an environment of its own, made under `.venv-peers/` when it is first asked for, at its best
ordinary setting, which the output names. Run from the repository's root, after `make smollm2`, on a machine
that does nothing else: torch loses more than we do to other processes. Prints JSON: a ratio of times above 1
and a ratio of memory below 1 are in our favour.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import picture_data
from peers.given_workload import TASKS
from peers.workload import add_arguments

BENCHMARKS = Path(__file__).parent
ENVIRONMENTS = BENCHMARKS.parent / ".venv-peers"
CONFIG = BENCHMARKS.parent / "configs" / "gsm8k_smollm2_cpu.yaml"
SEEING = BENCHMARKS.parent / "configs" / "shapes.yaml"
TORCH = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0", "accelerate", "datasets")


@dataclass(frozen=True)
class Peer:
    """A peer's script, the environment it runs in, and the seconds that are compared."""

    script: str
    environment: str
    requirements: tuple[str, ...]
    seconds: str = "step_s"
    task: str | None = None
    """Of a peer that trains on given data, as `given.py` does."""
    pictures: str | None = None
    """Of a peer that trains on rows with pictures: the key of `PICTURES`."""


SEES = (*TORCH, "torchvision", "pillow")
PICTURES: dict[str, dict[str, Any]] = {
    "shapes": {
        "sizes": {"prompts": 32, "samples": 8, "tokens": 8, "vision": "all"},
        "set": (),
    },
    "qwen3-vl": {
        "sizes": {"prompts": 2, "samples": 8, "tokens": 32, "vision": "frozen"},
        "set": ("data.max_prompt_length=256", "model.remat=dots"),
    },
}
"""Of each model of `picture_data.py`: the workload, and settings of ours beside those of `SEEING`."""
PEERS = {
    "trl": Peer("trl_step.py", "trl", TORCH),
    "hf": Peer("hf_generate.py", "trl", TORCH, seconds="rollout_s"),
    "tunix": Peer("tunix_step.py", "tunix", ("google-tunix==0.1.7",)),
    **{f"trl-{task}": Peer("trl_given.py", "trl", TORCH, task=task) for task in TASKS},
    "trl-pictures": Peer("trl_step.py", "trl-sees", SEES, pictures="shapes"),
    "trl-qwen3-vl": Peer("trl_step.py", "trl-sees", SEES, pictures="qwen3-vl"),
}


class PeerFailed(Exception):
    """A process that did not end well, in one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    add_arguments(parser)
    parser.add_argument("--rows", type=int, help="sequences of the peer's micro-batch; its best unless given")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for ours")
    peer = PEERS[parser.parse_args().peer]
    if peer.pictures is not None:
        folder = ENVIRONMENTS / "models" / peer.pictures
        parser.set_defaults(data=folder / "rows.jsonl", **PICTURES[peer.pictures]["sizes"])
    args = parser.parse_args()
    sizes = ("data", "prompts", "samples", "tokens", "steps") if peer.task is None else ("data", "steps")
    workload = [f"--{name}={getattr(args, name)}" for name in sizes]
    if peer.task is not None:
        workload += [f"--task={peer.task}"]
    script, own = BENCHMARKS / ("step.py" if peer.task is None else "given.py"), list(args.set)
    if peer.pictures is not None:
        workload += [f"--vision={args.vision}"]
        own = [f"model.path={folder}", *PICTURES[peer.pictures]["set"], *own]
    ours = [sys.executable, str(script), *workload, *(f"--set={item}" for item in own)]
    if peer.pictures is not None:
        ours += [f"--config={SEEING}"]
    load = os.getloadavg()[0]
    try:
        python = environment(peer)
        theirs = [
            str(python),
            str(BENCHMARKS / "peers" / peer.script),
            *workload,
            *peer_flags(peer, args.rows),
        ]
        turns = [measure("ours", ours), measure(args.peer, theirs), measure("ours again", ours)]
    except PeerFailed as error:
        raise SystemExit(f"{args.peer}: {error}") from None
    print(json.dumps({**comparison(args.peer, *turns), "load_average_before": round(load, 2)}, indent=2))


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of `quatrain serve` with a model, in a process of its own."""
    words = [sys.executable, "-m", "quatrain", "serve", "--set", f"model.path={model}", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if address := re.search(r"is served at (http://[^/;]+)", line):
                    yield address[1]
                    return
            raise SystemExit("the server ended before it served anything")
        finally:
            process.terminate()


def environment(peer: Peer) -> Path:
    """The interpreter of the peer's environment, which is made where it is not there."""
    folder = ENVIRONMENTS / peer.environment
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(peer.requirements) + "\n"
    if not done.exists() or done.read_text("utf-8") != wanted:
        say(f"making {folder.relative_to(BENCHMARKS.parent)} with {', '.join(peer.requirements)}")
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "--quiet", *peer.requirements])
        done.write_text(wanted, "utf-8")
    return python


def peer_flags(peer: Peer, rows: int | None) -> list[str]:
    """What a peer's script needs beside the workload; the model is written for transformers once."""
    from quatrain.config.load import load_config

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = [f"--threads={threads}"] + ([] if rows is None else [f"--rows={rows}"])
    if peer.pictures is not None:
        folder = ENVIRONMENTS / "models" / peer.pictures
        write_once(folder / "rows.jsonl", picture_data.write, peer.pictures, folder)
        return [*flags, f"--model={folder}"]
    config = load_config(CONFIG, environ={}).config
    folder = ENVIRONMENTS / "models" / Path(config.model.path).stem
    write_once(folder / "tokenizer_config.json", write_model, folder)
    return [*flags, f"--model={folder}", f"--system-prompt={config.data.system_prompt}"]


def write_once(last: Path, write: Callable[..., None], *given: Any) -> None:
    """Write a model for transformers unless its `last` file is there; in a process whose memory goes back."""
    if last.exists():
        return
    say(f"writing {last.parent.relative_to(BENCHMARKS.parent)} for transformers")
    process = multiprocessing.get_context("spawn").Process(target=write, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise PeerFailed(f"{last.parent.name} could not be written for transformers")


def write_model(folder: Path) -> None:
    """The configuration's model as a float32 folder."""
    from quatrain.config.load import load_config
    from quatrain.loop.export import export_policy
    from quatrain.loop.policy import load_policy

    loaded = load_policy(load_config(CONFIG, environ={}).config)
    export_policy(folder, loaded.arch, loaded.params, loaded.tokenizer)


def measure(name: str, command: list[str]) -> dict[str, Any]:
    """What the process printed last, as JSON."""
    say(f"measuring {name}")
    measured = json.loads(run(command).splitlines()[-1])
    say(f"  {json.dumps(measured['steps'])}")
    return measured


def run(command: list[str]) -> str:
    """Standard output of the process. Raises PeerFailed with its last words where it fails."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        raise PeerFailed(
            f"{Path(command[1]).name} was killed, as happens where memory runs out; lower it with --rows 8"
        )
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last = said[-1] if said else "without a word"
        raise PeerFailed(f"{Path(command[1]).name} ended with {done.returncode}: {last}")
    return done.stdout


def comparison(
    name: str, first: dict[str, Any], theirs: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    """Medians of both and their ratios. Raises SystemExit where the two did not have the same prompts."""
    if theirs.get("prompt_tokens") != first.get("prompt_tokens"):
        raise SystemExit(
            f"both sides have the same prompts: ours are {first['prompt_tokens']} tokens, "
            f"those of {name} {theirs['prompt_tokens']}"
        )
    seconds = PEERS[name].seconds
    our_steps = [*first["steps"], *second["steps"]]
    ours_s, theirs_s = medians(our_steps), medians(theirs["steps"])
    peaks = max(first["peak_rss_mib"], second["peak_rss_mib"]), theirs["peak_rss_mib"]
    compared = {
        "ours": {
            "seconds": ours_s,
            "each": [step[seconds] for step in our_steps],
            "peak_rss_mib": peaks[0],
            "compilations": [first["compilations"], second["compilations"]],
            **{name: first[name] for name in ("pictures", "tower_pictures") if name in first},
            "setting": first["setting"],
        },
        theirs["peer"]: {
            "seconds": theirs_s,
            "each": [round(step[seconds], 3) for step in theirs["steps"]],
            "peak_rss_mib": peaks[1],
            "setting": theirs["setting"],
        },
        "compared": seconds,
        "times_faster": round(theirs_s[seconds] / ours_s[seconds], 2),
    }
    if "losses" in theirs:
        # The first step's, from the same weights and rows: both trained on the same.
        compared["first_losses"] = [first["losses"][0], theirs["losses"][0]]
    if seconds == "step_s":
        if "rollout_s" in theirs_s:
            compared["rollout_times_faster"] = round(theirs_s["rollout_s"] / ours_s["rollout_s"], 2)
        compared["memory_ratio"] = round(peaks[0] / peaks[1], 3)
    return compared


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of every measure over the steps."""
    return {name: round(statistics.median(step[name] for step in steps), 3) for name in steps[0]}


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
