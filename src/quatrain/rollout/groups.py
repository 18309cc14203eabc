"""Groups of samples in flight, and their prompts packed into rows for the prefill.

Data flow: `Prompt` -> `Group` -> `Packed`, for `decode.prefill_program`; `session.py` fills completions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import numpy as np

from quatrain.ops.ladder import round_up
from quatrain.rollout.decode import Packed
from quatrain.types import Prompt

PREFILL_TOKENS = 2048
"""Prompts are packed into rows of this many tokens; a longer prompt has a row to itself."""
FEWEST_COLUMNS = 32
"""Of the cache: a ring of own tokens starts with this many and doubles."""


@dataclass
class Completion:
    """One sample of a group: its tokens so far, each with log-probability and version of the weights."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """More tokens, all of one version."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def cut(self, length: int) -> None:
        """Drop what follows `length` tokens."""
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]


@dataclass
class Group:
    """A prompt and its samples; `step` is the training step their randomness comes from."""

    prompt: Prompt
    step: int
    completions: list[Completion]


class Admitted(NamedTuple):
    """A group whose prompt is to be computed, its ticket, and the row on its replica."""

    group: Group
    ticket: int
    row: int


Pack = list[Admitted]


def packs_of(admitted: list[Admitted]) -> list[Pack]:
    """The groups in order, cut into packs of at most PREFILL_TOKENS prompt tokens where that is possible."""
    packs: list[Pack] = []
    room = 0
    for item in admitted:
        length = len(item.group.prompt.input_ids)
        if not packs or length > room:
            packs.append([])
            room = PREFILL_TOKENS
        packs[-1].append(item)
        room -= length
    return packs


def pack_prompts(packs: list[Pack], n: int, num_rows: int) -> Packed:
    """The prompts of each pack one behind the other, in shapes from the ladders that hold the largest."""
    count = 1 << (max(map(len, packs)) - 1).bit_length()
    most = max(sum(len(x.group.prompt.input_ids) for x in pack) for pack in packs)
    tokens = round_up(most, FEWEST_COLUMNS)
    each = [_packed_row(pack, n, num_rows, count, tokens) for pack in packs]
    return Packed(*arguments(*map(np.concatenate, zip(*each, strict=True))))


def _packed_row(pack: Pack, n: int, num_rows: int, count: int, tokens: int) -> tuple[np.ndarray, ...]:
    """The fields of `Packed` for one replica, `count` prompts and `tokens` with the padding."""
    input_ids, positions, segment_ids = (np.zeros(tokens, np.int32) for _ in range(3))
    starts, lengths = np.zeros(count, np.int32), np.ones(count, np.int32)
    rows = np.full(count, num_rows, np.int32)
    sequence_ids, steps = np.zeros((count, n), np.uint32), np.zeros(count, np.uint32)
    first = 0
    for i, (group, _, row) in enumerate(pack):
        prompt = group.prompt.input_ids
        size = len(prompt)
        span = slice(first, first + size)
        input_ids[span], positions[span], segment_ids[span] = prompt, np.arange(size), i + 1
        starts[i], lengths[i], rows[i], steps[i] = first, size, row, group.step
        sequence_ids[i] = [sequence_id(group.prompt, n, sample) for sample in range(n)]
        first += size
    return input_ids, positions, segment_ids, starts, lengths, rows, sequence_ids, steps


def arguments(*arrays: np.ndarray) -> list[jax.Array]:
    """Host arrays as arguments of a compiled function; placing them first would compile a program each."""
    return cast(list[jax.Array], list(arrays))


def prompt_columns(tokens: int) -> int:
    """The least 2 or 3 times a power of two, from FEWEST_COLUMNS, that holds `tokens` of prompts.

    A coarse ladder, as every rung is a compilation. Sizes follow from what was submitted alone, not from
    earlier calls, so that a resumed run adds up numbers in the same order.
    """
    power = max(FEWEST_COLUMNS, 1 << (tokens - 1).bit_length())
    smaller = power * 3 // 4
    return smaller if smaller >= FEWEST_COLUMNS and tokens <= smaller else power


def sequence_id(prompt: Prompt, n: int, sample: int) -> int:
    return (prompt.group_id * n + sample) % 2**32
