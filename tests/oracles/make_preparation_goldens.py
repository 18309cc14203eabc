"""Writes the tokens and masks that TRL prepares of rows in all forms, for `tests/data/test_row_forms.py`.

Needs trl, datasets and torch, which the tests do not. Run from the repository's root:

    python tests/oracles/make_preparation_goldens.py

The tokenizer has a token for each byte, so that ids are those of a text wherever it is cut, and a template in
ChatML's manner with `{% generation %}` marks, which say what of a text is the assistant's.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from chat_templates import Family, tokenizer_of

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\nTools:' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- if brief %}{{- '<|im_start|>system\nBe brief.<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {{- m.content }}
            {%- for call in m.tool_calls or [] %}
                {{- '<call>' + call.function.name + call.function.arguments | tojson }}
            {%- endfor %}
            {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
FAMILY = Family(TEMPLATE, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ROWS = 12


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def question(n: int) -> list[dict[str, Any]]:
    first = [said("system", f"You count to {n}.")] if n % 3 == 0 else []
    return [*first, said("user", f"What is {n}+é?")]


def dialogue(n: int) -> list[dict[str, Any]]:
    """Of one to three answers, every fourth with a call."""
    messages = question(n)
    for turn in range(n % 3):
        messages += [said("assistant", f"It is {n + turn}."), said("user", "Sure?")]
    if n % 4 == 0:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": n}}}
        messages += [said("assistant", "", tool_calls=[call]), said("tool", f"{n}", name="add")]
    return [*messages, said("assistant", f"Yes,\n {n}.")]


def beside(n: int) -> dict[str, Any]:
    return {"tools": [TOOL] if n % 2 == 0 else [], "chat_template_kwargs": {"brief": n % 5 == 0}}


def rows_of(made: Any) -> list[dict[str, Any]]:
    return [made(n) for n in range(ROWS)]


FORMS = {
    "messages": rows_of(lambda n: {"messages": dialogue(n), **beside(n)}),
    "texts": rows_of(lambda n: {"prompt": f"{n}+é=", "completion": f" {n}" if n % 2 else f"{n}<|im_end|>"}),
    "prompts": rows_of(
        lambda n: {"prompt": question(n), "completion": [said("assistant", f"It is {n}.")], **beside(n)}
    ),
    "text": rows_of(lambda n: {"text": f"Line {n}\né" + "<|im_end|>" * (n % 2)}),
    "preferences": rows_of(lambda n: {"prompt": f"{n}+1=", "chosen": f" {n + 1}", "rejected": f"{n}"}),
    "preferences of messages": rows_of(
        lambda n: {
            "prompt": question(n),
            "chosen": [said("assistant", f"It is {n}.")],
            "rejected": [said("assistant", "No.")],
            **beside(n),
        }
    ),
    "whole texts": rows_of(lambda n: {"chosen": f"é {n}:good", "rejected": f"é {n}:bad"}),
    "whole conversations": rows_of(
        lambda n: {
            "chosen": dialogue(n),
            "rejected": [*dialogue(n)[:-1], said("assistant", "Well.")],
            **beside(n),
        }
    ),
    "judged": rows_of(lambda n: {"prompt": f"{n}=", "completion": f"{n}", "label": n % 3 == 0}),
    "judged messages": rows_of(
        lambda n: {
            "prompt": question(n),
            "completion": [said("assistant", f"{n}")],
            "label": n % 3 == 0,
            **beside(n),
        }
    ),
}
SFT = {
    "messages": ("assistant", "all"),
    "texts": ("completion", "all"),
    "prompts": ("completion", "all"),
    "text": ("all",),
}
PAIRS = ("preferences", "preferences of messages", "whole texts", "whole conversations")
JUDGED = ("judged", "judged messages", "preferences", "whole conversations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("tests/golden"))
    args = parser.parse_args()
    tokenizer = tokenizer_of(FAMILY)
    expected: dict[str, Any] = {"sft": {}, "pairs": {}, "judged": {}}
    for form, modes in SFT.items():
        for mode in modes:
            expected["sft"][f"{form}/{mode}"] = examples(tokenizer, FORMS[form], mode)
    for form in PAIRS:
        expected["pairs"][form] = pairs(tokenizer, FORMS[form])
    for form in JUDGED:
        expected["judged"][form] = judged(tokenizer, FORMS[form])
    golden = {
        "made_by": {name: version(name) for name in ("trl", "transformers")},
        "template": TEMPLATE,
        "rows": FORMS,
        "expected": expected,
    }
    path = args.output / "prepared_by_trl.json"
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


def dataset(rows: list[dict[str, Any]]) -> Dataset:
    """Rows as TRL reads them: `tools` as JSON, and messages without the fields that others have."""
    return Dataset.from_list(
        [row | {"tools": json.dumps(row["tools"])} if "tools" in row else row for row in rows]
    )


def examples(tokenizer: Any, rows: list[dict[str, Any]], mode: str) -> list[list[list[int]]]:
    """[ids, scored] of each row."""
    config = SFTConfig(
        output_dir="unused",
        assistant_only_loss=mode == "assistant",
        max_length=None,
        use_cpu=True,
        bf16=False,
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None,
        completion_only_loss=mode == "completion",
        _is_vision_dataset=False,
    )
    made = SFTTrainer._prepare_dataset(trainer, dataset(rows), tokenizer, config, False, None, "train")
    return [[row["input_ids"], [int(label != -100) for label in row["labels"]]] for row in made]


def prepared(kind: Any, config: Any, tokenizer: Any, rows: list[dict[str, Any]], **others: Any) -> Dataset:
    settings = config(output_dir="unused", max_length=None, use_cpu=True, bf16=False)
    trainer = SimpleNamespace(_tokenizer=tokenizer, _is_vision_dataset=False, **others)
    return kind._prepare_dataset(trainer, dataset(rows), tokenizer, settings, "train")


def pairs(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[list[int]]]:
    """[prompt, chosen, rejected] of each row."""
    made = prepared(DPOTrainer, DPOConfig, tokenizer, rows)
    return [[row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]] for row in made]


def judged(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """[prompt, completion, label] of each answer."""
    weights = {"calculate_KL": False, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    made = prepared(KTOTrainer, KTOConfig, tokenizer, rows, **weights)
    return [[row["prompt_ids"], row["completion_ids"], bool(row["label"])] for row in made]


if __name__ == "__main__":
    main()
