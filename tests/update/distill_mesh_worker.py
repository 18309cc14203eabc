"""Training steps with a teacher on the meshes it is given, in a process of its own.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python distill_mesh_worker.py RESULT.npz "mesh=2,2,2"

A layout is what the configuration has of it. Writes the policy's gradient-descent steps of each layout for
sampled tokens and for divergences over the vocabulary and over its top words, and the teacher's scores.
"""

import sys
from dataclasses import replace

import jax
import numpy as np

from quatrain.config.load import load_config
from quatrain.config.schema import DistillConfig, LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.data.policy import Meshes
from quatrain.forward.specs import PolicySpec
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.update.distillation import Distillation
from quatrain.update.learner import Learner
from quatrain.update.teacher import FrozenModel, Teacher, WordTeacher
from quatrain.update.teacher_scores import TopWords

WORDS, LONGEST, TEMPERATURE = 64, 9, 0.8
TOP, COMMON = 5, 59
"""Words that losses tell apart, and words that count: a part of the last shard's do not."""


def architecture(width: int):
    """A small model whose vocabulary and heads `tp` and `cp` split."""
    arch = builtin_architecture("tiny", WORDS, (1,))
    kind = arch.layers[0]
    mixer, mlp = replace(kind.mixer, head_dim=8), replace(kind.mlp, width=2 * width)
    return replace(arch, hidden_size=width, layers=(replace(kind, mixer=mixer, mlp=mlp),) * 2)


def batch() -> AdvantagedBatch:
    """Ten ragged sequences of five groups."""
    rng = np.random.default_rng(0)
    rows, prompts = 10, np.repeat(rng.integers(2, 6, 5), 2)
    lengths = prompts + rng.integers(1, LONGEST + 1, rows)
    columns = np.arange(lengths.max())
    attention = columns < lengths[:, None]
    mask = attention & (columns >= prompts[:, None])
    ids = rng.integers(0, WORDS, attention.shape)
    ids = np.where(columns < prompts[:, None], np.repeat(ids[::2], 2, axis=0), ids)
    rollouts = RolloutBatch(
        input_ids=np.where(attention, ids, 0).astype(np.int32),
        attention_mask=attention,
        completion_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(3.0, mask.shape), 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(rows, "stop"),
        group_ids=np.repeat(np.arange(5), 2).astype(np.int64),
        prompts=("",) * rows,
        completions=("",) * rows,
    )
    rewards = rng.normal(size=rows).astype(np.float32)
    advantages = np.where(mask, rewards[:, None], 0).astype(np.float32)
    return AdvantagedBatch(RewardedBatch(rollouts, rewards, rewards[None], ("r",)), advantages)


def steps(layout: str) -> dict[str, np.ndarray]:
    """By what is computed: the teacher's log-probabilities, and the weights after a step with each loss."""
    config = load_config(None, ["distill.teacher=x", *layout.split("; ")], environ={}).config
    meshes = Meshes.of(config)
    arch, teacher_arch = architecture(32), architecture(48)
    spec = PolicySpec(teacher_arch, temperature=TEMPERATURE, mesh=meshes.teacher)
    params = init_params(teacher_arch, jax.random.key(3), mesh=meshes.teacher)
    memory = "host" if config.offload.teacher else "device"
    model = FrozenModel(params, spec, max_tokens=40, memory=memory)
    scored = Teacher({"default": model}, top=TopWords(TOP, COMMON)).score(batch().rewarded)
    assert scored.teacher_words is not None
    of_tokens = batch().rollouts.completion_mask
    found = {"logprobs": scored.token_logprobs["teacher_logprobs"]}
    found["words"] = scored.teacher_words.logprobs[of_tokens]
    losses = [("sampled", 0), ("reverse_kl", TOP), ("forward_kl", TOP)]
    losses += [("reverse_kl", 0), ("jsd", 0)] if config.placement.teacher is None else []
    for kind, top_k in losses:
        distill = Distillation.of(DistillConfig(teacher="x", loss=kind, rl_weight=0.5, top_k=top_k), 10)
        over_all = kind != "sampled" and not top_k
        learner = Learner(
            PolicySpec(arch, temperature=TEMPERATURE, mesh=meshes.train),
            UpdateConfig(mini_batch_size=5, max_tokens_per_device=20, loss_aggregation="token_mean"),
            LogprobConfig(max_tokens_per_device=40),
            OptimizerConfig(name="sgd", learning_rate=0.5, beta1=0.0, max_grad_norm=None),
            max_new_tokens=LONGEST,
            total_steps=1,
            seed=0,
            distillation=distill,
            teacher=WordTeacher(model, kind=kind, beta=0.5) if over_all else None,
            num_words=COMMON if top_k else None,
        )
        state = learner.init(init_params(arch, jax.random.key(7), mesh=meshes.train))
        state = learner.step(state, replace(batch(), rewarded=scored))
        for number, leaf in enumerate(jax.tree.leaves(state.params)):
            found[f"{kind}/{top_k}/{number}"] = np.asarray(leaf)
    return found


def main() -> None:
    """Writes what each layout computes."""
    target, *layouts = sys.argv[1:]
    results = {layout: steps(layout) for layout in layouts}
    np.savez(
        target, **{f"{layout}|{name}": x for layout, named in results.items() for name, x in named.items()}
    )


if __name__ == "__main__":
    main()
