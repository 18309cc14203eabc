"""Starts the fleet that the configuration names: workers on Ray, or inference servers.

Data flow: `Config` and the policy -> factories of workers and what publishes weights for them -> `Fleet`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.backend import this_backend
from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.config.places import local_path
from quatrain.config.roles import devices_of_worker, worker_config
from quatrain.config.schema import Config
from quatrain.data.expansion import BLIND
from quatrain.data.pictures import PictureReader, of_pixels
from quatrain.data.policy import Policy
from quatrain.data.tokenizer import render
from quatrain.engine.engine import records_routes
from quatrain.engine.service import blind
from quatrain.models.lora import EXPERT_PARAMETERS, merged, merged_architecture
from quatrain.rollout import http_worker
from quatrain.rollout.fleet import KEPT_VERSIONS, Fleet
from quatrain.rollout.http_worker import HttpWorker
from quatrain.rollout.publish import Adapted, Folder, InMemory, Publisher, Stream
from quatrain.rollout.supervisor import WorkerFactory
from quatrain.rollout.worker import Worker
from quatrain.servers.expert_routes import RouteRules
from quatrain.servers.server import PROBE_TEXT, Looks, ServerRules
from quatrain.types.pictures import Tokens
from quatrain.types.rollouts import Sampling

LOOK_SIDE = 64
"""Pixels of a side of the pictures by which servers are probed."""
MakeWorker = Callable[[Config, int, str], Worker]
"""Makes a worker in its own process: of the configuration of a worker, `Policy.usual_prompt` and its name."""


def start_fleet(config: Config, policy: Policy, make_worker: MakeWorker) -> Fleet:
    """The fleet of `rollout.workers` or `rollout.servers`, all of which have started; without weights.

    Raises ValueError, which names it, if one fails to start or cannot serve this run.
    """
    rollout = config.rollout
    publisher: Publisher = InMemory()
    factories: Sequence[WorkerFactory] = []
    adapted = _adapted(config, policy)  # by all processes, which compute the fingerprint together
    if is_main_process():
        if rollout.servers:
            of_kind = servers(config, policy, adapted)
        else:
            of_kind = ray_workers(config, policy, make_worker)
        factories, publisher = of_kind
    fleet = Fleet(
        factories,
        publisher,
        # Most servers load whole models; quatrain's own workers have the base, and take adapters.
        prepare=partial(merged, arch=policy.arch, dtype=config.model.dtype) if rollout.servers else None,
        dtype=config.model.dtype,
        timeout_s=rollout.timeout_s,
        cannot_see=blind(policy.arch),
    )
    try:
        fleet.wait_for_start()
        if rollout.servers:
            fleet.cannot_see = decided_by_main(lambda: _blind_server(fleet.workers))
            if adapted and decided_by_main(lambda: _take_adapters(fleet.workers)):
                fleet.prepare = None
    except BaseException:
        fleet.close()
        raise
    return fleet


def ray_workers(
    config: Config, policy: Policy, make_worker: MakeWorker
) -> tuple[Sequence[WorkerFactory], Publisher]:
    """The factories of workers on Ray, and what publishes weights for them."""
    from quatrain.rollout import ray_worker  # imports little; ray itself only with workers

    rollout = config.rollout
    factories, publisher = ray_worker.workers(
        partial(make_worker, worker_config(config), policy.usual_prompt),
        rollout.workers,
        platform=this_backend().kind,
        devices=devices_of_worker(config),
        timeout_s=rollout.timeout_s,
    )
    if rollout.weights_dir is None:
        return factories, publisher
    own = _weights_folder(config, rollout.weights_dir)
    return factories, Folder(own, policy.arch, policy.sampling, on_close=publisher.close)


def servers(
    config: Config, policy: Policy, adapted: Adapted | None = None
) -> tuple[Sequence[WorkerFactory], Publisher]:
    """The factories of workers that are inference servers, and what publishes weights for them.

    `adapted`: what adapters alone are published with, if all servers take them.
    """
    rollout = config.rollout
    arch = merged_architecture(policy.arch)
    # A server with the base has one matrix for both, and would load one of them in place of the other.
    if arch.tie_embeddings != policy.arch.tie_embeddings:
        raise ValueError(
            "lora.targets must not name lm_head with rollout.servers where the output head is tied to the "
            f"embeddings, as in this {arch.family} model: a server cannot load it apart; leave lm_head out"
        )
    rules = ServerRules(
        policy.tokenizer,
        policy.stop_ids,
        policy.arch.vocab_size,
        config.seed,
        Sampling.of(rollout),
        RouteRules.of(policy.arch) if records_routes(rollout, policy.arch) else None,
        needs_routes=config.update.router_aux_coef > 0,
        needs_versions=rollout.in_flight,
        needs_receiver=rollout.stream_weights,
        looks=_looks_or_why(policy),
    )
    factories = http_worker.workers(
        rollout.servers, rules, max_concurrency=rollout.max_concurrency, timeout_s=rollout.timeout_s
    )
    # Also a frozen tower: vLLM and SGLang know the tensors by the names of the whole model.
    whole = None if arch.vision is None else policy.whole
    if rollout.stream_weights:
        stream = Stream(arch, policy.sampling, whole=whole, adapted=adapted, kept=KEPT_VERSIONS)
        return factories, stream
    own = _run_folder(config) / "weights"
    if rollout.weights_dir is not None:
        own = _weights_folder(config, rollout.weights_dir)
    return factories, Folder(own, arch, policy.sampling, whole=whole)


def _adapted(config: Config, policy: Policy) -> Adapted | None:
    """What adapters are published with; None where whole matrices are, as of experts and of a tower."""
    if not config.rollout.stream_weights:
        return None
    lora, vision = policy.arch.lora, policy.arch.vision
    if lora is None or (vision and vision.lora):
        return None
    if any(target in EXPERT_PARAMETERS for target in lora.targets):
        return None
    return Adapted(policy.arch, config.model.path, policy.frozen_fingerprints["base"])


def _take_adapters(workers: Sequence[Worker]) -> bool:
    return all(isinstance(worker, HttpWorker) and worker.takes_adapters for worker in workers)


def looks(policy: Policy) -> Looks:
    """The prompts with pictures by which servers are probed: a text behind two halves of other colours."""
    assert policy.arch.vision is not None

    def behind(shades: tuple[int, int]) -> Tokens:
        parts = [_halves(shades), {"type": "text", "text": PROBE_TEXT}]
        message: dict[str, Any] = {"role": "user", "content": parts}
        return render(policy.tokenizer, [message])

    return Looks(behind((255, 0)), behind((0, 255)), not policy.arch.vision.has_grid)


def _looks_or_why(policy: Policy) -> Looks | str:
    """What servers are asked, or why they get no pictures."""
    if policy.arch.vision is None:
        return BLIND
    try:
        return looks(policy)
    except ValueError as error:  # a template that writes no pictures; texts are sampled all the same
        return f"no prompt with a picture can be made, by which servers are probed: {error}"


def _halves(shades: tuple[int, int]) -> dict[str, Any]:
    """A part of a message: a picture whose left and right halves have these shades of red and of blue."""
    pixels = np.zeros((LOOK_SIDE, LOOK_SIDE, 3), np.uint8)
    for half, shade in zip(np.split(pixels, 2, axis=1), shades, strict=True):
        half[..., 0], half[..., 2] = shade, 255 - shade
    return {"type": "image", "image": PictureReader().read(of_pixels(pixels))}


def _blind_server(workers: Sequence[Worker]) -> str | None:
    each = [worker.cannot_see for worker in workers if isinstance(worker, HttpWorker)]
    return next((why for why in each if why is not None), None)


def _weights_folder(config: Config, weights_dir: str) -> Path:
    """The folder of this run in `weights_dir`, which other runs may use too; the same when it is resumed.

    Its name is that of the run, with a digest of the path of the run's folder, which the run has locked.
    """
    run = _run_folder(config).resolve()
    return local_path(weights_dir) / f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"


def _run_folder(config: Config) -> Path:
    return local_path(config.run.dir) / config.run.name
