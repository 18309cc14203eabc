import json
import logging
import math
import shutil
import sys
import types
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from episode_batches import PROMPT, TURNS, episodes

from quatrain.config.schema import LoggingConfig
from quatrain.report import writer as module
from quatrain.report.writer import Report
from quatrain.reward.forms import plain_json
from quatrain.run.metrics import read_metrics
from quatrain.run.run_dir import LOCK_FILES, RunDir
from quatrain.run.samples import evaluation_sample
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric


def plain(text: str) -> str:
    return text


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "first")


@pytest.fixture(autouse=True)
def _no_handler_stays():
    log = logging.getLogger("quatrain")
    before, level = list(log.handlers), log.level
    yield
    assert log.handlers == before
    assert log.level == level


def batch(completions=("four", "4 \u00e9\ud83d")):
    ids = np.array([[1, 2, 3, 4], [1, 2, 3, 0]], np.int32)
    attention = ids > 0
    completion = attention & (np.arange(4) >= 2)
    rollouts = RolloutBatch(
        input_ids=ids,
        attention_mask=attention,
        completion_mask=completion,
        rollout_logprobs=np.where(completion, -0.5, 0).astype(np.float32),
        policy_version=np.where(completion, 0, -1).astype(np.int32),
        finish_reason=np.array(["length", "stop"]),
        group_ids=np.array([7, 8]),
        prompts=("2+2?", ({"role": "user", "content": "2+2?"},)),
        completions=completions,
    )
    rewarded = RewardedBatch(
        rollouts,
        np.array([0.1, np.nan], np.float32),
        np.array([[0.1, np.nan]], np.float32),
        ("correct",),
    )
    return AdvantagedBatch(rewarded, np.where(completion, [[0.25], [-0.5]], 0).astype(np.float32))


def test_metrics_are_reduced_into_one_line_per_step(run):
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.log(0, {"eval/reward": 0.5})
    report.log(1, {"loss": Metric(3.0, 2), "update/kl": Metric(np.nan), "none": Metric(0.0, 0)})
    report.log(1, {"eval/reward": 0.75})
    report.close()
    assert read_metrics(run.metrics) == [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "loss": 1.5, "update/kl": None, "eval/reward": 0.75, "non_finite": ["update/kl"]},
    ]


def test_samples_show_what_happened_to_each_sequence(run):
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.samples(10, batch())
    report.close()
    lines = (run.samples / "step_000010.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "step": 10,
            "group_id": 7,
            "prompt": "2+2?",
            "completion": "four",
            "columns": {},
            "rewards": {"correct": 0.1},
            "reward": 0.1,
            "advantage": 0.25,
            "finish_reason": "length",
            "completion_tokens": 2,
        },
        {
            "step": 10,
            "group_id": 8,
            "prompt": [{"role": "user", "content": "2+2?"}],
            "completion": "4 \u00e9\ud83d",
            "columns": {},
            "rewards": {"correct": None},
            "reward": None,
            "advantage": -0.5,
            "finish_reason": "stop",
            "completion_tokens": 1,
        },
    ]
    assert "\u00e9" in lines[1]


@pytest.mark.parametrize(("asked", "written"), [(1, 1), (0, 0), (99, 2)])
def test_as_many_samples_as_asked_for(run, asked, written):
    report = Report(run, LoggingConfig(samples_per_step=asked), redactor=lambda: plain)
    report.samples(3, batch())
    report.close()
    found = [line for path in run.samples.iterdir() for line in path.read_text().splitlines()]
    assert len(found) == written


def test_messages_reach_console_and_log_without_secrets(run, capsys):
    report = Report(run, LoggingConfig(), redactor=lambda: lambda text: text.replace("hunter2", "***"))
    report.event("starting with hunter2")
    logging.getLogger("quatrain.rollout").warning("slow %s", "hunter2")
    try:
        raise RuntimeError("hunter2")
    except RuntimeError:
        logging.getLogger("quatrain").exception("failed")
    report.close()
    report.event("after the end")
    console, log = capsys.readouterr().err, run.log.read_text()
    for text in (console, log):
        assert "starting with ***" in text
        assert "RuntimeError: ***" in text
        assert "hunter2" not in text
        assert "after the end" not in text
    assert "warning: slow ***" in console
    assert "WARNING quatrain.rollout: slow ***" in log


def test_samples_and_names_of_metrics_are_redacted_as_text_before_they_are_written(run):
    report = Report(run, LoggingConfig(), redactor=lambda: lambda text: text.replace('say "é"', "***"))
    report.samples(1, batch(('I say "é"', "4")))
    report.log(1, {'reward/say "é"/mean': 1.0, "loss": 2.0})
    report.close()
    line = (run.samples / "step_000001.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["completion"] == "I ***"
    assert read_metrics(run.metrics) == [{"step": 1, "reward/***/mean": 1.0, "loss": 2.0}]


def test_why_a_run_ended_is_in_its_log_alone(run, capsys):
    report = Report(run, LoggingConfig(), redactor=lambda: lambda text: text.replace("hunter2", "***"))
    try:
        raise RuntimeError("hunter2")
    except RuntimeError as error:
        report.failed(error)
    report.close()
    assert capsys.readouterr().err == ""
    log = run.log.read_text()
    assert "the run ended early\nTraceback (most recent call last):" in log
    assert "RuntimeError: ***" in log


def test_a_message_that_comes_while_the_log_is_closed_is_written_and_leaves_no_open_file(run):
    """Of a thread that had found the handler; the file stayed open, and a test of another run failed."""
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    late = logging.getLogger("quatrain").handlers[-2]
    report.close()
    record = logging.LogRecord("quatrain", logging.INFO, "", 0, "late", None, None)
    late.handle(record)
    assert late.stream is None
    assert run.log.read_text().endswith("late\n")
    shutil.rmtree(run.path)
    late.handle(record)  # as on a full disk: no error of the thread that logs


def test_how_a_run_began_is_said_first(tmp_path):
    run = RunDir.create(tmp_path, "first", resume="auto")
    Report(run, LoggingConfig(), redactor=lambda: plain).close()
    assert "starting a new run first" in run.log.read_text()


def test_other_processes_write_nothing(run, monkeypatch, capsys):
    monkeypatch.setattr(module, "is_main_process", lambda: False)
    report = Report(run, LoggingConfig(wandb="offline", tensorboard=True), redactor=lambda: plain)
    report.log(1, {"loss": 1.0})
    report.samples(1, batch())
    report.event("hello")
    report.close()
    assert {path.name for path in run.path.iterdir()} == {"samples", *LOCK_FILES}
    assert not list(run.samples.iterdir())
    assert capsys.readouterr().err == ""


class FakeWandB(types.ModuleType):
    """Records what it is told; raises in the call named `fails`."""

    def __init__(self, fails=""):
        super().__init__("wandb")
        self.fails, self.told, self.started = fails, [], []
        self.Table = lambda columns, data: (columns, data)

    def _call(self, name):
        if self.fails == name:
            raise ConnectionError(f"{name} is down")

    def init(self, **settings):
        self._call("init")
        self.started.append(settings)
        return self

    def log(self, numbers, step):
        self._call("log")
        self.told.append((step, numbers))

    def finish(self):
        self._call("finish")
        self.told.append("finished")


def test_wandb_gets_the_finite_numbers_and_keeps_its_id(run, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = LoggingConfig(wandb="offline", wandb_project="p")
    for step in (1, 2):
        report = Report(run, config, redactor=lambda: plain, run_config={"seed": 1})
        report.log(step, {"loss": Metric(1.0, 2), "update/kl": float("inf")})
        report.close()
    assert fake.told == [(1, {"loss": 0.5}), "finished", (2, {"loss": 0.5}), "finished"]
    first, second = fake.started
    assert first == second
    assert (first["project"], first["name"], first["mode"]) == ("p", "first", "offline")
    assert (first["config"], first["resume"]) == ({"seed": 1}, "allow")
    assert first["settings"] == {"console": "off", "x_disable_meta": True}


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_failing_service_is_reported_once_and_never_stops_the_run(run, monkeypatch, capsys, fails):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(fails))
    report = Report(run, LoggingConfig(wandb="online"), redactor=lambda: plain)
    for step in (1, 2, 3):
        report.log(step, {"loss": 1.0})
    report.close()
    assert len(read_metrics(run.metrics)) == 3
    assert capsys.readouterr().err.count(f"ConnectionError: {fails} is down") == 1


def test_a_missing_package_is_reported_once(run, monkeypatch, capsys):
    for name in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    report = Report(run, LoggingConfig(wandb="online", tensorboard=True), redactor=lambda: plain)
    report.log(1, {"loss": 1.0})
    report.close()
    console = capsys.readouterr().err
    assert console.count("W&B failed to start") == 1
    assert console.count("TensorBoard failed to start") == 1
    assert "pip install -e '.[wandb,trackio,tensorboard]'" in console


def test_disabled_services_are_not_imported(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB("init"))
    for mode in ("disabled", None):
        report = Report(run, LoggingConfig(wandb=mode), redactor=lambda: plain)
        report.close()
    assert "failed" not in run.log.read_text()


def test_tensorboard_gets_scalars(run, monkeypatch):
    told = []
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: told.append((name, value, step)),
        close=lambda: told.append("closed"),
    )
    fake = types.ModuleType("tensorboardX")
    fake.SummaryWriter = lambda folder, purge_step: told.append((folder, purge_step)) or writer
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    report = Report(run, LoggingConfig(tensorboard=True), redactor=lambda: plain)
    report.log(4, {"loss": 2.0})
    report.close()
    folder = str(run.path / "tensorboard")
    assert told == [(folder, None), ("loss", 2.0, 4), "closed"]

    (run.checkpoints / "3").mkdir(parents=True)
    run.close()
    resumed = RunDir.create(run.path.parent, "x", resume="first")
    report = Report(resumed, LoggingConfig(tensorboard=True), redactor=lambda: plain)
    report.log(4, {"loss": 1.0})
    report.close()
    assert told[3:] == [(folder, 4), ("loss", 1.0, 4), "closed"]


def test_tensorboard_keeps_the_step_in_whose_evaluation_a_run_was_stopped(run, monkeypatch):
    """The fault: the evaluation that a resumed run makes first removed the step's own values."""
    told = []
    writer = types.SimpleNamespace(add_scalar=lambda *numbers: None, close=lambda: None)
    fake = types.ModuleType("tensorboardX")
    fake.SummaryWriter = lambda folder, purge_step: told.append(purge_step) or writer
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    settings = LoggingConfig(tensorboard=True)
    report = Report(run, settings, redactor=lambda: plain)
    report.log(3, {"loss": 2.0, "ratio": float("nan")})
    report.log(4, {"loss": 3.0, "ratio": float("nan")})
    report.close()
    (run.checkpoints / "3").mkdir(parents=True)
    run.close()
    for step, values in ((3, {"eval/loss": 1.0}), (4, {"loss": 2.5, "ratio": float("nan")})):
        resumed = RunDir.create(run.path.parent, "x", resume="first")
        report = Report(resumed, settings, redactor=lambda: plain)
        resumed.rewind(3)
        report.log(step, values)
        report.close()
        resumed.close()
    assert told == [None, 4, 4]


def test_a_plot_that_fails_is_a_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(module, "can_plot", lambda: True)
    monkeypatch.setattr(module, "plot_run", lambda *paths: 1 / 0)
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.log(1, {"loss": 1.0})
    report.close()
    message = "warning: plot.png cannot be written (ZeroDivisionError: division by zero)"
    assert message in capsys.readouterr().err


def test_the_run_page_is_written_on_request_and_at_the_end(run, capsys):
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.page()
    assert not run.page.exists(), "there is nothing to show yet"
    report.log(1, {"loss": 1.0})
    report.page()
    first = run.page.read_bytes()
    report.log(2, {"reward/mean": 1.0})
    report.close()
    assert run.page.read_bytes() != first
    assert "warning" not in capsys.readouterr().err


def test_a_run_page_that_fails_is_one_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(module.Page, "write", lambda *given, **options: 1 / 0)
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.log(1, {"loss": 1.0})
    report.page()
    report.page()
    report.close()
    assert capsys.readouterr().err.count("warning: report.html cannot be written (ZeroDivisionError") == 1


def test_metrics_that_a_full_disk_refuses_are_written_later(run, monkeypatch, capsys):
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.log(1, {"loss": 1.0})
    plain_open, half = Path.open, []

    class Full:
        """Writes half of a line, as a disk that becomes full."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def seek(self, offset):
            self.file.seek(offset)

        def write(self, line):
            half.append(self.file.write(line[: len(line) // 2]))
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(plain_open(path, mode)))
    for step in (2, 3):
        report.log(step, {"loss": float(step)})
    assert len(half) == 2
    monkeypatch.setattr(Path, "open", plain_open)
    report.log(3, {"reward": 0.5})
    report.log(4, {"loss": 4.0})
    report.close()
    rows = read_metrics(run.metrics)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert rows[2]["reward"] == 0.5
    message = "warning: metrics cannot be written ([Errno 28] No space left on device); the run goes on"
    assert capsys.readouterr().err.count(message) == 1


def test_tokens_of_samples_with_the_log_probabilities_of_sampler_trainer_and_teacher(run):
    advantaged = batch()
    known = {"trainer_logprobs": np.full((2, 4), -0.25, np.float32)}
    known["teacher_logprobs"] = np.float32([[-0.125] * 4, [np.nan] * 4])
    advantaged = replace(advantaged, rewarded=replace(advantaged.rewarded, token_logprobs=known))
    report = Report(run, LoggingConfig(sample_tokens=True), redactor=lambda: plain, token_text="<{}>".format)
    report.samples(1, advantaged)
    report.close()
    first, second = map(json.loads, (run.samples / "step_000001.jsonl").read_text().splitlines())
    assert first["tokens"] == {
        "texts": ["<3>", "<4>"],
        "ids": [3, 4],
        "sampler_logprobs": [-0.5, -0.5],
        "trainer_logprobs": [-0.25, -0.25],
        "teacher_logprobs": [-0.125, -0.125],
        "advantages": [0.25, 0.25],
    }
    assert second["tokens"]["ids"] == [3]
    assert second["tokens"]["teacher_logprobs"] == [None]


def test_completions_of_evaluations_are_redacted_and_other_values_of_columns_become_text(run):
    sample = {
        "set": "",
        "completion": "hunter2",
        "columns": plain_json({"when": date(2026, 1, 2), "x": math.nan}),
    }
    report = Report(run, LoggingConfig(), redactor=lambda: lambda text: text.replace("hunter2", "***"))
    report.evaluation(5, [sample])
    report.evaluation(6, [])
    report.close()
    (line,) = (run.samples / "eval_000005.jsonl").read_text().splitlines()
    expected = {"step": 5, "set": "", "completion": "***", "columns": {"when": "2026-01-02", "x": "nan"}}
    assert json.loads(line) == expected
    assert not (run.samples / "eval_000006.jsonl").exists()


@pytest.mark.parametrize(
    ("package", "setting"), [("wandb", {"wandb": "offline"}), ("trackio", {"trackio": "p"})]
)
def test_a_service_gets_tables_of_samples_and_evaluations_without_secrets(run, monkeypatch, package, setting):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, package, fake)
    report = Report(
        run,
        LoggingConfig(sample_tokens=True, samples_per_step=1, **setting),
        redactor=lambda: lambda text: text.replace("four", "***"),
        token_text=str,
    )
    report.samples(3, batch())
    report.evaluation(3, [{"set": "", "columns": {"answer": [1]}, "correct": 1.0}])
    report.close()
    (step, samples), (_, evaluations), finished = fake.told
    assert (step, finished) == (3, "finished")
    columns, rows = samples["samples"]
    row = dict(zip(columns, rows[0], strict=True))
    assert (row["completion"], row["reward/correct"], row["advantage"]) == ("***", 0.1, 0.25)
    assert "tokens" not in columns
    assert evaluations["evaluation"] == (
        ["step", "set", "columns", "correct"],
        [[3, "", '{"answer": [1]}', 1.0]],
    )


def test_a_service_gets_an_episode_as_a_readable_text(run, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    report = Report(
        run, LoggingConfig(wandb="offline", sample_tokens=True), redactor=lambda: plain, token_text=str
    )
    report.samples(3, episodes())
    report.close()
    columns, rows = fake.told[0][1]["samples"]
    assert dict(zip(columns, rows[0], strict=True))["turns"] == (
        "[assistant (reward 0.25)]\n<call>mul(6, 7)</call>\n\n[tool mul]\n42\n\n"
        "[assistant (reward 1)]\nIt is 42."
    )


def test_an_episode_has_its_turns_with_their_rewards_and_no_prompt_twice(run):
    report = Report(run, LoggingConfig(), redactor=lambda: plain)
    report.samples(3, episodes())
    report.close()
    first, second = map(json.loads, (run.samples / "step_000003.jsonl").read_text().splitlines())
    assert first == {
        "step": 3,
        "group_id": 4,
        "prompt": list(PROMPT),
        "completion": "It is 42.",
        "turns": [TURNS[0] | {"reward": 0.25}, TURNS[1], TURNS[2] | {"reward": 1.0}],
        "environment_reward": 1.25,
        "columns": {"answer": "42"},
        "rewards": {"environment": 1.25},
        "reward": 1.25,
        "advantage": 1.0,
        "finish_reason": "environment",
        "completion_tokens": 4,
    }
    assert second["turns"] == [{"role": "assistant", "content": "<call>mul(", "reward": 0.0}]
    assert second["finish_reason"] == "error"


def test_tokens_between_two_turns_have_no_numbers(run):
    advantaged = episodes()
    known = {"trainer_logprobs": np.full((2, 8), -0.25, np.float32)}
    advantaged = replace(advantaged, rewarded=replace(advantaged.rewarded, token_logprobs=known))
    report = Report(run, LoggingConfig(sample_tokens=True), redactor=lambda: plain, token_text="<{}>".format)
    report.samples(1, advantaged)
    report.close()
    first, second = map(json.loads, (run.samples / "step_000001.jsonl").read_text().splitlines())
    assert first["tokens"] == {
        "texts": ["<3>", "<4>", "<5>", "<6>", "<7>", "<8>"],
        "ids": [3, 4, 5, 6, 7, 8],
        "sampler_logprobs": [-0.5, -0.5, None, None, -0.5, -0.5],
        "trainer_logprobs": [-0.25, -0.25, None, None, -0.25, -0.25],
        "advantages": [1.0, 1.0, None, None, 1.0, 1.0],
        "sampled": [True, True, False, False, True, True],
    }
    assert second["tokens"]["ids"] == [3]
    assert "sampled" not in second["tokens"]


@pytest.mark.parametrize(
    "examples",
    [
        ({"role": "user", "content": "2 times 2?"}, {"role": "assistant", "content": "4"}),
        ({"role": "user", "content": "a row of its own"},),
    ],
)
def test_messages_of_a_reset_are_turns_and_examples_among_them_have_no_reward(run, examples):
    messages = [*PROMPT, *examples, *TURNS]
    report = Report(run, LoggingConfig(samples_per_step=1), redactor=lambda: plain)
    report.samples(1, episodes(messages=(messages, messages)))
    report.close()
    (record,) = map(json.loads, (run.samples / "step_000001.jsonl").read_text().splitlines())
    assert [(turn["content"], turn.get("reward")) for turn in record["turns"]] == [
        *((message["content"], None) for message in examples),
        (TURNS[0]["content"], 0.25),
        ("42", None),
        ("It is 42.", 1.0),
    ]


def test_a_prompt_that_is_a_text_is_one_message_of_the_user():
    advantaged = episodes()
    messages = [{"role": "user", "content": "6*7"}, *TURNS]
    rollouts = replace(
        advantaged.rollouts,
        prompts=("6*7", "6*7"),
        columns={**advantaged.rollouts.columns, "messages": (messages, messages)},
    )
    rewarded = replace(advantaged.rewarded, rollouts=rollouts)
    record = evaluation_sample(rewarded, 0, greedy=True, right=None, strict=None)
    assert [turn["role"] for turn in record["turns"]] == ["assistant", "tool", "assistant"]
    assert (record["prompt"], record["environment_reward"], record["columns"]) == (
        "6*7",
        1.25,
        {"answer": "42"},
    )


def test_a_data_column_called_messages_is_a_column_as_any_other():
    rewarded = episodes().rewarded
    columns = {"messages": ([{"role": "user", "content": "x"}],) * 2}
    plain_batch = replace(rewarded, rollouts=replace(rewarded.rollouts, columns=columns))
    record = evaluation_sample(plain_batch, 0, greedy=True, right=None, strict=None)
    assert record["columns"] == {"messages": [{"role": "user", "content": "x"}]}
    assert "turns" not in record
    assert "environment_reward" not in record


def test_an_episode_without_a_turn_has_no_tokens(run):
    batch = episodes(turn_rewards=([], []), messages=([*PROMPT], [*PROMPT]))
    none = np.zeros_like(batch.rollouts.completion_mask)
    rollouts = replace(
        batch.rollouts,
        completion_mask=none,
        rollout_logprobs=np.zeros(none.shape, np.float32),
        policy_version=np.full(none.shape, -1, np.int32),
        completions=("", ""),
    )
    rewarded = replace(batch.rewarded, rollouts=rollouts)
    report = Report(run, LoggingConfig(sample_tokens=True), redactor=lambda: plain, token_text=str)
    report.samples(1, AdvantagedBatch(rewarded, np.zeros(none.shape, np.float32)))
    report.close()
    record = json.loads((run.samples / "step_000001.jsonl").read_text().splitlines()[0])
    assert (record["turns"], record["tokens"]["ids"], record["advantage"]) == ([], [], None)


def test_secrets_of_turns_are_redacted_and_their_tokens_left_out(run):
    secret = [*PROMPT, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "key 56"}]
    report = Report(
        run,
        LoggingConfig(sample_tokens=True, samples_per_step=1),
        redactor=lambda: lambda text: text.replace("56", "***"),  # ids 5 and 6 stand between the two turns
        token_text=str,
    )
    report.samples(1, episodes(messages=(secret, secret)))
    report.close()
    (record,) = map(json.loads, (run.samples / "step_000001.jsonl").read_text().splitlines())
    assert record["turns"][1]["content"] == "key ***"
    assert "tokens" not in record


def test_trackio_gets_the_run_and_continues_it(run, monkeypatch, capsys):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for step, (folder, resume) in enumerate(((run, "never"), (replace(run, resumed=True), "allow"))):
        report = Report(folder, LoggingConfig(trackio="mine"), redactor=lambda: plain, run_config={"seed": 1})
        report.log(step, {"loss": 1.0, "update/kl": math.inf})
        report.close()
        told = fake.started[-1]
        assert told == {"project": "mine", "name": "first", "config": {"seed": 1}, "resume": resume}
    assert fake.told == [(0, {"loss": 1.0}), "finished", (1, {"loss": 1.0}), "finished"]


@pytest.mark.parametrize(
    ("package", "setting"), [("wandb", {"wandb": "offline"}), ("trackio", {"trackio": "p"})]
)
def test_steps_that_a_resumed_run_repeats_are_logged_once(run, monkeypatch, package, setting):
    """The first attempt ends between metrics and evaluation of step 3; its checkpoint is of step 1."""
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, package, fake)

    def attempt(folder, first, last, *, evaluates_last):
        report = Report(folder, LoggingConfig(**setting), redactor=lambda: plain)
        for step in range(first, last + 1):
            report.log(step, {"loss": float(10 * first + step)})
            report.samples(step, batch())
            if step < last or evaluates_last:
                report.log(step, {"eval/reward": 1.0})
                report.evaluation(step, [{"set": "", "correct": 1.0}])
        report.close()

    attempt(run, 0, 3, evaluates_last=False)
    run.rewind(1)
    attempt(replace(run, resumed=True), 2, 4, evaluates_last=True)
    told = [each for each in fake.told if each != "finished"]
    names = ("loss", "samples", "eval/reward", "evaluation")
    assert sorted((step, name) for step, values in told for name in values) == sorted(
        (step, name) for step in range(5) for name in names
    )
    losses = {step: values["loss"] for step, values in told if "loss" in values}
    assert losses == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 24.0}
    said = "keeps the values that it has up to step 3, which were logged before the run was resumed"
    assert run.log.read_text().count(said) == 1

    run.rewind(-1)
    attempt(run, 0, 0, evaluates_last=True)  # a run that begins again is another one in the service
    assert fake.told[-2][0] == 0


def test_tokens_that_spell_a_secret_together_are_not_written(run, capsys):
    report = Report(
        run,
        LoggingConfig(sample_tokens=True),
        redactor=lambda: lambda text: text.replace("34", "***"),
        token_text=str,
    )
    report.samples(1, batch())
    report.close()
    first, second = map(json.loads, (run.samples / "step_000001.jsonl").read_text().splitlines())
    assert "tokens" not in first  # its tokens are 3 and 4
    assert second["tokens"]["texts"] == ["3"]
    assert "the tokens of 1 samples are not written: they spell a secret" in capsys.readouterr().err
