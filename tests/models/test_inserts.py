"""Features of pictures in the place of token embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
from architectures import changed

from quatrain.models.decoder import forward
from quatrain.models.vision import Inserts


def test_features_stand_in_the_place_of_scaled_embeddings(small_arch, small_params):
    """The scale is that of token embeddings alone; rows of tokens share a table or have one each."""
    arch = changed(small_arch, num_layers=1, embedding_scale=3.0)
    params = {**small_params, "layers": small_params["layers"][:1]}
    ids = np.random.default_rng(0).integers(1, 280, (2, 6)).astype(np.int32)
    positions, ones = np.broadcast_to(np.arange(6), ids.shape), np.ones_like(ids)
    run = jax.jit(lambda ids, inserts: forward(params, arch, ids, positions, ones, inserts=inserts).hidden)
    expected = run(ids, None)
    table = 3.0 * params["embed"][ids]  # [R, T, D]
    rows = np.array([[-1, 1, 2, -1, -1, 5], [0, -1, -1, -1, 4, -1]], np.int32)
    others = jnp.where(rows >= 0, 7, ids)
    each = run(others, Inserts(table[:, None], rows))
    np.testing.assert_allclose(each, expected, atol=1e-6)
    behind = np.where(rows >= 0, rows + np.array([[0], [6]], np.int32), -1)
    shared = Inserts(table.reshape(1, 1, 12, -1), behind)
    np.testing.assert_allclose(run(others, shared), expected, atol=1e-6)
    assert np.abs(run(others, None) - expected).max() > 1e-2
