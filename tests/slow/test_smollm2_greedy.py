"""SmolLM2-135M-Instruct from its GGUF file writes what it writes in transformers (dequantised, float32)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.data.tokenizer import load_tokenizer, render
from quatrain.models.decoder import forward, logits
from quatrain.models.families import Architecture
from quatrain.models.gguf import load_gguf
from quatrain.models.kv_cache import KVCache, init_cache
from quatrain.models.params import Params

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = ROOT / "tests" / "golden" / "smollm2_greedy.json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_file(), reason="models/ has no SmolLM2: run `make smollm2`"),
]


def test_greedy_text_and_logprobs_equal_those_of_transformers() -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))["prompts"]
    tokenizer = load_tokenizer(str(MODEL))
    arch, params = load_gguf(MODEL)
    prompts = [render(tokenizer, [{"role": "user", "content": case["question"]}]) for case in golden]
    tokens, logprobs = _greedy(params, arch, prompts, num_tokens=32)

    assert len(golden) == 8
    assert prompts == [case["prompt_ids"] for case in golden]
    assert tokens.tolist() == [case["completion_ids"] for case in golden]
    assert tokenizer.batch_decode(tokens) == [case["completion"] for case in golden]
    np.testing.assert_allclose(logprobs, [case["logprobs"] for case in golden], atol=1e-3)


def _greedy(
    params: Params, arch: Architecture, prompts: list[list[int]], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest token, `num_tokens` times, for all prompts at once; and its log-probability."""
    lengths = np.array([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts], np.int32)
    positions = np.broadcast_to(np.arange(width), ids.shape)
    real = (positions < lengths[:, None]).astype(np.int32)
    cache = init_cache(arch, len(prompts), width + num_tokens)

    @jax.jit
    def prefill(params: Params, cache: KVCache) -> tuple[jax.Array, jax.Array, KVCache]:
        hidden, cache = forward(
            params,
            arch,
            jnp.asarray(ids),
            jnp.asarray(positions),
            jnp.asarray(real),
            cache=cache,
            cache_start=0,
        )
        return *_likeliest(params, arch, hidden[jnp.arange(len(prompts)), lengths - 1]), cache

    @jax.jit
    def decode(
        params: Params, cache: KVCache, token: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        now = (jnp.asarray(lengths) + step)[:, None]
        hidden, cache = forward(
            params, arch, token[:, None], now, jnp.ones_like(now), cache=cache, cache_start=width + step
        )
        return *_likeliest(params, arch, hidden[:, 0]), cache

    token, logprob, cache = prefill(params, cache)
    tokens, logprobs = [token], [logprob]
    for step in range(num_tokens - 1):
        token, logprob, cache = decode(params, cache, token, jnp.int32(step))
        tokens.append(token)
        logprobs.append(logprob)
    return np.stack(tokens, 1), np.stack(logprobs, 1)


def _likeliest(params: Params, arch: Architecture, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.log_softmax(logits(params, arch, hidden))
    return scores.argmax(-1).astype(jnp.int32), scores.max(-1)
