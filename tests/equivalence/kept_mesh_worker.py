"""Sampled words, log-probabilities and gradient with filters, on meshes of 4 simulated devices.

Writes them to the file argv[1]; further arguments are meshes.
"""

import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollouts import local_rollouts

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig, UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params, partition
from quatrain.parallel.mesh import make_mesh, one_device, reshard, shardings, to_host
from quatrain.types.batches import Prompt
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

OBJECTIVE = PolicyObjective.of(UpdateConfig(entropy_coef=0.1), on_policy=True)
WORDS = 300  # two parts of 150, neither a multiple of 32 words
PROMPTS = (3, 5, 7), (11, 4), (3, 5, 8, 9, 10)


class WithoutText:
    """A tokenizer whose texts are empty."""

    def decode(self, tokens, skip_special_tokens):
        return ""


@cache
def model():
    """Logits are far from even: top_p 0.9 keeps 25 words on average, and 65 at most."""
    arch = builtin_architecture("tiny", WORDS, (0,))
    params = init_params(arch, jax.random.key(1))
    layers = jax.tree.map(lambda x: 2 * x if x.ndim > 1 and x.shape[-1] > 1 else x, params["layers"])
    return arch, {**params, "embed": 3 * params["embed"], "layers": layers}


def sampled(mesh=None, params=None, n=3, new=20, prompts=PROMPTS, **options):
    config = RolloutConfig(n=n, max_new_tokens=new, **options)
    how = {"stop_ids": (7, 30), "seed": 1, "mesh": mesh or one_device()}
    engine = local_rollouts(model()[0], config, WithoutText(), **how)
    engine.sync_weights(model()[1] if params is None else params, 0)
    return engine.generate([Prompt(i, np.array(ids, np.int32), "") for i, ids in enumerate(prompts)])


def table(batch) -> TokenTable:
    advantages = np.where(batch.completion_mask, np.random.default_rng(1).normal(size=(len(batch), 1)), 0)
    columns = {"advantages": advantages.astype(np.float32), "rollout_logprobs": batch.rollout_logprobs}
    return TokenTable.of_policy(batch, model()[0]).with_columns(**columns).weighted("token_mean", 20)


def results(shape: MeshShape, batch) -> dict[str, np.ndarray]:
    """Log-probabilities and gradient of `batch`, and what a sampler on this mesh draws."""
    arch, params = model()
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    params = reshard(params, shardings(mesh, partition(arch, shape)))
    spec = PolicySpec(arch, mesh=mesh, remat="layer")
    sizes = {"num_shards": shape.num_data_shards, "share_prompts": True}
    planner, given = MicroBatchPlanner(max_tokens=60 * shape.cp, **sizes), table(batch)
    cuts = [each for _, each in micro_batches(given, planner, mesh, spec.forms)]
    grads, _, _ = sum_gradients(params, cuts, model=spec, objective=OBJECTIVE)
    leaves = jax.tree.leaves(jax.tree.map(lambda g: to_host(g).sum(axis=0), grads))
    found = {
        "gradient": np.concatenate([leaf.reshape(-1) for leaf in leaves]),
        "logprobs": predict_tokens(params, given, model=spec, planner=planner),
    }
    if shape.cp == 1:  # the sampler has no cp
        own = sampled(mesh, params, top_p=0.9)
        found |= {"tokens": own.input_ids, "counts": own.kept.counts, "words": own.kept.words}
    return found


if __name__ == "__main__":
    every, batch = {}, sampled(top_p=0.9)
    for text in sys.argv[2:]:
        found = results(MeshShape(*map(int, text.split(","))), batch)
        every |= {f"{text} {key}": value for key, value in found.items()}
    np.savez(sys.argv[1], **every)
