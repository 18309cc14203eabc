"""Programs of others are trained two steps each, unchanged (`make test-hubs`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling_model import call, save_calling_model
from frameworks import HUBS, environment, pieces

from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.hubs

AGENTS = Path(__file__).parent / "agents"
SETTINGS = (
    "run.steps=2", "run.name=agent", "run.dir=runs", "model.path=model", "sft.steps=0", "data.batch_size=4",
    "data.train=rows.jsonl", "data.eval=rows.jsonl", "data.max_prompt_length=4000", "rollout.n=4",
    "rollout.max_new_tokens=400", "rollout.max_environment_tokens=6000", "rollout.max_turns=40",
    "rollout.agent_workers=2", "optimizer.learning_rate=1e-5", "eval.before=false", "eval.every_steps=0",
    "eval.final_num_prompts=1", "checkpoint.every_steps=0", "logging.samples_per_step=100",
)  # fmt: skip
TEXTS = ("The sum makes 5.", "No idea of that.")
ADD = ((*call("add", '{"a": 2', ', "b": 3}'),), (*call("add", '{"b": 4', ', "a": -1}'),))
BASH = (
    (*call("Bash", '{"command": "l', 's", "descri', 'ption": "look"}'),),
    (*call("Bash", '{"command": "c', "at sum.txt", '", "description": "read"}'),),
)
ARGUMENTS = {
    "add": (('"a": 7, ', '"b": 8}}\n</tool_call>'),),
    "final_result": tuple(('"value": ' + number, "}}\n</tool_call>") for number in "56"),
    "final_answer": tuple((f'"answer": "{number}', '"}}\n</tool_call>') for number in "56"),
}
"""What follows in a call whose beginning is given (`tool_choice`), by the tool: pieces behind the brace."""


def trained(place, agent, calls, tools=()):
    """A run of two steps with a model that makes `calls`: (metrics of the steps, samples of each).

    `tools`: those of which it must call one, which its prompt then begins.
    """
    texts = {pieces(text): 1.0 for text in TEXTS}
    begun = {"{": [line for name in tools for line in ARGUMENTS[name]]} if tools else None
    save_calling_model(place / "model", dict.fromkeys(calls, 1.0), texts, begun=begun)
    rows = [json.dumps({"prompt": f"How much is {i} + 3?"}) for i in range(8)]
    (place / "rows.jsonl").write_text("\n".join(rows))
    python = f"rollout.agent_python={HUBS}/frameworks/bin/python"
    settings = (*SETTINGS, python, f"rollout.agent={json.dumps(agent)}")
    command = [sys.executable, "-m", "quatrain", "train", *(f"--set={s}" for s in settings)]
    own = environment(place) | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    done = subprocess.run(command, cwd=place, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = place / "runs" / "agent"
    samples = [
        [json.loads(line) for line in (run / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()]
        for step in (1, 2)
    ]
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "agent/turns/mean" in row]
    print(place.name, [{k: v for k, v in row.items() if k.startswith("agent/")} for row in metrics])
    return metrics, samples


def check(metrics, samples, size_of, roots_of_episode=1):
    """That each sampled token is trained once, as it was sampled, and that answers continue one another.

    `size_of`: tokens of an answer by the tool that it calls; None: it is a text. Tokens of an answer that was
    encoded again would be those of its bytes.
    """
    assert len(metrics) == len(samples) == 2
    for row, step in zip(metrics, samples):
        assert row["agent/errors"] == row["agent/branches"] == row["agent/abandoned_turns"] == 0
        assert row["agent/malformed_calls"] == row["agent/overridden_fields"] == 0
        assert row["agent/turns/max"] > 1
        num_turns = round(row["agent/turns/mean"] * 16)
        assert row["agent/roots"] == (num_turns if roots_of_episode == "each turn" else 16)
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert len(step) == row["agent/roots"]
        answers = [turn for sample in step for turn in sample["turns"] if "answer" in turn]
        assert len(answers) == num_turns
        for sample in step:
            turns, found = sample["turns"], 0
            for here, turn in enumerate(turns):
                if "answer" in turn:
                    called = turns[here + 1].get("name") if here + 1 < len(turns) else None
                    found += size_of(called)
            assert sample["completion_tokens"] == found, sample


def by_calls(calls):
    """Sizes of answers that call a tool, or say a text; one token more ends each."""
    [text], [called] = ({len(pieces(t)) for t in TEXTS}, {len(c) for c in calls})
    return lambda name: 1 + (text if name is None else called)


def of_begun_call(name):
    """The size of an answer that goes on from the beginning of a call.

    Where its grammar forces the next bytes, each is a token: so this tokenizer encodes a text.
    """
    [arguments] = {len(line) for line in ARGUMENTS[name]}
    return len(f'{name}", "arguments": {{') + arguments + 1


@pytest.mark.parametrize("agent", ["anthropic_loop", "agents_sdk"])
def test_loops_of_tools_of_sdks_are_trained(tmp_path, agent):
    """An answer that comes back from the SDK in a form which the tree of turns does not know."""
    check(*trained(tmp_path, f"{AGENTS}/{agent}.py:agent", ADD), by_calls(ADD))


def test_an_agent_that_must_call_tools_is_trained(tmp_path):
    """A call whose beginning was given, and which is taken for another one when it comes back."""
    found = trained(tmp_path, f"{AGENTS}/pydantic_agent.py:agent", ADD, ("add", "final_result"))
    check(*found, lambda name: of_begun_call(name or "final_result"))


def test_an_agent_that_rewrites_its_calls_is_trained_a_turn_at_a_time(tmp_path):
    """smolagents sends each call back as a text: its turns are roots, and none may be trained twice."""
    found = trained(tmp_path, f"{AGENTS}/smol_agent.py:agent", ADD, ("add", "final_answer"))
    calls = {of_begun_call(name) for name in ("add", "final_answer")}
    texts = {1 + len(pieces(text)) for text in TEXTS}  # of an episode without an answer after its last step
    for step in found[1]:
        assert calls <= {sample["completion_tokens"] for sample in step} <= calls | texts
    for row in found[0]:
        assert row["agent/roots"] == round(row["agent/turns/mean"] * 16)
        assert row["agent/branches"] == row["agent/errors"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-4


def test_a_command_line_agent_is_trained(tmp_path):
    """A field or a history of Claude Code that is refused, or begins its dialogue anew."""
    claude = HUBS / "npm" / "node_modules" / ".bin" / "claude"
    if not claude.is_file():
        pytest.skip("Claude Code is not installed: npm was not found when scripts/install_hubs.py ran")
    check(*trained(tmp_path, f"command: sh {AGENTS}/claude.sh {claude}", BASH), by_calls(BASH))
