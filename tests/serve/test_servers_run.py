"""Whole runs with a server as sampler: the weights are those of a run that samples in its own process."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file

from quatrain.config.load import load_config
from quatrain.loop.policy import load_policy
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

QUATRAIN = (sys.executable, "-m", "quatrain")
SETTINGS = (
    "run.steps=3",
    "sft.steps=0",
    "optimizer.learning_rate=5e-4",
    "data.batch_size=4",
    "rollout.n=4",
    "eval.before=false",
    "eval.every_steps=0",
    "eval.final_num_prompts=4",
    "checkpoint.every_steps=0",
    "run.compilation_cache=null",
    "reward.functions={length.py:length: 1}",
)
REWARD = '''
def length(completions, **_):
    """Another reward for every completion."""
    return [len(text) / 100 for text in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory, narrow_model):
    """A small model as safetensors."""
    loaded = load_policy(load_config(None, []).config)
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(path, loaded.arch, loaded.params)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "QUATRAIN_SERVE_TOKEN": "the-token-of-the-tests"}


@contextmanager
def serving(folder, environment, place):
    """The address of a server, and its process."""
    command = [*QUATRAIN, "serve", "--set", f"model.path={folder}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place, env=environment) as process:
        try:
            yield re.search(r"is served at (\S+)/v1;", process.stdout.readline())[1], process
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, -signal.SIGKILL)


@pytest.fixture(scope="module")
def server(folder, environment, tmp_path_factory):
    with serving(folder, environment, tmp_path_factory.mktemp("server")) as (address, _):
        yield address


GAME = """
import os
import signal

from quatrain import StepResult


class Game:
    def step(self, completion):
        self.turns = getattr(self, "turns", 0) + 1
        if os.path.exists("alive") and os.environ.get("KILL"):
            os.remove("alive")
            os.kill(int(os.environ["KILL"]), signal.SIGKILL)
        answer = {"role": "user", "content": "And now?"}
        return StepResult([answer], reward=len(completion) / 100, done=self.turns == 3)
"""
AGENT = """
import os
import signal


async def agent(client, row):
    kill = os.environ.get("KILL")
    messages = list(row["prompt"])
    for turn in range(3):
        messages += [await client.chat(messages, max_tokens=12), {"role": "user", "content": "And now?"}]
        if kill and turn == 1 and os.path.exists("alive"):
            os.remove("alive")
            os.kill(int(kill), signal.SIGKILL)
    await client.chat(row["prompt"], max_tokens=3, train=False)
    return sum(len(message["content"]) for message in messages) / 100
"""


def train(place, folder, environment, name, *settings):
    (place / "length.py").write_text(REWARD)
    (place / "agent.py").write_text(AGENT)
    (place / "game.py").write_text(GAME)
    (place / "alive").touch()
    each = (*SETTINGS, f"model.path={folder}", f"run.name={name}", *settings)
    command = [*QUATRAIN, "train", *(f"--set={setting}" for setting in each)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = place / "runs" / name
    return run, hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("lora.rank=4",)], ids=["all weights", "adapters"])
def test_weights_are_those_of_a_run_in_one_process(server, folder, environment, tmp_path, more):
    exact = ("update.correction=none", *more)
    run, by_server = train(tmp_path, folder, environment, "by_server", *exact, f"rollout.servers=[{server}]")
    _, alone = train(tmp_path, folder, environment, "alone", *exact)
    assert by_server == alone
    assert not (run / "weights").exists()
    assert "the-token-of-the-tests" not in "".join(
        path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("rollout.agent=agent.py:agent", marks=pytest.mark.slow),
        pytest.param("rollout.environment=game.py:Game", marks=pytest.mark.slow),
        pytest.param("lora.rank=4", marks=pytest.mark.slow),
    ],
)
def test_episodes_on_two_servers_of_which_one_is_killed(folder, server, environment, tmp_path, case):
    """The texts and, up to rounding, the weights of a run in one process."""
    agent = ["rollout.agent=agent.py:agent", "rollout.agent_workers=1"]
    exact = (
        *(["rollout.stop=[a, e, o]"] if "environment" in case else agent), case, "rollout.max_new_tokens=40",
        "update.correction=none", "reward.functions={environment: 1}", "logging.samples_per_step=16",
    )  # fmt: skip
    alone, _ = train(tmp_path, folder, environment, "alone", *exact)
    with serving(folder, environment, tmp_path) as (other, process):
        servers = f"rollout.servers=[{server}, {other}]"
        killing = environment | {"KILL": str(process.pid)}
        run, _ = train(tmp_path, folder, killing, "killed", *exact, servers)
        assert process.wait(30) == -signal.SIGKILL
    rows, others = (read_metrics(each / "metrics.jsonl")[1:] for each in (run, alone))
    assert sum(row["fleet/restarts"] for row in rows) > 0
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in others]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows)
    for step in (1, 2, 3):
        texts = [
            (each / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines() for each in (run, alone)
        ]
        said, expected = ([json.loads(line)["completion"] for line in lines] for lines in texts)
        assert len(said) == 16
        assert said == expected
    one, other = (load_file(each / "final" / "model.safetensors") for each in (run, alone))
    for name, weight in one.items():
        np.testing.assert_allclose(weight, other[name], atol=1e-5, err_msg=name)
