"""Derived values for configuration keys that are null.

Data flow: merged layers -> `Config` -> `derived_values` fills nulls. This module reads no
data set and queries no device, so `run.steps` stays null if it depends on the length of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quatrain.config.algorithms import ESTIMATORS, LOSSES, takes
from quatrain.config.errors import ConfigError
from quatrain.config.fields import value_at
from quatrain.config.schema import Config
from quatrain.config.warnings import LORA_RATE, RATE, SFT_LORA_RATE, SFT_RATE, WANDB_MODES

# Token budget of one forward/backward pass per data shard if the user sets no micro-batch size.
MICRO_BATCH_TOKENS = 16384
BUILTIN = "builtin:"
HELDOUT = "-heldout"
RANDOM_RATE, RANDOM_LORA_RATE = 1e-3, 1e-2
"""Learning rates of a warm start of a built-in model, whose weights are random."""


def derived_values(config: Config, stem: str, environ: Mapping[str, str], now: datetime) -> dict[str, Any]:
    """Values by dotted key, for every null of `config` that can be derived from its other values.

    `run.name` is made of `stem`, the configuration file's name without extension, and the time `now`. Raises
    ConfigError if a token budget set by the user cannot hold the longest possible sequence.
    """
    _budgets_hold_a_sequence(config)
    sizes = _micro_batches(config)
    estimator, loss = ESTIMATORS.get(config.advantage.estimator), LOSSES.get(config.update.loss)
    values = {
        "run.name": f"{_folder_name(stem)}-{now:%Y%m%d-%H%M%S}",
        "model.tokenizer": config.model.path,
        "lora.alpha": float(config.lora.rank) or None,
        "data.eval": _heldout(config.data.train),
        "sft.data": config.data.train,
        **_learning_rates(config),
        "advantage.scale": estimator.scales[0] if estimator else None,
        "rollout.max_environment_tokens": environment_tokens(config) or None,
        "rollout.greedy_baseline": takes(config.advantage.estimator, "baseline_rewards"),
        **_overlong(config),
        "update.mini_batch_size": config.update.mini_batch_size or config.size_of_mini_batches,
        "update.loss_aggregation": (loss.aggregation if loss else None)
        or (estimator.aggregation if estimator else None)
        or "token_mean",
        "update.correction": _correction(config),
        "update.correction_floor": _correction_floor(config),
        **_critic(config),
        **sizes,
        "reward.model_max_tokens_per_device": _reward_model_tokens(config, sizes),
        "logging.wandb": _wandb(environ),
    }
    return {k: v for k, v in values.items() if v is not None and value_at(config, k) is None}


def _overlong(config: Config) -> dict[str, int]:
    if "overlong" not in config.reward.functions:
        return {}
    limit = config.overlong_limit
    return {"reward.overlong_limit": limit, "reward.overlong_buffer": max(limit // 5, 1)}


def _correction(config: Config) -> str:
    """`truncate` where other weights or another engine sample than are trained, or both round to bfloat16."""
    if config.update.old_logprobs == "rollout" or not config.rollout.samples_the_policy:
        return "none"
    differs = config.rollout.differs_from_trainer or config.model.dtype == "bfloat16"
    return "truncate" if differs else "none"


def _correction_floor(config: Config) -> float | None:
    return 1 / config.update.correction_cap if config.update.correction == "mask" else None


def _learning_rates(config: Config) -> dict[str, float]:
    adapters, random = config.lora.rank > 0, config.model.path.startswith(BUILTIN)
    sft = (RANDOM_RATE, RANDOM_LORA_RATE) if random else (SFT_RATE, SFT_LORA_RATE)
    return {"optimizer.learning_rate": (RATE, LORA_RATE)[adapters], "sft.learning_rate": sft[adapters]}


def environment_tokens(config: Config) -> int:
    """The most tokens of an episode that its environment and the chat template add; 0 without one."""
    rollout = config.rollout
    return (rollout.max_environment_tokens or rollout.max_new_tokens) if rollout.has_episodes else 0


def longest_sequence(config: Config) -> int:
    """Length in tokens of the longest possible sequence: prompt, completion and an environment's tokens."""
    return config.data.max_prompt_length + config.rollout.max_new_tokens + environment_tokens(config)


def _micro_batches(config: Config) -> dict[str, int]:
    """Derived micro-batch sizes or token budgets of `update` and `logprob`.

    A section without a setting follows the update's mode: sequences per micro-batch, or a token budget. The
    forward-only passes of `logprob` get twice the update's size.
    """
    update, logprob = config.update, config.logprob
    own = logprob.micro_batch_size or logprob.max_tokens_per_device
    if update.micro_batch_size is not None:
        return {} if own else {"logprob.micro_batch_size": 2 * update.micro_batch_size}
    budget = update.max_tokens_per_device or max(MICRO_BATCH_TOKENS, longest_sequence(config))
    values = {"update.max_tokens_per_device": budget}
    return values if own else values | {"logprob.max_tokens_per_device": 2 * budget}


def _critic(config: Config) -> dict[str, Any]:
    """Derived values of the section `critic`; none of its sizes without a critic."""
    critic, update = config.critic, config.update
    enabled = critic.enabled
    if enabled is None:
        enabled = takes(config.advantage.estimator, "values")
    values: dict[str, Any] = {"critic.enabled": enabled}
    if not enabled:
        return values
    values |= {
        "critic.mini_batch_size": config.update.mini_batch_size or config.size_of_mini_batches,
        "critic.epochs": update.epochs,
    }
    rows, tokens = critic.micro_batch_size, critic.max_tokens_per_device
    if rows is None and tokens is None:
        rows = update.micro_batch_size
        tokens = _micro_batches(config).get("update.max_tokens_per_device") if rows is None else None
        values |= {"critic.micro_batch_size": rows, "critic.max_tokens_per_device": tokens}
    if critic.forward_micro_batch_size is None and critic.forward_max_tokens_per_device is None:
        values["critic.forward_micro_batch_size"] = rows and 2 * rows
        values["critic.forward_max_tokens_per_device"] = tokens and 2 * tokens
    return values


def _reward_model_tokens(config: Config, sizes: Mapping[str, int]) -> int | None:
    """The derived token budget of reward models, a forward-only pass like those of `logprob`."""
    if not config.reward.models:
        return None
    logprob = config.logprob.max_tokens_per_device or sizes.get("logprob.max_tokens_per_device")
    return logprob or 2 * max(MICRO_BATCH_TOKENS, longest_sequence(config))


def _budgets_hold_a_sequence(config: Config) -> None:
    longest, added = longest_sequence(config), environment_tokens(config)
    more = f" + rollout.max_environment_tokens ({added})" if added else ""
    budgets = {
        "update.max_tokens_per_device": config.update.max_tokens_per_device,
        "logprob.max_tokens_per_device": config.logprob.max_tokens_per_device,
        "critic.max_tokens_per_device": config.critic.max_tokens_per_device,
        "critic.forward_max_tokens_per_device": config.critic.forward_max_tokens_per_device,
        "reward.model_max_tokens_per_device": config.reward.model_max_tokens_per_device,
    }
    problems = [
        f"{key}={budget} cannot hold one sequence of data.max_prompt_length "
        f"({config.data.max_prompt_length}) + rollout.max_new_tokens ({config.rollout.max_new_tokens}){more} "
        f"= {longest} tokens; set it to at least {longest}"
        for key, budget in budgets.items()
        if budget is not None and budget < longest
    ]
    if problems:
        raise ConfigError(problems)


def _folder_name(stem: str) -> str:
    return re.sub(r"[^\w.-]+", "-", stem).lstrip(".-") or "run"


def _heldout(train: str | tuple[str, ...]) -> str | None:
    if isinstance(train, str) and train.startswith(BUILTIN) and not train.endswith(HELDOUT):
        return train + HELDOUT
    return None


def _wandb(environ: Mapping[str, str]) -> str:
    mode = environ.get("WANDB_MODE")
    if mode:
        # An unknown mode (such as `dryrun`) must never cause data to be uploaded.
        return mode if mode in WANDB_MODES else "disabled"
    return "online" if environ.get("WANDB_API_KEY") else "disabled"
