"""A small model with experts, and the routes that its tokens go in a pass over whole sequences."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from quatrain.models.architecture import Architecture
from quatrain.models.decoder import forward
from quatrain.models.families import architecture_from_hf
from quatrain.models.params import Params, init_params
from quatrain.types.batches import RolloutBatch
from quatrain.types.routes import live_of

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "max_position_embeddings": 1024,
}


def routed_model(seed: int = 7, **values) -> tuple[Architecture, Params]:
    """Two layers of experts around one that has none; logits are far from even."""
    arch = architecture_from_hf({**CONFIG, **values}).for_length(1024)
    params = init_params(arch, jax.random.key(seed))
    return arch, jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)


@partial(jax.jit, static_argnames="arch")
def _routes(params, arch, ids, real):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return forward(params, arch, ids, positions, real, packed=False).routes


def routes_of_rows(params, arch, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T, L, k]: what the model chooses for whole rows, live on the last token of each and after it."""
    width = -(-ids.shape[1] // 64) * 64
    padded = np.pad(ids, ((0, 0), (0, width - ids.shape[1])))
    real = (np.arange(width) < lengths[:, None]).astype(np.int32)
    routes = np.array(_routes(params, arch, padded, real))[:, : ids.shape[1]]
    routes[np.arange(ids.shape[1]) >= (lengths - 1)[:, None]] = live_of(routes.dtype)
    return routes


def check_routes(params, arch, batch: RolloutBatch) -> None:
    """In float32 the experts of each token are those of a pass over its whole sequence."""
    assert batch.routes is not None
    expected = routes_of_rows(params, arch, batch.input_ids, batch.lengths)
    same = (np.sort(batch.routes, axis=-1) == np.sort(expected, axis=-1)).all(axis=(2, 3))
    assert same.all(), f"{(~same).sum()} of {same.size} tokens have the routes of others"
