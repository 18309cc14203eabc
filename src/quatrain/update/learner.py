"""Line 4 of the stanza: advantages to new weights.

Data flow: `AdvantagedBatch` -> mini-batches of whole groups -> micro-batches -> exact gradient ->
optimizer -> `TrainState`. Log-probabilities and values come from the pass in `forward/`, before the
advantages (`compute_logprobs_and_values`) where these depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import jax
import numpy as np

from quatrain.config.rules import FILTERS
from quatrain.config.schema import Config, LogprobConfig, OptimizerConfig, RewardConfig, UpdateConfig
from quatrain.data.policy import Policy
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.feature_store import FeatureStore
from quatrain.models.lora import adapters_of, has_adapters, with_trained, without_adapters
from quatrain.ops.kl import adapted_kl_coef
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import check_held, to_memory
from quatrain.types.batches import AdvantagedBatch, PromptPosition, RewardedBatch, RolloutBatch, brief
from quatrain.types.metrics import Metric
from quatrain.update.critic import Critic
from quatrain.update.distillation import Distillation, over_taught
from quatrain.update.objective import SQUARES, PolicyObjective
from quatrain.update.teacher import Teacher, WordTeacher
from quatrain.update.teacher_scores import TeacherScores, TopWords, model_scores
from quatrain.update.trainer import ModelState, StepTotals, Trainer, mini_batches_of_step

BLIND_SEQUENCES = 8
"""Sequences of the first training step that are also read with grey in the place of their pictures."""
LOSS_STREAM = 1
"""Separates the random numbers of a loss from those that draw mini-batches."""


@dataclass(frozen=True)
class TrainState(ModelState):
    """What training changes: the state of the policy, and of the critic if there is one.

    `train_step` counts finished batches.
    """

    train_step: int = 0
    critic: ModelState | None = None
    reward_kl_coef: float = 0.0
    """The coefficient of the KL in the reward, which `reward.kl_target` adapts."""
    position: PromptPosition = field(default_factory=PromptPosition)
    """Where the next training step begins in the stream of prompts; the training loop moves it."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    __repr__ = brief

    @property
    def models(self) -> list[ModelState]:
        """The states of the policy and of the critic."""
        return [self] if self.critic is None else [self, self.critic]


@dataclass(frozen=True)
class KLReward:
    """KL to the reference in the reward: its coefficient at the start, which adapts over `horizon` sequences
    so that the KL comes to `target` nats per token; None: it is fixed."""

    coef: float
    target: float | None
    horizon: int

    @classmethod
    def of(cls, config: RewardConfig) -> Self | None:
        """That of `reward`; None if it has none."""
        return cls(config.kl_coef, config.kl_target, config.kl_horizon) if config.kl_coef else None


class TooManyBadSteps(RuntimeError):
    """`update.max_bad_steps` optimizer steps in a row had a non-finite loss or gradient.

    `state` is that of the training step given up, metrics included; `batch` is what it trained on.
    """

    def __init__(
        self,
        state: TrainState,
        batch: Any,
        limit: int,
        remedy: str = "lower optimizer.learning_rate or look at the rewards and samples",
    ):
        super().__init__(
            f"update.max_bad_steps={limit}: {limit} optimizer steps in a row had a non-finite loss or "
            f"gradient and were not applied; {remedy}"
        )
        self.state, self.batch = state, batch


class Learner:
    """Owns the optimizer and the frozen reference; everything that changes is in the `TrainState`.

    `total_steps` and `optimizer_memory` are those of `Trainer`, `max_new_tokens` is the rollout's.
    `reference` are the parameters of the reference policy, which must be set before the first step if
    `update.kl_coef` is not 0 or with `kl_reward`; those of a policy with adapters may have none. They are
    used on the devices that they lie on, and may be kept in host memory. The policy's parameters are kept in
    `policy_memory` while they are neither trained nor compute log-probabilities. With `logs_logprobs`,
    `compute_logprobs_and_values` returns the policy's log-probabilities, which samples show. With
    `distillation`, batches have a teacher's scores (`Teacher.score`), of the first `num_words` words of the
    policy's, or the update computes the divergence from a `teacher` over all words. `store` has the pictures
    of batches; without it they may have none. `needs_kept`: batches have the words that each token was drawn
    from.
    """

    def __init__(
        self,
        policy: PolicySpec,
        update: UpdateConfig,
        logprob: LogprobConfig,
        optimizer: OptimizerConfig,
        *,
        max_new_tokens: int,
        total_steps: int,
        seed: int,
        reference: Any = None,
        critic: Critic | None = None,
        kl_reward: KLReward | None = None,
        distillation: Distillation | None = None,
        teacher: WordTeacher | None = None,
        num_words: int | None = None,
        optimizer_memory: Literal["device", "host"] = "device",
        policy_memory: Literal["device", "host"] = "device",
        logs_logprobs: bool = False,
        store: FeatureStore | None = None,
        needs_kept: bool = False,
    ):
        if update.router_aux_coef and policy.arch.routes is None:
            raise ValueError(
                f"update.router_aux_coef must be 0 for a model without experts; got "
                f"{update.router_aux_coef:g} and a model ({policy.arch.family}) that has none; set 0"
            )
        self.mini_batch_size, self.loss_aggregation = update.mini_batch_size, update.loss_aggregation
        self.objective = PolicyObjective.of(update, on_policy=True, distillation=distillation)
        # A user's loss is traced here, before anything is sampled: an error in it must not cost a rollout.
        read = self.objective.check()
        self.reads_sampler = "rollout_logprobs" in read
        """Whether the policy loss itself reads the sampler's log-probabilities."""
        compares = "old_logprobs" in read or self.objective.penalises
        to_sampler = update.old_logprobs == "rollout" and compares
        self.corrects_staleness = to_sampler or self.objective.correction is not None
        """Whether the policy loss takes into account which weights sampled a token."""
        self.policy, self.config, self.seed, self.max_new_tokens = policy, update, seed, max_new_tokens
        shared: dict[str, Any] = {"share_prompts": update.shares_prompts, "store": store}
        self.logprob_planner = policy.planner(logprob, **shared)
        self.trainer = Trainer(
            policy if distillation is None else distillation.compared(policy, num_words),
            policy.planner(update, **shared),
            optimizer,
            total_steps=total_steps,
            seed=seed,
            optimizer_memory=optimizer_memory,
            teacher=teacher,
        )
        self.policy_memory = policy_memory
        self.reference, self.critic, self.kl_reward = reference, critic, kl_reward
        self.logs_logprobs, self.store, self.needs_kept = logs_logprobs, store, needs_kept
        if store is not None:
            store.follow_steps()

    @classmethod
    def of(
        cls,
        config: Config,
        policy: Policy,
        *,
        steps: int,
        reference: Any = None,
        teacher: Teacher | WordTeacher | None = None,
    ) -> Self:
        """The update stage of a run of `steps` training steps, with its critic.

        Raises ValueError for a loss that cannot be imported, or that does not fit how the run samples.
        """
        rollout = config.rollout
        policy_steps = max(steps - config.critic.warmup_steps, 1)
        learner = cls(
            PolicySpec.of(config.model, policy, temperature=rollout.temperature or 1.0),
            config.update,
            config.logprob,
            config.optimizer,
            max_new_tokens=rollout.max_new_tokens,
            total_steps=policy_steps * config.optimizer_steps(config.update),
            seed=config.seed,
            reference=reference,
            critic=Critic.of(config, policy, steps=steps),
            kl_reward=KLReward.of(config.reward),
            distillation=Distillation.of(config.distill, steps),
            teacher=teacher if isinstance(teacher, WordTeacher) else None,
            num_words=teacher.top.num_words if isinstance(teacher, Teacher) and teacher.top else None,
            optimizer_memory="host" if config.offload.optimizer else "device",
            policy_memory="host" if config.offload.policy else "device",
            logs_logprobs=config.logging.sample_tokens,
            store=policy.store,
            needs_kept=rollout.replays and rollout.has_filters,
        )
        if rollout.max_staleness and not learner.corrects_staleness:
            raise ValueError(
                f"rollout.max_staleness {rollout.max_staleness} needs a correction for older weights, and "
                f"update.loss {config.update.loss} does not read old log-probabilities, so that "
                "update.old_logprobs rollout corrects nothing; set update.old_logprobs to auto and "
                "update.correction to truncate or mask"
            )
        if learner.reads_sampler and not rollout.trains_what_is_sampled:
            raise ValueError(
                f"update.loss {config.update.loss} reads the sampler's log-probabilities, which must be "
                f"those of the policy's own distribution; {FILTERS} make the sampler draw from another; "
                "unset these, or take another loss"
            )
        return learner

    def init(self, params: Any, critic_params: Any = None) -> TrainState:
        """A state at step 0; the parameters belong to the learner from here on (their buffers are donated).

        Raises ValueError if there is a critic, and no `critic_params`.
        """
        # Buffers are donated: arrays of a state that was trained from would fail deep within XLA, without
        # their name.
        check_held(params, "the parameters for update.init", "load them again")
        if self.critic is not None and critic_params is None:
            raise ValueError(
                "a critic needs parameters of its own, and update.init got none; "
                "call update.init(params, critic_params)"
            )
        policy = self.trainer.init(params)
        return TrainState(
            to_memory(self.policy_memory, policy.params),
            policy.opt_state,
            critic=self.critic.init(critic_params) if self.critic else None,
            reward_kl_coef=self.kl_reward.coef if self.kl_reward else 0.0,
        )

    def abstract(self, params: Any, critic_params: Any = None) -> TrainState:
        """The state of `init` as `ShapeDtypeStruct`s, for parameters that are some."""
        policy = self.trainer.abstract(params)
        critic = None if self.critic is None else self.critic.trainer.abstract(critic_params)
        return TrainState(policy.params, policy.opt_state, critic=critic)

    @property
    def needs_logprobs_and_values(self) -> bool:
        """Whether advantages need values or KL in the reward, or samples show log-probabilities."""
        return self.critic is not None or self.kl_reward is not None or self.logs_logprobs

    def compute_logprobs_and_values(self, state: TrainState, rewarded: RewardedBatch) -> RewardedBatch:
        """`rewarded` with the critic's values and with the rewards of single tokens, where configured."""
        _check_held(state)
        rollouts = rewarded.rollouts
        if self.critic is not None:
            assert state.critic is not None
            rewarded = replace(rewarded, values=self.critic.values(state.critic, TokenTable.of(rollouts)))
        logprobs = dict(rewarded.token_logprobs)
        if self.logs_logprobs:
            logprobs["trainer_logprobs"] = self._logprobs(state.params, self._table(rollouts))
        if self.kl_reward is None:
            return replace(rewarded, token_logprobs=logprobs)
        # Kept in the batch: the update uses them again, so that a step makes one pass of each model, not two.
        logprobs["old_logprobs"] = self._old_logprobs(state.params, rollouts, logprobs)
        logprobs["ref_logprobs"] = self._reference_logprobs(state.params, rollouts)
        kl = np.where(rollouts.completion_mask, logprobs["old_logprobs"] - logprobs["ref_logprobs"], 0)
        episodes = rollouts.episodes
        lengths = episodes.total(rollouts.completion_lengths)
        # An episode without a sampled token counts, with a KL of 0: its divisor must not be 0.
        per_token = episodes.total(kl.sum(axis=1)) / np.maximum(lengths, 1)
        token_rewards = (-state.reward_kl_coef * kl).astype(np.float32)
        metrics = {
            **rewarded.metrics,
            "reward/kl": Metric(float(per_token.sum()), len(per_token)),
            "reward/kl_coef": Metric(state.reward_kl_coef),
            "reward/kl_penalty": Metric(float(-token_rewards.sum()), len(per_token)),
        }
        return replace(rewarded, token_rewards=token_rewards, token_logprobs=logprobs, metrics=metrics)

    def step(self, state: TrainState, batch: AdvantagedBatch) -> TrainState:
        """All optimizer steps of one rollout batch: epochs x mini-batches, of critic and policy.

        Donates `state`'s arrays. The policy rests during the first `critic.warmup_steps` training steps. An
        optimizer step with a non-finite loss or gradient is counted and not applied; so is one of the policy
        in which no token has a signal. Raises ValueError for tokens that other weights than those of `state`
        sampled, if these are not corrected (`corrects_staleness`). Raises TooManyBadSteps, carrying state and
        batch, after `max_bad_steps` of the former in a row.
        """
        _check_held(state)
        stale = self._num_stale(state, batch.rollouts)
        blind = {} if state.train_step else self._blind_gap(state, batch.rollouts)
        # Counted around the whole step: after the first steps it should be 0, else shapes vary and a run
        # compiles for ever.
        compilations, began = num_compilations(), time.perf_counter()
        totals, critic_totals = StepTotals(), StepTotals()
        metrics: dict[str, Metric] = {}
        resting = False
        # The critic first: its parameters may have to leave the devices before those of the policy come.
        if self.critic is not None:
            state, metrics = self._critic_step(self.critic, state, batch, critic_totals)
            metrics["time/critic_s"] = Metric(time.perf_counter() - began)
            resting = state.train_step < self.critic.warmup_steps
        if not resting:
            state, policy_metrics = self._policy_step(state, batch, totals, fresh=not stale)
            metrics |= policy_metrics
        seconds = time.perf_counter() - began
        trained_tokens = float(batch.rollouts.attention_mask.sum()) * self.config.epochs
        metrics |= {
            "update/compilations": Metric(num_compilations() - compilations, reduction="sum"),
            "throughput/update_tokens_per_s": Metric(trained_tokens / seconds),
            **blind,
            **({} if self.store is None else self.store.end_step()),
        }
        if self.config.mask_truncated:
            masked = int((batch.rollouts.finish_reason == "length").sum())
            metrics["update/masked_sequences"] = Metric(masked, reduction="sum")
        if stale:  # the difference is that of the weights, not of sampler and trainer
            metrics = {k: metric for k, metric in metrics.items() if not k.startswith("rollout/logprob_diff")}
        # Before the error below, whose state is saved: a run that is given up still says what its last step
        # was.
        state = replace(state, metrics=metrics)
        if (totals.bad or critic_totals.bad) and self._too_many_bad_steps(state):
            raise TooManyBadSteps(state, batch, self.config.max_bad_steps)
        # From the KL that was rewarded in this step: the coefficient follows one step behind.
        coef = self._next_kl_coef(state, batch)
        return replace(state, train_step=state.train_step + 1, reward_kl_coef=coef)

    def _num_stale(self, state: TrainState, rollouts: RolloutBatch) -> int:
        """Number of tokens that other weights sampled; raises ValueError if they are not corrected."""
        versions = rollouts.policy_version[rollouts.completion_mask]
        # Versions count applied optimizer steps, not training steps: a step that was not applied changes no
        # weights.
        stale = versions[versions != state.step]
        if stale.size and not self.corrects_staleness:
            raise ValueError(
                "tokens must be sampled from the weights that are trained, unless the difference is "
                f"corrected: {len(stale)} of {len(versions)} tokens have policy_version {stale.min()} to "
                f"{stale.max()}, and the training step begins with version {state.step}; call "
                "sync_weights(state.params, state.step) before each rollout, or set update.correction to "
                "truncate or mask (or update.old_logprobs to rollout, for a loss with a ratio)"
            )
        return len(stale)

    def _policy_step(
        self, state: TrainState, batch: AdvantagedBatch, totals: StepTotals, *, fresh: bool
    ) -> tuple[TrainState, dict[str, Metric]]:
        began = time.perf_counter()
        # Kept by name for adapters: the base waits in its memory and is not moved back, only what was trained
        # is.
        waiting = state.params
        state = replace(state, params=to_memory("device", waiting))
        # Drawn from the number of the training step alone, so that a resumed run trains on the same mini-
        # batches.
        mini_batches = mini_batches_of_step(
            batch.rollouts.group_ids,
            self.mini_batch_size,
            epochs=self.config.epochs,
            seed=self.seed,
            train_step=state.train_step,
            resting_steps=self.critic.warmup_steps if self.critic else 0,
        )
        # With one mini-batch the old policy is the one that is trained: its ratio is 1 without another pass.
        on_policy = self.config.old_logprobs == "auto" and len(mini_batches) == 1
        # Before mini-batches are taken, so that the weights of their tokens count only what is trained on.
        table = self._without_zero_signal(self._policy_table(state, batch, on_policy), totals)
        table = self._without_rejected(table, totals)
        if (teacher := self.trainer.teacher) is not None:
            unread = batch.rollouts.completion_mask.any(axis=1) & (batch.rollouts.lengths > teacher.longest)
            totals.combine({"distill/no_teacher": Metric(int(unread.sum()), reduction="sum")})
        prepared = time.perf_counter()
        objective = replace(self.objective, on_policy=on_policy)
        for place, rows in mini_batches:
            mini = table.take(rows)
            signal = self._signal(mini)[mini.completion_mask].any()
            signal = signal or objective.without_signal or self.config.router_aux_coef
            # A step without signal would still move the weights by momentum and weight decay.
            if not signal or not mini.completion_mask.any():
                totals.skipped += 1
                continue
            # Statistics of a mini-batch must exist before it is cut: a micro-batch's own would depend on the
            # cut.
            mini = self._with_mini_batch_columns(state, mini, totals, fresh=fresh)
            # The weights of tokens are made of the whole mini-batch: from here on no sum knows how it is cut.
            mini = mini.weighted(self.loss_aggregation, self.max_new_tokens)
            if self.objective.distillation is not None:
                mini = self.objective.distillation.weighted(mini, self.loss_aggregation, self.max_new_tokens)
            if self.config.router_aux_coef:
                assert self.policy.arch.routes is not None
                mini = mini.balanced(self.config.router_aux_coef, self.policy.arch.routes.num_experts)
            state = self.trainer.step(state, mini, objective, totals, place)
            # The rest of the batch would fail as well, and the state that is kept is the last good one.
            if totals.bad and self._too_many_bad_steps(state):
                break
        # A base under adapters goes on waiting where it is: it is not copied again.
        trained = to_memory(self.policy_memory, self.policy.trained(state.params))
        base = state.params if self.policy_memory == "device" else waiting
        state = replace(state, params=self.policy.with_trained(base, trained))
        # Once all steps are combined: the counts of tokens with a teacher add up only then.
        totals.metrics = over_taught(totals.metrics)
        if squares := totals.metrics.pop(f"update/{SQUARES}", None):
            mean = totals.metrics["update/behaviour_weight_mean"].result()
            effective = mean**2 / squares.result() if squares.result() else 0.0
            totals.combine({"update/effective_sample_fraction": Metric(effective)})
        return state, totals.metrics | totals.load_metrics | {
            "update/learning_rate": Metric(self.trainer.optimizer.learning_rate(place)),
            "update/optimizer_steps": Metric(totals.applied, reduction="sum"),
            "update/bad_steps": Metric(totals.bad, reduction="sum"),
            "update/skipped_steps": Metric(totals.skipped, reduction="sum"),
            "time/update_logprobs_s": Metric(prepared - began),
            "time/shard_s": Metric(totals.shard_s),
        }

    def _with_mini_batch_columns(
        self, state: TrainState, mini: TokenTable, totals: StepTotals, *, fresh: bool
    ) -> TokenTable:
        """`mini` with the columns that the loss computes from a whole mini-batch, before it is cut.

        `fresh`: whether the weights at the start of the training step have sampled all tokens.
        """
        columns_of = self.objective.mini_batch_columns
        if columns_of is None:
            return mini
        number = totals.applied + totals.bad + totals.skipped
        old = current = mini.columns.get("old_logprobs")
        # After an applied step the policy is another than the one that the old log-probabilities are of.
        if current is None or self.config.old_logprobs == "rollout" or totals.applied:
            current = predict_tokens(state.params, mini, model=self.policy, planner=self.logprob_planner)
        if old is None or (fresh and not totals.applied):
            old = current  # what the two differ by is rounding
        # Of the place alone: a resumed run draws what the uninterrupted one does.
        rng = np.random.default_rng([self.seed, state.train_step, number, LOSS_STREAM])
        advantages = self.objective.advantages_on_host(mini, old)
        inputs = current, advantages, mini.completion_mask, rng
        return mini.with_columns(**columns_of(*inputs, old_logprobs=old))

    def _critic_step(
        self, critic: Critic, state: TrainState, batch: AdvantagedBatch, totals: StepTotals
    ) -> tuple[TrainState, dict[str, Metric]]:
        assert state.critic is not None
        values, returns = batch.rewarded.values, batch.returns
        if values is None or returns is None:
            missing = "values: call compute_logprobs_and_values before the advantages are estimated"
            if values is not None:
                missing = "returns: return TokenAdvantages(advantages, returns) from the estimator"
            raise ValueError(f"the critic is trained on values and returns; the batch has no {missing}")
        table = self._without_truncated(TokenTable.of(batch.rollouts), batch.rollouts)
        table = table.with_columns(old_values=values, returns=returns)
        limit = self.config.max_bad_steps
        trained, metrics = critic.step(
            state.critic, table, totals, train_step=state.train_step, max_bad_steps=limit
        )
        return replace(state, critic=trained), metrics

    def _too_many_bad_steps(self, state: TrainState) -> bool:
        return any(model.bad_steps >= self.config.max_bad_steps for model in state.models)

    def _next_kl_coef(self, state: TrainState, batch: AdvantagedBatch) -> float:
        if self.kl_reward is None or self.kl_reward.target is None:
            return state.reward_kl_coef
        return adapted_kl_coef(
            state.reward_kl_coef,
            batch.rewarded.metrics["reward/kl"].result(),
            target=self.kl_reward.target,
            num_sequences=len(batch.rollouts.episodes.first_rows),
            horizon=self.kl_reward.horizon,
        )

    def _policy_table(self, state: TrainState, batch: AdvantagedBatch, on_policy: bool) -> TokenTable:
        """The table with the columns that the objective reads; what was computed before is used again."""
        params, rollouts, known = state.params, batch.rollouts, batch.rewarded.token_logprobs
        columns = {"advantages": batch.advantages, "rollout_logprobs": rollouts.rollout_logprobs}
        if not on_policy:
            columns["old_logprobs"] = self._old_logprobs(params, rollouts, known)
        if self.config.kl_coef:
            ref = known.get("ref_logprobs")
            columns["ref_logprobs"] = self._reference_logprobs(params, rollouts) if ref is None else ref
        if self.objective.distillation is not None:
            longest = self.trainer.teacher.longest if self.trainer.teacher else None
            columns |= self.objective.distillation.columns(batch.rewarded, state.train_step, longest)
        return self._without_truncated(self._table(rollouts), rollouts).with_columns(**columns)

    def _table(self, rollouts: RolloutBatch) -> TokenTable:
        if self.needs_kept:
            sampled = rollouts.completion_mask
            without = sampled if rollouts.kept is None else sampled & ~rollouts.kept.has_set
            if without.any():
                raise ValueError(
                    "rollout.top_p, top_k or min_p filter, and the update needs the words that each token "
                    f"was drawn from; the sampler has recorded none of {int(without.sum())} of "
                    f"{int(sampled.sum())} tokens; take a sampler that does, or set rollout.replay_mask to "
                    "false"
                )
        return TokenTable.of_policy(rollouts, self.policy.arch)

    def _without_truncated(self, table: TokenTable, rollouts: RolloutBatch) -> TokenTable:
        """The `table` of `rollouts`, with the tokens that are trained on as the completion mask."""
        trained = (rollouts.finish_reason != "length") | (not self.config.mask_truncated)
        return replace(table, completion_mask=table.completion_mask & trained[:, None])

    def _signal(self, table: TokenTable) -> np.ndarray:
        """[B, T] bool: the tokens with an advantage other than 0 that is trained on, or with a teacher."""
        signal, distillation = table.columns["advantages"] != 0, self.objective.distillation
        if distillation is None:
            return signal
        return (signal & (distillation.rl_weight != 0)) | (table.columns["teacher_weights"] > 0)

    def _without_zero_signal(self, table: TokenTable, totals: StepTotals) -> TokenTable:
        """`table` without the completion tokens of groups without a signal, if configured."""
        if not self.config.mask_zero_signal:
            return table
        assert table.group_ids is not None
        # By group and not by row: a row of advantage 0 in a group with a signal still counts in the mean over
        # tokens.
        _, groups = np.unique(table.group_ids, return_inverse=True)
        signal = np.bincount(groups, self._signal(table).any(axis=1)) > 0
        totals.combine({"update/masked_groups": Metric(int((~signal).sum()), reduction="sum")})
        return replace(table, completion_mask=table.completion_mask & signal[groups][:, None])

    def _without_rejected(self, table: TokenTable, totals: StepTotals) -> TokenTable:
        """`table` without the completion tokens that a rule of `update.reject` drops."""
        if not self.objective.rejections or self.config.rejected == "keep":
            return table
        rejected, tokens = self.objective.rejected_on_host(table), table.completion_mask.sum()
        totals.combine({"update/dropped_fraction": Metric(float(rejected.sum()), float(max(tokens, 1)))})
        return replace(table, completion_mask=table.completion_mask & ~rejected)

    def _old_logprobs(
        self, params: Any, rollouts: RolloutBatch, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """What the ratio is taken to: the sampler's, or the policy's, which `known` may have."""
        # The ratio is then also the correction for sampler and staleness, in place of a weight of its own.
        if self.config.old_logprobs == "rollout":
            return rollouts.rollout_logprobs
        computed = known.get("old_logprobs", known.get("trainer_logprobs"))
        return self._logprobs(params, self._table(rollouts)) if computed is None else computed

    def teacher_kl(self, teacher: Teacher, params: Any, rollouts: RolloutBatch) -> Metric | None:
        """Mean over the completion tokens of the log-probability by `params` minus the teacher's, in nats.

        None if no sequence has a teacher. All processes of the mesh must call this together.
        """
        own = partial(self.own_scores, params)
        # Greedy completions are drawn without filters, so they have not the sets that `_table` asks for.
        table = TokenTable.of_policy(rollouts, self.policy.arch)
        gap = self._logprobs(params, table) - teacher.logprobs(rollouts, own)
        known = rollouts.completion_mask & ~np.isnan(gap)
        return Metric(float(gap[known].sum(dtype=np.float64)), float(known.sum())) if known.any() else None

    def _logprobs(self, params: Any, table: TokenTable) -> np.ndarray:
        params = to_memory("device", params)
        return predict_tokens(params, table, model=self.policy, planner=self.logprob_planner)

    def _blind_gap(self, state: TrainState, rollouts: RolloutBatch) -> dict[str, Metric]:
        """How much grey in the place of pictures changes the log-probabilities of a few sequences."""
        if rollouts.pictures is None or self.store is None:
            return {}
        seeing = np.flatnonzero(rollouts.pictures.ids.any(axis=1))[:BLIND_SEQUENCES]
        params, table = to_memory("device", state.params), self._table(rollouts).take(seeing)
        blind = replace(self.logprob_planner, store=self.store.grey(params))
        own, grey = (
            predict_tokens(params, table, model=self.policy, planner=planner)
            for planner in (self.logprob_planner, blind)
        )
        gaps = np.abs(own - grey)[table.completion_mask]
        return {"vision/blind_gap": Metric(float(gaps.sum(dtype=np.float64)), float(gaps.size))}

    def sampler_mismatch(self, state: TrainState, rollouts: RolloutBatch) -> float:
        """Mean absolute difference of the sampler's log-probabilities from those of `state`, in nats."""
        own = self._logprobs(state.params, self._table(rollouts))
        return float(np.abs(own - rollouts.rollout_logprobs)[rollouts.completion_mask].mean())

    def own_scores(
        self, params: Any, teacher: str, table: TokenTable, temperature: float, top: TopWords | None
    ) -> TeacherScores:
        """What weights of the run say of the scored tokens of `table`, with the words `top` or none.

        The policy's, `params`, for the `teacher` `policy`; those of the reference for `initial`.
        """
        # A teacher is asked at its own temperature, which need not be the one that the policy samples at.
        policy = replace(self.policy, temperature=temperature)
        if teacher != "policy":
            return self._by_reference(params, table, policy, top)
        params = to_memory("device", params)
        return model_scores(params, table, model=policy, planner=self.logprob_planner, top=top)

    def _reference_logprobs(self, params: Any, rollouts: RolloutBatch) -> np.ndarray:
        return self._by_reference(params, self._table(rollouts), self.policy).logprobs

    def _by_reference(
        self, params: Any, table: TokenTable, policy: PolicySpec, top: TopWords | None = None
    ) -> TeacherScores:
        """What the reference says of `table`. With adapters, its base is that of the policy `params`.

        That base has the policy's routers, and so the routes of `table`; another model has routes of its own.
        """
        if self.reference is None:
            raise ValueError(
                "the KL to the reference needs its parameters, and build_stages got none; give it a copy of "
                "the policy's, as reference=jax.tree.map(jnp.copy, policy.params), or set update.kl_coef and "
                "reward.kl_coef to 0"
            )
        reference, arch = self.reference, policy.arch
        check_held(reference, "the parameters of the reference", "give build_stages a copy of them")
        mesh = jax.tree.leaves(reference)[0].sharding.mesh
        lora = arch.lora if has_adapters(reference) else None
        if arch.lora:
            own = adapters_of(reference)
            reference = with_trained(params, own, arch) if lora else without_adapters(params)
        else:
            # Experts of another model have other numbers: replaying the routes of the policy would be noise.
            table = replace(table, routes=None)
        policy = replace(policy, mesh=mesh, arch=arch if lora else arch.without_lora)
        # The reference may lie on fewer devices than the policy: its micro-batches have as many parts as its
        # own mesh.
        planner = replace(self.logprob_planner, num_shards=policy.mesh_shape.num_data_shards)
        return model_scores(to_memory("device", reference), table, model=policy, planner=planner, top=top)


def _check_held(state: TrainState) -> None:
    arrays = [(model.params, model.opt_state) for model in state.models]
    check_held(arrays, "the arrays of this state", "go on with the state that update.step returned")
