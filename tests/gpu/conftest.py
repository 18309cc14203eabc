"""A model with heads as large as real ones, for tests on a real accelerator; all skip where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from quatrain.forward.table import TokenTable
from quatrain.models.families import architecture_from_hf
from quatrain.models.params import init_params

sys.path.insert(0, str(Path(__file__).parents[1]))  # reference.py

LONGEST = 90
"""Completion tokens of `table`'s longest sequence: more than a block of any attention has."""


@pytest.fixture(autouse=True, scope="session")
def _on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, and JAX runs on {jax.default_backend()} here")


@pytest.fixture(scope="session")
def arch():
    return architecture_from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
    )


@pytest.fixture(scope="session")
def params(arch):
    drawn = init_params(arch, jax.random.key(7))
    # Matrices half as large again: far from uniform distributions, and well conditioned in float32.
    return jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, drawn)


@pytest.fixture(scope="session")
def table(arch):
    """Five groups of four ragged sequences, completions of one token and of the longest among them.

    All begin with 40 tokens in common.
    """
    rng = np.random.default_rng(5)
    groups, n = 5, 4
    group_ids = np.repeat(np.arange(groups), n)
    before = np.repeat(rng.integers(41, 80, groups), n)
    completions = rng.integers(1, LONGEST + 1, groups * n)
    completions[:2] = 1, LONGEST
    columns = np.arange((before + completions).max())
    attention = columns < (before + completions)[:, None]
    completion = attention & (columns >= before[:, None])
    tokens = rng.integers(0, arch.vocab_size, attention.shape)
    tokens[:, :40] = tokens[0, :40]
    tokens = np.where(completion, tokens, np.repeat(tokens[::n], n, axis=0))  # one prompt to a group
    advantages = np.where(completion, rng.normal(size=(groups * n, 1)), 0).astype(np.float32)
    rollout_logprobs = np.where(completion, -rng.exponential(3.0, attention.shape), 0).astype(np.float32)
    return TokenTable(
        np.where(attention, tokens, 0).astype(np.int32),
        attention,
        completion,
        {"advantages": advantages, "rollout_logprobs": rollout_logprobs},
        group_ids,
    ).weighted("token_mean", LONGEST)
