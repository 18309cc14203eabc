"""Fleets and samplers of one's own say whether they see, whatever stands between them and who asks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from towers import seeing

from quatrain.config.schema import RolloutConfig
from quatrain.data.expansion import BLIND
from quatrain.rollout import start_fleet
from quatrain.rollout.fleet import Fleet, OneWorker
from quatrain.rollout.http_worker import HttpWorker
from quatrain.rollout.own_sampler import _Checked
from quatrain.rollout.publish import InMemory
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Picture, Pictures
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import Request, sampled

ASKED = [
    Request(
        Prompt(0, np.ones(1, np.int32), "", pictures=Pictures.of([Picture.of(b"a", (8, 8))])),
        0,
        Sampling(1, 4),
    )
]


def test_a_fleet_that_cannot_see_is_asked_for_nothing():
    fleet = Fleet((), InMemory(), dtype="float32", timeout_s=1.0, cannot_see="they are servers")
    try:
        for sampler in (fleet, OneWorker(fleet, 0), _Checked(fleet, "own", 9)):
            with pytest.raises(ValueError, match="pictures would be lost: they are servers"):
                sampled(sampler, ASKED)[0].result(0)
        assert fleet.num_running == 0
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("servers", "sees", "why"),
    [
        ([None, "it ignores pictures"], True, "it ignores pictures"),
        ([None], True, None),
        ([], True, None),
        ([], False, "the model does not see"),
    ],
)
def test_a_blind_server_and_a_model_without_a_tower_make_a_fleet_blind(monkeypatch, servers, sees, why):
    class Found(HttpWorker):
        cannot_see = None

        def __init__(self, why):
            self.cannot_see = why

    def fleet(*given, cannot_see, **options):
        workers = [Found(each) for each in servers]
        return SimpleNamespace(wait_for_start=lambda: None, workers=workers, cannot_see=cannot_see)

    monkeypatch.setattr(start_fleet, "Fleet", fleet)
    for name in ("servers", "ray_workers"):
        monkeypatch.setattr(start_fleet, name, lambda *given: ((), None))
    arch = seeing("qwen3_vl")
    config = SimpleNamespace(
        rollout=SimpleNamespace(servers=servers, timeout_s=1.0, stream_weights=False),
        model=SimpleNamespace(dtype="float32"),
    )
    vision = arch.vision if sees else None
    policy = SimpleNamespace(arch=SimpleNamespace(vision=vision))
    found = start_fleet.start_fleet(config, policy, lambda *given: None).cannot_see
    assert found is None if why is None else why in found


@pytest.mark.parametrize("sees", [True, False])
def test_servers_are_asked_about_pictures_and_given_the_whole_of_a_model_that_sees(monkeypatch, sees):
    """The faults: servers sample with the tower of the start, or of a text model names that it has not."""
    made, arch = [], seeing("qwen3_vl")
    arch = arch if sees else replace(arch, vision=None)
    monkeypatch.setattr(start_fleet, "Folder", lambda *given, whole: made.append(whole))
    monkeypatch.setattr(start_fleet.http_worker, "workers", lambda addresses, rules, **options: rules)
    monkeypatch.setattr(start_fleet, "looks", lambda policy: "two pictures")
    changes = {"servers": ["http://a:1"], "weights_dir": None, "max_concurrency": None, "timeout_s": 1.0}
    config = SimpleNamespace(
        rollout=RolloutConfig().model_copy(update=changes),
        run=SimpleNamespace(dir="runs", name="r"),
        update=SimpleNamespace(router_aux_coef=0.0),
        seed=1,
    )
    policy = SimpleNamespace(arch=arch, tokenizer=None, stop_ids=(), sampling={}, whole="the whole folder")
    rules, _ = start_fleet.servers(config, policy)
    assert made == (["the whole folder"] if sees else [None])
    assert rules.looks == ("two pictures" if sees else BLIND)
