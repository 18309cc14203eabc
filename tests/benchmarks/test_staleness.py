"""The runs that show what stale data costs in learning."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.load import load_config
from quatrain.config.schema import UpdateConfig
from quatrain.ops.tokens import ScoredTokens
from quatrain.update.objective import PolicyObjective

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script(load_script):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield load_script("staleness")
    sys.modules.pop("algorithms", None)


def test_every_variant_is_a_valid_configuration(script):
    suite = script.staleness(5e-4)
    for name in suite.settings:
        settings = script.main.__globals__["settings_of"](suite, name, 0, {})
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = load_config(None, overrides, environ={}).config
        kind, _, rest = name.partition("/")
        assert config.rollout.max_staleness == int(rest.replace(",", " ").split()[0])
        assert config.optimizer.learning_rate == (2e-3 if kind == "stress" else 5e-4)
        assert config.checkpoint.every_steps == 0
        assert config.rollout.in_flight == rest.endswith("in flight")


def test_the_uncorrected_loss_is_the_loss_without_its_correction(script):
    mask = jnp.ones((1, 3), bool)
    columns = {
        "old_logprobs": jnp.array([[-1.0, -2.0, -1.0]]),
        "rollout_logprobs": jnp.array([[-1.5, -4.0, -0.5]]),
        "advantages": jnp.array([[1.0, -1.0, 2.0]]),
    }
    tokens = ScoredTokens(
        jnp.array([[-1.1, -1.9, -0.9]]), jnp.zeros((1, 3)), mask, jnp.zeros((1, 3), jnp.int32), columns
    )
    plain, divided = (
        PolicyObjective.of(UpdateConfig(**config), on_policy=False)(tokens).loss
        for config in ({}, {"correction": "truncate", "loss": f"{script.UNCORRECTED}:uncorrected"})
    )
    np.testing.assert_allclose(divided, plain, rtol=1e-6)
