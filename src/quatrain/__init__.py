"""Post-training of language models in JAX: reinforcement learning, supervised, and on preferences.

The names below are what a training loop of one's own needs; docs/library.md shows one. Importing the package
imports nothing else: a name brings its module, and JAX, when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from quatrain.config.load import load_config as load_config
    from quatrain.config.schema import Config as Config
    from quatrain.data.pixels import seen_size as seen_size
    from quatrain.data.prompts import load_prompts as load_prompts
    from quatrain.episodes.environment import Environment as Environment
    from quatrain.episodes.environment import StepResult as StepResult
    from quatrain.episodes.environment import Turn as Turn
    from quatrain.episodes.tools import Tools as Tools
    from quatrain.loop.evaluate import Evaluator as Evaluator
    from quatrain.loop.export import export_policy as export_policy
    from quatrain.loop.policy import LoadedPolicy as LoadedPolicy
    from quatrain.loop.policy import load_policy as load_policy
    from quatrain.loop.stages import Stages as Stages
    from quatrain.loop.stages import build_stages as build_stages
    from quatrain.loop.step import collect as collect
    from quatrain.loop.step import learn as learn
    from quatrain.loop.train import dpo as dpo
    from quatrain.loop.train import rm as rm
    from quatrain.loop.train import sft as sft
    from quatrain.loop.train import train as train
    from quatrain.ops.advantages import TokenAdvantages as TokenAdvantages
    from quatrain.ops.preferences import PairLosses as PairLosses
    from quatrain.ops.preferences import Pairs as Pairs
    from quatrain.ops.tokens import ScoredTokens as ScoredTokens
    from quatrain.ops.tokens import TokenLoss as TokenLoss
    from quatrain.ops.tokens import with_mini_batch_columns as with_mini_batch_columns
    from quatrain.rollout.rollouts import Rollouts as Rollouts
    from quatrain.sandbox.sandbox import Sandbox as Sandbox
    from quatrain.types.batches import AdvantagedBatch as AdvantagedBatch
    from quatrain.types.batches import Prompt as Prompt
    from quatrain.types.batches import RewardedBatch as RewardedBatch
    from quatrain.types.batches import RolloutBatch as RolloutBatch
    from quatrain.types.metrics import Metric as Metric
    from quatrain.types.piece import Piece as Piece
    from quatrain.types.rollouts import Completion as Completion
    from quatrain.types.rollouts import Sampling as Sampling
    from quatrain.types.rollouts import rollout_batch as rollout_batch
    from quatrain.types.sampler import Progress as Progress
    from quatrain.types.sampler import Request as Request
    from quatrain.types.sampler import Sampler as Sampler
    from quatrain.update.learner import TrainState as TrainState

_MODULES = {
    "config.load": ("load_config",),
    "config.schema": ("Config",),
    "data.pixels": ("seen_size",),
    "data.prompts": ("load_prompts",),
    "episodes.environment": ("Environment", "StepResult", "Turn"),
    "episodes.tools": ("Tools",),
    "loop.evaluate": ("Evaluator",),
    "loop.export": ("export_policy",),
    "loop.policy": ("LoadedPolicy", "load_policy"),
    "loop.stages": ("Stages", "build_stages"),
    "loop.step": ("collect", "learn"),
    "loop.train": ("dpo", "rm", "sft", "train"),
    "ops.advantages": ("TokenAdvantages",),
    "ops.preferences": ("PairLosses", "Pairs"),
    "ops.tokens": ("ScoredTokens", "TokenLoss", "with_mini_batch_columns"),
    "types.batches": ("AdvantagedBatch", "Prompt", "RewardedBatch", "RolloutBatch"),
    "types.metrics": ("Metric",),
    "rollout.rollouts": ("Rollouts",),
    "sandbox.sandbox": ("Sandbox",),
    "types.piece": ("Piece",),
    "types.rollouts": ("Completion", "Sampling", "rollout_batch"),
    "types.sampler": ("Progress", "Request", "Sampler"),
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
