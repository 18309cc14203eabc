"""The keys that must agree when a run is resumed, as the sections mark them (`fields.MustAgreeOnResume`)."""

from __future__ import annotations

from typing import Any

from quatrain.config.fields import MustAgreeOnResume, value_at
from quatrain.config.schema import Config, fields, sections


def must_agree_on_resume(config: Config) -> dict[str, Any]:
    """The keys that a run with `config` must be resumed with, and their values as JSON."""
    return {key: _as_json(value_at(config, key)) for key in fields() if _is_kept(config, key)}


def _is_kept(config: Config, key: str) -> bool:
    marks = [mark for mark in fields()[key].metadata if isinstance(mark, MustAgreeOnResume)]
    section = sections().get(key.partition(".")[0], Config)
    conditions = [section.part_of_a_run_with, *(mark.where for mark in marks)]
    return bool(marks) and all(value_at(config, condition) for condition in conditions if condition)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
