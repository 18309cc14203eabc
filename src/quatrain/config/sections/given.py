"""The sections about training on data that exist: `sft`, `dpo` and `rm`, and what they share."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import (
    NOT_SET,
    Argument,
    Count,
    DataSets,
    Derived,
    MustAgreeOnResume,
    NonNegative,
    Section,
    Text,
    TrainingSets,
    function_name,
)
from quatrain.config.sections.update import Schedule

PREFERENCE_LOSSES = ("sigmoid", "ipo", "robust", "hinge", "orpo", "simpo", "kto")
"""Losses of `quatrain dpo`; `kto` reads single answers, not pairs."""
WITHOUT_REFERENCE = ("orpo", "simpo")
BY_LENGTH = ("ipo", *WITHOUT_REFERENCE)
"""Those that divide log-probabilities by the lengths of answers."""
SCORE_LOSSES = ("bradley_terry",)
_OWN = "or a coupled loss of your own as `path/file.py:function` or `package.module:function`"


def passes(epochs: float, count: int) -> int:
    """`epochs` times `count`, rounded up; of the decimal as it is written, as 1.1 times 10 are 11."""
    return math.ceil(Fraction(str(epochs)) * count)


class GivenConfig(Section):
    """Training on data that exist, without a rollout."""

    data: Annotated[Derived[TrainingSets], MustAgreeOnResume(where="run.on_given_data")] = NOT_SET
    """What is trained on: a data set, a list of them or a mixture, as `data.train`; the forms of rows:
    [data.md](data.md)."""
    eval: DataSets | None = None
    """Rows in the same forms, of which every evaluation computes the loss (`eval/loss` and more); null:
    none."""
    steps: Annotated[NonNegative, MustAgreeOnResume(where="run.on_given_data")] = 0
    """Optimizer steps; 0: as many as `epochs` make."""
    epochs: Annotated[float, MustAgreeOnResume(where="run.on_given_data")] = Field(1.0, gt=0, le=1e6)
    """Passes over the rows; has no effect if `steps` is set."""
    batch_size: Annotated[Count, MustAgreeOnResume(where="run.on_given_data")] = 64
    """Rows per optimizer step, over all devices: examples, or pairs of answers."""
    learning_rate: Derived[float] = Field(NOT_SET, ge=0)
    """Peak learning rate; derived: 1e-3 for a built-in model, whose weights are random, else 1e-5 (`dpo`:
    5e-7); ten times that with adapters (`lora.rank`)."""
    schedule: Schedule = "cosine"
    """How the learning rate changes after the warm-up; `linear` and `cosine` end at 0."""
    warmup_steps: NonNegative = 10
    """Optimizer steps over which the learning rate rises linearly."""
    max_length: Annotated[Count | None, MustAgreeOnResume(where="run.on_given_data")] = None
    """Maximum length of a row, prompt and answer together, in tokens; null: what a micro-batch holds
    (`update.max_tokens_per_device`), and in any case no more than the model has positions."""
    on_long: Annotated[Literal["error", "skip", "truncate"], MustAgreeOnResume(where="run.on_given_data")] = (
        "error"
    )
    """What to do with a row longer than that: end the run, skip the row, or cut its last tokens. Skipped and
    cut rows are counted."""


class SFTConfig(GivenConfig):
    """Supervised training on demonstrations: `quatrain sft`, or in `quatrain train` a warm start before the
    first training step."""

    data: Annotated[Derived[TrainingSets], MustAgreeOnResume(where="run.on_given_data")] = NOT_SET
    """Demonstrations: rows with `messages`, with `prompt` and `completion`, or with `text`
    (`sft.train_on: all`); a data set, a list or a mixture, as `data.train`; derived: `data.train`."""
    steps: Annotated[NonNegative, MustAgreeOnResume(where="keeps_supervised_steps")] = 0
    """Optimizer steps; 0: in `quatrain sft` as many as `sft.epochs` make, in `quatrain train` no warm
    start."""
    train_on: Annotated[
        Literal["completion", "assistant", "all"], MustAgreeOnResume(where="run.on_given_data")
    ] = "assistant"
    """Which tokens are trained: `assistant`: every answer of the assistant; `completion`: the last one;
    `all`: every token, which plain `text` needs."""


class DPOConfig(GivenConfig):
    """Training on preferences: `quatrain dpo`."""

    data: Annotated[Derived[TrainingSets], MustAgreeOnResume()] = NOT_SET
    """Pairs: rows with `chosen` and `rejected`, and perhaps `prompt`; for `dpo.loss: kto` rows with `prompt`,
    `completion` and `label`. A data set, a list or a mixture, as `data.train`."""
    loss: Annotated[str, function_name(PREFERENCE_LOSSES), MustAgreeOnResume()] = Field(
        "sigmoid",
        description=f"The loss: {', '.join(f'`{name}`' for name in PREFERENCE_LOSSES)}, {_OWN}: "
        "[algorithms.md](algorithms.md#losses-on-preferences).",
    )
    loss_args: Annotated[dict[Text, Argument], MustAgreeOnResume()] = Field({})
    """Arguments of a loss of your own by name; checked when a run starts."""
    beta: Annotated[float, MustAgreeOnResume()] = Field(0.1, gt=0)
    """Weight β of the log-ratio to the reference; the larger, the closer the policy stays to it. For `orpo`:
    the weight λ of the odds ratio; for `simpo`: that of mean log-probabilities, about 2 in its paper."""
    label_smoothing: Annotated[float, MustAgreeOnResume()] = Field(0.0, ge=0, lt=0.5)
    """Fraction ε of pairs whose answers are taken to be the wrong way round (`sigmoid`: cDPO; `robust`:
    unbiased)."""
    reference: Annotated[Text, MustAgreeOnResume()] = "initial"
    """The reference: `initial`, the model at the start of the run (with adapters: their frozen base), or
    another model in the forms of `model.path`, whose tokenizer must be the same. Its log-probabilities are
    computed once, before the first step."""
    gamma: Annotated[float, MustAgreeOnResume()] = Field(0.5, ge=0)
    """Margin γ of the rewards of a pair in `simpo`."""
    desirable_weight: Annotated[float, MustAgreeOnResume()] = Field(1.0, ge=0)
    """Weight of answers labelled true in `kto`."""
    undesirable_weight: Annotated[float, MustAgreeOnResume()] = Field(1.0, ge=0)
    """Weight of answers labelled false in `kto`."""

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a frozen reference."""
        return self.loss not in WITHOUT_REFERENCE


class RMConfig(GivenConfig):
    """Training a reward model on preferences: `quatrain rm`."""

    data: Annotated[Derived[TrainingSets], MustAgreeOnResume()] = NOT_SET
    """Pairs: rows with `chosen` and `rejected`, and perhaps `prompt` and `margin`, the least difference of
    their scores; a data set, a list or a mixture, as `data.train`."""
    loss: Annotated[str, function_name(SCORE_LOSSES), MustAgreeOnResume()] = Field(
        "bradley_terry",
        description=f"The loss: {', '.join(f'`{name}`' for name in SCORE_LOSSES)}, −log σ of the difference "
        f"of scores less the margin, {_OWN}.",
    )
    loss_args: Annotated[dict[Text, Argument], MustAgreeOnResume()] = Field({})
    """Arguments of a loss of your own by name; checked when a run starts."""
    center: Annotated[float, MustAgreeOnResume()] = Field(0.0, ge=0)
    """Weight of the square of the sum of a pair's scores, which keeps scores around 0; 0: none."""
