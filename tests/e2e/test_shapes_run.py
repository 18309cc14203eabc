"""A model that sees is trained on pictures, from a warm start to its export; the recipe learns to look."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import small_run
from servers import served

from quatrain.config.load import load_config
from quatrain.data import shapes
from quatrain.engine.service import EngineService
from quatrain.loop.policy import load_policy
from quatrain.loop.serve import serving_engine, weights_of
from quatrain.loop.train import train
from quatrain.models import families
from quatrain.models.params import init_params
from quatrain.run.metrics import read_metrics
from quatrain.weights.load_model import load_model

RECIPE = Path(__file__).parents[2] / "configs" / "shapes.yaml"


@pytest.fixture
def narrow(monkeypatch):
    """A tower and a text model of one narrow layer, and few rows."""
    config = deepcopy(families._BUILTIN["tiny_vl"])
    config["text_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    small = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config["vision_config"] |= small
    monkeypatch.setitem(families._BUILTIN, "tiny_vl", config)
    monkeypatch.setattr(shapes, "TRAIN_ROWS", 24)
    monkeypatch.setattr(shapes, "HELDOUT_ROWS", 4)


@pytest.mark.usefixtures("narrow")
def test_a_run_with_pictures(tmp_path):
    """A sampler that reads other features than the update, a tower that stays, or an export without it."""
    (tmp_path / "varied.py").write_text(
        "def varied(completions):\n    return [len(set(text)) for text in completions]\n"
    )
    options = (
        "model.path=builtin:tiny_vl", "data.train=builtin:shapes", "data.max_prompt_length=32",
        "data.eval=null", "rollout.max_new_tokens=8", "sft.steps=0", "run.steps=2", "update.kl_coef=0",
        "checkpoint.every_steps=0", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0",
        f"reward.functions={{'{tmp_path}/varied.py:varied': 1.0}}",
    )  # fmt: skip
    run = train(small_run(tmp_path, "pictures", *options)).run
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 2
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    assert rows[0]["vision/blind_gap"] > 1e-3
    # Once for the sampler, whose tower is that of the step, and once in the buffer of the update.
    assert (rows[1]["vision/pictures"], rows[1]["vision/tower_pictures"]) == (4, 8)
    exported = load_model(str(run / "final"), vision="all")
    first = init_params(exported.arch, jax.random.key(0))["vision"]
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), first, exported.params["vision"])
    towers = (moved["patch"], moved["merger"]["down"], moved["blocks"][0]["gate_up"])
    assert min(towers) > 1e-3
    assert json.loads((run / "final" / "preprocessor_config.json").read_text()) == families.BUILTIN_PROCESSOR


@pytest.mark.slow
def test_the_recipe_learns_to_look(tmp_path):
    """It names colours and compares sizes after half of its steps, and only by the pictures."""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    settings = ("run.steps=125", "eval.every_steps=0", f"run.dir={tmp_path}", "run.name=shapes")
    changed = [part for setting in settings for part in ("--set", setting)]
    command = (sys.executable, "-m", "quatrain", "train", str(RECIPE), *changed)
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "shapes" / "metrics.jsonl")
    before, after = (
        {kind: row[f"eval/{kind}/accuracy_strict"] for kind in (*shapes.QUESTIONS, shapes.SHUFFLED)}
        for row in (rows[0], rows[-1])
    )
    assert before["colour"] <= 0.7
    assert after["colour"] >= 0.95
    assert after["larger"] >= 0.8
    assert np.isclose(after["shuffled"], 0.25, atol=0.08)


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
def test_a_server_sees_the_pictures_with_the_tower_that_is_trained(tmp_path, monkeypatch):
    """Pictures that are lost on the way, a tower that is not published, or a probe that finds no server."""
    model = ("model.path=builtin:tiny_vl", "data.max_prompt_length=128", "rollout.max_new_tokens=8")
    config = load_config(None, model, {}).config
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    engine = serving_engine(config, loaded, 1 << 24)
    service = EngineService(engine, weights_of(loaded.arch, config, engine))
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", "t")
    with served(service, loaded.arch, loaded.tokenizer, token="t") as url:
        options = (
            *model, "data.train=builtin:shapes", "data.eval=null", "sft.steps=0", "run.steps=2",
            "update.kl_coef=0", "checkpoint.every_steps=0", "optimizer.learning_rate=1e-2",
            "optimizer.warmup_steps=0", f"rollout.servers=[{url}]", "update.correction=none",
        )  # fmt: skip
        run = train(small_run(tmp_path, "served", *options)).run
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 2
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    assert service.version >= 1
