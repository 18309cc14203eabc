"""Whether `quatrain eval` sees what transformers' `generate` would answer: greedy texts, and their accuracy.

    python benchmarks/evaluation.py --data test.jsonl
    python benchmarks/evaluation.py --config configs/gsm8k_qwen25_coder_0p5b_cpu.yaml --set model.path=FILE
    python benchmarks/evaluation.py --problems 8 --tokens 32

The model of a configuration, in float32, answers the first problems of GSM8K's test set with the system
prompt of the configuration: once with the engine, and once with `generate`, which renders the chats with
its own template and stops by its own generation configuration. Prompts must be equal to the token. Prints
JSON: how many texts are equal, the accuracy of both by the evaluation's own function, and every answer that
differs: from which token on, and by how much less likely, for transformers, the engine's token there was.
That is a tie where it is less than `--tie`, as products of other shapes round otherwise; anything else is
an error, and the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare import BENCHMARKS, ENVIRONMENTS, PEERS, environment, run, say, write_once

from quatrain.config.load import load_config
from quatrain.data.prompts import load_prompts
from quatrain.loop.export import export_policy
from quatrain.loop.policy import load_policy
from quatrain.loop.stages import build_engine
from quatrain.reward.functions import correct
from quatrain.types.rollouts import Sampling

CONFIG = BENCHMARKS.parent / "configs" / "gsm8k_smollm2_cpu.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tie", type=float, default=1e-3, help="in nats")
    args = parser.parse_args()
    settings = (
        *settings_of(args),
        f"eval.final_num_prompts={args.problems}",
        f"rollout.max_new_tokens={args.tokens}",
    )
    found = ours(args, settings)
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        chats = Path(folder) / "chats.jsonl"
        chats.write_text("".join(json.dumps(each["chat"]) + "\n" for each in found))
        model = exported(args.config, (*settings, *args.set))
        script = str(BENCHMARKS / "peers" / "hf_greedy.py")
        words = [f"--model={model}", f"--chats={chats}", f"--tokens={args.tokens}"]
        words += [f"--threads={os.cpu_count()}"]
        began = time.perf_counter()
        peer = json.loads(run([str(environment(PEERS["hf"])), script, *words]).splitlines()[-1])
        say(f"transformers: {time.perf_counter() - began:.0f} s")
    told = comparison(found, peer["answers"], args.tie)
    print(json.dumps({"peer": peer["peer"], "problems": len(found), **told}, indent=2))
    sys.exit(bool(told["errors"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the problems that are evaluated."""
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/gsm8k/test.jsonl"), metavar="FILE")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="most new tokens of an answer")


def settings_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The settings of the data and of float32."""
    dtypes = ("model.dtype=float32", "model.param_dtype=float32")
    return (f"data.eval={args.data}", f"data.train={args.data}", *dtypes)


def exported(config: Path, settings: tuple[str, ...]) -> Path:
    """The folder of the configuration's model, which is written once."""
    model = ENVIRONMENTS / "models" / f"evaluated-{config.stem}"
    write_once(model / "tokenizer_config.json", write_model, model, config, settings)
    return model


def write_model(folder: Path, config: Path, settings: tuple[str, ...]) -> None:
    """The configuration's model as a float32 folder."""
    loaded = load_policy(load_config(config, settings, environ={}).config)
    export_policy(folder, loaded.arch, loaded.params, loaded.tokenizer)


def ours(args: argparse.Namespace, settings: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of each problem the chat, and the engine's greedy answer."""
    config = load_config(args.config, (*settings, *args.set), os.environ).config
    loaded = load_policy(config)
    source = load_prompts(config.data.eval, config.data, loaded.tokenizer, seed=config.seed)
    prompts = source.head(args.problems)
    engine = build_engine(config, loaded, prompts=source)
    engine.sync_weights(loaded.params, 0)
    greedy, found, began = Sampling(n=1, max_new_tokens=args.tokens, temperature=0.0), [], time.perf_counter()
    for start in range(0, len(prompts), config.eval.batch_size):
        drawn = prompts[start : start + config.eval.batch_size]
        batch = engine.generate(drawn, sampling=greedy)
        for row, prompt in enumerate(drawn):
            scored = batch.completion_mask[row].astype(bool)
            found.append(
                {
                    "chat": prompt.text,
                    "answer": prompt.columns["answer"],
                    "prompt": prompt.input_ids.tolist(),
                    "tokens": batch.input_ids[row][scored].tolist(),
                    "text": batch.completions[row],
                }
            )
    say(f"engine: {time.perf_counter() - began:.0f} s, compilation included")
    engine.close()
    return found


def comparison(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tie: float) -> dict[str, Any]:
    """What the documentation of this file names."""
    ties, errors = [], []
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own["prompt"] != other["prompt"]:
            errors.append({"problem": number, "why": "another prompt"})
            continue
        place = first_difference(own["tokens"], other["tokens"])
        if place is None:
            if own["text"] != other["text"]:
                errors.append({"problem": number, "why": "another text of the same tokens"})
            continue
        named: dict[str, Any] = {"problem": number, "token": place}
        if place >= min(len(own["tokens"]), len(other["tokens"])):
            errors.append({**named, "why": "one ends where the other goes on"})
            continue
        second, gap = other["seconds"][place], other["gaps"][place]
        named["nats"] = round(gap, 6)
        if own["tokens"][place] == second and gap < tie:
            ties.append(named)
        else:
            errors.append({**named, "why": "another token"})
    answers = [each["answer"] for each in ours]
    return {
        "equal": len(ours) - len(ties) - len(errors),
        "ties": ties,
        "errors": errors,
        "accuracy": {
            name: sum(correct([], [each["text"] for each in side], answer=answers)) / len(ours)
            for name, side in (("ours", ours), ("theirs", theirs))
        },
    }


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place in which two lists differ, be it the end of one; None: they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, his) in pairs if own != his), min(len(one), len(other)))


if __name__ == "__main__":
    main()
