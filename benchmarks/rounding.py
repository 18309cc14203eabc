"""Which operations of the sampler round a token otherwise than the update, and what each costs the gap.

    python benchmarks/rounding.py [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--dtype float32 bfloat16] \\
        [--small] [--json rounding.json]

The engine samples `--n` completions of each of `--prompts` prompts, and the update's pass computes the
log-probabilities of the same tokens: the gap is the absolute difference, in nats. Then prefill, decode steps
and the update's pass are computed with each operation in two forms: as it is now, and with its sums in one
order for all three. With all in one order the gap is to be 0.0; with one as it is now it is this operation's.
A share is its mean square over the sum of those of all operations. In bfloat16 programs in one order keep
all casts, which XLA leaves out within fused loops (`casts`).

All sequences have sampled equally many tokens, and the first one, which the prefill draws, is left out.
Prompts and completions are whole blocks of attention, so that blocks of packed rows begin with a sequence.
What another place in a packed row and other programs of the update change is measured beside it. Only
`seconds` depend on other load: forward passes with all sums in one order, over those as they are now, in the
same treatment of casts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quatrain.backend import Backend, this_backend
from quatrain.config.schema import LogprobConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from quatrain.data.tokenizer import load_tokenizer
from quatrain.engine.decode import Program, _prefill
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.groups import Admitted, Group, UsualSampling, pack_prompts
from quatrain.engine.service import EngineService
from quatrain.forward.micro_batch import fill
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec, head_logprobs
from quatrain.forward.table import TokenTable
from quatrain.models import decode_step, decoder
from quatrain.models.attention import blockwise
from quatrain.models.blocks import attention as attention_block
from quatrain.models.blocks import layer_run
from quatrain.models.decode_step import Sharing
from quatrain.models.decoder import logits, run_layers
from quatrain.models.kv_cache import CachePart, empty_cache, write
from quatrain.models.layers import MASKED, Norm
from quatrain.ops import sampling
from quatrain.ops.logprobs import Sums, token_logprobs
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.mesh import one_device
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.rollouts import Sampling
from quatrain.update.objective import PolicyObjective
from quatrain.update.trainer import StepTotals, Trainer
from quatrain.weights.load_model import load_model

PRODUCTS = "qkv", "o", "gate_up", "down", "logits"
OPERATIONS = "norm", *PRODUCTS, "attention", "logsumexp"
"""Those that have two forms. The others have no sums, and the same expressions in decode and update."""

UPDATE_TOKENS = 4096
BLOCK = 64
"""Tokens of the blocks that keys are read in: `attention_blocks` of a CPU has two blocks of 32 at once."""
EXACT_CASTS = ("xla_allow_excess_precision", "False")
"""XLA leaves out casts to bfloat16 and back within a fusion, unless it is told not to."""


class Case(NamedTuple):
    """A model, and completions that its engine sampled: R prompts of P tokens, n completions of C tokens."""

    arch: Any
    params: Any
    dtype: str
    backend: Backend
    batch: RolloutBatch
    prompts: list[Prompt]
    n: int

    @property
    def tokens(self) -> np.ndarray:
        """[R n, C]"""
        return self.completions(self.batch.input_ids)

    def completions(self, values: np.ndarray) -> np.ndarray:
        """[R n, C] of [R n, P + C]."""
        return values[self.batch.completion_mask].reshape(len(values), -1)

    @property
    def spec(self) -> PolicySpec:
        return PolicySpec(self.arch, self.dtype, "none", "xla", one_device(), self.backend, temperature=1.0)

    def update(self, **how: Any) -> np.ndarray:
        """[R n, C]: log-probabilities by the update's pass, by default of rows with shared prompts."""
        spec = replace(self.spec, **{name: how[name] for name in ("remat", "backend") if name in how})
        rows = how.get("rows")
        sizes = LogprobConfig(micro_batch_size=rows, max_tokens_per_device=None if rows else UPDATE_TOKENS)
        planner = spec.planner(sizes, share_prompts=how.get("share", True))
        table = TokenTable.of_policy(self.batch, self.arch)
        return self.completions(predict_tokens(self.params, table, model=spec, planner=planner))


def sampled(args: Any, model: Any, tokenizer: Any, dtype: str, backend: Backend, tokens: int) -> Case:
    """Completions of prompts of so many random tokens, sampled by the engine."""
    rng = np.random.default_rng(args.seed)
    ids = rng.integers(0, model.arch.vocab_size, (args.prompts, tokens)).astype(np.int32)
    prompts = [Prompt(i, row, "") for i, row in enumerate(ids)]
    config = RolloutConfig(n=args.n, max_new_tokens=args.tokens)
    how: dict[str, Any] = {"stop_ids": (), "seed": args.seed, "dtype": dtype, "backend": backend}
    engine = RolloutEngine(model.arch, config, tokenizer, **how)
    rollouts = Rollouts(EngineService(engine, thread=None), tokenizer, Sampling.of(config))
    rollouts.sync_weights(model.params, 0)
    return Case(model.arch, model.params, dtype, backend, rollouts.generate(prompts), prompts, args.n)


class Taps:
    """Intermediate results of a program that is being traced, by layer and operation, in order."""

    def __init__(self, tapped: set[int]) -> None:
        self.found: dict[str, jax.Array] = {}
        self._tapped, self._layer = tapped, -1

    def add(self, name: str, x: jax.Array) -> None:
        """A result of an operation in the layer that is being traced."""
        if self._layer in self._tapped:
            # Programs return dictionaries in the order of their keys.
            self.found[f"{len(self.found):04} {self._layer} {name}"] = x

    @contextmanager
    def hooked(self, few_rows: Callable[[str, int], int]) -> Iterator[None]:
        """Programs that are traced in here are tapped; `few_rows(name, usual)` is that of a product."""
        linear, norm, rotate, layer = layer_run.linear, Norm.__call__, attention_block.rotate, decoder._layer

        def tapped_linear(x: Any, of: Any, name: str, axis: Any, rows: int, *more: Any) -> jax.Array:
            inputs = {"o": "attention", "down": "activation"}
            if name in inputs:
                self.add(inputs[name], x)
            y = linear(x, of, name, axis, few_rows(name, rows), *more)
            self.add(name, y)
            return y

        def tapped_norm(own: Norm, x: jax.Array, weight: jax.Array) -> jax.Array:
            y = norm(own, x, weight)
            self.add("norm", y)
            return y

        def tapped_rotate(x: jax.Array, angles: Any) -> jax.Array:
            y = rotate(x, angles)
            self.add("rope", y)
            return y

        def next_layer(*given: Any) -> Any:
            self._layer += 1
            return layer(*given)

        class Inlined:
            """jax, but that functions are traced in place, so that what is tapped can leave them."""

            jit = staticmethod(lambda function: function)

            def __getattr__(self, name: str) -> Any:
                return getattr(jax, name)

        with ExitStack() as stack:
            stack.enter_context(patch.object(layer_run, "linear", tapped_linear))
            stack.enter_context(patch.object(Norm, "__call__", tapped_norm))
            stack.enter_context(patch.object(attention_block, "rotate", tapped_rotate))
            stack.enter_context(patch.object(decoder, "_layer", next_layer))
            stack.enter_context(patch.object(decoder, "jax", Inlined()))
            yield


def compiled(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the compiler options of the engine's and the update's programs."""
    return jit_for_backend(function)(case.backend)


def update_values(case: Case, as_now: set[str], tapped: set[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(log-probabilities [B, C], tapped results [B, C, ...]) of the update: of the states before tokens."""
    spec, table = case.spec, TokenTable.of_policy(case.batch, case.arch)
    planner = spec.planner(LogprobConfig(max_tokens_per_device=UPDATE_TOKENS), share_prompts=True)
    shape = case.tokens.shape
    whole: dict[str, np.ndarray] = {}

    def predict(params: Any, batch: Any) -> Any:
        taps = Taps(tapped)
        with ordered({*OPERATIONS} - as_now), taps.hooked(lambda name, usual: usual):
            [logprobs, _] = spec.predict(params, batch).numbers
        return logprobs, taps.found

    run = compiled(case, predict)
    for cut in planner.plans(table):
        batch = fill(cut, replace(table, columns={}), one_device(), spec.forms)
        logprobs, found = jax.device_get(run(case.params, batch))
        mask, places = np.asarray(batch.mask), np.asarray(batch.predictors)
        rows = np.arange(len(mask))[:, None]
        found = {name: x[rows, places] for name, x in found.items()} | {"logprobs": logprobs}
        for name, x in found.items():
            own = whole.setdefault(name, np.zeros((*shape, *x.shape[2:]), x.dtype))
            own[cut.sequences] = x[mask].reshape(len(cut.sequences), shape[1], *x.shape[2:])
    return whole.pop("logprobs"), whole


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum over the last dimension, as a product: a row's sum does not depend on the other rows.

    The order of a sum that XLA compiles for a CPU depends on the loop that it is part of.
    """
    ones = jnp.ones((x.shape[-1], 8), x.dtype)
    return jnp.matmul(x.reshape(-1, x.shape[-1]), ones, precision="highest")[:, 0].reshape(x.shape[:-1])


def ordered_norm(own: Norm, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`layers.rms_norm` with `ordered_sum`."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(ordered_sum(jnp.square(x32))[..., None] / x.shape[-1] + own.eps)
    return (x32 * scale * (own.offset + weight.astype(jnp.float32))).astype(x.dtype)


def ordered_tile(own: Sums, logits: jax.Array) -> Any:
    """`Sums.with_tile` with `ordered_sum`."""
    peak = jnp.maximum(own.peak, logits.max(axis=-1))
    shrink, weights = jnp.exp(own.peak - peak), jnp.exp(logits - peak[:, None])
    return Sums(peak, own.total * shrink + ordered_sum(weights)), shrink, weights


def ordered_attention(
    name: str, q_BTNH: Any, k_BTKH: Any, v_BTKH: Any, pattern: Any, **how: Any
) -> jax.Array:
    """`blockwise.block_attention` with `ordered_sum`, its forward pass alone."""
    K = k_BTKH.shape[2]
    q, k, v = (blockwise._heads(x, K, pattern.block) for x in (q_BTNH, k_BTKH, v_BTKH))

    def group(i: jax.Array, results: jax.Array) -> jax.Array:
        blocks, keys, counts = pattern.queries[i], pattern.keys[i], pattern.counts[i]
        queries = q[blocks]

        def step(j: jax.Array, state: Attended) -> Attended:
            at = keys[:, j]
            keys_AKYH = blockwise._joined(k, at)
            given = queries, keys_AKYH, pattern, blocks, at, j, counts, None, None
            return read(state, queries, keys_AKYH, blockwise._joined(v, at), blockwise._scores(*given)[1])

        zeros = jnp.zeros(queries.shape, jnp.float32)
        state = Attended(jnp.full(zeros.shape[:-1], MASKED), zeros[..., 0], zeros)
        state = lax.fori_loop(0, blockwise._num_reads(keys, counts), step, state)
        y = state.y / jnp.where(state.total > 0, state.total, 1.0)[..., None]
        return results.at[i].set(y.astype(q.dtype))

    groups = pattern.queries.shape
    y = lax.fori_loop(0, groups[0], group, jnp.zeros(groups + q.shape[1:], q.dtype))
    return blockwise._rows(blockwise._in_order(y, pattern), q_BTNH.shape)


@contextmanager
def ordered(operations: set[str]) -> Iterator[None]:
    """Programs that are traced in here have sums of these operations in one order."""
    with ExitStack() as stack:
        if "norm" in operations:
            stack.enter_context(patch.object(Norm, "__call__", ordered_norm))
        if "logsumexp" in operations:
            stack.enter_context(patch.object(Sums, "with_tile", ordered_tile))
        if "attention" in operations:
            stack.enter_context(patch.object(decoder, "self_attention", ordered_attention))
            stack.enter_context(patch.object(decode_step, "self_attention", ordered_attention))
        yield


class Attended(NamedTuple):
    """Sums of a softmax over the keys so far, as `blockwise` has them."""

    peak: jax.Array
    total: jax.Array
    y: jax.Array


def read(state: Attended, q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> Attended:
    """`state` after one more block of keys: the expressions of `blockwise.block_attention`."""
    # In float32, which holds products of bfloat16 exactly: others are summed in an order that rows change.
    q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    scores = jnp.einsum("AKXH,AKYH->AKXY", q, keys)
    peak = jnp.maximum(state.peak, jnp.where(mask, scores, MASKED).max(axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    shrink = jnp.exp(state.peak - peak)
    # Of products with fewer columns the order of the sums depends on the number of rows.
    padded = jnp.pad(values, ((0, 0),) * 3 + ((0, max(BLOCK - values.shape[-1], 0)),)).astype(jnp.float32)
    rounded = weights.astype(values.dtype).astype(jnp.float32)
    product = jnp.einsum("AKXY,AKYH->AKXH", rounded, padded)[..., : values.shape[-1]]
    return Attended(peak, state.total * shrink + ordered_sum(weights), state.y * shrink[..., None] + product)


def in_blocks(q: jax.Array, cache: Any, mask: jax.Array, state: Attended) -> Attended:
    """`state` after all blocks of a cache; q [A, K, X, H], mask [A, X, S]."""
    keys, values = cache

    def step(j: jax.Array, state: Attended) -> Attended:
        at = j * BLOCK
        own = lax.dynamic_slice_in_dim(keys, at, BLOCK, 3).swapaxes(2, 3)
        return read(
            state,
            q,
            own,
            lax.dynamic_slice_in_dim(values, at, BLOCK, 2),
            lax.dynamic_slice_in_dim(mask, at, BLOCK, 2)[:, None],
        )

    return lax.fori_loop(0, keys.shape[3] // BLOCK, step, state)


def update_attention(q: jax.Array, prompt: Any, own: Any, prompt_mask: Any, own_mask: Any, n: int) -> Any:
    """Attention [B, N, H] of decode by the update's blocks, the prompt's first, then the sequence's own.

    q [B, N, H]; prompt_mask [R, S], own_mask [B, C]; the sequences of a prompt are neighbours.
    """
    B, N, H = q.shape
    K = own[0].shape[1]
    R, G = B // n, N // K
    by_prompt = q.reshape(R, n, K, G, H).swapaxes(1, 2).reshape(R, K, n * G, H)

    def by_sequence(x: jax.Array) -> jax.Array:
        return x.reshape(R, K, n, G, *x.shape[3:]).swapaxes(1, 2).reshape(B, K, G, *x.shape[3:])

    zeros = jnp.zeros(by_prompt.shape, jnp.float32)
    state = Attended(jnp.full(zeros.shape[:-1], MASKED), zeros[..., 0], zeros)
    mask = jnp.broadcast_to(prompt_mask[:, None], (R, n * G, prompt_mask.shape[1]))
    state = Attended(*map(by_sequence, in_blocks(by_prompt, prompt, mask, state)))
    mask = jnp.broadcast_to(own_mask[:, None], (B, G, own_mask.shape[1]))
    state = in_blocks(q.reshape(B, K, G, H), own, mask, state)
    return (state.y / state.total[..., None]).astype(q.dtype).reshape(B, N, H)


def decode_as_update(
    case: Case, params: Any, tokens: Any, prompts: CachePart, generated: CachePart, now: jax.Array
) -> Any:
    """`decode_step.decode` with the update's attention, where all sequences have sampled `now` + 1 tokens."""
    tokens_of_prompt = len(case.prompts[0].input_ids)
    R, S, C = len(case.prompts), prompts.positions, generated.positions
    prompt_mask = jnp.broadcast_to(jnp.arange(S) < tokens_of_prompt, (R, S))
    own_mask = jnp.broadcast_to(jnp.arange(C) <= now, (len(tokens), C))

    def attend_of(mixer: Any) -> Any:
        def attend(q: jax.Array, k: Any, v: Any, sinks: Any, cache: Any) -> Any:
            prompt, (keys, values) = cache
            own = write(keys, k[0, :, :, :, None], now, 3), write(values, v[0, :, :, None], now, 2)
            return update_attention(q[0], prompt, own, prompt_mask, own_mask, case.n)[None], own

        return attend

    caches = list(zip(prompts.layers, generated.layers, strict=True))
    places = jnp.full((1, len(tokens)), tokens_of_prompt + now, jnp.int32)
    how: dict[str, Any] = {"dtype": jnp.dtype(case.dtype), "backend": case.backend}
    run = run_layers(params, case.arch, tokens[None], places, attend_of, None, caches, **how)
    return run.hidden[0], CachePart(run.caches)


def logprobs_in_blocks(scores: jax.Array, words: jax.Array) -> jax.Array:
    """Log-probabilities [B] of `words` in logits [B, V], as `sampling.sample` sums them."""
    blocks = sampling._blocks(scores, 1, sampling.BLOCK, -jnp.inf)
    peak = blocks.max(axis=2).max(axis=1, keepdims=True)
    sums = jnp.exp(blocks - peak[..., None]).sum(axis=2)
    total = jnp.cumsum(sums, axis=1)[:, -1:]
    picked = jnp.take_along_axis(scores, words[:, None], axis=1)
    return (picked - peak - jnp.log(total))[:, 0]


def head_logprobs_of(case: Case, params: Any, hidden: Any, words: Any, as_decode: set[str]) -> jax.Array:
    """Log-probabilities [B] of `words` after hidden states [B, D]."""
    one_way = replace(case.backend, few_rows=0)
    backend = case.backend if "logits" in as_decode else one_way
    if "logsumexp" in as_decode:
        return logprobs_in_blocks(logits(params, case.arch, hidden, backend=backend), words)
    if "logits" not in as_decode:
        return head_logprobs(params, replace(case.spec, backend=one_way), hidden, words, len(words))[0]
    # Without the barrier the transposes would be part of the product.
    rows = lax.optimization_barrier(logits(params, case.arch, hidden, backend=backend)).T
    tile = case.backend.tile(case.arch.vocab_size)
    return token_logprobs(lambda rows, _: rows.T, rows, jnp.zeros((len(words), 1)), words, 1.0, tile=tile)[0]


def decode_program(case: Case, as_decode: set[str], tapped: set[int]) -> Callable[..., Any]:
    """All decode steps of the case's tokens, with these operations as decode has them, others as the update.

    (parameters, caches of prompts and of own tokens) -> (log-probabilities [C - 1, B] of all tokens but the
    first, tapped results [C - 1, B, ...]).
    """
    tokens = jnp.asarray(case.tokens.T)
    prompt_tokens, B = len(case.prompts[0].input_ids), tokens.shape[1]
    sequences = jnp.arange(B)
    R = len(case.prompts)
    sharing = Sharing(sequences.reshape(R, -1), sequences, jnp.full(R, prompt_tokens, jnp.int32))

    def rows_of(name: str, few: int) -> int:
        return few if name in as_decode else 0

    def step(params: Any, prompts: Any, generated: Any, now: Any, word: Any, following: Any) -> Any:
        taps = Taps(tapped)
        with ordered({*OPERATIONS} - as_decode), taps.hooked(rows_of):
            if "attention" in as_decode:
                full = partial(jnp.full, B, dtype=jnp.int32)
                hidden, generated, _ = decode_step.decode(
                    *(params, case.arch, word, full(prompt_tokens + now), prompts, generated),
                    *(full(now + 1), now, sharing, jnp.ones(B, bool)),
                    dtype=jnp.dtype(case.dtype),
                    backend=case.backend,
                )
            else:
                hidden, generated = decode_as_update(case, params, word, prompts, generated, now)
        with ordered({*OPERATIONS} - as_decode):
            logprobs = head_logprobs_of(case, params, hidden, following, as_decode)
        return generated, logprobs, {name: x[0] for name, x in taps.found.items()}

    def run(params: Any, prompts: Any, generated: Any) -> Any:
        def body(generated: Any, at: Any) -> Any:
            now, word, following = at
            generated, logprobs, found = step(params, prompts, generated, now, word, following)
            return generated, (logprobs, found)

        steps = jnp.arange(len(tokens) - 1, dtype=jnp.int32), tokens[:-1], tokens[1:]
        return lax.scan(body, generated, steps)[1]

    return compiled(case, run)


def inputs_of_decode(case: Case, as_now: set[str]) -> tuple[Any, CachePart, CachePart]:
    """(the sampler's parameters, its cache of the prompts, an empty one of own tokens)."""
    arch, dtype = case.arch, jnp.dtype(case.dtype)
    params = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, case.params)
    count = len(case.prompts)
    pack = [Admitted(Group.of(each, 0, range(case.n), 1), i, i) for i, each in enumerate(case.prompts)]
    packed = pack_prompts([pack], case.n, count, decode_forms(case), UsualSampling())
    program = Program(arch, (), dtype, "xla", one_device(), case.backend)
    positions = -(-len(case.prompts[0].input_ids) // BLOCK) * BLOCK
    empty = partial(empty_cache, arch, dtype=dtype, mesh=one_device())
    run = compiled(case, lambda params, cache, packed: _prefill(params, cache, packed, program))
    with ordered({*OPERATIONS} - as_now):
        prompts, *_ = run(params, empty(count, positions), packed)
    own = -(-case.tokens.shape[1] // BLOCK) * BLOCK
    return params, prompts, empty(len(case.tokens), own)


def decode_forms(case: Case) -> Any:
    return Program(case.arch, (), jnp.dtype(case.dtype), "xla", one_device(), case.backend).forms


class Runs:
    """The programs of a case with operations as they are now, others in one order; each is run once."""

    def __init__(self, case: Case, tapped: set[int]) -> None:
        self.case, self._tapped = case, tapped
        self._updates: dict[frozenset[str], Any] = {}
        self._inputs: dict[frozenset[str], Any] = {}

    def update(self, as_now: set[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`update_values`; products are in it as they are."""
        key = frozenset(as_now - {*PRODUCTS})
        if key not in self._updates:
            self._updates[key] = update_values(self.case, as_now, self._tapped)
        return self._updates[key]

    def decode(self, as_now: set[str]) -> tuple[Callable[..., Any], Any]:
        """(`decode_program`, its arguments)."""
        key = frozenset(as_now & {"norm", "attention"})
        if key not in self._inputs:
            self._inputs[key] = inputs_of_decode(self.case, as_now)
        return decode_program(self.case, as_now, self._tapped), self._inputs[key]

    def compared(self, as_now: set[str]) -> dict[str, Any]:
        """The gap between decode and update, and the first intermediate result with other bits."""
        of_update, values = self.update(as_now)
        run, arguments = self.decode(as_now)
        logprobs, found = jax.device_get(run(*arguments))
        row = gap(logprobs.T, of_update[:, 1:])
        for name, x in found.items():
            own, other = np.moveaxis(x, 0, 1), values[name][:, 1:]
            if (differs := own != other).any():
                _, layer, operation = name.split(" ")
                largest = np.abs(own.astype(np.float32) - other.astype(np.float32)).max()
                row |= {"first": f"layer {layer}, {operation}", "differ": float(differs.mean())}
                return row | {"first max": float(largest)}
        return row | {"first": "log-probability" if row["max"] else None}


def gap(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Absolute differences of log-probabilities, in nats, and the share of tokens without one."""
    apart = np.abs(a.astype(np.float64) - b)
    squares = float(np.square(apart).mean())
    return {
        "mean": float(apart.mean()),
        "max": float(apart.max()),
        "mean square": squares,
        "equal": float((apart == 0).mean()),
    }


def shifted(case: Case, tokens: int) -> Case:
    """The same completions after prompts without their first `tokens`: blocks then hold several sequences."""
    batch, names = case.batch, ("input_ids", "attention_mask", "completion_mask")
    cut = {name: getattr(batch, name)[:, tokens:] for name in (*names, "rollout_logprobs", "policy_version")}
    return case._replace(batch=replace(batch, **cut))


def of_gradient(case: Case) -> np.ndarray:
    """[B, C]: the log-probabilities that the programs of the gradient compute on their way."""
    planner = case.spec.planner(LogprobConfig(max_tokens_per_device=UPDATE_TOKENS), share_prompts=True)
    trainer = Trainer(case.spec, planner, OptimizerConfig(), total_steps=1, seed=0)
    state = trainer.init(jax.tree.map(jnp.copy, case.params))
    mask = case.batch.completion_mask
    columns = {"advantages": mask.astype(np.float32), "rollout_logprobs": case.batch.rollout_logprobs}
    table = TokenTable.of_policy(case.batch, case.arch).with_columns(**columns)
    objective = PolicyObjective.of(UpdateConfig(), on_policy=True)
    given = state, table.weighted("token_mean", case.tokens.shape[1]), objective, StepTotals()
    predictions = trainer.forward_backward(*given, want=True).predictions
    assert predictions is not None
    return case.completions(predictions)


def seconds_of(runs: Runs, rounds: int) -> dict[str, float]:
    """Decode steps and the update's forward pass with sums in one order, over those as they are now."""
    ways: dict[str, list[Callable[[], Any]]] = {"decode": [], "update": []}
    for as_now in ({*OPERATIONS}, set[str]()):
        run, arguments = runs.decode(as_now)
        ways["decode"].append(partial(run, *arguments))
        ways["update"].append(update_pass(runs.case, as_now))
    found: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for number in range(rounds + 1):
        for name, both in ways.items():
            for way, times in zip(both, found[name], strict=True):
                began = time.perf_counter()
                jax.block_until_ready(way())
                if number:
                    times.append(time.perf_counter() - began)
    return {name: statistics.median(b) / statistics.median(a) for name, (a, b) in found.items()}


def update_pass(case: Case, as_now: set[str]) -> Callable[[], Any]:
    """The forward pass of the first micro-batch."""
    spec, table = case.spec, TokenTable.of_policy(case.batch, case.arch)
    planner = spec.planner(LogprobConfig(max_tokens_per_device=UPDATE_TOKENS), share_prompts=True)
    batch = fill(planner.plans(table)[0], replace(table, columns={}), one_device(), spec.forms)

    def predict(params: Any, batch: Any) -> Any:
        with ordered({*OPERATIONS} - as_now):
            return spec.predict(params, batch).numbers[0]

    return partial(compiled(case, predict), case.params, batch)


def other_programs(case: Case, of_update: np.ndarray) -> dict[str, Any]:
    """The gaps between programs of the update."""
    other = {"rows of one sequence": {"rows": 4}, "remat: layer": {"remat": "layer"}}
    cut = shifted(case, 5)
    return {
        "gradient's own pass": gap(of_gradient(case), of_update),
        **{name: gap(case.update(**how), of_update) for name, how in other.items()},
        "another place in a packed row": gap(cut.update(), cut.update(rows=4)),
    }


def measured(args: Any, model: Any, tokenizer: Any, dtype: str) -> dict[str, Any]:
    """The figures of one dtype."""
    usual = this_backend()
    case = sampled(args, model, tokenizer, dtype, usual, args.prompt_tokens)
    of_engine, of_update = case.completions(case.batch.rollout_logprobs), case.update()
    report: dict[str, Any] = {"engine": gap(of_engine, of_update)}
    report["engine, first tokens"] = gap(of_engine[:, :1], of_update[:, :1])
    if not args.small:
        report["update"] = other_programs(case, of_update)
    exact = case
    if dtype != "float32":
        options = (*usual.compiler_options, EXACT_CASTS)
        exact = case._replace(backend=replace(usual, compiler_options=options))
    layers = len(case.arch.layers)
    tapped = {*range(layers)} if layers < 8 else {0, 1, layers // 2, layers - 1}
    runs, as_now = Runs(exact, tapped), Runs(case, tapped)
    rows = {"none": runs.compared(set()), "all": as_now.compared({*OPERATIONS})}
    print(dtype, json.dumps(report), json.dumps(rows), flush=True)
    if dtype != "float32":
        rows["casts"] = as_now.compared(set())
    for name in args.only or OPERATIONS:
        rows[name] = runs.compared({name})
        print(dtype, name, json.dumps(rows[name]), flush=True)
    single = [name for name in rows if name not in ("none", "all")]
    total = sum(rows[name]["mean square"] for name in single)
    for name in single:
        rows[name]["share"] = rows[name]["mean square"] / total if total else 0.0
    report |= {"operations": rows, "sum of mean squares": total}
    if args.rounds:
        report["seconds, one order / now"] = seconds_of(runs, args.rounds)
    return report


def table(report: dict[str, Any]) -> str:
    """The operations of one dtype, those with the largest share first."""
    rows = sorted(report["operations"].items(), key=lambda item: -item[1].get("share", 2.0))
    lines = ["| as now | mean | max | equal | share | first place | differ | max there |", "|" + "---|" * 8]
    for name, row in rows:
        share = f"{row['share']:.3f}" if "share" in row else ""
        place = row["first"] or "none", f"{row.get('differ', 0):.2g}", f"{row.get('first max', 0):.2g}"
        figures = f"{row['mean']:.2g}", f"{row['max']:.2g}", f"{row['equal']:.4f}", share
        lines.append(f"| {' | '.join((name, *figures, *place))} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    """Prints a table for each dtype, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:tiny", help="path of a model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=BLOCK, help=f"a multiple of {BLOCK}")
    parser.add_argument("--tokens", type=int, default=BLOCK, help=f"of a completion; a multiple of {BLOCK}")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, help="operations; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of the timed programs; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--small", action="store_true", help="float32, two operations, no other programs, nothing timed"
    )
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args(given)
    if args.prompt_tokens % BLOCK or args.tokens % BLOCK:
        parser.error(f"prompts and completions are whole blocks of {BLOCK} tokens; give multiples of it")
    if args.small:
        args.dtype, args.only, args.rounds, args.n = ["float32"], ["norm", "down"], 0, 2
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, vocab_size=len(tokenizer) if ":" in args.model else None)
    report = {dtype: measured(args, model, tokenizer, dtype) for dtype in args.dtype}
    for dtype, figures in report.items():
        print(f"\n{dtype}\n\n{table(figures)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
