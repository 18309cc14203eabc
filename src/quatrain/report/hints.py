"""Hints: what the metrics of a training step show to be probably wrong, each said once in a run.

Data flow: the numbers of a step -> `Hints.found` -> `report.writer.Report`, which logs each as a warning and
writes it to `hints.jsonl`, for the run page.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.config.schema import Config
from quatrain.types.batches import ENVIRONMENT

TRUNCATED, REWARD_SHARE, PADDING = 0.5, 0.3, 0.3
"""Fractions of completions cut, of a step spent on rewards, and of padding, above which there is a hint."""
STEPS_AT_ZERO = 5
"""Training steps in a row in which a reward function returned only 0 before there is a hint."""
_SECONDS = re.compile(r"reward/(.+)/seconds")
_LARGEST = re.compile(r"reward/(.+)/max")
_FORMATS = ("format", "tag_count")


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
        self._at_zero: Counter[str] = Counter()

    def found(self, step: int, numbers: Mapping[str, float]) -> list[Hint]:
        """The hints that the metrics of `step` give for the first time."""
        texts = {
            "truncated": self._truncated(numbers),
            "no_signal": self._no_signal(numbers),
            "slow_reward": self._slow_reward(numbers),
            "padding": self._padding(numbers),
            "learning_rate": self._no_learning_rate(step, numbers),
            **{f"always_zero:{name}": self._always_zero(name) for name in self._zero_rewards(numbers)},
        }
        new = [Hint(name, text) for name, text in texts.items() if text and name not in self._said]
        self._said |= {hint.hint for hint in new}
        return new

    def _truncated(self, numbers: Mapping[str, float]) -> str | None:
        fraction = numbers.get("rollout/truncated_fraction", 0.0)
        if fraction <= TRUNCATED:
            return None
        return (
            f"{fraction:.0%} of the completions were cut at rollout.max_new_tokens "
            f"({self._config.rollout.max_new_tokens}), most of them before their answer: raise it, or "
            "ask for shorter completions in data.system_prompt, with an example of their form"
        )

    def _no_signal(self, numbers: Mapping[str, float]) -> str | None:
        if numbers.get("advantage/zero_signal_fraction", 0.0) != 1:
            return None
        return (
            "no group had a signal: all samples of each prompt got the same reward (mean "
            f"{numbers.get('reward/mean', 0.0):.3g}), so the rewards gave no gradient in this step; look "
            "at the completions in samples/. If all are wrong, take easier prompts or a reward with more "
            "values; if all are right, harder prompts; more samples (rollout.n) help with both"
        )

    def _slow_reward(self, numbers: Mapping[str, float]) -> str | None:
        reward_s, step_s = numbers.get("time/reward_s", 0.0), numbers.get("time/step_s", 0.0)
        seconds = {m[1]: value for name, value in numbers.items() if (m := _SECONDS.fullmatch(name))}
        if not seconds or not step_s or reward_s <= REWARD_SHARE * step_s:
            return None
        name = max(seconds, key=seconds.__getitem__)
        return (
            f"rewards took {reward_s / step_s:.0%} of the step; the slowest is `{name}` with "
            f"{seconds[name]:.1f} s of {step_s:.1f} s: make it faster, or let several processes call it "
            "at once (reward.per_call group or sample, reward.workers)"
        )

    def _padding(self, numbers: Mapping[str, float]) -> str | None:
        fraction, update = numbers.get("batch/padding_fraction", 0.0), self._config.update
        if fraction <= PADDING:
            return None
        remedy = (
            "the sequences of a mini-batch fill its micro-batches badly; try another "
            f"update.max_tokens_per_device (it is {update.max_tokens_per_device})"
            if update.micro_batch_size is None
            else "with update.micro_batch_size each sequence is padded to the longest; set it to null, and "
            "sequences are packed up to update.max_tokens_per_device tokens"
        )
        return f"{fraction:.0%} of the tokens that the update computed were padding: {remedy}"

    def _no_learning_rate(self, step: int, numbers: Mapping[str, float]) -> str | None:
        if numbers.get("update/learning_rate") != 0 or step >= self._steps:
            return None
        rate = self._config.optimizer.learning_rate
        why = f"optimizer.schedule is {self._config.optimizer.schedule}" if rate else "set it above 0"
        return (
            "the learning rate was 0, so the weights did not change (optimizer.learning_rate is "
            f"{rate:g}; {why})"
        )

    def _zero_rewards(self, numbers: Mapping[str, float]) -> list[str]:
        """The reward functions that gave only 0 for STEPS_AT_ZERO steps, this one included."""
        largest = {m[1]: value for name, value in numbers.items() if (m := _LARGEST.fullmatch(name))}
        for name, value in largest.items():
            at_zero = value == 0 == numbers.get(f"reward/{name}/min")
            self._at_zero[name] = self._at_zero[name] + 1 if at_zero else 0
        return [name for name in largest if self._at_zero[name] >= STEPS_AT_ZERO]

    def _always_zero(self, name: str) -> str:
        remedy = "look at the completions in samples/, and whether the function reads them as it should"
        if name in _FORMATS:
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


def read_hints(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(the step, name and text of each hint in a file `hints.jsonl`, number of lines without one)."""
    hints, num_damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            step = row.get("step")
            hints.append(
                {
                    "step": step if isinstance(step, int) else None,
                    "hint": str(row["hint"]),
                    "text": str(row["text"]),
                }
            )
        except (ValueError, KeyError, AttributeError, RecursionError):
            num_damaged += 1
    return hints, num_damaged


def hints_in(path: Path) -> list[str]:
    """The names of the hints in a file `hints.jsonl`."""
    return [hint["hint"] for hint in read_hints(path)[0]]
