"""Judges in runs of two processes: each sample is judged once, and as in a run of one."""

import json
import os
import subprocess
import sys

import pytest
from architectures import changed
from judge_server import JudgeServer, said

from quatrain.config.load import load_config
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

pytestmark = pytest.mark.slow

TIMEOUT_S = 500
BATCH, N = 4, 3
SETTINGS = (
    f"data.batch_size={BATCH}", f"rollout.n={N}", "run.steps=1", "run.name=run", "mesh=1,-1,1",
    "sft.steps=0", "update.kl_coef=0", "rollout.max_new_tokens=12", "model.tokenizer=builtin:tiny",
    "eval.before=false", "eval.every_steps=0", "eval.num_prompts=1", "eval.final_num_prompts=1",
    f"logging.samples_per_step={BATCH * N}",
)  # fmt: skip
AGENT = """
async def agent(client, row):
    messages = list(row["prompt"])
    for _ in range(2):
        answer = await client.chat(messages)
        messages += [answer, {"role": "user", "content": "How many now?"}]
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory, small_arch, small_params):
    """A model of one layer, and what a judge reads: little, as the model has few positions."""
    folder = tmp_path_factory.mktemp("inputs")
    save_hf(
        folder / "model",
        changed(small_arch, num_layers=1),
        small_params | {"layers": small_params["layers"][:1]},
    )
    (folder / "template").write_text("{completion}\n{rubric}\n")
    (folder / "agent.py").write_text(AGENT)
    return (*SETTINGS, f"model.path={folder / 'model'}"), folder


def judged_by(who, folder):
    keys = f"template: {folder / 'template'}, rubric: ok, max_tokens: 128, temperature: 1.0"
    return f"reward.judge={{{who}, {keys}}}"


def in_two_processes(folder, settings):
    arguments = [part for each in (*settings, f"run.dir={folder}") for part in ("--set", each)]
    launch = ("launch", "--processes", "2", "--devices-per-process", "1", "--", "train")
    env = {name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
    command = [sys.executable, "-m", "quatrain", *launch, *arguments]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder / "run"


def alone(folder, settings):
    return train(load_config(None, (*settings, f"run.dir={folder}"), environ={})).run


def samples_of(run):
    return [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]


def spent(run):
    return json.loads((run / "judge_spent.json").read_text())["requests"]


def judged_rows(run):
    return [row for row in read_metrics(run / "metrics.jsonl") if "reward/judge/requests" in row]


def test_two_processes_ask_a_server_once_for_each_sample(tmp_path, settings):
    """Catches a server that every process asks, and a budget that each counts by itself."""
    common, folder = settings
    server = JudgeServer(lambda number, _: said(f'{{"reason": "{number}", "score": {number % 10 / 10}}}'))
    with server.running() as address:
        run = in_two_processes(tmp_path, (*common, judged_by(f"base_url: {address}", folder)))
    texts = server.texts
    assert len(texts) == len(set(texts)) > BATCH * N / 2
    assert spent(run) == len(texts)
    first, *_ = judged_rows(run)
    assert first["reward/judge/failed"] == 0
    assert first["reward/judge/requests"] == len({sample["completion"] for sample in samples_of(run)})
    assert len(list((run / "judgements").rglob("*.json"))) == len(texts)


@pytest.mark.parametrize("kind", ["turns", "agents"])
def test_two_processes_judge_on_their_engine_as_one_does(tmp_path, settings, kind):
    """Catches an engine that answers a question in each process, or another one than that of its sample.

    Of agents, the main process alone leads the engine, also for its judge.
    """
    common, folder = settings
    own = [judged_by("self: true", folder)]
    own += [f"rollout.agent={folder / 'agent.py'}:agent"] if kind == "agents" else []
    one = alone(tmp_path / "one", (*common, *own))
    two = in_two_processes(tmp_path / "two", (*common, *own))
    ours, theirs = (samples_of(run) for run in (two, one))
    assert len(ours) == BATCH * N
    for name in ("completion", "rewards", "columns"):
        assert [sample[name] for sample in ours] == [sample[name] for sample in theirs], name
    assert sum(isinstance(sample["columns"]["judge/reason"], str) for sample in ours) > 1
    for row, other in zip(judged_rows(two), judged_rows(one), strict=True):
        for name in ("requests", "cached", "failed", "tokens_in", "tokens_out"):
            assert row[f"reward/judge/{name}"] == other[f"reward/judge/{name}"], name
    asked = [
        f"{where}reward/judge/requests" for where in ("", "eval/")
    ]  # the one evaluation is the last row's
    assert spent(two) == spent(one) == sum(row[name] for row in judged_rows(two) for name in asked)
    questions = {sample["completion"] for sample in ours}
    assert judged_rows(two)[0]["reward/judge/requests"] == len(questions)
