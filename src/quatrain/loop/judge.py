"""Connects a judge on this run's devices (`reward.judge`) with what samples its answers.

Used where the rollout is made (`stages.py`): the policy judges with the sampler of the rollout, another model
with an engine of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from quatrain.backend import this_backend
from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.config.derive import longest_of_run
from quatrain.config.schema import Config
from quatrain.data.grammars import of_answer
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.loop.policy import LoadedPolicy
from quatrain.models.probe import trusted_attention
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import to_memory
from quatrain.reward.judge.judge import Judge
from quatrain.reward.judge.judgements import schema
from quatrain.reward.judge.on_engine import EngineJudge
from quatrain.rollout.rollouts import Rollouts, SingleTurns
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import AtOnce, Sampler
from quatrain.weights.load_model import BUILTIN, load_model

QUESTION_TOKENS = 1024
"""Tokens of a rubric and what stands around it, beside the longest sequence of the run, in which a judge's
positions are those of a short text."""
