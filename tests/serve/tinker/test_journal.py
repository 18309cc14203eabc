"""The figures of a training client: the numbers worked out by hand, and the page that is made of them."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from quatrain.loop.journals import ClientRows
from quatrain.report.page import Page
from quatrain.report.page_data import run_data
from quatrain.run.catalogue import unknown_metrics
from quatrain.serve.tinker.calls import AdamNumbers, Datum, LoraRequest, Pass, Passed
from quatrain.serve.tinker.journal import Journal
from quatrain.serve.tinker.store import Store

ADAM = AdamNumbers(learning_rate=0.25)


class Kept:
    """Rows in memory."""

    def __init__(self):
        self.rows, self.is_closed = [], False

    def write(self, step, numbers):
        self.rows.append((step, dict(numbers)))

    def close(self):
        self.is_closed = True


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def journal(kept):
    return Journal(kept)


def datum(targets, **columns):
    return Datum(
        np.zeros(len(targets), np.int32),
        np.asarray(targets, np.int32),
        {name: np.asarray(values, np.float32) for name, values in columns.items()},
    )


def of_ratios(journal, logprobs, sampled, advantages, loss, clipped, **options):
    asked = Pass((datum([5] * len(sampled), logprobs=sampled, advantages=advantages),), "ppo", **options)
    found = {"loss:sum": loss, "clip_fraction:mean": clipped}
    journal.passed(asked, Passed([np.asarray(logprobs, np.float32)], found))


def test_the_figures_of_a_step_are_over_all_its_calls(journal, kept):
    """Two chunks of 2 and 1 counted rows: means are over the 3 rows, not over the chunks; rows without an
    advantage count for nothing, whatever their ratio."""
    of_ratios(journal, [-1.0, -2.0, -9.0], [-1.5, -2.0, -1.0], [1.0, -1.0, 0.0], loss=6.0, clipped=0.5)
    of_ratios(journal, [-1.0], [-0.75], [2.0], loss=-1.5, clipped=1.0)
    journal.stepped(1, ADAM, {"grad_norm:mean": 3.0})
    ((step, row),) = kept.rows
    ratios = np.exp([0.5, 0.0, -0.25])
    assert step == 1
    assert row == {
        "loss": pytest.approx(1.5),
        "batch/tokens": 4.0,
        "update/clip_fraction": pytest.approx(2 / 3),
        "update/ratio_mean": pytest.approx(ratios.mean()),
        "update/ratio_max": pytest.approx(ratios.max()),
        "update/behaviour_kl": pytest.approx((ratios - 1 - np.array([0.5, 0.0, -0.25])).mean()),
        "rollout/logprob_diff_mean": pytest.approx(0.25),
        "rollout/logprob_diff_max": pytest.approx(0.5),
        "update/learning_rate": 0.25,
        "update/grad_norm": 3.0,
    }
    assert unknown_metrics(row) == []


def test_rows_outside_of_the_mask_of_a_sequence_are_not_counted(journal, kept):
    """Catches figures over rows that gspo leaves out: they have an advantage and no loss."""
    inputs = {"logprobs": [-1.5, -2.0, -9.0], "advantages": [1.0, 1.0, 1.0]}
    of_mask = datum([5] * 3, sequence_ratio_mask=[1.0, 1.0, 0.0], **inputs)
    found = {"loss:sum": 6.0, "clip_fraction:mean": 0.5}
    journal.passed(Pass((of_mask,), "gspo"), Passed([np.array([-1.0, -2.0, -1.0], np.float32)], found))
    journal.stepped(1, ADAM, {})
    ((_, row),) = kept.rows
    assert (row["loss"], row["update/clip_fraction"], row["rollout/logprob_diff_max"]) == (3.0, 0.5, 0.5)


def test_a_loss_without_a_sampler_has_no_ratio(journal, kept):
    """Weights of 0 and targets of -1 make no row; a row of two targets is one; without weights all count."""
    data = (datum([[3, 4], [5, -1], [6, -1]], weights=[[1, 1], [0, 1], [2, 0]]), datum([1, 2]))
    found = Passed([np.zeros((3, 2), np.float32), np.zeros(2, np.float32)], {"loss:sum": 8.0})
    journal.passed(Pass(data, "cross_entropy"), found)
    journal.stepped(1, ADAM, {})
    assert kept.rows == [(1, {"loss": 2.0, "batch/tokens": 5.0, "update/learning_rate": 0.25})]


def test_only_what_is_stepped_with_is_in_a_row(journal, kept):
    """Neither forward alone, nor a gradient that is void, nor that of the step before."""
    of_ratios(journal, [-1.0], [-1.0], [1.0], loss=5.0, clipped=0.0, forward_only=True)
    of_ratios(journal, [-1.0], [-1.0], [1.0], loss=7.0, clipped=0.0)
    journal.void()
    of_ratios(journal, [-1.0], [-1.0], [1.0], loss=9.0, clipped=0.0)
    journal.stepped(1, ADAM, {})
    journal.stepped(2, ADAM, {})
    of_ratios(journal, [-1.0], [-1.0], [0.0], loss=0.0, clipped=0.0)
    journal.stepped(3, ADAM, {})
    assert [row.get("loss") for _, row in kept.rows] == [9.0, None, None]
    journal.close()
    assert kept.is_closed


def test_steps_go_on_when_an_earlier_checkpoint_is_loaded(journal, kept):
    for step in (6, 7, 3, 4):
        journal.stepped(step, ADAM, {})
    assert [step for step, _ in kept.rows] == [6, 7, 8, 9]


def test_a_reward_that_a_program_notes_is_that_of_its_step(journal, kept):
    journal.stepped(4, ADAM, {})
    for noted in (None, {}, {"reward": "none yet"}, {"reward": "0.75", "loop": "4"}):
        journal.saved(noted)
    assert kept.rows[1:] == [(4, {"reward/mean": 0.75})]


def test_a_disk_that_is_full_is_told_once_and_training_goes_on(journal, kept, caplog):
    kept.write = lambda step, numbers: (_ for _ in ()).throw(OSError("No space left on device"))
    with caplog.at_level(logging.WARNING):
        journal.stepped(1, ADAM, {})
        journal.stepped(2, ADAM, {})
    assert [record.getMessage() for record in caplog.records] == [
        "figures of a training client are not written: No space left on device"
    ]


def test_the_run_page_shows_a_training_client(tmp_path, small_arch):
    """Its curves, its model and its adapters; it runs while its client does, and has no number of steps."""
    base = SimpleNamespace(name="/served", arch=small_arch, fingerprint="0" * 16)
    held = Store(tmp_path / "state", base, {"seed": 0, "model": {"path": "/models/served"}})
    held.note_run("o", "s:train:0", LoraRequest(4))
    folder = held.run_folder("s:train:0")
    assert run_data(folder)["state"] == "finished"
    journal = Journal(ClientRows(folder))
    for step in (1, 2):
        of_ratios(journal, [-1.0], [-1.5], [1.0], loss=float(step), clipped=0.0)
        journal.stepped(step, ADAM, {"grad_norm:mean": np.nan if step == 2 else 1.0})
    journal.saved({"reward": "0.5"})
    found = run_data(folder)
    assert (found["state"], found["step"], found["total_steps"]) == ("running", 2, None)
    assert found["notes"] == []
    assert found["steps"] == [1, 2]
    assert found["metrics"]["loss"] == [1.0, 2.0]
    assert found["metrics"]["reward/mean"] == [None, 0.5]
    assert found["non_finite"] == {"update/grad_norm": [2]}
    values = {row["key"]: row["value"] for row in found["config"]}
    assert values["model.path"] == "/models/served"
    assert (values["lora.rank"], values["lora.alpha"]) == (4, 32.0)
    owner = json.loads((folder / ".lock.json").read_text())
    journal.close()
    assert run_data(folder)["state"] == "finished"
    (folder / ".lock.json").write_text(json.dumps(owner | {"process": 2**22 + 1}))  # as after kill -9
    assert run_data(folder)["state"] == "not finished"
    Page([folder]).write(tmp_path / "page.html")
    assert "s_train_0" in (tmp_path / "page.html").read_text()
    held.close()
