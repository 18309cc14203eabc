"""The built-in reward functions.

`reward/scorer.py` calls every reward function, built-in or not, as f(prompts, completions, **columns); it
returns one number per completion, or None to abstain. Prompts are strings or lists of messages, completions
are strings, and each data column is a list with one item per completion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from quatrain.reward.answers import judge
from quatrain.reward.pool import Failure

RewardFunction = Callable[..., Sequence[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMAT = re.compile(r"<think>.*</think>\n<answer>.*</answer>", re.DOTALL)


def has_format(completion: str) -> bool:
    """Whether the whole completion is `<think>…</think>`, a newline, `<answer>…</answer>`, each tag once."""
    return _FORMAT.fullmatch(completion) is not None and all(completion.count(tag) == 1 for tag in TAGS)


def correct(
    prompts: list, completions: list[str], answer: list[Any], timeout_s: float = 10.0, **_: Any
) -> list[float | None]:
    """1 if the completion's answer equals the gold answer (see `is_correct`), else 0.

    The completion need not have the format, which the reward `format` checks. Abstains if the gold answer is
    None or blank, and if it is a text or notation that cannot be compared. NaN for a completion that is not
    judged, because comparisons take longer than `timeout_s` (`answers.judge`) or their process fails.
    """
    verdicts = graded(completions, answer, timeout_s)
    return [math.nan if isinstance(verdict, Failure) else verdict for verdict in verdicts]


def graded(completions: list[str], answer: list[Any], timeout_s: float) -> list[float | Failure | None]:
    """`correct` with the reason why a completion is not judged, for `reward/calls.py`."""
    verdicts = judge(completions, answer, timeout_s)
    return [float(verdict) if isinstance(verdict, bool) else verdict for verdict in verdicts]


def format(prompts: list, completions: list[str], **_: Any) -> list[float]:
    """1 if the whole completion has the format (see `has_format`), else 0."""
    return [float(has_format(completion)) for completion in completions]


def tag_count(prompts: list, completions: list[str], **_: Any) -> list[float]:
    """0.25 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that occurs exactly once."""
    return [0.25 * sum(completion.count(tag) == 1 for tag in TAGS) for completion in completions]


def overlong(completions: list[str], completion_ids: list[list[int]], limit: int, buffer: int) -> list[float]:
    """0 up to `limit - buffer` tokens, then falling linearly to -1 at `limit` tokens.

    Source: DAPO, arXiv 2503.14476.
    `limit` and `buffer` are the keys `reward.overlong_limit` and `reward.overlong_buffer`, in tokens.
    """
    return [-min(max((len(ids) - limit + buffer) / buffer, 0.0), 1.0) for ids in completion_ids]


def environment(environment_reward: list[float], **_: Any) -> list[float]:
    """What the environment of an episode gave for its turns, and at its end, in all."""
    return environment_reward


BUILTIN_FUNCTIONS: dict[str, RewardFunction] = {
    "correct": correct,
    "format": format,
    "tag_count": tag_count,
    "overlong": overlong,
    "environment": environment,
}
