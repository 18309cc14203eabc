"""A judge on this run's devices: the policy itself, or another model beside it, sampled as the policy is.

Data flow: `Question`s of `judge.py` -> prompts -> `generate`, which samples their answers -> `Outcome`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quatrain.config.sections.judge import JudgeConfig
from quatrain.data.tokenizer import render
from quatrain.reward.judge.judgements import NoJudgement, Outcome, judgement_in
from quatrain.reward.judge.limits import Spending
from quatrain.reward.judge.questions import Keep, Question
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import Sampling

Decide = Callable[[Callable[[], Any]], Any]
Generate = Callable[[Sequence[Prompt], Sampling], RolloutBatch]
"""Samples the answers to prompts; in a run of several processes, all call it alike and get the same."""


@dataclass
class EngineJudge:
    """The judge of `config` that `generate` samples from, in every process alike.

    `tokenizer` is the judge's, which reads prompts and answers of at most `longest` tokens together.
    `identity` says what the judge is, for the cache: its name, or a digest of the weights that it has now.
    """

    config: JudgeConfig
    spending: Spending
    generate: Generate
    tokenizer: Any
    longest: int
    identity: Callable[[], list[Any]]
    decide: Decide
    is_everywhere = True

    def ask(self, questions: Sequence[Question], keep: Keep) -> tuple[list[Outcome], Counter[str]]:
        """The outcome of each question, and counts of requests and tokens; `keep` gets each."""
        config = self.config
        ids = [self._ids(question.text) for question in questions]
        room = self.longest - config.max_tokens
        # By the main process: it has the numbers of a run that is resumed.
        has_budget = self.decide(lambda: [self._reserved(each, room) for each in ids])
        asked = [
            at
            for at, (each, has) in enumerate(zip(ids, has_budget, strict=True))
            if has and len(each) <= room
        ]
        numbers = _distinct([questions[at].key for at in asked])
        prompts = [
            Prompt(number, np.array(ids[at], np.int32), questions[at].text)
            for number, at in zip(numbers, asked, strict=True)
        ]
        sampling = Sampling(1, config.max_tokens, config.judging_temperature)
        answers = self.generate(prompts, sampling) if prompts else None
        rows = {at: row for row, at in enumerate(asked)}
        counts: Counter[str] = Counter()
        outcomes: list[Outcome] = []
        for at, (question, own) in enumerate(zip(questions, ids, strict=True)):
            if at not in rows:
                outcomes.append(self._not_asked(own, room))
            else:
                assert answers is not None
                row, new = rows[at], int(answers.completion_lengths[rows[at]])
                counts.update(requests=1, tokens_in=len(own), tokens_out=new)
                self.spending.send()
                self.spending.settle(len(own) + config.max_tokens, len(own) + new, sent=True)
                cut_at = config.max_tokens if answers.finish_reason[row] == "length" else None
                outcomes.append(judgement_in(answers.completions[row], config.scale, cut_at=cut_at))
            keep(question, outcomes[-1])
        return outcomes, counts

    def close(self) -> None:
        """Nothing is held here."""

    def _ids(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return render(self.tokenizer, messages if self.tokenizer.chat_template else text).ids

    def _reserved(self, ids: Sequence[int], room: int) -> bool:
        return len(ids) <= room and self.spending.reserve(len(ids) + self.config.max_tokens)

    def _not_asked(self, ids: Sequence[int], room: int) -> NoJudgement:
        if len(ids) > room:
            limit = f"the question has {len(ids)} tokens, and the judge has room for {room}"
            return NoJudgement("too_long", f"{limit} beside reward.judge.max_tokens")
        return NoJudgement("budget", "reward.judge.budget is used up")


def _distinct(keys: Sequence[str]) -> list[int]:
    """A number for each key, by its content, so that an answer does not depend on what else is asked."""
    numbers: dict[int, str] = {}
    for key in keys:
        number = int(key[:7], 16)
        while number in numbers:
            number += 1
        numbers[number] = key
    return list(numbers)
