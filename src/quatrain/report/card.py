"""The model card of a run's model: what it was trained from, on and by, its figures, and how to load it.

Data flow: `config.yaml`, `run.json` and `metrics.jsonl` of a run's folder -> README.md of an exported folder,
which the Hugging Face Hub shows (`loop.hub`).
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from quatrain import __version__
from quatrain.config.fields import REWARD_MODEL
from quatrain.config.places import HUB_ID
from quatrain.config.secrets import redact_tokens
from quatrain.config.settings import parse_yaml
from quatrain.run.description import starts_in
from quatrain.run.metrics import read_metrics

_ROWS = {
    "data": ("data.train", "data.eval"),
    "algorithm": ("advantage.estimator", "update.loss", "update.loss_aggregation", "update.kl_coef"),
    "rewards": ("reward.functions",),
    "batches": ("data.batch_size", "rollout.n", "update.mini_batch_size"),
    "sampling": ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens"),
    "optimizer": ("optimizer.name", "optimizer.learning_rate", "lora.rank", "sft.steps"),
}
"""The rows of the card that say how the model was trained, and the keys in each."""
_ROWS_GIVEN = {
    "data": ("{task}.data", "{task}.eval"),
    "loss": ("{task}.loss", "{task}.beta", "{task}.label_smoothing", "{task}.center", "{task}.train_on"),
    "steps": ("{task}.steps", "{task}.epochs", "{task}.batch_size", "{task}.max_length"),
    "optimizer": ("optimizer.name", "{task}.learning_rate", "{task}.schedule", "lora.rank"),
}
"""Those of a run on data that exist, in its section `task`."""
_KINDS = {
    "rl": ("reinforcement learning", "reinforcement-learning"),
    "sft": ("supervised training", "sft"),
    "dpo": ("training on preferences", "dpo"),
    "rm": ("training as a reward model", "reward-model"),
}
"""`run.task` -> what it is called in a sentence, and as a tag."""
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".gguf", ".py")
"""Endings of files, which no id on the Hub has."""
_LOADING = """\
```python
from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {kind}.from_pretrained("{name}")
```

or, {otherwise}
"""


def model_card(run: Path, step: int, name: str) -> str:
    """README.md for the model of training step `step` of the run at `run`, as `name` loads it.

    Of local paths it says the last name alone. Secrets are redacted in the run's `config.yaml` already;
    tokens of known services that stand in the configuration itself are redacted here.
    """
    config = parse_yaml((run / "config.yaml").read_text("utf-8"), "config.yaml")
    task = _at(config, "run.task") or "rl"  # a run of an earlier version has none
    base, train = _at(config, "model.path"), _at(config, "data.train" if task == "rl" else f"{task}.data")
    scores = task == "rm"
    pipeline = "text-classification" if scores else "text-generation"
    about: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": pipeline}
    local = _local_paths(run)
    if _on_the_hub(base, local):
        about["base_model"] = base
    sets = train if isinstance(train, list) else [train]
    names = [each["path"] if isinstance(each, Mapping) else each for each in sets]  # of a mixture, or plain
    specs = [name.partition(":")[0] for name in names]
    if datasets := [spec for spec in specs if _on_the_hub(spec, local)]:
        about["datasets"] = datasets
    training, tag = _KINDS[task]
    about["tags"] = ["quatrain", tag]
    algorithm = _at(config, "advantage.estimator" if task == "rl" else f"{task}.loss")
    named = f" (`{_shown(algorithm, local)}`)" if algorithm else ""
    lines = [
        "---",
        yaml.safe_dump(about, sort_keys=False, allow_unicode=True) + "---",
        f"# {name.rpartition('/')[2]}",
        "",
        f"{_shown(base, local)} after {step} steps of {training}{named} with quatrain {__version__}, in JAX.",
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
    ]
    for row, keys in (_ROWS if task == "rl" else _ROWS_GIVEN).items():
        named_keys = [key.format(task=task) for key in keys]
        values = {key: _at(config, key) for key in named_keys}
        cells = [f"`{key}`: {_cell(value, local)}" for key, value in values.items() if value is not None]
        lines.append(f"| {row} | {'<br>'.join(cells)} |")
    loading = _LOADING.format(
        name=name,
        kind="AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM",
        otherwise=f'as a reward in quatrain: `reward.functions: {{"model:{name}": 1.0}}`'
        if scores
        else f"over HTTP with OpenAI's interface: `quatrain serve model.path={name}`",
    )
    return "\n".join([*lines, *_figures(run, step), "## How to load it", "", loading])


def _figures(run: Path, step: int) -> list[str]:
    """The newest evaluation up to `step`, beside that before training."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] <= step]
    found = [row for row in rows if any(key.startswith("eval/") for key in row)]
    if not found:
        return ["", "No evaluation was made.", ""]
    first, last = found[0], found[-1]
    steps = [last["step"]] if first is last else [first["step"], last["step"]]
    table = [
        "",
        "## Figures",
        "",
        "On data that were not trained on, before training if the step is 0:",
        "",
        "| metric | " + " | ".join(f"step {number}" for number in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for key in sorted(key for key in last if key.startswith("eval/")):
        values = [last.get(key)] if first is last else [first.get(key), last.get(key)]
        numbers = ["" if value is None else f"{value:.4g}" for value in values]
        table.append(f"| `{key}` | {' | '.join(numbers)} |")
    return [*table, ""]


def _at(config: Any, key: str) -> Any:
    """The value of a dotted key; None where the configuration has none."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _local_paths(run: Path) -> set[str]:
    """The texts of the configuration that were paths when the run at `run` started or went on."""
    return {path for start in starts_in(run / "run.json") for path in start["paths"]}


def _on_the_hub(path: Any, local: Collection[str]) -> bool:
    named = isinstance(path, str) and HUB_ID.fullmatch(path) and path not in local
    return bool(named) and not path.endswith(_FILES)


def _shown(value: Any, local: Collection[str]) -> str:
    """A value as text, without the folders of local paths, and without tokens."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_shown(key, local)}: {_shown(entry, local)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(entry, local) for entry in value)
    text = str(value)
    place = text.removeprefix(REWARD_MODEL)
    if _on_the_hub(place.partition(":")[0], local):
        return text
    return redact_tokens(text.removesuffix(place) + PurePath(place).name, os.environ)


def _cell(value: Any, local: Collection[str]) -> str:
    return _shown(value, local).replace("|", "\\|").replace("\n", " ")
