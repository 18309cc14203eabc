"""Looks tokens up: what followed, earlier in a sequence, on the tokens that it ends with.

Data flow: prompts and what was sampled -> here -> drafts of further tokens -> `engine/speculation.py`, which
checks them. Pure array functions; L tokens of history for each of B sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NOTHING = -1
"""In place of a token where a history has none: it is equal to no token, so that no match goes across it."""
LONGEST = 4
"""Most tokens that are compared: of longer matches the latest is taken."""


def followers(history: jax.Array, ends: jax.Array, count: int, own: int = 0) -> jax.Array:
    """[B, count] int32: the tokens after the best earlier match of each sequence's last ones, or NOTHING.

    `history` [B, L] int32 has the sequence itself from place `own` on, up to `ends` [B] (the place after its
    last token, at least own + 1), and before it what other sequences have drawn; NOTHING is between them and
    in all other places. A match is a place before which as many tokens as possible, at most LONGEST and at
    least one, are those before the end, and which has a token itself. Of equally long ones the last counts.
    Where a match in the sequence itself comes to the end, what was read is read again, as if the sequence
    repeated itself. Raises ValueError for shapes that do not fit.
    """
    if history.ndim != 2 or ends.shape != history.shape[:1] or not 0 <= own < history.shape[1]:
        raise ValueError(
            f"expected history [B, L], ends [B] and own < L, got {history.shape}, {ends.shape} and {own}"
        )
    length = history.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)[None]
    matched = jnp.zeros(history.shape, jnp.int32)
    same = jnp.ones(history.shape, bool)
    # Compared with the places before it: what follows on place i stands in place i itself.
    earlier = history
    for back in range(1, LONGEST + 1):
        earlier = jnp.pad(earlier[:, :-1], ((0, 0), (1, 0)), constant_values=NOTHING)
        before = jnp.where(ends - back >= own, ends - back, length)[:, None]
        last = jnp.take_along_axis(history, before, axis=1, mode="fill", fill_value=NOTHING)
        same &= (earlier == last) & (earlier != NOTHING)
        matched += same.astype(jnp.int32)
    scores = jnp.where((history != NOTHING) & (matched > 0), matched * length + places, NOTHING)
    found, best = scores.max(axis=1, keepdims=True) >= 0, scores.argmax(axis=1, keepdims=True)
    ahead = jnp.arange(count, dtype=jnp.int32)[None]
    period = jnp.where(best >= own, ends[:, None] - best, count)
    tokens = jnp.take_along_axis(
        history, best + ahead % jnp.maximum(period, 1), axis=1, mode="fill", fill_value=NOTHING
    )
    return jnp.where(found, tokens, NOTHING)
