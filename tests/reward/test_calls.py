import json
import logging
import os
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from effort import within
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.reward.scorer import RewardScorer

SOURCE = '''
import os, sys, time

calls = 0

def size(completions):
    return [len(completions)] * len(completions)

def rank(completions):
    """The rank of each completion in its call; fails on a batch with `bad`."""
    if "bad" in completions:
        os._exit(0)
    return [sorted(completions).index(text) for text in completions]

def hangs(completions):
    if "bad" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)

def always_hangs(completions):
    time.sleep(1000)

def count_calls(completions):
    global calls
    calls += 1
    return [calls] * len(completions)

def process(completions):
    return [os.getpid()] * len(completions)

def waits(completions):
    time.sleep(0.3)
    return [1.0] * len(completions)

def says(completions):
    print("the token is", os.environ["MY_API_TOKEN"])
    print("to the other stream", file=sys.stderr)
    return [0.0] * len(completions)

def raises_a_token(completions):
    raise ValueError("-" * 60 + os.environ["MY_API_TOKEN"] + "-" * 3960)

def prints_a_token(completions):
    print("-" * (16384 - 20 - 8) + os.environ["MY_API_TOKEN"])
    return [0.0] * len(completions)

def returns_a_token(completions):
    return ["-" * 62 + os.environ["MY_API_TOKEN"]]

def jax_platform(completions):
    return [float(os.environ["JAX_PLATFORMS"] == "cpu" and "jax" not in sys.modules)] * len(completions)
'''


@pytest.fixture
def scorer_of(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    made = []

    def make(*names, decide=None, **settings):
        functions = {f"{path}:{name}": 1.0 for name in names}
        config = RewardConfig(functions=functions, **{"workers": 2, "timeout_s": 5.0} | settings)
        made.append(RewardScorer(config, **({} if decide is None else {"decide": decide})))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def grouped(completions, groups):
    return replace(make_rollouts(completions), group_ids=np.array(groups, np.int64))


def errors(batch, name):
    prefix = f"reward/{name}/errors"
    return {key.removeprefix(prefix): m.result() for key, m in batch.metrics.items() if prefix in key}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("per_call", "sizes"), [("batch", [5] * 5), ("group", [3, 2, 3, 2, 3]), ("sample", [1] * 5)]
)
def test_a_call_gets_the_samples_that_per_call_says(scorer_of, per_call, sizes, workers):
    scorer = scorer_of("size", per_call=per_call, workers=workers)
    rollouts = grouped(list("abcde"), [7, 4, 7, 4, 7])
    np.testing.assert_array_equal(scorer.score(rollouts).rewards, sizes)


def test_a_failing_group_is_searched_and_the_others_stay_whole(scorer_of):
    rollouts = grouped(["b", "c", "a", "bad", "y", "x"], [0, 0, 1, 1, 2, 2])
    batch = scorer_of("rank").score(rollouts)
    np.testing.assert_array_equal(batch.rewards, [0, 1, 0, -1, 1, 0])
    assert errors(batch, "rank") == {"": 1, "/exit": 1}


@pytest.mark.parametrize("per_call", ["batch", "group", "sample"])
def test_a_step_waits_the_time_limit_and_a_second_for_samples_that_hang(scorer_of, per_call):
    scorer = scorer_of("hangs", timeout_s=2.0, per_call=per_call)
    rollouts = grouped(["a", "b", "bad", "c", "d", "bad", "e", "f"], [0, 0, 1, 1, 2, 2, 3, 3])
    began = time.perf_counter()
    batch = scorer.score(rollouts)
    assert time.perf_counter() - began < 4.0  # twice the second, for a loaded machine
    np.testing.assert_array_equal(batch.rewards, [1, 1, -1, 1, 1, -1, 1, 1])
    assert errors(batch, "hangs") == {"": 2, "/timeout": 2}


@pytest.mark.parametrize("per_call", ["batch", "sample"])
def test_a_function_that_always_hangs_is_given_up(scorer_of, per_call):
    scorer = scorer_of("always_hangs", timeout_s=0.5, per_call=per_call)
    began = time.perf_counter()
    batch = scorer.score(make_rollouts(["x"] * 100))
    assert time.perf_counter() - began < 8.0  # 100 samples, two at a time, would take 25 s
    np.testing.assert_array_equal(batch.rewards, [-1] * 100)
    assert errors(batch, "always_hangs") == {"": 100, "/timeout": 100}


def test_a_function_keeps_its_state_and_its_process_from_call_to_call(scorer_of):
    scorer = scorer_of("count_calls", "process")
    counts, processes = zip(
        *(scorer.score(make_rollouts(["a"])).rewards_per_function[:, 0] for _ in range(3)), strict=True
    )
    assert counts == (1, 2, 3)
    assert len(set(processes)) == 1
    assert processes[0] != os.getpid()


def test_calls_on_single_samples_run_in_parallel(scorer_of):
    scorer = scorer_of("waits", per_call="sample", workers=4)
    scorer.score(make_rollouts(["a"] * 4))  # starts the workers
    within(0.9, lambda: scorer.score(make_rollouts(["a"] * 4)), time.perf_counter)  # one by one: 1.2 s


def test_workers_import_no_jax_and_keep_off_the_accelerator(scorer_of):
    assert scorer_of("jax_platform").score(make_rollouts(["a"])).rewards == 1


def test_what_a_function_prints_goes_to_the_log(scorer_of, caplog, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hush-hush")
    with caplog.at_level(logging.INFO):
        scorer_of("says").score(make_rollouts(["a"]))
    (record,) = caplog.records
    assert record.getMessage() == (
        "reward function `says` printed: the token is hush-hush\nto the other stream"
    )
    assert record.only_in_file


def test_what_a_function_prints_goes_redacted_to_standard_error_without_a_log(scorer_of, capsys, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hush-hush")
    scorer_of("says").score(make_rollouts(["a"]))
    printed = capsys.readouterr()
    assert "`says` printed: the token is [redacted]\nto the other stream" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("name", ["raises_a_token", "prints_a_token", "returns_a_token"])
def test_a_long_text_is_not_cut_within_a_secret(scorer_of, caplog, monkeypatch, name):
    """Where the text is cut, it would end or begin within the token, which could not be recognised."""
    monkeypatch.setenv("MY_API_TOKEN", "abcdefghijklmnopqrstuvwxyz012345")
    with caplog.at_level(logging.INFO), suppress(ValueError):
        scorer_of(name).score(make_rollouts(["a"]))
    text = caplog.text
    if name == "returns_a_token":
        with pytest.raises(ValueError, match="a value str of 96 characters") as raised:
            scorer_of(name).score(make_rollouts(["a"]))
        text += str(raised.value)
    assert text
    assert "abcdefgh" not in text
    assert "yz012345" not in text


def test_only_the_process_that_decides_has_workers(scorer_of):
    decided = []

    def deciding(function):
        decided.append(json.loads(json.dumps(function())))
        return decided[-1]

    here = scorer_of("size", decide=deciding)
    wanted = here.score(make_rollouts(["a", "b"])).rewards
    replies = iter(decided)
    there = scorer_of("size", decide=lambda function: next(replies))
    np.testing.assert_array_equal(there.score(make_rollouts(["a", "b"])).rewards, wanted)
    assert not there._pool._processes.all


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_names_file_and_line_and_shows_the_completion(tmp_path, caplog, workers):
    """Catches a warning of which a reader must guess the line, and the completion that it failed on."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions, **_):\n    return [float(c.split('=')[1]) for c in completions]\n"
    )
    config = RewardConfig(functions={f"{path}:score": 1.0}, workers=workers)
    with closing(RewardScorer(config)) as scorer, caplog.at_level(logging.WARNING):
        scorer.score(make_rollouts(["x=1", "no answer here"]))
    assert f"its first failure: {path}, line 2: " in caplog.text
    assert "the completion: 'no answer here'" in caplog.text


def test_built_in_functions_and_no_workers_start_no_process(scorer_of):
    assert RewardScorer(RewardConfig(functions={"format": 1.0}))._pool is None
    scorer = scorer_of("process", workers=0)
    assert scorer._pool is None
    assert scorer.score(make_rollouts(["a"])).rewards == os.getpid()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(0)", r"cannot be imported \(exit\): its process exited with status 0"),
        ("import ctypes; ctypes.string_at(0)", r"cannot be imported \(crash\): .* signal SIGSEGV"),
    ],
)
def test_a_file_that_ends_its_process_is_an_error(tmp_path, source, message):
    path = tmp_path / "leaves.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        RewardScorer(RewardConfig(functions={f"{path}:f": 1.0}))


def test_a_function_of_the_running_program_needs_no_workers():
    with pytest.raises(ValueError, match=r"which processes import; .* set reward.workers to 0"):
        RewardScorer(RewardConfig(functions={"__main__:f": 1.0}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_column_that_cannot_be_copied_is_an_error(tmp_path, workers):
    path = tmp_path / "takes.py"
    path.write_text("def takes(completions, lock): return [0.0]\n")
    scorer = RewardScorer(RewardConfig(functions={f"{path}:takes": 1.0}, workers=workers))
    with pytest.raises(ValueError, match="must hold values that can be copied"):
        scorer.score(make_rollouts(["a"], lock=[lambda: None]))


def test_a_function_that_fails_on_a_batch_only_is_one_error_of_its_kind(tmp_path):
    path = tmp_path / "single.py"
    path.write_text(
        "import sys\ndef single(completions):\n    if len(completions) > 1: sys.exit()\n    return [3]\n"
    )
    with closing(RewardScorer(RewardConfig(functions={f"{path}:single": 1.0}))) as scorer:
        batch = scorer.score(make_rollouts(["a", "b"]))
    np.testing.assert_array_equal(batch.rewards, [3, 3])
    assert errors(batch, "single") == {"": 1, "/exit": 1}


def test_workers_end_with_a_scorer_that_nobody_closed(tmp_path):
    path = tmp_path / "where.py"
    path.write_text("import os\ndef where(completions): return [os.getpid()]\n")
    code = (
        "import numpy, sys; from rollouts import make_rollouts\n"
        "from quatrain.config.schema import RewardConfig; from quatrain.reward.scorer import RewardScorer\n"
        f"scorer = RewardScorer(RewardConfig(functions={{'{path}:where': 1.0}}))\n"
        "print(int(scorer.score(make_rollouts(['a'])).rewards[0]))\n"
    )
    tests = str(Path(__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()
