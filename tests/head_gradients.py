"""Values and gradients of a function of an output head and hidden states, against those of its logits."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_head_gradients(total, head, hidden, value, by_logits):
    """`total(head, hidden)` returns (a sum, each token's value); `by_logits` [N, V] is the sum's gradient."""
    (by_head, by_hidden), found = jax.grad(total, argnums=(0, 1), has_aux=True)(
        jnp.float32(head), jnp.float32(hidden)
    )
    np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_head, by_logits.T @ hidden, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_hidden, by_logits @ head, rtol=1e-4, atol=1e-6)
