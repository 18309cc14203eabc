"""What a rollout worker on Ray is given of a run's configuration: its own configuration, and its devices.

Data flow: `Config` of the run -> `worker_config` -> the worker's process, and the plan of its memory. This
module does not import JAX.
"""

from __future__ import annotations

import math
from typing import Any

from quatrain.config.axes import TP
from quatrain.config.mesh import axis_sizes
from quatrain.config.schema import Config


def worker_config(config: Config) -> Config:
    """The configuration of a rollout worker, which has all devices of its own process and only samples."""
    rollout, spec = config.rollout, _mesh(config)
    most = rollout.max_concurrency
    own = {
        "workers": 0,
        "weights_dir": None,
        "mesh": spec,
        "max_staleness": 0,
        "greedy_baseline": False,
        "max_concurrency": most and -(-most // max(rollout.workers, 1)),
    }
    return config.model_copy(
        update={
            "mesh": spec,
            "rollout": rollout.model_copy(update=own),
            "placement": type(config.placement)(),
            "offload": type(config.offload)(),
            "critic": type(config.critic)(enabled=False),
        }
    )


def devices_of_worker(config: Config) -> int:
    """The accelerators that a worker gets: those that its mesh names, one for an axis of -1."""
    return math.prod(max(size, 1) for size in axis_sizes(_mesh(config), "rollout.mesh").values())


def _mesh(config: Config) -> Any:
    """The mesh of each worker: `rollout.mesh`, or replicas of the sampler with `tp` of `mesh`."""
    if config.rollout.mesh is not None:
        return config.rollout.mesh
    tp = 1 if config.mesh == "auto" else axis_sizes(config.mesh)[TP]
    return f"-1,1,{tp}" if tp > 0 else "1,1,-1"
