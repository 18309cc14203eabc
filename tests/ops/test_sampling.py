"""Sampling: the right distribution under every filter, and never a token of probability 0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from quatrain.ops.sampling import SamplingNumbers, sample, token_uniforms

ALMOST_ONE = np.float32(1 - 2**-24)


compiled_sample = jax.jit(sample, static_argnames="vocabulary_first")


def draw(logits, uniforms, *, vocabulary_first=False, **options):
    logits, uniforms = jnp.asarray(logits, jnp.float32), jnp.asarray(uniforms, jnp.float32)
    numbers = SamplingNumbers.alike(len(logits), **options)
    tokens, logprobs = compiled_sample(logits, uniforms, numbers, vocabulary_first=vocabulary_first)
    assert tokens.dtype == jnp.int32
    assert logprobs.dtype == jnp.float32
    return np.asarray(tokens), np.asarray(logprobs)


def draws(logits, uniforms, **options):
    return draw(np.tile(logits, (len(uniforms), 1)), uniforms, **options)


def expected_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, by sorting in float64."""
    probs = np.exp((logits - np.max(logits)) / temperature)
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    if top_p < 1:
        mass_before = np.cumsum(probs[order]) - probs[order]
        probs[order[(mass_before >= top_p) & (np.arange(len(order)) > 0)]] = 0
    probs[probs < min_p * probs.max() * (1 - 1e-6)] = 0
    return probs / probs.sum()


def test_inverse_of_the_cumulative_distribution():
    logits = np.log([1.0, 2.0, 5.0])
    tokens, logprobs = draws(logits, [0.0, 0.12, 0.13, 0.37, 0.38, ALMOST_ONE])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(logprobs, np.log([0.125, 0.125, 0.25, 0.25, 0.625, 0.625]), rtol=1e-6)


def test_temperature_zero_takes_the_likeliest_and_ignores_filters():
    logits = np.log([[1.0, 5.0, 2.0], [4.0, 2.0, 4.0]])
    tokens, logprobs = draw(logits, [0.0, ALMOST_ONE], temperature=0.0, top_k=1, min_p=0.9)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, np.log([0.625, 0.4]), rtol=1e-6)


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize(
    "options",
    [FILTERS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FILTERS[1:-1]), FILTERS[-1]],
    ids=str,
)
def test_chi_squared(options):
    """With random numbers; the next test has every filter."""
    logits = np.log([7.0, 1, 4, 12, 2, 9, 3, 5, 0.5, 6, 2, 8])
    rows = np.arange(20_000)
    tokens, logprobs = draws(logits, token_uniforms(0, 0, rows, rows), **options)
    probs = expected_probs(logits, **options)
    counts = np.bincount(tokens, minlength=12)
    kept = probs > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], probs[kept] * len(rows)).pvalue > 1e-3
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 700])
def test_evenly_spread_uniforms_give_the_distribution_itself(options, vocab):
    logits = np.random.default_rng(vocab).normal(size=vocab) * 2
    uniforms = (np.arange(1024) + 0.5) / 1024
    tokens, logprobs = draws(logits, uniforms, **options)
    probs = expected_probs(logits, **options)
    counts = np.bincount(tokens, minlength=vocab)
    assert np.abs(counts - probs * 1024).max() < 1.01
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_p": 0.83},
        {"top_p": 0.37},
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.999, "min_p": 0.02},
    ],
    ids=str,
)
def test_ties_go_to_the_lower_id(options):
    rows = np.random.default_rng(5).integers(-2, 3, (40, 9)).astype(np.float64)
    uniforms = np.tile((np.arange(256) + 0.5) / 256, 40)
    tokens, logprobs = draw(np.repeat(rows, 256, axis=0), uniforms, **options)
    for logits, drawn, logprob in zip(rows, tokens.reshape(40, 256), logprobs.reshape(40, 256), strict=True):
        probs = expected_probs(logits, **options)
        assert np.abs(np.bincount(drawn, minlength=9) - probs * 256).max() < 1.01
        np.testing.assert_allclose(logprob, np.log(probs[drawn]), rtol=1e-4, atol=1e-5)


def test_nucleus_is_the_smallest_set_that_reaches_the_mass():
    uniforms = (np.arange(64) + 0.5) / 64
    for top_p, kept in [(1e-9, 1), (0.125, 1), (0.126, 2), (0.5, 4), (0.999, 8)]:
        tokens, _ = draws(np.zeros(8), uniforms, top_p=top_p)
        assert set(tokens.tolist()) == set(range(kept)), top_p
    tokens, logprobs = draws(np.log([0.25, 0.5, 0.125, 0.125]), uniforms, top_p=0.75)
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(logprobs, np.log(np.where(tokens == 1, 2 / 3, 1 / 3)), rtol=1e-6)


def test_order_of_the_filters():
    logits = np.log([0.5, 0.2, 0.15, 0.1, 0.05])
    uniforms = (np.arange(256) + 0.5) / 256
    # min-p first would leave 0.59, 0.24, 0.18, of which two reach 0.8.
    tokens, _ = draws(logits, uniforms, top_p=0.8, min_p=0.25)
    assert set(tokens.tolist()) == {0, 1, 2}
    # top-p first would leave three, of which top-k keeps two; after top-k the first has 0.714.
    tokens, logprobs = draws(logits, uniforms, top_k=2, top_p=0.71)
    assert set(tokens.tolist()) == {0}
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.001}], ids=str)
@pytest.mark.parametrize("vocab", [3, 300])
def test_never_a_token_of_probability_zero(options, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(64, vocab)) * 30  # most weights underflow
    logits[:, rng.random(vocab) < 0.5] = -np.inf
    logits[:, vocab // 2] = 0.0
    logits[:, vocab // 2 + 1 :] = -np.inf
    for uniform in (0.0, 0.5, ALMOST_ONE):
        tokens, logprobs = draw(logits, np.full(64, uniform), **options)
        assert ((tokens >= 0) & (tokens <= vocab // 2)).all()
        assert np.isfinite(logits[np.arange(64), tokens]).all()
        assert np.isfinite(logprobs).all()
        assert (logprobs <= 1e-6).all()


def test_a_single_possible_token():
    logits = np.full((1, 600), -np.inf)
    logits[0, 511] = -3.0
    for options in FILTERS:
        tokens, logprobs = draw(logits, [ALMOST_ONE], **options)
        assert tokens.tolist() == [511]
        assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_show_in_the_logprob(options, bad):
    tokens, logprobs = draw([[0.0, bad, 1.0]], [0.5], **options)
    assert 0 <= tokens[0] < 3
    assert np.isnan(logprobs[0])


@pytest.mark.parametrize("vocabulary_first", [False, True])
def test_without_filters_nothing_of_them_is_computed(vocabulary_first):
    """A program without them has neither a sort nor a loop nor a branch; filters have loops, in branches."""

    def written(numbers):
        run = partial(sample, vocabulary_first=vocabulary_first)
        return str(jax.make_jaxpr(run)(jnp.zeros((2, 300)), jnp.zeros(2), numbers))

    for options, kinds in (
        ({}, []),
        ({"top_p": 0.5, "temperature": 0.0}, []),
        ({"top_p": 0.5}, ["cond", "scan"]),
    ):
        found = written(SamplingNumbers.alike(2, **options))
        assert [kind for kind in ("cond", "scan", "while", "sort") if f" {kind}[" in found] == kinds


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"got \(1, 2\) and \(2,\)"):
        draw([[0.0, 1.0]], [0.5, 0.5])


def test_uniforms_depend_on_seed_step_sequence_and_position_alone():
    ids, positions = np.array([5, 9, 5, 70_000]), np.array([0, 0, 3, 11])
    together = np.asarray(token_uniforms(1, 2, ids, positions))
    for row, value in enumerate(together):
        alone = token_uniforms(1, 2, ids[row : row + 1], positions[row : row + 1])
        assert alone[0] == value
    reverse = token_uniforms(1, 2, ids[::-1], positions[::-1])
    np.testing.assert_array_equal(reverse, together[::-1])
    np.testing.assert_array_equal(jax.jit(token_uniforms)(1, 2, ids, positions), together)


def test_uniforms_differ_where_anything_differs():
    one = np.array([1])
    values = [
        token_uniforms(*arguments)[0]
        for arguments in [
            (0, 0, one, one),
            (1, 0, one, one),
            (0, 1, one, one),
            (0, 0, one + 1, one),
            (0, 0, one, one + 1),
        ]
    ]
    assert len({float(v) for v in values}) == 5


def test_uniforms_are_uniform():
    ids, positions = (axis.ravel() for axis in np.meshgrid(np.arange(100), np.arange(100)))
    values = np.asarray(token_uniforms(0, 0, ids, positions))
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("options", [*FILTERS, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize(
    "vocab", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 384, 512)), 700]
)
def test_the_vocabulary_first_gives_the_same_tokens(options, vocab):
    """In blocks that divide the vocabulary (384: of 128 words) and in blocks that do not."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(64, vocab)) * 3
    logits[:, rng.random(vocab) < 0.2] = -np.inf
    logits[:, 0] = 1.0
    uniforms = rng.random(64)
    expected, logprobs = draw(logits, uniforms, **options)
    tokens, same = draw(logits, uniforms, vocabulary_first=True, **options)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(same, logprobs, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_show_with_the_vocabulary_first_too(bad):
    tokens, logprobs = draw([[0.0, bad, 1.0]], [0.5], vocabulary_first=True)
    assert 0 <= tokens[0] < 3
    assert np.isnan(logprobs[0])


def rows_of(options):
    """The numbers of rows with these options."""
    numbers = SamplingNumbers.alike(len(options))
    for place, row in enumerate(options):
        numbers = numbers.put(place, SamplingNumbers.alike(1, **row))
    return numbers


@pytest.mark.parametrize("vocabulary_first", [False, True])
@pytest.mark.parametrize("vocab", [pytest.param(1, marks=pytest.mark.slow), 384, 700])
def test_rows_with_parameters_of_their_own_are_sampled_as_if_alone(vocab, vocabulary_first):
    """Each row among rows of all other kinds."""
    kinds = [{}, {"temperature": 0.0}, *FILTERS, {"temperature": 0.0, "top_k": 3}]
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(8 * len(kinds), vocab)) * 3).astype(np.float32)
    logits[:, rng.random(vocab) < 0.2] = -np.inf
    logits[:, 0] = 1.0
    uniforms = rng.random(len(logits)).astype(np.float32)
    options = [kinds[row % len(kinds)] for row in range(len(logits))]
    tokens, logprobs = compiled_sample(logits, uniforms, rows_of(options), vocabulary_first=vocabulary_first)
    for row, option in enumerate(options):
        token, logprob = draw(logits[row : row + 1], uniforms[row : row + 1], **option)
        assert tokens[row] == token[0], option
        np.testing.assert_allclose(logprobs[row], logprob[0], atol=2e-6)


@pytest.mark.parametrize("vocab", [5, 700])
def test_top_k_of_each_row_gives_the_distribution_itself(vocab):
    logits = np.round(np.random.default_rng(vocab).normal(size=vocab) * 2, 1).astype(np.float32)  # with ties
    for top_k in (1, 3, vocab, vocab + 9):
        uniforms = ((np.arange(1024) + 0.5) / 1024).astype(np.float32)
        tokens, _ = draws(logits, uniforms, top_k=top_k)
        expected = expected_probs(logits.astype(np.float64), top_k=min(top_k, vocab))
        assert np.abs(np.bincount(tokens, minlength=vocab) - expected * 1024).max() < 1.01
