"""Programs of the real client against `quatrain serve --train` (`make test-tinker`).

Numbers in names of tests (t1, t4, …) are those of the acceptance list in docs/tinker.md.
"""

import time

import numpy as np
import pytest
from proxy import proxied
from tinker_server import PROGRAMS, finished, run_program, served, start_program

pytestmark = pytest.mark.tinker

TENANTS = 8
SAME_SEQUENCES = 0.999
"""The share of sequences with the same tokens, where decode batches of other shapes round otherwise."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("client")
    with served(place) as running:
        yield running


def test_every_call(server, tmp_path):
    """T1. Each check of the program names what it would catch."""
    found = run_program(server, "every_call", tmp_path)
    seconds = found["seconds"]
    slowest = sorted(seconds, key=seconds.get)[-5:]
    print(f"\n{len(seconds)} checks in {sum(seconds.values()):.0f} s, the longest: "
          + ", ".join(f"{name} {seconds[name]} s" for name in reversed(slowest)))  # fmt: skip
    assert not found["failed"], (tmp_path / "out.log").read_text()
    assert len(seconds) == 39


def test_chunks_in_any_order_are_one_request_and_lost_answers_change_nothing(server, tmp_path):
    """T4. Catches an order of arrival taken for that of the calls, and a repeated request that runs twice."""
    whole = run_program(server, "chunks", tmp_path / "whole", 2500)
    chunks = run_program(server, "chunks", tmp_path / "chunks", 300)
    for name in ("logprobs", "after"):
        apart = np.abs(np.subtract(whole[name], chunks[name])).max()
        print(f"\n{name}: one request and 9 chunks differ by {apart:.2g}")
        assert apart < 3e-5
    assert whole["losses"] == pytest.approx(chunks["losses"], rel=1e-5)
    with proxied(server.port, loses=True) as (url, asked, losses):
        lost = run_program(server, "chunks", tmp_path / "lost", 300, environment={"TINKER_BASE_URL": url})
    print(f"{losses[0]} of {len(asked)} answers lost; {lost['seconds']:.1f} s, "
          f"without losses {chunks['seconds']:.1f} s")  # fmt: skip
    assert losses[0] >= 5
    for name in ("losses", "logprobs", "after", "tokens"):
        assert lost[name] == chunks[name], name


def test_the_sampler_agrees_with_the_trainer(server, tmp_path):
    """T6. Catches adapters, positions or a head that decoding computes in another way."""
    found = run_program(server, "agreement", tmp_path)
    print(f"\n{found}")
    assert found["max"] < 1e-4
    assert found["mean"] < 1e-6
    assert found["scored_max"] < 1e-4


def sequences_alike(first, second):
    assert len(first) == len(second)
    return np.mean([a == b for a, b in zip(first, second)])


def test_tenants_have_the_numbers_that_each_has_alone(server, tmp_path):
    """T11. Catches gradients or samples that mix tenants, and a tenant that others starve."""
    alone = [run_program(server, "tenant", tmp_path / f"alone{i}", i, 3) for i in range(TENANTS)]
    go, processes = tmp_path / "go", []
    for i in range(TENANTS):
        ready = tmp_path / f"ready{i}"
        words = [PROGRAMS / "tenant.py", i, 3, ready, go]
        processes.append(start_program(server, words, tmp_path / f"together{i}"))
    while not all((tmp_path / f"ready{i}").exists() for i in range(TENANTS)):
        assert all(process.poll() in (None, 0) for process in processes)
        time.sleep(0.1)
    go.touch()
    together = [finished(process, tmp_path / f"together{i}") for i, process in enumerate(processes)]
    usual = np.mean([each["seconds"] for each in alone[1:]])  # the first compiles
    fair = TENANTS * usual
    alike = [sequences_alike(a["tokens"], b["tokens"]) for a, b in zip(alone, together)]
    took = [each["seconds"] for each in together]
    print(
        f"\n{TENANTS} at once: {min(took):.1f} to {max(took):.1f} s each, alone {usual:.1f} s; "
        f"sequences alike {np.mean(alike):.4f}"
    )
    assert [each["digest"] for each in together] == [each["digest"] for each in alone]
    assert np.mean(alike) >= SAME_SEQUENCES
    assert max(took) < 3 * fair
    assert max(each["longest"] for each in together) < fair
