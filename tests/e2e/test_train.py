"""Whole runs through the command's own functions, small enough for a test."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import SMALL, interrupted_after, small_run, steady_metrics

from quatrain.cli import main as cli
from quatrain.cluster.stop import Stopped
from quatrain.config import secrets
from quatrain.config.load import load_config
from quatrain.loop import build as build_module
from quatrain.loop.evaluate import evaluate_run, finite_numbers
from quatrain.loop.export import export
from quatrain.loop.prompts import NoSignal
from quatrain.loop.recorder import logprob_diff_warning
from quatrain.loop.train import train
from quatrain.report import progress
from quatrain.rollout.rollouts import Rollouts
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.checkpoint import Checkpointer
from quatrain.run.metrics import read_metrics
from quatrain.run.run_dir import LOCK_FILES
from quatrain.types.metrics import Metric
from quatrain.update.learner import Learner, TooManyBadSteps
from quatrain.update.supervised import GivenLearner
from quatrain.update.trainer import Trainer

pytestmark = pytest.mark.usefixtures("narrow_model")
SUM = "Tom has {} apples and buys 1 more. How many now?"
"""As long as the problems of other runs, for which the programs are compiled."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with every optional part of the update on, and its summary."""
    folder = tmp_path_factory.mktemp("runs")
    options = (
        "update.mini_batch_size=2", "update.epochs=2", "eval.n=2",
        "advantage.estimator=gae", "critic.epochs=1", "critic_optimizer.learning_rate=1e-3",
        "reward.kl_coef=0.05", "reward.kl_target=0.01", "reward.kl_horizon=100",
        "rollout.dynamic_sampling_rounds=3", "offload.critic=true",
    )  # fmt: skip
    return train(small_run(folder, "whole", *options)), options


def test_what_a_run_leaves(finished):
    run = finished[0].run
    assert {p.name for p in run.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "samples", "checkpoints", "final", "run.log"
    }  # fmt: skip
    assert load_config(run / "config.yaml", environ={}).config.run.name == "whole"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4"]
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    log = (run / "run.log").read_text()
    assert "step 1/4" not in log
    assert "log-probabilities of sampler and trainer" not in log
    sample = json.loads((run / "samples" / "step_000003.jsonl").read_text().splitlines()[0])
    assert set(sample["rewards"]) == {"correct", "format", "tag_count"}
    weights = {"correct": 1.0, "format": 0.5, "tag_count": 0.5}
    total = sum(weights[name] * value for name, value in sample["rewards"].items())
    assert sample["reward"] == pytest.approx(total)


def test_every_logged_metric_is_documented(finished):
    rows = read_metrics(finished[0].run / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "non_finite"}
    assert not unknown_metrics(names)
    last = rows[-1]
    for name in (
        "loss", "update/kl", "update/entropy", "update/clip_fraction", "update/grad_norm",
        "update/learning_rate", "time/shard_s", "memory/peak_gib",
        "reward/mean", "reward/correct/mean", "advantage/std", "length/completion/mean", "time/rollout_s",
        "time/step_s", "time/step_s_mean10", "throughput/tokens_per_s", "throughput/update_tokens_per_s",
        "eval/accuracy_strict", "eval/mean_at_n", "eval/pass_at_n", "rollout/logprob_diff_max",
    ):  # fmt: skip
        assert np.isfinite(last[name]), name
    assert last["update/optimizer_steps"] == 4  # 2 epochs of 2 mini-batches
    assert last["rollout/logprob_diff_max"] < 1e-4


def test_a_sampler_and_a_trainer_that_disagree_are_warned_about(tmp_path, monkeypatch, capfd):
    plain_generate = Rollouts.generate

    def shifted(self, prompts, **options):
        batch = plain_generate(self, prompts, **options)
        return replace(
            batch, rollout_logprobs=batch.rollout_logprobs - np.float32(0.25) * batch.completion_mask
        )

    monkeypatch.setattr(Rollouts, "generate", shifted)
    run = train(small_run(tmp_path, "shifted", "run.steps=2", "eval.every_steps=0", "sft.steps=0")).run
    log = (run / "run.log").read_text()
    for step in (1, 2):
        said = (
            f"step {step}: log-probabilities of sampler and trainer differ by 0.25 nats on average and 0.25 "
        )
        assert log.count(said) == 1
    assert "rollout.logprob_diff_warning is 0.05" in log
    assert "set model.dtype to float32" in log
    shown = capfd.readouterr().err
    assert "step 2: log-probabilities of sampler and trainer" in shown


@pytest.mark.parametrize(
    ("limit", "sum_", "count", "warns"),
    [
        (0.05, 0.6, 10, True),
        (0.05, 0.5, 10, False),
        (None, 9.0, 10, False),
        (0.05, 0.0, 0, False),
        (0.7, 6.0, 10, False),
    ],
)
def test_when_a_difference_is_warned_about(tmp_path, limit, sum_, count, warns):
    option = f"rollout.logprob_diff_warning={'null' if limit is None else limit}"
    config = small_run(tmp_path, "x", option).config
    metrics = {
        "rollout/logprob_diff_mean": Metric(sum_, count),
        "rollout/logprob_diff_max": Metric(2.0, reduction="max"),
    }
    warning = logprob_diff_warning(config, metrics)
    assert (warning is not None) == warns
    if warns:
        assert "differ by 0.06 nats on average and 2 at most" in warning
    assert logprob_diff_warning(config, {}) is None  # no token was trained on


def test_decoding_is_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "QUIET_INTERVAL_S", 0.0)
    resolved = small_run(tmp_path, "shown", "run.steps=1", "sft.steps=0")
    train(resolved)
    shown = capfd.readouterr().err
    ended = r"completions, [\d,]+ tokens/s, 0 slots$"
    assert re.search(rf"^train 0/1 .*\| evaluation before training: 8/8 {ended}", shown, re.MULTILINE)
    assert re.search(rf"^train 0/1 .*\| rollout: 16/16 {ended}", shown, re.MULTILINE)
    assert re.search(r"\| rollout: \d+/16 completions, [\d,]+ tokens/s, [1-9]\d* slots$", shown, re.MULTILINE)
    evaluate_run(resolved)
    shown = capfd.readouterr().err
    assert re.search(rf"^evaluation 0/8 .*\| 8/8 {ended}", shown, re.MULTILINE)


@contextmanager
def _signalled(number, owner, name, when):
    """Signal `number` when method `name` of `owner` begins, the first time that `when(*arguments)`."""
    plain, sent = getattr(owner, name), []

    def signals(*arguments, **options):
        if not sent and when(*arguments):
            sent.append(os.kill(os.getpid(), number))
        return plain(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, signals)
        yield


def _checkpoints(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(finished, tmp_path, capfd):
    """Invariant 5, with the reference model, epochs and mini-batches in play.

    Signals come in a rollout, and after the first optimizer step of an update, before an evaluation that is
    due; then the run is killed in a step after its last checkpoint.
    """
    whole, options = finished
    run, settings = tmp_path / "stopped", ("checkpoint.every_steps=0", *options)
    resolved = small_run(tmp_path, "stopped", *settings)
    rollout = (Rollouts, "generate", lambda rollouts, prompts: rollouts.sampler.version == 4)
    with _signalled(signal.SIGTERM, *rollout), pytest.raises(Stopped) as first:
        train(resolved)
    assert first.value.status == 143
    assert (
        str(first.value)
        == f"SIGTERM; step 1 is saved; go on with:\n  cd {os.getcwd()} && quatrain train --resume {run}"
    )
    assert _checkpoints(run) == [1]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    log = (run / "run.log").read_text()
    assert f"INFO quatrain.report.writer: stopped: {first.value}" in log
    assert "Traceback" not in log
    assert "SIGTERM: the run stops as soon as its state is whole" in capfd.readouterr().err

    update = (Trainer, "step", lambda trainer, state, *arguments: state.step == 5)
    with _signalled(signal.SIGHUP, *update), pytest.raises(Stopped) as second:
        train(resolved, resume="stopped")
    assert second.value.status == 129
    assert _checkpoints(run) == [1, 2]
    assert "eval/reward" not in read_metrics(run / "metrics.jsonl")[2]

    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(resolved, resume="stopped")
    assert _checkpoints(run) == [1, 2]
    summary = train(resolved, resume="stopped")

    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 1, 2, 2]

    # The steps before the checkpoint took more prompts than two batches of four.
    rows = read_metrics(whole.run / "metrics.jsonl")[1:3]
    assert sum(row["dynamic_sampling/drawn_groups"] for row in rows) > 8
    assert summary.before == whole.before
    assert summary.after == whole.after
    weights = [s.run / "final" / "model.safetensors" for s in (whole, summary)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert steady_metrics(whole.run) == steady_metrics(summary.run)
    for step in (1, 2, 3, 4):
        name = f"samples/step_{step:06d}.jsonl"
        assert (whole.run / name).read_text() == (summary.run / name).read_text()
    assert not any(thread.name == "signals" for thread in threading.enumerate())


def test_the_last_step_is_saved_while_the_next_one_compiles(tmp_path, monkeypatch):
    """And a process that is not the run's own goes on: its `train` raises when it has compiled."""
    resolved = small_run(tmp_path, "deaf", "run.steps=2", "sft.steps=0", "eval.before=false")
    run, plain, saved = tmp_path / "deaf", Learner.step, []
    monkeypatch.setattr("quatrain.cluster.stop.DEAF_S", 0.05)

    def compiles(self, state, batch):
        if state.train_step == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # another thread gets it
            try:
                time.sleep(1.0)  # hears no signal
                saved.append(_checkpoints(run))
            finally:  # `Stopped` may be raised here
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return plain(self, state, batch)

    monkeypatch.setattr(Learner, "step", compiles)
    with pytest.raises(Stopped, match="SIGTERM; step 1 is saved; go on with"):
        train(resolved)
    assert _checkpoints(run) == [1]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1]


def test_stopped_before_the_first_step_says_how_to_start_again(tmp_path):
    resolved = small_run(tmp_path, "early", "run.steps=1", "sft.steps=0")
    evaluation = (Rollouts, "generate_each", lambda *arguments: True)
    with _signalled(signal.SIGTERM, *evaluation), pytest.raises(Stopped) as stopped:
        train(resolved)
    assert str(stopped.value) == (
        f"SIGTERM; before its first step; start it again with:\n  cd {os.getcwd()} && "
        f"quatrain train --resume auto --set run.name=early --set run.dir={tmp_path}"
    )


def test_the_command_that_goes_on_works_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    options = ("data.train=rows.jsonl", "data.eval=rows.jsonl", "run.steps=1", "sft.steps=0")
    evaluation = (Rollouts, "generate_each", lambda *arguments: True)
    with _signalled(signal.SIGTERM, *evaluation), pytest.raises(Stopped) as stopped:
        train(small_run("runs", "early", *options))
    assert str(stopped.value).splitlines()[1] == (
        f"  cd {tmp_path} && quatrain train --resume auto --set run.name=early --set run.dir={tmp_path}/runs"
    )


def test_stopped_while_it_is_loaded_leaves_no_folder(tmp_path):
    loading = (build_module, "load_policy", lambda *arguments: True)
    with (
        _signalled(signal.SIGTERM, *loading),
        pytest.raises(Stopped, match="the run had not begun; give the"),
    ):
        train(small_run(tmp_path, "early"))
    assert not (tmp_path / "early").exists()


def test_stopped_in_the_warm_start_says_how_to_start_again(tmp_path):
    """Nothing of a warm start is kept."""
    steps = (GivenLearner, "step", lambda *arguments: True)
    with (
        _signalled(signal.SIGTERM, *steps),
        pytest.raises(
            Stopped, match=r"SIGTERM; before its first step; start it again with:\n.* train --resume auto"
        ),
    ):
        train(small_run(tmp_path, "warm", "sft.steps=5"))
    assert not (tmp_path / "warm" / "checkpoints").exists()


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A run that samples two steps ahead, with dynamic sampling, and its options."""
    options = (
        "rollout.max_staleness=2", "run.steps=6", "checkpoint.every_steps=3", "eval.every_steps=2",
        "update.mini_batch_size=2", "rollout.dynamic_sampling_rounds=2",
    )  # fmt: skip
    return train(small_run(tmp_path_factory.mktemp("runs"), "ahead", *options)), options


def test_a_run_with_rollouts_ahead_is_stale_by_its_lag_and_corrected(ahead):
    rows = read_metrics(ahead[0].run / "metrics.jsonl")[1:]
    # Checkpoints after steps 3 and 6: batch 4 is sampled by the weights after step 3, as are batches 5 and 6.
    steps = [0, 1, 2, 0, 1, 2]
    assert [row["async/staleness_max"] for row in rows] == [2 * age for age in steps]
    assert [row["async/staleness_mean"] for row in rows] == [2 * age for age in steps]
    assert all(row["async/versions_per_sequence_max"] == 1 for row in rows)
    assert [("rollout/logprob_diff_mean" in row) for row in rows] == [age == 0 for age in steps]
    for row, age in zip(rows, steps, strict=True):
        assert (abs(row["update/behaviour_weight_mean"] - 1) > 1e-5) == (age > 0)
        assert row["time/wait_rollout_s"] >= 0
        assert row["time/wait_weights_s"] >= 0
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})


@pytest.mark.slow
def test_rollouts_ahead_are_the_same_again_after_an_interruption(ahead, tmp_path):
    """Which takes every step a second time."""
    whole, options = ahead
    with interrupted_after(4), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "broken", *options))
    assert not any(
        thread.name == "quatrain-rollout" and thread.is_alive() for thread in threading.enumerate()
    )
    resumed = train(small_run(tmp_path, "broken", *options), resume="broken")
    assert resumed.after == whole.after
    final = [(each.run / "final" / "model.safetensors").read_bytes() for each in (whole, resumed)]
    assert final[0] == final[1]
    assert steady_metrics(whole.run) == steady_metrics(resumed.run)


@pytest.mark.slow
def test_a_run_ahead_that_is_stopped_between_two_fences_goes_on_and_says_what_differs(ahead, tmp_path):
    whole, options = ahead
    resolved = small_run(tmp_path, "stopped", *options)
    update = (Learner, "step", lambda learner, state, batch: state.train_step == 4)
    with _signalled(signal.SIGTERM, *update), pytest.raises(Stopped, match="step 4 is saved"):
        train(resolved)
    run = train(resolved, resume="stopped").run
    rows = [read_metrics(each / "metrics.jsonl") for each in (run, whole.run)]
    # Until the stop as without; then batch 5 is sampled by the weights after step 4, as is batch 6.
    ages = [[row["async/staleness_max"] for row in each[1:]] for each in rows]
    assert ages == [[0, 2, 4, 0, 0, 2], [0, 2, 4, 0, 2, 4]]
    assert "the checkpoint of step 4 is not one of checkpoint.every_steps" in (run / "run.log").read_text()


def test_staleness_without_a_correction_is_refused_before_anything_runs(tmp_path):
    options = ("rollout.max_staleness=1", "update.loss=reinforce", "update.old_logprobs=rollout")
    with pytest.raises(ValueError, match=r"update\.loss reinforce does not read old log-probabilities"):
        train(small_run(tmp_path, "stale", *options))
    assert not (tmp_path / "stale").exists()


def test_an_older_checkpoint_had_no_staleness(finished, tmp_path, monkeypatch):
    """Its saved settings lack the keys, which have their defaults then."""
    plain_read = Checkpointer.read_host

    def older(self, step=None):
        host = plain_read(self, step)
        return host | {"config": {k: v for k, v in host["config"].items() if not k.startswith("rollout.max")}}

    monkeypatch.setattr(Checkpointer, "read_host", older)
    summary, options = finished
    with pytest.raises(ValueError, match=r"rollout\.max_staleness of a resumed run .* has 0, got 1"):
        train(small_run(summary.run.parent, "x", *options, "rollout.max_staleness=1"), resume="whole")


@pytest.mark.parametrize("changed", ["rollout.max_staleness=1", "checkpoint.every_steps=2"])
def test_what_decides_the_weights_of_a_batch_cannot_change_on_resume(ahead, changed):
    summary, options = ahead
    key = changed.split("=")[0]
    with pytest.raises(ValueError, match=f"{key} of a resumed run must not change"):
        train(small_run(summary.run.parent, "unused", *options, changed), resume="ahead")


def test_a_reward_that_fails_ahead_of_training_ends_the_run_in_its_turn(tmp_path):
    rewards = tmp_path / "fails.py"
    rewards.write_text(
        "calls = []\n\n\ndef fails(completions):\n    calls.append(1)\n"
        "    return [1.0] * len(completions) if len(calls) < 5 else 5\n"
    )
    options = (
        f"reward.functions={{'{rewards}:fails': 1.0}}",
        "rollout.max_staleness=2",
        "update.mini_batch_size=2",
        "eval.every_steps=0",
    )
    with pytest.raises(ValueError, match="must return a list with one number per completion"):
        train(small_run(tmp_path, "failing", *options, "sft.steps=0"))
    rows = read_metrics(tmp_path / "failing" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]  # the first calls were the trial and the evaluation
    assert not _reward_workers()


def _reward_workers():
    """The worker processes that this process has started and that have not ended."""
    children = Path("/proc/self/task").glob("*/children")
    processes = [Path("/proc", child) for path in children for child in path.read_text().split()]
    return [process for process in processes if b"reward function" in (process / "cmdline").read_bytes()]


def test_a_run_in_flight_is_stale_by_no_more_than_its_lag(tmp_path):
    options = (
        "rollout.max_staleness=1",
        "rollout.in_flight=true",
        "rollout.max_concurrency=8",
        "update.mini_batch_size=2",
        "sft.steps=0",
        "run.steps=5",
    )
    run = train(small_run(tmp_path, "flight", *options, "checkpoint.every_steps=3")).run
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["async/staleness_max"] <= 2 for row in rows)  # two optimizer steps in a training step
    assert [rows[k]["async/staleness_max"] for k in (0, 3)] == [0, 0]  # at the start and after a checkpoint
    samples = [json.loads(line) for line in (run / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert sorted({sample["group_id"] for sample in samples}) == [4, 5, 6, 7]


def test_auto_starts_a_run_again_that_was_killed_before_its_first_checkpoint(tmp_path):
    options = ("run.steps=2", "checkpoint.every_steps=0", "eval.every_steps=0", "sft.steps=0")

    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "mine", *options), resume="auto")
    run = tmp_path / "mine"
    earlier = (run / "metrics.jsonl").read_text()
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in LOCK_FILES]
    kept = {path: path.read_bytes() for path in files}
    before = {path.name for path in run.iterdir()}
    with pytest.raises(ValueError, match="no built-in data set is called 'other'"):
        train(small_run(tmp_path, "mine", *options, "data.train=builtin:other"), resume="auto")
    assert {path: path.read_bytes() for path in files} == kept
    assert {path.name for path in run.iterdir()} == before

    assert train(small_run(tmp_path, "mine", *options), resume="auto").run == run
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert (run / "metrics.discarded.jsonl").read_text() == earlier
    assert "no complete checkpoint: starting mine again" in (run / "run.log").read_text()
    assert (run / "final" / "model.safetensors").is_file()
    assert [p.name for p in run.glob("config*.yaml")] == ["config.yaml"]


def test_secrets_are_in_no_file_and_no_line_of_a_run(tmp_path, monkeypatch, capfd):
    """Secrets stand in a `.env` file, in data, settings and errors, in a reward's name and in its output."""
    dotenv = {
        "DATABASE_URL": "postgres://me:pa55w0rd@db.example/x",
        "GITHUB_PAT": "ghp_0123456789abcdefghij",
        "PGPASS": "xyzzy7",
        "ANY_NAME": "correct-horse-battery",
    }
    exported = {"PIP_INDEX": "https://me:inde%78pw@pypi.example/", "OTHER_API_KEY": 'quo"té\\key'}
    found = [*dotenv.values(), *exported.values(), "pa55w0rd", "inde%78pw", "indexpw"]
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in dotenv.items()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, **exported, "HOME": str(tmp_path)})
    monkeypatch.setattr(secrets, "_of_dotenv", set())
    told = []
    service = types.SimpleNamespace(
        init=lambda **options: told.append(options) or service,
        log=lambda numbers, step: told.append(numbers),
        add_scalar=lambda *numbers: told.append(numbers),
        finish=lambda: None,
        close=lambda: None,
        SummaryWriter=lambda *options, **more: service,
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setitem(sys.modules, "tensorboardX", service)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} {text}"}], "answer": text, "note": {"of": text}}
        for i, text in enumerate(found)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "import logging, sys, warnings\n\n\n"
        "def shows(prompts, completions, note, answer):\n"
        "    print(note, answer)\n    print(prompts, file=sys.stderr)\n"
        "    with open('seen', 'a') as seen:\n        seen.write(''.join(answer))\n"
        "    logging.getLogger('quatrain').warning('%s', answer)\n"
        "    raise OSError(f'cannot connect to {answer[0]}')\n\n\n"
        "xyzzy7 = shows\n\n\ndef returns_text(answer, completions):\n    return answer[0]\n"
    )

    def updated(learner, state, batch):  # compiling one tells nothing here
        return replace(state, train_step=state.train_step + 1)

    monkeypatch.setattr(Learner, "step", updated)

    def command(name, *options):
        settings = (
            *SMALL, f"run.dir={tmp_path}/runs", f"run.name={name}", "sft.steps=0", "run.steps=1",
            "data.train=data.jsonl", "data.eval=null", "run.compilation_cache=null", "rollout.n=2",
            "data.max_prompt_length=128", "data.batch_size=9", "rollout.max_new_tokens=4", *options,
        )  # fmt: skip
        arguments = [part for setting in settings for part in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["quatrain", "train", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    rewards = "reward.functions={'rewards.py:shows': 1.0, 'rewards.py:xyzzy7': 0.5}"
    services = ("logging.wandb=offline", "logging.tensorboard=true", "logging.samples_per_step=16")
    prompt = f"data.system_prompt=ask {dotenv['DATABASE_URL']}"
    assert command("shown", rewards, prompt, *services) == 0
    assert command("fails", "reward.functions={'rewards.py:returns_text': 1.0}") == 2

    printed = "".join(capfd.readouterr())
    assert f"warning: {tmp_path}/.env holds secrets and can be read by others (mode 6" in printed
    assert "OSError: cannot connect to [redacted]" in printed
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    texts = {"printed": printed, "told": repr(told)}
    texts |= {str(path): path.read_bytes().decode(errors="replace") for path in files}
    for where, text in texts.items():
        for secret in found:
            for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
                assert form not in text, where
    seen = (tmp_path / "seen").read_text()  # what is written is redacted, not what is trained on
    assert all(secret in seen for secret in found)
    samples = (tmp_path / "runs/shown/samples/step_000001.jsonl").read_text().splitlines()
    assert len(samples) == 16
    assert all(" [redacted]" in json.loads(sample)["prompt"][-1]["content"] for sample in samples)
    assert "ask [redacted]" in (tmp_path / "runs/shown/config.yaml").read_text()
    assert "reward/[redacted]/mean" in (tmp_path / "runs/shown/metrics.jsonl").read_text()


def test_export_of_the_last_checkpoint_is_the_final_model(finished, tmp_path):
    run = finished[0].run
    assert export(run, tmp_path / "last") == 4
    assert export(run, tmp_path / "second", step=2) == 2
    final, last, second = (
        (folder / "model.safetensors").read_bytes()
        for folder in (run / "final", tmp_path / "last", tmp_path / "second")
    )
    assert final == last
    assert final != second
    with pytest.raises(ValueError, match="not an empty folder"):
        export(run, tmp_path / "last")
    with pytest.raises(ValueError, match=r"choose one of \[2, 4\]"):
        export(run, tmp_path / "third", step=3)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """The folder of two files of data, what writes them, and the options of a run of one step on them."""
    folder = tmp_path_factory.mktemp("own")

    def write(name, *changed):
        rows = [{"prompt": SUM.format(i), "answer": str(i + 1), "of": name} for i in range(8)]
        rows[7] |= dict(changed)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("data.jsonl")
    write("heldout.jsonl")
    options = (
        f"data.train={folder}/data.jsonl", f"data.eval={folder}/heldout.jsonl", "sft.steps=0",
        "run.steps=1", "checkpoint.best_metric=eval/reward",
    )  # fmt: skip
    train(small_run(folder / "runs", "own", *options))
    return folder, options, write


@pytest.fixture
def own_data(own_run, tmp_path):
    """The folder with a copy of the run alone, the run's options, what writes its data, and their folder."""
    folder, options, write = own_run
    write("data.jsonl")
    write("heldout.jsonl")
    shutil.copytree(folder / "runs" / "own", tmp_path / "own")
    return tmp_path, options, write, folder


def test_a_resume_with_other_training_data_is_refused(own_data):
    runs, options, write, folder = own_data
    data = folder / "data.jsonl"
    files = [path for path in (runs / "own").iterdir() if path.is_file() and path.name not in LOCK_FILES]
    kept = {path: path.read_bytes() for path in files}

    def refused(message, *more):
        with pytest.raises(ValueError, match=message):
            train(small_run(runs, "own", *options, "run.steps=2", *more), resume="own")

    differ = r"data\.train of a resumed run must not change: .*/data\.jsonl has as many rows as before, and "
    write("data.jsonl", ("answer", "7"))
    refused(differ + "the column `answer` differ; restore the data")
    write("data.jsonl", ("prompt", "5 + 2 ="))
    refused(differ + "the prompts, the tokens of the prompts differ")
    write("data.jsonl")
    refused(differ + "the prompts, the tokens of the prompts differ", "data.system_prompt=Add.")
    data.write_text(data.read_text() + data.read_text().splitlines()[0])
    refused("had 8 prompts that were not skipped, and has 9; restore the data")
    assert {path: path.read_bytes() for path in kept} == kept
    write("data.jsonl")
    assert train(small_run(runs, "own", *options, "run.steps=2"), resume="own").steps == 2


def test_a_resume_with_other_evaluation_data_compares_nothing_with_what_was_before(own_data, capfd):
    runs, options, write, folder = own_data
    assert json.loads((runs / "own" / "best.json").read_text())["step"] == 1
    write("heldout.jsonl", ("answer", "7"))
    resumed = train(small_run(runs, "own", *options, "run.steps=2"), resume="own")
    said = f"the evaluations have changed in the column `answer` of {folder}/heldout.jsonl: they are"
    log = (runs / "own" / "run.log").read_text()
    assert said in log
    assert re.findall(r"train (\d/\d) .* accuracy ", log) == ["1/1"]  # that of other data is not shown after
    assert resumed.before == {}
    assert json.loads((runs / "own" / "best.json").read_text())["step"] == 2


def test_a_resume_with_fewer_steps_than_its_checkpoint_is_refused(finished):
    summary, options = finished
    final = summary.run / "final" / "model.safetensors"
    before = final.stat().st_mtime_ns
    message = r"run\.steps of a resumed run must not be below .* has one of step 4, got 3 steps; raise run"
    with pytest.raises(ValueError, match=message):
        train(small_run(summary.run.parent, "x", *options, "run.steps=3"), resume="whole")
    assert final.stat().st_mtime_ns == before


def test_secrets_decide_no_resume_and_stand_in_no_checkpoint(tmp_path, monkeypatch):
    """The file's name is a secret in one environment and none in the other."""
    data = tmp_path / "hunter2.jsonl"
    rows = [json.dumps({"prompt": SUM.format(i), "answer": str(i + 1)}) + "\n" for i in range(6)]
    data.write_text("".join(rows))
    other = tmp_path / "xyzzy22.jsonl"
    other.write_text("".join(rows))
    monkeypatch.setenv("A_KEY", "hunter2")
    options = ("sft.steps=0", "run.steps=1", "data.eval=null")
    train(small_run(tmp_path, "own", *options, f"data.train={data}"))
    files = [path for path in (tmp_path / "own").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    monkeypatch.setenv("A_KEY", "xyzzy22")
    with pytest.raises(
        ValueError, match=r"data\.train .* has .*/\[redacted\]\.jsonl, got .*/\[redacted\]\.js"
    ):
        train(small_run(tmp_path, "own", *options, f"data.train={other}"), resume="own")
    monkeypatch.delenv("A_KEY")
    assert train(small_run(tmp_path, "own", *options, f"data.train={data}"), resume="own").steps == 1


@pytest.mark.slow
def test_a_moved_run_is_resumed_where_it_is(tmp_path):
    """Its configuration knows its old place, in which another run has begun meanwhile."""
    options = ("run.steps=1", "sft.steps=0", "data.eval=null")
    run = train(small_run(tmp_path / "first", "mine", *options)).run
    moved = shutil.copytree(run, tmp_path / "moved")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    seen = []
    plain = build_module.build_engine

    def build_engine(config, *arguments, **keywords):
        seen.append((config.run.dir, config.run.name))
        return plain(config, *arguments, **keywords)

    resolved = load_config(moved / "config.yaml", ["run.steps=2"], environ={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "build_engine", build_engine)
        assert train(resolved, resume=str(moved)).run == moved
    assert seen == [(str(tmp_path), "moved")]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert load_config(moved / "config.yaml", environ={}).config.run.name == "moved"


def test_a_run_of_other_devices_is_exported_on_these(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0].run, run)
    config = (run / "config.yaml").read_text()
    assert "\nmesh: auto" in config
    assert config.count("\n  critic: null") == 1  # of placement
    moved = config.replace("\nmesh: auto", '\nmesh: "2,2,2"').replace("\n  critic: null", '\n  critic: "4"')
    (run / "config.yaml").write_text(moved)
    assert export(run, tmp_path / "exported") == 4
    exported, final = (folder / "model.safetensors" for folder in (tmp_path / "exported", run / "final"))
    assert exported.read_bytes() == final.read_bytes()


def test_the_final_model_evaluates_to_the_same_numbers(finished, tmp_path):
    whole = finished[0]
    resolved = small_run(tmp_path, "unused", "eval.n=2", f"model.path={whole.run / 'final'}")
    again = evaluate_run(resolved)
    for name in ("eval/accuracy_strict", "eval/accuracy_lenient", "eval/reward", "eval/completion_length"):
        assert again[name] == pytest.approx(whole.after[name])


def test_a_taken_name_is_refused(finished):
    run = finished[0].run
    with pytest.raises(ValueError, match="--resume whole"):
        train(small_run(run.parent, "whole"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=5", r"seed of a resumed run must not change: .* has 0, got 5; set seed back"),
        ("rollout.n=2", r"rollout\.n of a resumed run .*: .* has 4, got 2"),
        ("data.batch_size=2", r"data\.batch_size of a resumed run .*: .* has 4, got 2"),
        ("data.train=builtin:other", r"data\.train of a resumed run "),
        ("data.min_pass_rate=0.5", r"data\.min_pass_rate of a resumed run .*: .* has None, got 0\.5"),
    ],
)
def test_a_resume_that_does_not_fit_changes_nothing(finished, override, message):
    summary, options = finished
    kept = ("config.yaml", "metrics.jsonl", "run.log")
    before = [(summary.run / name).read_bytes() for name in kept]
    sizes = ("update.mini_batch_size=2", override)
    with pytest.raises(ValueError, match=message):
        train(small_run(summary.run.parent, "unused", *options, *sizes), resume="whole")
    assert [(summary.run / name).read_bytes() for name in kept] == before
    assert not list(summary.run.glob("config.*.yaml"))


def test_bad_input_leaves_the_name_free(tmp_path):
    data = tmp_path / "bare.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(ValueError, match="supervised training needs the columns `prompt` and `completion`"):
        train(small_run(tmp_path, "bad", f"data.train={data}"))
    with pytest.raises(ValueError, match=r"takes it from update\.clip_low; set that instead"):
        train(small_run(tmp_path, "bad", "update.loss_args={clip_low: 0.1}"))
    assert not (tmp_path / "bad").exists()


def test_kl_cannot_begin_on_resume(finished, tmp_path):
    shutil.copytree(finished[0].run, tmp_path / "whole", ignore=shutil.ignore_patterns("reference"))
    with pytest.raises(
        ValueError, match=r"resumed with update\.kl_coef 0\.05 only .*set update\.kl_coef back"
    ):
        train(small_run(tmp_path, "x", *finished[1]), resume="whole")


def test_no_signal_is_counted_and_skipped(tmp_path):
    rewards = tmp_path / "flat.py"
    rewards.write_text("def flat(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    flat = (f"reward.functions={{'{rewards}:flat': 1.0}}", "run.steps=2", "eval.every_steps=0")
    options = (*flat, "sft.steps=0", "update.entropy_coef=0", "update.kl_coef=0")
    summary = train(small_run(tmp_path, "silent", *options))
    rows = read_metrics(summary.run / "metrics.jsonl")[1:]
    assert [row["advantage/zero_signal_fraction"] for row in rows] == [1.0, 1.0]
    assert [row["update/skipped_steps"] for row in rows] == [1, 1]
    assert [row["update/optimizer_steps"] for row in rows] == [0, 0]
    assert summary.after == summary.before


def test_no_signal_in_five_steps_stops_dynamic_sampling_with_a_checkpoint(tmp_path):
    rewards = tmp_path / "flat.py"
    rewards.write_text("def flat(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    flat = (f"reward.functions={{'{rewards}:flat': 1.0}}", "run.steps=6", "sft.steps=0", "data.eval=null")
    options = (*flat, "rollout.dynamic_sampling_rounds=2", "checkpoint.every_steps=0")
    with pytest.raises(NoSignal, match="drew 8 prompts in 2 rounds"):
        train(small_run(tmp_path, "silent", *options))
    host = Checkpointer(tmp_path / "silent" / "checkpoints").read_host()
    assert host["train_step"] == 4
    assert host["place"] == {"next_prompt": 32, "steps_without_signal": 4, "rates": []}
    with pytest.raises(NoSignal):
        train(small_run(tmp_path, "silent", *options), resume="silent")


def test_too_many_bad_steps_stop_with_a_checkpoint(tmp_path):
    (tmp_path / "loss.py").write_text(
        "from quatrain.ops.tokens import TokenLoss\n\n\n"
        "def not_a_number(tokens):\n    return TokenLoss(tokens.logprobs * float('nan'))\n"
    )
    loss = f"update.loss={tmp_path / 'loss.py'}:not_a_number"
    resolved = small_run(tmp_path, "bad", "update.max_bad_steps=2", loss)
    with pytest.raises(TooManyBadSteps, match="max_bad_steps=2"):
        train(resolved)
    run = tmp_path / "bad"
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["1"]
    # The step that was given up begins at the second batch of four prompts, and is taken again on resume.
    assert Checkpointer(run / "checkpoints").read_host()["place"]["next_prompt"] == 4
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (run / "samples" / "step_000002.jsonl").exists()
    assert "TooManyBadSteps: update.max_bad_steps=2" in (run / "run.log").read_text()
    assert rows[-1]["update/bad_steps"] == 1
    assert "loss" in rows[-1]["non_finite"]


def test_steps_follow_from_epochs(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (f"data.train={data}", "run.steps=null", "run.epochs=0.5", "sft.steps=0", "data.eval=null")
    summary = train(small_run(tmp_path, "epochs", *options))
    assert summary.steps == 2  # half a pass over 10 prompts, 4 at a time
    assert summary.before == summary.after == {}


def test_a_mean_over_nothing_is_no_result():
    metrics = {"eval/reward": Metric(0.0, 0), "eval/num_prompts": Metric(2.0, reduction="sum")}
    assert finite_numbers(metrics | {"eval/completion_length": Metric(float("nan"))}) == {
        "eval/num_prompts": 2.0
    }


def test_greedy_baseline_overlong_and_truncated_completions(tmp_path):
    """ReMax with every completion cut short: the baseline is scored, and nothing is trained on."""
    options = (
        "run.steps=1", "data.eval=null", "advantage.estimator=remax", "update.mask_truncated=true",
        "rollout.max_new_tokens=4", "reward.functions={tag_count: 1.0, overlong: 0.5}",
        "reward.overlong_buffer=2",
    )  # fmt: skip
    summary = train(small_run(tmp_path, "remax", *options))
    row = read_metrics(summary.run / "metrics.jsonl")[-1]
    assert row["reward/overlong/mean"] == -1.0
    assert row["reward/greedy/mean"] == pytest.approx(row["reward/mean"], abs=0.3)
    assert row["update/masked_sequences"] == 16
    assert row["update/optimizer_steps"] == 0
    assert row["update/skipped_steps"] == 1


@pytest.mark.slow
def test_two_runs_in_threads_of_one_process_have_a_log_each(tmp_path, capfd):
    (tmp_path / "rewards.py").write_text(
        "def says(prompts, completions, *, who):\n"
        "    print('from', who)\n    return [float(i) for i, _ in enumerate(completions)]\n"
    )
    names, began = ("first", "second"), threading.Barrier(2)

    def begin(name):
        rewards = f"reward.functions={{'{tmp_path}/rewards.py:says': {{args: {{who: {name}}}}}}}"
        options = ("run.steps=1", "sft.steps=0", "update.mini_batch_size=2", "rollout.max_staleness=1")
        resolved = small_run(tmp_path, name, *options, rewards, "eval.before=false")
        began.wait(60)
        train(resolved)

    threads = [threading.Thread(target=begin, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, other in (names, names[::-1]):
        log = (tmp_path / own / "run.log").read_text()
        assert log.count(f"run {own}: 1 steps") == 1
        assert f"from {own}" in log
        assert log.count(f"the trained model, for transformers: {tmp_path / own / 'final'}") == 1
        assert f"from {other}" not in log
        assert str(tmp_path / other) not in log
    shown = capfd.readouterr().err
    assert all(shown.count(f"run {name}: 1 steps") == 1 for name in names)
