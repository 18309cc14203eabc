"""Samples, routes, gradient and sums of routers of a model with experts, on meshes of 8 simulated devices.

Writes them to the file argv[1]; further arguments are meshes.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from routed_models import routed_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollouts import local_rollouts

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig, UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.params import partition
from quatrain.parallel.mesh import make_mesh, one_device, reshard, shardings, to_host
from quatrain.types.batches import Prompt
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVE = PolicyObjective.of(UpdateConfig(), on_policy=True)
ARCH, PARAMS = routed_model()


class _WithoutText:
    def decode(self, tokens, skip_special_tokens):
        return ""


def sampled(mesh, params):
    config = RolloutConfig(n=4, max_new_tokens=12)
    stop_ids = tuple(range(0, 290, 31))
    engine = local_rollouts(ARCH, config, _WithoutText(), stop_ids=stop_ids, seed=0, mesh=mesh)
    engine.sync_weights(params, 0)
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 290, size).astype(np.int32) for size in (5, 9, 2, 17, 6)]
    return engine.generate([Prompt(i, each, "") for i, each in enumerate(ids)])


def table(batch, routes: np.ndarray) -> TokenTable:
    advantages = np.where(batch.completion_mask, np.random.default_rng(1).normal(size=(len(batch), 1)), 0)
    known = TokenTable.of(batch).with_columns(
        advantages=advantages.astype(np.float32), rollout_logprobs=batch.rollout_logprobs
    )
    whole = TokenTable(*list(vars(known).values())[:6], routes)
    return whole.weighted("token_mean", 12).balanced(0.5, 8)


def results(shape: MeshShape, forced: TokenTable) -> dict[str, np.ndarray]:
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    params = reshard(PARAMS, shardings(mesh, partition(ARCH, shape)))
    model = PolicySpec(ARCH, mesh=mesh, remat="layer")
    planner = MicroBatchPlanner(
        max_tokens=100 * shape.cp, num_shards=shape.num_data_shards, share_prompts=True
    )
    batches = [batch for _, batch in micro_batches(forced, planner, mesh, model.forms)]
    grads, stats, _ = sum_gradients(params, batches, model=model, objective=OBJECTIVE)
    leaves = jax.tree.leaves(jax.tree.map(lambda g: to_host(g).sum(axis=0), grads))
    found = {
        "gradient": np.concatenate([leaf.reshape(-1) for leaf in leaves]),
        "logprobs": predict_tokens(params, forced, model=model, planner=planner),
        **{f"routers {name}": np.asarray(value) for name, value in stats["routers"].items()},
    }
    if shape.cp == 1:  # the sampler has no cp
        batch = sampled(mesh, params)
        found |= {"tokens": batch.input_ids, "routes": np.sort(batch.routes, axis=-1)}
    return found


def forced() -> TokenTable:
    """A batch with random experts, so that a device that chooses by itself is seen."""
    batch = sampled(one_device(), PARAMS)
    rng = np.random.default_rng(2)
    routes = np.argsort(rng.random((*batch.routes.shape[:3], 8)), axis=-1)[..., :2].astype(np.uint8)
    return table(batch, np.where(batch.routes == 255, batch.routes, routes))


if __name__ == "__main__":
    every, given = {}, forced()
    for text in sys.argv[2:]:
        found = results(MeshShape(*map(int, text.split(","))), given)
        every |= {f"{text} {key}": value for key, value in found.items()}
    np.savez(sys.argv[1], **every)
