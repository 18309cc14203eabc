"""One GRPO step of Tunix with its vanilla rollout, on the CPU; run by `compare.py --peer tunix`.

A micro-batch of the update is one prompt's samples unless `--rows` says otherwise; the rollout takes all at
once. Tunix's Llama module ignores `rope_theta`: the text it samples is not SmolLM2's, what it costs is.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3.model import ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from workload import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    finish,
    num_prompt_tokens,
    peer_parser,
    read_messages,
    text_reward,
)

NO_TOKEN = -1
"""Named as the stop token, which is then never sampled."""
PROMPT_MULTIPLE = 16


def main() -> None:
    args = peer_parser(__doc__).parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chats = read_messages(args)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
    ]
    longest = max(len(ids) for ids in tokenizer(prompts)["input_ids"])
    prompt_length = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    rollout = {
        "max_tokens_to_generate": args.tokens,
        "max_prompt_length": prompt_length,
        "kv_cache_size": prompt_length + args.tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "eos_tokens": [NO_TOKEN],
    }
    training = {
        "mini_batch_size": args.prompts,
        "train_micro_batch_size": (args.rows or args.samples) // args.samples,
        "rollout_micro_batch_size": args.prompts,
        "max_steps": args.steps + 1,
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = build(args, tokenizer, mesh, rollout, training)
    algorithm = GRPOConfig(num_generations=args.samples, num_iterations=1, beta=0.0)
    learner = GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=text_reward)
    clock = StepClock(cluster)
    before = np.array(cluster.actor_trainer.model.final_norm.w[...])
    with mesh:
        learner.train(clock.batches(prompts, args.prompts))
    after = np.array(cluster.actor_trainer.model.final_norm.w[...])
    assert (before != after).any(), "no optimizer step changed the weights"
    assert cluster.actor_trainer.train_steps == args.steps + 1, cluster.actor_trainer.train_steps
    finish(
        {
            "peer": f"google-tunix {version('google-tunix')}, flax {version('flax')}, jax {version('jax')}",
            "setting": {**rollout, **training, "rollout_engine": "vanilla", "dtype": "float32", "beta": 0.0},
            "prompt_tokens": num_prompt_tokens(tokenizer, chats),
            "steps": clock.steps[1:],
        }
    )


def build(
    args: Namespace,
    tokenizer: Any,
    mesh: jax.sharding.Mesh,
    rollout: dict[str, Any],
    training: dict[str, Any],
) -> RLCluster:
    """Actor and rollout on one mesh, sharing their weights."""
    given = json.loads((args.model / "config.json").read_text("utf-8"))
    shape = ModelConfig(
        num_layers=given["num_hidden_layers"],
        vocab_size=given["vocab_size"],
        embed_dim=given["hidden_size"],
        hidden_dim=given["intermediate_size"],
        num_heads=given["num_attention_heads"],
        head_dim=given["head_dim"],
        num_kv_heads=given["num_key_value_heads"],
        rope_theta=int(given["rope_parameters"]["rope_theta"]),
        norm_eps=given["rms_norm_eps"],
        weight_tying=given["tie_word_embeddings"],
    )
    with mesh:
        actor = create_model_from_safe_tensors(str(args.model), shape, mesh, jnp.float32)
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0)
    )
    return RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine="vanilla",
            training_config=RLTrainingConfig(actor_optimizer=optimizer, eval_every_n_steps=10**6, **training),
            rollout_config=RolloutConfig(**rollout),
        ),
    )


class StepClock:
    """Seconds of every step: from its prompts being asked for to the weights of its last update."""

    def __init__(self, cluster: RLCluster):
        self.steps: list[dict[str, float]] = []
        self._began = 0.0
        generate, update = cluster.generate, cluster.update_actor

        def timed_generate(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = generate(*given, **named)
            self.steps[-1]["rollout_s"] += time.perf_counter() - began
            return result

        def timed_update(*given: Any, **named: Any) -> None:
            began = time.perf_counter()
            update(*given, **named)
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            ended = time.perf_counter()
            self.steps[-1]["update_s"] += ended - began
            self.steps[-1]["step_s"] = ended - self._began

        cluster.generate, cluster.update_actor = timed_generate, timed_update

    def batches(self, prompts: list[str], size: int) -> Iterator[dict[str, Any]]:
        """The prompts of each step, which begins when they are asked for."""
        for start in range(0, len(prompts), size):
            self.steps.append({"step_s": 0.0, "rollout_s": 0.0, "update_s": 0.0})
            self._began = time.perf_counter()
            yield {"prompts": np.array(prompts[start : start + size])}


if __name__ == "__main__":
    main()
