"""lm_eval gets from `quatrain serve` the log-likelihoods that its own `hf` model computes, on SmolLM2-135M.

Needs a Python with torch, transformers, accelerate and lm_eval[api] of its own, named by LM_EVAL_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quatrain.data.tokenizer import load_tokenizer
from quatrain.weights.gguf import load_gguf
from quatrain.weights.hf import save_hf

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LM_EVAL = os.environ.get("LM_EVAL_PYTHON")
NUM_ITEMS = 20
TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "pages": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}
SENTENCES = (
    "The sun rises in the east and sets in the west. "
    "Water boils at a hundred degrees at the level of the sea. "
    "Paris is the capital of France, and Rome is the capital of Italy. "
    "A week has seven days. "
    "Bees make honey from the nectar of flowers. The moon goes around the earth in about a month. "
    "Plants need light, water and air to grow. A triangle has three sides and three corners. "
    "Ice is water that is frozen. Cows give milk, and hens lay eggs. Iron rusts when it is wet. "
    "The heart pumps blood through the body. Sound is slower than light. There are sixty minutes in an hour. "
    "Whales live in the sea but breathe air. Leaves fall from many trees in autumn. "
    "A year on Mars is almost twice as long as a year on Earth. Salt dissolves in warm water. "
    "The longest river of Africa is the Nile. Most birds can fly, but penguins can only swim"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_file(), reason="models/ has no SmolLM2: run `make smollm2`"),
    pytest.mark.skipif(not LM_EVAL, reason="LM_EVAL_PYTHON does not name a Python with torch and lm_eval"),
]


@pytest.fixture
def folder(tmp_path):
    """The model as a folder, and the tasks with their data, of NUM_ITEMS items each."""
    model = tmp_path / "model"
    save_hf(model, *load_gguf(MODEL))
    load_tokenizer(str(MODEL)).save_pretrained(model)
    questions = [(f"What is {3 * i + 4} plus {i + 9}?", 4 * i + 13) for i in range(NUM_ITEMS)]
    choices = [
        {"question": question, "choices": [f" {right + by}" for by in (0, 1, -10, 100)], "answer": 0}
        for question, right in questions
    ]
    pages = [{"text": sentence + "."} for sentence in SENTENCES.split(". ")]
    assert len(choices) == len(pages) == NUM_ITEMS
    for name, rows in {"choices": choices, "pages": pages}.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        head = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
        )
        (tmp_path / f"{name}.yaml").write_text(head + TASKS[name], "utf-8")
    return tmp_path


@pytest.fixture
def served(folder):
    """The address of `quatrain serve`, and the name of the model."""
    model = str(folder / "model")
    command = [sys.executable, "-m", "quatrain", "serve", "--set", f"model.path={model}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield re.search(r"http://\S+/v1", server.stdout.readline())[0], model
        finally:
            server.terminate()


def log_likelihoods(folder, name, model, arguments):
    """Of each answer of each item of each task, the log-likelihood, and whether greedy decoding gives it."""
    output = folder / name
    command = [
        LM_EVAL,
        "-m",
        "lm_eval",
        "--model",
        model,
        "--model_args",
        arguments,
        "--tasks",
        ",".join(TASKS),
    ]
    command += [
        "--include_path",
        str(folder),
        "--output_path",
        str(output),
        "--log_samples",
        "--batch_size",
        "20",
    ]
    settings = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    subprocess.run([*command, "--device", "cpu"], check=True, env={**os.environ, **settings})
    found = {}
    for task in TASKS:
        [samples] = output.rglob(f"samples_{task}_*.jsonl")
        rows = map(json.loads, samples.read_text("utf-8").splitlines())
        found[task] = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return found


def test_log_likelihoods_are_those_of_the_hf_model(folder, served):
    url, model = served
    asked = f"model={model},tokenizer={model},base_url={url}/completions"
    ours = log_likelihoods(folder, "served", "local-completions", asked)
    exact = (
        "dtype=float32,softmax_dtype=float64"  # torch's own sum over 49,152 words in float32 is off by 1e-5
    )
    theirs = log_likelihoods(folder, "hf", "hf", f"pretrained={model},{exact}")
    for task in TASKS:
        assert len(ours[task]) == len(theirs[task]) == NUM_ITEMS
        pairs = [pair for both in zip(ours[task], theirs[task]) for pair in zip(*both, strict=True)]
        gaps = [abs(float(_value(a)) - float(_value(b))) for a, b in pairs]
        print(f"{task}: {len(gaps)} log-likelihoods, largest difference {max(gaps):.2g}")
        assert max(gaps) < 1e-4
    assert [[r[1] for r in rs] for rs in ours["choices"]] == [[r[1] for r in rs] for rs in theirs["choices"]]


def _value(response):
    return response[0] if isinstance(response, list) else response
