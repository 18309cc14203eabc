"""The environment of docs/episodes.md plays, and trains."""

import json
from itertools import pairwise

import pytest
from runs import small_run
from test_readme import ROOT, blocks, commands

from quatrain.episodes.load_environment import load_environment
from quatrain.loop.train import train
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics

PAGE = ROOT / "docs" / "episodes.md"


@pytest.fixture
def environment(tmp_path):
    """The page's environment, in a file."""
    source, *_ = blocks(PAGE, "python")
    assert len(source.splitlines()) <= 26
    path = tmp_path / "second_chance.py"
    path.write_text(source, "utf-8")
    return f"{path}:SecondChance"


def test_the_environment_of_the_page_answers(environment):
    environments = load_environment(environment)
    assert environments.required_columns == ("answer",)
    play = environments({})
    assert play.reset({"answer": "4", "prompt": [], "completion": "?"}) is None
    for said, hint in (("3", "No, more."), ("5", "No, less.")):
        turn = play.step(f"<answer>{said}</answer>")
        assert (turn.messages[0]["content"], turn.reward, turn.done) == (hint, 0, False)
    assert play.step("four").messages[0]["content"] == "Write a number."
    for tries in (1, 2):
        play.reset({"answer": "4"})
        for _ in range(tries - 1):
            play.step("<answer>3</answer>")
        turn = play.step("<think>3+1=4</think>\n<answer>4</answer>")
        assert (turn.reward, turn.done) == (1 / tries, True)


@pytest.mark.slow
@pytest.mark.usefixtures("narrow_model")
def test_the_command_of_the_page_trains_and_leaves_turns(environment, tmp_path):
    words = next(words for words in commands(PAGE) if "rollout.max_turns=2" in words)
    settings = [value for flag, value in pairwise(words) if flag == "--set"]
    assert settings[0] == "rollout.environment=second_chance.py:SecondChance"
    settings[0] = f"rollout.environment={environment}"
    run = train(small_run(tmp_path, "page", *settings, "sft.steps=20", "run.steps=2")).run
    rows = read_metrics(run / "metrics.jsonl")
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})
    assert {"episode/turns/mean", "length/environment/max", "time/environment_wait_s"} <= rows[-1].keys()
    paths = sorted((run / "samples").glob("step_*"))
    samples = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    roles = {tuple(turn["role"] for turn in sample["turns"]) for sample in samples}
    assert roles <= {("assistant",), ("assistant", "user"), ("assistant", "user", "assistant"),
                     ("assistant", "user", "assistant", "user")}  # fmt: skip
    assert all(sample["rewards"] == {"environment": sample["environment_reward"]} for sample in samples)
