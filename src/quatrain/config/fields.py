"""What the sections of the configuration are made of: their base class, and types that several sections use.

Data flow: `sections/*.py` declare keys with these types -> `schema.py`. A description of a key is the text
below it, and a rule of its value that no type expresses is a `must` in its annotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quatrain.config.data_sets import MixedSet, data_sets, training_sets
from quatrain.config.mesh import IN_TEXT, axis_sizes, device_numbers

LARGEST_COUNT = 2**31 - 1
"""Above it, a number does not fit the 32 bits of the arrays that it becomes part of."""
REWARD_MODEL = "model:"
"""How an entry of `reward.functions` begins if it is the path of a reward model."""
MAX_DEPTH = 8
"""Levels of lists and mappings in an argument."""
T = TypeVar("T")
DERIVED = "derived"
"""In the annotation of a key: its null is replaced when the configuration is loaded (`derive.py`)."""
if TYPE_CHECKING:
    Derived = Annotated[T, DERIVED]
else:

    class Derived:
        """`Derived[T]` = `T | None`, the type of a key whose null in a file is replaced by a derived value.

        Type checkers see T: what runs reads a resolved configuration, in which the value is there wherever
        what reads it has a part in the run (tests/config/test_derive.py goes through all of them).
        """

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind | None, DERIVED]


NOT_SET: Any = None
"""The default of a `Derived` key."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors, and types are not converted ("16" is no number)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )
    part_of_a_run_with: ClassVar[str] = ""
    """Dotted key: where its value is false, 0 or null, the section has no part in a run."""


@dataclass(frozen=True)
class MustAgreeOnResume:
    """In the annotation of a key: a run cannot be resumed with another value (`resume.py`).

    For keys that decide what is sampled for each training step, or what a checkpoint holds.
    """

    where: str = ""
    """Dotted key: where its value is false, 0 or null, the key may change."""


def value_at(config: Section, key: str) -> Any:
    """The value of a dotted key, or of an entry of a mapping there."""
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def is_default(config: Section, key: str) -> bool:
    """Whether the dotted key of a section has its default."""
    section, _, name = key.rpartition(".")
    field = type(value_at(config, section)).model_fields[name]
    return bool(value_at(config, key) == field.default)


def must(rule: str | Callable[[Any], str], holds: Callable[[Any], object], *, before: bool = False) -> Any:
    """For an annotation: refuses a value for which `holds` is false or raises, with the rule `must {rule}`.

    A function makes the rule of the value, to name what is wrong in it. With `before`, the check runs before
    the value's type is checked, so that a union of types gives one error.
    """

    def check(value: Any) -> Any:
        try:
            valid = holds(value)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            broken = rule(value) if callable(rule) else rule
            raise PydanticCustomError("rule", "{rule}", {"rule": f"must {broken}"})
        return value

    return BeforeValidator(check) if before else AfterValidator(check)


def function_choice(what: str, builtin: Iterable[str], formulas: str) -> str:
    """The description of a key whose value `function_name` checks."""
    return (
        f"{what}: {', '.join(f'`{name}`' for name in builtin)} (formulas: [algorithms.md]({formulas})), or a "
        "function of your own as `path/file.py:function` or `package.module:function`."
    )


def function_name(builtin: Collection[str]) -> Any:
    """For an annotation: text that is a name in `builtin` or the location of a user's function."""
    return must(
        f"be one of {', '.join(builtin)}, or a function of your own as path/file.py:function",
        lambda name: name in builtin or ":" in name,
    )


def plain_value(value: object, depth: int = MAX_DEPTH) -> object:
    """`value` if it consists of numbers, text, booleans, null, and lists and mappings of these."""
    if depth and isinstance(value, list | tuple):
        return [plain_value(inner, depth - 1) for inner in value]
    if depth and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: plain_value(inner, depth - 1) for name, inner in value.items()}
    finite = isinstance(value, float) and math.isfinite(value)
    if finite or value is None or isinstance(value, int | str | bool):
        return value
    raise PydanticCustomError(
        "rule", "must be a finite number, text, true, false, null, or a list or mapping of these"
    )


_fits = must(f"be at most {LARGEST_COUNT}", lambda count: count <= LARGEST_COUNT)
Count = Annotated[int, Field(ge=1), _fits]
NonNegative = Annotated[int, Field(ge=0), _fits]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, le=0.9999999)]
"""A decay of a moment. One of 1 in float32 has no correction of its bias: weights would become NaN."""
Text = Annotated[str, Field(min_length=1)]
DataSets = Annotated[Text | tuple[Text, ...], BeforeValidator(data_sets)]
_Mixed = Annotated[MixedSet, WithJsonSchema({"const": "{path: text, weight: number > 0}"})]
TrainingSets = Annotated[Text | tuple[Text, ...] | tuple[_Mixed, ...], BeforeValidator(training_sets)]
"""One data set, a list that is read as one, or a mixture."""
PlainValue = Annotated[Any, BeforeValidator(plain_value), WithJsonSchema({"const": "any value"})]
Argument = Annotated[
    float | int | bool | str | None,
    must(
        "be a finite number, text, true, false or null",
        lambda value: value is None or isinstance(value, int | str) or math.isfinite(value),
        before=True,
    ),
]
"""A value that can be given in the configuration as an argument of a function."""
Mesh = Annotated[
    str | dict[str, int],
    must(
        f"be auto, numbers {IN_TEXT} as in 1,-1,1, or a mapping of those axes; each at least 1, or -1 for "
        "one axis, which then uses all remaining devices",
        lambda spec: spec == "auto" or axis_sizes(spec),
        before=True,
    ),
]
Devices = Annotated[
    int | str,
    must(
        "name devices by their numbers in a process, each once, as 3, 0-3 or 0,2,5, without blanks",
        lambda spec: isinstance(spec, int | str) and device_numbers(spec),
        before=True,
    ),
]
