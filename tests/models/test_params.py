from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed, of_golden
from jax.sharding import PartitionSpec

from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import BOTH
from quatrain.models.blocks.experts import Experts
from quatrain.models.families import builtin_architecture
from quatrain.models.params import (
    abstract_params,
    check_policy,
    init_params,
    is_spec,
    num_params,
    param_specs,
    partition,
)

ARCH = builtin_architecture("tiny", 64, (1,))


def test_num_params_of_the_builtin_model():
    # A layer: q, o 128*128, k, v 128*64, three MLP matrices 128*384, two norms.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    assert num_params(ARCH) == 64 * 128 + 4 * layer + 128 == 795_776
    assert num_params(replace(ARCH, tie_embeddings=False)) == 795_776 + 64 * 128


def test_init_abstract_and_specs_agree():
    arch = changed(ARCH, qk_norm=True, norms=BOTH, qkv_bias=True, bias=True, tie_embeddings=False)
    params = init_params(arch, jax.random.key(0), jnp.bfloat16)
    abstract = abstract_params(arch, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    for spec in jax.tree.leaves(param_specs(arch), is_leaf=is_spec):
        assert len(spec.axes) == len(spec.shape)
        assert set(spec.axes) <= {"vocab", "embed", "heads", "kv_heads", "mlp", "group", "head", "norm"}


def test_init_depends_on_the_key_and_the_place():
    small = replace(ARCH, layers=ARCH.layers[:2])
    one, same, other = (init_params(small, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert float(jnp.abs(one["embed"] - other["embed"]).max()) > 0
    assert float(jnp.abs(one["layers"][0]["qkv"] - one["layers"][1]["qkv"]).max()) > 0


def test_init_scale():
    params = init_params(ARCH, jax.random.key(0))
    np.testing.assert_allclose(params["layers"][0]["gate_up"].std(), 128**-0.5, rtol=0.02)
    np.testing.assert_allclose(params["layers"][0]["down"].std(), 384**-0.5 / 8**0.5, rtol=0.02)
    np.testing.assert_array_equal(params["final_norm"], np.ones(128))
    gemma = changed(ARCH, offset=1.0)
    np.testing.assert_array_equal(init_params(gemma, jax.random.key(0))["final_norm"], np.zeros(128))


@pytest.mark.parametrize(("tp", "valid"), [(3, False), (4, True), (8, False), (2, True)])
def test_tensor_parallelism_divides_the_heads(small_arch, tp, valid):
    """4 query heads and 2 key/value heads, which 4 devices have one of in pairs."""
    if valid:
        assert partition(small_arch, MeshShape(1, 1, tp))["layers"][0]["o"] == PartitionSpec(None, "tp")
        return
    with pytest.raises(ValueError, match=f"got tp {tp}; choose one of 1, 2, 4$"):
        partition(small_arch, MeshShape(1, 1, tp))


@pytest.mark.parametrize(("tp", "cp", "valid"), [(1, 4, "1, 2, 4"), (2, 4, "1, 2"), (1, 3, "1, 2, 4")])
def test_sequence_parallelism_divides_the_heads_of_a_device(small_arch, tp, cp, valid):
    """4 query heads and 2 key/value heads."""
    if str(cp) in valid:
        assert partition(small_arch, MeshShape(1, 1, tp, cp))["final_norm"] == PartitionSpec(None)
        return
    with pytest.raises(ValueError, match=rf"cp must be a number .*got cp {cp}; choose one of {valid}$"):
        partition(small_arch, MeshShape(1, 1, tp, cp))


def test_meshes_divide_the_key_heads_of_delta_layers():
    """4 key heads, and 4 query heads with one key/value head."""
    arch = of_golden("qwen3_5_text_biases")
    for name, axes in (("qkv", ("tp", None, None)), ("a_log", ("tp",)), ("o", (None, "tp"))):
        assert partition(arch, MeshShape(1, 1, 4))["layers"][0][name] == PartitionSpec(*axes)
    with pytest.raises(
        ValueError, match=r"divides the 4 key heads of DeltaNet layers.*got tp 3; choose one of 1, 2, 4$"
    ):
        partition(arch, MeshShape(1, 1, 3))
    with pytest.raises(
        ValueError, match=r"key heads of a device in DeltaNet layers \(2\); got cp 4; choose one of 1, 2$"
    ):
        partition(arch, MeshShape(1, 1, 2, 4))


@pytest.mark.parametrize(("tp", "ep", "valid"), [(1, 3, "1, 2, 4, 8"), (2, 8, "1, 2, 4")])
def test_ep_divides_the_experts_of_a_device(small_arch, tp, ep, valid):
    kind = replace(small_arch.layers[0], mlp=Experts(num=8, top_k=2, width=16))
    arch = replace(small_arch, layers=(kind,))
    assert partition(arch, MeshShape(1, 1, 1, 1, 4))["layers"][0]["experts_down"][0] == "ep"
    with pytest.raises(ValueError, match=rf"divides the experts .*got ep {ep}; choose one of {valid}$"):
        partition(arch, MeshShape(1, 1, tp, 1, ep))


def test_ep_of_a_policy_needs_experts_and_is_fsdp_to_other_models(small_arch):
    with pytest.raises(
        ValueError, match=r"must be 1 in a model without experts .*give these devices to fsdp"
    ):
        check_policy(small_arch, MeshShape(1, 2), MeshShape(1, 1, 1, 1, 2))
    check_policy(of_golden("qwen3_moe"), MeshShape(1, 1, 1, 1, 2))
    own, other = (
        partition(small_arch, mesh)["layers"] for mesh in (MeshShape(1, 1, 1, 1, 4), MeshShape(1, 4))
    )
    assert [{k: str(v).replace("'ep'", "'fsdp'") for k, v in layer.items()} for layer in own] == (
        [{k: str(v) for k, v in layer.items()} for layer in other]
    )
