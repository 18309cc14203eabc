"""One optimizer step on meshes of 8 simulated devices; writes its results to the file argv[1].

Of the adapters of a small model; or of a golden model, FAMILY in the environment, with adapters and without.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from tiny_qwen2 import tiny_qwen2

sys.path.insert(0, str(Path(__file__).parents[1]))
from architectures import ADAPTED, of_golden

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import OptimizerConfig, RolloutConfig, UpdateConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import Architecture, LoRA
from quatrain.models.lora import merged, trained_part, with_adapters, with_trained
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh, to_host
from quatrain.update.gradient import Accumulated, init_optimizer, optimizer_step, sum_gradients
from quatrain.update.objective import PolicyObjective
from quatrain.update.optimizer import Optimizer

ADAPTERS = LoRA(rank=4, alpha=6.0, targets=(*ADAPTED, "lm_head"))
OBJECTIVE = PolicyObjective.of(UpdateConfig(), on_policy=True)
OPTIMIZER = Optimizer(OptimizerConfig(name="sgd", beta1=0.0, learning_rate=1.0), 1)


def table() -> TokenTable:
    rng = np.random.default_rng(0)
    lengths, columns = rng.integers(6, 15, 16), np.arange(15)
    attention = columns < lengths[:, None]
    ids = np.where(attention, rng.integers(0, 64, attention.shape), 0).astype(np.int32)
    advantages = np.repeat(rng.normal(size=(16, 1)), 15, 1).astype(np.float32)
    known = {"advantages": advantages, "rollout_logprobs": np.zeros_like(advantages)}
    plain = TokenTable(ids, attention, attention & (columns >= 4), known)
    return plain.weighted("token_mean", 15)


def architectures() -> dict[str, Architecture]:
    case = os.environ.get("FAMILY")
    if case is None:
        return {"": replace(tiny_qwen2(num_layers=2), lora=ADAPTERS)}
    heads = {"num_kv_heads": 1} if os.environ.get("SHARED_HEADS") else {}
    arch = of_golden(case, vocab_size=64, **heads)
    return {"whole ": arch, "adapters ": replace(arch, lora=ADAPTERS)}


def results(shape: MeshShape, arch: Architecture, *, rounded: bool = False) -> dict[str, np.ndarray]:
    """With `rounded`, those of weights that are one unit in the last place larger or smaller."""
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    params = init_params(replace(arch, lora=None), jax.random.key(0), mesh=mesh)
    if arch.lora:
        params = with_adapters(params, arch, jax.random.key(0), mesh)
    drawn = np.random.default_rng(1)
    moved = jax.tree.map(
        lambda x: jax.device_put(to_host(x) + 0.1 * drawn.standard_normal(x.shape, np.float32), x.sharding),
        trained_part(params, arch),
    )
    params = with_trained(params, moved, arch)
    if rounded:
        params = jax.tree.map(lambda x: jax.device_put(_rounded(to_host(x), drawn), x.sharding), params)
    model = PolicySpec(arch, mesh=mesh)
    planner = MicroBatchPlanner(rows=4, num_shards=shape.num_data_shards)
    batches = [batch for _, batch in micro_batches(table(), planner, mesh)]
    logprobs = predict_tokens(params, table(), model=model, planner=planner)
    grads, stats, _ = sum_gradients(params, batches, model=model, objective=OBJECTIVE)
    engine = RolloutEngine(arch, RolloutConfig(), None, stop_ids=(0,), seed=0, mesh=mesh)
    found = {"logprobs": logprobs}
    found |= _named("gradient", jax.tree.map(lambda g: g.sum(axis=0), grads))
    found |= _named("merged", merged(params, arch)) | _named("placed", engine.copy_weights(params))
    opt_state = init_optimizer(OPTIMIZER.form, trained_part(params, arch))
    sums, form, numbers = Accumulated(grads, (stats,)), OPTIMIZER.form, OPTIMIZER.numbers(0)
    params, *_ = optimizer_step(params, opt_state, sums, model=model, form=form, numbers=numbers)
    return found | _named("params", params)


def _rounded(x: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
    return np.nextafter(x, drawn.choice(np.float32([-np.inf, np.inf]), x.shape))


def _named(kind: str, tree: object) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"{kind}{jax.tree_util.keystr(path)}": np.asarray(to_host(leaf)) for path, leaf in leaves}


if __name__ == "__main__":
    every = {}
    for text in sys.argv[2:]:
        numbers, _, rounded = text.partition("~")
        shape = MeshShape(*map(int, numbers.split(",")))
        for kind, arch in architectures().items():
            found = results(shape, arch, rounded=bool(rounded))
            every |= {f"{text} {kind}{name}": value for name, value in found.items()}
    np.savez(sys.argv[1], **every)
