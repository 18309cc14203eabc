"""Attention kernels on the real device, against all scores at once in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import attention

from quatrain.backend import this_backend
from quatrain.models.attention.kernels import choose_attention, cudnn_attention, pallas_attention
from quatrain.models.decoder import forward
from quatrain.models.layers import attention_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest |got - wanted| / |wanted|, Euclidean norms over all real tokens. Results in bfloat16 are rounded by
2e-3 on average; one token of 300 with a wrong mask is off by 3e-2 and more. Products in TF32 give 3e-4."""
PRIMITIVES = {"pallas": "pallas_call", "cudnn": "dot_product_attention_fwd"}
"""What each kernel is called in a traced program."""


def _rows(rows, T):
    """Segment ids and positions [B, T] of rows of segments of these lengths, padding behind them."""
    segments, positions = np.zeros((2, len(rows), T), np.int32)
    for row, lengths in enumerate(rows):
        used = sum(lengths)
        segments[row, :used] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        positions[row, :used] = np.concatenate([np.arange(n) for n in lengths])
    return jnp.asarray(segments), jnp.asarray(positions)


def distance(got, wanted):
    """|got - wanted| / |wanted|."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    assert np.isfinite(got).all()
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


PACKED, ALONE = [(1, 170, 129), (300,)], [(300,), (131,), (1,)]


@pytest.mark.parametrize(
    ("kernel", "dtype", "rows", "window"),
    [
        (pallas_attention, "float32", PACKED, None),
        (pallas_attention, "bfloat16", PACKED, None),
        (cudnn_attention, "bfloat16", ALONE, None),
        (cudnn_attention, "bfloat16", ALONE, 40),
    ],
)
@pytest.mark.parametrize("H", [64, 128])
def test_output_and_gradients_are_those_of_dense_attention(kernel, dtype, rows, window, H):
    T, N, K = 310, 6, 2
    segments, positions = _rows(rows, T)
    real = (segments != 0)[:, :, None, None]
    keys = jax.random.split(jax.random.key(H), 4)
    shapes = [(len(rows), T, heads, H) for heads in (N, K, K, N)]
    q, k, v, dy = (
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    q, dy = q * H**-0.5, dy * real

    def dense(q, k, v):
        return attention(q, k, v, attention_mask(positions, positions, segments, segments, window), None)

    def output_and_gradients(f, q, k, v, dy):
        y, vjp = jax.vjp(f, q, k, v)
        return y, *vjp(dy)

    with jax.default_matmul_precision("highest"):
        exact = (x.astype(jnp.float32) for x in (q, k, v, dy))
        expected = jax.jit(partial(output_and_gradients, dense))(*exact)
        fused = partial(kernel, segment_ids_BT=segments, window=window, cap=None)
        got = jax.jit(partial(output_and_gradients, fused))(q, k, v, dy)
    distances = {
        name: distance(x * real, wanted * real)
        for name, x, wanted in zip(("y", "dq", "dk", "dv"), got, expected, strict=True)
    }
    assert {name: value for name, value in distances.items() if value > TOLERANCE[dtype]} == {}


@pytest.mark.parametrize(
    ("dtype", "packed", "chosen"),
    [("bfloat16", True, "pallas"), ("bfloat16", False, "cudnn"), ("float32", True, "pallas")],
)
def test_auto_runs_what_it_chose(arch, params, dtype, packed, chosen):
    """Its call is in the program, and hidden states are those of the attention that XLA computes."""
    name = choose_attention("auto", arch, platform=this_backend().kind, dtype=dtype, packed=packed)
    assert name == chosen
    rows = PACKED if packed else ALONE
    segments, positions = _rows(rows, 310)
    ids = jax.random.randint(jax.random.key(1), segments.shape, 0, arch.vocab_size)

    def run(attention, params):
        return forward(params, arch, ids, positions, segments, dtype=dtype, attention=attention)

    with jax.default_matmul_precision("highest"):
        assert PRIMITIVES[chosen] in str(jax.make_jaxpr(partial(run, name))(params))
        got, expected = (jax.jit(partial(run, attention))(params) for attention in (name, "xla"))
    real = np.asarray(segments)[..., None] != 0
    # The rounding of two layers, on both sides.
    assert distance(got * real, expected * real) < 4 * TOLERANCE[dtype]
