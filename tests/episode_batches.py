"""Batches of made-up episodes: several turns in one row, and tokens of others between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch

PROMPT = ({"role": "system", "content": "Use the tool."}, {"role": "user", "content": "6 times 7?"})
TURNS = (
    {"role": "assistant", "content": "<call>mul(6, 7)</call>"},
    {"role": "tool", "content": "42", "name": "mul", "tool_call_id": "c0"},
    {"role": "assistant", "content": "It is 42."},
)
SAMPLED = np.array([[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0]], np.bool_)
"""[2, 8]: two turns of two tokens, with two tokens between them; one turn of one token."""


def episodes(**columns: tuple[Any, ...]) -> AdvantagedBatch:
    """Two episodes of one prompt: one of two turns with a tool, one that a fault ended after one turn."""
    ids = np.arange(16, dtype=np.int32).reshape(2, 8) % 8 + 1
    attended = np.array([[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]], np.bool_)
    rollouts = RolloutBatch(
        input_ids=np.where(attended, ids, 0).astype(np.int32),
        attention_mask=attended,
        completion_mask=SAMPLED,
        rollout_logprobs=np.where(SAMPLED, np.float32(-0.5), np.float32(0)),
        policy_version=np.where(SAMPLED, 3, -1).astype(np.int32),
        finish_reason=np.array(["environment", "error"]),
        group_ids=np.array([4, 4]),
        prompts=(PROMPT, PROMPT),
        completions=("It is 42.", "<call>mul("),
        columns={
            "answer": ("42", "42"),
            "messages": ([*PROMPT, *TURNS], [*PROMPT, {"role": "assistant", "content": "<call>mul("}]),
            "turn_rewards": ([0.25, 1.0], [0.0]),
            "environment_reward": (1.25, 0.0),
            **columns,
        },
    )
    rewards = np.array([1.25, -1.0], np.float32)
    rewarded = RewardedBatch(rollouts, rewards, rewards[None], ("environment",))
    advantages = np.where(SAMPLED, [[1.0], [-1.0]], 0).astype(np.float32)
    return AdvantagedBatch(rewarded, advantages)
