"""Derived values for configuration keys that are null.

Data flow: merged layers -> `Config` -> `derived_values` fills nulls. This module reads no data set and
queries no device, so `run.steps` stays null if it depends on the length of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from quatrain.config.algorithms import ESTIMATORS, LOSSES, takes
from quatrain.config.data_sets import TrainingSpec, data_set_list, heldout_gym, is_gym
from quatrain.config.errors import ConfigError
from quatrain.config.fields import value_at
from quatrain.config.mesh import axis_sizes
from quatrain.config.mesh_axes import CP
from quatrain.config.schema import Config, fields
from quatrain.config.warnings import LORA_RATE, RATE, SFT_LORA_RATE, SFT_RATE, WANDB_MODES

# Token budget of one forward/backward pass per data shard if the user sets no micro-batch size.
MICRO_BATCH_TOKENS = 16384
BUILTIN = "builtin:"
GYM_REWARD, AGENT_REWARD = "reasoning_gym", "environment"
"""The only reward function, if none is set, with data of reasoning-gym, and with an agent."""
HELDOUT = "-heldout"
PREFIX_SHARE = 0.5
"""Where requests come with contexts that grow, half of the KV cache's memory is for what is kept of them."""
RANDOM_RATE, RANDOM_LORA_RATE = 1e-3, 1e-2
"""Learning rates of a warm start of a built-in model, whose weights are random."""


def derived_values(config: Config, stem: str, environ: Mapping[str, str], now: datetime) -> dict[str, Any]:
    """Values by dotted key, for every null of `config` that can be derived from its other values.

    `run.name` is made of `stem`, the configuration file's name without extension, and the time `now`. Raises
    ConfigError if a token budget set by the user cannot hold the longest possible sequence.
    """
    _budgets_hold_a_sequence(config)
    estimator, loss = ESTIMATORS.get(config.advantage.estimator), LOSSES.get(config.update.loss)
    adapters, random = config.lora.rank > 0, config.model.path.startswith(BUILTIN)
    sft_rates = (RANDOM_RATE, RANDOM_LORA_RATE) if random else (SFT_RATE, SFT_LORA_RATE)
    masks = config.update.correction == "mask"
    values = {
        "run.name": f"{_folder_name(stem)}-{now:%Y%m%d-%H%M%S}",
        "model.tokenizer": config.model.path,
        "lora.alpha": float(config.lora.rank) or None,
        "data.eval": _heldout(config.data.train),
        "sft.data": config.data.train,
        "optimizer.learning_rate": (RATE, LORA_RATE)[adapters],
        "sft.learning_rate": sft_rates[adapters],
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
    sets = config.data.eval_sets.values() or filter(None, [values["data.eval"]])
    if all(map(is_gym, sets)) and is_gym(config.data.train):
        values["eval.accuracy"] = GYM_REWARD
    derived = {k: v for k, v in values.items() if v is not None and value_at(config, k) is None}
    if "functions" not in config.reward.model_fields_set:
        if is_gym(config.data.train):
            derived["reward.functions"] = {GYM_REWARD: 1.0}
        elif config.rollout.agent is not None:
            derived["reward.functions"] = {AGENT_REWARD: 1.0}
    return derived


def _correction(config: Config) -> str:
    """`truncate` where other weights or another engine sample than are trained, or both round to bfloat16."""
    if config.update.old_logprobs == "rollout" or not config.rollout.samples_the_policy:
        return "none"
    differs = config.rollout.differs_from_trainer or config.model.dtype == "bfloat16"
    return "truncate" if differs else "none"


def environment_tokens(config: Config) -> int:
    """The most tokens of an episode that its environment and the chat template add; 0 without one."""
    rollout = config.rollout
    return (rollout.max_environment_tokens or rollout.max_new_tokens) if rollout.has_episodes else 0


def longest_sequence(config: Config) -> int:
    """Length in tokens of the longest possible sequence: prompt, completion and an environment's tokens."""
    return config.data.max_prompt_length + config.rollout.max_new_tokens + environment_tokens(config)


def longest_of_run(config: Config) -> int:
    """Length in tokens of the longest sequence in training and evaluation."""
    new = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    return config.data.max_prompt_length + new + environment_tokens(config)


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
    budget = max(MICRO_BATCH_TOKENS, -(-longest_sequence(config) // _devices_of_a_sequence(config)))
    size = _Size(update.micro_batch_size, update.max_tokens_per_device).or_like(_Size(None, budget))
    forward = _Size(logprob.micro_batch_size, logprob.max_tokens_per_device).or_like(size, 2)
    values: dict[str, Any] = size.by_key("update.") | forward.by_key("logprob.")
    if config.reward.models:
        values["reward.model_max_tokens_per_device"] = forward.tokens or 2 * budget
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


def _budgets_hold_a_sequence(config: Config) -> None:
    devices = _devices_of_a_sequence(config)
    longest, added = longest_sequence(config), environment_tokens(config)
    more = f" + rollout.max_environment_tokens ({added})" if added else ""
    budgets = {key: value_at(config, key) for key in fields() if key.endswith("max_tokens_per_device")}
    problems = [
        f"{key}={budget} cannot hold one sequence of data.max_prompt_length "
        f"({config.data.max_prompt_length}) + rollout.max_new_tokens ({config.rollout.max_new_tokens}){more} "
        f"= {longest} tokens{f' on {devices} devices ({CP} of mesh)' * (devices > 1)}; set it to at least "
        f"{-(-longest // devices)}"
        for key, budget in budgets.items()
        if budget is not None and budget * devices < longest
    ]
    if problems:
        raise ConfigError(problems)


def _folder_name(stem: str) -> str:
    return re.sub(r"[^\w.-]+", "-", stem).lstrip(".-") or "run"


def _heldout(train: TrainingSpec) -> str | tuple[str, ...] | None:
    if is_gym(train):
        with suppress(ValueError):  # the reader of the data raises it
            sets = tuple(map(heldout_gym, data_set_list(train)))
            return sets[0] if isinstance(train, str) else sets
        return None
    if isinstance(train, str) and train.startswith(BUILTIN) and not train.endswith(HELDOUT):
        return train + HELDOUT
    return None


def _wandb(environ: Mapping[str, str]) -> str:
    mode = environ.get("WANDB_MODE")
    if mode:
        # An unknown mode (such as `dryrun`) must never cause data to be uploaded.
        return mode if mode in WANDB_MODES else "disabled"
    return "online" if environ.get("WANDB_API_KEY") else "disabled"
