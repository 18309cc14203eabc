from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from quatrain.config.mesh import MeshShape
from quatrain.config.roles import Role
from quatrain.parallel import mesh
from quatrain.parallel.mesh import reshard, to_memory


def test_copies_of_the_model_are_kept_within_a_process(monkeypatch):
    """Four processes of 2 x 2 chips of a 4 x 4 torus, whose device ids run along its rows."""
    devices = [
        SimpleNamespace(id=4 * y + x, process_index=2 * (y // 2) + x // 2, platform="cpu", device_kind="cpu")
        for y in range(4)
        for x in range(4)
    ]
    monkeypatch.setattr(mesh.jax, "devices", lambda: devices)
    monkeypatch.setattr(mesh, "Mesh", lambda devices, axes: devices)
    for shape in (MeshShape(4, 4, 1), MeshShape(4, 2, 2), MeshShape(8, 2, 1)):
        found = mesh.role_mesh(Role((0, 1, 2, 3), shape))
        assert found.shape == shape
        assert sorted(d.id for d in found.flat) == list(range(16))
        assert all(len({d.process_index for d in copy.flat}) == 1 for copy in found)
    assert mesh.role_mesh(Role((0, 1, 2, 3), MeshShape(1, 8, 2))).shape == (1, 8, 2, 1, 1)
    some = mesh.role_mesh(Role((1, 3), MeshShape(4, 2, 1)))
    assert [[d.id for d in copy.flat] for copy in some] == [[1, 5], [3, 7], [9, 13], [11, 15]]


def test_what_lies_there_already_is_given_back():
    tree = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    places = jax.tree.map(lambda x: x.sharding, tree)
    assert all(x is y for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(reshard(tree, places))))


def test_to_the_hosts_memory_and_back():
    tree = {"a": jnp.arange(6.0)}
    there = to_memory("host", tree)
    assert there["a"].sharding.memory_kind == "pinned_host"
    back = to_memory("device", there)
    assert back["a"].sharding == tree["a"].sharding
    assert back["a"].tolist() == tree["a"].tolist() == there["a"].tolist()


def test_a_backend_without_pinned_memory_is_named(monkeypatch):
    memory = SimpleNamespace(kind="device")
    device = SimpleNamespace(
        default_memory=lambda: memory, addressable_memories=lambda: [memory], device_kind="toaster"
    )
    monkeypatch.setattr(mesh.jax, "local_devices", lambda: [device])
    with pytest.raises(
        ValueError, match=r"\(toaster\) have the memory kinds device; set all keys of `offload` to false"
    ):
        to_memory("host", {"a": 1})
