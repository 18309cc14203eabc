"""Samples of prompts with pictures, on meshes of 4 simulated devices. Writes them to the file argv[1]."""

import sys
from pathlib import Path

import jax
import numpy as np
from tiny_qwen2 import tiny_qwen2

sys.path.insert(0, str(Path(__file__).parents[1]))

from architectures import changed
from pictured import MadeUpFeatures, picture, tokens_of

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig
from quatrain.engine import groups, session
from quatrain.engine.engine import RolloutEngine
from quatrain.models.params import init_params
from quatrain.models.rope import Rope
from quatrain.parallel.mesh import make_mesh
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import Request

ARCH = changed(tiny_qwen2(num_layers=2), rope=Rope(sections=(2, 1, 1), alternating=True))
BEGIN, CAT, DOG, LARGE = list(range(10, 50)), picture(3, 4), picture(3, 4, 1), picture(6, 9)
CONTEXTS = [
    [BEGIN, CAT, [5]],
    [BEGIN, DOG, [5]],
    [[7], CAT, DOG, [8]],
    [[*BEGIN, *BEGIN], LARGE, [9, 3]],  # in parts, the second of which begins within the picture
    [BEGIN],
    [[4], LARGE, [6]],
]
groups.PREFILL_TOKENS = session.PREFILL_TOKENS = 96


def results(shape: MeshShape) -> dict[str, np.ndarray]:
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    config = RolloutConfig(n=2, max_new_tokens=8, temperature=0.0)
    features = MadeUpFeatures(ARCH.hidden_size)
    engine = RolloutEngine(ARCH, config, None, stop_ids=(), seed=0, mesh=mesh, features=features)
    engine.sync_weights(init_params(ARCH, jax.random.key(0), mesh=mesh), 0)
    requests = []
    for number, runs in enumerate(CONTEXTS):
        ids, pictures = tokens_of(runs)
        prompt = Prompt(number, np.array(ids, np.int32), "", pictures=pictures)
        requests.append(Request(prompt, 0, Sampling.of(config)))
    tickets = engine.submit(requests)
    while not all(map(engine.finished, tickets)):
        engine.advance()
    done = [completion for ticket in tickets for completion in engine.take(ticket)]
    return {
        "tokens": np.array([each.tokens for each in done]),
        "logprobs": np.array([each.logprobs for each in done]),
    }


if __name__ == "__main__":
    every = {}
    for mesh in sys.argv[2:]:
        found = results(MeshShape(*map(int, mesh.split(","))))
        every |= {f"{mesh} {key}": value for key, value in found.items()}
    np.savez(sys.argv[1], **every)
