"""The built-in reward functions, and where those are that worker processes call.

`scorer.py` calls every reward function, built-in or not, as f(prompts, completions, **columns); it
returns one number per completion, or None to abstain. Prompts are strings or lists of messages, completions
are strings, and each data column is a list with one item per completion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any

from quatrain.config.errors import listed
from quatrain.config.sections.reward import RewardConfig
from quatrain.reward.math.answers import gold_text, judge
from quatrain.reward.math.grader import CPU_LIMIT_S
from quatrain.workers.pool import Failure

RewardFunction = Callable[..., Sequence[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMAT = re.compile(r"<think>.*</think>\n\s*<answer>.*</answer>", re.DOTALL)
_BEGUN = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def has_format(text: str) -> bool:
    """Whether `text` is `<think>…</think>`, a newline or more, `<answer>…</answer>`, each tag once."""
    return _FORMAT.fullmatch(text) is not None and all(text.count(tag) == 1 for tag in TAGS)


def begun_answer(prompt: Any, opening: str | None) -> str:
    """What a prompt has begun of the answer: the `opening` of a chat, or `<think>` at the end of a text."""
    if not isinstance(prompt, str):
        return opening or ""
    found = _BEGUN.search(prompt)
    return found[0] if found else ""


def accepted_answers(answer: Any) -> list[str]:
    """The texts that a gold answer stands for, of which a right completion has one; empty for other values.

    A list has several right answers. A number is rounded to the 15 digits that 64 bits hold, or written out;
    true and false are also yes and no; a time has no seconds, and a date no time, if these are 0.
    """
    match answer:
        case str():
            return [answer] if gold_text(answer) else []
        case bool():
            return ["true", "yes"] if answer else ["false", "no"]
        case int():
            return [str(answer)]
        case float() if math.isfinite(answer):
            return list(dict.fromkeys((f"{answer:.15g}", str(answer))))
        case Decimal() if answer.is_finite():
            return [f"{answer:f}"]
        case datetime() if answer.time() == time():
            return [answer.date().isoformat()]
        case datetime() | time():
            spec = "auto" if answer.second or answer.microsecond else "minutes"
            return [answer.isoformat(timespec=spec).replace("T", " ")]
        case date():
            return [answer.isoformat()]
        case list() | tuple() if not any(isinstance(each, list | tuple | Mapping) for each in answer):
            return [text for each in answer for text in accepted_answers(each)]
    return []


def why_unjudged(answer: Any) -> str | None:
    """Why `correct` abstains on each completion for a gold answer: what it is; None if it does not."""
    if answer is None or isinstance(answer, float):
        kind = "null" if answer is None else "NaN or infinite"
    else:
        kind = f"of the type {type(answer).__name__}"
    accepted = accepted_answers(answer)
    if not accepted:
        return kind
    verdicts = judge([""] * len(accepted), accepted, CPU_LIMIT_S)
    # A failure of math-verify's process is not an abstention: it is counted where it happens.
    abstains = all(verdict is None for verdict in verdicts)
    return "text or notation that cannot be compared" if abstains else None


def correct(
    prompts: list, completions: list[str], answer: list[Any], timeout_s: float = 10.0, **_: Any
) -> list[float | None]:
    """1 if the completion's answer equals one of the `accepted_answers` (see `is_correct`), else 0.

    The completion need not have the format, which the reward `format` checks. Abstains if none of the
    accepted answers can be compared, and without any. NaN for a completion that is not judged, because
    comparisons take longer than `timeout_s` (`answers.judge`) or their process fails.
    """
    verdicts = graded(completions, answer, timeout_s)
    return [math.nan if isinstance(verdict, Failure) else verdict for verdict in verdicts]


def graded(completions: list[str], answer: list[Any], timeout_s: float) -> list[float | Failure | None]:
    """`correct` with the reason why a completion is not judged, for `calls.py`."""
    accepted = [accepted_answers(gold) for gold in answer]
    texts = [text for text, golds in zip(completions, accepted, strict=True) for _ in golds]
    verdicts = iter(judge(texts, [gold for golds in accepted for gold in golds], timeout_s))
    return [_best(list(islice(verdicts, len(golds)))) for golds in accepted]


def _best(verdicts: Sequence[bool | Failure | None]) -> float | Failure | None:
    """1 if one of the verdicts is true, else the first failure, else 0 if one is false, else None."""
    if True in verdicts:
        return 1.0
    failure = next((verdict for verdict in verdicts if isinstance(verdict, Failure)), None)
    return failure or (0.0 if False in verdicts else None)


def format(
    prompts: list, completions: list[str], opening: str | None = None, pattern: str | None = None, **_: Any
) -> list[float]:
    """1 if what the prompt has begun of the answer and the whole completion have the format, else 0.

    The format is that the regular expression `pattern` matches all of it, with `.` for line breaks too; None:
    that of `has_format`. `opening` is what the chat template begins of each answer, such as `<think>`; None:
    it is not known, and a completion may have the format with `<think>` before it or without.
    """
    matches: Callable[[str], Any] = has_format
    if pattern is not None:
        matches = re.compile(pattern, re.DOTALL).fullmatch
    if opening is None:
        return [float(bool(matches(text) or matches(TAGS[0] + text))) for text in completions]
    whole = (begun_answer(prompt, opening) + text for prompt, text in zip(prompts, completions, strict=True))
    return [float(bool(matches(text))) for text in whole]


def tag_count(prompts: list, completions: list[str], opening: str | None = None, **_: Any) -> list[float]:
    """0.25 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that occurs exactly once.

    What the prompt has begun of the answer counts too (see `format`).
    """
    whole = (begun_answer(prompt, opening) + text for prompt, text in zip(prompts, completions, strict=True))
    return [0.25 * sum(text.count(tag) == 1 for tag in TAGS) for text in whole]


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
FORMATS = ("format", "tag_count")
"""Built-in functions that ask for a format, which strict accuracy requires."""
IN_WORKERS = {"reasoning_gym": "quatrain.reward.gym_reward:reasoning_gym"}
"""Built-in functions that run code of other packages on completions, called where users' functions are."""


def builtin_function(spec: str, config: RewardConfig, opening: str | None) -> Callable[..., Any]:
    """A built-in function with its arguments; raises ValueError for arguments that it does not have."""
    function = BUILTIN_FUNCTIONS[spec]
    if function is format:
        return format_of(config, opening)
    if args := config.entries[spec].args:
        has, remedy = "has no arguments of its own", "leave them out"
        if function is overlong:
            has = "takes limit and buffer from reward.overlong_limit and reward.overlong_buffer"
            remedy = "set these keys instead"
        raise ValueError(f"reward function {spec!r} is built in and {has}; got args {listed(args)}; {remedy}")
    if function is overlong:
        return partial(overlong, limit=config.overlong_limit, buffer=config.overlong_buffer)
    if function is correct:
        return partial(graded, timeout_s=config.timeout_s)
    return partial(function, opening=opening) if function is tag_count else function


def format_of(config: RewardConfig, opening: str | None) -> Callable[..., list[float]]:
    """`format` by the `pattern` that `reward.functions` gives it; raises ValueError for other arguments."""
    args = config.entries["format"].args if "format" in config.entries else {}
    pattern = args.get("pattern")
    if args.keys() - {"pattern"} or not isinstance(pattern, str | None):
        raise ValueError(
            "reward function 'format' is built in and has one argument, pattern, a regular expression; "
            f"got args {dict(args)}; leave the others out"
        )
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(
            "the pattern of reward function 'format' must be a regular expression of Python; got "
            f"{pattern!r}: {error}; mend it in reward.functions"
        ) from None
    return partial(format, opening=opening, pattern=pattern)
