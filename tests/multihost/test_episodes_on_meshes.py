"""Episodes on several devices and in several processes are those of one device."""

import json
import os
import subprocess
import sys

import pytest

from quatrain.config.load import load_config
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

pytestmark = pytest.mark.slow

GAME = """
from quatrain import StepResult


class Game:
    def reset(self, secret):
        self.secret, self.turns = secret, 0
        return [{"role": "user", "content": "Tom has 4 eggs."}] if secret == 3 else None

    def step(self, completion):
        self.turns += 1
        assert self.secret != 4 or len(completion) % 4, "an unlucky length"
        message = {"role": "user", "content": f"Tom has {self.turns} more."}
        return StepResult([message], reward=len(completion) / 9)
"""
AGENT = """
async def agent(client, row):
    messages, length = list(row["prompt"]), 0
    for _ in range(2):
        answer = await client.chat(messages)
        length += len(answer["content"])
        messages += [answer, {"role": "user", "content": "How many now?"}]
    return length / 9
"""
STEPS = 2
SETTINGS = (
    "data.batch_size=4", "rollout.n=3", "sft.steps=0", "update.kl_coef=0", "optimizer.eps=1e-3",
    "data.max_prompt_length=40", "rollout.max_new_tokens=24", "rollout.max_turns=3", "rollout.stop=[a, e]",
    "model.tokenizer=builtin:tiny", "reward.functions={environment: 1.0}", "eval.num_prompts=4",
    "logging.samples_per_step=12", f"run.steps={STEPS}", "run.name=run",
    "optimizer.learning_rate=5e-4",
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory, small_arch, small_params):
    folder = tmp_path_factory.mktemp("inputs")
    save_hf(folder / "model", small_arch, small_params)
    (folder / "game.py").write_text(GAME)
    (folder / "agent.py").write_text(AGENT)
    rows = [
        {"prompt": [{"role": "user", "content": f"{name} has {thing}. How many now?"}], "secret": secret}
        for name in ("Tom", "Ann", "Ben")
        for thing in ("apples", "books")
        for secret in (2, 3, 4)
    ]
    (folder / "game.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        *SETTINGS,
        f"model.path={folder / 'model'}",
        f"data.train={folder}/game.jsonl",
        f"data.eval={folder}/game.jsonl",
        f"rollout.environment={folder}/game.py:Game",
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory, settings):
    folder = tmp_path_factory.mktemp("alone")
    return train(load_config(None, (*settings, f"run.dir={folder}"), environ={})).run


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [(1, "mesh=1,-1,1"), (1, "mesh=2,2,2"), (2, "mesh=1,-1,1"), (2, "rollout.environment_workers=2")],
)
def test_episodes_of_a_mesh_are_those_of_one_device(tmp_path, settings, alone, processes, mesh):
    run = run_of(tmp_path, (*settings, mesh), processes)
    for step in range(1, STEPS + 1):
        ours, theirs = (samples_of(each, step) for each in (run, alone))
        assert any(len(sample["turns"]) > 4 for sample in theirs)
        for name in ("turns", "finish_reason", "rewards"):
            assert [sample[name] for sample in ours] == [sample[name] for sample in theirs]
    rows = read_metrics(run / "metrics.jsonl")
    assert max(row.get("rollout/logprob_diff_max", 0.0) for row in rows) < 1e-4
    assert sum(row.get("episode/errors", 0) for row in rows) > 0


def test_agents_of_two_processes_are_those_of_one(tmp_path, settings):
    """The main process has the agents and their server; the engine is in both. The faults: a process that
    waits for requests that it never gets, or samples other turns; and rows that the others do not train."""
    *others, environment = settings
    agents = (
        *others,
        environment.replace("rollout.environment", "rollout.agent").replace("game.py:Game", "agent.py:agent"),
    )
    one, two = (run_of(tmp_path / str(count), agents, count) for count in (1, 2))
    for step in range(1, STEPS + 1):
        ours, theirs = (samples_of(each, step) for each in (two, one))
        assert any(len(sample["turns"]) > 2 for sample in theirs)
        assert [sample["turns"] for sample in ours] == [sample["turns"] for sample in theirs]
        assert [sample["rewards"] for sample in ours] == [sample["rewards"] for sample in theirs]
    assert max(row.get("rollout/logprob_diff_max", 0.0) for row in read_metrics(two / "metrics.jsonl")) < 1e-4


def samples_of(run, step):
    return [json.loads(line) for line in (run / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]


def run_of(folder, settings, processes):
    """The folder of a run in so many processes, on eight devices."""
    overrides = (*settings, f"run.dir={folder}")
    command = ["train", *(part for each in overrides for part in ("--set", each))]
    env = {name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
    if processes == 1:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        command = [sys.executable, "-m", "quatrain", *command]
    else:
        launch = ("launch", "--processes", "2", "--devices-per-process", "4", "--")
        command = [sys.executable, "-m", "quatrain", *launch, *command]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder / "run"
