"""Checkpoints in a bucket in memory, which has no folders and renames nothing, through Orbax."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fsspec.config import conf
from object_store import Bucket, buckets_in_memory

from quatrain.config.buckets import COMPLETE
from quatrain.run.checkpoint import Checkpointer, DamagedCheckpoint, SaveFailed

PLACE = "s3://bucket/runs/mine/checkpoints"
PLACES = (PLACE, PLACE.replace("s3:", "gs:"))


@pytest.fixture
def objects(tmp_path):
    with buckets_in_memory(tmp_path) as made:
        yield made


@pytest.fixture
def checkpointer(objects):
    made = Checkpointer(PLACE, keep=2)
    yield made
    objects.refused.clear()
    made.close()


def state(seed=0):
    key = jax.random.key(seed)
    params = {"embed": jax.random.normal(key, (70, 40)).astype(jnp.bfloat16), "w": jnp.full((3,), -0.0)}
    return {"params": params, "mu": {"w": jax.random.normal(key, (300, 40))}}


def same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def steps_with_objects(objects):
    return sorted({int(name.partition("/")[0]) for name in objects.names(PLACE)})


@pytest.mark.parametrize("place", PLACES)
def test_a_state_comes_back_bit_for_bit_and_the_newest_are_kept(place, objects):
    """Catches arrays that are written to a folder `s3:`, and deleted checkpoints whose objects stay."""
    checkpointer = Checkpointer(place, keep=2)
    for step in (5, 10, 15):
        checkpointer.save(step, state(step), {"step": step})
    checkpointer.wait()
    assert (checkpointer.steps(), steps_with_objects(objects)) == ([10, 15], [10, 15])
    assert any(
        re.fullmatch(r"P(U|OS)T /bucket/.*/15/arrays/.*manifest.ocdbt", each) for each in objects.asked
    )
    step, restored, host = Checkpointer(place).restore(state(0))
    assert (step, host) == (15, {"step": 15})
    same_bits(restored, state(15))
    same_bits(
        checkpointer.restore({"params": state()["params"]}, 10, partial=True)[1]["params"],
        state(10)["params"],
    )
    assert checkpointer.read_host(10) == {"step": 10}
    checkpointer.close()


@pytest.mark.parametrize("place", PLACES)
def test_orbax_keeps_no_listings(place, objects, monkeypatch):
    """Catches a process that has read nothing from a bucket before: what Orbax lists there would be old."""
    monkeypatch.delitem(conf, place[:2], raising=False)
    Checkpointer(place)
    assert conf[place[:2]]["use_listings_cache"] is False


def test_the_mark_is_the_one_that_orbax_writes_last(checkpointer, objects):
    """Catches another name in another version of Orbax, with which nothing would be complete."""
    assert ocp.path.atomicity.COMMIT_SUCCESS_FILE == COMPLETE
    checkpointer.save(1, state(), {})
    checkpointer.wait()
    written = [name for name in Bucket.store if name.startswith("/bucket")]
    assert written[-1] == f"/bucket/runs/mine/checkpoints/1/{COMPLETE}"


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_without_its_mark_is_none_and_its_step_can_be_saved_again(place, objects):
    """As a process that was killed leaves it. Catches half a checkpoint that is read or stands in the way."""
    checkpointer = Checkpointer(place, keep=2)
    checkpointer.save(1, state(1), {})
    checkpointer.save(2, state(2), {})
    checkpointer.close()
    del Bucket.store[f"/bucket/runs/mine/checkpoints/2/{COMPLETE}"]
    objects.put(f"{PLACE}/3/arrays/ocdbt.process_0/d/0", b"a part")
    resumed = Checkpointer(place, keep=2)
    assert resumed.steps() == [1]
    assert resumed.restore(state(0))[0] == 1
    resumed.save(2, state(7), {})
    resumed.close()
    assert steps_with_objects(objects) == [1, 2]
    same_bits(Checkpointer(place).restore(state(0), 2)[1], state(7))


def test_a_changed_bit_is_found_and_the_checkpoint_before_is_used(checkpointer, objects, caplog):
    """Catches digests that are not compared, and a damaged checkpoint that is found again by the next run."""
    for step in (1, 2):
        checkpointer.save(step, state(step), {})
    checkpointer.wait()
    files = [f"{PLACE}/2/{name}" for name in objects.names(f"{PLACE}/2") if "/d/" in name]
    url = max(files, key=lambda each: len(objects.get(each)))
    content = bytearray(objects.get(url))
    content[len(content) // 2] ^= 1
    objects.put(url, bytes(content))
    resumed = Checkpointer(PLACE, keep=2)
    step, restored, _ = resumed.restore(state(0))
    assert step == 1
    same_bits(restored, state(1))
    before = objects.names(f"{PLACE}/2")
    resumed.set_aside()
    assert f"it was moved to {PLACE}.damaged/2" in caplog.text
    assert (Checkpointer(PLACE).steps(), steps_with_objects(objects)) == ([1], [1])
    assert objects.names(f"{PLACE}.damaged/2") == [name for name in before if name != COMPLETE]


def test_a_store_that_refuses_to_be_read_is_no_damage(checkpointer, objects):
    """Catches a good checkpoint that is moved aside because a right is missing for a moment."""
    checkpointer.save(1, state(1), {})
    checkpointer.wait()
    objects.refused = {"GET", "HEAD"}
    with pytest.raises(OSError, match=rf"{PLACE}/1 cannot be read: .*PERMISSION_DENIED"):
        checkpointer.restore(state(0))
    objects.refused = set()
    assert checkpointer.restore(state(0))[0] == 1


def test_a_missing_object_is_damage(checkpointer, objects):
    checkpointer.save(1, state(1), {})
    checkpointer.wait()
    for name in objects.names(f"{PLACE}/1/arrays"):
        if name.endswith("manifest.ocdbt"):
            del Bucket.store[f"/bucket/runs/mine/checkpoints/1/arrays/{name}"]
    with pytest.raises(DamagedCheckpoint, match="the checkpoint of step 1"):
        checkpointer.restore(state(0))


def test_a_save_that_is_refused_leaves_those_before_and_the_next_is_tried(checkpointer, objects):
    """Catches a run that cannot save again, and a refused save that counts as a checkpoint."""
    checkpointer.save(1, state(1), {})
    checkpointer.wait()
    objects.refused = {"PUT"}

    def fails():
        checkpointer.save(2, state(2), {})
        checkpointer.wait()

    with pytest.raises(SaveFailed, match=r"the checkpoint of step 2 cannot be written to s3://"):
        fails()
    assert checkpointer.steps() == [1]
    objects.refused = set()
    checkpointer.save(2, state(2), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    same_bits(checkpointer.restore(state(0))[1], state(2))
