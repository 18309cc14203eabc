"""Scores of a reward model on the meshes it is given, in one process or in one of several that it joins.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python score_worker.py MODEL RESULT.npz "mesh=2,2,2"

A layout is what the configuration has of it. Every process writes the scores of each layout. With
COORDINATOR, NUM_PROCESSES and PROCESS_ID in the environment, the devices are those of all processes.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from rollouts import make_rollouts

from quatrain.cluster import processes as hosts
from quatrain.config.load import load_config
from quatrain.data.policy import Meshes
from quatrain.reward.reward_model import load_reward_models

LENGTHS = (1, 30, 7, 15, 3, 3, 22, 9, 12, 40, 5)


def scores(path: str, layout: str) -> np.ndarray:
    """[n] scores of drawn texts, in micro-batches of at most 48 tokens per data shard."""
    entry = f"model:{path}"
    settings = (
        *layout.split(),
        f'reward.functions={{"{entry}": 1.0}}',
        "reward.model_max_tokens_per_device=48",
        "data.max_prompt_length=24",
        "rollout.max_new_tokens=24",
    )
    config = load_config(None, settings, environ={}).config
    offloaded = "host" if config.offload.reward_models else "device"
    mesh = Meshes.of(config).reward
    model = load_reward_models(config.reward, config.model, mesh=mesh, memory=offloaded)[entry]
    rng = np.random.default_rng(0)
    letters = ["".join(map(chr, rng.integers(97, 123, length))) for length in LENGTHS]
    return model.score(make_rollouts(letters)).values


def main() -> None:
    """Writes the scores of every layout."""
    model, target, *layouts = sys.argv[1:]
    if "COORDINATOR" in os.environ:
        number, own = (int(os.environ[name]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        hosts.initialize(os.environ["COORDINATOR"], number, own, start_timeout_s=60)
    np.savez(target, **{layout: scores(model, layout) for layout in layouts})
    hosts.shutdown()


if __name__ == "__main__":
    main()
