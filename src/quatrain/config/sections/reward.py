"""The sections about what is learned from: `reward`, `advantage`, and `distill`, a teacher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from quatrain.config.algorithms import ESTIMATORS
from quatrain.config.fields import (
    NOT_SET,
    REWARD_MODEL,
    Argument,
    Count,
    Derived,
    Fraction,
    Mesh,
    NonNegative,
    PlainValue,
    Section,
    Text,
    function_choice,
    function_name,
    must,
)
from quatrain.config.sections.judge import JUDGE, Judge


class RewardEntry(Section):
    """What `reward.functions` says of one function."""

    weight: float = 1.0
    args: dict[Text, PlainValue] = Field({})
    """Arguments of the function by name, beside those that every call brings."""
    data_source: Annotated[
        tuple[Text, ...] | None, BeforeValidator(lambda s: [s] if isinstance(s, str) else s)
    ] = Field(None, strict=False)
    """Values of the column `data_source` whose rows the function scores; None: all rows."""


def _unknown_keys(entry: Any) -> list[str]:
    return sorted(str(name) for name in entry if name not in RewardEntry.model_fields)


def _models_with_args(functions: Any) -> list[str]:
    return [
        name
        for name, entry in functions.items()
        if (name.startswith(REWARD_MODEL) or name == JUDGE) and isinstance(entry, RewardEntry) and entry.args
    ]


WeightOrEntry = Annotated[
    Annotated[float, Tag("weight")] | Annotated[RewardEntry, Tag("entry")],
    Discriminator(lambda entry: "weight" if isinstance(entry, int | float) else "entry"),
    must(
        lambda entry: (
            f"have no other keys than weight, args and data_source; it has {', '.join(_unknown_keys(entry))}"
        ),
        lambda entry: not (isinstance(entry, dict) and _unknown_keys(entry)),
        before=True,
    ),
    must(
        "be a number, or a mapping as {weight: 1.0, args: {name: value}, data_source: [name]}",
        lambda entry: type(entry) in (int, float) or isinstance(entry, dict | RewardEntry),
        before=True,
    ),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "{weight: …, args: {…}, data_source: […]}"}]}),
]
Functions = Annotated[
    dict[Text, WeightOrEntry],
    must(
        "be a mapping from functions to weights, as {correct: 1.0, rewards.py:mine: 0.5}",
        lambda functions: isinstance(functions, dict),
        before=True,
    ),
    must(
        "name a reward model with its path, as in model:PATH; one has none",
        lambda functions: REWARD_MODEL not in functions,
    ),
    must(
        lambda functions: (
            f"have no args for a reward model or the judge; {_models_with_args(functions)[0]} has some"
        ),
        lambda functions: not _models_with_args(functions),
    ),
]


class RewardConfig(Section):
    """Stage 2 of a training step: scoring completions."""

    functions: Functions = Field({"correct": 1.0, "format": 0.5, "tag_count": 0.5})
    """Mapping from reward functions to their weights. A function is a built-in name,
    `package.module:function`, `path/file.py:function`, `model:PATH`, the reward model in a local Hugging Face
    folder or on the Hub, or `judge`, the model of `reward.judge`. Instead of a weight, a mapping gives
    `weight` (default 1.0), `args` (arguments by name) and `data_source` (the values of this column whose rows
    are scored):
    [reward.md](reward.md#arguments-and-data-sources). A configuration layer that sets the mapping replaces
    the whole mapping; with a teacher (`distill.teacher`) it may be empty. If no layer sets it, it is
    `{judge: 1.0}` with `reward.judge`, else `{reasoning_gym: 1.0}` where `data.train` is of reasoning-gym,
    else `{environment: 1.0}` with `rollout.agent`."""
    judge: Judge = None
    """A model that judges completions: `self`, or a mapping with [these keys](#rewardjudge), of which each
    may be set alone, as `reward.judge.n`. The entry `judge` of `reward.functions` has its weight."""
    overlong_limit: Derived[Count] = NOT_SET
    """Tokens of a completion at which the function `overlong` gives -1; derived if `reward.functions` has
    `overlong`: `rollout.max_new_tokens`."""
    overlong_buffer: Derived[Count] = NOT_SET
    """Tokens before `reward.overlong_limit` over which the function `overlong` falls from 0 to -1; derived if
    `reward.functions` has `overlong`: a fifth of the limit."""
    truncated_factor: Fraction | None = None
    """Penalty on completions that were cut at `rollout.max_new_tokens`: their reward is multiplied by this
    factor. The function `overlong` is not part of what is multiplied, and a reward below 0 stays as it is.
    null: no factor."""
    truncated_reward: float | None = None
    """The same penalty in another form: the reward of a completion that was cut, whatever the functions but
    `overlong` gave it; null: theirs."""
    per_call: Literal["batch", "group", "sample"] = "batch"
    """Samples that a reward function gets in one call: the whole batch, the samples of one prompt, or one.
    Calls on groups or samples run in parallel, and a function that compares samples sees those of its call
    only."""
    workers: NonNegative | None = Field(None, le=1024)
    """Processes that call users' reward functions; null: one for each core that the process may use, at most
    8. 0: they are called in the process of the run, for functions that hold a model, without limits on time
    and memory."""
    timeout_s: float = Field(10.0, ge=0.01, le=86400)
    """Seconds that one call of a user's reward function may take, and so the longest time for one sample. A
    call that takes longer is ended, and its samples are called again in smaller parts. Of the function
    `correct`: seconds that each of its processes may spend on slow comparisons of expressions in one call."""
    memory_mb: int | None = Field(4096, ge=64, le=2**30)
    """MiB of private memory that a process that calls users' reward functions may use; null: not limited."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL to the frozen reference that is subtracted from each token's reward (old
    log-probability minus reference log-probability); 0: no KL in the reward."""
    kl_target: float | None = Field(None, gt=0)
    """KL, in nats per token, that the coefficient is adapted to from one training step to the next, starting
    from `reward.kl_coef`; null: the coefficient is fixed."""
    kl_horizon: Count = 10000
    """Sequences over which the coefficient adapts to `reward.kl_target`."""
    model_max_tokens_per_device: Derived[Count] = NOT_SET
    """Token budget of the reward models: maximum number of their tokens per data shard in one forward pass.
    Derived if `reward.functions` has a reward model: `logprob.max_tokens_per_device`; if that is null, 32768,
    or twice the length of the longest possible sequence if that is more."""

    @property
    def models(self) -> dict[str, str]:
        """The reward models: entry of `functions` -> path of the model."""
        entries = (name for name in self.functions if name.startswith(REWARD_MODEL))
        return {name: name.removeprefix(REWARD_MODEL) for name in entries}

    @property
    def judges(self) -> bool:
        """Whether a judge gives a reward."""
        return self.judge is not None and JUDGE in self.functions

    @property
    def entries(self) -> dict[str, RewardEntry]:
        """`functions` with every entry in its long form."""
        return {
            name: entry if isinstance(entry, RewardEntry) else RewardEntry(weight=entry)
            for name, entry in self.functions.items()
        }


class AdvantageConfig(Section):
    """Stage 3 of a training step: computing advantages from rewards."""

    estimator: Annotated[str, function_name(ESTIMATORS)] = Field(
        "grpo",
        description=function_choice("Advantage estimator", ESTIMATORS, "algorithms.md#advantage-estimators"),
    )
    args: dict[Text, Argument] = Field({})
    """Arguments of the estimator by name, beside its inputs; checked when a run starts."""
    turn_credit: bool = False
    """Whether what an environment gave for a turn is credit for the tokens of this turn alone, compared with
    the same turn of the group's other episodes, in place of a part of the whole episode's reward:
    [advantage.md](advantage.md#credit-of-turns)."""
    scale: Literal["group", "batch", "none"] | None = None
    """Standard deviation that divides the advantage: of the group's rewards, of the whole batch, or none.
    Which of these an estimator accepts, and which is derived:
    [algorithms.md](algorithms.md#advantage-estimators)."""


DEFAULT = "default"
"""The entry of `distill.teacher` for the rows of all data sources that it does not name."""
OWN = ("policy", "initial")
"""Teachers with weights of the run itself."""


HTTP = ("http://", "https://")
"""How the address of a server begins."""


class DistillConfig(Section):
    """On-policy distillation: a teacher says how likely it finds each token that the policy sampled."""

    teacher: Annotated[
        Text | dict[Text, Text | None] | None,
        must(
            "be a teacher, or a mapping from data sources to teachers, one of them not null, as "
            "{math: A, code: B, default: null}",
            lambda teacher: (
                teacher is None
                or (teacher and isinstance(teacher, str))
                or (isinstance(teacher, dict) and any(teacher.values()))
            ),
            before=True,
        ),
    ] = None
    """The teacher: a frozen model in the forms of `model.path`, of any supported family and size, whose
    tokenizer must be the policy's; `initial`, the reference, which may follow the policy
    (`update.reference_sync_steps`); the address of a server that gives log-probabilities of prompts, as
    `http://host:8000`; or `policy`, its weights at the start of the training step, which need a
    `distill.prompt`. A mapping from values of the column `data_source` to these gives each row its teacher;
    `default` is that of all other values, and null is none. null: no distillation."""
    prompt: Text | None = None
    """What the teacher reads in place of the prompt: a text with names of data columns, as
    `The answer is {answer}.` (a literal brace is written twice), which becomes a system message before the
    prompt's messages, or a function of the row as `path/file.py:function` that returns messages; null: the
    prompt."""
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "sampled"
    """What the policy learns from the teacher: `sampled`: the difference of log-probabilities of the sampled
    token, as an advantage; the others: a divergence over the whole vocabulary, as a loss of its own:
    [distill.md](distill.md#losses-over-the-vocabulary)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight β of the teacher in the mixture of `distill.loss: jsd`."""
    top_k: int = Field(0, ge=0)
    """Words that a loss over the vocabulary tells apart, the teacher's likeliest in each place; all others
    count as one. The teacher, of any form, is then asked once for each batch, before the update. 0: all
    words, by a teacher that is one model on the devices and the mesh of training."""
    weight: float = Field(1.0, ge=0)
    """Weight of the teacher's term; 0: it is measured and not trained on."""
    rl_weight: float = Field(1.0, ge=0)
    """Weight of the advantage that comes from rewards; 0: rewards are measured and not trained on."""
    clip: float = Field(10.0, gt=0)
    """Bound, in nats, of a token's difference of log-probabilities, teacher minus policy."""
    discount: Fraction = 0.0
    """Discount γ: a token's term is the sum of those from this token on, each times γ to the power of the
    number of sampled tokens between; 0: its own alone."""
    temperature: Derived[float] = Field(NOT_SET, gt=0)
    """Temperature of the teacher's distribution; derived: `rollout.temperature`."""
    warmdown_steps: Count | None = None
    """`distill.weight` falls to 0, linearly, over so many last training steps; null: it is constant."""
    max_tokens_per_device: Derived[Count] = NOT_SET
    """Token budget of the teacher: maximum number of tokens per data shard in one forward pass. Derived with
    a teacher: `logprob.max_tokens_per_device`; if that is null, 32768, or twice the length of the longest
    possible sequence if that is more."""
    mesh: Mesh | None = None
    """Device mesh of the teacher, in the forms of `mesh`, on the devices of `placement.teacher`; null: that
    of training on the same devices, else `auto`."""

    @property
    def teachers(self) -> dict[str, str | None]:
        """The teachers by data source, that of the others as `default`; empty without any."""
        if isinstance(self.teacher, dict):
            return self.teacher
        return {} if self.teacher is None else {DEFAULT: self.teacher}

    @property
    def own(self) -> tuple[str, ...]:
        """The teachers with weights of the run."""
        return tuple(name for name in OWN if name in self.teachers.values())

    @property
    def models(self) -> tuple[str, ...]:
        """The teachers with weights of their own, each once."""
        paths = (path for path in self.teachers.values() if path is not None)
        return tuple(dict.fromkeys(path for path in paths if path not in OWN and not path.startswith(HTTP)))

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of teachers behind servers, each once."""
        paths = (path for path in self.teachers.values() if path is not None)
        return tuple(dict.fromkeys(path for path in paths if path.startswith(HTTP)))
