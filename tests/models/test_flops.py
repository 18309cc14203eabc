import jax
import numpy as np

from quatrain.models.flops import forward_flops, linear_parameters
from quatrain.models.params import init_params


def test_every_matrix_of_the_layers_is_counted(small_arch):
    layers = init_params(small_arch, jax.random.key(0))["layers"]
    assert linear_parameters(small_arch) == sum(w.size for w in jax.tree.leaves(layers) if w.ndim > 1)


def test_flops_are_those_the_compiler_counts(small_arch):
    """A product of matrices per token, two per key, one with the vocabulary per scored token."""
    matrices = forward_flops(small_arch, tokens=10, keys=0, scored=0)
    assert matrices == 20 * linear_parameters(small_arch)
    attention = forward_flops(small_arch, tokens=10, keys=6, scored=0) - matrices
    q, k = np.zeros((4, 10, 8)), np.zeros((4, 6, 8))
    products = jax.jit(lambda q, k: (q @ k.swapaxes(1, 2)) @ k).lower(q, k).compile().cost_analysis()
    assert attention == small_arch.num_layers * products["flops"]
    head = forward_flops(small_arch, tokens=0, keys=0, scored=3)
    assert head == 2 * 3 * small_arch.hidden_size * small_arch.vocab_size
