"""Scores of given tokens are those of the forward pass over each sequence by itself."""

from functools import partial

import jax
import numpy as np
import pytest

from quatrain.config.schema import RolloutConfig
from quatrain.engine import groups, scoring
from quatrain.engine.engine import RolloutEngine
from quatrain.models.decoder import forward, logits

RNG = np.random.default_rng(3)
CONTEXT = RNG.integers(0, 290, 40).tolist()
SEQUENCES = {
    "one token": [[7]],
    "different lengths": [RNG.integers(0, 290, length).tolist() for length in (3, 1, 50, 17, 2, 33)],
    "a common beginning": [[*CONTEXT, *RNG.integers(0, 290, length).tolist()] for length in (1, 4, 2, 9)],
    "the same twice": [[*CONTEXT, 5]] * 2,
}


@pytest.fixture
def engine(small_arch, small_params, tokenizer):
    made = RolloutEngine(small_arch, RolloutConfig(), tokenizer, stop_ids=(0,), seed=1)
    made.sync_weights(small_params, 0)
    return made


@partial(jax.jit, static_argnames="arch")
def _logprobs(params, arch, ids, real):
    hidden = forward(params, arch, ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape), real).hidden
    return jax.nn.log_softmax(logits(params, arch, hidden))


def expected(arch, params, sequences):
    """Log-probabilities [T - 1, V] of what follows each token but the last, each sequence in its own row."""
    ids, real = np.zeros((2, 6, 64), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], real[row, : len(sequence)] = sequence, 1
    found = np.asarray(_logprobs(params, arch, ids, real))
    return [rows[: len(sequence) - 1] for rows, sequence in zip(found, sequences)]


@pytest.mark.parametrize("num_likeliest", [0, 3])
@pytest.mark.parametrize("name", SEQUENCES)
def test_scores_are_those_of_the_forward_pass(
    engine, small_arch, small_params, monkeypatch, name, num_likeliest
):
    monkeypatch.setattr(groups, "PREFILL_TOKENS", 64)  # several calls
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 11 * small_arch.vocab_size)  # several tiles
    sequences = SEQUENCES[name]
    found = [scores for part in engine.score(sequences, num_likeliest) for scores in part]
    assert len(found) == len(sequences)
    for ids, scores, wanted in zip(sequences, found, expected(small_arch, small_params, sequences)):
        np.testing.assert_allclose(scores.logprobs[1:], wanted[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
        assert scores.likeliest.shape == (len(ids), num_likeliest)
        best = np.take_along_axis(wanted, scores.likeliest[1:], axis=1)
        np.testing.assert_allclose(scores.likeliest_logprobs[1:], best, atol=1e-5)
        np.testing.assert_allclose(best, -np.sort(-wanted)[:, :num_likeliest], atol=1e-5)
        chosen = scores.likeliest[1:] == np.array(ids[1:])[:, None]
        assert (scores.likeliest_logprobs[1:] == scores.logprobs[1:, None])[chosen].all()


def test_listed_words_are_scored_in_the_place_of_each_token(engine, small_arch, small_params, monkeypatch):
    """The faults: words one place off, in another order, or those of another tile."""
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 11 * small_arch.vocab_size)
    [sequence] = sequences = [RNG.integers(0, 290, 33).tolist()]
    listed = RNG.integers(0, 290, (33, 3)).astype(np.int32)
    listed[::4, 1] = -1
    [[scores]] = engine.score(sequences, 0, listed)
    [wanted] = expected(small_arch, small_params, sequences)
    assert scores.listed_logprobs.shape == (33, 3)
    there = listed[1:] >= 0
    found = np.take_along_axis(wanted, np.maximum(listed[1:], 0), axis=1)
    np.testing.assert_allclose(scores.listed_logprobs[1:][there], found[there], atol=1e-5)
    np.testing.assert_allclose(scores.logprobs[1:], wanted[np.arange(32), sequence[1:]], atol=1e-5)
