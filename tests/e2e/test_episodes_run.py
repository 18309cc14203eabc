"""Whole runs of episodes of several turns: sampler and trainer agree; a resumed run is the same."""

import json

import numpy as np
import pytest
from resumed_runs import resumed_copy
from runs import interrupted_after, small_run, steady_metrics

from quatrain.config.errors import ConfigError
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")

GAME = """
from quatrain import StepResult


class Game:
    def reset(self, secret, prompt):
        self.secret, self.turns = secret, 0

    def step(self, completion):
        self.turns += 1
        assert self.secret != 4 or len(completion) % 4, "an unlucky length"
        if str(self.secret) in completion:
            return StepResult([], reward=1.0, done=True)
        return StepResult([{"role": "user", "content": f"Tom has {self.turns} more."}], reward=-0.1)
"""
ECHO = """
from quatrain import StepResult


class Echo:
    def step(self, completion):
        self.turns = getattr(self, "turns", 0) + 1
        return StepResult([{"role": "user", "content": "Tom has 2."}], reward=0.75, done=self.turns == 2)
"""
REWARD = """
def talks(completions, messages, turn_rewards, finish_reasons):
    assert all(len(m) > 1 for m in messages)
    assert "error" not in finish_reasons
    return [0.1 * len(rewards) for rewards in turn_rewards]
"""
SHORT = (
    "sft.steps=0",
    "run.steps=3",
    "checkpoint.every_steps=1",
    "checkpoint.keep=3",
    "eval.every_steps=0",
    "eval.final_num_prompts=16",
)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.py").write_text(GAME)
    (folder / "talks.py").write_text(REWARD)
    rows = [
        {"prompt": [{"role": "user", "content": f"{name} has {thing}. How many now?"}], "secret": secret}
        for name in ("Tom", "Ann", "Ben")
        for thing in ("apples", "books")
        for secret in (2, 3, 4)
    ]
    (folder / "game.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        f"data.train={folder}/game.jsonl", f"data.eval={folder}/game.jsonl", "sft.data=builtin:arithmetic",
        f"rollout.environment={folder}/game.py:Game", "rollout.max_turns=3", "rollout.max_new_tokens=30",
        f"reward.functions={{environment: 1.0, '{folder}/talks.py:talks': 0.5}}", "eval.num_prompts=16",
        "reward.workers=0", "logging.samples_per_step=16", "rollout.stop=[a, e]",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options):
    return train(small_run(tmp_path_factory.mktemp("runs"), "whole", *options, *SHORT)).run


def rows_of(run):
    return [row for row in read_metrics(run / "metrics.jsonl") if "episode/turns/mean" in row]


def samples_of(run, kind):
    files = sorted((run / "samples").glob(f"{kind}_*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_sampler_and_trainer_agree_on_the_tokens_of_every_turn(whole):
    rows = rows_of(whole)
    assert len(rows) == 3
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    assert all(row["episode/turns/max"] == 3 for row in rows)
    assert all(row["length/environment/max"] > 5 for row in rows)


def test_faults_cost_minus_one(whole):
    rows = rows_of(whole)
    assert sum(row["episode/errors"] for row in rows) > 0
    assert sum(row["reward/talks/errors"] for row in rows) == 0
    samples = samples_of(whole, "step")
    failed = [sample for sample in samples if sample["finish_reason"] == "error"]
    assert failed
    for sample in failed:
        assert sample["reward"] == -1.0
    talking = next(sample for sample in samples if len(sample["turns"]) > 2)
    assert [turn["role"] for turn in talking["turns"]][:3] == ["assistant", "user", "assistant"]
    assert talking["turns"][1]["content"] == "Tom has 1 more."


def test_evaluation_uses_the_environment(whole):
    assert any(len(sample["turns"]) > 2 for sample in samples_of(whole, "eval"))
    before = next(row for row in read_metrics(whole / "metrics.jsonl") if "eval/reward/environment" in row)
    assert -1 <= before["eval/reward/environment"] <= 1


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(whole, options, tmp_path):
    run = resumed_copy(whole, tmp_path, 2, *options, *SHORT)
    assert (run / "final" / "model.safetensors").read_bytes() == (
        whole / "final" / "model.safetensors"
    ).read_bytes()
    assert steady_metrics(run) == steady_metrics(whole)


@pytest.mark.slow
def test_a_run_with_rollouts_ahead_resumes_to_the_bit(options, tmp_path):
    ahead = (*options, "rollout.max_staleness=1")
    whole = train(small_run(tmp_path, "whole", *ahead)).run
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "stopped", *ahead))
    run = train(small_run(tmp_path, "stopped", *ahead), resume="stopped").run
    assert (run / "final" / "model.safetensors").read_bytes() == (
        whole / "final" / "model.safetensors"
    ).read_bytes()
    assert max(row["async/staleness_max"] for row in rows_of(whole)) == 1


@pytest.mark.slow
def test_worker_processes_and_weights_exchanged_in_flight(options, tmp_path):
    more = ("rollout.max_staleness=2", "rollout.in_flight=true", "rollout.environment_workers=2")
    run = train(small_run(tmp_path, "flight", *options, *more)).run
    rows = rows_of(run)
    assert len(rows) == 4
    assert all(np.isfinite(row["reward/mean"]) for row in rows)
    assert sum(row["episode/errors"] for row in rows) < 16 * 4 / 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.environment=null", "names the reward of an environment"),
        ("rollout.tools=[a.py:f]", "must be empty if rollout.environment is set"),
        ("rollout.environment=nowhere.py:Game", "nowhere.py"),
        ("rollout.environment=Game", "must be `path/file.py:name`"),
        ("data.on_long_prompt=truncate_left", "must be error or skip with rollout.environment"),
        ("data.train=builtin:arithmetic", "needs the column `secret`"),
    ],
)
def test_wrong_settings_are_refused_before_the_run(options, tmp_path, setting, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        train(small_run(tmp_path, "refused", *options, setting))


def test_keys_of_episodes_need_an_environment(tmp_path):
    with pytest.raises(ConfigError, match="has no effect without rollout"):
        train(small_run(tmp_path, "refused", "rollout.max_turns=2"))


@pytest.mark.slow
def test_a_column_chooses_among_environments(options, tmp_path):
    """In processes of their own; metrics are of all episodes, and of those of each environment."""
    (tmp_path / "echo.py").write_text(ECHO)
    rows = [
        {"prompt": [{"role": "user", "content": f"Tom has {i}."}], "game": name, "secret": 3}
        for i in range(6)
        for name in ("guess", "echo")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    game = next(option for option in options if option.startswith("rollout.environment=")).split("=")[1]
    named = f"{{column: game, guess: {game}, echo: {tmp_path}/echo.py:Echo}}"
    several = (
        *options, f"rollout.environment={named}", "rollout.environment_workers=1", "run.steps=1",
        "sft.steps=0", "eval.before=false", "eval.every_steps=0",
        f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/rows.jsonl",
    )  # fmt: skip
    run = train(small_run(tmp_path, "several", *several)).run
    for row in rows_of(run):
        assert row["episode/echo/turns/max"] == 2
        assert 1 < row["episode/echo/reward/mean"] <= 1.5
        assert row["episode/guess/reward/mean"] < 1
        assert row["episode/reward/mean"] < 1.5
    for sample in samples_of(run, "step"):
        if sample["columns"]["game"] == "echo":
            assert sample["finish_reason"] in ("environment", "length")
            assert {turn["content"] for turn in sample["turns"] if turn["role"] == "user"} <= {"Tom has 2."}
    rows[3]["game"] = "gess"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"row 4: the column `game` must name one of .* echo.*; got 'gess'"):
        train(small_run(tmp_path, "misspelt", *several))


@pytest.mark.parametrize(
    "named", ["{column: game}", "{guess: game.py:Game}", "{column: game, 'a b': g.py:G}"]
)
def test_environments_by_a_column_need_both(tmp_path, named):
    with pytest.raises(ConfigError, match="must name the data column that chooses the environment"):
        small_run(tmp_path, "refused", f"rollout.environment={named}", "data.train=builtin:arithmetic")
