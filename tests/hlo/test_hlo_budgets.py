"""Budgets of programs compiled for an H100 and a TPU v5e, neither of which is needed (`make test-hlo`).

Each program is compiled in a process of its own, with two layers. The numbers are counts of the compiled
program, not times; a change that lowers one lowers its budget here. The numbers are those of the pinned JAX's
compilers: others differ by some percent. `docs/performance.md` tells what they were before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from compile_program import LARGE_MIB, compiled
from devices import TARGETS

from quatrain.engine.decode import TOKENS_PER_CALL

pytestmark = pytest.mark.hlo

SIZES = ("0.5B", "1.5B")


@cache
def counts(target: str, *program: Any, **options: Any) -> dict[str, Any]:
    """The counts of a program, as `compiled`; skips where there is no compiler."""
    if reason := TARGETS[target].missing:
        pytest.skip(reason)
    return compiled(target, *program, **options)


@dataclass(frozen=True)
class Budget:
    """What a program may need; pairs are for 0.5B and 1.5B."""

    temporary_mib: tuple[int, int]
    large: dict[str, tuple[int, int]] = field(default_factory=dict)
    """MiB that operations in loops may write, where it is more than LARGE_MIB, by the end of their names."""
    copied_mib: tuple[int, int] = (0, 0)
    """Greatest array of LEAST_COPY_MIB or more that is copied."""


LEAST_COPY_MIB = 16

HEAD = {
    "jvp()/while/body/closed_call/while/body/dot_general": (476, 476),  # logits of a tile
    "while/body/jvp()/dot_general": (476, 476),  # the same in the backward pass
    "transpose(jvp())/convert_element_type": (238, 238),  # gradients of logits, in bfloat16
    "while/body/transpose(jvp())/dot_general": (105, 179),  # the gradient of a tile of the head
    "transpose(jvp())/while/body/closed_call/dynamic_slice": (105, 179),  # the same, once for a tile
    "transpose(jvp())/while/body/closed_call/dynamic_update_slice": (105, 179),
    "jvp()/while/body/closed_call/dynamic_slice": (0, 90),  # a tile of the head
}
BLOCKS = {  # scores, weights and sums of all query blocks at once
    "AKXY,AKYH->AKXH/dot_general": (0, 96),
    "closed_call/while/body/add": (0, 96),
}
LOGITS = {"body/closed_call/dot_general": (149, 149)}
# Arrays that a TPU's compiler moves to fast memory and back: parts of the cache, weights, sums of gradients.
MOVED = {r"(copy|slice)-start[.\d]*": (112, 192)}

BUDGETS = {
    ("h100", "decode"): Budget((150, 150), LOGITS),
    ("h100", "prefill"): Budget((80, 144)),
    ("h100", "head"): Budget((1180, 1512), HEAD),
    ("h100", "sampling"): Budget((150, 150)),
    ("h100", "gradient"): Budget((1950, 3300), HEAD | BLOCKS, copied_mib=(56, 96)),
    ("v5e", "decode"): Budget((154, 153), LOGITS, copied_mib=(32, 64)),
    # 73 with the keys of all layers before the values; with 28 layers this order needs 89 MiB, that one 105.
    ("v5e", "prefill"): Budget((15, 79), copied_mib=(17, 52)),
    ("v5e", "head"): Budget((844, 1275), HEAD | MOVED, copied_mib=(104, 89)),
    ("v5e", "sampling"): Budget((150, 150)),
    ("v5e", "gradient"): Budget((2804, 4613), HEAD | MOVED, copied_mib=(256, 256)),  # masks as 32-bit numbers
}


EP, TP = "1,1,1,1,2", "1,1,2"
EXPERTS = {("h100", EP): 2020, ("h100", TP): 1150, ("v5e", EP): 3730, ("v5e", TP): 2380}
"""Temporary MiB of the gradient of a model with experts on a mesh of two devices; the H100's are those of
products by blocks."""
EXPERTS_HEAD = {
    "while/body/dot_general": 512,  # logits of a tile, and gradients of a tile of the head
    "while/body/jvp()/dot_general": 512,
    "while/body/transpose(jvp())/convert_element_type": 256,
    "while/body/transpose(jvp())/dot_general": 128,
}


def cases() -> list[Any]:
    """Every program, in both sizes."""
    return [(*key, size) for key in BUDGETS for size in SIZES]


@pytest.mark.parametrize(("target", "program", "size"), cases())
def test_a_program_keeps_its_budget(target, program, size):
    budget, which = BUDGETS[target, program], SIZES.index(size)
    told = counts(target, program, size)
    assert told["temporary_mib"] <= budget.temporary_mib[which]
    for loop in told["loops"]:
        for source, mib in loop["large"].items():
            allowed = [
                most[which] for name, most in budget.large.items() if re.search(f"{_end(name)}$", source)
            ]
            assert mib <= max(allowed, default=LARGE_MIB), f"{source} writes {mib} MiB in {loop['source']}"
    copied = {name: mib for name, mib in told["copies"].items() if mib >= LEAST_COPY_MIB}
    assert max(copied.values(), default=0) <= budget.copied_mib[which], copied


@pytest.mark.parametrize(("target", "program", "size"), cases())
def test_no_parameter_is_cast_in_a_loop(target, program, size):
    told = counts(target, program, size)
    assert {loop["source"]: loop["casts"] for loop in told["loops"] if loop["casts"]} == {}


@pytest.mark.parametrize(("target", "mesh"), EXPERTS)
def test_experts_over_devices_keep_their_budget(target, mesh):
    told = counts(target, "gradient", "experts", mesh=mesh)
    assert told["temporary_mib"] <= EXPERTS[target, mesh]
    for loop in told["loops"]:
        assert loop["casts"] == {}
        for source, mib in loop["large"].items():
            allowed = [most for name, most in EXPERTS_HEAD.items() if source.endswith(name)]
            assert mib <= max(allowed, default=LARGE_MIB), f"{source} writes {mib} MiB in {loop['source']}"


@pytest.mark.skipif(find_spec("tokamax") is None, reason="tokamax, of the extra gpu, is not installed")
@pytest.mark.parametrize(("size", "temporary_mib"), [("0.5B", 2320), ("1.5B", 4100)])
def test_unpacked_attention_has_no_loop(size, temporary_mib):
    """Those of the output head are left: over its tiles, and over chunks of tokens, forward and backward."""
    told = counts("h100", "gradient", size, attention="tokamax")
    assert len(told["loops"]) == 4
    assert {loop["trips"] for loop in told["loops"] if loop["depth"] == 0} == {5}
    assert told["temporary_mib"] <= temporary_mib


@pytest.mark.parametrize("size", SIZES)
def test_attention_with_masks_has_no_loop(size):
    """On a v5e: neither over blocks of keys nor over buffers."""
    assert len(counts("v5e", "gradient", size)["loops"]) == 4


@pytest.mark.parametrize("size", SIZES)
def test_a_decode_step_has_so_many_kernels(size):
    """In a layer, 11 of them for attention; and for the output head, sampling and counting."""
    one, two = (counts("h100", "decode", size, layers)["loops"][0]["kernels"] for layers in (1, 2))
    a_layer = two - one
    assert a_layer <= (21 if size == "0.5B" else 22)
    assert one - a_layer <= 25


@pytest.mark.parametrize("size", SIZES)
def test_a_decode_call_has_a_known_number_of_steps(size):
    """Otherwise a GPU asks its host before each whether it is the last."""
    (loop,) = counts("h100", "decode", size)["loops"]
    assert loop["trips"] == TOKENS_PER_CALL


@pytest.mark.parametrize("size", SIZES)
def test_the_cache_is_not_copied(size):
    """Written where it lies, a column at a time: on an H100, but not on a v5e (see `MOVED`)."""
    assert counts("h100", "decode", size)["copies"] == {}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", TARGETS)
def test_logits_are_written_once_to_sample(target, size):
    """148 MiB of logits, and little beside them."""
    told = counts(target, "sampling", size)
    assert told["temporary_mib"] <= 150
    assert max(told["copies"].values(), default=0) <= 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_head_writes_so_much_for_each_chunk_of_tokens(target, size):
    """In five tiles of the vocabulary: MiB for 4,096 tokens forward and backward, and once for all tokens."""
    written: dict[int, list[int]] = {0: [], 1: []}
    for loop in counts(target, "head", size)["loops"]:
        written[loop["depth"]].append(loop["written_mib"])
        if target == "h100" and loop["depth"] == 0:
            assert loop["trips"] == 5
    for_a_chunk, for_a_tile = (500, 955), (90, 446)
    assert all(mib <= most for mib, most in zip(written[1], for_a_chunk, strict=True)), written
    assert all(mib <= most for mib, most in zip(written[0], for_a_tile, strict=True)), written


def _end(name: str) -> str:
    return name if "[" in name else re.escape(name)
