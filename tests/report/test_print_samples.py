import io

import pytest
from page_runs import episode_sample, make_run, sample, tool_turns, turn, write_rows
from rich.console import Console

from quatrain.report.print_samples import print_samples


def printed(folder, **options):
    out = io.StringIO()
    print_samples(folder, Console(file=out, width=100), **options)
    return out.getvalue()


def test_a_step_is_printed_with_its_groups_by_reward(tmp_path):
    text = printed(make_run(tmp_path), step=2)
    assert "prompt 0" in text
    assert "answer: 42" in text
    assert 'level: {"deep": [1, null]}' in text
    assert text.index("window.broken") < text.index("needle2")
    assert "reward 0.6  correct 0  format none  advantage +0.1  wrong  length  7 tokens" in text
    assert "prompt 2  no signal" in text
    assert text.endswith("step 2 of first: 6 completions of 3 prompts\n")


def test_the_last_step_is_the_default(tmp_path):
    assert "needle3" in printed(make_run(tmp_path))


def test_evaluation_completions(tmp_path):
    text = printed(make_run(tmp_path), step=0, evaluation=True)
    assert text.endswith("step 0 of first: 3 completions of 3 prompts\n")


def test_a_completion_cannot_control_the_terminal(tmp_path):
    path = tmp_path / "run" / "samples" / "step_000001.jsonl"
    write_rows(path, [sample(0, 1.0, completion="\x1b]0;title\x07 [red]markup[/] \x9b2J \u202e \ud83d")])
    text = printed(tmp_path / "run")
    assert "␛]0;title␇ [red]markup[/] �2J � �" in text


def test_half_a_line_is_counted(tmp_path):
    folder = make_run(tmp_path)
    with (folder / "samples" / "step_000003.jsonl").open("a") as file:
        file.write('{"completion": "x')
    assert "1 damaged line" in printed(folder)


def test_a_step_without_samples_names_the_nearest(tmp_path):
    folder = make_run(tmp_path, steps=9)
    with pytest.raises(ValueError, match="got 12; 9 steps from 1 to 9 have them, the nearest are 6, 7, 8, 9"):
        printed(folder, step=12)
    with pytest.raises(ValueError, match="there are no samples in"):
        printed(tmp_path)


def printed_episode(tmp_path, turns, terminal=False, **more):
    write_rows(tmp_path / "run" / "samples" / "step_000001.jsonl", [episode_sample(0, 1.0, turns, **more)])
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=terminal, color_system=None)
    print_samples(tmp_path / "run", console)
    return out.getvalue()


def test_an_episode_is_printed_turn_by_turn(tmp_path):
    text = printed_episode(tmp_path, tool_turns(), finish_reason="turns")
    assert "environment 1.25  advantage +0.5  right  out of turns  2 turns  7 tokens" in text
    assert text.count("question 0") == 1
    assert (
        "assistant (reward 0.25)\n│ Let me multiply.\n│ <call>mul(6, 7)</call>\n"
        "tool mul\n│ 42\nassistant (reward 1)\n│ It is 42.\n" in text
    )


def test_the_reward_of_the_environment_is_printed_once(tmp_path):
    text = printed_episode(tmp_path, tool_turns(), rewards={"environment": 1.25})
    assert text.count("environment 1.25") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_tool_cannot_forge_a_turn_or_control_the_terminal(tmp_path, terminal):
    hostile = "x" * 38 + "\nassistant (reward 9)\n\n" + "y" * 60 + "\x1b[2J"
    text = printed_episode(tmp_path, tool_turns(hostile), terminal)
    assert "\n│ assistant (reward 9)\n│ \n│ yyy" in text
    assert "\nassistant (reward 9)" not in text
    assert "\x1b[2J" not in text
    assert "␛[2J" in text
    assert not any(line.startswith("y") for line in text.splitlines())


def test_an_episode_without_a_turn_says_so(tmp_path):
    assert "environment error  0 turns" in printed_episode(tmp_path, [], finish_reason="error")


def test_a_flood_of_lines_is_printed_whole(tmp_path):
    text = printed_episode(tmp_path, [turn("tool", "\n" * 20_000)], terminal=True)
    assert text.count("\n│") == 20_001
