"""What must agree when a run is resumed (configuration, data, base, length); the form of its saved state.

Data flow: `Identity.to_save`, `loop/checkpoints.py` -> host data of a checkpoint -> `check_saved_state` and
`Identity.check`, before anything is changed. The keys of the configuration are marked where they are
declared (`MustAgreeOnResume`); what else must agree has a check here.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import jax
from pydantic import ConfigDict, Field

from quatrain.config.data_sets import MixedSet, shown_data_sets
from quatrain.config.errors import listed
from quatrain.config.fields import MustAgreeOnResume, value_at
from quatrain.config.files import Description, checked
from quatrain.config.schema import Config, fields, sections
from quatrain.config.secrets import REDACTED, comparable, redact, same
from quatrain.config.tasks import has_part
from quatrain.data.examples import ExampleSource
from quatrain.data.policy import Policy
from quatrain.data.preferences import JudgedSource, PairSource
from quatrain.data.prompts import PromptSource
from quatrain.models.lora import frozen_part
from quatrain.run.checkpoint import Checkpointer, form
from quatrain.run.run_dir import RunDir
from quatrain.weights.adapter import check_base

Number = Annotated[int, Field(ge=0, le=2**62)]


class _Counts(Description):
    model_config = ConfigDict(extra="forbid")

    step: Number
    bad_steps: Number


class _Place(Description):
    model_config = ConfigDict(extra="forbid")

    next_prompt: Number
    steps_without_signal: Number
    rates: list[float | None] = Field([])


class _Patience(Description):
    model_config = ConfigDict(extra="forbid")

    best: float | None
    without_better: Number
    metric: str | None = None


class _SavedState(Description):
    step: Number
    bad_steps: Number
    train_step: Number
    place: _Place
    reward_kl_coef: Annotated[float, Field(ge=0)]
    reward_kl_began: Annotated[float, Field(ge=0)] = 0.0
    critic: _Counts | None
    config: dict[str, Any]
    num_prompts: Number
    data: dict[str, Any] | None = None
    before: dict[str, float]
    accuracy: float | None
    evaluation_due: bool
    best: dict[str, Any] | None = None
    stop_when: _Patience | None = None
    ended: str | None = None
    base: str | None = None
    tower: str | None = None
    base_form: str | None = None


def check_saved_state(host: Mapping[str, Any], folder: Path | str) -> None:
    """Raises ValueError unless `host`, from a checkpoint in `folder`, is what a run saves.

    It has the host data besides arrays, which `loop/checkpoints.py` saves (`_host`).
    """
    checked(
        _SavedState,
        host,
        f"the state of a checkpoint in {folder}",
        remedy="it is damaged: remove the checkpoint, and resume from the one before",
    )


def must_agree_on_resume(config: Config) -> dict[str, Any]:
    """The keys that a run with `config` must be resumed with, and their values as JSON."""
    return {key: _as_json(value_at(config, key)) for key in fields() if _is_kept(config, key)}


def _is_kept(config: Config, key: str) -> bool:
    marks = [mark for mark in fields()[key].metadata if isinstance(mark, MustAgreeOnResume)]
    section = sections().get(key.partition(".")[0], Config)
    conditions = [section.part_of_a_run_with, *(mark.where for mark in marks)]
    agrees = bool(marks) and has_part(config, key)
    return agrees and all(value_at(config, condition) for condition in conditions if condition)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(each) if isinstance(each, MixedSet) else each for each in value]
    return value


@dataclass(frozen=True)
class Identity:
    """What of a run in `folder` must be the same when it is resumed.

    `data`: the digests of its `num_prompts` rows to train on. `frozen`: the fingerprints of what is not
    trained (`Policy.frozen_fingerprints`); none if no weights are read. `base_form`: what `checkpoint.form`
    says of the base; None without one.
    """

    config: Config
    folder: RunDir
    num_prompts: int
    data: Mapping[str, str]
    frozen: Mapping[str, str]
    base_form: str | None

    @classmethod
    def of(
        cls,
        config: Config,
        folder: RunDir,
        source: PromptSource | ExampleSource | PairSource | JudgedSource,
        policy: Policy,
        saved: Mapping[str, Any] | None,
    ) -> Self:
        """That of a run on `source`; raises ValueError if the checkpoint `saved` is of another run."""
        base_form, fingerprints = None, dict[str, str]()
        if policy.arch.partly_frozen:
            frozen = frozen_part(policy.abstract(config.model.param_dtype)[0], policy.arch)
            base_form = form(frozen) if jax.tree.leaves(frozen) else None
            fingerprints = {} if policy.params is None else policy.frozen_fingerprints
        identity = cls(config, folder, len(source), source.digests(), fingerprints, base_form)
        if saved is not None:
            identity.check(saved)
        return identity

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint says of the run; secrets as digests."""
        keys = must_agree_on_resume(self.config)
        return {
            "config": {key: comparable(value, os.environ) for key, value in keys.items()},
            "num_prompts": self.num_prompts,
            "data": comparable(self.data, os.environ),
            **self.frozen,
            **({"base_form": self.base_form} if "base" in self.frozen else {}),
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError unless the checkpoint `saved` is of the same run."""
        check_config(self.config, saved, self.folder)
        check_form(self.config, self.base_form, saved, self.folder)
        check_frozen(self.frozen, saved, self.config.model.path, self.folder.path)
        check_prompts(self.config, self.num_prompts, self.data, saved)


def check_config(config: Config, saved: Mapping[str, Any], folder: RunDir) -> None:
    """Raises ValueError if the configuration changes a key that must agree, or misses a reference."""
    run = folder.path
    for key, value in must_agree_on_resume(config).items():
        # The default for keys that are newer than the checkpoint.
        before = saved["config"].get(key, comparable(value_at(Config(), key), os.environ))
        if not same(before, value):
            secret = isinstance(before, dict) and REDACTED in before
            known = before[REDACTED] if secret else before
            raise ValueError(
                f"{key} of a resumed run must not change: {run} has {known}, got "
                f"{redact(str(value), os.environ)}; set {key} back, or start another run"
            )
    if config.copies_reference and not Checkpointer(folder.reference).steps():
        keys = ("update.kl_coef", "reward.kl_coef", "distill.teacher")
        key = next(key for key in keys if value_at(config, key))
        raise ValueError(
            f"a run can be resumed with {key} {value_at(config, key)} only if it was started with a "
            f"reference, which is saved at the start; {run} has none; set {key} back, or start another run"
        )


def check_frozen(frozen: Mapping[str, str], saved: Mapping[str, Any], model: str, where: Path) -> None:
    """Raises ValueError if the checkpoint `saved` is of a model with other parts that are `frozen`."""
    for name, found in frozen.items():
        # A checkpoint of an earlier version says nothing of towers.
        check_base(saved.get(name, found if name == "tower" else None), found, model, where)


def check_form(config: Config, form: str | None, saved: Mapping[str, Any], folder: RunDir) -> None:
    """Raises ValueError if the frozen part of the model has other arrays than the checkpoint `saved` says."""
    if form != saved.get("base_form", form):  # a checkpoint of an earlier version has none
        raise ValueError(
            "adapters (or weights beside a frozen tower) must be used with the base that they were trained "
            f"on: the parameters of {config.model.path} in {config.model.param_dtype} have other names, "
            f"shapes or dtypes than those of the base of {folder.path}; set model.path and "
            "model.param_dtype back"
        )


def check_prompts(
    config: Config, num_prompts: int, data: Mapping[str, str], saved: Mapping[str, Any]
) -> None:
    """Raises ValueError if the data to train on do not have the rows that the checkpoint `saved` had."""
    key = config.key_of("data")
    spec, before = shown_data_sets(value_at(config, key)), saved["num_prompts"]
    rows = "rows" if config.run.on_given_data else "prompts"
    if num_prompts != before:
        raise ValueError(
            f"{key} of a resumed run must not change: {spec} had {before} {rows} that were not skipped, and "
            f"has {num_prompts}; restore the data and {config.key_of('max_length')}, or start "
            "another run"
        )
    digests = saved.get("data", data)  # a checkpoint of an earlier version has none
    changed = [] if same(digests, data) else differing(digests, data)
    if changed:
        raise ValueError(
            f"{key} of a resumed run must not change: {spec} has as many rows as before, and "
            f"{listed(changed)} differ; restore the data, and the keys of data, the tokenizer and the "
            f"chat template that {rows} are made with, or start another run"
        )


def check_steps(config: Config, steps: int, done: int, run: Path) -> None:
    """Raises ValueError if the run has fewer steps than its newest checkpoint, that of step `done`."""
    if steps < done:
        key = config.key_of("steps")
        raise ValueError(
            f"{key} of a resumed run must not be below the step of its newest checkpoint: {run} has one "
            f"of step {done}, got {steps} steps; raise {key} (or {config.key_of('epochs')}), or export an "
            "earlier checkpoint with `quatrain export RUN OUTPUT --step N`"
        )


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the digests that are not the same in both."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
