import pytest
from jax.sharding import PartitionSpec as P

from quatrain.config.mesh import MeshShape
from quatrain.parallel.sharding import partition_spec


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "expected"),
    [
        ((64, 32), ("vocab", "embed"), (1, 1, 1), P(None, None)),
        ((64, 32), ("vocab", "embed"), (8, 1, 1), P(None, None)),
        ((64, 32), ("vocab", "embed"), (1, 4, 1), P(None, "fsdp")),
        ((64, 32), ("vocab", "embed"), (1, 2, 4), P("tp", "fsdp")),
        ((2, 4, 8, 32), ("kv_heads", "group", "head", "embed"), (1, 2, 2), P("tp", None, None, "fsdp")),
        ((2, 4, 8, 32), ("kv_heads", "group", "head", "embed"), (1, 2, 4), P(None, None, None, "fsdp")),
        ((30, 48), ("embed", "mlp"), (1, 4, 2), P(None, "tp")),
        ((48, 30), ("vocab", "embed"), (1, 4, 1), P("fsdp", None)),
        ((32,), ("norm",), (1, 4, 1), P(None)),
        ((63, 30), ("vocab", "embed"), (1, 4, 2), P(None, None)),
    ],
    ids=str,
)
def test_tp_splits_what_it_divides_and_fsdp_the_hidden_axis_or_the_largest(shape, axes, mesh, expected):
    assert partition_spec(shape, axes, MeshShape(*mesh)) == expected
