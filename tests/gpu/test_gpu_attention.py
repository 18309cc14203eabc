"""Attention kernels on the real device, against all scores at once in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_here import usable
from packed_rows import dense, rows_of_segments, with_grouped_branches

from quatrain.backend import ACCELERATOR, this_backend
from quatrain.models.attention import attention_pattern, self_attention
from quatrain.models.attention.kernels import candidates
from quatrain.models.attention.unpacking import unpacking
from quatrain.models.decoder import forward
from quatrain.models.probe import trusted_attention

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
"""Largest |got - wanted| / |wanted|, Euclidean norms over all real tokens. Results in bfloat16 are rounded by
2e-3 on average; one token of 300 with a wrong mask is off by 3e-2 and more."""
KERNELS = ("cudnn", "tokamax")


def distance(got, wanted):
    """|got - wanted| / |wanted|."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    assert np.isfinite(got).all()
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("H", [64, 128])
def test_output_and_gradients_are_those_of_dense_attention(arch, kernel, window, H):
    usable(kernel, arch)
    N, K = 6, 2
    positions, segments = rows_of_segments(np.random.default_rng(1), 2, 310)
    positions, branches = with_grouped_branches(segments, positions)
    layout = jax.tree.map(jnp.asarray, unpacking(segments, branches))
    real = jnp.asarray(segments != 0)[:, :, None, None]
    keys = jax.random.split(jax.random.key(H), 4)
    shapes = [(*segments.shape, heads, H) for heads in (N, K, K, N)]
    q, k, v, dy = (
        jax.random.normal(key, shape).astype("bfloat16") for key, shape in zip(keys, shapes, strict=True)
    )
    q, dy = q * jnp.bfloat16(H**-0.5), dy * real
    line = [jnp.asarray(x) for x in (positions, segments, branches)]

    def fused(q, k, v):
        pattern = attention_pattern(kernel, *line, window, ACCELERATOR.attention_blocks, layout=layout)
        return self_attention(kernel, q, k, v, pattern, window=window, cap=None)

    def output_and_gradients(f, q, k, v, dy):
        y, vjp = jax.vjp(f, q, k, v)
        return y, *vjp(dy)

    with jax.default_matmul_precision("highest"):
        exact = (x.astype(jnp.float32) for x in (q, k, v, dy))
        attend = partial(_dense, line=line, window=window)
        expected = jax.jit(partial(output_and_gradients, attend))(*exact)
    got = jax.jit(partial(output_and_gradients, fused))(q, k, v, dy)
    distances = {
        name: distance(x * real, wanted * real)
        for name, x, wanted in zip(("y", "dq", "dk", "dv"), got, expected, strict=True)
    }
    assert {name: value for name, value in distances.items() if value > TOLERANCE} == {}


def _dense(q, k, v, line, window):
    return dense(q, k, v, *line, window, None)


def test_auto_runs_what_it_chose(arch, params):
    """Hidden states are those of the attention that XLA computes."""
    kind = this_backend().kind
    name = trusted_attention("auto", arch, platform=kind, dtype="bfloat16")
    assert name in candidates(arch, platform=kind, dtype="bfloat16")
    positions, segments = rows_of_segments(np.random.default_rng(2), 2, 310)
    layout = unpacking(segments, np.zeros_like(segments))
    ids = jax.random.randint(jax.random.key(1), segments.shape, 0, arch.vocab_size)

    def run(attention, params):
        return forward(
            params, arch, ids, positions, segments, dtype="bfloat16", attention=attention, layout=layout
        ).hidden

    with jax.default_matmul_precision("highest"):
        got, expected = (jax.jit(partial(run, attention))(params) for attention in (name, "xla"))
    real = segments[..., None] != 0
    # The rounding of two layers, on both sides.
    assert distance(got * real, expected * real) < 4 * TOLERANCE
