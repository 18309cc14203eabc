"""Checkpoints of the training server: whole or absent, whatever ends the server in between."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from quatrain.config.load import load_config
from quatrain.models.lora import adapter_names, adapters_of, with_adapters, with_trained
from quatrain.models.params import leaf_at, param_specs
from quatrain.serve.tinker import checkpoint, store
from quatrain.serve.tinker.calls import LoraRequest, Refused, Trained
from quatrain.serve.tinker.checkpoint import Missing, what_loads
from quatrain.serve.tinker.store import Store, paged
from quatrain.serve.tinker.training import adapted
from quatrain.weights.adapter import adapters_from, save_adapter

OWNER, OTHER, MODEL = "a" * 64, "b" * 64, "session-1:train:0"
LORA = LoraRequest(4, seed=3, train_mlp=False)
CONFIG = {"seed": 0, "model": {"path": "builtin:tiny"}}
RUN = "session-1_train_0"


@pytest.fixture
def base(small_arch):
    return SimpleNamespace(name="/served/model", arch=small_arch, fingerprint="0123456789abcdef")


@pytest.fixture
def opened(base, tmp_path):
    """opened() -> a store with one training client; a second call opens the same folder anew."""
    stores = []

    def open_store(**changed):
        for each in stores:
            each.close()
        stores.append(Store(tmp_path / "state", SimpleNamespace(**vars(base) | changed), CONFIG))
        if not (stores[-1].run_folder(MODEL)).exists():
            stores[-1].note_run(OWNER, MODEL, LORA, {"renderer_name": "role_colon"})
        return stores[-1]

    yield open_store
    for each in stores:
        each.close()


def drawn(arch, seed=0, step=7, moments=True):
    """What a training client has after `step` steps, of random numbers."""
    arch, rng = adapted(arch, LORA.rank), np.random.default_rng(seed)
    specs = param_specs(arch)
    shapes = {name.name: name.shape_in(leaf_at(specs, name.path).shape) for name in adapter_names(arch)}

    def draw(start=""):
        return {start + name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    state = {"count": np.array(step, np.int32), **draw("mu."), **draw("nu.")}
    return Trained(LORA, 0, step, draw(), state if moments else None)


def saved(held, trained, name="one", kind="weights", owner=OWNER, **options):
    units = held.save(owner, MODEL, kind, name, trained, **options)
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def assert_same(found, trained):
    assert (found.lora, found.model, found.step) == (trained.lora, trained.model, trained.step)
    for mine, other in ((found.adapters, trained.adapters), (found.moments, trained.moments)):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.keys() == other.keys()
            for name, array in other.items():
                assert (mine[name].dtype, mine[name].shape) == (array.dtype, array.shape), name
                np.testing.assert_array_equal(mine[name], array, err_msg=name)


def paths(held, owner=OWNER):
    return [record["tinker_path"] for record in held.checkpoints(owner)]


def left_over(tmp_path):
    return [path.name for path in tmp_path.rglob("*~*")]


def test_what_is_saved_is_read_again_to_the_bit(opened, base):
    """Catches an array left out, renamed or cast, and a step, a seed or a part that is not kept."""
    held, trained = opened(), drawn(base.arch)
    path = saved(held, trained)
    assert path == f"tinker://{MODEL}/weights/one"
    for each in (held, opened()):
        assert_same(each.load(OWNER, path), trained)


def test_weights_of_a_sampler_are_a_folder_that_peft_loads(opened, base, tmp_path, small_params):
    """Byte for byte what the end of a run writes, and `adapters_from` finds each array's place again."""
    arch = adapted(base.arch, LORA.rank)
    params = with_adapters(small_params, arch, jax.random.key(0))
    leaves, tree = jax.tree.flatten(adapters_of(params))
    rng = np.random.default_rng(0)
    leaves = [jax.numpy.asarray(rng.normal(size=leaf.shape).astype(np.float32)) for leaf in leaves]
    adapters = jax.tree.unflatten(tree, leaves)
    save_adapter(tmp_path / "run", arch, with_trained(params, adapters, arch), base="builtin:tiny")
    tensors = load_file(tmp_path / "run" / "adapter_model.safetensors")
    held = opened(fingerprint=json.loads((tmp_path / "run" / "base.json").read_text())["fingerprint"])
    saved(held, Trained(LORA, 0, 2, tensors, None), kind="sampler_weights", user_metadata={"loop": 3})
    folder = held.run_folder(MODEL) / "sampler_weights" / "one"
    for file in (tmp_path / "run").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (folder / "moments.safetensors").exists()
    found = held.load(OWNER, f"tinker://{MODEL}/sampler_weights/one")
    assert (found.moments, found.step) == (None, 2)
    jax.tree.map(np.testing.assert_array_equal, adapters_from(arch, found.adapters, folder), adapters)


def test_adapters_of_another_model_are_refused(base):
    arch, trained = adapted(base.arch, LORA.rank), drawn(base.arch).adapters
    name = next(iter(trained))
    for changed in (
        {each: array for each, array in trained.items() if each != name},
        trained | {name: trained[name][:1]},
        trained | {"unknown": trained[name]},
    ):
        with pytest.raises(ValueError, match="unknown" if "unknown" in changed else name):
            adapters_from(arch, changed, "there")


class Killed(BaseException):
    """The process has ended at this point: nothing after it happens, no cleaning either."""


def kill_after(limit, patch):
    """Ends the process at the call after `limit` of those that change the disk; returns these calls."""
    calls = []

    def counted(real):
        def call(*arguments, **options):
            calls.append(real.__name__)
            if len(calls) > limit:
                raise Killed
            return real(*arguments, **options)

        return call

    for module, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree")):
        patch.setattr(module, name, counted(getattr(module, name)))
    return calls


def test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new_one(opened, base, monkeypatch, tmp_path):
    """At each synchronisation, renaming and removal; catches an order in which neither is whole, or one is
    half. What the killed process left behind is gone once the folder is opened again."""
    old, new = drawn(base.arch, seed=1, step=1), drawn(base.arch, seed=2, step=2)
    steps, calls = [], []
    for limit in (*range(20), 1000):
        held = opened()
        path = saved(held, old, overwrite=True)
        with monkeypatch.context() as patch, suppress(Killed):
            calls = kill_after(limit, patch)
            saved(held, new, overwrite=True)
        held = opened()
        assert left_over(tmp_path) == []
        found = held.load(OWNER, path)
        assert_same(found, new if found.step == 2 else old)
        steps.append(found.step)
    # All points are before the end of a save, and the new one is there from some point on.
    assert len(calls) <= 20
    assert steps == sorted(steps)
    assert (steps[0], steps[len(calls) // 2], steps[-1]) == (1, 1, 2)


def test_a_server_that_is_killed_leaves_whole_checkpoints(opened, base, tmp_path):
    """kill -9 of a process that saves over and over, under one name and under new ones."""
    opened().close()
    script = tmp_path / "saves.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import pickle
            from pathlib import Path
            import test_store as tests
            from quatrain.serve.tinker.store import Store
            base, trained = pickle.loads(Path({str(tmp_path / "given")!r}).read_bytes())
            held = Store(Path({str(tmp_path / "state")!r}), base, tests.CONFIG)
            for number in range(10**6):
                tests.saved(held, trained, "same", overwrite=True)
                tests.saved(held, trained, f"new{{number}}")
                print(number, flush=True)
            """
        )
    )
    trained = drawn(base.arch)
    (tmp_path / "given").write_bytes(pickle.dumps((base, trained)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert process.stdout.readline()
    time.sleep(0.013)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    held = opened()
    assert left_over(tmp_path) == []
    found = paths(held)
    assert f"tinker://{MODEL}/weights/same" in found
    assert len(found) >= 4
    for path in found:
        assert_same(held.load(OWNER, path), trained)


def test_each_kind_of_damage_is_named_and_nothing_is_half_read(opened, base):
    """A bit, an end that is missing, a file that is missing: of every file of a checkpoint."""
    held = opened()
    path = saved(held, drawn(base.arch))
    whole = held.run_folder(MODEL) / "weights" / "one"
    files = sorted(file.name for file in whole.iterdir())
    assert files == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "config.yaml",
        "meta.json",
        "moments.safetensors",
    ]
    files.remove("config.yaml")  # which may be corrected
    for name in files:
        content = (whole / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:-3], b"", None):
            (whole / name).unlink()
            if damaged is not None:
                (whole / name).write_bytes(damaged)
            with pytest.raises(Refused, match=name.replace(".", r"\.")) as refused:
                held.load(OWNER, path)
            assert not isinstance(refused.value, Missing)
            assert "damaged" in str(refused.value)
            (whole / name).write_bytes(content)
        held.load(OWNER, path)
    # It is not listed, and may be deleted or replaced.
    (whole / "meta.json").write_bytes(b"{}")
    assert paths(held) == []
    assert held.run(OWNER, MODEL)["last_checkpoint"] is None
    with pytest.raises(Refused, match="new name"):
        saved(held, drawn(base.arch))
    saved(held, drawn(base.arch, step=8), overwrite=True)
    assert held.load(OWNER, path).step == 8
    (whole / "meta.json").write_bytes(b"{}")
    held.delete(OWNER, path)
    assert not whole.exists()


def test_a_checkpoint_of_another_base_is_refused_with_both_fingerprints(opened, base):
    path = saved(opened(), drawn(base.arch))
    other = opened(fingerprint="fedcba9876543210", name="/served/elsewhere")
    with pytest.raises(Refused, match=r"0123456789abcdef.*fedcba9876543210"):
        other.load(OWNER, path)
    assert other.info(OWNER, path)["base_model"] == "/served/model"
    assert opened(name="/served/elsewhere").info(OWNER, path)["base_model"] == "/served/elsewhere"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "one",
        "/etc/passwd",
        f"tinker://{MODEL}/weights/",
        f"tinker://{MODEL}/weights/two",
        f"tinker://{MODEL}/weights/one/",
        f"tinker://{MODEL}/weights/one/adapter_model.safetensors",
        f"tinker://{MODEL}/weights/../weights/one",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/weights/.",
        f"tinker://{MODEL}/weights/one~draft",
        f"tinker://{MODEL}/weights/one\n",
        f"tinker://{MODEL}/weights/o\x00ne",
        f"tinker://{MODEL}/external_weights/one",
        f"tinker://{MODEL}/./one",
        f"tinker://{RUN}/weights/one",
        "tinker://../state/session-1_train_0/weights/one",
        "tinker://../weights/one",
        "tinker://./weights/one",
        "tinker:///weights/one",
        "TINKER://" + MODEL + "/weights/one",
        f"tinker://tinker://{MODEL}/weights/one",
        "tinker://" + "a" * 5000 + "/weights/one",
    ],
)
def test_paths_lead_to_checkpoints_alone(path, opened, base, tmp_path):
    held = opened()
    saved(held, drawn(base.arch))
    for outside in (tmp_path / "weights" / "one", tmp_path / "state" / "weights" / "one"):
        shutil.copytree(held.run_folder(MODEL) / "weights" / "one", outside)
    before = sorted(tmp_path.rglob("*"))
    for use in (held.load, held.info, held.delete, lambda owner, path: held.set_ttl(owner, path, 4000)):
        with pytest.raises(Refused):
            use(OWNER, path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../one", "a..b", "a b", "é", "a\n", "a~old", "a" * 129]
)
def test_names_are_plain(name, opened, base, tmp_path):
    held = opened()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match="name of a checkpoint"):
        saved(held, drawn(base.arch), name)
    assert sorted(tmp_path.rglob("*")) == before
    assert saved(held, drawn(base.arch), "-a.B_9" + "c" * 122).endswith("c")


def test_a_name_is_taken_once_unless_it_is_to_be_overwritten(opened, base):
    """Of each kind of checkpoint by itself; what is refused leaves what was."""
    held, first, second = opened(), drawn(base.arch, step=1), drawn(base.arch, seed=1, step=2)
    path = saved(held, first)
    saved(held, first, kind="sampler_weights")
    with pytest.raises(Refused, match="overwrite"):
        saved(held, second)
    assert_same(held.load(OWNER, path), first)
    saved(held, second, overwrite=True)
    assert_same(held.load(OWNER, path), second)


def test_a_checkpoint_expires(opened, base, monkeypatch):
    """Once its time is over it is neither read nor listed, its name is free, and its folder goes."""
    clock = time.time()
    monkeypatch.setattr(store.time, "time", lambda: clock)
    held = opened()
    path, stays = saved(held, drawn(base.arch), ttl_seconds=3600), saved(held, drawn(base.arch), "stays")
    folder = held.run_folder(MODEL) / "weights" / "one"
    assert held.expire(clock + 3599) == []
    clock += 3599
    assert held.load(OWNER, path).step == 7
    clock += 2
    with pytest.raises(Missing, match=r"weights/stays"):
        held.load(OWNER, path)
    assert paths(held) == [stays]
    held.set_ttl(OWNER, stays, 10)
    assert held.checkpoints(OWNER)[0]["expires_at"] is not None
    held.set_ttl(OWNER, stays, None)
    assert held.checkpoints(OWNER)[0]["expires_at"] is None
    assert folder.exists()
    held = opened()  # as at the start of a server
    assert not folder.exists()
    assert held.expire(clock + 10**9) == []
    saved(held, drawn(base.arch), ttl_seconds=1)
    assert held.expire(clock + 1) == [path]
    assert paths(held) == [stays]
    for seconds in (0, -1, 10**12):
        with pytest.raises(Refused, match="ttl_seconds"):
            saved(held, drawn(base.arch), "two", ttl_seconds=seconds)
        with pytest.raises(Refused, match="ttl_seconds"):
            held.set_ttl(OWNER, stays, seconds)


def test_owners_see_what_is_theirs_alone(opened, base):
    """Another's is said not to be there, in the same words as what is nowhere."""
    held = opened()
    path = saved(held, drawn(base.arch))
    theirs = "session-2:train:0"
    held.note_run(OTHER, theirs, LORA)
    units = held.save(OTHER, theirs, "weights", "one", drawn(base.arch, step=9))
    for _ in units:
        pass
    assert [run["training_run_id"] for run in held.runs(OWNER)] == [MODEL]
    assert [run["training_run_id"] for run in held.runs(OTHER)] == [theirs]
    assert paths(held) == [path]
    assert paths(held, OTHER) == [f"tinker://{theirs}/weights/one"]
    uses = [held.load, held.info, held.delete, lambda owner, path: held.set_ttl(owner, path, None)]
    for use in uses:
        with pytest.raises(Missing) as hidden:
            use(OTHER, path)
        with pytest.raises(Missing) as absent:
            use(OTHER, path.replace("session-1", "session-3"))
        assert str(hidden.value).replace("session-1", "session-3") == str(absent.value)
    for use in (held.run, held.checkpoints):
        with pytest.raises(Missing):
            use(OTHER, MODEL)
    with pytest.raises(Missing):
        saved(held, drawn(base.arch), owner=OTHER)
    assert held.load(OWNER, path).step == 7


def test_a_full_disk_is_one_clear_error_and_what_was_stays(opened, base, monkeypatch, tmp_path):
    held, first = opened(), drawn(base.arch, step=1)
    path = saved(held, first)
    room = 0

    def write(file, content):
        nonlocal room
        room -= 1
        file.write_bytes(content if room >= 0 else content[: len(content) // 2])
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for num_files in range(6):
        room = num_files
        with monkeypatch.context() as patch:
            patch.setattr(store, "write", write)
            with pytest.raises(Refused, match=r"No space left on device.*unchanged; free space"):
                saved(held, drawn(base.arch, seed=1, step=2), overwrite=True)
        assert left_over(tmp_path) == []
        assert_same(held.load(OWNER, path), first)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", write)
        with pytest.raises(Refused, match="No space left"):
            held.note_run(OWNER, "session-9:train:0", LORA)


def test_a_save_that_is_left_in_the_middle_leaves_nothing(opened, base, tmp_path):
    """It is cut into units, between which others work; a client that is gone does not finish its own."""
    held = opened()
    units = held.save(OWNER, MODEL, "weights", "one", drawn(base.arch))
    for _ in range(3):
        next(units)
    assert left_over(tmp_path) == ["one~draft"]
    assert paths(held) == []
    units.close()
    assert left_over(tmp_path) == []
    assert paths(held) == []


def test_weights_that_are_not_finite_are_not_saved(opened, base):
    held, trained = opened(), drawn(base.arch)
    for arrays in (trained.adapters, trained.moments):
        name = list(arrays)[-1]
        before = arrays[name].copy()
        arrays[name].flat[-1] = np.inf
        with pytest.raises(Refused, match=f"not finite.*{name}"):
            saved(held, trained)
        arrays[name] = before
    saved(held, trained)


def test_one_process_writes_a_folder(opened, base, tmp_path):
    held = opened()
    with pytest.raises(ValueError, match="another one uses it"):
        Store(tmp_path / "state", base, CONFIG)
    held.close()
    Store(tmp_path / "state", base, CONFIG).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be writable"):
        Store(tmp_path / "file" / "state", base, CONFIG)


def test_the_records_are_those_that_the_client_validates(opened, base, monkeypatch):
    """Names and types of `tinker.types` 0.38, which the client checks strictly; the newest comes first."""
    held = opened()
    clock = time.time()
    monkeypatch.setattr(store.time, "time", lambda: clock)
    saved(held, drawn(base.arch), "old")
    clock += 1
    saved(held, drawn(base.arch), "new", user_metadata={"loop_state": 3}, ttl_seconds=3600)
    saved(held, drawn(base.arch, moments=False), "old", kind="sampler_weights")
    run = held.run(OWNER, MODEL)
    assert held.runs(OWNER) == [run]
    assert {name: run[name] for name in ("training_run_id", "base_model", "is_lora", "lora_rank")} == {
        "training_run_id": MODEL,
        "base_model": "/served/model",
        "is_lora": True,
        "lora_rank": 4,
    }
    assert run["user_metadata"] == {"renderer_name": "role_colon"}
    last, sampler = run["last_checkpoint"], run["last_sampler_checkpoint"]
    assert (last["checkpoint_id"], last["checkpoint_type"]) == ("weights/new", "training")
    assert (sampler["checkpoint_id"], sampler["checkpoint_type"]) == ("sampler_weights/old", "sampler")
    assert last["user_metadata"] == {"loop_state": "3"}
    assert last["tinker_path"] == f"tinker://{MODEL}/weights/new"
    made, ends = (datetime.fromisoformat(last[name]) for name in ("time", "expires_at"))
    assert (ends - made).total_seconds() == pytest.approx(3600)
    assert made.timestamp() == pytest.approx(clock)
    folder = held.run_folder(MODEL) / "weights" / "new"
    sizes = sum(
        file.stat().st_size
        for file in folder.iterdir()
        if file.suffix != ".yaml" and file.name != "meta.json"
    )
    assert last["size_bytes"] == sizes
    ids = [each["checkpoint_id"] for each in held.checkpoints(OWNER, MODEL)]
    assert ids[-1] == "weights/old"
    assert sorted(ids) == ["sampler_weights/old", "weights/new", "weights/old"]
    assert held.info(OWNER, last["tinker_path"]) == {
        "base_model": "/served/model",
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
    }


def test_a_page_of_records_has_a_cursor():
    assert paged("runs", [1, 2, 3], limit=2, offset=1) == {
        "runs": [2, 3],
        "cursor": {"offset": 1, "limit": 2, "total_count": 3},
    }
    assert paged("runs", [1, 2, 3], limit=2, offset=3)["runs"] == []


def test_a_checkpoint_names_its_base_by_absolute_paths(tmp_path, monkeypatch):
    """So that it can be exported from any folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_config(None, ["model.path=model", "model.tokenizer=builtin:tiny", "seed=5"], {}).config
    found = what_loads(config)
    assert (found["model"]["path"], found["model"]["tokenizer"]) == (str(tmp_path / "model"), "builtin:tiny")
    assert found["seed"] == 5
