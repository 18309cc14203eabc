"""The tables of built-in policy losses and advantage estimators: what the configuration knows of each.

An algorithm is one file, `ops/losses/NAME.py` or `ops/advantages/NAME.py`, with a function of that name and,
where they apply, the constants that `Algorithm` describes. They are read from the source, because importing
it would load JAX; `ops/losses` and `ops/advantages` import the same files.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).parents[1] / "ops"


@dataclass(frozen=True)
class Algorithm:
    """One loss or estimator, from the source of its file."""

    parameters: tuple[str, ...]
    """Names of the function's parameters; those of an estimator are its inputs and arguments."""
    scales: tuple[str, ...] = ()
    """`SCALES` of an estimator: the values of `advantage.scale` that it accepts, its default first."""
    aggregation: str | None = None
    """`AGGREGATION`: the aggregation of its paper, if that is not `token_mean`."""
    compares_samples: bool = False
    """`COMPARES_SAMPLES`: whether samples are compared in their group: a group of one has advantage 0."""
    reads_sampler: bool = False
    """Whether a loss reads `tokens.rollout_logprobs`."""
    without_signal: bool = False
    """`WITHOUT_SIGNAL`: whether a loss draws tokens to the sampler's log-probabilities by itself, also those
    whose advantage is 0."""


def _read(folder: Path) -> Mapping[str, Algorithm]:
    files = sorted(path for path in folder.glob("*.py") if path.stem.isidentifier() and path.stem[0] != "_")
    return {path.stem: _algorithm(path) for path in files}


def _algorithm(path: Path) -> Algorithm:
    constants = {}
    parameters = None
    tree = ast.parse(path.read_text("utf-8"))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == path.stem:
            parameters = tuple(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lower()
            if name in Algorithm.__dataclass_fields__:
                constants[name] = ast.literal_eval(node.value)
    assert parameters is not None, f"{path} must define the function {path.stem}"
    return Algorithm(parameters, **constants, reads_sampler="rollout_logprobs" in read)


LOSSES = _read(OPS / "losses")
ESTIMATORS = _read(OPS / "advantages")


def takes(estimator: str, name: str) -> bool:
    """Whether `estimator` is built in and has the input or argument `name`."""
    return estimator in ESTIMATORS and name in ESTIMATORS[estimator].parameters
