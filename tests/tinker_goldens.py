"""What a training server's log-probabilities and gradients are compared with, kept in tests/golden/.

`tests/oracles/make_tinker_goldens.py` computes the same with torch and peft in float64, on the models of
`goldens.py` with adapters that are drawn by name.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from goldens import GOLDEN, draw

TINKER_CASES = ("qwen2", "llama", "gemma2")
RANK, ALPHA = 4, 32.0
VOCABULARY = 72
LENGTHS = (11, 1, 17, 6)
KINDS = ("single", "lists", "sparse")
NO_TARGET = -1


class Rows(NamedTuple):
    """A datum: tokens [T], targets and weights [T] or [T, K]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def rows_of(kind: str) -> list[Rows]:
    """Datums with random targets, some listed twice in a row, and weights of both signs."""
    random = np.random.RandomState(KINDS.index(kind))
    found = []
    for length in LENGTHS:
        tokens = random.randint(0, VOCABULARY, length)
        shape = length if kind == "single" else (length, 3)
        targets, weights = random.randint(0, VOCABULARY, shape), random.standard_normal(shape)
        if kind != "single":
            targets[::2, 1] = targets[::2, 0]
        if kind == "sparse":
            nothing = random.uniform(size=shape) < 0.5
            targets, weights = np.where(nothing, NO_TARGET, targets), np.where(nothing, 0, weights)
        found.append(Rows(*(x.astype(np.int32) for x in (tokens, targets)), weights.astype(np.float32)))
    return found


def adapter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The adapter of this name of peft's: A as large as it begins, B large enough to change the logits."""
    return (draw(name, shape) * (1.0 if ".lora_A." in name else 0.3)).astype(np.float32)


def read_tinker_golden(case: str) -> dict[str, Any]:
    """By kind: `logprobs` of all rows one after another, `loss`, and `gradients`: `goldens.probes` of it."""
    return json.loads((GOLDEN / f"tinker_{case}.json").read_text())
