"""The translation of one file while it is made: values of ours, remarks, and what is left over; then YAML.

Data flow: dotted keys of the other library -> `take` and `put` by its module -> `put_the_rest` by the table
in `config/aliases.py` -> `refuse` -> `render`.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from quatrain.config.aliases import INSIDE, key_for, suggestion, value_for
from quatrain.config.dump import inline
from quatrain.config.errors import ConfigError, shown
from quatrain.config.fields import value_at
from quatrain.config.load import check
from quatrain.config.schema import Config, sections, valid_keys

WIDTH = 108
COLUMN = 44
_ROLES = {
    "critic": ("critic", "offload.critic"),
    **dict.fromkeys(("reward", "reward_model"), ("reward", "offload.reward")),
    "distillation": ("distill",),
}
"""Sections of verl for another model than the policy -> where their keys may go here."""
OPTIMIZERS = "adamw, lion, sgd, muon or adafactor"
_READ = "read for the values above, or with this value there is nothing to set here"
_SECRET = re.compile(r"token$|password|secret|api_key")


@dataclass
class _Line:
    value: Any
    origin: str
    remark: str


@dataclass
class Translation:
    """The keys of `library`'s file `source` (`given`), and what has become of them so far."""

    library: str
    source: str
    given: Mapping[str, Any]
    lines: dict[str, _Line] = field(default_factory=dict)
    """Key here -> its value, its origin and a remark."""
    left: dict[str, str] = field(default_factory=dict)
    """Key there -> why it is not translated."""
    taken: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    """Keys there that the output names, as the origin of a value or as not translated."""

    def take(self, name: str, default: Any = None) -> Any:
        """The value of their key `name`, which counts as dealt with; `default` if it is null or absent."""
        self.taken.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def mapping(self, name: str) -> dict[str, Any]:
        """What is given below `name`, by the rest of the key; all of it counts as dealt with."""
        inside = {key: value for key, value in self.given.items() if key.startswith(f"{name}.")}
        self.taken |= {name, *inside}
        whole = self.given.get(name)
        return (
            whole
            if isinstance(whole, dict)
            else {key.removeprefix(f"{name}."): value for key, value in inside.items()}
        )

    def number(self, name: str, default: Any = None) -> Any:
        """As `take`, for a number; raises ConfigError for anything else."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.source}: {name} must be a number to be translated; got {shown(value)}")
        return value

    def put(self, key: str, value: Any, *names: str, remark: str = "") -> None:
        """Gives `key` here the `value`, which comes from their keys `names`.

        A value that is our default, and that the file does not give, is left out.
        """
        self.taken |= set(names)
        self.named |= set(names)
        given = [name for name in names if self.given.get(name) is not None]
        if not given and value == value_at(Config(), key) and not remark:
            return
        origin = ", ".join(f"{name}: {self._shown(name)}" for name in given)
        if not given and names:
            origin = f"{self.library}'s default of {names[0]}"
        self.lines[key] = _Line(value, origin, remark)

    def move(self, key: str, name: str, default: Any = None) -> None:
        """Gives `key` here the number of their key `name`, or their `default`."""
        self.put(key, self.number(name, default), name)

    def copy(self, key: str, name: str) -> None:
        """As `move`, where the file gives `name`."""
        if self.number(name) is not None:
            self.move(key, name)

    def copy_mapping(self, key: str, name: str) -> None:
        """Gives `key` here the mapping that the file has at or below their key `name`, if there is one."""
        if whole := self.mapping(name):
            self.put(key, whole, *(each for each in self.given if f"{each}.".startswith(f"{name}.")))

    def leave_all(self, why: str, begin: str | tuple[str, ...]) -> None:
        """As `leave`, all keys that begin so."""
        self.leave(why, *(name for name in self.given if name.startswith(begin)))

    def leave(self, why: str, *names: str) -> None:
        """Writes their keys `names`, those that the file gives, as comments with the reason."""
        self.taken |= set(names)
        self.named |= set(names)
        self.left |= {name: why for name in names if self.given.get(name) is not None}

    def put_the_rest(self, defaults: Mapping[str, Any]) -> None:
        """Translates the keys that are not dealt with by their names; `defaults` are theirs that differ."""
        for name, value in (dict(defaults) | dict(self.given)).items():
            if name in self.taken or value in (None, {}, []):
                continue
            parts = name.split(".")
            inside = next((n for n, part in enumerate(parts, 1) if part in INSIDE), 0)
            if inside:
                self.taken.add(name)
                whole = ".".join(parts[:inside]) + ".*" * (inside < len(parts))
                if parts[inside - 1] != "_target_":  # the class that Hydra makes of the section
                    self.left[whole] = INSIDE[parts[inside - 1]]
                self.named.add(name)
                continue
            key = key_for(name)
            if parts[0] in _ROLES and not (key or "").startswith(_ROLES[parts[0]]):
                key = None
            translated = value_for(key, value) if key else None
            if translated is not None and re.fullmatch(r"\w+", translated):
                value = translated
            if key is None:
                self.leave(suggestion(name) or "", name)
            elif key in self.lines:
                self.leave(f"here it is {key!r}, which has its value above", name)
            elif _fits(key, value):
                self.put(key, value, name)
            else:
                self.leave(f"here it is {key!r}, whose values are others", name)

        for name in sorted(self.taken - self.named):
            if self.given.get(name) not in (None, {}, []):
                self.leave(_READ, name)

    @property
    def _task(self) -> Any:
        return self.lines["run.task"].value if "run.task" in self.lines else None

    def refuse(self) -> None:
        """Makes each line that our rules refuse a comment with what they say."""
        while self.lines:
            # Data that are still to be filled in are no reason to refuse the rest.
            values = {f"{section}.data": "rows" for section in ("dpo", "rm") if section == self._task}
            problems = check(values | {key: line.value for key, line in self.lines.items()})
            refused = {
                key: problem
                for problem in problems
                for key in self.lines
                if problem.startswith((f"{key} ", f"{key}."))
            }
            if not refused:
                if problems:
                    raise ConfigError(problems)
                return
            for key, problem in refused.items():
                line = self.lines.pop(key)
                said = re.sub(r" \(from .*?\)(?=$|;)", "", problem)
                self.left[line.origin.partition(":")[0] or key] = f"quatrain refuses it: {said}"

    def render(self, header: Sequence[str]) -> str:
        """The YAML, in the order of our sections, with remarks, and what is left over as comments."""
        text = [*_comment(*header)]
        nested = sections()
        tops = [key for key in valid_keys() if key in self.lines and "." not in key]
        text += [line for key in tops for line in self._entry(key, "")]
        for section in nested:
            keys = [key for key in valid_keys() if key in self.lines and key.startswith(f"{section}.")]
            if keys:
                text += ["", f"{section}:", *(line for key in keys for line in self._entry(key, "  "))]
        return "\n".join([*text, *self._left_over()]) + "\n"

    def _entry(self, key: str, indent: str) -> Iterator[str]:
        line = self.lines[key]
        yield from (indent + text for text in _comment(line.remark) if line.remark)
        name = key.rpartition(".")[2]
        if isinstance(line.value, dict) and line.value and key != "mesh":
            yield f"{indent + name + ':':<{COLUMN}}" + f"  # {line.origin}"
            for entry, value in line.value.items():
                yield f"{indent}  {inline(entry)}: {inline(value)}"
        else:
            text = f"{indent}{name}: {inline(line.value)}"
            yield f"{text:<{COLUMN}}  # {line.origin}" if line.origin else text

    def _left_over(self) -> Iterator[str]:
        reasons: dict[str, list[str]] = {}
        for name, why in self.left.items():
            reasons.setdefault(why, []).append(name)
        off = [name for name in reasons.get("", ()) if self.given[name] in (False, [], {}, "", "none")]
        if reasons:
            yield ""
            yield "# ---- Not translated"
        for why, names in reasons.items():
            shown_here = [name for name in names if why or name not in off]
            yield from ("#   " + self._named(name) for name in shown_here)
            if shown_here:
                yield from _comment(f"^ {why or 'no key here does this'}", indent="      ")
        if off:
            yield from _comment(f"Off or empty there, and without a key here: {', '.join(off)}")

    def _named(self, name: str) -> str:
        return f"{name}: {self._shown(name)}" if self.given.get(name) is not None else name

    def _shown(self, name: str) -> str:
        if _SECRET.search(name.lower()):
            return "…"
        return " ".join(shown(_Plain(self.given[name])).split())


class _Plain:
    """Writes a value as YAML does, so that `shown` cuts and redacts it."""

    def __init__(self, value: Any) -> None:
        self._text = inline(value)

    def __repr__(self) -> str:
        return self._text


_MATRICES = {
    "qkv": ("q_proj", "k_proj", "v_proj", "q_einsum", "kv_einsum"),
    "o": ("o_proj", "attn_vec_einsum"),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "lm_head": ("lm_head",),
}


def put_lora_targets(t: Translation, name: str, default: str | list[str] = "all-linear") -> None:
    """The matrices with adapters from names of modules, a list or a pattern of them."""
    theirs = t.take(name, default)
    text = theirs if isinstance(theirs, str) else " ".join(map(str, theirs))
    ours = [matrix for matrix, modules in _MATRICES.items() if any(module in text for module in modules)]
    whole = all(module in text for matrix in ours for module in _MATRICES[matrix] if module.endswith("_proj"))
    if ours:
        remark = (
            "" if whole or "einsum" in text else "matrices that are stored as one have adapters together here"
        )
        t.put("lora.targets", ours, name, remark=remark)
    elif text == "all-linear":
        t.put("lora.targets", ["all-linear"], name)
    else:
        t.leave(
            "lora.targets has other matrices: all-linear, or some of qkv, o, gate_up, down, lm_head", name
        )


def _fits(key: str, value: Any) -> bool:
    """Whether `key` here takes `value`, whatever the other keys have."""
    section, _, name = key.rpartition(".")
    kind = sections()[section] if section else Config
    try:
        kind.model_validate({name: value})
    except ValidationError:
        return False
    return True


def _comment(*paragraphs: str, indent: str = " ") -> Iterator[str]:
    """Paragraphs as lines of a comment, of at most WIDTH characters."""
    for paragraph in paragraphs:
        for line in textwrap.wrap(paragraph, WIDTH - len(indent), break_on_hyphens=False) or [""]:
            yield f"#{indent}{line}".rstrip()
