"""The jitted half of the rollout: prefill, fan-out to a group's samples, and decode.

Called by `engine.py` alone. Shapes: N prompts, n samples each, B = N·n sequences, P prompt columns,
L completion columns, S = P + L cache columns, V vocabulary, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from quatrain.models.decoder import forward, logits
from quatrain.models.families import Architecture
from quatrain.models.kv_cache import KVCache, init_cache
from quatrain.ops.sampling import sample, token_uniforms


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; static in every compiled function.

    `n` samples per prompt, at most `max_new_tokens` each; temperature 0 is greedy; `top_k` 0 keeps all.
    """

    n: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "tokens", "logprobs", "lengths", "done", "prompt_lengths", "sequence_ids", "time"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DecodeState:
    """B sequences in flight. `lengths` counts completion tokens; `time` is the number decoded so far."""

    cache: KVCache
    tokens: jax.Array  # [B, L] int32
    logprobs: jax.Array  # [B, L] float32
    lengths: jax.Array  # [B] int32
    done: jax.Array  # [B] bool
    prompt_lengths: jax.Array  # [B] int32
    sequence_ids: jax.Array  # [B] uint32
    time: jax.Array  # [] int32


@dataclass(frozen=True)
class Draw:
    """What sampling one token needs beside the logits; static."""

    sampling: Sampling
    stop_ids: tuple[int, ...]

    def __call__(
        self, state: DecodeState, token_logits: jax.Array, seed: jax.Array, step: jax.Array
    ) -> DecodeState:
        """Append one token to every live sequence, from `token_logits` [B, V]."""
        spec, position = self.sampling, state.time
        positions = jnp.full(state.lengths.shape, position, jnp.uint32)
        uniforms = token_uniforms(seed, step, state.sequence_ids, positions)
        token, logprob = sample(
            token_logits,
            uniforms,
            temperature=spec.temperature,
            top_k=spec.top_k,
            top_p=spec.top_p,
            min_p=spec.min_p,
        )
        live = ~state.done
        token, logprob = jnp.where(live, token, 0), jnp.where(live, logprob, 0.0)
        lengths = state.lengths + live
        stopped = jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32)) & live
        return replace(
            state,
            tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], (0, position)),
            logprobs=jax.lax.dynamic_update_slice(state.logprobs, logprob[:, None], (0, position)),
            lengths=lengths,
            done=state.done | stopped | (lengths >= spec.max_new_tokens),
            time=position + 1,
        )


@partial(jax.jit, static_argnames=("arch", "draw", "dtype"))
def start(
    params: dict,
    input_ids: jax.Array,
    lengths: jax.Array,
    live: jax.Array,
    sequence_ids: jax.Array,
    seed: jax.Array,
    step: jax.Array,
    *,
    arch: Architecture,
    draw: Draw,
    dtype: jnp.dtype,
) -> DecodeState:
    """Prefill each of N prompts once, fan its cache out to n samples, and sample their first tokens.

    `input_ids` [N, P] right-padded, `lengths` and `live` [N] (rows not live are padding of the batch),
    `sequence_ids` [N·n].
    """
    n, new = draw.sampling.n, draw.sampling.max_new_tokens
    prompts, width = input_ids.shape
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), input_ids.shape)
    segments = (columns < lengths[:, None]).astype(jnp.int32)
    empty = init_cache(arch, prompts, width + new, dtype)
    hidden, cache = forward(
        params, arch, input_ids, columns, segments, cache=empty, cache_start=jnp.int32(0), dtype=dtype
    )
    assert cache is not None
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    state = DecodeState(
        cache=jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), cache),
        tokens=jnp.zeros((prompts * n, new), jnp.int32),
        logprobs=jnp.zeros((prompts * n, new), jnp.float32),
        lengths=jnp.zeros(prompts * n, jnp.int32),
        done=~jnp.repeat(live, n),
        prompt_lengths=jnp.repeat(lengths, n),
        sequence_ids=sequence_ids,
        time=jnp.int32(0),
    )
    return draw(state, jnp.repeat(logits(params, arch, last), n, axis=0), seed, step)


@partial(jax.jit, static_argnames=("arch", "draw", "dtype"), donate_argnames=("state",))
def decode(
    params: dict,
    state: DecodeState,
    until: jax.Array,
    seed: jax.Array,
    step: jax.Array,
    *,
    arch: Architecture,
    draw: Draw,
    dtype: jnp.dtype,
) -> DecodeState:
    """Decode up to completion length `until`; ends early when every sequence is done."""
    width = state.cache.positions.shape[1] - state.tokens.shape[1]

    def unfinished(state: DecodeState) -> jax.Array:
        return (state.time < until) & ~state.done.all()

    def advance(state: DecodeState) -> DecodeState:
        previous = state.time - 1
        token = jax.lax.dynamic_slice_in_dim(state.tokens, previous, 1, axis=1)
        positions = (state.prompt_lengths + previous)[:, None]
        hidden, cache = forward(
            params,
            arch,
            token,
            positions,
            jnp.ones_like(token),
            cache=state.cache,
            cache_start=width + previous,
            dtype=dtype,
        )
        assert cache is not None
        return draw(replace(state, cache=cache), logits(params, arch, hidden[:, 0]), seed, step)

    return jax.lax.while_loop(unfinished, advance, state)
