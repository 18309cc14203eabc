"""The section `data`: prompts, and how texts become tokens."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from quatrain.config.data_sets import data_sets
from quatrain.config.errors import rule
from quatrain.config.fields import (
    Count,
    Fraction,
    MustAgreeOnResume,
    PlainValue,
    Section,
    Text,
    TrainingSets,
)

RESERVED_SETS = ("final", "reward")
"""Names that metrics of evaluations have after `eval/`."""


def _evaluation_sets(sets: object) -> object:
    """One data set, several as one, or a mapping from names to these."""
    if not isinstance(sets, dict):
        return data_sets(sets)
    names = [name for name in sets if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name)]
    if not sets or len(names) < len(sets) or set(names) & set(RESERVED_SETS):
        raise PydanticCustomError(
            "rule",
            "must be data sets, or a mapping from names to data sets; a name has letters, digits, '_', '.' "
            "and '-' and is not {reserved}",
            {"reserved": " or ".join(RESERVED_SETS)},
        )
    return {name: data_sets(spec) for name, spec in sets.items()}


EvaluationSets = Annotated[
    str | tuple[str, ...] | dict[str, str | tuple[str, ...]], BeforeValidator(_evaluation_sets)
]


class CurriculumValues(Section):
    """The entries of `data.curriculum`."""

    reward: Text = "correct"
    low: float = 0.1
    high: float = 0.9
    outside: float = Field(0.1, gt=0, le=1)
    prior: float = 0.5
    newest: float = Field(0.5, gt=0, le=1)


def _curriculum(values: object) -> object:
    """The entries that are given, and the defaults of others; empty for no curriculum."""
    if not isinstance(values, dict) or not values:
        return values
    try:
        found = CurriculumValues.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        names = ", ".join(CurriculumValues.model_fields)
        name = ".".join(map(str, first["loc"]))
        wrong = "is none of them" if first["type"] == "extra_forbidden" else rule(first)
        text = f"must have entries of {names}; {name}: {wrong}; correct it or leave it out"
    else:
        if found.low <= found.high:
            return found.model_dump()
        text = "must have low at most high, the ends of the band of pass rates"
    raise PydanticCustomError("rule", "{rule}", {"rule": text})


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: Annotated[TrainingSets, MustAgreeOnResume()] = "builtin:arithmetic"
    """Training prompts: `builtin:arithmetic`, a data set on the Hub (`openai/gsm8k:main`) or of reasoning-gym
    (`reasoning_gym:chain_sum?size=2000`), or a .jsonl, .json, .parquet or .csv file, also in a bucket
    (`gs://bucket/rows.jsonl`); all forms: [data.md](data.md#where-rows-come-from). A list of data sets is
    read as one, in its order; a list of `{path: a.jsonl, weight: 3}` is a [mixture](data.md#mixtures), drawn
    in the proportions of its weights."""
    eval: EvaluationSets | None = None
    """Evaluation prompts, a data set or a list of them, or a mapping from names to such forms, whose results
    are reported apart: `{gsm8k: gsm8k.jsonl, math: math.jsonl}`; the first is shown during training. Derived:
    the held-out part if `data.train` is built in; further entries if it is of reasoning-gym."""
    batch_size: Annotated[Count, MustAgreeOnResume()] = 16
    """Prompts per training step, over all devices."""
    max_prompt_length: Count = 512
    """Maximum length of a prompt, in tokens."""
    on_long_prompt: Literal["error", "skip", "truncate_left"] = "error"
    """What to do with a prompt longer than `data.max_prompt_length`: end the run, skip the prompt, or drop
    its first tokens (not in episodes, nor with pictures). Skipped and truncated prompts are counted. For rows
    with answers it is `sft.on_long`, `dpo.on_long` or `rm.on_long`."""
    pass_rate_column: Annotated[Text, MustAgreeOnResume()] = "pass_rate"
    """Column with the fraction, 0 to 1, of a model's answers to the prompt that were right."""
    min_pass_rate: Annotated[Fraction | None, MustAgreeOnResume()] = None
    """Train on prompts with at least this pass rate; others of `data.train` are left out and counted. null:
    no lower bound."""
    max_pass_rate: Annotated[Fraction | None, MustAgreeOnResume()] = None
    """Train on prompts with at most this pass rate; null: no upper bound."""
    curriculum: Annotated[dict[Text, float | Text], BeforeValidator(_curriculum), MustAgreeOnResume()] = (
        Field({})
    )
    """Draw training prompts by their running pass rates, as `{low: 0.1, high: 0.9}`; empty: off, each as
    often as the others. Entries: `reward` (`correct`), the reward function whose mean over a prompt's samples
    is the rate; `low` (0.1) and `high` (0.9), between which prompts are drawn with the weight 1; `outside`
    (0.1), the weight of other prompts, above 0; `prior` (0.5), what counts as the rate of a prompt before it
    is drawn; `newest` (0.5), the weight of the newest mean in the rate:
    [data.md](data.md#a-curriculum-by-pass-rates)."""
    question_column: Text | None = None
    """Column with a plain question, which becomes a user message; null: the prompt is in the column `prompt`
    or, if there is none, in the column `messages`."""
    answer_column: Text | None = None
    """Column with the gold answer, which reward functions get as `answer`; null: the column `answer`, or
    verl's `reward_model.ground_truth`."""
    system_prompt: str | None = None
    """System message added before each prompt; null: none."""
    chat_template: Text | None = None
    """Chat template that replaces the tokenizer's: the path of a file, or the template itself, which has `{{`
    or `{%`. It is exported with the model."""
    chat_template_kwargs: dict[Text, PlainValue] = Field({})
    """Variables passed to the chat template, as `{enable_thinking: false}`; a variable that the template does
    not read is an error."""
    image_root: Text | None = None
    """Folder of the pictures that rows name by paths, which stay below it; null: that of the data file."""
    verify_images: bool = True
    """Decode each picture once before the run begins; false: read its size alone, so that a broken picture
    ends the run when it is used."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with a row whose picture cannot be used: end the run, or leave the row out, counted."""
    image_max_pixels: Annotated[Count | None, MustAgreeOnResume()] = None
    """Most pixels of a picture as the model sees it, to which larger ones are reduced (Qwen's models); null:
    as in the model's preprocessor_config.json, which for Qwen3-VL means up to 16,384 tokens a picture."""
    image_min_pixels: Annotated[Count | None, MustAgreeOnResume()] = None
    """Least pixels of a picture as the model sees it; null: as in the model's preprocessor_config.json."""
    shuffle: Annotated[bool, MustAgreeOnResume()] = True
    """Draw training prompts and demonstrations in a new order in each epoch, by `seed`; false: in the order
    of the files, the same in every epoch."""

    @property
    def difficulty(self) -> CurriculumValues | None:
        """The values of `curriculum`; None if it is off."""
        return CurriculumValues.model_validate(self.curriculum) if self.curriculum else None

    @property
    def eval_sets(self) -> dict[str, str | tuple[str, ...]]:
        """The evaluation sets by name; the name of a single source is empty."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"": self.eval}
