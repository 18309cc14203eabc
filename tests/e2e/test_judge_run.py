"""Whole runs whose reward is a judge: the policy, another model, or a server; also killed and resumed."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from judge_server import JudgeServer, said
from resumed_runs import killed_copy
from runs import small_run

from quatrain.config.mesh import MeshShape
from quatrain.config.sections.judge import JudgeConfig
from quatrain.loop import judge
from quatrain.loop.train import train
from quatrain.parallel.mesh import one_device
from quatrain.reward.judge.judge import Judge
from quatrain.reward.judge.judgements import Judgement
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")

TEMPLATE = "{completion}\n{rubric}\n"
STEPS = ("run.steps=2", "checkpoint.every_steps=1", "checkpoint.keep=2", "sft.steps=0", "update.kl_coef=0")
LITTLE = ("eval.before=false", "eval.every_steps=0", "eval.num_prompts=1", "eval.final_num_prompts=1")


def _options(folder, judge):
    template = folder / "template.txt"
    template.write_text(TEMPLATE)
    keys = f"{judge}, template: {template}, rubric: ok, max_tokens: 128, temperature: 1.0"
    return (*STEPS, *LITTLE, f"reward.judge={{{keys}}}")


def _by_step(run):
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "reward/judge/requests" in row]
    return {row["step"]: row for row in rows}


def _resumed(run, folder, options):
    copy = killed_copy(run, folder, step=1)
    return train(small_run(folder, run.name, *options), resume=copy.name).run


def test_the_policy_judges_itself(tmp_path):
    """Catches judgements that do not follow the grammar, are unnamed in the catalogue, or asked twice.

    A run that was killed after its first checkpoint finds those of its second step.
    """
    options = _options(tmp_path, "self: true")
    run = train(small_run(tmp_path / "first", "run", *options)).run
    steps = _by_step(run)
    names = {name for row in read_metrics(run / "metrics.jsonl") for name in row} - {"step", "non_finite"}
    assert not unknown_metrics(names)
    for row in steps.values():
        asked = row["reward/judge/requests"] + row["reward/judge/cached"]
        # Random weights may fill an answer with blanks, which the grammar allows.
        assert row["reward/judge/failed"] < asked
        assert 0 <= row["reward/judge/min"] <= row["reward/judge/max"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward/judge/mean"])
    samples = map(json.loads, (run / "samples" / "step_000001.jsonl").read_text().splitlines())
    assert any(isinstance(sample["columns"]["judge/reason"], str) for sample in samples)
    again = _by_step(_resumed(run, tmp_path / "again", options))
    assert again[2]["reward/judge/requests"] <= steps[2]["reward/judge/failed"]
    assert again[2]["reward/judge/cached"] > 0
    assert again[2]["reward/judge/mean"] == steps[2]["reward/judge/mean"]


def test_the_judgements_of_a_policy_go_with_its_weights(tmp_path, monkeypatch):
    """Would fail if the files of a policy that judges itself stayed for ever: once its weights have changed,
    only a run that is resumed from them finds any."""
    config = small_run(tmp_path, "run", "reward.judge=self", "checkpoint.every_steps=2").config
    monkeypatch.setattr(judge, "_sampling_of", lambda *_, **__: None)
    made, rollouts = Judge(config.reward.judge, folder=tmp_path), SimpleNamespace(sampler=None)
    loaded = SimpleNamespace(tokenizer=None, arch=SimpleNamespace(longest=100))
    judge.connect_judge(config, loaded, rollouts, made)
    digests = []
    for step in range(8):
        rollouts.on_weights({"weights": jnp.full(3, step)})
        made.cache.put("ab", Judgement(1.0), made.weights)
        digests.append(made.weights)
    assert len(set(digests)) == 8
    kept = [made.cache.get("ab", weights) is not None for weights in digests]
    assert kept == [False] * 3 + [True] * 5, "from the checkpoint of step 4, while that of 6 is written"


def test_another_model_judges(tmp_path):
    """Catches another model whose weights or tokenizer are those of the policy, or that is not asked."""
    options = _options(tmp_path, "model: builtin:tiny")
    run = train(small_run(tmp_path, "run", *options, "run.steps=1")).run
    row = _by_step(run)[1]
    assert row["reward/judge/requests"] > 0
    assert row["reward/judge/failed"] < row["reward/judge/requests"]
    assert row["reward/judge/tokens_out"] > 0


def test_another_model_has_a_slot_on_each_replica(monkeypatch):
    """Would fail if a judge of fewer answers at the same time than replicas had no slot at all on each: its
    first question then waited for ever."""
    made = []

    def engine(arch, config, *_, **__):
        made.append(config)
        raise InterruptedError

    monkeypatch.setattr(judge, "RolloutEngine", engine)
    monkeypatch.setattr(judge, "mesh_shape", lambda mesh: MeshShape(2, 2, 1, 1, 1), raising=False)
    loaded = SimpleNamespace(meshes=SimpleNamespace(reward=one_device()))
    for concurrency, slots in ((1, 4), (16, 16)):
        config = JudgeConfig(model="builtin:tiny", concurrency=concurrency)
        with pytest.raises(InterruptedError):
            judge._other_model(small_run(".", "run").config, loaded, Judge(config), "builtin:tiny")
        assert made.pop().max_concurrency == slots


def test_other_weights_at_the_same_path_are_another_judge(monkeypatch):
    """Would fail if a judge were known by its path alone: what old weights said would be the reward."""
    for name in ("RolloutEngine", "EngineService", "_sampling_of"):
        monkeypatch.setattr(judge, name, lambda *_, **__: None)
    loaded = SimpleNamespace(meshes=SimpleNamespace(reward=one_device()))
    read, config = judge.load_model, small_run(".", "run").config

    def identity(scale):
        def scaled(*args, **given):
            model = read(*args, **given)
            return replace(model, params=jax.tree.map(lambda leaf: leaf * scale, model.params))

        monkeypatch.setattr(judge, "load_model", scaled)
        made = Judge(JudgeConfig(model="builtin:tiny"))
        return judge._other_model(config, loaded, made, "builtin:tiny").identity()

    assert identity(1) == identity(1) != identity(2)


def test_a_resumed_run_asks_a_server_nothing_twice(tmp_path):
    """Catches questions of steps after the checkpoint, and of the start, that are asked again."""
    server = JudgeServer(lambda number, _: said(f'{{"reason": "r", "score": {number % 10 / 10}}}'))
    with server.running() as address:
        options = _options(tmp_path, f"base_url: {address}")
        run = train(small_run(tmp_path / "first", "run", *options)).run
        texts = server.texts
        assert len(texts) == len(set(texts)) > 2
        again = _resumed(run, tmp_path / "again", options)
        assert server.texts == texts
    before, after = _by_step(run)[2], _by_step(again)[2]
    assert after["reward/judge/requests"] == 0
    assert after["reward/judge/mean"] == before["reward/judge/mean"]
    spent = [json.loads((each / "judge_spent.json").read_text())["requests"] for each in (run, again)]
    assert spent == [len(texts), len(texts)]
