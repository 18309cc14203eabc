"""Reinforcement-learning post-training of language models in JAX: rollout, reward, advantages, update.

The names below are what a training loop of one's own needs; docs/library.md shows one. Importing the package
imports nothing else: a name brings its module, and JAX, when it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from quatrain.config.load import load_config as load_config
    from quatrain.config.schema import Config as Config
    from quatrain.data.prompts import load_prompts as load_prompts
    from quatrain.evaluate import Evaluator as Evaluator
    from quatrain.export import export_policy as export_policy
    from quatrain.metrics import Metric as Metric
    from quatrain.ops.advantages import TokenAdvantages as TokenAdvantages
    from quatrain.ops.tokens import ScoredTokens as ScoredTokens
    from quatrain.ops.tokens import TokenLoss as TokenLoss
    from quatrain.ops.tokens import with_mini_batch_columns as with_mini_batch_columns
    from quatrain.policy import LoadedPolicy as LoadedPolicy
    from quatrain.policy import load_policy as load_policy
    from quatrain.rollout.environment import Environment as Environment
    from quatrain.rollout.environment import Turn as Turn
    from quatrain.rollout.interface import Completion as Completion
    from quatrain.rollout.interface import Rollouts as Rollouts
    from quatrain.rollout.interface import Sampling as Sampling
    from quatrain.rollout.interface import rollout_batch as rollout_batch
    from quatrain.rollout.tools import Tools as Tools
    from quatrain.stages import Stages as Stages
    from quatrain.stages import build_stages as build_stages
    from quatrain.train import train as train
    from quatrain.types import AdvantagedBatch as AdvantagedBatch
    from quatrain.types import Prompt as Prompt
    from quatrain.types import RewardedBatch as RewardedBatch
    from quatrain.types import RolloutBatch as RolloutBatch
    from quatrain.update.learner import TrainState as TrainState

_MODULES = {
    "config.load": ("load_config",),
    "config.schema": ("Config",),
    "data.prompts": ("load_prompts",),
    "evaluate": ("Evaluator",),
    "export": ("export_policy",),
    "metrics": ("Metric",),
    "ops.advantages": ("TokenAdvantages",),
    "ops.tokens": ("ScoredTokens", "TokenLoss", "with_mini_batch_columns"),
    "policy": ("LoadedPolicy", "load_policy"),
    "rollout.environment": ("Environment", "Turn"),
    "rollout.interface": ("Completion", "Rollouts", "Sampling", "rollout_batch"),
    "rollout.tools": ("Tools",),
    "stages": ("Stages", "build_stages"),
    "train": ("train",),
    "types": ("AdvantagedBatch", "Prompt", "RewardedBatch", "RolloutBatch"),
    "update.learner": ("TrainState",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """`quatrain.train` is the function, also once its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
