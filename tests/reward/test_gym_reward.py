import pytest
import small_gym
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.data.rows import read_rows
from quatrain.reward.scorer import RewardScorer


@pytest.fixture
def score(tmp_path, monkeypatch):
    small_gym.install(tmp_path, monkeypatch)
    scorer = RewardScorer(RewardConfig(functions={"reasoning_gym": 1.0}, workers=1))

    def score(row, *completions):
        named = [row["rg"]] * len(completions)
        return scorer.score(make_rollouts(list(completions), rg=named))

    yield score
    scorer.close()


def test_answers_are_scored_by_entries_that_are_made_again(score):
    row = read_rows("reasoning_gym:sums?size=3&seed=1")[2]
    right = row["answer"]
    batch = score(
        row,
        right,
        f"<answer>{right}1</answer> no <answer>\n{right}\n</answer>",
        f"<answer>{right}</answer><answer>1000",
        f"<answer>1000</answer> {right}",
        "none",
        "not a number",
        "",
    )
    assert batch.rewards.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert batch.metrics["reward/reasoning_gym/errors"].value == 0
    assert batch.metrics["reward/reasoning_gym/unscored"].result() == 3 / 7


def test_what_the_policy_wrote_is_not_evaluated(score, tmp_path):
    matrix = read_rows("reasoning_gym:matrices?size=1")[0]
    mark = tmp_path / "mark"
    harm = f"[__import__('pathlib').Path({str(mark)!r}).write_text('x'), {int(matrix['answer']) - 1}]"
    right = f"[{matrix['answer']}]"
    assert score(matrix, harm, right).rewards.tolist() == [0, 1]
    formula = read_rows("reasoning_gym:countdown?size=1")[0]
    harm = f"__import__('pathlib').Path({str(mark)!r}).write_text('x') * 0 + {formula['answer']}"
    code = "+".join(f"chr({ord(letter)})" for letter in f"open({str(mark)!r}, 'w')")
    others = [f"(1).real * {formula['answer']}", f"{formula['answer']} + 0 * len(str(eval({code})))"]
    others += [other.replace("e", "ｅ") for other in others]  # the same names for Python
    right = f"1.0 * {formula['answer']}"
    assert score(formula, harm, *others, right).rewards.tolist() == [0, 0, 0, 0, 0, 1]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["unordered", "global"])
def test_entries_that_depend_on_the_order_of_sets_or_on_another_generator(score, name):
    row = read_rows(f"reasoning_gym:{name}?size=3")[2]
    assert score(row, row["answer"], "7").rewards.tolist() == [1, 0]


def test_an_entry_of_another_version_is_a_failure_and_a_row_without_one_an_abstention(score, caplog):
    row = read_rows("reasoning_gym:sums?size=1")[0]
    other = {"rg": row["rg"] | {"digest": "0" * 16}}
    assert score(other, row["answer"]).rewards.tolist() == [-1]
    assert "has another question here than in the data" in caplog.text
    abstained = score({"rg": None}, "1")
    assert abstained.metrics["reward/reasoning_gym/abstained"].value == 1


def test_the_function_needs_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'reasoning_gym' needs .* -e '\.\[reasoning-gym\]'"):
        RewardScorer(RewardConfig(functions={"reasoning_gym": 1.0}))
