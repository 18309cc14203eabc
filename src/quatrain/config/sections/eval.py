"""The section `eval`: evaluation before, during and after training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quatrain.config.fields import REWARD_MODEL, Count, NonNegative, Section, Text, must

AccuracyFunction = Annotated[
    Text,
    must(
        "be a function: the scores of a reward model are not right or wrong",
        lambda name: not name.startswith(REWARD_MODEL),
    ),
]


class EvalConfig(Section):
    """Evaluation before, during and after training."""

    every_steps: NonNegative = 10
    """Training steps between evaluations; 0: evaluate only before and after training."""
    before: bool = True
    """Whether the model is evaluated before training."""
    num_prompts: Count | None = 128
    """Number of prompts of each evaluation set that every evaluation of a run uses, so that its results can
    be compared; null: all. At most `eval.final_num_prompts`."""
    final_num_prompts: Count | None = None
    """Number of prompts of each evaluation set in the evaluation after training, and in `quatrain eval`;
    null: all. If it is more than `eval.num_prompts`, results on all of them are reported beside those on
    `eval.num_prompts`."""
    accuracy: AccuracyFunction | None = None
    """The function that decides whether a completion is right, in the form of an entry of `reward.functions`:
    1 is right, 0 is wrong, values between count in part, None leaves a completion out. null: `correct`, if
    the prompts have a column `answer`; else no accuracy is reported. Derived if all data are of
    reasoning-gym: `reasoning_gym`."""
    batch_size: Count = 64
    """Sequences decoded in one call during evaluation."""
    max_new_tokens: Count | None = None
    """Maximum length of a completion in evaluations, in tokens; null: that of the rollout,
    `rollout.max_new_tokens`."""
    n: NonNegative = 0
    """Sampled completions per prompt for mean@n and pass@n; 0: greedy completions only."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the completions for mean@n and pass@n."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling of the completions for mean@n and pass@n; 1: all tokens."""

    @property
    def usual_num_prompts(self) -> int | None:
        """Prompts of each set that every evaluation uses; None: all."""
        numbers = [n for n in (self.num_prompts, self.final_num_prompts) if n is not None]
        return min(numbers, default=None)
