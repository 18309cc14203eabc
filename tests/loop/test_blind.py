"""What reads prompts with pictures and cannot see them is refused at the start of a run."""

import json
from dataclasses import replace

import pytest
from towers import CONFIGS, PROCESSORS, seeing

from quatrain.config.load import load_config
from quatrain.loop.policy import LoadedPolicy

TOKENIZER = range(96)


@pytest.fixture
def folder(tmp_path):
    """A configuration of a model with a tower."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_vl"]))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["qwen3_vl"]))
    return str(tmp_path)


def blind(*overrides, **fields):
    config = load_config(None, overrides, {}).config
    arch = seeing("qwen3_vl", "frozen")
    return LoadedPolicy(TOKENIZER, arch, None, (), None, {}, **fields)._blind(config)


def test_which_models_of_a_run_must_see(folder):
    text = replace(seeing("qwen3_vl"), vision=None, head="value_head")
    gae = ("advantage.estimator=gae", "critic.path=some/critic")
    assert blind(*gae, critic_arch=text).startswith("the critic some/critic has no tower")
    assert blind(*gae, critic_arch=replace(text, vision=seeing("qwen3_vl").vision)) is None
    assert blind("reward.functions={model:some/model: 1}").startswith(
        "reward models read texts: leave model:"
    )
    distill = ("update.kl_coef=0", "distill.loss=sampled")
    assert blind(f"distill.teacher={folder}", *distill) is None
    assert "teacher builtin:tiny has no tower" in blind("distill.teacher=builtin:tiny", *distill)
    assert blind() is None


def test_several_processes_do_not_sample_ahead_with_pictures(monkeypatch):
    """Their calls of the tower would come in orders of their own, and wait for each other for ever."""
    assert blind("rollout.max_staleness=1") is None
    monkeypatch.setattr("quatrain.loop.policy.num_processes", lambda: 2)
    assert "set rollout.max_staleness to 0" in blind("rollout.max_staleness=1")
    assert blind() is None
