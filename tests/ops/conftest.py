"""Strict promotion for all maths: no broadcasting over a missing axis, no implicit change of dtype."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
