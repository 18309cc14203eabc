"""Three stanzas on the meshes it is given, in a process of its own, or in one of several that it joins.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_worker.py RESULT.npz \
        placement.train=0 "mesh=2,2,2 rollout.mesh=8,1,1"

A layout is what the configuration has of it. Writes, for each layout and mode, what was sampled, weights,
losses, gradients (their running mean, which the optimizer keeps) and what each device holds. With
COORDINATOR, NUM_PROCESSES and PROCESS_ID in the environment, the devices are those of all processes.
"""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

from coupled_losses import Pairs, with_reference
from rollouts import local_rollouts

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.cluster import processes as hosts
from quatrain.config.load import load_config
from quatrain.config.schema import (
    AdvantageConfig,
    CriticConfig,
    LogprobConfig,
    OptimizerConfig,
    RolloutConfig,
    UpdateConfig,
)
from quatrain.data.policy import Meshes
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import BOTH, PRE
from quatrain.models.blocks.experts import Experts
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.ops import packing
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.mesh import to_host, to_memory
from quatrain.types.batches import Prompt, RewardedBatch, RolloutBatch
from quatrain.update import residuals
from quatrain.update.critic import Critic
from quatrain.update.learner import KLReward, Learner
from quatrain.update.trainer import ModelState, StepTotals, Trainer

residuals.LEAST_BYTES = 2**8  # so that a tiny model's are held on every mesh
COMMON_PREFIX = (5, 9)
packing.LEAST_COMMON_PREFIX = len(COMMON_PREFIX)
STEPS = 3
STOP_IDS = (1, 7, 30)
GROUPS, SAMPLES = 5, 3
LONGEST = 9
MODES = {
    "rows": ({"micro_batch_size": 2}, {"micro_batch_size": 3}),
    "tokens": ({"max_tokens_per_device": 40}, {"max_tokens_per_device": 48}),
    "experts": ({"max_tokens_per_device": 40}, {"max_tokens_per_device": 48}),
    "both": ({"max_tokens_per_device": 40}, {"max_tokens_per_device": 48}),
}
"""`both` is `tokens` with experts."""
REMAT = {"rows": "layer", "tokens": "dots", "experts": "dots", "both": "dots"}
SMALL_NUMBERS = 32
ESTIMATORS = {"rows": "grpo", "tokens": "gae", "experts": "grpo", "both": "gae"}
"""`gae` brings a critic, and here KL in the reward, with a coefficient that adapts."""
LOSSES = {"rows": "ppo_clip", "tokens": f"{Path(__file__).parents[1]}/sequence_loss.py:sequence_ratio"}
LOSSES |= {"experts": LOSSES["rows"], "both": LOSSES["tokens"]}


class Tokenizer:
    """Words are numbers."""

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


def architecture(mode: str):
    """The small model of `mode`.

    Between them every kind of parameter there is; a vocabulary that no mesh splits, and one that `tp` does.
    """
    arch = builtin_architecture("tiny", 63 if mode == "rows" else 64, (1,))
    kind, rows, tokens = arch.layers[0], mode == "rows", mode in ("tokens", "both")
    mixer = replace(kind.mixer, head_dim=8, qkv_bias=tokens, output_bias=tokens, qk_norm=tokens)
    mlp = replace(kind.mlp, width=48, bias=tokens)
    # Of 16 columns: with 24, rounding decides on an expert of a token whose second and third are 2e-7 apart.
    experts = Experts(num=8, top_k=2, width=16, shared=mlp, shared_gate=True)
    dense = replace(kind, mixer=mixer, mlp=mlp, norms=BOTH if rows else PRE)
    mixed = replace(dense, mlp=experts)
    layers = {"experts": (mixed, mixed), "both": (mixed, dense)}.get(mode, (dense, dense))
    return replace(arch, hidden_size=32, layers=layers, tie_embeddings=rows)


def prompts(step: int) -> list[Prompt]:
    """5 prompts with a common prefix: no mesh of eight devices divides them or their 15 samples."""
    rng = np.random.default_rng(step)
    own = [rng.integers(0, 63, rng.integers(1, 5)) for _ in range(GROUPS)]
    ids = [np.array([*COMMON_PREFIX, *tokens], np.int32) for tokens in own]
    return [Prompt(step * GROUPS + i, tokens, f"prompt {i}", {}) for i, tokens in enumerate(ids)]


def rewarded(rollouts: RolloutBatch) -> RewardedBatch:
    """The share of small numbers among a completion's tokens."""
    small = (rollouts.input_ids < SMALL_NUMBERS) & rollouts.completion_mask
    rewards = (small.sum(axis=1) / rollouts.completion_lengths).astype(np.float32)
    return RewardedBatch(rollouts, rewards, rewards[None], ("small",))


def pairs() -> TokenTable:
    """Six pairs with a prompt each, whose targets are other tokens, one of them behind the last."""
    rng = np.random.default_rng(9)
    lengths, columns = rng.integers(6, 14, 12), np.arange(14)
    attention, scored = columns < lengths[:, None], (columns >= 4) & (columns <= lengths[:, None])
    ids, targets = rng.integers(0, 63, (2, *attention.shape)).astype(np.int32)
    ids[1::2, :4] = ids[::2, :4]
    groups = np.repeat(np.arange(6), 2)
    return with_reference(TokenTable(ids * attention, attention, scored, {}, groups, targets=targets))


def surprise(tokens) -> TokenLoss:
    return TokenLoss(-tokens.logprobs)


def halves(trainer: Trainer, state: ModelState, *, want: bool) -> dict[str, np.ndarray]:
    """Gradient and predictions of a coupled loss, and with `want` of a loss of tokens too."""
    tables = {"coupled": (pairs(), Pairs())}
    if want:
        tables["targets"] = pairs().weighted("token_mean", 1), surprise
    result = {}
    for name, (table, objective) in tables.items():
        found = trainer.forward_backward(state, table, objective, StepTotals(), want=True)
        assert found.predictions is not None
        result |= {f"{name} predictions": found.predictions, f"{name} loss": np.float64(found.loss)}
        result |= arrays(f"{name} gradient", jax.tree.map(lambda x: x.sum(axis=0), found.total))
    return result


def train(layout: str, mode: str) -> dict[str, np.ndarray]:
    """What STEPS steps of two mini-batches each come to, with a KL and an entropy term."""
    config = load_config(None, ["advantage.estimator=gae", *layout.split()], environ={}).config
    meshes, offload = Meshes.of(config), config.offload
    arch = architecture(mode)
    update, logprob = MODES[mode]
    config_of_update = UpdateConfig(
        mini_batch_size=3,
        kl_coef=0.1,
        entropy_coef=0.01,
        loss=LOSSES[mode],
        loss_aggregation="token_mean",
        **update,
    )
    optimizer = OptimizerConfig(learning_rate=3e-3, eps=1e-3)
    critic, critic_params = None, None
    if ESTIMATORS[mode] == "gae":
        critic_arch = replace(arch, head="value_head", layers=arch.layers[1:])
        forward = {f"forward_{name}": size for name, size in logprob.items()}
        critic = Critic(
            CriticSpec(critic_arch, remat=REMAT[mode], mesh=meshes.critic),
            CriticConfig(mini_batch_size=3, epochs=1, **update, **forward),
            config_of_update,
            optimizer,
            max_new_tokens=LONGEST,
            total_steps=2 * STEPS,
            seed=4,
            memory="host" if offload.critic else "device",
        )
        critic_params = init_params(critic_arch, jax.random.key(2), mesh=meshes.critic)
    learner = Learner(
        PolicySpec(arch, remat=REMAT[mode], mesh=meshes.train),
        config_of_update,
        LogprobConfig(**logprob),
        optimizer,
        max_new_tokens=LONGEST,
        total_steps=2 * STEPS,
        seed=3,
        reference=to_memory(
            "host" if offload.reference else "device",
            init_params(arch, jax.random.key(1), mesh=meshes.reference),
        ),
        critic=critic,
        kl_reward=KLReward(0.05, target=0.01, horizon=100) if critic else None,
        optimizer_memory="host" if offload.optimizer else "device",
        policy_memory="host" if offload.policy else "device",
    )
    estimator = AdvantageEstimator(AdvantageConfig(estimator=ESTIMATORS[mode]))
    sampling = RolloutConfig(n=SAMPLES, max_new_tokens=LONGEST)
    engine = local_rollouts(arch, sampling, Tokenizer(), stop_ids=STOP_IDS, seed=5, mesh=meshes.rollout)
    greedy = replace(engine.sampling, temperature=0.0)  # with the programs of the other samples
    params = init_params(arch, jax.random.key(0), mesh=meshes.train)
    first = to_host(params["layers"][0]["qkv"])
    state = learner.init(params, critic_params)
    before = [leaf.sharding for leaf in jax.tree.leaves((state.params, state.opt_state))]
    # Of the parameters before training, which wait where `offload.policy` says.
    on_device = replace(state, params=to_memory("device", state.params))
    result = halves(learner.trainer, on_device, want=mode != "both")
    for step in range(STEPS):
        engine.sync_weights(state.params, state.step)
        rollouts = engine.generate(prompts(step), step=step)
        result |= sampled(f"{step}", rollouts) | sampled(
            f"{step} greedy", engine.generate(prompts(step), sampling=greedy)
        )
        state = learner.step(
            state, estimator.estimate(learner.compute_logprobs_and_values(state, rewarded(rollouts)))
        )
        for name in ("loss", "update/grad_norm", "update/kl", "update/entropy", "update/ratio_max"):
            result[f"{name} {step}"] = np.float64(state.metrics[name].result())
        result |= arrays(f"gradients {step}", optax.tree.get(state.opt_state, "mu"))
        if state.critic is not None:
            for name in ("critic/loss", "critic/grad_norm", "critic/explained_variance"):
                result[f"{name} {step}"] = np.float64(state.metrics[name].result())
            result[f"kl_coef {step}"] = np.float64(state.reward_kl_coef)
            result |= arrays(f"critic gradients {step}", optax.tree.get(state.critic.opt_state, "mu"))
    for leaf, sharding in zip(jax.tree.leaves((state.params, state.opt_state)), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.sharding, sharding)
    result["steps"] = np.array(state.step)
    result["kept optimizer"] = np.array(leaf.sharding.memory_kind)
    result["kept policy"] = np.array(state.params["embed"].sharding.memory_kind)
    result["kept reference"] = np.array(jax.tree.leaves(learner.reference)[0].sharding.memory_kind)
    result["moved"] = np.abs(to_host(state.params["layers"][0]["qkv"]) - first).max()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]:
        result[f"held {jax.tree_util.keystr(path)}"] = np.array(leaf.addressable_shards[0].data.size)
    if state.critic is not None:
        kinds = {
            leaf.sharding.memory_kind
            for leaf in jax.tree.leaves((state.critic.params, state.critic.opt_state))
        }
        result["kept critic"] = np.array(" ".join(kinds))
        result |= arrays("critic weights", state.critic.params)
    return result | arrays("weights", state.params)


def arrays(name: str, params: dict) -> dict[str, np.ndarray]:
    """Each parameter, or what is like it, whole."""
    leaves = jax.tree_util.tree_flatten_with_path(to_memory("device", params))[0]
    return {f"{name} {jax.tree_util.keystr(path)}": to_host(leaf) for path, leaf in leaves}


def sampled(name: str, rollouts: RolloutBatch) -> dict[str, np.ndarray]:
    """Tokens and log-probabilities of completions, one behind the other, and their lengths."""
    mask = rollouts.completion_mask
    return {
        f"tokens {name}": rollouts.input_ids[mask],
        f"lengths {name}": mask.sum(axis=1),
        f"logprobs {name}": rollouts.rollout_logprobs[mask],
    }


def main() -> None:
    """Results of every layout and mode, or of those in the environment, under `layout mode name`."""
    target, *layouts = sys.argv[1:]
    if "COORDINATOR" in os.environ:
        number, own = (int(os.environ[name]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        hosts.initialize(os.environ["COORDINATOR"], number, own, start_timeout_s=60)
    results = {}
    for layout in layouts:
        for mode in os.environ.get("MODES", " ".join(MODES)).split():
            results |= {f"{layout} {mode} {name}": value for name, value in train(layout, mode).items()}
        # Programs take memory maps, of which a process has a limit that all layouts together exceed; XLA then
        # ends the process by a signal.
        jax.clear_caches()
        gc.collect()
    if hosts.is_main_process():
        np.savez(target, **results)
    hosts.shutdown()


if __name__ == "__main__":
    main()
