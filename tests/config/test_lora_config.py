"""The section `lora`: what it derives, and combinations that are refused, each with one sentence."""

import pytest

from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config


def resolved(*overrides):
    return load_config(None, ["run.name=run", *overrides], environ={})  # else the second names it


def test_without_rank_there_are_no_adapters():
    assert resolved("lora.rank=0").config == resolved().config
    assert resolved().config.lora.alpha is None
    assert resolved("update.kl_coef=0.1").config.copies_reference


def test_alpha_is_derived_from_the_rank():
    config = resolved("lora.rank=8", "update.kl_coef=0.1").config
    assert config.lora.alpha == 8.0
    assert not config.copies_reference
    assert resolved("lora.rank=8", "lora.alpha=16").config.lora.alpha == 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("lora.alpha=4",), "lora.alpha has no effect with lora.rank 0"),
        (("lora.targets=[qkv]",), "lora.targets has no effect with lora.rank 0"),
        (("rollout.lora=adapter",), "rollout.lora has no effect with lora.rank 0"),
        (("lora.rank=-1",), "lora.rank"),
        (("lora.rank=4", "lora.alpha=0"), "lora.alpha"),
        (("lora.rank=4", "lora.targets=[]"), "lora.targets"),
        (("lora.rank=4", "lora.targets=[embed]"), "lora.targets.*'qkv', 'o', 'gate_up', 'down', 'exp"),
        (("lora.rank=4", "lora.targets=[all-linear, embed]"), "lora.targets.*'all-linear', 'qkv', 'o'"),
        (("lora.rank=4", "lora.targets=[all-linear, router]"), "not name router: routers have no adapters"),
        (("lora.rank=4", "lora.targets=[gate]"), "not name gate: routers have no adapters"),
        (("lora.rank=4", "lora.targets=[all-linear, all-linear]"), "must name each matrix once"),
        (("lora.rank=4", "lora.targets=[q_proj, v_proj]"), "together.*; k_proj is missing"),
        (("lora.rank=4", "lora.targets=[o, o]"), "lora.targets must name each matrix once"),
        (("lora.rank=4", "rollout.lora=both"), "rollout.lora must be 'merged' or 'adapter'"),
        (("lora.rank=4", "advantage.estimator=gae"), "lora.rank must be 0 with a critic"),
        (("lora.rank=4", "critic.enabled=true"), "lora.rank must be 0 with a critic"),
        (("lora.rank=4", "model.vision=projector"), "model.vision must not be projector with lora.rank 4"),
        (("lora.rank=4", "model.vision=all"), "lora.targets must have one of vision.qkv, .* with model.vis"),
        (("lora.rank=4", "lora.targets=[vision.o]"), "lora.targets may have matrices of the tower with"),
        (
            ("lora.rank=4", "lora.targets=[o, vision.o]", "model.vision=frozen"),
            "lora.targets may have matrices of the tower with model.vision all alone",
        ),
        (
            ("lora.rank=4", "update.kl_coef=0.1", "offload.reference=true"),
            "offload.reference has no effect with lora.rank 4, where the reference is the frozen base",
        ),
        (
            ("lora.rank=4", "update.kl_coef=0.1", "placement.reference=0"),
            "placement.reference has no effect with lora.rank 4",
        ),
        (
            (
                "lora.rank=4", "update.kl_coef=0.1", "update.reference_sync_steps=2",
                "update.reference_mixup=0.6",
            ),
            "update.reference_mixup must be 1 with lora.rank 4",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        resolved(*overrides)
    assert len(raised.value.problems) == 1


def test_a_frozen_base_in_bfloat16_is_not_warned_about():
    settings = ("model.param_dtype=bfloat16", "optimizer.learning_rate=1e-6", "sft.steps=0")
    nearest = "optimizer.stochastic_rounding=false"
    assert any("rounding" in each for each in resolved(*settings, nearest).warnings)
    assert not any("rounding" in each for each in resolved(*settings, "lora.rank=4").warnings)


@pytest.mark.parametrize(
    ("words", "matrices"),
    [
        ("all-linear", ("all-linear",)),
        ("[o, all-linear, k_proj, experts]", ("all-linear", "experts_gate_up", "experts_down")),
        ("[all-linear, lm_head]", ("all-linear", "lm_head")),
        ("[qkv, experts]", ("qkv", "experts_gate_up", "experts_down")),
        ("[experts_down]", ("experts_down",)),
        ("[o_proj, v_proj, k_proj, q_proj]", ("o", "qkv")),
        ("[qkv_proj, down_proj, gate_up_proj]", ("qkv", "down", "gate_up")),
        ("[gate_proj, o, up_proj]", ("gate_up", "o")),
    ],
)
def test_words_of_peft_are_taken(words, matrices):
    config = load_config(None, ["lora.rank=4", f"lora.targets={words}"], environ={}).config
    assert config.lora.targets == matrices
