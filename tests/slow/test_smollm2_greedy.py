"""SmolLM2-135M-Instruct from its GGUF file writes what it writes in transformers (dequantised, float32)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain.config.schema import RolloutConfig
from quatrain.data.tokenizer import load_tokenizer, render
from quatrain.types.batches import Prompt
from quatrain.weights.gguf import load_gguf

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = ROOT / "tests" / "golden" / "smollm2_greedy.json"
NEW_TOKENS = 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_file(), reason="models/ has no SmolLM2: run `make smollm2`"),
]


def test_greedy_text_and_logprobs_equal_those_of_transformers() -> None:
    """In three slots for eight prompts, so that slots are refilled."""
    golden = json.loads(GOLDEN.read_text("utf-8"))["prompts"]
    tokenizer = load_tokenizer(str(MODEL))
    arch, params = load_gguf(MODEL)
    prompts = [render(tokenizer, [{"role": "user", "content": case["question"]}]).ids for case in golden]
    assert len(golden) == 8
    assert prompts == [case["prompt_ids"] for case in golden]

    config = RolloutConfig(n=1, max_new_tokens=NEW_TOKENS, temperature=0.0, max_concurrency=3)
    engine = local_rollouts(arch, config, tokenizer, stop_ids=(), seed=0)
    engine.sync_weights(params, 0)
    batch = engine.generate([Prompt(i, np.array(ids, np.int32), "") for i, ids in enumerate(prompts)])
    tokens = batch.input_ids[batch.completion_mask].reshape(len(golden), NEW_TOKENS)
    logprobs = batch.rollout_logprobs[batch.completion_mask].reshape(tokens.shape)
    assert tokens.tolist() == [case["completion_ids"] for case in golden]
    assert tokenizer.batch_decode(tokens) == [case["completion"] for case in golden]
    np.testing.assert_allclose(logprobs, [case["logprobs"] for case in golden], atol=1e-3)
