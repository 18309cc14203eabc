"""The folder of compiled programs: where it is, what decides on it, and what goes wrong without harm."""

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compiling import CHEAP_COMPILATION
from jax._src import lru_cache

from quatrain.backend import ACCELERATOR
from quatrain.config.load import load_config
from quatrain.parallel import compilation_cache as module
from quatrain.parallel.compilation_cache import (
    COUNTS,
    ProgramCount,
    compilation_cache,
    cpu_identity,
    default_root,
    machine_key,
)

CPU = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some Xeon
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse2 {flags}

processor\t: 1
flags\t\t: fpu
"""


@pytest.fixture
def jax_may_cache(monkeypatch):
    """JAX has the folder of this run of the tests; here it has none."""
    monkeypatch.setattr(module, "_is_for_us", lambda: True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    module.jax_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    module.jax_cache.reset_cache()


@pytest.fixture
def cpu_info(monkeypatch, tmp_path):
    """cpu_info(mhz, flags) writes what the machine says of its CPU."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "CPU_INFO", file)
    return lambda mhz="2000", flags="avx2": file.write_text(CPU.format(mhz=mhz, flags=flags))


def _entries(folder):
    return sorted(folder.glob("*-cache"))


def _compile(number):
    return jax.jit(lambda x: jnp.sin(x) + number)(jnp.ones(3)).tolist()


def test_the_key_is_that_of_machines_with_the_same_instructions(cpu_info, monkeypatch):
    cpu_info()
    key = machine_key()
    assert key.startswith(f"cpu-jax{jax.__version__}-")
    cpu_info(mhz="3100")
    assert machine_key() == key
    cpu_info(flags="avx2 avx512f")
    assert machine_key() != key
    cpu_info()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_thunk_runtime=true")
    assert machine_key() != key
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(module.jaxlib, "__version__", "0.0.1")
    assert machine_key() != key


def test_a_machine_that_does_not_say_its_cpu_shares_with_none(cpu_info, monkeypatch):
    assert module.platform.node() in cpu_identity()
    cpu_info()
    assert "avx2 fpu sse2" in cpu_identity()
    assert module.platform.node() not in cpu_identity()


def test_the_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root({}) == tmp_path / ".cache" / "quatrain" / "compiled"
    assert default_root({"XDG_CACHE_HOME": "/big"}) == Path("/big/quatrain/compiled")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == default_root({})


def test_programs_are_kept_in_a_folder_of_this_machine(jax_may_cache, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    with compilation_cache(str(tmp_path)) as folder:
        assert folder == tmp_path / machine_key()
        _compile(0.125)
        assert jax.config.jax_compilation_cache_dir == str(folder)
    assert len(_entries(folder)) >= 1
    assert jax.config.jax_compilation_cache_dir == before


def test_a_run_leaves_the_number_of_its_programs_to_the_next_of_its_shapes(jax_may_cache, tmp_path):
    """Numbers that are data of the programs, and names, do not make another kind of run; sizes do."""

    def count(*settings, command="train"):
        return ProgramCount(command, load_config(None, settings, environ={}).config)

    with compilation_cache(str(tmp_path)) as folder:
        first = count()
        assert (first.former, first.next_run_reads) == (None, True)
        first.keep(16)
        count("optimizer.learning_rate=1", "rollout.temperature=0.5", "run.name=b", "seed=3").keep(12)
        assert count("sft.steps=7").former == 16
        for other in (count("rollout.n=4"), count("optimizer.name=lion"), count(command="eval")):
            assert other.former is None
        (folder / COUNTS).write_text("[damaged")
        assert count().former is None
        count().keep(9)
        assert count().former == 9
    with compilation_cache(None):
        nothing = count()
        assert (nothing.former, nothing.next_run_reads) == (None, False)
        nothing.keep(3)


def test_null_keeps_nothing(jax_may_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with compilation_cache(None) as folder:
        assert folder is None
        assert jax.config.jax_compilation_cache_dir is None
        _compile(0.25)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert _entries(tmp_path) == []


def test_auto_leaves_jaxs_own_settings_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "default_root", lambda environ: pytest.fail("a folder was asked for"))
    with compilation_cache("auto") as folder:  # JAX has the folder of this run of the tests
        assert folder is None
    monkeypatch.setattr(module.jax, "config", _Config(True, str(tmp_path)))
    assert not module._is_for_us()
    monkeypatch.setattr(module.jax, "config", _Config(True, None))
    monkeypatch.setattr(module.sys, "platform", "linux")
    assert module._is_for_us()
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert not module._is_for_us()
    monkeypatch.setattr(module, "this_backend", lambda: ACCELERATOR)
    assert module._is_for_us()


class _Config:
    def __init__(self, enabled, folder):
        self.jax_enable_compilation_cache, self.jax_compilation_cache_dir = enabled, folder


def test_a_folder_that_cannot_be_made_is_told_once(jax_may_cache, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with compilation_cache(str(tmp_path / "file")) as folder:
        assert folder is None
        assert _compile(0.5) == _compile(0.5)
    assert len(caplog.records) == 1
    message = caplog.messages[0]
    assert str(tmp_path / "file") in message
    assert "set run.compilation_cache to another folder, or to null" in message


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_read(jax_may_cache, tmp_path, monkeypatch, caplog):
    with compilation_cache(str(tmp_path)) as folder:
        _compile(0.75)
    kept = _entries(folder)

    def refused(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refused)
    jax.clear_caches()
    with compilation_cache(str(tmp_path)) as folder:
        assert folder is not None
        _compile(0.75)
        _compile(0.8125)
    assert _entries(folder) == kept
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_every_user_may_write_is_not_used(jax_may_cache, tmp_path, caplog):
    folder = tmp_path / machine_key()
    folder.mkdir()
    folder.chmod(folder.stat().st_mode | stat.S_IWOTH)
    with compilation_cache(str(tmp_path)) as used:
        assert used is None
    assert "every user may write there" in caplog.text


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"\0" * len(data)])
def test_a_damaged_program_is_compiled_and_kept_anew(jax_may_cache, tmp_path, caplog, damage):
    with compilation_cache(str(tmp_path)) as folder:
        expected = _compile(0.875)
    for path in _entries(folder):
        path.write_bytes(damage(path.read_bytes()))
    jax.clear_caches()
    with compilation_cache(str(tmp_path)):
        assert _compile(0.875) == expected
    assert len(caplog.records) == 1
    assert "reading a compiled program failed" in caplog.messages[0]
    caplog.clear()
    jax.clear_caches()
    with compilation_cache(str(tmp_path)):
        assert _compile(0.875) == expected
    assert caplog.records == []


def test_a_full_disk_is_told_once(jax_may_cache, tmp_path, monkeypatch, caplog):
    def full(self, key, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lru_cache.LRUCache, "put", full)
    with compilation_cache(str(tmp_path)):
        _compile(0.375)
        _compile(0.4375)
    assert len(caplog.records) == 1
    assert "writing a compiled program failed" in caplog.messages[0]
    assert "No space left on device" in caplog.messages[0]


def test_other_warnings_are_shown_as_before(jax_may_cache, tmp_path):
    with pytest.warns(UserWarning, match="another"), compilation_cache(str(tmp_path)):
        warnings.warn("another", UserWarning, stacklevel=1)


def test_programs_unused_for_longest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 250)
    for age, (machine, name) in enumerate([("a-jax1-x", "new"), ("b-jax1-x", "middle"), ("a-jax1-x", "old")]):
        path = tmp_path / machine / f"{name}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age, 1e9 - age))
    others = tmp_path / "mine" / "keep-cache"
    others.parent.mkdir()
    others.write_bytes(b"x" * 1000)
    module._prune(tmp_path)
    assert sorted(path.stem for path in tmp_path.rglob("*-cache")) == [
        "keep-cache",
        "middle-cache",
        "new-cache",
    ]


PROGRAM = """
import json, sys
import jax
from quatrain.models import families
narrow = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
families._BUILTIN["tiny"] |= narrow
events = []
jax.monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
from quatrain.cli import main as cli
from quatrain.parallel.compilations import num_compilations
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code
print("PROGRAMS", json.dumps([num_compilations(), events.count("/jax/compilation_cache/cache_hits")]))
"""
TINY = (
    *(
        "run.steps=1",
        "sft.steps=0",
        "eval.every_steps=0",
        "data.batch_size=2",
        "rollout.n=2",
        "update.kl_coef=0",
    ),
    *(
        "rollout.max_new_tokens=8",
        "data.train=prompts.jsonl",
        "checkpoint.every_steps=0",
        "optimizer.learning_rate=1e-3",
    ),
)
FAST = " ".join(CHEAP_COMPILATION)
TIMED = ("time/", "throughput/", "memory/")
OTHERS = ("rollout/tokens_per_s", "rollout/prefill_s", "rollout/decode_s")


def _run(folder, name, cache):
    """(Programs compiled or read, programs read, metrics without seconds, seconds of compiling) of a run."""
    settings = (*TINY, f"run.dir={folder}", f"run.name={name}", f"run.compilation_cache={cache}")
    options = [part for setting in settings for part in ("--set", setting)]
    rows = [{"prompt": f"{number} + 1 = ?", "answer": str(number + 1)} for number in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", *options],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": FAST},
    )
    counts = json.loads(done.stdout.split("PROGRAMS")[1])
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    compile_s = sum(row.get("time/compile_s", 0.0) for row in rows)
    same = [
        {k: v for k, v in row.items() if not k.startswith(TIMED) and k not in OTHERS and "/seconds" not in k}
        for row in rows
    ]
    return *counts, same, compile_s


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_computes_the_same(tmp_path):
    cold = _run(tmp_path, "cold", tmp_path / "cache")
    warm = _run(tmp_path, "warm", tmp_path / "cache")
    assert cold[1] == 0
    assert warm[0] == warm[1] == cold[0]
    assert len(cold[2]) == 1
    assert cold[2] == warm[2]
    [counts] = (tmp_path / "cache").glob(f"*/{COUNTS}")
    [count] = json.loads(counts.read_text()).values()
    assert 0 < count <= cold[0]
    assert warm[3] < cold[3]
