"""Runs of TRL on small models, kept in tests/golden/, and what they were made with.

`tests/oracles/make_trainer_goldens.py` trains the models of `goldens.py` with TRL and keeps losses and norms
of gradients; the tests train the same models here.
"""

from __future__ import annotations

import json
from typing import Any

from goldens import GOLDEN

from quatrain.models.params import Params

TRAINED = ("qwen2", "llama", "gemma2")
STEPS = 10
LEARNING_RATE = 1e-3
BETA, EPSILON, GAMMA, CENTER, UNDESIRABLE = 0.5, 0.1, 0.5, 0.01, 1.3


def reference_of(params: Params) -> Params:
    """The frozen reference of a policy: other log-probabilities, else all log-ratios were 0 at first."""
    return {**params, "final_norm": params["final_norm"] * 0.5}


def read_trainer_golden(case: str) -> dict[str, Any]:
    """`data` that was trained on, and of `runs`, by the name of the objective, `losses` and `norms`."""
    return json.loads((GOLDEN / f"trl_{case}.json").read_text())
