"""A model as reward: the scores that it gives to the completions of a batch, each question asked once.

Stage 2 of a training step, beside reward functions and reward models: `RolloutBatch` -> `Questions` -> the
cache, and for what it lacks a server or an engine -> the mean score of each episode.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quatrain.config.sections.judge import JudgeConfig
from quatrain.reward.calls import Samples
from quatrain.reward.forms import FunctionScores
from quatrain.reward.judge.cache import JudgementCache, key_of
from quatrain.reward.judge.judgements import Judgement, NoJudgement, Outcome
from quatrain.reward.judge.limits import Spending
from quatrain.reward.judge.questions import Keep, Question, Questions
from quatrain.types.batches import RolloutBatch

logger = logging.getLogger(__name__)

FOLDER, SPENT = "judgements", "judge_spent.json"
"""In the folder of a run: the judgements, and what the judge has used of its budget."""
Decide = Callable[[Callable[[], Any]], Any]


class Asked(Protocol):
    """Who answers questions: a server (`on_server.py`) or an engine (`on_engine.py`)."""

    is_everywhere: bool
    """Whether all processes ask together; otherwise the main process asks."""

    @property
    def identity(self) -> Callable[[], list[Any]]:
        """Says what the judge is, for the cache."""

    def ask(self, questions: Sequence[Question], keep: Keep) -> tuple[list[Outcome], Counter[str]]:
        """The outcome of each question, and counts; `keep` gets each as soon as it is there."""

    def close(self) -> None:
        """Ends connections."""


class Judge:
    """The judge of `config`; `connect` says who answers before the first `score`.

    `folder` is that of the run, which has the judgements, if `config` says so, and what was used of the
    budget; None: both are kept in this process. `decide` as in `RewardScorer`; `writes`: this process is the
    one that reads and writes the folder. Raises ValueError for a template that cannot be used, and for a
    cache that is a file.
    """

    def __init__(
        self,
        config: JudgeConfig,
        *,
        folder: Path | None = None,
        decide: Decide = lambda f: f(),
        writes: bool = True,
    ):
        self.config, self._decide, self._writes = config, decide, writes
        self._questions = Questions(config)
        kept = None if folder is None else folder / FOLDER
        if isinstance(config.cache, str):
            kept = Path(config.cache).expanduser()
            if kept.exists() and not kept.is_dir():
                raise ValueError(
                    f"reward.judge.cache must be true, false or a folder; {kept} is a file; name another "
                    "place"
                )
        self.cache = JudgementCache(kept if config.cache else None, keeps=bool(config.cache))
        self.spending = Spending(config.budget, folder / SPENT if folder is not None and writes else None)
        self._asked: Asked | None = None
        self._identity: list[Any] | None = None
        self.weights = ""
        """A digest of the policy's weights that sample now, of the judge `self`."""

    def begin(self, weights: str) -> None:
        """From now on the policy's weights with this digest judge, and what is kept is theirs."""
        if self._writes and weights != self.weights:
            self.cache.begin(weights)
        self.weights = weights

    @property
    def is_connected(self) -> bool:
        """Whether somebody answers."""
        return self._asked is not None

    def connect(self, asked: Asked) -> None:
        """From now on `asked` answers."""
        self._asked = asked

    def close(self) -> None:
        """Ends connections."""
        if self._asked is not None:
            self._asked.close()

    def try_on(self, columns: Mapping[str, Any], prompt: Any, completion: str) -> str | None:
        """Asks a server once about a made-up completion: why it failed, as words for a warning, or None.

        Raises ValueError for a server that answers no question. A judge on this run's devices is not asked.
        """
        if self.config.base_url is None:
            return None
        outcomes, _ = self._outcomes([self._text(columns, prompt, completion)], 1)
        return outcomes[0].detail if isinstance(outcomes[0], NoJudgement) else None

    def score(self, rollouts: RolloutBatch, sources: frozenset[str] | None = None) -> FunctionScores:
        """[E] mean scores of the episodes, NaN for one without a judgement or of other `sources`.

        The column `reason` has that of an episode's first judgement. All processes of a run must call this
        together, with the same rollouts. Raises ValueError where the budget is used up, unless
        `on_budget` is abstain, and for a server that answers no question.
        """
        began = time.perf_counter()
        samples, config = Samples.of(rollouts), self.config
        rows = samples.of_sources(sources)
        given = samples.arguments
        texts = [
            self._text({name: values[row] for name, values in given.items()}, given["prompts"][row], said)
            for row in rows
            for said in [given["completions"][row]]
        ]
        outcomes, counts = self._outcomes(texts, config.n)
        values = np.full(len(samples), np.nan, np.float32)
        reasons: list[str | None] = [None] * len(samples)
        failures: list[NoJudgement] = []
        for at, row in enumerate(rows):
            own = outcomes[at * config.n : (at + 1) * config.n]
            judged = [each for each in own if isinstance(each, Judgement)]
            failures += [each for each in own if isinstance(each, NoJudgement)]
            counts["errors"] += not judged
            if judged:
                values[row] = math.fsum(each.score for each in judged) / len(judged)
                reasons[row] = judged[0].reason
        kinds = Counter(each.kind for each in failures)
        counts.update({"failed": len(failures)} | {f"failed/{kind}": count for kind, count in kinds.items()})
        self._report(failures, len(outcomes))
        return FunctionScores(
            values.tolist(), dict(counts), time.perf_counter() - began, columns={"reason": reasons}
        )

    def _text(self, columns: Mapping[str, Any], prompt: Any, completion: str) -> str | NoJudgement:
        try:
            return self._questions.text(columns, prompt, completion)
        except ValueError as error:
            return NoJudgement("no_question", str(error))

    def _outcomes(self, texts: Sequence[str | NoJudgement], n: int) -> tuple[list[Outcome], Counter[str]]:
        """`n` outcomes for each text, from the cache or asked for now, and what was done for them."""
        assert self._asked is not None, "connect comes first"
        config, asked, weights = self.config, self._asked, self.weights
        # A digest of weights changes from batch to batch; the name of a server's model is asked for once.
        if config.self or self._identity is None:
            self._identity = self._decide(asked.identity)
        how = [self._identity, config.judging_temperature, config.max_tokens, list(config.scale)]
        of_text = [
            text if isinstance(text, NoJudgement) else Question(text, key_of(*how, text, number))
            for text in texts
            for number in range(n)
        ]
        questions = {each.key: each for each in of_text if isinstance(each, Question)}
        damaged = self.cache.damaged
        kept: dict[str, Any] = self._decide(
            lambda: {key: found for key in questions if (found := self.cache.get(key, weights)) is not None}
        )
        found: dict[str, Outcome] = {key: Judgement(*each) for key, each in kept.items()}
        missing = [question for key, question in questions.items() if key not in found]
        outcomes, done = self._ask(missing, partial(self._keep, weights))
        found |= {question.key: each for question, each in zip(missing, outcomes, strict=True)}
        counts = Counter({"requests": 0, "tokens_in": 0, "tokens_out": 0, "cached": len(kept), "errors": 0})
        counts.update(done)
        if damaged := self.cache.damaged - damaged:
            counts["damaged"] = damaged
        self._end_without_budget(outcomes)
        return [found[each.key] if isinstance(each, Question) else each for each in of_text], counts

    def _ask(self, missing: Sequence[Question], keep: Keep) -> tuple[list[Outcome], Counter[str]]:
        asked = self._asked
        assert asked is not None
        if not missing:
            return [], Counter()
        if asked.is_everywhere:
            return asked.ask(missing, keep)

        def of_main() -> list[Any]:
            outcomes, counts = asked.ask(missing, keep)
            return [[[isinstance(each, Judgement), *each] for each in outcomes], dict(counts)]

        plain, counts = self._decide(of_main)
        return [(Judgement if good else NoJudgement)(*each) for good, *each in plain], Counter(counts)

    def _keep(self, weights: str, question: Question, outcome: Outcome) -> None:
        if self._writes and isinstance(outcome, Judgement):
            self.cache.put(question.key, outcome, weights)

    def _end_without_budget(self, outcomes: Sequence[Outcome]) -> None:
        refused = sum(isinstance(each, NoJudgement) and each.kind == "budget" for each in outcomes)
        if refused and self.config.on_budget == "error":
            raise ValueError(
                f"the judge must not use more than reward.judge.budget: it has used {self.spending}, and "
                f"{refused} judgements of this batch were not asked for; raise the budget and resume the run "
                "(what was judged is kept), or set reward.judge.on_budget to abstain"
            )

    def _report(self, failures: Sequence[NoJudgement], total: int) -> None:
        if failures:
            kinds = Counter(each.kind for each in failures)
            logger.warning(
                "%d of %d judgements failed (%s); a completion without any has no reward of the judge; the "
                "first: %s",
                *(len(failures), total, ", ".join(f"{kind}: {n}" for kind, n in kinds.items())),
                failures[0].detail,
            )
