"""Fits a small reward model to preferences between right and wrong answers of the built-in task.

python examples/reward_model.py judge
quatrain train --set 'reward.functions={"model:judge": 1.0}'
"""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from quatrain.data.builtin import builtin_rows, builtin_tokenizer
from quatrain.data.tokenizer import render_completed, save_tokenizer
from quatrain.models.decoder import forward, scores
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.weights.hf import save_hf

STEPS, PAIRS, WIDTH = 200, 32, 48
tokenizer = builtin_tokenizer()
arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
arch = dataclasses.replace(arch, head="value_head", pad_token_id=tokenizer.pad_token_id)


def conversation(row: dict, result: int) -> list[int]:
    """The token ids of a prompt and a completion with this result, in the tokenizer's chat template."""
    completion = re.sub(r"\d+(?=</)", str(result), row["completion"])
    return render_completed(tokenizer, row["prompt"], completion)


def batch(rows: list[dict], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [2 * PAIRS, WIDTH], right answers first, and lengths [2 * PAIRS]."""
    drawn = [rows[number] for number in rng.integers(0, len(rows), PAIRS)]
    answers = np.array([int(row["answer"]) for row in drawn])
    wrong = (answers + rng.integers(1, 11, PAIRS)) % 11
    texts = [conversation(*each) for each in zip(drawn * 2, [*answers, *wrong])]
    lengths = np.array([len(ids) for ids in texts])
    return np.array([[*ids, *[0] * (WIDTH - len(ids))] for ids in texts]), lengths


def loss(params: dict, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """The Bradley-Terry loss, -log sigmoid(score of the right answer - score of the wrong one), in nats."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH), ids.shape)
    hidden = forward(params, arch, ids, positions, (positions < lengths[:, None]).astype(int)).hidden
    right, wrong = jnp.split(scores(params, arch, hidden[jnp.arange(len(ids)), lengths - 1]), 2)
    return -jax.nn.log_sigmoid(right - wrong).mean()


@jax.jit
def step(params: dict, state: optax.OptState, ids: jax.Array, lengths: jax.Array) -> tuple:
    """One optimizer step: the new parameters and state, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(params, ids, lengths)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, STEPS))
params, rng, rows = init_params(arch, jax.random.key(0)), np.random.default_rng(0), builtin_rows("arithmetic")
state = optimizer.init(params)
for number in range(1, STEPS + 1):
    params, state, value = step(params, state, *batch(rows, rng))
    if number % 50 == 0:
        print(f"step {number}: loss {value:.3f}")
folder = Path(sys.argv[1])
save_hf(folder, arch, params)
save_tokenizer(tokenizer, folder)
