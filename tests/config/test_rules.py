"""The tables of rules and warnings: conditions and sentences read keys that exist."""

import ast
import inspect

import pytest

from quatrain.config import rules, warnings
from quatrain.config.fields import value_at
from quatrain.config.schema import Config, valid_keys

OF_ENVIRONMENTS = "reward.functions.environment"


@pytest.mark.parametrize("config", [Config(), Config(lora={"rank": 1}), Config(critic={"enabled": True})])
def test_an_ordinary_configuration_breaks_no_rule(config):
    assert [rule for rule in rules.RULES if rule.broken(config)] == []


def test_rules_are_about_keys():
    assert {rule.key for rule in rules.RULES} - {OF_ENVIRONMENTS} <= {*valid_keys()}


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
    for name in read - {"reward.entries.values"}:
        value_at(Config(), name)
