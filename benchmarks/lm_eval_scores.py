"""Whether `lm_eval` gives a model the same score through `quatrain serve` as with transformers.

    python benchmarks/lm_eval_scores.py --data test.jsonl
    python benchmarks/lm_eval_scores.py --config configs/gsm8k_qwen25_coder_0p5b_cpu.yaml --data test.jsonl
    python benchmarks/lm_eval_scores.py --problems 8 --tokens 32

The model of a configuration, in float32, as a chat with the configuration's system prompt, answers the first
problems of GSM8K's test set, greedy: as lm_eval's model `hf`, and as `local-chat-completions` of a server.
The score is `exact_match` of the last number of an answer. Prints JSON: both scores, how many answers are the
same text, and the problems whose answers are not.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from compare import TORCH, Peer, environment, run, say, serving
from evaluation import add_arguments, exported, settings_of

from quatrain.config.load import load_config

LM_EVAL = Peer("", "lm_eval", (*TORCH, "accelerate", "lm_eval[api]==0.4.13"))
NUMBER = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
"""As `flexible-extract` of lm_eval's own task gsm8k."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    settings = (*settings_of(args), *args.set)
    model = exported(args.config, settings)
    system = load_config(args.config, settings, os.environ).config.data.system_prompt
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as place:
        folder = Path(place)
        write_task(folder, args.data, args.problems, args.tokens)
        sides = {"ours": served(folder, model, system), "theirs": with_hf(folder, model, system)}
    print(json.dumps(comparison(sides), indent=2))


def write_task(folder: Path, data: Path, problems: int, tokens: int) -> None:
    """A task of lm_eval, and its rows."""
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()[:problems]]
    answers = [{**row, "right": row["answer"].split("####")[-1].strip().replace(",", "")} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers), "utf-8")
    task = {
        "task": "problems",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{right}}",
        # The server stops where the model's own end is, as `hf` does with no text to stop at.
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": tokens},
        "filter_list": [
            {
                "name": "last_number",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": NUMBER},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "regexes_to_ignore": [",", r"\$", r"\.$"],
            }
        ],
    }
    (folder / "problems.yaml").write_text(json.dumps(task), "utf-8")


def served(folder: Path, model: Path, system: str | None) -> list[dict[str, Any]]:
    """The samples of a server's model."""
    with serving(str(model)) as address:
        given = f"model={model},base_url={address}/v1/chat/completions,num_concurrent=32,max_retries=1"
        return samples(folder, "served", "local-chat-completions", given, system)


def with_hf(folder: Path, model: Path, system: str | None) -> list[dict[str, Any]]:
    """The samples of transformers' model."""
    return samples(folder, "hf", "hf", f"pretrained={model},dtype=float32", system)


def samples(folder: Path, name: str, kind: str, given: str, system: str | None) -> list[dict[str, Any]]:
    """What lm_eval logs of each problem."""
    say(f"lm_eval: {name}")
    words = [str(environment(LM_EVAL)), "-m", "lm_eval", "--model", kind, "--model_args", given]
    words += ["--tasks", "problems", "--include_path", str(folder), "--output_path", str(folder / name)]
    words += ["--log_samples", "--apply_chat_template", "--batch_size", "1" if name == "served" else "20"]
    words += [] if system is None else ["--system_instruction", system]
    words += ["--device", "cpu"] if name == "hf" else []
    settings = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    run(["env", *(f"{key}={value}" for key, value in settings.items()), *words])
    [file] = (folder / name).rglob("samples_problems_*.jsonl")
    return sorted(map(json.loads, file.read_text("utf-8").splitlines()), key=lambda row: row["doc_id"])


def comparison(sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the documentation of this file names."""
    texts = {name: [row["resps"][0][0] for row in rows] for name, rows in sides.items()}
    differ = [
        number
        for number, pair in enumerate(zip(*texts.values(), strict=True))
        if len({*map(str.strip, pair)}) > 1
    ]
    return {
        "problems": len(texts["ours"]),
        "exact_match": {
            name: sum(row["exact_match"] for row in rows) / len(rows) for name, rows in sides.items()
        },
        "equal_texts": len(texts["ours"]) - len(differ),
        "others": differ,
    }


if __name__ == "__main__":
    main()
