"""What depends on what in the configuration: one table of rules, and the function that applies it.

Data flow: `Config` with sections that are valid alone -> `broken_rule`, the first row that holds -> an error.
Conditions and sentences read the configuration as `c.section.key` and `{c.section.key}`.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from quatrain.config.algorithms import ESTIMATORS, LOSSES, takes
from quatrain.config.fields import is_default, value_at
from quatrain.config.places import FOLDER_OR_BUCKET, has_scheme, names_no_bucket
from quatrain.config.sections.given import WITHOUT_REFERENCE
from quatrain.config.sections.judge import JUDGE
from quatrain.config.sections.model_on_devices import VISION_TARGETS
from quatrain.config.sections.reward import DistillConfig
from quatrain.config.sections.rollout import COLUMN, MOST_KEPT, is_address
from quatrain.config.sections.update import HAVE_BETA2, HAVE_EPS, CriticConfig, CriticOptimizerConfig
from quatrain.config.sections.whole_run import smaller_is_better
from quatrain.config.tasks import has_part, without_part


class Rule(NamedTuple):
    """One row: `key` is refused with `sentence` (the rule and the remedy) where `broken` holds."""

    key: str
    broken: Callable[[Any], object]
    sentence: str


def broken_rule(config: Any, keys: Iterable[str] = ()) -> tuple[str, Any, str] | None:
    """Key, value and sentence of the first rule that the `Config` breaks; None if it breaks none.

    Those of `keys` that have no part in the run must have their defaults.
    """
    for key in keys:
        if not has_part(config, key) and not is_default(config, key):
            return key, value_at(config, key), without_part(config, key)
    for rule in RULES:
        if rule.broken(config):
            return rule.key, value_at(config, rule.key), rule.sentence.format(c=config)
    return None


def no_effect(
    keys: Iterable[str], used: Callable[[Any], object], reason: str, remedy: str = ""
) -> list[Rule]:
    """Rules for keys that must have their defaults unless `used` holds: they have `no effect REASON`."""
    sentence = f"has no effect {reason}; {remedy + ', or ' if remedy else ''}leave this key at its default"

    def unused(key: str) -> Callable[[Any], object]:
        return lambda c: not used(c) and not is_default(c, key)

    return [Rule(key, unused(key), sentence) for key in keys]


def without(*needed: str) -> tuple[Callable[[Any], object], str, str]:
    """For `no_effect`: the keys have no effect where all keys in `needed` have their defaults."""
    remedy = "set that" if len(needed) == 1 else "set one of these"
    return lambda c: not all(is_default(c, key) for key in needed), f"without {' or '.join(needed)}", remedy


def _takes(c: Any, name: str) -> bool:
    return takes(c.advantage.estimator, name)


def _has_critic(c: Any) -> bool:
    return _takes(c, "values") or bool(c.critic.enabled)


def _trains_tower(c: Any) -> bool:
    return c.model.vision in ("projector", "all")


def _adapts_tower(c: Any) -> bool:
    return not {*VISION_TARGETS}.isdisjoint(c.lora.targets)


def _is_corrected(c: Any) -> bool:
    return c.update.correction not in (None, "none")


def _filters(c: Any) -> bool:
    return not c.rollout.trains_what_is_sampled


FILTERS = "rollout.top_p, top_k or min_p without rollout.replay_mask, or temperature 0"


def _of_micro_batches(section: str) -> Rule:
    rows, tokens = f"{section}.micro_batch_size", f"{section}.max_tokens_per_device"
    return Rule(
        rows,
        lambda c: None not in (value_at(c, rows), value_at(c, tokens)),
        f"must be null if {tokens} ({{c.{tokens}}}) is set: the size of micro-batches is given in sequences "
        "or in tokens, not both; set one of the two to null",
    )


def _of_total_rewards(key: str) -> Rule:
    sentence = (
        "must be null for advantage.estimator {c.advantage.estimator}, which reads the values of reward "
        "functions and not their sum, to which the penalty applies; set null, or take the function overlong"
    )
    return Rule(key, lambda c: value_at(c, key) is not None and _takes(c, "function_rewards"), sentence)


def _over_all_words(c: Any) -> bool:
    return c.distill.loss != "sampled" and not c.distill.top_k


def _of_single_scores(key: str) -> Rule:
    sentence = (
        "must be null for distill.loss {c.distill.loss} over all words, which reads the teacher's "
        "distributions in the micro-batches of the update; set null, distill.top_k to 64, or distill.loss to "
        "sampled"
    )
    return Rule(key, lambda c: _over_all_words(c) and value_at(c, key) is not None, sentence)


def _of_other_engines(key: str, none: str) -> Rule:
    sentence = (
        f"must be {none} with {FILTERS}: what other engines sample is corrected by the ratio of policy to "
        "sampler, which then draws from another distribution; unset these, or sample on devices of this run"
    )
    return Rule(key, lambda c: _filters(c) and value_at(c, key), sentence)


def _of_curriculum(key: str) -> Rule:
    why = {
        "data.shuffle": "it draws prompts at random",
        "rollout.dynamic_sampling_rounds": "which prompts are drawn again changes with the rates",
        "rollout.in_flight": "prompts are drawn by the rewards of all batches before",
    }
    default = {"data.shuffle": "true", "rollout.dynamic_sampling_rounds": "1", "rollout.in_flight": "false"}
    sentence = (
        f"must be {default[key]} with data.curriculum: {why[key]}; set that, or leave data.curriculum out"
    )
    return Rule(key, lambda c: c.data.curriculum and not is_default(c, key), sentence)


def _of_in_flight(needed: str, lacking: Callable[[Any], object]) -> Rule:
    sentence = f"needs {needed}; set that, or false"
    return Rule("rollout.in_flight", lambda c: c.rollout.in_flight and lacking(c), sentence)


def _of_optimizer(section: str) -> list[Rule]:
    name = f"{section}.name"
    unread = f"for {name} {{c.{name}}}, which does not read it"
    return [
        Rule(
            name,
            lambda c: value_at(c, name) == "muon" and c.lora.rank,
            "must not be muon with lora.rank {c.lora.rank}: it orthogonalises updates of the model's "
            "matrices, which adapters leave as they are; take adamw, or set lora.rank to 0",
        ),
        Rule(
            f"{section}.weight_decay",
            lambda c: getattr(c, section).name == "sgd" and getattr(c, section).weight_decay > 0,
            f"must be 0 for {section}.name sgd, which has no weight decay; set 0, or take adamw or lion",
        ),
        *no_effect(
            [f"{section}.state_dtype"],
            lambda c: getattr(c, section).has_first_moment,
            f"for {name} {{c.{name}}} with beta1 0, which has no first moment",
            "set beta1 above 0",
        ),
        *no_effect([f"{section}.beta2"], lambda c: value_at(c, name) in HAVE_BETA2, unread),
        *no_effect([f"{section}.eps"], lambda c: value_at(c, name) in HAVE_EPS, unread),
        *no_effect(
            [f"{section}.stochastic_rounding"],
            lambda c: c.model.param_dtype == "bfloat16" and not c.lora.rank,
            "where what is trained is float32 and not rounded (model.param_dtype float32, or adapters)",
        ),
    ]


def _on_this_machine(key: str, remedy: str) -> Rule:
    sentence = f"must be a local path, not one in a bucket or at another address: {remedy}"
    return Rule(key, lambda c: has_scheme(value_at(c, key)), sentence)


def _of_pairs(task: str, columns: str) -> Rule:
    return Rule(
        f"{task}.data",
        lambda c: c.run.task == task and getattr(c, task).data is None,
        f"must name data with {columns}; set it, as {task}.data=pairs.jsonl",
    )


def _is_loss(*names: str) -> Callable[[Any], object]:
    return lambda c: c.dpo.loss in names or ":" in c.dpo.loss


def _of_estimator(name: str, scales: Sequence[str]) -> Rule:
    return Rule(
        "advantage.scale",
        lambda c: c.advantage.estimator == name and c.advantage.scale not in (None, *scales),
        f"must be {' or '.join(scales)} for advantage.estimator {name}; set that, or null to derive it",
    )


RULES: tuple[Rule, ...] = (
    *no_effect(["data.pass_rate_column"], *without("data.min_pass_rate", "data.max_pass_rate")),
    Rule(
        "data.min_pass_rate",
        lambda c: c.data.max_pass_rate is not None and (c.data.min_pass_rate or 0) > c.data.max_pass_rate,
        "must be at most data.max_pass_rate ({c.data.max_pass_rate}); lower it, or raise data.max_pass_rate",
    ),
    *map(_of_curriculum, ("data.shuffle", "rollout.dynamic_sampling_rounds", "rollout.in_flight")),
    *no_effect(
        ["eval.temperature", "eval.top_p"],
        lambda c: c.eval.n,
        "with eval.n 0, which evaluates greedy completions only",
        "set eval.n to 1 or more",
    ),
    Rule(
        "update.mini_batch_size",
        lambda c: (c.update.mini_batch_size or 0) > c.data.batch_size,
        "must be at most data.batch_size ({c.data.batch_size}), the number of prompts in a training step; "
        "set a smaller number, or null for all of them",
    ),
    Rule(
        "update.mini_batch_size",
        lambda c: (
            c.update.num_mini_batches and c.update.mini_batch_size not in (None, c.size_of_mini_batches)
        ),
        "must be null, or {c.size_of_mini_batches} as update.num_mini_batches {c.update.num_mini_batches} "
        "and data.batch_size {c.data.batch_size} make it; set one of the two to null",
    ),
    *no_effect(
        ["update.reference_sync_steps"],
        lambda c: c.needs_reference,
        "without a reference",
        "set update.kl_coef or reward.kl_coef above 0, or distill.teacher to initial",
    ),
    *no_effect(["update.reference_mixup"], *without("update.reference_sync_steps")),
    *no_effect(["checkpoint.best_mode"], *without("checkpoint.best_metric")),
    *map(_of_micro_batches, ("update", "logprob", "critic")),
    Rule(
        "critic.enabled",
        lambda c: _takes(c, "values") and c.critic.enabled is False,
        "must not be false for advantage.estimator {c.advantage.estimator}, which needs a critic; set true "
        "or null",
    ),
    *no_effect(
        [
            *(f"critic.{key}" for key in CriticConfig.model_fields if key != "enabled"),
            *(f"critic_optimizer.{key}" for key in CriticOptimizerConfig.model_fields),
            *("placement.critic", "offload.critic"),
        ],
        _has_critic,
        "without a critic",
        "set advantage.estimator to gae, or critic.enabled to true for an estimator of your own",
    ),
    *no_effect(
        ["placement.reward", "offload.reward_models"],
        lambda c: c.reward.models or (c.reward.judge is not None and c.reward.judge.model),
        "without a reward model or a judge on this run's devices",
        "add model:PATH to reward.functions, or set reward.judge.model",
    ),
    Rule(
        "distill.prompt",
        lambda c: "policy" in c.distill.own and c.distill.prompt is None,
        "must be set for distill.teacher policy: with the policy's own prompt the two are the same; set it, "
        "or take another teacher",
    ),
    *map(_of_single_scores, ("distill.prompt", "distill.mesh", "placement.teacher")),
    Rule(
        "distill.loss",
        lambda c: _over_all_words(c) and c.distill.teacher not in c.distill.models,
        "over all words needs one model as the teacher, and distill.teacher is {c.distill.teacher}; set "
        "distill.top_k to 64, or distill.loss to sampled",
    ),
    Rule(
        "distill.loss",
        lambda c: c.distill.loss != "sampled" and c.rollout.has_filters,
        "compares whole distributions, and rollout.top_p, top_k or min_p make the sampler draw from a part; "
        "unset these, or set distill.loss to sampled",
    ),
    Rule(
        "distill.weight",
        lambda c: c.distill.loss != "sampled" and not c.distill.weight,
        "must be above 0 for distill.loss {c.distill.loss}; set that, or distill.loss to sampled, whose KL "
        "is measured without it",
    ),
    Rule(
        "distill.teacher",
        lambda c: not all(map(is_address, c.distill.servers)),
        "must be an address such as http://host:8000 where it begins with http:// or https://; correct it",
    ),
    Rule(
        "distill.temperature",
        lambda c: c.distill.servers and (c.distill.temperature or c.rollout.temperature) != 1,
        "must be 1 for a teacher behind a server, which gives log-probabilities of prompts at temperature 1; "
        "set 1, or rollout.temperature",
    ),
    *no_effect(
        ["distill.clip", "distill.discount"],
        lambda c: c.distill.loss == "sampled",
        "for distill.loss {c.distill.loss}, which is exact and a loss of its own",
    ),
    *no_effect(["distill.top_k"], lambda c: c.distill.loss != "sampled", "for distill.loss sampled"),
    *no_effect(["distill.beta"], lambda c: c.distill.loss == "jsd", "for distill.loss {c.distill.loss}"),
    Rule(
        "distill.prompt",
        lambda c: c.distill.prompt is not None and c.rollout.agent is not None,
        "must be null with rollout.agent, whose requests have prompts of their own; set null",
    ),
    *no_effect(
        ["distill.max_tokens_per_device", "distill.mesh", "placement.teacher", "offload.teacher"],
        lambda c: c.distill.models or not c.distill.teachers,
        "for distill.teacher {c.distill.teacher}, no model that this run loads",
    ),
    *no_effect(
        [
            *(f"distill.{key}" for key in DistillConfig.model_fields if key != "teacher"),
            *("placement.teacher", "offload.teacher"),
        ],
        *without("distill.teacher"),
    ),
    *no_effect(
        ["distill.clip", "distill.discount", "distill.warmdown_steps"],
        lambda c: c.distill.weight,
        "for distill.weight 0",
        "raise distill.weight",
    ),
    *no_effect(
        ["update.reject"],
        lambda c: c.distill.loss == "sampled" or c.distill.rl_weight or c.update.rejected == "drop",
        "for update.rejected keep with distill.loss {c.distill.loss} and distill.rl_weight 0: the policy "
        "loss that it multiplies is 0, and the teacher's term stays",
        "set update.rejected to drop, which leaves that term out too",
    ),
    Rule(
        "distill.teacher",
        lambda c: _filters(c) and c.distill.teacher is not None,
        f"must be null with {FILTERS}: the gradient of the KL to the teacher is an expectation over what the "
        "policy itself samples; unset these",
    ),
    Rule(
        "reward.functions",
        lambda c: not c.reward.functions and c.distill.teacher is None,
        "must name at least one function, such as correct, unless there is a teacher (distill.teacher)",
    ),
    Rule(
        "distill.rl_weight",
        lambda c: c.distill.teacher is not None and not c.distill.weight and not c.distill.rl_weight,
        "must be above 0 where distill.weight is 0: nothing would be trained on; raise one of the two",
    ),
    Rule(
        "reward.functions",
        lambda c: (
            c.reward.judge is not None
            and "functions" in c.reward.model_fields_set
            and JUDGE not in c.reward.functions
        ),
        "must have the entry judge, the weight of reward.judge; add judge: 1.0, or leave reward.judge out",
    ),
    Rule(
        "reward.functions.judge",
        lambda c: c.reward.judge is None and JUDGE in c.reward.functions,
        "names the reward of a judge, which there is not; set reward.judge (self, model or base_url), "
        "or leave it out",
    ),
    Rule(
        "reward.judge",
        lambda c: c.reward.judge is not None and c.reward.judge.self and c.rollout.in_flight,
        "must not be self with rollout.in_flight: weights are exchanged while a batch is judged; set "
        "rollout.in_flight to false, or name another model",
    ),
    *no_effect(
        ["reward.overlong_limit", "reward.overlong_buffer"],
        lambda c: "overlong" in c.reward.functions,
        "without the function overlong in reward.functions",
        "add it",
    ),
    Rule(
        "reward.overlong_buffer",
        lambda c: (c.reward.overlong_buffer or 0) > c.overlong_limit,
        "must be at most reward.overlong_limit ({c.overlong_limit} tokens); set a smaller number",
    ),
    Rule(
        "reward.truncated_factor",
        lambda c: c.reward.truncated_factor is not None and c.reward.truncated_reward is not None,
        "must be null if reward.truncated_reward ({c.reward.truncated_reward}) is set: the reward of a "
        "completion that was cut is multiplied or replaced, not both; set one of the two to null",
    ),
    _of_total_rewards("reward.truncated_factor"),
    _of_total_rewards("reward.truncated_reward"),
    Rule(
        "rollout.greedy_baseline",
        lambda c: _takes(c, "baseline_rewards") and c.rollout.greedy_baseline is False,
        "must not be false for advantage.estimator {c.advantage.estimator}, whose baseline it is; set true "
        "or null",
    ),
    Rule(
        "rollout.dynamic_sampling_rounds",
        lambda c: c.rollout.dynamic_sampling_rounds > 1 and c.rollout.n == 1,
        "must be 1 for rollout.n 1: it looks for groups whose samples have different rewards, which a single "
        "sample never has; set 1, or raise rollout.n",
    ),
    Rule(
        "rollout.tools",
        lambda c: c.rollout.environment is not None and c.rollout.tools,
        "must be empty if rollout.environment is set: an environment has its own tools, as methods; set one "
        "of the two",
    ),
    Rule(
        "rollout.environment",
        lambda c: (
            isinstance(c.rollout.environment, dict)
            and (
                COLUMN not in c.rollout.environment
                or len(c.rollout.environment) < 2
                or not all(re.fullmatch(r"[\w.-]+", name) for name in c.rollout.environment)
            )
        ),
        "must name the data column that chooses the environment, and an environment for each of its values "
        "(of letters, digits and . _ -), as the entries `column: game`, `chess: chess.py:Chess` and so on; "
        "for a single one, give `path.py:Class`",
    ),
    Rule(
        "data.on_long_prompt",
        lambda c: c.rollout.has_episodes and c.data.on_long_prompt == "truncate_left",
        "must be error or skip with rollout.environment, rollout.tools or rollout.agent: what follows a "
        "prompt is written from its messages, which must be whole; set one of the two",
    ),
    Rule(
        "reward.functions.environment",
        lambda c: not c.rollout.has_episodes and "environment" in c.reward.functions,
        "names the reward of an environment or an agent, which there is not; set rollout.environment or "
        "rollout.agent, or leave the function out",
    ),
    *no_effect(["advantage.turn_credit"], *without("rollout.environment")),
    Rule(
        "advantage.turn_credit",
        lambda c: c.advantage.turn_credit and "environment" not in c.reward.functions,
        "needs the reward `environment`, which has what the environment gave for each turn; name it in "
        "reward.functions, or set false",
    ),
    *no_effect(
        ["rollout.max_turns", "rollout.max_environment_tokens"],
        *without("rollout.environment", "rollout.tools", "rollout.agent"),
    ),
    *no_effect(
        ["rollout.environment_timeout_s", "rollout.environment_workers"],
        *without("rollout.environment", "rollout.tools"),
    ),
    *no_effect(
        [
            f"rollout.agent_{name}"
            for name in ("args", "python", "workers", "concurrency", "timeout_s", "failure")
        ],
        *without("rollout.agent"),
    ),
    Rule(
        "rollout.agent",
        lambda c: c.rollout.agent is not None and (c.rollout.environment is not None or c.rollout.tools),
        "must be null with rollout.environment or rollout.tools: an agent runs the dialogue itself; leave "
        "one of them out",
    ),
    Rule(
        "rollout.replay_mask",
        lambda c: c.rollout.replay_mask is True and not c.rollout.temperature,
        "must not be true with rollout.temperature 0, which draws from no distribution to train; "
        "set auto, or a temperature above 0",
    ),
    Rule(
        "rollout.top_k",
        lambda c: c.rollout.replays and c.rollout.has_filters and c.rollout.top_k > MOST_KEPT,
        f"must be at most {MOST_KEPT} where the words that tokens are drawn from are recorded; got "
        f"{{c.rollout.top_k}}; set {MOST_KEPT} or less, or rollout.replay_mask to false",
    ),
    Rule(
        "rollout.servers",
        lambda c: c.rollout.workers and c.rollout.servers,
        "must be empty with rollout.workers: either workers or servers sample; leave one of the two out",
    ),
    Rule(
        "rollout.sampler",
        lambda c: c.rollout.sampler is not None and (c.rollout.workers or c.rollout.servers),
        "must be null with rollout.workers or rollout.servers: one of them samples; leave the others out",
    ),
    Rule(
        "rollout.servers",
        lambda c: len(set(c.rollout.servers)) < len(c.rollout.servers),
        "must name each server once; leave the second one out",
    ),
    Rule(
        "rollout.mesh",
        lambda c: c.rollout.servers and c.rollout.mesh is not None,
        "must be null with rollout.servers: each server decides how it uses its devices; set null, and start "
        "servers with the parallelism that they need",
    ),
    Rule(
        "placement.rollout",
        lambda c: c.rollout.has_fleet and c.placement.rollout is not None,
        "must be null with rollout.workers and rollout.servers, which have devices of their own; set null, "
        "or sample on devices of this run",
    ),
    *no_effect(
        ["rollout.speculate"],
        lambda c: not c.rollout.servers and c.rollout.sampler is None,
        "with rollout.servers or rollout.sampler, which sample as they do",
    ),
    *no_effect(["rollout.weights_dir"], *without("rollout.workers", "rollout.servers")),
    *no_effect(["rollout.stream_weights"], *without("rollout.servers")),
    Rule(
        "rollout.stream_weights",
        lambda c: c.rollout.stream_weights and c.rollout.weights_dir is not None,
        "must be false with rollout.weights_dir, a folder through which servers get weights; leave one out",
    ),
    Rule(
        "rollout.weights_dir",
        lambda c: c.rollout.weights_dir is not None and c.lora.rank and c.rollout.workers,
        "must be null with lora.rank: adapters reach rollout workers through Ray's object store",
    ),
    _of_in_flight("rollout.max_staleness of 1 or more", lambda c: not c.rollout.max_staleness),
    _of_in_flight("rollout.dynamic_sampling_rounds 1", lambda c: c.rollout.dynamic_sampling_rounds > 1),
    _of_in_flight("no greedy baseline", lambda c: c.rollout.greedy_baseline or _takes(c, "baseline_rewards")),
    Rule(
        "update.router_aux_coef",
        lambda c: c.update.router_aux_coef and c.rollout.record_routes is False,
        "must be 0 for rollout.record_routes false: how many tokens an expert has in a mini-batch must be "
        "known before it is cut into micro-batches; set 0, or rollout.record_routes to auto",
    ),
    Rule(
        "update.router_aux_coef",
        lambda c: c.update.router_aux_coef and c.lora.rank,
        "must be 0 with lora.rank: adapters leave routers as they are, which this loss is to change; set 0",
    ),
    Rule(
        "update.correction",
        lambda c: _is_corrected(c) and c.update.old_logprobs == "rollout",
        "must be none for update.old_logprobs rollout, which takes the ratio to the sampler already: the "
        "difference would count twice; set one of the two to its default",
    ),
    *no_effect(
        ["update.correction_level"],
        lambda c: c.update.correction != "none",
        "for update.correction none",
        "set truncate or mask",
    ),
    *no_effect(["update.rejected"], *without("update.reject")),
    Rule(
        "update.reject",
        lambda c: c.update.reject and c.update.old_logprobs == "rollout",
        "must be empty for update.old_logprobs rollout, where the old log-probabilities are the sampler's; "
        "set auto or recompute",
    ),
    Rule(
        "update.reject",
        lambda c: c.update.reject and _filters(c),
        f"needs log-probabilities of the policy's own distribution, and {FILTERS} make the sampler draw from "
        "another; unset these, or leave it empty",
    ),
    Rule(
        "update.rejected",
        lambda c: c.update.reject and c.update.rejected == "drop" and c.update.old_logprobs != "recompute",
        "must be keep unless update.old_logprobs is recompute: which sequences are dropped must be known "
        "before their losses are weighed; set one of the two",
    ),
    Rule(
        "update.correction_floor",
        lambda c: c.update.correction_floor is not None and c.update.correction not in (None, "mask"),
        "has no effect for update.correction {c.update.correction}; set update.correction to mask, or null",
    ),
    Rule(
        "update.old_logprobs",
        lambda c: _filters(c) and c.update.old_logprobs == "rollout",
        f"must not be rollout with {FILTERS}: the sampler's log-probabilities are those of another "
        "distribution than the policy's, so that the ratio, and a KL in the reward, would count the filter; "
        "unset these, or set auto or recompute",
    ),
    Rule(
        "update.correction",
        lambda c: _filters(c) and _is_corrected(c),
        f"needs log-probabilities of the policy's own distribution, and {FILTERS} make the sampler draw from "
        "another; unset these, or set none",
    ),
    Rule(
        "update.loss",
        lambda c: _filters(c) and c.update.loss in LOSSES and LOSSES[c.update.loss].reads_sampler,
        f"reads the sampler's log-probabilities as those of the policy's own distribution, and {FILTERS} "
        "make the sampler draw from another; unset these, or take another loss",
    ),
    Rule(
        "update.sampler_kl_coef",
        lambda c: _filters(c) and c.update.sampler_kl_coef,
        f"must be 0 with {FILTERS}: the sampler's log-probabilities are then those of another distribution "
        "than the policy's, which the policy would be drawn to; unset these, or set 0",
    ),
    _of_other_engines("rollout.servers", "empty"),
    _of_other_engines("rollout.sampler", "null"),
    Rule(
        "rollout.max_staleness",
        lambda c: _filters(c) and c.rollout.max_staleness,
        f"must be 0 with {FILTERS}: stale tokens are corrected by the ratio of policy to sampler, which then "
        "draws from another distribution; unset these, or set 0",
    ),
    Rule(
        "update.correction",
        lambda c: (
            c.rollout.max_staleness and c.update.correction == "none" and c.update.old_logprobs != "rollout"
        ),
        "must not be none for rollout.max_staleness {c.rollout.max_staleness}: stale tokens would be trained "
        "on as if the current policy had sampled them; set truncate, mask or null, or update.old_logprobs to "
        "rollout",
    ),
    Rule(
        "reward.kl_target",
        lambda c: c.reward.kl_target is not None and not c.reward.kl_coef,
        "needs reward.kl_coef above 0, the coefficient that is adapted to it; set that, or null",
    ),
    Rule(
        "reward.kl_coef",
        lambda c: c.reward.kl_coef and _takes(c, "function_rewards"),
        "must be 0 for advantage.estimator {c.advantage.estimator}, which reads the values of reward "
        "functions and no others; set 0, or update.kl_coef for a KL in the loss",
    ),
    Rule(
        "reward.kl_coef",
        lambda c: c.reward.kl_coef and c.advantage.estimator == "maxrl",
        "must be 0 for advantage.estimator maxrl, which divides by a group's mean reward: a group without a "
        "right answer would have advantages of full size from its KL alone; set 0, or update.kl_coef for a "
        "KL in the loss",
    ),
    *no_effect(
        ["lora.alpha", "lora.targets", "rollout.lora"],
        lambda c: c.lora.rank,
        "with lora.rank 0",
        "set lora.rank to 1 or more",
    ),
    Rule(
        "model.vision",
        lambda c: c.model.vision not in (None, "none") and c.model.path.endswith(".gguf"),
        "must be none for a .gguf file, whose tower (mmproj) is not read; give the model's Hugging Face "
        "folder or hub id, or set none",
    ),
    Rule(
        "model.vision",
        lambda c: c.model.vision not in (None, "none") and c.run.task == "rm",
        "must be none for `quatrain rm`: a model with a score head reads texts alone; set none",
    ),
    Rule(
        "model.vision",
        lambda c: _trains_tower(c) and _has_critic(c),
        "must be frozen or none with a critic, which reads the features of a tower that stays as it is; set "
        "frozen, or take an advantage.estimator without a critic",
    ),
    Rule(
        "model.vision",
        lambda c: c.lora.rank and c.model.vision == "projector",
        "must not be projector with lora.rank {c.lora.rank}: adapters leave the projector as it is; set "
        "frozen, all with one of " + ", ".join(VISION_TARGETS) + " in lora.targets, or lora.rank to 0",
    ),
    Rule(
        "lora.targets",
        lambda c: c.lora.rank and c.model.vision == "all" and not _adapts_tower(c),
        "must have one of " + ", ".join(VISION_TARGETS) + " with model.vision all: adapters alone are "
        "trained; add one, or set model.vision to frozen",
    ),
    Rule(
        "lora.targets",
        lambda c: _adapts_tower(c) and c.model.vision != "all",
        "may have matrices of the tower with model.vision all alone; set that, or leave them out",
    ),
    *no_effect(
        ["optimizer.vision_learning_rate"],
        _trains_tower,
        "unless a part of the tower is trained",
        "set model.vision to projector or all",
    ),
    *no_effect(
        ["critic_optimizer.vision_learning_rate"], lambda c: False, "because the critic trains no tower"
    ),
    *no_effect(["model.vision_cache_bytes"], lambda c: c.model.vision != "none", "for model.vision none"),
    Rule(
        "rollout.weights_dir",
        lambda c: c.rollout.weights_dir is not None and c.rollout.workers and _trains_tower(c),
        "must be null with model.vision {c.model.vision}: its folders hold the text model alone; set null, "
        "or model.vision to frozen",
    ),
    Rule(
        "lora.rank",
        lambda c: c.lora.rank and _has_critic(c),
        "must be 0 with a critic, all of whose weights are trained; set 0, or take an advantage.estimator "
        "without a critic",
    ),
    *no_effect(
        ["placement.reference", "offload.reference"],
        lambda c: not c.lora.rank,
        "with lora.rank {c.lora.rank}, where the reference is the frozen base, which is in memory on the "
        "devices of training",
    ),
    Rule(
        "update.reference_mixup",
        lambda c: c.lora.rank and c.update.reference_mixup != 1,
        "must be 1 with lora.rank {c.lora.rank}: adapters of that rank cannot hold a mixture of two; set 1, "
        "or lora.rank to 0",
    ),
    Rule(
        "update.share_prompts",
        lambda c: c.update.share_prompts is True and c.update.micro_batch_size is not None,
        "needs a token budget, and update.micro_batch_size is {c.update.micro_batch_size}: a padded row "
        "holds one sequence; set update.max_tokens_per_device instead, or update.share_prompts to auto",
    ),
    _of_pairs("dpo", "the columns `chosen` and `rejected`, or `completion` and `label` for dpo.loss kto"),
    _of_pairs("rm", "the columns `chosen` and `rejected`"),
    *no_effect(
        ["dpo.label_smoothing"], _is_loss("sigmoid", "robust"), "for dpo.loss {c.dpo.loss}", "take sigmoid"
    ),
    *no_effect(
        ["dpo.reference"],
        lambda c: c.dpo.loss not in WITHOUT_REFERENCE,
        "for dpo.loss {c.dpo.loss}, which has none",
    ),
    *no_effect(["dpo.gamma"], _is_loss("simpo"), "for dpo.loss {c.dpo.loss}", "take simpo"),
    *no_effect(
        ["dpo.desirable_weight", "dpo.undesirable_weight"],
        lambda c: c.dpo.loss == "kto",
        "for dpo.loss {c.dpo.loss}, which reads pairs",
        "set dpo.loss to kto",
    ),
    *no_effect(
        ["dpo.loss_args"],
        lambda c: ":" in c.dpo.loss,
        "for dpo.loss {c.dpo.loss}, whose arguments are keys of dpo",
    ),
    *no_effect(
        ["rm.loss_args"],
        lambda c: ":" in c.rm.loss,
        "for rm.loss {c.rm.loss}, whose arguments are keys of rm",
    ),
    Rule(
        "checkpoint.best_mode",
        lambda c: smaller_is_better(c.checkpoint.best_metric or "") and c.checkpoint.best_mode == "max",
        "must be min for checkpoint.best_metric {c.checkpoint.best_metric}, whose smaller value is the "
        "better; set min",
    ),
    *(_of_estimator(name, estimator.scales) for name, estimator in ESTIMATORS.items()),
    *_of_optimizer("optimizer"),
    *_of_optimizer("critic_optimizer"),
    Rule(
        "checkpoint.dir",
        lambda c: names_no_bucket(c.checkpoint.dir),
        f"{FOLDER_OR_BUCKET}; correct it, or mount what it names as a folder",
    ),
    _on_this_machine("run.dir", "log, metrics and lock are files; set checkpoint.dir to the bucket"),
    _on_this_machine("run.compilation_cache", "set a folder, or null"),
    _on_this_machine("data.image_root", "put the pictures into the rows, or mount the bucket"),
    _on_this_machine("rollout.weights_dir", "set a folder that all workers see, or null"),
    Rule(
        "tinker.aliases",
        lambda c: {*map(os.path.normpath, dict.values(c.tinker.aliases))} - {os.path.normpath(c.model.path)},
        "must be names of the model that is served, model.path {c.model.path}; serve others by servers of "
        "their own",
    ),
)
