"""What is decided about Ray workers without Ray."""

import logging
from types import SimpleNamespace

import pytest

from quatrain.rollout.ray_worker import OPTIONS, _warn_of_missing_devices


@pytest.mark.parametrize(
    ("platform", "there", "warning"),
    [
        ("gpu", {"GPU": 3.0, "CPU": 8.0}, "rollout.workers 2 need 4 GPU, and the Ray cluster has 3 now"),
        ("gpu", {"GPU": 4.0}, None),
        ("tpu", {"CPU": 8.0}, "rollout.workers 2 need 4 TPU, and the Ray cluster has 0 now"),
        ("cpu", {}, None),
    ],
)
def test_workers_for_which_the_cluster_has_no_devices_yet(platform, there, warning, caplog):
    ray = SimpleNamespace(cluster_resources=lambda: there)
    with caplog.at_level(logging.WARNING):
        _warn_of_missing_devices(ray, OPTIONS[platform](2), 2, 30.0)
    assert [warning in text for text in caplog.messages] == [True] * (warning is not None)
