"""The environments of verifiers and openenv, with the real packages (`make test-hubs`)."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.hubs

HERE = Path(__file__).parent
HUBS = HERE.parents[1] / ".hubs"
SETTINGS = (
    "run.steps=2", "run.name=hub", "run.dir=runs", "sft.steps=0", "data.batch_size=4", "rollout.n=4",
    "rollout.agent_workers=2", "eval.before=false", "eval.every_steps=0", "eval.final_num_prompts=4",
    "checkpoint.every_steps=0", "logging.samples_per_step=16",
)  # fmt: skip


def trained(place, *settings):
    """A run of two steps with the quickstart's model: (metrics of the steps, samples of the first)."""
    command = [sys.executable, "-m", "quatrain", "train", *(f"--set={s}" for s in (*SETTINGS, *settings))]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = place / "runs" / "hub"
    lines = (run / "samples" / "step_000001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    return [row for row in read_metrics(run / "metrics.jsonl") if "agent/turns/mean" in row], samples


@contextmanager
def serving(kind):
    """The address of an environment of `echo_server.py`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [HUBS / "openenv/bin/python", HERE / "echo_server.py", kind, str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"{url}/schema")
                    break
                except OSError:
                    assert process.poll() is None
                    time.sleep(0.2)
            yield url
        finally:
            process.kill()


def test_a_taskset_of_verifiers_is_trained(tmp_path):
    (tmp_path / "words_taskset.py").write_text((HERE / "words_taskset.py").read_text())
    rows, samples = trained(
        tmp_path,
        f"rollout.agent_python={HUBS}/verifiers/bin/python",
        "rollout.agent=verifiers:words_taskset",
        "rollout.agent_args={agent: {harness: {id: 'null'}}}",
        "data.train=verifiers:words_taskset?suffix=!",
        "data.eval=verifiers:words_taskset?skip=1&size=2",
        "rollout.max_new_tokens=16",
    )
    assert [row["agent/errors"] for row in rows] == [0, 0]
    assert [row["agent/turns/mean"] for row in rows] == [1, 1]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows)
    for sample in samples:
        assert sample["prompt"][-1]["content"] == f"Say {sample['columns']['name']}!"
        assert sample["reward"] == pytest.approx(len(sample["completion"].strip()) / 10, abs=0.11)
    assert all(3 <= row["agent/own/word_length"] <= 5 for row in rows)


def test_two_agents_of_verifiers_are_trained_with_their_own_rewards(tmp_path):
    for name in ("words_taskset", "duel_environment"):
        (tmp_path / f"{name}.py").write_text((HERE / f"{name}.py").read_text())
    rows, samples = trained(
        tmp_path,
        f"rollout.agent_python={HUBS}/verifiers/bin/python",
        "rollout.agent=verifiers:words_taskset",
        "rollout.agent_args={id: duel_environment}",
        "data.train=verifiers:words_taskset",
        "data.eval=verifiers:words_taskset",
        "rollout.max_new_tokens=16",
        "rollout.temperature=1.5",
        "logging.samples_per_step=32",
    )
    assert [row["agent/errors"] for row in rows] == [0, 0]
    assert [row["agent/untrained_roles"] for row in rows] == [16, 16]  # the judge
    assert [row["agent/turns/mean"] for row in rows] == [1, 1]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows)
    of = {(s["group_id"], s["episode"]["sample"], s["episode"]["role"]): s for s in samples}
    assert len(of) == 4 * 4 * 2
    for (group, number, role), sample in of.items():
        first, second = (len(of[group, number, name]["completion"].strip()) for name in ("first", "second"))
        won = (first > second) - (first < second)
        assert sample["reward"] == (won if role == "first" else -won)
    assert {sample["reward"] for sample in samples} >= {1.0, -1.0}


@pytest.mark.parametrize("kind", ["action", "tools"])
def test_an_environment_of_openenv_is_trained(tmp_path, kind):
    """The model calls nothing yet, so that each episode has one turn; the tools are in its prompt."""
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"Play {i}.", "seed": i}) for i in range(8))
    )
    with serving(kind) as url:
        rows, samples = trained(
            tmp_path,
            f"rollout.agent_python={HUBS}/openenv/bin/python",
            f"rollout.agent=openenv:{url}",
            "data.train=rows.jsonl",
            "data.eval=rows.jsonl",
            "data.system_prompt=Use the tool.",
            "rollout.max_new_tokens=16",
        )
    assert [row["agent/errors"] for row in rows] == [0, 0]
    assert all(row["agent/own/steps"] == 0 and row["agent/turns/mean"] == 1 for row in rows)
    assert {sample["prompt"][-1]["content"] for sample in samples} <= {f"Play {i}." for i in range(8)}


SCRIPTED = """
import asyncio, json, sys
sys.path.append(sys.argv[1])
from quatrain.episodes.openenv_child import agent


class Client:
    def __init__(self, calls):
        self.calls, self.seen = list(calls), []

    async def chat(self, messages, tools):
        self.seen, self.tools = list(messages), tools
        if not self.calls:
            return {"role": "assistant", "content": "Done."}
        name, arguments = self.calls.pop(0)
        call = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": call}]}


async def main():
    clients = [Client(json.loads(sys.argv[3])) for _ in range(3)]
    row = {"prompt": [{"role": "user", "content": "Play."}], "seed": 5}
    ended = await asyncio.gather(*(agent(client, row, sys.argv[2]) for client in clients))
    print(json.dumps([ended, clients[0].seen, [tool["function"]["name"] for tool in clients[0].tools]]))


asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("kind", "calls", "said", "reward", "names"),
    [
        ("action",
         [["step", {"message": "hi"}], ["walk", {}], ["step", {"shout": 1}], ["step", {"message": "x"}]],
         ["hi", "Error: there is no tool walk; call step", "Error: "], 0.5, ["step"]),
        ("tools", [["add", {"a": 2, "b": 3}], ["add", {"a": "x"}], ["sub", {}]], ["5", "", ""], 0.0, ["add"]),
    ],
)  # fmt: skip
def test_calls_of_openenvs_tools(tmp_path, kind, calls, said, reward, names):
    """Three episodes at once, also where the server has room for one."""
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    source = str(HERE.parents[1] / "src")
    with serving(kind) as url:
        asked = [HUBS / "openenv/bin/python", "scripted.py", source, url, json.dumps(calls)]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ended, messages, tools = json.loads(done.stdout)
    assert [each["reward"] for each in ended] == [reward] * 3
    assert tools == names
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert len(results) == (3 if kind == "action" else len(calls))
    for result, expected in zip(results, said):
        assert expected in result
