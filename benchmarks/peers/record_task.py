"""A task that a small model learns in some twenty steps: a sentence as JSON of a given form.

Needs the standard library alone: `learning.py` gives it to ours and to the peers. A reward of 1 needs the
form and both fields; the form alone gives 0.4, each field that is right beside it 0.3.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Karin", "Leo")
THINGS = ("apples", "books", "candles", "eggs", "keys", "lamps", "pens", "roses", "shirts", "stamps", "cups")
PLACES = ("in the shop", "at the market", "on Monday", "for the school", "last week", "before lunch")
QUESTION = (
    '{name} bought {count} {thing} {place}. Who bought how many? Answer with JSON alone: {{"name": ..., '
    '"count": ...}}'
)
FIELDS = ("name", "count")


def write_rows(path: Path, count: int, skip: int = 0) -> None:
    """`count` different questions, after the first `skip`, as JSON lines with their `name` and `count`."""
    every = list(itertools.product(NAMES, range(2, 100), THINGS, PLACES))
    with path.open("w", encoding="utf-8") as out:
        for name, number, thing, place in random.Random(0).sample(every, skip + count)[skip:]:
            question = QUESTION.format(name=name, count=number, thing=thing, place=place)
            out.write(json.dumps({"question": question, "name": name, "count": number}) + "\n")


def record(completions: list[Any], name: list[str], count: list[int], **_: Any) -> list[float]:
    """The reward of each completion, a text or a chat; `name` and `count` are those of its row."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [_score(text, *right) for text, *right in zip(texts, name, count, strict=True)]


def _score(text: str, *right: object) -> float:
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or tuple(found) != FIELDS:
        return 0.0
    # True equals 1, and is no count.
    fits = (
        type(found[field]) is type(value) and found[field] == value
        for field, value in zip(FIELDS, right, strict=True)
    )
    return 0.4 + 0.3 * sum(fits)
