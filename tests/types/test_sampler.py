"""What asks a sampler: turns come to those who asked for them, whatever the sampler does and when."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from quatrain.types.batches import Prompt
from quatrain.types.piece import Piece
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import AtOnce, Progress, Request, Sampler, TurnFailed, plain, request_of, sampled


class AtOnceDone(Sampler):
    """Ends each turn within `start`, with the number of its prompt as its token; fails at prompt 9."""

    def __init__(self):
        self.most = 0

    def load(self, weights, version):
        """Nothing to load."""

    def start(self, requests, listener):
        number = 0
        self.most = max(self.most, sum(request.sampling.n for request in requests))
        for request in requests:
            if request.prompt.group_id == 9:
                raise ConnectionError("the service is away")
            for _ in range(request.sampling.n):
                listener(number, Progress(Piece([request.prompt.group_id], [-1.0], [0]), "stop"))
                number += 1
        keys = Future()
        keys.set_result(list(range(len(requests))))
        return keys


def requests_of(*numbers, n=2):
    return [Request(Prompt(i, np.ones(1, np.int32), ""), 0, Sampling(n, 4)) for i in numbers]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_each_turn_comes_to_its_request_if_it_ends_at_once(most):
    """The fault: a turn that ends while others begin takes the place of one of these."""
    sampler = AtOnceDone()
    turns = AtOnce(sampler, most).sampled(requests_of(4, 5, 6, 7))
    assert [turn.result(5).tokens for turn in turns] == [[i] for i in (4, 4, 5, 5, 6, 6, 7, 7)]
    assert sampler.most <= max(most, 2)


def test_turns_that_end_at_once_may_be_many():
    """The fault: each began the next from within itself, and after some hundreds, where Python allows no
    deeper calls, the others were never asked for: an evaluation with such a sampler waited for ever."""
    turns = AtOnce(AtOnceDone(), 2).sampled(requests_of(*range(10, 2010), n=1))
    assert [turn.result(5).tokens for turn in turns] == [[i] for i in range(10, 2010)]


def test_who_waits_is_told_what_a_sampler_raises():
    """The fault: nobody would set the futures, and the run would wait for ever."""
    turns = AtOnce(AtOnceDone(), 2).sampled(requests_of(4, 9))
    assert turns[0].result(5).tokens == [4]
    with pytest.raises(ConnectionError, match="away"):
        turns[3].result(5)


def test_a_turn_that_was_refused_may_still_end():
    class Twice(AtOnceDone):
        def start(self, requests, listener):
            listener(0, Progress(error="no"))
            listener(0, Progress(Piece([1], [-1.0], [0]), "stop"))
            return Future()

    [turn] = sampled(Twice(), requests_of(4, n=1))
    with pytest.raises(TurnFailed, match="no"):
        turn.result(5)


def test_a_request_is_the_same_in_another_process():
    [request] = requests_of(4, n=3)
    ends = replace(request.singly(7)[0].own, stop_ids=(3, 4))
    for each in (request, *request.singly(7), replace(request, own=ends)):
        again = request_of(plain(each))
        assert (again.step, again.sampling, again.own) == (each.step, each.sampling, each.own)
        assert again.prompt.input_ids.tolist() == each.prompt.input_ids.tolist()
        assert again.prompt.group_id == each.prompt.group_id
    assert [each.own.sequence_id for each in request.singly(7)] == [12, 13, 14]
