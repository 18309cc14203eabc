"""The tables of rules and warnings: conditions and sentences read keys that exist."""

import ast
import inspect
import re

import pytest

from quatrain.config import rules, warnings
from quatrain.config.fields import value_at
from quatrain.config.load import load_config
from quatrain.config.schema import Config, valid_keys

OF_ENTRIES = {"reward.functions.environment", "reward.functions.judge"}


@pytest.mark.parametrize("config", [Config(), Config(lora={"rank": 1}), Config(critic={"enabled": True})])
def test_an_ordinary_configuration_breaks_no_rule(config):
    assert [rule for rule in rules.RULES if rule.broken(config)] == []


def test_rules_are_about_keys():
    assert {rule.key for rule in rules.RULES} - OF_ENTRIES <= {*valid_keys()}


def test_sentences_can_be_written():
    sentences = [rule.sentence for rule in rules.RULES] + [sentence for _, sentence in warnings.WARNINGS]
    for sentence in sentences:
        assert not {*"{}"} & {*sentence.format(c=Config())}


@pytest.mark.parametrize("module", [rules, warnings])
def test_conditions_read_attributes_that_exist(module):
    tree = ast.parse(inspect.getsource(module))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read = {name.removeprefix("c.") for name in names if name.startswith("c.")}
    assert len(read) > 10
    inner = {"reward.judge.self", "reward.judge.model"}  # of a section that may be null
    for name in read - {"reward.entries.values"} - inner:
        value_at(Config(), name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("update.reject={k3: 0.01}", "update.old_logprobs=rollout"), "update.reject must be empty for"),
        (("update.reject={k3: 0.01}", "update.rejected=drop"), "update.rejected must be keep unless"),
        (("update.rejected=drop",), "update.rejected has no effect without update.reject"),
        (
            ("update.reject={k4: 0.01}",),
            "update.reject must name rules of geometric, product, k3, negative_kl",
        ),
        (("update.reject={k3: [0.1, 0.2]}",), "update.reject must have for k3 one bound between 2.1e-09 and"),
        (("update.reject={product: [2.0, 0.5]}",), "product bounds [low, high] with low < 1 < high, between"),
        (
            ("update.reject={geometric: 0.5}",),
            "must have for geometric bounds [low, high] with low < 1 < high",
        ),
        (
            ("update.reject={k3: 0.1, geometric: [2, 3]}",),
            "for geometric bounds [low, high] with low < 1 < high",
        ),
        (
            ("update.reject={product: [1e-12, 1e12]}",),
            "product bounds [low, high] with low < 1 < high, between",
        ),
        (
            ("update.reject={k3: 1e9}",),
            "must have for k3 one bound between 2.1e-09 and 4.9e+08, as 0.01; it has",
        ),
        (("update.reject={negative_kl: true}",), "must have for negative_kl one bound between"),
        (
            ("update.correction=none", "update.correction_level=sequence"),
            "update.correction_level has no effect",
        ),
        (("distill.weight=2",), "distill.weight has no effect without distill.teacher"),
        (
            ("distill.teacher=x", "rollout.replay_mask=false", "rollout.top_p=0.9"),
            "distill.teacher must be null with rollout.top_p",
        ),
        (
            ("distill.teacher=x", "distill.weight=0", "distill.rl_weight=0"),
            "distill.rl_weight must be above 0",
        ),
        (
            ("distill.teacher={default: null}", "reward.functions={}"),
            "distill.teacher must be a teacher, or a",
        ),
        (("distill.teacher=http://",), "distill.teacher must be an address such as http://host:8000"),
        (("distill.teacher=http://h:abc",), "distill.teacher must be an address such as http://host:8000"),
        (("distill.teacher={a: 'http://h:99999'}",), "distill.teacher must be an address such as"),
        (("distill.teacher={}",), "distill.teacher must be a teacher, or a"),
        (("distill.teacher=policy",), "distill.prompt must be set for distill.teacher policy"),
        (("distill.teacher=http://h:1", "rollout.temperature=0.9"), "distill.temperature must be 1 for"),
        (("distill.teacher=x", "distill.loss=jsd", "distill.weight=0"), "distill.weight must be above 0"),
        (("distill.teacher=x", "distill.loss=jsd", "distill.clip=2"), "distill.clip has no effect for"),
        (("distill.teacher=x", "distill.beta=0.2"), "distill.beta has no effect for distill.loss sampled"),
        (("distill.teacher=initial", "distill.loss=jsd"), "distill.loss over all words needs one model"),
        (("distill.teacher={math: x, code: y}", "distill.loss=jsd"), "distill.loss over all words needs one"),
        (("distill.teacher=x", "distill.top_k=8"), "distill.top_k has no effect for distill.loss sampled"),
        (("distill.teacher=x", "distill.loss=jsd", "distill.prompt=hi"), "distill.prompt must be null for"),
        (
            ("distill.teacher=x", "distill.weight=0", "distill.clip=2"),
            "distill.clip has no effect for distill.w",
        ),
        (
            ("distill.teacher=x", "distill.weight=0", "distill.warmdown_steps=2"),
            "distill.warmdown_steps has no effect for distill.weight 0; raise distill.weight",
        ),
        (
            ("distill.teacher=x", "distill.loss=jsd", "distill.rl_weight=0", "update.reject={k3: 0.1}"),
            "update.reject has no effect for update.rejected keep with distill.loss jsd and distill.rl_wei",
        ),
        (("distill.teacher=initial", "offload.teacher=true"), "offload.teacher has no effect for"),
        (("reward.functions={}",), "reward.functions must name at least one function"),
        (("advantage.estimator=gdpo", "reward.kl_coef=0.1"), "reward.kl_coef must be 0 for"),
        (("advantage.estimator=maxrl", "reward.kl_coef=0.1"), "reward.kl_coef must be 0 for advantage.est"),
        (
            ("update.loss=dppo", "rollout.replay_mask=false", "rollout.top_p=0.9"),
            "update.loss reads the sampler's log-probabilities",
        ),
        (
            ("update.loss=dppo", "rollout.replay_mask=false", "rollout.min_p=0.1"),
            "update.loss reads the sampler's log-probabilities",
        ),
        (
            ("update.loss=dro", "rollout.replay_mask=false", "rollout.top_k=9"),
            "update.loss reads the sampler's log-probabilities",
        ),
        (
            ("update.sampler_kl_coef=0.1", "rollout.replay_mask=false", "rollout.top_p=0.9"),
            "update.sampler_kl_coef must be 0 with rollout.",
        ),
        (
            ("reward.truncated_factor=0.5", "reward.truncated_reward=-1"),
            "reward.truncated_factor must be null if reward.truncated_reward (-1.0) is set",
        ),
        (
            ("advantage.estimator=gdpo", "reward.truncated_factor=0.5"),
            "reward.truncated_factor must be null for advantage.estimator gdpo",
        ),
        (
            ("advantage.estimator=gdpo", "reward.truncated_reward=0"),
            "reward.truncated_reward must be null for advantage.estimator gdpo",
        ),
    ],
)
def test_what_does_not_go_together_is_said(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(None, overrides, environ={})
