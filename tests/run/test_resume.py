"""What must agree when a run is resumed, and what may change, without a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from quatrain.config.schema import Config
from quatrain.run.resume import Identity, check_prompts, check_steps, differing

DATA = {"the prompts": "0a", "the tokens of the prompts": "1b", "the column `answer`": "2c"}


@pytest.fixture
def identity(tmp_path):
    def make(num_prompts=10, digests=DATA, **sections):
        folder = SimpleNamespace(path=tmp_path, reference=tmp_path / "reference")
        return Identity(Config(**sections), folder, num_prompts, digests, frozen={}, base_form=None)

    return make


def test_a_run_of_the_same_settings_goes_on(identity):
    saved = identity().to_save()
    identity().check(saved)
    identity(run={"steps": 999}, optimizer={"learning_rate": 0.5}).check(saved)  # these may change


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seed": 1}, r"seed of a resumed run must not change: .* has 0, got 1; set seed back"),
        ({"data": {"batch_size": 8}}, r"data.batch_size of a resumed run must not change: .* has 16, got 8"),
        ({"rollout": {"n": 4}}, r"rollout.n of a resumed run must not change: .* has 8, got 4"),
        ({"optimizer": {"state_dtype": "bfloat16"}}, r"optimizer.state_dtype .* has float32, got bfloat16"),
        ({"update": {"kl_coef": 0.1}}, r"update.kl_coef 0.1 only if it was started with a reference"),
    ],
)
def test_what_decides_the_weights_must_not_change(identity, sections, message):
    with pytest.raises(ValueError, match=message):
        identity(**sections).check(identity().to_save())


def test_a_key_that_an_older_checkpoint_does_not_know_had_its_default(identity):
    saved = identity().to_save()
    del saved["config"]["rollout.n"]
    identity().check(saved)
    with pytest.raises(ValueError, match=r"rollout.n of a resumed run must not change: .* has 8, got 4"):
        identity(rollout={"n": 4}).check(saved)


@pytest.mark.parametrize(
    ("num_prompts", "data", "message"),
    [
        (9, DATA, r"had 10 prompts that were not skipped, and has 9"),
        (10, DATA | {"the prompts": "ff"}, r"as many rows as before, and the prompts differ"),
        (10, DATA | {"the column `hint`": "3d"}, r"and the column `hint` differ"),
        (10, {k: v for k, v in DATA.items() if "answer" not in k}, r"and the column `answer` differ"),
    ],
)
def test_the_rows_of_the_data_must_not_change(identity, num_prompts, data, message):
    saved = identity().to_save()
    with pytest.raises(ValueError, match=message):
        identity(num_prompts, data).check(saved)


def test_a_checkpoint_without_digests_says_nothing_of_the_rows(identity):
    saved = identity().to_save()
    del saved["data"]
    check_prompts(Config(), 10, {"the prompts": "ff"}, saved)


def test_a_run_may_end_at_its_newest_checkpoint_and_not_before():
    check_steps(Config(), 4, 4, Path("run"))
    check_steps(Config(), 5, 4, Path("run"))
    with pytest.raises(ValueError, match="run has one of step 4, got 3 steps"):
        check_steps(Config(), 3, 4, Path("run"))


def test_what_differs_between_digests():
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == ["b", "c", "d"]
    assert differing(DATA, DATA) == []
