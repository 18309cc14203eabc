from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from quatrain.parallel import mesh
from quatrain.parallel.mesh import in_memory, moved


def test_what_lies_there_already_is_given_back():
    tree = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    places = jax.tree.map(lambda x: x.sharding, tree)
    assert all(x is y for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(moved(tree, places))))


def test_to_the_hosts_memory_and_back():
    tree = {"a": jnp.arange(6.0)}
    there = in_memory("host", tree)
    assert there["a"].sharding.memory_kind == "pinned_host"
    back = in_memory("device", there)
    assert back["a"].sharding == tree["a"].sharding
    assert back["a"].tolist() == tree["a"].tolist() == there["a"].tolist()


def test_a_backend_without_pinned_memory_is_named(monkeypatch):
    memory = SimpleNamespace(kind="device")
    device = SimpleNamespace(
        default_memory=lambda: memory, addressable_memories=lambda: [memory], device_kind="toaster"
    )
    monkeypatch.setattr(mesh.jax, "local_devices", lambda: [device])
    with pytest.raises(ValueError, match=r"\(toaster\) know device; set offload.reference and offload.optim"):
        in_memory("host", {"a": 1})
