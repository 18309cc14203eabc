"""A Gated DeltaNet layer: milliseconds of a forward and backward pass, beside torch's chunked layer.

    python benchmarks/delta.py [--tokens 1024] [--torch .venv-peers/trl/bin/python]

A layer of the shape of Qwen3.5's (hidden size 1024, 16 key heads and 16 value heads of 128) with an MLP of 8
columns, in float32, one sequence: half of what a model with three of them takes longer than one with one.
With `--torch`, an environment with torch and transformers, its layer is timed by `peers/delta_layer.py` in
turns with ours, and the ratio of the best times is printed; above 1, torch is faster. For figures, the
machine must do nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from peers.delta_layer import TURNS, config, layer_ms, parser

from quatrain.models.decoder import forward
from quatrain.models.families import architecture_from_hf
from quatrain.models.params import init_params


def passes(tokens: int, layers: int) -> Callable[[], Any]:
    """Computes the gradient of a function of the hidden states of a model with so many layers."""
    arch = architecture_from_hf(config(layers))
    params = init_params(arch, jax.random.key(0), dtype=jnp.float32)
    ids = jnp.arange(tokens)[None] % arch.vocab_size
    places, segments = jnp.arange(tokens)[None], jnp.ones((1, tokens), jnp.int32)

    @jax.jit
    def gradient(params):
        def loss(params):
            return jnp.sin(forward(params, arch, ids, places, segments).hidden).sum()

        return jax.grad(loss)(params)

    return lambda: jax.block_until_ready(gradient(params))


def main() -> None:
    """Prints JSON."""
    options = parser(__doc__)
    options.add_argument(
        "--torch", type=Path, help="the Python of an environment with torch and transformers"
    )
    options.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.alone or args.torch is None:
        print(json.dumps({"ms": layer_ms(partial(passes, args.tokens))}))
        return
    scripts = {
        "quatrain": [sys.executable, __file__, "--alone"],
        "torch": [args.torch, Path(__file__).parent / "peers" / "delta_layer.py"],
    }
    found: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(TURNS):
        for name, command in scripts.items():
            done = subprocess.run(
                [*map(str, command), f"--tokens={args.tokens}"], check=True, stdout=subprocess.PIPE, text=True
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1])["ms"])
    ratio = min(found["quatrain"]) / min(found["torch"])
    print(json.dumps({"tokens": args.tokens, "ms": found, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
