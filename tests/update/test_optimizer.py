import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from architectures import changed, of_golden
from jax.sharding import NamedSharding, PartitionSpec

from quatrain.config.schema import OptimizerConfig
from quatrain.models.architecture import BOTH, LoRA
from quatrain.models.lora import trained_part
from quatrain.models.params import abstract_params, init_params
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import one_device
from quatrain.update.gradient import _apply, init_optimizer
from quatrain.update.optimizer import Optimizer, OptimizerForm, is_decayed, is_matrix


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


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_next", "gemma4_text"])
def test_weight_decay_is_of_matrices_alone(case):
    """Sinks, and the logarithms of the decays of DeltaNet layers, were decayed towards 0: gates of 1."""
    params = abstract_params(of_golden(case))
    decayed = jax.tree_util.tree_leaves_with_path(is_decayed(params))
    shapes = dict(jax.tree_util.tree_leaves_with_path(params))
    assert any(decays for _, decays in decayed)
    assert not [path for path, decays in decayed if decays and len(shapes[path].shape) < 2]


def test_a_tower_has_a_learning_rate_of_its_own_and_no_decay_of_norms():
    """By the schedule of all; decay is times the same rate. Without one, no program has it."""
    matrix = jnp.ones((2, 2))
    tower = {"patch": matrix, "blocks": [{"norm1": jnp.ones(2), "qkv": matrix}]}
    params = {"embed": matrix, "layers": [{"o": matrix}], "vision": tower}
    rates = {"learning_rate": 0.5, "vision_learning_rate": 0.1, "schedule": "linear"}
    config = OptimizerConfig(weight_decay=0.1, **rates)
    optimizer = Optimizer(config, 4)
    state, zeros = optimizer.form.init(params), jax.tree.map(jnp.zeros_like, params)
    found, _ = optimizer.form.update(zeros, state, params, optimizer.numbers(1))
    half = 0.75 * 0.1
    np.testing.assert_allclose(found["embed"], -half * 0.5, rtol=1e-6)
    np.testing.assert_allclose(found["layers"][0]["o"], -half * 0.5, rtol=1e-6)
    np.testing.assert_allclose(found["vision"]["patch"], -half * 0.1, rtol=1e-6)
    np.testing.assert_allclose(found["vision"]["blocks"][0]["qkv"], -half * 0.1, rtol=1e-6)
    assert not found["vision"]["blocks"][0]["norm1"].any()
    plain = Optimizer(config.model_copy(update={"vision_learning_rate": None}), 4).numbers(1)
    assert plain.vision_learning_rate is None
    found, _ = optimizer.form.update(zeros, state, params, plain)
    np.testing.assert_allclose(found["vision"]["patch"], -half * 0.5, rtol=1e-6)


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


def random_tree(shapes, seed):
    """Arrays of these shapes; the scales of matrices differ, so that each must have a norm of its own."""
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    arrays = [
        rng.normal(size=shape) * rng.uniform(0.1, 3, (*shape[:-2], *(1,) * len(shape[-2:])))
        for shape in leaves
    ]
    return jax.tree.unflatten(structure, [jnp.asarray(array, jnp.float32) for array in arrays])


def ten_steps(config, shapes, expected):
    """Compares ten steps with those of `expected`, which gives updates at learning rate 1 for all gradients.

    Weight decay and the learning rate of each step are applied to these by hand.
    """
    optimizer, params = Optimizer(config, 10), random_tree(shapes, 100)
    theirs, decayed = params, is_decayed(params)
    grads = [random_tree(shapes, seed) for seed in range(10)]
    update, state = jax.jit(optimizer.form.update), optimizer.form.init(params)
    names = form_of(state)
    for step, (grad, of_optax) in enumerate(zip(grads, expected(grads, params), strict=True)):
        rate = optimizer.learning_rate(step)
        change, state = update(grad, state, params, optimizer.numbers(step))
        assert form_of(state) == names, "the arrays of a step's state are not those it began with"
        params = jax.tree.map(jnp.add, params, change)
        decay = jax.tree.map(lambda p, decays: config.weight_decay * decays * p, theirs, decayed)
        theirs = optax.apply_updates(theirs, optax.tree.scale(rate, optax.tree.sub(of_optax, decay)))
        for ours, other in zip(jax.tree.leaves(params), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(ours, other, rtol=1e-4, atol=2e-5)


def form_of(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


NUMBERS = {"schedule": "cosine", "weight_decay": 0.1, "learning_rate": 0.05}
"""Of the tests of ten steps; a learning rate at which a wrong update shows."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_is_that_of_optax_on_each_matrix_by_itself(dtype):
    """Ten steps; optax has each head, the gate and the up projection as an array of its own.

    Catches matrices that are orthogonalised together or along other axes, another scale, and AdamW in place
    of Muon or Muon in place of AdamW.
    """
    layer = {
        "qkv": (2, 3, 4, 8),
        "o": (8, 16),
        "gate_up": (2, 12, 8),
        "input_norm": (8,),
        "qkv_bias": (2, 3, 4),
    }
    shapes = {"embed": (20, 8), "layers": [layer], "final_norm": (8,)}
    config = OptimizerConfig(
        name="muon", beta1=0.95, beta2=0.99, eps=1e-6, state_dtype=dtype, max_grad_norm=2.0, **NUMBERS
    )

    def apart(tree):
        """({name and number: matrix}, the rest of the tree)."""
        matrices = {}
        for name in ("qkv", "o", "gate_up"):
            array = tree["layers"][0][name]
            for number, matrix in enumerate(array.reshape(-1, *array.shape[-2:])):
                matrices[f"{name} {number}"] = matrix
        others = {
            key: value for key, value in tree["layers"][0].items() if key not in ("qkv", "o", "gate_up")
        }
        return matrices, {**tree, "layers": [others]}

    def together(matrices, rest):
        for name in ("qkv", "o", "gate_up"):
            parts = [matrix for key, matrix in matrices.items() if key.split()[0] == name]
            rest["layers"][0][name] = jnp.stack(parts).reshape(layer[name])
        return rest

    def expected(grads, params):
        # The decay of the momentum is an array, as here: a Python number would be rounded to bfloat16.
        muon = optax.contrib.muon(1.0, beta=jnp.float32(0.95), mu_dtype=dtype, consistent_rms=0.2)
        adamw = optax.chain(optax.scale_by_adam(0.95, 0.99, 1e-6, mu_dtype=dtype), optax.scale(-1.0))
        clip = optax.clip_by_global_norm(2.0)
        matrices, rest = apart(params)
        states = [muon.init(matrices), adamw.init(rest)]
        updates = [jax.jit(each.update) for each in (muon, adamw)]
        for grad in grads:
            both = apart(clip.update(grad, optax.EmptyState())[0])
            found = []
            for number, (update, part, own) in enumerate(zip(updates, both, (matrices, rest), strict=True)):
                change, states[number] = update(part, states[number], own)
                found.append(change)
            yield together(*found)

    ten_steps(config, shapes, expected)


@pytest.mark.parametrize(("momentum", "dtype"), [(0.0, "float32"), (0.9, "float32"), (0.9, "bfloat16")])
def test_adafactor_is_that_of_optax(momentum, dtype):
    """Ten steps, of parameters with a factored second moment and with a whole one."""
    shapes = {
        "embed": (130, 128),
        "layers": [{"gate_up": (2, 128, 136), "o": (128, 128), "input_norm": (128,)}],
    }
    config = OptimizerConfig(
        name="adafactor", beta1=momentum, state_dtype=dtype, max_grad_norm=None, **NUMBERS
    )

    def expected(grads, params):
        theirs = optax.adafactor(
            1.0, multiply_by_parameter_scale=False, momentum=momentum or None, dtype_momentum=dtype
        )
        update, state = jax.jit(theirs.update), theirs.init(params)
        for grad in grads:
            change, state = update(grad, state, params)
            yield change

    ten_steps(config, shapes, expected)


def test_which_parameters_muon_orthogonalises(small_arch):
    """Matrices of layers: routers and experts too; no filters of convolutions, no single rows, no biases."""

    def chosen(arch):
        found = is_matrix(trained_part(abstract_params(arch), arch))
        layers = found.pop("layers")
        assert not any(jax.tree.leaves(found)), "embeddings, heads and norms are none"
        return [{name for name, matrix in layer.items() if matrix} for layer in layers]

    dense = {"qkv", "o", "gate_up", "down"}
    biased = changed(
        small_arch, **dict.fromkeys(("qkv_bias", "output_bias", "bias", "qk_norm"), True), norms=BOTH
    )
    assert chosen(biased) == [dense, dense]
    assert chosen(changed(small_arch, lora=LoRA(2, 2.0, ("qkv", "down")))) == [set(), set()]
    delta = dense | {"ba", "router", "experts_gate_up", "experts_down"}
    of_layers = {frozenset(layer) for layer in chosen(of_golden("qwen3_next_experts"))}
    assert of_layers == {frozenset(delta), frozenset(dense)}


def test_the_state_lies_where_its_parameters_do():
    """Factored moments along the dimensions that remain, of which a square matrix tells none by its size."""
    P = PartitionSpec
    shapes = {"a": (2, 128, 256), "b": (256, 128), "square": (128, 128), "small": (2, 64, 256), "c": (1,)}
    specs = {"a": P(None, "tp", "fsdp"), "b": P("tp", "fsdp"), "square": P("tp", "fsdp")}
    specs |= {"small": P(None, "tp", "fsdp"), "c": P(None)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    form = OptimizerForm.of(OptimizerConfig(name="adafactor"))
    places = form.places(params, specs)
    _, ((factored, first), _, schedule) = places
    assert factored.v_row == {
        "a": P(None, "tp"),
        "b": P("fsdp"),
        "square": P("tp"),
        "small": P(),
        "c": P(None),
    }
    assert factored.v_col == {
        "a": P(None, "fsdp"),
        "b": P("tp"),
        "square": P("fsdp"),
        "small": P(),
        "c": P(None),
    }
    assert factored.v == {"a": P(), "b": P(), "square": P(), "small": specs["small"], "c": P(None)}
    assert first.ema == specs
    assert factored.count == first.count == schedule.count == P()
    state = form.init(
        jax.tree.map(lambda x: jnp.arange(np.prod(x.shape), dtype=x.dtype).reshape(x.shape), params)
    )
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        assert len(spec) <= leaf.ndim
