"""Words that are listed for each scored token, against the log-probabilities of one target at a time."""

from dataclasses import replace

import jax
import numpy as np

from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_columns, predict_tokens
from quatrain.forward.specs import ListedSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.ops.tokens import LISTED_WORDS, TokenLoss
from quatrain.ops.top_words import NO_WORD
from quatrain.parallel.mesh import one_device
from quatrain.update.gradient import sum_gradients

PACKED = MicroBatchPlanner(max_tokens=48, share_prompts=True)


def first_word(tokens):
    return TokenLoss(tokens.listed[..., 0] + 2 * tokens.listed[..., 2])


def target(tokens):
    return TokenLoss(3 * tokens.logprobs)


def test_listed_words_are_predicted_and_trained_as_targets_are(make_batch, small_arch, small_params):
    """Of the words [target, another, target again, none] in packed micro-batches, of which the last entries
    of each list are padding."""
    table = TokenTable.of(make_batch(3).rollouts)
    other = (table.input_ids + 1) % small_arch.vocab_size
    words = np.stack([table.input_ids, other, table.input_ids, np.full_like(other, NO_WORD)], axis=-1)
    policy = PolicySpec(small_arch, temperature=0.9)
    model = policy.extended(ListedSpec)
    given = {LISTED_WORDS: words.astype(np.int32), "weights": table.completion_mask.astype(np.float32)}
    listed = table.with_columns(**given)
    (found,) = predict_columns(small_params, listed, model=model, planner=PACKED)
    own, others = (
        predict_tokens(small_params, replace(table, targets=targets), model=policy, planner=PACKED)
        for targets in (table.input_ids, other)
    )
    np.testing.assert_allclose(found, np.stack([own, others, own, 0 * own], axis=-1), rtol=1e-5, atol=1e-6)
    assert (others[table.completion_mask] < -0.1).all()

    def gradient(model, objective, table):
        batches = (batch for _, batch in micro_batches(table, PACKED, one_device()))
        return sum_gradients(small_params, batches, model=model, objective=objective)

    ours, theirs = gradient(model, first_word, listed), gradient(policy, target, listed)
    np.testing.assert_allclose(ours.stats["sum"]["loss"], theirs.stats["sum"]["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours.total), jax.tree.leaves(theirs.total), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))
