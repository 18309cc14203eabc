"""The objective of reinforcement learning: policy loss, KL to the reference and entropy bonus per token.

Made by `learner.py` of its configuration, run by `gradient.py` on each micro-batch. The policy loss is one of
`ops/losses/`, or a user's own function of `ScoredTokens`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.algorithms import LOSSES
from quatrain.config.sections.update import SHARED_LOSS_ARGUMENTS, UpdateConfig
from quatrain.forward.table import TokenTable
from quatrain.ops.corrections import Correction, Rejections, behaviour_weights, rejected_tokens
from quatrain.ops.kl import KL_ESTIMATORS, MAX_LOG_RATIO, k2, k3
from quatrain.ops.losses import POLICY_LOSSES
from quatrain.ops.tokens import DistilledTokens, MiniBatchColumns, ScoredTokens, TokenLoss
from quatrain.update.distillation import Distillation
from quatrain.workers.user_code import find_function, first_parameter, own_arguments

SQUARES = "behaviour_weight_squares"
"""Mean of the squared weights, of which the learner makes the effective sample size."""

LOGGED = {
    *("policy_loss", "entropy", "ratio_mean", "ratio_max", "kl", "grad_norm", "learning_rate"),
    *("behaviour_weight_mean", "behaviour_weight_max", "behaviour_kl", "corrected_fraction", SQUARES),
    *("effective_sample_fraction", "optimizer_steps", "bad_steps", "skipped_steps", "compilations"),
    *("masked_sequences", "masked_groups", "dropped_fraction", "router_aux_loss"),
}
"""Metrics `update/…` of every loss, which one of the loss's own would replace. Not `sampler_kl`, which `dro`
logs: it is the same number."""


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss + KL to reference and sampler - entropy bonus, per token: a `gradient.Objective`."""

    name: str
    """The loss as the configuration has it, for errors."""
    loss: Callable[..., TokenLoss]
    arguments: tuple[tuple[str, Any], ...]
    on_policy: bool
    """Old log-probabilities are the current ones: a single optimizer step per rollout batch."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    correction: Correction | None = None
    correction_cap: float = 2.0
    correction_floor: float | None = None
    correction_level: str = "token"
    rejections: Rejections = ()
    rejected: str = "keep"
    distillation: Distillation | None = None
    sampler_kl_coef: float = 0.0
    penalises: bool = False
    """Whether the loss draws tokens to the sampler's log-probabilities, also those whose advantage is 0."""

    @classmethod
    def of(
        cls, config: UpdateConfig, *, on_policy: bool, distillation: Distillation | None = None
    ) -> PolicyObjective:
        """The objective of `config`.

        Raises ValueError for a loss that cannot be imported, and for arguments that it does not take.
        """
        name = f"policy loss {config.loss!r}"
        loss = find_function(config.loss, POLICY_LOSSES, "policy loss")
        arguments = own_arguments(
            loss,
            name,
            inputs=first_parameter(loss, name, "tokens"),
            shared={key: getattr(config, key) for key in SHARED_LOSS_ARGUMENTS},
            given=config.loss_args,
            key="update.loss_args",
        )
        _refuse_unused(config, name, loss)
        rules = sorted(config.reject.items())
        return cls(
            name,
            loss,
            tuple(sorted(arguments.items())),
            on_policy,
            config.kl_coef,
            config.kl_estimator,
            config.entropy_coef,
            None if config.correction is None or config.correction == "none" else config.correction,
            config.correction_cap,
            config.correction_floor,
            config.correction_level,
            tuple((name, tuple(b) if isinstance(b, list | tuple) else (b,)) for name, b in rules),
            config.rejected,
            distillation,
            config.sampler_kl_coef,
            config.loss in LOSSES and LOSSES[config.loss].without_signal,
        )

    @property
    def without_signal(self) -> bool:
        """Whether tokens whose advantage is 0 have a gradient too."""
        return bool(self.kl_coef or self.sampler_kl_coef or self.entropy_coef or self.penalises)

    @property
    def mini_batch_columns(self) -> MiniBatchColumns | None:
        """What computes the loss's columns from a whole mini-batch; None for a loss without such columns.

        A function `(logprobs, advantages, mask, rng, old_logprobs) -> columns`: the one that
        `with_mini_batch_columns` gave the loss (`ops/tokens.py`), with what it names of the loss's arguments.
        """
        function = getattr(self.loss, "mini_batch_columns", None)
        if function is None:
            return None
        parameters = inspect.signature(self.loss).parameters.values()
        arguments = {p.name: p.default for p in parameters} | dict(self.arguments)
        names = inspect.signature(function).parameters
        named = {name: arguments[name] for name in names if name in arguments}

        def columns(*inputs: Any, old_logprobs: np.ndarray) -> dict[str, np.ndarray]:
            old = {"old_logprobs": old_logprobs} if "old_logprobs" in names else {}
            return function(*inputs, **named, **old)

        return columns

    def __call__(self, tokens: ScoredTokens) -> TokenLoss:
        """Token loss [R, K] and its metrics under the names they are logged with."""
        logprobs, entropy = tokens.logprobs, tokens.entropy
        if self.on_policy:
            old = jax.lax.stop_gradient(logprobs)
            tokens = replace(tokens, columns={**tokens.columns, "old_logprobs": old})
        teacher: dict[str, jax.Array] = {}
        weighted = None
        if self.distillation is not None:
            advantages, teacher = self.distillation.advantages(tokens)
            tokens = replace(tokens, columns={**tokens.columns, "advantages": advantages})
            if self.distillation.over_words:
                weighted, of_words = self.distillation.term(tokens)
                teacher |= of_words
        policy = self._policy_loss(tokens)
        if self.correction is not None or self.rejections:
            policy = self._corrected(policy, tokens)
        if policy.weighted is not None:
            weighted = policy.weighted if weighted is None else weighted + policy.weighted
        loss = policy.loss - self.entropy_coef * entropy
        ratio = jnp.exp(jnp.clip(logprobs - tokens.old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        gap = jnp.abs(logprobs - tokens.rollout_logprobs)
        means = {"policy_loss": policy.loss, "entropy": entropy, "ratio_mean": ratio}
        means = {f"update/{name}": values for name, values in {**means, **policy.means}.items()}
        peaks = {f"update/{name}": values for name, values in {"ratio_max": ratio, **policy.peaks}.items()}
        means |= teacher
        means["rollout/logprob_diff_mean"] = peaks["rollout/logprob_diff_max"] = gap
        if self.kl_coef:
            kl = KL_ESTIMATORS[self.kl_estimator](logprobs, tokens.ref_logprobs)
            loss = loss + self.kl_coef * kl
            means["update/kl"] = kl
        if self.sampler_kl_coef:
            means["update/sampler_kl"] = sampler_kl = k2(logprobs, tokens.rollout_logprobs)
            loss = loss + self.sampler_kl_coef * sampler_kl
        return TokenLoss(loss, means, peaks, weighted)

    def advantages_on_host(self, table: TokenTable, old_logprobs: np.ndarray) -> np.ndarray:
        """[B, T] float32: the advantages of a table's tokens, with the teacher's part of them."""
        if self.distillation is None:
            return table.columns["advantages"]
        return np.asarray(self.distillation.advantages(_whole(table, old_logprobs))[0])

    def rejected_on_host(self, table: TokenTable) -> np.ndarray:
        """[B, T] bool: the tokens of a table with old log-probabilities that a rule rejects."""
        tokens = _whole(table, table.columns["old_logprobs"])
        advantages = jnp.asarray(self.advantages_on_host(table, table.columns["old_logprobs"]))
        tokens = replace(tokens, columns={**tokens.columns, "advantages": advantages})
        masks = rejected_tokens(tokens, self.rejections, before=True).values()
        return np.logical_or.reduce([np.asarray(mask) for mask in masks]) & table.completion_mask

    def _policy_loss(self, tokens: ScoredTokens) -> TokenLoss:
        result = self.loss(tokens, **dict(self.arguments))
        if not isinstance(result, TokenLoss):
            raise ValueError(
                f"{self.name} must return a TokenLoss; it returned {type(result).__name__}; "
                "wrap the token losses: TokenLoss(loss)"
            )
        logged = [*result.means.items(), *result.peaks.items()]
        names = [name for name, _ in logged]
        if taken := [name for name in names if name in LOGGED or names.count(name) > 1]:
            raise ValueError(
                f"{self.name} must have names of its own for what it logs, each once; got {taken[0]!r}, "
                "which is logged already; rename it"
            )
        more = [] if result.weighted is None else [("weighted", result.weighted)]
        for name, values in [("loss", result.loss), *more, *logged]:
            if jnp.shape(values) != tokens.mask.shape:
                raise ValueError(
                    f"{self.name} must return one number per token, shape {tokens.mask.shape}; "
                    f"{name!r} has shape {jnp.shape(values)}"
                )
        return result

    def _corrected(self, policy: TokenLoss, tokens: ScoredTokens) -> TokenLoss:
        """`policy` with each token's loss weighted for the difference between policy and sampler."""
        old, behaviour = tokens.old_logprobs, tokens.rollout_logprobs
        means, peaks, weights = dict(policy.means), dict(policy.peaks), jnp.ones(tokens.mask.shape)
        if self.correction is not None:
            cap, floor = self.correction_cap, self.correction_floor
            by_sequence = self.correction_level == "sequence"
            gaps = tokens.sequence_sum(old - behaviour) if by_sequence else old - behaviour
            weights, changed = behaviour_weights(gaps, correction=self.correction, cap=cap, floor=floor)
            means |= {
                "behaviour_weight_mean": weights,
                "corrected_fraction": changed,
                "behaviour_kl": jax.lax.stop_gradient(k3(behaviour, old)),
            }
        masks = rejected_tokens(tokens, self.rejections)
        if self.rejected == "keep":
            for name, mask in masks.items():
                means[f"rejected_fraction/{name}"] = mask.astype(jnp.float32)
                weights = jnp.where(mask, 0.0, weights)
        if masks or self.correction_level == "sequence":
            peaks["behaviour_weight_max"] = weights
            means[SQUARES] = jnp.square(weights)
            means["behaviour_weight_mean"] = weights
        return replace(policy, loss=weights * policy.loss, means=means, peaks=peaks)

    def check(self) -> frozenset[str]:
        """Trace the objective on abstract tokens, as a run would; returns the columns that the loss reads.

        Raises ValueError where the loss fails: what it asks for and does not have, what it returns in another
        shape, and what it raises is an error before anything is computed. The names of the loss's own columns
        come from a mini-batch of zeros.
        """
        read: set[str] = set()

        def traced(tokens: ScoredTokens) -> TokenLoss:
            self._policy_loss(replace(tokens, columns=_ReadColumns(tokens.columns, read)))
            return self(tokens)

        floats: Any = jax.ShapeDtypeStruct((2, 8), jnp.float32)
        names = ("advantages", "rollout_logprobs", *(() if self.on_policy else ("old_logprobs",)))
        names += ("ref_logprobs",) if self.kl_coef else ()
        names += self.distillation.names if self.distillation else ()
        columns = dict.fromkeys(names, floats)
        mask: Any = jax.ShapeDtypeStruct((2, 8), jnp.bool_)
        ids: Any = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        try:
            columns |= dict.fromkeys(self._own_columns(), floats)
            if self.on_policy:  # as `__call__` adds them
                columns["old_logprobs"] = floats
            tokens = ScoredTokens(floats, floats, mask, ids, columns)
            if self.distillation is not None and self.distillation.over_words:
                tokens = DistilledTokens(floats, floats, mask, ids, columns, floats, floats)
            jax.eval_shape(traced, tokens)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be used: {error}") from error
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        return frozenset(read)

    def _own_columns(self) -> dict[str, np.ndarray]:
        """The columns that the loss computes from a mini-batch of zeros."""
        if self.mini_batch_columns is None:
            return {}
        zeros = np.zeros((2, 8), np.float32)
        rng = np.random.default_rng(0)
        columns = self.mini_batch_columns(zeros, zeros, zeros == 0, rng, old_logprobs=zeros)
        for name, values in columns.items():
            if np.shape(values) != zeros.shape or np.asarray(values).dtype != np.float32:
                raise ValueError(
                    f"the columns of a mini-batch must be float32 of its shape {zeros.shape}; {name!r} is "
                    f"{np.asarray(values).dtype} of shape {np.shape(values)}"
                )
        return columns


def _whole(table: TokenTable, old_logprobs: np.ndarray) -> ScoredTokens:
    """The completion tokens of a table, of which each row is a sequence; without the policy's predictions."""
    shape = table.completion_mask.shape
    columns = {name: jnp.asarray(values) for name, values in table.columns.items()}
    columns["old_logprobs"] = jnp.asarray(old_logprobs)
    mask, ids = jnp.asarray(table.completion_mask), jnp.zeros(shape, jnp.int32)
    return ScoredTokens(jnp.zeros(shape), jnp.zeros(shape), mask, ids, columns)


class _ReadColumns(dict[str, jax.Array]):
    """Columns that note in `read` which of them are asked for."""

    def __init__(self, columns: Mapping[str, jax.Array], read: set[str]):
        super().__init__(columns)
        self._read = read

    def __getitem__(self, name: str) -> jax.Array:
        self._read.add(name)
        return super().__getitem__(name)


def _refuse_unused(config: UpdateConfig, name: str, loss: Callable[..., TokenLoss]) -> None:
    """Raises ValueError where a key of the update was changed that the loss does not read."""
    parameters = inspect.signature(loss).parameters
    for key in SHARED_LOSS_ARGUMENTS:
        value, default = getattr(config, key), UpdateConfig.model_fields[key].default
        own = parameters[key].default if key in parameters else None
        if value == default or (key in parameters and own is inspect.Parameter.empty):
            continue
        remedy = f"; set update.loss_args.{key}, whose default is {own}" if key in parameters else ""
        raise ValueError(
            f"update.{key} is {value}, which {name} does not take; leave it at its default ({default})"
            f"{remedy}"
        )
