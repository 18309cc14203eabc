"""The built-in reward function `reasoning_gym`, which is called in worker processes, as users' functions are.

Data flow: completions and the column `rg` (`data/gym_rows.py`) -> scores from 0 to 1.

Some data sets of the package evaluate the answer as a Python expression. Answers are what the policy wrote:
here such data sets get literals alone, and answers that SymPy is to parse, which is evaluation too, may have
no texts, attributes, indices or Python's own functions. Otherwise only the limits of the process hold.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quatrain.data.gym_rows import entry

for _name in (
    *("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion"),
    "games.n_queens",
):
    importlib.import_module(f"reasoning_gym.{_name}").__dict__["eval"] = ast.literal_eval
_PARSED_BY_SYMPY = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
_NO_FORMULA = re.compile(r"""__|["'\[\]]|\.\s*[^\W\d]""")
_NOT_OF_FORMULAS = frozenset(vars(builtins)) - {"abs", "max", "min", "pow", "round", "sum"}
_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    completions: Sequence[str],
    rg: Sequence[Mapping[str, Any] | None],
    log_metric: Callable[[str, float], None],
) -> list[float | None]:
    """What the data set of each row says of its answer: 1 is right, and some data sets have values between.

    The answer is the content of the last `<answer>…</answer>`, or else the whole text. 0 where the data set
    gives no number or raises; the metric `unscored` is the fraction of these. Abstains on rows without `rg`.
    Raises ValueError if an entry is not that of the data.
    """
    scores: list[float | None] = []
    for completion, named in zip(completions, rg, strict=True):
        score = None if named is None else _score(_answer(completion), named)
        scores.append(score if named is None else score or 0.0)
        if named is not None:
            log_metric("unscored", score is None)
    return scores


def _answer(completion: str) -> str:
    found = _ANSWER.match(completion)
    return (found[1] if found else completion).strip()


def _is_formula(answer: str) -> bool:
    text = unicodedata.normalize("NFKC", answer)  # as Python reads names
    names = re.findall(r"[^\W\d]\w*", text)
    return _NO_FORMULA.search(text) is None and _NOT_OF_FORMULAS.isdisjoint(names)


def _score(answer: str, named: Mapping[str, Any]) -> float | None:
    data_set, made = entry(**named)
    if named["name"] in _PARSED_BY_SYMPY and not _is_formula(answer):
        return None
    with suppress(Exception):  # of the package, for answers that it does not expect
        return float(data_set.score_answer(answer, made))
    return None
