"""What is decided about Ray workers without Ray."""

import logging
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from quatrain.rollout import ray_worker
from quatrain.rollout.ray_worker import (
    OPTIONS,
    StoredPictures,
    _Actor,
    _warn_of_missing_devices,
    _without_bytes,
)
from quatrain.rollout.worker import FinishedGroup, GroupSpec
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Picture, Pictures
from quatrain.types.rollouts import Completion, Sampling


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


class Store:
    """Ray's object store: what was put, by number."""

    def __init__(self):
        self.objects = []

    def put(self, value):
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, references):
        return [self.objects[reference] for reference in references]


def group_of(number, *pictures):
    """Whose prompt has its pictures in text and columns too, as those of data do."""
    seen = Pictures.of([None, *pictures])
    prompt = Prompt(number, np.ones(1 + len(pictures), np.int32), "x", {"images": [*pictures]}, pictures=seen)
    return GroupSpec(number, prompt, 0, Sampling(2, 4))


def test_bytes_of_a_picture_go_to_workers_once(monkeypatch):
    """The faults: a worker gets them with each group, or another's; or they come back with its samples."""
    store = Store()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=store.get))
    stored, actor = StoredPictures(store), _Actor(".")
    red, blue, green = (Picture.of(bytes([shade]) * 99, (8, 8)) for shade in range(3))
    groups = [group_of(1, red, blue, red), group_of(2), group_of(3, blue, green)]
    given = []
    done = Completion([5], [-1.0], [0])
    actor._worker = SimpleNamespace(
        submit=lambda groups, version: given.extend(groups),
        take=lambda timeout_s: [FinishedGroup(g.number, [(g.prompt, done)] * 2) for g in given],
    )
    for some in (groups[:2], groups[2:]):
        references = stored.of([group.prompt for group in some])
        sent = pickle.dumps([_without_bytes(group) for group in some])
        assert not any(picture.encoded in sent for picture in (red, blue, green))
        actor.submit(pickle.loads(sent), 0, references)
    assert store.objects == [red.encoded, blue.encoded, green.encoded]
    for group, got in zip(groups, given, strict=True):
        assert (got.number, got.sampling) == (group.number, group.sampling)
        before, after = group.prompt.pictures, got.prompt.pictures
        assert (before is None) == (after is None)
        if before is not None:
            assert after.ids.tolist() == before.ids.tolist()
            assert [each.encoded for each in after.used] == [each.encoded for each in before.used]
    finished = actor.take(0)
    assert [prompt.pictures for group in finished for prompt, _ in group.samples] == [None] * 6
    assert [completion for group in finished for _, completion in group.samples] == [done] * 6


def test_a_file_that_changed_is_sent_to_no_worker(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a")
    picture = Picture.of(path, (8, 8))
    path.write_bytes(b"b")
    with pytest.raises(ValueError, match="must not change during a run"):
        StoredPictures(Store()).of([group_of(0, picture).prompt])


def test_the_object_store_keeps_the_last_pictures(monkeypatch):
    monkeypatch.setattr(ray_worker, "KEPT_BYTES", 250)
    store = Store()
    stored = StoredPictures(store)
    pictures = [Picture.of(bytes([shade]) * 99, (8, 8)) for shade in range(4)]
    for shown in (0, 1, 0, 2, 0, 1):  # 2 takes the place of 1, which was used before 0
        assert len(stored.of([group_of(0, pictures[shown]).prompt])) == 1
    assert [content[0] for content in store.objects] == [0, 1, 2, 1]
    assert len(stored.of([group_of(0, *pictures).prompt])) == 4  # more than are kept
