import json

import pytest

from quatrain.run.best import Best, best_step


def noted(tmp_path, mode, *values):
    best = Best(tmp_path, "eval/reward", mode)
    return best, [best.note(step, {"eval/reward": value}) for step, value in enumerate(values)]


def test_the_first_of_the_best_values_after_step_0_is_kept(tmp_path):
    best, better = noted(tmp_path, "max", 9.0, 1.0, 0.5, 2.0, 2.0)
    assert better == [False, True, False, True, False]
    assert json.loads((tmp_path / "best.json").read_text()) == best.found
    assert (best_step(tmp_path), best.found["value"]) == (3, 2.0)
    assert str(best) == "best eval/reward: 2, in the checkpoint of step 3"


def test_the_smallest_value_may_be_the_best(tmp_path):
    assert noted(tmp_path, "min", 0.0, 1.0, 0.5, 2.0)[1] == [False, True, True, False]


def test_a_metric_that_is_missing(tmp_path, caplog):
    best = Best(tmp_path, "eval/acc", "max")
    assert not best.note(1, {"eval/a": 1.0})
    assert "the evaluation of step 1 has no finite eval/acc" in caplog.text
    assert best.note(2, {"eval/acc": 0.0})
    assert not best.note(3, {"eval/a": 1.0})
    assert "the evaluation of step 3 has no finite eval/acc" in caplog.text


@pytest.mark.parametrize(
    ("step", "checkpoints", "saved", "found"),
    [
        (4, [3, 4], 1, 3),  # the file's
        (2, [1, 2], 1, 1),  # the file knows of a step that is gone
        (2, [1, 2, 3], 1, 1),  # the same, whatever checkpoints there are
        (4, [1, 4], 1, 1),  # the file's checkpoint was not completed
        (2, [2], None, None),
        # The file is of the last time that the run was on this machine, and checkpoints are elsewhere. An
        # older best one would be taken, and the best one would lose its place beside the newest.
        (9, [3, 8, 9], 8, 8),
    ],
)
def test_a_resumed_run_goes_back(tmp_path, step, checkpoints, saved, found):
    """Catches a best checkpoint that is gone, of another line of steps, or older than what the run knew."""
    noted(tmp_path, "max", 0.0, 1.0, 0.5, 2.0)
    best = Best(tmp_path, "eval/reward", "max")
    host = saved and {"metric": "eval/reward", "mode": "max", "step": saved, "value": 1.0}
    best.restore(host, step, checkpoints)
    assert (best.found and best.found["step"]) == found
    assert (tmp_path / "best.json").exists() == (found is not None)


def test_what_was_found_for_another_metric_does_not_count(tmp_path):
    noted(tmp_path, "max", 0.0, 1.0)
    best = Best(tmp_path, "eval/reward", "min")
    best.restore(None, 1, [1])
    assert best.found is None


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "best.json").write_text('{"metric": "a", "mode": "max", "step": -1, "value": 1.0}')
    with pytest.raises(ValueError, match=r"best\.json: step .*it is damaged; remove it"):
        best_step(tmp_path)


def test_a_best_step_without_a_checkpoint_is_withdrawn(tmp_path):
    best = Best(tmp_path, "eval/reward", "max")
    assert best.note(1, {"eval/reward": 0.5})
    best.withdraw()
    assert best.found is None
    assert not (tmp_path / "best.json").exists()
    assert best.note(2, {"eval/reward": 0.4})
    assert best.note(3, {"eval/reward": 0.6})
    best.withdraw()
    assert (best.found["step"], best_step(tmp_path)) == (2, 2)
