import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from architectures import changed
from jax.sharding import NamedSharding, PartitionSpec

from quatrain.config.schema import OptimizerConfig
from quatrain.models.architecture import BOTH, LoRA
from quatrain.models.lora import trained_part
from quatrain.models.params import init_params
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import one_device
from quatrain.update.gradient import _apply, init_optimizer
from quatrain.update.optimizer import Optimizer, OptimizerForm


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
    rates = [Optimizer(config, total_steps=8).learning_rate(step) for step in range(10)]
    np.testing.assert_allclose(rates, [*expected, expected[-1]], rtol=1e-5)


def test_one_step_of_warm_up_is_the_peak():
    optimizer = Optimizer(OptimizerConfig(learning_rate=2.0, warmup_steps=1), total_steps=5)
    assert [optimizer.learning_rate(step) for step in range(3)] == [2.0, 2.0, 2.0]


def updates_of(config, grads, params=None, total_steps=1):
    """The updates of steps with these gradients, one after the other, and the last state."""
    optimizer = Optimizer(config, total_steps)
    params = jnp.zeros_like(grads[0]) if params is None else params
    update, state, found = jax.jit(optimizer.form.update), optimizer.form.init(params), []
    for step, grad in enumerate(grads):
        updates, state = update(grad, state, params, optimizer.numbers(step))
        found.append(updates)
    return found, state


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
    [updates], _ = updates_of(config, [jnp.array([6.0, 8.0])])
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_no_clipping_without_a_bound():
    config = OptimizerConfig(name="sgd", learning_rate=1.0, max_grad_norm=None)
    [updates], _ = updates_of(config, [jnp.array([6.0, 8.0])])
    np.testing.assert_allclose(updates, [-6.0, -8.0], rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e6])
def test_clipping_is_that_of_optax(scale):
    grads = {"a": scale * jax.random.normal(jax.random.key(0), (5, 7)), "b": scale * jnp.arange(3.0)}
    config = OptimizerConfig(name="sgd", learning_rate=1.0, max_grad_norm=0.5)
    [ours], state = updates_of(config, [grads], grads)
    clip = optax.clip_by_global_norm(0.5)
    theirs, clipping = clip.update(grads, clip.init(grads), None)
    assert jax.tree.structure(state[0]) == jax.tree.structure(clipping)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(-a, b, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("lion", 1), ("sgd", 1)])
def test_the_first_moment_in_bfloat16(name, moments):
    """Half the bytes of one moment, and nearly the updates of float32."""
    params, updates, sizes = jnp.ones(64), {}, {}
    grads = jax.random.normal(jax.random.key(0), (3, 64))
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(name=name, learning_rate=1.0, state_dtype=dtype)
        found, state = updates_of(config, grads, params)
        updates[dtype] = found[-1]
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
    [updates], _ = updates_of(config, [jax.tree.map(jnp.zeros_like, params)], params)
    layer = {"qkv", "o", "gate_up", "down"}
    if rank:
        layer = {"qkv_lora_a", "qkv_lora_b", "down_lora_a", "down_lora_b"}
    assert {key for key, update in updates["layers"][1].items() if update.any()} == layer
    moved = {key for key, update in updates.items() if key != "layers" and update.any()}
    assert moved == (set() if rank else {"embed"})
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(leaf, -0.05 if leaf.any() else 0, rtol=1e-6)


def of_optax(config, total_steps):
    """The optimizer with its numbers built into it, as optax has it."""
    peak, final, b1, b2 = config.learning_rate, config.final_fraction, config.beta1, config.beta2
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup_steps, total_steps, peak * final)
    moment, decay = config.state_dtype, config.weight_decay
    steps = {
        "adamw": [optax.scale_by_adam(b1, b2, config.eps, mu_dtype=moment), optax.add_decayed_weights(decay)],
        "lion": [optax.scale_by_lion(b1, b2, mu_dtype=moment), optax.add_decayed_weights(decay)],
        "sgd": [optax.trace(b1, accumulator_dtype=moment)],
    }[config.name]
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(clip, optax.chain(*steps, optax.scale_by_learning_rate(rate)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_numbers_as_data_are_those_of_optax(name, dtype):
    """Decays near 1 too, whose complement float32 would get wrong in the fifth digit if it subtracted.

    Catches a state that a step returns in another dtype than the one it began in.
    """
    config = OptimizerConfig(
        name=name,
        learning_rate=1e-3,
        schedule="cosine",
        final_fraction=0.1,
        beta1=0.95,
        beta2=0.9999,
        eps=1e-6,
        weight_decay=0.0 if name == "sgd" else 0.1,
        max_grad_norm=2.0,
        state_dtype=dtype,
    )
    theirs, params = of_optax(config, 6), {"w": jnp.linspace(-1.0, 1.0, 32)}
    grads = [{"w": jax.random.normal(jax.random.key(i), (32,))} for i in range(6)]
    found, ours = updates_of(config, grads, params, 6)
    update, state = jax.jit(theirs.update), theirs.init(params)
    for grad, updates in zip(grads, found, strict=True):
        expected, state = update(grad, state, params)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=2e-6, atol=1e-9)
    counts = [[int(x) for x in jax.tree.leaves(s) if x.dtype == jnp.int32] for s in (ours, state)]
    assert counts[0] == counts[1]
    names = [
        {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(s)}
        for s in (ours, state, Optimizer(config, 6).form.init(params))
    ]
    assert names[0] == names[1] == names[2]  # the names of a checkpoint's arrays


def test_optimizers_of_one_form_share_their_programs():
    """A program of its own for each learning rate, decay or bound would be compiled for seconds each time."""
    one = OptimizerConfig(learning_rate=1e-3)
    other = OptimizerConfig(
        learning_rate=0.1,
        schedule="cosine",
        warmup_steps=3,
        final_fraction=0.5,
        weight_decay=0.1,
        beta1=0.5,
        beta2=0.9,
        eps=1e-3,
        max_grad_norm=7.0,
    )
    mesh = one_device()

    def stepped(config, step):
        optimizer, place = Optimizer(config, 10), NamedSharding(mesh, PartitionSpec())
        params = {"w": jax.device_put(np.ones(5, np.float32), place)}
        total = {"w": jax.device_put(np.full((1, 5), 0.5, np.float32), place)}
        state = init_optimizer(optimizer.form, params)
        loss = jax.device_put(np.float32(1), place)
        new, *_ = _apply(params, state, total, loss, optimizer.numbers(step), form=optimizer.form)
        return float(new["w"][0])

    first, before = stepped(one, 0), num_compilations()
    assert stepped(other, 3) != first
    assert num_compilations() == before
    assert OptimizerForm.of(one) == OptimizerForm.of(other)
