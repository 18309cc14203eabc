"""The gated delta rule over chunks of packed rows with shared prefixes, against each whole sequence alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.models import delta_rule as module
from quatrain.models.delta_rule import CHUNK, DeltaState, DeltaWeights, inverse_of_unit_lower, one_sequence
from quatrain.models.layers import BRANCHES_PER_GROUP
from quatrain.models.prefix_tree import chunk_layout, prefixes_of, spans_of_nodes

# One program of each for the shapes of a test.
delta_rule = jax.jit(module.delta_rule, static_argnums=4)
states_at_ends = jax.jit(module.states_at_ends, static_argnums=(4, 5))
continued, step = jax.jit(module.continued), jax.jit(module.step)

K, G, E, F, W = 2, 2, 8, 6, 4
C = 2 * E + G * F
X = C + G * F


def inputs(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, DeltaWeights]:
    rng = np.random.default_rng(seed)
    x, ba = (rng.normal(size=(*shape, K, n)).astype(np.float32) for n in (X, 2 * G))
    conv, a_log, dt_bias = rng.normal(size=(K, C, W)) / 2, rng.normal(size=K * G), rng.normal(size=K * G) - 2
    return x, ba, DeltaWeights(*(jnp.asarray(w, jnp.float32) for w in (conv, a_log, dt_bias)))


def recurrence(x: np.ndarray, ba: np.ndarray, weights: DeltaWeights) -> tuple[np.ndarray, np.ndarray]:
    """(y [T, K, G F], memory [K, E, G F]) of one sequence, token by token in float64."""
    conv, a_log, dt_bias = (np.asarray(w, np.float64) for w in weights)
    memory, ys = np.zeros((K, G, E, F)), []
    x, a_log, dt_bias = x[..., :C].astype(np.float64), a_log.reshape(K, G), dt_bias.reshape(K, G)
    before = np.concatenate([np.zeros((W - 1, K, C)), x])
    for t in range(len(x)):
        mixed = sum(before[t + w] * conv[:, :, w] for w in range(W))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = mixed[:, :E], mixed[:, E : 2 * E], mixed[:, 2 * E :].reshape(K, G, F)
        q, k = (each / np.sqrt(np.square(each).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
        beta = 1 / (1 + np.exp(-ba[t, :, :G].astype(np.float64)))
        g = -np.exp(a_log) * np.log1p(np.exp(ba[t, :, G:] + dt_bias))
        memory = memory * np.exp(g)[..., None, None]
        new = beta[..., None] * (v - np.einsum("ke,kgef->kgf", k, memory))
        memory = memory + k[:, None, :, None] * new[:, :, None]
        ys.append(np.einsum("ke,kgef->kgf", q * E**-0.5, memory))
    return np.array(ys).reshape(-1, K, G * F), memory.transpose(0, 2, 1, 3).reshape(K, E, G * F)


def no_tokens(rows: int) -> DeltaState:
    return DeltaState(jnp.zeros((rows, K, W - 1, C)), jnp.zeros((rows, K, E, G * F)))


def close(found, expected, tolerance=2e-6):
    expected = np.asarray(expected)
    assert np.abs(np.asarray(found) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    "tokens", [3, 64, 130, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 63, 65))]
)
def test_chunks_of_one_sequence_are_the_recurrence(tokens):
    x, ba, weights = inputs(1, tokens)
    y = delta_rule(x, ba, one_sequence(jnp.ones((1, tokens), jnp.int32)), weights, E)
    expected, memory = recurrence(x[0], ba[0], weights)
    close(y[0], expected)
    _, end = continued(x, ba, jnp.array([tokens]), weights, no_tokens(1))
    close(end.memory[0], memory)


def test_padding_at_either_end_is_zero_and_changes_nothing():
    x, ba, weights = inputs(2, 100)
    segments = np.ones((2, 100), np.int32)
    segments[0, 70:], segments[1, :9] = 0, 0
    y = np.asarray(delta_rule(x, ba, one_sequence(jnp.asarray(segments)), weights, E))
    close(y[0, :70], recurrence(x[0, :70], ba[0, :70], weights)[0])
    close(y[1, 9:], recurrence(x[1, 9:], ba[1, 9:], weights)[0])
    assert not y[segments == 0].any()


def test_steps_are_the_recurrence_and_continue_a_state():
    x, ba, weights = inputs(1, 90)
    y, state = continued(x[:, :70], ba[:, :70], jnp.array([67]), weights, no_tokens(1))
    for t in range(67, 90):
        one, state = step(x[:, t], ba[:, t], weights, state)
        y = y.at[:, t].set(one) if t < 70 else jnp.concatenate([y, one[:, None]], axis=1)
    expected, memory = recurrence(x[0], ba[0], weights)
    close(y[0], expected)
    close(state.memory[0], memory)
    close(state.conv[0], x[0, 87:, :, :C].swapaxes(0, 1))


def test_a_continued_row_without_tokens_keeps_its_state():
    x, ba, weights = inputs(2, 20)
    begin = jax.tree.map(lambda each: each + 0.5, no_tokens(2))
    _, end = continued(x, ba, jnp.array([0, 5]), weights, begin)
    np.testing.assert_array_equal(end.memory[0], begin.memory[0])
    np.testing.assert_array_equal(end.conv[0], begin.conv[0])
    assert not np.array_equal(end.memory[1], begin.memory[1])


def test_equal_keys_do_not_make_the_system_overflow():
    x, ba, weights = inputs(1, 128)
    x[:], ba[..., :G], ba[..., G:] = x[:, :1], 3.0, -9.0  # beta 0.95, hardly any decay
    y = delta_rule(x, ba, one_sequence(jnp.ones((1, 128), jnp.int32)), weights, E)
    close(y[0], recurrence(x[0], ba[0], weights)[0])


@pytest.mark.parametrize("keys", ["random", "equal"])
def test_the_inverse_reads_what_is_below_the_diagonal(keys):
    rng = np.random.default_rng(2)
    shape = (2, 3, CHUNK, CHUNK)
    below = np.tril(rng.normal(size=shape) / 8 if keys == "random" else np.full(shape, 0.95), -1)
    x = (below + np.triu(rng.normal(size=below.shape))).astype(np.float32)
    expected = np.linalg.inv(np.tril(x.astype(np.float64), -1) + np.eye(CHUNK))
    direction = rng.normal(size=x.shape).astype(np.float32)

    @jax.jit
    def inverse_and_gradient(x):
        found, pullback = jax.vjp(inverse_of_unit_lower, x)
        return found, pullback(direction)[0]

    found, gradient = inverse_and_gradient(x)
    close(found, expected, 1e-6)
    over = expected.swapaxes(-1, -2)
    close(gradient, np.tril(-over @ direction @ over, -1), 1e-6)


def test_a_gradient_calls_no_library_of_the_cpu():
    """Two triangular solvers at once, as a gradient had them, wait for ever in XLA's pool of two threads."""
    x, ba, weights = inputs(1, 130)
    chunks = one_sequence(jnp.ones((1, 130), jnp.int32))

    def loss(x, ba, weights):
        return jnp.sin(delta_rule(x, ba, chunks, weights, E)).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, ba, weights).compile().as_text()
    assert "while" in program
    assert "custom-call" not in program


FORESTS = {
    "lengths": [(1, 0, 1), (2, 0, 63), (3, 0, 64), (4, 0, 65), (5, 0, 128)],
    "shared": [(1, 0, 130), *((1, branch, n) for branch, n in enumerate((60, 1, 64, 65, 2), 1)), (2, 0, 3)],
    "nested": [
        (1, 0, 2),
        *((1, BRANCHES_PER_GROUP + branch, n) for branch, n in enumerate((65, 2, 70))),
        *((1, 2 * BRANCHES_PER_GROUP + branch, n) for branch, n in enumerate((3, 5, 1)) if n),
        (1, 3 * BRANCHES_PER_GROUP + 1, 66),  # a group whose prompt is the common prefix
        (1, 4 * BRANCHES_PER_GROUP, 7),
    ],
}
"""(segment, branch, tokens) of each node."""


def buffer(nodes, width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    segments, branches = (np.repeat([n[i] for n in nodes], [n[2] for n in nodes]) for i in (0, 1))
    padding = max(width - len(segments), 5)
    return tuple(np.pad(x, (0, padding)).astype(np.int32) for x in (segments, branches))


def sequences(segments: np.ndarray, branches: np.ndarray) -> list[np.ndarray]:
    """The places of the tokens of each path of the forest that is not a part of another."""
    spans = spans_of_nodes(segments, branches)
    paths = {node: sorted(prefixes_of(*node) & spans.keys()) for node in spans}
    leaves = spans.keys() - {prefix for path in paths.values() for prefix in path}
    return [np.concatenate([spans[each] for each in (*paths[leaf], leaf)]) for leaf in leaves]


@pytest.mark.parametrize("forest", FORESTS)
def test_packed_sequences_with_shared_prefixes_are_each_alone(forest):
    segments, branches = buffer(FORESTS[forest])
    x, ba, weights = inputs(1, len(segments))
    chunks = chunk_layout(segments[None], branches[None])
    y = delta_rule(x, ba, jax.tree.map(jnp.asarray, chunks), weights, E)[0]
    for places in sequences(segments, branches):
        close(y[places], recurrence(x[0, places], ba[0, places], weights)[0])


@pytest.mark.slow
def test_buffers_with_different_forests_stand_side_by_side():
    nodes = [FORESTS[name] for name in ("shared", "lengths")]
    rows = [buffer(each, 340) for each in nodes]
    segments, branches = (np.stack(each) for each in zip(*rows, strict=True))
    x, ba, weights = inputs(2, segments.shape[1])
    y = delta_rule(x, ba, jax.tree.map(jnp.asarray, chunk_layout(segments, branches)), weights, E)
    for i, row in enumerate(rows):
        for places in sequences(*row):
            close(y[i, places], recurrence(x[i, places], ba[i, places], weights)[0])


@pytest.mark.parametrize(
    "forest", ["nested", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lengths", "shared"))]
)
def test_gradients_are_the_sums_over_whole_sequences(forest):
    """Of a loss of the tokens after prefixes: one of a prefix token would count once in a buffer."""
    segments, branches = buffer(FORESTS[forest])
    x, ba, weights = inputs(1, len(segments))
    chunks = jax.tree.map(jnp.asarray, chunk_layout(segments[None], branches[None]))
    paths, spans = sequences(segments, branches), spans_of_nodes(segments, branches)
    own = [len(span) for span in (next(s for s in spans.values() if s[-1] == p[-1]) for p in paths)]
    direction = np.random.default_rng(1).normal(size=(len(segments), K, G * F)).astype(np.float32)

    def packed(*args):
        y = delta_rule(*args[:2], chunks, args[2], E)[0]
        return sum(jnp.sum(jnp.sin(y[p[-n:]]) * direction[p[-n:]]) for p, n in zip(paths, own, strict=True))

    def alone(*args):
        total = 0.0
        for places, n in zip(paths, own, strict=True):
            rows = [each[:, places].swapaxes(0, 1) for each in args[:2]]
            _, y = jax.lax.scan(lambda state, row: step(*row, args[2], state)[::-1], no_tokens(1), rows)
            total += jnp.sum(jnp.sin(y[-n:, 0]) * direction[places[-n:]])
        return total

    args = (jnp.asarray(x), jnp.asarray(ba), weights)
    found, expected = (jax.jit(jax.grad(loss, (0, 1, 2)))(*args) for loss in (packed, alone))
    jax.tree.map(partial(close, tolerance=1e-5), found, expected)


def test_states_at_the_ends_of_prompts_that_share_a_prefix():
    nodes = [(1, 0, 40), (1, 1, 30), (1, 2, 1), (1, 3, 100)]
    segments, branches = buffer(nodes)
    x, ba, weights = inputs(1, len(segments))
    chunks = jax.tree.map(jnp.asarray, chunk_layout(segments[None], branches[None], ends=True))
    y, states = states_at_ends(x, ba, chunks, weights, E, 4)
    for number, places in enumerate(sorted(sequences(segments, branches), key=lambda p: p[-1]), 1):
        expected, memory = recurrence(x[0, places], ba[0, places], weights)
        close(y[0, places], expected)
        close(states.memory[number, 0], memory)
        close(states.conv[number, 0], x[0, places[-3:], :, :C].swapaxes(0, 1))
    close(states.memory[0, 0], recurrence(x[0, :40], ba[0, :40], weights)[1])


def test_bfloat16_inputs_are_computed_in_float32():
    x, ba, weights = inputs(1, 2 * CHUNK)
    chunks = one_sequence(jnp.ones((1, 2 * CHUNK), jnp.int32))
    half = [jnp.asarray(each, jnp.bfloat16) for each in (x, ba)]
    y = delta_rule(*half, chunks, weights, E)
    exact = delta_rule(*(each.astype(jnp.float32) for each in half), chunks, weights, E)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))
