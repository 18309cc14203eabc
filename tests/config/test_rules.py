"""The table of rules: every row reads keys that exist, and its sentence can be written."""

import pytest

from quatrain.config.fields import value_at
from quatrain.config.rules import RULES
from quatrain.config.schema import Config, valid_keys
from quatrain.config.warnings import WARNINGS

ENVIRONMENT = "reward.functions.environment"


@pytest.mark.parametrize("config", [Config(), Config(lora={"rank": 1}), Config(critic={"enabled": True})])
def test_rules_and_warnings_read_keys_that_exist(config):
    for rule in RULES:
        assert rule.key in valid_keys() or rule.key == ENVIRONMENT
        assert not rule.broken(config), rule
        assert "{" not in rule.sentence.format(c=config)
        if rule.key != ENVIRONMENT:
            value_at(config, rule.key)
    for _, sentence in WARNINGS[:2]:
        assert "{" not in sentence.format(c=config)
