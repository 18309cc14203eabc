"""How a micro-batch becomes numbers for its scored tokens: log-probabilities of a policy, values of a critic.

Data flow: `predict.py` (without gradient) and `update/gradient.py` (with it) call `ModelSpec.predict` on
parameters and a micro-batch, on each data shard. A spec is a static argument of compiled functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quatrain.backend import Backend, this_backend
from quatrain.config.mesh import MeshShape
from quatrain.config.schema import CriticConfig, LogprobConfig, ModelConfig, UpdateConfig
from quatrain.data.policy import Policy
from quatrain.forward.micro_batch import MicroBatch
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.models.attention import longest_buffer, unpacks_above
from quatrain.models.attention.kernels import choose_attention
from quatrain.models.blocks.experts import RouterSums
from quatrain.models.decoder import forward, output_head, project, scores, vocabulary_axis
from quatrain.models.families import Architecture
from quatrain.models.feature_store import FeatureStore, of_states
from quatrain.models.flops import packing_cost
from quatrain.models.lora import trained_part, with_trained
from quatrain.models.params import output_head_name, partition
from quatrain.models.prefix_tree import RowForms
from quatrain.models.probe import trusted_attention, trusted_backend
from quatrain.models.tower import features
from quatrain.models.vision import Inserts
from quatrain.ops.divergences import Divergence, token_divergences
from quatrain.ops.kept_words import NO_WORD, bits_from, kept_bits
from quatrain.ops.logprobs import Head, first_of, token_logprobs
from quatrain.ops.tokens import (
    LISTED_WORDS,
    TEACHER_WORD_LOGPROBS,
    TEACHER_WORDS,
    DistilledTokens,
    ListedTokens,
    ScoredTokens,
    ValuedTokens,
)
from quatrain.ops.top_words import listed_logprobs, outcome_divergence, outcome_logits, top_words
from quatrain.parallel.axes import CP
from quatrain.parallel.collectives import axis_index, axis_size, psum_backward, psum_forward
from quatrain.parallel.mesh import mesh_shape, one_device

Extended = TypeVar("Extended", bound="ModelSpec")


class Predicted(NamedTuple):
    """What a model predicts of a micro-batch."""

    numbers: tuple[jax.Array, ...]
    """[R, K, ...] float32 each, in the order of `Tokens.predictions`."""
    routers: RouterSums | None = None


@dataclass(frozen=True)
class ModelSpec(ABC):
    """A model and how it is computed: architecture, dtype, rematerialisation, attention and devices.

    `backend` holds the settings for the kind of these devices, by default for the devices of this process.
    """

    arch: Architecture
    dtype: str = "float32"
    remat: str = "layer"
    attention: str = "auto"
    mesh: Mesh = field(default_factory=one_device)
    backend: Backend = field(default_factory=this_backend)

    tokens: ClassVar[type[Any]]
    """The `ops.tokens.Tokens` that an objective reads; its `predictions` name the arrays of `predict`."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The columns of a micro-batch that `predict` reads without a gradient too."""

    @abstractmethod
    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Arrays [R, K, ...] float32 with numbers of each scored token, and what routers did, if asked.

        In a function mapped over the mesh: of this data shard's buffers, from this device's parameters.
        """

    def predicted_shapes(self, batch: MicroBatch) -> list[tuple[int, ...]]:
        """The shape of each array of `predict`, without computing it."""
        return [batch.mask.shape] * len(self.tokens.predictions)

    def extended(self, spec: type[Extended], /, **more: Any) -> Extended:
        """This model as a `spec` of a subclass, whose further fields are `more`."""
        return spec(**{each.name: getattr(self, each.name) for each in fields(self)}, **more)

    def trained(self, tree: Any) -> Any:
        """The part that is trained of a tree like the parameters (`lora.trained_part`)."""
        return trained_part(tree, self.arch)

    def with_trained(self, params: Any, trained: Any) -> Any:
        """`params` with their trained part replaced by `trained`."""
        return with_trained(params, trained, self.arch)

    @property
    def mesh_shape(self) -> MeshShape:
        """The sizes of the mesh's axes."""
        return mesh_shape(self.mesh)

    @property
    def partition(self) -> Any:
        """The tree of partition specs of the parameters."""
        return partition(self.arch, self.mesh_shape)

    @property
    def kernel(self) -> str:
        """The attention implementation."""
        return choose_attention(self.attention, self.arch, platform=self.backend.kind, dtype=self.dtype)

    @property
    def forms(self) -> RowForms:
        """Which further arrays packed micro-batches need."""
        return RowForms(unpacks_above(self.kernel), bool(self.arch.deltas), self.arch.routes is not None)

    def planner(
        self,
        sizes: UpdateConfig | LogprobConfig | CriticConfig,
        *,
        share_prompts: bool = False,
        store: FeatureStore | None = None,
    ) -> MicroBatchPlanner:
        """How tables are cut into micro-batches of `sizes` for this model and its devices.

        Prompts are shared only where `sizes` has a token budget. `store` has the pictures for this model.
        """
        return MicroBatchPlanner(
            sizes.micro_batch_size,
            sizes.max_tokens_per_device and sizes.max_tokens_per_device * self.mesh_shape.cp,
            num_shards=self.mesh_shape.num_data_shards,
            cost=packing_cost(self.arch),
            share_prompts=share_prompts and sizes.max_tokens_per_device is not None,
            line_tokens=longest_buffer(self.kernel, self.backend),
            store=store,
        )

    def hidden(self, params: Any, batch: MicroBatch) -> tuple[jax.Array, RouterSums | None]:
        """(hidden states [R, T / cp, D] after the final norm, sums of routers over all tokens).

        There are sums of micro-batches with `counts`. In a function mapped over the mesh.
        """
        assert not (self.arch.deltas and batch.packed and batch.chunks is None), "packed rows need chunks"
        forwarded = forward(
            params,
            self.arch,
            batch.input_ids,
            batch.positions,
            batch.segment_ids,
            branch_ids=batch.branch_ids if batch.shared else None,
            dtype=jnp.dtype(self.dtype),
            remat=self.remat,
            attention=self.kernel,
            packed=batch.packed,
            layout=None if self.forms.unpack_above is None else batch.layout,
            chunks=batch.chunks if self.arch.deltas else None,
            routes=batch.routes,
            counted=batch.counts,
            turns=None if batch.turns is None else jnp.moveaxis(batch.turns, 1, 0),
            inserts=self.inserts(params, batch),
            backend=self.backend,
        )
        sums = forwarded.sums
        if sums is not None and axis_size(CP) > 1:  # each device has those of its columns
            sums = jax.tree.map(lambda x: psum_forward(x, CP), sums)
        return forwarded.hidden, sums

    def inserts(self, params: Any, batch: MicroBatch) -> Inserts | None:
        """The features of the pictures of `batch`, made here of what is trained of the tower; None: none.

        In a function mapped over the mesh. With `cp` and `tp` each device makes all of its data shard's. Of a
        `cp` device the gradient is that of its own columns, which `gather_params` sums; of a `tp` device it
        is whole.
        """
        if batch.rows is None:
            return None
        vision = self.arch.vision
        assert vision is not None, "micro-batches with pictures are of a model with a tower"
        if batch.patches is not None:
            how: dict[str, Any] = {"dtype": jnp.dtype(self.dtype), "remat": self.remat != "none"}
            made = features(params["vision"], vision, batch.patches, **how, backend=self.backend)
            return Inserts(made, batch.rows)
        assert batch.features is not None, "pictures have features, or patches"
        if vision.trained == "projector":
            return Inserts(of_states(params["vision"], vision, batch.features), batch.rows)
        return Inserts(batch.features, batch.rows)


@dataclass(frozen=True)
class PolicySpec(ModelSpec):
    """A policy: log-probability and entropy of each scored token at a sampling temperature."""

    temperature: float = field(default=1.0, kw_only=True)

    tokens: ClassVar[type[Any]] = ScoredTokens

    @classmethod
    def of(cls, config: ModelConfig, policy: Policy, *, temperature: float) -> Self:
        """How the log-probabilities of `policy` are computed at `temperature`."""
        devices = policy.meshes.train, policy.backend
        return cls(
            policy.arch, config.dtype, config.remat, policy.attention, *devices, temperature=temperature
        )

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Log-probability and entropy [R, K], in nats."""
        scored, results = self.scored_logprobs(params, batch)
        return scored.predicted(results)

    @property
    def scorer(self) -> Head:
        """What makes logits at the sampling temperature."""
        settings: dict[str, Any] = {"dtype": jnp.dtype(self.dtype), "backend": self.backend}
        return Head(lambda rows, chunk: project(rows, self.arch, chunk, **settings), self.temperature)

    def tiling(self, num_live: jax.Array) -> dict[str, Any]:
        """How the logits of hidden states, of which `num_live` are asked for, are computed in tiles."""
        return {
            "tile": self.backend.tile(self.arch.vocab_size),
            "num_live": num_live,
            "vocabulary_axis": vocabulary_axis(self.arch),
        }

    def scored_logprobs(
        self, params: Any, batch: MicroBatch
    ) -> tuple[ScoredStates, tuple[jax.Array, jax.Array]]:
        """The states before the scored tokens, and log-probability and entropy of these tokens."""
        scored = self.scored_states(params, batch)
        targets = batch.targets.reshape(-1)[scored.order]
        kept = kept_here(batch, scored.order, self.arch)
        return scored, head_logprobs(params, self, scored.hidden, targets, scored.live, kept)

    def scored_states(self, params: Any, batch: MicroBatch) -> ScoredStates:
        """The states before the scored tokens."""
        hidden, routers = self.hidden(params, batch)
        axis = vocabulary_axis(self.arch)
        if axis is not None:  # each device has the gradient of its part of the vocabulary
            hidden = psum_backward(hidden, axis)
        places, here = predicted_here(batch, hidden)
        # Those the list does not fill, and other devices' go last, where the tiles past the live ones are not
        # computed.
        order = jnp.argsort(~here.reshape(-1), stable=True)
        states = (jnp.arange(len(hidden))[:, None] * hidden.shape[1] + places).reshape(-1)[order]
        return ScoredStates(hidden.reshape(-1, hidden.shape[-1])[states], order, here, routers)


class ScoredStates(NamedTuple):
    """N = R x K hidden states, those of scored tokens first."""

    hidden: jax.Array
    """[N, D]"""
    order: jax.Array
    """[N]: the place of each in the lists of scored tokens, one after another."""
    here: jax.Array
    """[R, K]: whether the token is scored, by this `cp` device."""
    routers: RouterSums | None
    """What `ModelSpec.hidden` has of routers."""

    @property
    def live(self) -> jax.Array:
        """How many of the states are those of scored tokens."""
        return self.here.sum()

    def in_place(self, result: jax.Array) -> jax.Array:
        """[R, K, ...] on every device of `cp`: the results [N, ...] of the states, at the places of their
        tokens."""
        placed = result[jnp.argsort(self.order)].reshape(*self.here.shape, *result.shape[1:])
        return of_all_columns(placed, self.here)

    def predicted(self, results: Iterable[jax.Array]) -> Predicted:
        """The results of the states in their places, and the sums of routers."""
        return Predicted(tuple(map(self.in_place, results)), self.routers)


@dataclass(frozen=True)
class DistilledSpec(PolicySpec):
    """A policy with its divergence from a teacher over the vocabulary, for each scored token.

    Its parameters are {"policy": those of the policy, "teacher": {the name of the output head: the head}};
    micro-batches have the teacher's hidden states. The words are those that both have.
    """

    teacher: PolicySpec = field(kw_only=True)
    kind: Divergence = field(kw_only=True)
    beta: float = field(default=0.5, kw_only=True)

    tokens = DistilledTokens

    def trained(self, tree: Any) -> Any:
        """The part of the policy's tree that is trained."""
        return super().trained(tree["policy"])

    def with_trained(self, params: Any, trained: Any) -> Any:
        """`params` with the trained part of the policy's replaced by `trained`."""
        return {**params, "policy": super().with_trained(params["policy"], trained)}

    @property
    def partition(self) -> Any:
        """The trees of partition specs of the policy's parameters and the teacher's output head."""
        name = output_head_name(self.teacher.arch)
        head = {name: partition(self.teacher.arch, self.mesh_shape)[name]}
        return {"policy": super().partition, "teacher": head}

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Log-probability, entropy and divergence in nats, and mass of the other words [R, K]."""
        policy, teacher = params["policy"], self.teacher
        scored, results = self.scored_logprobs(policy, batch)
        hidden = batch.teacher_hidden
        assert hidden is not None, "micro-batches have the teacher's hidden states"
        hidden = hidden.reshape(-1, hidden.shape[-1])[scored.order]
        own = output_head(policy, self.arch, scored.hidden, backend=self.backend)
        head, states = output_head(params["teacher"], teacher.arch, hidden, backend=teacher.backend)
        words = min(len(first_of(own[0])), len(first_of(head)))
        tiling = self.tiling(scored.live)
        divergence, log_total = token_divergences(
            *(self.scorer, jax.tree.map(lambda x: x[:words], own[0]), own[1]),
            *(teacher.scorer, head[:words], states),
            kind=self.kind,
            beta=self.beta,
            head_gradient=self.arch.lora is None,
            **tiling,
        )
        mass = jnp.zeros_like(divergence)
        # Static: where the vocabularies agree no further pass over the teacher's head is compiled.
        if len(head) > words:
            nothing = jnp.zeros((len(hidden), 0), jnp.int32)
            # Over `tp` both vocabularies have as many rows, so there is no axis to sum over here.
            given = teacher.scorer, head[words:], states, nothing
            outside = outcome_logits(*given, **{**tiling, "vocabulary_axis": None})[:, 0]
            mass = jax.lax.stop_gradient(jnp.exp(outside - jnp.logaddexp(outside, log_total)))
        return scored.predicted((*results, divergence, mass))


@dataclass(frozen=True)
class TopWordsSpec(PolicySpec):
    """A teacher: the sampled tokens' log-probabilities, and its `count` likeliest of `num_words` words."""

    count: int = field(kw_only=True)
    num_words: int = field(kw_only=True)

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Log-probability [R, K], words [R, K, k], log-probabilities of them and the rest [R, K, k + 1], and
        mass of the words that do not count [R, K]."""
        scored, (logprobs, _) = self.scored_logprobs(params, batch)
        head = output_head(params, self.arch, scored.hidden, backend=self.backend)
        given = self.scorer, *head, self.count
        words, logits, mass = top_words(*given, num_words=_counted(self), **self.tiling(scored.live))
        return scored.predicted((logprobs, words, jax.nn.log_softmax(logits), mass))


@dataclass(frozen=True)
class OutcomesSpec(PolicySpec):
    """A policy with its divergence from a teacher's top k words and the rest, for each scored token.

    Micro-batches have the columns `teacher_words` and `teacher_word_logprobs`. The words are the first
    `num_words`.
    """

    kind: Divergence = field(kw_only=True)
    num_words: int = field(kw_only=True)
    beta: float = field(default=0.5, kw_only=True)

    tokens = DistilledTokens

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Log-probability, entropy and divergence in nats, and mass of the teacher's words [R, K]."""
        scored, results = self.scored_logprobs(params, batch)
        words, log_q = (
            values.reshape(-1, values.shape[-1])[scored.order]
            for values in map(batch.columns.__getitem__, (TEACHER_WORDS, TEACHER_WORD_LOGPROBS))
        )
        logits = outcome_logits(
            self.scorer,
            *output_head(params, self.arch, scored.hidden, backend=self.backend),
            words,
            num_words=_counted(self),
            head_gradient=self.arch.lora is None,
            **self.tiling(scored.live),
        )
        # Past the live tokens there are no outcomes, and nothing may come of them but zeros.
        alive = jnp.arange(len(logits)) < scored.live
        logits = jnp.where(alive[:, None], logits, 0.0)
        divergence = outcome_divergence(self.kind, logits, log_q, beta=self.beta)
        mass = jax.lax.stop_gradient(jax.nn.softmax(logits)[:, :-1].sum(axis=-1))
        return scored.predicted((*results, jnp.where(alive, divergence, 0.0), mass))


@dataclass(frozen=True)
class ListedSpec(PolicySpec):
    """A policy: log-probabilities of words that are listed for each scored token, exact over all words.

    Micro-batches have the column `listed_words` [R, K, W]; their `targets` are not read.
    """

    tokens = ListedTokens
    reads = (LISTED_WORDS,)

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Log-probabilities [R, K, W] in nats, 0 where the list has no word."""
        scored, words = self.scored_states(params, batch), batch.columns[LISTED_WORDS]
        # Past the live tokens no logits are computed: no words are listed there.
        alive = jnp.arange(len(scored.order)) < scored.live
        words = jnp.where(alive[:, None], words.reshape(-1, words.shape[-1])[scored.order], NO_WORD)
        outcomes = outcome_logits(
            self.scorer,
            *output_head(params, self.arch, scored.hidden, backend=self.backend),
            words,
            head_gradient=self.arch.lora is None,
            **self.tiling(scored.live),
        )
        return scored.predicted([listed_logprobs(outcomes, words)])

    def predicted_shapes(self, batch: MicroBatch) -> list[tuple[int, ...]]:
        """[R, K, W]."""
        return [batch.columns[LISTED_WORDS].shape]


def _counted(spec: TopWordsSpec | OutcomesSpec) -> int | None:
    """The number of words that count, if they are not all."""
    return spec.num_words if spec.num_words < spec.arch.vocab_size else None


def predicted_here(batch: MicroBatch, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, K]: the columns of `hidden` that predict, and whether they are those of this `cp` device."""
    places = batch.predictors - axis_index(CP) * hidden.shape[1]
    here = batch.mask & (places >= 0) & (places < hidden.shape[1])
    return jnp.where(here, places, 0), here


def of_all_columns(values: jax.Array, here: jax.Array) -> jax.Array:
    """[R, K, ...] on every device of `cp`: the `values` of the one whose columns predict, `here` [R, K]."""
    return values if axis_size(CP) == 1 else psum_forward(of_all_tokens(values, here), CP)


def of_all_tokens(values: jax.Array, mask: jax.Array) -> jax.Array:
    """`values` [R, K, ...], 0 outside `mask` [R, K]."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (values.ndim - 2)), values, 0)


def head_logprobs(
    params: Any,
    policy: PolicySpec,
    hidden: jax.Array,
    targets: jax.Array,
    num_live: jax.Array,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [N] of `targets` [N], each after the hidden states [N, D] before it.

    The first `num_live` are computed, over the words that `kept` has bits for. In a function mapped over the
    mesh.
    """
    scorer, head = policy.scorer, output_head(params, policy.arch, hidden, backend=policy.backend)
    given = scorer.project, *head, targets, scorer.temperature
    return token_logprobs(
        *given, head_gradient=policy.arch.lora is None, kept=kept, **policy.tiling(num_live)
    )


def kept_here(batch: MicroBatch, order: jax.Array, arch: Architecture) -> jax.Array | None:
    """[N, ceil(V / 32)] uint32: bits of the words that scored tokens were drawn from, of V on this device.

    `order` [N] are the places of the tokens. None: all were drawn from all words. In a function mapped over
    the mesh.
    """
    if batch.kept_words is None:
        return None
    axis = vocabulary_axis(arch)
    num_words = arch.vocab_size if axis is None else arch.vocab_size // axis_size(axis)
    first = 0 if axis is None else axis_index(axis) * num_words
    bits = kept_bits(batch.kept_words.reshape(-1, batch.kept_words.shape[-1])[order], num_words, first)
    if batch.masks is None or batch.mask_ids is None:
        return bits
    buffers, count, width = batch.masks.shape
    masks = bits_from(batch.masks.reshape(-1, width), num_words, first)
    numbers = (batch.mask_ids + count * jnp.arange(buffers)[:, None]).reshape(-1)[order]
    has_mask = batch.mask_ids.reshape(-1)[order] >= 0
    return jnp.where(has_mask[:, None], masks[numbers], bits)


@dataclass(frozen=True)
class CriticSpec(ModelSpec):
    """A model whose head is `score`: the number it has for the state before each scored token.

    That is the value of a critic, or the score of a reward model (`predict.sequence_scores`).
    """

    tokens = ValuedTokens

    @classmethod
    def of(cls, config: ModelConfig, arch: Architecture, mesh: Mesh) -> Self:
        """How the values of the critic `arch` are computed on `mesh`; raises ValueError as the probes do."""
        kind = this_backend().kind
        attention = trusted_attention(config.attention, arch, platform=kind, dtype=config.dtype)
        # What `model.experts` names is for the policy's experts; a critic of another model may have none.
        backend = trusted_backend(config, arch) if arch.routes else this_backend()
        return cls(arch, config.dtype, config.remat, attention, mesh, backend)

    def predict(self, params: Any, batch: MicroBatch) -> Predicted:
        """Values [R, K] of the states in which the scored tokens were drawn."""
        hidden, routers = self.hidden(params, batch)
        places, here = predicted_here(batch, hidden)
        values = scores(params, self.arch, hidden)
        return Predicted((of_all_columns(jnp.take_along_axis(values, places, axis=1), here),), routers)
