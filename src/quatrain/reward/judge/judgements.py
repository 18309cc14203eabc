"""What a judge says: a score with a reason, read from its answer by a schema, or why there is none.

Answers are texts of a model, which a completion may have told what to write: they are parsed, and never
evaluated.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, NamedTuple

Failed = Literal["timeout", "lost", "refused", "unreadable", "budget", "too_long", "no_question"]
"""Why there is no judgement: too late, no answer of the server, a refusal, an answer without a score in the
scale, nothing left of the budget, a question that is too long for the model, or a row that makes none."""
LONGEST_REASON = 2000
"""Characters of a reason that are kept."""
MOST_OBJECTS = 64
"""Braces of an answer, the last ones, at which a JSON object is looked for."""
FENCE = "` \t\r\n"
"""What may stand behind the object of an answer: white space, and the end of a fence of Markdown."""
LARGEST = 1e300
"""Above it, a whole number may have no floating-point number."""
_SCORE = re.compile(
    r"""(?<!max )(?<!maximum )(?<!possible )(?<!highest )(?<!full )(?<!min )(?<!minimum )(?<!lowest )"""
    r"""\bscore["'*]{0,3}\s{0,4}[:=]["'*\s]{0,6}(-?\d{1,9}(?:\.\d{1,9})?)(?!\d|\.\d|[eE])"""
    r"""(?:[*\s]{0,4}(?:/|(?:out\s)?of\b)[*\s]{0,4}(\d{1,9}(?:\.\d{1,9})?))?""",
    re.IGNORECASE,
)
"""A line with a score, and the highest one if the line says it; not one that says the highest one alone."""


class Judgement(NamedTuple):
    """A score in the scale."""

    score: float
    reason: str | None = None


class NoJudgement(NamedTuple):
    """Why there is none."""

    kind: Failed
    detail: str


Outcome = Judgement | NoJudgement


def schema(scale: tuple[float, float], longest_reason: int | None = None) -> dict[str, Any]:
    """The JSON schema of an answer.

    With `longest_reason`, in characters, it bounds also the digits of the score, so that an answer which
    follows it ends. Servers need not know these keywords.
    """
    low, high = scale
    reason: dict[str, Any] = {"type": "string"}
    score: dict[str, Any] = {"type": "number", "minimum": low, "maximum": high}
    if longest_reason is not None:
        reason["maxLength"] = longest_reason
        score["multipleOf"] = 10.0 ** (math.floor(math.log10(high - low)) - 3)
    return {
        "type": "object",
        "properties": {"reason": reason, "score": score},
        "required": ["reason", "score"],
        "additionalProperties": False,
    }


def judgement_in(text: str, scale: tuple[float, float], *, cut_at: int | None = None) -> Outcome:
    """The judgement in an answer: its last JSON object with a number `score`, or else a line `score: 7`.

    What a model thought, up to `</think>`, is left out; thoughts that do not end make no judgement. Of an
    answer that was cut at `cut_at` tokens, only an object that ends it counts. A score outside of `scale` is
    none.
    """
    said = text.rpartition("</think>")[2].strip()
    if said.startswith("<think>"):
        return _unreadable("its thoughts do not end", cut_at)
    found, rest = _with_score(said)
    # What was cut may be a thought, or quote the form of an answer or what the completion asks for.
    if cut_at is not None:
        found = None if rest.strip(FENCE) else found
    elif found is None and (lines := _SCORE.findall(said)):
        number, highest = lines[-1]
        if highest and float(highest) != scale[1]:
            return _unreadable(f"the score {number} of {highest} is not of the scale to {scale[1]:g}", None)
        found = {"score": float(number)}
    if found is None:
        return _unreadable(f"the answer has no score: {_short(said) or 'it is empty'}", cut_at)
    score, reason, (low, high) = found["score"], found.get("reason"), scale
    if not low <= score <= high:
        return _unreadable(f"the score {score:g} is not from {low:g} to {high:g}", cut_at)
    return Judgement(float(score), reason[:LONGEST_REASON] if isinstance(reason, str) else None)


def _unreadable(detail: str, cut_at: int | None) -> NoJudgement:
    cut = "" if cut_at is None else f"it was cut at {cut_at} tokens (reward.judge.max_tokens, or its body); "
    return NoJudgement("unreadable", cut + detail)


def _with_score(text: str) -> tuple[dict[str, Any] | None, str]:
    """The last JSON object in a text, not inside of another, that has a finite number as its score.

    And the text behind it; all of it if there is none.
    """
    decoder, end = json.JSONDecoder(), 0
    found: tuple[dict[str, Any] | None, str] = None, text
    for start in [at for at, letter in enumerate(text) if letter == "{"][-MOST_OBJECTS:]:
        if start < end:
            continue  # inside of the one before
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        score = value.get("score")
        if type(score) in (int, float) and abs(score) < LARGEST and math.isfinite(score):
            found = value, text[end:]
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:120]}…"
