"""Loads a model and serves it: `quatrain serve`.

Data flow: configuration -> `RolloutEngine` -> `EngineService` -> `Api` -> uvicorn, until a signal. With
`training_server.py`, programs also train adapters of the model.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvicorn

from quatrain.config.derive import PREFIX_SHARE, longest_of_run
from quatrain.config.schema import Config
from quatrain.config.secrets import SERVE_TOKEN, TINKER_KEY
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.loop.policy import LoadedPolicy, load_policy
from quatrain.models.architecture import Architecture
from quatrain.models.lora import merged, merged_architecture, with_host_adapters
from quatrain.models.params import LM_HEAD
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.compilations import watching_compilations
from quatrain.parallel.mesh import to_memory
from quatrain.serve.api import Api
from quatrain.weights.adapter import check_base, is_adapter_folder, read_adapter
from quatrain.weights.hf import load_hf
from quatrain.weights.load_model import load_tower

QUIET_S = 60.0
"""Seconds without compiling after which it is said again."""
START_VERSION = -1
"""The label of the weights that the server was started with, which no run has given."""
CLOSE_S = 5
"""Seconds that answers in progress get when the server is to end."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine that requests may always use."""


def serve(
    config: Config,
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
    compiles: Callable[[], None] = lambda: None,
    name: str | None = None,
    trains: Callable[[str, str, bool], None] | None = None,
) -> None:
    """Serve the model of `config` until the process gets a signal; `ready` gets the address.

    `compiles` is called when answers begin to wait for programs that are compiled, again after QUIET_S.

    Requests call the model `name`; None: by `model.path`.

    With `trains`, programs train adapters of the model too, and it gets the address, the name of the model
    for them, and whether there is one key that is taken (`QUATRAIN_TINKER_KEY`).

    `port` 0 takes any free port. Raises ValueError if the address cannot be used, if it is not one of this
    machine alone and there is no token (`QUATRAIN_SERVE_TOKEN`), and for a model that cannot be loaded.
    """
    token = os.environ.get(SERVE_TOKEN) or None
    local = _is_loopback(host)
    if token is None and not local:
        raise ValueError(
            f"a server that others can reach needs a token: --host {host} is not an address of this machine "
            f"alone, and {SERVE_TOKEN} is not set; set it to a secret that clients send, or use "
            "--host 127.0.0.1"
        )
    if trains and not local and not os.environ.get(TINKER_KEY):
        raise ValueError(
            f"a training server that others can reach needs a key: --host {host} is not an address of this "
            f"machine alone, and {TINKER_KEY} is not set; set it to a secret that begins with `tml-`, or use "
            "--host 127.0.0.1"
        )
    with _bound(host, port) as bound:
        loaded = load_policy(config, critic=False, adapters=False, environments=False)
        with ExitStack() as ends:
            training, cache_bytes = None, None
            if trains:
                from quatrain.loop.training_server import Memory, training_server

                memory = Memory.of(config, loaded)
                training = ends.enter_context(training_server(config, loaded, memory, name=name))
                cache_bytes = memory.cache
            engine = serving_engine(config, loaded, cache_bytes)
            # A run's first version is 0, and a server that is started again must not say that it has it.
            service = EngineService(engine, weights_of(loaded.arch, config, engine), version=START_VERSION)
            if training is None:
                # Else the first weights would stay on the device beside those that are loaded later.
                loaded = replace(loaded, params=None)
            ends.callback(service.close)
            api = Api(
                service,
                loaded.tokenizer,
                model=config.model.path if name is None else name,
                vocab_size=loaded.arch.vocab_size,
                max_positions=loaded.arch.longest,
                token=token,
            )
            address, number = bound.getsockname()[:2]
            reached = f"[{address}]" if ":" in address else address
            settings = uvicorn.Config(
                api.app(
                    (*LOOPBACK, reached) if local else ("*",), () if training is None else training.routes
                ),
                log_level="error",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSE_S,
            )
            bound.listen()
            ready(f"http://{reached}:{number}")
            if trains and training is not None:
                trains(f"http://{reached}:{number}", training.name, training.has_key)
            told = -math.inf

            def tell() -> None:
                nonlocal told
                quiet, told = time.monotonic() - told >= QUIET_S, time.monotonic()
                if quiet:
                    compiles()

            with watching_compilations(tell), suppress(KeyboardInterrupt):  # the way to end it
                uvicorn.Server(settings).run(sockets=[bound])


def serving_engine(config: Config, loaded: LoadedPolicy, cache_bytes: int | None = None) -> RolloutEngine:
    """An engine for requests that each have a sampling of their own, with the weights of `loaded`.

    Its KV cache has `cache_bytes` of a device; None: a share of what is free.
    """
    # Weights are loaded in place of the old ones: memory for copies of other versions would be left unused.
    share = config.rollout.prefix_share
    changes: dict[str, Any] = {"max_staleness": 0, "in_flight": False}
    changes |= {"prefix_share": PREFIX_SHARE if share is None else share}
    served = config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})
    engine = RolloutEngine.of(served, loaded, per_request_sampling=True, cache_bytes=cache_bytes)
    engine.sync_weights(loaded.params, 0)
    return engine


def weights_of(arch: Architecture, config: Config, engine: RolloutEngine) -> Callable[[str], Any]:
    """What reads the weights in a folder, which must be of `arch`, or adapters of the model that is served.

    If its tower is frozen, the folder has the same, or none, as those that a training run publishes.
    """
    vision = arch.vision
    frozen = vision is not None and vision.trained == "frozen"

    @cache
    def base() -> tuple[LoadedPolicy, str]:
        """The model that is served, in the host's memory, and its fingerprint, from the first adapters on."""
        loaded = load_policy(config, critic=False, adapters=False, environments=False)
        found = tree_fingerprint(loaded.params)
        if loaded.backend.kind != "cpu":  # whose memory is the host's
            loaded = replace(loaded, params=to_memory("host", loaded.params))
        return loaded, found

    def with_adapters(folder: Path) -> Any:
        adapted, adapters, known = read_adapter(folder, arch)
        if merged_architecture(adapted).tie_embeddings != arch.tie_embeddings:
            raise ValueError(
                f"adapters of {LM_HEAD} need an output head of its own; that of {config.model.path} is tied "
                "to the embeddings; leave it out of lora.targets"
            )
        loaded, found = base()
        check_base(known, found, config.model.path, folder)
        params = with_host_adapters(loaded.params, adapters, adapted, loaded.meshes.train)
        # As the run merges them where it samples itself: the same matrices, to the bit.
        return to_memory("device", merged(params, adapted, config.model.dtype))

    def read(path: str) -> Any:
        if is_adapter_folder(Path(path)):
            return with_adapters(Path(path))
        found, params = load_hf(
            path,
            dtype=config.model.param_dtype,
            mesh=engine.mesh,
            vision="none" if vision is None else None if frozen else vision.trained,
        )
        # Not the whole of `vision`: sizes of pictures are those of the server (`data.image_max_pixels`).
        other_tower = found.vision and vision and found.vision.params() != vision.params()
        if found.text.for_length(longest_of_run(config)) != arch.text or other_tower:
            raise ValueError(
                f"new weights must be of the model that is served ({config.model.path}); the architecture in "
                f"{path} is another; serve that model with a server of its own"
            )
        if frozen and found.vision is not None:
            served, new = (load_tower(each, arch, engine.mesh) for each in (config.model.path, path))
            if not all(map(np.array_equal, jax.tree.leaves(served), jax.tree.leaves(new))):
                raise ValueError(
                    f"new weights must have the vision tower that is served, which is frozen; {path} has "
                    "another; start the server with --set model.vision=all, which reads it with the weights"
                )
        return params

    return read


@contextmanager
def _bound(host: str, port: int) -> Any:
    """A socket bound to the address, which does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host must be an address of this machine; {host} is not: {error}") from error
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            raise ValueError(
                f"--host and --port must be a free address of this machine; {host}:{port} cannot be used: "
                f"{error}; choose another port, or 0 for any free one"
            ) from error
        yield bound


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
