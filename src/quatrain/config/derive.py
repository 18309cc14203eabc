"""Derived values for configuration keys that are null.

Data flow: merged layers -> `Config` -> `derived_values` fills nulls. This module reads no data set and
queries no device, so `run.steps` stays null if it depends on the length of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from quatrain.config.algorithms import ESTIMATORS, LOSSES, takes
from quatrain.config.data_sets import is_gym
from quatrain.config.errors import ConfigError
from quatrain.config.fields import value_at
from quatrain.config.mesh import axis_sizes
from quatrain.config.mesh_axes import CP
from quatrain.config.schema import Config, fields
from quatrain.config.sections.judge import JUDGE
from quatrain.config.tasks import BUILTIN, generates, has_part, heldout
from quatrain.config.warnings import GIVEN_RATES, LORA_RATE, RATE, WANDB_MODES

# Token budget of one forward/backward pass per data shard if the user sets no micro-batch size.
MICRO_BATCH_TOKENS = 16384
GYM_REWARD, AGENT_REWARD = "reasoning_gym", "environment"
"""The only reward function, if none is set, with data of reasoning-gym, and with an agent."""
PREFIX_SHARE = 0.5
"""Where requests come with contexts that grow, half of the KV cache's memory is for what is kept of them."""
RANDOM_RATES = (1e-3, 1e-2)
"""Learning rates on given data of a built-in model, whose weights are random: of all weights, of adapters."""


def derived_values(
    config: Config, stem: str, environ: Mapping[str, str], now: datetime, *, trains: bool = True
) -> dict[str, Any]:
    """Values by dotted key, for every null of `config` that can be derived from its other values.

    `run.name` is made of `stem`, the configuration file's name without extension, and the time `now`. If the
    command `trains`, keys without a part in the run stay null. Raises ConfigError if a token budget set by
    the user cannot hold the longest possible sequence.
    """
    _budgets_hold_a_sequence(config)
    estimator, loss = ESTIMATORS.get(config.advantage.estimator), LOSSES.get(config.update.loss)
    adapters, random = config.lora.rank > 0, config.model.path.startswith(BUILTIN)
    masks = config.update.correction == "mask"
    values = {
        "run.name": f"{_folder_name(stem)}-{now:%Y%m%d-%H%M%S}",
        "model.tokenizer": config.model.path,
        "lora.alpha": float(config.lora.rank) or None,
        "data.eval": heldout(config),
        "sft.data": config.data.train,
        "optimizer.learning_rate": (RATE, LORA_RATE)[adapters],
        **{
            f"{name}.learning_rate": (RANDOM_RATES if random else rates)[adapters]
            for name, rates in GIVEN_RATES.items()
        },
        "advantage.scale": estimator.scales[0] if estimator else None,
        "rollout.max_environment_tokens": environment_tokens(config) or None,
        "rollout.prefix_share": PREFIX_SHARE if config.rollout.has_episodes else None,
        "rollout.greedy_baseline": takes(config.advantage.estimator, "baseline_rewards"),
        "update.mini_batch_size": config.size_of_mini_batches,
        "update.loss_aggregation": (loss and loss.aggregation)
        or (estimator and estimator.aggregation)
        or "token_mean",
        "update.correction": _correction(config),
        "update.correction_floor": 1 / config.update.correction_cap if masks else None,
        "distill.temperature": (config.rollout.temperature or 1.0) if config.distill.teacher else None,
        "logging.wandb": _wandb(environ),
        **_sizes(config),
    }
    if "overlong" in config.reward.functions:
        values["reward.overlong_limit"] = config.overlong_limit
        values["reward.overlong_buffer"] = max(config.overlong_limit // 5, 1)
    sets = [*(config.data.eval_sets.values() or filter(None, [values["data.eval"]]))]
    # What is rewarded in evaluations is what training rewards; without rollouts there are evaluations alone.
    rewarded = sets if config.run.on_given_data else [config.data.train]
    gym = bool(rewarded) and all(map(is_gym, rewarded))
    if gym and all(map(is_gym, sets)):
        values["eval.accuracy"] = GYM_REWARD
    read = {key: value for key, value in values.items() if not trains or has_part(config, key)}
    derived = {k: v for k, v in read.items() if v is not None and value_at(config, k) is None}
    if (most := config.rollout.most_words) != config.rollout.top_k:
        derived["rollout.top_k"] = most
    if "functions" not in config.reward.model_fields_set:
        if config.reward.judge is not None:
            derived["reward.functions"] = {JUDGE: 1.0}
        elif gym:
            derived["reward.functions"] = {GYM_REWARD: 1.0}
        elif config.rollout.agent is not None:
            derived["reward.functions"] = {AGENT_REWARD: 1.0}
    return derived


def _correction(config: Config) -> str:
    """`truncate` where other weights or another engine sample than are trained, or both round to bfloat16."""
    if config.update.old_logprobs == "rollout" or not config.rollout.trains_what_is_sampled:
        return "none"
    differs = config.rollout.differs_from_trainer or config.model.dtype == "bfloat16"
    return "truncate" if differs else "none"


def environment_tokens(config: Config) -> int:
    """The most tokens of an episode that its environment and the chat template add; 0 without one."""
    rollout = config.rollout
    return (rollout.max_environment_tokens or rollout.max_new_tokens) if rollout.has_episodes else 0


def longest_sequence(config: Config) -> int:
    """Length in tokens of the longest possible sequence in training.

    In `quatrain train`: prompt, completion and an environment's tokens. On given data, whose lengths the
    configuration does not know: `max_length`, or what a micro-batch holds.
    """
    if config.run.on_given_data:
        budget = config.update.max_tokens_per_device or MICRO_BATCH_TOKENS
        return config.given.max_length or budget * _devices_of_a_sequence(config)
    return _longest_rollout(config)


def _longest_rollout(config: Config) -> int:
    return config.data.max_prompt_length + config.rollout.max_new_tokens + environment_tokens(config)


def longest_of_run(config: Config) -> int:
    """Length in tokens of the longest sequence in training and evaluation."""
    if config.run.on_given_data and not generates(config):
        return longest_sequence(config)
    new = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    evaluated = config.data.max_prompt_length + new + environment_tokens(config)
    return max(longest_sequence(config), evaluated) if config.run.on_given_data else evaluated


class _Size(NamedTuple):
    """The size of micro-batches: in sequences or in tokens."""

    rows: int | None
    tokens: int | None

    def by_key(self, prefix: str) -> dict[str, int | None]:
        return {f"{prefix}micro_batch_size": self.rows, f"{prefix}max_tokens_per_device": self.tokens}

    def or_like(self, other: _Size, factor: int = 1) -> _Size:
        """This size if it is set, else `factor` times the other."""
        if self != (None, None):
            return self
        return _Size(other.rows and factor * other.rows, other.tokens and factor * other.tokens)


def _sizes(config: Config) -> dict[str, Any]:
    """Sizes of micro-batches and, with a critic, its mini-batches: what is not set follows the update's.

    Forward-only passes get twice the size.
    """
    update, logprob, critic = config.update, config.logprob, config.critic
    longest = max((longest for longest, _ in _longest_of_budget(config, "update")), default=0)
    budget = max(MICRO_BATCH_TOKENS, -(-longest // _devices_of_a_sequence(config)))
    size = _Size(update.micro_batch_size, update.max_tokens_per_device).or_like(_Size(None, budget))
    forward = _Size(logprob.micro_batch_size, logprob.max_tokens_per_device).or_like(size, 2)
    if forward.tokens and (evaluated := _evaluated_with_teacher(config)):
        forward = _Size(None, max(forward.tokens, -(-evaluated // _devices_of_a_sequence(config))))
    values: dict[str, Any] = size.by_key("update.") | forward.by_key("logprob.")
    if config.reward.models:
        scored = max((longest for longest, _ in _longest_of_budget(config, "reward")), default=0)
        values["reward.model_max_tokens_per_device"] = max(forward.tokens or 2 * budget, scored)
    if config.distill.models:
        values["distill.max_tokens_per_device"] = forward.tokens or 2 * budget
    values["critic.enabled"] = enabled = critic.enabled or (
        critic.enabled is None and takes(config.advantage.estimator, "values")
    )
    if enabled:
        own = _Size(critic.micro_batch_size, critic.max_tokens_per_device).or_like(size)
        passes = critic.forward_sizes
        own_forward = _Size(passes.micro_batch_size, passes.max_tokens_per_device).or_like(own, 2)
        values |= own.by_key("critic.") | own_forward.by_key("critic.forward_")
        values["critic.mini_batch_size"] = update.mini_batch_size or config.size_of_mini_batches
        values["critic.epochs"] = update.epochs
    return values


def _devices_of_a_sequence(config: Config) -> int:
    """The size of `cp` in `mesh`; 1 where the number of devices decides."""
    return 1 if config.mesh == "auto" else max(axis_sizes(config.mesh)[CP], 1)


def _longest_of_budget(config: Config, section: str) -> Iterator[tuple[int, str]]:
    """The longest sequences that a section's token budget must hold, in tokens, and what each is of."""
    given, on_given_data = config.given, config.run.on_given_data
    added = environment_tokens(config)
    more = f" + rollout.max_environment_tokens ({added})" if added else ""
    read_by = ("update", "logprob") if on_given_data else ("update",) if given.steps else ()
    if given.max_length and section in read_by:
        name = config.run.task if on_given_data else "sft"
        yield given.max_length, f"{name}.max_length = {given.max_length} tokens"
    if not on_given_data or (section == "reward" and generates(config)):
        longest = _longest_rollout(config)
        yield (
            longest,
            f"data.max_prompt_length ({config.data.max_prompt_length}) + rollout.max_new_tokens "
            f"({config.rollout.max_new_tokens}){more} = {longest} tokens",
        )
    if section == "logprob" and (longest := _evaluated_with_teacher(config)):
        yield (
            longest,
            "an evaluation, whose KL to distill.teacher is computed: data.max_prompt_length "
            f"({config.data.max_prompt_length}) + eval.max_new_tokens ({config.eval.max_new_tokens})"
            f"{more} = {longest} tokens",
        )


def _evaluated_with_teacher(config: Config) -> int:
    """Length in tokens of the longest sequence of evaluations that is compared with a teacher.

    0 if that is none, or no longer than those of training.
    """
    compared = config.distill.teacher is not None and (config.data.eval_sets or heldout(config))
    longest = longest_of_run(config)
    return longest if compared and longest > _longest_rollout(config) else 0


def _budgets_hold_a_sequence(config: Config) -> None:
    devices = _devices_of_a_sequence(config)
    budgets = {key: value_at(config, key) for key in fields() if key.endswith("max_tokens_per_device")}
    problems = [
        f"{key}={budget} cannot hold one sequence of {what}"
        f"{f' on {devices} devices ({CP} of mesh)' * (devices > 1)}; set it to at least "
        f"{-(-longest // devices)}"
        for key, budget in budgets.items()
        for longest, what in _longest_of_budget(config, key.partition(".")[0])
        if budget is not None and budget * devices < longest
    ]
    if problems:
        raise ConfigError(problems)


def _folder_name(stem: str) -> str:
    return re.sub(r"[^\w.-]+", "-", stem).lstrip(".-") or "run"


def _wandb(environ: Mapping[str, str]) -> str:
    mode = environ.get("WANDB_MODE")
    if mode:
        # An unknown mode (such as `dryrun`) must never cause data to be uploaded.
        return mode if mode in WANDB_MODES else "disabled"
    return "online" if environ.get("WANDB_API_KEY") else "disabled"
