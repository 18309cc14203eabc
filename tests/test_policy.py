import pytest

from quatrain import policy
from quatrain.config.load import load_config


def test_several_processes_are_refused_instead_of_each_training_alone(monkeypatch):
    monkeypatch.setattr(policy, "num_processes", lambda: 2)
    with pytest.raises(ValueError, match=r"run in one process.*got 2 processes; start the command by itself"):
        policy.load_policy(load_config(None, environ={}).config)
