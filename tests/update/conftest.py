"""A teacher of the small model, for tests of losses over words."""

import jax
import pytest
from architectures import changed

from quatrain.models.params import init_params


@pytest.fixture(scope="module")
def teacher_arch(small_arch):
    """Another width, and a padded vocabulary."""
    return changed(small_arch, hidden_size=48, width=64, vocab_size=small_arch.vocab_size + 10)


@pytest.fixture(scope="module")
def teacher_params(teacher_arch):
    params = init_params(teacher_arch, jax.random.key(3))
    return {**params, "embed": params["embed"] * 1.5}
