"""Folders of runs for the tests of the run page, with the files that a run writes and no training."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

SCRIPT = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
CONFIG = """# The final configuration; after each value, a comment names its layer.
seed: 0                                   # default

run:
  name: {name}                            # --set
  steps: 3                                # file a.yaml
rollout:
  n: 2                                    # quickstart
  max_new_tokens: 256                     # default
  stop: ["a # b", "c"]                    # file a.yaml
update:
  micro_batch_size: 8                     # derived
reward:
  functions:
    correct: 1.0                          # default
    "mine.py:f # g": {weight}             # environment QUATRAIN__REWARD__FUNCTIONS
gone:
  key: 1                                  # default
"""


def sample(group: int, reward: float, **more: Any) -> dict[str, Any]:
    """One row of a file of samples."""
    row = {
        "group_id": group,
        "prompt": f"question {group}",
        "completion": f"answer {reward}",
        "rewards": {"correct": float(reward >= 1), "format": None},
        "reward": reward,
        "advantage": reward - 0.5,
        "finish_reason": "stop",
        "completion_tokens": 7,
        "columns": {"answer": "42", "level": {"deep": [1, None]}},
    }
    return row | more


def tokens(texts: list[str]) -> dict[str, Any]:
    """Token data as `logging.sample_tokens` adds it."""
    count = len(texts)
    return {
        "texts": texts,
        "ids": list(range(count)),
        "sampler_logprobs": [-1.0 * i for i in range(count)],
        "trainer_logprobs": [-1.5 * i for i in range(count)],
        "teacher_logprobs": [-0.25 * i for i in range(count)],
        "advantages": [0.25] * count,
    }


def unpacked(packed: str | bytes) -> Any:
    """The value that `page_samples.pack` compressed."""
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def step_samples(step: int) -> list[dict[str, Any]]:
    """Three prompts: one that tries to break the page, one wrong but rewarded, one without signal."""
    return [
        sample(0, 1.0, completion=SCRIPT, tokens=tokens([SCRIPT, " world", "\n"])),
        sample(0, 0.0, completion=f"needle{step}", tokens=tokens(["need", f"le{step}"])),
        sample(1, 0.6, finish_reason="length"),
        sample(1, 1.0, prompt="question 1"),
        sample(2, 0.5, advantage=0.0, prompt=[{"role": "user", "content": "chat <b>question</b>"}]),
        sample(2, 0.5, advantage=0.0, prompt=[{"role": "user", "content": "chat <b>question</b>"}]),
    ]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def episode_sample(group: int, reward: float, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The row of an episode; its completion is the assistant's last turn."""
    said = [each["content"] for each in turns if each["role"] == "assistant"]
    given = sum(each.get("reward", 0) for each in turns)
    row = sample(group, reward, completion=said[-1] if said else "", finish_reason="environment")
    return row | {"turns": turns, "environment_reward": given} | more


def episode_tokens() -> dict[str, Any]:
    """Tokens of two turns, with those of a tool's result and of the template between them."""
    texts = [
        "<call>",
        "mul(6, 7)",
        "</call>",
        "<|end|>\n<|tool|>",
        "42",
        "<|end|>\n<|assistant|>",
        "It is",
        " 42.",
    ]
    sampled = [each not in (3, 4, 5) for each in range(len(texts))]
    values = tokens(texts)
    numbers = {
        key: [number if own else None for number, own in zip(values[key], sampled, strict=True)]
        for key in ("sampler_logprobs", "trainer_logprobs", "teacher_logprobs", "advantages")
    }
    return values | numbers | {"sampled": sampled}


def tool_turns(result: str = "42") -> list[dict[str, Any]]:
    """Two turns of the assistant with a tool's result between them."""
    return [
        turn("assistant", "Let me multiply.\n<call>mul(6, 7)</call>", reward=0.25),
        turn("tool", result, name="mul", tool_call_id="call_0"),
        turn("assistant", "It is 42.", reward=1.0),
    ]


def eval_sample(prompt: int, right: int, **more: Any) -> dict[str, Any]:
    base = sample(prompt, float(right), correct=right, strict=right, greedy=True, sample=0, set="")
    del base["group_id"], base["advantage"]
    return base | {"prompt_index": prompt} | more


START: dict[str, Any] = {
    "time": "2026-01-02T03:04:05+0000",
    "step": 0,
    "command": "quatrain train first.yaml",
    "working_folder": "/home/me",
    "run_folder": "/home/me/runs/first",
    "versions": {"python": "3.11.7", "quatrain": "0.1.0"},
    "commits": {"quatrain": {"hash": "0123abcd", "changed_files": 2}, "working_folder": None},
    "devices": {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1},
    "changed_keys": {},
    "paths": {},
    "code": {"/home/me/rewards.py": "code/rewards.py"},
}
RESUMED = START | {"step": 2, "changed_keys": {"run.steps": ["2", "3"]}}


def make_run(root: Path, name: str = "first", *, steps: int = 3, weight: float = 0.5) -> Path:
    """A finished run with every file that the page reads."""
    folder = root / name
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy_lenient": 0.25, "eval/num_prompts": 4.0}]
    for step in range(1, steps + 1):
        write_rows(folder / "samples" / f"step_{step:06d}.jsonl", step_samples(step))
        rows.append(
            {
                "step": step,
                "reward/mean": step / steps,
                "reward/correct/mean": step / steps,
                "time/rollout_s": 1.0,
                "time/update_s": 2.0,
                "length/completion/mean": 7.0,
                "brand/new": 5.0,
                "update/entropy": None,
                "non_finite": ["update/entropy"],
            }
        )
    rows[-1]["eval/accuracy_lenient"] = 0.75
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "samples" / "eval_000000.jsonl", [eval_sample(i, 0) for i in range(3)])
    after = [eval_sample(0, 1), eval_sample(1, 0), eval_sample(2, 1), eval_sample(3, 1)]
    write_rows(folder / "samples" / f"eval_{steps:06d}.jsonl", after)
    write_rows(folder / "hints.jsonl", [{"step": 2, "hint": "truncated", "text": "Raise it."}])
    plan = {"prompts_per_step": 4, "lengths": {"min": 2, "max": 9}, "unit": {"prompts_per_step": "prompts"}}
    (folder / "plan.json").write_text(json.dumps(plan | {"why": {}, "warnings": ["odd"]}), encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG.format(name=name, weight=weight), encoding="utf-8")
    (folder / "run.json").write_text(
        json.dumps({"starts": [START | {"ended_with_step": 2}, RESUMED]}), encoding="utf-8"
    )
    (folder / "final").mkdir()
    return folder
