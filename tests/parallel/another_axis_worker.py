"""A mesh, shardings, an optimizer step and the plan, with the axis argv[2] (JSON, null: none) in the table.

Writes them to the file argv[1].
"""

import json
import sys

import numpy as np

from quatrain.config import mesh_axes as axes

target, extra = sys.argv[1], json.loads(sys.argv[2])
if extra:  # before any module reads the table
    axes.AXES += (axes.MeshAxis("extra", **extra),)
    axes.DATA_AXES += ("extra",) * axes.AXES[-1].splits_batch

import jax  # noqa: E402

from quatrain.config.load import load_config  # noqa: E402
from quatrain.config.mesh import axis_sizes, resolve_mesh  # noqa: E402
from quatrain.config.roles import resolve_roles  # noqa: E402
from quatrain.config.schema import OptimizerConfig, UpdateConfig  # noqa: E402
from quatrain.forward.micro_batch import micro_batches  # noqa: E402
from quatrain.forward.planner import MicroBatchPlanner  # noqa: E402
from quatrain.forward.specs import PolicySpec  # noqa: E402
from quatrain.forward.table import TokenTable  # noqa: E402
from quatrain.models.families import architecture_from_hf  # noqa: E402
from quatrain.models.params import init_params, partition  # noqa: E402
from quatrain.parallel.mesh import role_mesh, to_host  # noqa: E402
from quatrain.plan import batch_plan, device_memory  # noqa: E402
from quatrain.plan.placement import placement  # noqa: E402
from quatrain.update.gradient import Accumulated, init_optimizer, optimizer_step, sum_gradients  # noqa: E402
from quatrain.update.objective import PolicyObjective  # noqa: E402
from quatrain.update.optimizer import Optimizer  # noqa: E402

ARCH = architecture_from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)


def table() -> TokenTable:
    """Twelve sequences with prompts of 3 tokens and completions of up to 9."""
    rng, columns = np.random.default_rng(0), np.arange(12)
    mask = columns < 3 + rng.integers(1, 10, 12)[:, None]
    completion = mask & (columns >= 3)
    known = {"advantages": rng.normal(size=mask.shape), "rollout_logprobs": np.zeros(mask.shape)}
    known = {name: (values * completion).astype(np.float32) for name, values in known.items()}
    ids = np.where(mask, rng.integers(0, 64, mask.shape), 0).astype(np.int32)
    return TokenTable(ids, mask, completion, known, np.arange(12)).weighted("token_mean", 9)


config = load_config(None, ["mesh=2,-1,2", "rollout.mesh=4,1,2"], environ={}).config
role = resolve_roles(config, 8).train
mesh = role_mesh(role)
model = PolicySpec(ARCH, mesh=mesh)
params = init_params(ARCH, jax.random.key(0), mesh=mesh)
planner = MicroBatchPlanner(max_tokens=40, num_shards=role.mesh.num_data_shards, share_prompts=False)
parts = [part for _, part in micro_batches(table(), planner, mesh, model.forms)]
objective = PolicyObjective.of(UpdateConfig(), on_policy=True)
optimizer = Optimizer(OptimizerConfig(learning_rate=1e-2), 1)
grads, stats, _ = sum_gradients(params, parts, model=model, objective=objective)
new, _, applied, metrics, _ = optimizer_step(
    params,
    init_optimizer(optimizer.form, params),
    Accumulated(grads, (stats,)),
    model=model,
    form=optimizer.form,
    numbers=optimizer.numbers(0),
)
assert applied
planned = batch_plan.plan(config, devices=8)
found = {
    "mesh": [str(role.mesh), dict(mesh.shape) | {"extra": 1}, [d.id for d in mesh.devices.flat]],
    "forms": [str(resolve_mesh(spec, 8)) for spec in ("auto", "1,-1,2", {"tp": 4, "fsdp": 2})],
    "sizes": axis_sizes("1,-1,1") | {"extra": 1},
    "partition": [str(spec) for spec in jax.tree.leaves(partition(ARCH, role.mesh))],
    "shapes": [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(new)],
    "plan": {row.key: row.value for row in planned.rows},
    "plan's text": batch_plan.render(planned),
    "memory": device_memory.render(placement(config, devices=8)),
}
arrays = {jax.tree_util.keystr(p): to_host(x) for p, x in jax.tree_util.tree_flatten_with_path(new)[0]}
np.savez(target, loss=np.float64(metrics["loss"].result()), found=np.array(json.dumps(found)), **arrays)
