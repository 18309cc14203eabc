"""A sampler of one's own, which asks a function for the next token: here the model's plain forward pass.

quatrain train --set rollout.sampler=examples/own_sampler.py:AskFunction --set rollout.max_new_tokens=4
"""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from quatrain import Piece, Progress, Sampler
from quatrain.models.decoder import forward, logits


class AskFunction(Sampler):
    """Samples token by token. Whatever has the weights and gives log-probabilities can take its place."""

    def __init__(self, arch, stop_ids):
        self.stop_ids = stop_ids
        self.scores = jax.jit(
            lambda params, *row: logits(params, arch, forward(params, arch, *row).hidden)[0]
        )

    def load(self, weights, version):
        self.params, self.version = jax.tree.map(jnp.copy, weights), version  # training takes over `weights`

    def start(self, requests, listener):
        turns = [(request, number) for request in requests for number in range(request.sampling.n)]
        for i, (request, number) in enumerate(turns):
            own, group = request.own, request.prompt.group_id  # `own`: of a turn of an episode of several
            place = [group, number] if own is None else [own.sequence_id, own.offset]
            rng = np.random.default_rng([request.step, *place])
            listener(i, self.turn(request.prompt.input_ids.tolist(), request.sampling, rng))
        keys = Future()
        keys.set_result(list(range(len(requests))))
        return keys

    def turn(self, ids, sampling, rng):
        piece = Piece()
        while len(piece.tokens) < sampling.max_new_tokens:
            last, size = len(ids) - 1, -(-len(ids) // 32) * 32  # few sizes: each compiles a program
            row = np.pad(ids, (0, size - len(ids)))[None].astype(np.int32)
            scores = np.asarray(self.scores(self.params, row, np.arange(size)[None], np.minimum(row + 1, 1)))
            scores = scores[last].astype(np.float64) / (sampling.temperature or 1e-6)
            logprobs = scores - np.logaddexp.reduce(scores)
            ids = [*ids, int(rng.choice(len(scores), p=np.exp(logprobs)))]
            piece.append(Piece(ids[-1:], [float(logprobs[ids[-1]])], [self.version]))
            if ids[-1] in self.stop_ids:
                return Progress(piece, "stop")
        return Progress(piece, "length")
