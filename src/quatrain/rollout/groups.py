"""Groups of samples, and the packing of their prompts into rows for the prefill.

Data flow: `Prompt` -> `Group` -> `Packed` -> `decode.prefill_program`; `session.py` appends the sampled
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import numpy as np

from quatrain.models.attention.unpacking import unpacking
from quatrain.ops.ladder import round_up_coarsely
from quatrain.ops.packing import useful_common_prefix
from quatrain.rollout.decode import Packed
from quatrain.rollout.interface import Completion
from quatrain.types import Prompt

PREFILL_TOKENS = 2048
"""Prompts are packed into rows of at most this many tokens; a longer prompt gets a row of its own."""
FEWEST_COLUMNS = 32
"""Least number of columns of a cache; the cache of generated tokens starts with it and grows by doubling."""


@dataclass
class Group:
    """A prompt and its samples; `step` is the training step that their randomness is derived from."""

    prompt: Prompt
    step: int
    completions: list[Completion]


class Admitted(NamedTuple):
    """A group whose prompt is to be prefilled, its ticket, and its row of the prompt cache on its replica."""

    group: Group
    ticket: int
    row: int


Pack = list[Admitted]


def split_into_packs(admitted: list[Admitted]) -> list[Pack]:
    """Splits the groups, in order, into packs of at most PREFILL_TOKENS prompt tokens.

    A prompt with more tokens is a pack of its own. The common prefix of all prompts counts once per pack.
    """
    num_common = _common_prefix(admitted)
    packs: list[Pack] = []
    room = 0
    for item in admitted:
        length = len(item.group.prompt.input_ids) - num_common
        if not packs or length > room:
            packs.append([])
            room = PREFILL_TOKENS - num_common
        packs[-1].append(item)
        room -= length
    return packs


def pack_prompts(packs: list[Pack], n: int, num_rows: int, *, unpack: bool) -> Packed:
    """The prompts of each pack (one pack per replica), concatenated and padded to the same shape.

    The shape is that of the largest pack, with the numbers of prompts and of tokens rounded up, so that few
    programs are compiled. A common prefix of all prompts of a pack is stored once. `unpack`: with the layout
    that puts each prompt in a row of its own.
    """
    count = 1 << (max(map(len, packs)) - 1).bit_length()
    num_common = [_common_prefix(pack) for pack in packs]
    most = max(map(_num_tokens, packs, num_common))
    tokens = prompt_columns(most)
    each = [
        _packed_row(pack, n, num_rows, count, tokens, common)
        for pack, common in zip(packs, num_common, strict=True)
    ]
    arrays = list(map(np.concatenate, zip(*each, strict=True)))
    layout = None
    if unpack:
        _, _, segment_ids, branch_ids, *_ = (array.reshape(len(packs), -1) for array in arrays)
        layout = unpacking(segment_ids, branch_ids)
    return Packed._make([*as_jit_arguments(*arrays), layout])


def _common_prefix(pack: Pack) -> int:
    """Tokens of the common prefix of all prompts of `pack`; 0 if it is too short to be worth sharing."""
    if len(pack) < 2:
        return 0
    prompts = [item.group.prompt.input_ids for item in pack]
    lengths = np.array([len(prompt) for prompt in prompts])
    return useful_common_prefix(np.array([prompt[: lengths.min()] for prompt in prompts]), lengths)


def _num_tokens(pack: Pack, num_common: int) -> int:
    return num_common + sum(len(item.group.prompt.input_ids) - num_common for item in pack)


def _packed_row(
    pack: Pack, n: int, num_rows: int, count: int, tokens: int, num_common: int
) -> tuple[np.ndarray, ...]:
    """The fields of `Packed` for one replica, padded to `count` prompts and `tokens` tokens."""
    input_ids, positions, segment_ids, branch_ids = (np.zeros(tokens, np.int32) for _ in range(4))
    starts, lengths = np.zeros(count, np.int32), np.ones(count, np.int32)
    rows = np.full(count, num_rows, np.int32)
    sequence_ids, steps = np.zeros((count, n), np.uint32), np.zeros(count, np.uint32)
    first = num_common
    if num_common:
        input_ids[:first], positions[:first] = pack[0].group.prompt.input_ids[:first], np.arange(first)
        segment_ids[:first] = 1
    for i, (group, _, row) in enumerate(pack):
        prompt = group.prompt.input_ids
        size = len(prompt)
        span = slice(first, first + size - num_common)
        input_ids[span], positions[span] = prompt[num_common:], np.arange(num_common, size)
        segment_ids[span], branch_ids[span] = (1, i + 1) if num_common else (i + 1, 0)
        starts[i], lengths[i], rows[i], steps[i] = first, size, row, group.step
        sequence_ids[i] = [sequence_id(group.prompt, n, sample) for sample in range(n)]
        first += size - num_common
    common = np.array([num_common], np.int32)
    return input_ids, positions, segment_ids, branch_ids, common, starts, lengths, rows, sequence_ids, steps


def as_jit_arguments(*arrays: np.ndarray) -> list[jax.Array]:
    """Host arrays, typed as arguments of a jitted function; putting them on a device would compile more."""
    return cast(list[jax.Array], list(arrays))


def prompt_columns(tokens: int) -> int:
    """Columns for prompts of `tokens` tokens: the next 2 or 3 times a power of two, at least FEWEST_COLUMNS.

    There are few such sizes, for the columns of the prompt cache and for packed rows of prompts, because each
    compiles a program. The size depends only on the prompts, not on earlier calls, so that a resumed run sums
    floating-point numbers in the same order.
    """
    return round_up_coarsely(tokens, FEWEST_COLUMNS)


def sequence_id(prompt: Prompt, n: int, sample: int) -> int:
    """The id, from which the randomness of sample number `sample` of `prompt` is derived."""
    return (prompt.group_id * n + sample) % 2**32
