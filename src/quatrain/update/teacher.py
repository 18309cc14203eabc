"""The teacher of on-policy distillation: a frozen model that scores what the policy sampled.

Between lines 2 and 3 of a training step: `RewardedBatch` -> `Teacher.score` -> the same with the teacher's
log-probability of each completion token, which `distillation.py` makes a part of the advantages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import Mesh

from quatrain.backend import this_backend
from quatrain.config.schema import DistillConfig, LogprobConfig, ModelConfig
from quatrain.data.tokenizer import load_tokenizer
from quatrain.data.vocabulary import check_same_tokens
from quatrain.forward.micro_batch import MicroBatch
from quatrain.forward.predict import predict_tokens, scored_hidden_program
from quatrain.forward.specs import DistilledSpec, ModelSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.attention.probe import trusted_attention
from quatrain.models.params import output_head_name
from quatrain.ops.divergences import Divergence
from quatrain.parallel.axes import TP
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import to_memory
from quatrain.types.batches import DATA_SOURCE, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.update.distillation import TEACHER_LOGPROBS
from quatrain.update.teacher_prompts import TeacherPrompts
from quatrain.weights.load import BUILTIN, load_model

logger = logging.getLogger(__name__)
MOST_SOURCES = 16
"""Values of the column `data_source` in a batch up to which each has a metric of its own."""


Own = Literal["policy", "initial"]
OWN: tuple[Own, ...] = get_args(Own)
"""Teachers with weights of the run itself: the policy's at the start of the step, and the reference's."""
OwnLogprobs = Callable[[Own, TokenTable, float], np.ndarray]
"""(teacher, table, temperature) -> log-probabilities of its scored tokens [B, T]."""


class FrozenModel:
    """A loaded model with its passes; its parameters wait in `memory`, and are on the devices for a pass."""

    def __init__(
        self,
        params: Any,
        spec: PolicySpec,
        *,
        max_tokens: int,
        share_prompts: bool = True,
        memory: Literal["device", "host"] = "device",
    ):
        self.spec = spec
        sizes = LogprobConfig(max_tokens_per_device=max_tokens)
        self._planner = spec.planner(sizes, share_prompts=share_prompts)
        assert self._planner.max_tokens is not None
        self.longest = min(self._planner.max_tokens, spec.arch.longest)
        """Tokens of the longest sequence that the model can read."""
        self._params = to_memory(memory, params)

    def logprobs(self, table: TokenTable) -> np.ndarray:
        """[B, T] float32 log-probabilities of the scored tokens of `table`, 0 elsewhere."""
        return predict_tokens(self.on_device(), table, model=self.spec, planner=self._planner)

    def on_device(self) -> Any:
        """The parameters on the devices."""
        return to_memory("device", self._params)


class WordTeacher:
    """A teacher of losses over the vocabulary: its hidden states join micro-batches, its head the parameters.

    It lies on the devices and the mesh of training.
    """

    def __init__(self, model: FrozenModel, *, kind: Divergence, beta: float):
        self._model, self._kind, self._beta = model, kind, beta
        self.longest, self.unpacks = model.longest, model.spec.unpacks

    def joined(
        self, policy: ModelSpec, params: Any, batches: Iterable[MicroBatch]
    ) -> tuple[DistilledSpec, Any, Iterator[MicroBatch]]:
        """The policy with its divergence, parameters and micro-batches for it.

        The hidden states of a micro-batch are computed when it is asked for, just before its own pass. Raises
        ValueError for vocabularies of different sizes that are sharded over `tp`.
        """
        teacher, values = self._model.spec, {f.name: getattr(policy, f.name) for f in fields(policy)}
        sizes = policy.arch.vocab_size, teacher.arch.vocab_size
        if policy.mesh_shape.tp > 1 and sizes[0] != sizes[1]:
            raise ValueError(
                f"with {TP} above 1 the teacher's vocabulary must have as many rows as the policy's for "
                f"distill.loss {self._kind}; they have {sizes[1]} and {sizes[0]}; set {TP} of mesh to 1, or "
                "distill.loss to sampled"
            )
        weights = self._model.on_device()
        name = output_head_name(teacher.arch)
        spec = DistilledSpec(**values, teacher=teacher, kind=self._kind, beta=self._beta)
        program = scored_hidden_program(teacher.backend)

        def with_states() -> Iterator[MicroBatch]:
            for batch in batches:
                with trim_after_compiling():
                    yield replace(batch, teacher_hidden=program(weights, batch, model=teacher))

        return spec, {"policy": params, "teacher": {name: weights[name]}}, with_states()


class Teacher:
    """What scores the policy's tokens: a model, or weights of the run itself; with prompts of its own or not.

    `longest`: tokens of the longest sequence that weights of the run can read; a model has its own.
    """

    def __init__(
        self,
        model: FrozenModel | Own,
        *,
        temperature: float,
        longest: int,
        prompts: TeacherPrompts | None = None,
    ):
        self.model, self.prompts, self.temperature = model, prompts, temperature
        self.longest = model.longest if isinstance(model, FrozenModel) else longest

    def score(self, rewarded: RewardedBatch, own: OwnLogprobs | None = None) -> RewardedBatch:
        """`rewarded` with `teacher_logprobs` [B, T] in nats, 0 outside the completion mask.

        They are NaN on the tokens of a sequence that is longer than `longest`, which has no teacher (counted
        in `distill/no_teacher`). `own` computes those of weights of the run (`Learner.own_logprobs`). All
        processes of the mesh must call this together, with the same batch.
        """
        rollouts, prompts = rewarded.rollouts, self.prompts
        table = TokenTable.of(rollouts) if prompts is None else prompts.table(rollouts)
        held = np.flatnonzero(table.lengths <= self.longest)
        found = np.where(table.completion_mask, np.float32(np.nan), np.float32(0))
        if held.size:
            found[held] = self._logprobs(table.take(held), own)
        logprobs = found if prompts is None else prompts.back(found, table, rollouts)
        return replace(
            rewarded,
            token_logprobs={**rewarded.token_logprobs, TEACHER_LOGPROBS: logprobs},
            metrics={**rewarded.metrics, **_metrics(rollouts, logprobs)},
        )

    def _logprobs(self, table: TokenTable, own: OwnLogprobs | None) -> np.ndarray:
        if isinstance(self.model, FrozenModel):
            return self.model.logprobs(table)
        if own is None:
            raise ValueError(
                f"the teacher {self.model} has weights of the run; give teacher.score what computes with "
                "them, functools.partial(update.own_logprobs, state)"
            )
        return own(self.model, table, self.temperature)


def _metrics(rollouts: RolloutBatch, logprobs: np.ndarray) -> dict[str, Metric]:
    """Metrics of the teacher's `logprobs` [B, T] of what was sampled."""
    missing = np.isnan(logprobs)
    scored = rollouts.completion_mask & ~missing
    gaps = np.where(scored, rollouts.rollout_logprobs - np.nan_to_num(logprobs), 0).astype(np.float64)

    def kl(rows: np.ndarray) -> Metric:
        return Metric(float(gaps[rows].sum()), float(scored[rows].sum()))

    metrics = {"distill/no_teacher": Metric(int(missing.any(axis=1).sum()), reduction="sum")}
    if not scored.any():
        return metrics
    metrics["distill/kl"] = kl(scored.any(axis=1))
    metrics["distill/teacher_logprob"] = Metric(float(logprobs[scored].sum()), float(scored.sum()))
    of_row = np.array(rollouts.columns.get(DATA_SOURCE, ()), str)
    sources = np.unique(of_row)
    for source in sources if 1 < len(sources) <= MOST_SOURCES else ():
        if scored[of_row == source].any():
            metrics[f"distill/kl/{source}"] = kl(of_row == source)
    return metrics


def load_teacher(
    config: DistillConfig,
    model: ModelConfig,
    tokenizer: Any,
    *,
    mesh: Mesh,
    memory: Literal["device", "host"] = "device",
    share_prompts: bool = True,
    longest: int = 0,
    seed: int = 0,
    prompts: TeacherPrompts | None = None,
    weights: bool = True,
) -> Teacher | WordTeacher | None:
    """The teacher of `config` on `mesh`, with `prompts` of its own or None.

    None if `config` names no teacher, and without `weights`, after the checks.
    Parameters are stored in `model.param_dtype`, activations are in `model.dtype`. A warning is logged for a
    teacher that cannot read sequences of `longest` tokens, the longest that a run can produce; `seed` is that
    of a built-in one. Raises ValueError for a teacher that is missing, damaged, of an unsupported family,
    that `mesh` cannot shard, or whose tokens are not those of the policy's `tokenizer`.
    """
    path = config.teacher
    if path is None:
        return None
    assert config.temperature is not None, "the temperature is derived before it comes here"
    given: dict[str, Any] = {"temperature": config.temperature, "longest": longest, "prompts": prompts}
    if path in OWN:
        return Teacher(path, **given) if weights else None
    try:
        if not path.startswith(BUILTIN):
            check_same_tokens(load_tokenizer(path), tokenizer)
        loaded = load_model(
            path, dtype=model.param_dtype, seed=seed, vocab_size=len(tokenizer), mesh=mesh, weights=weights
        )
        if len(tokenizer) > loaded.arch.vocab_size:
            raise ValueError(
                "a teacher must have an embedding for each token of the policy's tokenizer: it has "
                f"{loaded.arch.vocab_size}, the tokenizer {len(tokenizer)} tokens; choose another teacher"
            )
        kind = this_backend().kind
        attention = trusted_attention("auto", loaded.arch, platform=kind, dtype=model.dtype)
    except ValueError as error:
        raise ValueError(f"distill.teacher {path} cannot be used: {error}") from error
    if not weights:
        return None
    arch = loaded.arch.for_length(longest)
    spec = PolicySpec(arch, model.dtype, attention=attention, mesh=mesh, temperature=config.temperature)
    budget = config.max_tokens_per_device
    assert budget is not None, "batch sizes are derived before they come here"
    passes: dict[str, Any] = {"share_prompts": share_prompts, "memory": memory}
    frozen = FrozenModel(loaded.params, spec, max_tokens=budget, **passes)
    teacher: Teacher | WordTeacher = Teacher(frozen, **given)
    if config.loss != "sampled":
        teacher = WordTeacher(frozen, kind=config.loss, beta=config.beta)
    if teacher.longest < longest:
        logger.warning(
            "the teacher %s reads at most %d tokens, and the longest sequence of this run has %d; sequences "
            "that are too long have no teacher (counted in distill/no_teacher)",
            *(path, teacher.longest, longest),
        )
    return teacher
