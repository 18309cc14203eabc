"""Counting programs and the seconds of compiling them."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from quatrain.parallel import compilations
from quatrain.parallel.compilations import (
    COMPILE_EVENT,
    compile_seconds,
    compiling_for_s,
    num_compilations,
    watching_compilations,
)


def test_a_program_is_counted_once_with_its_seconds():
    program = jax.jit(lambda x: jnp.sin(x) * 3)
    x = jnp.ones(5)
    count, seconds, began = num_compilations(), compile_seconds(), time.perf_counter()
    program(x)
    wall = time.perf_counter() - began
    assert num_compilations() == count + 1
    assert 0 < compile_seconds() - seconds <= wall
    compiled = compile_seconds()
    program(x)
    assert (num_compilations(), compile_seconds()) == (count + 1, compiled)
    assert compiling_for_s() is None


@pytest.fixture
def record(monkeypatch):
    """A record of its own, and a clock to set."""
    now = [0.0]
    monkeypatch.setattr(compilations.time, "perf_counter", lambda: now[0])
    return compilations._Record(), now


def test_seconds_of_activities_inside_each_other_count_once(record):
    record, now = record
    trace = "/jax/core/compile/jaxpr_trace_duration"
    record.begin(trace, 0.0)
    now[0] = 2.0
    record.begin(trace, 0.0)
    now[0] = 5.0
    assert (record.seconds(), record.current_s()) == (5.0, 5.0)
    record.end(trace, 3.0)
    now[0] = 6.0
    record.end(trace, 6.0)
    now[0] = 100.0
    assert (record.seconds(), record.current_s(), record.count) == (6.0, None, 0)
    record.begin(COMPILE_EVENT, 0.0)
    now[0] = 110.0
    record.end(COMPILE_EVENT, 10.0)
    record.end("/jax/compilation_cache/cache_retrieval_time_sec", 10.0)
    assert (record.seconds(), record.count) == (16.0, 1)


def test_two_threads_that_compile_at_once_count_their_seconds_once(record):
    record, now = record
    record.begin(COMPILE_EVENT, 0.0)
    now[0] = 4.0
    other = threading.Thread(target=record.begin, args=(COMPILE_EVENT, 0.0))
    other.start()
    other.join()
    now[0] = 7.0
    record.end(COMPILE_EVENT, 7.0)
    now[0] = 9.0
    record.end(COMPILE_EVENT, 5.0)
    assert (record.seconds(), record.count) == (9.0, 2)


def test_a_watcher_is_called_before_each_program():
    called = []
    x = jnp.ones(6)
    with watching_compilations(lambda: called.append((num_compilations(), compiling_for_s()))):
        before = num_compilations()
        jax.jit(lambda x: jnp.cos(x) * 5)(x)
    jax.jit(lambda x: jnp.cos(x) * 6)(x)
    assert [count for count, _ in called] == [before]
    assert called[0][1] is not None
