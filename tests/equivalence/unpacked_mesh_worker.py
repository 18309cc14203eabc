"""Gradient and samples with attention in rows of whole sequences, on meshes of 8 simulated devices.

Writes them to the file argv[1]. XLA's causal attention stands for the kernel of a GPU.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from tiny_qwen2 import tiny_qwen2

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollouts import local_rollouts

from quatrain.backend import backend_of
from quatrain.config.mesh import MeshShape
from quatrain.config.schema import RolloutConfig, UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models import attention
from quatrain.models.attention import kernels
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh, to_host
from quatrain.types.batches import Prompt
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

ARCH = tiny_qwen2(num_layers=2)
OBJECTIVE = PolicyObjective.of(UpdateConfig(), on_policy=True)
kernels.obstacle = lambda *_: None
attention._CAUSAL["cudnn"] = partial(kernels.cudnn_attention, implementation="xla")


class _WithoutText:
    def decode(self, tokens, skip_special_tokens):
        return ""


def table() -> TokenTable:
    """Eight groups of four sequences with a prompt of 6 tokens, and completions of up to 20."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(8), 4)
    lengths, columns = 6 + rng.integers(1, 21, 32), np.arange(26)
    mask = columns < lengths[:, None]
    completion = mask & (columns >= 6)
    tokens = rng.integers(0, 64, mask.shape)
    tokens = np.where(completion, tokens, tokens[::4].repeat(4, axis=0))
    known = {"advantages": rng.normal(size=mask.shape), "rollout_logprobs": np.zeros(mask.shape)}
    columns = {name: (values * completion).astype(np.float32) for name, values in known.items()}
    ids = np.where(mask, tokens, 0).astype(np.int32)
    return TokenTable(ids, mask, completion, columns, groups).weighted("token_mean", 20)


def results(shape: MeshShape, name: str) -> dict[str, np.ndarray]:
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    params = init_params(ARCH, jax.random.key(0), mesh=mesh)
    model = PolicySpec(ARCH, attention=name, mesh=mesh, backend=replace(backend_of("cpu"), kind="gpu"))
    planner = MicroBatchPlanner(max_tokens=150, num_shards=shape.num_data_shards, share_prompts=True)
    batches = [batch for _, batch in micro_batches(table(), planner, mesh, model.forms)]
    assert all((batch.layout is not None) == (name == "cudnn") for batch in batches)
    grads, *_ = sum_gradients(params, batches, model=model, objective=OBJECTIVE)
    engine = local_rollouts(
        ARCH,
        RolloutConfig(n=2, max_new_tokens=8),
        _WithoutText(),
        stop_ids=(0,),
        seed=0,
        attention=name,
        mesh=mesh,
    )
    engine.sync_weights(params, 0)
    prompts = [Prompt(i, np.arange(1, 9 + i, dtype=np.int32), "") for i in range(9)]
    sampled = engine.generate(prompts)
    scored = [scores for part in engine.engine.score([p.input_ids for p in prompts], 3) for scores in part]
    leaves = jax.tree.leaves(jax.tree.map(lambda g: to_host(g).sum(axis=0), grads))
    return {
        "logprobs": predict_tokens(params, table(), model=model, planner=planner),
        "gradient": np.concatenate([leaf.reshape(-1) for leaf in leaves]),
        "tokens": sampled.input_ids,
        "sampled logprobs": sampled.rollout_logprobs,
        "scores": np.concatenate([scores.logprobs[1:] for scores in scored]),
        "likeliest": np.concatenate([scores.likeliest_logprobs[1:] for scores in scored]),
    }


if __name__ == "__main__":
    every = {}
    for text in sys.argv[2:]:
        mesh, name = text.split("/")
        found = results(MeshShape(*map(int, mesh.split(","))), name)
        every |= {f"{text} {key}": value for key, value in found.items()}
    np.savez(sys.argv[1], **every)
