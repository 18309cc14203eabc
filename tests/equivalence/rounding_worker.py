"""One optimizer step of bfloat16 parameters from the same gradient, on each mesh of argv[2:]; see argv[1]."""

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
from quatrain.update.gradient import _apply, _copies, init_optimizer
from quatrain.update.optimizer import Optimizer

ARCH = tiny_qwen2(num_layers=1)
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


def _gradient(rng, shape, copies, sharding):
    """A gradient whose sum over copies of the model does not depend on their number: the others are 0."""
    total = np.zeros((copies, *shape), np.float32)
    total[0] = rng.normal(size=shape)
    return device_put(total, sharding)


target, *meshes = sys.argv[1:]
found = {}
for mesh in meshes:
    found |= {f"{mesh} {k}": v for k, v in results(MeshShape(*map(int, mesh.split(",")))).items()}
np.savez(target, **found)
