"""A server of a small model in this process, for the tests of `quatrain serve` and of its clients."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.loop.serve import LOOPBACK
from quatrain.serve.api import Api
from quatrain.weights.hf import load_hf

MODEL = "small"


def service_of(arch, params, tokenizer, *, seed=11, cache_bytes=1 << 26, stop_ids=(0, 7), **config):
    settings = RolloutConfig(**{"n": 1, "max_new_tokens": arch.max_position, **config})
    engine = RolloutEngine(
        arch,
        settings,
        tokenizer,
        stop_ids=stop_ids,
        seed=seed,
        cache_bytes=cache_bytes,
        per_request_sampling=True,
    )
    engine.sync_weights(params, 0)

    def read(path):
        found, new = load_hf(path)
        if found != arch:
            raise ValueError(f"{path} has another architecture")
        return new

    return EngineService(engine, read)


@contextmanager
def served(service, arch, tokenizer, *, token=None, sessions=None):
    """The URL of a server of `service`, which ends with the block."""
    api = Api(
        service,
        tokenizer,
        model=MODEL,
        vocab_size=arch.vocab_size,
        max_positions=arch.max_position,
        token=token,
        stop_ids=(tokenizer.eos_token_id,),
        sessions=sessions,
    )
    config = uvicorn.Config(api.app(LOOPBACK), port=0, log_level="error", lifespan="off")
    config.timeout_graceful_shutdown = 2
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        service.close()
