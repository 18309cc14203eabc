"""Three training steps on the meshes it is given, in a process of its own with eight devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_worker.py RESULT.npz 1,1,1 2,2,2

Writes, for each mesh, the weights, losses, gradient norms and log-probabilities, and what each device holds.
"""

import dataclasses
import sys

import jax
import numpy as np

from quatrain.config.mesh import resolve_mesh
from quatrain.config.schema import LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.parallel.mesh import make_mesh
from quatrain.types import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.update.gradient import Policy
from quatrain.update.learner import Learner

STEPS = 3
VOCABULARY = 64
MODES = {
    "rows": ({"micro_batch_size": 2}, {"micro_batch_size": 3}),
    "tokens": ({"max_tokens_per_device": 40}, {"max_tokens_per_device": 48}),
}


def architecture():
    """Every kind of parameter there is: biases, norms of queries and keys, an output head of its own."""
    arch = builtin_architecture("tiny", VOCABULARY, (1,))
    return dataclasses.replace(
        arch,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        layer_types=arch.layer_types[:2],
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=False,
    )


def advantaged(seed: int) -> AdvantagedBatch:
    """15 ragged sequences of 5 groups: a number that no mesh of eight devices divides."""
    rng = np.random.default_rng(seed)
    groups, n = 5, 3
    prompts = np.repeat(rng.integers(1, 7, groups), n)
    completions = rng.integers(1, 10, groups * n)
    columns = np.arange((prompts + completions).max())
    attention = columns < (prompts + completions)[:, None]
    mask = attention & (columns >= prompts[:, None])
    tokens = rng.integers(0, VOCABULARY, attention.shape)
    tokens = np.where(mask, tokens, np.repeat(tokens[::n], n, axis=0))
    rollouts = RolloutBatch(
        input_ids=np.where(attention, tokens, 0).astype(np.int32),
        attention_mask=attention,
        completion_mask=mask,
        rollout_logprobs=np.where(mask, -3.0, 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(groups * n, "stop"),
        group_ids=np.repeat(np.arange(groups), n).astype(np.int64),
        prompts=("",) * (groups * n),
        completions=("",) * (groups * n),
    )
    rewards = rng.normal(size=groups * n).astype(np.float32)
    advantages = np.where(mask, rewards[:, None], 0).astype(np.float32)
    return AdvantagedBatch(RewardedBatch(rollouts, rewards, rewards[None], ("r",)), advantages)


def train(spec: str, mode: str) -> dict[str, np.ndarray]:
    """Weights and metrics after STEPS steps of two mini-batches each, with a KL and an entropy term."""
    shape = resolve_mesh(spec, int(np.prod([int(size) for size in spec.split(",")])))
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    arch = architecture()
    update, logprob = MODES[mode]
    learner = Learner(
        Policy(arch, temperature=0.8, remat="dots", mesh=mesh),
        UpdateConfig(mini_batch_size=3, kl_coef=0.1, entropy_coef=0.01, **update),
        LogprobConfig(**logprob),
        OptimizerConfig(learning_rate=3e-3, eps=1e-4),
        max_new_tokens=9,
        total_steps=2 * STEPS,
        seed=3,
        reference=init_params(arch, jax.random.key(1), mesh=mesh),
    )
    params = init_params(arch, jax.random.key(0), mesh=mesh)
    first = np.asarray(params["layers"][0]["qkv"])
    state = learner.init(params)
    before = {id_: leaf.sharding for id_, leaf in enumerate(jax.tree.leaves((state.params, state.opt_state)))}
    result = {}
    for step in range(STEPS):
        state = learner.step(state, advantaged(step))
        for name in ("loss", "update/grad_norm", "update/kl", "update/entropy", "update/ratio_max"):
            result[f"{name} {step}"] = np.float64(state.metrics[name].result())
    for id_, leaf in enumerate(jax.tree.leaves((state.params, state.opt_state))):
        assert leaf.sharding.is_equivalent_to(before[id_], leaf.ndim), (id_, leaf.sharding, before[id_])
    result["steps"] = np.array(state.step)
    result["moved"] = np.abs(np.asarray(state.params["layers"][0]["qkv"]) - first).max()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]:
        name = jax.tree_util.keystr(path)
        result[f"weights {name}"] = np.asarray(leaf)
        result[f"held {name}"] = np.array(leaf.addressable_shards[0].data.size)
    return result


def main() -> None:
    """Results of every mesh and mode, under `mesh mode name`."""
    target, *specs = sys.argv[1:]
    results = {}
    for spec in specs:
        for mode in MODES:
            results |= {f"{spec} {mode} {name}": value for name, value in train(spec, mode).items()}
    np.savez(target, **results)


if __name__ == "__main__":
    main()
