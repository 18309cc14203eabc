"""Derived values for configuration keys that are null, and warnings about settings that will not learn.

Data flow: merged layers -> `Config` -> `derived_values` fills nulls -> `warnings_about`. This module reads no
data set and queries no device, so `run.steps` stays null if it depends on the length of the data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quatrain.config.errors import ConfigError
from quatrain.config.schema import (
    ADVANTAGE_SCALES,
    AGGREGATION_OF_ESTIMATOR,
    AGGREGATION_OF_LOSS,
    Config,
    UpdateConfig,
)

# Token budget of one forward/backward pass per data shard if the user sets no micro-batch size.
MICRO_BATCH_TOKENS = 16384
BUILTIN = "builtin:"
GREEDY_ESTIMATOR = "remax"
"""The built-in advantage estimator whose baseline is the reward of a greedy completion."""
CRITIC_ESTIMATOR = "gae"
"""The built-in advantage estimator that needs a critic."""
HELDOUT = "-heldout"
DEFAULT_CAP = UpdateConfig.model_fields["correction_cap"].default
RATE, LORA_RATE = 1e-6, 1e-5
"""Learning rates of all weights, and of adapters: about ten times as much, as in LoRA Without Regret."""
SFT_RATE, SFT_LORA_RATE = 1e-5, 1e-4
RANDOM_RATE, RANDOM_LORA_RATE = 1e-3, 1e-2
"""Those of a warm start, of a pretrained model and of a built-in one, whose weights are random."""
WANDB_MODES = ("disabled", "offline", "online")
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "passk")
# bfloat16 has 8 bits of precision: adding less than 1/512 of a weight rounds back to the weight. Weights are
# around 0.02, and an adamw update is about as large as the learning rate.
LEAST_BFLOAT16_RATE = 1e-4


def derived_values(config: Config, stem: str, environ: Mapping[str, str], now: datetime) -> dict[str, Any]:
    """Values by dotted key, for every null of `config` that can be derived from its other values.

    `run.name` is made of `stem`, the configuration file's name without extension, and the time `now`. Raises
    ConfigError if a token budget set by the user cannot hold the longest possible sequence.
    """
    _budgets_hold_a_sequence(config)
    sizes = _micro_batches(config)
    values = {
        "run.name": f"{_folder_name(stem)}-{now:%Y%m%d-%H%M%S}",
        "model.tokenizer": config.model.path,
        "lora.alpha": float(config.lora.rank) or None,
        "data.eval": _heldout(config.data.train),
        "sft.data": config.data.train,
        **_learning_rates(config),
        "advantage.scale": ADVANTAGE_SCALES.get(config.advantage.estimator, (None,))[0],
        "rollout.max_environment_tokens": environment_tokens(config) or None,
        "rollout.greedy_baseline": config.advantage.estimator == GREEDY_ESTIMATOR,
        **_overlong(config),
        "update.mini_batch_size": mini_batch_size(config),
        "update.loss_aggregation": AGGREGATION_OF_LOSS.get(config.update.loss)
        or AGGREGATION_OF_ESTIMATOR.get(config.advantage.estimator, "token_mean"),
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
    limit = config.reward.overlong_limit or config.rollout.max_new_tokens
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


def mini_batch_size(config: Config) -> int:
    """Prompts per optimizer step: as set, or the batch split into `update.num_mini_batches` parts."""
    return config.update.mini_batch_size or math.ceil(
        config.data.batch_size / (config.update.num_mini_batches or 1)
    )


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
    enabled = config.advantage.estimator == CRITIC_ESTIMATOR if critic.enabled is None else critic.enabled
    values: dict[str, Any] = {"critic.enabled": enabled}
    if not enabled:
        return values
    values |= {
        "critic.mini_batch_size": mini_batch_size(config),
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


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


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


def warnings_about(config: Config, environ: Mapping[str, str]) -> list[str]:
    """One warning for each setting that is valid but probably not intended."""
    return [*_about_learning(config), *_about_sampling(config), *_about_the_rest(config, environ)]


def _about_learning(config: Config) -> list[str]:
    estimator, n = config.advantage.estimator, config.rollout.n
    warnings = []
    if n == 1 and estimator in GROUP_ESTIMATORS:
        warnings.append(
            f"rollout.n is 1 and advantage.estimator is {estimator}, which compares the samples of one "
            "prompt: every advantage is 0 and nothing will be learned; set rollout.n to 2 or more, or "
            "advantage.estimator to reinforce"
        )
    if config.optimizer.learning_rate == 0:
        warnings.append("optimizer.learning_rate is 0: training does not change the weights")
    warnings += [*_about_rounding(config), *_about_adapters(config)]
    if config.update.kl_coef > 0 and config.update.kl_estimator == "k1":
        warnings.append(
            f"update.kl_estimator is k1 and update.kl_coef {config.update.kl_coef:g}: used as a loss term, "
            "k1 has a gradient of mean zero, which does not pull the policy towards the reference; set "
            "update.kl_estimator to k2, k3 or k3_straight"
        )
    if config.update.kl_coef > 0 and config.reward.kl_coef > 0:
        warnings.append(
            f"update.kl_coef is {config.update.kl_coef:g} and reward.kl_coef {config.reward.kl_coef:g}: the "
            "KL to the reference counts twice, in the loss and in the reward; set one of the two to 0"
        )
    if not any(entry.weight for entry in config.reward.entries.values()):
        warnings.append(
            "every weight in reward.functions is 0: every reward is 0 and nothing will be learned"
        )
    return warnings


def _rates(config: Config) -> dict[str, float]:
    """The learning rates of the policy by key, where they are set and something is trained with them."""
    rates = {"optimizer.learning_rate": config.optimizer.learning_rate}
    if config.sft.steps:
        rates["sft.learning_rate"] = config.sft.learning_rate
    return {key: rate for key, rate in rates.items() if rate}


def _about_rounding(config: Config) -> list[str]:
    nearest = not config.optimizer.stochastic_rounding
    if config.model.param_dtype != "bfloat16" or config.lora.rank or not nearest:
        return []
    return [
        f"optimizer.stochastic_rounding is false, model.param_dtype bfloat16 and {key} {rate:g}: an update "
        "smaller than bfloat16's resolution (about 1/256 of a weight) is lost by rounding, so little or "
        "nothing will be learned; set optimizer.stochastic_rounding to true, or model.param_dtype to float32"
        for key, rate in _rates(config).items()
        if rate < LEAST_BFLOAT16_RATE
    ]


def _about_adapters(config: Config) -> list[str]:
    usual = {"optimizer.learning_rate": LORA_RATE, "sft.learning_rate": SFT_LORA_RATE}
    return [
        f"lora.rank is {config.lora.rank} and {key} {rate:g}, a rate for training all weights: adapters need "
        f"about ten times as much; set {key} to {10 * rate:g}, or to null for {usual[key]:g}"
        for key, rate in _rates(config).items()
        if config.lora.rank and rate < usual[key]
    ]


def _about_sampling(config: Config) -> list[str]:
    rollout = config.rollout
    warnings = []
    if rollout.temperature == 0:
        same = f", so the {rollout.n} samples of a prompt are identical" if rollout.n > 1 else ""
        warnings.append(
            f"rollout.temperature is 0: sampling is greedy and explores nothing{same}; "
            "set it above 0 to train"
        )
    shared = not rollout.has_fleet and config.placement.rollout in (None, config.placement.train)
    if rollout.max_staleness and shared:
        warnings.append(
            f"rollout.max_staleness is {rollout.max_staleness} and the rollout has the devices of training: "
            "both compete for them and little or nothing is gained; give the rollout devices of its own in "
            "placement.rollout, or set rollout.max_staleness to 0"
        )
    every = config.checkpoint.every_steps
    if 0 < every <= rollout.max_staleness:
        warnings.append(
            f"checkpoint.every_steps is {every} and rollout.max_staleness {rollout.max_staleness}: no batch "
            f"is sampled ahead of a checkpoint, so the staleness is at most {every - 1}; save checkpoints "
            "less often, or lower rollout.max_staleness"
        )
    if config.update.correction == "none" and config.update.correction_cap != DEFAULT_CAP:
        warnings.append("update.correction_cap has no effect, because update.correction is none")
    estimator = config.advantage.estimator
    comparing = (*GROUP_ESTIMATORS, GREEDY_ESTIMATOR)
    if rollout.dynamic_sampling_rounds > 1 and estimator in ADVANTAGE_SCALES and estimator not in comparing:
        warnings.append(
            f"rollout.dynamic_sampling_rounds is {rollout.dynamic_sampling_rounds} and advantage.estimator "
            f"is {estimator}, which also learns from groups whose samples have the same reward: dynamic "
            f"sampling leaves these out; set it to 1, or take one of {', '.join(comparing)}"
        )
    filters = {
        "rollout.top_p < 1": rollout.top_p < 1,
        "rollout.top_k > 0": rollout.top_k > 0,
        "rollout.min_p > 0": rollout.min_p > 0,
    }
    active = [name for name, on in filters.items() if on]
    if active and rollout.temperature > 0:
        warnings.append(
            f"with {' and '.join(active)} the sampled and the trained distribution differ: the trainer "
            "computes log-probabilities at rollout.temperature without these filters; the difference is "
            "logged as rollout/logprob_diff"
        )
    return warnings


def _about_the_rest(config: Config, environ: Mapping[str, str]) -> list[str]:
    warnings = []
    if config.data.eval is None:
        warnings.append("data.eval is null: there is no evaluation before, during or after training")
    if config.run.steps is not None and config.run.epochs != 1.0:
        warnings.append(f"run.epochs ({config.run.epochs:g}) has no effect, because run.steps is set")
    if config.reward.model_max_tokens_per_device is not None and not config.reward.models:
        warnings.append(
            "reward.model_max_tokens_per_device has no effect, because reward.functions has no reward model "
            "(model:PATH)"
        )
    mode = environ.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES and config.logging.wandb == "disabled":
        known = ", ".join(WANDB_MODES)
        warnings.append(f"WANDB_MODE is none of {known}: Weights & Biases is disabled; set logging.wandb")
    return warnings
