"""Advantage estimators: rewards and explicit group ids in, one advantage per sequence or per token out.

Data flow: rewards -> here (host-side numpy) -> `advantage/estimate.py`, which gives each completion token the
advantage of its sequence where an estimator returns one advantage per sequence.

Inputs, of which each estimator names some:
- `rewards` [B] floats, NaN where nothing was scored; `baseline_rewards` [B], those of greedy completions;
- `group_ids` [B] integers, equal where the prompt is the same;
- `completion_mask` [B, T] bool, True on completion tokens;
- `token_rewards` [B, T] floats, rewards of single tokens beside that of the sequence;
- `values` [B, T] floats, a critic's estimate of the return at each completion token;
- `episode_ids` [B] integers, equal in the rows of one episode, which have its reward; None: all differ.

Arguments: `scale` says which standard deviation divides; `gamma`, the discount per completion token, and
`lam` are in [0, 1]. Estimators return [B] or [B, T] float32, or `TokenAdvantages`, and raise ValueError for
another `scale`, an argument out of range, and shapes that do not fit.

All of them: group ids may be any integers, in any order, with any number of rows each. A row whose reward
is NaN (every reward function abstained) is left out of all statistics and has advantage 0. Computed in
float64, returned as float32. Permuting the rows permutes the result and renaming the ids changes nothing,
both to the last bit: sums over rows or over the tokens of several rows run in the order of the values, never
in the order of the rows.

Estimators per token take a row as a trajectory, whose last completion token has the reward, also where an
episode has several rows. They see the completion tokens of a row only: positions outside the completion
mask (prompt, padding, tokens that an environment wrote) are skipped as if they did not exist, and have
advantage 0.

One file each: a file whose name does not begin with `_` is an estimator, a function of the file's name, with
the constants that `config/algorithms.py` describes. Nothing else lists the estimators.
"""

from collections.abc import Callable

import numpy as np

from quatrain.ops import functions_of
from quatrain.ops.advantages._shared import TokenAdvantages as TokenAdvantages

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., np.ndarray | TokenAdvantages]] = functions_of(
    __name__, __path__
)
"""Functions of the inputs that they name, as `advantage/estimate.py` lists them, and of their arguments."""
