import pytest

from quatrain.config.load import load_config
from quatrain.config.roles import devices_of_worker, worker_config


def _config(*overrides):
    return load_config(None, overrides, environ={}).config


@pytest.mark.parametrize(
    ("overrides", "mesh", "devices"),
    [
        ((), "-1,1,1", 1),
        (("mesh=1,2,4",), "-1,1,4", 4),
        (("mesh=2,1,-1",), "1,1,-1", 1),
        (("mesh=1,2,4", "rollout.mesh=2,1,2"), "2,1,2", 4),
    ],
)
def test_a_worker_gets_the_devices_of_its_mesh(overrides, mesh, devices):
    config = _config("rollout.workers=3", *overrides)
    assert worker_config(config).mesh == mesh
    assert devices_of_worker(config) == devices


def test_a_worker_samples_alone_and_with_its_share_of_the_sequences():
    config = _config("rollout.workers=3", "rollout.max_concurrency=16", "rollout.max_staleness=1")
    own = worker_config(config)
    assert (own.rollout.workers, own.rollout.max_staleness, own.rollout.max_concurrency) == (0, 0, 6)
    assert not own.critic.enabled
    assert own.rollout.n == config.rollout.n
