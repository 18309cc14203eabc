import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from architectures import changed

from quatrain.config.schema import OptimizerConfig
from quatrain.models.architecture import BOTH, LoRA
from quatrain.models.lora import trained_part
from quatrain.models.params import init_params
from quatrain.update.optimizer import build_optimizer, clip_by_global_norm, learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_schedules(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4, final_fraction=0.2)
    rate = learning_rate(config, total_steps=8)
    np.testing.assert_allclose([float(rate(step)) for step in range(9)], expected, rtol=1e-5)


def test_one_step_of_warm_up_is_the_peak():
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=1), total_steps=5)
    assert [float(rate(step)) for step in range(3)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", [-0.3, -0.4]),  # clipped from norm 10 to norm 0.5, times the learning rate
        ("lion", [-1.0, -1.0]),
        ("adamw", [-1.0, -1.0]),
    ],
)
def test_first_update(name, expected):
    config = OptimizerConfig(name=name, learning_rate=1.0, max_grad_norm=0.5)
    optimizer = build_optimizer(config, total_steps=1)
    params = jnp.zeros(2)
    updates, _ = optimizer.update(jnp.array([6.0, 8.0]), optimizer.init(params), params)
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_no_clipping_without_a_bound():
    optimizer = build_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0, max_grad_norm=None), 1)
    params = jnp.zeros(2)
    updates, _ = optimizer.update(jnp.array([6.0, 8.0]), optimizer.init(params), params)
    np.testing.assert_allclose(updates, [-6.0, -8.0], rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e6])
def test_clipping_is_that_of_optax(scale):
    grads = {"a": scale * jax.random.normal(jax.random.key(0), (5, 7)), "b": scale * jnp.arange(3.0)}
    ours, theirs = (
        clip.update(grads, clip.init(grads), None)
        for clip in (clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5))
    )
    assert jax.tree.structure(ours[1]) == jax.tree.structure(theirs[1])
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("lion", 1), ("sgd", 1)])
def test_the_first_moment_in_bfloat16(name, moments):
    """Half the bytes of one moment, and nearly the updates of float32."""
    params, updates, sizes = jnp.ones(64), {}, {}
    grads = jax.random.normal(jax.random.key(0), (3, 64))
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(name=name, learning_rate=1.0, state_dtype=dtype)
        optimizer = build_optimizer(config, total_steps=4)
        state = optimizer.init(params)
        for grad in grads:
            updates[dtype], state = optimizer.update(grad, state, params)
        kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        assert [leaf.dtype for leaf in kept][:1] == [dtype]
        sizes[dtype] = sum(leaf.nbytes for leaf in kept)
    assert sizes == {"float32": moments * 256, "bfloat16": moments * 256 - 128}
    near = np.isclose(updates["bfloat16"], updates["float32"], rtol=0.03, atol=0.01)
    assert near.mean() > 0.95  # the sign of a moment near 0 may differ (lion)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("rank", [0, 2])
def test_weight_decay_leaves_norms_and_biases_out(name, rank, small_arch):
    """Without a gradient, decayed parameters move by -learning rate x decay x value, and no others."""
    arch = changed(
        small_arch,
        **dict.fromkeys(("qkv_bias", "output_bias", "bias", "qk_norm"), True),
        norms=BOTH,
        lora=LoRA(rank, 2.0, ("qkv", "down")) if rank else None,
    )
    params = trained_part(jax.tree.map(jnp.ones_like, init_params(arch, jax.random.key(0))), arch)
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.1)
    optimizer = build_optimizer(config, total_steps=1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    layer = {"qkv", "o", "gate_up", "down"}
    if rank:
        layer = {"qkv_lora_a", "qkv_lora_b", "down_lora_a", "down_lora_b"}
    assert {key for key, update in updates["layers"][1].items() if update.any()} == layer
    moved = {key for key, update in updates.items() if key != "layers" and update.any()}
    assert moved == (set() if rank else {"embed"})
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(leaf, -0.05 if leaf.any() else 0, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_place_in_the_schedule_is_not_the_number_of_applied_steps(name):
    config = OptimizerConfig(name=name, learning_rate=1.0, schedule="linear")
    optimizer = build_optimizer(config, total_steps=8)
    params, grads = jnp.zeros(2), jnp.array([0.3, 0.4])
    state = optimizer.init(params)
    first, _ = optimizer.update(grads, state, params)
    sixth, state = optimizer.update(grads, state, params, schedule_step=np.int32(6))
    np.testing.assert_allclose(sixth, 0.25 * first, rtol=1e-6)
    counts = [int(leaf) for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert counts == [1, 7] if name != "sgd" else [7]  # those of the moments, and of the schedule
