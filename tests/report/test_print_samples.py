import io

import pytest
from page_runs import make_run, sample, write_rows
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
