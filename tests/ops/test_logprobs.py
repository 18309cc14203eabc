"""Token log-probabilities: literal values, the gradient of the naive formula, memory of one tile."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION

from quatrain.models.layers import product_in
from quatrain.ops.logprobs import Tile, even_parts, kept_logits, token_logprobs


def dot(rows, hidden):
    return hidden @ rows.T


def pick(rows, logits):
    return logits[:, rows.astype(jnp.int32)]


def given(logits, targets, temperature, *, tile=None):
    """Of logits that are given: the head is the numbers of the words."""
    words = jnp.arange(logits.shape[-1], dtype=jnp.float32)
    return token_logprobs(pick, words, logits, targets, temperature, tile=tile or Tile(8, 2))


def naive(logits, targets, temperature):
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    picked = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return picked, -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


def test_literal_values():
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]))
    logprobs, entropy = given(logits, jnp.array([1, 2]), 1.0)
    np.testing.assert_allclose(logprobs, [-1.3862944, -0.6931472], rtol=1e-6)  # log 1/4, log 1/2
    np.testing.assert_allclose(entropy, [0.9002561, 1.0397208], rtol=1e-6)
    assert logprobs.dtype == entropy.dtype == jnp.float32


def test_temperature_divides_the_logits():
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))
    logprobs, entropy = given(logits, jnp.array([2]), 0.5)
    np.testing.assert_allclose(logprobs, [np.log(25 / 30)], rtol=1e-6)  # weights 1, 4, 25
    np.testing.assert_allclose(entropy, [0.5339616], rtol=1e-6)


def quick_or_slow(cases, quick):
    """Those of `cases` that are in `quick` as they are, the others marked slow."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@functools.cache
def eleven_words():
    """Seven tokens and eleven words: a function that gives the value and gradients of a weighted sum of the
    log-probabilities and entropies that its argument computes; and what it gives for the naive formula.
    """
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, 7), jnp.int32)
    by_logprob, by_entropy = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32)

    def gradient_of(function):
        def value(hidden, head):
            logprobs, entropy = function(hidden, head, targets)
            return (by_logprob * logprobs + by_entropy * entropy**2).sum()

        return jax.jit(jax.value_and_grad(value, (0, 1)))(hidden, head)

    return gradient_of, gradient_of(lambda h, w, targets: naive(h @ w.T, targets, 0.7))


SIZES = [(tokens, words) for tokens in (1, 3, 5, 7) for words in (1, 2, 3, 4, 5, 10, 11, 16)]
QUICK_SIZES = [(1, 1), (5, 3), (3, 5), (7, 16)]


@pytest.mark.parametrize("kept_bytes", [0, 4 * 7 * 11], ids=["made twice", "kept"])
@pytest.mark.parametrize(("tokens", "words"), quick_or_slow(SIZES, QUICK_SIZES))
def test_values_and_gradients_are_those_of_the_naive_formula(tokens, words, kept_bytes):
    """Tiles of each size, those that do not come out even in eleven words and seven tokens among them."""
    gradient_of, theirs = eleven_words()
    tile = Tile(tokens, words, kept_bytes)
    ours = gradient_of(lambda h, w, targets: token_logprobs(dot, w, h, targets, 0.7, tile=tile))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)
    assert np.abs(theirs[1][1]).max() > 0.1  # the head does get a gradient


@pytest.mark.parametrize("tile", [Tile(3, 4), Tile(7, 16, 4 * 7 * 11)])
def test_a_frozen_head_has_no_gradient_and_hidden_states_have_the_same(tile):
    gradient_of, _ = eleven_words()

    def ours(**frozen):
        return gradient_of(lambda h, w, targets: token_logprobs(dot, w, h, targets, 0.7, tile=tile, **frozen))

    (value, (by_hidden, by_head)), (same, (expected, _)) = ours(head_gradient=False), ours()
    np.testing.assert_allclose(value, same, rtol=1e-6)
    np.testing.assert_allclose(by_hidden, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(by_head).any()


def both(rows, states):
    return dot(rows[0], states[0]) + dot(rows[1], states[1])


@pytest.mark.parametrize("tile", [Tile(3, 4), Tile(7, 16, 4 * 7 * 11)])
def test_of_two_matrices_of_which_the_first_is_frozen_the_other_has_its_gradient(tile):
    """As of one matrix that has the columns of both: those of a head's adapters are behind the others."""
    gradient_of, _ = eleven_words()

    def ours(hidden, head, targets):
        rows, states = (head[:, :3], head[:, 3:]), (hidden[:, :3], hidden[:, 3:])
        return token_logprobs(both, rows, states, targets, 0.7, tile=tile, head_gradient=False)

    value, (by_hidden, by_head) = gradient_of(ours)
    whole = gradient_of(lambda h, w, targets: token_logprobs(dot, w, h, targets, 0.7, tile=tile))
    np.testing.assert_allclose(value, whole[0], rtol=1e-5)
    np.testing.assert_allclose(by_hidden, whole[1][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_head[:, 3:], whole[1][1][:, 3:], rtol=1e-5, atol=1e-5)
    assert not np.asarray(by_head[:, :3]).any()


def test_the_gradient_of_a_frozen_head_costs_nothing():
    hidden, head = jnp.zeros((64, 16)), jnp.zeros((512, 16))

    def num_operations(**frozen):
        def loss(hidden):
            targets = jnp.zeros(64, jnp.int32)
            logprobs, _ = token_logprobs(dot, head, hidden, targets, 1.0, tile=Tile(64, 512), **frozen)
            return logprobs.sum()

        return jax.make_jaxpr(jax.grad(loss))(hidden).pretty_print().count("dot_general")

    # Logits in the forward and in the backward pass, and the gradient of the hidden states.
    assert num_operations(head_gradient=False) == 3
    assert num_operations() == 4

    def with_adapters(states, b):
        given = (head, b), states, jnp.zeros(64, jnp.int32), 1.0
        return token_logprobs(both, *given, tile=Tile(64, 512), head_gradient=False)[0].sum()

    given = (hidden, jnp.zeros((64, 2))), jnp.zeros((512, 2))
    lowered = jax.make_jaxpr(jax.grad(with_adapters, (0, 1)))(*given)
    assert lowered.pretty_print().count("dot_general") == 3 + 4


@pytest.mark.parametrize("tile", [Tile(64, 4096), Tile(2048, 128), Tile(512, 500)])
def test_backward_holds_one_tile_of_logits(tile):
    num_tokens, vocab, width = 2048, 4096, 8
    hidden, head = jnp.zeros((num_tokens, width)), jnp.zeros((vocab, width))
    targets = jnp.zeros(num_tokens, jnp.int32)

    def loss(hidden, head):
        logprobs, entropy = token_logprobs(dot, head, hidden, targets, 1.0, tile=tile)
        return (logprobs + entropy).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile(DEFAULT_FUSION)
    full_logits = num_tokens * vocab * 4
    assert compiled.memory_analysis().temp_size_in_bytes < full_logits / 6


def test_only_the_logits_are_computed_twice():
    hidden, head, targets = jnp.ones((8, 3)), jnp.ones((5, 3)), jnp.zeros(8, jnp.int32)

    def loss(hidden, head):
        return token_logprobs(dot, head, hidden, targets, 1.0, tile=Tile(2, 3))[0].sum()

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, head))
    # Forward: logits. Backward: logits again, the gradient of the hidden states, that of the weights.
    assert program.count("dot_general[") == 4
    # Of the logits once each, and of what the greatest has risen by.
    assert program.count("= exp ") == 3
    assert program.count("= log ") == 1


@pytest.mark.parametrize("words", [1, 2, 3])
def test_forbidden_tokens_add_nothing(words):
    logits = jnp.array([[0.0, -jnp.inf, 0.0]])

    def total(logits):
        logprobs, entropy = given(logits, jnp.array([0]), 1.0, tile=Tile(1, words))
        return logprobs[0] + entropy[0], (logprobs, entropy)

    gradient, (logprobs, entropy) = jax.grad(total, has_aux=True)(logits)
    np.testing.assert_allclose([logprobs[0], entropy[0]], [-np.log(2), np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 0.0, -0.5]], atol=1e-6)


@pytest.mark.parametrize("words", [1, 2, 3])
def test_extreme_logits_stay_finite(words):
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    logprobs, entropy = given(logits, jnp.array([1, 0]), 1.0, tile=Tile(1, words))
    np.testing.assert_allclose(logprobs, [-2e4, -np.log(3)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [0.0, np.log(3)], atol=1e-6)


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_broken_logit_is_not_hidden(words, broken):
    logits = jnp.array([[0.0, broken, 1.0], [0.0, 0.0, 0.0]])
    logprobs, entropy = given(logits, jnp.array([0, 1]), 1.0, tile=Tile(1, words))
    np.testing.assert_array_equal(jnp.isfinite(jnp.stack([logprobs, entropy])), [[False, True]] * 2)


def test_softmax_is_float32_under_bfloat16_activations():
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.bfloat16)
    targets = jnp.zeros(6, jnp.int32)
    ours = given(hidden, targets, 1.0)
    np.testing.assert_allclose(ours, naive(hidden.astype(jnp.float32), targets, 1.0), rtol=1e-5)
    gradient = jax.grad(lambda h: given(h, targets, 1.0)[0].sum())(hidden)
    assert gradient.dtype == jnp.bfloat16


def test_float32_heads_under_bfloat16_activations_are_cast_once_and_have_float32_gradients():
    """The gradients are sums of exact products of rounded factors, over all four tiles of two chunks."""
    rng = np.random.default_rng(6)
    hidden = jnp.asarray(rng.normal(size=(16, 24)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(64, 24)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 64, 16), jnp.int32)

    def project(rows, chunk):
        return product_in(chunk, rows, jnp.bfloat16)

    def gradients(function, *arguments):
        return jax.grad(lambda *a: function(*a)[0].sum(), (0, 1))(*arguments)

    def ours(hidden, head):
        return token_logprobs(project, head, hidden, targets, 1.0, tile=Tile(8, 16))

    def exact(hidden, head):
        return naive(hidden @ head.T, targets, 1.0)

    to_hidden, to_head = gradients(ours, hidden, head)
    rounded = hidden.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    by_hidden, by_head = gradients(exact, *rounded)
    assert (to_hidden.dtype, to_head.dtype) == (jnp.bfloat16, jnp.float32)
    # The gradients of logits, factors of both products, have eight leading bits.
    for rounded, exactly in ((to_head, by_head), (to_hidden.astype(jnp.float32), by_hidden)):
        np.testing.assert_allclose(rounded, exactly, atol=2**-8 * float(jnp.abs(exactly).max()))
    program = str(jax.make_jaxpr(lambda *a: gradients(ours, *a))(hidden, head))
    casts = re.findall(r":bf16\[(\d+),24\] = convert", program)
    # The whole head once in the forward and once in the backward pass; tiles of it are in bfloat16 already.
    assert casts.count("64") == 2


def test_logits_wait_for_the_backward_pass_where_there_is_room():
    """Three products of a tile then: logits, gradients of head and hidden states; else logits once more."""

    def products(kept_bytes):
        def loss(hidden, head):
            tile = Tile(16, 16, kept_bytes)
            return token_logprobs(dot, head, hidden, jnp.zeros(16, jnp.int32), 1.0, tile=tile)[0].sum()

        grad = jax.jit(jax.grad(loss, (0, 1)))
        hlo = grad.lower(jnp.ones((16, 8)), jnp.ones((64, 8))).compile(DEFAULT_FUSION).as_text()
        return hlo.count(" dot(")

    assert kept_logits(16, 64, Tile(16, 16, 4096)) == 4096
    assert kept_logits(16, 64, Tile(16, 16, 4095)) == 0
    assert products(4096) == 3
    assert products(4095) == 4


def test_no_tokens():
    logprobs, entropy = given(jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), 1.0)
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5)])
def test_a_tile_has_a_token_and_a_word(sizes):
    with pytest.raises(ValueError, match=f"at least one token and one word, got {sizes[0]} and {sizes[1]}"):
        Tile(*sizes)


def test_words_of_several_tiles_come_in_units():
    assert even_parts(151936, 32768, 128) == (5, 30464)
    assert even_parts(151936, 32768) == (5, 30388)
    assert even_parts(300, 512, 128) == (1, 300)
    with pytest.raises(ValueError, match="multiples of its unit, got 500 words and 128"):
        Tile(1, 500, unit=128)


@pytest.mark.parametrize(
    ("hidden", "targets", "temperature", "message"),
    [
        ((2, 3), (2,), 0.0, "temperature > 0, got 0.0"),
        ((2, 2, 3), (2, 2), 1.0, "flatten batch and time"),
        ((2, 3), (3,), 1.0, r"got \(2, 3\) and \(3,\)"),
    ],
)
def test_bad_input(hidden, targets, temperature, message):
    with pytest.raises(ValueError, match=message):
        given(jnp.zeros(hidden), jnp.zeros(targets, jnp.int32), temperature)


@functools.cache
def of_live_tokens(kept_bytes: int | None):
    """Of the first `count` of eleven tokens: their sum with its gradients and all log-probabilities.

    In chunks of 4, 4 and 3 tokens, or by the naive formula where `kept_bytes` is None.
    """
    targets = jax.random.randint(jax.random.key(2), (11,), 0, 7)

    def loss(hidden, weight, count):
        if kept_bytes is None:
            logprobs, entropy = naive(hidden @ weight.T, targets, 1.3)
        else:
            tile = Tile(4, 3, kept_bytes)
            logprobs, entropy = token_logprobs(dot, weight, hidden, targets, 1.3, tile=tile, num_live=count)
        return jnp.where(jnp.arange(11) < count, logprobs + 0.3 * entropy, 0.0).sum(), logprobs

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("kept_bytes", [0, 4 * 11 * 7], ids=["made twice", "kept"])
@pytest.mark.parametrize("num_live", [0, 1, 5, 8, 11])
def test_tokens_past_the_live_ones_are_not_computed(num_live, kept_bytes):
    """Results and gradients are those of the live tokens alone."""
    hidden = jax.random.normal(jax.random.key(0), (11, 5))
    weight = jax.random.normal(jax.random.key(1), (7, 5))
    args = hidden, weight, jnp.int32(num_live)
    (value, logprobs), (to_hidden, to_weight) = of_live_tokens(kept_bytes)(*args)
    assert not np.asarray(logprobs)[-(-num_live // 4) * 4 :].any()
    (expected, _), (hidden_grad, weight_grad) = of_live_tokens(None)(*args)
    assert (expected == 0) == (num_live == 0)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(to_hidden, hidden_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_weight, weight_grad, rtol=1e-5, atol=1e-6)


PARTS = [(words, forbidden) for words in (3, 4, 11, 16) for forbidden in (False, True)]
QUICK_PARTS = [(3, True), (16, False)]


@pytest.mark.parametrize("kept_bytes", [0, 4 * 7 * 11], ids=["made twice", "kept"])
@pytest.mark.parametrize(("words", "forbidden"), quick_or_slow(PARTS, QUICK_PARTS))
def test_devices_that_share_the_vocabulary_tile_their_parts(words, forbidden, kept_bytes):
    """Two parts of eleven words: the results of the whole, the gradient of hidden states in two parts."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(22, 5)), jnp.float32)
    last = 10 if forbidden else 21
    targets = jnp.asarray([0, 10, 10, 4, last, last - 3, 9], jnp.int32)
    by_logprob, by_entropy = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32)
    allowed = jnp.where(jnp.arange(22) < (11 if forbidden else 22), 0.0, -jnp.inf)
    rows = jnp.concatenate([head, allowed[:, None]], axis=1)

    def project(rows, hidden):
        return hidden @ rows[:, :-1].T + rows[None, :, -1]

    def loss(hidden, rows, axis):
        logprobs, entropy = token_logprobs(
            project, rows, hidden, targets, 0.7, tile=Tile(3, words, kept_bytes), vocabulary_axis=axis
        )
        return (by_logprob * logprobs + by_entropy * entropy).sum()

    run = jax.value_and_grad(loss, (0, 1))
    whole, (to_hidden, to_rows) = jax.jit(lambda: run(hidden, rows, None))()
    parts = jax.jit(jax.vmap(lambda own: run(hidden, own, "tp"), axis_name="tp"))(rows.reshape(2, 11, 6))
    value, (part_of_hidden, part_of_rows) = parts
    np.testing.assert_allclose(value, [whole, whole], rtol=1e-5)
    np.testing.assert_allclose(part_of_hidden.sum(axis=0), to_hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(part_of_rows.reshape(22, 6)[:, :-1], to_rows[:, :-1], rtol=1e-5, atol=1e-5)
    picked, _ = naive(project(rows, hidden), targets, 0.7)
    singles = jax.jit(lambda: token_logprobs(project, rows, hidden, targets, 0.7, tile=Tile(3, words))[0])()
    np.testing.assert_allclose(singles, picked, rtol=1e-5, atol=1e-6)
