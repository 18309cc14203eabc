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
LARGEST = 1e300
"""Above it, a whole number may have no floating-point number."""
_SCORE = re.compile(
    r"""\bscore["'*]{0,3}\s{0,4}[:=]["'*\s]{0,6}(-?\d{1,9}(?:\.\d{1,9})?)(?!\d|\.\d|[eE])""", re.IGNORECASE
)


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


def judgement_in(text: str, scale: tuple[float, float]) -> Outcome:
    """The judgement in an answer: its last JSON object with a number `score`, or else a line `score: 7`.

    What a model thought, up to `</think>`, is left out. A score outside of `scale` is none.
    """
    said = text.rpartition("</think>")[2]
    found = _with_score(said)
    if found is None:
        lines = _SCORE.findall(said)
        found = {"score": float(lines[-1])} if lines else None
    if found is None:
        return NoJudgement("unreadable", f"the answer has no score: {_short(said) or 'it is empty'}")
    score, reason, (low, high) = found["score"], found.get("reason"), scale
    if not low <= score <= high:
        return NoJudgement("unreadable", f"the score {score:g} is not from {low:g} to {high:g}")
    return Judgement(float(score), reason[:LONGEST_REASON] if isinstance(reason, str) else None)


def _with_score(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text, not inside of another, that has a finite number as its score."""
    decoder, end, found = json.JSONDecoder(), 0, None
    for start in [at for at, letter in enumerate(text) if letter == "{"][-MOST_OBJECTS:]:
        if start < end:
            continue  # inside of the one before
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        score = value.get("score")
        if type(score) in (int, float) and abs(score) < LARGEST and math.isfinite(score):
            found = value
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:120]}…"
