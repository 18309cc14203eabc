"""lm_eval: generated answers by chats, and log-likelihoods by completions."""

import io
import json
import logging
import os
import tempfile
from pathlib import Path

from checks import BASE, MODEL, QUESTION, error_of, main
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [{"question": QUESTION, "answer": "5", "choices": ["It is 5.", "It is six."]}] * 8
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 100, "do_sample": True, "temperature": 1.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICES = {
    **{key: value for key, value in TASK.items() if key != "generation_kwargs"},
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def evaluated(kind, task, arguments, **options):
    with tempfile.TemporaryDirectory() as folder:
        rows, path = Path(folder) / "rows.jsonl", Path(folder) / "task.yaml"
        rows.write_text("\n".join(map(json.dumps, ROWS)))
        path.write_text(json.dumps({**task, "dataset_kwargs": {"data_files": {"test": str(rows)}}}))
        found = simple_evaluate(
            model=kind,
            model_args={"model": MODEL, "max_retries": 1, **arguments},
            tasks=[str(path)],
            task_manager=TaskManager(),
            log_samples=True,
            **options,
        )
    return found["samples"][task["task"]]


def chats(concurrent, **options):
    arguments = {"base_url": f"{BASE}/chat/completions", "num_concurrent": concurrent}
    samples = evaluated("local-chat-completions", TASK, arguments, apply_chat_template=True, **options)
    return [sample["resps"][0][0] for sample in samples]


def chat():
    return chats(1)[0]


def parallel():
    return chats(8)


def loglikelihoods():
    """Those of both choices, of the first row; the longer is less likely."""
    tokenizer = os.environ["MODEL_FOLDER"]
    arguments = {
        "base_url": f"{BASE}/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
    }
    samples = evaluated("local-completions", CHOICES, arguments)
    return [each[0][0] for each in samples[0]["resps"]]


def lacks():
    """lm_eval logs what a server says, and raises the status alone."""
    said = io.StringIO()
    logging.getLogger("lm_eval").addHandler(logging.StreamHandler(said))
    error = error_of(lambda: chats(1, gen_kwargs={"logit_bias": {"5": 3}}))
    return {**error, "text": said.getvalue()}


if __name__ == "__main__":
    main()
