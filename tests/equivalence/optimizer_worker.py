"""Optimizer steps from the same gradient on each mesh of argv[2:]; writes the results to the file argv[1]."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from tiny_qwen2 import tiny_qwen2

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import OptimizerConfig
from quatrain.forward.specs import PolicySpec
from quatrain.models.params import init_params
from quatrain.parallel.mesh import device_put, make_mesh, shardings, to_host
from quatrain.plan.placement import _optimizer_bytes
from quatrain.update import optimizer as optimizers
from quatrain.update.gradient import _apply, _copies, init_optimizer
from quatrain.update.optimizer import Optimizer

optimizers.LEAST_FACTORED = 8  # so that the matrices of a tiny model are
ARCH = tiny_qwen2(num_layers=1)
OF_MATRICES = {
    "muon": OptimizerConfig(name="muon", learning_rate=0.01, weight_decay=0.1),
    "adafactor": OptimizerConfig(name="adafactor", learning_rate=0.01, weight_decay=0.1),
}
"""They reckon with more than one element at a time."""
CONFIG = OptimizerConfig(name="sgd", beta1=0.0, learning_rate=2.0**-10, max_grad_norm=None)
"""Its new parameters have one rounding in float32 before that to bfloat16, the same in every program."""


def results(shape: MeshShape) -> dict[str, np.ndarray]:
    """The parameters after a step with and without stochastic rounding."""
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    optimizer = Optimizer(CONFIG, 1)
    params = init_params(ARCH, jax.random.key(0), jnp.bfloat16, mesh)
    rng, found = np.random.default_rng(0), {}
    places = shardings(mesh, _copies(PolicySpec(ARCH, mesh=mesh)))
    total = jax.tree.map(lambda x, sharding: _gradient(rng, x.shape, shape.dp, sharding), params, places)
    for name, draw in (("stochastic", np.array([5, 0, 3], np.uint32)), ("nearest", None)):
        own = jax.tree.map(jnp.copy, params)
        new, *_ = _apply(
            own,
            init_optimizer(optimizer.form, own),
            total,
            jnp.float32(1),
            optimizer.numbers(0),
            draw,
            form=optimizer.form,
        )
        for path, leaf in jax.tree_util.tree_flatten_with_path(new)[0]:
            found[f"{name} {jax.tree_util.keystr(path)}"] = to_host(leaf).view(np.uint16)
    return found


def of_matrices(shape: MeshShape, config: OptimizerConfig) -> dict[str, np.ndarray]:
    """Parameters and state after two steps, and the bytes of the state on the first device."""
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    optimizer = Optimizer(config, 2)
    params = init_params(ARCH, jax.random.key(0), mesh=mesh)
    state = init_optimizer(optimizer.form, params)
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    rng = np.random.default_rng(0)
    places = shardings(mesh, _copies(PolicySpec(ARCH, mesh=mesh)))
    for step in range(2):
        total = jax.tree.map(lambda x, sharding: _gradient(rng, x.shape, shape.dp, sharding), params, places)
        numbers = optimizer.numbers(step)
        params, state, *_ = _apply(params, state, total, jnp.float32(1), numbers, form=optimizer.form)
    held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
    assert held == _optimizer_bytes(config, ARCH, shape), "the plan counts other bytes"
    for leaf, sharding in zip(jax.tree.leaves(state), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), "the step moved the state"
    found = {"held": np.array(held)}
    for path, leaf in jax.tree_util.tree_flatten_with_path((params, state))[0]:
        found[jax.tree_util.keystr(path)] = to_host(leaf)
    return found


def _gradient(rng, shape, copies, sharding):
    """A gradient whose sum over copies of the model does not depend on their number: two halves, and 0."""
    half, total = np.float32(rng.normal(size=shape)) / 2, np.zeros((copies, *shape), np.float32)
    total[0] += half
    total[-1] += half
    return device_put(total, sharding)


target, *meshes = sys.argv[1:]
found = {}
for mesh in meshes:
    shape = MeshShape(*map(int, mesh.split(",")))
    named = results(shape)
    for name, config in OF_MATRICES.items():
        named |= {f"{name}: {k}": v for k, v in of_matrices(shape, config).items()}
    found |= {f"{mesh} {k}": v for k, v in named.items()}
np.savez(target, **found)
