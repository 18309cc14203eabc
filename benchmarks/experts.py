"""Products of experts: blocks of rows, XLA's ragged_dot and all experts for all tokens, in one process.

    python benchmarks/experts.py [--tokens 8 32 2048] [--hidden 512] [--width 256] [--experts 32] [--top 4]

Prints milliseconds of a forward pass and of a forward and a backward pass, the best of five, taken in turns,
and the temporary memory of the second beside the rows of all pairs: k (2 D + 3 F) float32 numbers a token.
Each measured call follows one of the same program that is not measured: after another program's, a call pays
for memory that this one gave back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.models.expert_products import expert_product, from_experts, group_pairs, to_experts

REPEATS = 5
Layer = Callable[..., jax.Array]


def by_expert(how: str, x: jax.Array, gate_up: jax.Array, down: jax.Array, w: jax.Array, ids: Any) -> Any:
    """The layer as the block `Experts` computes it."""
    groups = group_pairs(ids.reshape(-1), len(down))
    gate, up = jnp.split(expert_product(to_experts(x, groups), gate_up, groups, how), 2, axis=-1)
    weighted = jax.nn.silu(gate) * up * to_experts(w.reshape(-1, 1), groups)
    return from_experts(expert_product(weighted, down, groups, how), groups, len(x))


def dense(x: jax.Array, gate_up: jax.Array, down: jax.Array, w: jax.Array, ids: Any) -> Any:
    """The layer with all experts for all tokens."""
    gate, up = jnp.split(jnp.einsum("nd,eod->neo", x, gate_up), 2, axis=-1)
    y = jnp.einsum("nef,edf->ned", jax.nn.silu(gate) * up, down)
    weights = (jax.nn.one_hot(ids, len(down)) * w[..., None]).sum(axis=1)
    return jnp.einsum("ned,ne->nd", y, weights)


LAYERS: dict[str, Layer] = {
    "dense": dense,
    "ragged": partial(by_expert, "ragged"),
    "blocks": partial(by_expert, "blocks"),
}


def inputs(args: argparse.Namespace, tokens: int) -> tuple[jax.Array, ...]:
    """x, gate_up, down, weights and experts of random tokens."""
    rng = np.random.default_rng(0)
    D, F, E, k = args.hidden, args.width, args.experts, args.top
    shapes = {(tokens, D): 1.0, (E, 2 * F, D): D**-0.5, (E, D, F): F**-0.5, (tokens, k): 1.0}
    arrays = (jnp.asarray(rng.normal(size=shape) * scale, jnp.float32) for shape, scale in shapes.items())
    ids = np.argsort(rng.normal(size=(tokens, E)), axis=1)[:, :k]
    return *arrays, jnp.asarray(ids, jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 2048])
    for name, default in (("hidden", 512), ("width", 256), ("experts", 32), ("top", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=[*LAYERS], default=[*LAYERS])
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}; D {args.hidden}, F {args.width}, {args.top} of {args.experts}")
    for tokens in args.tokens:
        *arrays, ids = inputs(args, tokens)
        programs = {}
        for name in args.only:
            run = partial(LAYERS[name], ids=ids)
            forward = jax.jit(run).lower(*arrays).compile()
            backward = jax.jit(lambda *x, run=run: jax.vjp(run, *x)[1](x[0])).lower(*arrays).compile()
            programs[name] = forward, backward
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            for name, both in programs.items():
                for number, program in enumerate(both):
                    jax.block_until_ready(program(*arrays))
                    began = time.perf_counter()
                    jax.block_until_ready(program(*arrays))
                    times.setdefault((name, number), []).append(1e3 * (time.perf_counter() - began))
        rows = 4 * tokens * args.top * (2 * args.hidden + 3 * args.width)
        for name, (_, backward) in programs.items():
            forward_ms, both_ms = (min(times[name, number]) for number in (0, 1))
            memory = backward.memory_analysis().temp_size_in_bytes
            print(
                f"{tokens:6} tokens  {name:7} {forward_ms:8.1f} ms {both_ms:8.1f} ms  "
                f"{memory / 2**20:7.1f} MiB, {memory / rows:.2f} x the pairs' rows"
            )


if __name__ == "__main__":
    main()
