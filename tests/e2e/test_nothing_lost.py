"""Runs whose checkpoints are damaged, whose weights are ruined, and whose disk is full."""

import pytest
from resumed_runs import killed_copy
from runs import small_run, steady_metrics

from quatrain.loop.train import train
from quatrain.run.checkpoint import Checkpointer, DamagedCheckpoint, NonFiniteState, SaveFailed
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")
OPTIONS = (
    "checkpoint.every_steps=1",
    "checkpoint.keep=4",
    "eval.every_steps=0",
    "sft.steps=0",
    "run.steps=3",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of three steps, with a checkpoint of each."""
    return train(small_run(tmp_path_factory.mktemp("runs"), "whole", *OPTIONS)).run


def damage_arrays(folder):
    """Other numbers of the same form, as a disk that flips a bit leaves them."""
    file = max((folder / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_and_its_step_trained_again(whole, tmp_path):
    run = killed_copy(whole, tmp_path, 2)
    damage_arrays(run / "checkpoints" / "2")
    train(small_run(tmp_path, "whole", *OPTIONS), resume="whole")
    assert steady_metrics(run) == steady_metrics(whole)
    weights = [each / "final" / "model.safetensors" for each in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [path.name for path in (run / "checkpoints.damaged").iterdir()] == ["2"]
    log = (run / "run.log").read_text()
    assert "the checkpoint of step 2" in log
    assert "is damaged" in log
    assert "the checkpoint of step 1 is used" in log
    assert "Traceback" not in log.split("resuming", 1)[1]


def test_a_damaged_reference_ends_the_resume_with_one_message(whole, tmp_path):
    damage_arrays(killed_copy(whole, tmp_path, 2) / "reference" / "0")
    with pytest.raises(DamagedCheckpoint, match=r"reference is damaged.*; no other checkpoint is left"):
        train(small_run(tmp_path, "whole", *OPTIONS), resume="whole")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_ruined_state_does_not_displace_a_good_one(tmp_path):
    """The learning rate makes parameters infinite in the first step."""
    options = ("optimizer.learning_rate=1e39", "optimizer.warmup_steps=0")
    message = (
        r"step 1 is not saved: params.* have numbers that are not finite; lower optimizer\.learning_rate"
    )
    with pytest.raises(NonFiniteState, match=message):
        train(small_run(tmp_path, "ruined", *OPTIONS, *options))
    assert not (tmp_path / "ruined" / "final").exists()
    assert Checkpointer(tmp_path / "ruined" / "checkpoints").steps() == []


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_weights_that_a_warm_start_ruins_are_not_trained(tmp_path):
    ruin = ("sft.steps=1", "sft.learning_rate=1e39", "sft.warmup_steps=0")
    with pytest.raises(ValueError, match=r"must leave weights that are finite; after 1 steps .* 1e\+39"):
        train(small_run(tmp_path, "ruined", *ruin))
    assert not (tmp_path / "ruined" / "final").exists()


def test_a_disk_that_is_full_for_one_checkpoint_costs_nothing_else(whole, tmp_path, monkeypatch):
    plain_wait, failed = Checkpointer.wait, []

    def full(self):
        plain_wait(self)
        if self.directory.name == "checkpoints" and self.latest_step() == 2 and not failed:
            failed.append(2)
            raise SaveFailed("the checkpoint of step 2 cannot be written")

    monkeypatch.setattr(Checkpointer, "wait", full)
    run = train(small_run(tmp_path, "full", *OPTIONS)).run
    log = (run / "run.log").read_text()
    assert log.count("cannot be written; the run goes on; its newest checkpoint is of step 2") == 1
    assert (run / "final" / "model.safetensors").read_bytes() == (
        whole / "final" / "model.safetensors"
    ).read_bytes()
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]
