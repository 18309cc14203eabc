"""Settings that are valid but probably not intended: a table of warnings, in the form of the rules.

Data flow: the resolved `Config` -> `warnings_about` -> the log and the output of `quatrain config`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quatrain.config.algorithms import ESTIMATORS, takes
from quatrain.config.fields import is_default, value_at
from quatrain.config.schema import Config

WANDB_MODES = ("disabled", "offline", "online")
RATE, LORA_RATE = 1e-6, 1e-5
"""Learning rates of all weights, and of adapters: about ten times as much, as in LoRA Without Regret."""
GIVEN_RATES = {"sft": (1e-5, 1e-4), "dpo": (5e-7, 5e-6), "rm": (1e-5, 1e-4)}
"""The same two on data that exist."""
# bfloat16 has 8 bits of precision: adding less than 1/512 of a weight rounds back to the weight. Weights are
# around 0.02, and an adamw update is about as large as the learning rate.
LEAST_BFLOAT16_RATE = 1e-4
COMPARING = [
    name
    for name, estimator in ESTIMATORS.items()
    if estimator.compares_samples or takes(name, "baseline_rewards")
]
"""Estimators that learn nothing from a group whose samples have the same reward."""


def _compares(c: Config) -> bool:
    estimator = ESTIMATORS.get(c.advantage.estimator)
    return estimator is not None and estimator.compares_samples


def _shares_devices(c: Config) -> bool:
    return not c.rollout.has_fleet and c.placement.rollout in (None, c.placement.train)


WARNINGS: tuple[tuple[Callable[[Config], object], str], ...] = (
    (
        lambda c: c.rollout.n == 1 and _compares(c),
        "rollout.n is 1 and advantage.estimator is {c.advantage.estimator}, which compares the samples of "
        "one prompt: every advantage is 0 and nothing will be learned; set rollout.n to 2 or more, or "
        "advantage.estimator to reinforce",
    ),
    (
        lambda c: c.optimizer.learning_rate == 0,
        "optimizer.learning_rate is 0: training does not change the weights",
    ),
    (
        lambda c: c.update.kl_coef > 0 and c.update.kl_estimator == "k1",
        "update.kl_estimator is k1 and update.kl_coef {c.update.kl_coef:g}: used as a loss term, k1 has a "
        "gradient of mean zero, which does not pull the policy towards the reference; set "
        "update.kl_estimator to k2, k3 or k3_straight",
    ),
    (
        lambda c: c.update.kl_coef > 0 and c.reward.kl_coef > 0,
        "update.kl_coef is {c.update.kl_coef:g} and reward.kl_coef {c.reward.kl_coef:g}: the KL to the "
        "reference counts twice, in the loss and in the reward; set one of the two to 0",
    ),
    (
        lambda c: not any(entry.weight for entry in c.reward.entries.values()),
        "every weight in reward.functions is 0: every reward is 0 and nothing will be learned",
    ),
    (
        lambda c: c.rollout.temperature == 0 and c.rollout.n > 1,
        "rollout.temperature is 0: sampling is greedy and explores nothing, so the {c.rollout.n} samples of "
        "a prompt are identical; set it above 0 to train",
    ),
    (
        lambda c: c.rollout.temperature == 0 and c.rollout.n == 1,
        "rollout.temperature is 0: sampling is greedy and explores nothing; set it above 0 to train",
    ),
    (
        lambda c: c.rollout.max_staleness and _shares_devices(c),
        "rollout.max_staleness is {c.rollout.max_staleness} and the rollout has the devices of training: "
        "both compete for them and little or nothing is gained; give the rollout devices of its own in "
        "placement.rollout, or set rollout.max_staleness to 0",
    ),
    (
        lambda c: 0 < c.checkpoint.every_steps <= c.rollout.max_staleness,
        "checkpoint.every_steps is {c.checkpoint.every_steps} and rollout.max_staleness "
        "{c.rollout.max_staleness}: no batch is sampled ahead of a checkpoint, so the staleness stays below "
        "{c.checkpoint.every_steps}; save checkpoints less often, or lower rollout.max_staleness",
    ),
    (
        lambda c: c.run.steps is not None and c.run.steps <= c.critic.warmup_steps,
        "critic.warmup_steps is {c.critic.warmup_steps} and run.steps {c.run.steps}: the policy rests in "
        "every training step and is not trained; set critic.warmup_steps below run.steps",
    ),
    (
        lambda c: (c.update.num_mini_batches or 0) > c.mini_batches_by_number,
        "update.num_mini_batches is {c.update.num_mini_batches} and data.batch_size {c.data.batch_size}: "
        "parts of {c.size_of_mini_batches} prompts (update.mini_batch_size) are {c.mini_batches_by_number}, "
        "and an epoch has as many optimizer steps; set data.batch_size to a multiple of "
        "update.num_mini_batches, or update.num_mini_batches to {c.mini_batches_by_number}",
    ),
    (
        lambda c: c.update.correction == "none" and not is_default(c, "update.correction_cap"),
        "update.correction_cap has no effect, because update.correction is none",
    ),
    (
        lambda c: (
            c.rollout.dynamic_sampling_rounds > 1
            and c.advantage.estimator in ESTIMATORS
            and c.advantage.estimator not in COMPARING
        ),
        "rollout.dynamic_sampling_rounds is {c.rollout.dynamic_sampling_rounds} and advantage.estimator is "
        "{c.advantage.estimator}, which also learns from groups whose samples have the same reward: dynamic "
        f"sampling leaves these out; set it to 1, or take one of {', '.join(COMPARING)}",
    ),
    (
        lambda c: c.data.eval is None,
        "data.eval is null: there is no evaluation before, during or after training",
    ),
    (
        lambda c: c.reward.model_max_tokens_per_device is not None and not c.reward.models,
        "reward.model_max_tokens_per_device has no effect, because reward.functions has no reward model "
        "(model:PATH)",
    ),
)
ON_GIVEN_DATA: tuple[tuple[Callable[[Config], object], str], ...] = (
    (
        lambda c: c.given.learning_rate == 0,
        "{c.run.task}.learning_rate is 0: training does not change the weights",
    ),
    (
        lambda c: c.given.eval is None and c.data.eval is None,
        "{c.run.task}.eval is null: there is no evaluation before, during or after training",
    ),
)
"""Those of `quatrain sft`, `dpo` and `rm`, in place of the table above."""


def warnings_about(
    config: Config, environ: Mapping[str, str], chose: Callable[[str], bool] = lambda key: False
) -> list[str]:
    """One warning for each setting that is valid but probably not intended; `chose` as `Resolved.chose`."""
    table = ON_GIVEN_DATA if config.run.on_given_data else WARNINGS
    warnings = [sentence.format(c=config) for holds, sentence in table if holds(config)]
    steps, epochs = config.key_of("steps"), config.key_of("epochs")
    number, passes = value_at(config, steps), value_at(config, epochs)
    # The default too, where somebody has asked for it: the steps may be those of the quickstart.
    if number and (chose(epochs) or not is_default(config, epochs)):
        unset = "0" if config.run.on_given_data else "null"
        warnings.append(
            f"{epochs} ({passes:g}) has no effect, because {steps} is {number}; set {steps}={unset} to count "
            "epochs"
        )
    warnings += _about_rates(config)
    mode = environ.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES and config.logging.wandb == "disabled":
        known = ", ".join(WANDB_MODES)
        warnings.append(f"WANDB_MODE is none of {known}: Weights & Biases is disabled; set logging.wandb")
    return warnings


def _about_rates(config: Config) -> Iterator[str]:
    rates: dict[str, tuple[Any, float]] = {
        "optimizer.learning_rate": (config.optimizer.learning_rate, LORA_RATE),
        "sft.learning_rate": (config.sft.steps and config.sft.learning_rate, GIVEN_RATES["sft"][1]),
    }
    if config.run.on_given_data:
        task = config.run.task
        rates = {f"{task}.learning_rate": (config.given.learning_rate, GIVEN_RATES[task][1])}
    rounds = config.model.param_dtype == "bfloat16" and not config.optimizer.stochastic_rounding
    for key, (rate, usual) in rates.items():
        if rate and rounds and not config.lora.rank and rate < LEAST_BFLOAT16_RATE:
            yield (
                f"optimizer.stochastic_rounding is false, model.param_dtype bfloat16 and {key} {rate:g}: an "
                "update smaller than bfloat16's resolution (about 1/256 of a weight) is lost by rounding, so "
                "little or nothing will be learned; set optimizer.stochastic_rounding to true, or "
                "model.param_dtype to float32"
            )
        if rate and config.lora.rank and rate < usual:
            yield (
                f"lora.rank is {config.lora.rank} and {key} {rate:g}, a rate for training all weights: "
                f"adapters need about ten times as much; set {key} to {10 * rate:g}, or to null for {usual:g}"
            )
