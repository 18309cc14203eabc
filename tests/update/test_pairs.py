"""Tables of pairs and judged answers, what is logged of them, and a user's own loss."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from quatrain.config.schema import Config
from quatrain.config.sections.given import DPOConfig, RMConfig
from quatrain.types.batches import Judged, Pair
from quatrain.update.coupled import check_coupled
from quatrain.update.preferences import (
    Judgement,
    Preference,
    RewardPairs,
    coupled_of,
    judged_table,
    other_answers,
    pair_table,
    reads_reference,
)

DOCS = Path(__file__).parents[2] / "docs"


def ids(*words):
    return np.array(words, np.int32)


def pairs(*sources):
    """Two pairs: prompts of 2 and 1 tokens, better answers of 1 and 3, others of 2 and 1."""
    first, second = sources or ("", "")
    return [
        Pair(ids(1, 2), ids(3), ids(4, 5), 1.5, 0, first),
        Pair(ids(6), ids(7, 8, 9), ids(9), None, 1, second),
    ]


def predicted(table, sums):
    """Predictions whose sums over the scored tokens of each row are `sums`, all in the first of them."""
    found = np.zeros(table.completion_mask.shape)
    found[np.arange(len(table)), table.completion_mask.argmax(axis=1)] = sums
    return found


def results(found):
    return {name: metric.result() for name, metric in found.metrics.items()}


def with_reference(table, reference):
    of_rows = {**table.of_rows, "reference": np.array(reference, float)}
    return dataclasses.replace(table, of_rows=of_rows)


def test_a_table_has_the_better_answers_and_then_the_others():
    table = pair_table(pairs())
    assert table.input_ids.tolist() == [[1, 2, 3, 0], [6, 7, 8, 9], [1, 2, 4, 5], [6, 9, 0, 0]]
    assert table.lengths.tolist() == [3, 4, 4, 2]
    assert table.completion_mask.astype(int).tolist() == [
        [0, 0, 1, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 1, 0, 0],
    ]
    assert table.group_ids.tolist() == [0, 1, 0, 1]  # a pair's prompt is computed once
    assert table.of_rows["margin"].tolist() == [1.5, 0, 1.5, 0]
    assert table.of_rows["reference"].tolist() == [0, 0, 0, 0]


def test_a_reward_model_scores_the_last_token_that_is_not_padding():
    """As where the model is used: an end token that is the padding token is not scored."""
    table = pair_table(pairs(), scored_at_end=True, pad_token_id=9)
    assert table.completion_mask.argmax(axis=1).tolist() == [3, 3, 4, 1]
    assert table.completion_mask.sum(axis=1).tolist() == [1, 1, 1, 1]


def test_slopes_stand_on_the_scored_tokens_of_their_sequences():
    """Mean over the pairs, Δ = 2 and -4: a slope of a sum would be twice as large."""
    table = with_reference(pair_table(pairs()), [-3, -4, -5, -6])
    found = Preference.of(DPOConfig(beta=0.5))(predicted(table, [-2, -7, -6, -5]), table)
    below = 1 / (1 + np.exp([1.0, -2.0]))  # σ(-βΔ)
    slopes = 0.5 / 2 * np.array([-below[0], -below[1], below[0], below[1]])
    np.testing.assert_allclose(found.slopes, np.where(table.completion_mask, slopes[:, None], 0))
    assert found.loss == pytest.approx(np.log1p(np.exp([-1.0, 2.0])).mean())
    check_coupled(found, table)


def test_metrics_of_preferences():
    table = with_reference(pair_table(pairs()), [-3, -4, -5, -6])
    found = Preference.of(DPOConfig(beta=0.5))(predicted(table, [-2, -7, -6, -5]), table)
    assert results(found) == pytest.approx(
        {
            "dpo/loss": found.loss,
            "dpo/accuracy": 0.5,
            "dpo/margin": 0.5 * (2 - 4) / 2,
            "dpo/reward_chosen": 0.5 * (1 - 3) / 2,
            "dpo/reward_rejected": 0.5 * (-1 + 1) / 2,
            "dpo/logprob_chosen": -4.5,
            "dpo/logprob_rejected": -5.5,
            "dpo/kl_chosen": (1 - 3) / 4,  # a token
        }
    )


def test_without_a_reference_rewards_are_mean_logprobs():
    table = pair_table(pairs())
    found = results(
        Preference.of(DPOConfig(loss="simpo", beta=2.0))(predicted(table, [-2, -9, -6, -3]), table)
    )
    assert found["dpo/reward_chosen"] == pytest.approx(2 * (-2 - 3) / 2)
    assert found["dpo/reward_rejected"] == pytest.approx(2 * (-3 - 3) / 2)
    assert found["dpo/accuracy"] == 0.75  # a tie counts half
    assert "dpo/kl_chosen" not in found


def test_each_of_several_sources_has_its_loss_and_accuracy():
    table = pair_table(pairs("easy", "hard"))
    found = results(Preference.of(DPOConfig(beta=0.5))(predicted(table, [-2, -7, -6, -5]), table))
    assert (found["dpo/accuracy/easy"], found["dpo/accuracy/hard"]) == (1, 0)
    assert found["dpo/loss"] == pytest.approx((found["dpo/loss/easy"] + found["dpo/loss/hard"]) / 2)
    # Also where a part of an evaluation has rows of one alone; where there is one data set, it has no name.
    alone, unnamed = pair_table(pairs("easy", "easy")), pair_table(pairs())
    assert results(Preference.of(DPOConfig())(predicted(alone, [0] * 4), alone))["dpo/accuracy/easy"] == 0.5
    found = results(Preference.of(DPOConfig())(predicted(unnamed, [0] * 4), unnamed))
    assert not [name for name in found if name.count("/") > 1]


def test_a_reward_model_is_trained_on_scores_margins_and_their_centre():
    table = pair_table(pairs(), scored_at_end=True)
    found = RewardPairs.of(RMConfig(center=0.1))(predicted(table, [2.0, -1.0, 0.0, 3.0]), table)
    losses = np.log1p(np.exp([-0.5, 4.0])) + 0.1 * np.array([4.0, 4.0])
    assert found.loss == pytest.approx(losses.mean())
    assert results(found) == pytest.approx(
        {
            "rm/loss": losses.mean(),
            "rm/accuracy": 0.5,
            "rm/margin": -1.0,
            "rm/reward_mean": 1.0,
            "rm/reward_min": -1.0,
            "rm/reward_max": 3.0,
            "rm/reward_std": np.std([2, -1, 0, 3]),
        }
    )


def judged(*prompts):
    """Answers of 1, 2, 3, … tokens to prompts of a word each, from row 10 on."""
    return [
        Judged(ids(word), ids(*range(20, 21 + place)), place % 2 == 0, 10 + place)
        for place, word in enumerate(prompts)
    ]


def test_prompts_are_paired_with_the_answer_of_the_nearest_row_before_them_with_another_prompt(caplog):
    """Two answers to one prompt are neighbours where pairs are read as single answers."""
    found = other_answers(judged(1, 1, 2, 2, 3))
    assert {number: len(answer) for number, answer in found.items()} == {10: 5, 11: 5, 12: 2, 13: 2, 14: 4}
    assert not caplog.text
    assert [len(answer) for answer in other_answers(judged(1, 1, 1)).values()] == [3, 1, 2]
    assert len(other_answers(judged(1))) == 1


def test_other_answers_are_not_longer_than_the_longest_row_allows(caplog):
    """Else a sequence of the second half would not fit where all rows do."""
    rows = [Judged(ids(1, 2, 3), ids(4), True, 0), Judged(ids(5), ids(6, 7, 8), True, 1)]
    assert [answer.tolist() for answer in other_answers(rows).values()] == [[6], [4]]
    assert "1 of 2 answers" in caplog.text
    assert "4 tokens" in caplog.text


def test_kto_reads_answers_to_other_prompts_without_training_on_them():
    """Log-ratios 2 and -1; the others' are 3 and 1, so the KL is 2."""
    rows = judged(1, 2)
    table = with_reference(judged_table(rows, other_answers(rows)), [-3, -4, -5, -6])
    assert table.input_ids.tolist() == [[1, 20, 0], [2, 20, 21], [1, 20, 21], [2, 20, 0]]
    config = DPOConfig(loss="kto", beta=0.5, desirable_weight=0.8, undesirable_weight=1.2)
    found = Judgement.of(config)(predicted(table, [-1, -5, -2, -5]), table)
    inside = 1 / (1 + np.exp(-0.5 * 3))
    losses = [0.8 / 2, 1.2 * (1 - inside)]
    assert found.loss == pytest.approx(np.mean(losses))
    slopes = np.array([-0.8 * 0.5 / 4, 1.2 * 0.5 * inside * (1 - inside), 0, 0]) / 2
    np.testing.assert_allclose(found.slopes, np.where(table.completion_mask, slopes[:, None], 0))
    assert results(found) == pytest.approx(
        {
            "dpo/loss": found.loss,
            "dpo/kl": 2.0,
            "dpo/reward_chosen": 1.0,
            "dpo/reward_rejected": -0.5,
            "dpo/logprob_chosen": -1.0,
            "dpo/logprob_rejected": -5.0,
        }
    )
    assert found.metrics["dpo/kl"].count == 2  # a small part of an evaluation weighs less


@pytest.mark.parametrize(
    ("task", "keys", "kind", "reference"),
    [
        ("dpo", {}, Preference, True),
        ("dpo", {"loss": "kto"}, Judgement, True),
        ("dpo", {"loss": "orpo"}, Preference, False),
        ("dpo", {"loss": "simpo"}, Preference, False),
        ("rm", {}, RewardPairs, False),
    ],
)
def test_the_objective_of_a_command(task, keys, kind, reference):
    config = Config(run={"task": task}, **{task: {"data": "rows.jsonl", **keys}})
    assert isinstance(coupled_of(config), kind)
    assert reads_reference(config) == reference


OWN = """
import numpy as np

def restated(pairs, *, beta, scale: float = 1.0):
    x = beta * ((pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected))
    slope = -beta * scale / (1 + np.exp(x))
    return scale * np.log1p(np.exp(-x)), slope, -slope

def scores(pairs, *, center):
    x = pairs.chosen - pairs.rejected - pairs.margin
    return np.log1p(np.exp(-x)), -1 / (1 + np.exp(x)), 1 / (1 + np.exp(x))

def wrong_sign(pairs):
    return pairs.rejected - pairs.chosen, np.ones_like(pairs.chosen), np.ones_like(pairs.chosen)

def one_number(pairs):
    return (pairs.rejected - pairs.chosen).sum()

def two_losses(pairs):
    return pairs.chosen[:2], pairs.chosen, pairs.chosen

def infinite(pairs):
    return pairs.chosen * np.inf, pairs.chosen, pairs.rejected

def broken(pairs):
    return pairs.logprobs

def without_pairs():
    return 0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return lambda name, **keys: DPOConfig(loss=f"{tmp_path / 'mine.py'}:{name}", **keys)


def test_a_loss_of_ones_own_is_the_built_in_one_that_it_restates(own):
    table = with_reference(pair_table(pairs()), [-3, -4, -5, -6])
    values = predicted(table, [-2, -7, -6, -5])
    ours = Preference.of(DPOConfig(beta=0.3))(values, table)
    for scale, keys in ((1, {}), (2, {"loss_args": {"scale": 2.0}})):
        theirs = Preference.of(own("restated", beta=0.3, **keys))(values, table)
        assert theirs.loss == pytest.approx(scale * ours.loss, rel=1e-6)
        np.testing.assert_allclose(theirs.slopes, scale * ours.slopes, rtol=1e-6)
        assert results(theirs)["dpo/margin"] == results(ours)["dpo/margin"]


def test_a_reward_model_may_have_a_loss_of_ones_own(own):
    table = pair_table(pairs(), scored_at_end=True)
    values = predicted(table, [2.0, -1.0, 0.0, 3.0])
    theirs = RewardPairs.of(RMConfig(loss=own("scores").loss))(values, table)
    ours = RewardPairs.of(RMConfig())(values, table)
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-6)
    np.testing.assert_allclose(theirs.slopes, ours.slopes, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "one_number",
            {},
            r"cannot be used: a loss of pairs must return three arrays .* shape \(5,\): .* a float64",
        ),
        ("two_losses", {}, r"it returned shapes \[\(2,\), \(5,\), \(5,\)\]; return PairLosses"),
        ("infinite", {}, "cannot be used: it must return finite numbers; those of losses are not"),
        ("broken", {}, "failed: AttributeError"),
        ("without_pairs", {}, r"must take the pairs as its first argument: \(pairs, \*, ...\)"),
        ("missing", {}, "has no attribute 'missing'"),
        ("restated", {"loss_args": {"gamma": 1.0}}, "takes from dpo.loss_args .*got gamma"),
        ("restated", {"loss_args": {"beta": 1.0}}, "takes it from dpo.beta; set that instead"),
        ("restated", {"loss_args": {"scale": "big"}}, "takes scale as float"),
        ("restated", {"gamma": 1.0}, "dpo.gamma has no effect for .*, which has no argument gamma without"),
    ],
)
def test_a_loss_that_cannot_be_used_is_an_error_before_anything_is_computed(own, name, keys, message):
    with pytest.raises(ValueError, match=message):
        Preference.of(own(name, **keys))


def test_the_loss_of_the_page_is_one(tmp_path, caplog):
    section = (DOCS / "library.md").read_text().partition("## A loss on preferences")[2]
    (tmp_path / "page.py").write_text(section.partition("```python")[2].partition("```")[0])
    Preference.of(DPOConfig(loss=f"{tmp_path / 'page.py'}:exponential"))
    assert not caplog.text


def test_slopes_that_are_not_those_of_the_losses_are_said(own, caplog):
    """A wrong sign trains the worse answers, and nothing else would show it."""
    with caplog.at_level(logging.WARNING):
        Preference.of(own("wrong_sign"))
    assert "with respect to pairs.chosen are [1.0, 1.0, 1.0, 1.0, 1.0]" in caplog.text
    assert "pairs.rejected" not in caplog.text
    caplog.clear()
    for loss in ("sigmoid", "ipo", "robust", "hinge", "orpo", "simpo"):
        Preference.of(DPOConfig(loss=loss))
    Preference.of(own("restated"))
    RewardPairs.of(RMConfig(center=0.1))
    assert not caplog.text
