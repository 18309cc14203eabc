"""A model small enough to compile in seconds, and batches of random ragged sequences for it."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from architectures import changed
from compiling import CHEAP_COMPILATION
from durations import file_of, measure, read_durations
from hypothesis import settings

from quatrain.data.builtin import builtin_tokenizer
from quatrain.models import families
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run: what fails was made to fail by the change at hand.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags before it reads them, which it does when JAX asks for its devices.

    Flags that are set already come last and win. The long proofs (`-m slow`) and the tests on an accelerator
    (`-m gpu`) run the programs that users get.
    """
    if "not slow" in config.option.markexpr or config.option.markexpr == "tinker":
        given = os.environ.get("XLA_FLAGS", "").split()
        cheap = [flag for flag in CHEAP_COMPILATION if flag not in given]
        os.environ["XLA_FLAGS"] = " ".join([*cheap, *given])
    measure(config, config.getoption("--record-durations"))
    if not hasattr(
        config, "workerinput"
    ):  # xdist's workers have the folder from the process that starts them
        config.add_cleanup(_share_programs())


def _share_programs() -> Callable[[], None]:
    """Gives this process and all that it starts one new folder for compiled programs; returns its removal.

    No test reads programs that an earlier run kept: they might hide what no longer compiles.
    """
    folder = tempfile.mkdtemp(prefix="quatrain-programs-")
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    return partial(shutil.rmtree, folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that took longest first, as `durations.json` has them.

    A file goes to one of two workers as a whole; a long one begun last would leave the other worker idle.
    """
    seconds = {name: figures["seconds"] for name, figures in read_durations().items()}
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def pytest_collection_finish() -> None:
    """Leaves the objects of imported modules, about half of all, out of later garbage collections.

    Reading a checkpoint collects, and a run that is resumed reads several.
    """
    gc.collect()
    gc.freeze()


MANY_MAPS = 40_000
SECONDS_BETWEEN_COUNTS = 10.0
_counted = time.monotonic()


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Forgets compiled programs where they are many.

    They take memory maps, of which Linux gives a process 65,530; XLA crashes when it gets no more. Counting
    them takes a tenth of a second where they are many, and compiling them far longer.
    """
    global _counted
    yield
    maps = Path("/proc/self/maps")
    if time.monotonic() - _counted < SECONDS_BETWEEN_COUNTS or not maps.is_file():
        return
    if len(maps.read_text().splitlines()) > MANY_MAPS:
        jax.clear_caches()
        gc.collect()
    _counted = time.monotonic()


@pytest.fixture(autouse=True)
def _no_signal_stays_blocked():
    """A test that leaves one blocked makes others wait for child processes, which inherit that, for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    left = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert left == before, f"signals {left ^ before} were left blocked"


@pytest.fixture(scope="session")
def tokenizer():
    return builtin_tokenizer()


@pytest.fixture(scope="session")
def small_arch(tokenizer):
    arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    return changed(arch, hidden_size=32, width=48, num_layers=2, head_dim=8)


@pytest.fixture(scope="session")
def small_params(small_arch):
    params = init_params(small_arch, jax.random.key(7))
    # Logits of standard deviation about 1.5: far from uniform, and well conditioned in float32.
    return {**params, "embed": params["embed"] * 1.5}


@pytest.fixture(scope="module")
def narrow_model():
    """`builtin:tiny` and `builtin:tiny_moe` have two narrow layers, which compile faster than their four."""
    narrow = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tiny", "tiny_moe"):
            patch.setitem(families._BUILTIN, name, families._BUILTIN[name] | narrow)
        yield


@pytest.fixture
def make_batch(small_arch):
    """make_batch(seed, groups, n) -> AdvantagedBatch of ragged sequences, completions of 0 to 9 tokens.

    Its rows are as wide for every seed, so that one program computes them all: the first prompt, whose third
    sample is the longest, has 6 tokens, and others have fewer or as many. With `holes`, three in ten of these
    are no part of the completion mask, as if an environment wrote them.
    """

    def make(
        seed: int, groups: int = 4, n: int = 3, longest: int = 9, holes: bool = False
    ) -> AdvantagedBatch:
        rng = np.random.default_rng(seed)
        rows = groups * n
        prompts = rng.integers(1, 7, groups)
        prompts[0] = 6
        prompts = np.repeat(prompts, n)
        completions = rng.integers(0, longest + 1, rows)
        completions[: min(3, rows)] = (0, 1, longest)[: min(3, rows)]
        columns = np.arange((prompts + completions).max())
        attention = columns < (prompts + completions)[:, None]
        mask = attention & (columns >= prompts[:, None])
        tokens = rng.integers(0, small_arch.vocab_size, attention.shape)
        written = mask  # completions, with what an environment wrote in them
        if holes:
            mask = mask & (rng.random(mask.shape) < 0.7)
        tokens = np.where(written, tokens, np.repeat(tokens[::n], n, axis=0))  # one prompt to a group
        rollouts = RolloutBatch(
            input_ids=np.where(attention, tokens, 0).astype(np.int32),
            attention_mask=attention,
            completion_mask=mask,
            rollout_logprobs=np.where(mask, -rng.exponential(3.0, mask.shape), 0).astype(np.float32),
            policy_version=np.where(mask, 0, -1).astype(np.int32),
            finish_reason=np.full(rows, "stop"),
            group_ids=np.repeat(rng.permutation(groups * 10)[:groups], n).astype(np.int64),
            prompts=("",) * rows,
            completions=("",) * rows,
        )
        advantages = np.where(mask, rng.normal(size=(rows, 1)), 0).astype(np.float32)
        rewards = rng.normal(size=rows).astype(np.float32)
        return AdvantagedBatch(RewardedBatch(rollouts, rewards, rewards[None], ("r",)), advantages)

    return make


@pytest.fixture(scope="module")
def load_script():
    """Imports a script of `benchmarks/` by its name."""
    loaded = []

    def load(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    sys.path.insert(0, str(BENCHMARKS))  # where the scripts that it imports are
    yield load
    sys.path.remove(str(BENCHMARKS))
    for name in loaded:
        del sys.modules[name]
