"""The forms of a data set in the configuration, brought into one before they are typed."""

from __future__ import annotations

from pydantic_core import PydanticCustomError


def data_sets(spec: object) -> object:
    """One data set as text, several as a tuple; a list of one is the one."""
    if spec and isinstance(spec, str):
        return spec
    if not isinstance(spec, list | tuple) or not spec or not all(isinstance(s, str) and s for s in spec):
        raise PydanticCustomError(
            "rule", "must be a data set, or a list of data sets, as [a.jsonl, b.parquet]"
        )
    return spec[0] if len(spec) == 1 else tuple(spec)


def data_set_list(spec: str | tuple[str, ...]) -> tuple[str, ...]:
    """The data sets of a value that `data_sets` returned."""
    return (spec,) if isinstance(spec, str) else spec


def shown_data_sets(spec: str | tuple[str, ...]) -> str:
    """The data sets of a value that `data_sets` returned, as text for messages."""
    return ", ".join(data_set_list(spec))
