"""Writes the pages that are made from the code: docs/config.md and docs/metrics.md. `make docs` runs it.

Data flow: the schema of the configuration and the catalogue of metrics -> tables in Markdown.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from quatrain.config.layers import sections
from quatrain.config.schema import Config, Section
from quatrain.report.catalogue import CATALOGUE

DOCS = Path(__file__).parents[1] / "docs"

CONFIG_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` (scripts/document.py) from src/quatrain/config/schema.py. Edit that file. -->

A run is described by one YAML file; every key has a default. `quatrain config CONFIG.yaml` prints what
results, each value with the layer it came from (`--json` for programs), and so does
`quatrain train CONFIG.yaml --print-config`.

## Layers

Lowest first; a later layer wins.

1. **Defaults**: the tables below.
2. **The YAML file.** Without one, the embedded quickstart (`configs/quickstart.yaml`).
3. **`--set key.sub=value`**, as often as you like; among equals the last wins.
4. **The environment**: `QUATRAIN__ROLLOUT__N=16` sets `rollout.n`. A double underscore is a dot; upper and
   lower case are the same. A variable that takes back a `--set` is reported.
5. **Derived**: what is still `null` and follows from the rest, as the descriptions say. A value that was
   given is never changed.

```bash
quatrain train configs/gsm8k_smollm2_cpu.yaml --set rollout.n=4 --set optimizer.learning_rate=1e-6
quatrain train configs/gsm8k_smollm2_cpu.yaml --set data.train=../shared/data/gsm8k/train.jsonl
QUATRAIN__RUN__STEPS=5 quatrain train
```

An unknown key is an error in every layer, and the message names the nearest valid key. Nothing is converted:
a number in quotes is text, and text where a number belongs is an error.

Values are YAML, with the scalars of YAML 1.2: `1e-6` is a number, only `true` and `false` are truth values
(`off`, `no` and `1:30` are text), a key may stand once. Text with `: ` or ` #` in it, or that begins with one
of `[ { * & ! % @ > |`, needs quotes: `--set 'data.system_prompt="Answer: a number."'`. An empty value is
`null`. Relative paths start at the working directory.

`reward.functions` is a mapping from name to weight. A layer that gives the mapping replaces it whole; one
entry changes with `--set reward.functions.correct=2` (all that follows `reward.functions.` is the name, dots
included) or `QUATRAIN__REWARD__FUNCTIONS__CORRECT=2`.

A run keeps its final configuration in `config.yaml` in its folder, and that file is a CONFIG again. Derived
values are written out there; where you change what they follow from, set them to `null` to derive them anew.

## Secrets

Keys and passwords (`WANDB_API_KEY`, `HF_TOKEN`) come from the environment or from a `.env` file, never from a
configuration. The file is the first that exists of `.env` in the repository (or the working directory,
outside one) and `~/.env`; it fills only variables that are not set. `.env.example` shows the form, which is
python-dotenv's without the substitution of `${NAME}`; an error in the file names the line and does not show
it. Git ignores `.env`. Of the environment the configuration reads only the `QUATRAIN__` variables, and
whether `WANDB_API_KEY` is set and what `WANDB_MODE` asks for. The values of variables named `*_API_KEY`,
`*_TOKEN`, `*_SECRET` or `*PASSWORD*` are replaced by `[redacted]` in everything that is printed or written.

`QUATRAIN_DEBUG=1` shows a traceback with every error.
"""

METRICS_INTRODUCTION = """\
# Metrics

<!-- Written by `make docs` (scripts/document.py) from src/quatrain/report/catalogue.py. Edit that file. -->

A run writes one JSON object per training step to `metrics.jsonl`, and the same numbers to Weights & Biases
and TensorBoard where these are on. Step 0 is the state before training. Every line is on disk before the run
goes on. A step that is logged twice (an evaluation after the step) is merged into its line.

- **Reduction** says how the parts of a step (sequences, tokens, micro-batches, optimizer steps) become one
  number. A mean is kept as sum and count and divided once, so that it does not depend on how a batch was cut.
- A mean over nothing is left out. A number that is not finite is `null`, and its name is listed in
  `non_finite`.
- After `--resume`, lines after the restored step are moved to `metrics.discarded.jsonl`: one line per step.
- Lengths, rewards and advantages are over the step's rollout batch; losses over the tokens trained on.

| name | unit | reduction | meaning |
|---|---|---|---|
"""


def config_page() -> str:
    """docs/config.md: one table per section, from the descriptions, defaults and bounds of the schema."""
    nested = sections()
    top = {name: field for name, field in Config.model_fields.items() if name not in nested}
    parts = [CONFIG_INTRODUCTION, "## Keys\n", _table("", Config, list(top))]
    for name, kind in nested.items():
        about = inspect.cleandoc(kind.__doc__ or "")
        parts += [f"### `{name}`\n\n{about}\n", _table(f"{name}.", kind, list(kind.model_fields))]
    return "\n".join(parts)


def _table(prefix: str, kind: type[Section], names: list[str]) -> str:
    properties = kind.model_json_schema()["properties"]
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    for name in names:
        field = properties[name]
        default = json.dumps(field["default"], ensure_ascii=False)
        cells = [f"`{prefix}{name}`", type_text(field), f"`{default}`", field["description"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


_NAMES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def type_text(field: dict[str, Any]) -> str:
    """A field's type and bounds in words, from its JSON schema."""
    if "anyOf" in field:
        return " or ".join(type_text(choice) for choice in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field["type"] == "array":
        return f"list of {type_text(field['items'])}"
    if field["type"] == "object":
        return f"mapping of name to {type_text(field['additionalProperties'])}"
    bounds = ", ".join(f"{sign} {field[bound]:g}" for bound, sign in _BOUNDS.items() if bound in field)
    return f"{_NAMES[field['type']]} {bounds}".rstrip()


def metrics_page() -> str:
    """docs/metrics.md: the catalogue as a table."""
    rows = (f"| `{name}` | {doc.unit} | {doc.reduction} | {doc.meaning} |" for name, doc in CATALOGUE.items())
    return METRICS_INTRODUCTION + "\n".join(rows) + "\n"


def main() -> None:
    """Write both pages."""
    (DOCS / "config.md").write_text(config_page(), encoding="utf-8")
    (DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
