"""What the engines that agents ask compute with."""

import pytest
from host_model import use_host_model


@pytest.fixture(params=["host", pytest.param("jax", marks=pytest.mark.slow)])
def computed_by(request, monkeypatch):
    """NumPy, which compiles nothing (`host_model.py`), or, in the slow tests, JAX as in a run."""
    if request.param == "host":
        use_host_model(monkeypatch)
    return request.param
