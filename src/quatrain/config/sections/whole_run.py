"""The sections about a run as a whole: `run`, `eval`, `checkpoint`, `logging`, `hub`, `distributed`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import (
    NOT_SET,
    REWARD_MODEL,
    Argument,
    Count,
    Derived,
    MustAgreeOnResume,
    NonNegative,
    Section,
    Text,
    must,
)
from quatrain.config.places import HUB_ID

FolderName = Annotated[
    Text,
    must(
        "be letters, digits, '_', '.' and '-': it names a folder",
        re.compile(r"\w[\w.-]*").fullmatch,
    ),
]


def smaller_is_better(metric: str) -> bool:
    """Whether a smaller value of the metric is the better one: a loss or a perplexity, also of a source."""
    first, _, rest = metric.partition("/")
    return (rest or first).partition("/")[0] in ("loss", "perplexity")


def _is_condition(value: dict[str, object]) -> bool:
    """Whether `run.stop_when` is empty, or names a metric and one bound, or the patience."""
    (name, bound), *others = [*((n, b) for n, b in value.items() if n != "metric"), ("", None)]
    number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if name == "patience":
        number = isinstance(bound, int) and number and bound >= 1
    known = name in ("at_least", "at_most", "patience") and len(others) == 1
    return not value or (isinstance(value.get("metric"), str) and known and number)


Task = Literal["rl", "sft", "dpo", "rm"]


class RunConfig(Section):
    """The run as a whole."""

    task: Annotated[Task, MustAgreeOnResume()] = "rl"
    """What is run: `rl` by `quatrain train`, `sft`, `dpo` or `rm` by the command of that name. The command
    sets it; in a file it may stand for `quatrain plan` and `quatrain config`."""
    name: Derived[FolderName] = NOT_SET
    """Name of the run's folder; derived: the configuration file's name and the time (UTC)."""
    dir: Text = "runs"
    """Folder that holds all runs."""
    steps: Count | None = None
    """Number of training steps (rollout batches); derived from `run.epochs` and the data."""
    epochs: float = Field(1.0, gt=0, le=1e6)
    """Passes over the training prompts; has no effect if `run.steps` is set."""
    stop_when: Annotated[
        dict[Text, Argument],
        must(
            "be {metric: NAME, at_least: NUMBER}, {metric: NAME, at_most: NUMBER} or {metric: NAME, "
            "patience: COUNT}, or {}",
            _is_condition,
        ),
    ] = Field({})
    """The run ends early after the first step whose metric reaches a bound, as in
    `{metric: eval/accuracy_strict, at_least: 0.9}` or `{metric: update/entropy, at_most: 0.1}`, or after the
    evaluation that is the third in a row without a better value, as in `{metric: eval/loss, patience: 3}`,
    with its last checkpoint, final evaluation and export. A metric of evaluations is compared after the steps
    that have one (`eval.every_steps`); the better value of `loss` and `perplexity` is the smaller, of others
    the larger. `{}`: never. A run that ended so and is resumed trains on, and compares again after each
    step; one that was stopped in its final evaluation or export is resumed there."""
    profile_steps: tuple[Count, ...] = Field((), strict=False)
    """Training steps, as `[3, 4]`, of which the main process writes a trace of JAX's profiler to `profile/`
    in the run's folder; consecutive steps are one trace."""
    compilation_cache: Text | None = "auto"
    """Folder that keeps compiled programs for later runs; in it, every kind of machine and every version of
    JAX has a folder of its own. `auto`: `quatrain/compiled` in `XDG_CACHE_HOME` or `~/.cache`, on
    accelerators and, under Linux, on CPUs; where JAX's own variables name a folder or switch its cache off,
    they hold. null: nothing is kept or read."""

    @property
    def on_given_data(self) -> bool:
        """Whether the run trains on data that exist, without rollouts: `quatrain sft`, `dpo` or `rm`."""
        return self.task != "rl"


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


class CheckpointConfig(Section):
    """Checkpoints, which contain everything needed to resume a run."""

    every_steps: Annotated[NonNegative, MustAgreeOnResume(where="rollout.max_staleness")] = 50
    """Training steps between checkpoints; 0: only after the last step."""
    keep: Count = 3
    """Number of checkpoints kept; older ones are deleted."""
    dir: Text | None = None
    """Folder or bucket (`gs://BUCKET/NAME`, `s3://BUCKET/NAME`; extra `buckets`) that gets the checkpoints of
    runs, each run's in `<run.name>/`, with the reference policy; for many hosts without a file system that
    they share. null: they are in the run's folder."""
    best_metric: Text | None = None
    """Metric of every evaluation, such as `eval/accuracy_lenient` or `eval/reward`. An evaluation with a new
    best value saves a checkpoint, which is kept beside the newest `checkpoint.keep`; `quatrain export RUN
    OUTPUT --step best` exports it. null: no evaluation does."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of `checkpoint.best_metric` is the best."""


class LoggingConfig(Section):
    """Logging of metrics and samples, in addition to the files that every run writes."""

    wandb: Literal["disabled", "offline", "online"] | None = None
    """Mode of Weights & Biases (extra `wandb`); derived: the variable WANDB_MODE, or `online` if
    WANDB_API_KEY is set, else `disabled`."""
    wandb_project: Text = "quatrain"
    """Project in Weights & Biases."""
    trackio: Text | None = None
    """Project in Trackio (extra `trackio`) that the run is logged to; null: none."""
    tensorboard: bool = False
    """Write TensorBoard files (extra `tensorboard`)."""
    samples_per_step: NonNegative = 16
    """Completions written to `samples/` at each training step."""
    sample_tokens: bool = False
    """Write the tokens of these completions too, with the log-probabilities of sampler and trainer. The
    trainer's cost one forward pass in each training step."""


Repository = Annotated[Text, must("be a repository on the Hugging Face Hub, as OWNER/NAME", HUB_ID.fullmatch)]


class HubConfig(Section):
    """The trained model on the Hugging Face Hub."""

    push: Repository | None = None
    """Repository `OWNER/NAME` that gets the trained model and its card at the end of the run; created at the
    start, so that a missing right is an error then. Needs `HF_TOKEN` or a login. In a run of several
    processes, process 0 uploads, which must end within `distributed.shutdown_timeout_s`. null: none."""
    private: bool = True
    """Whether a new repository is private; one that exists is not changed."""


class DistributedConfig(Section):
    """How long the processes of a run with several processes wait for each other."""

    start_timeout_s: Count = 300
    """Maximum time, in seconds, that a process waits at the start for the coordinator and for all other
    processes."""
    heartbeat_timeout_s: Count = 60
    """Time without a sign of life, in seconds, after which a process counts as dead and the others end."""
    shutdown_timeout_s: Count = 600
    """Maximum time, in seconds, that a process waits at the end for the other processes, mainly for process 0
    to write its files."""
