"""Every data set of the real reasoning-gym: the gold answer through the reward function scores as in it."""

import pytest
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.data.rows import read_rows
from quatrain.reward.scorer import RewardScorer

WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets whose entries have no answer, because many are right; the text None scores 0 or 0.01."""


@pytest.mark.slow
def test_the_gold_answer_of_each_data_set_is_right():
    factory = pytest.importorskip("reasoning_gym.factory", reason="needs the extra reasoning-gym")
    names = sorted(factory.DATASETS.keys() - {"composite"})
    rows = {name: read_rows(f"reasoning_gym:{name}?size=2&seed=1") for name in names}
    scorer = RewardScorer(RewardConfig(functions={"reasoning_gym": 1.0}, workers=1, timeout_s=120))
    scores = {}
    for name, each in rows.items():
        said = [f"<think>x</think>\n<answer>{row['answer']}</answer>" for row in each]
        batch = scorer.score(make_rollouts(said, rg=[row["rg"] for row in each]))
        assert batch.metrics["reward/reasoning_gym/errors"].value == 0, name
        scores[name] = batch.rewards.tolist()
    scorer.close()
    assert len(scores) == 105
    assert {name for name, row in rows.items() if row[0]["answer"] is None} == WITHOUT_AN_ANSWER
    assert {name for name, score in scores.items() if max(score) < 0.02} == WITHOUT_AN_ANSWER
    assert all(score == [1, 1] for name, score in scores.items() if name not in WITHOUT_AN_ANSWER)
