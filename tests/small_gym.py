"""A package `reasoning_gym` with a few data sets, each with a trait of the real one's."""

import sys

FACTORY = """
from dataclasses import dataclass, field
from enum import Enum
import random
from random import Random

class Kind(Enum):
    PLAIN = "plain"
    ODD = "odd"

@dataclass
class Config:
    size: int = 500
    seed: int | None = None
    least: int = 0
    names: tuple[str, ...] = ("a", "b")
    kind: Kind = Kind.PLAIN

    def validate(self):
        assert self.least >= 0, "least must be non-negative"

class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        rng = Random(self.config.seed + index)
        a, b = rng.randint(self.config.least, 99), rng.randint(0, 99)
        names = [self.config.names[0], self.config.kind.value]
        return {"question": f"{names} {a} + {b} =", "answer": str(a + b), "metadata": {"pair": (a, b)}}

    def score_answer(self, answer, entry):
        if answer == "none":
            return None
        pair = entry["metadata"]["pair"]
        return float(int(answer) == sum(pair)) if isinstance(pair, tuple) else 0.05

class Unordered(Sums):
    def __getitem__(self, index):
        order = "".join({f"word {i}" for i in range(50)})
        return {"question": order, "answer": order, "metadata": {"pair": ()}}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])

class Global(Sums):
    def __getitem__(self, index):
        return {"question": str(random.random()), "answer": "1", "metadata": {"pair": (1, 0)}}

class Matrices(Sums):
    def score_answer(self, answer, entry):
        from reasoning_gym.algorithmic.binary_matrix import value_of
        return float(sum(value_of(answer)) == sum(entry["metadata"]["pair"]))

class Formulas(Sums):
    def score_answer(self, answer, entry):
        return float(eval(answer) == sum(entry["metadata"]["pair"]))

DATASETS = {"sums": (Sums, Config), "unordered": (Unordered, Config), "global": (Global, Config),
            "matrices": (Matrices, Config),
            "countdown": (Formulas, Config), "composite": (None, None)}

def create_dataset(name, **config):
    made, form = DATASETS[name]
    config = form(**config)
    config.validate()
    return made(config)
"""


def install(folder, monkeypatch):
    """Makes the package importable, here and in worker processes."""
    package = folder / "reasoning_gym"
    for name in ("", "algorithmic", "games"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "factory.py").write_text(FACTORY)
    for name in ("binary_matrix", "spiral_matrix", "string_insertion"):
        (package / "algorithmic" / f"{name}.py").write_text("def value_of(text):\n    return eval(text)\n")
    (package / "games" / "n_queens.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
