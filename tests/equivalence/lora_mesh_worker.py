"""One optimizer step of adapters on meshes of 8 simulated devices; writes its results to the file argv[1]."""

import sys
from dataclasses import replace

import jax
import numpy as np
from tiny_qwen2 import tiny_qwen2

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import LoraConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import LoRA
from quatrain.models.lora import adapters_of, merged, with_adapters, with_trained
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh, to_host
from quatrain.update.gradient import init_optimizer, optimizer_step, sum_gradients
from quatrain.update.objective import PolicyObjective
from quatrain.update.optimizer import build_optimizer

ARCH = replace(tiny_qwen2(num_layers=2), lora=LoRA(rank=4, alpha=6.0, targets=LoraConfig().targets))
OBJECTIVE = PolicyObjective.of(UpdateConfig(), on_policy=True)
OPTIMIZER = build_optimizer(OptimizerConfig(name="sgd", beta1=0.0, learning_rate=1.0), 1)


def table() -> TokenTable:
    rng = np.random.default_rng(0)
    lengths, columns = rng.integers(6, 15, 16), np.arange(15)
    attention = columns < lengths[:, None]
    ids = np.where(attention, rng.integers(0, 64, attention.shape), 0).astype(np.int32)
    advantages = np.repeat(rng.normal(size=(16, 1)), 15, 1).astype(np.float32)
    known = {"advantages": advantages, "rollout_logprobs": np.zeros_like(advantages)}
    plain = TokenTable(ids, attention, attention & (columns >= 4), known)
    return plain.weighted("token_mean", 15)


def results(shape: MeshShape) -> dict[str, np.ndarray]:
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    base = init_params(replace(ARCH, lora=None), jax.random.key(0), mesh=mesh)
    params = with_adapters(base, ARCH, jax.random.key(0), mesh)
    drawn = np.random.default_rng(1)
    moved = jax.tree.map(
        lambda x: jax.device_put(to_host(x) + 0.1 * drawn.standard_normal(x.shape, np.float32), x.sharding),
        adapters_of(params),
    )
    params = with_trained(params, moved, ARCH)
    model = PolicySpec(ARCH, mesh=mesh)
    planner = MicroBatchPlanner(rows=4, num_shards=shape.num_data_shards)
    batches = [batch for _, batch in micro_batches(table(), planner, mesh)]
    logprobs = predict_tokens(params, table(), model=model, planner=planner)
    grads, _ = sum_gradients(params, batches, model=model, objective=OBJECTIVE)
    engine = RolloutEngine(ARCH, RolloutConfig(), None, stop_ids=(0,), seed=0, mesh=mesh)
    found = {"logprobs": logprobs}
    found |= _named("gradient", jax.tree.map(lambda g: g.sum(axis=0), grads))
    found |= _named("merged", merged(params, ARCH)) | _named("placed", engine.copy_weights(params))
    opt_state = init_optimizer(OPTIMIZER, adapters_of(params))
    params, *_ = optimizer_step(
        params, opt_state, batches, model=model, objective=OBJECTIVE, optimizer=OPTIMIZER
    )
    return found | _named("params", params)


def _named(kind: str, tree: object) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"{kind}{jax.tree_util.keystr(path)}": np.asarray(to_host(leaf)) for path, leaf in leaves}


if __name__ == "__main__":
    every = {}
    for text in sys.argv[2:]:
        shape = MeshShape(*map(int, text.split(",")))
        every |= {f"{text} {name}": value for name, value in results(shape).items()}
    np.savez(sys.argv[1], **every)
