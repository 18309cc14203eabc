"""Counts in the text of a compiled program (XLA's optimised HLO): kernels, loops, copies, casts.

A kernel is an instruction of a computation that runs by itself, that is, neither inside a fusion nor as the
function of a reduction, and that does work: parameters, tuples, constants and bitcasts do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

MIB = 2**20
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Bytes of an element; 4 for a type that is not named."""

NO_WORK = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "partition-id", "replica-id"),
    *("after-all", "opt-barrier", "async-update", "async-done", "copy-done", "slice-done"),
    *("all-gather-done", "all-reduce-done"),
}
MOVES = {
    "bitcast",
    "copy",
    "reshape",
    "transpose",
    "slice",
    "dynamic-slice",
    "broadcast",
    "get-tuple-element",
}
"""Operations whose result has the values of their first operand, so that a cast of it is a cast of that."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line: its name, result type, operation, operands, and the text after them."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def mib(self) -> float:
        """MiB of the result; of an asynchronous move (copy-start), of what arrives."""
        arrays = _ARRAY.findall(self.type)[: 1 if self.operation.endswith("-start") else None]
        return sum(BYTES.get(kind, 4) * _product(sizes) for kind, sizes in arrays) / MIB

    @property
    def source(self) -> str:
        """JAX's name of the operation, with the functions it was traced in; else its own name.

        A traced function that runs as it is has the name `closed_call`, which is `eval_jaxpr` since JAX 0.12.
        """
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1].replace("/eval_jaxpr/", "/closed_call/") if found else self.name

    def named(self, key: str) -> str | None:
        """The computation or the number that stands behind `key=`."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


@dataclass
class Computation:
    """The instructions of a computation, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(x for x in self.instructions.values() if x.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        """Its parameters, by number."""
        found = (x for x in self.instructions.values() if x.operation == "parameter")
        return sorted(found, key=lambda x: int(x.operands[0]) if x.operands else 0)


@dataclass(frozen=True)
class Kernel:
    """An instruction that runs by itself, and the MiB that it writes."""

    by: Instruction
    written_mib: float


@dataclass(frozen=True)
class Loop:
    """What one loop does in a round, without the loops inside it."""

    source: str
    depth: int
    """Loops around it."""
    trips: int | None
    """Rounds, where the compiler knows."""
    kernels: int
    written_mib: int
    """MiB that the kernels of a round write."""
    large: dict[str, int]
    """MiB that a kernel writes, by its source, where it is more than the limit."""
    casts: dict[str, float]
    """MiB of arrays, the same in every round, that are cast to another type in each, by the source."""


def _largest(found: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Of entries with the same source, the largest."""
    most: dict[str, Any] = {}
    for source, mib in found:
        most[source] = max(mib, most.get(source, 0))
    return most


class Program:
    """A compiled program, of its text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current = Computation("")
        for line in text.splitlines():
            if begin := _COMPUTATION.match(line):
                current = self.computations[begin[2]] = Computation(begin[2])
                self.entry = begin[2] if begin[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                instruction = _instruction(found)
                current.instructions[instruction.name] = instruction

    def kernels(self, computation: str) -> list[Kernel]:
        """The kernels of a computation, with those of computations that it calls once (call, conditional)."""
        found = []
        inside = self.computations[computation].instructions
        for x in inside.values():
            if called := self._called(x):
                found += [kernel for name in called for kernel in self.kernels(name)]
            elif x.operation not in NO_WORK and x.operation != "while":
                found.append(Kernel(x, self._written_mib(x, inside)))
        return found

    def _called(self, x: Instruction) -> list[str]:
        """Computations that `x` runs once, at most."""
        if x.operation == "call":
            return [name] if (name := x.named("to_apply")) else []
        if x.operation == "async-start":
            return [name] if (name := x.named("calls")) else []
        if x.operation == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
            if listed:
                return [name.strip().lstrip("%") for name in listed[1].split(",")]
            return [x.named("true_computation") or "", x.named("false_computation") or ""]
        return []

    def _whiles(self, computation: str, depth: int = 0) -> Iterator[tuple[Instruction, int]]:
        for x in self.computations[computation].instructions.values():
            inner = self._called(x)
            if x.operation == "while":
                yield x, depth
                inner, deeper = [x.named("body") or ""], depth + 1
            else:
                deeper = depth
            for name in inner:
                yield from self._whiles(name, deeper)

    def loops(self, limit_mib: float, cast_limit_mib: float = 1.0) -> list[Loop]:
        """Every loop; kernels that write more than `limit_mib` and casts of at least `cast_limit_mib`."""
        found = []
        for x, depth in self._whiles(self.entry):
            body = x.named("body") or ""
            kernels = self.kernels(body)
            written = round(sum(kernel.written_mib for kernel in kernels))
            large = _largest(
                (k.by.source, round(k.written_mib)) for k in kernels if k.written_mib > limit_mib
            )
            casts = self._casts(body, cast_limit_mib)
            found.append(Loop(x.source, depth, _trips(x), len(kernels), written, large, casts))
        return found

    def _written_mib(self, x: Instruction, inside: dict[str, Instruction]) -> float:
        """MiB that is written for the result of `x`: of an update in place, those of the update."""
        if x.operation == "fusion":
            fused = self.computations[x.named("calls") or ""]
            return self._written_mib(fused.root, fused.instructions)
        if x.operation in ("tuple", "bitcast"):
            return sum(self._written_mib(inside[name], inside) for name in x.operands)
        if x.operation == "dynamic-update-slice":
            return inside[x.operands[1]].mib
        return 0.0 if x.operation == "parameter" else x.mib

    def _casts(self, body: str, limit_mib: float) -> dict[str, float]:
        computation = self.computations[body]
        found = self._converts(computation, _constant_names(computation))
        return _largest((x.source, round(x.mib, 1)) for x in found if x.mib >= limit_mib)

    def _converts(self, computation: Computation, known: set[str]) -> Iterator[Instruction]:
        """Converts of what `known` names and of what is moved from it, in fusions and called ones too."""
        known = set(known)
        for x in computation.instructions.values():
            if x.operation in MOVES and x.operands and x.operands[0] in known:
                known.add(x.name)
            elif x.operation == "convert" and x.operands[0] in known:
                yield x
            elif x.operation in ("fusion", "call"):
                inner = self.computations[x.named("calls") or x.named("to_apply") or ""]
                pairs = zip(inner.parameters, x.operands, strict=False)
                handed = {parameter.name for parameter, operand in pairs if operand in known}
                if handed:
                    yield from self._converts(inner, handed)
                    if x.operation == "fusion" and inner.root.operation in MOVES and len(x.operands) == 1:
                        known.add(x.name)

    def copies(self, limit_mib: float) -> dict[str, float]:
        """MiB of arrays of at least `limit_mib` that a kernel writes and only copies, by its name."""
        bodies = {self.entry} | {x.named("body") or "" for x, _ in self._whiles(self.entry)}
        return {
            f"{kernel.by.operation} {kernel.by.source}": round(kernel.by.mib)
            for body in sorted(bodies)
            for kernel in self.kernels(body)
            if kernel.by.mib >= limit_mib and self._only_copies(kernel.by)
        }

    def _only_copies(self, x: Instruction) -> bool:
        if x.operation in ("copy", "copy-start", "transpose", "pad"):
            return True
        if x.operation != "fusion":
            return False
        inside = self.computations[x.named("calls") or ""].instructions.values()
        return {y.operation for y in inside} <= {
            "parameter",
            "copy",
            "transpose",
            "bitcast",
            "pad",
            "constant",
        }

    @property
    def size(self) -> int:
        """Kernels of the whole program, each once."""
        whiles = [x.named("body") or "" for x, _ in self._whiles(self.entry)]
        return sum(len(self.kernels(name)) for name in (self.entry, *whiles))


def describe(text: str, *, limit_mib: float) -> dict[str, Any]:
    """What the tests assert of a program, as JSON."""
    program = Program(text)
    return {
        "kernels": program.size,
        "loops": [asdict(loop) for loop in program.loops(limit_mib)],
        "copies": program.copies(1.0),
    }


def _instruction(found: re.Match[str]) -> Instruction:
    root, name, kind, operation, after = found.groups()
    inside, rest = _until_closed(after)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(re.findall(r"[\w.\-]+", inside)[:1])
    return Instruction(name, kind, operation, operands, rest, bool(root))


def _until_closed(text: str) -> tuple[str, str]:
    """`text` up to the parenthesis that closes one that is open, and what follows."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i], text[i + 1 :]
    return text, ""


def _product(sizes: str) -> int:
    product = 1
    for size in filter(None, sizes.split(",")):
        product *= int(size)
    return product


def _trips(loop: Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    return int(found[1]) if found else None


def _constant_names(body: Computation) -> set[str]:
    """Names, in the body of a loop, of the arrays that the loop hands on as they are."""
    root = body.root
    (carry,) = body.parameters
    handed = {
        x.name: int(x.named("index") or 0)
        for x in body.instructions.values()
        if x.operation == "get-tuple-element" and x.operands == (carry.name,)
    }
    if root.operation != "tuple":
        return set()
    return {name for name, index in handed.items() if root.operands[index] == name}
