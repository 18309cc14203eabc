"""The ideal schedule that rollouts ahead of training are compared with, and the runs of sleeping stages."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("ahead")


def test_the_ideal_makespan_of_equal_steps(script):
    """N steps of R and U seconds: R + (N - 1) max(R, U) + U with a lag, N (R + U) without."""
    for rollout, update in ((2.0, 1.0), (1.0, 3.0)):
        times = [rollout] * 10, [update] * 10
        overlapped = rollout + 9 * max(rollout, update) + update
        assert script.ideal_makespan(*times, 0, 0) == 10 * (rollout + update)
        for lag in (1, 2, 3):
            assert script.ideal_makespan(*times, lag, 0) == overlapped
        # Each of the two fences after the start costs the shorter of the two.
        assert script.ideal_makespan(*times, 1, 4) == overlapped + 2 * min(rollout, update)


def test_more_lag_helps_where_times_vary(script):
    rollout, update = np.random.default_rng(0).lognormal(0, 1, (2, 40))
    spans = [script.ideal_makespan(rollout, update, lag, 0) for lag in (0, 1, 2, 8)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == pytest.approx(rollout.sum() + update.sum())
    assert spans[-1] >= max(rollout.sum(), update.sum())


def test_sleeping_stages_take_no_less_than_the_ideal(script):
    """The run checks which weights sample each batch; what it takes in seconds is not asserted from above."""
    times = [0.004] * 6, [0.002] * 6
    for lag in (0, 2):
        assert script.sleeping_run(*times, lag, 4) >= script.ideal_makespan(*times, lag, 4)


def test_the_times_of_a_run_become_bars(script):
    common = {"time/step_s": 3.0, "time/rollout_s": 1.5, "time/reward_s": 0.5}
    update = {"time/update_s": 0.75, "time/advantage_s": 0.25}
    alone = script.spans([{**common, **update}] * 2)
    assert alone == ([(0.0, 2.0), (3.0, 2.0)], [(2.0, 1.0), (5.0, 1.0)])
    ahead = {"time/wait_rollout_s": 1.5, "time/place_weights_s": 0.5, "time/lead_s": 4.0}
    rollouts, _ = script.spans([{**common, **update, **ahead}] * 2)
    assert rollouts == [(-2.0, 2.0), (1.0, 2.0)]
    table = script.overlap_table({"0": [{**common, **update}], "1": [{**common, **update, **ahead}]})
    assert table[2] == "| 0 | 3.000 | 2.000 | 1.000 | 0.000 | 0.000 | 1.50 |"
