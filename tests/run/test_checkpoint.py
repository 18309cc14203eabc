import json
import random
import shutil
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import damage

from quatrain.config.schema import OptimizerConfig
from quatrain.run.checkpoint import Checkpointer, DamagedCheckpoint, NonFiniteState, form
from quatrain.update.optimizer import OptimizerForm


def some_state(seed: int = 0):
    key = jax.random.key(seed)
    params = {
        "embed": jax.random.normal(key, (7, 4)).astype(jnp.bfloat16),
        "layers": [{"w": jax.random.normal(key, (4, 3))}, {"w": jnp.full((3,), -0.0)}],
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.asarray(2**31 - 1, jnp.int32),
        "reference": None,
        "empty": (),
        "key": jax.random.key_data(key),
    }


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def test_a_state_comes_back_bit_for_bit_with_its_tree(checkpointer):
    state, host = some_state(), {"data_index": 12, "seed": 2**40, "config": "ab", "none": None}
    checkpointer.save(3, state, host)
    step, restored, found = checkpointer.restore(abstract(state))
    assert (step, found) == (3, host)
    assert checkpointer.read_host() == host
    same_bits(restored, state)
    assert type(restored["opt_state"]) is type(state["opt_state"])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


OPTIMIZERS = [{"name": name} for name in ("adamw", "lion", "sgd", "muon", "adafactor")]
OPTIMIZERS += [{"name": name, "beta1": 0.0} for name in ("sgd", "adafactor")]


def test_the_states_of_all_optimizers_come_back_and_none_is_taken_for_another(checkpointer):
    """Catches a resume with another optimizer whose state has the same arrays."""
    shapes = {"embed": (9, 4), "layers": [{"o": (128, 130), "qkv": (2, 3, 4, 8), "input_norm": (8,)}]}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    forms = [
        OptimizerForm.of(OptimizerConfig(**each, **more))
        for each in OPTIMIZERS
        for more in ({}, {"max_grad_norm": None}, {"state_dtype": "bfloat16"})
        if more.keys() != {"state_dtype"} or each.get("beta1") is None
    ]
    states = [each.init(params) for each in forms]
    assert len({form(state) for state in states}) == len(states)
    rng = np.random.default_rng(0)
    states = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 100, x.dtype), states)
    checkpointer.save(1, {"states": states}, {})
    same_bits(checkpointer.restore(abstract({"states": states}))[1]["states"], states)


def test_it_restores_into_concrete_arrays_and_from_another_process_view(checkpointer, tmp_path):
    checkpointer.save(1, some_state(0), {})
    checkpointer.wait()
    reader = Checkpointer(tmp_path / "checkpoints")
    same_bits(reader.restore(some_state(1))[1], some_state(0))


def test_buffers_may_be_donated_right_after_save(checkpointer):
    @partial(jax.jit, donate_argnums=0)
    def overwrite(tree):
        return jax.tree.map(lambda x: x * 0 - 1, tree)

    for step in range(3):
        state = {f"w{i}": jnp.arange(1 << 18, dtype=jnp.float32) + i + step for i in range(8)}
        expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
        checkpointer.save(step, state, {})
        overwritten = jax.block_until_ready(overwrite(state))
        again = jax.block_until_ready(overwrite(overwritten))
        same_bits(checkpointer.restore(abstract(again))[1], expected)


def test_the_newest_are_kept(checkpointer):
    assert checkpointer.latest_step() is None
    for step in (5, 10, 15):
        checkpointer.save(step, some_state(step), {"step": step})
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.latest_step()) == ([10, 15], 15)
    step, restored, host = checkpointer.restore(abstract(some_state()), 10)
    assert (step, host) == (10, {"step": 10})
    same_bits(restored, some_state(10))


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported(tmp_path, monkeypatch, caplog):
    def refuse(path):
        raise OSError("busy")

    monkeypatch.setattr("quatrain.run.checkpoint.shutil.rmtree", refuse)
    checkpointer = Checkpointer(tmp_path, keep=1)
    for step in (1, 2):
        checkpointer.save(step, {"w": np.arange(3.0, dtype=np.float32)}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [2]
    assert f"the old checkpoint {tmp_path}/1 cannot be deleted: busy" in caplog.text


def test_part_of_a_state_can_be_read(checkpointer):
    checkpointer.save(1, some_state(), {})
    wanted = {"params": abstract(some_state()["params"])}
    same_bits(checkpointer.restore(wanted, partial=True)[1], {"params": some_state()["params"]})
    with pytest.raises(
        ValueError, match=r"'params\.lm_head' this run has float32\[2\], step 1 .* has nothing"
    ):
        checkpointer.restore({"params": {"lm_head": jnp.zeros(2)}}, partial=True)


def test_no_checkpoint_and_no_such_step_are_errors(checkpointer, tmp_path):
    with pytest.raises(ValueError, match="must have a complete checkpoint"):
        checkpointer.restore(abstract(some_state()))
    assert not (tmp_path / "checkpoints").exists()
    checkpointer.save(4, some_state(), {})
    with pytest.raises(ValueError, match=r"no checkpoint of step 7 .*choose one of \[4\]"):
        checkpointer.restore(abstract(some_state()), 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": jnp.zeros(2, jnp.int32)}, r"'step' this run has int32\[2\], step 1 .* has int32\[\]"),
        ({"step": jnp.zeros((), jnp.float32)}, r"'step' this run has float32\[\], .* has int32\[\]"),
        ({"step": None}, r"'step' this run has nothing, .* has int32\[\]"),
        ({"extra": jnp.zeros(3)}, r"'extra' this run has float32\[3\], .* has nothing"),
    ],
)
def test_a_different_tree_names_its_first_leaf(checkpointer, change, message):
    checkpointer.save(1, some_state(), {})
    with pytest.raises(ValueError, match=message):
        checkpointer.restore(some_state() | change)


def test_steps_come_in_order_and_only_arrays_are_saved(checkpointer):
    checkpointer.save(2, some_state(), {})
    with pytest.raises(ValueError, match=r"got step 2, but .* has step 2"):
        checkpointer.save(2, some_state(), {})
    with pytest.raises(ValueError, match=r"'n\.0' is int; put Python values into `host`"):
        checkpointer.save(3, {"n": [1]}, {})
    with pytest.raises(ValueError, match=r"'k' is key<fry>\[\]"):
        checkpointer.save(3, {"k": jax.random.key(0)}, {})
    with pytest.raises(ValueError, match="JSON compliant"):
        checkpointer.save(3, some_state(), {"reward": float("nan")})


def test_an_interrupted_save_is_ignored_and_cleaned_up(tmp_path):
    """The process dies while the files are written: what remains is never taken for a checkpoint."""
    folder = tmp_path / "checkpoints"
    script = f"""
        import os, numpy as np
        from quatrain.run.checkpoint import Checkpointer, DamagedCheckpoint, NonFiniteState, SaveFailed
        c = Checkpointer({str(folder)!r}, keep=2, in_background=True)
        state = lambda n: {{f"w{{i}}": np.random.default_rng(i).random(n, np.float32) for i in range(10)}}
        c.save(1, state(10), {{"step": 1}})
        c.wait()
        c.save(2, state(1_000_000), {{"step": 2}})
        os._exit(9)
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert died.returncode == 9
    partial_folders = [path.name for path in folder.iterdir() if path.name.startswith("2")]
    assert partial_folders
    assert partial_folders != ["2"]
    checkpointer = Checkpointer(folder, keep=2)
    step, restored, host = checkpointer.restore({f"w{i}": jnp.zeros(10) for i in range(10)})
    assert (step, host) == (1, {"step": 1})
    assert np.array_equal(restored["w3"], np.random.default_rng(3).random(10, np.float32))
    checkpointer.save(2, some_state(), {})
    checkpointer.close()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2):
        checkpointer.save(step, some_state(step), {"train_step": 10 * step})
    checkpointer.close()
    return folder


def damaged_copies(two, tmp_path, count):
    """`count` copies of `two`, in each of which one file of step 2 is damaged, and what was done to it."""
    rng = random.Random(0)
    for number in range(count):
        folder = tmp_path / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(two, folder)
        yield folder, _damage_arrays(folder / "2") if number % 4 == 0 else damage(folder / "2", rng)


def _damage_arrays(folder):
    """Flips a bit in the middle of the largest file, which holds numbers: random files often hold none."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"flip {len(content) // 2} {file.relative_to(folder)}"


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_damage_is_found_and_the_checkpoint_before_is_used(two, tmp_path, caplog, count):
    """Damage that changes nothing that was saved may be passed over."""
    found = []
    for folder, what in damaged_copies(two, tmp_path, count):
        caplog.clear()
        step, restored, host = Checkpointer(folder).restore(abstract(some_state()))
        same_bits(restored, some_state(step))
        assert host == {"train_step": 10 * step}, what
        names = [record.message for record in caplog.records]
        if step == 1:
            assert len(names) == 1, what
            assert names[0].startswith(f"the checkpoint of step 2 in {folder} is damaged: ")
            assert names[0].endswith("; the checkpoint of step 1 is used")
            assert len(names[0]) < 600
        else:
            assert not names
        found.append(step)
    assert 0.1 * count < found.count(1) < count


def test_numbers_in_the_json_are_believed_only_with_their_digest(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    file = folder / "2" / "host" / "metadata"
    text = file.read_text()
    assert json.loads(text)["host"]["train_step"] == 20
    file.write_text(text.replace('"train_step": 20', '"train_step": 21'))
    assert file.read_text() != text
    with pytest.raises(DamagedCheckpoint, match=r"step 2 in .* is damaged: its JSON is not what was saved"):
        Checkpointer(folder).read_host(2)
    assert Checkpointer(folder).read_host() == {"train_step": 10}


def test_without_a_whole_checkpoint_all_are_named(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    for step in (1, 2):
        shutil.rmtree(folder / str(step))
        (folder / str(step)).mkdir()
    with pytest.raises(
        DamagedCheckpoint, match=r"of step 2 .* is damaged.*of step 1 .*; no other checkpoint"
    ):
        Checkpointer(folder).restore(abstract(some_state()))


def test_damaged_checkpoints_are_set_aside(two, tmp_path, caplog):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    for _ in range(2):
        (folder / "2" / "host" / "metadata").write_text("{}")
        checkpointer = Checkpointer(folder, keep=2)
        assert checkpointer.restore(abstract(some_state()))[0] == 1
        assert checkpointer.steps() == [1]
        checkpointer.save(2, some_state(2), {})
        checkpointer.close()
        assert "is damaged: its JSON has no digest" in caplog.text
        assert f"it was moved to {tmp_path / 'checkpoints.damaged'}" in caplog.text
        assert checkpointer.steps() == [1, 2]
    assert {path.name for path in (tmp_path / "checkpoints.damaged").iterdir()} == {"2", "2.1"}


def test_another_structure_is_not_damage(two):
    state = some_state() | {"step": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match="use the model and optimizer") as raised:
        Checkpointer(two).restore(state)
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_ruined_numbers_are_not_saved(checkpointer):
    checkpointer.save(1, some_state(), {})
    state = some_state()
    state["params"]["layers"][0]["w"] = state["params"]["layers"][0]["w"].at[2, 1].set(jnp.inf)
    with pytest.raises(NonFiniteState, match=r"step 2 is not saved: params\.layers\.0\.w have numbers"):
        checkpointer.save(2, state, {})
    checkpointer.wait()
    assert checkpointer.steps() == [1]


def test_a_full_disk_costs_that_checkpoint_only(tmp_path):
    """Files have a limit of 100 kB, as on a full disk, while step 2 is saved; step 3 is saved again."""
    code = f"""
        import resource, numpy as np
        from quatrain.run.checkpoint import Checkpointer, SaveFailed
        state = lambda n: {{"w": np.random.default_rng(n).random(200_000, np.float32)}}
        c = Checkpointer({str(tmp_path / "checkpoints")!r}, keep=2)
        c.save(1, state(1), {{}})
        c.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            c.save(2, state(2), {{}})
            c.wait()
        except SaveFailed as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert c.steps() == [1]
        assert np.array_equal(c.restore(state(0))[1]["w"], state(1)["w"])
        c.save(3, state(3), {{}})
        c.close()
        assert c.steps() == [1, 3]
        assert np.array_equal(c.restore(state(0))[1]["w"], state(3)["w"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the checkpoint of step 2 cannot be written to {tmp_path}")
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_the_last_pinned_checkpoint_is_kept_beside_the_newest(checkpointer):
    checkpointer.pinned = [1, 2, 9]  # of 9 there is none yet
    for step in (1, 2, 3, 4, 5):
        checkpointer.save(step, {"w": jnp.full((2,), float(step))}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 5]
    checkpointer.pinned = []
    checkpointer.save(6, {"w": jnp.ones((2,))}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [5, 6]


def test_whole_arrays_of_another_step_are_not_believed(two, tmp_path):
    """They can be read without an error, so that their digests alone tell that they were not saved here."""
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    shutil.rmtree(folder / "2" / "arrays")
    shutil.copytree(folder / "1" / "arrays", folder / "2" / "arrays")
    with pytest.raises(DamagedCheckpoint, match=r"step 2 in .* are not the numbers that were saved"):
        Checkpointer(folder).restore(abstract(some_state()), 2)
    assert Checkpointer(folder).restore(abstract(some_state()))[0] == 1
