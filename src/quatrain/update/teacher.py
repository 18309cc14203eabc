"""The teacher of on-policy distillation: a frozen model that scores what the policy sampled.

Between lines 2 and 3 of a training step: `RewardedBatch` -> `Teacher.score` -> the same with the teacher's
log-probability of each completion token, which `distillation.py` makes a part of the advantages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from quatrain.backend import this_backend
from quatrain.config.derive import longest_of_run
from quatrain.config.errors import listed
from quatrain.config.schema import Config, DistillConfig, LogprobConfig
from quatrain.config.sections.reward import DEFAULT
from quatrain.data.pixels import with_limits
from quatrain.data.policy import Policy
from quatrain.data.tokenizer import load_tokenizer
from quatrain.data.vocabulary import check_same_tokens
from quatrain.forward.micro_batch import MicroBatch
from quatrain.forward.predict import scored_hidden_program
from quatrain.forward.specs import DistilledSpec, ModelSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.feature_store import FeatureStore
from quatrain.models.params import output_head_name
from quatrain.models.probe import trusted_attention
from quatrain.ops.divergences import Divergence
from quatrain.parallel.axes import TP
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import to_memory
from quatrain.types.batches import DATA_SOURCE, RewardedBatch, RolloutBatch, TeacherWords
from quatrain.types.metrics import Metric
from quatrain.update.distillation import TEACHER_LOGPROBS
from quatrain.update.server_teacher import ServerTeacher
from quatrain.update.teacher_prompts import TeacherPrompts
from quatrain.update.teacher_scores import Gathered, TeacherScores, TopWords, model_scores
from quatrain.weights.load_model import BUILTIN, load_model

logger = logging.getLogger(__name__)
MOST_SOURCES = 16
"""Values of the column `data_source` in a batch up to which each has a metric of its own."""

OwnScores = Callable[[str, TokenTable, float, TopWords | None], TeacherScores]
"""(`policy` or `initial`, table, temperature, which words) -> what these weights say of it."""


@dataclass(frozen=True)
class OwnWeights:
    """A `Source` with weights of the run: the policy's at the start of the step, or the reference's."""

    name: str
    temperature: float
    longest: int
    """Tokens of the longest sequence that it can read."""

    def scores(self, table: TokenTable, own: OwnScores | None, top: TopWords | None = None) -> TeacherScores:
        """The scores of the scored tokens of `table`, with the words `top` or none.

        Raises ValueError without `own`.
        """
        if own is None:
            raise ValueError(
                f"the teacher {self.name} has weights of the run; give teacher.score what computes with "
                "them, functools.partial(update.own_scores, state.params)"
            )
        return own(self.name, table, self.temperature, top)


class FrozenModel:
    """A `Source` that is a loaded model, whose parameters wait in `memory` between its passes.

    `store` has the pictures for it.
    """

    def __init__(
        self,
        params: Any,
        spec: PolicySpec,
        *,
        max_tokens: int,
        share_prompts: bool = True,
        memory: Literal["device", "host"] = "device",
        store: FeatureStore | None = None,
    ):
        self.spec = spec
        sizes = LogprobConfig(max_tokens_per_device=max_tokens)
        self._planner = spec.planner(sizes, share_prompts=share_prompts, store=store)
        assert self._planner.max_tokens is not None
        self.longest = min(self._planner.max_tokens, spec.arch.longest)
        """Tokens of the longest sequence that the model can read."""
        # On the host between passes if asked to: a teacher is often larger than the policy and is used once a
        # step.
        self._params = to_memory(memory, params)

    def scores(
        self, table: TokenTable, own: OwnScores | None = None, top: TopWords | None = None
    ) -> TeacherScores:
        """As `OwnWeights.scores`."""
        return model_scores(self.on_device(), table, model=self.spec, planner=self._planner, top=top)

    def on_device(self) -> Any:
        """The parameters on the devices."""
        return to_memory("device", self._params)


Source = OwnWeights | FrozenModel | ServerTeacher
"""What computes scores for a teacher."""


class WordTeacher:
    """A teacher of losses over all words: its hidden states join micro-batches, its head the parameters.

    It lies on the devices and the mesh of training.
    """

    def __init__(self, model: FrozenModel, *, kind: Divergence, beta: float):
        self._model, self._kind, self._beta = model, kind, beta
        self.longest, self.forms = model.longest, model.spec.forms
        self.scorer = Teacher({DEFAULT: model})
        """What scores tokens outside of the update."""

    def joined(
        self, policy: ModelSpec, params: Any, batches: Iterable[MicroBatch]
    ) -> tuple[DistilledSpec, Any, Iterator[MicroBatch]]:
        """The policy with its divergence, parameters and micro-batches for it.

        The hidden states of a micro-batch are computed when it is asked for, just before its own pass. Raises
        ValueError for vocabularies of different sizes that are sharded over `tp`.
        """
        teacher = self._model.spec
        sizes = policy.arch.vocab_size, teacher.arch.vocab_size
        # Each `tp` device compares its rows with the teacher's: of vocabularies of other sizes they are other
        # words.
        if policy.mesh_shape.tp > 1 and sizes[0] != sizes[1]:
            raise ValueError(
                f"with {TP} above 1 the teacher's vocabulary must have as many rows as the policy's for "
                f"distill.loss {self._kind}; they have {sizes[1]} and {sizes[0]}; set {TP} of mesh to 1, or "
                "distill.loss to sampled"
            )
        weights = self._model.on_device()
        name = output_head_name(teacher.arch)
        spec = policy.extended(DistilledSpec, teacher=teacher, kind=self._kind, beta=self._beta)
        program = scored_hidden_program(teacher.backend)

        def with_states() -> Iterator[MicroBatch]:
            for batch in batches:
                if batch.rows is not None:
                    raise ValueError(
                        "a teacher of a loss over all words cannot read pictures, and a batch has some; set "
                        "distill.top_k, or distill.loss to sampled"
                    )
                with trim_after_compiling():
                    own = replace(batch, routes=None)  # those of the policy are not the teacher's
                    yield replace(batch, teacher_hidden=program(weights, own, model=teacher))

        return spec, {"policy": params, "teacher": {name: weights[name]}}, with_states()


class Teacher:
    """What scores the policy's tokens: a source for each data source, with prompts of its own or not.

    `sources` has what scores the rows of each value of the column `data_source`, None for nothing, and under
    `default` what scores all others. `top` says which words losses over the top words ask for.
    """

    def __init__(
        self,
        sources: Mapping[str, Source | None],
        prompts: TeacherPrompts | None = None,
        *,
        top: TopWords | None = None,
    ):
        self._sources, self._prompts, self.top = sources, prompts, top
        # A server also gives the sampled word, which need not be among the likeliest.
        served = any(isinstance(source, ServerTeacher) for source in sources.values())
        self._width = None if top is None else top.count + served

    def check_sources(self, sources: Iterable[object]) -> None:
        """Raises ValueError unless `sources`, those of the data, are those with a teacher."""
        known = list(dict.fromkeys(map(str, sources)))
        named = [name for name in self._sources if name != DEFAULT]
        for name in named:
            if name not in known:
                raise ValueError(
                    f"distill.teacher must name values of the column {DATA_SOURCE}, which are "
                    f"{listed(known)}; got {name}; correct the name"
                )
        for name in known if DEFAULT not in self._sources else ():
            if name not in named:
                raise ValueError(
                    f"distill.teacher must name a teacher for each data source; {name} has none; name one, "
                    f"or a {DEFAULT}, which may be null"
                )

    def score(self, rewarded: RewardedBatch, own: OwnScores | None = None) -> RewardedBatch:
        """`rewarded` with `teacher_logprobs` [B, T] in nats, 0 outside the completion mask.

        They are NaN on the tokens of a sequence that has no teacher: by its data source, or because it is
        longer than its teacher can read (counted in `distill/no_teacher`). With `top`, `teacher_words` are
        there too. `own` computes the scores of weights of the run (`Learner.own_scores`). All processes of
        the mesh must call this together, with the same batch.
        """
        rollouts, scores = rewarded.rollouts, self._scores(rewarded.rollouts, own, self.top)
        logprobs, words = {**rewarded.token_logprobs, TEACHER_LOGPROBS: scores.logprobs}, None
        if scores.words is not None and scores.word_logprobs is not None:
            words = TeacherWords(scores.words, scores.word_logprobs)
        metrics = {**rewarded.metrics, **_metrics(rollouts, scores)}
        return replace(rewarded, token_logprobs=logprobs, teacher_words=words, metrics=metrics)

    def logprobs(self, rollouts: RolloutBatch, own: OwnScores | None = None) -> np.ndarray:
        """[B, T]: the `teacher_logprobs` of `score`, of any completions."""
        return self._scores(rollouts, own, None).logprobs

    def _scores(self, rollouts: RolloutBatch, own: OwnScores | None, top: TopWords | None) -> TeacherScores:
        prompts = self._prompts
        names = _data_sources(rollouts) or [DEFAULT] * len(rollouts)
        of_row = [self._sources.get(name, self._sources.get(DEFAULT)) for name in names]
        taught = [each is not None for each in of_row]
        table = TokenTable.of(rollouts) if prompts is None else prompts.table(rollouts, taught)
        gathered = Gathered(table, None if top is None else self._width)
        # By identity: two data sources may name one teacher, whose rows then share micro-batches and one
        # pass.
        sources: dict[int, Source] = {id(each): each for each in of_row if each is not None}
        for source in sources.values():
            # Rows that are too long stay NaN and are counted; cut, they would be scored in another context.
            held = np.flatnonzero([each is source for each in of_row] & (table.lengths <= source.longest))
            if held.size:
                gathered.add(held, source.scores(table.take(held), own, top))
        if prompts is None:
            return gathered.scores
        found = {name: x for name, x in gathered.scores._asdict().items() if x is not None}
        return TeacherScores(**{name: prompts.back(x, table, rollouts) for name, x in found.items()})


def has_teacher(config: DistillConfig, columns: Mapping[str, Any]) -> bool:
    """Whether a row with the data `columns` has a teacher."""
    name = str(columns.get(DATA_SOURCE, DEFAULT))
    return config.teachers.get(name, config.teachers.get(DEFAULT)) is not None


def _data_sources(rollouts: RolloutBatch) -> list[str]:
    """The data source of each row as text, as the configuration names it; [] without the column."""
    return [str(value) for value in rollouts.columns.get(DATA_SOURCE, ())]


def _metrics(rollouts: RolloutBatch, scores: TeacherScores) -> dict[str, Metric]:
    """Metrics of the teacher's `scores` [B, T] of what was sampled."""
    logprobs = scores.logprobs
    missing = np.isnan(logprobs)
    # Of what the sampler saw: the KL to the teacher is then that of the samples, before any update.
    scored = rollouts.completion_mask & ~missing
    gaps = np.where(scored, rollouts.rollout_logprobs - np.nan_to_num(logprobs), 0).astype(np.float64)

    def kl(rows: np.ndarray) -> Metric:
        return Metric(float(gaps[rows].sum()), float(scored[rows].sum()))

    metrics = {"distill/no_teacher": Metric(int(missing.any(axis=1).sum()), reduction="sum")}
    if not scored.any():
        return metrics
    metrics["distill/kl"] = kl(scored.any(axis=1))
    count = float(scored.sum())
    metrics["distill/teacher_logprob"] = Metric(float(logprobs[scored].sum()), count)
    if scores.word_logprobs is not None:
        rest = np.exp(scores.word_logprobs[scored][:, -1].astype(np.float64))
        metrics["distill/topk_mass"] = Metric(float((1 - rest).sum()), count)
    if scores.outside_mass is not None and scores.outside_mass.any():
        metrics["distill/outside_mass"] = Metric(float(scores.outside_mass[scored].sum()), count)
    of_row = np.array(_data_sources(rollouts))
    sources = np.unique(of_row)
    for source in sources if 1 < len(sources) <= MOST_SOURCES else ():
        if scored[of_row == source].any():
            metrics[f"distill/kl/{source}"] = kl(of_row == source)
    return metrics


def as_stage(teacher: Teacher | WordTeacher | None) -> Teacher | None:
    """`teacher`, if it is a stage of a step; one of losses over all words is a part of the update."""
    return teacher if isinstance(teacher, Teacher) else None


@dataclass(frozen=True)
class TeacherLoader:
    """How the teachers of a run on `policy` are loaded, on their mesh and in their memory.

    `longest_prompt`: tokens of the longest of the teacher's own prompts (`TeacherPrompts.longest`).
    """

    config: Config
    policy: Policy
    longest_prompt: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a teacher gets to read, in training or evaluation."""
        more = max(self.longest_prompt - self.config.data.max_prompt_length, 0)
        return longest_of_run(self.config) + more

    def load(
        self, prompts: TeacherPrompts | None = None, *, weights: bool = True
    ) -> Teacher | WordTeacher | None:
        """The teacher, with `prompts` of its own or None.

        None if the configuration names none, and without `weights`, after the checks. A warning is logged for
        a teacher that cannot read sequences of `longest` tokens. Raises ValueError for a model that is
        missing, damaged, of an unsupported family, that `mesh` cannot shard, or whose tokens are not those of
        the policy's `tokenizer`.
        """
        config, policy = self.config.distill, self.policy
        # Each model once, whatever number of data sources name it.
        loaded: dict[str, Source | None] = {path: self._model(path, weights) for path in config.models}
        if not config.teachers or not weights:
            return None
        own = min(policy.arch.longest, self.config.logprob.max_tokens_per_device or policy.arch.longest)
        for name in config.own:
            loaded[name] = OwnWeights(name, config.temperature, own)
        timeout_s = self.config.rollout.timeout_s
        for address in config.servers:
            most = config.top_k if config.loss != "sampled" else 0
            loaded[address] = ServerTeacher(address, policy.tokenizer, timeout_s=timeout_s, num_words=most)
        for path, source in loaded.items():
            if source is not None and source.longest < self.longest:
                logger.warning(
                    "the teacher %s reads at most %d tokens, and the longest sequence of this run has %d; "
                    "sequences that are too long have no teacher (counted in distill/no_teacher)",
                    *(path, source.longest, self.longest),
                )
        if config.loss != "sampled" and not config.top_k:
            (model,) = loaded.values()
            assert isinstance(model, FrozenModel), "a rule of the configuration"
            return WordTeacher(model, kind=config.loss, beta=config.beta)
        sources = {name: None if path is None else loaded[path] for name, path in config.teachers.items()}
        return Teacher(sources, prompts, top=self._top(loaded.values()))

    def _top(self, sources: Iterable[Source | None]) -> TopWords | None:
        """The words that a loss over the top words asks for: of those that the policy and all models have.

        Raises ValueError if there are fewer of them.
        """
        config = self.config.distill
        if config.loss == "sampled":
            return None
        sizes = [x.spec.arch.vocab_size for x in sources if isinstance(x, FrozenModel)]
        num_words = min([self.policy.arch.vocab_size, *sizes])
        if config.top_k > num_words:
            raise ValueError(
                f"distill.top_k must be at most {num_words}, the number of words that the policy and its "
                f"teachers have; got {config.top_k}; set a smaller number, or 0 for all words"
            )
        return TopWords(config.top_k, num_words)

    def _model(self, path: str, weights: bool) -> FrozenModel | None:
        config = self.config
        params, spec = load_frozen(
            config,
            self.policy,
            path,
            key="distill.teacher",
            mesh=self.policy.meshes.teacher,
            longest=self.longest,
            temperature=config.distill.temperature,
            weights=weights,
        )
        if not weights:
            return None
        return FrozenModel(
            params,
            spec,
            max_tokens=config.distill.max_tokens_per_device,
            share_prompts=config.update.shares_prompts,
            memory="host" if config.offload.teacher else "device",
            store=self.policy.store_beside(spec.arch, path, spec.mesh),
        )


def load_frozen(
    config: Config,
    policy: Policy,
    path: str,
    *,
    key: str,
    mesh: Mesh,
    longest: int,
    temperature: float = 1.0,
    weights: bool = True,
) -> tuple[Any, PolicySpec]:
    """Another model whose log-probabilities of the policy's tokens are read: parameters on `mesh`, and spec.

    It reads sequences of at most `longest` tokens. Without `weights` the parameters are None. Raises
    ValueError, which names `key`, for a model that cannot be loaded, and if its tokens are not the policy's.
    """
    model, tokenizer = config.model, policy.tokenizer
    size = len(tokenizer)
    try:
        # Ids are compared, not sizes: two tokenizers of one size may differ in a single word, and scores
        # would be of other texts.
        if not path.startswith(BUILTIN):
            check_same_tokens(load_tokenizer(path), tokenizer)
        given: dict[str, Any] = {"seed": config.seed, "vocab_size": size, "mesh": mesh}
        given["vision"] = None if policy.arch.vision else "none"
        loaded = load_model(path, dtype=model.param_dtype, weights=weights, **given)
        # The other way round is no error: heads are often padded beyond the tokenizer's last id.
        if size > loaded.arch.vocab_size:
            what = key.rpartition(".")[2]
            raise ValueError(
                f"a {what} must have an embedding for each token of the policy's tokenizer: it has "
                f"{loaded.arch.vocab_size}, the tokenizer {size} tokens; choose another {what}"
            )
        kind = this_backend().kind
        attention = trusted_attention("auto", loaded.arch, platform=kind, dtype=model.dtype)
    except ValueError as error:
        raise ValueError(f"{key} {path} cannot be used: {error}") from error
    arch = loaded.arch.for_length(longest)
    if arch.vision is not None:
        arch = replace(arch, vision=with_limits(arch.vision, config.data))
    return loaded.params, PolicySpec(
        arch, model.dtype, attention=attention, mesh=mesh, temperature=temperature
    )
