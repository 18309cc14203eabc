"""Which keys have a part in a run of which command: `quatrain train`, `sft`, `dpo` or `rm` (`run.task`).

Used by `rules.py`, which refuses what was set without a part in the run, by `derive.py`, which leaves it
null, and by `load.py`, which takes of the quickstart what suits the command.
"""

from __future__ import annotations

from typing import Any

from quatrain.config.data_sets import data_set_list, heldout_gym, is_gym

COMMANDS = {"rl": "train", "sft": "sft", "dpo": "dpo", "rm": "rm"}
"""`run.task` -> the command that runs it."""
EVALUATED = {
    "rl": "data.eval",
    "sft": "sft.eval or data.eval",
    "dpo": "dpo.eval or data.eval",
    "rm": "rm.eval",
}
"""`run.task` -> the keys that name what its evaluations read."""
SECTIONS = ("sft", "dpo", "rm")
BUILTIN, HELDOUT = "builtin:", "-heldout"
_OF_ALL = {
    *("seed", "mesh", "run", "model", "lora", "optimizer", "logprob", "checkpoint", "logging", "hub"),
    *("distributed", "placement.train", "offload.optimizer", "eval.every_steps", "eval.before"),
    *(f"update.{key}" for key in ("micro_batch_size", "max_tokens_per_device")),
    *("update.max_bad_steps", "data.shuffle", "data.question_column", "data.system_prompt"),
    *("data.chat_template", "data.chat_template_kwargs"),
}
"""Keys and sections with a part in every run on data that exist."""
_WHERE_IT_GENERATES = {
    *("rollout", "reward", "eval", "placement.rollout", "placement.reward", "offload.policy"),
    *("offload.reward_models", "data.max_prompt_length", "data.on_long_prompt", "data.answer_column"),
}
"""Further ones where the run also completes the prompts of `data.eval` and scores them."""
_OF_PICTURES = {
    *("data.image_root", "data.verify_images", "data.on_bad_image"),
    *("data.image_max_pixels", "data.image_min_pixels"),
}
"""Keys of the pictures in rows, which `quatrain sft` reads, and evaluations that complete prompts."""
_OF_TRAINING_STEPS = {
    *("run.steps", "run.epochs", "logging.sample_tokens"),
    *(f"optimizer.{key}" for key in ("learning_rate", "schedule", "warmup_steps", "final_fraction")),
    *(f"rollout.{key}" for key in ("n", "greedy_baseline", "dynamic_sampling_rounds", "max_staleness")),
    *(f"rollout.{key}" for key in ("temperature", "top_p", "top_k", "min_p")),  # evaluations have `eval.…`
    *("rollout.in_flight", "reward.kl_coef", "reward.kl_target", "reward.kl_horizon"),
}
"""Keys of those sections that only the training steps of `quatrain train` read."""
_ALONE_IN_SFT = ("sft.eval", "sft.epochs")
"""Keys of `sft` that a warm start does not read."""
_INSTEAD = {
    "run.steps": "steps",
    "run.epochs": "epochs",
    "data.train": "data",
    "data.eval": "eval",
    "data.batch_size": "batch_size",
    "update.loss": "loss",
    "update.kl_coef": "beta",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "schedule",
    "optimizer.warmup_steps": "warmup_steps",
}
"""Key of `quatrain train` -> the key of the given section that has its place, where that section has it."""


def has_part(c: Any, key: str) -> bool:
    """Whether a run with the `Config` c reads the key."""
    task, section = c.run.task, key.partition(".")[0]
    if section == "tinker":
        return False
    if section in SECTIONS:
        return section == task or (task == "rl" and section == "sft" and key not in _ALONE_IN_SFT)
    if task == "rl":
        return True
    if key == "data.train":
        return task == "sft" and c.sft.data in (None, c.data.train)
    if key == "data.eval":
        return task != "rm"
    if key == "update.share_prompts":
        return task != "sft"  # whose rows have a prompt each
    if key in _OF_TRAINING_STEPS:
        return False
    if key in _OF_PICTURES:
        return task == "sft" or generates(c)
    named = {key, section}
    return bool(named & _OF_ALL) or (bool(named & _WHERE_IT_GENERATES) and generates(c))


def generates(c: Any) -> bool:
    """Whether a run on data that exist also completes prompts, those of `data.eval`, and scores them."""
    return c.run.task in ("sft", "dpo") and (c.data.eval or heldout(c)) is not None


def heldout(c: Any) -> str | tuple[str, ...] | None:
    """What `data.eval` is derived to be: further rows of data that are made, not read, or None."""
    train = {"rl": c.data.train, "sft": c.sft.data or c.data.train}.get(c.run.task)
    if train is None:
        return None
    if is_gym(train):
        try:
            sets = tuple(map(heldout_gym, data_set_list(train)))
        except ValueError:  # the reader of the data raises it
            return None
        return sets[0] if isinstance(train, str) else sets
    if isinstance(train, str) and train.startswith(BUILTIN) and not train.endswith(HELDOUT):
        return train + HELDOUT
    return None


def without_part(c: Any, key: str) -> str:
    """Why a key that has no part in the run must not be set, and what to do instead."""
    task, section = c.run.task, key.partition(".")[0]
    if key == "data.train" and task == "sft":
        return "has no effect beside sft.data; leave one of the two out"
    where, instead = f"in quatrain {COMMANDS[task]}", "use quatrain train"
    if section == "tinker":
        instead = "use quatrain serve --train"
    elif section in SECTIONS:
        first = section == "sft" and task != "rl"
        instead = f"run quatrain {section}{' first, and set model.path to the final/ of its run' * first}"
    elif _INSTEAD.get(key) in type(getattr(c, task)).model_fields:
        instead = f"set {task}.{_INSTEAD[key]}"
    elif task != "rm" and key not in _OF_TRAINING_STEPS and {key, section} & _WHERE_IT_GENERATES:
        where, instead = f"{where} without data.eval", "set that"
    return f"has no effect {where}; {instead}, or leave this key out"
