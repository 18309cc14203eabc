"""The service around an engine: between `pause` and `resume` no round runs."""

import threading
import time

import numpy as np
import pytest
from servers import service_of

from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling, Request


@pytest.mark.usefixtures("computed_by")
def test_pause_returns_when_no_round_runs(small_arch, small_params, tokenizer, monkeypatch):
    service = service_of(small_arch, small_params, tokenizer)
    engine, inside, rounds = service.engine, threading.Event(), []
    advance = engine.advance

    def observed():
        inside.set()
        advance()
        rounds.append(1)
        inside.clear()

    monkeypatch.setattr(engine, "advance", observed)
    sampling = Sampling(n=1, max_new_tokens=40)
    owners = [PerRequestSampling(sampling, 5, 0, i) for i in range(4)]
    prompt = Prompt(0, np.arange(3, 9, dtype=np.int32), "")
    service.start([Request.alone(prompt, own) for own in owners], lambda number, progress: None)
    while service.num_running or not rounds:
        inside.wait(0.01)
        service.pause()
        seen = len(rounds), inside.is_set()
        time.sleep(0.01)
        assert seen == (len(rounds), inside.is_set()) == (len(rounds), False)
        service.resume()
    service.close()
    assert len(rounds) > 1
