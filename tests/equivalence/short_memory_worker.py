"""Samples of engines with little memory, on meshes of 4 simulated devices; writes them to the file argv[1].

The other arguments are MESH/POSITIONS/RINGS/CHANCE: the positions of a replica's cache, those of its rings
before the last, and how often a sample is preempted in a round; then perhaps /DRAFTS, those of a step. The
model is that of the golden FAMILY in the environment, if it is given; greedy, because its log-probabilities
have more rounding.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
from tiny_qwen2 import tiny_qwen2

sys.path.insert(0, str(Path(__file__).parents[1]))
from architectures import of_golden

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.models.kv_cache import bytes_per_position, bytes_per_state
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh
from quatrain.types.batches import Prompt
from quatrain.types.sampler import Request

FAMILY = os.environ.get("FAMILY")
ARCH = of_golden(FAMILY, vocab_size=64, max_position=4096) if FAMILY else tiny_qwen2(num_layers=1)
LENGTHS = tuple(map(int, os.environ.get("LENGTHS", "3,1,9,2100,1,2,3,4,5,6,7,8").split(",")))
"""Of prompts, of which the longest is computed in parts."""


class _WithoutText:
    def decode(self, tokens, skip_special_tokens):
        return ""


def sampled(case: str) -> dict[str, np.ndarray]:
    sizes, positions, rings, chance, *drafts = case.split("/")
    shape, draw = MeshShape(*map(int, sizes.split(","))), np.random.default_rng(0)
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    config = RolloutConfig(
        n=3,
        max_new_tokens=int(os.environ.get("MOST_NEW", "100")),
        temperature=0.0 if FAMILY else 0.9,
        speculate=int(drafts[0]) if drafts else 0,
    )
    memory = int(positions) * bytes_per_position(ARCH, "float32", shape.tp)
    memory += 20 * bytes_per_state(ARCH, "float32", shape.tp)
    settings = {"stop_ids": tuple(range(0, 64, 25)), "seed": 11, "mesh": mesh, "cache_bytes": memory}
    engine = RolloutEngine(ARCH, config, _WithoutText(), **settings)
    engine.sync_weights(init_params(ARCH, jax.random.key(0), mesh=mesh), 1)
    prompts = [Prompt(i, draw.integers(1, 64, size, np.int32), "") for i, size in enumerate(LENGTHS)]
    tickets = engine.submit([Request(prompt, 3, engine.sampling) for prompt in prompts])
    engine._session._admission.ring_positions = tuple(map(int, filter(None, rings.split(","))))
    while not all(map(engine.finished, tickets)):
        for who in engine._session._scheduler.placed:
            if draw.random() < float(chance):
                engine._session._scheduler.preempt(*who)
        engine.advance()
    recomputed = np.array(engine.stats.recomputed_tokens)
    completions = [turn for ticket in tickets for turn in engine.take(ticket)]
    tokens, logprobs = (
        np.concatenate([getattr(c, name) for c in completions]) for name in ("tokens", "logprobs")
    )
    return {"tokens": tokens, "logprobs": logprobs, "recomputed": recomputed}


if __name__ == "__main__":
    found = {f"{case} {name}": value for case in sys.argv[2:] for name, value in sampled(case).items()}
    np.savez(sys.argv[1], **found)
