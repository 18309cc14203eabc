"""Decode steps one by one, of sequences with a grammar: the mask of a token depends on the token before it.

Called by `session.py`: the host notes what a step has drawn, and makes the masks of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from quatrain.engine.decode import TOKENS_PER_CALL, Decoded, Slots
from quatrain.engine.groups import Group, as_jit_arguments, masks_of


def one_by_one(
    call: Callable[[Slots, int], Decoded],
    slots: Slots,
    first: Decoded,
    groups: Sequence[Group | None],
    stop_ids: Sequence[int],
) -> tuple[Decoded, np.ndarray]:
    """Up to TOKENS_PER_CALL steps, as one decode call would give them, and the masks [B, steps, W] of these.

    `groups` are those of the samples in `slots`. `first` is what the first step will give; `call` runs
    another one, given slots and the number of steps before it.
    """
    parts, lives, masks = list[Decoded](), list[np.ndarray](), list[np.ndarray]()
    live, limits = np.asarray(slots.live), np.asarray(slots.limits)
    decoded = first
    while True:
        parts.append(jax.device_get(decoded))
        lives.append(live)
        masks.append(np.asarray(slots.masks))
        drawn, lengths = np.asarray(parts[-1].tokens)[:, 0], np.asarray(slots.lengths) + 1
        live = live & ~np.isin(drawn, stop_ids)
        for i, group in enumerate(groups):
            if live[i] and group is not None:
                group.consume(int(drawn[i]), stop_ids)
                live[i] = group.failure is None
        live &= lengths < limits
        if len(parts) == TOKENS_PER_CALL or not live.any():
            break
        going = [group if goes_on else None for group, goes_on in zip(groups, live, strict=True)]
        tokens, ahead, left = as_jit_arguments(drawn, lengths, live)
        of_next = masks_of([going], len(going))
        slots = slots._replace(tokens=tokens, lengths=ahead, live=left, masks=of_next)
        decoded = call(slots, len(parts))
    routes = [part.routes for part in parts if part.routes is not None]
    tokens, logprobs, counts, steps = as_jit_arguments(
        np.concatenate([part.tokens for part in parts], axis=1),
        np.concatenate([part.logprobs for part in parts], axis=1),
        np.sum(lives, axis=0),
        np.array(len(parts), np.int32),
    )
    [of_experts] = as_jit_arguments(np.concatenate(routes, axis=1)) if routes else [None]
    kept = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *(part.kept for part in parts))
    return Decoded(tokens, logprobs, counts, steps, of_experts, kept), np.stack(masks, axis=1)
