"""Hints: what the metrics of a training step show to be probably wrong, each said once in a run.

Data flow: the numbers of a step -> `Hints.found` -> `sinks.Report`, which logs each as a warning and writes
it to `hints.jsonl`, for the run page.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

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
        new = [hint for hint in self._all(step, numbers) if hint.hint not in self._said]
        self._said |= {hint.hint for hint in new}
        return new

    def _all(self, step: int, numbers: Mapping[str, float]) -> Iterator[Hint]:
        yield from self._truncated(numbers)
        yield from self._no_signal(numbers)
        yield from self._slow_reward(numbers)
        yield from self._padding(numbers)
        yield from self._no_learning_rate(step, numbers)
        yield from self._always_zero(numbers)

    def _truncated(self, numbers: Mapping[str, float]) -> Iterator[Hint]:
        fraction = numbers.get("rollout/truncated_fraction", 0.0)
        if fraction > TRUNCATED:
            yield Hint(
                "truncated",
                f"{fraction:.0%} of the completions were cut at rollout.max_new_tokens "
                f"({self._config.rollout.max_new_tokens}), most of them before their answer: raise it, or "
                "ask for shorter completions in data.system_prompt, with an example of their form",
            )

    def _no_signal(self, numbers: Mapping[str, float]) -> Iterator[Hint]:
        if numbers.get("advantage/zero_signal_fraction", 0.0) == 1:
            yield Hint(
                "no_signal",
                "no group had a signal: all samples of each prompt got the same reward (mean "
                f"{numbers.get('reward/mean', 0.0):.3g}), so the rewards gave no gradient in this step; look "
                "at the completions in samples/. If all are wrong, take easier prompts or a reward with more "
                "values; if all are right, harder prompts; more samples (rollout.n) help with both",
            )

    def _slow_reward(self, numbers: Mapping[str, float]) -> Iterator[Hint]:
        reward_s, step_s = numbers.get("time/reward_s", 0.0), numbers.get("time/step_s", 0.0)
        seconds = {m[1]: value for name, value in numbers.items() if (m := _SECONDS.fullmatch(name))}
        if seconds and step_s and reward_s > REWARD_SHARE * step_s:
            name = max(seconds, key=lambda each: seconds[each])
            yield Hint(
                "slow_reward",
                f"rewards took {reward_s / step_s:.0%} of the step; the slowest is `{name}` with "
                f"{seconds[name]:.1f} s of {step_s:.1f} s: make it faster, or let several processes call it "
                "at once (reward.per_call group or sample, reward.workers)",
            )

    def _padding(self, numbers: Mapping[str, float]) -> Iterator[Hint]:
        fraction, update = numbers.get("batch/padding_fraction", 0.0), self._config.update
        if fraction <= PADDING:
            return
        if update.micro_batch_size is not None:
            remedy = (
                "with update.micro_batch_size each sequence is padded to the longest; set it to null, and "
                "sequences are packed up to update.max_tokens_per_device tokens"
            )
        else:
            remedy = (
                "the sequences of a mini-batch fill its micro-batches badly; try another "
                f"update.max_tokens_per_device (it is {update.max_tokens_per_device})"
            )
        yield Hint("padding", f"{fraction:.0%} of the tokens that the update computed were padding: {remedy}")

    def _no_learning_rate(self, step: int, numbers: Mapping[str, float]) -> Iterator[Hint]:
        if numbers.get("update/learning_rate") == 0 and step < self._steps:
            rate = self._config.optimizer.learning_rate
            why = f"optimizer.schedule is {self._config.optimizer.schedule}" if rate else "set it above 0"
            yield Hint(
                "learning_rate",
                "the learning rate was 0, so the weights did not change (optimizer.learning_rate is "
                f"{rate:g}; {why})",
            )

    def _always_zero(self, numbers: Mapping[str, float]) -> Iterator[Hint]:
        largest = {m[1]: value for name, value in numbers.items() if (m := _LARGEST.fullmatch(name))}
        for name, value in largest.items():
            at_zero = value == 0 == numbers.get(f"reward/{name}/min")
            self._at_zero[name] = self._at_zero[name] + 1 if at_zero else 0
            if self._at_zero[name] < STEPS_AT_ZERO:
                continue
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
            else:
                remedy = (
                    "look at the completions in samples/, and whether the function reads them as it should"
                )
            yield Hint(
                f"always_zero:{name}",
                f"the reward function `{name}` returned 0 for every completion of {STEPS_AT_ZERO} steps: "
                f"{remedy}",
            )


def hints_in(path: Path) -> list[str]:
    """The names of the hints in a file `hints.jsonl`; lines that damage left without one are skipped."""
    names = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            names.append(str(json.loads(line)["hint"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return names
