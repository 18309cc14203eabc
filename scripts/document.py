"""Writes the pages that are made from the code: docs/config.md and docs/metrics.md. `make docs` runs it.

Data flow: the schema of the configuration and the catalogue of metrics -> tables in Markdown.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from quatrain.config.fields import Section
from quatrain.config.schema import Config, inner_section, sections
from quatrain.run.catalogue import CATALOGUE

DOCS = Path(__file__).parents[1] / "docs"

CONFIG_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` (scripts/document.py) from src/quatrain/config/sections. Edit those files. -->

A YAML file describes a run; every key has a default. `quatrain config CONFIG.yaml` prints the resolved
configuration, each value with the layer it came from (`--json` prints JSON).
`quatrain train CONFIG.yaml --print-config` prints the same.

## Layers

The layers, from lowest to highest; a higher layer overrides a lower one.

1. **Defaults**: the values in the tables below.
2. **The YAML file.** Without a CONFIG, the file of the quickstart (`configs/quickstart.yaml`); with
   another `model.path`, without its `sft`, `optimizer` and `model.remat`; `quatrain sft`, `dpo` and `rm`
   take of it what they read.
   A file may begin from others: `extends: base.yaml`, or a list of files, which are layers below it in their
   order ([below](#configurations-that-extend-others)).
3. **`--set key.sub=value`**, which can be repeated; if a key is set twice, the last value counts. `--set`
   may be left out: a word `key.sub=value` that is no file is an override, applied after those of `--set`.
4. **Environment variables**: `QUATRAIN__ROLLOUT__N=16` sets `rollout.n`. A double underscore stands for a
   dot; upper and lower case are equivalent. If an environment variable overrides a `--set`, a warning says
   so.
5. **Derived values**: a key that is `null` after layers 1 to 4 gets the derived value that its description
   gives, if it gives one. A value other than `null` is never changed.

```bash
quatrain train configs/gsm8k_smollm2_cpu.yaml --set rollout.n=4 --set optimizer.learning_rate=1e-6
quatrain train configs/gsm8k_smollm2_cpu.yaml --set data.train=train.jsonl
QUATRAIN__RUN__STEPS=5 quatrain train
```

An unknown key is an error in every layer, and the error names the nearest valid key, or what replaces a
[key of verl, TRL or Tunix](coming_from.md). Values are never
converted to another type: a number in quotes is a string, and a string for a key that needs a number is an
error.

Values are YAML, with the scalars of YAML 1.2: `1e-6` is a number, and only `true` and `false` are booleans
(`off`, `no` and `1:30` are strings). A key given twice in one file is an error; so is a file of more than
131,072 characters or 10,000 keys and values, counted wherever an alias repeats them. A string that contains
`: ` or ` #`, or that begins with one of `[ { * & ! % @ > |`, needs quotes:
`--set 'data.system_prompt="Answer: a number."'`. An empty value is `null`. Relative paths are relative to
the working directory; a file that is not there, but beside the configuration file that names it, is that one.

`reward.functions` is a mapping from names to weights, or to mappings with a weight and more. A layer that
sets the mapping replaces the whole mapping. To change one entry, use `--set reward.functions.correct=2`
(everything after `reward.functions.` is the name, dots included) or
`QUATRAIN__REWARD__FUNCTIONS__CORRECT=2`.

## Configurations that extend others

```yaml
extends: gsm8k_smollm2_cpu.yaml     # or a list: [base.yaml, one_gpu.yaml]
rollout:
  n: 16
```

The file has all values of the file that it extends, and changes those that it sets itself. Paths in
`extends` are relative to the file in which they stand. A file that is extended may extend others. In a list,
later files override earlier ones; a file that several of them extend counts once, before the first (so a
listed file that an earlier one extends overrides nothing). Files
that extend each other in a circle are an error. A mapping such as `reward.functions`, and a list,
replaces that of the base as
a whole. `quatrain config` names the file that each value comes from, and a run's `config.yaml` has all values
and no `extends`.

## The configuration of a run

A run writes its resolved configuration to `config.yaml` in its folder. This file can be used as a CONFIG
again. The file contains the derived values: if you change a key that others are derived from, set those to
`null`, so that they are derived again.

## Secrets

Keys and passwords (`WANDB_API_KEY`, `HF_TOKEN`) are read from the environment or from a `.env` file, never
from a configuration. quatrain reads one `.env` file: the one in the repository (outside a repository, in the
working directory), or, if that does not exist, `~/.env`. The file sets only variables that are not set yet.
`.env.example` shows the format, which is python-dotenv's without substitution of `${NAME}`; an error in the
file names the line and does not show it. Git ignores `.env`. The configuration depends on no other
environment variables than those with the prefix `QUATRAIN__`, `WANDB_MODE`, and whether `WANDB_API_KEY` is
set. A `.env` file that others than its owner can read is warned about.

In everything that a run prints or writes (configuration, log, samples, names of metrics, W&B, TensorBoard,
error messages, checkpoints' settings, and what Python code such as a reward function prints) secrets are
replaced by `[redacted]`. What is trained on does not change. Secrets are

- **by name**, the values of 4 characters or more of variables such as `*_KEY`, `*_TOKEN`, `*_PAT`, `*_AUTH`,
  `*_DSN`, and of those whose names contain `SECRET`, `PASSWORD`, `CREDENTIAL`, or end in `PASS`;
- **by form**, whatever the variable: tokens of known services (`hf_…`, `sk-…`, `ghp_…`, `AKIA…`, `eyJ….…`),
  private keys, and passwords in URLs (`postgres://me:PASSWORD@host`) and connection strings (`Password=…;`),
  together with the whole value;
- **by place**, every other value of 8 characters or more in the `.env` file.

No secrets are switches (`true`), numbers of up to 5 digits, ordinary words of under 8 characters
(`S3_KEY=data`), paths that exist, and variables `QUATRAIN__…`, which are configuration; in a `.env` file
also lists of numbers and what a configuration key has by default or offers for a choice (`bfloat16`). A
secret is also found line by line, escaped as in JSON or Python, and with the escapes of a URL; it is not
found in pieces, in other encodings, in what other programs print, or in what a program of yours prints
beside the run that it started with `quatrain.loop.train.train`. A token that you write into code, the
command or the configuration, and into no variable, is unknown as a secret: it is redacted by its form in
`code/`, the command in `run.json` and model cards, and nowhere else. W&B gets neither the
console nor the command line. A configuration in which `[redacted]` stands for a secret, such as
the `config.yaml` of a run, can be used again once `--set` or the environment gives the key its value.

Weights and the model folder `final/` hold no text of a run but tokenizer and chat template of the model;
checkpoints hold the settings that a resume compares (`data.train` and names of columns). A setting with a
secret in it is redacted there and compared by its SHA-256.

With `QUATRAIN_DEBUG=1`, every error is printed with its traceback.
"""

METRICS_INTRODUCTION = """\
# Metrics

<!-- Written by `make docs` (scripts/document.py) from src/quatrain/run/catalogue.py. Edit that file. -->

A run writes one JSON object (one line) per training step to `metrics.jsonl`. It also sends the metrics to
Weights & Biases and TensorBoard if these are enabled. Step 0 is the state before training. Each line is on
disk before the run continues. If a step is logged twice (for example by an evaluation after the step), the
metrics are merged into one line.

- The **reduction** says how the values of sequences, tokens, micro-batches or optimizer steps are combined
  into one number per training step. A mean is accumulated as a sum and a count and divided once, so it does
  not depend on how a batch was split.
- A mean over zero items is left out of the line. A non-finite number is written as `null`, and its name is
  listed in `non_finite`.
- When a run is resumed, lines for steps after the restored one are moved to `metrics.discarded.jsonl`, so
  that `metrics.jsonl` has one line per step.
- Lengths, rewards and advantages are those of the rollout batch of the training step. Losses are taken over
  the completion tokens that were trained on.

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
        inner = {key: inner_section(f"{name}.{key}") for key in kind.model_fields}
        for key, found in inner.items():
            if found is not None:
                about = inspect.cleandoc(found.__doc__ or "")
                table = _table(f"{name}.{key}.", found, list(found.model_fields))
                parts += [f"#### `{name}.{key}`\n\n{about}\n", table]
    return "\n".join(parts)


def _table(prefix: str, kind: type[Section], names: list[str]) -> str:
    properties = kind.model_json_schema()["properties"]
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    for name in names:
        field = properties[name]
        default = json.dumps(field["default"], ensure_ascii=False)
        cells = [
            f"`{prefix}{name}`",
            type_text(field),
            f"`{default}`",
            " ".join(field["description"].split()),
        ]
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
    if "$ref" in field:
        return "mapping"
    if "anyOf" in field:
        return " or ".join(type_text(choice) for choice in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{_as_yaml(choice)}`" for choice in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field["type"] == "array":
        return f"list of {type_text(field['items'])}"
    if field["type"] == "object":
        return f"mapping of name to {type_text(field['additionalProperties'])}"
    bounds = ", ".join(f"{sign} {field[bound]:.10g}" for bound, sign in _BOUNDS.items() if bound in field)
    return f"{_NAMES[field['type']]} {bounds}".rstrip()


def _as_yaml(choice: str | bool) -> str:
    """A value as YAML spells it: booleans in lower case."""
    return str(choice).lower() if isinstance(choice, bool) else choice


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
