"""An exchange of weights with a server: bytes and seconds, by a folder and over HTTP.

    python benchmarks/weights.py [--size 0.5B] [--learning-rate 1e-6] [--json weights.json]

A model of Qwen2.5's shape with random weights, of standard deviation 0.02, is changed as an optimizer of
normalised gradients does: each float32 weight by `--learning-rate` times a normal number, and then rounded to
bfloat16. Versions reach a server's process by a folder on this machine's disk, which it reads, and in pieces
over HTTP, where it is `quatrain serve` on the loopback. Reading the files into the device, which is the same
for both, is measured apart. Prints JSON:

- `bytes`: of the whole model, of what has changed of it, and of the adapters of rank 32 of all matrices.
- `seconds`: `folder` to write it; `publish` to write it to memory and find what has changed; `send` of the
  whole and of the changes; `load` to read the files.
- `of_7B`: the same of 7.6 billion parameters, if both grow with them, and what the bytes take at 1, 10 and
  100 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from accelerator import qwen25
from compare import serving

from quatrain.models.architecture import Architecture
from quatrain.models.lora import adapters_of
from quatrain.models.params import is_spec, param_specs
from quatrain.models.spec import LoRA
from quatrain.rollout.publish import Folder, Stream
from quatrain.servers.client import ServerClient
from quatrain.servers.kinds import Quatrain
from quatrain.servers.pieces import Pieces
from quatrain.servers.server import Server, ServerRules
from quatrain.types.rollouts import Sampling
from quatrain.weights.hf import load_hf

SIZES = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12), "tiny": (64, 96, 1, 4)}
SEVEN_B = (3584, 18944, 28, 28)
NUM_7B = 7.6e9
RANK = 32
TARGETS = ("qkv", "o", "gate_up", "down")
GBITS = (1, 10, 100)
TOKEN = "of-this-benchmark"
LIMIT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    found = json.dumps(measured(qwen25(*SIZES[args.size]), args.learning_rate), indent=2)
    print(found)
    if args.json:
        args.json.write_text(found + "\n")


def measured(arch: Architecture, learning_rate: float) -> dict[str, Any]:
    """What the documentation of this file names."""
    os.environ.setdefault("QUATRAIN_SERVE_TOKEN", TOKEN)
    versions = versions_of(arch, learning_rate)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[name] = round(time.perf_counter() - began, 3)
        return result

    first, second = next(versions), next(versions)
    with tempfile.TemporaryDirectory(prefix="weights-") as folder, client_of_server() as client:
        publisher = Folder(Path(folder) / "versions", arch)
        path = timed("folder", lambda: publisher.publish(first, 1))
        timed("load", lambda: jax.block_until_ready(load_hf(path, "bfloat16")[1]))
        publisher.close()
        stream = Stream(arch, {}, kept=2)
        server = Server(client, Quatrain("tiny"), ServerRules(None, (), 0, 0, Sampling(1, 1)))

        def send(pieces: Pieces) -> None:
            client.run(server.send(pieces, LIMIT_S))

        whole = stream.publish(first, 1)
        timed("send_whole", lambda: send(whole))
        changed = timed("publish", lambda: stream.publish(second, 2))
        timed("send_changes", lambda: send(changed))
        stream.close()
    factor = NUM_7B * 2 / whole.num_bytes
    sizes = {
        "whole": whole.num_bytes,
        "changes": changed.num_new_bytes,
        "adapters": adapter_bytes(arch),
    }
    of_7b = {name: round(size * factor) for name, size in sizes.items() if name != "adapters"}
    of_7b["adapters"] = adapter_bytes(qwen25(*SEVEN_B))
    return {
        "learning_rate": learning_rate,
        "bytes": sizes,
        "share_changed": round(sizes["changes"] / sizes["whole"], 4),
        "seconds": seconds,
        "of_7B": {
            "bytes": of_7b,
            "seconds": {name: round(value * factor, 1) for name, value in seconds.items()},
            "seconds_on_a_network": {
                f"{gbits} Gbit/s": {name: round(size * 8 / (gbits * 1e9), 2) for name, size in of_7b.items()}
                for gbits in GBITS
            },
        },
    }


def versions_of(arch: Architecture, learning_rate: float) -> Iterator[Any]:
    """Weights in bfloat16, one version after another."""
    random = np.random.default_rng(0)
    master = jax.tree.map(
        lambda spec: random.standard_normal(spec.shape, np.float32) * 0.02, param_specs(arch), is_leaf=is_spec
    )
    while True:
        yield jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), master)
        for leaf in jax.tree.leaves(master):
            leaf += learning_rate * random.standard_normal(leaf.shape, np.float32)


def adapter_bytes(arch: Architecture) -> int:
    """Bytes of the adapters of all matrices of the layers, in float32."""
    specs = adapters_of(param_specs(replace(arch, lora=LoRA(RANK, float(RANK), TARGETS))))
    return sum(4 * math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


@contextmanager
def client_of_server() -> Iterator[ServerClient]:
    """A client of a server of a small model in a process of its own: what it is sent, it does not load."""
    with serving("builtin:tiny") as address:
        client = ServerClient(address, timeout_s=LIMIT_S)
        yield client
        client.close()


if __name__ == "__main__":
    main()
