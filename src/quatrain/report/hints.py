"""Hints: what the metrics of training steps in a row show to be probably wrong, each said once in a run.

Data flow: the numbers of a step -> `Hints.found` -> `report.writer.Report`, which logs each as a warning and
writes it to `hints.jsonl`, for the run page.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.config.derive import environment_tokens, longest_sequence, value_at
from quatrain.config.schema import Config
from quatrain.reward.functions import BUILTIN_FUNCTIONS, FORMATS, IN_WORKERS
from quatrain.reward.scorer import short_names
from quatrain.types.batches import ENVIRONMENT
from quatrain.workers.pool import default_workers

TRUNCATED, REWARD_SHARE, PADDING, REJECTED = 0.5, 0.3, 0.3, 0.3
"""Fractions of completions cut, of a step spent on rewards, of padding, and of tokens that `update.reject`
rejects, above which there is a hint."""
PICTURE_SHARE, FULL = 0.3, 0.9
"""Fraction of a step spent on pictures above which there is a hint, and of their store above which it is
full."""
OUTSIDE = 1e-4
"""Probability that a teacher gives to words that the policy does not have, above which there is a hint."""
STEPS_IN_A_ROW, STEPS_AT_ZERO = 3, 5
"""Training steps in a row that show something before there is a hint; reward functions that return only 0."""
_SECONDS = re.compile(r"reward/(.+)/seconds")
_LARGEST = re.compile(r"reward/(.+)/max")


class Hint(NamedTuple):
    """Its name, which is the same in every run, and the sentence."""

    hint: str
    text: str


class Hints:
    """Looks at the numbers of each training step of a run of `steps` steps.

    `said`: names of hints that an earlier part of the run has given.
    """

    def __init__(self, config: Config, steps: int, said: Collection[str] = ()):
        self._config, self._steps, self._said = config, steps, set(said)
        self._in_a_row: Counter[str] = Counter()
        self._has_begun = False
        self._specs = {name: spec for spec, name in short_names(config.reward).items()}

    def found(self, step: int, numbers: Mapping[str, float]) -> list[Hint]:
        """The hints that the metrics of `step`, and of the steps before it, give for the first time."""
        texts = {
            "truncated": self._truncated(numbers),
            "no_signal": self._no_signal(numbers),
            # The first step of a process also starts workers and compiles.
            "slow_reward": self._slow_reward(numbers) if self._has_begun else None,
            "slow_pictures": self._slow_pictures(numbers) if self._has_begun else None,
            "padding": self._padding(numbers),
            "rejected": _rejected(numbers),
            "outside_mass": _outside(numbers),
            "learning_rate": self._no_learning_rate(step, numbers),
            **{f"always_zero:{name}": self._always_zero(name) for name in _zero_rewards(numbers)},
        }
        self._has_begun = True
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name, text in texts.items() if text})
        new = [
            Hint(name, text)
            for name, text in texts.items()
            if text and name not in self._said and self._in_a_row[name] >= _steps_needed(name)
        ]
        self._said |= {hint.hint for hint in new}
        return new

    def _truncated(self, numbers: Mapping[str, float]) -> str | None:
        fraction = numbers.get("rollout/truncated_fraction", 0.0)
        if fraction <= TRUNCATED:
            return None
        rollout = self._config.rollout
        if rollout.has_episodes:
            return (
                f"{fraction:.0%} of the episodes ended where a limit on tokens left no room, most of them "
                f"before their answer: raise rollout.max_new_tokens ({rollout.max_new_tokens}) if what the "
                "policy writes in all turns comes near it (length/completion), else "
                f"rollout.max_environment_tokens ({environment_tokens(self._config)}), for what is written "
                "between them"
            )
        return (
            f"{fraction:.0%} of the completions were cut at rollout.max_new_tokens "
            f"({self._config.rollout.max_new_tokens}), most of them before their answer: raise it, or "
            "ask for shorter completions in data.system_prompt, with an example of their form"
        )

    def _no_signal(self, numbers: Mapping[str, float]) -> str | None:
        if numbers.get("advantage/zero_signal_fraction", 0.0) != 1 or self._config.distill.teacher:
            return None
        return (
            "no group had a signal: all samples of each prompt got the same reward (mean "
            f"{numbers.get('reward/mean', 0.0):.3g}), so the rewards gave no gradient; look "
            "at the completions in samples/. If all are wrong, take easier prompts or a reward with more "
            "values; if all are right, harder prompts; more samples (rollout.n) help with both"
        )

    def _slow_reward(self, numbers: Mapping[str, float]) -> str | None:
        step_s = numbers.get("time/step_s", 0.0)
        seconds = {m[1]: value for name, value in numbers.items() if (m := _SECONDS.fullmatch(name))}
        remedies = {name: remedy for name in seconds if (remedy := self._faster(name))}
        # With rollouts ahead, rewards cost what training waits for them.
        spent = min(sum(seconds[name] for name in remedies), numbers.get("time/wait_rollout_s", step_s))
        if not remedies or spent <= REWARD_SHARE * step_s:
            return None
        name = max(remedies, key=seconds.__getitem__)
        return (
            f"rewards took {spent / step_s:.0%} of the step; the slowest is `{name}` with "
            f"{seconds[name]:.1f} s of {step_s:.1f} s: {remedies[name]}"
        )

    def _faster(self, name: str) -> str | None:
        """How the reward called `name` in metrics can take less time; None: no setting does it."""
        reward, spec = self._config.reward, self._specs.get(name, "")
        if spec in BUILTIN_FUNCTIONS:
            return None
        if spec in reward.models:
            return (
                "take a smaller reward model, or let it compute more at once "
                f"(reward.model_max_tokens_per_device, which is {reward.model_max_tokens_per_device})"
            )
        if ":" not in IN_WORKERS.get(spec, spec):
            return "make it faster; in a file, as path.py:function, several processes can call it at once"
        if reward.workers == 0:
            return "make it faster, or let processes call it at once (reward.workers above 0)"
        if reward.per_call == "batch":
            return (
                "make it faster, or let several processes call it at once (reward.per_call: group or sample)"
            )
        workers = default_workers() if reward.workers is None else reward.workers
        return f"make it faster, or let more processes call it (reward.workers, which is {workers})"

    def _slow_pictures(self, numbers: Mapping[str, float]) -> str | None:
        spent, step_s = numbers.get("time/vision_s", 0.0), numbers.get("time/step_s", 0.0)
        if spent <= PICTURE_SHARE * step_s:
            return None
        model, remedy = self._config.model, "lower data.image_max_pixels"
        if numbers.get("vision/store_bytes", 0.0) > FULL * model.vision_cache_bytes:
            remedy = (
                "raise model.vision_cache_bytes, so that what was computed of a picture is kept until it is "
                f"drawn again (it is {model.vision_cache_bytes} and full), or {remedy}"
            )
        elif model.vision == "all":
            remedy += ", or train less of the tower (model.vision projector or frozen)"
        return (
            f"pictures took {spent / step_s:.0%} of the step, {spent:.1f} s of {step_s:.1f} s for "
            f"{numbers.get('vision/tower_pictures', 0.0):.0f} pictures: {remedy}"
        )

    def _padding(self, numbers: Mapping[str, float]) -> str | None:
        fraction, update = numbers.get("batch/padding_fraction", 0.0), self._config.update
        if fraction <= PADDING:
            return None
        budget, longest = update.max_tokens_per_device, longest_sequence(self._config)
        several = numbers.get("batch/micro_batches", 1.0) > numbers.get("update/optimizer_steps", 1.0)
        if budget is None:
            remedy = (
                "with update.micro_batch_size each sequence is padded to the longest; set it to null, and "
                "sequences are packed up to update.max_tokens_per_device tokens"
            )
        elif several:
            remedy = (
                "few sequences fit into a micro-batch; set a larger update.max_tokens_per_device (it is "
                f"{budget}), if the memory allows it"
            )
        else:
            smaller = f"set a smaller update.max_tokens_per_device (it is {budget}, and at least {longest})"
            sizes = self._config.key_of("batch_size")
            sizes += "" if self._config.run.on_given_data else ", update.mini_batch_size"
            more = f"train on more sequences in an optimizer step ({sizes})"
            remedy = "one micro-batch holds a whole mini-batch, and is not full; "
            remedy += f"{smaller}, or {more}" if budget >= 2 * longest else more
        return f"{fraction:.0%} of the tokens that the update computed were padding: {remedy}"

    def _no_learning_rate(self, step: int, numbers: Mapping[str, float]) -> str | None:
        if numbers.get("update/learning_rate") != 0 or step >= self._steps:
            return None
        key = self._config.key_of("learning_rate")
        section = key.partition(".")[0]
        rate = value_at(self._config, key)
        schedule = value_at(self._config, f"{section}.schedule")
        why = f"{section}.schedule is {schedule}" if rate else "set it above 0"
        return f"the learning rate was 0, so the weights did not change ({key} is {rate:g}; {why})"

    def _always_zero(self, name: str) -> str:
        remedy = "look at the completions in samples/, and whether the function reads them as it should"
        if name in FORMATS:
            remedy = (
                "the model never writes the format: ask for it in data.system_prompt, with an example, "
                "or begin with demonstrations (sft.steps)"
            )
        elif name == ENVIRONMENT and self._config.rollout.has_episodes:
            remedy = (
                "the environment gave no reward: look at the episodes in samples/, and whether its step, "
                "its get_reward or its attribute reward gives what it should"
            )
        return (
            f"the reward function `{name}` returned 0 for every completion of {STEPS_AT_ZERO} steps: {remedy}"
        )


def _rejected(numbers: Mapping[str, float]) -> str | None:
    prefix, dropped = "update/rejected_fraction/", "update/dropped_fraction"
    found = {name: value for name, value in numbers.items() if name.startswith(prefix) or name == dropped}
    name = max(found, key=found.__getitem__, default="")
    if found.get(name, 0.0) <= REJECTED:
        return None
    rule = f"the rule {name.removeprefix(prefix)} of update.reject" if name != dropped else "update.reject"
    return (
        f"{rule} rejected {found[name]:.0%} of the tokens, which are not trained on: widen its bounds, or "
        "see that sampler and trainer agree (rollout/logprob_diff_mean, update/behaviour_kl, model.dtype)"
    )


def _outside(numbers: Mapping[str, float]) -> str | None:
    mass = numbers.get("distill/outside_mass", 0.0)
    if mass <= OUTSIDE:
        return None
    return (
        f"the teacher gives {mass:.2g} of its probability to words that the policy does not have, which the "
        "loss over the vocabulary leaves out: see that the two models have the same words, or take "
        "distill.loss sampled"
    )


def _zero_rewards(numbers: Mapping[str, float]) -> list[str]:
    """The reward functions that gave only 0."""
    largest = {m[1]: value for name, value in numbers.items() if (m := _LARGEST.fullmatch(name))}
    return [name for name, value in largest.items() if value == 0 == numbers.get(f"reward/{name}/min")]


def _steps_needed(hint: str) -> int:
    return STEPS_AT_ZERO if hint.startswith("always_zero:") else STEPS_IN_A_ROW


def read_hints(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(the step, name and text of each hint in a file `hints.jsonl`, number of lines without one)."""
    hints, num_damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            step = row.get("step") if isinstance(row.get("step"), int) else None
            hints.append({"step": step, "hint": str(row["hint"]), "text": str(row["text"])})
        except (ValueError, KeyError, AttributeError, RecursionError):
            num_damaged += 1
    return hints, num_damaged


def hints_in(path: Path) -> list[str]:
    """The names of the hints in a file `hints.jsonl`."""
    return [hint["hint"] for hint in read_hints(path)[0]]
