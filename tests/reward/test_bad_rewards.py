"""Whatever a reward function does, it costs the samples on which it does it, and no other."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import bad_rewards
import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.reward.scorer import RewardScorer

FILE = bad_rewards.__file__
KINDS = {
    kind: [name for name, other in bad_rewards.FAILING.items() if other == kind]
    for kind in bad_rewards.FAILING.values()
}
COMPLETIONS = ["aa", "bad", "c", "dddd"]
REWARDS = [2.0, -1.0, 1.0, 4.0]


def make_scorer(names, **settings):
    functions = {f"{FILE}:{name}": 1.0 for name in names}
    settings = {"timeout_s": 5.0, "memory_mb": 256, "workers": 2, "per_call": "sample"} | settings
    return RewardScorer(RewardConfig(functions=functions, **settings))


def check(names, rollouts, **settings):
    """Scores the batch with all functions at once, and compares each with the table."""
    with closing(make_scorer(names, **settings)) as scorer:
        batch = scorer.score(rollouts)
    for name, values in zip(batch.function_names, batch.rewards_per_function, strict=True):
        kind = bad_rewards.FAILING[name]
        counts = {
            metric.removeprefix(f"reward/{name}/"): value.result()
            for metric, value in batch.metrics.items()
            if metric.startswith(f"reward/{name}/errors")
        }
        assert counts == {"errors": 1, f"errors/{kind}": 1}, name
        np.testing.assert_array_equal(values, np.float32(REWARDS), name)


@pytest.mark.parametrize("kind", ["crash", "memory", "exit", "error"])
def test_a_failing_sample_costs_itself_alone_and_is_counted_by_kind(kind):
    check(KINDS[kind], make_rollouts(COMPLETIONS))


def test_a_function_that_takes_too_long_costs_the_sample_and_is_ended_on_time():
    names = ["spins_in_c", "ignores_signals"]
    began = time.perf_counter()
    check(names, make_rollouts(COMPLETIONS), timeout_s=0.5)
    assert time.perf_counter() - began < len(names) * (0.5 + 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("per_call", ["batch", "group", "sample"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", bad_rewards.FAILING)
def test_each_failure_in_calls_on_batches_groups_and_samples(name, workers, per_call):
    rollouts = replace(make_rollouts(COMPLETIONS), group_ids=np.array([4, 4, 2, 2]))
    settings = {"per_call": per_call, "workers": workers}
    if bad_rewards.FAILING[name] == "timeout":
        settings["timeout_s"] = 1.0
    began = time.perf_counter()
    check([name], rollouts, **settings)
    assert time.perf_counter() - began < settings.get("timeout_s", 5.0) + 2.0


def test_a_wrong_return_value_is_one_clear_error():
    with closing(make_scorer(bad_rewards.REFUSED)) as scorer:
        functions = scorer._functions
        for function, message in zip(functions, bad_rewards.REFUSED.values(), strict=True):
            scorer._functions = [function]
            with pytest.raises(ValueError, match=rf"`.*:{function.name}` must return .*{message}"):
                scorer.score(make_rollouts(["a", "b"]))


def test_odd_functions_that_harm_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(make_scorer(bad_rewards.HARMLESS, workers=1)) as scorer:
        for _ in range(2):
            batch = scorer.score(make_rollouts(COMPLETIONS))
            wanted = [np.float32([2, 3, 1, 4])] * len(bad_rewards.HARMLESS)
            np.testing.assert_array_equal(batch.rewards_per_function, wanted)
            assert not [name for name in batch.metrics if "/errors/" in name]
        worker = scorer._pool._processes.all[0]._popen.pid
        assert of_session(worker) == [worker]  # the children of functions that forked have ended
    assert Path.cwd() == tmp_path
    assert of_session(worker) == []


def test_there_are_as_many_as_promised():
    assert len(bad_rewards.FAILING) >= 50


def of_session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = path.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found
