"""math-verify in its processes: what it takes too long over, and what happens when a process fails."""

import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.reward.functions import correct, graded
from quatrain.reward.math import answers, grader
from quatrain.reward.math.expressions import same_expression
from quatrain.reward.scorer import RewardScorer
from quatrain.workers import worker_process
from quatrain.workers.pool import Failure, Pool

SLOW = r"\sqrt[9]{\sqrt[9]{9}}-9-\pi"


@pytest.fixture(autouse=True)
def nothing_remembered():
    grader._answer.cache_clear()
    answers._verdict.cache_clear()


@pytest.fixture
def broken_processes():
    """Ends the running processes, so that the next question starts one."""
    for worker in grader._POOL._processes.all:
        grader._POOL._thread.do(worker.kill, Failure("crash", "ended by the test"))


def test_a_comparison_without_end_is_cut_off_and_the_next_one_works():
    with pytest.raises(grader.Unjudged, match="took longer than 2 s") as error:
        same_expression(SLOW, "(1,x)")
    assert error.value.failure.kind == "timeout"
    assert same_expression("1+1+x", "x+2") is True


def test_a_process_that_cannot_start_is_a_failure_and_started_again(broken_processes, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(worker_process.sys, "executable", "/nowhere/python")
        values = graded(["1+x", "7", "x+1"], ["x+1", "7", "x+1"], timeout_s=5.0)
        assert [getattr(value, "kind", value) for value in values] == ["crash", 1.0, "crash"]
        assert "failed" in values[0].detail
        assert [math.isnan(value) for value in correct(["q"], ["1+x"], ["x+1"])] == [True]
    assert graded(["1+x", "7", "x+1"], ["x+1", "7", "x+1"], timeout_s=5.0) == [1.0, 1.0, 1.0]


def test_a_gold_answer_whose_process_fails_is_asked_again(broken_processes, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(worker_process.sys, "executable", str(python))
        (failure,) = graded(["5"], ["x+1"], timeout_s=5.0)
        assert isinstance(failure, Failure)
        assert "exited with status 3" in failure.detail
    assert graded(["5", "1+x"], ["x+1"] * 2, timeout_s=5.0) == [0.0, 1.0]


def test_slow_comparisons_are_bounded_in_all_and_counted_as_timeouts(caplog):
    num_slow = 400
    slow = [rf"\boxed{{{SLOW}-{index}}}" for index in range(num_slow)]
    rollouts = make_rollouts([r"\boxed{(1,x)}", *slow])
    rollouts = replace(rollouts, columns={"answer": ["(1,x)"] * len(slow) + ["(1,x)"]})
    config = RewardConfig(functions={"correct": 1.0}, timeout_s=0.5)
    began = time.perf_counter()
    batch = RewardScorer(config).score(rollouts)
    assert time.perf_counter() - began < 30.0  # 400 seconds on two free cores without the bound
    np.testing.assert_array_equal(batch.rewards, [1.0] + [-1.0] * num_slow)
    assert batch.metrics["reward/correct/errors/timeout"].result() == num_slow
    assert batch.metrics["reward/correct/abstained"].result() == 0
    assert "reward function `correct` failed on 400 of 401 samples (timeout: 400)" in caplog.text


def test_what_took_too_long_is_not_remembered():
    (first,) = graded([rf"\boxed{{{SLOW}}}"], ["(1,x)"], timeout_s=0.2)
    assert isinstance(first, Failure)
    assert "0.2 s" in first.detail
    (again,) = graded([rf"\boxed{{{SLOW}}}"], ["(1,x)"], timeout_s=0.3)
    assert "0.3 s" in again.detail


def test_each_question_is_asked_once(monkeypatch):
    asked = Counter()
    real = Pool.submit

    def submit(self, spec, arguments, *limits, **more):
        asked[arguments["question"]] += 1
        return real(self, spec, arguments, *limits, **more)

    monkeypatch.setattr(Pool, "submit", submit)
    for _ in range(2):
        assert graded(["x+1", "1+x", "x+2", "x+2", "no"], ["x+1"] * 5, 5.0) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert sum(asked.values()) == 3
    assert max(asked.values()) == 1


def test_numbers_need_no_process(monkeypatch):
    monkeypatch.setattr(Pool, "submit", lambda self, *request: pytest.fail(f"asked {request}"))
    said = [
        "12",
        "13",
        "3*4",
        "2^3 + 4",
        r"\frac{24}{2}",
        "<12",
        "(3,12",
        "12 apples",
        "7x-",
        "1, 12",
        "x < 12",
    ]
    assert graded(said, ["12"] * len(said), 5.0) == [1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert graded(["5!", "120", "6!"], ["120", "5!", "5!"], 5.0) == [1, 1, 0]


def test_a_column_named_like_the_limit_does_not_replace_it():
    rollouts = replace(make_rollouts(["7"]), columns={"answer": ["7"], "timeout_s": ["soon"]})
    assert RewardScorer(RewardConfig(functions={"correct": 1.0})).score(rollouts).rewards.tolist() == [1.0]


def test_a_comparison_that_is_cut_off_ends_no_process_but_its_fork():
    assert same_expression("1+x", "x+1") is True
    before = [worker._popen.pid for worker in grader._POOL._processes.all]
    with pytest.raises(grader.Unjudged):
        same_expression(SLOW, "(2,x)")
    assert same_expression("2+x", "x+2") is True
    assert [worker._popen.pid for worker in grader._POOL._processes.all] == before
